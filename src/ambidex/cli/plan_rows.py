"""A plan's weights by layer and by part, as its three forms (text, JSON, picture) show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ambidex.memory.weight_patterns import layer_index

if TYPE_CHECKING:
    from ambidex.memory.planner import Plan
    from ambidex.memory.weight_places import ModuleSize, WeightPlace


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes of weights by what happens with them."""

    #: Lie where the lane computes: on the accelerator, or in the host's memory where it is alone.
    resident: int = 0
    #: On the host, copied to the accelerator for each use.
    streamed: int = 0
    #: On the host, which computes with them.
    computed: int = 0
    #: On the host, some rows copied and some computed, as the table by tokens per step says.
    split: int = 0

    @property
    def total(self) -> int:
        return self.resident + self.streamed + self.computed + self.split

    @property
    def percent(self) -> tuple[int, ...]:
        return tuple(round(100 * each / self.total) for each in self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __add__(self, other: Shares) -> Shares:
        pairs = zip(self.parts.values(), other.parts.values(), strict=True)
        return Shares(*(a + b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Row:
    """Some of the weights, under a name."""

    name: str
    #: Of a layer.
    index: int | None
    shares: Shares


def by_layer(plan: Plan) -> list[Row]:
    """One row a layer, in order; what comes before the first and after the last has one each."""
    is_before = True

    def name(module: ModuleSize) -> str:
        nonlocal is_before
        index = layer_index(module.path)
        if index is None:
            return "embedding" if is_before else "head"
        is_before = False
        return f"layer {index}"

    return _rows(plan, name)


def by_part(plan: Plan) -> list[Row]:
    """One row for the matrices that are alike in all layers: attention, MLP, experts."""

    def name(module: ModuleSize) -> str:
        index = layer_index(module.path)
        if index is None or not module.is_matrix:
            return ""
        return module.path.partition(f".{index}.")[2].partition(".")[0]

    return _rows(plan, name)


def runs(rows: Iterable[Row]) -> list[Row]:
    """The same with layers in a row joined that are shared alike, to a percent."""
    joined: list[tuple[Row, Row]] = []
    for row in rows:
        if joined:
            first, last = joined[-1]
            is_next = row.index is not None and last.index == row.index - 1
            if is_next and last.shares.percent == row.shares.percent:
                both = Row(first.name, first.index, first.shares + row.shares)
                joined[-1] = (both, row)
                continue
        joined.append((row, row))
    return [
        first
        if first.index == last.index
        else Row(f"layers {first.index} to {last.index}", first.index, first.shares)
        for first, last in joined
    ]


def _rows(plan: Plan, name: Callable[[ModuleSize], str]) -> list[Row]:
    """Weights of one name together; those without one are left out."""
    found: dict[str, tuple[int | None, Shares]] = {}
    for module in plan.shape.modules:
        key = name(module)
        if not key:
            continue
        index, before = found.get(key, (layer_index(module.path), Shares()))
        found[key] = (index, before + _shares(plan, module))
    return [Row(key, index, shares) for key, (index, shares) in found.items()]


def _shares(plan: Plan, module: ModuleSize) -> Shares:
    if plan.placement is None:
        return Shares(resident=module.num_bytes)
    place: WeightPlace = plan.placement.places[module.path]
    resident = module.num_bytes * place.resident_rows // module.rows
    rest = module.num_bytes - resident
    kind = {"resident": "computed", "stream": "streamed", "host": "computed", "split": "split"}
    return Shares(resident=resident) + Shares(**{kind[place.placement.value]: rest})
