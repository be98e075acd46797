"""The host's processor."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from ambidex.errors import OutOfMemory
from ambidex.kernels import reference
from ambidex.kernels.cpu.levels import kernel_table_name, recorded_levels, usable_level
from ambidex.kernels.cpu.numa import FillingPlacer, PagePlacer, Placer
from ambidex.kernels.cpu.topology import plan_threads
from ambidex.kernels.table import Kernels
from ambidex.memory.host import host_capacity_bytes, process_bytes
from ambidex.memory.ledger import HOST, Ledger, format_bytes
from ambidex.memory.pages import prefault

if TYPE_CHECKING:
    from ambidex.kernels.native import NativeKernels


def default_num_threads() -> int:
    """Compute threads where nobody gives a number; see ``plan_threads``."""
    return plan_threads(None, None, os.environ).num_threads


class CPUDevice:
    """The CPU lane's device: host memory and a kernel table.

    ``cpus``, ``within`` and ``nodes``: where its threads run, see ``ThreadPlan``; empty: anywhere.
    ``kernels``: native, or reference (plain PyTorch); None: what AMBIDEX_CPU_KERNELS names.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        cpus: Sequence[int] = (),
        nodes: Sequence[int] = (),
        within: Sequence[int] = (),
        kernels: str | None = None,
    ) -> None:
        self.name = "cpu"
        self.ledger = Ledger(HOST, 0)
        self.num_threads = num_threads or default_num_threads()
        self.cpus = tuple(cpus)
        self.within = tuple(within)
        #: Sentences that the user should read once.
        self.notes: list[str] = []
        chosen = kernels or kernel_table_name(os.environ)
        self._is_native = chosen == "native"
        self.prepare_thread()
        self._kernels = (
            self._make_native(cpus, nodes) if self._is_native else cast(Kernels, reference)
        )
        self._placer = PagePlacer(nodes)
        self.measure()

    def _make_native(self, cpus: Sequence[int], nodes: Sequence[int]) -> Kernels:
        from ambidex.kernels.cpu.library import load
        from ambidex.kernels.native import NativeKernels

        level, note = usable_level(load(), recorded_levels(), os.environ.get("AMBIDEX_CPU_LEVEL"))
        if note:
            self.notes.append(note)
        return cast(Kernels, NativeKernels(self.num_threads, cpus, level, nodes))

    def fill_nodes(self, parts: Sequence[tuple[int, int]]) -> Placer:
        """Lays the weights that are packed from now on on NUMA nodes, in the order of ``parts``
        (node, bytes). Weights of the reference table are PyTorch's, and stay where it has them.

        Returns what places them, for weights that the caller copies itself.
        """
        placer = FillingPlacer(parts)
        if self._is_native:
            cast("NativeKernels", self._kernels).fill_nodes(placer)
        return placer

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def prepare_thread(self) -> None:
        # The calling thread is the first of the group. Threads that it starts, PyTorch's and those
        # of the native table that are not pinned, inherit where it may run.
        own = (self.cpus[:1] if self._is_native else self.cpus) or self.within
        if own and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, own)
        # PyTorch keeps the number of threads per calling thread. Beside a native table it gets
        # one: two pools on the same cores would fight.
        torch.set_num_threads(1 if self._is_native else self.num_threads)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, account: str = "activations"
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def store(self, tensor: Tensor, account: str = "weights") -> Tensor:
        return tensor

    def write(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, account: str = "activations"
    ) -> Tensor:
        # The system hands out zero pages when they are first used; torch.zeros would write all
        # of them now. In small pages: a layer and head of the KV cache is a region of its own, and
        # the first token would have a large page of each cleared, 0.2 s for a small model. At
        # 2,048 tokens of context attention is as fast in small ones.
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            # Private: pages of shared memory take half as long again to be had.
            area = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(str(error)) from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # Kernels without huge pages do not know it.
            with contextlib.suppress(OSError):
                area.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.from_numpy(np.frombuffer(area, np.uint8, num_bytes)).view(dtype).view(shape)

    def measure(self) -> None:
        if all(held.account == "runtime" for held in self.ledger.reservations()):
            # So far: the interpreter, its libraries, and what the process did before.
            self.ledger.release_all()
            self.ledger.record("runtime", "process", process_bytes())
        self.ledger.set_free(host_capacity_bytes())

    def prefault(self, tensors: Sequence[Tensor]) -> None:
        wanted, free = sum(tensor.nbytes for tensor in tensors), host_capacity_bytes()
        if wanted > free:
            raise OutOfMemory(
                f"{format_bytes(wanted)} of memory are to be taken before requests come; "
                f"{format_bytes(free)} are free."
            )
        for tensor in tensors:
            address, num_bytes = tensor.data_ptr(), tensor.nbytes
            # This thread takes them all: without a place they would all be on its node.
            self._placer.place(address, num_bytes // mmap.PAGESIZE, mmap.PAGESIZE)
            prefault(address, num_bytes)

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        del self._kernels
