"""The parameters that ``models/*`` builds for a configuration, and its KV cache: no torch.

What a config.json may leave out, and rules about layers that the models need too, stand here once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ambidex import checkpoint_names
from ambidex.checkpoint_names import WHOLE, Names, NameTable, check_part
from ambidex.config import CheckpointConfig, config_errors, rope_parameters
from ambidex.errors import UnsupportedModelError
from ambidex.memory.model_shape import KVShape
from ambidex.memory.weight_places import WeightKind

#: Bytes of a value.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
#: Rows of OPT's table of positions that stand before position 0.
OPT_POSITION_OFFSET = 2


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A parameter of a model; see ``model_shape.WeightShape`` for the fields of the same name."""

    path: str
    rows: int
    columns: int
    kind: WeightKind
    #: Of all experts: part -> (first row, rows).
    parts: Mapping[str, tuple[int, int]]
    num_experts: int = 1
    num_chosen: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model has it: experts below each other."""
        if self.kind is WeightKind.VECTOR and self.columns == 1:
            return (self.rows,)
        return (self.rows * self.num_experts, self.columns)

    @property
    def stacked(self) -> tuple[int, ...]:
        """Of a tensor that holds all parts."""
        if self.kind is WeightKind.EXPERTS:
            return (self.num_experts, self.rows, self.columns)
        return self.shape

    @property
    def is_matrix(self) -> bool:
        return self.kind is not WeightKind.VECTOR

    @property
    def is_paired(self) -> bool:
        return self.kind is WeightKind.MATRIX and list(self.parts) == ["gate", "up"]

    def check(
        self, part: str, shape: tuple[int, ...], name: str, filled: set[str]
    ) -> tuple[int, int]:
        """See ``checkpoint_names.check_part``."""
        return check_part(self.parts, (self.shape, self.stacked), part, shape, name, filled)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of a token."""

    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(slots=True)
class Architecture:
    """A model without weights. ``weights`` are in the order of execution."""

    names: NameTable
    weights: list[WeightSpec] = field(default_factory=list)
    layers: list[LayerKV] = field(default_factory=list)
    #: Of each position: cosines and sines of all rotations, in float32.
    rope_bytes: int = 0

    def kv_shapes(self, dtype: str) -> tuple[KVShape, ...]:
        """Layers of one shape and window, in the native layout; int8 has a float32 scale for each
        token and head of keys and of values."""
        counts: dict[tuple[int | None, int, int], int] = {}
        for layer in self.layers:
            key = (layer.window, layer.num_kv_heads, layer.head_dim)
            counts[key] = counts.get(key, 0) + 1
        scale = 4 if dtype == "int8" else 0
        return tuple(
            KVShape(
                count,
                heads,
                head_dim,
                count * 2 * heads * (head_dim * DTYPE_BYTES[dtype] + scale),
                window,
            )
            for (window, heads, head_dim), count in counts.items()
        )

    def tensors(self, is_fused: bool) -> dict[str, tuple[WeightSpec, str, tuple[int, ...]]]:
        """A published checkpoint's tensors: name -> (parameter, part, shape). ``is_fused``: parts
        of one parameter lie in one tensor where checkpoints may have that."""
        found = {}
        for spec in self.weights:
            parts = list(spec.parts)
            if is_fused and parts != [""] and spec.kind is WeightKind.MATRIX:
                parts = [WHOLE]
            for part in parts:
                rows = spec.shape[0] if part == WHOLE else spec.parts[part][1]
                name = self.names.name_of(spec.path, part)
                found[name] = (spec, part, (rows, *spec.shape[1:]))
        return found

    # ------------------------------------------------------------------- as layers/* builds them

    def rope(self, head_dim: int, parameters: Mapping[str, Any]) -> None:
        share = parameters.get("partial_rotary_factor") or 1.0
        self.rope_bytes += 2 * 4 * -(-int(head_dim * share) // 2)

    def vector(self, path: str, size: int, parts: Mapping[str, int] | None = None) -> None:
        self._add(path, 1, WeightKind.VECTOR, parts or {"": size})

    def linear(
        self, path: str, columns: int, rows: int | Mapping[str, int], bias: bool = False
    ) -> None:
        parts = {"": rows} if isinstance(rows, int) else rows
        self._add(f"{path}.weight", columns, WeightKind.MATRIX, parts)
        if bias:
            self.vector(f"{path}.bias", 0, parts)

    def embedding(self, rows: int, width: int, *, is_tied: bool) -> None:
        kind = WeightKind.TIED if is_tied else WeightKind.TABLE
        self._add("embedding.weight", width, kind, {"": rows})

    def layer_norm(self, path: str, size: int) -> None:
        self.vector(f"{path}.weight", size)
        self.vector(f"{path}.bias", size)

    def experts(
        self, path: str, columns: int, parts: Mapping[str, int], count: int, chosen: int
    ) -> None:
        places, start = {}, 0
        for expert in range(count):
            for part, rows in parts.items():
                places[f"{expert}.{part}" if part else str(expert)] = (start, rows)
                start += rows
        spec = WeightSpec(
            path, sum(parts.values()), columns, WeightKind.EXPERTS, places, count, chosen
        )
        self.weights.append(spec)

    def _add(self, path: str, columns: int, kind: WeightKind, parts: Mapping[str, int]) -> None:
        places, start = {}, 0
        for part, rows in parts.items():
            places[part] = (start, rows)
            start += rows
        self.weights.append(WeightSpec(path, start, columns, kind, places))


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a ``model_type``."""

    build: Callable[[Architecture, CheckpointConfig], None]
    names: Names = field(default_factory=lambda: checkpoint_names.LLAMA)
    #: What a config.json may leave out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Published checkpoints hold query, key and value, and gate and up, in one tensor.
    is_fused: bool = False
    #: False: for plans only, the engine has no such model.
    is_served: bool = True


def model_config(config: CheckpointConfig, *, planned: bool = False) -> CheckpointConfig:
    """The language model's part of ``config`` (of a model that also reads images, only text is
    served), with what its config.json may leave out. ``planned``: of a family that is not served,
    too. Raises UnsupportedModelError."""
    family = family_of(config, planned=planned)
    inner = config.get("text_config")
    if isinstance(inner, dict):
        outer = {name: value for name, value in config.values.items() if name != "text_config"}
        # An inner kind that nobody knows says less than the outer one, which is known.
        known = {n: v for n, v in inner.items() if n != "model_type" or v in list(FAMILIES)}
        config = CheckpointConfig(outer | known, config.source)
    return config.with_defaults(**family.defaults)


def family_of(config: CheckpointConfig, *, planned: bool = False) -> Family:
    """See :func:`model_config`."""
    kind = config.get("model_type", "")
    inner = config.get("text_config")
    values = config.values | inner if isinstance(inner, dict) else config.values
    rank = values.get("kv_lora_rank")
    if rank is not None:
        raise UnsupportedModelError(latent_attention(config.source, kind, rank))
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not (family.is_served or planned):
        names = config.get("architectures", [])
        first = names[0] if isinstance(names, list) and names else "?"
        raise UnsupportedModelError(
            f"{config.source}: architecture {first!s:.80} (model_type '{kind!s:.80}') is not "
            f"supported. Supported model types: {', '.join(served_types())}."
        )
    return family


def served_types() -> list[str]:
    """Every ``model_type`` that the engine has a model for."""
    return sorted(kind for kind, family in FAMILIES.items() if family.is_served)


def latent_attention(source: str, kind: object, rank: object) -> str:
    """Why a model with latent attention cannot be had."""
    return (
        f"{source}: models of type '{kind!s:.80}' keep keys and values in a compressed form "
        f"(multi-head latent attention, kv_lora_rank {rank!s:.20}), which is not supported. Choose "
        "a model with grouped-query attention, such as Qwen3-30B-A3B."
    )


def architecture_of(config: CheckpointConfig, *, planned: bool = False) -> Architecture:
    """The model of ``config`` (see :func:`model_config`). Raises UnsupportedModelError or
    InvalidModelError."""
    family = family_of(config, planned=planned)
    result = Architecture(NameTable(family.names))
    with config_errors(config):
        family.build(result, config)
    return result


# --------------------------------------------------------------------------- rules about layers


def head_size(config: CheckpointConfig) -> int:
    hidden, heads = config.require("hidden_size"), config.require("num_attention_heads")
    return int(config.get("head_dim", hidden // heads))


def gemma3_ropes(config: CheckpointConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of full and of sliding layers."""
    by_kind = config.get("rope_parameters", {})
    if "full_attention" in by_kind or "sliding_attention" in by_kind:
        full, sliding = (
            dict(by_kind.get(kind) or {}) for kind in ("full_attention", "sliding_attention")
        )
    else:
        full, sliding = rope_parameters(config), {}
    if sliding.get("rope_theta") is None:
        sliding["rope_theta"] = config.get("rope_local_base_freq", 10000.0)
    return full, sliding


def mistral_window(config: CheckpointConfig, layer: int) -> int | None:
    """The first release's files may leave the window out; null was written by later ones."""
    window: int | None = config.values.get("sliding_window", 4096)
    return window


def plain_window(config: CheckpointConfig, layer: int) -> int | None:
    window: int | None = config.get("sliding_window")
    return window


def qwen2_window(config: CheckpointConfig, layer: int) -> int | None:
    """With ``use_sliding_window``, layers from ``max_window_layers`` on have one, unless
    ``layer_types`` says which."""
    if not config.get("use_sliding_window", False):
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        slides = kinds[layer] == "sliding_attention"
    else:
        slides = layer >= config.get("max_window_layers", 28)
    return config.get("sliding_window", 4096) if slides else None


def qwen3_moe_window(config: CheckpointConfig, layer: int) -> int | None:
    return config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None


def gemma3_slides(config: CheckpointConfig) -> list[bool]:
    """For each layer, whether it sees only a window."""
    num_layers = config.require("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds[:num_layers]]
    pattern = config.require("sliding_window_pattern")
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]


def qwen3_moe_experts(config: CheckpointConfig, layer: int) -> int:
    """Experts of a layer; 0 where it has a plain MLP."""
    every = config.get("decoder_sparse_step", 1)
    if layer in config.get("mlp_only_layers", []) or (layer + 1) % every != 0:
        return 0
    # transformers 5 writes the count under the second name. No expert is a plain MLP too.
    count = config.get("num_experts")
    return int(config.get("num_local_experts", 128) if count is None else count)


# --------------------------------------------------------------------------- families

_Part = Callable[[Architecture, CheckpointConfig, int], None]


def _attention(
    model: Architecture,
    config: CheckpointConfig,
    layer: int,
    window: int | None,
    *,
    bias: bool | None = None,
    is_normed: bool = False,
) -> None:
    hidden, heads = config.require("hidden_size"), config.require("num_attention_heads")
    kv_heads, size = config.get("num_key_value_heads", heads), head_size(config)
    path = f"layers.{layer}.attention"
    output_bias = config.get("attention_bias", False)
    if bias is None:
        bias = config.get("qkv_bias", output_bias)
    parts = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    model.linear(f"{path}.qkv", hidden, parts, bias)
    model.linear(f"{path}.output", heads * size, hidden, output_bias)
    if is_normed:
        model.vector(f"{path}.q_norm.weight", size)
        model.vector(f"{path}.k_norm.weight", size)
    model.layers.append(LayerKV(kv_heads, size, window))


def _gated_mlp(
    model: Architecture, config: CheckpointConfig, layer: int, *, bias: bool = False
) -> None:
    hidden, inner = config.require("hidden_size"), config.require("intermediate_size")
    path = f"layers.{layer}.mlp"
    model.linear(f"{path}.gate_up", hidden, {"gate": inner, "up": inner}, bias)
    model.linear(f"{path}.down", inner, hidden, bias)


def _llama_mlp(model: Architecture, config: CheckpointConfig, layer: int) -> None:
    _gated_mlp(model, config, layer, bias=config.get("mlp_bias", False))


def _moe(
    model: Architecture,
    config: CheckpointConfig,
    layer: int,
    width: int,
    count: int,
    chosen: int,
) -> None:
    hidden, path = config.require("hidden_size"), f"layers.{layer}.mlp"
    model.linear(f"{path}.router", hidden, count)
    model.experts(f"{path}.gate_up", hidden, {"gate": width, "up": width}, count, chosen)
    model.experts(f"{path}.down", width, {"": hidden}, count, chosen)


def _mixtral_mlp(model: Architecture, config: CheckpointConfig, layer: int) -> None:
    count, chosen = config.require("num_local_experts"), config.require("num_experts_per_tok")
    _moe(model, config, layer, config.require("intermediate_size"), count, chosen)


def _qwen3_moe_mlp(model: Architecture, config: CheckpointConfig, layer: int) -> None:
    count = qwen3_moe_experts(config, layer)
    if not count:
        _llama_mlp(model, config, layer)
        return
    width, chosen = config.require("moe_intermediate_size"), config.require("num_experts_per_tok")
    _moe(model, config, layer, width, count, chosen)


def _decoder(
    window: Callable[[CheckpointConfig, int], int | None],
    mlp: _Part = _llama_mlp,
    *,
    bias: bool | None = None,
    is_normed: bool = False,
) -> Callable[[Architecture, CheckpointConfig], None]:
    """Llama and its relatives: attention, then an MLP, each after a norm."""

    def build(model: Architecture, config: CheckpointConfig) -> None:
        hidden, vocab = config.require("hidden_size"), config.require("vocab_size")
        is_tied = config.get("tie_word_embeddings", False)
        model.embedding(vocab, hidden, is_tied=is_tied)
        model.rope(head_size(config), rope_parameters(config))
        for layer in range(config.require("num_hidden_layers")):
            model.vector(f"layers.{layer}.attention_norm.weight", hidden)
            seen = window(config, layer)
            _attention(model, config, layer, seen, bias=bias, is_normed=is_normed)
            model.vector(f"layers.{layer}.mlp_norm.weight", hidden)
            mlp(model, config, layer)
        model.vector("norm.weight", hidden)
        if not is_tied:
            model.linear("head", hidden, vocab)

    return build


def _gemma3(model: Architecture, config: CheckpointConfig) -> None:
    hidden, vocab = config.require("hidden_size"), config.require("vocab_size")
    is_tied = config.get("tie_word_embeddings", True)
    model.embedding(vocab, hidden, is_tied=is_tied)
    windows = gemma3_slides(config)
    for kind, parameters in enumerate(gemma3_ropes(config)):
        if bool(kind) in windows:
            model.rope(config.require("head_dim"), parameters)
    for layer, slides in enumerate(windows):
        window = config.require("sliding_window") if slides else None
        model.vector(f"layers.{layer}.attention_norm.weight", hidden)
        _attention(model, config, layer, window, is_normed=True)
        for norm in ("attention_out_norm", "mlp_norm"):
            model.vector(f"layers.{layer}.{norm}.weight", hidden)
        _gated_mlp(model, config, layer)
        model.vector(f"layers.{layer}.mlp_out_norm.weight", hidden)
    model.vector("norm.weight", hidden)
    if not is_tied:
        model.linear("head", hidden, vocab)


def _opt(model: Architecture, config: CheckpointConfig) -> None:
    hidden, vocab = config.require("hidden_size"), config.require("vocab_size")
    heads, inner = config.require("num_attention_heads"), config.require("ffn_dim")
    width = config.get("word_embed_proj_dim", hidden)
    bias, norm_first = config.get("enable_bias", True), config.get("do_layer_norm_before", True)
    affine = config.get("layer_norm_elementwise_affine", True)
    is_tied = config.get("tie_word_embeddings", True)
    model.embedding(vocab, width, is_tied=is_tied)
    positions = config.require("max_position_embeddings") + OPT_POSITION_OFFSET
    model.weights.append(
        WeightSpec("positions.weight", positions, hidden, WeightKind.VECTOR, {"": (0, positions)})
    )
    if width != hidden:
        model.linear("project_in", width, hidden)
    for layer in range(config.require("num_hidden_layers")):
        path = f"layers.{layer}"
        if affine:
            model.layer_norm(f"{path}.attention_norm", hidden)
        model.linear(f"{path}.qkv", hidden, dict.fromkeys("qkv", hidden), bias)
        model.layers.append(LayerKV(heads, hidden // heads, None))
        model.linear(f"{path}.output", hidden, hidden, bias)
        if affine:
            model.layer_norm(f"{path}.mlp_norm", hidden)
        model.linear(f"{path}.mlp.up", hidden, inner, bias)
        model.linear(f"{path}.mlp.down", inner, hidden, bias)
    if affine and norm_first and not config.get("_remove_final_layer_norm", False):
        model.layer_norm("norm", hidden)
    if width != hidden:
        model.linear("project_out", hidden, width)
    if not is_tied:
        model.linear("head", width, vocab)


def _mllama(model: Architecture, config: CheckpointConfig) -> None:
    """The language model of Llama 3.2 with images. Layers that look at the image keep nothing of a
    token of text; the embedding has rows for eight special tokens more than the head."""
    hidden, vocab = config.require("hidden_size"), config.require("vocab_size")
    heads, size = config.require("num_attention_heads"), head_size(config)
    kv_heads = config.get("num_key_value_heads", heads)
    crossing: Sequence[int] = config.require("cross_attention_layers")
    model.embedding(vocab + 8, hidden, is_tied=False)
    model.rope(size, rope_parameters(config))
    for layer in range(config.require("num_hidden_layers")):
        path = f"layers.{layer}"
        model.vector(f"{path}.attention_norm.weight", hidden)
        if layer in crossing:
            model.linear(f"{path}.cross.query", hidden, heads * size)
            model.linear(f"{path}.cross.key_value", hidden, dict.fromkeys("kv", kv_heads * size))
            model.linear(f"{path}.cross.output", heads * size, hidden)
            model.vector(f"{path}.cross.q_norm.weight", size)
            model.vector(f"{path}.cross.k_norm.weight", size)
            model.vector(f"{path}.attention_gate", 1)
        else:
            _attention(model, config, layer, None)
        model.vector(f"{path}.mlp_norm.weight", hidden)
        _gated_mlp(model, config, layer)
        if layer in crossing:
            model.vector(f"{path}.mlp_gate", 1)
    model.vector("norm.weight", hidden)
    model.linear("head", hidden, vocab)


_GEMMA3 = Family(
    _gemma3,
    checkpoint_names.GEMMA3,
    {
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
    },
)
_QWEN3 = checkpoint_names.QWEN3

_MLLAMA = Family(_mllama, checkpoint_names.MLLAMA, is_served=False)

#: By ``model_type``.
FAMILIES: dict[str, Family] = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "llama": Family(_decoder(lambda config, layer: None)),
    "mistral": Family(_decoder(mistral_window)),
    "mixtral": Family(
        _decoder(plain_window, _mixtral_mlp),
        checkpoint_names.MIXTRAL,
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "mllama": _MLLAMA,
    "mllama_text_model": _MLLAMA,
    "opt": Family(_opt, checkpoint_names.OPT),
    "phi3": Family(_decoder(plain_window), checkpoint_names.PHI3, is_fused=True),
    "qwen2": Family(_decoder(qwen2_window, bias=True)),
    "qwen3": Family(_decoder(qwen2_window, is_normed=True), _QWEN3, {"head_dim": 128}),
    "qwen3_moe": Family(
        _decoder(qwen3_moe_window, _qwen3_moe_mlp, is_normed=True), checkpoint_names.QWEN3_MOE
    ),
}
