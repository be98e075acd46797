"""Products with low-bit matrices that stay packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels.cpu.base import NativeBase
from ambidex.kernels.quantized import SUPER_GROUP, Quantized

#: Rows of a panel; matrices are cut at multiples of it.
PANEL_ROWS = 16

#: Activations that :meth:`QuantizedLinearOps.gated_linear_quantized` applies itself.
GATED_ACTIVATIONS = {"silu": "SILU", "gelu_tanh": "GELU_TANH", "relu": "RELU"}

# Panels and what lies before them begin at multiples of this many bytes.
_ALIGNMENT = 64
# Codebooks that are no whole numbers of 8 bits are held as ones of 16.
_LARGEST_TABLE_NUMBER = 32767


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A low-bit matrix in panels of 16 rows; see quantized_linear.h for the layout.

    The tensors are parts of one allocation.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    #: Native description of a panel.
    form: Any
    #: uint8 [panels * bytes of a panel].
    panels: Tensor
    #: uint8: the entries, and the same as whole numbers.
    codebook: Tensor | None
    #: int32 [in].
    permutation: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of its panels, codebook and permutation."""
        parts = (self.panels, self.codebook, self.permutation)
        return sum(part.nbytes for part in parts if part is not None)

    def addresses(self) -> tuple[int, int, int]:
        """Of the panels, the codebook and the permutation; 0 where there is none."""
        return self.panels.data_ptr(), _address(self.codebook), _address(self.permutation)

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The same matrix over what ``move`` gives for each piece of its memory."""
        return replace(
            self,
            panels=move(self.panels),
            codebook=None if self.codebook is None else move(self.codebook),
            permutation=None if self.permutation is None else move(self.permutation),
        )

    def gather(
        self, ranges: Sequence[tuple[int, int]], store: Callable[[list[Tensor]], Tensor]
    ) -> PackedWeight:
        """Those rows, one range behind the other, as ``rows`` cuts them; ``store`` copies pieces
        of bytes, one behind the other, to where they shall lie."""
        parts = [self.rows(start, end) for start, end in ranges]
        num_rows = sum(part.shape[0] for part in parts)
        return PackedWeight(
            self.name,
            (num_rows, self.shape[1]),
            self.bits,
            self.form.with_rows(num_rows),
            store([part.panels for part in parts]),
            None if self.codebook is None else store([self.codebook]),
            None
            if self.permutation is None
            else store([self.permutation.view(torch.uint8)]).view(torch.int32),
        )

    def rows(self, start: int, end: int) -> PackedWeight:
        """Rows ``start`` to ``end`` alone, sharing memory.

        ``start`` is a multiple of 16, and so is ``end`` unless it is the last row. Raises
        KernelError where they are not.
        """
        rows, columns = self.shape
        if not 0 <= start <= end <= rows or start % PANEL_ROWS or (end % PANEL_ROWS and end < rows):
            raise KernelError(
                f"{self.name} has {rows} rows, in panels of {PANEL_ROWS}: rows {start} to {end} "
                "cannot be cut out."
            )
        form = self.form.with_rows(end - start)
        first = start // PANEL_ROWS * form.panel_bytes
        return PackedWeight(
            self.name,
            (end - start, columns),
            self.bits,
            form,
            self.panels[first : first + form.num_panels * form.panel_bytes],
            self.codebook,
            self.permutation,
        )


class QuantizedLinearOps(NativeBase):
    """Products with a :class:`PackedWeight`.

    Activations are quantised to 8 bits, per row and 32 columns (16 where that is asked for): each
    becomes the whole number, at most 127, nearest to it over ``scale``, the largest magnitude among
    them over 127. The sums of products are whole numbers and exact; those of each scale (or
    group's, if that is smaller) are scaled and added in float32, in the order of the columns. A
    row's bits depend on that row alone. A row that holds NaN or infinity gives NaN.
    """

    def pack_quantized(
        self, weight: Quantized, precise: bool = False, below: Sequence[Quantized] = ()
    ) -> PackedWeight:
        """``weight`` in panels, at the size of its form, and the rows of those ``below``, which are
        of the same form; all but the last are whole panels. ``precise``: activations that it is
        multiplied with get a scale per 16 rather than 32 columns, which takes longer where many
        rows share the weights. Raises KernelError."""
        parts = (weight, *below)
        rows, columns = sum(part.shape[0] for part in parts), weight.shape[1]
        if not columns:
            raise KernelError(f"{weight.name} has no columns.")
        kinds = self._native
        codebook = weight.codebook
        zero, unit = weight.zero, 1.0
        if codebook is not None:
            numbers, unit, bits = _whole_numbers(codebook)
            zero = 128 if bits == 8 else 32768
            code = kinds.CodeKind.TABLE8 if bits == 8 else kinds.CodeKind.TABLE16
        else:
            code = getattr(kinds.CodeKind, f"BITS{weight.bits}")
        scale = weight.scale if weight.scale is not None else weight.scale_codes
        assert scale is not None
        minimum = weight.minimum if weight.minimum is not None else weight.minimum_codes
        if weight.minimum_codes is not None:
            zero_kind = kinds.ZeroKind.MIN_CODES
        elif minimum is not None:
            half = minimum.dtype is torch.float16
            zero_kind = kinds.ZeroKind.MIN_F16 if half else kinds.ZeroKind.MIN_F32
        else:
            constant = weight.zeros is None
            zero_kind = kinds.ZeroKind.CONSTANT if constant else kinds.ZeroKind.CODES
        scale_name = {
            torch.float16: "F16",
            torch.float32: "F32",
            torch.int8: "I8",
            torch.uint8: "U8",
        }[scale.dtype]
        # A group that is the whole row has no shift of its own.
        group = weight.group if weight.num_groups > 1 or weight.group == 16 else 0
        scale_kind = getattr(kinds.ScaleKind, scale_name)
        # Groups of 16 are scaled apart anyway.
        fine = precise or group == 16
        form = kinds.PackedForm(rows, columns, code, group, scale_kind, zero_kind, zero, unit, fine)

        order_bytes = 0 if weight.permutation is None else _aligned(4 * columns)
        book_bytes = 0 if codebook is None else _aligned(kinds.CODEBOOK_BYTES)
        panel_bytes = form.num_panels * form.panel_bytes
        memory = self._weight_memory.take(panel_bytes + order_bytes + book_bytes)
        panels, book, order = memory.split([panel_bytes, book_bytes, order_bytes])
        permutation = None
        if weight.permutation is not None:
            _check_permutation(weight.name, weight.permutation, columns)
            permutation = order[: 4 * columns].view(torch.int32)
            permutation.copy_(weight.permutation)
        if codebook is not None:
            entries = codebook.float().contiguous().view(torch.uint8)
            low, high = numbers % 256, numbers // 256
            tables = torch.cat([entries, low.to(torch.uint8), high.to(torch.uint8)])
            book[: len(tables)] = tables

        self._placer.place(panels.data_ptr(), form.num_panels, form.panel_bytes)
        at = panels.data_ptr()
        for part in parts:
            self._pack_panels(part, form.with_rows(part.shape[0]), at)
            at += part.shape[0] // PANEL_ROWS * form.panel_bytes
        return PackedWeight(
            weight.name,
            (rows, columns),
            weight.bits,
            form,
            panels,
            None if codebook is None else book,
            permutation,
        )

    def _pack_panels(self, part: Quantized, form: Any, address: int) -> None:
        """Write the panels of ``part``, which has that form, to ``address``."""
        scale = part.scale if part.scale is not None else part.scale_codes
        zeros = next(
            (each for each in (part.zeros, part.minimum, part.minimum_codes) if each is not None),
            None,
        )
        sources = [
            None if tensor is None else _on_cpu(part.name, tensor)
            for tensor in (part.codes, scale, zeros, part.super_scale, part.super_minimum)
        ]
        self._native.pack_quantized(
            self._context,
            form,
            *(_address(tensor) for tensor in sources),
            part.num_groups,
            -(-part.shape[1] // SUPER_GROUP),
            address,
        )

    def linear_quantized(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``x`` [n, in] times ``weight`` [out, in] transposed, plus ``bias`` [out], plus
        ``residual`` [n, out]: [n, out], written to ``out`` if given. Raises KernelError."""
        width, columns = weight.shape
        self._check_rows(x, "x", columns)
        if bias is not None:
            self._check_vector(bias, "bias", width)
        if residual is not None:
            self._check_rows(residual, "residual", width)
            if residual.shape[0] != x.shape[0]:
                raise KernelError(
                    f"residual has {residual.shape[0]} rows, and must have {x.shape[0]}."
                )
        if out is None:
            out = self._empty(x, width)
        else:
            self._check_beside(out, x, width)
        self._native.linear_quantized(
            self._context,
            weight.form,
            *weight.addresses(),
            x.data_ptr(),
            x.stride(0),
            _address(bias),
            _address(residual),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            out.stride(0),
            self._rows(x),
            x.shape[0],
        )
        return out

    def gated_linear_quantized(
        self, x: Tensor, weight: PackedWeight, activation: str, bias: Tensor | None = None
    ) -> Tensor | None:
        """``activation(gate) * up`` [n, width], ``weight`` [2 * width, in] having the gate's rows
        first, as linear_quantized() and the activation give it.

        None, with nothing done, where the width is no multiple of 16 or the activation is not in
        ``GATED_ACTIVATIONS``. Raises KernelError.
        """
        rows, columns = weight.shape
        if rows % (2 * PANEL_ROWS) or activation not in GATED_ACTIVATIONS:
            return None
        self._check_rows(x, "x", columns)
        if bias is not None:
            self._check_vector(bias, "bias", rows)
        out = self._empty(x, rows // 2)
        self._native.gated_quantized(
            self._context,
            weight.form,
            *weight.addresses(),
            x.data_ptr(),
            x.stride(0),
            getattr(self._native.GatedActivation, GATED_ACTIVATIONS[activation]),
            _address(bias),
            out.data_ptr(),
            out.stride(0),
            self._rows(x),
            x.shape[0],
        )
        return out

    def embedding_quantized(
        self, token_ids: Tensor, weight: PackedWeight, scale: float = 1.0
    ) -> Tensor:
        """Rows ``token_ids`` [n] int64 of ``weight``, times ``scale``: [n, in], bit for bit those
        of ``Quantized.dequantise()``. NaN for an id that has no row. Raises KernelError."""
        self._check_ids(token_ids)
        out = self._empty(token_ids, weight.shape[1])
        rows = self._rows(token_ids)
        self._native.embedding_quantized(
            self._context,
            weight.form,
            *weight.addresses(),
            0 if rows < 0 else token_ids.data_ptr(),
            scale,
            out.data_ptr(),
            out.stride(0),
            rows,
        )
        return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _on_cpu(name: str, tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise KernelError(f"{name} is on {tensor.device}; the CPU's kernels cannot read it.")
    return tensor.contiguous()


def _check_permutation(name: str, permutation: Tensor, columns: int) -> None:
    order, _ = _on_cpu(name, permutation).long().sort()
    if not torch.equal(order, torch.arange(columns)):
        raise KernelError(f"{name}: its permutation does not hold each of {columns} columns once.")


def _whole_numbers(codebook: Tensor) -> tuple[Tensor, float, int]:
    """A codebook as ``unit * (numbers - offset)``: the numbers, the unit, and their bits (8 with
    offset 128, exact; or 16 with offset 32768, to the nearest)."""
    values = codebook.double()
    sizes = values.abs()
    smallest = sizes[sizes > 0].min().item() if bool((sizes > 0).any()) else 1.0
    for unit in (1.0, *(smallest / parts for parts in range(1, 17))):
        numbers = values / unit
        # The unit must be a float32, so that the product of both is the entry, exactly.
        whole = torch.equal(numbers.round() * torch.tensor(unit).float().double(), values)
        if whole and numbers.min() >= -128 and numbers.max() <= 127:
            return numbers.round().long() + 128, unit, 8
    unit = sizes.max().item() / _LARGEST_TABLE_NUMBER
    numbers = (values / unit).nan_to_num(0.0, 0.0, 0.0).round().clamp(-32767, 32767)
    return numbers.long() + 32768, unit, 16
