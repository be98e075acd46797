"""The host's processor."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ambidex.kernels import reference
from ambidex.kernels.cpu.topology import plan_threads
from ambidex.memory.host import host_capacity_bytes
from ambidex.memory.ledger import Ledger


def default_num_threads() -> int:
    """Compute threads where nobody gives a number; see ``plan_threads``."""
    return plan_threads(None, None, os.environ).num_threads


class CPUDevice:
    """The CPU lane's device: host memory, reference kernels.

    ``cpus``: where its threads run, see ``ThreadPlan``; empty: anywhere.
    """

    def __init__(self, num_threads: int | None = None, cpus: Sequence[int] = ()) -> None:
        self.name = "cpu"
        self.ledger = Ledger("host", host_capacity_bytes())
        self.num_threads = num_threads or default_num_threads()
        self.cpus = tuple(cpus)
        self.prepare_thread()

    @property
    def kernels(self) -> ModuleType:
        return reference

    def prepare_thread(self) -> None:
        if self.cpus and hasattr(os, "sched_setaffinity"):
            # PyTorch's threads inherit this when they are started.
            os.sched_setaffinity(0, self.cpus)
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
