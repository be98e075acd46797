"""Small models in every file format that can be read."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

# Lets the tests of this folder import ``quantised_checkpoints``, which lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: name -> (configuration class, its own fields, GGUF architecture).
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}, "llama"),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}, "qwen2"),
    "qwen3": ("Qwen3Config", {"head_dim": 32}, "qwen3"),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "llama"),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
        "qwen3moe",
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
        "gemma3",
    ),
    "phi3": ("Phi3Config", {"sliding_window": 64}, "phi3"),
    "mistral": ("MistralConfig", {"sliding_window": 40}, "llama"),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 48}, ""),
}


def save_hf(name: str, folder: Path, **save_options: Any) -> Path:
    """A random model of one architecture as a Hugging Face folder."""
    class_name, extra, _ = CONFIGS[name]
    config = getattr(transformers, class_name)(**{**SIZES, **extra})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms start as ones and biases as zeros, which would hide a mistake.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **save_options)
    return folder


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., Path]:
    return lambda name, **options: save_hf(name, tmp_path / name, **options)


def interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows as GGUF's llama keeps them: the halves of a head's rotary values side by side."""
    half = weight.shape[0] // num_heads // 2
    parts = weight.reshape(num_heads, 2, half, *weight.shape[1:])
    return parts.transpose(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path, name: str, path: Path, *, fields: dict[str, Any] | None = None, dtype: Any = None
) -> Path:
    """Convert a folder of :func:`save_hf` with the gguf package's own name tables."""
    from safetensors.torch import load_file

    config = transformers.AutoConfig.from_pretrained(folder)
    arch = CONFIGS[name][2]
    key = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if getattr(config, "head_dim", None) and arch != "llama":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch in ("gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    num_experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}.get(name)
    if num_experts:
        writer.add_expert_count(getattr(config, num_experts))
        writer.add_expert_used_count(config.num_experts_per_tok)
        if name == "qwen3_moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for field, value in (fields or {}).items():
        writer.add_key_value(field, *value)
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for hf_name, tensor in load_file(folder / "model.safetensors").items():
        base, suffix = hf_name.rsplit(".", 1)
        if ".experts." in base:
            before, after = base.split(".experts.")
            expert, part = after.split(".")
            stacks.setdefault(f"{before}.experts.{part}.{suffix}", {})[int(expert)] = tensor
            continue
        if arch == "llama" and base.endswith(("q_proj", "k_proj")):
            is_q = base.endswith("q_proj")
            heads = config.num_attention_heads if is_q else config.num_key_value_heads
            tensor = interleave(tensor, heads)
        if arch == "gemma3" and base.endswith("norm"):
            tensor = tensor + 1
        _add(writer, f"{names.get_name(base)}.{suffix}", tensor, dtype)
    for hf_name, experts in stacks.items():
        base, suffix = hf_name.rsplit(".", 1)
        tensor = torch.stack([experts[index] for index in sorted(experts)])
        _add(writer, f"{names.get_name(base)}.{suffix}", tensor, dtype)
    close(writer)
    return path


def _add(writer: Any, name: str, tensor: torch.Tensor, dtype: Any) -> None:
    data = tensor.contiguous().numpy()
    if dtype is None or tensor.dim() == 1:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, dtype), raw_dtype=dtype)


def close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """``(folder, file)``: one random model in both formats."""

    def make(name: str, **options: Any) -> tuple[Path, Path]:
        folder = save_hf(name, tmp_path / name)
        return folder, write_gguf(folder, name, tmp_path / f"{name}.gguf", **options)

    return make


@pytest.fixture
def one_tensor_gguf(tmp_path: Path) -> Callable[..., Path]:
    """A llama file whose only layer tensor is given as packed bytes."""

    def make(data: Any, dtype: Any, name: str = "blk.0.ffn_down.weight") -> Path:
        path = tmp_path / "one.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for add, value in (
            (writer.add_context_length, 64),
            (writer.add_embedding_length, 64),
            (writer.add_block_count, 1),
            (writer.add_feed_forward_length, 256),
            (writer.add_head_count, 2),
        ):
            add(value)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("token_embd.weight", torch.zeros(8, 64).numpy())
        writer.add_tensor(name, data, raw_dtype=dtype)
        close(writer)
        return path

    return make


@pytest.fixture
def ends_within() -> Callable[[float], AbstractContextManager[None]]:
    """``with ends_within(seconds)``: what would wait for ever fails then."""

    @contextlib.contextmanager
    def limit(seconds: float) -> Iterator[None]:
        def end(*_: object) -> None:
            raise AssertionError(f"it still waits after {seconds} s")

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return limit
