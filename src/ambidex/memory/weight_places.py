"""Drafts of a placement: which weights leave the accelerator for a number of bytes.

What leaves first: experts, since each token needs few of them; tables that are only looked up,
since a step reads few of their rows; then the layers from the last upward; at last the head, which
is large and would need a large ring. Experts of one layer go together: one kernel call uses them
all. ``split`` shares evenly among the matrices of all layers instead, so that both sides have work
in every product.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from ambidex.config import OffloadConfig
from ambidex.errors import OptionError
from ambidex.memory.weight_patterns import layer_index, match_patterns

#: Rows (output features) are shared out in units of this many.
ROW_UNIT = 64
#: The rank of what leaves last.
HEAD = 3


class Placement(Enum):
    """What happens with one weight."""

    RESIDENT = "resident"
    STREAM = "stream"
    HOST = "host"
    SPLIT = "split"


class WeightKind(Enum):
    """What a weight is to the placement."""

    #: Norms, biases, learned positions: always on the device.
    VECTOR = "vector"
    MATRIX = "matrix"
    #: Rows that are only looked up: the embedding of a model with a head of its own.
    TABLE = "table"
    #: Looked up, and multiplied with by the head: one weight, one place.
    TIED = "tied"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """One weight of a model, in the order in which a step uses them."""

    #: In the model: ``layers.3.mlp.gate_up.weight``.
    path: str
    #: As it is held, quantised or not.
    num_bytes: int
    #: Output features; of experts those of all.
    rows: int
    kind: WeightKind = WeightKind.MATRIX
    #: In the checkpoint: ``model.layers.3.mlp.gate_proj.weight`` and so on.
    names: tuple[str, ...] = ()
    #: Of ``num_bytes``, what every part of the rows has: both memories, where it is cut.
    fixed_bytes: int = 0

    @property
    def is_matrix(self) -> bool:
        """Whether it can leave the device."""
        return self.kind is not WeightKind.VECTOR

    @property
    def is_expert(self) -> bool:
        return self.kind is WeightKind.EXPERTS


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The place of one weight."""

    placement: Placement
    #: Rows on the device: all (RESIDENT), none (STREAM, HOST), or a multiple of ROW_UNIT (SPLIT).
    resident_rows: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Places, and what they take."""

    mode: str
    places: Mapping[str, WeightPlace]
    device_bytes: int
    host_bytes: int
    streamed_bytes: int
    computed_bytes: int
    #: The ring that is streamed through: layers, and bytes of the largest.
    ring_layers: int
    ring_layer_bytes: int

    @property
    def device_used(self) -> int:
        return self.device_bytes + self.ring_layers * self.ring_layer_bytes


class Drafts:
    """All ways to place the weights of a model on a device of ``device_budget`` bytes."""

    def __init__(
        self,
        modules: Sequence[ModuleSize],
        device_budget: int,
        offload: OffloadConfig,
        computes: Callable[[str], bool],
    ) -> None:
        """``computes(path)``: whether a weight that has one place and is not resident is better
        computed on the host than streamed."""
        assert len({module.path for module in modules}) == len(modules), "a path stands once"
        assert all(module.num_bytes > 0 and module.rows > 0 for module in modules), "none is empty"
        self.modules = modules
        self.device_budget = device_budget
        self.offload = offload
        self.computes = computes
        self.total = sum(module.num_bytes for module in modules)
        self._least: dict[str, Draft | None] = {}
        self.units = self._units(self._eligible())
        self.most = sum(module.num_bytes for unit in self.units for module in unit)

    # --- what may go, and in which order -----------------------------------------------------

    def _eligible(self) -> list[ModuleSize]:
        """Weights that may leave the device, in the order of the model."""
        patterns = self.offload.patterns
        chosen: set[int] = set(range(len(self.modules)))
        if patterns:
            chosen = set()
            weights = [(module.path, *module.names) for module in self.modules]
            for match in match_patterns(patterns, weights):
                named = [self.modules[index] for index in sorted(match.weights)]
                if not any(module.is_matrix for module in named):
                    raise OptionError(
                        f"--offload-layers {match.pattern!r} names only vectors ({len(named)}, "
                        f"such as {named[0].path}), which stay on the accelerator: nothing would "
                        "be offloaded. Name matrices, such as '*.mlp'."
                    )
                chosen |= match.weights
            experts = {
                _parent(self.modules[index].path)
                for index in chosen
                if self.modules[index].is_expert
            }
            chosen |= {
                index
                for index, module in enumerate(self.modules)
                if module.is_expert and _parent(module.path) in experts
            }
        return [m for i, m in enumerate(self.modules) if i in chosen and m.is_matrix]

    def _units(self, eligible: Sequence[ModuleSize]) -> list[list[ModuleSize]]:
        """What leaves together, in the order in which it leaves."""
        units: dict[str, list[ModuleSize]] = {}
        for module in reversed(eligible):
            key = _parent(module.path) if module.is_expert else module.path
            units.setdefault(key, []).append(module)
        return sorted(units.values(), key=lambda unit: rank(unit[0]))

    # --- drafts ------------------------------------------------------------------------------

    @property
    def _modes(self) -> list[str]:
        """The mode, or those to try, the simple ones first."""
        if self.offload.mode != "auto":
            return [self.offload.mode]
        return ["compute", "stream", "split"]

    def _placement(self, mode: str, module: ModuleSize) -> Placement:
        if module.kind is WeightKind.TABLE:
            # Streaming all of it for the few rows that a step looks up is never right.
            return Placement.HOST
        if module.is_expert:
            # A step needs few of them; all of a layer would cross the link.
            return Placement.HOST
        if mode == "split":
            if module.kind is WeightKind.MATRIX:
                return Placement.SPLIT
            return Placement.HOST if self.computes(module.path) else Placement.STREAM
        return Placement.STREAM if mode == "stream" else Placement.HOST

    def draft(
        self, mode: str, wanted: int, units: Sequence[list[ModuleSize]] | None = None
    ) -> Draft:
        """At least ``wanted`` bytes on the host, up to all that may go; ``units`` in another order
        than theirs."""
        gone: dict[str, WeightPlace] = {}
        left = wanted
        units = self.units if units is None else units
        shared = [u[0] for u in units if self._placement(mode, u[0]) is Placement.SPLIT]
        # Layers share evenly, and the head only leaves after them.
        groups = [list(group) for _, group in groupby(shared, rank)]
        firsts = {group[0].path: group for group in groups}
        for unit in units:
            if left <= 0:
                break
            if unit[0].path in gone:
                continue
            if unit[0].path in firsts:
                group = firsts[unit[0].path]
                places = _share_out(group, left)
                gone |= places
                left -= sum(_host_bytes(m, places[m.path]) for m in group)
                continue
            for module in unit:
                gone[module.path] = WeightPlace(self._placement(mode, module), 0)
                left -= module.num_bytes
        return self._measure(mode, gone)

    def _measure(self, mode: str, gone: Mapping[str, WeightPlace]) -> Draft:
        resident = Placement.RESIDENT
        places = {m.path: gone.get(m.path, WeightPlace(resident, m.rows)) for m in self.modules}
        on_host = {m.path: _host_bytes(m, places[m.path]) for m in self.modules}

        def total(*kinds: Placement) -> int:
            return sum(n for path, n in on_host.items() if places[path].placement in kinds)

        linked = (Placement.STREAM, Placement.SPLIT)
        through_link = [m for m in self.modules if places[m.path].placement in linked]
        host_bytes = sum(on_host.values())
        twice = sum(
            m.fixed_bytes for m in self.modules if 0 < places[m.path].resident_rows < m.rows
        )
        return Draft(
            mode=mode if host_bytes else "resident",
            places=places,
            device_bytes=self.total - host_bytes + twice,
            host_bytes=host_bytes,
            streamed_bytes=total(Placement.STREAM),
            computed_bytes=total(Placement.HOST),
            ring_layers=self._ring_layers if through_link else 0,
            ring_layer_bytes=_largest_layer(through_link, on_host),
        )

    @property
    def _ring_layers(self) -> int:
        """Layers that the ring has room for: the one in use, and those ahead."""
        ahead = 1 if self.offload.prefetch_step is None else self.offload.prefetch_step
        return 1 + (ahead if self.offload.is_async else 0)

    def least(self, mode: str) -> Draft | None:
        """The draft with the fewest bytes on the host that fits the device; None: there is none."""
        if mode not in self._least:
            self._least[mode] = self._find_least(mode)
        return self._least[mode]

    def _find_least(self, mode: str) -> Draft | None:
        found = self._search(mode, self.units)
        heads = [unit for unit in self.units if rank(unit[0]) == HEAD]
        if found is None or all(_is_whole(m, found.places[m.path]) for (m,) in heads):
            return found
        # It is larger than what was still to go: where it leaves first, layers may come back.
        others = [unit for unit in self.units if unit not in heads]
        other = self._search(mode, [*heads, *others])
        return other if other and other.host_bytes < found.host_bytes else found

    def _search(self, mode: str, units: Sequence[list[ModuleSize]]) -> Draft | None:
        wanted = max(self.total - self.device_budget, 0)
        while wanted <= self.most:
            draft = self.draft(mode, wanted, units)
            over = draft.device_used - self.device_budget
            if over <= 0:
                return draft
            # No byte on the host frees more than one on the device, and what has left stays
            # away when more leaves, so that the ring only grows: none is passed over.
            wanted = draft.host_bytes + over
        return None


def _largest_layer(streamed: Sequence[ModuleSize], on_host: Mapping[str, int]) -> int:
    """Bytes of the streamed weights of a layer, or of a weight that is in none."""
    sizes: dict[str | int, int] = {}
    for module in streamed:
        index = layer_index(module.path)
        key = module.path if index is None else index
        # Each weight begins at a multiple of 64 bytes.
        sizes[key] = sizes.get(key, 0) + -(-on_host[module.path] // 64) * 64
    return max(sizes.values(), default=0)


def _parent(path: str) -> str:
    return path.removesuffix(".weight").rpartition(".")[0]


def rank(module: ModuleSize) -> int:
    """What leaves first; see the module's text."""
    if module.is_expert:
        return 0
    if module.kind is WeightKind.TABLE:
        return 1
    return 2 if layer_index(module.path) is not None else HEAD


def _is_whole(module: ModuleSize, place: WeightPlace) -> bool:
    """Whether all of it is on the device."""
    return place.resident_rows == module.rows


def _host_bytes(module: ModuleSize, place: WeightPlace) -> int:
    if _is_whole(module, place):
        return 0
    by_row = module.num_bytes - module.fixed_bytes
    return module.num_bytes - by_row * place.resident_rows // module.rows


def _share_out(modules: Sequence[ModuleSize], wanted: int) -> dict[str, WeightPlace]:
    """Rows of every matrix to the host, the same share of each, until it is ``wanted`` bytes.

    Exact to one unit of rows. Units leave in one order, whatever is wanted: a matrix of n units
    gives up its unit k when the share reaches k / n, the first matrices first. So more wanted never
    takes less from a matrix, and never makes the ring smaller.
    """
    units = {module.path: -(-module.rows // ROW_UNIT) for module in modules}
    # The same share is the same float, however it is written as a fraction.
    turns = {number: [k / number for k in range(number)] for number in set(units.values())}

    def place(module: ModuleSize, number: int) -> WeightPlace:
        if not number:
            return WeightPlace(Placement.RESIDENT, module.rows)
        return WeightPlace(Placement.SPLIT, (units[module.path] - number) * ROW_UNIT)

    def host_bytes(module: ModuleSize, number: int) -> int:
        return _host_bytes(module, place(module, number))

    def given_at(share: float) -> dict[str, int]:
        at = {number: bisect_right(turn, share) for number, turn in turns.items()}
        return {path: at[number] for path, number in units.items()}

    def reached(share: float) -> int:
        given = given_at(share)
        return sum(host_bytes(module, given[module.path]) for module in modules)

    shares = sorted({share for turn in turns.values() for share in turn})
    last = min(bisect_left(shares, wanted, key=reached), len(shares) - 1)
    given = given_at(shares[last - 1]) if last else dict.fromkeys(units, 0)
    left = wanted - sum(host_bytes(module, given[module.path]) for module in modules)
    at_last = given_at(shares[last])
    for module in modules:
        if left <= 0:
            break
        before = host_bytes(module, given[module.path])
        given[module.path] = at_last[module.path]
        left -= host_bytes(module, given[module.path]) - before
    return {module.path: place(module, given[module.path]) for module in modules}
