"""Qwen 2 and 2.5: Llama with biases on query, key and value.

Yang et al. 2024 (arXiv 2407.10671).
"""

from __future__ import annotations

from ambidex.config import CheckpointConfig
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.rope import Rope
from ambidex.memory.architectures import qwen2_window
from ambidex.models.llama import Llama, LlamaAttention


class Qwen2(Llama):
    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        window = qwen2_window(config, layer)
        return LlamaAttention(context, config, layer, rope, bias=True, window=window)


Model = Qwen2
