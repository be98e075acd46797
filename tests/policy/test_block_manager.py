"""Block tables, prefix hits and sliding windows."""

import itertools

import pytest
from fake_lane import engine_request, group

from ambidex.errors import OptionError
from ambidex.kv.block import NO_BLOCK
from ambidex.kv.block_manager import BlockManager
from ambidex.request import Request

SIZE = 8
SEQUENCE = itertools.count()


def manager(*windows: int | None, num_blocks: int = 16, caching: bool = True) -> BlockManager:
    groups = [group(window) for window in windows or (None,)]
    return BlockManager(groups, [num_blocks] * len(groups), SIZE, caching)


def request(
    num_tokens: int, *, first: int = 0, salt: str | None = None, **params: object
) -> Request:
    prompt = [(first * 1000 + i) for i in range(num_tokens)]
    return Request(engine_request("r", prompt, cache_salt=salt, **params), next(SEQUENCE))


def compute(blocks: BlockManager, r: Request, num_tokens: int | None = None) -> None:
    """One step over the given number of tokens, or all that are left."""
    count = r.num_tokens - r.num_computed_tokens if num_tokens is None else num_tokens
    assert blocks.allocate(r, count)
    r.num_computed_tokens += count
    blocks.commit(r)
    blocks.check()


def admit(blocks: BlockManager, r: Request) -> int:
    r.num_computed_tokens = blocks.lookup(r)
    hit = r.num_computed_tokens
    compute(blocks, r)
    return hit


def test_tables_grow_by_whole_blocks() -> None:
    blocks = manager()
    r = request(20)
    compute(blocks, r, 5)
    assert len(blocks.block_tables(r)[0]) == 1
    compute(blocks, r, 3)
    assert len(blocks.block_tables(r)[0]) == 1
    compute(blocks, r, 12)
    (table,) = blocks.block_tables(r)
    assert len(table) == len(set(table)) == 3
    assert blocks.usage == 3 / 16
    blocks.free(r)
    assert blocks.usage == 0
    blocks.check()


def test_a_table_handed_out_never_changes() -> None:
    blocks = manager(None, 8)
    r = request(40)
    compute(blocks, r, 8)
    before = blocks.block_tables(r)
    copies = [list(table) for table in before]
    compute(blocks, r, 24)
    compute(blocks, r, 8)
    blocks.free(r)
    assert [list(table) for table in before] == copies


def test_an_unchanged_table_is_the_same_object() -> None:
    blocks = manager()
    r = request(8)
    compute(blocks, r, 3)
    table = blocks.block_tables(r)[0]
    compute(blocks, r, 2)
    assert blocks.block_tables(r)[0] is table


def test_all_groups_or_none() -> None:
    blocks = BlockManager([group(), group(16)], [8, 2], SIZE, True)
    r = request(40)
    assert not blocks.allocate(r, 24)
    assert blocks.num_available == (8, 2)
    assert blocks.allocate(r, 16)
    r.num_computed_tokens = 16
    assert not blocks.allocate(r, 8)
    assert blocks.num_held(r) == (2, 2)
    blocks.check()


def test_a_second_request_shares_full_blocks_and_keeps_a_token_to_compute() -> None:
    blocks = manager()
    a, b = request(20), request(20)
    assert admit(blocks, a) == 0
    assert admit(blocks, b) == 16
    ta, tb = blocks.block_tables(a)[0], blocks.block_tables(b)[0]
    assert ta[:2] == tb[:2]
    assert ta[2] != tb[2]


def test_a_full_hit_computes_the_last_block_again_and_writes_no_known_block() -> None:
    blocks = manager()
    a, b = request(16), request(16)
    admit(blocks, a)
    assert admit(blocks, b) == 8
    assert blocks.block_tables(a)[0][1] != blocks.block_tables(b)[0][1]
    # The copy is not known: the first one is, still.
    blocks.free(b)
    assert blocks.pools[0].num_cached == 0


def test_a_block_is_known_only_when_its_tokens_are_computed() -> None:
    blocks = manager()
    a = request(24)
    assert blocks.allocate(a, 24)
    a.num_computed_tokens = a.num_in_flight_tokens = 24
    assert blocks.lookup(request(24)) == 0
    with pytest.raises(AssertionError, match="in flight"):
        blocks.commit(a)
    a.num_in_flight_tokens = 0
    blocks.commit(a)
    assert blocks.lookup(request(24)) == 16


def test_output_is_found_again_too() -> None:
    blocks = manager()
    a = request(6)
    compute(blocks, a)
    for token in range(100, 112):
        a.token_ids.append(token)
        compute(blocks, a)
    b = request(6)
    b.token_ids += range(100, 112)
    assert blocks.lookup(b) == 16


def test_a_difference_early_in_the_prefix_is_a_miss_for_all_after_it() -> None:
    blocks = manager()
    a, b = request(32), request(32)
    b.token_ids[3] = 999
    admit(blocks, a)
    assert blocks.lookup(b) == 0
    c = request(32)
    c.token_ids[12] = 999
    assert blocks.lookup(c) == 8


@pytest.mark.parametrize(("one", "other"), [(None, "x"), ("x", "y"), (None, ""), ("x", "\ud800")])
def test_salts_are_kept_apart(one: str | None, other: str | None) -> None:
    blocks = manager()
    admit(blocks, request(20, salt=one))
    assert blocks.lookup(request(20, salt=other)) == 0
    assert blocks.lookup(request(20, salt=one)) == 16


def test_prompt_logprobs_skip_the_look_up() -> None:
    blocks = manager()
    admit(blocks, request(20))
    assert blocks.lookup(request(20, prompt_logprobs=0)) == 0
    assert blocks.lookup(request(20)) == 16


def test_prefix_caching_off() -> None:
    blocks = manager(caching=False)
    a = request(20)
    admit(blocks, a)
    assert blocks.lookup(request(20)) == 0
    blocks.free(a)
    assert blocks.pools[0].num_cached == 0


def test_the_tail_is_evicted_first() -> None:
    blocks = manager(num_blocks=4)
    a = request(32)
    admit(blocks, a)
    blocks.free(a)
    b = request(8, first=1)
    admit(blocks, b)
    assert blocks.num_evicted == 1
    assert blocks.lookup(request(33)) == 24


def test_cached_blocks_of_a_hit_are_not_counted_as_room_for_its_rest() -> None:
    blocks = manager(num_blocks=3)
    a = request(24)
    admit(blocks, a)
    blocks.free(a)
    b = request(33)
    b.num_computed_tokens = blocks.lookup(b)
    assert b.num_computed_tokens == 24
    # Three blocks can be had, and all three are the hit itself.
    assert not blocks.allocate(b, 9)
    blocks.check()
    assert blocks.lookup(b) == 24


def test_forgetting_the_cache_leaves_running_requests_alone() -> None:
    blocks = manager()
    a, b = request(20), request(20, first=1)
    admit(blocks, a)
    admit(blocks, b)
    blocks.free(b)
    assert blocks.reset_prefix_cache() == 2
    assert blocks.lookup(request(20)) == 0
    a.token_ids += range(8)
    compute(blocks, a)
    blocks.free(a)
    blocks.check()


# -- sliding windows ----------------------------------------------------------------------------


def test_a_long_generation_in_a_window_stays_bounded() -> None:
    blocks = manager(16, num_blocks=4)
    r = request(1)
    for token in range(400):
        compute(blocks, r)
        r.token_ids.append(token)
        (table,) = blocks.block_tables(r)
        position = r.num_computed_tokens - 1
        first = max(0, position - 15) // SIZE
        assert NO_BLOCK not in table[first:]
        assert blocks.num_held(r)[0] <= 3
    assert len(table) == 50
    assert table[:47] == [NO_BLOCK] * 47


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 15, 16, 17, 40])
def test_what_a_window_needs_is_never_more_than_said(window: int) -> None:
    for step in (1, 5, 8, 13):
        blocks = manager(window, num_blocks=40)
        r = request(200)
        most = 0
        while r.num_computed_tokens < 200:
            compute(blocks, r, min(step, 200 - r.num_computed_tokens))
            most = max(most, blocks.num_held(r)[0])
        (bound,) = blocks.num_blocks_needed(200, step)
        assert most <= bound <= most + 1


def test_full_groups_need_every_block() -> None:
    blocks = manager(None, 16)
    assert blocks.num_blocks_needed(1000) == (125, 125)
    assert blocks.num_blocks_needed(1000, 1) == (125, 3)
    assert blocks.num_blocks_needed(1001, 4000) == (126, 126)
    assert blocks.num_blocks_needed(9, 1) == (2, 2)


def know(blocks: BlockManager, names_by_group: list[list[bytes]]) -> None:
    """Put blocks of these hashes into the pools' caches."""
    for pool, names in zip(blocks.pools, names_by_group, strict=True):
        for name in names:
            block = pool.allocate()
            pool.register(block, name)
            pool.release(block)


def test_a_sliding_hit_needs_only_the_window() -> None:
    first = manager(16)
    a = request(48)
    admit(first, a)
    blocks = manager(16)
    know(blocks, [a.block_hashes[4:6]])
    b = request(49)
    assert blocks.lookup(b) == 48
    b.num_computed_tokens = 48
    assert blocks.allocate(b, 1)
    (table,) = blocks.block_tables(b)
    assert table[:4] == [NO_BLOCK] * 4
    assert NO_BLOCK not in table[4:]
    assert blocks.num_held(b) == (3,)


def test_a_hit_is_as_long_as_every_group_can_serve() -> None:
    """One full and two sliding groups, against brute force over all lengths."""
    windows = (None, 10, 20)
    blocks = manager(*windows, num_blocks=12)
    a = request(64)
    admit(blocks, a)
    blocks.free(a)
    hashes = list(a.block_hashes)
    for missing in itertools.product((None, 0, 3, 5, 6), repeat=3):
        fresh = manager(*windows, num_blocks=12)
        known = [[h for i, h in enumerate(hashes[:7]) if i != gone] for gone in missing]
        know(fresh, known)
        best = 0
        for count in range(8):
            end = count * SIZE
            seen = [range(max(0, end - w + 1) if w else 0, end) for w in windows]
            if all(
                hashes[p // SIZE] in names
                for positions, names in zip(seen, known, strict=True)
                for p in positions
            ):
                best = end
        b = request(64)
        assert fresh.lookup(b) == best, missing
        b.num_computed_tokens = best
        assert fresh.allocate(b, 64 - best)
        fresh.check()


def test_block_size_must_be_one_of_the_list() -> None:
    with pytest.raises(OptionError, match="--block-size is 12; it must be one of 8, 16"):
        BlockManager([group()], [4], 12, True)
