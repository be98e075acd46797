"""From a plan of places to the parameters of a model, and from a loaded model to its streamer."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ambidex.errors import OutOfMemory
from ambidex.layers.module import Experts, Matrix, Parameter, Place, Table, submodules
from ambidex.layers.moe import MoE
from ambidex.memory.expert_cache import expert_capacities
from ambidex.memory.placement import (
    ModuleSize,
    Placement,
    PlacementPlan,
    Rates,
    WeightKind,
    WeightPlace,
    describe,
    plan_placement,
)
from ambidex.memory.split import streamed_rows
from ambidex.weights.expert_slots import ExpertSlots, HostExperts
from ambidex.weights.placed_weight import Ordered, PlacedWeight, ring_bytes
from ambidex.weights.streamer import Streamer

if TYPE_CHECKING:
    from ambidex.config import EngineConfig, OffloadConfig
    from ambidex.models.registry import CausalLM
    from ambidex.runner.hands import Hands

logger = logging.getLogger(__name__)

#: This part of the accelerator's memory is for copies of experts, where some are on the host.
CACHE_DIVISOR = 10


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
        accelerator.ledger.reserve("weights", "cached experts", size)
        slots = ExpertSlots(
            accelerator, placed.host, layers, capacities, is_static=mode == "static"
        )
        placed.set_experts(slots)
    return size


def is_on_host(weight: object) -> bool:
    """Whether the host computes all of a loaded matrix."""
    return isinstance(weight, PlacedWeight) and weight.resident is None


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


def plan_places(
    config: EngineConfig,
    hands: Hands,
    model: CausalLM,
    names: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    other_bytes: int,
    host_other_bytes: int,
) -> Places:
    """Decide where weights go. ``names``: of the checkpoint, by path; ``sizes``: bytes by path;
    ``other_bytes``: what the lane's own memory needs beside weights and staging, and
    ``host_other_bytes`` the host's. Raises OutOfMemory and OptionError."""
    host, total = hands.host.ledger, sum(sizes.values())
    accelerator = hands.accelerator
    if accelerator is None:
        return Places({}, {host.name: total}, 0, [])
    rate, host_rate = accelerator.rate, accelerator.host_rate(hands.host.num_threads)
    rates = Rates(
        link_bytes_per_s=accelerator.link.bytes_per_s,
        host_bytes_per_s=host_rate.bytes_per_s,
        host_flops=host_rate.flops,
        device_bytes_per_s=rate.bytes_per_s,
        device_flops=rate.flops,
    )
    parameters = dict(model.named_parameters())
    modules = [
        ModuleSize(path, sizes[path], _num_rows(parameter), _kind(parameter), tuple(names[path]))
        for path, parameter in parameters.items()
    ]
    budget = max(accelerator.ledger.free_bytes - other_bytes, 0)
    host_budget = max(host.free_bytes - host_other_bytes, 0)
    share = accelerator.ledger.capacity_bytes // CACHE_DIVISOR
    plan, cache_bytes = plan_with_cache(
        modules,
        lambda num_bytes: plan_placement(modules, num_bytes, host_budget, config.offload, rates),
        budget,
        share,
        config.offload.moe_expert_cache,
    )
    places = {
        path: _place(place, parameters[path], sizes[path], rates)
        for path, place in plan.places.items()
        if place.placement is not Placement.RESIDENT
    }
    num_bytes = {host.name: plan.host_bytes, accelerator.ledger.name: plan.device_bytes}
    for line in describe(plan):
        logger.info("%s", line)
    notes = [*plan.notes, *plan.warnings]
    return Places(places, num_bytes, plan.staging_bytes, notes, cache_bytes)


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


def _place(place: WeightPlace, parameter: Parameter, num_bytes: int, rates: Rates) -> Place:
    rows = _num_rows(parameter)
    if place.placement is Placement.STREAM:
        return Place(0, lambda _: rows)
    if place.placement is Placement.HOST:
        return Place(0, lambda _: 0)
    on_host = rows - place.resident_rows
    row_bytes = num_bytes / rows
    row_flops = 2.0 * math.prod(parameter.shape) / rows
    return Place(
        place.resident_rows,
        lambda num_tokens: streamed_rows(num_tokens, on_host, row_bytes, row_flops, rates),
    )


def place_parameters(model: CausalLM, places: dict[str, Place]) -> None:
    """Say where parameters go when they are loaded; ``places``: by path."""
    table = dict(model.named_parameters())
    for path, place in places.items():
        parameter = table[path]
        assert isinstance(parameter, Matrix | Experts), path
        cast(Matrix, parameter).place = place
