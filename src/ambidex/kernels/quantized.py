"""One low-bit matrix, whatever file format it came from: codes, scales, zeros.

This is the plain form, one byte a code. Readers in ``quant/`` make it, one tensor at a time;
kernel tables turn it into a layout of their own and keep only that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ambidex.errors import InvalidModelError

BITS = (4, 5, 6, 8)
#: Columns that share a scale; a whole row may, too.
GROUPS = (16, 32, 64, 128)
#: Columns that share a super-scale.
SUPER_GROUP = 256


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [rows, columns] whose value in row r, column c, group g = c // group is

    * ``scale[r, g] * (code[r, c] - zero)``, with ``zero`` one number or ``zeros[r, g]``; or
    * ``scale[r, g] * code[r, c] + minimum[r, g]``; or
    * ``scale[r, g] * codebook[code[r, c]]``.

    Scales and minima are given as they are, or as a whole number times a super-scale of 256
    columns: ``scale = scale_codes[r, g] * super_scale[r, c // 256]`` and
    ``minimum = -minimum_codes[r, g] * super_minimum[r, c // 256]``.
    """

    name: str
    bits: int
    #: Columns a group; the number of columns where a row has one scale. The last group of a row
    #: may be shorter where the columns are not a multiple of it.
    group: int
    #: uint8 [rows, columns], below 2^bits.
    codes: Tensor
    #: float16 or float32 [rows, groups]; None where there are scale codes.
    scale: Tensor | None = None
    #: int8 or uint8 [rows, groups].
    scale_codes: Tensor | None = None
    #: float16 [rows, super-groups].
    super_scale: Tensor | None = None
    #: The code that stands for zero, the same everywhere.
    zero: int = 0
    #: uint8 [rows, groups]: the code that stands for zero.
    zeros: Tensor | None = None
    #: float16 or float32 [rows, groups].
    minimum: Tensor | None = None
    #: uint8 [rows, groups].
    minimum_codes: Tensor | None = None
    #: float16 [rows, super-groups].
    super_minimum: Tensor | None = None
    #: float32 [16], for 4 bits.
    codebook: Tensor | None = None
    #: int32 [columns]: the input that column c multiplies; None: input c.
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        self._check()

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    @property
    def num_groups(self) -> int:
        return -(-self.codes.shape[1] // self.group)

    def _check(self) -> None:
        """Raises InvalidModelError where lengths or types do not belong together."""
        if self.codes.dim() != 2 or self.codes.dtype is not torch.uint8:
            raise InvalidModelError(f"{self.name}: its codes are no matrix of bytes.")
        rows, columns = self.codes.shape
        if self.bits not in BITS:
            raise InvalidModelError(
                f"{self.name} has {self.bits} bits a weight; supported are "
                f"{', '.join(map(str, BITS))}."
            )
        if self.group not in GROUPS and self.group != columns:
            raise InvalidModelError(
                f"{self.name} has groups of {self.group} columns; supported are "
                f"{', '.join(map(str, GROUPS))} and a whole row of {columns}."
            )
        supers = -(-columns // SUPER_GROUP)
        floats, codes8 = (torch.float16, torch.float32), (torch.int8, torch.uint8)
        byte, half = (torch.uint8,), (torch.float16,)
        for label, tensor, width, dtypes in (
            ("scale", self.scale, self.num_groups, floats),
            ("scale_codes", self.scale_codes, self.num_groups, codes8),
            ("super_scale", self.super_scale, supers, half),
            ("zeros", self.zeros, self.num_groups, byte),
            ("minimum", self.minimum, self.num_groups, floats),
            ("minimum_codes", self.minimum_codes, self.num_groups, byte),
            ("super_minimum", self.super_minimum, supers, half),
        ):
            if tensor is None:
                continue
            if tuple(tensor.shape) != (rows, width) or tensor.dtype not in dtypes:
                raise InvalidModelError(
                    f"{self.name}: its {label} is {tensor.dtype} {list(tensor.shape)}; its "
                    f"{rows} rows of {columns} columns ask for [{rows}, {width}]."
                )
        coded = self.scale_codes is not None and self.super_scale is not None
        if (self.scale is None) == (not coded):
            raise InvalidModelError(f"{self.name} needs scales, or scale codes and super-scales.")
        if (self.minimum_codes is None) != (self.super_minimum is None):
            raise InvalidModelError(f"{self.name}: minimum codes and super-minima go together.")
        offsets = [self.zeros, self.minimum, self.minimum_codes, self.codebook]
        if sum(item is not None for item in offsets) > 1 or (
            self.zero and any(item is not None for item in offsets)
        ):
            raise InvalidModelError(f"{self.name} has more than one kind of zero.")
        if self.codebook is not None and (self.bits != 4 or self.codebook.shape != (16,)):
            raise InvalidModelError(f"{self.name}: a codebook has 16 entries, for 4 bits.")
        if self.permutation is not None and tuple(self.permutation.shape) != (columns,):
            raise InvalidModelError(
                f"{self.name}: its permutation has {self.permutation.numel()} entries for "
                f"{columns} columns."
            )

    def _by_column(self, values: Tensor, group: int) -> Tensor:
        columns = self.codes.shape[1]
        return values.float().repeat_interleave(group, 1)[:, :columns]

    def dequantise(self) -> Tensor:
        """The matrix in float32, columns in the order of the input: the definition."""
        if self.scale is not None:
            scale = self._by_column(self.scale, self.group)
        else:
            assert self.scale_codes is not None and self.super_scale is not None
            scale = self._by_column(self.scale_codes, self.group)
            scale = scale * self._by_column(self.super_scale, SUPER_GROUP)
        codes = self.codes.float() - self.zero
        if self.codebook is not None:
            codes = self.codebook[self.codes.long()]
        if self.zeros is not None:
            codes = codes - self._by_column(self.zeros, self.group)
        values = scale * codes
        if self.minimum is not None:
            values = values + self._by_column(self.minimum, self.group)
        if self.minimum_codes is not None and self.super_minimum is not None:
            minimum = self._by_column(self.minimum_codes, self.group)
            values = values - minimum * self._by_column(self.super_minimum, SUPER_GROUP)
        if self.permutation is not None:
            ordered = torch.empty_like(values)
            ordered[:, self.permutation.long()] = values
            values = ordered
        return values

    def rows(self, start: int, end: int) -> Quantized:
        """Rows ``start`` to ``end`` alone, sharing memory."""
        cut: dict[str, Any] = {
            field: None if value is None else value[start:end]
            for field in BY_ROW
            for value in (getattr(self, field),)
        }
        return Quantized(
            self.name,
            self.bits,
            self.group,
            zero=self.zero,
            codebook=self.codebook,
            permutation=self.permutation,
            **cut,
        )


#: What has a row for each of the matrix.
BY_ROW = (
    "codes",
    "scale",
    "scale_codes",
    "super_scale",
    "zeros",
    "minimum",
    "minimum_codes",
    "super_minimum",
)


def are_of_one_form(parts: Sequence[Quantized]) -> bool:
    """Whether the rows of all ``parts`` can be one matrix."""
    first = parts[0]
    for part in parts[1:]:
        same = (
            part.bits == first.bits
            and part.group == first.group
            and part.shape[1] == first.shape[1]
            and part.zero == first.zero
            and _same(part.codebook, first.codebook)
            and _same(part.permutation, first.permutation)
        )
        for field in BY_ROW:
            a, b = getattr(part, field), getattr(first, field)
            same = same and (a is None) == (b is None) and (a is None or a.dtype == b.dtype)
        if not same:
            return False
    return True


def concatenate(parts: Sequence[Quantized]) -> Quantized:
    """One matrix of the rows of all ``parts``, which are of one form."""
    first = parts[0]
    joined: dict[str, Any] = {
        field: None
        if getattr(first, field) is None
        else torch.cat([getattr(part, field) for part in parts])
        for field in BY_ROW
    }
    return Quantized(
        first.name,
        first.bits,
        first.group,
        zero=first.zero,
        codebook=first.codebook,
        permutation=first.permutation,
        **joined,
    )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
