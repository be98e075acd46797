"""Gemma 3, its language model.

Gemma Team 2025 (arXiv 2503.19786).
"""

from __future__ import annotations

from torch import Tensor

from ambidex.config import CheckpointConfig
from ambidex.errors import UnsupportedModelError
from ambidex.layers.batch import Batch
from ambidex.layers.embedding import Embedding, LMHead
from ambidex.layers.mlp import GatedMLP
from ambidex.layers.module import BuildContext, Module
from ambidex.layers.norm import RMSNorm
from ambidex.layers.rope import Rope, make_rope, rope_parameters
from ambidex.models.llama import NAMES as LLAMA_NAMES
from ambidex.models.qwen3 import NORM_NAMES, NormedAttention

_BLOCK = "model.layers.{i}."
_TEXT_NAMES: dict[str, str | None] = {
    **LLAMA_NAMES,
    **NORM_NAMES,
    _BLOCK + "post_attention_layernorm.weight": "layers.{i}.attention_out_norm.weight",
    _BLOCK + "pre_feedforward_layernorm.weight": "layers.{i}.mlp_norm.weight",
    _BLOCK + "post_feedforward_layernorm.weight": "layers.{i}.mlp_out_norm.weight",
}
# The language model inside an image model, as older and newer files name it.
NAMES = _TEXT_NAMES | {
    prefix + name.removeprefix(strip): path
    for name, path in _TEXT_NAMES.items()
    for prefix, strip in (("language_model.", ""), ("model.language_model.", "model."))
}

#: What a config.json may leave out.
DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


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

    names = NAMES

    def __init__(self, context: BuildContext, config: CheckpointConfig) -> None:
        config = config.with_defaults(**DEFAULTS)
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
            for layer, slides in enumerate(sliding_layers(config))
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


def sliding_layers(config: CheckpointConfig) -> list[bool]:
    """For each layer, whether it sees only a window."""
    num_layers = config.require("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds[:num_layers]]
    pattern = config.require("sliding_window_pattern")
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]


def make_ropes(context: BuildContext, config: CheckpointConfig) -> tuple[Rope, Rope]:
    """The rotations of full and of sliding layers, from either spelling of a config.json."""
    by_kind = config.get("rope_parameters", {})
    if "full_attention" in by_kind or "sliding_attention" in by_kind:
        full, sliding = (
            dict(by_kind.get(kind) or {}) for kind in ("full_attention", "sliding_attention")
        )
    else:
        full, sliding = rope_parameters(config), {}
    if sliding.get("rope_theta") is None:
        sliding["rope_theta"] = config.get("rope_local_base_freq", 10000.0)
    head_dim = config.require("head_dim")
    return (
        make_rope(context, config, head_dim, theta=1e6, parameters=full),
        make_rope(context, config, head_dim, parameters=sliding),
    )


Model = Gemma3Text
