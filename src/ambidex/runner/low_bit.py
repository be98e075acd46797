"""Which weights are kept in low bits: those that the file holds so, or that the user wants so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ambidex.kernels.quantized import Quantized
from ambidex.quant.forms import ON_LOAD_FORMS
from ambidex.quant.on_load import quantise
from ambidex.weights.hub import cache_dir
from ambidex.weights.quantization import low_bit_kind
from ambidex.weights.quantization_cache import QuantizationCache

if TYPE_CHECKING:
    from ambidex.config import EngineConfig
    from ambidex.kernels.table import Kernels
    from ambidex.weights.checkpoint import Checkpoint


class FileForms:
    """Matrices as the checkpoint holds them."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels) -> None:
        self._checkpoint = checkpoint
        self._unpack = kernels.unpack_gguf
        self.description = f"{checkpoint.dtype_name} weights as stored, int8 activations"

    def num_bytes(self, name: str) -> int | None:
        """Bytes of a tensor in low bits; None where it stays as it is."""
        return self._checkpoint.quantized_bytes(name)

    def fixed_bytes(self, name: str) -> int:
        """Of these bytes, what every part of a matrix has."""
        return self._checkpoint.fixed_bytes(name)

    def load(self, name: str) -> Tensor | Quantized:
        return self._checkpoint.load_quantized(name, self._unpack)


class QuantisedOnLoad:
    """Matrices of numbers, quantised while they are loaded; with ``cache``, once for all."""

    def __init__(
        self, checkpoint: Checkpoint, kind: str, cache: QuantizationCache | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._kind = kind
        self._cache = cache
        self.description = f"{kind} weights (quantised on load), int8 activations"

    def num_bytes(self, name: str) -> int | None:
        """Bytes of a tensor in low bits; None where it stays as it is."""
        shape = self._checkpoint.tensor_shape(name)
        return ON_LOAD_FORMS[self._kind].num_bytes(*shape) if len(shape) == 2 else None

    def fixed_bytes(self, name: str) -> int:
        """Of these bytes, what every part of a matrix has."""
        return ON_LOAD_FORMS[self._kind].fixed_bytes(self._checkpoint.tensor_shape(name)[-1])

    def load(self, name: str) -> Tensor | Quantized:
        if len(self._checkpoint.tensor_shape(name)) != 2:
            return self._checkpoint.load(name)
        if self._cache is None:
            return self._quantise(name)
        return self._cache.quantised(name, lambda: self._quantise(name))

    def _quantise(self, name: str) -> Quantized:
        return quantise(name, self._checkpoint.load(name), self._kind)


def low_bit_source(
    config: EngineConfig, checkpoint: Checkpoint, kernels: Kernels
) -> FileForms | QuantisedOnLoad | None:
    """What gives matrices in low bits; None where all weights are numbers.

    Raises OptionError where options contradict each other or the files.
    """
    kind = low_bit_kind(config.model, checkpoint)
    if kind in ON_LOAD_FORMS:
        cache = None
        if config.quantization_cache:
            folder = cache_dir() / "quantized"
            cache = QuantizationCache(folder, checkpoint.files, kind)
        return QuantisedOnLoad(checkpoint, kind, cache)
    return None if kind is None else FileForms(checkpoint, kernels)
