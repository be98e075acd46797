"""A model's configuration before anything is built from it: kinds, bounds, and what the files hold.

Without this a config.json with a wrong value ends in a bare TypeError, or in a model of a billion
layers. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ambidex.config import CheckpointConfig, config_errors, rope_parameters
from ambidex.errors import InvalidModelError, UnsupportedModelError
from ambidex.memory.architectures import gemma3_ropes, head_size
from ambidex.weights.checkpoint import Checkpoint
from ambidex.weights.quantized_source import METHODS

#: Sizes above it are a mistake; each is the length of an array or a loop.
_MAX_SIZE = 2**31 - 1
_MAX_HEAD_DIM = 1 << 16
#: Where the checkpoint does not tell.
_MAX_EXPERTS = 1 << 12
_MAX_LAYERS = 1 << 12
_MAX_EXPERTS_OF_ALL = 1 << 17

_REPAIR = "Repair the file, or give the value with --hf-overrides."


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300  # an integer may be too large for a float
        and math.isfinite(value)
    )


#: Kind of a field -> (what it must be, its test).
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number of at least 1", lambda v: _is_whole(v) and v > 0),
    "whole": ("a whole number of at least 0", _is_whole),
    "length": (
        f"a number of at least 1 and at most {_MAX_SIZE}",
        lambda v: _is_number(v) and 1 <= v <= _MAX_SIZE,
    ),
    "positive": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "at_least_0": ("a number of at least 0", lambda v: _is_number(v) and v >= 0),
    "number": ("a number", _is_number),
    "share": ("a number above 0 and at most 1", lambda v: _is_number(v) and 0 < v <= 1),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "word": ("a string", lambda v: isinstance(v, str)),
    "words": (
        "a list of strings",
        lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
    ),
    "indices": (
        "a list of whole numbers",
        lambda v: isinstance(v, list) and all(map(_is_whole, v)),
    ),
    "factors": (
        "a list of numbers above 0",
        lambda v: isinstance(v, list) and all(_is_number(item) and item > 0 for item in v),
    ),
    "object": ("an object", lambda v: isinstance(v, Mapping)),
    "token_ids": (
        "a token's id, a whole number of at least 0, or a list of them",
        lambda v: all(map(_is_whole, v)) if isinstance(v, list) else _is_whole(v),
    ),
}

#: Every field that a model or the sizing reads -> its kind.
_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "moe_intermediate_size", "ffn_dim",
         "word_embed_proj_dim", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size", "num_experts_per_tok",
         "num_local_experts", "decoder_sparse_step", "sliding_window", "sliding_window_pattern"),
        "count",
    ),
    **dict.fromkeys(("num_experts", "max_window_layers"), "whole"),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), "length"),
    **dict.fromkeys(
        ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"), "positive"
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping"), "at_least_0"
    ),
    "partial_rotary_factor": "share",
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window",
         "norm_topk_prob", "enable_bias", "layer_norm_elementwise_affine",
         "do_layer_norm_before", "_remove_final_layer_norm", "use_bidirectional_attention"),
        "flag",
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), "word"),
    "layer_types": "words",
    "mlp_only_layers": "indices",
    **dict.fromkeys(("rope_scaling", "rope_parameters"), "object"),
    "eos_token_id": "token_ids",
}  # fmt: skip

#: The same inside ``rope_scaling`` and ``rope_parameters``.
_ROPE_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(("rope_type", "type"), "word"),
    **dict.fromkeys(
        ("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
         "attention_factor"),
        "positive",
    ),
    "partial_rotary_factor": "share",
    "original_max_position_embeddings": "length",
    **dict.fromkeys(("mscale", "mscale_all_dim"), "number"),
    **dict.fromkeys(("long_factor", "short_factor"), "factors"),
    "truncate": "flag",
}  # fmt: skip
#: ``rope_parameters`` may have a table for each kind of layer.
_LAYER_KINDS = ("full_attention", "sliding_attention")

#: Type of rope scaling -> the fields without which it says nothing (``layers/rope.py``).
ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("long_factor", "short_factor"),
    "su": ("long_factor", "short_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
#: What kernels have (``kernels/reference.py``).
ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")


def check_config(config: CheckpointConfig, checkpoint: Checkpoint) -> None:
    """Raise InvalidModelError for a field of a wrong kind or one that contradicts the weights,
    UnsupportedModelError for a way of quantisation that cannot be read. ``config`` is that of the
    language model (``memory.architectures.model_config``)."""
    _check_quantization(config, (checkpoint.quantization,))
    _check_values(config)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    is_gguf = checkpoint.format == "gguf"
    _check_kinds(
        str(checkpoint.path if is_gguf else folder / "generation_config.json"),
        "",
        checkpoint.generation_config,
        {"eos_token_id": "token_ids"},
    )
    _check_heads(config)
    _check_layer_types(config)
    _check_against_tensors(config, checkpoint)
    _check_computation(config)


def check_bare_config(config: CheckpointConfig) -> None:
    """The same for a configuration without weights."""
    _check_quantization(config, tuple(METHODS))
    _check_values(config)
    _check_heads(config)
    _check_layer_types(config)
    layers = config.get("num_hidden_layers", 1)
    most_experts = min(_MAX_EXPERTS, _MAX_EXPERTS_OF_ALL // min(layers, _MAX_LAYERS))
    for name, most in (
        ("num_hidden_layers", _MAX_LAYERS),
        ("num_experts", most_experts),
        ("num_local_experts", most_experts),
    ):
        asked = config.get(name)
        if asked is not None and asked > most:
            raise _wrong(config.source, name, asked, f"must be at most {most}")
        chosen = config.get("num_experts_per_tok")
        if "experts" in name and asked and chosen is not None and chosen > asked:
            raise _wrong(config.source, "num_experts_per_tok", chosen, f"'{name}' is {asked}")
    _check_computation(config)


def _check_values(config: CheckpointConfig) -> None:
    _check_kinds(config.source, "", config.values, _FIELDS)
    for name in ("rope_scaling", "rope_parameters"):
        table = config.get(name, {})
        _check_rope(config, name, table)
        for kind in _LAYER_KINDS:
            if isinstance(table.get(kind), Mapping):
                _check_rope(config, f"{name}.{kind}", table[kind])


def _check_kinds(
    source: str, prefix: str, values: Mapping[str, Any], fields: Mapping[str, str]
) -> None:
    for name, kind in fields.items():
        value = values.get(name)
        expected, is_right = _KINDS[kind]
        if value is not None and not is_right(value):
            if kind != "length" and type(value) is int and value > _MAX_SIZE:
                expected += f" and at most {_MAX_SIZE}"
            raise _wrong(source, prefix + name, value, f"must be {expected}")


def _wrong(source: str, name: str, value: Any, problem: str) -> InvalidModelError:
    # An integer of JSON may be too long for repr.
    shown = "a very large number" if type(value) is int and abs(value) >= 10**40 else repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return InvalidModelError(f"{source}: the field '{name}' is {shown}, and {problem}. {_REPAIR}")


def _check_rope(config: CheckpointConfig, name: str, table: Mapping[str, Any]) -> None:
    _check_kinds(config.source, name + ".", table, _ROPE_FIELDS)
    length = "original_max_position_embeddings"
    kind = table.get("rope_type") or table.get("type")
    if kind == "yarn" and not (table.get("factor") or table.get(length) or config.get(length)):
        raise InvalidModelError(
            f"{config.source}: {name} of type 'yarn' has neither a 'factor' nor '{length}', so "
            f"nothing says how far to stretch. {_REPAIR}"
        )


def _check_quantization(config: CheckpointConfig, read: tuple[str | None, ...]) -> None:
    """``read``: the ways that the files are quantised in."""
    for name in ("quantization_config", "compression_config"):
        table = config.get(name)
        if table is None or table == {}:
            continue
        if not isinstance(table, Mapping):
            raise _wrong(config.source, name, table, "must be an object")
        method = table.get("quant_method") or table.get("quant_algo") or "unknown"
        if name == "quantization_config" and method in read:
            continue
        raise UnsupportedModelError(
            f"{config.source}: the weights are quantised with the method '{method!s:.40}' "
            f"({name}), which is not supported; supported are {', '.join(sorted(METHODS))}. Use "
            "such a checkpoint of this model, an unquantised checkpoint, or a GGUF file."
        )


def _check_heads(config: CheckpointConfig) -> None:
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    if head_dim is not None and head_dim > _MAX_HEAD_DIM:
        raise _wrong(config.source, "head_dim", head_dim, f"must be at most {_MAX_HEAD_DIM}")
    if heads and kv_heads and heads % kv_heads:
        problem = f"must divide the {heads} of 'num_attention_heads'"
        raise _wrong(config.source, "num_key_value_heads", kv_heads, problem)
    if heads and hidden and head_dim is None and heads > hidden:
        problem = f"'hidden_size' {hidden} has less than one value for each"
        raise _wrong(config.source, "num_attention_heads", heads, problem)
    if heads and hidden and head_dim is None and hidden % heads:
        problem = (
            f"does not divide 'hidden_size' {hidden}, and no 'head_dim' says how wide a head is"
        )
        raise _wrong(config.source, "num_attention_heads", heads, problem)


def _check_layer_types(config: CheckpointConfig) -> None:
    """A list that is longer is no harm: --hf-overrides may ask for the first layers alone."""
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and layers is not None and len(kinds) < layers:
        raise InvalidModelError(
            f"{config.source}: the field 'layer_types' names {len(kinds)} layers, and "
            f"'num_hidden_layers' is {layers}. {_REPAIR}"
        )


def _check_computation(config: CheckpointConfig) -> None:
    """What the layers would refuse: rotations and activation functions that there are none of."""
    kind = str(config.get("model_type", ""))
    is_gemma = kind.startswith("gemma3")
    name = {"opt": "activation_function"}.get(
        kind, "hidden_activation" if is_gemma else "hidden_act"
    )
    activation = config.get(name)
    if activation is not None and activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.source}: the activation function '{activation!s:.80}' ({name}) is not "
            f"supported. Supported: {', '.join(ACTIVATIONS)}."
        )
    if kind == "opt":
        return
    with config_errors(config):
        tables = gemma3_ropes(config) if is_gemma else (rope_parameters(config),)
        for table in tables:
            name = table.get("rope_type") or table.get("type") or "default"
            # Its first files call it so (``models/phi3.py``).
            is_long = kind == "phi3" and name == "yarn"
            _check_rotation(config, "longrope" if is_long else name, table)


def _check_rotation(config: CheckpointConfig, kind: str, table: Mapping[str, Any]) -> None:
    """``table``: as ``config.rope_parameters`` has it."""
    source, head_dim = config.source, head_size(config)
    rotary_dim = int(head_dim * (table.get("partial_rotary_factor") or 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        part = "" if rotary_dim == head_dim else f", of which {rotary_dim} are to be rotated"
        raise InvalidModelError(
            f"{source}: a head has {head_dim} values{part}. Values are rotated in pairs, so "
            "that must be an even number above 0. Check 'head_dim', 'hidden_size', "
            "'num_attention_heads' and 'partial_rotary_factor', or download the model again."
        )
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"{source}: rope_scaling type '{kind!s:.80}' is not supported. Supported: "
            f"{', '.join(sorted(ROPE_KINDS))}."
        )
    for name in ROPE_KINDS[kind]:
        value = table.get(name)
        if value is None:
            raise InvalidModelError(
                f"{source}: its rope_scaling of type '{kind}' lacks the field '{name}'. Repair the "
                "file, or give the value with --hf-overrides "
                f'\'{{"rope_scaling": {{"{name}": ...}}}}\'.'
            )
        if isinstance(value, list) and len(value) != rotary_dim // 2:
            raise InvalidModelError(
                f"{source}: rope_scaling.{name} has {len(value)} entries; the head size asks for "
                f"{rotary_dim // 2}. {_REPAIR}"
            )


def _check_against_tensors(config: CheckpointConfig, checkpoint: Checkpoint) -> None:
    """Sizes that a loop runs over, or that decide on memory, against the names and shapes."""
    path, source = checkpoint.path, config.source
    # A model's image encoder has layers of its own.
    names = [name for name in checkpoint.tensor_names() if "vision" not in name]
    layers = _highest(_LAYER, names) + 1
    asked = config.get("num_hidden_layers")
    if asked is not None and asked > layers:
        found = f"its layers end with layers.{layers - 1}" if layers else "it has no layers"
        raise _wrong(
            source, "num_hidden_layers", asked, f"{path} lacks layers.{asked - 1}: {found}"
        )
    experts = _highest(_EXPERT, names) + 1
    for name in ("num_experts", "num_local_experts"):
        asked = config.get(name)
        if asked is not None and asked > (experts or _MAX_EXPERTS):
            found = f"{path} has {experts} in a layer" if experts else f"the most is {_MAX_EXPERTS}"
            raise _wrong(source, name, asked, found)
        chosen = config.get("num_experts_per_tok")
        if experts and asked and chosen is not None and chosen > asked:
            raise _wrong(source, "num_experts_per_tok", chosen, f"'{name}' is {asked}")
    embedding = next((name for name in names if name.endswith("embed_tokens.weight")), None)
    if embedding is None:
        return
    shape = checkpoint.tensor_shape(embedding)
    width = "word_embed_proj_dim" if config.get("word_embed_proj_dim") else "hidden_size"
    for name, axis, unit in (("vocab_size", 0, "rows"), (width, 1, "columns")):
        asked = config.get(name)
        if len(shape) == 2 and asked is not None and asked != shape[axis]:
            raise _wrong(
                source, name, asked, f"the tensor '{embedding}' of {path} has {shape[axis]} {unit}"
            )


def _highest(pattern: re.Pattern[str], names: list[str]) -> int:
    """The highest index in the names; -1 where there is none."""
    return max((int(match[1]) for name in names if (match := pattern.search(name))), default=-1)
