"""Parameters, and the layers that hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from ambidex.checkpoint_names import WHOLE, check_part
from ambidex.kernels.quantized import Quantized
from ambidex.kernels.rows import TensorRows
from ambidex.kv.block import BLOCK_SIZES, KVGroup

if TYPE_CHECKING:
    from ambidex.device.base import Device
    from ambidex.kernels.table import Kernels


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer needs of the KV cache."""

    layer: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(slots=True)
class BuildContext:
    """What layers are built with: the device, its kernels (or those of the device and the host
    together), the dtype of matrices, the longest context."""

    device: Device
    dtype: torch.dtype
    max_model_len: int
    attention: list[AttentionSpec] = field(default_factory=list)
    #: A table over two memories, in place of the device's own.
    placed_kernels: Kernels | None = None

    @property
    def kernels(self) -> Kernels:
        return self.placed_kernels or self.device.kernels

    def _layer_bytes(self, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> int:
        """Bytes a token of one layer's KV cache."""
        slots = min(BLOCK_SIZES)
        layout = self.kernels.kv_layout(num_kv_heads, slots, head_dim, kv_dtype)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout) // slots

    def kv_groups(self, kv_dtype: torch.dtype) -> list[KVGroup]:
        """Layers of one shape and window share a block table."""
        by_shape: dict[tuple[int | None, int, int], list[int]] = {}
        for spec in self.attention:
            key = (spec.window, spec.num_kv_heads, spec.head_dim)
            by_shape.setdefault(key, []).append(spec.layer)
        return [
            KVGroup(
                layers=tuple(layers),
                num_kv_heads=heads,
                head_dim=head_dim,
                window=window,
                bytes_per_token=len(layers) * self._layer_bytes(heads, head_dim, kv_dtype),
            )
            for (window, heads, head_dim), layers in by_shape.items()
        ]


def weight_bytes(weight: Any) -> int:
    """Bytes of a tensor, of a kernel table's weight, or of a list of them."""
    if isinstance(weight, list):
        return sum(weight_bytes(item) for item in weight)
    if isinstance(weight, Tensor):
        return weight.numel() * weight.dtype.itemsize
    return int(weight.num_bytes)


class Parameter:
    """A vector or table: shape and dtype from the start, memory once it is loaded.

    ``parts`` names slices of the first dimension that come from different checkpoint tensors,
    for example q, k and v of one fused projection: name -> (first row, rows). A tensor for
    :data:`WHOLE` has the parameter's shape, or ``stacked`` where it is given: [experts, rows,
    columns] for experts that lie below each other.
    """

    #: Whether kernels multiply with it in low bits, where the checkpoint or the user says so.
    is_matrix = False

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: Mapping[str, tuple[int, int]] | None = None,
        stacked: tuple[int, ...] | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.stacked = stacked or shape
        self.parts = dict(parts or {"": (0, shape[0])})
        self.data: Any = torch.empty(0)
        self._filled: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes when it is held in its dtype."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes, once it is loaded."""
        return weight_bytes(self.data)

    @property
    def takes_rows(self) -> bool:
        """Whether :meth:`load_rows` can load it."""
        return False

    @property
    def is_loaded(self) -> bool:
        return len(self._filled) == len(self.parts)

    def missing_parts(self) -> list[str]:
        return [part for part in self.parts if part not in self._filled]

    def check(
        self, part: str, shape: tuple[int, ...], name: str, filled: set[str]
    ) -> tuple[int, int]:
        """See ``checkpoint_names.check_part``."""
        return check_part(self.parts, (self.shape, self.stacked), part, shape, name, filled)

    def load(self, device: Device, part: str, tensor: Tensor | Quantized, name: str) -> None:
        """Take a checkpoint tensor; raises InvalidModelError as :meth:`check` does."""
        first, rows = self.check(part, tuple(tensor.shape), name, self._filled)
        self._take(device, part, first, rows, tensor)

    def load_rows(
        self, device: Device, part: str, read: Callable[[int, int], Tensor], name: str
    ) -> None:
        """See :class:`Matrix`."""
        raise AssertionError(f"{name} is loaded as a whole")

    def _take(
        self, device: Device, part: str, first: int, rows: int, tensor: Tensor | Quantized
    ) -> None:
        if isinstance(tensor, Quantized):
            tensor = tensor.dequantise()
        if not self.data.numel():
            self.data = torch.empty(self.shape, dtype=self.dtype)
        self.data[first : first + rows].copy_(tensor)
        if self.is_loaded:
            self.data = device.store(self.data)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a matrix goes whose rows (outputs) are not all on the accelerator: its first
    ``resident_rows`` are; of the others ``streamed_rows(n)`` are copied to it for a product with
    ``n`` rows, and the rest is computed on the host. Rows of a gate and what it is multiplied with
    are counted once."""

    resident_rows: int
    streamed_rows: Callable[[int], int]
    #: All rows are copied in every step: they may be kept, and copied, compressed.
    is_compressed: bool = False


class PlacingKernels(Protocol):
    """A kernel table over two memories."""

    def place(
        self,
        parts: Sequence[Tensor | Quantized | TensorRows],
        precise: bool,
        place: Place,
        is_paired: bool = False,
    ) -> Any:
        """:meth:`Kernels.pack_parts` with rows where ``place`` says."""


def _placing(kernels: Kernels) -> PlacingKernels:
    # Places are given by whoever chose a table that knows them.
    return cast(PlacingKernels, kernels)


class Matrix(Parameter):
    """What inputs are multiplied with: [out, in], in the layout of the device's kernels.

    ``precise``: what comes out decides much, so that with low bits inputs are rounded less.
    """

    is_matrix = True

    def __init__(
        self,
        kernels: Kernels,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: Mapping[str, tuple[int, int]] | None = None,
        *,
        precise: bool = False,
    ) -> None:
        super().__init__(shape, dtype, parts)
        self._kernels = kernels
        self._precise = precise
        self._waiting: dict[str, Tensor | Quantized | TensorRows] = {}
        #: Where its rows go; None: to the kernels' own memory.
        self.place: Place | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the kernels' layout, which may be padded."""
        rows, columns = self.shape
        return self._kernels.packed_bytes((rows, columns), self.dtype)

    @property
    def is_paired(self) -> bool:
        """A gate above what it is multiplied with: row i of both makes one output."""
        return list(self.parts) == ["gate", "up"]

    def _take(
        self,
        device: Device,
        part: str,
        first: int,
        rows: int,
        tensor: Tensor | Quantized | TensorRows,
    ) -> None:
        if isinstance(tensor, Tensor) and tensor.dtype is not self.dtype:
            # Kernels pack straight from the mapped file where it has the right type, else from
            # some rows at a time.
            tensor = self._converted(tensor)
        self._waiting[part] = tensor
        if self.is_loaded:
            order = [WHOLE] if WHOLE in self._waiting else list(self.parts)
            self.data = self._pack([self._waiting[name] for name in order])
            self._waiting.clear()

    @property
    def takes_rows(self) -> bool:
        return len(self.parts) == 1

    def load_rows(
        self, device: Device, part: str, read: Callable[[int, int], Tensor], name: str
    ) -> None:
        """:meth:`load` of a matrix that has one part, of which ``read(a, b)`` gives rows ``a`` to
        ``b``."""
        first, rows = self.check(part, self.shape, name, self._filled)
        self._take(device, part, first, rows, TensorRows((rows, self.shape[1]), self.dtype, read))

    def _converted(self, tensor: Tensor) -> TensorRows:
        rows, columns = tensor.shape
        return TensorRows((rows, columns), self.dtype, lambda start, end: tensor[start:end])

    def _pack(self, parts: list[Tensor | Quantized | TensorRows]) -> Any:
        if self.place is not None:
            return _placing(self._kernels).place(parts, self._precise, self.place, self.is_paired)
        return self._kernels.pack_parts(parts, self._precise)


class Table(Matrix):
    """Rows to look up, [rows, width]; with ``has_head``, a tied head multiplies with it too."""

    def __init__(self, kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(kernels, shape, dtype)
        self.has_head = False
        #: What the head multiplies with.
        self.head: Any = None

    @property
    def num_bytes(self) -> int:
        rows, width = self.shape
        extra = self._kernels.head_bytes((rows, width), self.dtype) if self.has_head else 0
        return super().num_bytes + extra

    @property
    def held_bytes(self) -> int:
        beside = self.has_head and self.head is not self.data
        return super().held_bytes + (weight_bytes(self.head) if beside else 0)

    def _pack(self, parts: list[Tensor | Quantized | TensorRows]) -> Any:
        if self.place is not None:
            table = _placing(self._kernels).place(parts, True, self.place)
        else:
            table = self._kernels.pack_table(parts[0])
        if self.has_head:
            self.head = self._kernels.pack_head(table)
        return table


class Experts(Parameter):
    """One matrix an expert: ``data`` is a list of them.

    ``parts`` maps the parts of one expert to their rows; the checkpoint's parts are
    ``{expert}.{part}``, or ``{expert}`` where there is one part.
    """

    is_matrix = True

    def __init__(
        self,
        kernels: Kernels,
        num_experts: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        parts: Sequence[str] = ("",),
    ) -> None:
        rows = shape[0] // len(parts)
        names = {
            f"{expert}.{part}" if part else str(expert): (
                expert * shape[0] + index * rows,
                rows,
            )
            for expert in range(num_experts)
            for index, part in enumerate(parts)
        }
        super().__init__((num_experts * shape[0], shape[1]), dtype, names, (num_experts, *shape))
        self._kernels = kernels
        self._expert_parts = tuple(parts)
        self._waiting: dict[str, Tensor | Quantized] = {}
        self._matrix_bytes = kernels.packed_bytes(shape, dtype)
        self.data = [None] * num_experts
        #: Where all of them go; None: to the kernels' own memory.
        self.place: Place | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.data) * self._matrix_bytes

    def _take(
        self, device: Device, part: str, first: int, rows: int, tensor: Tensor | Quantized
    ) -> None:
        held = tensor if isinstance(tensor, Quantized) else tensor.to(self.dtype)
        if part == WHOLE:
            assert isinstance(held, Tensor)
            self.data = [self._pack([matrix]) for matrix in held]
            return
        self._waiting[part] = held
        expert = part.partition(".")[0]
        names = [f"{expert}.{name}" if name else expert for name in self._expert_parts]
        if all(name in self._waiting for name in names):
            parts = [self._waiting.pop(name) for name in names]
            self.data[int(expert)] = self._pack(parts)

    def _pack(self, parts: list[Tensor | Quantized]) -> Any:
        if self.place is not None:
            return _placing(self._kernels).place(parts, False, self.place)
        return self._kernels.pack_parts(parts)


class Module:
    """A layer. Parameters are found by walking its attributes and lists."""

    #: What it computes; every layer has arguments of its own.
    __call__: Callable[..., Any]

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            yield from _walk(f"{prefix}{name}", value)


def submodules(module: object) -> Iterator[Module]:
    """``module`` and all modules within, each once."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, Module) and id(item) not in seen:
            seen.add(id(item))
            yield item
            waiting.extend(vars(item).values())


def _walk(path: str, value: object) -> Iterator[tuple[str, Parameter]]:
    if isinstance(value, Parameter):
        yield path, value
    elif isinstance(value, Module):
        yield from value.named_parameters(path + ".")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(f"{path}.{index}", item)
