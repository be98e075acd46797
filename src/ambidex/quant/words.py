"""Small codes out of 32-bit words: what the formats of Hugging Face checkpoints are packed in."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Codes of 2, 3, 4 or 8 bits out of ``words`` int32 [rows, n], each row one stream of bits,
    the lowest first: uint8 [rows, n * 32 / bits]. ``n`` is a multiple of 3 for 3 bits."""
    rows, num_words = words.shape
    words = words.contiguous()
    mask = (1 << bits) - 1
    if bits == 3:
        # A code may cross from one word of three to the next.
        wide = words.view(rows, num_words // 3, 3).long() & 0xFFFFFFFF
        codes = torch.empty(rows, num_words // 3, 32, dtype=torch.uint8)
        for index in range(32):
            word, shift = divmod(index * bits, 32)
            code = wide[:, :, word] >> shift
            if shift + bits > 32:
                code = code | (wide[:, :, word + 1] << (32 - shift))
            codes[:, :, index] = (code & mask).to(torch.uint8)
        return codes.view(rows, -1)
    packed = words.view(torch.uint8)
    if bits == 8:
        return packed.clone()
    count = 8 // bits
    codes = torch.empty(rows, packed.shape[1], count, dtype=torch.uint8)
    for index in range(count):
        codes[:, :, index] = (packed >> (index * bits)) & mask
    return codes.view(rows, -1)


def repeat_groups(values: Tensor, repeats: int) -> Tensor:
    """``values`` [rows, groups], each ``repeats`` times, in memory of its own."""
    return values.repeat_interleave(repeats, 1) if repeats > 1 else values.contiguous()


def narrow_scale(scale: Tensor) -> Tensor:
    """float16 and float32 as they are, others (bfloat16) widened: a form has those two."""
    return scale if scale.dtype in (torch.float16, torch.float32) else scale.float()
