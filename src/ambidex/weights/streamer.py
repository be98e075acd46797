"""Weights that live in the host's memory and are copied to the accelerator ahead of their use.

A ring of staging buffers lies on the device. While one weight is multiplied with, the next ones,
in the order of execution and across steps, are on their way over the link. A copy into a buffer
waits until the kernel that used the last weight in it is done; a kernel waits until its weight is
there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ambidex.device.queued import memory_of, num_bytes
from ambidex.weights.compressed import CompressedWeight

if TYPE_CHECKING:
    from ambidex.device.base import Accelerator, Event
    from ambidex.kernels.table import Weight

#: Pieces within a buffer begin at multiples of this many bytes.
_ALIGNMENT = 64

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class StagedRows:
    """Rows of a weight in the host's memory; compared by identity."""

    weight: Weight
    ranges: Ranges
    #: Of the ring.
    num_bytes: int


def staged_bytes(weight: Weight, ranges: Ranges) -> int:
    """Bytes of the ring that rows of ``weight`` take."""
    total = 0

    def measure(pieces: list[Tensor]) -> Tensor:
        nonlocal total
        size = sum(piece.numel() for piece in pieces)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
        return torch.empty(size, dtype=torch.uint8, device="meta")

    weight.gather(ranges, measure)
    return total


@dataclass(slots=True, eq=False)
class _Staged:
    """Rows in the ring, from ``start`` to ``end`` of its bytes."""

    rows: StagedRows
    weight: Weight
    start: int
    end: int
    is_there: Event
    num_bytes: int
    #: When the kernels that use it are done; None: they have not been launched.
    is_free: Event | None = None
    is_dropped: bool = False

    @property
    def is_failed(self) -> bool:
        return (self.is_free or self.is_there).is_failed


class Streamer:
    """A ring of ``ring_bytes``, as far ahead as it reaches; with ``is_async`` off a weight is
    copied when it is needed, and nothing is computed meanwhile."""

    def __init__(self, device: Accelerator, ring_bytes: int, is_async: bool = True) -> None:
        self._device = device
        self._is_async = is_async
        self._ring = device.empty((ring_bytes,), torch.uint8, "staging")
        self._size = ring_bytes
        self._end = 0
        #: What lies in the ring.
        self._held: list[_Staged] = []
        #: What a step uses, in order, and the place of each in it.
        self._order: list[StagedRows] = []
        self._places: dict[StagedRows, int] = {}
        #: What is there, or on its way, and not used yet.
        self._ahead: dict[StagedRows, _Staged] = {}
        #: Bytes copied over the link; those of copies that nobody used; copies; those of them that
        #: had begun before they were needed.
        self.num_bytes = 0
        self.num_wasted_bytes = 0
        self.num_copies = 0
        self.num_prefetched = 0
        #: Bytes that came out of compressed ones.
        self.num_decompressed_bytes = 0
        self._decompressed = device.empty((0,), torch.uint8, "staging")

    def decompress_into(self, num_bytes: int) -> None:
        """Take memory for the largest weight that arrives compressed. There is one: kernels run in
        order, and each weight is decompressed right before its product."""
        self._decompressed = self._device.empty((num_bytes,), torch.uint8, "staging")

    @property
    def ring_bytes(self) -> int:
        return self._size

    @property
    def num_ahead(self) -> int:
        """Weights copied, or on their way, that have not been used yet."""
        return len(self._ahead)

    @property
    def num_bytes_ahead(self) -> int:
        """Their bytes."""
        return sum(staged.num_bytes for staged in self._ahead.values())

    def begin_step(self, order: Sequence[StagedRows]) -> None:
        """What this step will use, in order. The next step is expected to begin as this one.

        Whatever happened before, the step begins with its first weights at the ring's beginning,
        so that its copies have the same places every time (a captured step needs that).
        """
        if order != self._order:
            self._order = list(order)
            self._places = {rows: place for place, rows in enumerate(order)}
            assert len(self._places) == len(order), "a weight is used once a step"
        if any(staged.is_failed for staged in self._held):
            # Since then everything launched has been waited for: nothing uses the ring, and what it
            # holds may never have been copied.
            self._drop_ahead()
            self._held.clear()
        if self._is_async and list(self._ahead) != self._first_in_ring():
            self._drop_ahead()
            self._fetch_ahead(-1)

    def end_step(self) -> None:
        """All of the step has been launched: go on with what the next one begins with."""
        if self._is_async and self._order:
            self._fetch_ahead(len(self._order) - 1)

    def arrivals(self) -> dict[StagedRows, Event]:
        """When what is on its way, and not used yet, is there."""
        return {rows: staged.is_there for rows, staged in self._ahead.items()}

    def set_arrivals(self, events: Mapping[StagedRows, Event]) -> None:
        """The same was launched by a captured step: its events are others."""
        assert self._ahead.keys() == events.keys(), "a step leaves the ring as the one before it"
        for rows, event in events.items():
            self._ahead[rows].is_there = event
        is_free = self._device.compute.record()
        for staged in self._held:
            if staged.is_free is not None:
                staged.is_free = is_free

    def counts(self) -> dict[str, int]:
        """Bytes and copies so far, by name."""
        return {
            "streamed_bytes": self.num_bytes,
            "copies": self.num_copies,
            "prefetched": self.num_prefetched,
            "decompressed_bytes": self.num_decompressed_bytes,
        }

    def add_counts(self, counts: Mapping[str, int]) -> None:
        self.num_bytes += counts["streamed_bytes"]
        self.num_copies += counts["copies"]
        self.num_prefetched += counts["prefetched"]
        self.num_decompressed_bytes += counts["decompressed_bytes"]

    def _first_in_ring(self) -> list[StagedRows]:
        """The first weights of a step that the ring has room for together."""
        end, first = 0, []
        for rows in self._order:
            end += rows.num_bytes
            if end > self._size:
                break
            first.append(rows)
        return first

    @contextlib.contextmanager
    def use(self, rows: StagedRows) -> Iterator[Weight]:
        """The rows on the device, for kernels that are launched within."""
        staged = self._ahead.pop(rows, None)
        if staged is not None:
            self.num_prefetched += 1
        else:
            staged = self._fetch(rows)
            if staged is None:
                # What was fetched for another order of events is in the way.
                self._drop_ahead()
                staged = self._fetch(rows)
            assert staged is not None, "the ring is smaller than a weight"
        self._device.compute.wait(staged.is_there)
        weight = staged.weight
        try:
            if isinstance(weight, CompressedWeight):
                weight = weight.decompressed(self._device.kernels, self._decompressed)
                self.num_decompressed_bytes += num_bytes(memory_of(weight))
                # Its place in the ring is free before the product is done.
                staged.is_free = self._device.compute.record()
            yield weight
        finally:
            staged.is_free = staged.is_free or self._device.compute.record()
        if self._is_async and rows in self._places:
            self._fetch_ahead(self._places[rows])

    def _fetch_ahead(self, place: int) -> None:
        """Fetch what comes after the step's weight at ``place``, as far as there is room."""
        size = len(self._order)
        for step in range(1, size + 1):
            upcoming = self._order[(place + step) % size]
            if upcoming in self._ahead:
                continue
            staged = self._fetch(upcoming)
            if staged is None:
                return
            self._ahead[upcoming] = staged

    def _drop_ahead(self) -> None:
        for staged in self._ahead.values():
            self.num_wasted_bytes += staged.num_bytes
            staged.is_dropped = True
        self._ahead.clear()

    def _room(self, num_bytes: int, is_first: bool) -> tuple[int, list[Event]] | None:
        """Where ``num_bytes`` fit behind what came last, or at the ring's beginning where they are
        a step's first, and the events to wait for before; None where something that has not been
        used yet is in the way."""
        start = self._end if self._end + num_bytes <= self._size and not is_first else 0
        end = start + num_bytes
        if end > self._size:
            return None
        in_the_way = [held for held in self._held if held.start < end and start < held.end]
        if any(held.is_free is None and not held.is_dropped for held in in_the_way):
            return None
        events = [held.is_free for held in in_the_way if held.is_free is not None]
        self._held = [held for held in self._held if held not in in_the_way]
        return start, events

    def _fetch(self, rows: StagedRows) -> _Staged | None:
        """Launch the copies of ``rows``; None where there is no room yet."""
        room = self._room(rows.num_bytes, bool(self._order) and rows is self._order[0])
        if room is None:
            return None
        start, events = room
        stream = self._device.copy_in
        for event in events:
            stream.wait(event)
        if not self._is_async:
            stream.wait(self._device.compute.record())
        end = start
        num_bytes = 0

        def store(pieces: list[Tensor]) -> Tensor:
            nonlocal end, num_bytes
            first = end
            for piece in pieces:
                size = piece.numel()
                self._device.copy(self._ring[end : end + size], piece, "weights")
                end += size
                num_bytes += size
            stored = self._ring[first:end]
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            return stored

        weight = rows.weight.gather(rows.ranges, store)
        is_there = stream.record()
        if not self._is_async:
            is_there.wait()
        self.num_bytes += num_bytes
        self.num_copies += 1
        self._end = start + rows.num_bytes
        staged = _Staged(rows, weight, start, self._end, is_there, num_bytes)
        self._held.append(staged)
        return staged
