"""Qwen 2 and 2.5: Llama with biases on query, key and value.

Yang et al. 2024 (arXiv 2407.10671).
"""

from __future__ import annotations

from ambidex.config import CheckpointConfig
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.rope import Rope
from ambidex.models.llama import Llama, LlamaAttention


def sliding_window(config: CheckpointConfig, layer: int) -> int | None:
    """The window of one layer: with ``use_sliding_window``, layers from ``max_window_layers`` on
    have one, unless ``layer_types`` says which."""
    if not config.get("use_sliding_window", False):
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        slides = kinds[layer] == "sliding_attention"
    else:
        slides = layer >= config.get("max_window_layers", 28)
    return config.get("sliding_window", 4096) if slides else None


class Qwen2(Llama):
    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        window = sliding_window(config, layer)
        return LlamaAttention(context, config, layer, rope, bias=True, window=window)


Model = Qwen2
