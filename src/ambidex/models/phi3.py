"""Phi 3, 3.5 and 4 (text): Llama whose checkpoints hold fused projections.

Abdin et al. 2024 (arXiv 2404.14219).
"""

from __future__ import annotations

from ambidex.config import CheckpointConfig
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.rope import Rope, make_rope, rope_parameters
from ambidex.models.llama import NAMES as LLAMA_NAMES
from ambidex.models.llama import Llama, LlamaAttention

NAMES = LLAMA_NAMES | {
    "model.layers.{i}.self_attn.qkv_proj.weight": "layers.{i}.attention.qkv.weight:*",
    "model.layers.{i}.mlp.gate_up_proj.weight": "layers.{i}.mlp.gate_up.weight:*",
}


class Phi3(Llama):
    names = NAMES

    def make_rope(self, context: BuildContext, config: CheckpointConfig) -> Rope:
        parameters = rope_parameters(config)
        # The first files call LongRoPE "su", or "yarn", which is something else everywhere else.
        kind = parameters.get("rope_type") or parameters.get("type")
        if kind in ("su", "yarn"):
            parameters["rope_type"] = "longrope"
        hidden, heads = config.require("hidden_size"), config.require("num_attention_heads")
        head_dim = config.get("head_dim", hidden // heads)
        return make_rope(context, config, head_dim, parameters=parameters)

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        return LlamaAttention(context, config, layer, rope, window=config.get("sliding_window"))


Model = Phi3
