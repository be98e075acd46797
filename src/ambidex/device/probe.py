"""What this machine really reaches, measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ambidex.kernels.table import Kernels
from ambidex.memory.cost_model import ComputeRate

_ROUNDS = 3
# Larger than caches, small enough to be read in a few milliseconds.
_READ_BYTES = 64 << 20
_MATRIX = 768
_MATRIX_ROWS = 128


def core_rate(kernels: Kernels) -> ComputeRate:
    """What ``kernels``, with one thread, read out of memory and multiply in float32: the best of a
    few short rounds, some tens of milliseconds."""
    columns = 1024
    table = kernels.pack(torch.ones(_READ_BYTES // 4 // columns, columns))
    row = torch.ones(1, columns)
    read_s = _best_s(lambda: kernels.linear(row, table))
    matrix = kernels.pack(torch.ones(_MATRIX, _MATRIX))
    rows = torch.ones(_MATRIX_ROWS, _MATRIX)
    product_s = _best_s(lambda: kernels.linear(rows, matrix))
    return ComputeRate(_READ_BYTES / read_s, 2.0 * _MATRIX_ROWS * _MATRIX**2 / product_s)


def _best_s(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
