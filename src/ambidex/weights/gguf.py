"""Weights of a GGUF file: dequantised to float32, one by one, in Hugging Face's layout."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ambidex.errors import InvalidModelError, UnsupportedModelError
from ambidex.memory.host import give_freed_memory_back
from ambidex.weights.gguf_names import (
    MappedTensor,
    config_from_header,
    generation_config_from_header,
    map_tensors,
)
from ambidex.weights.headers import (
    DOWNLOAD_AGAIN,
    GGML_NAMES,
    GGUFHeader,
    TensorInfo,
    map_file,
    read_gguf_header,
    release_pages,
    require_whole,
)

if TYPE_CHECKING:
    import mmap

    import numpy
    import torch

    from ambidex.kernels.quantized import Quantized
    from ambidex.quant.forms import Form

#: The tensor types that can be turned into float32.
DEQUANTISABLE = frozenset(GGML_NAMES) - {
    *("I8", "I16", "I32", "I64", "F64"),
    *("Q8_1", "Q8_K", "Q1_0"),
}
#: Types that torch has, by its name.
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Values dequantised at once; bounds the temporary arrays to some 20 MB.
_SLICE_VALUES = 1 << 20
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


def split_parts(path: Path) -> list[Path]:
    """All parts of a split file, in order, given any of them; ``[path]`` where it is not split."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    name = f"{match['stem']}-{{:05d}}-of-{match['count']}.gguf"
    parts = [path.with_name(name.format(number)) for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise InvalidModelError(
            f"{path} is part of a model in {count} files, and {len(missing)} are missing in "
            f"{path.parent}: {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}. "
            "Download the missing parts into the same folder."
        )
    return parts


#: ``(name, type, packed rows, columns)`` -> the matrix, or None for a type that it does not know.
Unpack = Callable[[str, str, "numpy.ndarray", int], "Quantized | None"]


class GGUFSource:
    """The tensors of one GGUF file (or of all its parts), by Hugging Face name."""

    quantization: str | None = "gguf"

    def __init__(self, path: Path, *, header_only: bool = False) -> None:
        """``header_only``: to plan with; the files may end behind their headers."""
        self.headers = [
            read_gguf_header(part, header_only=header_only) for part in split_parts(path)
        ]
        self.files = [header.path for header in self.headers]
        #: The first part, which has the metadata.
        self.header = self.headers[0]
        self._files: dict[str, GGUFHeader] = {}
        self._writable: dict[Path, mmap.mmap] = {}
        tensors: dict[str, TensorInfo] = {}
        for header in self.headers:
            for name, info in header.tensors.items():
                if name in tensors:
                    raise InvalidModelError(
                        f"The tensor '{name}' is both in {self._files[name].path} and in "
                        f"{header.path}. {DOWNLOAD_AGAIN}"
                    )
                tensors[name] = info
                self._files[name] = header
        expected = self.header.metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise InvalidModelError(
                f"{self.header.path} announces {expected} tensors in all parts, and they hold "
                f"{len(tensors)}. {DOWNLOAD_AGAIN}"
            )
        self.config = config_from_header(self.header, tensors)
        self.generation_config = generation_config_from_header(self.header)
        self._tensors = map_tensors(self.header, tensors.values(), self.config)
        used = {tensor.info.name: tensor.info for tensor in self._tensors.values()}
        self._check_types(used)
        self.num_bytes = sum(info.num_bytes for info in used.values())
        self.num_parameters = sum(info.num_elements for info in used.values())
        sizes: Counter[str] = Counter()
        for info in used.values():
            sizes[info.type_name] += info.num_bytes
        self.dtype_name = sizes.most_common(1)[0][0]

    def _check_types(self, used: dict[str, TensorInfo]) -> None:
        wrong = {
            info.type_name: name
            for name, info in used.items()
            if info.type_name not in DEQUANTISABLE
        }
        if wrong:
            listed = ", ".join(f"{kind} ('{name}')" for kind, name in sorted(wrong.items()))
            raise UnsupportedModelError(
                f"{self.header.path} holds tensors of types that cannot be dequantised: {listed}. "
                f"Supported are {', '.join(sorted(DEQUANTISABLE))}."
            )

    @property
    def missing_bytes(self) -> int:
        """What the files lack of their tensors; without ``header_only`` always 0."""
        return sum(
            max(0, max(info.offset + info.num_bytes for info in infos) - len(header.buffer))
            for header in self.headers
            if (infos := header.tensors.values())
        )

    def names(self) -> list[str]:
        return list(self._tensors)

    def release_pages(self) -> None:
        for header in self.headers:
            release_pages(header.buffer)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def load(self, name: str) -> torch.Tensor:
        """The tensor as float32, in memory of its own."""
        import numpy
        import torch

        tensor = self._tensors[name]
        rows = self._packed_rows(tensor)
        result = torch.empty(tensor.shape, dtype=torch.float32)
        out = result.view(rows.shape[0], -1).numpy()
        step = max(1, _SLICE_VALUES // out.shape[1])
        for start in range(0, len(out), step):
            self._require_whole(tensor)
            out[start : start + step] = _dequantise(
                rows[start : start + step], tensor.info, self.header
            )
        if tensor.permuted_heads and len(tensor.shape) == 1:
            order = _row_order(tensor.shape[0], tensor.permuted_heads)
            result = result[torch.from_numpy(numpy.ascontiguousarray(order))]
        if tensor.offset:
            result -= tensor.offset
        return result

    def row_reader(self, name: str) -> Callable[[int, int], torch.Tensor] | None:
        """``read(a, b)`` gives rows ``a`` to ``b`` of a matrix as :meth:`load` does; None for what
        is no matrix."""
        import torch

        tensor = self._tensors[name]
        if len(tensor.shape) != 2 or tensor.offset:
            return None
        rows = self._packed_rows(tensor)

        def read(start: int, end: int) -> torch.Tensor:
            values = _dequantise(rows[start:end], tensor.info, self.header)
            # Plain numbers lie in the mapped file, which torch may not be given.
            values = values if values.flags.writeable else values.copy()
            # The C library would keep what unpacking took, in pieces.
            give_freed_memory_back()
            return torch.from_numpy(values.reshape(end - start, tensor.shape[1]))

        return read

    def quantized_form(self, name: str) -> Form | None:
        """How :meth:`load_quantized` gives the tensor; None where that is a plain tensor."""
        from ambidex.quant.forms import GGUF_FORMS

        tensor = self._tensors[name]
        if len(tensor.shape) != 2 or tensor.offset:
            return None
        return GGUF_FORMS.get(tensor.info.type_name)

    def packed_rows(self, name: str) -> tuple[str, numpy.ndarray]:
        """Type, and the tensor as the file packs it: uint8 [rows, bytes per row], rows in the
        order of :meth:`load`. It lies in the mapped file where that has the same order."""
        tensor = self._tensors[name]
        return tensor.info.type_name, self._packed_rows(tensor)

    def load_quantized(self, name: str, unpack: Unpack | None = None) -> Quantized | torch.Tensor:
        """A low-bit matrix with the values of the file, where :meth:`quantized_form` has a form;
        else a tensor: a matrix of numbers in the file's type, anything else as float32.

        ``unpack`` does the work of ``quant.gguf.from_gguf`` faster, where it knows the type."""
        import torch

        tensor = self._tensors[name]
        if self.quantized_form(name) is not None:
            from ambidex.quant.gguf import check_packed, from_gguf

            type_name, columns = tensor.info.type_name, tensor.shape[-1]
            rows = self._packed_rows(tensor)
            if unpack is not None:
                check_packed(name, type_name, rows, columns)
                made = unpack(name, type_name, rows, columns)
                if made is not None:
                    return made
            return from_gguf(name, type_name, rows, columns)
        kind = tensor.info.type_name
        if kind not in _PLAIN or len(tensor.shape) != 2 or tensor.offset:
            return self.load(name)
        plain = torch.from_numpy(self._packed_rows(tensor, writable=True))
        return plain.view(getattr(torch, _PLAIN[kind]))

    def _require_whole(self, tensor: MappedTensor) -> None:
        """Raises InvalidModelError where the tensor's file has become shorter."""
        header = self._files[tensor.info.name]
        require_whole(header.buffer, header.path)

    def _packed_rows(self, tensor: MappedTensor, *, writable: bool = False) -> numpy.ndarray:
        """The tensor as the file packs it: uint8 [rows, bytes per row], rows in our order.

        ``writable``: in a private mapping, which torch wants; the file never changes."""
        import numpy

        info, shape = tensor.info, tensor.shape
        num_bytes = info.num_bytes // (info.shape[0] if tensor.expert is not None else 1)
        start = info.offset + num_bytes * (tensor.expert or 0)
        buffer = self._files[info.name].buffer
        if writable:
            path = self._files[info.name].path
            if path not in self._writable:
                self._writable[path] = map_file(path, "GGUF", 24, writable=True)
            buffer = self._writable[path]
        self._require_whole(tensor)
        packed = numpy.frombuffer(buffer, numpy.uint8, count=num_bytes, offset=start)
        num_rows = math.prod(shape[:-1])
        rows = packed.reshape(num_rows, -1)
        if tensor.permuted_heads and len(shape) > 1:
            # Rows move while they are still packed, which is a fraction of the float32 bytes.
            rows = rows[_row_order(num_rows, tensor.permuted_heads)]
        return rows


def _row_order(num_rows: int, num_heads: int) -> Any:
    """Row of the file for each row of ours.

    The file pairs the two halves of a head's rotary values as neighbours: of a head's row
    ``2 * i + j`` ours is ``j * half + i``.
    """
    import numpy

    half = num_rows // num_heads // 2
    order = numpy.arange(num_rows).reshape(num_heads, half, 2)
    return order.swapaxes(1, 2).reshape(-1)


def _dequantise(rows: numpy.ndarray, info: TensorInfo, header: GGUFHeader) -> numpy.ndarray:
    import numpy

    if info.type_name in ("F32", "F16"):
        # Importing gguf takes longer than a small model's norms.
        plain = numpy.float32 if info.type_name == "F32" else numpy.float16
        return rows.view(plain).astype(numpy.float32, copy=False)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        # Whether weights are finite is checked where they are used, not printed from in here.
        with numpy.errstate(all="ignore"):
            return dequantize(rows, GGMLQuantizationType(GGML_NAMES[info.type_name]))
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(
            f"{header.path}: the installed gguf package cannot dequantise '{info.name}' of type "
            f"{info.type_name} ({error}). Upgrade it: pip install -U gguf."
        ) from None
