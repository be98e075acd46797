"""From a checkpoint's tensors to a model's parameters, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from ambidex.errors import InvalidModelError

if TYPE_CHECKING:
    from torch import Tensor

    from ambidex.device.base import Device
    from ambidex.weights.checkpoint import Checkpoint


class LoadableParameter(Protocol):
    """See ``layers.module.Parameter``."""

    @property
    def num_bytes(self) -> int: ...

    def missing_parts(self) -> list[str]: ...

    def load(self, device: Device, part: str, tensor: Tensor, name: str) -> None: ...


class Names(Protocol):
    """See ``layers.module.NameTable``."""

    def find(self, name: str) -> tuple[str, str] | None: ...


def load_weights(
    parameters: Iterable[tuple[str, LoadableParameter]],
    names: Names,
    checkpoint: Checkpoint,
    device: Device,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Load every parameter; ``progress(loaded, total)`` counts checkpoint tensors.

    Returns the names of checkpoint tensors that the model does not use. Raises InvalidModelError
    where a parameter finds no tensor.
    """
    table = dict(parameters)
    unused = []
    tensors = checkpoint.tensor_names()
    for count, name in enumerate(tensors):
        try:
            target = names.find(name)
        except KeyError:
            target = None
        parameter = table.get(target[0]) if target else None
        if target is None or parameter is None:
            unused.append(name)
            continue
        parameter.load(device, target[1], checkpoint.load(name), name)
        if progress is not None:
            progress(count + 1, len(tensors))
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
