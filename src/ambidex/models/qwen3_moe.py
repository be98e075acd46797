"""Qwen 3 with a mixture of experts in some or all layers.

Yang et al. 2025 (arXiv 2505.09388).
"""

from __future__ import annotations

from ambidex.config import CheckpointConfig
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.moe import MoE
from ambidex.layers.rope import Rope
from ambidex.models.llama import NAMES as LLAMA_NAMES
from ambidex.models.llama import Llama
from ambidex.models.qwen3 import NORM_NAMES, NormedAttention

_MLP = "model.layers.{i}.mlp."
NAMES = {
    **LLAMA_NAMES,
    **NORM_NAMES,
    _MLP + "gate.weight": "layers.{i}.mlp.router.weight",
    _MLP + "experts.{e}.gate_proj.weight": "layers.{i}.mlp.gate_up:{e}.gate",
    _MLP + "experts.{e}.up_proj.weight": "layers.{i}.mlp.gate_up:{e}.up",
    _MLP + "experts.{e}.down_proj.weight": "layers.{i}.mlp.down:{e}",
    _MLP + "experts.gate_up_proj": "layers.{i}.mlp.gate_up:*",
    _MLP + "experts.down_proj": "layers.{i}.mlp.down:*",
}


class Qwen3MoE(Llama):
    names = NAMES

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        slides = config.get("use_sliding_window", False)
        window = config.get("sliding_window", 4096) if slides else None
        return NormedAttention(context, config, layer, rope, window=window)

    def make_mlp(self, context: BuildContext, config: CheckpointConfig, layer: int) -> Module:
        # transformers 5 writes the count under the second name.
        num_experts = config.get("num_experts") or config.get("num_local_experts", 128)
        every = config.get("decoder_sparse_step", 1)
        if layer in config.get("mlp_only_layers", []) or (layer + 1) % every != 0:
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
