"""Plain descriptions of paged KV: groups of layers, and the copies that policy asks for."""

from __future__ import annotations

from dataclasses import dataclass

#: Allowed numbers of tokens per block.
BLOCK_SIZES = (8, 16, 32, 64, 128)

#: An entry of a block table whose block was given back (it lies outside a sliding window).
NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table.

    ``window`` is the sliding window in tokens (a query at position p sees keys p-window+1..p),
    or None for full attention. ``bytes_per_token`` covers all layers of the group, keys and values.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy ``num_tokens`` tokens of one group between two pools; offsets are tokens in a block."""

    src_pool: str
    src_block: int
    src_offset: int
    dst_pool: str
    dst_block: int
    dst_offset: int
    num_tokens: int
    group: int
