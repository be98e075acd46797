"""Headers of safetensors and GGUF files: what a file holds and where, without reading the weights.

Only the standard library is used, so that ``ambidex plan`` can size a model without torch.
Nothing in a file is believed before it was checked against the file's length: whatever is wrong
raises :class:`InvalidModelError` in one sentence.
"""

from __future__ import annotations

import json
import math
import mmap
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ambidex.errors import (
    InvalidModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    memory_refusal,
)

#: What to do about a damaged file; ends most messages of this module.
DOWNLOAD_AGAIN = "Download it again."
_JSON_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
}

#: safetensors dtype -> (torch's name, bits per element).
SAFETENSORS_TYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
}

#: GGML type id -> (name, elements per block, bytes per block).
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
GGML_NAMES: dict[str, int] = {name: type_id for type_id, (name, _, _) in GGML_TYPES.items()}

#: GGUF metadata value type -> struct code. 8 is a string, 9 an array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
#: Arrays up to this length are decoded at once, longer ones when they are first used.
_EAGER_LENGTH = 64
_MAX_ARRAY_DEPTH = 4
_MAX_SAFETENSORS_HEADER = 100_000_000
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. ``shape`` is in row-major order (GGUF's is turned round)."""

    name: str
    shape: tuple[int, ...]
    #: "BF16", "F32", ... (safetensors) or "Q4_1", "F16", ... (GGUF).
    type_name: str
    #: Bytes from the start of the file.
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class LazyArray(Sequence[Any]):
    """A long GGUF array, decoded when it is first read; ``len()`` is free.

    Strings are UTF-8; bytes that are not become U+FFFD.
    """

    __slots__ = ("_buffer", "_element_type", "_length", "_offset", "_source", "_values")

    def __init__(
        self, buffer: mmap.mmap, source: str, element_type: int, length: int, offset: int
    ) -> None:
        self._buffer = buffer
        self._source = source
        self._element_type = element_type
        self._length = length
        self._offset = offset
        self._values: list[Any] | None = None

    def __len__(self) -> int:
        return self._length

    def _decoded(self) -> list[Any]:
        if self._values is None:
            require_whole(self._buffer, self._source)
            cursor = _Cursor(self._buffer, self._source, self._offset)
            self._values = cursor.array_values(self._element_type, self._length)
        return self._values

    def __getitem__(self, index: Any) -> Any:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._decoded())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | LazyArray):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LazyArray(length={self._length})"


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata and tensor table of one GGUF file (of one part, where it is split)."""

    path: Path
    version: int
    alignment: int
    #: Scalars, strings, lists, and :class:`LazyArray` for long arrays.
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    #: The whole file, mapped read-only.
    buffer: mmap.mmap

    @property
    def architecture(self) -> str:
        """``general.architecture``, for example "llama"."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise InvalidModelError(
                f"{self.path} lacks the metadata field 'general.architecture'. {DOWNLOAD_AGAIN}"
            )
        return value


def require_regular(path: Path) -> None:
    """Raise InvalidModelError for what is no regular file (after links): a FIFO would block the
    reader, and a device has no end. OSError where there is nothing."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kinds = (
            (stat.S_ISDIR, "a directory"),
            (stat.S_ISFIFO, "a pipe"),
            (stat.S_ISSOCK, "a socket"),
        )
        kind = next((name for test, name in kinds if test(mode)), "a device")
        raise InvalidModelError(f"{path} is {kind}, not a regular file. Give a file on a disk.")


def map_file(path: Path, kind: str, minimum: int, *, writable: bool = False) -> mmap.mmap:
    """Map a file; ``kind`` ("GGUF") and ``minimum`` (bytes) are for the message if it is too short.

    ``writable`` maps it privately: torch wants writable memory, and the file never changes.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < minimum:
                raise InvalidModelError(
                    f"{path} has {size} bytes, too few for a {kind} file. {DOWNLOAD_AGAIN}"
                )
            access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
            return mmap.mmap(file.fileno(), 0, access=access)
    except FileNotFoundError:
        raise ModelNotFoundError(f"There is no file {path}. Check the path.") from None
    except OSError as error:
        refused = memory_refusal(error)
        if refused is not None:
            raise refused from None
        raise InvalidModelError(
            f"{path} cannot be read: {error.strerror or error}. Check the path and its permissions."
        ) from None


def require_whole(mapping: mmap.mmap, path: Path | str) -> None:
    """Raise InvalidModelError where the mapped file has become shorter since.

    To be asked before a tensor is touched: what is gone from a mapped file ends the process.
    """
    size = mapping.size()
    if size < len(mapping):
        raise InvalidModelError(
            f"{path} became shorter while it was read: {size} bytes of {len(mapping)} are left. "
            f"{DOWNLOAD_AGAIN}"
        )


def release_pages(mapping: mmap.mmap) -> None:
    """Let go of what a mapped file takes of memory; reading it again brings it back.

    A file that was read once else counts as this process's memory, beside what was made of it.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)  # Linux and most others
    if advice is not None:
        mapping.madvise(advice)


class _Cursor:
    """Reads GGUF values one after the other, never beyond the end of the file."""

    def __init__(self, buffer: mmap.mmap, source: str, position: int = 0) -> None:
        self.buffer = buffer
        self.source = source
        self.position = position
        self.size = len(buffer)

    def fail(self, what: str) -> InvalidModelError:
        return InvalidModelError(f"{self.source} is damaged: {what}. {DOWNLOAD_AGAIN}")

    def truncated(self, wanted: int) -> InvalidModelError:
        return InvalidModelError(
            f"{self.source} is truncated: its header needs {wanted} bytes at position "
            f"{self.position}, and the file ends at {self.size}. {DOWNLOAD_AGAIN}"
        )

    def take(self, num_bytes: int) -> int:
        """Move on by ``num_bytes``; returns the position before."""
        if num_bytes > self.size - self.position:
            raise self.truncated(num_bytes)
        start = self.position
        self.position += num_bytes
        return start

    def scalar(self, code: str) -> Any:
        start = self.take(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.buffer, start)[0]

    def raw_string(self) -> bytes:
        length = self.scalar("Q")
        start = self.take(length)
        return self.buffer[start : start + length]

    def key(self, what: str) -> str:
        raw = self.raw_string()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"a {what} is no UTF-8 ({raw[:40]!r})") from None

    def value(self, value_type: int, key: str, depth: int = 0) -> Any:
        if value_type in _SCALARS:
            return self.scalar(_SCALARS[value_type])
        if value_type == _STRING:
            return self.raw_string().decode("utf-8", errors="replace")
        if value_type == _ARRAY:
            return self.array(key, depth)
        raise self.fail(f"field '{key}' has value type {value_type}, which does not exist")

    def array(self, key: str, depth: int) -> Any:
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.fail(f"field '{key}' nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        element_type, length = self.scalar("I"), self.scalar("Q")
        # A string or an array takes at least its 8 or 12 bytes of length.
        if element_type in _SCALARS:
            minimum = struct.calcsize("<" + _SCALARS[element_type])
        else:
            minimum = {_STRING: 8, _ARRAY: 12}.get(element_type, 0)
        if minimum == 0:
            raise self.fail(f"array '{key}' has element type {element_type}, which does not exist")
        if length * minimum > self.size - self.position:
            raise self.fail(
                f"array '{key}' claims {length} entries, more than the file's {self.size} bytes "
                "can hold"
            )
        if element_type == _ARRAY:
            return [self.array(key, depth + 1) for _ in range(length)]
        if length <= _EAGER_LENGTH:
            return self.array_values(element_type, length)
        start = self.position
        if element_type == _STRING:
            self.skip_strings(length)
        else:
            self.take(length * minimum)
        return LazyArray(self.buffer, self.source, element_type, length, start)

    def skip_strings(self, count: int) -> None:
        unpack, buffer, position = struct.Struct("<Q").unpack_from, self.buffer, self.position
        try:
            for _ in range(count):
                position += 8 + unpack(buffer, position)[0]
        except (struct.error, OverflowError):
            raise self.truncated(8) from None
        if position > self.size:
            raise self.truncated(position - self.position)
        self.position = position

    def array_values(self, element_type: int, length: int) -> list[Any]:
        if element_type == _STRING:
            unpack, buffer, position = struct.Struct("<Q").unpack_from, self.buffer, self.position
            values = []
            try:
                for _ in range(length):
                    start = position + 8
                    position = start + unpack(buffer, position)[0]
                    values.append(buffer[start:position].decode("utf-8", errors="replace"))
            except (struct.error, OverflowError):
                raise self.truncated(8) from None
            if position > self.size:
                raise self.truncated(position - self.position)
            self.position = position
            return values
        form = f"<{length}{_SCALARS[element_type]}"
        return list(struct.unpack_from(form, self.buffer, self.take(struct.calcsize(form))))


def read_gguf_header(path: Path | str, *, header_only: bool = False) -> GGUFHeader:
    """Read metadata and tensor table of a GGUF file (versions 2 and 3, little-endian).

    ``header_only``: the file may end anywhere behind its header. Raises
    :class:`InvalidModelError` for a damaged file and :class:`UnsupportedModelError` for tensor
    types that do not exist here.
    """
    path = Path(path)
    buffer = map_file(path, "GGUF", 24)
    cursor = _Cursor(buffer, str(path))
    magic = buffer[: cursor.take(4) + 4]
    if magic != b"GGUF":
        raise InvalidModelError(
            f"{path} is no GGUF file: it starts with {magic!r}, not b'GGUF'. {DOWNLOAD_AGAIN}"
        )
    version = cursor.scalar("I")
    if version and version & 0xFFFF == 0:
        raise InvalidModelError(
            f"{path} is a big-endian GGUF file, which is not supported. "
            "Download the little-endian file."
        )
    if version not in (2, 3):
        raise InvalidModelError(
            f"{path} has GGUF version {version}; versions 2 and 3 can be read. "
            "Download a newer conversion of the model."
        )
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    # The shortest field takes 13 bytes, the shortest tensor entry 32.
    if num_fields * 13 + num_tensors * 32 > len(buffer):
        raise cursor.fail(
            f"{num_fields} metadata fields and {num_tensors} tensors are claimed, more than its "
            f"{len(buffer)} bytes can hold"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.key("metadata key")
        if key in metadata:
            raise cursor.fail(f"the metadata field '{key}' comes twice")
        metadata[key] = cursor.value(cursor.scalar("I"), key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment % 8:
        raise cursor.fail(f"general.alignment is {alignment!r}, not a positive multiple of 8")
    tensors = _gguf_tensors(cursor, num_tensors, alignment)
    _check_ranges(str(path), list(tensors.values()), None if header_only else len(buffer))
    return GGUFHeader(path, version, alignment, metadata, tensors, buffer)


def _gguf_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    unknown: dict[int, str] = {}
    for _ in range(num_tensors):
        name = cursor.key("tensor name")
        num_dims = cursor.scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.fail(f"tensor '{name}' has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
        dims = tuple(cursor.scalar("Q") for _ in range(num_dims))
        type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
        if type_id not in GGML_TYPES:
            unknown.setdefault(type_id, name)
        entries.append((name, dims[::-1], type_id, offset))
    if unknown:
        listed = ", ".join(f"{type_id} ('{name}')" for type_id, name in sorted(unknown.items()))
        raise UnsupportedModelError(
            f"{cursor.source} holds tensors of GGML types that are not known here: {listed}. "
            "Take another quantisation of the model, such as Q4_K_M or Q8_0."
        )
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in entries:
        type_name, block_size, block_bytes = GGML_TYPES[type_id]
        if min(shape) < 1:
            raise cursor.fail(f"tensor '{name}' has the shape {shape}")
        if shape[-1] % block_size:
            raise cursor.fail(
                f"tensor '{name}' has rows of {shape[-1]} values, no multiple of {type_name}'s "
                f"block of {block_size}"
            )
        if offset % alignment:
            raise cursor.fail(
                f"tensor '{name}' starts at offset {offset}, no multiple of {alignment}"
            )
        if name in tensors:
            raise cursor.fail(f"tensor '{name}' comes twice")
        num_bytes = math.prod(shape) // block_size * block_bytes
        tensors[name] = TensorInfo(name, shape, type_name, data_start + offset, num_bytes)
    return tensors


def _check_ranges(source: str, tensors: list[TensorInfo], file_size: int | None) -> None:
    """Every tensor lies within the file (unless its size is None), and no two share a byte."""
    tensors.sort(key=lambda info: (info.offset, info.num_bytes))
    end = max((info.offset + info.num_bytes for info in tensors), default=0)
    if file_size is not None and end > file_size:
        missing = sum(info.offset + info.num_bytes > file_size for info in tensors)
        raise InvalidModelError(
            f"{source} is truncated: it has {file_size} bytes and needs {end}; {missing} of its "
            f"{len(tensors)} tensors lie beyond the end. {DOWNLOAD_AGAIN}"
        )
    for first, second in pairwise(tensors):
        if first.offset + first.num_bytes > second.offset:
            raise InvalidModelError(
                f"{source} is damaged: the tensors '{first.name}' and '{second.name}' overlap at "
                f"byte {second.offset}. {DOWNLOAD_AGAIN}"
            )


def read_safetensors_header(path: Path | str) -> dict[str, TensorInfo]:
    """Read the tensor table of a safetensors file; :class:`InvalidModelError` if it is damaged."""
    path = Path(path)
    buffer = map_file(path, "safetensors", 8)
    try:
        return _safetensors_tensors(str(path), buffer)
    finally:
        buffer.close()


def _safetensors_tensors(source: str, buffer: mmap.mmap) -> dict[str, TensorInfo]:
    size = len(buffer)
    (header_bytes,) = struct.unpack_from("<Q", buffer, 0)

    def fail(what: str) -> InvalidModelError:
        return InvalidModelError(f"{source} is damaged: {what}. {DOWNLOAD_AGAIN}")

    if header_bytes > _MAX_SAFETENSORS_HEADER:
        raise InvalidModelError(
            f"{source} is no safetensors file: its header would be {header_bytes} bytes long, and "
            f"{_MAX_SAFETENSORS_HEADER} is the most allowed. {DOWNLOAD_AGAIN}"
        )
    if 8 + header_bytes > size:
        raise InvalidModelError(
            f"{source} is truncated: its header needs {8 + header_bytes} bytes and the file has "
            f"{size}. {DOWNLOAD_AGAIN}"
        )
    table = parse_json_object(
        buffer[8 : 8 + header_bytes], f"The header of {source}", unique_keys=True
    )
    data_start = 8 + header_bytes
    tensors: dict[str, TensorInfo] = {}
    unknown: dict[str, str] = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        type_name, shape, begin, end = _safetensors_entry(entry) or (None, (), 0, 0)
        if type_name is None:
            raise fail(f"the entry of tensor '{name}' is not dtype, shape and data_offsets")
        if type_name not in SAFETENSORS_TYPES:
            unknown.setdefault(type_name, name)
            continue
        num_bits = math.prod(shape) * SAFETENSORS_TYPES[type_name][1]
        if end < begin or (end - begin) * 8 != num_bits:
            raise fail(
                f"tensor '{name}' of type {type_name} and shape {list(shape)} needs "
                f"{num_bits // 8} bytes, and its offsets {begin} to {end} span {end - begin}"
            )
        tensors[name] = TensorInfo(name, shape, type_name, data_start + begin, end - begin)
    if unknown:
        listed = ", ".join(f"{key} ('{name}')" for key, name in sorted(unknown.items()))
        raise UnsupportedModelError(
            f"{source} holds tensors of types that are not known here: {listed}. "
            f"Take a checkpoint in one of {', '.join(SAFETENSORS_TYPES)}."
        )
    _check_ranges(source, list(tensors.values()), size)
    used = sum(info.num_bytes for info in tensors.values())
    if used != size - data_start:
        raise fail(f"its tensors take {used} bytes, and {size - data_start} follow the header")
    return tensors


def _safetensors_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int] | None:
    """``(dtype, shape, begin, end)`` of a header entry, or None where it has another form."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return None
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return None
    if not all(type(item) is int and item >= 0 for item in (*shape, *offsets)):
        return None
    return entry["dtype"], tuple(shape), offsets[0], offsets[1]


def parse_json_object(raw: bytes, source: str, *, unique_keys: bool = False) -> dict[str, Any]:
    """JSON text that must be one object; ``source`` starts the message if it is not.

    ``unique_keys`` refuses a key that comes twice, where the plain rule is that the last one wins.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if unique_keys and len(result) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidModelError(f"{source} has the key '{twice}' twice. {DOWNLOAD_AGAIN}")
        return result

    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        reason = f"it is no UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except (RecursionError, ValueError):
        # ValueError: an integer of thousands of digits.
        reason = "it is nested too deeply or holds a number that is too long"
    else:
        if isinstance(value, dict):
            return value
        raise InvalidModelError(
            f"{source} holds {_JSON_KINDS[type(value)]}, not an object. Repair the file, or "
            "download it again."
        )
    raise InvalidModelError(
        f"{source} is no valid JSON ({reason}). Repair the file, or download it again."
    )
