"""Hugging Face folders: safetensors, shards, torch files, and everything that can be wrong."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from ambidex.errors import InvalidModelError, ModelNotFoundError, UnsupportedModelError
from ambidex.weights.checkpoint import open_checkpoint
from ambidex.weights.headers import LazyArray, read_gguf_header

Maker = Callable[..., Path]
INDEX = "model.safetensors.index.json"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        state.update(load_file(file))
    return state


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_folder(hf_folder: Maker, name: str, shard: str) -> None:
    folder = hf_folder(name, max_shard_size=shard)
    assert (folder / INDEX).exists() == (shard == "40KB")
    expected = state_of(folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "safetensors" and checkpoint.dtype_name == "float32"
    assert sorted(checkpoint.tensor_names()) == sorted(expected)
    for key, tensor in expected.items():
        assert key in checkpoint
        assert checkpoint.tensor_shape(key) == tuple(tensor.shape)
        assert torch.equal(checkpoint.load(key), tensor)
    assert checkpoint.num_parameters == sum(tensor.numel() for tensor in expected.values())
    assert checkpoint.num_bytes == 4 * checkpoint.num_parameters
    assert checkpoint.config.require("model_type") == name
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert checkpoint.gguf is None


def test_experts_have_the_names_of_the_hub_s_checkpoints(hf_folder: Maker) -> None:
    names = open_checkpoint(hf_folder("mixtral")).tensor_names()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    names = open_checkpoint(hf_folder("qwen3_moe")).tensor_names()
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names


def test_loading_maps_and_never_writes_to_the_file(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    before = (folder / "model.safetensors").read_bytes()
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.load("model.norm.weight")
    tensor.add_(1)
    del checkpoint
    # The tensor keeps its memory alive without the checkpoint.
    assert torch.isfinite(tensor).all()
    assert (folder / "model.safetensors").read_bytes() == before


def test_dtypes_and_odd_alignment(hf_folder: Maker, tmp_path: Path) -> None:
    folder = hf_folder("llama")
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "f16": torch.randn(7).half(),
        "i8": torch.arange(3, dtype=torch.int8),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype_name == "bfloat16"
    for key, tensor in tensors.items():
        loaded = checkpoint.load(key)
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :]
    (folder / "model.safetensors").write_bytes(shifted)
    checkpoint = open_checkpoint(folder)
    for key, tensor in tensors.items():
        assert torch.equal(checkpoint.load(key), tensor)


def test_overrides_merge_level_by_level(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(values))
    overrides = {"rope_scaling": {"factor": 4.0}, "extra": 1}
    config = open_checkpoint(folder, overrides).config
    assert config.get("rope_scaling") == {"rope_type": "linear", "factor": 4.0}
    assert config.get("extra") == 1 and config.get("hidden_size") == 64


def test_nested_text_config(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    inner = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["LlamaForCausalLM"], "model_type": "wrap", "text_config": inner}
    (folder / "config.json").write_text(json.dumps(outer))
    assert open_checkpoint(folder).config.get("hidden_size") == 64
    assert open_checkpoint(folder).config.get("model_type") == "llama"
    outer["architectures"] = ["SomeForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(outer))
    assert open_checkpoint(folder).config.get("hidden_size") is None


def test_tokenizer_files_are_listed(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("x")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tokenizer_files == {"tokenizer.json": folder / "tokenizer.json"}


def test_torch_file(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    state = state_of(folder)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "training_args.bin").write_bytes(b"x")
    for path in (folder, folder / "pytorch_model.bin"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.format == "torch" and checkpoint.dtype_name == "float32"
        for key, tensor in state.items():
            assert torch.equal(checkpoint.load(key), tensor)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('executed')",))


def test_torch_file_never_runs_code(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({"a": _Evil()}, file)
    with pytest.raises(InvalidModelError, match="weights-only"):
        open_checkpoint(folder)
    file.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(InvalidModelError, match="old format"):
        open_checkpoint(folder)
    torch.save([1, 2], file)
    with pytest.raises(InvalidModelError, match="list"):
        open_checkpoint(folder)
    torch.save({"a": 3}, file)
    with pytest.raises(InvalidModelError, match="'a'"):
        open_checkpoint(folder)


def one_line(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    for part in parts:
        assert part in message


def test_missing_things(hf_folder: Maker, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        open_checkpoint(tmp_path / "absent")
    one_line(error, "absent")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidModelError, match="holds no weights"):
        open_checkpoint(empty)
    other = tmp_path / "x.onnx"
    other.write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"\.gguf"):
        open_checkpoint(other)
    folder = hf_folder("llama")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(InvalidModelError, match=r"'model\.nothing'"):
        checkpoint.load("model.nothing")
    with pytest.raises(InvalidModelError, match=r"'model\.nothing'"):
        checkpoint.tensor_shape("model.nothing")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "line 1"), ("[]", "list"), ("\xff", "UTF-8"), ("", "line 1"), (None, "no config.json")],
)
def test_bad_config(hf_folder: Maker, text: str | None, expected: str) -> None:
    folder = hf_folder("llama")
    path = folder / "config.json"
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidModelError) as error:
        open_checkpoint(folder)
    one_line(error, str(folder), expected)


def test_bad_generation_config(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    (folder / "generation_config.json").write_text("{,}")
    with pytest.raises(InvalidModelError, match=r"generation_config\.json"):
        open_checkpoint(folder)


def test_lacking_field_names_file_and_field(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    config = open_checkpoint(folder, {"hidden_size": None}).config
    with pytest.raises(InvalidModelError) as error:
        config.require("hidden_size")
    one_line(error, str(folder / "config.json"), "hidden_size")


def test_missing_shard_is_named(hf_folder: Maker) -> None:
    folder = hf_folder("llama", max_shard_size="40KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(InvalidModelError) as error:
        open_checkpoint(folder)
    one_line(error, victim.name, "1 of the")


def test_truncated_shard(hf_folder: Maker) -> None:
    folder = hf_folder("llama", max_shard_size="40KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(InvalidModelError) as error:
        open_checkpoint(folder)
    one_line(error, victim.name, "truncated")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", "..", 3])
def test_index_cannot_leave_the_folder(hf_folder: Maker, file: object) -> None:
    folder = hf_folder("llama")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(InvalidModelError, match="no file name"):
        open_checkpoint(folder)


def test_index_and_shards_disagree(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    table = dict.fromkeys(state_of(folder), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {**table, "more": "model.safetensors"}}))
    with pytest.raises(InvalidModelError, match="'more'"):
        open_checkpoint(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(InvalidModelError, match="weight_map"):
        open_checkpoint(folder)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that anyone may look into, seen by a user for whom permissions count."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").touch()
        yield folder / "model"
        os.seteuid(user)
        (folder / "model").chmod(0o700)


@pytest.mark.parametrize(
    ("mode", "inner"), [(0o600, ""), (0o311, ""), (0o600, "model.safetensors")]
)
def test_a_folder_that_may_not_be_read(unprivileged: Path, mode: int, inner: str) -> None:
    """600: what is in it cannot be looked at; 311: what is in it cannot be listed."""
    unprivileged.chmod(mode)
    if os.geteuid() == 0:
        os.seteuid(65534)
    with pytest.raises(InvalidModelError) as error:
        open_checkpoint(unprivileged / inner)
    one_line(error, str(unprivileged), "cannot be read: Permission denied")


def test_several_files_without_an_index(hf_folder: Maker) -> None:
    folder = hf_folder("llama")
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert len(open_checkpoint(folder).tensor_names()) == 21
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(InvalidModelError, match="2 weight files"):
        open_checkpoint(folder)


def test_folder_with_gguf(gguf_file: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    _, file = gguf_file("llama")
    folder = tmp_path / "only"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(file.read_bytes())
    assert open_checkpoint(folder).format == "gguf"
    (folder / "b.gguf").write_bytes(file.read_bytes())
    with pytest.raises(InvalidModelError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        open_checkpoint(folder)


def test_opening_needs_no_torch(gguf_file: Callable[..., tuple[Path, Path]]) -> None:
    """A plan opens checkpoints; it must not wait for torch."""
    folder, file = gguf_file("llama")
    code = (
        "import sys; from ambidex.weights.checkpoint import open_checkpoint\n"
        f"open_checkpoint({str(folder)!r}); open_checkpoint({str(file)!r})\n"
        "assert not {'torch', 'numpy', 'gguf'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "quantised gguf"])
def test_a_file_that_shrinks_while_it_is_read(
    gguf_file: Callable[..., tuple[Path, Path]], kind: str
) -> None:
    dtype = gguf.GGMLQuantizationType.Q8_0 if kind == "quantised gguf" else None
    folder, file = gguf_file("llama", dtype=dtype)
    if kind == "safetensors":
        file = folder / "model.safetensors"
    checkpoint = open_checkpoint(folder if kind == "safetensors" else file)
    name = "model.layers.0.mlp.down_proj.weight"
    load = checkpoint.load_quantized if kind == "quantised gguf" else checkpoint.load
    load(name)
    size = file.stat().st_size
    # By less than a page: without the check, what is gone would read as zeros.
    os.truncate(file, size - 1)
    message = f"{file.name} became shorter while it was read: {size - 1} bytes of {size} are left"
    with pytest.raises(InvalidModelError, match=message):
        load(name)


def test_a_long_field_of_a_file_that_has_shrunk(
    gguf_file: Callable[..., tuple[Path, Path]],
) -> None:
    _, file = gguf_file(
        "llama", fields={"general.many": (list(range(100)), gguf.GGUFValueType.ARRAY)}
    )
    values = read_gguf_header(file).metadata["general.many"]
    assert isinstance(values, LazyArray)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(InvalidModelError, match="became shorter"):
        list(values)
