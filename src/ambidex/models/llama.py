"""Llama 2 and 3, SmolLM2 and their like.

Touvron et al. 2023 (arXiv 2302.13971, 2307.09288); Grattafiori et al. 2024 (arXiv 2407.21783).
"""

from __future__ import annotations

from torch import Tensor

from ambidex import checkpoint_names
from ambidex.config import CheckpointConfig
from ambidex.layers.attention import Attention
from ambidex.layers.batch import Batch
from ambidex.layers.embedding import Embedding, LMHead
from ambidex.layers.linear import Linear
from ambidex.layers.mlp import GatedMLP
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.norm import RMSNorm
from ambidex.layers.rope import Rope, make_rope
from ambidex.memory.architectures import head_size


class LlamaAttention(Module):
    """Grouped-query attention with rotary positions.

    ``bias`` is that of the query, key and value projections; None: as the output's.
    """

    def __init__(
        self,
        context: BuildContext,
        config: CheckpointConfig,
        layer: int,
        rope: Rope,
        *,
        bias: bool | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        hidden = config.require("hidden_size")
        heads = config.require("num_attention_heads")
        kv_heads = config.get("num_key_value_heads", heads)
        self.head_dim = head_dim = head_size(config)
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        output_bias = config.get("attention_bias", False)
        self.qkv = Linear(
            context,
            hidden,
            dict(zip("qkv", self.sizes, strict=True)),
            bias=config.get("qkv_bias", output_bias) if bias is None else bias,
            precise=True,
        )
        self.output = Linear(context, heads * head_dim, hidden, bias=output_bias)
        self.rope = rope
        self.attend = Attention(
            context, layer, kv_heads, head_dim, scale=scale, window=window, softcap=softcap
        )

    def project(self, x: Tensor) -> list[Tensor]:
        """Query, key and value of ``x`` [n, hidden]: [n, heads, head_dim] each."""
        return [part.view(len(x), -1, self.head_dim) for part in self.qkv(x).split(self.sizes, -1)]

    def __call__(self, x: Tensor, batch: Batch, residual: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.rope(q, k, batch)
        return self.output(self.attend(q, k, v, batch), residual)


class LlamaBlock(Module):
    """Attention, then a gated MLP, each after a norm and around a residual."""

    def __init__(
        self,
        context: BuildContext,
        config: CheckpointConfig,
        attention: Module,
        mlp: Module,
    ) -> None:
        hidden = config.require("hidden_size")
        eps = config.get("rms_norm_eps", 1e-6)
        self.attention_norm = RMSNorm(context, hidden, eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(context, hidden, eps)
        self.mlp = mlp

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        x = self.attention(self.attention_norm(x), batch, residual=x)
        return self.mlp(self.mlp_norm(x), residual=x)


class Llama(Module):
    """``model(batch)`` gives hidden states [n, hidden]; ``model.head(rows)`` gives logits.

    Its relatives replace ``make_attention``, ``make_mlp`` or ``make_rope``.
    """

    names = checkpoint_names.LLAMA

    def __init__(self, context: BuildContext, config: CheckpointConfig) -> None:
        hidden = config.require("hidden_size")
        vocab = config.require("vocab_size")
        self.embedding = Embedding(context, vocab, hidden)
        rope = self.make_rope(context, config)
        self.layers = [
            LlamaBlock(
                context,
                config,
                self.make_attention(context, config, layer, rope),
                self.make_mlp(context, config, layer),
            )
            for layer in range(config.require("num_hidden_layers"))
        ]
        self.norm = RMSNorm(context, hidden, config.get("rms_norm_eps", 1e-6))
        tied = self.embedding if config.get("tie_word_embeddings", False) else None
        self.head = LMHead(context, vocab, hidden, tied_to=tied)

    def make_rope(self, context: BuildContext, config: CheckpointConfig) -> Rope:
        return make_rope(context, config, head_size(config))

    def make_attention(
        self, context: BuildContext, config: CheckpointConfig, layer: int, rope: Rope
    ) -> Module:
        return LlamaAttention(context, config, layer, rope)

    def make_mlp(self, context: BuildContext, config: CheckpointConfig, layer: int) -> Module:
        return GatedMLP(
            context,
            config.require("hidden_size"),
            config.require("intermediate_size"),
            config.get("hidden_act", "silu"),
            bias=config.get("mlp_bias", False),
        )

    def __call__(self, batch: Batch) -> Tensor:
        x = self.embedding(batch.token_ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)


Model = Llama
