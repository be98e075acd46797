"""The host's processor."""

from __future__ import annotations

import math
import os
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ambidex.kernels import reference
from ambidex.kernels.table import Kernels
from ambidex.memory.host import host_capacity_bytes
from ambidex.memory.ledger import Ledger


def default_num_threads() -> int:
    """Compute threads: one a core that this process may use (its affinity mask)."""
    if hasattr(os, "sched_getaffinity"):  # Linux; elsewhere the whole machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CPUDevice:
    """The CPU lane's device: host memory, reference kernels."""

    def __init__(self, num_threads: int | None = None) -> None:
        self.name = "cpu"
        self.ledger = Ledger("host", host_capacity_bytes())
        self.num_threads = num_threads or default_num_threads()
        self.prepare_thread()

    @property
    def kernels(self) -> Kernels:
        return cast(Kernels, reference)

    def prepare_thread(self) -> None:
        # PyTorch keeps the number of threads per calling thread.
        torch.set_num_threads(self.num_threads)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # numpy leaves it to the system to hand out zero pages when they are first used;
        # torch.zeros would write all of them now.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)

    def synchronize(self) -> None:
        return None
