"""What a GGUF header means in Hugging Face's terms: a ``config.json`` and tensor names.

Pure tables and arithmetic over a header, no torch and no numpy, so that a plan can use it too.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ambidex.errors import InvalidModelError, UnsupportedModelError
from ambidex.memory.architectures import latent_attention
from ambidex.weights.headers import (
    DOWNLOAD_AGAIN,
    GGUFHeader,
    LazyArray,
    TensorInfo,
    require_whole,
)

#: Names outside the layers, the same for every architecture.
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
#: Tensors that are constants of the configuration, not weights.
_CONSTANTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"
)

#: The largest number that a float of 32 bits holds.
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture is named and stored."""

    model_type: str
    class_name: str
    #: GGUF name within a layer -> Hugging Face name within a layer.
    layer: Mapping[str, str]
    #: "ffn_gate", "ffn_up", "ffn_down" -> name of one expert's matrix; {e} is the expert.
    experts: Mapping[str, str] = field(default_factory=dict)
    #: Rows of q and k are stored in the order of interleaved rotary embeddings.
    is_qk_permuted: bool = False
    #: Added to every norm weight when the file was made.
    norm_offset: float = 0.0


_LLAMA = Architecture(
    "llama", "LlamaForCausalLM", {**_ATTENTION, **_FFN_NORM, **_MLP}, is_qk_permuted=True
)
_MISTRAL = Architecture("mistral", "MistralForCausalLM", _LLAMA.layer, is_qk_permuted=True)
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {**_ATTENTION, **_FFN_NORM, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate": "block_sparse_moe.experts.{e}.w1",
        "ffn_down": "block_sparse_moe.experts.{e}.w2",
        "ffn_up": "block_sparse_moe.experts.{e}.w3",
    },
    is_qk_permuted=True,
)

#: ``general.architecture`` -> what it is. "llama" is three of Hugging Face's (see below).
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {**_ATTENTION, **_FFN_NORM, **_MLP}),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", {**_ATTENTION, **_QK_NORM, **_FFN_NORM, **_MLP}
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_QK_NORM, **_FFN_NORM, "ffn_gate_inp": "mlp.gate"},
        experts={
            "ffn_gate": "mlp.experts.{e}.gate_proj",
            "ffn_up": "mlp.experts.{e}.up_proj",
            "ffn_down": "mlp.experts.{e}.down_proj",
        },
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            **_ATTENTION,
            **_QK_NORM,
            **_MLP,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
}


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One Hugging Face tensor, and where a GGUF file keeps it."""

    info: TensorInfo
    #: Row-major shape of this tensor (for one expert of a stack: without the experts' axis).
    shape: tuple[int, ...]
    #: Index into the stack of experts, or None.
    expert: int | None = None
    #: Heads whose rows are interleaved, 0 where rows are in order.
    permuted_heads: int = 0
    #: To be subtracted from every value.
    offset: float = 0.0


class _Fields:
    """Checked access to the metadata fields of one architecture."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.prefix = header.architecture + "."

    def get(self, name: str) -> Any:
        return self.header.metadata.get(self.prefix + name)

    def fail(self, name: str, what: str) -> InvalidModelError:
        return InvalidModelError(
            f"{self.header.path}: the metadata field '{self.prefix}{name}' {what}. {DOWNLOAD_AGAIN}"
        )

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; one list value a layer is accepted where all are the same."""
        value = self.get(name)
        if isinstance(value, list | LazyArray):
            wrong = next((each for each in value if type(each) is not int), None)
            if wrong is not None:
                raise self.fail(name, f"holds {wrong!r:.40}, and must hold integers")
            values = set(value)
            if len(values) > 1:
                raise UnsupportedModelError(
                    f"{self.header.path}: the metadata field '{self.prefix}{name}' differs between "
                    f"layers ({sorted(values)[:4]}), which is not supported."
                )
            value = values.pop() if values else None
        if value is None:
            if default is None:
                raise self.fail(name, "is missing")
            return default
        if type(value) is not int or value <= 0:
            raise self.fail(name, f"is {value!r}, not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, f"is {value!r}, not a number")
        if not math.isfinite(value):
            raise self.fail(name, f"is {value!r}, not a finite number")
        if abs(value) > _LARGEST_FLOAT:
            raise self.fail(name, f"is {value!r}, more than a float of 32 bits holds")
        return shortest_float(float(value))


def shortest_float(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06.

    GGUF keeps float32; the configuration it was made from had a short decimal.
    """
    if math.isfinite(value) and abs(value) > _LARGEST_FLOAT:
        return value
    packed = struct.pack("<f", value)
    for digits in range(6, 10):
        candidate = float(f"{value:.{digits}g}")
        # The largest floats have no such decimal: rounded up, it is beyond them.
        if abs(candidate) <= _LARGEST_FLOAT and struct.pack("<f", candidate) == packed:
            return candidate
    return value


def architecture_of(header: GGUFHeader) -> Architecture:
    """The architecture; :class:`UnsupportedModelError` names those that are supported."""
    name = header.architecture
    rank = header.metadata.get(f"{name}.attention.kv_lora_rank")
    if rank is not None:
        raise UnsupportedModelError(latent_attention(str(header.path), name, rank))
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} is a GGUF file of architecture '{name}'; supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    if name == "llama":
        # llama.cpp files Mistral and Mixtral under "llama".
        if header.metadata.get("llama.expert_count"):
            return _MIXTRAL
        if header.metadata.get("llama.attention.sliding_window"):
            return _MISTRAL
    return ARCHITECTURES[name]


def config_from_header(header: GGUFHeader, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """A Hugging Face ``config.json`` for a GGUF file.

    ``tensors`` are those of all parts of the file, by GGUF name.
    """
    architecture = architecture_of(header)
    fields = _Fields(header)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_layers = _num_layers(fields, tensors)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidModelError(
            f"{header.path} has no tensor 'token_embd.weight' among its {len(tensors)}. "
            f"{DOWNLOAD_AGAIN}"
        )
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise InvalidModelError(
            f"{header.path}: the tensor 'token_embd.weight' has shape {list(embedding.shape)}, and "
            f"embedding_length is {hidden_size}. {DOWNLOAD_AGAIN}"
        )
    if fields.get("attention.key_length") is None and hidden_size % num_heads:
        raise fields.fail(
            "attention.head_count", f"is {num_heads}, which does not divide {hidden_size}"
        )
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{header.path} has keys of {head_dim} and values of {value_dim} per head; only equal "
            "sizes are supported."
        )
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
    }
    if config["rms_norm_eps"] is None:
        raise fields.fail("attention.layer_norm_rms_epsilon", "is missing")
    if architecture.model_type != "qwen3_moe":
        config["intermediate_size"] = fields.integer("feed_forward_length")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        if architecture.model_type != "phi3":
            raise UnsupportedModelError(
                f"{header.path} rotates {rotary_dim} of {head_dim} values per head, which is "
                f"supported for phi3 only."
            )
        config["partial_rotary_factor"] = rotary_dim / head_dim
    config["rope_scaling"] = _rope_scaling(header, fields, config, rotary_dim)
    extra = _EXTRA.get(architecture.model_type)
    if extra is not None:
        extra(fields, config)
    config.update(_token_ids(header))
    return config


def _num_layers(fields: _Fields, tensors: Mapping[str, TensorInfo]) -> int:
    """``block_count``, which tables of a value a layer may be built of: no more than there are."""
    num_layers = fields.integer("block_count")
    found = {match[1] for name in tensors if (match := _IN_LAYER.fullmatch(name))}
    if num_layers > len(found):
        raise fields.fail(
            "block_count", f"is {num_layers}, and the file has tensors of {len(found)} layers"
        )
    return num_layers


def _moe_mixtral(fields: _Fields, config: dict[str, Any]) -> None:
    config["num_local_experts"] = fields.integer("expert_count")
    config["num_experts_per_tok"] = fields.integer("expert_used_count")
    _sliding_window(fields, config)


def _moe_qwen3(fields: _Fields, config: dict[str, Any]) -> None:
    config["num_experts"] = fields.integer("expert_count")
    config["num_experts_per_tok"] = fields.integer("expert_used_count")
    config["moe_intermediate_size"] = fields.integer("expert_feed_forward_length")
    config["intermediate_size"] = fields.integer(
        "feed_forward_length", config["moe_intermediate_size"]
    )
    # llama.cpp normalises the chosen experts' weights for this architecture, whatever a file says.
    config["norm_topk_prob"] = True
    config["decoder_sparse_step"] = 1
    config["mlp_only_layers"] = []


def _sliding_window(fields: _Fields, config: dict[str, Any]) -> None:
    window = fields.get("attention.sliding_window")
    config["sliding_window"] = fields.integer("attention.sliding_window") if window else None


def _gemma3(fields: _Fields, config: dict[str, Any]) -> None:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["sliding_window"] = fields.integer("attention.sliding_window")
    config["rope_local_base_freq"] = fields.number("rope.freq_base_swa", 10000.0)
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list | LazyArray):
        # One flag a layer: true where attention is local.
        if len(pattern) != num_layers:
            raise fields.fail(
                "attention.sliding_window_pattern",
                f"has {len(pattern)} entries for {num_layers} layers",
            )
        is_local = [bool(flag) for flag in pattern]
    else:
        period = fields.integer("attention.sliding_window_pattern", 6)
        is_local = [(layer + 1) % period != 0 for layer in range(num_layers)]
        config["sliding_window_pattern"] = period
    config["layer_types"] = [
        "sliding_attention" if local else "full_attention" for local in is_local
    ]
    # Files do not say it: the 27B (62 layers) scales by hidden_size / heads, others by head_dim.
    is_27b = num_layers == 62
    scale = config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim
    config["query_pre_attn_scalar"] = scale
    config["attn_logit_softcapping"] = fields.number("attn_logit_softcapping")
    config["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    # In "hidden_act" the other architectures keep what Gemma keeps in "hidden_activation".
    del config["hidden_act"]


_EXTRA = {
    "mistral": _sliding_window,
    "mixtral": _moe_mixtral,
    "phi3": _sliding_window,
    "qwen3_moe": _moe_qwen3,
    "gemma3_text": _gemma3,
}


def _rope_scaling(
    header: GGUFHeader, fields: _Fields, config: dict[str, Any], rotary_dim: int
) -> dict[str, Any] | None:
    context = config["max_position_embeddings"]
    long_factor = _float_tensor(header, "rope_factors_long.weight", rotary_dim // 2)
    short_factor = _float_tensor(header, "rope_factors_short.weight", rotary_dim // 2)
    if (long_factor is None) != (short_factor is None):
        raise InvalidModelError(
            f"{header.path} has one of the tensors 'rope_factors_long.weight' and "
            f"'rope_factors_short.weight', and needs both. {DOWNLOAD_AGAIN}"
        )
    if long_factor is not None:
        original = fields.integer("rope.scaling.original_context_length", context)
        config["original_max_position_embeddings"] = original
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": long_factor,
            "short_factor": short_factor,
            "original_max_position_embeddings": original,
        }
        attention_factor = fields.number("rope.scaling.attn_factor")
        if attention_factor:
            scaling["attention_factor"] = attention_factor
        return scaling
    factors = _float_tensor(header, "rope_freqs.weight", rotary_dim // 2)
    if factors is not None:
        return _scaling_of_factors(factors, config["rope_theta"], rotary_dim, context)
    kind = fields.get("rope.scaling.type")
    factor = fields.number("rope.scaling.factor")
    if kind is None:
        # Old files have the linear factor alone.
        factor = fields.number("rope.scale_linear") or factor
        kind = "linear" if factor else "none"
    if kind == "none" or not factor or (kind == "linear" and factor == 1.0):
        return None
    if factor <= 0:
        raise fields.fail("rope.scaling.factor", f"is {factor}, not positive")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length", context)
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        for key in ("beta_fast", "beta_slow"):
            value = fields.number(f"rope.scaling.yarn_{key}")
            if value is not None:
                scaling[key] = value
        multiplier = fields.number("rope.scaling.attn_factor")
        if multiplier is not None and multiplier != 1.0:
            scaling["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
        return scaling
    raise UnsupportedModelError(
        f"{header.path} scales its rotary embeddings by '{kind}'; supported are none, linear, "
        "yarn, llama3 and longrope."
    )


def _scaling_of_factors(
    factors: list[float], theta: float, rotary_dim: int, context: int
) -> dict[str, Any] | None:
    """Llama 3's parameters from the table of divisors that a file has in their place."""
    if all(factor == 1.0 for factor in factors):
        return None
    low, high, original = 1.0, 4.0, 8192
    scale = max(factors)
    expected = []
    for index in range(rotary_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * index / rotary_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1.0 / ((1.0 - smooth) / scale + smooth))
    pairs = zip(factors, expected, strict=True)
    if all(math.isclose(got, want, rel_tol=1e-4) for got, want in pairs):
        return {
            "rope_type": "llama3",
            "factor": scale,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    # Made with other parameters: the same divisors at every length are longrope without its factor.
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _float_tensor(header: GGUFHeader, name: str, length: int) -> list[float] | None:
    """A small F32 tensor of the first part as numbers, or None where there is none."""
    info = header.tensors.get(name)
    if info is None:
        return None
    if info.type_name != "F32" or info.num_elements != length:
        raise InvalidModelError(
            f"{header.path}: the tensor '{name}' is {info.type_name} of {info.num_elements} "
            f"values, not F32 of {length}. {DOWNLOAD_AGAIN}"
        )
    require_whole(header.buffer, header.path)
    values = struct.unpack_from(f"<{length}f", header.buffer, info.offset)
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise InvalidModelError(
            f"{header.path}: the tensor '{name}' holds values that are not positive and finite. "
            f"{DOWNLOAD_AGAIN}"
        )
    return [shortest_float(value) for value in values]


def _token_ids(header: GGUFHeader) -> dict[str, Any]:
    """``bos_token_id`` and ``eos_token_id`` (a list where end of turn or message differ)."""
    result: dict[str, Any] = {}
    metadata = header.metadata
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if isinstance(bos, int):
        result["bos_token_id"] = bos
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    if unique:
        result["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return result


#: ``general.sampling.*`` -> generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_config_from_header(header: GGUFHeader) -> dict[str, Any]:
    """A ``generation_config.json``: token ids, and sampling defaults where a file has them."""
    config = _token_ids(header)
    for key, name in _SAMPLING.items():
        value = header.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[name] = shortest_float(value) if isinstance(value, float) else value
    return config


_IN_LAYER = re.compile(r"blk\.(\d+)\.([a-z0-9_]+?)(?:\.(\d+))?\.(weight|bias)")
_STACK_SUFFIX = "_exps"


def map_tensors(
    header: GGUFHeader, tensors: Iterable[TensorInfo], config: Mapping[str, Any]
) -> dict[str, MappedTensor]:
    """Hugging Face name -> place in the file, for every weight.

    Raises :class:`UnsupportedModelError` for tensors that the architecture does not know: leaving
    one out would change the model's output.
    """
    architecture = architecture_of(header)
    mapped: dict[str, MappedTensor] = {}
    unknown: list[str] = []
    for info in tensors:
        if _CONSTANTS.fullmatch(info.name):
            continue
        found = list(_map_one(architecture, info, config, str(header.path)))
        if not found:
            unknown.append(info.name)
        for name, tensor in found:
            if name in mapped:
                raise InvalidModelError(
                    f"{header.path} has two tensors for '{name}', one of them '{info.name}'. "
                    f"{DOWNLOAD_AGAIN}"
                )
            mapped[name] = tensor
    if unknown:
        listed = ", ".join(unknown[:5]) + (" ..." if len(unknown) > 5 else "")
        raise UnsupportedModelError(
            f"{header.path} has {len(unknown)} tensors that {architecture.model_type} does not "
            f"know: {listed}. Take another conversion."
        )
    return mapped


def _map_one(
    architecture: Architecture, info: TensorInfo, config: Mapping[str, Any], source: str
) -> Iterable[tuple[str, MappedTensor]]:
    """The Hugging Face tensors that one tensor of the file holds: none, one, or one an expert."""
    in_layer = _IN_LAYER.fullmatch(info.name)
    if in_layer is None:
        outer, _, suffix = info.name.rpartition(".")
        if outer in _OUTER and suffix in ("weight", "bias"):
            offset = architecture.norm_offset if outer == "output_norm" else 0.0
            yield f"{_OUTER[outer]}.{suffix}", MappedTensor(info, info.shape, offset=offset)
        return
    layer, part, expert, suffix = in_layer.groups()
    prefix = f"model.layers.{layer}."
    if part.endswith(_STACK_SUFFIX) and part.removesuffix(_STACK_SUFFIX) in architecture.experts:
        if len(info.shape) != 3:
            raise InvalidModelError(
                f"{source}: the tensor '{info.name}' has shape {list(info.shape)}, not "
                f"[experts, rows, columns]. {DOWNLOAD_AGAIN}"
            )
        form = architecture.experts[part.removesuffix(_STACK_SUFFIX)]
        for index in range(info.shape[0]):
            name = f"{prefix}{form.format(e=index)}.{suffix}"
            yield name, MappedTensor(info, info.shape[1:], expert=index)
        return
    if expert is not None:
        if part in architecture.experts:
            name = f"{prefix}{architecture.experts[part].format(e=expert)}.{suffix}"
            yield name, MappedTensor(info, info.shape)
        return
    if part not in architecture.layer:
        return
    heads = 0
    if architecture.is_qk_permuted and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if info.shape[0] % (2 * heads):
            raise InvalidModelError(
                f"{source}: the tensor '{info.name}' has {info.shape[0]} rows, no multiple of "
                f"2 x {heads} heads. {DOWNLOAD_AGAIN}"
            )
    offset = architecture.norm_offset if part.endswith("_norm") and suffix == "weight" else 0.0
    name = f"{prefix}{architecture.layer[part]}.{suffix}"
    yield name, MappedTensor(info, info.shape, permuted_heads=heads, offset=offset)
