"""Token embedding and the head that turns hidden states into logits."""

from __future__ import annotations

from torch import Tensor

from ambidex.layers.module import BuildContext, Module, Parameter


class Embedding(Module):
    """Rows of a table: [n] ids to [n, width]."""

    def __init__(self, context: BuildContext, num_rows: int, width: int) -> None:
        self._kernels = context.device.kernels
        self.weight = Parameter((num_rows, width), context.dtype)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._kernels.embedding(token_ids, self.weight.data)


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
        self._kernels = context.device.kernels
        self._tied_to = (tied_to,) if tied_to is not None else ()
        self._softcap = softcap
        if tied_to is None:
            self.weight = Parameter(
                (vocab_size, width), context.dtype, pack=self._kernels.pack_weight
            )
        elif self._kernels.packs(vocab_size, context.dtype):
            tied_to.weight.pack_beside(self._kernels.pack_weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        weight = self._tied_to[0].weight if self._tied_to else self.weight
        table = weight.data if weight.packed is None else weight.packed
        logits = self._kernels.linear(hidden, table)
        if self._softcap:
            logits = self._kernels.softcap(logits, self._softcap)
        return logits
