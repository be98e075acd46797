"""Parameters, the layers that hold them, and how a checkpoint's names find them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ambidex.errors import InvalidModelError
from ambidex.kv.block import KVGroup

if TYPE_CHECKING:
    from ambidex.device.base import Device


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer needs of the KV cache."""

    layer: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(slots=True)
class BuildContext:
    """What layers are built with: the device, the dtype of matrices, the longest context."""

    device: Device
    dtype: torch.dtype
    max_model_len: int
    attention: list[AttentionSpec] = field(default_factory=list)

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
                bytes_per_token=2 * len(layers) * heads * head_dim * kv_dtype.itemsize,
            )
            for (window, heads, head_dim), layers in by_shape.items()
        ]


#: The part that stands for all parts: a checkpoint may hold a fused parameter in one tensor.
WHOLE = "*"


class Parameter:
    """A weight: shape and dtype from the start, memory once it is loaded.

    ``parts`` names slices of the first dimension that come from different checkpoint tensors,
    for example q, k and v of one fused projection: name -> (first row, rows). A tensor for
    :data:`WHOLE` has the parameter's shape, or ``stacked`` where it is given: [experts, rows,
    columns] for experts that lie below each other.
    """

    __slots__ = (
        "_filled",
        "_pack",
        "_pack_beside",
        "data",
        "dtype",
        "packed",
        "parts",
        "shape",
        "stacked",
    )

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: Mapping[str, tuple[int, int]] | None = None,
        stacked: tuple[int, ...] | None = None,
        pack: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.stacked = stacked or shape
        self.parts = dict(parts or {"": (0, shape[0])})
        self.data: Tensor = torch.empty(0)
        #: Rearranges the weight for its kernel, once it is whole.
        self._pack = pack
        self._pack_beside: Callable[[Tensor], Tensor] | None = None
        #: A second form of the weight; see :meth:`pack_beside`.
        self.packed: Tensor | None = None
        self._filled: set[str] = set()

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count if self._pack_beside is None else 2 * count

    def pack_beside(self, pack: Callable[[Tensor], Tensor]) -> None:
        """Keep a packed copy beside the weight: an embedding is read by rows and, where the head
        is tied to it, multiplied too."""
        self._pack_beside = pack

    @property
    def is_loaded(self) -> bool:
        return len(self._filled) == len(self.parts)

    def missing_parts(self) -> list[str]:
        return [part for part in self.parts if part not in self._filled]

    def load(self, device: Device, part: str, tensor: Tensor, name: str) -> None:
        """Copy a checkpoint tensor to its place; raises InvalidModelError for a wrong shape."""
        if part == WHOLE:
            first, rows, expected = 0, self.shape[0], self.stacked
        elif part in self.parts:
            first, rows = self.parts[part]
            expected = (rows, *self.shape[1:])
        else:
            raise InvalidModelError(
                f"Tensor {name} has no place: the configuration asks for {len(self.parts)} such "
                "tensors. The checkpoint and its config.json do not belong together."
            )
        if tuple(tensor.shape) != expected:
            raise InvalidModelError(
                f"Tensor {name} has shape {list(tensor.shape)}; the configuration asks for "
                f"{list(expected)}. The checkpoint and its config.json do not belong together."
            )
        if not self._filled:
            self.data = device.empty(self.shape, self.dtype)
        self.data[first : first + rows].view(expected).copy_(tensor)
        self._filled.update(self.parts if part == WHOLE else (part,))
        if self._pack is not None and self.is_loaded:
            self.data = self._pack(self.data)
        if self._pack_beside is not None and self.is_loaded:
            self.packed = self._pack_beside(self.data)


class Module:
    """A layer. Parameters are found by walking its attributes and lists."""

    #: What it computes; every layer has arguments of its own.
    __call__: Callable[..., Any]

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            yield from _walk(f"{prefix}{name}", value)


def _walk(path: str, value: object) -> Iterator[tuple[str, Parameter]]:
    if isinstance(value, Parameter):
        yield path, value
    elif isinstance(value, Module):
        yield from value.named_parameters(path + ".")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(f"{path}.{index}", item)


class NameTable:
    """Checkpoint names to parameter paths.

    Keys and values use ``{name}`` for what carries over, for example
    ``"model.layers.{i}.self_attn.q_proj.{w}": "layers.{i}.attention.qkv.{w}:q"``; the text after
    a colon names the part of a fused parameter. A value of None says that the tensor is known
    and not needed.
    """

    def __init__(self, names: Mapping[str, str | None]) -> None:
        self._rules = [
            (re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^.]+)", re.escape(pattern))), target)
            for pattern, target in names.items()
        ]

    def find(self, name: str) -> tuple[str, str] | None:
        """``(path, part)``, or None for a known tensor that is not needed.

        Files saved from a model without its head lack the prefix ``model.``. Raises KeyError for a
        name that no rule matches.
        """
        try:
            return self._find(name)
        except KeyError:
            return self._find(f"model.{name}")

    def _find(self, name: str) -> tuple[str, str] | None:
        for pattern, target in self._rules:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if target is None:
                return None
            path, _, part = target.format(**match.groupdict()).partition(":")
            return path, part
        raise KeyError(name)
