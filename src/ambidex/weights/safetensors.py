"""Weights of safetensors files: tensors over the mapped file, without a copy."""

from __future__ import annotations

import mmap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ambidex.errors import InvalidModelError
from ambidex.weights.headers import (
    SAFETENSORS_TYPES,
    TensorInfo,
    map_file,
    parse_json_object,
    read_safetensors_header,
    release_pages,
    require_regular,
    require_whole,
)

if TYPE_CHECKING:
    import torch


#: What file systems allow for one name.
_MAX_NAME_BYTES = 255


def read_weight_map(index: Path) -> dict[str, str]:
    """``weight_map`` of an index file: tensor name -> file name, checked to stay in the folder."""
    try:
        require_regular(index)
        raw = index.read_bytes()
    except OSError as error:
        raise InvalidModelError(
            f"{index} cannot be read: {error.strerror or error}. Check its permissions."
        ) from None
    table = parse_json_object(raw, str(index)).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InvalidModelError(
            f"{index} has no 'weight_map' from tensor to file. Download it again."
        )
    for name, file in table.items():
        if not _is_file_name(file):
            raise InvalidModelError(
                f"{index} places the tensor '{name:.200}' in {file!r:.200}, which is no file name. "
                "Download it again."
            )
    return table


def _is_file_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value not in ("", ".", "..")
        and "\0" not in value
        and Path(value).name == value
        and len(value.encode("utf-8", "surrogatepass")) <= _MAX_NAME_BYTES
    )


def shards_of(index: Path) -> dict[str, str]:
    """The index's ``weight_map``, all of whose files are there; else the missing ones are named."""
    weight_map = read_weight_map(index)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise InvalidModelError(
            f"{len(missing)} of the {len(files)} weight files that {index} names are missing: "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}. "
            "Download them into the same folder."
        )
    return weight_map


class SafetensorsSource:
    """The tensors of one file, or of the shards that an index names."""

    #: How the weights are quantised.
    quantization: str | None = None

    def __init__(self, files: list[Path], weight_map: dict[str, str] | None = None) -> None:
        self.files = files
        self._tensors: dict[str, tuple[Path, TensorInfo]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for file in files:
            for name, info in read_safetensors_header(file).items():
                if weight_map is not None and weight_map.get(name) != file.name:
                    continue
                if name in self._tensors:
                    raise InvalidModelError(
                        f"The tensor '{name}' is both in {self._tensors[name][0]} and in {file}. "
                        "Keep one copy of the weights in the folder."
                    )
                self._tensors[name] = (file, info)
        absent = [name for name in weight_map or () if name not in self._tensors]
        if absent:
            file_name = (weight_map or {})[absent[0]]
            raise InvalidModelError(
                f"{files[0].parent}: the index names {len(absent)} tensors that its files lack, "
                f"such as '{absent[0]}' in {file_name}. Download the model again."
            )
        infos = [info for _, info in self._tensors.values()]
        if not infos:
            raise InvalidModelError(f"{files[0]} holds no tensors. Download it again.")
        self.num_bytes = sum(info.num_bytes for info in infos)
        self.num_parameters = sum(info.num_elements for info in infos)
        sizes: Counter[str] = Counter()
        for info in infos:
            sizes[info.type_name] += info.num_bytes
        self.dtype_name = SAFETENSORS_TYPES[sizes.most_common(1)[0][0]][0]

    def names(self) -> list[str]:
        return list(self._tensors)

    def release_pages(self) -> None:
        for mapping in self._maps.values():
            release_pages(mapping)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1].shape

    def dtype_of(self, name: str) -> str:
        """torch's name of the tensor's type, without torch."""
        return SAFETENSORS_TYPES[self._tensors[name][1].type_name][0]

    def read_bytes(self, name: str) -> bytes:
        """The tensor's bytes, for small ones that are text."""
        file, info = self._tensors[name]
        with map_file(file, "safetensors", 8) as buffer:
            return buffer[info.offset : info.offset + info.num_bytes]

    def quantized_form(self, name: str) -> None:
        """No tensor of these files is quantised by itself; see ``quantized_source.py``."""
        return

    def load_quantized(self, name: str, unpack: object = None) -> torch.Tensor:
        return self.load(name)

    def load(self, name: str) -> torch.Tensor:
        """The tensor in the file's dtype, backed by the mapped file.

        Writing to it changes this process's copy of the page, never the file.
        """
        import torch

        file, info = self._tensors[name]
        dtype = getattr(torch, SAFETENSORS_TYPES[info.type_name][0])
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        if file not in self._maps:
            self._maps[file] = map_file(file, "safetensors", 8, writable=True)
        buffer = self._maps[file]
        require_whole(buffer, file)
        if info.offset + info.num_bytes > len(buffer):
            raise InvalidModelError(
                f"{file} became shorter while it was read ({len(buffer)} bytes). Download it again."
            )
        if info.offset % dtype.itemsize:
            # A header of odd length: the values are not aligned in the file.
            raw = bytearray(buffer[info.offset : info.offset + info.num_bytes])
            return torch.frombuffer(raw, dtype=dtype).view(info.shape)
        tensor = torch.frombuffer(buffer, dtype=dtype, count=info.num_elements, offset=info.offset)
        return tensor.view(info.shape)
