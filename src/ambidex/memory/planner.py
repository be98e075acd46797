"""What fits, where it lies and how fast it will be, before anything is loaded: pure arithmetic.

The accounts are those of the ledgers of an engine that runs: weights, KV cache, activations,
captured steps, staging, runtime. (A draft model would be another: there is none yet.) Sizes come
from the functions that loading uses, and speed from the cost model, so what is printed here is what
an engine does.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ambidex.config import EngineConfig
from ambidex.errors import OptionError, OutOfMemory
from ambidex.memory.cost_model import CostModel, StepTime
from ambidex.memory.judge import TYPICAL_PROMPT, typical_mix
from ambidex.memory.ledger import HOST, Ledger, MemorySnapshot, format_bytes, format_seconds
from ambidex.memory.model_shape import ModelShape
from ambidex.memory.operations import StepLoad, prefill_steps
from ambidex.memory.placement import ModuleSize, Placement, PlacementPlan, plan_placement
from ambidex.memory.profile import HardwareProfile
from ambidex.memory.proposals import changes
from ambidex.memory.sizing import (
    ASKED_KV_SHARE,
    DEFAULT_KV_SHARE,
    GroupSize,
    KVSize,
    sequence_tokens,
    size_kv_cache,
)
from ambidex.memory.split import SplitTable
from ambidex.memory.step_memory import (
    OF_KV,
    StepSizes,
    activation_bytes,
    check_room_for_weights,
    comfortable_kv_bytes,
    graph_bytes,
    graph_rows,
    plan_beside_cache,
    reserve_host_part,
    room_for_kv,
    rope_bytes,
)
from ambidex.memory.weight_places import WeightKind

__all__ = ["Plan", "PlanRefused", "Prediction", "Proposal", "make_plan", "plan_with_cache"]

#: What the engine's process holds before anything is loaded: torch and its libraries.
HOST_RUNTIME_BYTES = 220 << 20
#: What a GPU's context and its libraries take of the GPU's memory; a simulated one takes nothing.
DEVICE_RUNTIME_BYTES = 512 << 20
#: This part of the accelerator's memory is for copies of experts, where some are on the host.
CACHE_DIVISOR = 10
#: Tokens of an answer where nobody says otherwise.
TYPICAL_OUTPUT = 128
#: Most ways out of a plan that does not fit.
MAX_PROPOSALS = 3


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one kind of step or request."""

    #: For people: "a token of 1 request".
    name: str
    seconds: float
    #: What holds it up, in words; see ``cost_model``.
    limit: str
    #: How long each resource is busy meanwhile.
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is known before loading."""

    shape: ModelShape
    profile: HardwareProfile
    #: None: there is one memory.
    placement: PlacementPlan | None
    #: Ledgers as planned, the host's first.
    memories: tuple[MemorySnapshot, ...]
    kv: KVSize
    #: Requests of the longest context that the KV cache holds.
    max_concurrency: float
    #: ttft_1, tpot_1: of one request alone; ttft_full, tpot_full: of ``full_concurrency``.
    predictions: Mapping[str, Prediction]
    tokens_per_s_1: float
    tokens_per_s_full: float
    full_concurrency: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    #: Tokens per step -> the share of the host's rows that is streamed.
    split_table: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Options with which it fits: they were planned."""

    flags: str
    predictions: Mapping[str, Prediction]


class PlanRefused(OutOfMemory):
    """It does not fit, for ``reason``; ``proposals`` do. Its text has both."""

    def __init__(
        self, message: str, proposals: Sequence[Proposal] = (), reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.proposals = tuple(proposals)
        self.reason = message if reason is None else reason

    def __reduce__(self) -> tuple[object, ...]:
        return PlanRefused, (str(self), self.proposals, self.reason)


def make_plan(
    shape: ModelShape,
    profile: HardwareProfile,
    config: EngineConfig,
    *,
    prompt_len: int = TYPICAL_PROMPT,
    output_len: int = TYPICAL_OUTPUT,
    reshape: Callable[[EngineConfig], ModelShape] | None = None,
) -> Plan:
    """Plan ``shape`` on ``profile`` with the options of ``config``; with ``--device cpu`` on the
    host alone. Speed is predicted for prompts of ``prompt_len`` tokens and answers of
    ``output_len``.

    Raises :class:`PlanRefused` where it does not fit, with up to three sets of options that were
    planned and do, and :class:`OptionError` where options contradict the model or each other.
    ``reshape(config)``: the shape of the same model with other options (of weights or KV cache);
    without it one is reckoned.
    """
    alone = replace(profile, device=None, link=None, link_back=None)
    # Of a machine that was described, nobody said that it would be used without its accelerator.
    is_left = profile.device and profile.origin == "measured" and config.device.device != "cpu"

    def plan(config: EngineConfig, shape: ModelShape) -> Plan:
        machine = alone if config.device.device == "cpu" else profile
        return _plan(shape, machine, config, prompt_len, output_len)

    try:
        return plan(config, shape)
    except PlanRefused:
        raise
    except OutOfMemory as error:
        found: list[Proposal] = []
        for together in (False, True):
            # Several changes together only where none is enough.
            for flags, other, other_shape in changes(config, shape, plan, reshape, together):
                with contextlib.suppress(OutOfMemory, OptionError):
                    found.append(Proposal(flags, plan(other, other_shape).predictions))
                if len(found) == MAX_PROPOSALS:
                    break
            if found:
                break
        if not found and is_left:
            cpu = replace(config, device=replace(config.device, device="cpu"))
            with contextlib.suppress(OutOfMemory, OptionError):
                found.append(Proposal("--device cpu", plan(cpu, shape).predictions))
        raise PlanRefused(_refusal(str(error), found), found, str(error)) from None


def fits(shape: ModelShape, profile: HardwareProfile, config: EngineConfig) -> bool:
    """Whether there is a plan, without a look for a way out where there is none."""
    try:
        _plan(shape, profile, config, TYPICAL_PROMPT, TYPICAL_OUTPUT)
    except OutOfMemory:
        return False
    return True


def _refusal(reason: str, proposals: Sequence[Proposal]) -> str:
    if not proposals:
        return (
            f"{reason} No quantisation, shorter context, larger offload or smaller KV cache that "
            "was tried fits either: it takes a machine with more memory, or a smaller model."
        )
    lines = [
        "{} (first token {}, then {} a token)".format(
            proposal.flags,
            *(format_seconds(proposal.predictions[key].seconds) for key in ("ttft_1", "tpot_1")),
        )
        for proposal in proposals
    ]
    return f"{reason} These were planned, and fit: {'; '.join(lines)}."


# --- one plan ---------------------------------------------------------------------------------


def _plan(
    shape: ModelShape,
    profile: HardwareProfile,
    config: EngineConfig,
    prompt_len: int,
    output_len: int,
) -> Plan:
    limits, cache = config.scheduler, config.cache
    length, is_given = _longest(shape, config)
    sizes = StepSizes.of_shape(shape, (profile.device or profile.host).gathers_kv)
    groups = [GroupSize(group.bytes_per_token, group.window) for group in shape.kv]

    def step_bytes(length: int) -> int:
        return activation_bytes(sizes, limits, length, chooses=profile.device is None)

    # Beside an accelerator: tokens are chosen there, and attention has no part in it.
    of_host = replace(sizes, gathers_kv=False)
    host_step_bytes = activation_bytes(of_host, limits, length)

    host = Ledger(HOST, profile.host.memory_bytes)
    host.reserve("runtime", "runtime", min(HOST_RUNTIME_BYTES, host.capacity_bytes))
    ledgers = [host]
    placement: PlacementPlan | None = None
    lane, beside, share = host, 0, DEFAULT_KV_SHARE
    captured: list[int] = []
    if profile.device is not None:
        lane = _device_ledger(profile, config)
        ledgers.append(lane)
        if not config.enforce_eager and config.offload.is_async:
            captured = graph_rows(limits.max_num_seqs)
        beside = graph_bytes(sizes, captured) + rope_bytes(shape, length)
        share = ASKED_KV_SHARE
        kv_room = room_for_kv(groups, cache, limits, length, is_given)
        least_steps = step_bytes(length if is_given else 1)
        unpacked = _unpacked_bytes(shape, config)
        needs = {
            "the largest step": least_steps,
            "captured steps (none with --enforce-eager)": graph_bytes(sizes, captured),
            "tables of positions": rope_bytes(shape, length),
            "decompressing a weight": unpacked,
            OF_KV: kv_room,
        }
        check_room_for_weights(lane, needs, sizes, limits)
        comfortable = comfortable_kv_bytes(
            config.offload,
            shape.weight_bytes,
            lane.free_bytes - sum(needs.values()),
            lane.capacity_bytes,
            host.free_bytes - host_step_bytes,
        )
        free_bytes = lane.free_bytes - sum(needs.values()) + kv_room
        host_bytes = max(host.free_bytes - host_step_bytes, 0)
        expert_share = lane.capacity_bytes // CACHE_DIVISOR

        def place(kv_room: int) -> tuple[PlacementPlan, int]:
            mix = typical_mix(shape, limits, kv_room)
            return plan_with_cache(
                shape.modules,
                lambda num_bytes: plan_placement(
                    shape, num_bytes, host_bytes, config.offload, profile, mix
                ),
                max(free_bytes - kv_room, 0),
                expert_share,
                config.offload.moe_expert_cache,
            )

        more = room_for_kv(groups, cache, limits, length, is_given, comfortable)
        placement, cache_bytes = plan_beside_cache(place, more, kv_room)
        host.reserve("weights", "weights", placement.host_bytes)
        lane.reserve("weights", "weights", placement.device_bytes + cache_bytes)
        lane.reserve("staging", "streamed weights", placement.staging_bytes)
        if placement.streamed_bytes:
            lane.reserve("staging", "a decompressed weight", unpacked)
    else:
        _reserve_weights(host, shape, step_bytes(1))
    of_memory = "host memory" if lane is host else lane.name
    kv = size_kv_cache(
        groups,
        lane.free_bytes - beside,
        step_bytes,
        cache,
        limits,
        length,
        is_given,
        of_memory,
        share,
    )
    if lane is not host:
        lane.reserve("graphs", "captured steps", graph_bytes(sizes, captured))
        lane.reserve("activations", "tables of positions", rope_bytes(shape, kv.max_model_len))
        reserve_host_part(host, host_step_bytes)
    lane.reserve("activations", "steps", step_bytes(kv.max_model_len))
    lane.reserve(
        "kv_cache",
        "kv_cache",
        sum(
            (count + 1) * cache.block_size * group.bytes_per_token
            for count, group in zip(kv.num_blocks, groups, strict=True)
        ),
    )

    def at_once(length: int) -> float:
        """Requests of so many tokens that the KV cache holds."""
        return min(
            count * cache.block_size / sequence_tokens(group, length, _chunk(config), 0)
            for count, group in zip(kv.num_blocks, groups, strict=True)
        )

    notes, warnings = list(shape.notes), []
    if kv.note:
        notes.append(kv.note)
    prompt = max(min(prompt_len, kv.max_model_len - 1), 1)
    output = max(min(output_len, kv.max_model_len - prompt), 1)
    if (prompt, output) != (prompt_len, output_len):
        warnings.append(
            f"A prompt of {prompt_len:,} and an answer of {output_len:,} tokens do not fit into "
            f"the context of {kv.max_model_len:,}: speed is that of {prompt:,} and {output:,}."
        )
    full = max(min(limits.max_num_seqs, int(at_once(prompt + output))), 1)
    if placement is not None:
        notes += placement.notes
        warnings += placement.warnings
    predictions = _predict(shape, profile, config, placement, prompt, output, full)
    table = None if placement is None else placement.split_table
    return Plan(
        shape=shape,
        profile=profile,
        placement=placement,
        memories=tuple(ledger.snapshot() for ledger in ledgers),
        kv=kv,
        max_concurrency=at_once(kv.max_model_len),
        predictions=predictions,
        tokens_per_s_1=1 / predictions["tpot_1"].seconds,
        tokens_per_s_full=full / predictions["tpot_full"].seconds,
        full_concurrency=full,
        notes=tuple(notes),
        warnings=tuple(warnings),
        split_table=() if table is None else table.points,
    )


def _longest(shape: ModelShape, config: EngineConfig) -> tuple[int, bool]:
    """The longest context to plan for, and whether it was asked for."""
    asked, limit = config.model.max_model_len, shape.max_positions
    if asked is None and limit is None:
        raise OptionError(
            f"The configuration of {shape.name} does not say how long a context may be "
            "(max_position_embeddings). Give --max-model-len."
        )
    if asked is None:
        assert limit is not None
        return min(limit, config.model.max_model_len_cap or limit), False
    if limit is not None and asked > limit:
        raise OptionError(
            f"--max-model-len {asked} is more than the {limit} tokens of {shape.name} "
            f"(max_position_embeddings and rope scaling). Ask for at most {limit}, or correct the "
            "field with --hf-overrides."
        )
    return asked, True


def _chunk(config: EngineConfig) -> int:
    return config.scheduler.max_num_batched_tokens


def _device_ledger(profile: HardwareProfile, config: EngineConfig) -> Ledger:
    assert profile.device is not None
    share = int(profile.device.memory_bytes * config.device.gpu_memory_utilization)
    capacity = min(share, config.device.gpu_memory_limit_bytes or share)
    ledger = Ledger(profile.device.name, capacity)
    if not profile.device.name.startswith("sim"):
        ledger.reserve("runtime", "context", min(DEVICE_RUNTIME_BYTES, capacity))
    return ledger


def _unpacked_bytes(shape: ModelShape, config: EngineConfig) -> int:
    """Of the largest weight that may be streamed compressed."""
    if not config.offload.compress:
        return 0
    weights = (w for w in shape.weights if w.kind is WeightKind.MATRIX and w.form == "bfloat16")
    return max((weight.num_bytes for weight in weights), default=0)


def _reserve_weights(host: Ledger, shape: ModelShape, step_bytes: int) -> None:
    if shape.weight_bytes > host.free_bytes:
        raise OutOfMemory(
            f"The weights of {shape.name} take {format_bytes(shape.weight_bytes)}, "
            f"{format_bytes(host.free_bytes)} of host memory are free, and a step needs "
            f"{format_bytes(step_bytes)} beside them."
        )
    host.reserve("weights", "weights", shape.weight_bytes)


def plan_with_cache(
    modules: Sequence[ModuleSize],
    plan_within: Callable[[int], PlacementPlan],
    budget: int,
    share: int,
    mode: str,
) -> tuple[PlacementPlan, int]:
    """A plan for ``budget`` bytes, and what of them is for copies of the host's experts: up to
    ``share``.

    Where a plan leaves less, and ``mode`` is auto, more experts leave the accelerator to make room:
    a cache of those that are used most serves more tokens than experts of some layers. Other
    weights stay where they are.
    """
    plan = plan_within(budget)
    experts = [module for module in modules if module.is_expert]
    if mode == "off" or not _host_bytes(plan, experts):
        return plan, 0
    if mode == "auto":
        others = [module.path for module in modules if not module.is_expert]
        with contextlib.suppress(OutOfMemory):  # What was asked for allows of no less.
            smaller = plan_within(max(budget - share, 0))
            if all(smaller.places[path] == plan.places[path] for path in others):
                plan = smaller
    left = budget - plan.device_bytes - plan.staging_bytes
    return plan, min(share, left, _host_bytes(plan, experts))


def _host_bytes(plan: PlacementPlan, modules: Sequence[ModuleSize]) -> int:
    """Of weights that are as a whole in one memory."""
    places = plan.places
    on_host = (m for m in modules if places[m.path].placement is not Placement.RESIDENT)
    return sum(module.num_bytes for module in on_host)


# --- speed ------------------------------------------------------------------------------------


def _predict(
    shape: ModelShape,
    profile: HardwareProfile,
    config: EngineConfig,
    placement: PlacementPlan | None,
    prompt: int,
    output: int,
    full: int,
) -> dict[str, Prediction]:
    offload = config.offload
    model = CostModel(
        profile,
        shape,
        None if placement is None else placement.places,
        link_limit=offload.link_limit_bytes_per_s,
        is_async=offload.is_async,
        ring_bytes=None if placement is None else placement.staging_bytes,
        compress=offload.compress,
    )
    shares = placement.split_table if placement is not None else None
    shares = shares or SplitTable(((1, 0.0),))
    #: Half of the answer is there, on average.
    context = prompt + output // 2

    def predict(name: str, loads: Iterable[StepLoad]) -> Prediction:
        # Requests that are alike have the same steps: each kind is reckoned once.
        steps = Counter(loads)
        found = [(model.step(load, shares), number) for load, number in steps.items()]
        return _sum(name, found)

    def many(number: int) -> str:
        return "1 request" if number == 1 else f"{number:,} requests"

    return {
        "ttft_1": predict(
            f"first token of a prompt of {prompt:,} tokens, {many(1)}",
            prefill_steps(prompt, _chunk(config), 1),
        ),
        "tpot_1": predict(f"a token, {many(1)}", [StepLoad(1, 1, context)]),
        "ttft_full": predict(
            f"last first token of prompts of {prompt:,} tokens, {many(full)} at once",
            prefill_steps(prompt, _chunk(config), full),
        ),
        "tpot_full": predict(f"a token of each, {many(full)}", [StepLoad(full, 1, context)]),
    }


def _sum(name: str, steps: Sequence[tuple[StepTime, int]]) -> Prediction:
    """Steps one after the other, each so many times."""
    parts: dict[str, float] = {}
    limits: dict[str, float] = {}
    for step, number in steps:
        limits[step.limit] = limits.get(step.limit, 0.0) + number * step.seconds
        for resource, seconds in step.parts.items():
            parts[resource] = parts.get(resource, 0.0) + number * seconds
    limit = max(limits, key=lambda each: limits[each])
    return Prediction(name, sum(limits.values()), limit, parts)
