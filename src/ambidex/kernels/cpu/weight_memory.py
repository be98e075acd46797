"""Memory for packed weights: large pieces, one weight behind the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64
# Pieces of this size and alignment can be backed by huge pages.
_PIECE_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


class WeightMemory:
    """Hands out memory that is never handed out again; a piece is freed with its last weight.

    numpy asks the system for huge pages for large arrays (MADV_HUGEPAGE). A step reads every
    weight, and with pages of 4 KiB looking their places up takes a good part of that time. Weights
    that are read one after the other lie so, too, so that what the processor fetches ahead is used.
    """

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, not initialised, 64-byte aligned."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._piece.nbytes:
            piece = np.empty(max(size, _PIECE_BYTES) + _HUGE_PAGE_BYTES, np.uint8)
            skip = -piece.ctypes.data % _HUGE_PAGE_BYTES
            self._piece = piece[skip : skip + max(size, _PIECE_BYTES)]
        taken, self._piece = self._piece[:num_bytes], self._piece[size:]
        return torch.from_numpy(taken)
