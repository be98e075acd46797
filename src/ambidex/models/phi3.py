"""Phi 3, 3.5 and 4 (text): Llama whose checkpoints hold fused projections.

Abdin et al. 2024 (arXiv 2404.14219).
"""

from __future__ import annotations

from ambidex import checkpoint_names
from ambidex.config import CheckpointConfig, rope_parameters
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.rope import Rope, make_rope
from ambidex.memory.architectures import head_size, plain_window
from ambidex.models.llama import Llama, LlamaAttention


class Phi3(Llama):
    names = checkpoint_names.PHI3

    def make_rope(self, context: BuildContext, config: CheckpointConfig) -> Rope:
        parameters = rope_parameters(config)
        # The first files call LongRoPE "su", or "yarn", which is something else everywhere else.
        kind = parameters.get("rope_type") or parameters.get("type")
        if kind in ("su", "yarn"):
            parameters["rope_type"] = "longrope"
        return make_rope(context, config, head_size(config), parameters=parameters)

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        return LlamaAttention(context, config, layer, rope, window=plain_window(config, layer))


Model = Phi3
