"""The blocks of one KV group in one memory: who holds which, and which may be evicted.

Every block is in exactly one of three states:

- free: nobody holds it and its content means nothing;
- used: at least one request holds it (its reference count is above 0);
- cached: nobody holds it, but its content is known under a hash and can be taken up again.

Free + used + cached = total, always. All operations are O(1). Block ids are 0 .. num_blocks-1.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Reference counts, the hash index and eviction for ``num_blocks`` blocks of one group."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool has at least one block"
        self.num_blocks = num_blocks
        #: Cached blocks whose content was given up to make room, since the start.
        self.num_evicted = 0
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        # A stack; the lowest ids go first, which keeps a young pool compact.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Keys only: the least recently used block comes first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can hand out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def hash_of(self, block: int) -> bytes | None:
        """The hash under which the block's content is known; None while it may be written."""
        return self._hashes[block]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, used or cached, or None. Takes no reference."""
        return self._block_by_hash.get(block_hash)

    def allocate(self) -> int:
        """A block to write, with one reference. The caller has checked ``num_available``."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget_content(block)
            self.num_evicted += 1
        self._ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block, for reading."""
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. The last one makes the block cached, or free if it has no hash."""
        count = self._ref_counts[block] - 1
        assert count >= 0, f"block {block} is released more often than it was taken"
        self._ref_counts[block] = count
        if count == 0:
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a used block's content known. It must never be written again.

        Where another block has the same content already, that one stays the known one.
        """
        assert self._ref_counts[block] > 0, f"block {block} is registered by nobody"
        if self._hashes[block] is None and block_hash not in self._block_by_hash:
            self._hashes[block] = block_hash
            self._block_by_hash[block_hash] = block

    def forget_cached(self) -> int:
        """Give up every known content; returns how many cached blocks became free."""
        num_freed = len(self._cached)
        self._free.extend(self._cached)
        self._cached.clear()
        self._block_by_hash.clear()
        self._hashes = [None] * self.num_blocks
        return num_freed

    def check(self) -> None:
        """Assert every invariant; O(num_blocks), for tests and debugging."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        assert not free & used, "a block is free and used"
        assert not cached & used, "a block is cached and used"
        assert len(free) + len(used) + len(cached) == self.num_blocks, "a block is lost"
        assert self.num_used == len(used)
        assert all(self._hashes[block] is None for block in free), "a free block has a hash"
        assert all(self._hashes[block] is not None for block in cached), "a cached block has none"
        known = {h: block for block, h in enumerate(self._hashes) if h is not None}
        assert known == self._block_by_hash, "the hash index is wrong"

    def _forget_content(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._block_by_hash[block_hash]
        self._hashes[block] = None
