"""From a plan of places to the parameters of a model, and from a loaded model to its streamer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from ambidex.layers.module import Experts, Matrix, Parameter, Place, Table, submodules
from ambidex.layers.moe import MoE
from ambidex.memory.cost_model import CostModel
from ambidex.memory.expert_cache import CACHED_EXPERTS, expert_capacities
from ambidex.memory.judge import typical_mix
from ambidex.memory.model_shape import KVShape, ModelShape, WeightShape, form_of
from ambidex.memory.operations import StepLoad
from ambidex.memory.placement import (
    Placement,
    WeightKind,
    WeightPlace,
    describe,
    plan_placement,
)
from ambidex.memory.planner import CACHE_DIVISOR, plan_with_cache
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.split import SplitTable, streamed_rows
from ambidex.weights.expert_slots import ExpertSlots, HostExperts
from ambidex.weights.placed_weight import Ordered, PlacedWeight, ring_bytes
from ambidex.weights.streamer import Streamer

if TYPE_CHECKING:
    from ambidex.config import EngineConfig, OffloadConfig
    from ambidex.device.base import Accelerator
    from ambidex.kv.block import KVGroup
    from ambidex.memory.rates import ComputeRate, LinkRate
    from ambidex.memory.step_memory import StepSizes
    from ambidex.models.registry import CausalLM
    from ambidex.runner.hands import Hands

logger = logging.getLogger(__name__)


def placed_weights(model: CausalLM) -> list[Ordered]:
    """Weights with rows on the host, in the order of execution."""
    found = []
    for path, parameter in model.named_parameters():
        is_head = path.startswith("head.")
        if isinstance(parameter, Table):
            if not parameter.has_head:
                continue  # It is looked up, on the host.
            is_head = True
        # Experts of the host are computed there.
        if isinstance(parameter.data, PlacedWeight):
            found.append(Ordered(parameter.data, group_of(path), is_head))
    # A tied head is the last to be multiplied with, though its table comes first.
    return sorted(found, key=lambda item: item.is_head)


def group_of(path: str) -> str:
    """The layer that a parameter belongs to: ``layers.3``; its module where it is in none."""
    first, *rest = path.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


def host_weight_bytes(parameter: Parameter) -> int:
    """Bytes of a loaded parameter in the host's memory, beside an accelerator."""
    data = parameter.data if isinstance(parameter.data, list) else [parameter.data]
    return sum(weight.host_bytes for weight in data if isinstance(weight, PlacedWeight))


def ring_groups(offload: OffloadConfig) -> int:
    """Layers that the ring of streamed weights has room for: the one in use and those ahead."""
    ahead = 1 if offload.prefetch_step is None else offload.prefetch_step
    return 1 + (ahead if offload.is_async else 0)


def start_streaming(hands: Hands, model: CausalLM, offload: OffloadConfig, max_rows: int) -> int:
    """Tell the kernels of what is on the host, and make the ring that it is streamed through;
    returns the ring's bytes."""
    placed, accelerator = hands.placed, hands.accelerator
    assert placed is not None
    assert accelerator is not None
    order = placed_weights(model)
    size = ring_bytes(order, ring_groups(offload), max_rows)
    streamer = None
    if size:
        accelerator.ledger.reserve("staging", "streamed weights", size)
        streamer = Streamer(accelerator, size, offload.is_async)
    placed.set_order(order, streamer)
    return size


def start_expert_cache(hands: Hands, model: CausalLM, mode: str, cache_bytes: int) -> int:
    """Cache experts of the host on the accelerator, in up to ``cache_bytes`` of its free memory;
    ``mode``: auto, static or off. Returns the bytes taken."""
    placed, accelerator = hands.placed, hands.accelerator
    assert placed is not None
    assert accelerator is not None
    order = {id(parameter): i for i, (_, parameter) in enumerate(model.named_parameters())}
    mixtures = [module for module in submodules(model) if isinstance(module, MoE)]
    layers = [
        HostExperts(
            module.gate_up.data,
            [weight.host for weight in module.gate_up.data],
            [weight.host for weight in module.down.data],
        )
        for module in sorted(mixtures, key=lambda module: order[id(module.gate_up)])
        if all(is_on_host(weight) for weight in (*module.gate_up.data, *module.down.data))
    ]
    if mode == "off" or not layers:
        return 0
    num_experts = min(len(layer.gate_up) for layer in layers)
    capacities = expert_capacities([layer.slot_bytes for layer in layers], num_experts, cache_bytes)
    size = ExpertSlots.reserved_bytes(layers, capacities)
    if size:
        accelerator.ledger.reserve("weights", CACHED_EXPERTS, size)
        slots = ExpertSlots(
            accelerator, placed.host, layers, capacities, is_static=mode == "static"
        )
        placed.set_experts(slots)
    return size


def is_on_host(weight: object) -> bool:
    """Whether the host computes all of a loaded matrix."""
    return isinstance(weight, PlacedWeight) and weight.resident is None


def accelerated_profile(accelerator: Accelerator, num_threads: int) -> HardwareProfile:
    """The machine as an accelerator's own rates have it. Its clock lets copies and whoever reads
    the same memory go on side by side, each at its full rate."""
    rate, host_rate = accelerator.rate, accelerator.host_rate(num_threads)
    link = accelerator.link
    return HardwareProfile(
        name=accelerator.name,
        host=_processor("host", host_rate, link, num_threads),
        device=_processor(accelerator.name, rate, link),
        link=link,
        link_back=link,
        sync_s=link.latency_s,
        origin="measured",
    )


def _processor(name: str, rate: ComputeRate, link: LinkRate, num_threads: int = 0) -> Processor:
    return Processor(
        name,
        0,
        rate.bytes_per_s,
        {"float32": ProductRate(((1, rate.flops),))},
        launch_s=rate.launch_s,
        num_threads=num_threads,
        shared_bytes_per_s=rate.bytes_per_s + link.bytes_per_s,
    )


def built_shape(
    model: CausalLM,
    groups: Sequence[KVGroup],
    sizes: StepSizes,
    num_bytes: Mapping[str, int],
    fixed: Mapping[str, int],
) -> ModelShape:
    """The sizes of a model that was built; ``num_bytes``: of its parameters as they will be held,
    by path, and ``fixed`` of them what every part of one has."""
    weights = []
    for path, parameter in model.named_parameters():
        rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
        kind = _kind(parameter)
        is_expert = kind is WeightKind.EXPERTS
        num_experts = max(sizes.num_experts, 1) if is_expert else 1
        weights.append(
            WeightShape(
                path=path,
                rows=rows // num_experts,
                columns=columns,
                kind=kind,
                form=form_of(8 * num_bytes[path] / (rows * columns)),
                num_bytes=num_bytes[path],
                fixed_bytes=fixed.get(path, 0),
                num_experts=num_experts,
                num_chosen=sizes.num_chosen if is_expert else 1,
                is_paired=kind is WeightKind.MATRIX and _num_rows(parameter) < rows,
            )
        )
    kv = tuple(
        KVShape(len(g.layers), g.num_kv_heads, g.head_dim, g.bytes_per_token, g.window)
        for g in groups
    )
    return ModelShape(
        name="",
        model_type="",
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        vocab_size=sizes.vocab,
        num_heads=sizes.query // groups[0].head_dim,
        head_dim=groups[0].head_dim,
        weights=tuple(weights),
        kv=kv,
        max_positions=None,
        num_experts=sizes.num_experts,
        num_chosen=sizes.num_chosen,
    )


@dataclass(slots=True)
class Places:
    """``by_path``: of the parameters that are not all on the accelerator. ``num_bytes``: planned
    for each memory, by its ledger's name."""

    by_path: dict[str, Place]
    num_bytes: dict[str, int]
    staging_bytes: int
    notes: list[str]
    #: Of the accelerator's memory, for copies of the host's experts.
    cache_bytes: int = 0
    #: Seconds of a step; None without an accelerator.
    predict: Callable[[StepLoad], float] | None = None


def plan_places(
    config: EngineConfig,
    hands: Hands,
    model: CausalLM,
    names: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    other_bytes: int,
    host_other_bytes: int,
    shape: ModelShape,
    kv_room: int,
) -> Places:
    """Decide where weights go. ``names``: of the checkpoint, by path; ``sizes``: bytes by path;
    ``other_bytes``: what the lane's own memory needs beside weights, staging and ``kv_room`` for
    the KV cache, and ``host_other_bytes`` the host's; ``shape``: of the same model (see
    :func:`built_shape`). Raises OutOfMemory and OptionError."""
    host, total = hands.host.ledger, sum(sizes.values())
    accelerator = hands.accelerator
    if accelerator is None:
        return Places({}, {host.name: total}, 0, [])
    shape = replace(
        shape,
        weights=tuple(replace(w, names=tuple(names[w.path])) for w in shape.weights),
    )
    profile = accelerated_profile(accelerator, hands.host.num_threads)
    mix = typical_mix(shape, config.scheduler, kv_room)
    budget = max(accelerator.ledger.free_bytes - other_bytes - kv_room, 0)
    host_budget = max(host.free_bytes - host_other_bytes, 0)
    share = accelerator.ledger.capacity_bytes // CACHE_DIVISOR
    plan, cache_bytes = plan_with_cache(
        shape.modules,
        lambda num_bytes: plan_placement(
            shape, num_bytes, host_budget, config.offload, profile, mix
        ),
        budget,
        share,
        config.offload.moe_expert_cache,
    )
    parameters = dict(model.named_parameters())
    places = {
        path: _place(place, _num_rows(parameters[path]), plan.split_table)
        for path, place in plan.places.items()
        if place.placement is not Placement.RESIDENT
    }
    num_bytes = {host.name: plan.host_bytes, accelerator.ledger.name: plan.device_bytes}
    for line in describe(plan):
        logger.info("%s", line)
    notes = [*plan.notes, *plan.warnings]
    table = plan.split_table or SplitTable(((1, 0.0),))
    model_of_steps = CostModel(
        profile,
        shape,
        plan.places,
        link_limit=config.offload.link_limit_bytes_per_s,
        is_async=config.offload.is_async,
        ring_bytes=plan.staging_bytes,
    )
    return Places(
        places,
        num_bytes,
        plan.staging_bytes,
        notes,
        cache_bytes,
        lambda load: model_of_steps.seconds(load, table),
    )


def _num_rows(parameter: Parameter) -> int:
    """Outputs; those of a gate and what it is multiplied with are counted once."""
    paired = isinstance(parameter, Matrix) and parameter.is_paired
    return parameter.shape[0] // (2 if paired else 1)


def _kind(parameter: Parameter) -> WeightKind:
    if isinstance(parameter, Experts):
        return WeightKind.EXPERTS
    if isinstance(parameter, Table):
        return WeightKind.TIED if parameter.has_head else WeightKind.TABLE
    return WeightKind.MATRIX if isinstance(parameter, Matrix) else WeightKind.VECTOR


def _place(place: WeightPlace, rows: int, table: SplitTable | None) -> Place:
    if place.placement is Placement.STREAM:
        return Place(0, lambda _: rows)
    if place.placement is Placement.HOST:
        return Place(0, lambda _: 0)
    assert table is not None
    on_host = rows - place.resident_rows
    return Place(
        place.resident_rows,
        lambda num_tokens: streamed_rows(table.share(num_tokens), on_host),
    )


def place_parameters(model: CausalLM, places: dict[str, Place]) -> None:
    """Say where parameters go when they are loaded; ``places``: by path."""
    table = dict(model.named_parameters())
    for path, place in places.items():
        parameter = table[path]
        assert isinstance(parameter, Matrix | Experts), path
        cast(Matrix, parameter).place = place
