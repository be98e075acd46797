"""Experts of the host, the hot ones cached on a simulated accelerator: the CPU lane's bits, work
on both sides, and changes between steps alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_placed import Lane

from ambidex.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
    SchedulerConfig,
)
from ambidex.engine.engine import Engine
from ambidex.engine.summary import memory_report
from ambidex.errors import DeviceError
from ambidex.kernels.native import NativeKernels
from ambidex.layers.module import Place
from ambidex.memory import expert_cache
from ambidex.memory.model_shape import ModelShape, WeightShape
from ambidex.memory.placement import (
    Placement,
    PlacementPlan,
    WeightKind,
    plan_placement,
)
from ambidex.memory.planner import plan_with_cache
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.rates import LinkRate
from ambidex.request import EngineRequest, SamplingParams
from ambidex.runner import loader
from ambidex.weights.expert_slots import ExpertSlots, HostExperts, SharedExperts
from ambidex.weights.placed import PlacedKernels

MODELS = ("qwen3_moe", "mixtral")
NUM_EXPERTS = {"qwen3_moe": 8, "mixtral": 6}
NUM_LAYERS, TOP_K = 2, 2
#: Every expert is on the host.
EXPERTS = ("*.mlp.gate_up", "*.mlp.down")

Trace = dict[str, list[tuple[int, float]]]


@dataclass
class Run:
    """What an engine said, and its kernels' counters at the end."""

    trace: Trace
    counts: dict[str, int] = field(default_factory=dict)
    #: By step: choices computed on the accelerator, and all.
    hits: list[tuple[int, int]] = field(default_factory=list)
    num_replays: int = 0
    #: On the accelerator at the end, by layer.
    cached: list[frozenset[int]] = field(default_factory=list)


def make_config(
    folder: Path, mode: str | None, is_eager: bool = False, **model: Any
) -> EngineConfig:
    """``mode``: of the cache; None: the CPU lane."""
    device = DeviceConfig("sim:memory=128MiB,core_bandwidth=10GB/s,core_flops=50G,speed=4")
    return EngineConfig(
        model=ModelConfig(str(folder), max_model_len=320, **model),
        cache=CacheConfig(kv_cache_bytes=8 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
        device=DeviceConfig() if mode is None else device,
        offload=OffloadConfig(patterns=EXPERTS, mode="compute", moe_expert_cache=mode or "off"),
        cpu_threads=1,
        enforce_eager=is_eager,
    )


@contextmanager
def opened(config: EngineConfig) -> Iterator[Engine]:
    engine = Engine(config)
    try:
        yield engine
    finally:
        engine.close()


def placed_of(engine: Engine) -> PlacedKernels:
    placed = engine.lane.hands.placed
    assert placed is not None
    return placed


def generate(engine: Engine, num_prompts: int, num_tokens: int) -> Run:
    run = Run({})
    for index in range(num_prompts):
        name = f"request-{index}"
        # Together more than one step takes, and one of them more than experts are shared for.
        prompt = [3 + (7 * index + 5 * i) % 500 for i in range(2 + 43 * index)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
        run.trace[name] = []
        engine.add_request(EngineRequest(name, prompt, params, 0.0))
    placed = engine.lane.hands.placed
    before = (0, 0)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            entries = output.logprobs or []
            for token, entry in zip(output.new_token_ids, entries, strict=True):
                run.trace[output.request_id].append((token, entry.logprob))
        if placed is not None and placed.experts is not None:
            counts = placed.counts()
            after = (counts["expert_hits"], counts["expert_hits"] + counts["expert_misses"])
            run.hits.append((after[0] - before[0], after[1] - before[1]))
            before = after
    if placed is not None:
        run.counts = placed.counts()
        replayer = engine.lane.runner.replayer
        run.num_replays = replayer.num_replays if replayer is not None else 0
        if placed.experts is not None:
            run.cached = [placed.experts.cached(layer) for layer in range(NUM_LAYERS)]
    return run


def run_once(config: EngineConfig, num_prompts: int = 3, num_tokens: int = 40) -> Run:
    with opened(config) as engine:
        return generate(engine, num_prompts, num_tokens)


@pytest.fixture
def room_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``room_for(n)``: the cache has memory for n experts of a tiny model's layer."""
    start = loader.start_expert_cache

    def limit(num_experts: float) -> None:
        def limited(hands: Any, model: Any, mode: str, cache_bytes: int) -> int:
            module = next(layer.mlp for layer in model.layers)
            pair = (module.gate_up.data[0], module.down.data[0])
            size = NUM_LAYERS * sum(weight.host.num_bytes for weight in pair)
            assert size * num_experts <= cache_bytes
            taken = start(hands, model, mode, int(size * num_experts))
            assert taken <= size * num_experts
            return taken

        monkeypatch.setattr(loader, "start_expert_cache", limited)

    return limit


@dataclass
class Watch:
    """What experts each call computed with, and how often each changed hands, and when."""

    #: By layer, in the order of calls: experts that the call was given.
    on_device: dict[int, list[frozenset[int]]] = field(default_factory=dict)
    on_host: dict[int, list[frozenset[int]]] = field(default_factory=dict)
    num_changes: int = 0
    num_starts: int = 0
    is_between_steps: bool = True
    num_inside: int = 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Looks into every call of the kernels, replayed ones too, while it runs."""
    watch, layers = Watch(), {}
    compute, change, begin = (
        NativeKernels.expert_outputs,
        SharedExperts.give_to_host,
        ExpertSlots.begin_step,
    )
    add = ExpertSlots._add

    def noted_add(self: ExpertSlots, experts: Any, capacity: int) -> None:
        add(self, experts, capacity)
        layer = self._layers[-1]
        layers[id(layer.device_gate_up)] = (watch.on_device, layer.index)
        layers[id(layer.host_gate_up)] = (watch.on_host, layer.index)

    def noted_compute(self: Any, x: Any, gate_up: Any, *rest: Any) -> Any:
        calls, layer = layers[id(gate_up)]
        held = frozenset(expert for expert, weight in enumerate(gate_up) if weight is not None)
        calls.setdefault(layer, []).append(held)
        watch.num_inside += 1
        out = compute(self, x, gate_up, *rest)
        watch.num_inside -= 1
        return out

    def noted_change(self: SharedExperts, expert: int) -> None:
        assert watch.is_between_steps
        assert watch.num_inside == 0
        watch.num_changes += 1
        change(self, expert)

    def noted_begin(self: ExpertSlots, num_rows: int) -> None:
        watch.is_between_steps = True
        begin(self, num_rows)
        watch.is_between_steps = False
        watch.num_starts += 1

    monkeypatch.setattr(ExpertSlots, "_add", noted_add)
    monkeypatch.setattr(NativeKernels, "expert_outputs", noted_compute)
    monkeypatch.setattr(SharedExperts, "give_to_host", noted_change)
    monkeypatch.setattr(ExpertSlots, "begin_step", noted_begin)
    return watch


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", ["auto", "static", "off"])
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_cpu_lanes_bits(
    tiny_model: Callable[[str], Path],
    room_for: Callable[[float], None],
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    mode: str,
    is_eager: bool,
    quantization: str | None,
) -> None:
    # Changes as often as there can be some.
    monkeypatch.setattr(expert_cache, "HYSTERESIS", 1.0)
    monkeypatch.setattr(expert_cache, "LEAST_USES", 0.1)
    monkeypatch.setattr(expert_cache, "DECAY", 0.8)
    folder, model = tiny_model(kind), {"quantization": quantization}
    ours = run_once(make_config(folder, None, **model))
    room_for(1.5)
    run = run_once(make_config(folder, mode, is_eager, **model))
    assert run.trace == ours.trace
    assert bool(run.num_replays) != is_eager
    if mode == "off":
        assert "expert_hits" not in run.counts and not watch.on_device
        return
    assert run.counts["expert_hits"] > 0 and run.counts["expert_misses"] > 0
    # Both sides were called for every layer of a step, and no expert was left out or done twice.
    everyone, caches = frozenset(range(NUM_EXPERTS[kind])), set()
    assert set(watch.on_device) == set(watch.on_host) == set(range(NUM_LAYERS))
    for layer, calls in watch.on_device.items():
        others = watch.on_host[layer]
        assert len(calls) == len(others) > 20
        for of_device, of_host in zip(calls, others, strict=True):
            assert of_device == everyone - of_host
            assert len(of_device) <= 2
        caches.update(calls)
    swaps = run.counts["expert_swaps"]
    assert swaps == watch.num_changes
    if mode == "static":
        assert swaps == run.counts["expert_bytes"] == 0
        assert caches == {frozenset({0}), frozenset({0, 1})}
    else:
        assert swaps > 0 and len(caches) > 2


@pytest.mark.parametrize("is_eager", [False, True])
def test_no_choice_is_lost(
    tiny_model: Callable[[str], Path], room_for: Callable[[float], None], is_eager: bool
) -> None:
    """Hits and misses together are the choices of every row, those of large steps too; not those of
    the rows that fill up a captured step of three requests."""
    room_for(3)
    with opened(make_config(tiny_model("qwen3_moe"), "auto", is_eager)) as engine:
        # Of warming up.
        before = placed_of(engine).counts()
        run = generate(engine, 3, 20)
    num_rows = sum(2 + 43 * index for index in range(3)) + 3 * 19
    assert bool(run.num_replays) != is_eager
    choices = num_rows * NUM_LAYERS * TOP_K
    counted = sum(run.counts[name] - before[name] for name in ("expert_hits", "expert_misses"))
    assert counted == choices


def test_large_steps_are_the_hosts(
    tiny_model: Callable[[str], Path], room_for: Callable[[float], None], watch: Watch
) -> None:
    room_for(3)
    with opened(make_config(tiny_model("qwen3_moe"), "auto")) as engine:
        before = dict(placed_of(engine).counts())
        params = SamplingParams(max_tokens=1, temperature=0.0)
        engine.add_request(EngineRequest("long", [5] * 100, params, 0.0))
        num_calls = len(watch.on_device[0])
        while engine.has_work:
            engine.step()
        after = placed_of(engine).counts()
    assert len(watch.on_device[0]) == num_calls
    assert after["expert_hits"] == before["expert_hits"]
    assert after["expert_misses"] - before["expert_misses"] == 100 * NUM_LAYERS * TOP_K


def skewed(folder: Path, target: Path) -> Path:
    """The same model, whose routers choose one of experts 4 and 5 and one of 6 and 7, always."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[:4] = 0.0
            tensor[5], tensor[7] = -tensor[4], -tensor[6]
        if name.endswith("embed_tokens.weight"):
            # The token of rows of no request is all zero, to which all experts are alike.
            tensor[0] = tensor[1]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("is_eager", [False, True])
def test_what_is_used_comes_in(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    room_for: Callable[[float], None],
    is_eager: bool,
) -> None:
    folder = skewed(tiny_model("qwen3_moe"), tmp_path / "skewed")
    ours = run_once(make_config(folder, None), 3, 80)
    room_for(4)
    still = run_once(make_config(folder, "static", is_eager), 3, 80)
    moving = run_once(make_config(folder, "auto", is_eager), 3, 80)
    assert still.trace == moving.trace == ours.trace
    assert still.cached == [frozenset(range(4))] * NUM_LAYERS
    assert sum(hits for hits, _ in still.hits) == 0
    assert moving.cached == [frozenset(range(4, 8))] * NUM_LAYERS
    # From nothing to everything.
    last = moving.hits[-20:]
    assert all(hits == choices > 0 for hits, choices in last)
    assert moving.counts["expert_swaps"] == 4 * NUM_LAYERS
    size = 3 * 64 * 32 * 4
    assert moving.counts["expert_bytes"] == 4 * NUM_LAYERS * size


def test_a_copy_travels_for_a_step(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    room_for: Callable[[float], None],
    watch: Watch,
) -> None:
    """One expert a layer may be on its way: then the host computes it, and the one that left."""
    folder = skewed(tiny_model("qwen3_moe"), tmp_path / "skewed")
    room_for(4)
    with opened(make_config(folder, "auto")) as engine:
        swaps = generate(engine, 2, 80).counts["expert_swaps"]
        spans = [
            span
            for span in engine.lane.hands.accelerator.clock.timeline  # type: ignore[union-attr]
            if span.name == "expert"
        ]
    sizes = [len(cached) for calls in watch.on_device.values() for cached in calls]
    # Each swap leaves a slot without an expert for one step.
    assert set(sizes) == {3, 4}
    assert sizes.count(3) == swaps > 0
    # Two matrices each; the first experts, then the others.
    assert len(spans) == 2 * (4 * NUM_LAYERS + swaps)
    assert {span.stream for span in spans} == {"copy_in"}


def test_static_runs_are_alike(
    tiny_model: Callable[[str], Path], room_for: Callable[[float], None]
) -> None:
    room_for(3)
    first, second = (run_once(make_config(tiny_model("qwen3_moe"), "static")) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_the_cache_takes_what_is_left(tiny_model: Callable[[str], Path], mode: str) -> None:
    with opened(make_config(tiny_model("qwen3_moe"), mode)) as engine:
        device = engine.lane.device
        cached = [r for r in device.ledger.reservations("weights") if r.name == "cached experts"]
        taken = device.taken_bytes("weights")  # type: ignore[attr-defined]
        assert taken == device.ledger.reserved_bytes("weights")
        # There is room for all of them.
        size = NUM_LAYERS * NUM_EXPERTS["qwen3_moe"] * 3 * 64 * 32 * 4
        assert [r.num_bytes for r in cached] == ([size] if mode == "auto" else [])
        report = memory_report(engine.memory(), engine.lane.module_bytes())
        assert report["gpu_weights"] == taken
        assert report["modules"].get("cached experts") == (
            {device.ledger.name: size} if mode == "auto" else None
        )
        assert (placed_of(engine).experts is None) == (mode == "off")


def test_no_room_no_cache(
    tiny_model: Callable[[str], Path], room_for: Callable[[float], None]
) -> None:
    room_for(0.4)
    with opened(make_config(tiny_model("qwen3_moe"), "auto")) as engine:
        assert placed_of(engine).experts is None
    # One of two layers has a cached expert.
    room_for(0.5)
    run = run_once(make_config(tiny_model("qwen3_moe"), "auto"))
    assert sorted(map(len, run.cached)) == [0, 1]
    assert run.trace == run_once(make_config(tiny_model("qwen3_moe"), None)).trace


def plan_mixture(budget: int, cache: str, **offload: Any) -> tuple[PlacementPlan, int]:
    """Four layers of 100 bytes beside 1,200 of experts; up to 500 bytes are for a cache."""
    weights = []
    for layer in range(4):
        path = f"layers.{layer}.attention.qkv.weight"
        weights.append(WeightShape(path, 64, 1, WeightKind.MATRIX, "int8", 100))
        for name, size in (("gate_up", 800), ("down", 400)):
            path = f"layers.{layer}.mlp.{name}"
            weights.append(WeightShape(path, 64, 6, WeightKind.EXPERTS, "int8", size))
    shape = ModelShape("", "", 4, 64, 64, 64, 1, 64, tuple(weights), (), None)
    host, device = (
        Processor(name, 1 << 20, rate, {"float32": ProductRate(((1, 5 * rate),))})
        for name, rate in (("host", 10e9), ("device", 40e9))
    )
    profile = HardwareProfile("made up", host, device, LinkRate(4e9))
    asked = OffloadConfig(**offload)
    return plan_with_cache(
        shape.modules,
        lambda num_bytes: plan_placement(shape, num_bytes, 1 << 20, asked, profile),
        budget,
        500,
        cache,
    )


@pytest.mark.parametrize(
    ("budget", "mode", "device_bytes", "cache_bytes"),
    [
        # Two layers' experts fit, and 200 bytes more; or one layer's, and a cache.
        (3000, "auto", 1600, 500),
        (3000, "static", 2800, 200),
        (3000, "off", 2800, 0),
        # Everything fits.
        (5200, "auto", 5200, 0),
        # No experts are left that could make room: the rest stays where it is.
        (500, "auto", 400, 100),
        # There is room enough.
        (2200, "auto", 1600, 500),
    ],
)
def test_room_for_the_cache(budget: int, mode: str, device_bytes: int, cache_bytes: int) -> None:
    plan, num_bytes = plan_mixture(budget, mode)
    assert (plan.device_bytes, num_bytes) == (device_bytes, cache_bytes)
    assert num_bytes <= budget - plan.device_bytes
    assert all(
        place.placement is Placement.RESIDENT
        for path, place in plan.places.items()
        if "attention" in path
    )


def test_no_more_leaves_than_was_asked_for() -> None:
    plan, num_bytes = plan_mixture(4100, "auto", patterns=("layers.0.mlp",), mode="compute")
    assert (plan.device_bytes, num_bytes) == (4000, 100)
    plan, num_bytes = plan_mixture(9000, "auto", patterns=("layers.0.mlp",), mode="compute")
    assert (plan.device_bytes, num_bytes) == (4000, 500)


def test_a_failed_step_leaves_the_cache_whole(
    tiny_model: Callable[[str], Path],
    room_for: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step's kernels raise is raised to the host, and its requests run again."""
    folder = tiny_model("qwen3_moe")
    ours = run_once(make_config(folder, None))
    room_for(3)
    with opened(make_config(folder, "auto")) as engine:
        accelerator: Any = engine.lane.hands.accelerator
        inner = accelerator.kernels.inner
        combine, calls = inner.combine_experts, []

        def failing(parts: Any, weights: Any, experts: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) in (20, 33):
                raise RuntimeError("for once")
            return combine(parts, weights, experts)  # type: ignore[no-any-return]

        monkeypatch.setattr(inner, "combine_experts", failing)
        run = generate(engine, 3, 40)
    assert len(calls) > 33
    assert run.trace == ours.trace
    assert run.counts["expert_swaps"] > 0


# ------------------------------------------------------------------------------------- the slots


class Slots:
    """One layer of two experts, of which the accelerator has room for one: at first number 0, and
    after a step that used number 1 a lot that one."""

    def __init__(self) -> None:
        self.lane = Lane()
        place = Place(0, lambda _: 0)
        gate_up, down = (
            [self.lane.kernels.place([torch.randn(64, 64)], False, place) for _ in range(2)]
            for _ in range(2)
        )
        self.key: list[Any] = gate_up
        layer = HostExperts(gate_up, [w.host for w in gate_up], [w.host for w in down])
        self.slots = ExpertSlots(self.lane.device, self.lane.kernels.host, [layer], [1])
        assert self.slots.cached(0) == {0}

    def use(self, expert: int) -> None:
        self.slots.begin_step(64)
        self.slots.note_use(self.key, 64, 1, torch.full((64, 1), expert))
        self.lane.device.synchronize()


@pytest.fixture
def slots() -> Iterator[Slots]:
    made = Slots()
    yield made
    made.lane.close()


@pytest.mark.parametrize("stream", ["compute", "host"])
def test_nothing_changes_while_something_computes(slots: Slots, stream: str) -> None:
    """Calls read who has an expert when they run: a slot is overwritten when they have."""
    slots.use(1)
    queue = slots.lane.device.compute if stream == "compute" else slots.lane.kernels.host.stream
    gate, seen = threading.Event(), []

    def compute() -> None:
        assert gate.wait(20)
        seen.append(slots.slots.cached(0))

    queue.launch("computes", compute, 0.0)
    threading.Timer(0.1, gate.set).start()
    slots.slots.begin_step(64)
    assert gate.is_set()
    assert slots.slots.cached(0) == set(), "one has left, and the other is on its way"
    slots.slots.begin_step(64)
    assert slots.slots.cached(0) == {1}
    slots.lane.device.synchronize()
    assert seen == [{0}]


def test_an_expert_is_there_before_it_is_used(slots: Slots) -> None:
    """Calls are not told of whose memory they read: nothing else would notice."""
    slots.use(1)
    gate = threading.Event()
    slots.lane.device.copy_in.launch("slow link", lambda: gate.wait(20), 0.0)
    slots.slots.begin_step(64)
    assert slots.slots.cached(0) == set()
    threading.Timer(0.1, gate.set).start()
    slots.slots.begin_step(64)
    assert gate.is_set() and slots.slots.cached(0) == {1}
    there = slots.slots._layers[0].device_gate_up[1]
    assert torch.equal(there.panels, slots.key[1].host.panels)


def test_a_change_is_made_after_a_failure(slots: Slots) -> None:
    """What was decided when something failed is not forgotten: the policy counts it as done."""

    def fail() -> None:
        raise RuntimeError("for once")

    slots.use(1)
    slots.lane.device.compute.launch("fails", fail, 0.0)
    for failing in (slots.slots.begin_step, lambda _: slots.lane.device.synchronize()):
        with pytest.raises(DeviceError, match="for once"):
            failing(64)
    slots.slots.begin_step(64)
    slots.slots.begin_step(64)
    assert slots.slots.cached(0) == {1}
    assert slots.slots.counts()["expert_swaps"] == 1
