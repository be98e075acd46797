"""Products with weights that are plain numbers, and rows out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.base import NativeBase

#: Rows of a weight that lie interleaved; a weight may be cut at multiples of this.
PANEL_ROWS = 16

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_GATES = {
    "silu": 1,
    "swish": 1,
    "gelu_tanh": 2,
    "gelu_pytorch_tanh": 2,
    "gelu_new": 2,
    "gelu_fast": 2,
    "relu": 3,
}


class FloatWeight:
    """A matrix [out, in] of plain numbers in panels of 16 rows: [panel][in][16]."""

    __slots__ = ("panels", "shape")

    def __init__(self, panels: Tensor, num_out: int) -> None:
        self.panels = panels  # [panels, in, 16]
        self.shape = (num_out, panels.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    @property
    def num_bytes(self) -> int:
        return self.panels.numel() * self.panels.element_size()

    def moved(self, move: Callable[[Tensor], Tensor]) -> FloatWeight:
        """The same matrix over what ``move`` gives for its memory."""
        return FloatWeight(move(self.panels), self.shape[0])

    def gather(
        self, ranges: Sequence[tuple[int, int]], store: Callable[[list[Tensor]], Tensor]
    ) -> FloatWeight:
        """Those rows, one range behind the other, as ``rows`` cuts them; ``store`` copies pieces
        of bytes, one behind the other, to where they shall lie."""
        parts = [self.rows(start, end) for start, end in ranges]
        pieces = [part.panels.flatten().view(torch.uint8) for part in parts]
        panels = store(pieces).view(self.dtype).view(-1, *self.panels.shape[1:])
        return FloatWeight(panels, sum(part.shape[0] for part in parts))

    def rows(self, start: int, end: int) -> FloatWeight:
        """Rows ``start`` to ``end`` in the same memory. Both are multiples of 16, or the end."""
        num_out = self.shape[0]
        if not 0 <= start <= end <= num_out:
            raise KernelError(f"Rows {start} to {end} are not in a weight of {num_out} rows.")
        if start % PANEL_ROWS or (end % PANEL_ROWS and end != num_out):
            raise KernelError(f"A weight cannot be cut at rows {start} and {end}: not by 16.")
        return FloatWeight(self.panels[start // PANEL_ROWS : -(-end // PANEL_ROWS)], end - start)


class FloatLinearOps(NativeBase):
    """See kernels/reference.py for what each computes."""

    def empty_float(self, shape: tuple[int, int], dtype: torch.dtype) -> FloatWeight:
        """Memory for a matrix [out, in] of ``dtype``, to be packed into."""
        num_out, num_in = shape
        num_panels = -(-num_out // PANEL_ROWS)
        panel_bytes = PANEL_ROWS * num_in * dtype.itemsize
        memory = self._weight_memory.take(num_panels * panel_bytes)
        self._placer.place(memory.data_ptr(), num_panels, panel_bytes)
        return FloatWeight(memory.view(dtype).view(num_panels, num_in, PANEL_ROWS), num_out)

    def pack_float(self, weight: Tensor, made: FloatWeight | None = None) -> FloatWeight:
        """A float32, float16 or bfloat16 ``weight`` [out, in], rows contiguous, in panels: those of
        ``made``, of the same shape and type, if given."""
        if weight.device.type != "cpu" or weight.dim() != 2 or weight.dtype not in _TYPES:
            raise KernelError(
                f"A weight is {weight.dtype} {list(weight.shape)} on {weight.device}; it must be "
                "a float32, float16 or bfloat16 matrix on the CPU."
            )
        num_out, num_in = weight.shape
        if num_in > 1 and weight.stride(1) != 1:
            raise KernelError("A weight's rows are not contiguous, so it cannot be packed.")
        if made is None:
            made = self.empty_float((num_out, num_in), weight.dtype)
        elif made.shape != (num_out, num_in) or made.dtype is not weight.dtype:
            raise KernelError(
                f"A weight is {weight.dtype} [{num_out}, {num_in}], and is to be packed into "
                f"memory for {made.dtype} {list(made.shape)}."
            )
        panels = made.panels
        self._native.pack_float(
            self._context,
            weight.data_ptr(),
            weight.stride(0) * weight.element_size(),
            panels.data_ptr(),
            num_out,
            num_in,
            _TYPES[weight.dtype],
        )
        return made

    def linear_float(
        self,
        x: Tensor,
        weight: FloatWeight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``x`` [n, in] times ``weight`` [out, in] transposed, plus ``bias`` [out], plus
        ``residual`` [n, out]: [n, out], written to ``out`` if given."""
        if residual is not None:
            self._check_rows(residual, "residual", weight.shape[0])
            if residual.shape[0] != x.shape[0]:
                raise KernelError(f"{residual.shape[0]} rows cannot be added to {x.shape[0]}.")
        return self._product_float(x, weight, bias, residual, weight.shape[0], 0, out)

    def gated_linear_float(
        self, x: Tensor, weight: FloatWeight, activation: str, bias: Tensor | None = None
    ) -> Tensor | None:
        """``activation(gate) * up`` [n, width] where ``weight`` [2 * width, in] has the gate's
        rows first; None where that is not one kernel."""
        num_out = weight.shape[0]
        gate = _GATES.get(activation)
        if gate is None or num_out % (2 * PANEL_ROWS):
            return None
        return self._product_float(x, weight, bias, None, num_out // 2, gate)

    def _product_float(
        self,
        x: Tensor,
        weight: FloatWeight,
        bias: Tensor | None,
        residual: Tensor | None,
        width: int,
        gate: int,
        out: Tensor | None = None,
    ) -> Tensor:
        num_out, num_in = weight.shape
        self._check_rows(x, "x", num_in)
        if bias is not None:
            self._check_vector(bias, "bias", num_out)
        if out is None:
            out = self._empty(x, width)
        else:
            self._check_beside(out, x, width)
        self._native.linear_float(
            self._context,
            x.data_ptr(),
            x.stride(0),
            weight.panels.data_ptr(),
            num_out,
            num_in,
            _TYPES[weight.panels.dtype],
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._rows(x),
            gate,
        )
        return out

    def embedding_float(self, token_ids: Tensor, weight: FloatWeight, scale: float = 1.0) -> Tensor:
        """Rows ``token_ids`` [n] int64 of ``weight`` [vocab, width], times ``scale``: [n, width].

        An id that is no row gives NaN. While recording, the ids are the step's.
        """
        self._check_ids(token_ids)
        num_out, width = weight.shape
        out = self._empty(token_ids, width)
        rows = self._rows(token_ids)
        self._native.embedding_float(
            self._context,
            token_ids.data_ptr() if rows >= 0 else 0,
            weight.panels.data_ptr(),
            num_out,
            width,
            _TYPES[weight.panels.dtype],
            out.data_ptr(),
            out.stride(0),
            rows,
            scale,
        )
        return out
