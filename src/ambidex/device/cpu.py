"""The host's processor."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ambidex.errors import OptionError
from ambidex.kernels import reference
from ambidex.kernels.table import Kernels
from ambidex.memory.host import host_capacity_bytes
from ambidex.memory.ledger import Ledger

#: Kernel tables of this device.
KERNELS = ("native", "reference")


def default_num_threads() -> int:
    """Compute threads: one a core that this process may use (its affinity mask)."""
    if hasattr(os, "sched_getaffinity"):  # Linux; elsewhere the whole machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CPUDevice:
    """The CPU lane's device: host memory and a kernel table.

    ``kernels``: native, or reference (plain PyTorch); None: what AMBIDEX_CPU_KERNELS names.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        cpus: Sequence[int] = (),
        kernels: str | None = None,
    ) -> None:
        self.name = "cpu"
        self.ledger = Ledger("host", host_capacity_bytes())
        self.num_threads = num_threads or default_num_threads()
        chosen = kernels or os.environ.get("AMBIDEX_CPU_KERNELS") or "native"
        if chosen not in KERNELS:
            raise OptionError(
                f"AMBIDEX_CPU_KERNELS={chosen} is not known; choose one of {', '.join(KERNELS)}."
            )
        self._is_native = chosen == "native"
        self.prepare_thread()
        self._kernels = self._make_native(cpus) if self._is_native else cast(Kernels, reference)

    def _make_native(self, cpus: Sequence[int]) -> Kernels:
        from ambidex.kernels.native import NativeKernels

        return cast(Kernels, NativeKernels(self.num_threads, cpus, "v4_vnni"))

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def prepare_thread(self) -> None:
        # PyTorch keeps the number of threads per calling thread. Beside a native table it gets
        # one: two pools on the same cores would fight.
        torch.set_num_threads(1 if self._is_native else self.num_threads)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # numpy leaves it to the system to hand out zero pages when they are first used;
        # torch.zeros would write all of them now.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)

    def synchronize(self) -> None:
        return None
