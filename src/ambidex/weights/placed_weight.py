"""A weight whose rows lie in two memories, and the order in which a step uses such weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ambidex.weights.compressed import raw_bytes
from ambidex.weights.streamer import Ranges, StagedRows, staged_bytes

#: Rows are cut at multiples of this.
ROW_UNIT = 64
#: What any weight can be cut at multiples of; see ``kernels.table.Weight``.
PANEL_ROWS = 16


@dataclass(slots=True, eq=False)
class PlacedWeight:
    """A matrix whose rows lie in two memories: the first ones on the accelerator.

    ``is_paired``: gate above up, of which row i of both is one output; rows are then counted in one
    of them. ``streamed_rows(n)``: how many of the host's rows are copied to the accelerator for a
    product with n rows; the others are computed on the host.
    """

    shape: tuple[int, int]
    is_paired: bool
    resident: Any
    host: Any
    streamed_rows: Callable[[int], int]
    #: Rows that are copied at a time; None: all. A head is larger than a layer, and would have the
    #: ring to itself.
    piece_rows: int | None = None
    _staged: dict[tuple[int, int], StagedRows] = field(default_factory=dict)

    @property
    def halves(self) -> int:
        return 2 if self.is_paired else 1

    @property
    def num_rows(self) -> int:
        return self.shape[0] // self.halves

    @property
    def num_resident(self) -> int:
        return 0 if self.resident is None else int(self.resident.shape[0]) // self.halves

    @property
    def num_host(self) -> int:
        return self.num_rows - self.num_resident

    @property
    def num_bytes(self) -> int:
        return self.device_bytes + self.host_bytes

    @property
    def device_bytes(self) -> int:
        return 0 if self.resident is None else int(self.resident.num_bytes)

    @property
    def host_bytes(self) -> int:
        return 0 if self.host is None else int(self.host.num_bytes)

    def staged(self, count: int, start: int = 0) -> StagedRows:
        """Rows ``start`` to ``count`` of the host's, as they are copied."""
        key = (start, count)
        if key not in self._staged:
            ranges = self.host_ranges(start, count)
            self._staged[key] = StagedRows(self.host, ranges, staged_bytes(self.host, ranges))
        return self._staged[key]

    def pieces(self, count: int) -> list[tuple[int, int]]:
        """The first ``count`` of the host's rows, cut into what is copied at a time."""
        step = self.piece_rows or max(count, 1)
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    def host_ranges(self, start: int, end: int) -> Ranges:
        """Rows ``start`` to ``end`` of the host's part, in both halves."""
        return row_ranges(start, end, self.num_host, self.is_paired)

    def on_host(self, start: int, stack: Callable[[list[Any]], Any]) -> Any:
        """The host's part from row ``start`` on, in its own memory; ``stack`` lays weights one
        below the other."""
        if start == 0:
            return self.host
        if not self.is_paired:
            return self.host.rows(start, self.num_host)
        ranges = self.host_ranges(start, self.num_host)
        return stack([self.host.rows(*rows) for rows in ranges])


def row_ranges(start: int, end: int, num_rows: int, is_paired: bool) -> Ranges:
    """Rows ``start`` to ``end`` of a matrix, or of both halves of one of ``2 * num_rows`` rows."""
    if not is_paired:
        return ((start, end),)
    if (start, end) == (0, num_rows):
        return ((0, 2 * num_rows),)
    return ((start, end), (num_rows + start, num_rows + end))


class Place(Protocol):
    """See ``layers.module.Place``."""

    @property
    def resident_rows(self) -> int: ...

    @property
    def streamed_rows(self) -> Callable[[int], int]: ...

    @property
    def is_compressed(self) -> bool: ...


class Uncut:
    """The place of a matrix that cannot be cut: all of it where most of it would be."""

    def __init__(self, place: Place, num_rows: int) -> None:
        self._place = place
        self._num_rows = num_rows
        self.is_compressed = place.is_compressed
        self.resident_rows = num_rows if place.resident_rows >= num_rows else 0

    def streamed_rows(self, num_tokens: int) -> int:
        on_host = self._num_rows - self._place.resident_rows
        return self._num_rows if 2 * self._place.streamed_rows(num_tokens) > on_host else 0


@dataclass(frozen=True, slots=True)
class Ordered:
    """A weight in the order of execution. ``group``: the layer that it belongs to; ``is_head``: it
    has a row only for tokens whose logits are wanted."""

    weight: PlacedWeight
    group: str
    is_head: bool


def ring_bytes(order: Sequence[Ordered], num_groups: int, max_rows: int) -> int:
    """Bytes of the ring for ``num_groups`` layers (at least the largest weight), for steps of up to
    ``max_rows`` tokens; 0 where nothing is streamed."""
    groups: dict[str, int] = {}
    for item in order:
        weight = item.weight
        count = max(weight.streamed_rows(rows) for rows in row_counts(max_rows))
        if count:
            size = weight.staged(count).num_bytes
            groups[item.group] = groups.get(item.group, 0) + size
    return num_groups * max(groups.values(), default=0)


def row_counts(max_rows: int) -> list[int]:
    """Numbers of rows at which a table by tokens may change: powers of two, and the largest."""
    counts = [1]
    while counts[-1] * 2 < max_rows:
        counts.append(counts[-1] * 2)
    return [*counts, max_rows]


def decompressed_bytes(order: Sequence[Ordered]) -> int:
    """Bytes of the largest weight, or piece of one, that arrives compressed; 0: none does."""
    sizes = [0]
    for item in order:
        weight = item.weight
        size = raw_bytes(weight.host)
        if weight.piece_rows is not None:
            # Whole panels of it; what is not cut may have a last panel that is filled up.
            size = min(size, 2 * weight.piece_rows * weight.halves * weight.shape[1])
        sizes.append(size)
    return max(sizes)
