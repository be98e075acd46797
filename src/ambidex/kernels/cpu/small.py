"""Norms, activations and other operations that touch every number once."""

from __future__ import annotations

from torch import Tensor

from ambidex.kernels.cpu.base import NativeBase


class SmallOps(NativeBase):
    """See kernels/reference.py for what each computes."""

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
            self._check_rows(residual, "residual", heads * width)
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
        self._check_rows(y, "y", x.shape[1])
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
