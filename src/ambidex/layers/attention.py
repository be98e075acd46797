"""Attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from ambidex.layers.batch import Batch
from ambidex.layers.module import AttentionSpec, BuildContext, Module


class Attention(Module):
    """Writes a step's keys and values to the cache, then attends to what the cache holds.

    ``window``: a query at position p sees keys p-window+1 .. p. ``softcap``: scores become
    ``softcap * tanh(scores / softcap)``.
    """

    def __init__(
        self,
        context: BuildContext,
        layer: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float = 0.0,
    ) -> None:
        self._kernels = context.kernels
        self.layer = layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        context.attention.append(AttentionSpec(layer, num_kv_heads, head_dim, window))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
        """[n, heads, head_dim], twice [n, kv_heads, head_dim]: [n, heads * head_dim]."""
        cache = batch.kv_cache.layer(self.layer)
        metadata = batch.attention[batch.kv_cache.group_of(self.layer)]
        self._kernels.write_kv(key, value, cache, metadata)
        return self._kernels.attention(query, cache, metadata, self.scale, self.softcap)
