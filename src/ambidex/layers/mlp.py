"""Feed-forward layers."""

from __future__ import annotations

from torch import Tensor

from ambidex.errors import UnsupportedModelError
from ambidex.layers.linear import Linear
from ambidex.layers.module import BuildContext, Module


def check_activation(context: BuildContext, activation: str) -> str:
    """``activation``, if the kernels know it; raises UnsupportedModelError."""
    known = context.kernels.ACTIVATIONS
    if activation not in known:
        raise UnsupportedModelError(
            f"The activation function '{activation}' of config.json is not supported. Supported: "
            f"{', '.join(sorted(known))}."
        )
    return activation


class GatedMLP(Module):
    """``down(activation(gate(x)) * up(x))``, gate and up in one product; plus a residual."""

    def __init__(
        self,
        context: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        *,
        bias: bool = False,
    ) -> None:
        self.activation = check_activation(context, activation)
        sizes = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up = Linear(context, hidden_size, sizes, bias=bias)
        self.down = Linear(context, intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(self.gate_up.gated(x, self.activation), residual)


class MLP(Module):
    """``down(activation(up(x)))``, plus a residual."""

    def __init__(
        self,
        context: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool = False,
    ) -> None:
        self._kernels = context.kernels
        self.activation = check_activation(context, activation)
        self.up = Linear(context, hidden_size, intermediate_size, bias=bias)
        self.down = Linear(context, intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(self._kernels.activate(self.up(x), self.activation), residual)
