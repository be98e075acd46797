"""Mixtures of experts over weights of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.base import NativeBase

if TYPE_CHECKING:
    from ambidex.kernels.table import Weight


class MoEOps(NativeBase):
    """See kernels/reference.py for what each computes."""

    if TYPE_CHECKING:

        def linear(
            self,
            x: Tensor,
            weight: Any,
            bias: Tensor | None = None,
            residual: Tensor | None = None,
        ) -> Tensor: ...

        def gated_linear(
            self, x: Tensor, weight: Any, activation: str, bias: Tensor | None = None
        ) -> Tensor: ...

    def route_experts(
        self, router_logits: Tensor, top_k: int, *, normalise: bool, softmax_first: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Choose ``top_k`` experts a row of ``router_logits`` [n, experts], lower ids of equals.

        Returns weights [n, top_k] float32 and expert ids [n, top_k] int64.
        """
        self._check_rows(router_logits, "router_logits")
        num_experts = router_logits.shape[1]
        if not 1 <= top_k <= num_experts:
            raise KernelError(f"{top_k} of {num_experts} experts cannot be chosen.")
        weights = self._empty(router_logits, top_k)
        experts = self._empty_ids(router_logits, top_k)
        self._native.route_experts(
            self._context,
            router_logits.data_ptr(),
            router_logits.stride(0),
            self._rows(router_logits),
            num_experts,
            top_k,
            softmax_first,
            normalise,
            weights.data_ptr(),
            experts.data_ptr(),
        )
        return weights, experts

    def moe(
        self,
        x: Tensor,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        weights: Tensor,
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        """``x`` [n, hidden] through the experts of each row, added in index order: [n, hidden].

        ``weights`` float32 and ``experts`` int64 [n, top_k] come from :meth:`route_experts`;
        ``gate_up`` and ``down`` hold one matrix an expert, only those in use are touched. While
        recording, which are in use is read at replay.
        """
        self._check_rows(x, "x")
        num_experts = len(gate_up)
        if num_experts != len(down):
            raise KernelError(f"There are {num_experts} matrices gate_up, and {len(down)} down.")
        top_k = self._check_routing(x, weights, experts, num_experts)
        out = self._empty(x, down[0].shape[0] if down else x.shape[1])
        rows, width = self._rows(x), out.shape[1]
        order = self._empty_ids(x, top_k)
        # Where each expert's rows start in `order`, and how many they are.
        places = self._kept_ids(2 * num_experts)
        starts, counts = places.data_ptr(), places.data_ptr() + 8 * num_experts
        self._native.group_experts(
            self._context,
            experts.data_ptr(),
            order.data_ptr(),
            starts,
            counts,
            num_experts,
            top_k,
            rows,
        )
        self._native.clear_rows(self._context, out.data_ptr(), out.stride(0), rows, width)
        for expert, count in enumerate(self._expert_counts(x, places[num_experts:])):
            if count == 0:
                continue
            start = starts + 8 * expert
            gathered = self._counted(x, count, counts + 8 * expert)
            self._native.gather_rows(
                self._context,
                x.data_ptr(),
                x.stride(0),
                order.data_ptr(),
                start,
                gathered.data_ptr(),
                self._rows(gathered),
                x.shape[1],
                top_k,
            )
            hidden = self.gated_linear(gathered, gate_up[expert], activation)
            result = self.linear(hidden, down[expert])
            if result.shape[1] != width:
                raise KernelError(f"Expert {expert} gives rows of {result.shape[1]}, not {width}.")
            self._native.scatter_rows(
                self._context,
                result.data_ptr(),
                order.data_ptr(),
                start,
                weights.data_ptr(),
                out.data_ptr(),
                out.stride(0),
                self._rows(result),
                width,
                top_k,
            )
        self._end_counted()
        return out

    def _expert_counts(self, x: Tensor, counts: Tensor) -> list[int]:
        """Rows of each expert; while recording, the most that there can be."""
        return [int(count) for count in counts.tolist()]

    def _counted(self, x: Tensor, count: int, address: int) -> Tensor:
        """Memory for ``count`` rows as wide as those of ``x``. While recording, ``address`` is
        that of their number, and calls are left out where it is zero."""
        return torch.empty((count, x.shape[1]), dtype=torch.float32)

    def _end_counted(self) -> None:
        """Calls that follow are never left out."""

    def _check_routing(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int) -> int:
        """The number of experts a row, of routing that fits ``x``."""
        for tensor, dtype, what in (
            (weights, torch.float32, "weights"),
            (experts, torch.int64, "experts"),
        ):
            if (
                tensor.device.type != "cpu"
                or tensor.dtype is not dtype
                or tensor.dim() != 2
                or tensor.shape != experts.shape
                or tensor.shape[0] != x.shape[0]
                or tensor.shape[1] < 1
                or not tensor.is_contiguous()
            ):
                raise KernelError(
                    f"{what} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, and must "
                    f"be {dtype} [{x.shape[0]}, top_k], contiguous, on the CPU."
                )
        if self._rows(x) > 0:
            least, most = (int(value) for value in experts.aminmax())
            if least < 0 or most >= num_experts:
                wrong = least if least < 0 else most
                raise KernelError(f"there is no expert {wrong}; there are {num_experts}.")
        return int(experts.shape[1])
