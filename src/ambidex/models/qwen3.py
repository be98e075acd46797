"""Qwen 3: Llama with normalised queries and keys.

Yang et al. 2025 (arXiv 2505.09388).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ambidex import checkpoint_names
from ambidex.config import CheckpointConfig
from ambidex.layers.batch import Batch
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.norm import RMSNorm
from ambidex.layers.rope import Rope
from ambidex.memory.architectures import qwen2_window
from ambidex.models.llama import Llama, LlamaAttention


class NormedAttention(LlamaAttention):
    """Each query and key head is normalised before it is turned."""

    def __init__(
        self,
        context: BuildContext,
        config: CheckpointConfig,
        layer: int,
        rope: Rope,
        *,
        offset: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(context, config, layer, rope, **options)
        eps = config.get("rms_norm_eps", 1e-6)
        self.q_norm = RMSNorm(context, self.head_dim, eps, offset=offset)
        self.k_norm = RMSNorm(context, self.head_dim, eps, offset=offset)

    def __call__(self, x: Tensor, batch: Batch, residual: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.rope(self.q_norm(q), self.k_norm(k), batch)
        return self.output(self.attend(q, k, v, batch), residual)


class Qwen3(Llama):
    names = checkpoint_names.QWEN3

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        return NormedAttention(context, config, layer, rope, window=qwen2_window(config, layer))


Model = Qwen3
