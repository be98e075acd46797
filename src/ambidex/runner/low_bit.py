"""Which weights are kept in low bits: those that the file holds so, or that the user wants so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ambidex.errors import OptionError
from ambidex.kernels.quantized import Quantized
from ambidex.quant.on_load import quantise, quantised_bytes

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.weights.checkpoint import Checkpoint

#: Kinds of --quantization that are made while loading.
ON_LOAD = ("int8", "int4")


class FileForms:
    """Matrices as the checkpoint holds them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.description = f"{checkpoint.dtype_name} weights as stored, int8 activations"

    def num_bytes(self, name: str) -> int | None:
        return self._checkpoint.quantized_bytes(name)

    def load(self, name: str) -> Tensor | Quantized:
        return self._checkpoint.load_quantized(name)


class QuantisedOnLoad:
    """Matrices of numbers, quantised while they are loaded."""

    def __init__(self, checkpoint: Checkpoint, kind: str) -> None:
        self._checkpoint = checkpoint
        self._kind = kind
        self.description = f"{kind} weights (quantised on load), int8 activations"

    def num_bytes(self, name: str) -> int | None:
        shape = self._checkpoint.tensor_shape(name)
        return quantised_bytes(shape, self._kind) if len(shape) == 2 else None

    def load(self, name: str) -> Tensor | Quantized:
        tensor = self._checkpoint.load(name)
        return quantise(name, tensor, self._kind) if tensor.dim() == 2 else tensor


def low_bit_source(
    config: EngineConfig, checkpoint: Checkpoint
) -> FileForms | QuantisedOnLoad | None:
    """What gives matrices in low bits; None where all weights are numbers.

    Raises OptionError where options contradict each other.
    """
    kind, dtype = config.model.quantization, config.model.dtype
    if kind in ON_LOAD:
        if dtype != "auto":
            raise OptionError(
                f"--quantization {kind} and --dtype {dtype} exclude each other: leave out one."
            )
        return QuantisedOnLoad(checkpoint, kind)
    if checkpoint.is_quantized and dtype == "auto":
        return FileForms(checkpoint)
    return None
