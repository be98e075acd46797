"""What low-bit matrices will take in memory, from their form alone: no torch, for planning."""

from __future__ import annotations

from dataclasses import dataclass

#: The native layout: panels of rows, each a whole number of cache lines, of columns in whole
#: vectors.
PANEL_ROWS = 16
COLUMN_UNIT = 32
LINE_BYTES = 64
SUPER_GROUP = 256
#: A codebook's entries, as numbers and as whole numbers, up to the end of a line.
CODEBOOK_BYTES = 128


@dataclass(frozen=True, slots=True)
class Form:
    """How one matrix is quantised; see ``kernels.quantized.Quantized``."""

    bits: int
    #: Columns a scale; 0: a whole row.
    group: int
    #: Bytes a group: scales (or their codes) and what stands for zero (minima, codes of them, or
    #: integers).
    scale_bytes: int = 2
    zero_bytes: int = 0
    #: Bytes every 256 columns: super-scales and super-minima.
    super_bytes: int = 0
    #: Columns come in an order of their own: 4 bytes a column, once.
    is_permuted: bool = False
    #: Codes stand for entries of a table, which the matrix has once.
    has_codebook: bool = False

    def fixed_bytes(self, columns: int) -> int:
        """Of :meth:`num_bytes`, what every part of the matrix has, however few its rows are."""
        order = 4 * columns if self.is_permuted else 0
        return order + (CODEBOOK_BYTES if self.has_codebook else 0)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of ``rows`` x ``columns`` weights in the native layout."""
        wide = -(-columns // COLUMN_UNIT) * COLUMN_UNIT
        groups = -(-wide // self.group) if self.group else 1
        row = wide * self.bits // 8 + groups * (self.scale_bytes + self.zero_bytes)
        row += -(-wide // SUPER_GROUP) * self.super_bytes
        panel = -(-PANEL_ROWS * row // LINE_BYTES) * LINE_BYTES
        return -(-rows // PANEL_ROWS) * panel + self.fixed_bytes(columns)


#: GGUF types that are kept at their own bits (two and three bits become four).
GGUF_FORMS: dict[str, Form] = {
    "Q4_0": Form(4, 32),
    "Q4_1": Form(4, 32, zero_bytes=2),
    "Q5_0": Form(5, 32),
    "Q5_1": Form(5, 32, zero_bytes=2),
    "Q8_0": Form(8, 32),
    "Q2_K": Form(4, 16, scale_bytes=1, zero_bytes=1, super_bytes=4),
    "Q3_K": Form(4, 16, scale_bytes=1, super_bytes=2),
    "Q4_K": Form(4, 32, scale_bytes=1, zero_bytes=1, super_bytes=4),
    "Q5_K": Form(5, 32, scale_bytes=1, zero_bytes=1, super_bytes=4),
    "Q6_K": Form(6, 16, scale_bytes=1, super_bytes=2),
    "IQ4_NL": Form(4, 32, has_codebook=True),
    "MXFP4": Form(4, 32, scale_bytes=4, has_codebook=True),
}

#: ``--quantization`` -> the form that plain numbers get while they are loaded (``on_load.py``).
ON_LOAD_FORMS: dict[str, Form] = {"int8": Form(8, 32), "int4": Form(4, 32, zero_bytes=2)}

#: Columns that may share a scale, as in ``kernels.quantized``.
GROUPS = (16, 32, 64, 128)


def split_group(group: int, columns: int) -> tuple[int, int] | None:
    """``(group, repeats)``: the group of a form, and how often each of the file's scales comes in
    a row; (0, 1) where a whole row shares one. None where no form fits."""
    if group < 1 or columns % group:
        return None
    if group in GROUPS:
        return group, 1
    if group == columns:
        return 0, 1
    largest = GROUPS[-1]
    return (largest, group // largest) if group % largest == 0 else None
