"""GGUF files against the Hugging Face models that they were made from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFValueType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file

from ambidex.checkpoint_names import NameTable
from ambidex.device.cpu import CPUDevice
from ambidex.errors import InvalidModelError, UnsupportedModelError
from ambidex.layers.module import BuildContext
from ambidex.models.registry import build_model
from ambidex.weights.checkpoint import open_checkpoint
from ambidex.weights.gguf import DEQUANTISABLE
from ambidex.weights.headers import read_gguf_header
from ambidex.weights.load import load_weights

ALL = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3", "phi3"]
Maker = Callable[..., tuple[Path, Path]]


@pytest.mark.parametrize("name", ALL)
def test_tensors_are_those_of_the_original(gguf_file: Maker, name: str) -> None:
    folder, file = gguf_file(name)
    expected = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(file)
    assert checkpoint.format == "gguf" and checkpoint.dtype_name == "F32"
    assert sorted(checkpoint.tensor_names()) == sorted(expected)
    assert checkpoint.num_parameters == sum(tensor.numel() for tensor in expected.values())
    assert checkpoint.num_bytes == 4 * checkpoint.num_parameters
    for key, tensor in expected.items():
        loaded = checkpoint.load(key)
        assert loaded.dtype == torch.float32
        assert checkpoint.tensor_shape(key) == tuple(tensor.shape) == tuple(loaded.shape)
        if name == "gemma3" and key.endswith("norm.weight"):
            torch.testing.assert_close(loaded, tensor, rtol=0, atol=2e-7)
        else:
            assert torch.equal(loaded, tensor), key


@pytest.mark.parametrize("name", ALL)
def test_our_model_finds_every_tensor(gguf_file: Maker, name: str) -> None:
    """Biases, too: Qwen 2 has them on queries, keys and values, and none on the output."""
    _, file = gguf_file(name)
    checkpoint = open_checkpoint(file)
    device = CPUDevice(1)
    model = build_model(BuildContext(device, torch.float32, 128), checkpoint.config)
    unused = load_weights(model.named_parameters(), NameTable(model.names), checkpoint, device)
    assert unused == []
    paths = [path for path, _ in model.named_parameters()]
    assert any(path.endswith("qkv.bias") for path in paths) == (name == "qwen2")


@pytest.mark.parametrize("name", ALL)
def test_rebuilt_config_makes_the_same_model(gguf_file: Maker, name: str) -> None:
    """transformers, given our rebuilt configuration and tensors, computes the same logits."""
    folder, file = gguf_file(name)
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    checkpoint = open_checkpoint(file)
    values = {**checkpoint.config.values, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(**values)
    rebuilt = folder.parent / "rebuilt"
    config.architectures = values["architectures"]
    rebuilt.mkdir()
    config.save_pretrained(rebuilt)
    from safetensors.torch import save_file

    tensors = {key: checkpoint.load(key).contiguous() for key in checkpoint.tensor_names()}
    save_file(tensors, rebuilt / "model.safetensors", {"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(rebuilt, dtype=torch.float32)
    ids = torch.arange(40)[None] % 128
    with torch.no_grad():
        want, got = original(ids).logits, again(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_half_types_and_mixed_files(gguf_file: Maker) -> None:
    folder, file = gguf_file("llama", dtype=GGMLQuantizationType.BF16)
    checkpoint = open_checkpoint(file)
    assert checkpoint.dtype_name == "BF16"
    for key, tensor in load_file(folder / "model.safetensors").items():
        want = tensor if tensor.dim() == 1 else tensor.bfloat16().float()
        assert torch.equal(checkpoint.load(key), want)


def test_quantised_experts_and_permuted_rows(gguf_file: Maker) -> None:
    """Packed rows of a stack, and rows permuted while packed, dequantise as the whole would."""
    folder, file = gguf_file("mixtral", dtype=GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(file)
    for key, tensor in load_file(folder / "model.safetensors").items():
        kind = GGMLQuantizationType.Q8_0
        want = tensor.numpy()
        if tensor.dim() > 1:
            want = quants.dequantize(quants.quantize(want, kind), kind)
        assert torch.equal(checkpoint.load(key), torch.from_numpy(want)), key


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Random packed bytes of a type; scales may be anything, so NaN is possible."""
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    return generator.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)


@pytest.mark.parametrize("type_name", sorted(DEQUANTISABLE - {"F32", "F16"}))
def test_every_type_is_dequantised_as_gguf_does(
    one_tensor_gguf: Callable[..., Path], type_name: str
) -> None:
    kind = GGMLQuantizationType[type_name]
    packed = random_blocks(kind, 50, 256)
    checkpoint = open_checkpoint(one_tensor_gguf(packed, kind))
    loaded = checkpoint.load("model.layers.0.mlp.down_proj.weight").numpy()
    with np.errstate(all="ignore"):
        want = quants.dequantize(packed, kind)
    assert loaded.shape == want.shape == (50, 256)
    np.testing.assert_array_equal(loaded, want)


def test_table_of_dequantisable_types_is_gguf_s() -> None:
    for kind in GGML_QUANT_SIZES:
        block, size = GGML_QUANT_SIZES[kind]
        try:
            with np.errstate(all="ignore"):
                quants.dequantize(np.zeros((1, size * 256 // block), np.uint8), kind)
            works = True
        except NotImplementedError:
            works = False
        assert works == (kind.name in DEQUANTISABLE), kind.name


def test_types_that_cannot_be_dequantised_are_listed(
    one_tensor_gguf: Callable[..., Path],
) -> None:
    kind = GGMLQuantizationType.Q8_1
    file = one_tensor_gguf(random_blocks(kind, 4, 256), kind)
    with pytest.raises(UnsupportedModelError, match=r"Q8_1 \('blk.0.ffn_down.weight'\)"):
        open_checkpoint(file)


def test_large_tensors_are_read_in_slices(
    one_tensor_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ambidex.weights.gguf._SLICE_VALUES", 1000)
    kind = GGMLQuantizationType.Q4_0
    packed = random_blocks(kind, 33, 256)
    loaded = open_checkpoint(one_tensor_gguf(packed, kind)).load(
        "model.layers.0.mlp.down_proj.weight"
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(loaded.numpy(), quants.dequantize(packed, kind))


def test_unknown_tensors_are_not_ignored(one_tensor_gguf: Callable[..., Path]) -> None:
    data = np.zeros((4, 64), np.float32)
    file = one_tensor_gguf(data, GGMLQuantizationType.F32, "blk.0.ssm_in.weight")
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ssm_in\.weight"):
        open_checkpoint(file)


def test_unsupported_architecture_names_the_supported(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    from_writer(writer)
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen2"):
        open_checkpoint(tmp_path / "m.gguf")


def from_writer(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FLOAT, TEXT, COUNT = GGUFValueType.FLOAT32, GGUFValueType.STRING, GGUFValueType.UINT32


def test_linear_and_yarn_scaling(gguf_file: Maker) -> None:
    _, file = gguf_file(
        "llama",
        fields={
            "llama.rope.scaling.type": ("linear", TEXT),
            "llama.rope.scaling.factor": (4.0, FLOAT),
        },
    )
    scaling = open_checkpoint(file).config.get("rope_scaling")
    assert scaling == {"rope_type": "linear", "factor": 4.0}
    _, file = gguf_file(
        "qwen2",
        fields={
            "qwen2.rope.scaling.type": ("yarn", TEXT),
            "qwen2.rope.scaling.factor": (4.0, FLOAT),
            "qwen2.rope.scaling.original_context_length": (64, COUNT),
        },
    )
    scaling = open_checkpoint(file).config.get("rope_scaling")
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def with_factors(path: Path, arch: str, tensors: dict[str, np.ndarray], **numbers: Any) -> Path:
    """A file of two heads of 64 with rotary tables."""
    writer = GGUFWriter(path, arch)
    writer.add_context_length(131072)
    writer.add_embedding_length(128)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    for key, value in numbers.items():
        writer.add_key_value(f"{arch}.rope.scaling.{key}", value, FLOAT if key[0] == "a" else COUNT)
    writer.add_tensor("token_embd.weight", np.zeros((8, 128), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(128, np.float32))
    for name, value in tensors.items():
        writer.add_tensor(name, value.astype(np.float32))
    from_writer(writer)
    return path


def test_llama3_scaling_comes_back_from_its_table(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = (plain / scaled.double()).numpy()
    file = with_factors(tmp_path / "m.gguf", "llama", {"rope_freqs.weight": factors})
    scaling = open_checkpoint(file).config.get("rope_scaling")
    assert math.isclose(scaling.pop("factor"), 32.0, rel_tol=1e-6)
    assert scaling == {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    odd = with_factors(tmp_path / "n.gguf", "llama", {"rope_freqs.weight": factors**1.5})
    scaling = open_checkpoint(odd).config.get("rope_scaling")
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    np.testing.assert_allclose(scaling["long_factor"], factors**1.5, rtol=1e-6)


def test_longrope_factors(tmp_path: Path) -> None:
    long, short = np.linspace(1, 60, 32), np.linspace(1, 1.5, 32)
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    numbers = {"attn_factor": 1.25, "original_context_length": 4096}
    file = with_factors(tmp_path / "m.gguf", "phi3", tensors, **numbers)
    config = open_checkpoint(file).config
    scaling = config.get("rope_scaling")
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.25
    assert config.get("original_max_position_embeddings") == 4096
    np.testing.assert_allclose(scaling["long_factor"], long, rtol=1e-6)
    np.testing.assert_allclose(scaling["short_factor"], short, rtol=1e-6)
    del tensors["rope_factors_short.weight"]
    broken = with_factors(tmp_path / "n.gguf", "phi3", tensors)
    with pytest.raises(InvalidModelError, match="needs both"):
        open_checkpoint(broken)
    wrong = {"rope_freqs.weight": np.ones(31)}
    with pytest.raises(InvalidModelError, match="31"):
        open_checkpoint(with_factors(tmp_path / "o.gguf", "llama", wrong))


def test_gemma3_fields(gguf_file: Maker) -> None:
    _, file = gguf_file("gemma3")
    config = open_checkpoint(file).config
    assert config.get("model_type") == "gemma3_text"
    assert config.get("layer_types") == ["sliding_attention"] * 5 + [
        "full_attention",
        "sliding_attention",
    ]
    assert config.get("query_pre_attn_scalar") == 32
    assert config.get("rope_local_base_freq") == 10000.0
    assert config.get("sliding_window") == 16
    assert config.get("tie_word_embeddings") is True


@pytest.mark.parametrize("count", [8, 2**32 - 1])
def test_more_layers_than_the_file_has(gguf_file: Maker, count: int) -> None:
    """Before anything of a value a layer is built: 4 billion of them would fill the memory."""
    _, file = gguf_file("gemma3", fields={"gemma3.block_count": (count, COUNT)})
    expected = rf"'gemma3\.block_count' is {count}, and the file has tensors of 7 layers"
    with pytest.raises(InvalidModelError, match=expected):
        open_checkpoint(file)


def test_mistral_is_known_by_its_window(gguf_file: Maker) -> None:
    _, file = gguf_file("llama", fields={"llama.attention.sliding_window": (128, COUNT)})
    config = open_checkpoint(file).config
    assert config.get("model_type") == "mistral" and config.get("sliding_window") == 128


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"llama.attention.value_length": (8, COUNT)}, "values of 8"),
        ({"llama.attention.key_length": (0, COUNT)}, "key_length"),
        (
            {"llama.rope.scaling.type": ("odd", TEXT), "llama.rope.scaling.factor": (2.0, FLOAT)},
            "odd",
        ),
        ({"llama.rope.dimension_count": (8, COUNT)}, "rotates 8 of 16"),
        ({"llama.vocab_size": (5, COUNT)}, None),
    ],
)
def test_odd_fields(gguf_file: Maker, fields: dict[str, Any], expected: str | None) -> None:
    _, file = gguf_file("llama", fields=fields)
    if expected is None:
        # The embedding's rows count, not what a field says.
        assert open_checkpoint(file).config.get("vocab_size") == 128
        return
    with pytest.raises((InvalidModelError, UnsupportedModelError), match=expected) as error:
        open_checkpoint(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [([[2, 2], [2, 2]], r"\[2, 2\]"), ([2.5, 2.5], "2.5"), (["2", "2"], "'2'"), ([2, -2], None)],
)
def test_a_number_a_layer_that_is_none(gguf_file: Maker, value: Any, shown: str | None) -> None:
    field = {"llama.attention.head_count_kv": (value, GGUFValueType.ARRAY)}
    _, file = gguf_file("llama", fields=field)
    message = f"holds {shown}, and must hold integers" if shown else "differs between layers"
    with pytest.raises((InvalidModelError, UnsupportedModelError), match=message):
        open_checkpoint(file)


@pytest.mark.parametrize("name", ["rope.freq_base", "attention.layer_norm_rms_epsilon"])
def test_numbers_beyond_a_float(gguf_file: Maker, name: str) -> None:
    wide = GGUFValueType.FLOAT64
    _, file = gguf_file("llama", fields={f"llama.{name}": (1e300, wide)})
    with pytest.raises(InvalidModelError, match=rf"'llama\.{name}' is 1e\+300, more than"):
        open_checkpoint(file)


@pytest.mark.parametrize("value", [1e300, 3.4028234663852886e38, math.inf])
def test_sampling_defaults_beyond_a_float(gguf_file: Maker, value: float) -> None:
    """Whoever checks sampling parameters refuses them."""
    wide = GGUFValueType.FLOAT64
    _, file = gguf_file("llama", fields={"general.sampling.temp": (value, wide)})
    assert open_checkpoint(file).generation_config["temperature"] == value


def test_token_ids_and_sampling_defaults(gguf_file: Maker) -> None:
    _, file = gguf_file(
        "llama",
        fields={
            "tokenizer.ggml.eot_token_id": (9, COUNT),
            "general.sampling.temp": (0.6, FLOAT),
            "general.sampling.top_k": (20, GGUFValueType.INT32),
        },
    )
    checkpoint = open_checkpoint(file)
    assert checkpoint.config.get("eos_token_id") == [2, 9]
    assert checkpoint.config.get("bos_token_id") == 1
    assert checkpoint.generation_config == {
        "bos_token_id": 1,
        "eos_token_id": [2, 9],
        "temperature": 0.6,
        "top_k": 20,
    }


def test_split_file(hf_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A file cut in two opens by either part; a missing part is named."""
    folder = hf_folder("llama")
    tensors = load_file(folder / "model.safetensors")
    whole = [
        ("token_embd.weight", tensors["model.embed_tokens.weight"]),
        ("output_norm.weight", tensors["model.norm.weight"]),
    ]
    parts = [tmp_path / f"x-{part:05d}-of-00002.gguf" for part in (1, 2)]
    for part, (path, (name, tensor)) in enumerate(zip(parts, whole, strict=True)):
        writer = GGUFWriter(path, "llama")
        if part == 0:
            writer.add_context_length(64)
            writer.add_embedding_length(64)
            writer.add_block_count(2)
            writer.add_feed_forward_length(96)
            writer.add_head_count(4)
            writer.add_layer_norm_rms_eps(1e-5)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 4)
        writer.add_tensor(name, tensor.numpy())
        writer.add_tensor(f"blk.{part}.attn_norm.weight", np.ones(64, np.float32))
        from_writer(writer)
    for path in (*parts, tmp_path):
        checkpoint = open_checkpoint(path)
        loaded = checkpoint.load("model.norm.weight")
        assert torch.equal(loaded, tensors["model.norm.weight"])
        assert checkpoint.num_parameters == 128 * 64 + 3 * 64
    parts[1].unlink()
    with pytest.raises(InvalidModelError, match="x-00002-of-00002"):
        open_checkpoint(parts[0])


@pytest.mark.model
def test_smollm2_equals_transformers_bit_by_bit(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.dtype_name == "Q4_1"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(smollm2.parent), gguf_file=smollm2.name, dtype=torch.float32
    )
    state = model.state_dict()
    names = checkpoint.tensor_names()
    tied = {"lm_head.weight"}
    assert set(names) == set(state) - tied
    for name in names:
        assert torch.equal(checkpoint.load(name), state[name]), name
    assert checkpoint.num_parameters == sum(state[name].numel() for name in names)
    theirs = model.config.to_dict()
    for key in ("hidden_size", "num_key_value_heads", "vocab_size", "max_position_embeddings"):
        assert checkpoint.config.get(key) == theirs[key], key
    assert checkpoint.config.get("rope_theta") == 100000.0
    assert checkpoint.config.get("rms_norm_eps") == 1e-5
    assert read_gguf_header(smollm2).metadata["tokenizer.ggml.pre"] == "smollm"
