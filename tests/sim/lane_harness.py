"""Runs an engine with an accelerator and keeps what it said and what its counters counted."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ambidex.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
    SchedulerConfig,
)
from ambidex.device.sim import SimDevice
from ambidex.device.stream import Span
from ambidex.engine.engine import Engine
from ambidex.layers.module import Experts, Matrix, Parameter, Place, Table
from ambidex.request import EngineRequest, SamplingParams
from ambidex.runner.placing import Places
from ambidex.weights.placed import PlacedKernels
from ambidex.weights.placed_weight import PlacedWeight

#: Rates are given, so that nothing is measured and times are the same everywhere.
SIM = "sim:memory=256MiB,core_bandwidth=10GB/s,core_flops=50G,link=4GB/s,latency=20us,speed=4"

#: Of models that are large enough to be cut at multiples of 64 rows, and small enough to be fast.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}

#: A token, its log probability's bits, and those of the best.
Trace = list[tuple[int, float, tuple[tuple[int, float], ...]]]


@dataclass
class Step:
    """What one step of the engine counted."""

    #: On the accelerator's clock: what it took, and when it was over.
    seconds: float
    end_s: float
    #: Rows of products with layers, and with the head.
    rows: tuple[int, int]
    counts: dict[str, int]

    @property
    def streamed_bytes(self) -> int:
        return self.counts.get("streamed_bytes", 0)


@dataclass
class Ran:
    """What an engine said, and its counters at the end."""

    traces: list[Trace]
    errors: list[str | None]
    steps: list[Step] = field(default_factory=list)
    #: Requests that ran alone after a step had failed: also after a wait that was missing.
    num_alone: int = 0
    #: See PlacedKernels.counts; empty on the CPU lane.
    counts: dict[str, int] = field(default_factory=dict)
    wasted_bytes: int = 0
    #: Copied for the step that would have come next.
    ahead_bytes: int = 0
    num_ahead: int = 0
    ring_bytes: int = 0
    num_replays: int = 0
    #: Bytes of a step's streamed weights by its rows.
    plan: Callable[[tuple[int, int]], int] = lambda rows: 0
    host_bytes: int = 0
    timeline: list[Span] = field(default_factory=list)
    #: The most that the accelerator's accounts took at a time.
    device_bytes: int = 0
    activation_bytes: int = 0

    def busy(self, steps: Sequence[Step]) -> dict[str, float]:
        """Seconds a step for which each stream worked, in ``steps``, one after the other."""
        first, last = steps[0].end_s - steps[0].seconds, steps[-1].end_s
        busy: dict[str, float] = {}
        for span in self.timeline:
            part = min(span.end_s, last) - max(span.start_s, first)
            busy[span.stream] = busy.get(span.stream, 0.0) + max(part, 0.0) / len(steps)
        return busy

    def steady(self, num_tokens: int | None = None) -> list[Step]:
        """Steps that came after a like one; with ``num_tokens``, of as many requests' tokens."""
        return [
            step
            for before, step in itertools.pairwise(self.steps)
            if before.rows == step.rows and num_tokens in (None, step.rows[0])
        ]


def make_config(
    folder: Path, device: str = "auto", offload: OffloadConfig | None = None, **changes: Any
) -> EngineConfig:
    names = {
        "model": ("dtype", "quantization", "max_model_len"),
        "cache": ("block_size", "enable_prefix_caching", "kv_cache_dtype", "kv_cache_bytes"),
        "scheduler": ("max_num_seqs", "max_num_batched_tokens"),
    }
    parts: dict[str, Any] = {
        part: {name: changes.pop(name) for name in each if name in changes}
        for part, each in names.items()
    }
    return EngineConfig(
        model=ModelConfig(str(folder), **{"max_model_len": 320, **parts["model"]}),
        cache=CacheConfig(
            **{"kv_cache_bytes": 4 << 20, "enable_prefix_caching": False, **parts["cache"]}
        ),
        scheduler=SchedulerConfig(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **parts["scheduler"]}
        ),
        device=DeviceConfig(device),
        offload=offload or OffloadConfig(),
        cpu_threads=changes.pop("cpu_threads", 1),
        **changes,
    )


def prompts(lengths: Sequence[int] = (1, 5, 33, 70), seed: int = 1) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(3, 500) for _ in range(length)] for length in lengths]


def run(
    config: EngineConfig,
    inputs: Sequence[Sequence[int]] | None = None,
    num_tokens: int = 8,
    *,
    prepare: Callable[[Engine], None] | None = None,
) -> Ran:
    """All requests at once, greedily. ``prepare(engine)`` is called before the first step."""
    engine = Engine(config)
    try:
        if prepare is not None:
            prepare(engine)
        return drive(engine, prompts() if inputs is None else inputs, num_tokens)
    finally:
        engine.close()


def drive(engine: Engine, inputs: Sequence[Sequence[int]], num_tokens: int, first: int = 0) -> Ran:
    """``first``: the first request's number; no two of an engine share one."""
    hands = engine.lane.hands
    placed, clock = hands.placed, getattr(hands.accelerator, "clock", None)
    ran = Ran([[] for _ in inputs], [None for _ in inputs])
    for index, prompt in enumerate(inputs):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
        engine.add_request(EngineRequest(str(first + index), list(prompt), params, 0.0))
    runner = engine.lane.runner
    run_alone = runner._execute_alone

    def note_alone(*request: Any) -> None:
        ran.num_alone += 1
        run_alone(*request)

    runner._execute_alone = note_alone  # type: ignore[method-assign]
    rows = [(0, 0)]
    if placed is not None:
        begin_step = placed.begin_step

        def note(num_tokens: int, num_logits: int) -> None:
            rows[:] = [(num_tokens, num_logits)]
            begin_step(num_tokens, num_logits)

        placed.begin_step = note  # type: ignore[method-assign]
    while engine.has_work:
        before = placed.counts() if placed else {}
        began_s = clock.host_s if clock else 0.0
        outputs = engine.step()
        for output in outputs:
            index = int(output.request_id) - first
            ran.errors[index] = output.error or ran.errors[index]
            for token, entry in zip(output.new_token_ids, output.logprobs or [], strict=True):
                ran.traces[index].append((token, entry.logprob, tuple(entry.top)))
        after = placed.counts() if placed else {}
        counts = {name: after[name] - before[name] for name in after}
        end_s = clock.host_s if clock else 0.0
        ran.steps.append(Step(end_s - began_s, end_s, rows[0], counts))
    runner._execute_alone = run_alone  # type: ignore[method-assign]
    if placed is not None:
        placed.begin_step = begin_step  # type: ignore[method-assign]
        count_up(ran, engine, placed)
    return ran


def count_up(ran: Ran, engine: Engine, placed: PlacedKernels) -> None:
    hands, runner = engine.lane.hands, engine.lane.runner
    memory = hands.accelerator if isinstance(hands.accelerator, SimDevice) else None
    ran.counts = placed.counts()
    if placed.streamer is not None:
        ran.wasted_bytes = placed.streamer.num_wasted_bytes
        ran.num_ahead = placed.streamer.num_ahead
        ran.ahead_bytes = placed.streamer.num_bytes_ahead
        ran.ring_bytes = placed.streamer.ring_bytes
    if runner.replayer is not None:
        ran.num_replays = runner.replayer.num_replays
    weights = streamed_weights(runner.model)
    ran.plan = lambda rows: sum(planned_bytes(w, rows[is_head]) for w, is_head in weights)
    ran.host_bytes = sum(placed_bytes(p) for _, p in runner.model.named_parameters())
    engine.lane.device.synchronize()
    ran.timeline = list(memory.clock.timeline) if memory else []
    # A third party's device need not count these.
    for name, account in (("device_bytes", "weights"), ("activation_bytes", "activations")):
        setattr(ran, name, memory.peak_bytes(account) if memory else 0)


def planned_bytes(weight: PlacedWeight, rows: int) -> int:
    """Bytes that a product with ``rows`` rows has to stream: its share of the host's rows."""
    share = weight.streamed_rows(rows) / weight.num_host if rows else 0.0
    return math.ceil(weight.host.num_bytes * share)


def streamed_weights(model: Any) -> list[tuple[PlacedWeight, bool]]:
    """Placed matrices that are multiplied with, and whether that gives logits."""
    found = []
    for path, parameter in model.named_parameters():
        is_looked_up = isinstance(parameter, Table) and not parameter.has_head
        if isinstance(parameter.data, PlacedWeight) and not is_looked_up:
            is_head = isinstance(parameter, Table) or path.startswith("head.")
            found.append((parameter.data, is_head))
    return found


def placed_bytes(parameter: Parameter) -> int:
    held = parameter.data if isinstance(parameter.data, list) else [parameter.data]
    return sum(weight.host_bytes for weight in held if isinstance(weight, PlacedWeight))


def assert_same(got: Ran, expected: Ran, num_tokens: int = 8, *, has_failed: bool = False) -> None:
    """The same tokens and log probabilities, bit for bit; ``has_failed``: a step failed, and its
    requests ran again."""
    assert got.errors == [None] * len(expected.traces)
    assert (got.num_alone > 0) == has_failed
    for index, (ours, theirs) in enumerate(zip(got.traces, expected.traces, strict=True)):
        assert len(ours) == len(theirs) == num_tokens
        assert ours == theirs, f"prompt {index}"


def assert_streamed(ran: Ran, *, is_constant: bool = True) -> None:
    """To the byte what the plan says in every steady step; where as much is streamed whatever the
    number of tokens, nothing is in vain."""
    steady = ran.steady()
    assert len(steady) >= len(ran.steps) // 2
    for step in steady:
        assert step.streamed_bytes == ran.plan(step.rows)
    assert ran.wasted_bytes == 0 or not is_constant


#: Path of a parameter, and the parameter -> its place; None: all of it on the accelerator.
Chooser = Callable[[str, Parameter], Place | None]


def place_by(patch: pytest.MonkeyPatch, choose: Chooser) -> None:
    """Put ``choose`` in the place of the policy."""

    def plan(
        config: Any, hands: Any, model: Any, names: Any, sizes: Mapping[str, int], *rest: Any
    ) -> Places:
        places = {}
        for path, parameter in model.named_parameters():
            if isinstance(parameter, Matrix | Experts):
                place = choose(path, parameter)
                if place is not None:
                    places[path] = place
        # No less than is needed on either side.
        total = sum(sizes.values())
        ledgers = [ledger.name for ledger in hands.ledgers]
        return Places(places, dict.fromkeys(ledgers, total), 0, [])

    patch.setattr("ambidex.runner.loader.plan_places", plan)


def num_rows(parameter: Parameter) -> int:
    """Outputs of a matrix; those of a gate and what it is multiplied with count once."""
    is_paired = isinstance(parameter, Matrix) and parameter.is_paired
    return parameter.shape[0] // (2 if is_paired else 1)


def thirds(parameter: Parameter) -> Place:
    """A matrix in three parts, as far as it has rows; experts and tables on the host."""
    rows = num_rows(parameter)
    if isinstance(parameter, Experts | Table):
        return Place(0, lambda _: 0)
    resident = rows // 3 // 64 * 64
    streamed = min(max((rows - resident) // 128 * 64, 64), rows)
    return Place(resident, lambda _: streamed)
