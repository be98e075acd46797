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
        #: Of results in use: now, and the most at a time.
        self.taken_bytes = 0
        self.peak_bytes = 0
        # Filled by finalisers, which may run at any point of any thread.
        self._freed: deque[int] = deque()

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
        self.collect()
        if self.taken_bytes + num_bytes > self.limit_bytes:
            self._accelerator.settle()
            self.collect()
        held = np.empty(num_bytes, np.uint8).view(_Held)
        weakref.finalize(held, self._freed.append, num_bytes)
        self.taken_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        return torch.from_numpy(held).view(dtype).view(shape)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is taken within is kept for later, as a captured step's results are: it is not ahead
        of computing, and launching does not wait for it."""
        self.collect()
        before, limit, self.limit_bytes = self.taken_bytes, self.limit_bytes, math.inf
        try:
            yield
            self.collect()
            limit += self.taken_bytes - before
        finally:
            self.limit_bytes = limit

    def collect(self) -> None:
        """Count what is not in use any more."""
        while self._freed:
            self.taken_bytes -= self._freed.popleft()
