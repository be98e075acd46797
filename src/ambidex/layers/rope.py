"""Rotary position embedding, with every scaling that checkpoints name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ambidex.config import CheckpointConfig, rope_parameters
from ambidex.errors import InvalidModelError, UnsupportedModelError
from ambidex.layers.batch import Batch
from ambidex.layers.module import BuildContext, Module, submodules

# Positions are turned into angles in chunks of this many, so that a position's cosine has the
# same bits however long the contexts of a step are.
_CHUNK = 1024


class Rope(Module):
    """Turns queries and keys by their positions."""

    def __init__(self, context: BuildContext, frequencies: Tensor, factor: float = 1.0) -> None:
        """``frequencies`` [width] float32 in radians a token; ``factor`` scales the result."""
        self._kernels = context.kernels
        self._frequencies = frequencies
        self._factor = factor
        self._num_ready = 0
        self._device = context.device
        num_chunks = -(-context.max_model_len // _CHUNK)
        self._shape = (num_chunks * _CHUNK, frequencies.shape[0])
        self._cos = self._sin = torch.empty(0)

    @property
    def table_bytes(self) -> int:
        """Bytes of the device's memory that its tables take."""
        return 2 * 4 * self._shape[0] * self._shape[1]

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [positions, width] float32 each."""
        return self._cos, self._sin

    def prepare(self, max_position: int) -> None:
        """Fill in the tables up to ``max_position``; a step that is replayed needs this before."""
        if not self._cos.numel():
            # The whole tables' addresses stay; their pages are taken as they are filled.
            self._cos, self._sin = (
                self._device.empty(self._shape, torch.float32) for _ in range(2)
            )
        while self._num_ready <= max_position:
            first, end = self._num_ready, self._num_ready + _CHUNK
            positions = torch.arange(first, end, dtype=torch.float32)
            angles = torch.outer(positions, self._frequencies).double()
            self._device.write(self._cos[first:end], (torch.cos(angles) * self._factor).float())
            self._device.write(self._sin[first:end], (torch.sin(angles) * self._factor).float())
            self._num_ready = end

    def __call__(self, query: Tensor, key: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        self.prepare(batch.max_position)
        return self._kernels.rope(query, key, self._cos, self._sin, batch.positions)


def rope_bytes(model: object) -> int:
    """Bytes of the tables of all of a model's ropes."""
    return sum(item.table_bytes for item in submodules(model) if isinstance(item, Rope))


def make_rope(
    context: BuildContext,
    config: CheckpointConfig,
    head_dim: int,
    *,
    theta: float = 10000.0,
    parameters: Mapping[str, Any] | None = None,
) -> Rope:
    """The rotation that ``config`` describes, or ``parameters`` if given (see
    :func:`rope_parameters`); ``theta`` is the base where neither names one.

    It may be of type default, linear, dynamic, yarn, longrope (su) or llama3. The choice that
    ``dynamic`` and ``longrope`` make by sequence length is made once, by the engine's longest
    context, so that a token's key does not depend on what follows it.
    Formulas: the papers and the model cards that introduced each.
    """
    if parameters is None:
        parameters = rope_parameters(config)
    theta = float(parameters.get("rope_theta") or theta)
    share = parameters.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        part = "" if rotary_dim == head_dim else f", of which {rotary_dim} are to be rotated"
        raise InvalidModelError(
            f"{config.source}: a head has {head_dim} values{part}. Values are rotated in pairs, so "
            "that must be an even number above 0. Check 'head_dim', 'hidden_size', "
            "'num_attention_heads' and 'partial_rotary_factor', or download the model again."
        )
    frequencies, factor = rope_frequencies(
        parameters, theta, rotary_dim, config, context.max_model_len
    )
    return Rope(context, frequencies, factor)


def rope_frequencies(
    scaling: Mapping[str, Any],
    theta: float,
    rotary_dim: int,
    config: CheckpointConfig,
    max_model_len: int,
) -> tuple[Tensor, float]:
    """``(frequencies [rotary_dim / 2] float32, factor on cosine and sine)``."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    maker = _SCALINGS.get(kind)
    if maker is None:
        raise UnsupportedModelError(
            f"{config.source}: rope_scaling type '{kind}' is not supported. Supported: "
            f"{', '.join(sorted(_SCALINGS))}."
        )
    return maker(scaling, theta, rotary_dim, config, max_model_len)


def _need(scaling: Mapping[str, Any], name: str, config: CheckpointConfig) -> Any:
    value = scaling.get(name)
    if value is None:
        raise InvalidModelError(
            f"{config.source}: its rope_scaling lacks the field '{name}'. Repair the file, or give "
            f'the value with --hf-overrides \'{{"rope_scaling": {{"{name}": ...}}}}\'.'
        )
    return value


def _plain(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / (theta**exponents)


def _default(
    scaling: Mapping[str, Any], theta: float, dim: int, config: CheckpointConfig, length: int
) -> tuple[Tensor, float]:
    return _plain(theta, dim), 1.0


def _linear(
    scaling: Mapping[str, Any], theta: float, dim: int, config: CheckpointConfig, length: int
) -> tuple[Tensor, float]:
    return _plain(theta, dim) / float(_need(scaling, "factor", config)), 1.0


def _original_length(scaling: Mapping[str, Any], config: CheckpointConfig) -> int:
    name = "original_max_position_embeddings"
    value = config.get(name) or scaling.get(name) or config.require("max_position_embeddings")
    return int(value)


def _dynamic(
    scaling: Mapping[str, Any], theta: float, dim: int, config: CheckpointConfig, length: int
) -> tuple[Tensor, float]:
    original = int(config.require("max_position_embeddings"))
    factor = float(_need(scaling, "factor", config))
    length = max(length, original)
    stretch = factor * length / original - (factor - 1)
    return _plain(theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(
    scaling: Mapping[str, Any], theta: float, dim: int, config: CheckpointConfig, length: int
) -> tuple[Tensor, float]:
    original = _original_length(scaling, config)
    factor = float(scaling.get("factor") or config.require("max_position_embeddings") / original)

    def attention_scale(scale: float, weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        weight, all_weight = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if weight and all_weight:
            attention = attention_scale(factor, weight) / attention_scale(factor, all_weight)
        else:
            attention = attention_scale(factor)

    def boundary(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = boundary(float(scaling.get("beta_fast") or 32))
    high = boundary(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = _plain(theta, dim)
    return plain / factor * ramp + plain * (1 - ramp), float(attention)


def _longrope(
    scaling: Mapping[str, Any], theta: float, dim: int, config: CheckpointConfig, length: int
) -> tuple[Tensor, float]:
    original = _original_length(scaling, config)
    longest = int(config.get("max_position_embeddings", original))
    stretched = scaling.get("factor") or longest / original
    key = "long_factor" if length > original else "short_factor"
    factors = torch.tensor(_need(scaling, key, config), dtype=torch.float32)
    if factors.shape[0] != dim // 2:
        raise UnsupportedModelError(
            f"{config.source}: rope_scaling.{key} has {factors.shape[0]} entries; the head size "
            f"asks for {dim // 2}."
        )
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = (
            1.0 if stretched <= 1 else math.sqrt(1 + math.log(stretched) / math.log(original))
        )
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (factors * theta**exponents), float(attention)


def _llama3(
    scaling: Mapping[str, Any], theta: float, dim: int, config: CheckpointConfig, length: int
) -> tuple[Tensor, float]:
    plain = _plain(theta, dim)
    factor = float(_need(scaling, "factor", config))
    low, high = (
        float(_need(scaling, name, config)) for name in ("low_freq_factor", "high_freq_factor")
    )
    original = _original_length(scaling, config)
    wavelengths = 2 * math.pi / plain
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(wavelengths > original / low, plain / factor, plain)
    middle = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(middle, blended, stretched), 1.0


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "llama3": _llama3,
}
