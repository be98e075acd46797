"""The cache of what was quantised while loading: right, or made again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from ambidex.kernels.quantized import Quantized
from ambidex.quant.on_load import quantise
from ambidex.weights import quantization_cache
from ambidex.weights.quantization_cache import QuantizationCache


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights" * 1000)
    return path


class Maker:
    """Counts how often something is made."""

    def __init__(self, kind: str = "int4", columns: int = 100) -> None:
        self.weight = torch.randn(30, columns, generator=torch.Generator().manual_seed(1))
        self.kind = kind
        self.count = 0

    def __call__(self) -> Quantized:
        self.count += 1
        return quantise("a/b.weight", self.weight, self.kind)


def get(folder: Path, model: Path, make: Maker) -> Quantized:
    cache = QuantizationCache(folder, [model], make.kind)
    return cache.quantised("a/b.weight", make)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("columns", [1, 100, 128])
def test_second_time_out_of_the_cache(tmp_path: Path, model: Path, kind: str, columns: int) -> None:
    make = Maker(kind, columns)
    first = get(tmp_path / "cache", model, make)
    again = get(tmp_path / "cache", model, make)
    assert make.count == 1
    assert again.name == first.name and (again.bits, again.group, again.zero) == (
        first.bits, first.group, first.zero,
    )  # fmt: skip
    assert torch.equal(again.dequantise(), first.dequantise())
    assert again.scale is not None and again.scale.dtype is torch.float16
    assert not list((tmp_path / "cache").rglob(".partial*"))


def test_content_decides(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, folder = Maker(), tmp_path / "cache"
    get(folder, model, make)
    os.utime(model, (1, 1))
    get(folder, model, make)
    assert make.count == 1
    moved = model.rename(tmp_path / "other.safetensors")
    get(folder, moved, make)
    assert make.count == 1
    moved.write_bytes(b"weightS" * 1000)
    get(folder, moved, make)
    assert make.count == 2
    other = Maker("int8")
    get(folder, moved, other)
    assert other.count == 1
    monkeypatch.setattr(quantization_cache, "FORMAT_VERSION", 2)
    get(folder, moved, make)
    assert make.count == 3


def test_unchanged_files_are_not_read_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(tmp_path / "cache", model, Maker())

    def fail(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("hashlib.file_digest", fail)
    get(tmp_path / "cache", model, Maker())


def one_file(folder: Path) -> Path:
    (file,) = folder.rglob("*.safetensors")
    return file


def flip(raw: bytes) -> bytes:
    return raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: b"",
        lambda raw: raw[:8] + b"x" + raw[9:],
        flip,
        lambda raw: raw.replace(b"a/b.weight", b"a/c.weight"),
        lambda raw: raw.replace(b'"crc32"', b'"crc33"'),
        lambda raw: raw.replace(b'"version": 1', b'"version": 9'),
        lambda raw: raw.replace(b'"int4"', b'"int7"'),
    ],
)
def test_damage_is_made_again(
    tmp_path: Path, model: Path, damage: Callable[[bytes], bytes]
) -> None:
    make, folder = Maker(), tmp_path / "cache"
    want = get(folder, model, make)
    file = one_file(folder)
    raw = file.read_bytes()
    assert damage(raw) != raw
    file.write_bytes(damage(raw))
    assert torch.equal(get(folder, model, make).dequantise(), want.dequantise())
    assert make.count == 2
    assert file.read_bytes() == raw
    get(folder, model, make)
    assert make.count == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', "null"])
def test_damaged_memory_of_contents(tmp_path: Path, model: Path, text: str) -> None:
    make, folder = Maker(), tmp_path / "cache"
    get(folder, model, make)
    (folder / "contents.json").write_text(text)
    get(folder, model, make)
    assert make.count == 1
    entries = json.loads((folder / "contents.json").read_text())
    entries[str(model.resolve())] = [1]
    (folder / "contents.json").write_text(json.dumps(entries))
    get(folder, model, make)
    assert make.count == 1


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    make = Maker()
    cache = QuantizationCache(blocked, [model], "int4")
    cache.quantised("a/b.weight", make)
    cache.quantised("a/b.weight", make)
    assert make.count == 2
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


def test_a_folder_that_cannot_be_read(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, folder = Maker(), tmp_path / "cache"
    get(folder, model, make)

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    cache = QuantizationCache(folder, [model], "int4")
    cache.quantised("a/b.weight", make)
    cache.quantised("a/b.weight", make)
    assert make.count == 3
    (record,) = caplog.records
    assert "cannot be read: Permission denied" in record.getMessage()


def test_what_killed_writers_left_is_swept(tmp_path: Path, model: Path) -> None:
    make, folder = Maker(), tmp_path / "cache"
    get(folder, model, make)
    old = [folder / ".partial-a", one_file(folder).parent / ".partial-b"]
    young = [path.with_name(".partial-young") for path in old]
    for path in old + young:
        path.write_bytes(b"part")
    for path in old:
        os.utime(path, (1, 1))
    get(folder, model, make)
    assert not any(path.exists() for path in old) and all(path.exists() for path in young)
    assert make.count == 1


def test_pipes_in_the_folder(
    tmp_path: Path, model: Path, ends_within: Callable[[float], AbstractContextManager[None]]
) -> None:
    make, folder = Maker(), tmp_path / "cache"
    get(folder, model, make)
    for path in (folder / "contents.json", one_file(folder)):
        path.unlink()
        os.mkfifo(path)
    with ends_within(20):
        get(folder, model, make)
        assert make.count == 2
        # Files have taken the pipes' places.
        get(folder, model, make)
        assert make.count == 2
