"""What an attention kernel must know of a step, the same for every kernel table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Attention reduces over tiles of this many tokens at absolute positions, on every device.
TILE = 64

#: Row counts of products are padded to a multiple of this: below it, the bits of one row of a
#: product depend on how many rows there are.
ROW_PAD = 8

#: Column counts (rows of a weight) are, too; a weight may be cut at multiples of this, too.
COLUMN_PAD = 16

#: Output columns of one product of a batch of them.
PANEL = 64


def padded(num_rows: int, multiple: int = ROW_PAD) -> int:
    """``num_rows`` rounded up to a ``multiple``."""
    return -(-num_rows // multiple) * multiple


@dataclass(slots=True)
class AttentionMetadata:
    """One KV group's part in a step.

    Sequence ``i`` has query rows ``query_starts[i] .. query_starts[i+1]-1`` of the batch, at
    positions ``context_lens[i]-n .. context_lens[i]-1``. Sequences with one query row come first,
    by falling context length; that helps kernels, and changes no result.
    """

    block_size: int
    num_blocks: int
    window: int | None
    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    #: Index of the KV group.
    group: int = 0
    #: What a kernel table derives from the above once a step and uses in every layer.
    derived: dict[str, Any] = field(default_factory=dict)
