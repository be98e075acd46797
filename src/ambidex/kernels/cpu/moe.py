"""Mixtures of experts over weights of any kind. Steps with one are not recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.base import NativeBase

if TYPE_CHECKING:
    from ambidex.kernels.table import Weight


class MoEOps(NativeBase):
    """See kernels/reference.py for what each computes."""

    if TYPE_CHECKING:

        def linear(self, x: Tensor, weight: Weight) -> Tensor: ...

        def gated_linear(self, x: Tensor, weight: Weight, activation: str) -> Tensor: ...

    def route_experts(
        self, router_logits: Tensor, top_k: int, *, normalise: bool, softmax_first: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Choose ``top_k`` experts a row of ``router_logits`` [n, experts], lower ids of equals.

        Returns weights [n, top_k] float32 and expert ids [n, top_k] int64.
        """
        self._check_eager(router_logits)
        self._check_rows(router_logits, "router_logits")
        num_rows, num_experts = router_logits.shape
        if not 1 <= top_k <= num_experts:
            raise KernelError(f"{top_k} of {num_experts} experts cannot be chosen.")
        weights = torch.empty((num_rows, top_k), dtype=torch.float32)
        experts = torch.empty((num_rows, top_k), dtype=torch.int64)
        self._native.route_experts(
            self._context,
            router_logits.data_ptr(),
            router_logits.stride(0),
            num_rows,
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
        ``gate_up`` and ``down`` hold one matrix an expert, only those in use are touched.
        """
        self._check_eager(x)
        self._check_rows(x, "x")
        if len(gate_up) != len(down):
            raise KernelError(f"There are {len(gate_up)} matrices gate_up, and {len(down)} down.")
        top_k = self._check_routing(x, weights, experts)
        num_rows, count = x.shape[0], experts.numel()
        out_width = down[0].shape[0] if down else x.shape[1]
        order = torch.empty(count, dtype=torch.int64)
        try:
            groups = self._native.group_by_expert(
                experts.data_ptr(), count, len(gate_up), order.data_ptr()
            )
        except IndexError as error:
            raise KernelError(f"{error}; there are {len(gate_up)}.") from error
        gathered = self._gather_rows(x, order, top_k)
        results, places, begin = [], [], 0
        for expert, end in groups:
            hidden = self.gated_linear(gathered[begin:end], gate_up[expert], activation)
            result = self.linear(hidden, down[expert])
            if tuple(result.shape) != (end - begin, out_width) or not result.is_contiguous():
                raise KernelError(
                    f"Expert {expert} gives {list(result.shape)}; others rows of {out_width}."
                )
            results.append(result)
            places.append((result.data_ptr(), end))
            begin = end
        out = torch.empty((num_rows, out_width), dtype=torch.float32)
        self._native.scatter_experts(
            self._context,
            places,
            order.data_ptr(),
            weights.data_ptr(),
            experts.data_ptr(),
            num_rows,
            out_width,
            top_k,
            out.data_ptr(),
        )
        return out

    def _gather_rows(self, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        """Rows ``order // top_k`` of ``x``."""
        out = torch.empty((order.shape[0], x.shape[1]), dtype=torch.float32)
        self._native.gather_rows(
            self._context,
            x.data_ptr(),
            x.stride(0),
            order.data_ptr(),
            order.shape[0],
            x.shape[1],
            top_k,
            out.data_ptr(),
        )
        return out

    def _check_eager(self, x: Tensor) -> None:
        if self._rows(x) < 0:
            raise KernelError("A mixture of experts cannot be recorded.")

    def _check_routing(self, x: Tensor, weights: Tensor, experts: Tensor) -> int:
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
        return int(experts.shape[1])
