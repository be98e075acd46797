"""Blocks of a GGUF file as plain codes and scales, on all of a lane's threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.base import NativeBase
from ambidex.kernels.quantized import Quantized

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True, slots=True)
class _Type:
    #: GGUF's number.
    number: int
    columns: int
    num_bytes: int
    bits: int
    zero: int = 0
    group: int = 32
    #: Beside the codes: float16 a group ("scale", "minimum"), a byte a group ("*_codes"), float16
    #: a block ("super_*").
    fields: tuple[str, ...] = ("scale",)


_K_FIELDS = ("scale_codes", "minimum_codes", "super_scale", "super_minimum")
_TYPES = {
    "Q4_0": _Type(2, 32, 18, 4, 8),
    "Q4_1": _Type(3, 32, 20, 4, fields=("scale", "minimum")),
    "Q5_0": _Type(6, 32, 22, 5, 16),
    "Q5_1": _Type(7, 32, 24, 5, fields=("scale", "minimum")),
    "Q8_0": _Type(8, 32, 34, 8, 128),
    "Q4_K": _Type(12, 256, 144, 4, fields=_K_FIELDS),
    "Q5_K": _Type(13, 256, 176, 5, fields=_K_FIELDS),
    "Q6_K": _Type(14, 256, 210, 6, 32, 16, ("scale_codes", "super_scale")),
}
_FIELDS = ("scale", "minimum", *_K_FIELDS)


class UnpackOps(NativeBase):
    """``quant/gguf.py`` is the reference."""

    def unpack_gguf(
        self, name: str, type_name: str, rows: numpy.ndarray, columns: int
    ) -> Quantized | None:
        """``rows`` uint8 [rows, bytes per row] of ``columns`` columns, rows contiguous, which may
        lie in a mapped file. None for a type that is not unpacked here.

        Raises KernelError where the lengths do not fit.
        """
        kind = _TYPES.get(type_name)
        if kind is None:
            return None
        blocks, rest = divmod(columns, kind.columns)
        expected = blocks * kind.num_bytes
        if rows.dtype != "uint8" or rows.ndim != 2 or rest or rows.shape[1] != expected:
            raise KernelError(
                f"{name} is {rows.dtype} {list(rows.shape)}, and must be uint8 rows of "
                f"{expected} bytes for {columns} columns of type {type_name}."
            )
        if rows.size and expected > 1 and rows.strides[1] != 1:
            raise KernelError(f"{name}: the bytes of a row do not lie side by side.")
        num_rows = rows.shape[0]
        codes = torch.empty(num_rows, columns, dtype=torch.uint8)
        fields: dict[str, Any] = {
            field: self._field(field, kind, num_rows, columns) for field in kind.fields
        }
        self._native.unpack_blocks(
            self._context,
            kind.number,
            rows.ctypes.data,
            rows.strides[0],
            num_rows,
            blocks,
            codes.data_ptr(),
            *(fields[field].data_ptr() if field in fields else 0 for field in _FIELDS),
        )
        return Quantized(name, kind.bits, kind.group, codes, zero=kind.zero, **fields)

    @staticmethod
    def _field(field: str, kind: _Type, num_rows: int, columns: int) -> Tensor:
        if field.startswith("super"):
            return torch.empty(num_rows, columns // 256, dtype=torch.float16)
        dtype = torch.float16
        if field.endswith("codes"):
            # The one type whose scales have a sign is the one without minima.
            dtype = torch.uint8 if "minimum_codes" in kind.fields else torch.int8
        return torch.empty(num_rows, columns // kind.group, dtype=dtype)
