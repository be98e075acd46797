"""Philox4x32-10: the counter-based random numbers behind sampling, in numpy.

A counter-based generator has no state: the number at output position ``i`` of a request with
seed ``s`` is a pure function of ``(s, i)``. So a seed gives the same text whatever else is in
the batch, after a preemption, and on any lane. The function is that of Salmon et al., "Parallel
Random Numbers: As Easy as 1, 2, 3" (SC11); the test holds it to the paper's published vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 10
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
#: Added to the two key words after each round: the golden ratio and sqrt(3) - 1.
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(_MASK_32)
_SHIFT_32 = np.uint64(32)
#: Up to here Python's integers are faster than numpy's arrays.
_FEW_NUMBERS = 8


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Ten rounds of Philox4x32.

    ``counter``: [..., 4] 32-bit words, ``key``: [..., 2]; returns [..., 4] random words.
    """
    # 64-bit lanes hold 32-bit words, so that a product keeps its high half.
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(_NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _SHIFT_32) ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = (product0 >> _SHIFT_32) ^ c3 ^ k1
        c3 = product0 & _LOW
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each pair of a seed and an output position.

    ``seeds``: [n], any Python integers, of which the low 64 bits count (-1 is 2**64 - 1);
    ``positions``: [n], 0 <= position < 2**64. Returns [n] float64.

    The key is (low word, high word of the seed); the counter is (low word, high word of the
    position, 0, 0). The value has 52 random bits, ``(bits + 0.5) / 2**52``: with 53 the largest
    would round to 1. It lies in [2**-53, 1 - 2**-53], all of it exact in float64.
    """
    if len(seeds) <= _FEW_NUMBERS:
        return np.array([_uniform_one(*pair) for pair in zip(seeds, positions, strict=True)])
    seed = np.array([value & _MASK_64 for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32(
        np.stack([position & _LOW, position >> _SHIFT_32, zero, zero], axis=-1).astype(np.uint32),
        np.stack([seed & _LOW, seed >> _SHIFT_32], axis=-1).astype(np.uint32),
    ).astype(np.uint64)
    bits = ((words[..., 0] << _SHIFT_32) | words[..., 1]) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _uniform_one(seed: int, position: int) -> float:
    k0, k1 = seed & _MASK_32, seed >> 32 & _MASK_32
    c0, c1, c2, c3 = position & _MASK_32, position >> 32, 0, 0
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = product1 >> 32 ^ c1 ^ k0, product1 & _MASK_32
        c2, c3 = product0 >> 32 ^ c3 ^ k1, product0 & _MASK_32
        k0, k1 = k0 + 0x9E3779B9 & _MASK_32, k1 + 0xBB67AE85 & _MASK_32
    return float(((c0 << 32 | c1) >> 12) + 0.5) * 2.0**-52
