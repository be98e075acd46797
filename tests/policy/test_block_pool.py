"""Reference counts, the hash index and eviction of one pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.kv.block_pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_used, pool.num_cached


def test_blocks_without_a_hash_go_from_free_to_used_and_back() -> None:
    pool = BlockPool(3)
    assert counts(pool) == (3, 0, 0)
    a, b = pool.allocate(), pool.allocate()
    assert a != b
    assert counts(pool) == (1, 2, 0)
    pool.release(a)
    assert counts(pool) == (2, 1, 0)


def test_a_registered_block_is_cached_when_nobody_holds_it() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.register(block, b"x")
    assert pool.find(b"x") == block
    pool.release(block)
    assert counts(pool) == (1, 0, 1)
    assert pool.num_available == 2
    pool.acquire(block)
    assert counts(pool) == (1, 1, 0)


def test_it_is_cached_only_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.register(block, b"x")
    pool.acquire(block)
    pool.release(block)
    assert counts(pool) == (1, 1, 0)
    pool.release(block)
    assert counts(pool) == (1, 0, 1)


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.register(block, b"x")
    pool.release(block)
    assert pool.allocate() != block
    assert pool.num_evicted == 0
    assert pool.allocate() == block
    assert pool.num_evicted == 1
    assert pool.find(b"x") is None
    assert pool.hash_of(block) is None


def test_the_least_recently_used_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block, name)
        pool.release(block)
    # A hit on the oldest makes it the youngest.
    pool.acquire(blocks[0])
    pool.release(blocks[0])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]
    assert pool.num_evicted == 3


def test_the_first_of_two_blocks_with_one_content_stays_the_known_one() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(), pool.allocate()
    pool.register(a, b"x")
    pool.register(b, b"x")
    assert pool.find(b"x") == a
    pool.release(b)
    assert counts(pool) == (1, 1, 0)


def test_forgetting_frees_cached_blocks_and_leaves_used_ones() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(), pool.allocate()
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.release(a)
    assert pool.forget_cached() == 1
    assert counts(pool) == (2, 1, 0)
    assert pool.find(b"b") is None
    pool.release(b)
    assert counts(pool) == (3, 0, 0)


def test_releasing_twice_is_our_bug() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


@given(
    num_blocks=st.integers(1, 5),
    ops=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60),
)
def test_any_order_of_operations_keeps_the_sum(num_blocks: int, ops: list[tuple[int, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for op, number in ops:
        name = bytes([number % 7])
        if op == 0 and pool.num_available:
            held.append(pool.allocate())
            assert held.count(held[-1]) == 1, "a held block was handed out"
        elif op == 1 and held:
            pool.release(held.pop(number % len(held)))
        elif op == 2 and held:
            pool.register(held[number % len(held)], name)
        elif op == 3 and (block := pool.find(name)) is not None:
            pool.acquire(block)
            held.append(block)
        elif op == 4 and number == 0:
            pool.forget_cached()
        pool.check()
        assert pool.num_free + pool.num_used + pool.num_cached == num_blocks
        assert pool.num_used == len(set(held))
