"""How the reference attention goes through a step: which keys are gathered together, and which
query rows share a product. Made once a step, used by every layer of a KV group."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ambidex.kernels.metadata import ROW_PAD, TILE, AttentionMetadata, padded

# Scores of one attention call are cut so that they stay in the cache: elements.
_MAX_SCORES = 1 << 20
# Keys that decoding sequences gather at a time: tokens.
_MAX_GATHERED_KEYS = 1 << 15


class Block:
    """Consecutive query rows of one part that are computed by one product."""

    __slots__ = ("first_row", "hidden", "num_rows", "num_tiles")

    def __init__(self, first_row: int, num_rows: int, num_tiles: int, hidden: Tensor) -> None:
        self.first_row = first_row
        self.num_rows = num_rows
        self.num_tiles = num_tiles
        #: [sequences, rows, 1, keys] bool: True where a query must not see a key.
        self.hidden = hidden

    @staticmethod
    def padded_rows(rows_each: int, group: int) -> int:
        return padded(rows_each * group)


class Part:
    """Sequences whose keys are gathered together: many that decode, or one that prefills."""

    __slots__ = ("_gathered", "_rows", "blocks", "num_sequences", "num_tiles", "units")

    def __init__(
        self, num_sequences: int, num_tiles: int, units: Tensor, blocks: list[Block]
    ) -> None:
        self.num_sequences = num_sequences
        self.num_tiles = num_tiles
        #: [sequences * tiles * 64 / unit] int64: where their keys and values lie in the cache.
        self.units = units
        self.blocks = blocks
        self._gathered: dict[int, Tensor] = {}
        #: ``units`` of every head, as rows of a layer's cache.
        self._rows: Tensor | None = None

    def gather(self, number: int, store: Tensor) -> Tensor:
        """This part's units of ``store`` [kv_heads, units, width]. The memory is reused by the next
        layer's call with the same ``number``: fresh memory costs more than the copy."""
        kv_heads, count, width = store.shape
        if self._rows is None:
            heads = torch.arange(kv_heads)[:, None] * count
            self._rows = (heads + self.units).view(-1)
        out = self._gathered.get(number)
        if out is None:
            out = self._gathered[number] = store.new_empty(self._rows.shape[0], width)
        return torch.index_select(store.view(-1, width), 0, self._rows, out=out)


def make_plan(metadata: AttentionMetadata, num_heads: int) -> list[Part]:
    starts, lens = metadata.query_starts, metadata.context_lens
    counts = [end - start for start, end in itertools.pairwise(starts)]
    parts: list[Part] = []
    index = 0
    while index < len(counts) and counts[index] == 1:
        # Decodes whose lengths are within a factor of two share one product; the shorter ones
        # read the zero block in place of the tiles they lack.
        most = index + max(1, _MAX_GATHERED_KEYS // padded(lens[index]))
        end = index
        while (
            end < min(most, len(counts))
            and counts[end] == 1
            and lens[end] * 2 + 2 * TILE >= lens[index]
        ):
            end += 1
        parts.append(_decode_part(metadata, index, end))
        index = end
    for sequence in range(index, len(counts)):
        parts.append(_prefill_part(metadata, sequence, counts[sequence], num_heads))
    return parts


def _first_tile(position: int, window: int | None) -> int:
    """The first tile that a query at ``position`` sees a key of."""
    return 0 if window is None else max(0, position - window + 1) // TILE


def unit_size(block_size: int) -> int:
    """Tokens that are gathered together: a block, or a tile's worth of a larger one."""
    return min(block_size, TILE)


def _units(
    metadata: AttentionMetadata, sequences: slice, firsts: list[int], num_tiles: int
) -> Tensor:
    """Which units of the cache hold ``num_tiles`` tiles of each sequence, from its first tile on:
    [sequences * units]. The zero block stands for what a sequence does not have."""
    size, unit = metadata.block_size, unit_size(metadata.block_size)
    tables = metadata.block_tables[sequences]
    # All sequences at once: a step of 64 decodes must not cost 64 small tensor operations.
    # A column of -1, as of blocks that left the window, catches what lies past a table's end.
    width = max(len(table) for table in tables) + 1
    table = torch.tensor([[*row, *([-1] * (width - len(row)))] for row in tables])
    first = torch.tensor(firsts)[:, None] * TILE
    positions = first + torch.arange(0, num_tiles * TILE, unit)
    blocks = table.gather(1, (positions // size).clamp_(max=width - 1))
    blocks = torch.where(blocks < 0, metadata.num_blocks, blocks)
    return (blocks * (size // unit) + positions % size // unit).view(-1)


def _decode_part(metadata: AttentionMetadata, begin: int, end: int) -> Part:
    lens = metadata.context_lens[begin:end]
    firsts = [_first_tile(length - 1, metadata.window) for length in lens]
    num_tiles = max(-(-length // TILE) - first for length, first in zip(lens, firsts, strict=True))
    num, keys = len(lens), num_tiles * TILE
    lengths = torch.tensor(lens)[:, None]
    positions = torch.tensor(firsts)[:, None] * TILE + torch.arange(keys)
    hidden = positions >= lengths
    if metadata.window is not None:
        hidden |= positions <= lengths - 1 - metadata.window
    units = _units(metadata, slice(begin, end), firsts, num_tiles)
    row = metadata.query_starts[begin]
    block = Block(row, num, num_tiles, hidden.view(num, 1, 1, keys))
    return Part(num, num_tiles, units, [block])


def _prefill_part(
    metadata: AttentionMetadata, sequence: int, num_rows: int, num_heads: int
) -> Part:
    length = metadata.context_lens[sequence]
    start = length - num_rows
    first = _first_tile(start, metadata.window)
    num_tiles = -(-length // TILE) - first
    units = _units(metadata, slice(sequence, sequence + 1), [first], num_tiles)
    row = metadata.query_starts[sequence]
    positions = torch.arange(first * TILE, (first + num_tiles) * TILE)
    step = max(ROW_PAD, _MAX_SCORES // (num_heads * num_tiles * TILE) // ROW_PAD * ROW_PAD)
    blocks = []
    for offset in range(0, num_rows, step):
        count = min(step, num_rows - offset)
        # A causal block needs no keys after its last query.
        tiles = -(-(start + offset + count) // TILE) - first
        queries = torch.arange(start + offset, start + offset + count)[:, None]
        seen = positions[: tiles * TILE]
        hidden = seen > queries
        if metadata.window is not None:
            hidden |= seen <= queries - metadata.window
        blocks.append(Block(row + offset, count, tiles, hidden.view(1, count, 1, -1)))
    return Part(1, num_tiles, units, blocks)
