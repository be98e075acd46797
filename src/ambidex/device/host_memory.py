"""The host's memory beside an accelerator's, as the host's stream sees it."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ambidex.device.base import Accelerator
from ambidex.device.region import Region
from ambidex.errors import OutOfMemory
from ambidex.memory.ledger import Ledger

#: Of the region: it has no other.
_ACCOUNT = "activations"


class _Held(np.ndarray):
    """A result in use; numpy's own arrays cannot tell when they die."""


class HostMemory:
    """Hands out memory for results that launched work will write.

    Launching is ahead of computing, and what is launched has its memory already: from
    ``limit_bytes`` on launching waits, so that a step takes what it needs and no more.
    """

    name = "host"

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.limit_bytes: float = math.inf
        #: The most that results in use took at a time.
        self.peak_bytes = 0
        #: Of them, what is kept for later; and the most that others took at a time.
        self._kept_bytes = 0
        self._ahead_bytes = 0
        self._is_keeping = False
        self._region: Region | None = None
        #: Of results beside the region.
        self._beside_bytes = 0
        # Filled by finalisers, which may run at any point of any thread.
        self._freed: deque[int] = deque()

    @property
    def taken_bytes(self) -> int:
        """Of results in use."""
        self.collect()
        held = 0 if self._region is None else self._region.taken_bytes(_ACCOUNT)
        return self._beside_bytes + held

    @property
    def needed_bytes(self) -> int:
        """Of all kinds of steps that have been so far: what is kept, and the most beside it."""
        return self._kept_bytes + self._ahead_bytes

    def hold(self, num_bytes: int) -> None:
        """Keep addresses for so much. Results live short and are of all sizes, and other threads
        drop them: from the C library's heap they left twice what they take."""
        ledger = Ledger("host", num_bytes)
        ledger.reserve(_ACCOUNT, "results", num_bytes)
        self._region = Region(ledger)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.numel() == 0 or not self._accelerator.owns(tensor)

    def store(self, tensor: Tensor, account: str = "weights") -> Tensor:
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, account: str = "activations"
    ) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        if self.taken_bytes + num_bytes > self.limit_bytes:
            self._accelerator.settle()
        made = self._make(num_bytes)
        taken = self.taken_bytes
        self.peak_bytes = max(self.peak_bytes, taken)
        if not self._is_keeping:
            self._ahead_bytes = max(self._ahead_bytes, taken - self._kept_bytes)
        return made.view(dtype).view(shape)

    def _make(self, num_bytes: int) -> Tensor:
        if self._region is not None:
            # The limit is where launching waits, not where results end.
            with contextlib.suppress(OutOfMemory):
                return self._region.empty((num_bytes,), torch.uint8, _ACCOUNT)
        held = np.empty(num_bytes, np.uint8).view(_Held)
        weakref.finalize(held, self._freed.append, num_bytes)
        self._beside_bytes += num_bytes
        return torch.from_numpy(held)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is taken within is kept for later, as a captured step's results are: it is not ahead
        of computing, and launching does not wait for it."""
        before, limit, self.limit_bytes = self.taken_bytes, self.limit_bytes, math.inf
        self._is_keeping = True
        try:
            yield
            kept = max(self.taken_bytes - before, 0)
            self._kept_bytes += kept
            limit += kept
        finally:
            self._is_keeping = False
            self.limit_bytes = limit

    def collect(self) -> None:
        """Count what is not in use any more."""
        while self._freed:
            self._beside_bytes -= self._freed.popleft()
