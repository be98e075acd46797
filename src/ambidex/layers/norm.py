"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ambidex.layers.module import BuildContext, Module, Parameter


class RMSNorm(Module):
    """Root-mean-square normalisation; Gemma stores its weights less one (``offset`` 1)."""

    def __init__(
        self, context: BuildContext, width: int, eps: float, *, offset: float = 0.0
    ) -> None:
        self._kernels = context.kernels
        self.eps = eps
        self.offset = offset
        self.weight = Parameter((width,), torch.float32)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._kernels.rms_norm(x, self.weight.data, self.eps, self.offset, residual)


class LayerNorm(Module):
    """Layer normalisation; ``affine`` False: without a weight and a bias."""

    def __init__(
        self, context: BuildContext, width: int, eps: float = 1e-5, *, affine: bool = True
    ) -> None:
        self._kernels = context.kernels
        self.eps = eps
        self.weight = Parameter((width,), torch.float32) if affine else None
        self.bias = Parameter((width,), torch.float32) if affine else None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.data for p in (self.weight, self.bias))
        return self._kernels.layer_norm(x, weight, bias, self.eps)
