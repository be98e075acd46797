"""Compressed words: every bit pattern comes back, nothing grows, and damage is an error."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.errors import KernelError
from ambidex.kernels import lossless as plain
from ambidex.kernels.lossless import BLOCK_WORDS, FRAME_WORDS, FrameGrid, frame_starts
from ambidex.quant.lossless import MIN_RATIO, compress, decompress

NO_LIMIT = 1 << 40

KINDS = ("weights", "noise", "zeros", "few", "pruned", "patches", "tail")


def make_words(kind: str, count: int, seed: int) -> np.ndarray:
    """``count`` words uint16: of each kind, another part of the format is in use."""
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 1 << 16, count, dtype=np.uint16)
    values = generator.standard_normal(count).astype(np.float32) * 0.02
    weights = (values.view(np.uint32) >> 16).astype(np.uint16)
    if kind == "noise":
        return noise
    if kind == "zeros":
        return np.zeros(count, np.uint16)
    if kind == "few":
        return (noise & 0x807F) | (generator.choice([0, 7, 255], count) << 7).astype(np.uint16)
    if kind == "pruned":
        return np.where(generator.random(count) < 0.5, 0, weights).astype(np.uint16)
    if kind == "patches":
        # Whole blocks without a code among others that have one.
        is_noise = generator.random(-(-count // BLOCK_WORDS)) < 0.1
        return np.where(is_noise.repeat(BLOCK_WORDS)[:count], noise, weights).astype(np.uint16)
    if kind == "tail":
        return np.where(generator.random(count) < 0.3, noise, weights).astype(np.uint16)
    return weights


def as_tensor(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int16).copy())


def payload_of(words: np.ndarray, unit_words: int = FRAME_WORDS) -> torch.Tensor:
    payload = plain.compress_words(as_tensor(words), unit_words, NO_LIMIT)
    assert payload is not None
    return payload


def words_of(payload: torch.Tensor, num_words: int) -> np.ndarray:
    out = torch.full((num_words,), -1, dtype=torch.int16)
    plain.decompress_words(payload, num_words, out)
    return out.numpy().view(np.uint16)


def width_of(payload: torch.Tensor) -> int:
    return int(payload[12])


# ------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("order", ["rising", "shuffled", "with weights"])
def test_every_bit_pattern_comes_back(order: str) -> None:
    words = np.arange(1 << 16).astype(np.uint16)
    if order != "rising":
        words = np.random.default_rng(1).permutation(words)
    if order == "with weights":
        # One pattern among 31 words that have codes: nearly all are escapes of their blocks.
        words = np.insert(
            words, np.repeat(np.arange(1 << 16), 31), make_words("weights", 31 << 16, 2)
        )
    payload = payload_of(words)
    assert np.array_equal(words_of(payload, words.size), words)
    assert width_of(payload) == (3 if order == "with weights" else 0)


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    count=st.one_of(st.integers(0, 1100), st.integers(FRAME_WORDS - 3, 2 * FRAME_WORDS + 300)),
    unit_words=st.one_of(st.integers(1, 3000), st.integers(FRAME_WORDS - 1, 3 * FRAME_WORDS)),
    seed=st.integers(0, 1 << 30),
)
def test_words_come_back_and_do_not_grow(kind: str, count: int, unit_words: int, seed: int) -> None:
    # Many frames of a few words each take long here, and are no different.
    unit_words = max(unit_words, count // 50 + 1)
    words = make_words(kind, count, seed)
    payload = payload_of(words, unit_words)
    assert np.array_equal(words_of(payload, count), words)
    grid = FrameGrid(count, unit_words)
    frames = list(grid.frames())
    assert len(frames) == grid.num_frames == len(frame_starts(payload, count)) - 1
    # Every word once, in order; a frame begins with each unit.
    ends = [end for _, end in frames]
    assert [first for first, _ in frames] == ([0, *ends[:-1]] if frames else [])
    assert (ends[-1] if ends else 0) == count
    assert set(range(0, count, unit_words)) <= {first for first, _ in frames}
    blocks = sum(-(-(end - first) // BLOCK_WORDS) for first, end in frames)
    assert payload.numel() <= blocks * (2 * BLOCK_WORDS + 1) + 128 * len(frames)
    assert payload.numel() % 64 == 0


@pytest.mark.parametrize("words", [0, 1, FRAME_WORDS, FRAME_WORDS + 1, 129 * FRAME_WORDS + 1])
def test_units_of_any_size_have_frames_that_are_not_empty(words: int) -> None:
    grid = FrameGrid(3 * words + 1, max(words, 1))
    assert all(0 < end - first <= grid.frame_words for first, end in grid.frames())
    assert len(list(grid.frames())) == grid.num_frames
    assert grid.frame_words <= FRAME_WORDS


def test_each_kind_uses_its_part_of_the_format() -> None:
    sizes = {kind: payload_of(make_words(kind, FRAME_WORDS, 3)) for kind in KINDS}
    widths = {kind: width_of(payload) for kind, payload in sizes.items()}
    assert widths == {
        "weights": 3, "noise": 0, "zeros": 0, "few": 2, "pruned": 3, "patches": 3, "tail": 3,
    }  # fmt: skip
    bits = {kind: 8 * payload.numel() / FRAME_WORDS for kind, payload in sizes.items()}
    # Sign and mantissa are 8 bits of a word; exponents of a normal distribution hold 2.55.
    assert 11.2 < bits["weights"] < 11.4
    assert bits["zeros"] < 8.1 and bits["few"] < 10.1
    assert 16 < bits["noise"] < 16.1
    assert bits["pruned"] < 12


def test_what_does_not_pay_is_left_alone() -> None:
    made = compress(as_tensor(make_words("weights", 100_000, 4)))
    assert made is not None
    assert 1.40 < made.ratio < 1.43
    assert made.ratio == 200_000 / made.payload.numel() == 200_000 / made.num_bytes
    assert compress(as_tensor(make_words("noise", 100_000, 4))) is None
    assert compress(torch.empty(0, dtype=torch.bfloat16)) is None
    # float16's numbers have other bits where exponents are looked for.
    assert compress(torch.randn(100_000).half().view(torch.int16)) is None
    words = as_tensor(make_words("weights", 5000, 4))
    size = payload_of(words.numpy().view(np.uint16)).numel()
    assert plain.compress_words(words, FRAME_WORDS, size) is not None
    assert plain.compress_words(words, FRAME_WORDS, size - 1) is None
    assert MIN_RATIO > 1


def test_bfloat16_of_any_shape() -> None:
    weight = torch.randn(12, 40, 16).bfloat16()
    made = compress(weight)
    assert made is not None
    out = torch.empty_like(weight)
    plain.decompress_words(made.payload, made.num_words, out)
    assert torch.equal(out, weight)
    assert torch.equal(decompress(made), weight.view(-1).view(torch.int16))


# ------------------------------------------------------------------------------ parts


@settings(max_examples=40, deadline=None)
@given(
    units=st.integers(1, 6),
    unit_words=st.sampled_from([64, 640, 64 * 40, FRAME_WORDS, FRAME_WORDS + 64]),
    missing=st.integers(0, 63),
    seed=st.integers(0, 1 << 30),
    data=st.data(),
)
def test_a_part_is_read_alone(
    units: int, unit_words: int, missing: int, seed: int, data: Any
) -> None:
    count = units * unit_words - missing
    words = make_words("weights", count, seed)
    whole = compress(as_tensor(words), unit_words)
    if whole is None:
        # A header for every few words.
        assert unit_words < 1000
        return
    first = data.draw(st.integers(0, units - 1))
    end = data.draw(st.integers(first, units))
    part = whole.part(first * unit_words, min(end * unit_words, count))
    want = words[first * unit_words : end * unit_words]
    assert part.num_words == want.size and part.unit_words == unit_words
    # Sent alone: from memory of its own.
    assert np.array_equal(words_of(part.payload.clone(), want.size), want)
    assert list(part.frame_starts) == frame_starts(part.payload, want.size)
    if want.size:
        assert (
            part.part(0, min(unit_words, want.size)).payload.data_ptr() == part.payload.data_ptr()
        )
    if (first, end) != (0, units):
        assert part.num_bytes < whole.num_bytes


def test_a_part_is_cut_at_units_only() -> None:
    made = compress(as_tensor(make_words("weights", 10_000, 5)), 1024)
    assert made is not None
    assert made.part(1024, 10_000).num_words == 10_000 - 1024
    for first, end in (
        (0, 1000),
        (1, 1024),
        (1024, 5000),
        (-1024, 1024),
        (2048, 1024),
        (0, 10_240),
    ):
        with pytest.raises(KernelError, match=rf"{first}"):
            made.part(first, end)


# ------------------------------------------------------------------------------ the format


def test_a_frame_written_by_hand() -> None:
    """Two blocks, the second of three words; what the page says, byte by byte."""
    words = np.full(259, 0x3F80, np.uint16)  # 1.0: exponent 127
    words[1] = 0xBF81  # negative, exponent 127
    words[64] = 0x3F00  # exponent 126
    words[200] = 0x0001  # a denormal: exponent 0, an escape
    words[257] = 0x7FC1  # NaN: exponent 255, an escape
    header = struct.pack("<4sIIB3x", b"ABF1", 704, 259, 1) + bytes([127, 126])
    low = bytearray(512)
    low[1], low[200], low[257] = 0x81, 0x01, 0x41
    codes = bytearray(64)
    codes[8] = 1  # the second eight bytes are words 64 to 127
    escapes = bytes([1, 1, 200, 0, 1, 255])
    frame = (header.ljust(64, b"\0") + low + codes + escapes).ljust(704, b"\0")
    got = words_of(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 259)
    assert np.array_equal(got, words)
    # The encoder finds that one code is enough here; its frame reads the same.
    assert np.array_equal(words_of(payload_of(words), 259), words)
    # With all exponents of a block listed instead.
    listed = np.full(256, 127, np.uint8)
    listed[64], listed[200] = 126, 0
    escapes = bytes([255, 1]) + listed.tobytes() + bytes([1, 255])
    num_bytes = 64 + 512 + 64 + len(escapes)
    num_bytes += -num_bytes % 64
    frame = header.replace(struct.pack("<I", 704), struct.pack("<I", num_bytes)).ljust(64, b"\0")
    frame = (frame + low + bytes(64) + escapes).ljust(num_bytes, b"\0")
    got = words_of(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 259)
    assert np.array_equal(got, words)


def test_equal_counts_give_the_lowest_exponents_codes() -> None:
    words = (np.array([9, 3, 200, 3, 9, 200] * 100) << 7).astype(np.uint16)
    payload = payload_of(words)
    assert width_of(payload) == 2
    assert payload[16:20].tolist() == [3, 9, 200, 0]


# ------------------------------------------------------------------------------ damage

#: What to change in a sound payload of 2,000 words in frames of 1,024, and what is then wrong.
DAMAGE: dict[str, Any] = {
    "empty": lambda data: data[:0],
    "a byte short": lambda data: data[:-1],
    "a line short": lambda data: data[:-64],
    "half of a header": lambda data: data[:32],
    "one frame only": lambda data: data[: int(data[4:8].view(np.uint32)[0])],
    "longer": lambda data: np.concatenate([data, np.zeros(64, np.uint8)]),
    "a frame twice": lambda data: np.concatenate([data, data]),
    "magic": lambda data: changed(data, 0, 0),
    "no bytes": lambda data: changed(data, 4, 0, 0, 0, 0),
    "a line fewer": lambda data: changed(data, 4, *le(int(data[4:8].view(np.uint32)[0]) - 64)),
    "a line more": lambda data: changed(data, 4, *le(int(data[4:8].view(np.uint32)[0]) + 64)),
    "bytes not by 64": lambda data: changed(data, 4, *le(int(data[4:8].view(np.uint32)[0]) + 1)),
    "very many bytes": lambda data: changed(data, 4, 0xC0, 0xFF, 0xFF, 0xFF),
    "no words": lambda data: changed(data, 8, *le(0)),
    "more words": lambda data: changed(data, 8, *le(1025)),
    "fewer words": lambda data: changed(data, 8, *le(700)),
    "very many words": lambda data: changed(data, 8, 0xFF, 0xFF, 0xFF, 0xFF),
    "wider": lambda data: changed(data, 12, 4),
    "narrower": lambda data: changed(data, 12, 1),
    "width 5": lambda data: changed(data, 12, 5),
    "width 255": lambda data: changed(data, 12, 255),
    "too many escapes": lambda data: changed(data, 64 + 1024 + 3 * 128, 129),
    "all escape": lambda data: changed(data, 64 + 1024 + 3 * 128, 255, 255, 255, 255),
}


def le(value: int) -> bytes:
    return struct.pack("<I", value)


def changed(data: np.ndarray, at: int, *values: int) -> np.ndarray:
    data[at : at + len(values)] = values
    return data


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_an_error(name: str) -> None:
    sound = payload_of(make_words("weights", 2000, 6), 1024)
    assert width_of(sound) == 3
    data = torch.from_numpy(DAMAGE[name](sound.numpy().copy()))
    out = torch.empty(2000, dtype=torch.int16)
    with pytest.raises(KernelError, match=r"2000 words is damaged.*byte \d+.*Load the model again"):
        plain.decompress_words(data, 2000, out)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30), flips=st.integers(1, 8), in_header=st.booleans())
def test_any_flipped_bits_give_an_error_or_words(seed: int, flips: int, in_header: bool) -> None:
    words = make_words("tail", 1500, 7)
    data = payload_of(words, 700).numpy().copy()
    generator = np.random.default_rng(seed)
    for _ in range(flips):
        data[generator.integers(28 if in_header else data.size)] ^= 1 << generator.integers(8)
    error = ""
    try:
        got = words_of(torch.from_numpy(data), 1500)
    except KernelError as caught:
        error = str(caught)
    assert "damaged" in error or got.size == 1500


def test_tensors_that_cannot_be_read() -> None:
    words = torch.zeros(512, dtype=torch.int16)
    payload = payload_of(np.zeros(512, np.uint16))
    for wrong in (words.float(), words[::2], torch.zeros(4, dtype=torch.uint8)):
        with pytest.raises(KernelError, match="Words are"):
            plain.compress_words(wrong, 64, NO_LIMIT)
    with pytest.raises(KernelError, match="Units of 0"):
        plain.compress_words(words, 0, NO_LIMIT)
    for out in (words.float(), torch.zeros(1024, dtype=torch.int16)[::2]):
        with pytest.raises(KernelError, match="Decompressed words"):
            plain.decompress_words(payload, 512, out)
    for count in (511, 513, -1):
        with pytest.raises(KernelError, match=rf"{count} words are to be"):
            plain.decompress_words(payload, count, words)
    for wrong in (payload.to(torch.int8), payload.view(2, -1), payload.repeat_interleave(2)[::2]):
        with pytest.raises(KernelError, match="payload"):
            plain.decompress_words(wrong, 512, words)
    with pytest.raises(KernelError, match="damaged"):
        plain.decompress_words(payload, 500, words[:500])
