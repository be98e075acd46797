"""A matrix of numbers that is read some rows at a time, so that it is never held beside its packed
form: what a file has in other types, or packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: What is read at a time: about a layer's matrix, whatever the size of a table.
CHUNK_BYTES = 8 << 20
_UNIT = 64


@dataclass(frozen=True, slots=True)
class TensorRows:
    """``read(a, b)`` gives rows ``a`` to ``b`` [b - a, columns], of any type of numbers."""

    shape: tuple[int, int]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    def all(self) -> Tensor:
        return self.read(0, self.shape[0]).to(self.dtype)

    def blocks(self, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Rows ``start`` to ``end`` in this type, cut at multiples of 64 rows behind ``start``: the
        first row of each block, and its rows, which the next block overwrites."""
        row_bytes = max(self.shape[1] * self.dtype.itemsize, 1)
        step = min(max(CHUNK_BYTES // row_bytes // _UNIT, 1) * _UNIT, max(end - start, 1))
        # One memory for all: the C library would keep much of what was freed, in pieces.
        block = torch.empty(step, self.shape[1], dtype=self.dtype)
        for first in range(start, end, step):
            last = min(first + step, end)
            yield first, block[: last - first].copy_(self.read(first, last))
