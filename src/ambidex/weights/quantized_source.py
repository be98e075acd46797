"""Checkpoints of Hugging Face that are quantised (AWQ, GPTQ, bitsandbytes), under plain names.

A matrix is several tensors there, such as ``q_proj.qweight``, ``.qzeros`` and ``.scales``; here it
is ``q_proj.weight`` again. Opening reads headers only and needs no torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ambidex.errors import InvalidModelError, UnsupportedModelError
from ambidex.quant.forms import Form, split_group

if TYPE_CHECKING:
    import torch

    from ambidex.kernels.quantized import Quantized

_FLOATS = ("float32", "float16", "bfloat16")
_AGAIN = "Download the model again."


class FileSource(Protocol):
    """Tensors as files hold them."""

    files: list[Path]
    num_bytes: int

    def names(self) -> list[str]: ...
    def release_pages(self) -> None: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype_of(self, name: str) -> str: ...
    def read_bytes(self, name: str) -> bytes: ...
    def load(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One quantised matrix, and the tensors that it is made of."""

    shape: tuple[int, int]
    form: Form
    parts: tuple[str, ...]
    load: Callable[[], Quantized]


class QuantizedSource:
    """A ``TensorSource`` (weights/checkpoint.py) over the files of a quantised checkpoint."""

    def __init__(self, source: FileSource, table: Mapping[str, Any], origin: str) -> None:
        """``table`` is the ``quantization_config`` of the file ``origin``; its method is one of
        :data:`METHODS`. Raises InvalidModelError and UnsupportedModelError."""
        self.quantization: str | None = table["quant_method"]
        self.files = source.files
        self._source = source
        reader = _Reader(source, table, f"{origin}: quantization_config")
        self._matrices = METHODS[table["quant_method"]](reader)
        if not self._matrices:
            raise InvalidModelError(
                f"{origin} says that the weights are quantised with '{self.quantization}', and no "
                "tensor of the files is. Use an unquantised checkpoint of this model with its own "
                "config.json, a GGUF file, or --hf-overrides '{\"quantization_config\": null}'."
            )
        owner = {part: name for name, matrix in self._matrices.items() for part in matrix.parts}
        self._names = list(dict.fromkeys(owner.get(name, name) for name in source.names()))
        self.num_bytes = source.num_bytes
        self.num_parameters = sum(math.prod(self.shape(name)) for name in self._names)
        bits = sorted({matrix.form.bits for matrix in self._matrices.values()})
        self.dtype_name = f"{self.quantization}, {' and '.join(map(str, bits))} bits"

    def names(self) -> list[str]:
        return list(self._names)

    def release_pages(self) -> None:
        self._source.release_pages()

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self._matrices.get(name)
        return self._source.shape(name) if matrix is None else matrix.shape

    def quantized_form(self, name: str) -> Form | None:
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.form

    def load_quantized(self, name: str, unpack: object = None) -> Quantized | torch.Tensor:
        matrix = self._matrices.get(name)
        return self._source.load(name) if matrix is None else matrix.load()

    def load(self, name: str) -> torch.Tensor:
        """A quantised matrix as float32, other tensors in the file's type."""
        matrix = self._matrices.get(name)
        return self._source.load(name) if matrix is None else matrix.load().dequantise()


class _Reader:
    """Checked access to the files and to ``quantization_config``."""

    def __init__(self, source: FileSource, table: Mapping[str, Any], where: str) -> None:
        self.source = source
        self.table = table
        self.where = where
        self.names = frozenset(source.names())

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first field of ``names`` that is there, a whole number."""
        value = next((self.table[n] for n in names if self.table.get(n) is not None), default)
        if type(value) is not int or abs(value) > 1 << 20:
            raise InvalidModelError(
                f"{self.where}.{names[0]} is {value!r:.60}, not a whole number. Repair the file, "
                "or give the value with --hf-overrides."
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.table.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidModelError(
                f"{self.where}.{name} is {value!r:.60}, not true or false. Repair the file, or "
                "give the value with --hf-overrides."
            )
        return default if value is None else value

    def word(self, name: str, supported: tuple[str, ...]) -> str:
        """The field in lower case, one of ``supported``; the first where it is absent."""
        value = self.table.get(name)
        text = supported[0] if value is None else str(value).lower()
        if text not in supported:
            raise UnsupportedModelError(
                f"{self.where}.{name} is {text[:40]!r}, which is not supported; supported are "
                f"{', '.join(supported)}. Use another checkpoint of this model, or a GGUF file."
            )
        return text

    def require(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
        """``name``, whose tensor has this shape (rows and columns of one are not told apart) and
        one of these types."""
        if name not in self.names:
            raise InvalidModelError(f"The files lack the tensor '{name}'. {_AGAIN}")
        found, kind = self.source.shape(name), self.source.dtype_of(name)
        flat = len(shape) == 1 and math.prod(found) == shape[0]
        if (found != shape and not flat) or kind not in dtypes:
            raise InvalidModelError(
                f"The tensor '{name}' is {kind} {list(found)}; it must be {' or '.join(dtypes)} "
                f"{list(shape)}. {_AGAIN}"
            )
        return name

    def matrix(self, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        shape, kind = self.source.shape(name), self.source.dtype_of(name)
        if len(shape) != 2 or min(shape) < 1 or kind not in dtypes:
            raise InvalidModelError(
                f"The tensor '{name}' is {kind} {list(shape)}; it must be a matrix of "
                f"{' or '.join(dtypes)}. {_AGAIN}"
            )
        return shape[0], shape[1]

    def split(self, name: str, group: int, columns: int) -> int:
        """The group of the form, see ``forms.split_group``."""
        split = split_group(group, columns)
        if split is None and (group < 1 or columns % group):
            raise InvalidModelError(
                f"{name} has rows of {columns} columns, and groups of {group} do not divide them. "
                f"{_AGAIN}"
            )
        if split is None:
            raise UnsupportedModelError(
                f"{name} has groups of {group} columns; supported are 16, 32, 64, multiples of "
                "128, and whole rows. Use another checkpoint of this model, or a GGUF file."
            )
        return split[0]

    def prefixes(self, suffix: str) -> list[str]:
        """What comes before ``suffix`` in the names that end with it."""
        return [n.removesuffix(suffix) for n in self.source.names() if n.endswith(suffix)]

    def scale_bytes(self, name: str) -> int:
        return 2 if self.source.dtype_of(name) == "float16" else 4

    def group_size(self, columns: int) -> int:
        group = self.whole("group_size", "q_group_size", default=128)
        return columns if group == -1 else group


def _awq(reader: _Reader) -> dict[str, _Matrix]:
    reader.word("version", ("gemm",))
    bits = reader.whole("bits", "w_bit", default=4)
    if bits != 4:
        raise UnsupportedModelError(
            f"{reader.where}.bits is {bits}; AWQ is supported with 4 bits only. Use another "
            "checkpoint of this model, or a GGUF file."
        )
    return {f"{p}.weight": _awq_matrix(reader, p) for p in reader.prefixes(".qweight")}


def _awq_matrix(reader: _Reader, prefix: str) -> _Matrix:
    name, load = f"{prefix}.weight", reader.source.load
    columns, words = reader.matrix(f"{prefix}.qweight", ("int32",))
    rows, group = words * 8, reader.group_size(columns)
    form_group = reader.split(name, group, columns)
    groups = columns // group
    parts = (
        f"{prefix}.qweight",
        reader.require(f"{prefix}.qzeros", (groups, words), ("int32",)),
        reader.require(f"{prefix}.scales", (groups, rows), _FLOATS),
    )

    def read() -> Quantized:
        from ambidex.quant.awq import from_awq

        qweight, qzeros, scales = map(load, parts)
        return from_awq(name, qweight, qzeros, scales, group)

    form = Form(4, form_group, reader.scale_bytes(parts[2]), zero_bytes=1)
    return _Matrix((rows, columns), form, parts, read)


def _gptq(reader: _Reader) -> dict[str, _Matrix]:
    bits = reader.whole("bits", "w_bit", default=4)
    if bits not in (2, 3, 4, 8):
        raise UnsupportedModelError(
            f"{reader.where}.bits is {bits}; GPTQ is supported with 2, 3, 4 and 8 bits. Use "
            "another checkpoint of this model, or a GGUF file."
        )
    reader.word("checkpoint_format", ("gptq", "gptq_v2"))
    if reader.table.get("dynamic"):
        raise UnsupportedModelError(
            f"{reader.where}.dynamic gives some matrices settings of their own, which is not "
            "supported. Use another checkpoint of this model, or a GGUF file."
        )
    return {f"{p}.weight": _gptq_matrix(reader, p, bits) for p in reader.prefixes(".qweight")}


def _gptq_matrix(reader: _Reader, prefix: str, bits: int) -> _Matrix:
    name, load = f"{prefix}.weight", reader.source.load
    words, rows = reader.matrix(f"{prefix}.qweight", ("int32",))
    if (bits == 3 and words % bits) or rows * bits % 32:
        raise InvalidModelError(
            f"The tensor '{prefix}.qweight' has {words} words for each of {rows} outputs, which is "
            f"no whole number of {bits}-bit codes. {_AGAIN}"
        )
    columns = words * 32 // bits
    group = reader.group_size(columns)
    form_group = reader.split(name, group, columns)
    groups = columns // group
    parts = [
        f"{prefix}.qweight",
        reader.require(f"{prefix}.qzeros", (groups, rows * bits // 32), ("int32",)),
        reader.require(f"{prefix}.scales", (groups, rows), _FLOATS),
    ]
    is_ordered, is_symmetric = reader.flag("desc_act", False), reader.flag("sym", True)
    has_index = f"{prefix}.g_idx" in reader.names
    if has_index or is_ordered:
        parts.append(reader.require(f"{prefix}.g_idx", (columns,), ("int32", "int64")))
    less_one = reader.word("checkpoint_format", ("gptq", "gptq_v2")) == "gptq"

    def read() -> Quantized:
        from ambidex.quant.gptq import from_gptq

        qweight, qzeros, scales, *index = map(load, parts)
        return from_gptq(
            name,
            qweight,
            qzeros,
            scales,
            index[0].flatten() if index else None,
            bits,
            group,
            is_symmetric=is_symmetric,
            zeros_less_one=less_one,
        )

    form = Form(
        8 if bits == 8 else 4,
        form_group,
        reader.scale_bytes(parts[2]),
        zero_bytes=0 if is_symmetric else 1,
        is_permuted=is_ordered and groups > 1,
    )
    return _Matrix((rows, columns), form, tuple(parts), read)


_STATE = ".weight.quant_state.bitsandbytes__"


def _bitsandbytes(reader: _Reader) -> dict[str, _Matrix]:
    made = {f"{p}.weight": _int8_matrix(reader, p) for p in reader.prefixes(".SCB")}
    for kind in ("nf4", "fp4"):
        for prefix in reader.prefixes(_STATE + kind):
            made[f"{prefix}.weight"] = _bnb_4bit_matrix(reader, prefix, kind)
    return made


def _int8_matrix(reader: _Reader, prefix: str) -> _Matrix:
    name, load = f"{prefix}.weight", reader.source.load
    if name not in reader.names:
        raise InvalidModelError(f"The files lack the tensor '{name}'. {_AGAIN}")
    rows, columns = reader.matrix(name, ("int8",))
    scb = reader.require(f"{prefix}.SCB", (rows,), _FLOATS)
    parts = [name, scb]
    layout = f"{prefix}.weight_format"
    if layout in reader.names:
        parts.append(layout)
        if any(reader.source.read_bytes(layout)):
            raise UnsupportedModelError(
                f"The tensor '{name}' is not stored row by row ('{layout}' is not 0), which is not "
                "supported. Save the model again with a newer bitsandbytes."
            )

    def read() -> Quantized:
        from ambidex.quant.bitsandbytes import from_int8

        return from_int8(name, load(name), load(scb).flatten())

    return _Matrix((rows, columns), Form(8, 0, scale_bytes=4), tuple(parts), read)


def _bnb_4bit_matrix(reader: _Reader, prefix: str, kind: str) -> _Matrix:
    name, load = f"{prefix}.weight", reader.source.load
    state_name = f"{prefix}{_STATE}{kind}"
    state = _State(reader, state_name)
    (rows, columns), block = state.shape(), state.whole("blocksize")
    form_group = reader.split(name, block, columns)
    if name not in reader.names:
        raise InvalidModelError(f"The files lack the tensor '{name}'. {_AGAIN}")
    # The bytes may pass for numbers of another type.
    packed_type = reader.source.dtype_of(name)
    width = {"uint8": 1, "int8": 1, "float32": 4}.get(packed_type, 2)
    if rows * columns % (2 * width):
        raise InvalidModelError(
            f"The tensor '{state_name}' says {rows} x {columns} values of 4 bits, which do not "
            f"fill whole elements of '{name}' ({packed_type}). {_AGAIN}"
        )
    reader.require(name, (rows * columns // 2 // width,), ("uint8", "int8", *_FLOATS))
    quant_map = reader.require(f"{name}.quant_map", (16,), _FLOATS)
    blocks = rows * columns // block
    nested = "nested_blocksize" in state.values
    parts = [name, state_name, quant_map]
    kinds = ("uint8",) if nested else _FLOATS
    absmax = reader.require(f"{name}.absmax", (blocks,), kinds)
    parts.append(absmax)
    nested_block, offset = 0, 0.0
    if nested:
        nested_block, offset = state.whole("nested_blocksize"), state.number("nested_offset")
        count = -(-blocks // nested_block)
        parts.append(reader.require(f"{name}.nested_absmax", (count,), _FLOATS))
        parts.append(reader.require(f"{name}.nested_quant_map", (256,), _FLOATS))

    def read() -> Quantized:
        import torch

        from ambidex.quant.bitsandbytes import from_4bit, nested_absmax

        scales = load(absmax).flatten()
        if nested:
            scales = nested_absmax(
                scales,
                load(f"{name}.nested_quant_map").flatten(),
                load(f"{name}.nested_absmax").flatten(),
                nested_block,
                offset,
            )
        packed = load(name).contiguous().flatten().view(torch.uint8)
        return from_4bit(name, packed, (rows, columns), scales, load(quant_map), block)

    form = Form(4, form_group, scale_bytes=4, has_codebook=True)
    return _Matrix((rows, columns), form, tuple(parts), read)


class _State:
    """The JSON text that bitsandbytes keeps beside a matrix, as a tensor of bytes."""

    def __init__(self, reader: _Reader, name: str) -> None:
        self.name = name
        try:
            values = json.loads(reader.source.read_bytes(name).decode("utf-8"))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise InvalidModelError(f"The tensor '{name}' is no JSON object. {_AGAIN}")
        self.values: dict[str, Any] = values

    def _fail(self, field: str) -> InvalidModelError:
        value = self.values.get(field)
        return InvalidModelError(
            f"The tensor '{self.name}' has {value!r:.60} for '{field}'. {_AGAIN}"
        )

    def whole(self, field: str) -> int:
        value = self.values.get(field)
        if type(value) is not int or not 0 < value <= 1 << 20:
            raise self._fail(field)
        return value

    def number(self, field: str) -> float:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._fail(field)
        # Written without an exponent, a number may be larger than any float.
        if not abs(value) <= sys.float_info.max:
            raise self._fail(field)
        return float(value)

    def shape(self) -> tuple[int, int]:
        value = self.values.get("shape")
        if not isinstance(value, list) or len(value) != 2:
            raise self._fail("shape")
        if not all(type(size) is int and 0 < size < 1 << 31 for size in value):
            raise self._fail("shape")
        return value[0], value[1]


#: ``quant_method`` of config.json -> what finds the quantised matrices.
METHODS: dict[str, Callable[[_Reader], dict[str, _Matrix]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
}
