"""Tiny random models of every architecture, and the options of each that change its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_SHORT = [1.0 + 0.05 * i for i in range(8)]
_LONG = [1.0 + 0.8 * i for i in range(8)]


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


def _fixed_rotation(model: Any, length: int) -> None:
    """Give a reference the frequencies of one length for all contexts (our rule for types that
    depend on it)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = model.model.rotary_emb
    make = ROPE_INIT_FUNCTIONS[rotary.rope_type]
    frequencies, rotary.attention_scaling = make(model.config, "cpu", seq_len=length)
    rotary.inv_freq = rotary.original_inv_freq = frequencies
    rotary.rope_type = "default"


def _cap_scores(model: Any, length: int) -> None:
    """transformers 5 reads Gemma 3's ``attn_logit_softcapping`` and does not apply it."""
    from transformers.models.gemma3 import modeling_gemma3

    cap = model.config.attn_logit_softcapping
    plain = modeling_gemma3.eager_attention_forward
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        forward = layer.self_attn.forward

        def capped(*args: Any, _forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
            modeling_gemma3.eager_attention_forward = lambda *a, **k: plain(*a, softcap=cap, **k)
            try:
                return _forward(*args, **kwargs)
            finally:
                modeling_gemma3.eager_attention_forward = plain

        layer.self_attn.forward = capped


@dataclass(frozen=True)
class Case:
    """``kind`` is a model_type; ``values`` go to its transformers configuration."""

    name: str
    kind: str
    values: Mapping[str, Any]
    max_model_len: int = 512
    #: Changes the reference, given our longest context.
    prepare: Callable[[Any, int], None] | None = None
    #: Each of these overrides of config.json must change the logits: what it names is in use.
    matters: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name


def _case(
    kind: str,
    variant: str,
    *,
    matters: Any = (),
    prepare: Any = None,
    max_model_len: int = 512,
    **values: Any,
) -> Case:
    matters = tuple(matters) if isinstance(matters, list | tuple) else (matters,)
    return Case(f"{kind}-{variant}", kind, _SIZES | values, max_model_len, prepare, matters)


_GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_OPT = {"ffn_dim": 112, "word_embed_proj_dim": 64}
_MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN3_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "head_dim": 24,
}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

CASES = [
    _case("llama", "plain", matters={"rope_parameters": {"rope_theta": 500.0}}),
    _case("llama", "tied", tie_word_embeddings=True),
    _case("llama", "biases", attention_bias=True, mlp_bias=True),
    _case("llama", "wide-heads", head_dim=24, num_key_value_heads=1, hidden_act="gelu"),
    _case("llama", "linear", **_rope("linear", factor=4.0), matters=_PLAIN_ROPE),
    _case(
        "llama",
        "dynamic-short",
        **_rope("dynamic", factor=2.0),
        max_model_len=500,
    ),
    _case(
        "llama",
        "dynamic-long",
        **_rope("dynamic", factor=2.0),
        max_position_embeddings=64,
        prepare=_fixed_rotation,
        matters=_PLAIN_ROPE,
    ),
    _case(
        "llama",
        "yarn",
        **_rope("yarn", factor=8.0, original_max_position_embeddings=64),
        matters=_PLAIN_ROPE,
    ),
    _case(
        "llama",
        "yarn-options",
        **_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=128,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.2,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    ),
    _case(
        "llama",
        "yarn-attention-factor",
        **_rope("yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.3),
    ),
    _case(
        "llama",
        "longrope",
        **_rope(
            "longrope",
            short_factor=_SHORT,
            long_factor=_LONG,
            factor=8.0,
            original_max_position_embeddings=64,
        ),
        prepare=_fixed_rotation,
        matters=_PLAIN_ROPE,
    ),
    _case(
        "llama",
        "llama3",
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        matters=_PLAIN_ROPE,
    ),
    _case("mistral", "window", sliding_window=13, matters={"sliding_window": None}),
    _case("mistral", "full", sliding_window=None, head_dim=24),
    _case("qwen2", "plain", tie_word_embeddings=True),
    _case(
        "qwen2",
        "window",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
        matters=[{"use_sliding_window": False}, {"sliding_window": 21}],
    ),
    _case("qwen3", "plain", head_dim=24),
    _case(
        "qwen3",
        "window",
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
        matters={"use_sliding_window": False},
    ),
    _case(
        "gemma3_text",
        "plain",
        **_GEMMA,
        matters=[
            {"query_pre_attn_scalar": 16},
            {"sliding_window": 13},
            {"layer_types": ["full_attention"] * 4},
            {"rope_parameters": {"sliding_attention": {"rope_theta": 500.0}}},
            {"rope_parameters": {"full_attention": {"rope_theta": 500.0}}},
        ],
    ),
    _case(
        "gemma3_text",
        "scaled",
        **_GEMMA,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
        final_logit_softcapping=4.0,
        attn_logit_softcapping=1.5,
        prepare=_cap_scores,
        matters=[
            {"final_logit_softcapping": None},
            {"attn_logit_softcapping": None},
            {"rope_parameters": {"full_attention": {"factor": 1.0}}},
        ],
    ),
    _case("phi3", "plain", sliding_window=None),
    _case(
        "phi3",
        "longrope-window",
        sliding_window=30,
        tie_word_embeddings=True,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": _SHORT[:6],
            "long_factor": _LONG[:6],
        },
        prepare=_fixed_rotation,
        matters=[{"sliding_window": None}, {"original_max_position_embeddings": 512}],
    ),
    _case(
        "phi3",
        "longrope-short",
        original_max_position_embeddings=64,
        max_model_len=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "short_factor": _SHORT,
            "long_factor": _LONG,
        },
        prepare=_fixed_rotation,
    ),
    _case("opt", "plain", **_OPT),
    _case("opt", "projected", **_OPT | {"word_embed_proj_dim": 24}, do_layer_norm_before=False),
    _case(
        "opt",
        "bare",
        **_OPT,
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        _remove_final_layer_norm=True,
        tie_word_embeddings=False,
        activation_function="gelu",
    ),
    _case("mixtral", "plain", **_MIXTRAL),
    _case("mixtral", "window", **_MIXTRAL, sliding_window=17, matters={"sliding_window": None}),
    _case(
        "qwen3_moe", "plain", **_QWEN3_MOE, norm_topk_prob=True, matters={"norm_topk_prob": False}
    ),
    _case(
        "qwen3_moe",
        "mixed-layers",
        **_QWEN3_MOE,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        use_sliding_window=True,
        sliding_window=18,
        matters=[{"norm_topk_prob": True}, {"use_sliding_window": False}],
    ),
]


def make_reference(case: Case) -> Any:
    """The transformers model of ``case`` with random weights under which every part matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.kind, **case.values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to(torch.float32).eval()
    random = torch.Generator().manual_seed(hash_of(case.name))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim < 2:
                # Norms and biases start at ones and zeros, which would hide mistakes.
                parameter += 0.3 * noise
            elif "embed" in name:
                parameter.copy_(noise * 0.4)
            else:
                parameter.copy_(noise * 1.3 / parameter.shape[-1] ** 0.5)
    return model


def hash_of(name: str) -> int:
    """A seed for ``name`` that is the same in every process."""
    return int.from_bytes(name.encode()[:12].ljust(12, b"_"), "big") % 2**31 + len(name)
