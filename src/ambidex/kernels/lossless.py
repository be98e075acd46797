"""bfloat16 words in fewer bits, without loss: the format, and plain code that defines it.

Most exponents of a trained weight are among a few neighbours, and sign and mantissa look random.
So a word is cut into a *low byte* (its sign, then its mantissa), kept as it is, and its exponent,
of which a short code of fixed width is kept; exponents without a code are listed. That is about
11.3 bits a word, read with one look-up and no branch. Any 16 bits come back as they were.

A **payload** is a run of frames; each is a whole number of 64 bytes and is read without the
others, so that threads share them and a part of a matrix can be sent alone. All numbers are
little-endian. A frame of ``n`` words in ``b = ceil(n / 256)`` blocks is

    offset          bytes
    0               4       magic, "ABF1"
    4               4       bytes of the frame
    8               4       n, at most 32768
    12              1       w: the width of a code, 0 to 4
    16              16      the exponent of each code
    64              256 b   low bytes; zero behind the last word
    64 + 256 b      32 w b  codes: for every 64 words, w times 8 bytes with one bit a word, the
                            codes' lowest bits first; the lowest bit of the first byte is the
                            first word's
                    b       escapes of each block: how many (0 to 128), or 255
                    ...     block after block: a position in the block and an exponent, a byte
                            each, in rising order; for 255 the exponents of all 256 words

and zero elsewhere. A word that has an escape, and what is behind the last word, has code 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ambidex.errors import KernelError

#: Words of a frame, at most.
FRAME_WORDS = 32768
BLOCK_WORDS = 256
#: A payload may be cut, and memory for it lies, at multiples of this.
ALIGNMENT = 64
HEADER_BYTES = 64
MAGIC = int.from_bytes(b"ABF1", "little")
MAX_CODE_BITS = 4
#: More escapes of a block than this are not listed: all of its exponents are.
MAX_ESCAPES = 128
ALL_ESCAPE = 255

_TWO_BYTES = (torch.int16, torch.uint16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class FrameGrid:
    """How words are cut into frames: every ``unit_words`` begin a frame, so that a payload may be
    cut there; the frames of a unit are of one size, but for its last."""

    num_words: int
    unit_words: int

    def __post_init__(self) -> None:
        if self.unit_words < 1:
            raise KernelError(
                f"Units of {self.unit_words} words are asked for; a unit has at least one."
            )

    @property
    def frame_words(self) -> int:
        """Words of a frame: equal shares of a unit, in whole blocks."""
        share = -(-self.unit_words // -(-self.unit_words // FRAME_WORDS))
        return -(-share // BLOCK_WORDS) * BLOCK_WORDS

    @property
    def frames_per_unit(self) -> int:
        return -(-self.unit_words // self.frame_words)

    @property
    def num_frames(self) -> int:
        return self.frames_before(self.num_words)

    def frames_before(self, word: int) -> int:
        """Frames that begin before ``word``."""
        units, rest = divmod(word, self.unit_words)
        return units * self.frames_per_unit + -(-rest // self.frame_words)

    def frames(self) -> Iterator[tuple[int, int]]:
        """First word and end of every frame."""
        for unit in range(0, self.num_words, self.unit_words):
            end = min(unit + self.unit_words, self.num_words)
            for first in range(unit, end, self.frame_words):
                yield first, min(first + self.frame_words, end)


def check_words(words: Tensor, what: str) -> None:
    """Raises KernelError unless ``words`` are numbers of two bytes, contiguous, on the CPU."""
    if words.device.type != "cpu" or words.dtype not in _TWO_BYTES or not words.is_contiguous():
        raise KernelError(
            f"{what} are {words.dtype} {list(words.shape)} on {words.device}, and must be bfloat16 "
            "or 16-bit integers, contiguous, on the CPU."
        )


def check_payload(payload: Tensor, num_words: int, out: Tensor) -> None:
    """Raises KernelError unless ``payload`` is [n] uint8 and ``out`` has room for the words."""
    if payload.device.type != "cpu" or payload.dtype is not torch.uint8 or payload.dim() != 1:
        raise KernelError(
            f"A payload is {payload.dtype} {list(payload.shape)} on {payload.device}, and must be "
            "uint8 [n] on the CPU."
        )
    if not payload.is_contiguous():
        raise KernelError("A payload's bytes do not lie side by side.")
    check_words(out, "Decompressed words")
    if num_words < 0 or out.numel() != num_words:
        raise KernelError(
            f"{num_words} words are to be decompressed into memory for {out.numel()}."
        )


def damaged(offset: int, num_bytes: int, num_words: int) -> KernelError:
    """The error of a payload that is no run of frames with that many words."""
    return KernelError(
        f"A compressed weight of {num_words} words is damaged: what is at byte {offset} of its "
        f"{num_bytes} is no frame that could be there. Load the model again; if this comes back, "
        "leave --offload-compress out, and have the memory tested."
    )


def as_array(words: Tensor) -> np.ndarray:
    """The words [n] uint16, in the same memory."""
    return words.detach().view(-1).view(torch.int16).numpy().view(np.uint16)


# ------------------------------------------------------------------------------ writing


def compress_words(words: Tensor, unit_words: int, max_bytes: int) -> Tensor | None:
    """The payload [n] uint8 of ``words``, cut at every multiple of ``unit_words``; None where it
    would take more than ``max_bytes``. ``words`` hold two bytes each, in any shape."""
    check_words(words, "Words")
    flat = as_array(words)
    grid = FrameGrid(flat.size, unit_words)
    frames = [_encode(flat[first:end]) for first, end in grid.frames()]
    if sum(len(frame) for frame in frames) > max_bytes:
        return None
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *frames]))


def _encode(words: np.ndarray) -> np.ndarray:
    """The frame of up to FRAME_WORDS words."""
    num_blocks = -(-words.size // BLOCK_WORDS)
    exponents = np.zeros(num_blocks * BLOCK_WORDS, np.uint8)
    exponents[: words.size] = (words >> 7) & 0xFF
    low_bytes = np.zeros_like(exponents)
    low_bytes[: words.size] = ((words >> 8) & 0x80) | (words & 0x7F)

    counts = np.bincount(exponents[: words.size], minlength=256)
    # The most frequent first, the lowest of equals.
    order = np.argsort(-counts, kind="stable")
    width = _code_bits(counts[order], num_blocks)
    coded = [int(exponent) for exponent in order[: 1 << width] if counts[exponent]]
    code_of = np.zeros(256, np.uint8)
    code_of[coded] = np.arange(len(coded))
    is_coded = np.zeros(256, np.bool_)
    is_coded[coded] = True

    is_escape = ~is_coded[exponents]
    is_escape[words.size :] = False
    codes = np.where(is_escape, 0, code_of[exponents]).astype(np.uint8)
    codes[words.size :] = 0
    bits = [
        np.packbits((codes.reshape(-1, 64) >> plane) & 1, axis=1, bitorder="little")
        for plane in range(width)
    ]
    planes = np.stack(bits, 1).ravel() if bits else np.empty(0, np.uint8)
    numbers, escapes = _escapes(
        is_escape.reshape(-1, BLOCK_WORDS), exponents.reshape(-1, BLOCK_WORDS)
    )

    num_bytes = HEADER_BYTES + low_bytes.size + planes.size + numbers.size + escapes.size
    num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    header = struct.pack("<IIIB3x16s", MAGIC, num_bytes, words.size, width, bytes(coded))
    start = np.frombuffer(header.ljust(HEADER_BYTES, b"\0"), np.uint8)
    frame = np.zeros(num_bytes, np.uint8)
    whole = np.concatenate([start, low_bytes, planes, numbers, escapes])
    frame[: whole.size] = whole
    return frame


def _code_bits(ranked: np.ndarray, num_blocks: int) -> int:
    """The width of a code that makes the shortest frame, the narrowest of equals; ``ranked``: how
    often each exponent occurs, falling."""

    def cost(width: int) -> int:
        listed = 2 * int(ranked[1 << width :].sum())
        return num_blocks * width * BLOCK_WORDS // 8 + min(listed, num_blocks * BLOCK_WORDS)

    return min(range(MAX_CODE_BITS + 1), key=cost)


def _escapes(is_escape: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of blocks [b, 256]: the number of each, uint8 [b], and what lists them, uint8."""
    counts = is_escape.sum(1)
    is_whole = counts > MAX_ESCAPES
    sizes = np.where(is_whole, BLOCK_WORDS, 2 * counts)
    starts = np.cumsum(sizes) - sizes
    listed = np.zeros(int(sizes.sum()), np.uint8)
    listed[starts[is_whole, None] + np.arange(BLOCK_WORDS)] = exponents[is_whole]
    block, position = np.nonzero(is_escape & ~is_whole[:, None])
    pairs = np.where(is_whole, 0, counts)
    rank = np.arange(block.size) - (np.cumsum(pairs) - pairs)[block]
    listed[starts[block] + 2 * rank] = position
    listed[starts[block] + 2 * rank + 1] = exponents[block, position]
    return np.where(is_whole, ALL_ESCAPE, counts).astype(np.uint8), listed


# ------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class _Frame:
    num_bytes: int
    num_words: int
    width: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_words // BLOCK_WORDS)

    @property
    def numbers_at(self) -> int:
        """Where the blocks' numbers of escapes begin."""
        block_bytes = BLOCK_WORDS + self.width * BLOCK_WORDS // 8
        return HEADER_BYTES + self.num_blocks * block_bytes


def _read_header(payload: np.ndarray, offset: int, words_left: int) -> _Frame | None:
    """The frame at ``offset``, where one can be there."""
    if payload.size - offset < HEADER_BYTES:
        return None
    magic, num_bytes, num_words, width = struct.unpack(
        "<IIIB", payload[offset : offset + 13].tobytes()
    )
    frame = _Frame(num_bytes, num_words, width)
    if (
        magic != MAGIC
        or not 1 <= num_words <= min(FRAME_WORDS, words_left)
        or width > MAX_CODE_BITS
        or num_bytes % ALIGNMENT
        or not frame.numbers_at + frame.num_blocks <= num_bytes <= payload.size - offset
    ):
        return None
    return frame


def frame_starts(payload: Tensor, num_words: int) -> list[int]:
    """Where every frame of ``payload`` begins, in bytes, and its end.

    Raises KernelError where its frames are not those of ``num_words`` words.
    """
    data, starts, word = payload.numpy(), [0], 0
    while word < num_words:
        frame = _read_header(data, starts[-1], num_words - word)
        if frame is None:
            raise damaged(starts[-1], data.size, num_words)
        starts.append(starts[-1] + frame.num_bytes)
        word += frame.num_words
    if starts[-1] != data.size:
        raise damaged(starts[-1], data.size, num_words)
    return starts


def decompress_words(payload: Tensor, num_words: int, out: Tensor) -> None:
    """Writes the words of ``payload`` [n] uint8 to ``out``: ``num_words`` of two bytes, in any
    shape.

    Raises KernelError where the payload is no run of frames with that many words; ``out`` then
    holds anything. A wrong bit elsewhere makes a wrong word.
    """
    check_payload(payload, num_words, out)
    data, words = payload.numpy(), as_array(out)
    offset = word = 0
    while word < num_words:
        frame = _read_header(data, offset, num_words - word)
        if frame is None or not _decode(
            data[offset : offset + frame.num_bytes], frame, words, word
        ):
            raise damaged(offset, data.size, num_words)
        offset += frame.num_bytes
        word += frame.num_words
    if offset != data.size:
        raise damaged(offset, data.size, num_words)


def _decode(data: np.ndarray, frame: _Frame, out: np.ndarray, word: int) -> bool:
    """Writes a frame's words behind the first ``word``; False where its escapes are damaged."""
    num_blocks, width = frame.num_blocks, frame.width
    padded = num_blocks * BLOCK_WORDS
    numbers = data[frame.numbers_at : frame.numbers_at + num_blocks]
    is_whole = numbers == ALL_ESCAPE
    pairs = np.where(is_whole, 0, numbers.astype(np.int64))
    if (pairs > MAX_ESCAPES).any():
        return False
    sizes = np.where(is_whole, BLOCK_WORDS, 2 * pairs)
    escapes_at = frame.numbers_at + num_blocks
    end = escapes_at + int(sizes.sum())
    if -(-end // ALIGNMENT) * ALIGNMENT != frame.num_bytes:
        return False

    low_bytes = data[HEADER_BYTES : HEADER_BYTES + padded].astype(np.uint16)
    planes = data[HEADER_BYTES + padded : frame.numbers_at].reshape(padded // 64, width, 8)
    codes = np.zeros((padded // 64, 64), np.uint8)
    for plane in range(width):
        codes |= np.unpackbits(planes[:, plane], axis=1, bitorder="little") << plane
    exponents = data[16:32][codes].reshape(num_blocks, BLOCK_WORDS)

    listed = data[escapes_at:end]
    starts = np.cumsum(sizes) - sizes
    exponents[is_whole] = listed[starts[is_whole, None] + np.arange(BLOCK_WORDS)]
    block = np.repeat(np.arange(num_blocks), pairs)
    rank = np.arange(block.size) - (np.cumsum(pairs) - pairs)[block]
    at = starts[block] + 2 * rank
    # One after the other where a position comes twice, as other readers do.
    exponents[block, listed[at]] = listed[at + 1]

    high = exponents.ravel().astype(np.uint16) << 7
    words = ((low_bytes & 0x80) << 8) | high | (low_bytes & 0x7F)
    out[word : word + frame.num_words] = words[: frame.num_words]
    return True
