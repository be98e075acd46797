"""GGUF's block formats as :class:`Quantized`: every value exactly as the file has it.

A row is blocks of 32 or 256 columns, one after the other; a block is its scales and its codes.
Where the file packs fewer bits than a form has (Q2_K, Q3_K), codes are widened and values stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ambidex.errors import InvalidModelError, UnsupportedModelError
from ambidex.kernels.quantized import Quantized
from ambidex.quant.forms import GGUF_FORMS

Bytes = NDArray[np.uint8]
#: Field of Quantized -> values of each block.
Fields = dict[str, NDArray[Any]]

#: Weights unpacked at once: temporary arrays stay in the processor's cache.
_SLICE_WEIGHTS = 1 << 18
_LOW = np.uint8(15)

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: Twice the values of E2M1, whose scales are halved in turn.
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Bytes, start: int) -> NDArray[Any]:
    """The float16 at byte ``start`` of each block: [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Codes of 4 bits [n, 2 * bytes]: of each ``run`` bytes the low halves, then the high ones."""
    n = len(packed)
    codes = np.empty((n, packed.shape[1] // run, 2, run), np.uint8)
    grouped = packed.reshape(n, -1, run)
    np.bitwise_and(grouped, _LOW, out=codes[:, :, 0])
    np.right_shift(grouped, 4, out=codes[:, :, 1])
    return codes.reshape(n, -1)


def _planes(packed: Bytes, bits: int, run: int) -> Bytes:
    """Codes of ``bits`` (1 or 2): of each ``run`` bytes the lowest bits, then the next."""
    n, count = len(packed), 8 // bits
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, count, 1)
    codes = (packed.reshape(n, -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(n, -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """The fifth bit of 32 codes from 4 bytes, in its place: [n, 32]."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Fields:
    return {"codes": _nibbles(blocks[:, 2:], 16), "scale": _half(blocks, 0)}


def _q4_1(blocks: Bytes) -> Fields:
    return {
        "codes": _nibbles(blocks[:, 4:], 16),
        "scale": _half(blocks, 0),
        "minimum": _half(blocks, 2),
    }


def _q5_0(blocks: Bytes) -> Fields:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return {"codes": codes, "scale": _half(blocks, 0)}


def _q5_1(blocks: Bytes) -> Fields:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return {"codes": codes, "scale": _half(blocks, 0), "minimum": _half(blocks, 2)}


def _q8_0(blocks: Bytes) -> Fields:
    # Adding 128 to a signed byte is turning its highest bit.
    return {"codes": blocks[:, 2:] ^ np.uint8(128), "scale": _half(blocks, 0)}


def _q2_k(blocks: Bytes) -> Fields:
    scales = blocks[:, :16]
    return {
        "codes": _planes(blocks[:, 16:80], 2, 32),
        "scale_codes": scales & _LOW,
        "minimum_codes": scales >> 4,
        "super_scale": _half(blocks, 80),
        "super_minimum": _half(blocks, 82),
    }


def _q3_k(blocks: Bytes) -> Fields:
    # A bit of the mask that is not set takes 4 away.
    codes = _planes(blocks[:, 32:96], 2, 32) | (_planes(blocks[:, :32], 1, 32) << np.uint8(2))
    low, high = _nibbles(blocks[:, 96:104], 8), _planes(blocks[:, 104:108], 2, 4)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return {"codes": codes, "scale_codes": scales, "super_scale": _half(blocks, 108)}


def _k_scales(blocks: Bytes) -> Fields:
    """Scales and minima of 6 bits: twelve bytes for eight of each."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, two = np.uint8(0x3F), np.uint8(0x30)
    scales = np.concatenate([first & six, (rest & _LOW) | ((first >> 2) & two)], 1)
    minima = np.concatenate([second & six, (rest >> 4) | ((second >> 2) & two)], 1)
    return {
        "scale_codes": scales,
        "minimum_codes": minima,
        "super_scale": _half(blocks, 0),
        "super_minimum": _half(blocks, 2),
    }


def _q4_k(blocks: Bytes) -> Fields:
    return {"codes": _nibbles(blocks[:, 16:], 32), **_k_scales(blocks)}


def _q5_k(blocks: Bytes) -> Fields:
    codes = _nibbles(blocks[:, 48:], 32) | (_planes(blocks[:, 16:48], 1, 32) << np.uint8(4))
    return {"codes": codes, **_k_scales(blocks)}


def _q6_k(blocks: Bytes) -> Fields:
    codes = _nibbles(blocks[:, :128], 64) | (_planes(blocks[:, 128:192], 2, 32) << np.uint8(4))
    return {
        "codes": codes,
        "scale_codes": blocks[:, 192:208].view(np.int8),
        "super_scale": _half(blocks, 208),
    }


def _mxfp4(blocks: Bytes) -> Fields:
    exponent = blocks[:, :1].astype(np.uint32)
    # Half of 2^(exponent - 127); the two smallest are no normal numbers.
    normal = (np.maximum(exponent, 1) - np.uint32(1)) << np.uint32(23)
    small = np.uint32(0x00200000) << np.minimum(exponent, 1)
    scale = np.where(exponent < 2, small, normal).view(np.float32)
    return {"codes": _nibbles(blocks[:, 1:], 16), "scale": scale}


#: Type -> (columns a block, bytes a block, what unpacks blocks, fields that are always the same).
_READERS: dict[str, tuple[int, int, Callable[[Bytes], Fields], dict[str, Any]]] = {
    "Q4_0": (32, 18, _q4_0, {"zero": 8}),
    "Q4_1": (32, 20, _q4_1, {}),
    "Q5_0": (32, 22, _q5_0, {"zero": 16}),
    "Q5_1": (32, 24, _q5_1, {}),
    "Q8_0": (32, 34, _q8_0, {"zero": 128}),
    "Q2_K": (256, 84, _q2_k, {}),
    "Q3_K": (256, 110, _q3_k, {"zero": 4}),
    "Q4_K": (256, 144, _q4_k, {}),
    "Q5_K": (256, 176, _q5_k, {}),
    "Q6_K": (256, 210, _q6_k, {"zero": 32}),
    "IQ4_NL": (32, 18, _q4_0, {"codebook": _IQ4_NL}),
    "MXFP4": (32, 17, _mxfp4, {"codebook": _MXFP4}),
}


def check_packed(name: str, type_name: str, rows: Bytes, columns: int) -> None:
    """Raise InvalidModelError unless ``rows`` is uint8 [rows, bytes] of ``columns`` columns, and
    UnsupportedModelError for a type that has no low-bit form."""
    if type_name not in _READERS:
        raise UnsupportedModelError(
            f"{name} is of the GGUF type {type_name}, which has no low-bit form here; those that "
            f"have one are {', '.join(_READERS)}."
        )
    width, size, _, _ = _READERS[type_name]
    if columns < 1 or columns % width:
        raise InvalidModelError(
            f"{name} has rows of {columns} columns, no multiple of {type_name}'s block of {width}."
        )
    expected = columns // width * size
    if rows.ndim != 2 or rows.dtype != np.uint8 or rows.shape[1] != expected:
        raise InvalidModelError(
            f"{name} is packed as {rows.dtype} {list(rows.shape)}; rows of {columns} columns of "
            f"type {type_name} take {expected} bytes each."
        )


def from_gguf(name: str, type_name: str, rows: Bytes, columns: int) -> Quantized:
    """``rows`` uint8 [rows, bytes per row] of ``columns`` columns, as the file packs them.

    Raises InvalidModelError where the lengths do not fit, UnsupportedModelError for a type that is
    not in ``forms.GGUF_FORMS``.
    """
    check_packed(name, type_name, rows, columns)
    width, size, read, _ = _READERS[type_name]
    num_rows, per_row = rows.shape[0], columns // width
    if not num_rows:
        # One row goes through, so that the fields have their types.
        return from_gguf(name, type_name, np.zeros((1, rows.shape[1]), np.uint8), columns).rows(
            0, 0
        )
    fields: Fields = {}
    step = max(1, _SLICE_WEIGHTS // columns)
    for start in range(0, num_rows, step):
        part = rows[start : start + step]
        for field, values in read(part.reshape(len(part) * per_row, size)).items():
            if field not in fields:
                fields[field] = np.empty((num_rows, per_row * values.shape[1]), values.dtype)
            fields[field][start : start + step] = values.reshape(len(part), -1)
    return quantized_of(name, type_name, fields)


def quantized_of(name: str, type_name: str, fields: Fields) -> Quantized:
    """The matrix of unpacked ``fields``, with what all matrices of this type share."""
    form = GGUF_FORMS[type_name]
    constants = dict(_READERS[type_name][3])
    if "codebook" in constants:
        constants["codebook"] = torch.tensor(constants["codebook"], dtype=torch.float32)
    tensors: dict[str, Any] = {field: torch.from_numpy(values) for field, values in fields.items()}
    return Quantized(name, form.bits, form.group, **tensors, **constants)
