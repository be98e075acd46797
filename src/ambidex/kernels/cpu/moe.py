"""Mixtures of experts over weights of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
        width = self._check_experts(x, gate_up, down)
        top_k = self._check_routing(x.shape[0], experts, weights)
        out = self._empty(x, width)

        def add(result: Tensor, order: int, start: int) -> None:
            self._native.scatter_rows(
                self._context,
                result.data_ptr(),
                order,
                start,
                weights.data_ptr(),
                out.data_ptr(),
                out.stride(0),
                self._rows(result),
                width,
                top_k,
            )

        self._through_experts(x, gate_up, down, experts, activation, out, add)
        return out

    def expert_outputs(
        self,
        x: Tensor,
        gate_up: Sequence[Weight | None],
        down: Sequence[Weight | None],
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        """``x`` [n, hidden] through the experts of each row: [n, top_k, hidden]; zero where
        ``gate_up`` and ``down`` hold None for an expert. See :meth:`moe` for the rest."""
        width = self._check_experts(x, gate_up, down)
        top_k = self._check_routing(x.shape[0], experts)
        out = self._empty(x, top_k, width)

        def put(result: Tensor, order: int, start: int) -> None:
            self._native.spread_rows(
                self._context,
                result.data_ptr(),
                order,
                start,
                out.data_ptr(),
                self._rows(result),
                width,
            )

        self._through_experts(x, gate_up, down, experts, activation, out, put)
        return out

    def combine_experts(self, parts: Sequence[Tensor], weights: Tensor, experts: Tensor) -> Tensor:
        """The sum that :meth:`moe` gives [n, hidden], of what :meth:`expert_outputs` gave.

        ``parts`` [n, top_k, hidden] each: a choice's result is in one of them, and the others are
        zero there. ``weights`` float32 and ``experts`` int64 are [n, top_k].
        """
        most = int(self._native.MAX_PARTS)
        if not 1 <= len(parts) <= most:
            raise KernelError(f"{len(parts)} parts cannot be combined: from 1 to {most} can.")
        shape = parts[0].shape
        for part in parts:
            if (
                part.device.type != "cpu"
                or part.dtype is not torch.float32
                or part.dim() != 3
                or part.shape != shape
                or not part.is_contiguous()
            ):
                raise KernelError(
                    f"A part is {part.dtype} {list(part.shape)} on {part.device}, and must be "
                    f"float32 [n, top_k, hidden] as the first, {list(shape)}, contiguous, on the "
                    "CPU."
                )
        top_k = self._check_routing(shape[0], experts, weights)
        if top_k != shape[1]:
            raise KernelError(f"There are {shape[1]} results a row, and {top_k} experts.")
        out = self._empty(parts[0], shape[2])
        self._native.combine_experts(
            self._context,
            [part.data_ptr() for part in parts],
            weights.data_ptr(),
            experts.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            self._rows(parts[0]),
            shape[2],
            top_k,
        )
        return out

    def _through_experts(
        self,
        x: Tensor,
        gate_up: Sequence[Weight | None],
        down: Sequence[Weight | None],
        experts: Tensor,
        activation: str,
        out: Tensor,
        take: Callable[[Tensor, int, int], None],
    ) -> None:
        """Clear ``out`` [n, ..., width], and give ``take`` each expert's results [its rows, width],
        by rising expert; with the addresses of the choices sorted by expert, and of where in them
        this expert's begin."""
        num_experts, top_k, width = len(gate_up), experts.shape[1], out.shape[-1]
        if self._rows(x) > 0:
            least, most = (int(value) for value in experts.aminmax())
            if least < 0 or most >= num_experts:
                wrong = least if least < 0 else most
                raise KernelError(f"there is no expert {wrong}; there are {num_experts}.")
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
            self._rows(x),
        )
        # Between the call above and those that its counts may leave out there has to be another.
        size = math.prod(out.shape[1:])
        self._native.clear_rows(self._context, out.data_ptr(), out.stride(0), self._rows(x), size)
        for expert, count in enumerate(self._expert_counts(x, places[num_experts:])):
            first, second = gate_up[expert], down[expert]
            if count == 0 or first is None or second is None:
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
            hidden = self.gated_linear(gathered, first, activation)
            result = self.linear(hidden, second)
            if result.shape[1] != width:
                raise KernelError(f"Expert {expert} gives rows of {result.shape[1]}, not {width}.")
            take(result, order.data_ptr(), start)
        self._end_counted()

    def _expert_counts(self, x: Tensor, counts: Tensor) -> list[int]:
        """Rows of each expert; while recording, the most that there can be."""
        return [int(count) for count in counts.tolist()]

    def _counted(self, x: Tensor, count: int, address: int) -> Tensor:
        """Memory for ``count`` rows as wide as those of ``x``. While recording, ``address`` is
        that of their number, and calls are left out where it is zero."""
        return torch.empty((count, x.shape[1]), dtype=torch.float32)

    def _end_counted(self) -> None:
        """Calls that follow are never left out."""

    def _check_experts(
        self, x: Tensor, gate_up: Sequence[Weight | None], down: Sequence[Weight | None]
    ) -> int:
        """The width of results; raises KernelError where experts do not have two matrices each."""
        self._check_rows(x, "x")
        if len(gate_up) != len(down):
            raise KernelError(f"There are {len(gate_up)} matrices gate_up, and {len(down)} down.")
        for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
            if (first is None) != (second is None):
                raise KernelError(f"Expert {expert} has one matrix here, and needs both or none.")
        return next((weight.shape[0] for weight in down if weight is not None), x.shape[1])

    def _check_routing(self, num_rows: int, experts: Tensor, weights: Tensor | None = None) -> int:
        """The number of experts a row; raises KernelError for what is no routing of that many."""
        checked = [(experts, torch.int64, "experts")]
        if weights is not None:
            checked.append((weights, torch.float32, "weights"))
        for tensor, dtype, what in checked:
            if (
                tensor.device.type != "cpu"
                or tensor.dtype is not dtype
                or tensor.dim() != 2
                or tensor.shape != experts.shape
                or tensor.shape[0] != num_rows
                or tensor.shape[1] < 1
                or not tensor.is_contiguous()
            ):
                raise KernelError(
                    f"{what} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, and must "
                    f"be {dtype} [{num_rows}, top_k], contiguous, on the CPU."
                )
        return int(experts.shape[1])
