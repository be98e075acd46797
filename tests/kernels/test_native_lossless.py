"""Compressed words, natively, against kernels/lossless.py: the same bytes and the same errors."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.errors import KernelError
from ambidex.kernels import lossless as plain
from ambidex.kernels.cpu.lossless import LosslessOps
from ambidex.kernels.lossless import BLOCK_WORDS, FRAME_WORDS
from ambidex.kernels.native import NativeKernels
from ambidex.quant.lossless import compress, decompress

native: Any = importlib.import_module("ambidex.kernels.cpu._native")
LEVELS = native.supported_levels()
NO_LIMIT = 1 << 40
CANARY = 0x5AA5


@pytest.fixture(scope="module")
def ops() -> Callable[[str, int], LosslessOps]:
    made: dict[tuple[str, int], LosslessOps] = {}

    def get(level: str, threads: int) -> LosslessOps:
        if (level, threads) not in made:
            made[level, threads] = LosslessOps(threads, [], level)
        return made[level, threads]

    return get


def make_words(count: int, seed: int, num_exponents: int, share: float) -> torch.Tensor:
    """Words with ``num_exponents`` exponents, but for a ``share`` with any, which lies in patches
    for odd seeds."""
    generator = np.random.default_rng(seed)
    low = generator.integers(0, 1 << 16, count) & 0x807F
    usual = generator.permutation(256)[:num_exponents]
    # Falling frequencies, as trained weights have them.
    exponents = usual[np.minimum(generator.geometric(0.4, count) - 1, num_exponents - 1)]
    if seed % 2:
        odd = (generator.random(-(-count // BLOCK_WORDS)) < share).repeat(BLOCK_WORDS)[:count]
    else:
        odd = generator.random(count) < share
    exponents = np.where(odd, generator.integers(0, 256, count), exponents)
    return torch.from_numpy((low | exponents << 7).astype(np.uint16).view(np.int16))


def outcome(decompress: Callable[..., None], payload: torch.Tensor, num_words: int) -> Any:
    """The words, or the error; what lies around the words must stay as it is."""
    around = torch.full((num_words + 128,), CANARY, dtype=torch.int16)
    inside = around[64 : 64 + num_words]
    try:
        decompress(payload, num_words, inside)
        result: Any = inside.tolist()
    except KernelError as error:
        result = str(error)
    assert (around[:64] == CANARY).all() and (around[64 + num_words :] == CANARY).all()
    return result


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    count=st.one_of(st.integers(0, 1100), st.integers(FRAME_WORDS - 3, 2 * FRAME_WORDS + 300)),
    unit_words=st.one_of(st.integers(1, 3000), st.integers(FRAME_WORDS - 1, 3 * FRAME_WORDS)),
    seed=st.integers(0, 1 << 30),
    num_exponents=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 40, 256]),
    share=st.sampled_from([0.0, 0.003, 0.05, 0.4, 1.0]),
    threads=st.integers(1, 3),
)
def test_bytes_and_words_are_the_reference_s(
    ops: Any, level: str, count: int, unit_words: int, seed: int, num_exponents: int, share: float,
    threads: int,
) -> None:  # fmt: skip
    unit_words = max(unit_words, count // 50 + 1)
    words = make_words(count, seed, num_exponents, share)
    want = plain.compress_words(words, unit_words, NO_LIMIT)
    one = ops(level, threads)
    got = one.compress_words(words, unit_words, NO_LIMIT)
    assert want is not None and got is not None and torch.equal(got, want)
    assert one.compress_words(words, unit_words, want.numel()) is not None
    if count:
        assert one.compress_words(words, unit_words, want.numel() - 1) is None
    assert outcome(one.decompress_words, want, count) == words.tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", range(5))
def test_every_bit_pattern_beside_codes_of_each_width(ops: Any, level: str, width: int) -> None:
    one = ops(level, 2)
    patterns = torch.arange(1 << 16).to(torch.int16)
    # So many others with as many exponents as there are codes that the width is chosen for them.
    generator = np.random.default_rng(width)
    exponents = generator.integers(100, 100 + (1 << width), (31, 1 << 16))
    usual = generator.integers(0, 1 << 16, exponents.shape) & 0x807F | exponents << 7
    others = torch.from_numpy(usual.astype(np.uint16).view(np.int16))
    words = torch.cat([others, patterns[None]]).t().contiguous().view(-1)
    payload = one.compress_words(words, FRAME_WORDS, NO_LIMIT)
    assert payload is not None and int(payload[12]) == width
    out = torch.empty_like(words)
    one.decompress_words(payload, words.numel(), out)
    assert torch.equal(out, words)
    # And alone, where nearly every word is an escape.
    made = one.compress_words(patterns, FRAME_WORDS, NO_LIMIT)
    assert outcome(one.decompress_words, made, 1 << 16) == patterns.tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_a_matrix_and_its_parts(ops: Any, level: str) -> None:
    one, num_in = ops(level, 2), 200
    weight = (torch.randn(20, num_in, 16) * 0.02).bfloat16()  # panels of 16 rows
    unit_words = 64 * num_in
    made = compress(weight, unit_words, one)
    assert made is not None and made.ratio > 1.3
    assert torch.equal(decompress(made, one), weight.view(-1).view(torch.int16))
    out = torch.empty(12, num_in, 16, dtype=torch.bfloat16)
    part = made.part(unit_words, 4 * unit_words)
    one.decompress_words(part.payload, part.num_words, out)
    assert torch.equal(out, weight[4:16])
    noise = torch.randint(-(1 << 15), 1 << 15, (5000,)).to(torch.int16)
    assert compress(noise, unit_words, one) is None


# ------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    flips=st.integers(0, 6),
    where=st.sampled_from(["headers", "escapes", "anywhere"]),
    cut=st.sampled_from([0, 0, 0, 1, 64, 640]),
    threads=st.integers(1, 3),
)
def test_damage_gives_what_the_reference_gives(
    ops: Any, level: str, seed: int, flips: int, where: str, cut: int, threads: int
) -> None:
    count = 1500
    sound = plain.compress_words(make_words(count, seed, 8, 0.02), 600, NO_LIMIT)
    assert sound is not None
    starts = plain.frame_starts(sound, count)
    data = sound.numpy().copy()
    generator = np.random.default_rng(seed)
    for _ in range(flips):
        frame = generator.integers(len(starts) - 1)
        first, end = {
            "headers": (starts[frame], starts[frame] + 28),
            "escapes": (starts[frame + 1] - 64, starts[frame + 1]),
            "anywhere": (0, data.size),
        }[where]
        data[generator.integers(first, end)] ^= 1 << generator.integers(8)
    payload = torch.from_numpy(data[: data.size - cut].copy())
    want = outcome(plain.decompress_words, payload, count)
    got = outcome(ops(level, threads).decompress_words, payload, count)
    assert got == want
    if cut and not flips:
        assert "damaged" in want


def sound_frames_in_a_wrong_place() -> dict[str, tuple[torch.Tensor, int]]:
    """Payloads in which only one number is wrong, and how many words are asked for."""
    words = make_words(2000, 10, 8, 0.02)
    sound = plain.compress_words(words, 600, NO_LIMIT)
    assert sound is not None
    starts = plain.frame_starts(sound, 2000)
    # The first frames of both workers' shares.
    two = sound.clone()
    two[[starts[1], starts[2]]] = 0
    # One block that lists 200 escapes, and has room for them.
    header = struct.pack("<4sIIB", b"ABF1", 768, 256, 0).ljust(64 + 256, b"\0")
    listed = bytes([200]) + bytes(range(200)) * 2
    too_many = bytearray((header + listed).ljust(768, b"\0"))
    return {
        "more words": (sound, 1500),
        "fewer words": (sound, 2001),
        "one frame more": (torch.cat([sound, sound[starts[3] :]]), 2000),
        "zeros behind": (torch.cat([sound, torch.zeros(64, dtype=torch.uint8)]), 2000),
        "two damaged frames": (two, 2000),
        "too many escapes": (torch.frombuffer(too_many, dtype=torch.uint8), 256),
        "no words": (sound, 0),
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sound_frames_in_a_wrong_place())
def test_frames_that_do_not_belong_are_told_apart(ops: Any, level: str, name: str) -> None:
    payload, count = sound_frames_in_a_wrong_place()[name]
    want = outcome(plain.decompress_words, payload, count)
    assert "damaged" in want
    for threads in (1, 2, 3):
        # Which worker is first differs from time to time.
        for _ in range(20):
            assert outcome(ops(level, threads).decompress_words, payload, count) == want


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_behind_a_payload_is_read(ops: Any, level: str) -> None:
    """The page behind it cannot be read: whoever does, ends this process."""
    page = mmap.PAGESIZE
    count = 700
    one = ops(level, 1)
    payload = one.compress_words(make_words(count, 4, 8, 0.02), FRAME_WORDS, NO_LIMIT)
    assert payload is not None
    room = -(-payload.numel() // page) * page
    memory = mmap.mmap(-1, room + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(start + room), ctypes.c_size_t(page), 0) == 0
    whole = torch.frombuffer(memory, dtype=torch.uint8)[:room]
    try:
        generator = np.random.default_rng(8)
        for size in (payload.numel(), *generator.integers(0, payload.numel(), 40).tolist()):
            at_end = whole[room - size :]
            at_end.copy_(payload[:size])
            for _ in range(20):
                result = outcome(one.decompress_words, at_end, count)
                assert isinstance(result, list) or "damaged" in result
                if size:
                    bit = 1 << int(generator.integers(8))
                    at_end[int(generator.integers(min(size, 64)))] ^= bit
    finally:
        assert protect(ctypes.c_void_p(start + room), ctypes.c_size_t(page), 3) == 0


def test_an_error_does_not_stay(ops: Any) -> None:
    one = ops(LEVELS[-1], 2)
    words = make_words(3000, 2, 8, 0.0)
    payload = one.compress_words(words, 1024, NO_LIMIT)
    assert payload is not None
    with pytest.raises(KernelError, match="damaged"):
        one.decompress_words(payload[:-64], 3000, torch.empty_like(words))
    out = torch.empty_like(words)
    one.decompress_words(payload, 3000, out)
    assert torch.equal(out, words)
    one.check_decompressed()


def test_tensors_that_cannot_be_read(ops: Any) -> None:
    one = ops("generic", 1)
    words = torch.zeros(512, dtype=torch.int16)
    with pytest.raises(KernelError, match="Words are"):
        one.compress_words(words[::2], 64, NO_LIMIT)
    with pytest.raises(KernelError, match="Units of 0"):
        one.compress_words(words, 0, NO_LIMIT)
    payload = one.compress_words(words, 512, NO_LIMIT)
    with pytest.raises(KernelError, match="511 words are to be"):
        one.decompress_words(payload, 511, words)
    with pytest.raises(KernelError, match="payload is"):
        one.decompress_words(payload.view(2, -1), 512, words)


# ------------------------------------------------------------------------------ replay


@pytest.mark.parametrize("level", LEVELS)
def test_a_recorded_step_decompresses_at_its_point(level: str) -> None:
    kernels = NativeKernels(2, [], level)
    weights = [torch.randn(32, 64).bfloat16() for _ in range(2)]
    payloads = []
    for weight in weights:
        panels = kernels.pack_float(weight).panels
        payload = kernels.compress_words(panels, 64 * 64, NO_LIMIT)
        assert payload is not None
        payloads.append(payload)
    # Both weights arrive in the same place, one after the other.
    crossed = torch.zeros(max(payload.numel() for payload in payloads), dtype=torch.uint8)
    place = kernels.pack_float(torch.zeros_like(weights[0]))
    ids, positions = torch.tensor([3, 31, 8]), torch.zeros(3, dtype=torch.int64)

    def compute(max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        kernels.decompress_words(crossed[: payloads[0].numel()], place.panels.numel(), place.panels)
        hidden = kernels.embedding(torch.zeros(max_tokens, dtype=torch.int64), place)
        with pytest.raises(KernelError, match="while a step is recorded"):
            kernels.compress_words(place.panels, 64, NO_LIMIT)
        return hidden, kernels.take_logit_rows(hidden, [])

    recording = kernels.record(8, 4, compute)
    assert not place.panels.any(), "recording computes nothing"
    kernels.set_step(ids, positions, 3)
    kernels.set_logit_rows([0])
    crossed[: payloads[0].numel()] = payloads[0]
    recording.replay()
    kernels.check_decompressed()
    assert torch.equal(recording.hidden[:3], weights[0][ids].float())
    # What arrives is damaged: told after the replay, once.
    crossed[0] ^= 1
    recording.replay()
    with pytest.raises(KernelError, match="damaged at its byte 0"):
        kernels.check_decompressed()
    kernels.check_decompressed()
    crossed[0] ^= 1
    recording.replay()
    kernels.check_decompressed()
