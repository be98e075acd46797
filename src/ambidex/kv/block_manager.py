"""Which blocks hold which request's KV: tables, prefix hits, reference counts. Policy only.

A request has one block table per KV group; entry ``i`` holds its tokens
``i*block_size .. (i+1)*block_size-1``. All tables of a request have the same length. In a sliding
group the entries that no later token can see are :data:`~ambidex.kv.block.NO_BLOCK`.

Two rules keep content right without any copying:

- **A known block is never written.** A block gets its hash only when it is full and the step that
  filled it is done, and prefix hits are whole blocks, so that new tokens always go to blocks with
  one holder and no hash.
- **A table handed out is never changed.** Tables are copy-on-write: where one grows or loses a
  block a new list takes its place. A lane's thread may read its own for as long as it likes, and
  ``is`` tells it whether a table has changed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ambidex.errors import OptionError
from ambidex.kv.block import BLOCK_SIZES, NO_BLOCK, KVGroup
from ambidex.kv.block_pool import BlockPool
from ambidex.request import Request


@dataclass(slots=True)
class _Tables:
    """What one request holds. Block ids below ``first_live[g]`` in table ``g`` are NO_BLOCK."""

    by_group: tuple[list[int], ...]
    first_live: list[int]
    #: Leading blocks whose content is known to the pools already.
    num_committed: int

    @property
    def num_blocks(self) -> int:
        return len(self.by_group[0])


class BlockManager:
    """Block tables of all requests over one pool per KV group.

    ``num_blocks`` gives each group's pool size, in blocks of ``block_size`` tokens. Requests are
    told apart by ``Request.sequence``. Not thread-safe: the engine thread owns it.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        assert groups, "a model has at least one KV group"
        assert len(groups) == len(num_blocks), "one pool size per KV group"
        if block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise OptionError(f"--block-size is {block_size}; it must be one of {sizes}.")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self._sliding = [
            (index, group.window) for index, group in enumerate(groups) if group.window is not None
        ]
        self._tables: dict[int, _Tables] = {}

    # -- views ------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Used blocks over all blocks, 0 to 1, of the fullest group. Cached blocks are not used."""
        return max(pool.num_used / pool.num_blocks for pool in self.pools)

    @property
    def num_evicted(self) -> int:
        return sum(pool.num_evicted for pool in self.pools)

    @property
    def num_available(self) -> tuple[int, ...]:
        """Blocks that can be had now, by group: free and cached ones."""
        return tuple(pool.num_available for pool in self.pools)

    def num_blocks_needed(
        self, num_tokens: int, max_step_tokens: int | None = None
    ) -> tuple[int, ...]:
        """The most blocks that a request holds at once while it grows to ``num_tokens`` tokens.

        One number a group. ``max_step_tokens`` bounds the tokens computed in one step; with it a
        sliding group needs only its window and one step, however long the request gets.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if not self._sliding or max_step_tokens is None:
            return (num_blocks,) * len(self.groups)
        needed = [num_blocks] * len(self.groups)
        for index, window in self._sliding:
            # The blocks that a span of so many tokens touches where it lies worst.
            span = window - 1 + max_step_tokens
            most = (span + self.block_size - 2) // self.block_size + 1
            needed[index] = min(num_blocks, most)
        return tuple(needed)

    def num_held(self, request: Request) -> tuple[int, ...]:
        """Blocks that the request holds now, by group."""
        tables = self._tables.get(request.sequence)
        if tables is None:
            return (0,) * len(self.groups)
        return tuple(tables.num_blocks - first for first in tables.first_live)

    def num_held_alone(self, request: Request) -> tuple[int, ...]:
        """Blocks that would become available if the request were freed, by group."""
        tables = self._tables.get(request.sequence)
        if tables is None:
            return (0,) * len(self.groups)
        return tuple(
            sum(pool.ref_count(block) == 1 for block in table[first:])
            for pool, table, first in zip(
                self.pools, tables.by_group, tables.first_live, strict=True
            )
        )

    def block_tables(self, request: Request) -> tuple[list[int], ...]:
        """One table a group. The lists are never changed afterwards; do not change them."""
        return self._tables[request.sequence].by_group

    def check(self) -> None:
        """Assert every invariant: of each pool, and that references equal table entries."""
        counts = [[0] * pool.num_blocks for pool in self.pools]
        for tables in self._tables.values():
            for group, table in enumerate(tables.by_group):
                assert len(table) == tables.num_blocks
                first = tables.first_live[group]
                assert all(block == NO_BLOCK for block in table[:first])
                for block in table[first:]:
                    counts[group][block] += 1
        for pool, expected in zip(self.pools, counts, strict=True):
            pool.check()
            assert all(pool.ref_count(block) == n for block, n in enumerate(expected))

    # -- prefix cache -----------------------------------------------------------------------

    def reads_cache(self, request: Request) -> bool:
        """Whether prefix hits are for this request: prompt log probabilities need every logit."""
        return self.enable_prefix_caching and request.params.prompt_logprobs is None

    def lookup(self, request: Request) -> int:
        """Leading tokens of a request without blocks whose KV is known, in whole blocks.

        It is the longest prefix that every group can serve, and always leaves one token: on a
        full hit the last block is computed again, since its last token's logits are needed and
        its known copy must not be written. Takes no references.
        """
        assert request.sequence not in self._tables, "look-up comes before allocation"
        if not self.reads_cache(request):
            return 0
        num_blocks = (request.num_tokens - 1) // self.block_size
        hashes = self._hashes(request, num_blocks)
        for pool, group in zip(self.pools, self.groups, strict=True):
            if group.window is None:
                find = pool.find
                num_blocks = next(
                    (i for i in range(num_blocks) if find(hashes[i]) is None), num_blocks
                )
        # A shorter hit may lack blocks in a group that could serve the longer one: repeat.
        settled = False
        while not settled:
            settled = True
            for index, window in self._sliding:
                hit = self._sliding_hit(self.pools[index], window, hashes, num_blocks)
                settled = settled and hit == num_blocks
                num_blocks = hit
        return num_blocks * self.block_size

    def num_hits_in_use(self, request: Request, num_cached_tokens: int) -> tuple[int, ...]:
        """Of a hit of this length, the blocks that others hold: they cost nothing, by group."""
        hits = self._hit_blocks(request, num_cached_tokens)
        return tuple(
            sum(pool.ref_count(block) > 0 for block in blocks)
            for pool, blocks in zip(self.pools, hits, strict=True)
        )

    def reset_prefix_cache(self) -> int:
        """Forget every known block; returns how many became free. Running requests go on."""
        return sum(pool.forget_cached() for pool in self.pools)

    # -- requests ---------------------------------------------------------------------------

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Make sure of blocks for ``num_new_tokens`` after the computed ones: all groups or none.

        A request without blocks takes up the cached ones of its ``num_computed_tokens`` first,
        which must be what :meth:`lookup` said. Sliding groups give back blocks that no token from
        ``num_computed_tokens`` on can see. No step of this request may be in flight.
        """
        tables = self._tables.get(request.sequence)
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_blocks = -(-num_tokens // self.block_size)
        if tables is None:
            return self._allocate_first(request, num_blocks)
        if self._sliding:
            self._leave_windows(tables, request.num_computed_tokens)
        num_new_blocks = num_blocks - tables.num_blocks
        if num_new_blocks <= 0:
            return True
        if any(pool.num_available < num_new_blocks for pool in self.pools):
            return False
        tables.by_group = tuple(
            table + [pool.allocate() for _ in range(num_new_blocks)]
            for pool, table in zip(self.pools, tables.by_group, strict=True)
        )
        return True

    def commit(self, request: Request) -> None:
        """Make the request's full, computed blocks known. No step of it may be in flight."""
        assert request.num_in_flight_tokens == 0, "tokens in flight are not there yet"
        if not self.enable_prefix_caching:
            return
        tables = self._tables[request.sequence]
        num_full = request.num_computed_tokens // self.block_size
        if num_full == tables.num_committed:
            return
        hashes = self._hashes(request, num_full)
        for pool, table in zip(self.pools, tables.by_group, strict=True):
            for index in range(tables.num_committed, num_full):
                if table[index] != NO_BLOCK:
                    pool.register(table[index], hashes[index])
        tables.num_committed = num_full

    def free(self, request: Request) -> None:
        """Give back all blocks, if any. Known content stays cached until it is evicted."""
        tables = self._tables.pop(request.sequence, None)
        if tables is None:
            return
        for pool, table, first in zip(self.pools, tables.by_group, tables.first_live, strict=True):
            # The tail first: it is evicted first, and a prefix without its tail is still a hit.
            for block in reversed(table[first:]):
                pool.release(block)

    # -- inside -----------------------------------------------------------------------------

    def _allocate_first(self, request: Request, num_blocks: int) -> bool:
        hits = self._hit_blocks(request, request.num_computed_tokens)
        num_hit_blocks = request.num_computed_tokens // self.block_size
        num_new_blocks = num_blocks - num_hit_blocks
        for pool, blocks in zip(self.pools, hits, strict=True):
            num_idle = sum(pool.ref_count(block) == 0 for block in blocks)
            if pool.num_available - num_idle < num_new_blocks:
                return False
        by_group = []
        for pool, blocks in zip(self.pools, hits, strict=True):
            for block in blocks:
                pool.acquire(block)
            gone = [NO_BLOCK] * (num_hit_blocks - len(blocks))
            by_group.append(gone + blocks + [pool.allocate() for _ in range(num_new_blocks)])
        self._tables[request.sequence] = _Tables(
            by_group=tuple(by_group),
            first_live=[num_hit_blocks - len(blocks) for blocks in hits],
            num_committed=num_hit_blocks,
        )
        return True

    def _leave_windows(self, tables: _Tables, position: int) -> None:
        """Give back the blocks that a token at ``position`` or later cannot see."""
        for index, window in self._sliding:
            first = self._first_seen(position, window)
            start = tables.first_live[index]
            if first <= start:
                continue
            pool, table = self.pools[index], tables.by_group[index]
            for block in table[start:first]:
                pool.release(block)
            shorter = [NO_BLOCK] * first + table[first:]
            tables.by_group = (*tables.by_group[:index], shorter, *tables.by_group[index + 1 :])
            tables.first_live[index] = first

    def _first_seen(self, position: int, window: int) -> int:
        """The first block that a token at ``position`` sees in a sliding group."""
        return max(0, position - window + 1) // self.block_size

    def _sliding_hit(
        self, pool: BlockPool, window: int, hashes: list[bytes], num_blocks: int
    ) -> int:
        """The longest hit, at most ``num_blocks``, whose window is known to a sliding group."""
        end = num_blocks
        first = self._first_seen(end * self.block_size, window)
        index = end - 1
        while index >= first:
            if pool.find(hashes[index]) is None:
                end = index
                first = self._first_seen(end * self.block_size, window)
            index -= 1
        return end

    def _hit_blocks(self, request: Request, num_cached_tokens: int) -> list[list[int]]:
        """The blocks that a hit of this length takes up, by group."""
        num_blocks = num_cached_tokens // self.block_size
        if num_blocks == 0:
            return [[] for _ in self.groups]
        hashes = self._hashes(request, num_blocks)
        hits = []
        for pool, group in zip(self.pools, self.groups, strict=True):
            first = 0
            if group.window is not None:
                first = self._first_seen(num_cached_tokens, group.window)
            blocks = []
            for index in range(first, num_blocks):
                block = pool.find(hashes[index])
                assert block is not None, "a prefix hit was evicted before it was taken up"
                blocks.append(block)
            hits.append(blocks)
        return hits

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """At least ``num_blocks`` chained hashes of the request's leading full blocks.

        Each is SHA-256 over the one before and the block's tokens, so that it names the whole
        prefix; the first link holds the extra keys. It is the same chain for every group.
        """
        hashes = request.block_hashes
        size = self.block_size
        while len(hashes) < num_blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else _first_link(request)
            tokens = array("I", request.token_ids[start : start + size])
            hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return hashes


def _first_link(request: Request) -> bytes:
    """What a prefix must share besides its tokens. No salt and an empty salt differ."""
    salt = request.cache_salt
    # A salt is any string that JSON can hold, lone surrogates included.
    extra = b"" if salt is None else b"salt:" + salt.encode(errors="surrogatepass")
    return hashlib.sha256(b"ambidex kv chain 1;" + extra).digest()
