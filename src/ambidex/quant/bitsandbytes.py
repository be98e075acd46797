"""bitsandbytes: LLM.int8 (a scale a row) and its 4-bit types NF4 and FP4 (a codebook).

* 8 bits: ``weight[r, c] = code[r, c] * SCB[r] / 127``, codes signed. The library multiplies the
  code by SCB first, so values differ from its own by two units in the last place at most.
* 4 bits: ``weight = quant_map[code] * absmax[block]``, blocks along the rows, of a byte's two codes
  the high one first. ``absmax`` may be quantised itself: ``nested_quant_map[code] *
  nested_absmax[block] + offset``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ambidex.kernels.quantized import Quantized
from ambidex.quant.forms import split_group


def from_int8(name: str, weight: Tensor, scb: Tensor) -> Quantized:
    """``weight`` int8 [rows, columns], ``scb`` [rows]."""
    codes = weight.contiguous().view(torch.uint8) ^ 128
    scale = scb.float().view(-1, 1) * (1 / 127)
    return Quantized(name, 8, codes.shape[1], codes, scale=scale, zero=128)


def nested_absmax(
    codes: Tensor, quant_map: Tensor, absmax: Tensor, block: int, offset: float
) -> Tensor:
    """Float32 block maxima from their ``codes`` uint8 [n], of which ``block`` share one of
    ``absmax``."""
    scales = absmax.float().repeat_interleave(block)[: codes.numel()]
    return quant_map.float()[codes.flatten().long()] * scales + offset


def from_4bit(
    name: str, packed: Tensor, shape: tuple[int, int], absmax: Tensor, quant_map: Tensor, block: int
) -> Quantized:
    """``packed`` uint8 [rows * columns / 2], ``absmax`` float32 [rows * columns / block]."""
    rows, columns = shape
    split = split_group(block, columns)
    assert split is not None
    pairs = packed.reshape(-1, 1)
    codes = torch.empty(pairs.shape[0], 2, dtype=torch.uint8)
    codes[:, :1] = pairs >> 4
    codes[:, 1:] = pairs & 15
    scale = absmax.float().reshape(rows, columns // block)
    if split[1] > 1:
        scale = scale.repeat_interleave(split[1], 1)
    return Quantized(
        name,
        4,
        split[0] or columns,
        codes.view(rows, columns),
        scale=scale.contiguous(),
        codebook=quant_map.float().flatten(),
    )
