"""bfloat16 words in fewer bits, without loss, on all of a lane's threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.base import NativeBase
from ambidex.kernels.lossless import (
    HEADER_BYTES,
    FrameGrid,
    check_payload,
    check_words,
    damaged,
)

#: Where a frame's header says how large it is, in words of four bytes.
_NUM_BYTES_AT = 1


class LosslessOps(NativeBase):
    """``kernels/lossless.py`` is the reference, to the bit."""

    def __init__(
        self, num_threads: int, cpus: Sequence[int], level: str, nodes: Sequence[int] = ()
    ) -> None:
        super().__init__(num_threads, cpus, level, nodes)
        # Native code writes the offset of a frame that cannot be there; -1: there was none.
        self._damage = torch.full((1,), -1, dtype=torch.int64)

    def compress_words(self, words: Tensor, unit_words: int, max_bytes: int) -> Tensor | None:
        """The payload [n] uint8 of ``words`` (two bytes each, in any shape), cut at every multiple
        of ``unit_words``; None where it would take more than ``max_bytes``."""
        check_words(words, "Words")
        if self._is_recording():
            raise KernelError("Words cannot be compressed while a step is recorded.")
        grid = FrameGrid(words.numel(), unit_words)
        shape = (
            grid.num_words,
            grid.unit_words,
            grid.frame_words,
            grid.frames_per_unit,
            grid.num_frames,
        )
        headers = torch.empty(grid.num_frames, HEADER_BYTES, dtype=torch.uint8)
        self._native.plan_frames(self._context, words.data_ptr(), headers.data_ptr(), *shape)
        ends = headers.view(torch.int32)[:, _NUM_BYTES_AT].cumsum(0, dtype=torch.int64)
        num_bytes = int(ends[-1]) if grid.num_frames else 0
        if num_bytes > max_bytes:
            return None
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        starts = ends - headers.view(torch.int32)[:, _NUM_BYTES_AT]
        self._native.encode_frames(
            self._context,
            words.data_ptr(),
            headers.data_ptr(),
            starts.data_ptr(),
            payload.data_ptr(),
            *shape,
        )
        return payload

    def decompress_words(self, payload: Tensor, num_words: int, out: Tensor) -> None:
        """Writes the words of ``payload`` [n] uint8 to ``out``: ``num_words`` of two bytes, in any
        shape.

        Raises KernelError where the payload is no run of frames with that many words; ``out`` then
        holds anything. While recording, that is told by :meth:`check_decompressed` after a replay.
        """
        check_payload(payload, num_words, out)
        native: Any = self._native
        native.decompress(
            self._context,
            payload.data_ptr(),
            payload.numel(),
            out.data_ptr(),
            num_words,
            self._damage.data_ptr(),
        )
        if not self._is_recording():
            self._check_damage(payload.numel(), num_words)

    def check_decompressed(self) -> None:
        """Raises KernelError where a replay has met a damaged payload since the last call."""
        if int(self._damage) < 0:
            return
        offset = int(self._damage)
        self._damage.fill_(-1)
        raise KernelError(
            f"A compressed weight was damaged at its byte {offset} when a step was replayed. Load "
            "the model again; if this comes back, leave --offload-compress out, and have the "
            "memory tested."
        )

    def _check_damage(self, num_bytes: int, num_words: int) -> None:
        offset = int(self._damage)
        if offset >= 0:
            self._damage.fill_(-1)
            raise damaged(offset, num_bytes, num_words)
