"""Mistral: Llama with a sliding window.

Jiang et al. 2023 (arXiv 2310.06825).
"""

from __future__ import annotations

from ambidex.config import CheckpointConfig
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.rope import Rope
from ambidex.memory.architectures import mistral_window
from ambidex.models.llama import Llama, LlamaAttention


class Mistral(Llama):
    """Every layer sees the last ``sliding_window`` tokens; null means all of them."""

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        window = mistral_window(config, layer)
        return LlamaAttention(context, config, layer, rope, window=window)


Model = Mistral
