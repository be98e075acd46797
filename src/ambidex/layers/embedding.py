"""Token embedding and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ambidex.layers.module import BuildContext, Matrix, Module, Parameter, Table


class Embedding(Module):
    """Rows of a table, times ``scale``: [n] ids to [n, width]."""

    def __init__(
        self, context: BuildContext, num_rows: int, width: int, *, scale: float = 1.0
    ) -> None:
        self._kernels = context.kernels
        self.weight = Table(self._kernels, (num_rows, width), context.dtype)
        self.scale = scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._kernels.embedding(token_ids, self.weight.data, self.scale)


class LearnedPositions(Module):
    """A row a position, added to the embedding. ``skip``: rows of the checkpoint's table that
    stand before position 0."""

    def __init__(
        self, context: BuildContext, num_positions: int, width: int, *, skip: int = 0
    ) -> None:
        self._kernels = context.kernels
        self.weight = Parameter((num_positions + skip, width), torch.float32)
        self._skip = skip

    def __call__(self, positions: Tensor) -> Tensor:
        return self._kernels.position_rows(self.weight.data[self._skip :], positions)


class LMHead(Module):
    """Logits of hidden states; with ``tied_to``, the embedding's table serves."""

    def __init__(
        self,
        context: BuildContext,
        vocab_size: int,
        width: int,
        *,
        tied_to: Embedding | None = None,
        softcap: float = 0.0,
    ) -> None:
        self._kernels = context.kernels
        self._tied_to = (tied_to,) if tied_to is not None else ()
        self._softcap = softcap
        if tied_to is None:
            self.weight = Matrix(self._kernels, (vocab_size, width), context.dtype, precise=True)
        else:
            tied_to.weight.has_head = True

    def __call__(self, hidden: Tensor) -> Tensor:
        weight = self._tied_to[0].weight.head if self._tied_to else self.weight.data
        logits = self._kernels.linear(hidden, weight)
        if self._softcap:
            logits = self._kernels.softcap(logits, self._softcap)
        return logits
