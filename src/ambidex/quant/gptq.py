"""GPTQ, with and without act-order.

``weight[o, i] = scales[g, o] * (code[i, o] - zero[g, o])``, where g is ``g_idx[i]``, or without
it ``i // group``.
``qweight`` [in * bits / 32, out] packs a column's codes, ``qzeros`` [groups, out * bits / 32] a
group's zeros, each as one stream of bits. The first version of the format stores zeros less one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ambidex.errors import InvalidModelError
from ambidex.kernels.quantized import Quantized
from ambidex.quant.forms import split_group
from ambidex.quant.words import narrow_scale, repeat_groups, unpack_words

#: Bits in the file -> bits of the form.
BITS = {2: 4, 3: 4, 4: 4, 8: 8}


def from_gptq(
    name: str,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    bits: int,
    group: int,
    *,
    is_symmetric: bool,
    zeros_less_one: bool,
) -> Quantized:
    """Lengths have been checked (``weights.quantized_source``). With act-order, columns come in
    the order of their groups, and ``permutation`` says which input each one multiplies.

    Raises InvalidModelError where ``g_idx`` does not give every group its ``group`` columns.
    """
    codes = unpack_words(qweight.t(), bits)
    columns = codes.shape[1]
    zeros = unpack_words(qzeros, bits)
    if zeros_less_one:
        # A zero of 0 was stored as what comes before it: all bits set.
        zeros = (zeros + 1) & ((1 << bits) - 1)
    zeros = zeros.t()
    permutation = _permutation(name, g_idx, group, columns)
    if permutation is not None:
        codes = codes[:, permutation.long()]
    split = split_group(group, columns)
    assert split is not None
    middle = 1 << (bits - 1)
    # The same for all, as it is in every symmetric file, needs no memory.
    is_plain = is_symmetric and bool((zeros == middle).all())
    return Quantized(
        name,
        BITS[bits],
        split[0] or columns,
        codes,
        scale=repeat_groups(narrow_scale(scales).t(), split[1]),
        zero=middle if is_plain else 0,
        zeros=None if is_plain else repeat_groups(zeros, split[1]),
        permutation=permutation,
    )


def _permutation(name: str, g_idx: Tensor | None, group: int, columns: int) -> Tensor | None:
    """Input of each column once they are sorted by group; None where they are already."""
    if g_idx is None:
        return None
    in_order = torch.arange(columns) // group
    if torch.equal(g_idx.long(), in_order):
        return None
    ordered, order = torch.sort(g_idx.long(), stable=True)
    if not torch.equal(ordered, in_order):
        raise InvalidModelError(
            f"{name}: its g_idx does not give each of {columns // group} groups {group} of its "
            f"{columns} columns. Download the model again."
        )
    return order.int()
