"""The generator against its published vectors, and the uniforms as a sample of what they claim."""

from __future__ import annotations

import numpy as np
import pytest

from ambidex.kernels.philox import philox4x32, uniform

#: Random123's known answers for philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, output: str) -> None:
    assert philox4x32(words(counter), words(key)).tolist() == words(output).tolist()


def test_known_answers_as_one_batch() -> None:
    counters, keys, outputs = (
        np.stack([words(t) for t in c]) for c in zip(*KNOWN_ANSWERS, strict=True)
    )
    assert philox4x32(counters, keys).tolist() == outputs.tolist()


def test_uniform_is_the_documented_function_of_the_words() -> None:
    seed, position = 0x299F31D0_A4093822, 0x00000007_00000005
    out = philox4x32(
        np.array([5, 7, 0, 0], dtype=np.uint32),
        np.array([0xA4093822, 0x299F31D0], dtype=np.uint32),
    )
    bits = ((int(out[0]) << 32) | int(out[1])) >> 12
    assert uniform([seed], [position]).tolist() == [(bits + 0.5) / 2**52]
    # Fixed for ever: a change here would change the text of every seeded request.
    assert uniform([0], [0]).tolist() == [(0x6627E8D5E169C + 0.5) / 2**52]


def test_few_numbers_are_those_of_many() -> None:
    rng = np.random.default_rng(5)
    seeds = [int(x) - 2**63 for x in rng.integers(0, 2**64, 300, dtype=np.uint64)]
    positions = [int(x) >> 12 * (i % 5) for i, x in enumerate(rng.bit_generator.random_raw(300))]
    many = uniform(seeds, positions)
    for at in range(300):
        assert uniform(seeds[at : at + 1], positions[at : at + 1]) == many[at]
    assert uniform([], []).shape == (0,)


def test_ends_of_the_range_are_exact_and_open() -> None:
    assert (0 + 0.5) * 2.0**-52 > 0.0
    assert (float(2**52 - 1) + 0.5) * 2.0**-52 == 1 - 2.0**-53 < 1.0


def test_seed_is_taken_modulo_two_to_the_64() -> None:
    assert uniform([-1], [3]) == uniform([2**64 - 1], [3]) == uniform([2**65 - 1], [3])


def test_a_value_does_not_depend_on_the_batch() -> None:
    seeds, positions = list(range(100, 164)), [i * i for i in range(64)]
    together = uniform(seeds, positions).tolist()
    assert together == [uniform([s], [p]).item() for s, p in zip(seeds, positions, strict=True)]
    assert uniform([], []).shape == (0,)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_uniform_and_independent_of_its_neighbour(vary: str) -> None:
    n = 40_000
    fixed, varied = [12345] * n, list(range(n))
    u = uniform(fixed, varied) if vary == "position" else uniform(varied, fixed)
    # 99.9% points of chi-square with 63 and 255 degrees of freedom: 103.4 and 330.5.
    assert chi_square(np.bincount((u * 64).astype(int), minlength=64)) < 103.4
    cell = (u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int)
    assert chi_square(np.bincount(cell, minlength=256)) < 330.5
    assert len(set(u.tolist())) == n
