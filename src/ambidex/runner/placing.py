"""From a plan of places to the parameters of a model, and from a loaded model to its streamer."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ambidex.layers.module import Experts, Matrix, Parameter, Place, Table, submodules
from ambidex.layers.moe import MoE
from ambidex.memory.expert_cache import expert_capacities
from ambidex.weights.expert_slots import ExpertSlots, HostExperts
from ambidex.weights.placed import Ordered, PlacedWeight, ring_bytes
from ambidex.weights.streamer import Streamer

if TYPE_CHECKING:
    from ambidex.config import EngineConfig, OffloadConfig
    from ambidex.models.registry import CausalLM
    from ambidex.runner.hands import Hands


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
    layers = [
        HostExperts(
            module.gate_up.data,
            [weight.host for weight in module.gate_up.data],
            [weight.host for weight in module.down.data],
        )
        for module in submodules(model)
        if isinstance(module, MoE)
        and all(is_on_host(weight) for weight in (*module.gate_up.data, *module.down.data))
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


def plan_places(
    config: EngineConfig, hands: Hands, model: CausalLM, sizes: dict[str, int], step_bytes: int
) -> Places:
    """Decide where weights go."""
    host, total = hands.host.ledger.name, sum(sizes.values())
    if hands.accelerator is None:
        return Places({}, {host: total}, 0, [])
    places, on_host = {}, 0
    groups: dict[str, int] = {}
    offload = config.offload
    for path, parameter in model.named_parameters():
        if not isinstance(parameter, Matrix | Experts):
            continue
        if any(fnmatch.fnmatch(path, pattern) for pattern in offload.patterns):
            rows = parameter.shape[0] // (2 if getattr(parameter, "is_paired", False) else 1)
            place = _place(offload.mode, rows, isinstance(parameter, Experts | Table))
            places[path] = place
            on_host += sizes[path] - sizes[path] * place.resident_rows // rows
            groups[group_of(path)] = groups.get(group_of(path), 0) + sizes[path]
    staging = ring_groups(offload) * max(groups.values(), default=0)
    if offload.mode == "compute":
        staging = 0
    device = hands.accelerator.ledger.name
    return Places(places, {host: on_host, device: total - on_host}, staging, [])


def _place(mode: str, rows: int, is_whole: bool) -> Place:
    if mode == "stream" and not is_whole:
        return Place(0, lambda _: rows)
    if mode == "split" and not is_whole:
        resident = rows // 3 // 64 * 64
        half = (rows - resident) // 2 // 64 * 64
        return Place(resident, lambda _: half)
    return Place(0, lambda _: 0)


def place_parameters(model: CausalLM, places: dict[str, Place]) -> None:
    """Say where parameters go when they are loaded; ``places``: by path."""
    table = dict(model.named_parameters())
    for path, place in places.items():
        parameter = table[path]
        assert isinstance(parameter, Matrix | Experts), path
        cast(Matrix, parameter).place = place
