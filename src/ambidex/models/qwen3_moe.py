"""Qwen 3 with a mixture of experts in some or all layers.

Yang et al. 2025 (arXiv 2505.09388).
"""

from __future__ import annotations

from ambidex import checkpoint_names
from ambidex.config import CheckpointConfig
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.moe import MoE
from ambidex.layers.rope import Rope
from ambidex.memory.architectures import qwen3_moe_experts, qwen3_moe_window
from ambidex.models.llama import Llama
from ambidex.models.qwen3 import NormedAttention


class Qwen3MoE(Llama):
    names = checkpoint_names.QWEN3_MOE

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        window = qwen3_moe_window(config, layer)
        return NormedAttention(context, config, layer, rope, window=window)

    def make_mlp(self, context: BuildContext, config: CheckpointConfig, layer: int) -> Module:
        num_experts = qwen3_moe_experts(config, layer)
        if not num_experts:
            return super().make_mlp(context, config, layer)
        return MoE(
            context,
            config.require("hidden_size"),
            config.require("moe_intermediate_size"),
            num_experts,
            config.require("num_experts_per_tok"),
            config.get("hidden_act", "silu"),
            normalise=config.get("norm_topk_prob", False),
        )


Model = Qwen3MoE
