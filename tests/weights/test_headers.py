"""Headers: right on sound files, one sentence on every damaged one."""

from __future__ import annotations

import errno
import json
import random
import struct
import time
from pathlib import Path

import pytest

from ambidex.errors import (
    AmbidexError,
    InvalidModelError,
    ModelNotFoundError,
    OutOfMemory,
    UnsupportedModelError,
)
from ambidex.weights.headers import (
    GGML_TYPES,
    LazyArray,
    map_file,
    read_gguf_header,
    read_safetensors_header,
)

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    fields: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_fields)
    head += b"".join(fields) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def written(folder: Path, data: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


SOUND = gguf_bytes(
    [
        field("general.architecture", STRING, text("llama")),
        field("a.count", U32, struct.pack("<I", 7)),
        field("a.list", ARRAY, struct.pack("<IQ", U32, 2) + struct.pack("<2I", 5, 6)),
        field("a.words", ARRAY, struct.pack("<IQ", STRING, 100) + text("ab") * 100),
    ],
    [tensor("one", (4, 2), 0, 0), tensor("two", (32,), 8, 32)],
    b"\0" * (32 + 34),
)


def test_gguf_fields_and_tensors(tmp_path: Path) -> None:
    header = read_gguf_header(written(tmp_path, SOUND))
    assert header.architecture == "llama"
    assert header.metadata["a.count"] == 7
    assert header.metadata["a.list"] == [5, 6]
    words = header.metadata["a.words"]
    assert isinstance(words, LazyArray)
    assert len(words) == 100 and words[99] == "ab" and words[1:3] == ["ab", "ab"]
    one, two = header.tensors["one"], header.tensors["two"]
    assert one.shape == (2, 4) and one.type_name == "F32" and one.num_bytes == 32
    assert two.type_name == "Q8_0" and two.num_bytes == 34
    assert two.offset == one.offset + 32 == len(SOUND) - 34


ARCH = field("general.architecture", STRING, text("llama"))
BROKEN = {
    "empty": (b"", "0 bytes"),
    "magic": (gguf_bytes([ARCH], [], magic=b"GGML"), "b'GGML'"),
    "version": (gguf_bytes([ARCH], [], version=9), "version 9"),
    "big endian": (gguf_bytes([ARCH], [], version=3 << 24), "big-endian"),
    "many fields": (gguf_bytes([ARCH], [], counts=(0, 1 << 60)), str(1 << 60)),
    "many tensors": (gguf_bytes([ARCH], [], counts=(1 << 40, 1)), str(1 << 40)),
    "long string": (gguf_bytes([text("k") + struct.pack("<IQ", STRING, 1 << 62)], []), "truncated"),
    "long array": (
        gguf_bytes([field("k", ARRAY, struct.pack("<IQ", U64, 1 << 61))], []),
        "claims",
    ),
    "long strings": (
        gguf_bytes([field("k", ARRAY, struct.pack("<IQ", STRING, 70) + b"\xff" * 560)], []),
        "truncated",
    ),
    "value type": (gguf_bytes([field("k", 77, b"")], []), "value type 77"),
    "array type": (gguf_bytes([field("k", ARRAY, struct.pack("<IQ", 77, 1))], []), "type 77"),
    "deep array": (
        gguf_bytes([field("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9 + b"\0" * 64)], []),
        "deep",
    ),
    "key": (gguf_bytes([field(b"\xff\xfe", U32, b"\0" * 4)], []), "UTF-8"),
    "key twice": (gguf_bytes([ARCH, ARCH], []), "twice"),
    "alignment": (
        gguf_bytes([field("general.alignment", U32, struct.pack("<I", 0))], []),
        "alignment is 0",
    ),
    "dimensions": (gguf_bytes([ARCH], [tensor("t", (1,) * 5, 0, 0)], b"\0" * 32), "5 dimensions"),
    "no size": (gguf_bytes([ARCH], [tensor("t", (0, 4), 0, 0)], b"\0" * 32), "shape (4, 0)"),
    "half block": (gguf_bytes([ARCH], [tensor("t", (33,), 8, 0)], b"\0" * 99), "block of 32"),
    "misaligned": (gguf_bytes([ARCH], [tensor("t", (4,), 0, 5)], b"\0" * 99), "offset 5"),
    "beyond the end": (gguf_bytes([ARCH], [tensor("t", (99,), 0, 0)], b"\0" * 64), "truncated"),
    "absurd size": (
        gguf_bytes([ARCH], [tensor("t", (1 << 62, 1 << 62), 0, 0)], b"\0" * 64),
        "truncated",
    ),
    "overlap": (
        gguf_bytes([ARCH], [tensor("a", (32,), 0, 0), tensor("b", (8,), 0, 32)], b"\0" * 128),
        "overlap",
    ),
    "tensor twice": (
        gguf_bytes([ARCH], [tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32)], b"\0" * 64),
        "twice",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_gguf_is_one_sentence(tmp_path: Path, case: str) -> None:
    data, expected = BROKEN[case]
    path = written(tmp_path, data)
    with pytest.raises(InvalidModelError) as error:
        read_gguf_header(path)
    assert str(path) in str(error.value) and expected in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_gguf_type_lists_it(tmp_path: Path) -> None:
    data = gguf_bytes([ARCH], [tensor("odd", (32,), 36, 0)], b"\0" * 64)
    with pytest.raises(UnsupportedModelError, match=r"36 \('odd'\)"):
        read_gguf_header(written(tmp_path, data))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        read_gguf_header(tmp_path / "none.gguf")
    with pytest.raises(InvalidModelError, match="directory"):
        read_gguf_header(tmp_path)


@pytest.mark.parametrize("length", range(0, len(SOUND), 7))
def test_every_truncation_is_noticed(tmp_path: Path, length: int) -> None:
    with pytest.raises(InvalidModelError):
        read_gguf_header(written(tmp_path, SOUND[:length]))


def test_random_damage_never_escapes(tmp_path: Path) -> None:
    """Any flipped bytes give a header or a typed error, in bounded time and memory."""
    generator = random.Random(1)
    for _ in range(400):
        data = bytearray(SOUND)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.choice((0, 1, 255, 9, 8))
        try:
            header = read_gguf_header(written(tmp_path, bytes(data)))
            for value in header.metadata.values():
                len(list(value)) if isinstance(value, LazyArray) else None
        except AmbidexError:
            pass


def test_type_table_is_that_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {int(k): (k.name, *size) for k, size in gguf.GGML_QUANT_SIZES.items()}
    for number, entry in theirs.items():
        assert GGML_TYPES[number] == entry


@pytest.mark.model
def test_a_real_header_opens_quickly(smollm2: Path) -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        header = read_gguf_header(smollm2)
        times.append(time.perf_counter() - start)
    # 16 ms on a slow core; generous, since gguf's own reader takes seconds.
    assert min(times) < 0.25
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert header.metadata["tokenizer.ggml.tokens"][1] == "<|im_start|>"
    assert len(header.tensors) == 272


# --- safetensors ---------------------------------------------------------------------------------


def safetensors_bytes(table: object, data: bytes = b"", raw: bytes | None = None) -> bytes:
    head = json.dumps(table).encode() if raw is None else raw
    return struct.pack("<Q", len(head)) + head + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_safetensors_table(tmp_path: Path) -> None:
    table = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [2, 3], 0, 12),
        "a": entry("F32", [], 12, 16),
        "none": entry("F32", [0, 4], 16, 16),
    }
    path = written(tmp_path, safetensors_bytes(table, b"\0" * 16), "m.safetensors")
    tensors = read_safetensors_header(path)
    assert list(tensors) == ["b", "a", "none"]
    assert tensors["b"].shape == (2, 3) and tensors["b"].type_name == "BF16"
    assert tensors["a"].num_bytes == 4 and tensors["a"].num_elements == 1


BAD_TABLES = {
    "empty": (b"", "0 bytes"),
    "huge header": (struct.pack("<Q", 1 << 50) + b"{}", "would be"),
    "cut header": (struct.pack("<Q", 400) + b"{}", "truncated"),
    "no json": (safetensors_bytes(None, raw=b"{nope"), "no valid JSON"),
    "a list": (safetensors_bytes([1]), "a list"),
    "no utf-8": (safetensors_bytes(None, raw=b'{"\xff": 1}'), "UTF-8"),
    "deep": (safetensors_bytes(None, raw=b"[" * 200_000), "nested"),
    "twice": (safetensors_bytes(None, raw=b'{"a": 1, "a": 2}'), "twice"),
    "entry": (safetensors_bytes({"a": 3}), "'a'"),
    "shape": (safetensors_bytes({"a": entry("F32", [-1], 0, 4)}, b"\0" * 4), "'a'"),
    "offsets": (safetensors_bytes({"a": entry("F32", [1], 4, 0)}, b"\0" * 4), "4 to 0"),
    "bool": (safetensors_bytes({"a": entry("F32", [True], 0, 4)}, b"\0" * 4), "'a'"),
    "length": (safetensors_bytes({"a": entry("F32", [2], 0, 4)}, b"\0" * 4), "8 bytes"),
    "cut": (safetensors_bytes({"a": entry("F32", [9], 0, 36)}, b"\0" * 20), "truncated"),
    "trailing": (safetensors_bytes({"a": entry("F32", [1], 0, 4)}, b"\0" * 20), "20 follow"),
    "overlap": (
        safetensors_bytes({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, b"\0" * 12),
        "overlap",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_damaged_safetensors_is_one_sentence(tmp_path: Path, case: str) -> None:
    data, expected = BAD_TABLES[case]
    path = written(tmp_path, data, "m.safetensors")
    with pytest.raises(InvalidModelError) as error:
        read_safetensors_header(path)
    assert str(path) in str(error.value) and expected in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_safetensors_type(tmp_path: Path) -> None:
    data = safetensors_bytes({"a": entry("F3", [1], 0, 4)}, b"\0" * 4)
    with pytest.raises(UnsupportedModelError, match="F3"):
        read_safetensors_header(written(tmp_path, data, "m.safetensors"))


def test_a_map_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``ulimit -v`` does: no fault of the file."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(64))
    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(OutOfMemory, match="ulimit -v"):
        map_file(path, "GGUF", 24)
