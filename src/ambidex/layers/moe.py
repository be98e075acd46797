"""Mixture of experts."""

from __future__ import annotations

from torch import Tensor

from ambidex.layers.linear import Linear
from ambidex.layers.mlp import check_activation
from ambidex.layers.module import BuildContext, Module, Parameter


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
        self._kernels = context.device.kernels
        self.activation = check_activation(context, activation)
        self.top_k = top_k
        self.normalise = normalise
        width = intermediate_size
        self.router = Linear(context, hidden_size, num_experts)
        self._shapes = ((num_experts, 2 * width, hidden_size), (num_experts, hidden_size, width))
        self.gate_up = Parameter(
            (num_experts * 2 * width, hidden_size),
            context.dtype,
            {
                f"{expert}.{part}": ((2 * expert + index) * width, width)
                for expert in range(num_experts)
                for index, part in enumerate(("gate", "up"))
            },
            self._shapes[0],
        )
        self.down = Parameter(
            (num_experts * hidden_size, width),
            context.dtype,
            {str(e): (e * hidden_size, hidden_size) for e in range(num_experts)},
            self._shapes[1],
        )

    def __call__(self, x: Tensor) -> Tensor:
        weights, experts = self._kernels.route_experts(
            self.router(x), self.top_k, normalise=self.normalise
        )
        gate_up, down = self._shapes
        return self._kernels.moe(
            x,
            self.gate_up.data.view(gate_up),
            self.down.data.view(down),
            weights,
            experts,
            self.activation,
        )
