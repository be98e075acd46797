"""Mixtral: Mistral with a mixture of experts.

Jiang et al. 2024 (arXiv 2401.04088).
"""

from __future__ import annotations

from ambidex.config import CheckpointConfig
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.moe import MoE
from ambidex.layers.rope import Rope, make_rope
from ambidex.models.llama import NAMES as LLAMA_NAMES
from ambidex.models.llama import Llama, LlamaAttention

_EXPERTS = {
    "gate.weight": "router.weight",
    "experts.{e}.w1.weight": "gate_up:{e}.gate",
    "experts.{e}.w3.weight": "gate_up:{e}.up",
    "experts.{e}.w2.weight": "down:{e}",
    "experts.gate_up_proj": "gate_up:*",
    "experts.down_proj": "down:*",
}
NAMES = LLAMA_NAMES | {
    f"model.layers.{{i}}.{module}.{name}": f"layers.{{i}}.mlp.{path}"
    for module in ("block_sparse_moe", "mlp")
    for name, path in _EXPERTS.items()
}


class Mixtral(Llama):
    names = NAMES

    def make_rope(self, context: BuildContext, config: CheckpointConfig) -> Rope:
        hidden, heads = config.require("hidden_size"), config.require("num_attention_heads")
        return make_rope(context, config, config.get("head_dim", hidden // heads), theta=1e6)

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        return LlamaAttention(context, config, layer, rope, window=config.get("sliding_window"))

    def make_mlp(self, context: BuildContext, config: CheckpointConfig, layer: int) -> Module:
        return MoE(
            context,
            config.require("hidden_size"),
            config.require("intermediate_size"),
            config.get("num_local_experts", 8),
            config.get("num_experts_per_tok", 2),
            config.get("hidden_act", "silu"),
        )


Model = Mixtral
