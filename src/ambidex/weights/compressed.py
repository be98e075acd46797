"""Weights that are kept in the host's memory compressed, without loss, and cross the link so.

The accelerator decompresses each where it has arrived, into memory for one weight, right before
its product. Which weights: bfloat16 ones of which a step streams every row, and where that is
faster than the link with the bytes as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ambidex.device.queued import memory_of, num_bytes
from ambidex.memory.compression import (
    TYPICAL_RATIO,
    decompressed_bytes_per_s,
    worth_compressing,
)
from ambidex.quant.lossless import Codec, Compressed, compress

if TYPE_CHECKING:
    from ambidex.kernels.table import Weight

#: Rows that can be sent alone.
UNIT_ROWS = 64


class Decompressor(Protocol):
    """The part of an accelerator's table that is used here."""

    def decompress_words(self, payload: Tensor, num_words: int, out: Tensor) -> None: ...


class CompressedWeight:
    """A packed matrix of bfloat16 numbers of which there is only the payload.

    ``form``: the matrix without memory behind it.
    """

    __slots__ = ("_compressed", "form")

    def __init__(self, form: Weight, compressed: Compressed) -> None:
        self.form = form
        self._compressed = compressed

    @property
    def shape(self) -> tuple[int, int]:
        return self.form.shape

    @property
    def num_bytes(self) -> int:
        """Bytes that are held, and that cross the link."""
        return self._compressed.num_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes that come out."""
        return 2 * self._compressed.num_words

    def gather(
        self, ranges: Sequence[tuple[int, int]], store: Callable[[list[Tensor]], Tensor]
    ) -> CompressedWeight:
        """Those rows, one range behind the other, still compressed; see ``kernels.table.Weight``.
        They are cut at multiples of 64."""
        form = self.form.gather(ranges, _no_memory)
        words_per_row = self._compressed.unit_words // UNIT_ROWS
        parts = []
        for start, end in ranges:
            # A matrix's last panel is padded.
            last = self._compressed.num_words if end == self.shape[0] else end * words_per_row
            parts.append(self._compressed.part(start * words_per_row, last))
        starts, first = [0], 0
        for part in parts:
            starts += [first + start for start in part.frame_starts[1:]]
            first = starts[-1]
        payload = store([part.payload for part in parts])
        num_words = sum(part.num_words for part in parts)
        unit = self._compressed.unit_words
        return CompressedWeight(form, Compressed(num_words, payload, unit, tuple(starts)))

    def decompressed(self, kernels: Decompressor, memory: Tensor) -> Weight:
        """The matrix, in ``memory`` [n] uint8 of the table that decompresses it."""
        out = memory[: self.raw_bytes]
        words = self._compressed.num_words
        kernels.decompress_words(self._compressed.payload, words, out.view(torch.int16))
        return self.form.gather([(0, self.shape[0])], lambda _: out)


def _no_memory(pieces: list[Tensor]) -> Tensor:
    return torch.empty(num_bytes(pieces), dtype=torch.uint8, device="meta")


def raw_bytes(weight: Any) -> int:
    """Bytes that come out of ``weight`` on the accelerator; 0 where nothing has to be."""
    return weight.raw_bytes if isinstance(weight, CompressedWeight) else 0


class Compression:
    """Decides, weight by weight, and compresses. Rates in bytes a second: of the link, and of what
    the accelerator reads of its own memory."""

    def __init__(self, link_bytes_per_s: float, device_bytes_per_s: float) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._device_bytes_per_s = device_bytes_per_s
        #: Of what has been compressed: weights, bytes before and after.
        self.num_weights = 0
        self.num_raw_bytes = 0
        self.num_bytes = 0
        #: Looked at, and left as they are.
        self.num_left = 0

    def judge(self, ratio: float = TYPICAL_RATIO) -> tuple[bool, str]:
        """Whether weights that shrink by ``ratio`` arrive sooner, and a sentence."""
        return worth_compressing(
            ratio,
            self._link_bytes_per_s,
            decompressed_bytes_per_s(ratio, self._device_bytes_per_s),
            self._device_bytes_per_s,
        )

    def compress(
        self, weight: Weight, codec: Codec, keep: Callable[[list[Tensor]], Tensor]
    ) -> CompressedWeight | None:
        """``weight``, of the host, with its payload where ``keep`` puts it; None where that is no
        gain."""
        found = memory_of(weight)
        if len(found) != 1 or found[0].dtype is not torch.bfloat16:
            self.num_left += 1
            return None
        made = compress(found[0], UNIT_ROWS * weight.shape[1], codec)
        if made is None or not self.judge(made.ratio)[0]:
            self.num_left += 1
            return None
        self.num_weights += 1
        self.num_raw_bytes += 2 * made.num_words
        self.num_bytes += made.num_bytes
        kept = Compressed(made.num_words, keep([made.payload]), made.unit_words, made.frame_starts)
        form = weight.moved(lambda tensor: torch.empty_like(tensor, device="meta"))
        return CompressedWeight(form, kept)

    def describe(self) -> str:
        """What became of the weights that were looked at."""
        if not self.num_weights:
            # Where none was, nothing of what is streamed can be compressed.
            is_worth, reason = self.judge()
            return self.judge(1.0)[1] if is_worth else reason
        text = self.judge(self.num_raw_bytes / self.num_bytes)[1]
        if self.num_left:
            text += f" {self.num_left} of {self.num_left + self.num_weights} stay as they are."
        return text
