"""Gemma 3, its language model.

Gemma Team 2025 (arXiv 2503.19786).
"""

from __future__ import annotations

from torch import Tensor

from ambidex import checkpoint_names
from ambidex.config import CheckpointConfig
from ambidex.errors import UnsupportedModelError
from ambidex.layers.batch import Batch
from ambidex.layers.embedding import Embedding, LMHead
from ambidex.layers.mlp import GatedMLP
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.norm import RMSNorm
from ambidex.layers.rope import Rope, make_rope
from ambidex.memory.architectures import gemma3_ropes, gemma3_slides
from ambidex.models.qwen3 import NormedAttention


class Gemma3Block(Module):
    """Attention and a gated MLP, each between two norms and around a residual."""

    def __init__(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope, slides: bool
    ) -> None:
        hidden = config.require("hidden_size")

        def norm() -> RMSNorm:
            return RMSNorm(context, hidden, config.get("rms_norm_eps", 1e-6), offset=1.0)

        self.attention_norm = norm()
        self.attention = NormedAttention(
            context,
            config,
            layer,
            rope,
            offset=1.0,
            window=config.require("sliding_window") if slides else None,
            scale=config.require("query_pre_attn_scalar") ** -0.5,
            softcap=config.get("attn_logit_softcapping", 0.0),
        )
        self.attention_out_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(
            context,
            hidden,
            config.require("intermediate_size"),
            config.get("hidden_activation", "gelu_pytorch_tanh"),
        )
        self.mlp_out_norm = norm()

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        x = self.attention_out_norm(self.attention(self.attention_norm(x), batch), residual=x)
        return self.mlp_out_norm(self.mlp(self.mlp_norm(x)), residual=x)


class Gemma3Text(Module):
    """Most layers see a window and turn by a base of their own; the others see everything."""

    names = checkpoint_names.GEMMA3

    def __init__(self, context: BuildContext, config: CheckpointConfig) -> None:
        if config.get("use_bidirectional_attention", False):
            raise UnsupportedModelError(
                f"{config.source}: use_bidirectional_attention makes an embedding model, which "
                "generates no text. Choose a Gemma 3 model without it."
            )
        hidden, vocab = config.require("hidden_size"), config.require("vocab_size")
        self.embedding = Embedding(context, vocab, hidden, scale=hidden**0.5)
        everywhere, nearby = make_ropes(context, config)
        self.layers = [
            Gemma3Block(context, config, layer, nearby if slides else everywhere, slides)
            for layer, slides in enumerate(gemma3_slides(config))
        ]
        self.norm = RMSNorm(context, hidden, config.get("rms_norm_eps", 1e-6), offset=1.0)
        self.head = LMHead(
            context,
            vocab,
            hidden,
            tied_to=self.embedding if config.get("tie_word_embeddings", True) else None,
            softcap=config.get("final_logit_softcapping", 0.0),
        )

    def __call__(self, batch: Batch) -> Tensor:
        x = self.embedding(batch.token_ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)


def make_ropes(context: BuildContext, config: CheckpointConfig) -> tuple[Rope, Rope]:
    """The rotations of full and of sliding layers, from either spelling of a config.json."""
    full, sliding = gemma3_ropes(config)
    head_dim = config.require("head_dim")
    return (
        make_rope(context, config, head_dim, theta=1e6, parameters=full),
        make_rope(context, config, head_dim, parameters=sliding),
    )


Model = Gemma3Text
