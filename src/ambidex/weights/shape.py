"""The sizes of a model, from headers or a configuration alone: no weights, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ambidex.config import CheckpointConfig, EngineConfig, config_errors
from ambidex.errors import InvalidModelError, ModelNotFoundError, UnsupportedModelError
from ambidex.memory.architectures import (
    DTYPE_BYTES,
    Architecture,
    Family,
    WeightSpec,
    architecture_of,
    family_of,
    head_size,
    model_config,
)
from ambidex.memory.model_shape import ModelShape, WeightShape
from ambidex.memory.public_shapes import (
    PUBLIC_SHAPES,
    find_public_shape,
    nearest_public_shapes,
)
from ambidex.memory.sizing import find_length_limit, resolve_max_model_len
from ambidex.memory.weight_places import WeightKind
from ambidex.quant.forms import ON_LOAD_FORMS, PANEL_ROWS, Form, split_group
from ambidex.weights.checkpoint import (
    Checkpoint,
    gguf_checkpoint,
    merged,
    open_checkpoint,
    read_config,
)
from ambidex.weights.config_check import check_bare_config, check_config
from ambidex.weights.gguf import GGUFSource
from ambidex.weights.hub import resolve_model
from ambidex.weights.load import fixed_bytes, planned_bytes
from ambidex.weights.quantization import Files, low_bit_kind

#: Of files whose headers say what they hold.
_WITH_HEADERS = (".safetensors", ".gguf")
#: Columns that share a scale where bitsandbytes' configuration does not say.
_BNB_BLOCK = 64


class _Tensors(Files, Protocol):
    """What sizes are taken from: ``checkpoint.Checkpoint``, or :class:`_Published`."""

    def tensor_names(self) -> list[str]: ...

    def tensor_shape(self, name: str) -> tuple[int, ...]: ...

    def quantized_form(self, name: str) -> Form | None: ...


def model_shape(model: str, config: EngineConfig, auto_dtype: str = "float32") -> ModelShape:
    """The sizes of ``model``, held as ``config`` says.

    ``model`` is a config.json, a GGUF file (which may end behind its header), a safetensors file, a
    folder with or without weights, an alias or a hub id in the cache, or a name of
    ``memory.public_shapes``. Where there are headers, bytes are those that the loader plans for
    the native kernels; of a configuration alone they are those of a checkpoint as it is published.
    ``auto_dtype`` is what ``--dtype auto`` comes to: float32 on the lanes that there are.

    Raises ModelNotFoundError, InvalidModelError, UnsupportedModelError or OptionError.
    """
    return _shape(_open(model, config, config.model.hf_overrides), config, auto_dtype)


def checkpoint_shape(checkpoint: Checkpoint, config: EngineConfig) -> ModelShape:
    """The same of files that are open already."""
    return _shape(_opened(config.model.model, checkpoint, ()), config)


def _shape(found: _Found, config: EngineConfig, auto_dtype: str = "float32") -> ModelShape:
    values = found.config
    with config_errors(values):
        # That something says how long a context may be, and that no more is asked for.
        resolve_max_model_len(config.model.max_model_len, values, config.model.max_model_len_cap)
        limit = find_length_limit(values)
    tensors = found.tensors
    low_bit = low_bit_kind(config.model, tensors)
    dtype = auto_dtype if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = config.cache.kv_cache_dtype
    if kv_dtype == "auto":
        # See ``runner.loader``: beside weights in low bits.
        kv_dtype = dtype if low_bit is None else "float16"

    def form_of(name: str) -> Form | None:
        if low_bit in ON_LOAD_FORMS:
            is_matrix = len(tensors.tensor_shape(name)) == 2
            return ON_LOAD_FORMS[str(low_bit)] if is_matrix else None
        return None if low_bit is None else tensors.quantized_form(name)

    architecture = found.architecture
    weights = _weights(architecture, found.targets, tensors, form_of, dtype)
    hidden = int(values.require("hidden_size"))
    experts = [spec for spec in architecture.weights if spec.kind is WeightKind.EXPERTS]
    return ModelShape(
        name=found.name,
        model_type=str(values.require("model_type")),
        num_layers=int(values.require("num_hidden_layers")),
        hidden_size=hidden,
        intermediate_size=int(values.get("intermediate_size", 4 * hidden)),
        vocab_size=int(values.require("vocab_size")),
        num_heads=int(values.require("num_attention_heads")),
        head_dim=head_size(values),
        weights=weights,
        kv=architecture.kv_shapes(kv_dtype),
        max_positions=limit,
        description=_description(low_bit, tensors, config.model.dtype, dtype),
        num_experts=max((spec.num_experts for spec in experts), default=0),
        num_chosen=max((spec.num_chosen for spec in experts), default=0),
        dtype=dtype,
        kv_dtype=kv_dtype,
        rope_bytes_per_position=architecture.rope_bytes,
        notes=found.notes,
    )


def _description(low_bit: str | None, tensors: _Tensors, asked: str, dtype: str) -> str:
    if low_bit in ON_LOAD_FORMS:
        return f"{low_bit}, quantised while it is loaded"
    if low_bit is not None:
        return f"{tensors.dtype_name}, as stored"
    return f"{dtype} (auto)" if asked == "auto" else dtype


# --------------------------------------------------------------------------- bytes


@dataclass(frozen=True, slots=True)
class _Sized:
    """A parameter with its bytes as numbers; see ``weights.load.SizedParameter``."""

    spec: WeightSpec
    num_bytes: int

    @property
    def is_matrix(self) -> bool:
        return self.spec.is_matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def check(self, part: str, shape: tuple[int, ...], name: str, filled: set[str]) -> object:
        return self.spec.check(part, shape, name, filled)


def _number_bytes(spec: WeightSpec, dtype: str) -> int:
    """Bytes of a parameter that is held as numbers: vectors in float32, matrices in ``dtype`` and
    in panels of rows (``NativeKernels.packed_bytes``)."""
    if not spec.is_matrix:
        return 4 * spec.rows * spec.columns
    panels = -(-spec.rows // PANEL_ROWS) * PANEL_ROWS
    return spec.num_experts * panels * spec.columns * DTYPE_BYTES[dtype]


class _Targets:
    """Where tensors go, found once; see ``weights.load.Names``."""

    def __init__(self, targets: Mapping[str, tuple[str, str] | None]) -> None:
        self._targets = targets

    def find(self, name: str) -> tuple[str, str] | None:
        return self._targets[name]

    def items(self) -> Iterator[tuple[str, str]]:
        """(tensor, path of its parameter)."""
        return ((name, target[0]) for name, target in self._targets.items() if target)


def _weights(
    architecture: Architecture,
    targets: _Targets,
    tensors: _Tensors,
    form_of: Callable[[str], Form | None],
    dtype: str,
) -> tuple[WeightShape, ...]:
    forms: dict[str, Form] = {}
    for name, _ in targets.items():
        form = form_of(name)
        if form is not None:
            forms[name] = form

    def low_bit_bytes(name: str) -> int | None:
        form = forms.get(name)
        if form is None:
            return None
        rows, columns = tensors.tensor_shape(name)
        return form.num_bytes(rows, columns)

    def fixed_of(name: str) -> int:
        return forms[name].fixed_bytes(tensors.tensor_shape(name)[1]) if name in forms else 0

    fixed = fixed_bytes(targets, tensors, fixed_of)
    sized = {spec.path: _Sized(spec, _number_bytes(spec, dtype)) for spec in architecture.weights}
    num_bytes = planned_bytes(sized.items(), targets, tensors, low_bit_bytes if forms else None)
    names: dict[str, list[str]] = {path: [] for path in sized}
    #: Of a parameter's tensors: bytes by the form that they are held in.
    held: dict[str, Counter[str]] = {path: Counter() for path in sized}
    for name, path in targets.items():
        if path not in names:
            continue
        names[path].append(name)
        size = low_bit_bytes(name)
        if size is not None:
            held[path][f"int{forms[name].bits}"] += size
    return tuple(
        WeightShape(
            path=spec.path,
            rows=spec.rows,
            columns=spec.columns,
            kind=spec.kind,
            form=_form(spec, held[spec.path], dtype),
            num_bytes=num_bytes[spec.path],
            fixed_bytes=fixed[spec.path],
            num_experts=spec.num_experts,
            num_chosen=spec.num_chosen,
            names=tuple(names[spec.path]),
            is_paired=spec.is_paired,
        )
        for spec in architecture.weights
    )


def _form(spec: WeightSpec, held: Counter[str], dtype: str) -> str:
    """The form of most of a parameter's bytes."""
    if not spec.is_matrix:
        return "float32"
    return held.most_common(1)[0][0] if held else dtype


# --------------------------------------------------------------------------- opening


@dataclass(frozen=True, slots=True)
class _Found:
    """A model, opened. ``config``: of the language model, checked."""

    name: str
    config: CheckpointConfig
    architecture: Architecture
    tensors: _Tensors
    targets: _Targets
    notes: tuple[str, ...] = ()


def _open(model: str, config: EngineConfig, overrides: Mapping[str, Any]) -> _Found:
    try:
        path = resolve_model(model, revision=config.model.revision, download=False).path
    except ModelNotFoundError as error:
        public = find_public_shape(model)
        if public is None:
            raise _not_found(model, error) from None
        return _open_public(model, public, overrides)
    try:
        return _open_path(model, path, overrides)
    except PermissionError as error:
        raise InvalidModelError(
            f"{error.filename or path} cannot be read: {error.strerror or error}. Check its "
            "permissions, and those of the folders that it lies in."
        ) from None


def _open_path(model: str, path: Path, overrides: Mapping[str, Any]) -> _Found:
    if path.is_dir():
        if any(entry.name.lower().endswith(_WITH_HEADERS) for entry in path.iterdir()):
            return _opened(model, open_checkpoint(path, overrides), ())
        if not (path / "config.json").is_file():
            raise InvalidModelError(
                f"{path} holds neither a config.json nor a .safetensors or .gguf file. Give the "
                "folder of a model, or one of its files."
            )
        path = path / "config.json"
    if path.suffix.lower() in (".bin", ".pt", ".pth"):
        # Their headers need torch; the configuration beside them says the same.
        path = path.parent / "config.json"
    if path.suffix.lower() == ".safetensors":
        return _opened(model, open_checkpoint(path, overrides), ())
    if path.suffix.lower() == ".gguf" or _is_gguf(path):
        source = GGUFSource(path, header_only=True)
        notes: tuple[str, ...] = ()
        missing = source.missing_bytes
        if missing:
            notes = (
                f"{path} lacks the last {missing} bytes of its weights: it can be planned with, "
                "not loaded.",
            )
        return _opened(model, gguf_checkpoint(path, source, overrides), notes)
    if path.suffix.lower() != ".json":
        raise UnsupportedModelError(
            f"{path} is nothing to plan with: give a config.json, a folder that has one, or a "
            ".gguf or .safetensors file."
        )
    bare = CheckpointConfig(read_config(path, overrides), str(path))
    return _open_bare(model, bare, path, ())


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _not_found(model: str, error: ModelNotFoundError) -> ModelNotFoundError:
    near = nearest_public_shapes(model)
    names = ", ".join(near or list(PUBLIC_SHAPES)[:4])
    what = "the nearest are" if near else "such as"
    return ModelNotFoundError(
        f"{error} To plan without files give a config.json, or one of {len(PUBLIC_SHAPES)} names "
        f"that are built in, {what} {names}; `ambidex plan --help` lists them."
    )


def _opened(model: str, checkpoint: Checkpoint, notes: tuple[str, ...]) -> _Found:
    config = model_config(checkpoint.config)
    check_config(config, checkpoint)
    architecture = architecture_of(config)
    targets: dict[str, tuple[str, str] | None] = {}
    for name in checkpoint.tensor_names():
        try:
            targets[name] = architecture.names.find(name)
        except KeyError:
            targets[name] = None
    return _Found(model, config, architecture, checkpoint, _Targets(targets), notes)


def _open_public(model: str, key: str, overrides: Mapping[str, Any]) -> _Found:
    public = PUBLIC_SHAPES[key]
    source = f"{key} (built in, from the config.json of {public.source})"
    notes = [f"The sizes are those that are built in for {key}, from {public.source}."]
    config = CheckpointConfig(merged(public.values, overrides), source)
    if not family_of(config, planned=True).is_served:
        notes.append(
            f"{key} can be planned but not served: it reads images too. Its language model is "
            "counted, with the layers that look at an image, and without the image's encoder."
        )
    return _open_bare(model, config, Path(public.source), tuple(notes), planned=True)


def _open_bare(
    model: str,
    config: CheckpointConfig,
    path: Path,
    notes: tuple[str, ...],
    *,
    planned: bool = False,
) -> _Found:
    config = model_config(config, planned=planned)
    check_bare_config(config)
    family = family_of(config, planned=planned)
    architecture = architecture_of(config, planned=planned)
    tensors = _Published(architecture, family, config, path)
    return _Found(model, config, architecture, tensors, tensors.targets, notes)


class _Published:
    """A checkpoint as it would be published for a configuration; see :class:`_Tensors`."""

    def __init__(
        self, architecture: Architecture, family: Family, config: CheckpointConfig, path: Path
    ) -> None:
        self.path = path
        found = architecture.tensors(family.is_fused)
        self._shapes = {name: shape for name, (_, _, shape) in found.items()}
        self.targets = _Targets(
            {name: (spec.path, part) for name, (spec, part, _) in found.items()}
        )
        self._specs = {name: spec for name, (spec, _, _) in found.items()}
        table = config.get("quantization_config") or {}
        self._form = _quantizer(table, config.source)
        self._skipped = _skipped(table)
        self.quantization: str | None = table.get("quant_method")
        self.is_quantized = bool(table)
        self.dtype_name = f"{self.quantization}, {_bits(table)} bits" if table else "numbers"

    def tensor_names(self) -> list[str]:
        return list(self._shapes)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def quantized_form(self, name: str) -> Form | None:
        """Quantisers leave embeddings, heads and routers alone."""
        spec = self._specs[name]
        is_layer = spec.path.startswith("layers.") and not spec.path.endswith("router.weight")
        if self._form is None or not (spec.is_matrix and is_layer):
            return None
        if any(skipped in name for skipped in self._skipped):
            return None
        return self._form(self._shapes[name][1])


def _skipped(table: Mapping[str, Any]) -> list[str]:
    found = table.get("modules_to_not_convert") or table.get("llm_int8_skip_modules")
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def _bits(table: Mapping[str, Any]) -> int:
    if table.get("quant_method") == "bitsandbytes":
        return 8 if table.get("load_in_8bit") else 4
    bits = table.get("bits") or table.get("w_bit") or 4
    return bits if type(bits) is int else 0


def _quantizer(table: Mapping[str, Any], source: str) -> Callable[[int], Form] | None:
    """The form of a matrix by its columns; see ``quantized_source.py`` for the ways."""
    if not table:
        return None
    method, bits = table.get("quant_method"), _bits(table)
    supported = {"awq": (4,), "gptq": (2, 3, 4, 8), "bitsandbytes": (4, 8)}[str(method)]
    if bits not in supported:
        raise InvalidModelError(
            f"{source}: quantization_config.bits is {table.get('bits')!r:.40}; {method} is "
            f"supported with {', '.join(map(str, supported))} bits."
        )
    if method == "bitsandbytes" and bits == 8:
        return lambda columns: Form(8, 0, scale_bytes=4)
    is_bnb = method == "bitsandbytes"
    default = _BNB_BLOCK if is_bnb else 128
    size = table.get("group_size") or table.get("q_group_size") or default
    is_symmetric = table.get("sym", True) if method == "gptq" else False
    is_ordered = method == "gptq" and bool(table.get("desc_act"))

    def form(columns: int) -> Form:
        group = columns if size == -1 else size
        split = split_group(group, columns) if type(group) is int else None
        if split is None:
            raise InvalidModelError(
                f"{source}: {size!r:.40} columns share a scale (quantization_config), and a matrix "
                f"has rows of {columns} columns. Supported are 16, 32, 64, multiples of 128 and "
                "whole rows, where they divide it."
            )
        if is_bnb:
            return Form(4, split[0], scale_bytes=4, has_codebook=True)
        return Form(
            8 if bits == 8 else 4,
            split[0],
            zero_bytes=0 if is_symmetric else 1,
            is_permuted=is_ordered and columns > group,
        )

    return form
