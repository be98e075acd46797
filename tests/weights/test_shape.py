"""The sizes of a model against what the loader plans and holds, and bad input."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import quantised_checkpoints as files
from gguf.constants import GGMLQuantizationType, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantized_source import CASES, make

from ambidex.config import (
    CacheConfig,
    CheckpointConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
)
from ambidex.errors import (
    AmbidexError,
    InvalidModelError,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
)
from ambidex.memory.architectures import FAMILIES
from ambidex.memory.model_shape import ModelShape
from ambidex.memory.public_shapes import PUBLIC_SHAPES, find_public_shape
from ambidex.memory.weight_places import ModuleSize
from ambidex.runner import loader
from ambidex.runner.placing import _kind, _num_rows
from ambidex.weights import config_check
from ambidex.weights.checkpoint import open_checkpoint
from ambidex.weights.headers import LazyArray
from ambidex.weights.shape import checkpoint_shape, model_shape

Folder = Callable[..., Path]
#: Of the models that ``hf_folder`` makes.
NAMES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3", "phi3", "mistral", "opt")
LLAMA = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
GGUF_KINDS = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def engine(model: Path | str, kv: str = "auto", **fields: Any) -> EngineConfig:
    cache = CacheConfig(kv_cache_dtype=kv, kv_cache_bytes=1 << 20)
    return EngineConfig(ModelConfig(str(model), **fields), cache, cpu_threads=1)


def shape_of(model: Path | str, kv: str = "auto", **fields: Any) -> ModelShape:
    return model_shape(str(model), engine(model, kv, **fields))


class Loaded:
    """A model in the engine: what was planned of it, and what is held."""

    def __init__(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        planned: list[dict[str, int]] = []
        modules: list[Any] = []
        plan_bytes, plan_places = loader.planned_bytes, loader.plan_places

        def record_bytes(*args: Any) -> dict[str, int]:
            planned.append(plan_bytes(*args))
            return planned[-1]

        def record_places(config: Any, hands: Any, model: Any, names: Any, *rest: Any) -> Any:
            fixed = {weight.path: weight.fixed_bytes for weight in rest[3].weights}
            modules.append((dict(model.named_parameters()), names, fixed))
            return plan_places(config, hands, model, names, *rest)

        monkeypatch.setattr(loader, "planned_bytes", record_bytes)
        monkeypatch.setattr(loader, "plan_places", record_places)
        lane = loader.load_lane(config)
        try:
            (self.planned,) = planned
            ((parameters, names, fixed),) = modules
            #: As ``runner.placing`` makes them.
            self.modules = [
                ModuleSize(
                    path,
                    self.planned[path],
                    _num_rows(p),
                    _kind(p),
                    tuple(names[path]),
                    fixed[path],
                )
                for path, p in parameters.items()
            ]
            self.held = {path: p.held_bytes for path, p in lane.runner.model.named_parameters()}
            self.ledger = lane.ledgers[0].snapshot().accounts.get("weights", 0)
            self.kv = [
                (len(g.layers), g.num_kv_heads, g.head_dim, g.window, g.bytes_per_token)
                for g in lane.groups
            ]
            self.kv_dtype = lane.kv_dtype
            self.max_model_len = lane.max_model_len
        finally:
            lane.close()


def compare(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    """A shape that is the loader's, to the byte."""
    shape = model_shape(config.model.model, config)
    assert checkpoint_shape(open_checkpoint(config.model.model), config) == shape
    loaded = Loaded(config, monkeypatch)
    assert {weight.path: weight.num_bytes for weight in shape.weights} == loaded.planned
    assert {weight.path: weight.num_bytes for weight in shape.weights} == loaded.held
    assert shape.weight_bytes == loaded.ledger
    assert shape.modules == loaded.modules
    assert [
        (g.num_layers, g.num_kv_heads, g.head_dim, g.window, g.bytes_per_token) for g in shape.kv
    ] == loaded.kv
    assert shape.kv_dtype == loaded.kv_dtype
    if shape.max_positions is not None and shape.max_positions <= 512:  # It fits the cache.
        assert shape.max_positions == loaded.max_model_len
    return shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "kv": "int8"},
        {"quantization": "int8"},
        {"quantization": "int4", "kv": "bfloat16"},
    ],
    ids=str,
)
def test_plain_checkpoints(
    hf_folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str, fields: Mapping[str, Any]
) -> None:
    folder = hf_folder(name)
    shape = compare(engine(folder, **fields), monkeypatch)
    expected = {"int8": "int8", "int4": "int4"}.get(
        fields.get("quantization", ""), fields.get("dtype", "float32")
    )
    assert {w.form for w in shape.weights if w.path.endswith("qkv.weight")} == {expected}
    assert {w.form for w in shape.weights if "norm" in w.path} == {"float32"}
    # The configuration alone says the same, but for names and for experts that files stack.
    bare = shape_of(folder / "config.json", **fields)
    paths = ("path", "rows", "columns", "kind", "num_experts", "num_chosen", "is_paired")
    stacked = {w.path for w in shape.weights if any("experts." in n for n in w.names)}
    for one, other in zip(shape.weights, bare.weights, strict=True):
        assert [getattr(one, p) for p in paths] == [getattr(other, p) for p in paths]
        if one.path not in stacked:
            assert (one.num_bytes, one.form) == (other.num_bytes, other.form)
            assert sorted(one.names) == sorted(other.names)
    assert (bare.kv, bare.max_positions) == (shape.kv, shape.max_positions)


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("offload_bytes", [0, 100_000])
def test_beside_an_accelerator(
    hf_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
    offload_bytes: int,
) -> None:
    """The same bytes, wherever they lie."""
    device = DeviceConfig("sim:memory=128MiB,core_bandwidth=10GB/s,core_flops=50G,speed=4")
    config = replace(
        engine(hf_folder("mixtral"), quantization=quantization),
        device=device,
        offload=OffloadConfig(cpu_offload_bytes=offload_bytes, moe_expert_cache="off"),
        enforce_eager=True,
    )
    shape = model_shape(config.model.model, config)
    loaded = Loaded(config, monkeypatch)
    assert {weight.path: weight.num_bytes for weight in shape.weights} == loaded.planned
    assert {weight.path: weight.num_bytes for weight in shape.weights} == loaded.held
    assert shape.modules == loaded.modules
    assert loaded.ledger >= offload_bytes


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "gemma3", "phi3"])
def test_gguf_files(
    gguf_file: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    kind: str,
) -> None:
    dtype = None if kind == "F32" else GGMLQuantizationType[kind]
    _, file = gguf_file(name, dtype=dtype)
    shape = compare(engine(file), monkeypatch)
    bits = f"int{kind[1]}" if kind.startswith("Q") else "float32"
    assert {w.form for w in shape.weights if w.path.endswith("qkv.weight")} == {bits}
    assert shape.kv_dtype == ("float16" if kind.startswith("Q") else "float32")
    # Cut off behind its header.
    data = file.read_bytes()
    size = len(data) - sum(w.num_bytes for w in shape.weights) // 4
    cut = tmp_path / "header"
    cut.write_bytes(data[: max(size // 8, 1 << 14)])
    again = shape_of(cut)
    assert not shape.notes
    assert f"the last {len(data) - cut.stat().st_size} bytes" in again.notes[0]
    assert (again.weights, again.kv) == (shape.weights, shape.kv)


@pytest.mark.parametrize("case", CASES)
def test_quantised_checkpoints(
    hf_folder: Folder, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder, _ = make(hf_folder, case)
    config = engine(folder)
    shape = model_shape(str(folder), config)
    loaded = Loaded(config, monkeypatch)
    planned = {weight.path: weight.num_bytes for weight in shape.weights}
    assert planned == loaded.planned
    assert shape.modules == loaded.modules
    # A codebook of 16 entries comes with each matrix that has one.
    beside = 128 if case in ("nf4", "nf4-nested", "fp4") else 0
    for path, size in loaded.held.items():
        parts = 3 if path.endswith("qkv.weight") else 2
        assert 0 <= size - planned[path] <= parts * beside, path
    if beside:
        return  # Such configurations do not say how many columns share a scale.
    bare = shape_of(folder / "config.json")
    assert {w.path: (w.num_bytes, w.form) for w in bare.weights} == {
        w.path: (w.num_bytes, w.form) for w in shape.weights
    }
    assert bare.kv == shape.kv


def test_a_configuration_of_bitsandbytes(tmp_path: Path) -> None:
    """Blocks of 64, the library's default; skipped modules stay numbers."""
    table = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path = write(tmp_path, LLAMA | {"intermediate_size": 128, "quantization_config": table})
    sizes = {w.path: w.num_bytes for w in shape_of(path).weights}
    book = 128
    assert sizes["layers.0.attention.output.weight"] == 64 * 64 // 2 + 64 * 4 + book
    assert sizes["layers.0.mlp.down.weight"] == 64 * 128 // 2 + 64 * 2 * 4 + book
    assert sizes["head.weight"] == 128 * 64 * 4
    table["llm_int8_skip_modules"] = ["down_proj"]  # type: ignore[assignment]
    write(tmp_path, LLAMA | {"intermediate_size": 128, "quantization_config": table})
    skipped = {w.path: w.num_bytes for w in shape_of(path).weights}
    assert skipped["layers.0.mlp.down.weight"] == 64 * 128 * 4


@pytest.mark.parametrize("case", ["awq", "gptq-4-order", "int8"])
@pytest.mark.parametrize("name", ["mixtral", "phi3"])
def test_quantised_checkpoints_of_other_models(
    hf_folder: Folder, monkeypatch: pytest.MonkeyPatch, case: str, name: str
) -> None:
    pack, table = CASES[case]
    folder = hf_folder(name)
    files.quantise_folder(folder, pack, table)
    shape = compare(engine(folder), monkeypatch)
    bare = shape_of(folder / "config.json")
    if name == "phi3":
        assert [w.num_bytes for w in bare.weights] == [w.num_bytes for w in shape.weights]


def test_numbers_of_a_quantised_checkpoint(
    hf_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--dtype`` asks for numbers, whatever the files are."""
    folder, _ = make(hf_folder, "awq")
    shape = compare(engine(folder, dtype="bfloat16"), monkeypatch)
    assert {w.form for w in shape.weights} == {"bfloat16", "float32"}


@pytest.mark.model
def test_the_default_model(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fields in ({}, {"dtype": "bfloat16"}, {"kv": "int8"}):
        shape = compare(engine(smollm2, **fields), monkeypatch)
        assert 134.4e6 < shape.num_parameters < 134.6e6
    named = shape_of("smollm2-135m")
    assert [(w.path, w.rows, w.columns, w.kind) for w in named.weights] == [
        (w.path, w.rows, w.columns, w.kind) for w in shape.weights
    ]


# --- built-in names --------------------------------------------------------------------------


@pytest.mark.parametrize("key", PUBLIC_SHAPES)
def test_public_shapes_have_the_published_number_of_parameters(key: str) -> None:
    shape, public = shape_of(key), PUBLIC_SHAPES[key]
    assert shape.num_parameters == pytest.approx(public.parameters, rel=0.005)
    assert shape.notes[0].endswith(f"from {public.source}.")
    assert find_public_shape(public.source) == key
    assert find_public_shape(key.upper()) == key
    assert len(shape.notes) == (1 if FAMILIES[shape.model_type].is_served else 2)
    assert all(weight.names for weight in shape.weights)


@pytest.mark.parametrize(
    ("key", "active", "kv"),
    [
        # arXiv 2401.04088: "uses only 13B active parameters"; the announcement says 12.9.
        ("mixtral-8x7b", 12.9e9, 131072),
        # The card: 3.3 and 22 billion active.
        ("qwen3-30b-a3b", 3.35e9, 98304),
        ("qwen3-235b-a22b", 22.2e9, 192512),
        ("llama-3-8b", 8.03e9, 131072),
        ("qwen2-7b", 7.616e9, 57344),
        ("llama-2-7b", 6.738e9, 524288),
    ],
)
def test_what_one_token_uses(key: str, active: float, kv: int) -> None:
    shape = shape_of(key, dtype="bfloat16")
    assert shape.num_active_parameters == pytest.approx(active, rel=0.005)
    assert shape.kv_bytes_per_token == kv


def test_windows_and_layers_that_keep_nothing() -> None:
    gemma = shape_of("gemma-3-27b", kv="bfloat16")
    assert [(g.num_layers, g.window) for g in gemma.kv] == [(52, 1024), (10, None)]
    for name, window in (("v0.1", 4096), ("instruct-v0.2", None), ("v0.3", None)):
        mistral = shape_of(f"mistral-7b-{name}")
        assert [(g.num_layers, g.window) for g in mistral.kv] == [(32, window)]
    large = shape_of("llama-3.2-90b")
    assert [(g.num_layers, g.window) for g in large.kv] == [(80, None)]
    assert large.num_layers == 100
    assert "images" in large.notes[1]


def test_variants_of_public_names() -> None:
    for name, key in (
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen2-7B", "qwen2-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-3-12b-pt", "gemma-3-12b"),
        ("Llama-3.2-90B-Vision-Instruct", "llama-3.2-90b"),
    ):
        assert find_public_shape(name) == key
    assert find_public_shape("mistralai/Mistral-7B-Instruct-v0.4") is None
    assert find_public_shape("microsoft/Phi-3-mini-128k-instruct") is None
    assert find_public_shape("deepseek-v3") is None
    assert find_public_shape("") is None


def test_overrides_change_a_public_shape() -> None:
    shape = shape_of("llama-3-8b", hf_overrides={"num_hidden_layers": 2, "vocab_size": 100})
    assert shape.num_layers == len(
        [w for w in shape.weights if w.path.endswith("qkv.weight")]
    ) == 2  # fmt: skip


# --- speed and imports -----------------------------------------------------------------------

_CODE = """
import sys
from ambidex.config import EngineConfig, ModelConfig
from ambidex.weights.shape import model_shape
for name in sys.argv[1:]:
    print(model_shape(name, EngineConfig(ModelConfig(name))).weight_bytes)
    assert not {"torch", "numpy", "transformers", "huggingface_hub"} & set(sys.modules)
"""


def test_without_torch(hf_folder: Folder, gguf_file: Callable[..., tuple[Path, Path]]) -> None:
    folder, file = gguf_file("llama", dtype=GGMLQuantizationType.Q8_0)
    quantised, _ = make(hf_folder, "nf4-nested", "phi3")
    names = [str(n) for n in (folder, file, quantised, folder / "config.json", "llama-3-70b")]
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *names], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.split()) == len(names)


def test_long_lists_of_tokens_are_not_read(
    tmp_path: Path, gguf_file: Callable[..., tuple[Path, Path]]
) -> None:
    """A header of 152,000 tokens: none of them is decoded."""
    tokens = [f"token{i}" for i in range(152_000)]
    fields = {"tokenizer.ggml.tokens": (tokens, GGUFValueType.ARRAY)}
    _, file = gguf_file("llama", fields=fields)
    decoded: list[int] = []
    original = LazyArray._decoded

    def count(self: LazyArray) -> list[Any]:
        decoded.append(len(self))
        return original(self)

    LazyArray._decoded = count  # type: ignore[method-assign]
    try:
        assert shape_of(file).vocab_size == LLAMA["vocab_size"]
    finally:
        LazyArray._decoded = original  # type: ignore[method-assign]
    assert not decoded


# --- folders, and bad input ------------------------------------------------------------------


def write(folder: Path, values: Mapping[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


def test_a_folder_without_weights(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    shape = shape_of(tmp_path)
    # Weights of torch's own format are not opened, which would need torch.
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert shape_of(tmp_path) == shape
    assert shape_of(tmp_path / "pytorch_model.bin").weights == shape.weights


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"neither a config\.json nor a \.safetensors"):
        shape_of(tmp_path)


def test_a_model_in_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hf_folder: Folder
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    saved = hf_folder("llama")
    (folder / "snapshots").mkdir()
    saved.rename(folder / "snapshots" / "abc")
    (folder / "snapshots" / "abc" / "tokenizer.json").write_text("{}")
    assert shape_of("org/tiny").num_layers == LLAMA["num_hidden_layers"]


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"built in, the nearest are llama-3-70b"):
        shape_of("llama3-70b")
    with pytest.raises(ModelNotFoundError, match=r"built in, such as llama-2-7b"):
        shape_of("some/zzzz")


def test_without_a_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, {k: v for k, v in LLAMA.items() if k != "max_position_embeddings"})
    with pytest.raises(InvalidModelError) as raised:
        shape_of(path)
    for part in (str(path), "'max_position_embeddings'", "--max-model-len", "--hf-overrides"):
        assert part in str(raised.value)
    assert shape_of(path, max_model_len=100).max_positions is None
    assert shape_of(path, hf_overrides={"max_position_embeddings": 77}).max_positions == 77


def test_the_engine_goes_on_without_a_length_too(
    hf_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_folder("llama")
    values = json.loads((folder / "config.json").read_text())
    del values["max_position_embeddings"]
    write(folder, values)
    assert Loaded(engine(folder, max_model_len=64), monkeypatch).max_model_len == 64
    with pytest.raises(InvalidModelError, match="--max-model-len"):
        Loaded(engine(folder), monkeypatch)


def test_rope_scaling_lengthens(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert shape_of(path).max_positions == 1024
    with pytest.raises(OptionError, match=r"--max-model-len 1025 .* 1024 tokens"):
        shape_of(path, max_model_len=1025)
    wrong = {"max_position_embeddings": 2048}
    assert shape_of(path, max_model_len=4096, hf_overrides=wrong).max_positions == 8192


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_key_value_heads": 3}, r"'num_key_value_heads' is 3, .* divide the 4"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, r"does not divide 'hidden_size' 64"),
        ({"num_attention_heads": 128}, r"'num_attention_heads' is 128"),
        ({"hidden_size": "64"}, r"'hidden_size' is '64'"),
        ({"hidden_size": None}, r"lacks the field 'hidden_size'.*--hf-overrides"),
        ({"num_hidden_layers": 10**9}, r"'num_hidden_layers' .* at most 4096"),
        ({"model_type": "mixtral", "num_local_experts": 10**6}, r"'num_local_experts' .* most"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            r"'num_experts_per_tok' is 3",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 3}},
            r"quantization_config\.bits is 3; awq is supported with 4 bits",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 48}},
            r"48 columns share a scale .* rows of 64 columns",
        ),
    ],
)
def test_a_config_that_contradicts_itself(
    tmp_path: Path, change: Mapping[str, Any], match: str
) -> None:
    path = write(tmp_path, LLAMA | change)
    with pytest.raises(InvalidModelError, match=match) as raised:
        shape_of(path)
    assert str(path) in str(raised.value)
    # The right values repair it.
    repaired = {name: LLAMA.get(name) for name in change}
    if "quantization_config" not in change:
        assert shape_of(path, hf_overrides=repaired).weights


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rope_scaling": {"rope_type": "ntk-x"}}, r"type 'ntk-x' is not supported.*longrope"),
        ({"rope_scaling": {"type": "linear"}}, r"type 'linear' lacks the field 'factor'"),
        ({"rope_scaling": {"type": "dynamic"}}, r"type 'dynamic' lacks the field 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, r"lacks the field 'low_freq_factor'"),
        ({"rope_scaling": LONG | {"long_factor": [2.0] * 7}}, r"long_factor has 7 .* asks for 8"),
        ({"rope_scaling": LONG | {"short_factor": None}}, r"lacks the field 'short_factor'"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, r"lacks the field 'long_factor'"),
        ({"hidden_act": "mish"}, r"'mish' \(hidden_act\) is not supported.*gelu_pytorch_tanh"),
        ({"model_type": "gemma3_text", "hidden_activation": "mish"}, r"\(hidden_activation\)"),
        ({"model_type": "opt", "ffn_dim": 64, "activation_function": "mish"}, r"'mish'"),
        ({"head_dim": 15}, r"a head has 15 values.*even number"),
        ({"partial_rotary_factor": 0.2}, r"of which 3 are to be rotated"),
    ],
)
def test_what_the_layers_would_refuse_is_not_planned(
    tmp_path: Path, change: Mapping[str, Any], match: str
) -> None:
    path = write(tmp_path, LLAMA | change)
    with pytest.raises((InvalidModelError, UnsupportedModelError), match=match) as raised:
        shape_of(path)
    assert str(path) in str(raised.value)


def test_every_rotation_and_activation_of_the_layers_can_be_planned(tmp_path: Path) -> None:
    from ambidex.kernels import reference
    from ambidex.layers import rope

    assert tuple(sorted(reference.ACTIVATIONS)) == config_check.ACTIVATIONS
    assert set(rope._SCALINGS) == set(config_check.ROPE_KINDS)
    for kind, needed in config_check.ROPE_KINDS.items():
        table = {name: [1.5] * 8 if name in LONG else 2.0 for name in needed}
        table |= {"rope_type": kind, "factor": 2.0}
        path = write(tmp_path, LLAMA | {"rope_scaling": table})
        assert shape_of(path).weights


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnsupportedModelError, match=r"nothing to plan with: give a config\.json"):
        shape_of(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidModelError, match="no valid JSON"):
        shape_of(tmp_path / "config.json")


values = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 40), st.just(10**12), st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "quant_method", "bits"]),
                    st.sampled_from(["awq", "gptq", "bitsandbytes", "yarn", 4, 8, None, 1.5])),
)  # fmt: skip
names = st.sampled_from(
    ["model_type", "text_config", "quantization_config", "rope_scaling", "rope_parameters",
     "layer_types", "mlp_only_layers", "head_dim", "num_experts", "num_local_experts",
     "num_experts_per_tok", "moe_intermediate_size", "ffn_dim", "sliding_window",
     "tie_word_embeddings", "architectures", "kv_lora_rank", *LLAMA]
)  # fmt: skip


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(names, values, max_size=4))
@settings(max_examples=300, deadline=None)
def test_no_configuration_ends_in_a_traceback(kind: str, changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), LLAMA | {"model_type": kind} | changes)
        with contextlib.suppress(AmbidexError):
            shape = shape_of(path)
            assert shape.weight_bytes > 0
            assert len(shape.weights) > 0


def test_unknown_and_unsupported_models(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA | {"model_type": "falcon"})
    with pytest.raises(UnsupportedModelError, match=r"'falcon'.*Supported model types: gemma3, "):
        shape_of(path)
    for values in (
        LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        {"model_type": "x", "text_config": LLAMA | {"kv_lora_rank": 512}},
    ):
        write(tmp_path, values)
        with pytest.raises(UnsupportedModelError, match=r"compressed form .*kv_lora_rank 512"):
            shape_of(path)
    write(tmp_path, LLAMA | {"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(UnsupportedModelError, match=r"'hqq'.*awq, bitsandbytes, gptq"):
        shape_of(path)


def test_latent_attention_in_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "deepseek2")
    writer.add_key_value("deepseek2.attention.kv_lora_rank", 512, gguf.GGUFValueType.UINT32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"compressed form .*kv_lora_rank 512"):
        shape_of(tmp_path / "m.gguf")


def test_options_that_contradict_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    with pytest.raises(OptionError, match="--quantization int8 and --dtype bfloat16 exclude"):
        shape_of(path, quantization="int8", dtype="bfloat16")
    with pytest.raises(OptionError, match="--quantization awq does not fit"):
        shape_of(path, quantization="awq")
    write(tmp_path, LLAMA | {"quantization_config": CASES["awq"][1]})
    with pytest.raises(OptionError, match="quantises plain weights"):
        shape_of(path, quantization="int8")


def test_a_truncated_header_is_still_an_error(
    tmp_path: Path, gguf_file: Callable[..., tuple[Path, Path]]
) -> None:
    _, file = gguf_file("llama")
    cut = tmp_path / "short.gguf"
    cut.write_bytes(file.read_bytes()[:400])
    with pytest.raises(InvalidModelError, match=r"damaged|truncated"):
        shape_of(cut)


def test_checked_configurations_need_no_file() -> None:
    """A configuration's own name stands in messages."""
    config = CheckpointConfig({"model_type": "opt"}, "somewhere")
    from ambidex.memory.architectures import architecture_of

    with pytest.raises(InvalidModelError, match="somewhere lacks the field 'hidden_size'"):
        architecture_of(config)
