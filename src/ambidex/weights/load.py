"""From a checkpoint's tensors to a model's parameters, one tensor at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from ambidex.errors import InvalidModelError
from ambidex.memory.host import give_freed_memory_back

if TYPE_CHECKING:
    from torch import Tensor

    from ambidex.device.base import Device
    from ambidex.kernels.quantized import Quantized
    from ambidex.weights.checkpoint import Checkpoint


#: Values read until the pages of the mapped file are let go.
_RELEASE_VALUES = 1 << 24
#: And until what was freed of the memory for packing is given back: it would come to a third of
#: the weights.
_TRIM_VALUES = 1 << 23


class LoadableParameter(Protocol):
    """See ``layers.module.Parameter``."""

    is_matrix: bool
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int: ...

    @property
    def held_bytes(self) -> int: ...

    @property
    def takes_rows(self) -> bool: ...

    def missing_parts(self) -> list[str]: ...

    def check(self, part: str, shape: tuple[int, ...], name: str, filled: set[str]) -> object: ...

    def load(self, device: Device, part: str, tensor: Tensor | Quantized, name: str) -> None: ...

    def load_rows(
        self, device: Device, part: str, read: Callable[[int, int], Tensor], name: str
    ) -> None: ...


class SizedParameter(Protocol):
    """What planning asks of a parameter."""

    @property
    def is_matrix(self) -> bool: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def check(self, part: str, shape: tuple[int, ...], name: str, filled: set[str]) -> object: ...


class TensorShapes(Protocol):
    """See ``checkpoint.Checkpoint``."""

    def tensor_names(self) -> list[str]: ...

    def tensor_shape(self, name: str) -> tuple[int, ...]: ...


class Names(Protocol):
    """See ``checkpoint_names.NameTable``."""

    def find(self, name: str) -> tuple[str, str] | None: ...


def planned_bytes(
    parameters: Iterable[tuple[str, SizedParameter]],
    names: Names,
    checkpoint: TensorShapes,
    low_bit_bytes: Callable[[str], int | None] | None,
) -> dict[str, int]:
    """Bytes that each parameter will take, from headers alone.

    ``low_bit_bytes(name)``: what a tensor takes in low bits, None where it stays as it is; the
    function is None where nothing is kept in low bits.

    Raises InvalidModelError where a tensor in low bits has a wrong shape or comes twice: what it
    takes says nothing about its parameter then.
    """
    table = dict(parameters)
    sizes = {path: parameter.num_bytes for path, parameter in table.items()}
    if low_bit_bytes is None:
        return sizes
    filled: dict[str, set[str]] = defaultdict(set)
    for name in checkpoint.tensor_names():
        target = _find(names, name)
        parameter = table.get(target[0]) if target else None
        size = low_bit_bytes(name) if parameter is not None and parameter.is_matrix else None
        if target is not None and parameter is not None and size is not None:
            shape = checkpoint.tensor_shape(name)
            parameter.check(target[1], shape, name, filled[target[0]])
            share = math.prod(shape) / math.prod(parameter.shape)
            # Rounded so that what is planned is never too little.
            sizes[target[0]] += size - int(parameter.num_bytes * share)
    return sizes


def fixed_bytes(
    names: Names, checkpoint: TensorShapes, of_tensor: Callable[[str], int]
) -> dict[str, int]:
    """By parameter: of :func:`planned_bytes`, what every part of its rows has."""
    sizes: dict[str, int] = defaultdict(int)
    for name in checkpoint.tensor_names():
        target = _find(names, name)
        if target is not None:
            sizes[target[0]] += of_tensor(name)
    return sizes


def _find(names: Names, name: str) -> tuple[str, str] | None:
    try:
        return names.find(name)
    except KeyError:
        return None


def load_weights(
    parameters: Iterable[tuple[str, LoadableParameter]],
    names: Names,
    checkpoint: Checkpoint,
    device: Device,
    progress: Callable[[int, int], None] | None = None,
    low_bit: Callable[[str], Tensor | Quantized] | None = None,
) -> list[str]:
    """Load every parameter; ``progress(loaded, total)`` counts checkpoint tensors.

    ``low_bit(name)`` gives a tensor that is to be multiplied with, perhaps in low bits; None:
    every tensor is loaded as numbers.

    Returns the names of checkpoint tensors that the model does not use. Raises InvalidModelError
    where a parameter finds no tensor.
    """
    table = dict(parameters)
    unused = []
    num_read = num_packed = 0
    tensors = checkpoint.tensor_names()
    for count, name in enumerate(tensors):
        target = _find(names, name)
        parameter = table.get(target[0]) if target else None
        if target is None or parameter is None:
            unused.append(name)
            continue
        load = low_bit if low_bit is not None and parameter.is_matrix else checkpoint.load
        num_values = math.prod(checkpoint.tensor_shape(name))
        read = checkpoint.row_reader(name) if parameter.takes_rows else None
        if read is not None and (low_bit is None or not parameter.is_matrix):
            parameter.load_rows(device, target[1], read, name)
        else:
            parameter.load(device, target[1], load(name), name)
        num_read += num_values
        num_packed += num_values
        if num_packed >= _TRIM_VALUES:
            give_freed_memory_back()
            num_packed = 0
        if num_read >= _RELEASE_VALUES:
            checkpoint.release_pages()
            num_read = 0
        if progress is not None:
            progress(count + 1, len(tensors))
    checkpoint.release_pages()
    missing = [
        f"{path}:{part}" if part else path
        for path, parameter in table.items()
        for part in parameter.missing_parts()
    ]
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise InvalidModelError(
            f"{checkpoint.path} lacks {len(missing)} of the model's tensors: {shown}. "
            "The download may be incomplete; fetch the model again."
        )
    return unused
