"""Where each weight lives and who multiplies with it: policy, numbers in, numbers out.

A weight stays on the accelerator (``RESIDENT``), or it is kept in host memory and copied ahead of
use (``STREAM``), multiplied with by the CPU (``HOST``), or both, row by row (``SPLIT``). What the
user asked for decides; else what fits does, and then as little as possible leaves. Which weights
leave first is in ``weight_places.py``; of the modes that fit ``auto`` takes the one that the cost
model finds fastest over a mix of steps (``judge.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ambidex.config import OffloadConfig
from ambidex.errors import OptionError, OutOfMemory
from ambidex.memory.judge import Judge, Mix
from ambidex.memory.ledger import format_bytes, format_seconds
from ambidex.memory.model_shape import ModelShape
from ambidex.memory.profile import HardwareProfile
from ambidex.memory.split import SplitTable
from ambidex.memory.weight_places import (
    ROW_UNIT,
    Draft,
    Drafts,
    ModuleSize,
    Placement,
    WeightKind,
    WeightPlace,
    rank,
)

__all__ = [
    "LARGE_HOST_SHARE",
    "ROW_UNIT",
    "ModuleSize",
    "Placement",
    "PlacementPlan",
    "WeightKind",
    "WeightPlace",
    "describe",
    "plan_placement",
]

#: As users write that nothing may leave the accelerator.
FORBIDS = "--no-cpu-offload (or --cpu-offload-gb 0)"
#: Above this share of the weights on the host there is a warning.
LARGE_HOST_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The place of every weight, and the bytes that follow from it."""

    #: By path.
    places: Mapping[str, WeightPlace]
    #: resident | stream | compute | split: how what left the device is used.
    mode: str
    #: What ``--cpu-offload-gb`` asked for; None: decided by patterns, or by what fits.
    asked_bytes: int | None
    #: What ``--offload-layers`` asked for.
    patterns: tuple[str, ...]
    #: Weights on the device, staging apart.
    device_bytes: int
    #: Weights on the host.
    host_bytes: int
    #: Of them: copied to the device in every step, and left to the CPU; SPLIT is in neither.
    streamed_bytes: int
    computed_bytes: int
    #: The ring that streamed weights are copied into: layers, and bytes of the largest.
    ring_layers: int
    ring_layer_bytes: int
    device_budget_bytes: int
    #: By rows of a product, what of the host's rows is copied; None: no weight is SPLIT.
    split_table: SplitTable | None = None
    #: Sentences for the start-up text.
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that left the device."""
        return self.host_bytes

    @property
    def staging_bytes(self) -> int:
        """Of the ring."""
        return self.ring_layers * self.ring_layer_bytes

    @property
    def total_bytes(self) -> int:
        return self.device_bytes + self.host_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left of the device's budget, for a cache of hot experts for example."""
        return self.device_budget_bytes - self.device_bytes - self.staging_bytes

    @property
    def cpu_share(self) -> float:
        """Share of the weights' bytes that are on the host, 0 to 1."""
        return self.host_bytes / self.total_bytes if self.total_bytes else 0.0


def plan_placement(
    shape: ModelShape,
    device_budget_bytes: int,
    host_budget_bytes: int,
    offload: OffloadConfig,
    profile: HardwareProfile,
    mix: Mix | None = None,
) -> PlacementPlan:
    """The place of every weight of ``shape``, in the order in which a step uses them.

    ``device_budget_bytes`` are for weights and the ring together, ``host_budget_bytes`` for
    what leaves the device; ``profile`` has an accelerator, and ``mix`` is what modes are compared
    at. Raises :class:`OutOfMemory` where the weights do not fit, and
    :class:`OptionError` where what was asked for cannot be done; a change that either suggests
    has been planned, and fits.
    """
    judge = Judge(shape, profile, offload, mix or Mix())
    modules = shape.modules
    return _Planner(modules, device_budget_bytes, host_budget_bytes, offload, judge).plan()


def describe(plan: PlacementPlan) -> list[str]:
    """Lines for the start-up table: bytes asked for, bytes placed on either side, how."""
    lines = [
        f"weights: {format_bytes(plan.device_bytes)} on the accelerator, "
        f"{format_bytes(plan.host_bytes)} on the host ({plan.cpu_share:.0%})"
    ]
    asked = [] if plan.asked_bytes is None else [format_bytes(plan.asked_bytes)]
    asked += [" ".join(plan.patterns)] if plan.patterns else []
    line = (
        f"offload: asked for {' of '.join(asked) or 'what does not fit'}, placed "
        f"{format_bytes(plan.offloaded_bytes)}"
    )
    if not asked and not plan.offloaded_bytes:
        line = "offload: none, all weights fit the accelerator"
    if plan.mode != "resident":
        counts = [
            f"{number} {placement.value}"
            for placement in Placement
            if (number := sum(p.placement is placement for p in plan.places.values()))
        ]
        line += f", mode {plan.mode} (weights: {', '.join(counts)})"
    lines.append(line)
    if plan.ring_layers:
        lines.append(f"staging: {_ring(plan)} on the accelerator")
    return lines


_LITTLE_USED = (
    "What is on the host is computed there, not streamed: of experts and of tables that are looked "
    "up a step uses little."
)
_HOW = {
    "compute": "The CPU multiplies with what is on the host",
    "stream": "What is on the host is streamed",
    "split": "The CPU multiplies with some rows of what is on the host, and others are streamed",
    "cut": "The accelerator multiplies with some rows of a matrix, and the CPU with the others",
}


def _times(seconds: Iterable[float]) -> str:
    *first, last = map(format_seconds, seconds)
    return f"{', '.join(first)} and {last}"


def _ring(plan: PlacementPlan | Draft) -> str:
    layers = "1 layer" if plan.ring_layers == 1 else f"{plan.ring_layers} layers"
    return f"a ring of {layers} of {format_bytes(plan.ring_layer_bytes)}"


class _Planner(Drafts):
    """Chooses among the drafts, and says what helps where none fits."""

    def __init__(
        self,
        modules: Sequence[ModuleSize],
        device_budget: int,
        host_budget: int,
        offload: OffloadConfig,
        judge: Judge,
    ) -> None:
        super().__init__(modules, device_budget, offload, judge.computes)
        self.host_budget = host_budget
        self.judge = judge

    def _fits(self, draft: Draft) -> bool:
        return draft.device_used <= self.device_budget and draft.host_bytes <= self.host_budget

    def _best(self, drafts: Iterable[Draft | None]) -> Draft | None:
        """Of drafts that fit the device: the fastest one that fits the host too, the first of
        equals, or the one that takes least of it."""
        found = [draft for draft in drafts if draft and draft.device_used <= self.device_budget]
        fitting = [draft for draft in found if self._fits(draft)]
        if len(fitting) > 1:
            return min(fitting, key=self.judge.cost)
        return fitting[0] if fitting else min(found, key=lambda d: d.host_bytes, default=None)

    def _least_of_any(self) -> Draft | None:
        """The least offload of each mode: the best of them."""
        return self._best(self.least(mode) for mode in self._modes)

    def _works(self) -> bool:
        """Whether there is a plan where no size is asked for."""
        # Patterns alone take all that they name.
        all_of_it = bool(self.offload.patterns)
        drafts = (self.draft(m, self.most) if all_of_it else self.least(m) for m in self._modes)
        return any(draft is not None and self._fits(draft) for draft in drafts)

    def plan(self) -> PlacementPlan:
        asked, patterns = self.offload.cpu_offload_bytes, self.offload.patterns
        if asked == 0 and patterns:
            raise OptionError(
                f"--offload-layers asks for what {FORBIDS} forbids. Leave one of them out."
            )
        if (asked or patterns) and not self.most:
            raise OptionError(
                f"{self._request} asks for an offload, and none of the model's "
                f"{len(self.modules)} weights can leave the accelerator: all are vectors. Leave "
                "it out."
            )
        notes: list[str] = []
        warnings: list[str] = []
        if asked or patterns:
            draft = self._draft_asked()
            warnings += self._unneeded(draft)
            if asked is not None and asked > self.most:
                warnings.append(
                    f"--cpu-offload-gb asks for {format_bytes(asked)}; all that may leave the "
                    f"accelerator are {format_bytes(self.most)}, which are placed on the host."
                )
        else:
            draft = self._draft_fitting()
            if draft.host_bytes:
                notes.append(
                    f"The weights take {format_bytes(self.total)}, the accelerator has "
                    f"{format_bytes(self.device_budget)} for them"
                    f"{f' and {_ring(draft)}' if draft.ring_layers else ''}: "
                    f"{format_bytes(draft.host_bytes)} stay on the host."
                )
        self._check_host(draft)
        table = self._table(draft)
        if table is not None and not table.streams and not draft.streamed_bytes:
            # Nothing passes through it, whatever the number of tokens.
            draft = replace(draft, ring_layers=0, ring_layer_bytes=0)
        notes += self._reasons(draft, table)
        plan = PlacementPlan(
            places=draft.places,
            mode=draft.mode,
            asked_bytes=asked,
            patterns=patterns,
            device_bytes=draft.device_bytes,
            host_bytes=draft.host_bytes,
            streamed_bytes=draft.streamed_bytes,
            computed_bytes=draft.computed_bytes,
            ring_layers=draft.ring_layers,
            ring_layer_bytes=draft.ring_layer_bytes,
            device_budget_bytes=self.device_budget,
            split_table=table,
            notes=tuple(notes),
        )
        if plan.cpu_share > LARGE_HOST_SHARE:
            warnings.append(self._much_on_the_host(plan))
        return replace(plan, warnings=tuple(warnings))

    @property
    def _request(self) -> str:
        if self.offload.cpu_offload_bytes:
            return f"--cpu-offload-gb ({format_bytes(self.offload.cpu_offload_bytes)})"
        return f"--offload-layers {' '.join(self.offload.patterns)}"

    @property
    def _smaller(self) -> str:
        # What is quantised already is not quantised again.
        bits = "fewer bits (--quantization int8 or int4)"
        return (
            f"choose a smaller model or {bits if self.judge.shape.is_plain else 'a smaller file'}"
        )

    @property
    def _beside(self) -> tuple[str, str]:
        """What asks for an offload beside :attr:`_request`, and what to leave out so that nothing
        does."""
        is_both = self.offload.cpu_offload_bytes and self.offload.patterns
        return (" and --offload-layers", "both") if is_both else ("", "it")

    def _draft_asked(self) -> Draft:
        """What was asked for, by size or by patterns."""
        asked = self.offload.cpu_offload_bytes
        wanted = self.most if asked is None else min(asked, self.most)
        drafts = [self.draft(mode, wanted) for mode in self._modes]
        draft = self._best(drafts)
        if draft is None:
            raise OutOfMemory(self._too_little(drafts[0]))
        return draft

    def _draft_fitting(self) -> Draft:
        """Nothing on the host where all fits, else the least that makes it fit."""
        if self.total <= self.device_budget:
            return self.draft("resident", 0)
        if self.offload.cpu_offload_bytes == 0:
            raise OutOfMemory(self._forbidden())
        draft = self._least_of_any()
        if draft is None:
            raise OutOfMemory(self._too_small())
        return draft

    def _check_host(self, draft: Draft) -> None:
        if draft.host_bytes <= self.host_budget:
            return
        text = (
            f"{format_bytes(draft.host_bytes)} of weights would stay in host memory, of which "
            f"{format_bytes(self.host_budget)} are free beside what steps take. "
        )
        if self.offload.cpu_offload_bytes:
            largest = self._suggest_most()
            if largest is not None:
                raise OutOfMemory(f"{text}Lower {self._request} to {largest}, or free memory.")
        free = self._with(cpu_offload_bytes=None, patterns=())
        least = free._least_of_any()
        if least is not None and self._fits(least):
            enough = f"{format_bytes(least.host_bytes)} there are enough"
            if not least.host_bytes:
                enough = "All of them fit the accelerator"
            others, leave = self._beside
            raise OutOfMemory(
                f"{text}{enough}, which is what happens without {self._request}{others}. Leave "
                f"{leave} out, or free memory."
            )
        raise OutOfMemory(
            f"{text}The weights take {format_bytes(self.total)}, and the accelerator has "
            f"{format_bytes(self.device_budget)} for them. Free memory, or {self._smaller}."
        )

    def _much_on_the_host(self, plan: PlacementPlan) -> str:
        text = (
            f"{plan.cpu_share:.0%} of the weights ({format_bytes(plan.host_bytes)} of "
            f"{format_bytes(plan.total_bytes)}) are on the CPU's side, whose memory or link "
            "decides the speed."
        )
        if (plan.asked_bytes or plan.patterns) and self.total > self.device_budget:
            least = self._with(cpu_offload_bytes=None, patterns=())._least_of_any()
            if least is not None and least.host_bytes < plan.host_bytes:
                enough, (others, leave) = format_bytes(least.host_bytes), self._beside
                text += f" {enough} are enough without {self._request}{others}: leave {leave} out."
        if self.judge.shape.is_plain:
            text += " Fewer bits (--quantization int8 or int4) leave less there."
        return text

    def _unneeded(self, draft: Draft) -> Iterator[str]:
        spare = self.device_budget - self.total
        if spare >= 0:
            # A host may be faster than an accelerator that shares the work badly.
            costs = [self.judge.cost(each) for each in (draft, self.draft(draft.mode, 0))]
            slower = ", and makes steps slower; leave it out" if costs[0] > costs[1] else ""
            yield (
                f"{self._request} asks for an offload that is not needed: the weights take "
                f"{format_bytes(self.total)} and fit the accelerator with {format_bytes(spare)} "
                f"to spare. It is done all the same{slower}."
            )

    def _table(self, draft: Draft) -> SplitTable | None:
        is_split = any(p.placement is Placement.SPLIT for p in draft.places.values())
        return self.judge.table(draft) if is_split else None

    def _reasons(self, draft: Draft, table: SplitTable | None) -> Iterator[str]:
        """Why ``auto`` chose what it did, and where a mode that was asked for changes nothing."""
        mode = self.offload.mode
        if mode != "auto":
            if not draft.host_bytes:
                yield f"--offload-mode {mode} has no effect: all weights fit the accelerator."
            elif mode == "stream" and not draft.streamed_bytes:
                yield f"--offload-mode {mode} streams nothing here. {_LITTLE_USED}"
            return
        if not draft.host_bytes:
            return
        asked = self.offload.cpu_offload_bytes
        wanted = self.most if self.offload.patterns and asked is None else asked
        others = [
            self.draft(mode, min(wanted, self.most)) if wanted else self.least(mode)
            for mode in self._modes
            if mode != draft.mode
        ]
        if all(other is not None and other.places == draft.places for other in others):
            yield _LITTLE_USED
            return
        host, link = (
            f"{rate / 1e9:.1f} GB/s"
            for rate in (self.judge.host_bytes_per_s, self.judge.link_bytes_per_s)
        )
        mix = self.judge.mix
        how = "cut" if table is not None and not table.streams else draft.mode
        text = (
            f"{_HOW[how]}: the CPU reads {host} there, and the link carries {link}. A token "
            f"of 1 request, of {mix.num_seqs:,}, and {mix.chunk_tokens:,} tokens of a prompt are "
            f"expected to take {_times(self.judge.seconds(draft))}"
        )
        fitting = [other for other in others if other is not None and self._fits(other)]
        for other in fitting:
            text += f"; in mode {other.mode} {_times(self.judge.seconds(other))}"
        yield f"{text}."
        if not any(d.ring_layers for d in (draft, *fitting)):
            yield "There is no room for the ring on the accelerator that streaming needs."

    # --- what to say where it does not fit ---------------------------------------------------

    def _too_little(self, draft: Draft) -> str:
        """What was asked for leaves too much on the device."""
        beside = f" beside {_ring(draft)}" if draft.ring_layers else ""
        text = (
            f"With {self._request} {format_bytes(draft.device_bytes)} of the weights' "
            f"{format_bytes(self.total)} stay on the accelerator{beside}, which has "
            f"{format_bytes(self.device_budget)} for them. "
        )
        if self.total <= self.device_budget:
            others, leave = self._beside
            return f"{text}Without it{others} all of them fit: leave {leave} out."
        if self.offload.cpu_offload_bytes:
            size = self._suggest_least()
            if size is not None:
                # Without a size all that patterns name would go.
                either = "" if self.offload.patterns else ", or leave the size out"
                return f"{text}Give {size}{either}."
        return text + self._remedy()

    def _forbidden(self) -> str:
        text = (
            f"The weights take {format_bytes(self.total)}, the accelerator has "
            f"{format_bytes(self.device_budget)} for them, and {FORBIDS} forbids keeping "
            "any on the host. "
        )
        free = self._with(cpu_offload_bytes=None)
        size = free._suggest_least()
        if size is not None:
            return f"{text}Leave it out, or give {size} instead."
        least = free._least_of_any()
        if least is None:
            return text + self._remedy()
        return (
            f"{text}{format_bytes(least.host_bytes)} would have to go there, where "
            f"{format_bytes(self.host_budget)} are free beside what steps take. Free memory, or "
            f"{self._smaller}."
        )

    def _too_small(self) -> str:
        # Nothing takes less of the device than the mode that needs no ring.
        modes = ["compute"] if "compute" in self._modes else self._modes
        mode, need = min(
            ((mode, self._least_device(mode)) for mode in modes),
            key=lambda found: found[1].device_used,
        )
        staging = f" and {_ring(need)}" if need.ring_layers else ""
        return (
            f"The accelerator has {format_bytes(self.device_budget)} for weights. Mode {mode} "
            f"needs {format_bytes(need.device_used)} at least: "
            f"{format_bytes(need.device_bytes)} of weights{staging}. {self._remedy()}"
        )

    def _least_device(self, mode: str) -> Draft:
        """The draft that takes least of the device."""
        if mode == "compute":
            # Each weight that leaves frees what it takes.
            return self.draft(mode, self.most)
        units: list[list[ModuleSize]] = self.units
        if mode == "split":
            # What is shared out leaves together, and the bytes in use change evenly meanwhile.
            groups = itertools.groupby(
                units, lambda unit: (self._placement(mode, unit[0]), rank(unit[0]))
            )
            units = [list(itertools.chain.from_iterable(group)) for _, group in groups]
        sizes = (sum(module.num_bytes for module in unit) for unit in units)
        steps = [0, *itertools.accumulate(sizes)]
        return min((self.draft(mode, wanted) for wanted in steps), key=lambda d: d.device_used)

    def _remedy(self) -> str:
        """The smallest change of the options with which it fits; planned before it is named."""
        changes: list[tuple[list[str], dict[str, object]]] = [
            (["leave --offload-layers out"], {"patterns": ()}),
            (["give --offload-prefetch-step 1"], {"prefetch_step": 1}),
            (["give --offload-prefetch-step 0"], {"prefetch_step": 0}),
            (["give --offload-mode compute"], {"mode": "compute"}),
            (
                ["leave --offload-layers out", "give --offload-mode compute"],
                {"patterns": (), "mode": "compute"},
            ),
        ]
        for steps, change in changes:
            other = self._with(cpu_offload_bytes=None, **change)
            if other.offload == replace(self.offload, cpu_offload_bytes=None):
                continue
            if "prefetch_step" in change and other._ring_layers >= self._ring_layers:
                continue
            if other._works():
                if self.offload.cpu_offload_bytes is not None:
                    zero = " 0" if self.offload.cpu_offload_bytes == 0 else ""
                    steps = [f"leave --cpu-offload-gb{zero} out", *steps]
                text = " and ".join(steps)
                return f"{text[0].upper()}{text[1:]}."
        return (
            "Give the accelerator more memory (--gpu-memory-utilization, --gpu-memory-limit, or "
            f"fewer tokens a step with --max-num-batched-tokens), or {self._smaller}."
        )

    def _with(self, **changes: object) -> _Planner:
        offload = replace(self.offload, **changes)  # type: ignore[arg-type]
        return _Planner(self.modules, self.device_budget, self.host_budget, offload, self.judge)

    def _suggest_least(self) -> str | None:
        """The smallest size that works, as an option."""
        for mode in self._modes:
            # What is asked for leaves in the order of ``units``.
            least = self._search(mode, self.units)
            if least is not None:
                size = least.host_bytes
                unit = _unit(size)
                for candidate in (-(-size // unit) * unit, size):
                    if self._fits(self.draft(mode, min(candidate, self.most))):
                        return _size_option(candidate)
        return None

    def _suggest_most(self) -> str | None:
        """The largest size that works, as an option."""
        for mode in self._modes:
            low, high = 0, min(self.host_budget, self.most)
            while low < high:
                middle = (low + high + 1) // 2
                if self.draft(mode, middle).host_bytes <= self.host_budget:
                    low = middle
                else:
                    high = middle - 1
            for candidate in (low // _unit(low) * _unit(low), low):
                draft = self.draft(mode, candidate)
                if draft.host_bytes and self._fits(draft):
                    return _size_option(candidate)
        return None


def _unit(num_bytes: int) -> int:
    """A round number of bytes that changes a size by a tenth at most."""
    return next((unit for unit in (1 << 30, 1 << 20, 1 << 10) if num_bytes >= 10 * unit), 1)


def _size_option(num_bytes: int) -> str:
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % unit == 0:
            return f"--cpu-offload-size {num_bytes // unit}{name}"
    return f"--cpu-offload-size {num_bytes}B"
