"""AWQ, 4 bits, in the layout of its "gemm" version.

``weight[o, i] = scales[i // group, o] * (code[i, o] - zero[i // group, o])``. A word of ``qweight``
[in, out / 8] and of ``qzeros`` [in / group, out / 8] holds eight outputs, not in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ambidex.kernels.quantized import Quantized
from ambidex.quant.forms import split_group
from ambidex.quant.words import narrow_scale, repeat_groups

BITS = 4
#: Output of a word's eight for each four bits, the lowest first.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _unpack(words: Tensor) -> Tensor:
    """``words`` int32 [n, out / 8] as codes uint8 [out, n]."""
    by_output = words.t().contiguous()
    codes = torch.empty(by_output.shape[0], 8, by_output.shape[1], dtype=torch.uint8)
    for index, output in enumerate(_ORDER):
        codes[:, output] = (by_output >> (BITS * index)) & 15
    return codes.view(-1, words.shape[0])


def from_awq(name: str, qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> Quantized:
    """Lengths have been checked (``weights.quantized_source``)."""
    codes = _unpack(qweight)
    split = split_group(group, codes.shape[1])
    assert split is not None
    return Quantized(
        name,
        BITS,
        split[0] or codes.shape[1],
        codes,
        scale=repeat_groups(narrow_scale(scales).t(), split[1]),
        zeros=repeat_groups(_unpack(qzeros), split[1]),
    )
