"""Well-known models, to plan with before anything is fetched: the sizes of their config.json."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PublicShape:
    """``values`` are those fields of the config.json of ``source``, a hub id, that decide on sizes;
    ``parameters`` is the number that its card, its files or its paper state, of the language model
    alone."""

    source: str
    parameters: float
    values: Mapping[str, Any]


def _shape(source: str, billions: float, kind: str, **values: Any) -> PublicShape:
    return PublicShape(source, billions * 1e9, {"model_type": kind, **values})


def _llama(
    source: str,
    billions: float,
    layers: int,
    hidden: int,
    inner: int,
    heads: tuple[int, int],
    vocab: int,
    length: int,
    kind: str = "llama",
    **more: Any,
) -> PublicShape:
    """``heads``: of queries, and of keys and values."""
    return _shape(
        source,
        billions,
        kind,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=vocab,
        max_position_embeddings=length,
        **more,
    )


def _opt(source: str, billions: float, layers: int, hidden: int, heads: int) -> PublicShape:
    return _shape(
        source,
        billions,
        "opt",
        num_hidden_layers=layers,
        hidden_size=hidden,
        ffn_dim=4 * hidden,
        num_attention_heads=heads,
        vocab_size=50272,
        max_position_embeddings=2048,
    )


def _rope3(factor: float) -> dict[str, Any]:
    """Llama 3.1's: the length that is named is the stretched one."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA31: dict[str, Any] = {"rope_scaling": _rope3(8.0)}
_LLAMA32: dict[str, Any] = {"rope_scaling": _rope3(32.0), "tie_word_embeddings": True}
_QWEN3: dict[str, Any] = {"head_dim": 128}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262208,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
_LONG = 131072


def _gemma3(
    source: str, billions: float, layers: int, hidden: int, inner: int, heads: tuple[int, int],
    head_dim: int,
) -> PublicShape:  # fmt: skip
    return _shape(
        source, billions, "gemma3_text", num_hidden_layers=layers, hidden_size=hidden,
        intermediate_size=inner, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=head_dim, max_position_embeddings=_LONG, **_GEMMA3,
    )  # fmt: skip


def _qwen_moe(source: str, billions: float, layers: int, hidden: int, inner: int, expert: int,
              heads: int) -> PublicShape:  # fmt: skip
    return _llama(
        source, billions, layers, hidden, inner, (heads, 4), 151936, 40960, "qwen3_moe",
        moe_intermediate_size=expert, num_experts=128, num_experts_per_tok=8, **_QWEN3,
    )  # fmt: skip


PUBLIC_SHAPES: Mapping[str, PublicShape] = {
    "llama-2-7b": _llama("meta-llama/Llama-2-7b-hf", 6.738, 32, 4096, 11008, (32, 32), 32000, 4096),
    "llama-2-13b": _llama(
        "meta-llama/Llama-2-13b-hf", 13.016, 40, 5120, 13824, (40, 40), 32000, 4096
    ),
    "llama-2-70b": _llama(
        "meta-llama/Llama-2-70b-hf", 68.977, 80, 8192, 28672, (64, 8), 32000, 4096
    ),
    "llama-3-8b": _llama(
        "meta-llama/Meta-Llama-3-8B", 8.03, 32, 4096, 14336, (32, 8), 128256, 8192
    ),
    "llama-3-70b": _llama(
        "meta-llama/Meta-Llama-3-70B", 70.55, 80, 8192, 28672, (64, 8), 128256, 8192
    ),
    "llama-3.1-8b": _llama(
        "meta-llama/Llama-3.1-8B", 8.03, 32, 4096, 14336, (32, 8), 128256, _LONG, **_LLAMA31
    ),
    "llama-3.1-70b": _llama(
        "meta-llama/Llama-3.1-70B", 70.55, 80, 8192, 28672, (64, 8), 128256, _LONG, **_LLAMA31
    ),
    # Of the revision after release, with 8 heads of keys and values; the first one's file said 16,
    # each of them twice.
    "llama-3.1-405b": _llama(
        "meta-llama/Llama-3.1-405B", 405.9, 126, 16384, 53248, (128, 8), 128256, _LONG, **_LLAMA31
    ),
    "llama-3.3-70b": _llama(
        "meta-llama/Llama-3.3-70B-Instruct", 70.55, 80, 8192, 28672, (64, 8), 128256, _LONG,
        **_LLAMA31,
    ),
    "llama-3.2-1b": _llama(
        "meta-llama/Llama-3.2-1B", 1.236, 16, 2048, 8192, (32, 8), 128256, _LONG, head_dim=64,
        **_LLAMA32,
    ),
    "llama-3.2-3b": _llama(
        "meta-llama/Llama-3.2-3B", 3.213, 28, 3072, 8192, (24, 8), 128256, _LONG, head_dim=128,
        **_LLAMA32,
    ),
    # The card says 88.8 billion with the part that reads images, whose size the paper (arXiv
    # 2407.21783, 7.2) gives as 0.85.
    "llama-3.2-90b": _llama(
        "meta-llama/Llama-3.2-90B-Vision", 88.8 - 0.85, 100, 8192, 28672, (64, 8), 128256, _LONG,
        "mllama", cross_attention_layers=list(range(3, 100, 5)), **_LLAMA31,
    ),
    # The files of Qwen2-7B and of Qwen2.5-1.5B, 7B, 14B, 32B and 72B without Instruct say the same
    # sizes and a length of 131,072.
    "qwen2-7b": _llama(
        "Qwen/Qwen2-7B-Instruct", 7.616, 28, 3584, 18944, (28, 4), 152064, 32768, "qwen2"
    ),
    "qwen2.5-0.5b": _llama(
        "Qwen/Qwen2.5-0.5B-Instruct", 0.494, 24, 896, 4864, (14, 2), 151936, 32768, "qwen2",
        tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": _llama(
        "Qwen/Qwen2.5-1.5B-Instruct", 1.544, 28, 1536, 8960, (12, 2), 151936, 32768, "qwen2",
        tie_word_embeddings=True,
    ),
    "qwen2.5-3b": _llama(
        "Qwen/Qwen2.5-3B-Instruct", 3.086, 36, 2048, 11008, (16, 2), 151936, 32768, "qwen2",
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _llama(
        "Qwen/Qwen2.5-7B-Instruct", 7.616, 28, 3584, 18944, (28, 4), 152064, 32768, "qwen2"
    ),
    "qwen2.5-14b": _llama(
        "Qwen/Qwen2.5-14B-Instruct", 14.77, 48, 5120, 13824, (40, 8), 152064, 32768, "qwen2"
    ),
    "qwen2.5-32b": _llama(
        "Qwen/Qwen2.5-32B-Instruct", 32.764, 64, 5120, 27648, (40, 8), 152064, 32768, "qwen2"
    ),
    "qwen2.5-72b": _llama(
        "Qwen/Qwen2.5-72B-Instruct", 72.706, 80, 8192, 29568, (64, 8), 152064, 32768, "qwen2"
    ),
    "qwen3-8b": _llama(
        "Qwen/Qwen3-8B", 8.191, 36, 4096, 12288, (32, 8), 151936, 40960, "qwen3", **_QWEN3
    ),
    "qwen3-14b": _llama(
        "Qwen/Qwen3-14B", 14.768, 40, 5120, 17408, (40, 8), 151936, 40960, "qwen3", **_QWEN3
    ),
    "qwen3-32b": _llama(
        "Qwen/Qwen3-32B", 32.762, 64, 5120, 25600, (64, 8), 151936, 40960, "qwen3", **_QWEN3
    ),
    "qwen3-30b-a3b": _qwen_moe("Qwen/Qwen3-30B-A3B", 30.53, 48, 2048, 6144, 768, 32),
    "qwen3-235b-a22b": _qwen_moe("Qwen/Qwen3-235B-A22B", 235.09, 94, 4096, 12288, 1536, 64),
    "mistral-7b": _llama(
        "mistralai/Mistral-7B-v0.1", 7.242, 32, 4096, 14336, (32, 8), 32000, 32768, "mistral",
        sliding_window=4096,
    ),
    # From v0.2 on no layer has a window; v0.3 has a longer vocabulary.
    "mistral-7b-v0.2": _llama(
        "mistralai/Mistral-7B-Instruct-v0.2", 7.242, 32, 4096, 14336, (32, 8), 32000, 32768,
        "mistral", sliding_window=None,
    ),
    "mistral-7b-v0.3": _llama(
        "mistralai/Mistral-7B-Instruct-v0.3", 7.248, 32, 4096, 14336, (32, 8), 32768, 32768,
        "mistral", sliding_window=None,
    ),
    "mixtral-8x7b": _llama(
        "mistralai/Mixtral-8x7B-v0.1", 46.703, 32, 4096, 14336, (32, 8), 32000, 32768, "mixtral",
        num_local_experts=8, num_experts_per_tok=2,
    ),
    # Of the Gemma 3 report (arXiv 2503.19786), table 1: embedding and the rest of the text model.
    "gemma-3-4b": _gemma3("google/gemma-3-4b-it", 0.675 + 3.209, 34, 2560, 10240, (8, 4), 256),
    "gemma-3-12b": _gemma3("google/gemma-3-12b-it", 1.012 + 10.759, 48, 3840, 15360, (16, 8), 256),
    "gemma-3-27b": _gemma3("google/gemma-3-27b-it", 1.416 + 25.6, 62, 5376, 21504, (32, 16), 128),
    "phi-3-mini": _llama(
        "microsoft/Phi-3-mini-4k-instruct", 3.821, 32, 3072, 8192, (32, 32), 32064, 4096, "phi3",
        sliding_window=2047,
    ),
    "phi-4": _llama("microsoft/phi-4", 14.66, 40, 5120, 17920, (40, 10), 100352, 16384, "phi3"),
    "smollm2-135m": _llama(
        "HuggingFaceTB/SmolLM2-135M-Instruct", 0.1345, 30, 576, 1536, (9, 3), 49152, 8192,
        tie_word_embeddings=True,
    ),
    "smollm2-360m": _llama(
        "HuggingFaceTB/SmolLM2-360M-Instruct", 0.3618, 32, 960, 2560, (15, 5), 49152, 8192,
        tie_word_embeddings=True,
    ),
    "smollm2-1.7b": _llama(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.711, 24, 2048, 8192, (32, 32), 49152, 8192,
        tie_word_embeddings=True,
    ),
    "opt-125m": _opt("facebook/opt-125m", 0.1252, 12, 768, 12),
    "opt-6.7b": _opt("facebook/opt-6.7b", 6.658, 32, 4096, 32),
    "opt-30b": _opt("facebook/opt-30b", 29.97, 48, 7168, 56),
}  # fmt: skip

#: Parts of names that mean the same sizes. Mistral's versions after the first do not.
_VARIANT = re.compile(r"-(instruct|chat|it|hf|base|vision|4k|text|pt)(?=-|$)|-v0\.1$")


def find_public_shape(name: str) -> str | None:
    """The key of :data:`PUBLIC_SHAPES` that ``name`` means: the key itself, in any spelling of
    capitals, the last part of a hub id, or one of its variants of the same sizes."""
    text = name.lower().rpartition("/")[2].replace("_", "-").removeprefix("meta-")
    while text not in PUBLIC_SHAPES:
        shorter = _VARIANT.sub("", text, count=1)
        if shorter == text:
            return None
        text = shorter
    return text


def nearest_public_shapes(name: str) -> list[str]:
    """Keys that look like ``name``, the nearest first."""
    text = name.lower().rpartition("/")[2]
    return difflib.get_close_matches(text, list(PUBLIC_SHAPES), 3)
