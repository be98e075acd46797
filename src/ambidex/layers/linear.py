"""Matrix products with a weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ambidex.layers.module import BuildContext, Matrix, Module, Parameter


class Linear(Module):
    """``x @ weight.T + bias (+ residual)``: [n, in_features] to [n, out_features].

    ``out_features`` may be a mapping of part names to sizes: several projections of the same
    input, computed by one product and loaded from several checkpoint tensors. ``precise``: see
    :class:`Matrix`.
    """

    def __init__(
        self,
        context: BuildContext,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        bias: bool = False,
        precise: bool = False,
    ) -> None:
        self._kernels = context.kernels
        sizes = {"": out_features} if isinstance(out_features, int) else dict(out_features)
        parts, total = {}, 0
        for name, size in sizes.items():
            parts[name] = (total, size)
            total += size
        self.out_features = total
        self.weight = Matrix(
            self._kernels, (total, in_features), context.dtype, parts, precise=precise
        )
        self.bias = Parameter((total,), torch.float32, parts) if bias else None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        bias = self.bias.data if self.bias is not None else None
        return self._kernels.linear(x, self.weight.data, bias, residual)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """``activation(gate) * up``, the parts being a gate and an up projection."""
        bias = self.bias.data if self.bias is not None else None
        return self._kernels.gated_linear(x, self.weight.data, activation, bias)
