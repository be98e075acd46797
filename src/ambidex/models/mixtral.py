"""Mixtral: Mistral with a mixture of experts.

Jiang et al. 2024 (arXiv 2401.04088).
"""

from __future__ import annotations

from ambidex import checkpoint_names
from ambidex.config import CheckpointConfig
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.moe import MoE
from ambidex.layers.rope import Rope, make_rope
from ambidex.memory.architectures import head_size, plain_window
from ambidex.models.llama import Llama, LlamaAttention


class Mixtral(Llama):
    names = checkpoint_names.MIXTRAL

    def make_rope(self, context: BuildContext, config: CheckpointConfig) -> Rope:
        return make_rope(context, config, head_size(config), theta=1e6)

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        return LlamaAttention(context, config, layer, rope, window=plain_window(config, layer))

    def make_mlp(self, context: BuildContext, config: CheckpointConfig, layer: int) -> Module:
        return MoE(
            context,
            config.require("hidden_size"),
            config.require("intermediate_size"),
            config.require("num_local_experts"),
            config.require("num_experts_per_tok"),
            config.get("hidden_act", "silu"),
        )


Model = Mixtral
