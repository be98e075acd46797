"""From a plan of places to the parameters of a model, and from a loaded model to its streamer."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ambidex.layers.module import Experts, Matrix, Parameter, Place, Table
from ambidex.memory.placement import (
    ModuleSize,
    Placement,
    Rates,
    WeightKind,
    WeightPlace,
    describe,
    plan_placement,
)
from ambidex.memory.split import streamed_rows
from ambidex.weights.placed import Ordered, PlacedWeight, ring_bytes
from ambidex.weights.streamer import Streamer

if TYPE_CHECKING:
    from ambidex.config import EngineConfig, OffloadConfig
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


@dataclass(slots=True)
class Places:
    """``by_path``: of the parameters that are not all on the accelerator. ``num_bytes``: planned
    for each memory, by its ledger's name."""

    by_path: dict[str, Place]
    num_bytes: dict[str, int]
    staging_bytes: int
    notes: list[str]


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
    plan = plan_placement(
        modules,
        max(accelerator.ledger.free_bytes - other_bytes, 0),
        max(host.free_bytes - host_other_bytes, 0),
        config.offload,
        rates,
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
    if config.offload.compress:
        notes.append(
            "--offload-compress has no effect yet: streamed weights cross the link as they are."
        )
    return Places(places, num_bytes, plan.staging_bytes, notes)


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
