"""A piece of address space, as a device's own memory: capped, with every byte in an account."""

from __future__ import annotations

import bisect
import math
import mmap
import sys
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

from ambidex.errors import OutOfMemory
from ambidex.memory.ledger import Ledger, format_bytes

#: What GPUs align allocations to.
ALIGNMENT = 256
_SLACK_BYTES = 16 << 20
#: Python knows its name since 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class _Held(np.ndarray):
    """An allocation in use; numpy's own arrays cannot tell when they die."""


class Region:
    """Hands out memory of ``ledger``'s capacity; an allocation is freed with its last tensor.

    What an account takes may not exceed what is reserved for it in the ledger: memory that nobody
    planned is refused even where there is some.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Room for alignment and gaps: what is capped is the bytes that tensors take.
        size_bytes = ledger.capacity_bytes + max(ledger.capacity_bytes // 8, _SLACK_BYTES)
        # Not backed by anything until it is written.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            area = mmap.mmap(-1, size_bytes, flags=flags)
        except OSError as error:
            raise OutOfMemory(
                f"The system gives this process no {format_bytes(size_bytes)} of addresses for "
                f"{ledger.name} ({error.strerror}). Give it less memory."
            ) from error
        self._memory = np.frombuffer(area, np.uint8)
        self._base = self._memory.ctypes.data
        self._end = self._base + size_bytes
        #: Free pieces by offset: [offset, size], neither adjacent nor empty.
        self._free: list[list[int]] = [[0, size_bytes]]
        # Filled by finalisers, which may run at any point of any thread; emptied under the lock.
        self._dropped: deque[tuple[str, int, int, int]] = deque()
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}
        self._peak: dict[str, int] = {}

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in this memory; empty ones do not lie anywhere."""
        return tensor.numel() == 0 or self._base <= tensor.data_ptr() < self._end

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, account: str) -> Tensor:
        """Uninitialised memory of ``account``. Raises OutOfMemory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        size = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._collect()
            offset = self._take(size, num_bytes, account)
        held = self._memory[offset : offset + num_bytes].view(_Held)
        weakref.finalize(held, self._dropped.append, (account, offset, size, num_bytes))
        return torch.from_numpy(held).view(dtype).view(shape)

    def taken_bytes(self, account: str) -> int:
        """Bytes of an account's live tensors."""
        with self._lock:
            self._collect()
            return self._taken.get(account, 0)

    def peak_bytes(self, account: str) -> int:
        """The most that an account took at a time."""
        with self._lock:
            return self._peak.get(account, 0)

    def _take(self, size: int, num_bytes: int, account: str) -> int:
        taken = self._taken.get(account, 0) + num_bytes
        reserved = self._ledger.reserved_bytes(account)
        if taken > reserved:
            raise OutOfMemory(
                f"{self._ledger.name}: {format_bytes(num_bytes)} wanted for {account}, of which "
                f"{format_bytes(taken - num_bytes)} of {format_bytes(reserved)} reserved are taken."
            )
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[index]
                else:
                    self._free[index] = [offset + size, free - size]
                self._taken[account] = taken
                self._peak[account] = max(self._peak.get(account, 0), taken)
                return offset
        largest = max((free for _, free in self._free), default=0)
        raise OutOfMemory(
            f"{self._ledger.name}: {format_bytes(size)} wanted for {account}; the largest free "
            f"piece has {format_bytes(largest)}."
        )

    def _collect(self) -> None:
        while self._dropped:
            account, offset, size, num_bytes = self._dropped.popleft()
            self._taken[account] -= num_bytes
            index = bisect.bisect(self._free, [offset, 0])
            self._free.insert(index, [offset, size])
            for left in (index, index - 1):
                if left < 0 or left + 1 >= len(self._free):
                    continue
                (first, length), (second, more) = self._free[left : left + 2]
                assert first + length <= second, "an allocation was freed twice"
                if first + length == second:
                    self._free[left : left + 2] = [[first, length + more]]
