"""Weights that cross a link compressed, without loss: what is kept in host memory for them.

``kernels/lossless.py`` defines the format. Kernel tables write and read it; where none is given,
plain code does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels import lossless
from ambidex.kernels.lossless import FRAME_WORDS, FrameGrid

#: A payload is kept where it is smaller than the words by at least this factor.
MIN_RATIO = 1.05


class Codec(Protocol):
    """The part of a kernel table that writes and reads payloads."""

    def compress_words(self, words: Tensor, unit_words: int, max_bytes: int) -> Tensor | None: ...

    def decompress_words(self, payload: Tensor, num_words: int, out: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Compressed:
    """Words of two bytes, compressed."""

    num_words: int
    #: [n] uint8: what crosses the link.
    payload: Tensor
    #: It may be cut at multiples of this many words.
    unit_words: int
    #: Where each frame begins, and the end, in bytes.
    frame_starts: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.payload.numel()

    @property
    def ratio(self) -> float:
        """Bytes of the words for one of the payload; 1 where there are none."""
        return 2 * self.num_words / self.num_bytes if self.num_words else 1.0

    def part(self, first_word: int, end_word: int) -> Compressed:
        """Words ``first_word`` to ``end_word`` alone, in the same memory. Both are multiples of
        ``unit_words``, or the end."""
        if not 0 <= first_word <= end_word <= self.num_words:
            raise KernelError(
                f"Words {first_word} to {end_word} are not among {self.num_words} compressed ones."
            )
        if first_word % self.unit_words or (
            end_word % self.unit_words and end_word != self.num_words
        ):
            raise KernelError(
                f"Compressed words cannot be cut at {first_word} and {end_word}: "
                f"not by {self.unit_words}."
            )
        grid = FrameGrid(self.num_words, self.unit_words)
        first, end = grid.frames_before(first_word), grid.frames_before(end_word)
        starts = self.frame_starts[first : end + 1]
        return Compressed(
            end_word - first_word,
            self.payload[starts[0] : starts[-1]],
            self.unit_words,
            tuple(start - starts[0] for start in starts),
        )


def compress(
    words: Tensor, unit_words: int = FRAME_WORDS, codec: Codec | None = None
) -> Compressed | None:
    """``words`` (bfloat16 or 16-bit integers, contiguous) compressed; None where that would not
    make them smaller by :data:`MIN_RATIO`.

    ``unit_words``: what may be cut off alone, for example 64 rows of a matrix.
    """
    max_bytes = int(2 * words.numel() / MIN_RATIO)
    payload = (codec or lossless).compress_words(words, unit_words, max_bytes)
    if payload is None or not words.numel():
        return None
    starts = lossless.frame_starts(payload, words.numel())
    return Compressed(words.numel(), payload, unit_words, tuple(starts))


def decompress(compressed: Compressed, codec: Codec | None = None) -> Tensor:
    """The words, [num_words] int16. Raises KernelError where the payload is damaged."""
    out = torch.empty(compressed.num_words, dtype=torch.int16)
    (codec or lossless).decompress_words(compressed.payload, compressed.num_words, out)
    return out
