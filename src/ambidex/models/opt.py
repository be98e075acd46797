"""OPT: learned positions, layer norms and biases.

Zhang et al. 2022 (arXiv 2205.01068).
"""

from __future__ import annotations

from torch import Tensor

from ambidex import checkpoint_names
from ambidex.config import CheckpointConfig
from ambidex.layers.attention import Attention
from ambidex.layers.batch import Batch
from ambidex.layers.embedding import Embedding, LearnedPositions, LMHead
from ambidex.layers.linear import Linear
from ambidex.layers.mlp import MLP
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.norm import LayerNorm
from ambidex.memory.architectures import OPT_POSITION_OFFSET


class OPTBlock(Module):
    """Attention, then an MLP, each around a residual; norms come before them, or after."""

    def __init__(self, context: BuildContext, config: CheckpointConfig, layer: int) -> None:
        hidden, heads = config.require("hidden_size"), config.require("num_attention_heads")
        bias = config.get("enable_bias", True)
        affine = config.get("layer_norm_elementwise_affine", True)
        self.norm_first = config.get("do_layer_norm_before", True)
        self.head_dim = hidden // heads
        self.attention_norm = LayerNorm(context, hidden, affine=affine)
        self.qkv = Linear(context, hidden, dict.fromkeys("qkv", hidden), bias=bias, precise=True)
        self.attend = Attention(context, layer, heads, self.head_dim)
        self.output = Linear(context, hidden, hidden, bias=bias)
        self.mlp_norm = LayerNorm(context, hidden, affine=affine)
        self.mlp = MLP(
            context,
            hidden,
            config.require("ffn_dim"),
            config.get("activation_function", "relu"),
            bias=bias,
        )

    def attention(self, x: Tensor, batch: Batch, residual: Tensor) -> Tensor:
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv(x).chunk(3, -1))
        return self.output(self.attend(q, k, v, batch), residual)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        if self.norm_first:
            x = self.attention(self.attention_norm(x), batch, residual=x)
            return self.mlp(self.mlp_norm(x), residual=x)
        x = self.attention_norm(self.attention(x, batch, residual=x))
        return self.mlp_norm(self.mlp(x, residual=x))


class OPT(Module):
    """Words may be narrower than the layers (``word_embed_proj_dim``): projections join them."""

    names = checkpoint_names.OPT

    def __init__(self, context: BuildContext, config: CheckpointConfig) -> None:
        hidden, vocab = config.require("hidden_size"), config.require("vocab_size")
        width = config.get("word_embed_proj_dim", hidden)
        positions = config.require("max_position_embeddings")
        self.embedding = Embedding(context, vocab, width)
        self._kernels = context.kernels
        self.positions = LearnedPositions(context, positions, hidden, skip=OPT_POSITION_OFFSET)
        self.project_in = Linear(context, width, hidden) if width != hidden else None
        self.layers = [
            OPTBlock(context, config, layer) for layer in range(config.require("num_hidden_layers"))
        ]
        has_norm = config.get("do_layer_norm_before", True) and not config.get(
            "_remove_final_layer_norm", False
        )
        affine = config.get("layer_norm_elementwise_affine", True)
        self.norm = LayerNorm(context, hidden, affine=affine) if has_norm else None
        self.project_out = Linear(context, hidden, width) if width != hidden else None
        tied = self.embedding if config.get("tie_word_embeddings", True) else None
        self.head = LMHead(context, vocab, width, tied_to=tied)

    def __call__(self, batch: Batch) -> Tensor:
        x = self.embedding(batch.token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = self._kernels.add(x, self.positions(batch.positions))
        for layer in self.layers:
            x = layer(x, batch)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)


Model = OPT
