"""Mixture of experts."""

from __future__ import annotations

from torch import Tensor

from ambidex.layers.linear import Linear
from ambidex.layers.mlp import check_activation
from ambidex.layers.module import BuildContext, Experts, Module


class MoE(Module):
    """A router picks ``top_k`` experts a token; each is a gated MLP.

    Checkpoint parts: ``gate_up`` has parts ``{e}.gate`` and ``{e}.up``, ``down`` has ``{e}``; or
    whole, stacked by expert: [experts, 2 * width, hidden] and [experts, hidden, width].
    """

    def __init__(
        self,
        context: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        activation: str = "silu",
        *,
        normalise: bool = True,
    ) -> None:
        self._kernels = context.kernels
        self.activation = check_activation(context, activation)
        self.top_k = top_k
        self.normalise = normalise
        width = intermediate_size
        self.router = Linear(context, hidden_size, num_experts)
        self.gate_up = Experts(
            self._kernels, num_experts, (2 * width, hidden_size), context.dtype, ("gate", "up")
        )
        self.down = Experts(self._kernels, num_experts, (hidden_size, width), context.dtype)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        weights, experts = self._kernels.route_experts(
            self.router(x), self.top_k, normalise=self.normalise
        )
        out = self._kernels.moe(
            x, self.gate_up.data, self.down.data, weights, experts, self.activation
        )
        return out if residual is None else self._kernels.add(residual, out)
