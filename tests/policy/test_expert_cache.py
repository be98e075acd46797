"""Which experts are cached: sizes stay, changes are few, and what is used most is in."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.memory.cost_model import ComputeRate, LinkRate
from ambidex.memory.expert_cache import (
    DECAY,
    LEAST_USES,
    MAX_ROWS,
    SWEEP_STEPS,
    ExpertCache,
    ExpertSize,
    expert_capacities,
    sharing_pays,
)

FEW = settings(max_examples=50, deadline=None)


def step(cache: ExpertCache, generator: random.Random, weights: list[float], top_k: int) -> int:
    """Choose experts of every layer by ``weights``, count them; returns how many were cached."""
    hits = 0
    for layer in range(cache.num_layers):
        keys = [generator.random() ** (1 / weight) for weight in weights]
        chosen = sorted(range(len(keys)), key=keys.__getitem__)[-top_k:]
        hits += len(cache.cached(layer) & set(chosen))
        cache.record(layer, Counter(chosen))
    return hits


@FEW
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=20),
    st.integers(1, 60),
    st.integers(0, 1000),
)
def test_sizes_stay_and_changes_are_few(capacities: list[int], steps: int, seed: int) -> None:
    generator = random.Random(seed)
    cache = ExpertCache(capacities, 6)
    held = [set(range(capacity)) for capacity in capacities]
    for _ in range(steps):
        for layer in range(len(capacities)):
            cache.record(layer, {generator.randrange(6): generator.randrange(1, 30)})
        changes = cache.changes()
        assert len(changes) <= cache.max_changes <= -(-len(capacities) // SWEEP_STEPS)
        assert len({change.layer for change in changes}) == len(changes)
        for layer, expert_in, expert_out in changes:
            assert expert_out in held[layer] and expert_in not in held[layer]
            held[layer] = held[layer] - {expert_out} | {expert_in}
        assert [set(cache.cached(layer)) for layer in range(len(capacities))] == held
    assert [len(each) for each in held] == capacities


def test_the_same_uses_make_the_same_changes() -> None:
    traces = []
    for _ in range(2):
        cache, generator, trace = ExpertCache([3] * 4, 12), random.Random(3), []
        for _ in range(200):
            step(cache, generator, [1.0 + expert for expert in range(12)], 2)
            trace.append(cache.changes())
        traces.append(trace)
    assert traces[0] == traces[1] and any(traces[0])


def test_hot_experts_come_in_and_stay() -> None:
    cache, generator = ExpertCache([8] * 4, 64), random.Random(1)
    weights = [0.05] * 56 + [2.0] * 8
    num_changes = []
    for first in range(0, 1200, 300):
        hits, changes = 0, 0
        for _ in range(300):
            hits += step(cache, generator, weights, 8)
            changes += len(cache.changes())
        num_changes.append(changes)
        if first:
            assert hits > 0.7 * 300 * 4 * 8
    assert num_changes[0] == 4 * 8 and sum(num_changes[1:]) == 0
    assert all(cache.cached(layer) == frozenset(range(56, 64)) for layer in range(4))
    # Use that moves elsewhere is followed.
    weights.reverse()
    for _ in range(900):
        step(cache, generator, weights, 8)
        cache.changes()
    assert all(cache.cached(layer) == frozenset(range(8)) for layer in range(4))


def test_chance_alone_changes_little() -> None:
    cache, generator, changes = ExpertCache([16] * 4, 128), random.Random(1), 0
    for count in range(1000):
        step(cache, generator, [1.0] * 128, 8)
        found = len(cache.changes())
        changes += found if count >= 500 else 0
    assert changes < 0.2 * 500


def test_old_uses_fade() -> None:
    """What was used much, long ago, gives way to what is used now and then."""
    cache = ExpertCache([1], 2)
    cache.record(0, {0: 1000})
    steps = 0
    while cache.cached(0) == {0}:
        cache.record(0, {1: 1})
        cache.changes()
        steps += 1
        assert steps < 2000
    # Where one use a step is worth as much as what is left of the thousand.
    assert 1000 * DECAY**steps < 1 / (1 - DECAY)


def test_scores_are_of_any_age() -> None:
    """Far beyond the number of steps at which weights begin again."""
    cache = ExpertCache([1], 3)
    for _ in range(6000):
        cache.record(0, {0: 2, 1: 1})
        assert cache.changes() == []
    for _ in range(1000):
        cache.record(0, {2: 2})
        cache.changes()
    assert cache.cached(0) == {2}


def test_a_few_uses_change_nothing() -> None:
    cache = ExpertCache([1], 2)
    for _ in range(int(LEAST_USES) - 1):
        cache.record(0, {1: 1})
        assert cache.changes() == []


def test_static_never_changes() -> None:
    cache = ExpertCache([2, 0, 4], 4, is_static=True)
    for _ in range(100):
        for layer in range(3):
            cache.record(layer, {3: 50})
        assert cache.changes() == []
    assert [cache.cached(layer) for layer in range(3)] == [{0, 1}, frozenset(), {0, 1, 2, 3}]


@FEW
@given(st.lists(st.integers(1, 1000), max_size=9), st.integers(1, 12), st.integers(0, 100_000))
def test_capacities(slot_bytes: list[int], num_experts: int, cache_bytes: int) -> None:
    capacities = expert_capacities(slot_bytes, num_experts, cache_bytes)
    assert len(capacities) == len(slot_bytes)
    assert all(0 <= capacity <= num_experts for capacity in capacities)
    left = cache_bytes - sum(map(int.__mul__, capacities, slot_bytes))
    assert left >= 0
    if capacities:
        assert max(capacities) - min(capacities) <= 1
        # No layer that has fewer experts than another could have had one more.
        fewest = [
            size
            for size, capacity in zip(slot_bytes, capacities, strict=True)
            if capacity < num_experts and capacity == min(capacities)
        ]
        assert all(size > left for size in fewest)


#: An expert of 9 million weights at 4 bits; memory of 50 GB/s and one of 1 TB/s, 20 GB/s between.
SIZE = ExpertSize(num_bytes=4_700_000, num_weights=9_437_184, hidden=2048)
HOST, DEVICE = ComputeRate(50e9, 1e12), ComputeRate(1e12, 50e12)
LINK = LinkRate(20e9, 10e-6)


def pays(num_rows: int, capacity: int = 16, **changes: object) -> bool:
    rates = {"host": HOST, "device": DEVICE, "link": LINK} | changes
    return sharing_pays(num_rows, 8, 128, capacity, SIZE, **rates)  # type: ignore[arg-type]


def test_sharing_pays_for_few_rows() -> None:
    assert pays(1) and pays(8)
    assert not pays(0)
    assert not pays(MAX_ROWS + 1)
    assert not pays(4, capacity=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"link": LinkRate(20e6, 10e-6)},
        {"device": HOST.scaled(0.1)},
        {"host": DEVICE.scaled(20)},
    ],
)
def test_sharing_does_not_pay(changes: dict[str, object]) -> None:
    """A link too slow for results that are not added up; an accelerator slower than its share; a
    host that is done before results could cross."""
    assert not pays(4, **changes)
