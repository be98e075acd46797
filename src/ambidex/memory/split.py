"""Which rows of a split weight are copied, and which are computed where they lie."""

from __future__ import annotations

from ambidex.memory.weight_places import ROW_UNIT, Rates


def streamed_rows(
    num_tokens: int, num_rows: int, row_bytes: float, row_flops: float, rates: Rates
) -> int:
    """Of ``num_rows`` rows in the host's memory, those that are copied to the accelerator for a
    product with ``num_tokens`` rows; a multiple of 64, or all.

    While the host is held up by its own memory it computes all of them: copies would come out of
    the same memory. Beyond, both take as long as each other.
    """
    read_s = row_bytes / rates.host_bytes_per_s
    compute_s = num_tokens * row_flops / rates.host_flops
    if compute_s <= read_s:
        return 0
    copy_s = row_bytes / rates.link_bytes_per_s
    streamed = num_rows * compute_s / (compute_s + copy_s)
    return min(int(streamed / ROW_UNIT + 0.5) * ROW_UNIT, num_rows)
