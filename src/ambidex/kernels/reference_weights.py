"""The form in which the reference kernels hold weights: plain, or packed by oneDNN."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ambidex.kernels.metadata import PANEL
from ambidex.kernels.quantized import Quantized
from ambidex.kernels.rows import TensorRows

# The number of rows that a packed weight's layout is chosen for; it serves all.
_PACKED_FOR_ROWS = 16


def packed_bytes(shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes that :func:`pack` holds for a matrix of numbers."""
    return shape[0] * shape[1] * dtype.itemsize


def _has_packed_form(num_out: int, dtype: torch.dtype) -> bool:
    return (
        dtype is torch.float32
        and num_out >= PANEL
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
    )


def pack(weight: Tensor | Quantized | TensorRows, precise: bool = False) -> Tensor:
    """A ``weight`` [out, in] in the form that :func:`linear` multiplies fastest.

    On x86 that is oneDNN's own layout, opaque and of the same size: the library else rearranges
    the weight in every call, which takes longer than the product with few rows. The results are
    as exact, though not the same bits as unpacked. Low-bit matrices become float32.
    """
    table = pack_table(weight)
    if not _has_packed_form(table.shape[0], table.dtype):
        return table
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(table, _PACKED_FOR_ROWS)
    return packed


def pack_table(weight: Tensor | Quantized | TensorRows) -> Tensor:
    """A table that :func:`embedding` reads rows of."""
    if isinstance(weight, Quantized):
        return weight.dequantise()
    return weight.all() if isinstance(weight, TensorRows) else weight


def pack_head(table: Tensor) -> Tensor:
    """What :func:`linear` multiplies with where the head is tied to an embedding's ``table``: a
    second, packed copy."""
    return pack(table)


def head_bytes(shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes that :func:`pack_head` takes beside the table."""
    return packed_bytes(shape, dtype) if _has_packed_form(shape[0], dtype) else 0


def unpack_gguf(name: str, type_name: str, rows: Any, columns: int) -> Quantized | None:
    """None: this table reads no file formats, ``quant.gguf`` does."""
    return None


def pack_parts(parts: Sequence[Tensor | Quantized | TensorRows], precise: bool = False) -> Tensor:
    """:func:`pack` of the rows of all ``parts``, one below the other."""
    tables = [pack_table(part) for part in parts]
    if len({table.dtype for table in tables}) > 1:
        tables = [table.float() for table in tables]
    return pack(tables[0] if len(tables) == 1 else torch.cat(tables))
