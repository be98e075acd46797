"""Weights that live in the host's memory and are copied to the accelerator ahead of their use.

A ring of staging buffers lies on the device. While one weight is multiplied with, the next ones,
in the order of execution and across steps, are on their way over the link. A copy into a buffer
waits until the kernel that used the last weight in it is done; a kernel waits until its weight is
there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


def staged_bytes(weight: Weight, ranges: Ranges | None = None) -> int:
    """Bytes of a staging buffer that ``weight`` takes (or those rows of it)."""
    total = 0

    def measure(pieces: list[Tensor]) -> Tensor:
        nonlocal total
        size = sum(piece.numel() for piece in pieces)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
        return torch.empty(size, dtype=torch.uint8, device="meta")

    weight.gather(ranges or ((0, weight.shape[0]),), measure)
    return total


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    #: When the kernel that used the last weight in it is done.
    is_free: Event | None = None


@dataclass(slots=True)
class _Staged:
    weight: Weight
    buffer: _Buffer
    is_there: Event
    num_bytes: int


class Streamer:
    """``prefetch_step``: how many weights are on their way beside the one in use; with
    ``is_async`` off a weight is copied when it is needed, and nothing is computed meanwhile."""

    def __init__(
        self, device: Accelerator, buffer_bytes: int, prefetch_step: int = 1, is_async: bool = True
    ) -> None:
        assert prefetch_step >= 0, "a prefetch is not negative"
        self._device = device
        self._is_async = is_async
        self._prefetch = prefetch_step if is_async else 0
        self._free = deque(
            _Buffer(device.empty((buffer_bytes,), torch.uint8, "staging"))
            for _ in range(num_buffers(prefetch_step, is_async))
        )
        #: What a step uses, in order, and the place of each in it.
        self._order: list[StagedRows] = []
        self._places: dict[StagedRows, int] = {}
        self._staged: dict[StagedRows, _Staged] = {}
        #: Bytes copied over the link; those of copies that nobody used; copies; those of them that
        #: had begun before they were needed.
        self.num_bytes = 0
        self.num_wasted_bytes = 0
        self.num_copies = 0
        self.num_prefetched = 0

    def begin_step(self, order: Sequence[StagedRows]) -> None:
        """What this step will use, in order. The next step is expected to begin as this one."""
        if order != self._order:
            self._order = list(order)
            self._places = {rows: place for place, rows in enumerate(order)}
            assert len(self._places) == len(order), "a weight is used once a step"

    @contextlib.contextmanager
    def use(self, rows: StagedRows) -> Iterator[Weight]:
        """The rows on the device, for kernels that are launched within."""
        staged = self._staged.pop(rows, None)
        if staged is not None:
            self.num_prefetched += 1
        else:
            # What was fetched for another order of events is in the way.
            for other in self._staged.values():
                self.num_wasted_bytes += other.num_bytes
                self._free.append(other.buffer)
            self._staged.clear()
            staged = self._fetch(rows)
        self._device.compute.wait(staged.is_there)
        for upcoming in self._upcoming(rows):
            if upcoming not in self._staged:
                self._staged[upcoming] = self._fetch(upcoming)
        try:
            yield staged.weight
        finally:
            staged.buffer.is_free = self._device.compute.record()
            self._free.append(staged.buffer)

    def _upcoming(self, rows: StagedRows) -> list[StagedRows]:
        place = self._places.get(rows)
        if place is None:
            return []
        size = len(self._order)
        steps = range(1, min(self._prefetch, size - 1) + 1)
        return [self._order[(place + step) % size] for step in steps]

    def _fetch(self, rows: StagedRows) -> _Staged:
        """Launch the copies of ``rows`` into the buffer that is free the longest."""
        buffer = self._free.popleft()
        stream = self._device.copy_in
        if buffer.is_free is not None:
            stream.wait(buffer.is_free)
        if not self._is_async:
            stream.wait(self._device.compute.record())
        end = 0
        num_bytes = 0

        def store(pieces: list[Tensor]) -> Tensor:
            nonlocal end, num_bytes
            first = end
            for piece in pieces:
                size = piece.numel()
                self._device.copy(buffer.memory[end : end + size], piece, "weights")
                end += size
                num_bytes += size
            stored = buffer.memory[first:end]
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            return stored

        weight = rows.weight.gather(rows.ranges, store)
        is_there = stream.record()
        if not self._is_async:
            is_there.wait()
        self.num_bytes += num_bytes
        self.num_copies += 1
        return _Staged(weight, buffer, is_there, num_bytes)


def num_buffers(prefetch_step: int, is_async: bool) -> int:
    """Staging buffers of a ring."""
    return (prefetch_step if is_async else 0) + 1
