"""Matrices that were quantised while loading, kept on disk for the next start.

One safetensors file a matrix, in a folder named after the weights' content, the format's version
and the kind. Whatever does not verify is made again: a damaged cache is never an error, and
neither is one that cannot be read or written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ambidex.errors import AmbidexError
from ambidex.weights.headers import require_regular
from ambidex.weights.safetensors import SafetensorsSource

if TYPE_CHECKING:
    from ambidex.kernels.quantized import Quantized

log = logging.getLogger(__name__)

#: Part of every key: raised when the files or what quantising computes change.
FORMAT_VERSION = 1
_CONTENTS = "contents.json"
_PARTIAL = ".partial-"
#: Age of a partial file whose writer must have been killed.
_ABANDONED_S = 86400.0
_META = "meta"
_TENSORS = ("codes", "scale", "minimum")
_TYPES = {"torch.uint8": "U8", "torch.float16": "F16", "torch.float32": "F32"}


class QuantizationCache:
    """The cache of one model in one kind, int8 or int4."""

    def __init__(self, folder: Path, files: Sequence[Path], kind: str) -> None:
        """``folder`` holds all models' caches; ``files`` are the model's weight files, which are
        read once to know their content, and again only when their size or time has changed."""
        self.is_writable = True
        self._root = folder
        self._kind = kind
        _sweep(folder)
        digests = self._contents([file.resolve() for file in files])
        key = json.dumps([FORMAT_VERSION, kind, digests])
        self.folder = folder / hashlib.sha256(key.encode()).hexdigest()[:32]

    def quantised(self, name: str, make: Callable[[], Quantized]) -> Quantized:
        """The matrix ``name`` out of the cache, or what ``make`` makes, which is then kept."""
        found = self._read(name)
        if found is not None:
            return found
        made = make()
        if self.is_writable:
            self._guarded(lambda: self._write(made))
        return made

    def _path(self, name: str) -> Path:
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"

    def _read(self, name: str) -> Quantized | None:
        path = self._path(name)
        try:
            if not path.is_file():
                return None
            return _read_file(path, name)
        except (AmbidexError, ValueError, LookupError, TypeError) as error:
            log.info("A matrix of the quantization cache is made again: %s", error)
            return None
        except OSError as error:
            # As another user's folder; what cannot be read would not be found next time, either.
            self._give_up("read", error)
            return None

    def _write(self, made: Quantized) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self._path(made.name), _file_bytes(made, self._kind))

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._give_up("written", error)

    def _give_up(self, what: str, error: OSError) -> None:
        """Write nothing from now on, and say so once."""
        if not self.is_writable:
            return
        self.is_writable = False
        log.warning(
            "The quantization cache %s cannot be %s: %s. Nothing more is kept; set "
            "AMBIDEX_CACHE to a folder with room that you can write to.",
            self._root,
            what,
            error.strerror or error,
        )

    def _contents(self, files: list[Path]) -> list[str]:
        """The SHA-256 of each file, remembered by path, size and time."""
        memory = self._root / _CONTENTS
        known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError, AmbidexError):
            # What is not there, or damaged, is computed below; a pipe would never be read.
            loaded = json.loads(_read_regular(memory))
            known = loaded if isinstance(loaded, dict) else {}
        digests, is_new = [], False
        for file in files:
            status = file.stat()
            identity = [status.st_size, status.st_mtime_ns]
            entry = known.get(str(file))
            if (
                not isinstance(entry, list)
                or entry[:2] != identity
                or len(entry) != 3
                or not isinstance(entry[2], str)
            ):
                with file.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                entry, is_new = [*identity, digest], True
                known[str(file)] = entry
            digests.append(entry[2])
        if is_new:

            def write() -> None:
                self._root.mkdir(parents=True, exist_ok=True)
                _replace(memory, [json.dumps(known).encode()])

            self._guarded(write)
        return digests


def _read_regular(path: Path) -> bytes:
    require_regular(path)
    return path.read_bytes()


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed while they wrote have left behind."""
    oldest = time.time() - _ABANDONED_S
    with contextlib.suppress(OSError):  # of another user, or removed meanwhile
        for pattern in (f"{_PARTIAL}*", f"*/{_PARTIAL}*"):
            for path in folder.glob(pattern):
                with contextlib.suppress(OSError):
                    if path.lstat().st_mtime < oldest:
                        path.unlink()


def _replace(path: Path, parts: Sequence[Any]) -> None:
    """Write a file that is whole or not there, whoever else writes it."""
    descriptor, temp = tempfile.mkstemp(prefix=_PARTIAL, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def _file_bytes(made: Quantized, kind: str) -> list[Any]:
    """A safetensors file: its header, what stands beside the tensors, the tensors."""
    arrays: dict[str, Any] = {}
    for field in _TENSORS:
        tensor = getattr(made, field)
        if tensor is not None:
            arrays[field] = tensor.contiguous().numpy()
            arrays[field] = (
                _TYPES[str(tensor.dtype)],
                list(tensor.shape),
                memoryview(arrays[field]).cast("B"),
            )
    checksum = 0
    for _, _, data in arrays.values():
        checksum = zlib.crc32(data, checksum)
    meta = {"version": FORMAT_VERSION, "name": made.name, "kind": kind, "crc32": checksum}
    text = json.dumps(meta).encode()
    # Whole words, so that what follows is aligned.
    text += b" " * (-len(text) % 8)
    arrays = {_META: ("U8", [len(text)], text), **arrays}
    header: dict[str, Any] = {}
    position = 0
    for field, (dtype, shape, data) in arrays.items():
        end = position + len(data)
        header[field] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return [len(raw).to_bytes(8, "little"), raw, *(data for _, _, data in arrays.values())]


def _read_file(path: Path, name: str) -> Quantized:
    """Raises InvalidModelError, ValueError, LookupError or TypeError for what does not verify."""
    from ambidex.quant.on_load import rebuild

    source = SafetensorsSource([path])
    fields = source.names()
    meta = json.loads(source.read_bytes(_META))
    tensors: dict[str, Any] = {field: source.load(field) for field in _TENSORS if field in fields}
    checksum = 0
    for field in _TENSORS:
        if field in tensors and tensors[field].numel():
            checksum = zlib.crc32(memoryview(tensors[field].numpy()).cast("B"), checksum)
    if (meta["version"], meta["name"], meta["crc32"]) != (FORMAT_VERSION, name, checksum):
        raise ValueError(f"{path} is not the matrix {name}, or is damaged")
    return rebuild(name, meta["kind"], tensors)
