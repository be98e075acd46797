"""A step's native calls, recorded once and replayed for every batch.

While recording, tensors stand for the largest batch; how many of their rows count is read from the
step's parameters at replay. So there are no buckets and no padding. Results lie in an arena: its
memory is handed on as soon as the last tensor over it is gone, which is right because the calls
are replayed in the order in which they were recorded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64


class _Held(np.ndarray):
    """A piece of the arena in use; numpy's own arrays cannot tell when they die."""


class Arena:
    """Memory for the results of recorded calls. Pages are taken when they are first written."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._all: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces: what a step with the largest batch touches."""
        return sum(piece.nbytes for piece in self._all)

    def tensors(self) -> list[Tensor]:
        """All pieces, as bytes."""
        return [torch.from_numpy(piece) for piece in self._all]

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised float32 memory, 64-byte aligned."""
        num_bytes = max(math.prod(shape) * 4, _ALIGNMENT)
        fitting = [piece for piece in self._free if piece.nbytes >= num_bytes]
        if fitting:
            piece = min(fitting, key=lambda item: item.nbytes)
            # In place: what frees a piece later adds it to this list.
            self._free[:] = [item for item in self._free if item is not piece]
        else:
            raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
            skip = -raw.ctypes.data % _ALIGNMENT
            piece = raw[skip : skip + num_bytes]
            self._all.append(piece)
        held = piece[: math.prod(shape) * 4].view(np.float32).view(_Held)
        # The tensor and its views keep `held` alive; when it dies the piece is free again.
        weakref.finalize(held, self._free.append, piece)
        return torch.from_numpy(held).view(shape)


class Recorder:
    """State while a step is recorded.

    ``max_tokens`` and ``max_logits`` differ, so that a tensor's row count tells which of them it
    stands for.
    """

    def __init__(self, max_tokens: int, max_logits: int) -> None:
        assert max_tokens != max_logits
        self.arena = Arena()
        self.max_tokens = max_tokens
        self.max_logits = max_logits
        #: Row codes of tensors whose number of rows is computed in the step, by address.
        self._computed: dict[int, int] = {}
        #: Memory that calls are told the address of, and nothing else holds.
        self.kept: list[Tensor] = []

    def rows(self, x: Tensor) -> int | None:
        """The row code of ``x`` where its number of rows is computed in the step."""
        return self._computed.get(x.data_ptr())

    def empty(self, shape: tuple[int, ...], rows: int | None = None) -> Tensor:
        """Memory for a result; ``rows``: its row code, where that is computed in the step."""
        out = self.arena.empty(shape)
        if rows is None:
            self._computed.pop(out.data_ptr(), None)
        else:
            self._computed[out.data_ptr()] = rows
        return out


@dataclass(slots=True)
class Recording:
    """A recorded step: ``replay`` computes it with the context's step parameters."""

    program: Any
    arena: Arena
    kept: list[Tensor]
    #: [max tokens, hidden]: rows of this step's tokens.
    hidden: Tensor
    #: [max logit rows, vocab]
    logits: Tensor
    #: [max logit rows] int64: the lowest of each row's best tokens.
    best: Tensor
    #: [max logit rows] bool: whether a row's logits are.
    is_finite: Tensor
    _replay: Callable[[Any], None]
    _replay_timed: Callable[[Any], list[float]]
    num_replays: int = 0

    @property
    def num_calls(self) -> int:
        """Native calls of one replay."""
        calls: int = self.program.num_calls
        return calls

    def replay(self) -> None:
        self._replay(self.program)
        self.num_replays += 1

    def replay_timed(self) -> list[float]:
        """The same; seconds of each call, until all threads have done it."""
        self.num_replays += 1
        return self._replay_timed(self.program)
