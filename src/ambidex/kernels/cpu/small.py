"""Norms, activations and other operations that touch every number once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.base import NativeBase

_FUNCTIONS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "gelu_pytorch_tanh": 2,
    "gelu_new": 2,
    "gelu_fast": 2,
    "relu": 3,
}
_SOFTCAP = 4
#: The most that :meth:`SmallOps.top_k` finds.
MAX_TOP_K = 1024


class SmallOps(NativeBase):
    """See kernels/reference.py for what each computes."""

    #: The rows that the step points to: alive as long as the step may be read.
    _step_logit_rows: array[int] | None = None

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``x`` [n, width] or [n, heads, width]; the result is contiguous, of the same shape."""
        width = weight.shape[0]
        heads = x.shape[1] if x.dim() == 3 else 1
        flat = x if x.dim() == 2 else x.flatten(1)
        self._check_rows(flat, "x", heads * width)
        self._check_vector(weight, "weight", width)
        if residual is not None:
            self._check_beside(residual, x, heads * width, "residual")
        out = self._empty(x, *x.shape[1:])
        self._native.rms_norm(
            self._context,
            flat.data_ptr(),
            flat.stride(0),
            weight.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._rows(x),
            heads,
            width,
            eps,
            offset,
        )
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x`` + ``y``, both [n, width]."""
        self._check_rows(x, "x")
        self._check_beside(y, x, x.shape[1], "y")
        out = self._empty(x, x.shape[1])
        self._native.add(
            self._context,
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._rows(x),
            x.shape[1],
        )
        return out

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """``x`` [n, width] or [n, heads, width]; the result is contiguous, of the same shape."""
        width = x.shape[-1]
        heads = x.shape[1] if x.dim() == 3 else 1
        flat = x if x.dim() == 2 else x.flatten(1)
        self._check_rows(flat, "x", heads * width)
        for vector, what in ((weight, "weight"), (bias, "bias")):
            if vector is not None:
                self._check_vector(vector, what, width)
        out = self._empty(x, *x.shape[1:])
        self._native.layer_norm(
            self._context,
            flat.data_ptr(),
            flat.stride(0),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            self._rows(x),
            heads,
            width,
            eps,
        )
        return out

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """``activation(x)`` of ``x`` [n, width]."""
        self._check_rows(x, "x")
        return self._apply(x, 0, x.shape[1], _function(activation), 0.0)

    def activate_and_multiply(self, gate_up: Tensor, activation: str) -> Tensor:
        """``activation(gate) * up`` of ``gate_up`` [n, 2 * width], gate first: [n, width]."""
        self._check_rows(gate_up, "gate_up")
        if gate_up.shape[1] % 2:
            raise KernelError(f"gate_up has rows of {gate_up.shape[1]}, which are no two halves.")
        width = gate_up.shape[1] // 2
        up = gate_up.data_ptr() + 4 * width
        return self._apply(gate_up, up, width, _function(activation), 0.0)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """``cap * tanh(x / cap)`` of ``x`` [n, width]."""
        self._check_rows(x, "x")
        return self._apply(x, 0, x.shape[1], _SOFTCAP, cap)

    def _apply(self, x: Tensor, up: int, width: int, function: int, cap: float) -> Tensor:
        out = self._empty(x, width)
        self._native.apply(
            self._context,
            x.data_ptr(),
            x.stride(0),
            up,
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._rows(x),
            width,
            function,
            cap,
        )
        return out

    def take_logit_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Rows ``rows`` of ``x`` [n, width]: [len(rows), width]. While recording, the rows are
        the step's."""
        self._check_rows(x, "x")
        out, code = self._logit_rows_out(x, rows, x.shape[1])
        if code >= 0:
            if len(rows) and not 0 <= min(rows) <= max(rows) < x.shape[0]:
                raise KernelError(
                    f"Rows {min(rows)} to {max(rows)} are asked for; x has {x.shape[0]}."
                )
            self.set_logit_rows(rows)
        self._native.take_rows(
            self._context,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._rows(x),
            code,
            x.shape[1],
        )
        return out

    def set_logit_rows(self, rows: Sequence[int]) -> None:
        """Which rows of this step have logits, for the calls that follow and what is replayed."""
        taken = array("i", rows)
        self._context.set_logit_rows(len(taken), taken.buffer_info()[0])
        # Native code reads it later.
        self._step_logit_rows = taken

    def position_rows(self, table: Tensor, positions: Tensor) -> Tensor:
        """Rows ``positions`` [n] int64 of ``table`` [m, width] float32: [n, width]; NaN for a
        position that has no row. While recording, the positions are the step's."""
        self._check_rows(table, "table")
        self._check_ids(positions, "positions")
        out = self._empty(positions, table.shape[1])
        rows = self._rows(positions)
        self._native.position_rows(
            self._context,
            table.data_ptr(),
            table.stride(0),
            table.shape[0],
            0 if rows < 0 else positions.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            rows,
            table.shape[1],
        )
        return out

    def _logit_rows_out(self, x: Tensor, rows: Sequence[int], width: int) -> tuple[Tensor, int]:
        """Memory for those rows, and their number as native code is told."""
        if self._rows(x) < 0:
            return self._empty(x, width), int(self._native.ROWS_LOGITS)
        return torch.empty((len(rows), width), dtype=torch.float32), len(rows)

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each row's largest number, the lowest of equals, and whether the row is
        finite: of ``logits`` [n, vocab], [n] int64 and [n] bool.

        The column of a row that is not finite means nothing.
        """
        self._check_rows(logits, "logits")
        num_rows, width = logits.shape
        if width == 0:
            raise KernelError("logits has no columns.")
        ids = torch.empty(num_rows, dtype=torch.int64)
        is_finite = torch.empty(num_rows, dtype=torch.bool)
        self._native.greedy(
            self._context,
            logits.data_ptr(),
            logits.stride(0),
            self._rows(logits),
            num_rows,
            width,
            ids.data_ptr(),
            is_finite.data_ptr(),
        )
        return ids, is_finite

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` largest of each row of ``logits`` [n, vocab] and their columns, falling, lower
        columns first among equals: [n, k] float32 and [n, k] int64. NaN is largest."""
        self._check_rows(logits, "logits")
        num_rows, width = logits.shape
        if not 1 <= k <= min(width, MAX_TOP_K):
            raise KernelError(
                f"top_k of {k} is asked for; 1 to {min(width, MAX_TOP_K)} can be found."
            )
        values = torch.empty((num_rows, k), dtype=torch.float32)
        ids = torch.empty((num_rows, k), dtype=torch.int64)
        self._native.top_k(
            self._context,
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            width,
            k,
            values.data_ptr(),
            ids.data_ptr(),
        )
        return values, ids


def _function(activation: str) -> int:
    if activation not in _FUNCTIONS:
        raise KernelError(
            f"The activation {activation!r} is unknown; known are {', '.join(_FUNCTIONS)}."
        )
    return _FUNCTIONS[activation]
