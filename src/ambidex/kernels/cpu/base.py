"""What every native operation's wrapper needs: the context, checks, and memory for results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ambidex.errors import KernelError, OutOfMemory
from ambidex.kernels.cpu.library import load
from ambidex.kernels.cpu.numa import PagePlacer, Placer
from ambidex.kernels.cpu.weight_memory import WeightMemory


class NativeBase:
    """A lane's threads and level. The operations are mixed in; see ``kernels/native.py``.

    Wrappers check shape, stride, type and owner, since native code sees addresses only. Tensors
    are float32 on the CPU unless said otherwise; rows may lie apart, the numbers of a row may not.
    """

    def __init__(
        self, num_threads: int, cpus: Sequence[int], level: str, nodes: Sequence[int] = ()
    ) -> None:
        """``cpus`` and ``nodes``: where each thread is pinned, and that CPU's NUMA node.
        Raises OutOfMemory where the system does not give the threads."""
        self._native: Any = load()
        self.level = level
        self.num_threads = num_threads
        self._weight_memory = self._kept_weights = WeightMemory()
        #: Puts each part of a weight on the node of the thread that multiplies with it.
        self._placer: Placer = PagePlacer(nodes)
        self._kept_placer: Placer = self._placer
        try:
            self._context = self._native.Context(level, num_threads, list(cpus))
        except RuntimeError as error:  # std::system_error
            raise OutOfMemory(
                f"The system refused to start {num_threads} threads: {error}. Give fewer "
                "--cpu-threads, or raise this process's limits (ulimit -u, ulimit -v)."
            ) from None

    def fill_nodes(self, placer: Placer) -> None:
        """From now on ``placer`` lays packed weights on NUMA nodes, instead of beside the threads
        that multiply with them."""
        self._placer = self._kept_placer = placer

    @contextlib.contextmanager
    def temporary_weights(self) -> Iterator[None]:
        """Weights packed within lie in memory that is freed with the last of them."""
        kept, self._weight_memory = self._weight_memory, WeightMemory()
        self._placer = PagePlacer(())
        try:
            yield
        finally:
            self._weight_memory, self._placer = kept, self._kept_placer

    def keep(self, pieces: list[Tensor]) -> Tensor:
        """Copy bytes, one piece behind the other, to the memory of the weights that stay, on the
        NUMA nodes where these go."""
        memory = self._kept_weights.take(sum(piece.numel() for piece in pieces))
        self._kept_placer.place(memory.data_ptr(), memory.nbytes // 64, 64)
        return torch.cat(pieces, out=memory)

    def fetch(self, x: Tensor) -> Tensor:
        return x

    def put(self, x: Tensor) -> Tensor:
        return x

    def begin_step(self, num_tokens: int, num_logits: int) -> None:
        """Nothing has to be fetched ahead."""

    def end_step(self) -> None:
        """Nothing goes on after it."""

    def _is_recording(self) -> bool:
        """Whether calls are recorded, and compute nothing."""
        return False

    def _rows(self, x: Tensor) -> int:
        """How many rows ``x`` has, as native code is told: a symbol while recording."""
        return x.shape[0]

    def _empty(self, like: Tensor, *shape: int) -> Tensor:
        """Memory for a float32 result with as many rows as ``like``."""
        return torch.empty((like.shape[0], *shape), dtype=torch.float32)

    def _empty_ids(self, like: Tensor, width: int) -> Tensor:
        """Memory for an int64 result with as many rows as ``like``."""
        return torch.empty((like.shape[0], width), dtype=torch.int64)

    def _kept_ids(self, size: int) -> Tensor:
        """[size] int64 that lives as long as the calls that are told its address."""
        return torch.empty(size, dtype=torch.int64)

    def _check_rows(self, x: Tensor, what: str, width: int | None = None) -> None:
        """Raises KernelError unless ``x`` is a float32 matrix on the CPU, rows contiguous."""
        if x.device.type != "cpu":
            raise KernelError(f"{what} is on {x.device}; the CPU's kernels cannot read it.")
        if x.dtype is not torch.float32:
            raise KernelError(f"{what} is {x.dtype}, and must be float32.")
        if x.dim() != 2:
            raise KernelError(f"{what} has {x.dim()} dimensions, and must have 2.")
        if x.shape[1] > 1 and x.stride(1) != 1:
            raise KernelError(f"{what}: the numbers of a row do not lie side by side.")
        if width is not None and x.shape[1] != width:
            raise KernelError(f"{what} has rows of {x.shape[1]}, and must have {width}.")

    def _check_beside(self, y: Tensor, x: Tensor, width: int, what: str = "out") -> None:
        """Raises KernelError unless ``y`` has a row of ``width`` for every row of ``x``."""
        self._check_rows(y, what, width)
        if y.shape[0] != x.shape[0]:
            raise KernelError(f"{what} has {y.shape[0]} rows, and must have {x.shape[0]}.")

    def _check_ids(self, token_ids: Tensor, what: str = "token_ids") -> None:
        """Raises KernelError unless ``token_ids`` is [n] int64, contiguous, on the CPU."""
        if (
            token_ids.device.type != "cpu"
            or token_ids.dtype is not torch.int64
            or token_ids.dim() != 1
            or not token_ids.is_contiguous()
        ):
            raise KernelError(
                f"{what} is {token_ids.dtype} {list(token_ids.shape)} on {token_ids.device}, "
                "and must be int64 [n], contiguous, on the CPU."
            )

    def _check_vector(self, x: Tensor, what: str, size: int) -> None:
        """Raises KernelError unless ``x`` is [size] float32, contiguous, on the CPU."""
        if (
            x.device.type != "cpu"
            or x.dtype is not torch.float32
            or tuple(x.shape) != (size,)
            or not x.is_contiguous()
        ):
            raise KernelError(
                f"{what} is {x.dtype} {list(x.shape)} on {x.device}, and must be float32 [{size}]."
            )
