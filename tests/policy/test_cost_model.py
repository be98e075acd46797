"""Seconds of steps: what adds up, what overlaps, what holds a step up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.memory.compression import TYPICAL_RATIO
from ambidex.memory.cost_model import CostModel, StepLoad, bound, step_time
from ambidex.memory.model_shape import KVShape, ModelShape, WeightShape
from ambidex.memory.operations import experts_used, host_step_s, small_parts
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.rates import LinkRate
from ambidex.memory.split import SplitTable, streamed_rows
from ambidex.memory.weight_places import Placement, WeightKind, WeightPlace

LAYERS, ROWS, COLUMNS = 8, 6400, 1000
#: Of one matrix in 16 bits; two matrices a layer.
SIZE = 2 * ROWS * COLUMNS
FLOPS = 2 * ROWS * COLUMNS
MLP = ("mlp.gate_up", "mlp.down")


def shape_of(
    *,
    head: bool = False,
    experts: int = 0,
    attention: bool = False,
    kv: tuple[KVShape, ...] = (),
) -> ModelShape:
    weights = [WeightShape("embedding.weight", 999, 7, WeightKind.TABLE, "bfloat16", 1 << 40)]
    for i in range(LAYERS):
        at = f"layers.{i}"
        weights.append(WeightShape(f"{at}.norm.weight", 99, 1, WeightKind.VECTOR, "float32", 396))
        for name in (*(("attention.qkv", "attention.output") if attention else ()), *MLP):
            weight = WeightShape(
                f"{at}.{name}",
                ROWS,
                COLUMNS,
                WeightKind.EXPERTS if experts else WeightKind.MATRIX,
                "bfloat16",
                SIZE * max(experts, 1),
                max(experts, 1),
                2 if experts else 1,
            )
            weights.append(weight)
    if head:
        weights.append(
            WeightShape("head.weight", ROWS, COLUMNS, WeightKind.MATRIX, "bfloat16", SIZE)
        )
    return ModelShape("", "llama", LAYERS, COLUMNS, ROWS, ROWS, 8, 128, tuple(weights), kv, None)


def machine(**values: Any) -> HardwareProfile:
    """Memory of 1 TB/s beside a link of 10 GB/s and a host's of 100; arithmetic is free unless it
    is given: ``host_flops``, ``device_flops``."""
    host = {"float32": ProductRate(((1, values.pop("host_flops", 1e30)),))}
    device = {"float32": ProductRate(((1, values.pop("device_flops", 1e30)),))}
    dram = values.pop("dram", 100e9)
    return HardwareProfile(
        "made up",
        host=Processor(
            "host",
            0,
            dram,
            host,
            shared_bytes_per_s=values.pop("shared", 0.0),
            small_bytes_per_s=1e30,
        ),
        device=Processor("device", 0, 1e12, device, small_bytes_per_s=1e30),
        link=LinkRate(values.pop("link", 10e9), values.pop("latency", 0.0)),
        activation_bytes=values.pop("activation_bytes", 0),
        **values,
    )


def places(
    shape: ModelShape, of: Mapping[str, WeightPlace] | WeightPlace
) -> dict[str, WeightPlace]:
    """``of``: by the end of a path, or of every matrix; others are resident."""
    found = {}
    for weight in shape.weights:
        rows = weight.module.rows
        place = WeightPlace(Placement.RESIDENT, rows)
        if weight.kind not in (WeightKind.VECTOR, WeightKind.TABLE):
            if isinstance(of, WeightPlace):
                place = of
            else:
                place = next((p for end, p in of.items() if weight.path.endswith(end)), place)
        found[weight.path] = place
    return found


HOST, STREAM = WeightPlace(Placement.HOST, 0), WeightPlace(Placement.STREAM, 0)
HALF = WeightPlace(Placement.SPLIT, ROWS // 2)
ONE = StepLoad(1, 1, 1)


# --- one processor ------------------------------------------------------------------------------


def test_on_the_host_alone_operations_follow_each_other() -> None:
    host = Processor(
        "host",
        0,
        100e9,
        {"float32": ProductRate(((1, 1e12),))},
        launch_s=1e-5,
        step_s=1e-4,
        token_s=1e-5,
        prompt_token_s=1e-6,
    )
    shape = shape_of(head=True, kv=(KVShape(LAYERS, 8, 128, 4096, None),))
    for load in (StepLoad(3, 1, 50), StepLoad(1, 700, 700)):
        got = step_time(HardwareProfile("", host), shape, None, load)
        assert got.seconds == pytest.approx(host_step_s(host, shape, load))
        assert set(got.parts) <= {"DRAM", "host arithmetic", "fixed costs"}
        assert sum(got.parts.values()) == pytest.approx(got.seconds)
        operations, _ = small_parts(host, shape, load)
        fixed = operations * 1e-5 + 1e-4 + load.num_seqs * 1e-5 + load.num_tokens * 1e-6
        assert got.parts["fixed costs"] == pytest.approx(fixed)


def test_each_operation_takes_the_longer_of_reading_and_computing() -> None:
    shape = shape_of(head=True)
    profile = dataclasses.replace(machine(host_flops=1e12), device=None, link=None)
    # 10 FLOP a byte: 10 rows in 16 bits. The head has one row a sequence.
    few, many = (step_time(profile, shape, None, StepLoad(1, n, n)) for n in (10, 40))
    read = SIZE / 100e9
    assert few.seconds == pytest.approx(17 * read) and few.limit == "DRAM"
    assert many.seconds == pytest.approx(16 * 4 * read + read) and many.limit == "host arithmetic"


def test_without_places_an_accelerator_holds_everything() -> None:
    got = step_time(machine(), shape_of(), None, ONE)
    assert got.seconds == pytest.approx(16 * SIZE / 1e12) and got.limit == "HBM"


# --- two processors -----------------------------------------------------------------------------


def test_the_device_waits_for_what_the_host_computes() -> None:
    shape = shape_of()
    got = step_time(machine(), shape, places(shape, {"down": HOST}), ONE)
    assert got.seconds == pytest.approx(8 * SIZE / 1e12 + 8 * SIZE / 100e9)
    assert got.limit == "DRAM"


def test_activations_cross_to_the_host_and_back() -> None:
    shape = shape_of()
    profile = machine(sync_s=1.0, activation_bytes=2, link_back=LinkRate(1e6))
    load = StepLoad(5, 1, 1)
    got = step_time(profile, shape, places(shape, {"down": HOST}), load)
    bytes_in, bytes_out = 5 * 2 * COLUMNS, 5 * 2 * ROWS
    crossing = 8 * (2.0 + bytes_in / 1e6 + bytes_out / 10e9)
    assert got.parts["synchronisation"] == pytest.approx(crossing)
    assert got.seconds == pytest.approx(8 * SIZE / 1e12 + 8 * SIZE / 100e9 + crossing)
    assert got.limit == "synchronisation"


def synchronisations(of: Mapping[str, WeightPlace] | WeightPlace, **shape: Any) -> float:
    """Of a step where each takes a second and nothing else takes long."""
    made = shape_of(**shape)
    got = step_time(machine(sync_s=1.0), made, places(made, of), ONE)
    return round(got.parts.get("synchronisation", 0.0), 3)


def test_activations_stay_where_the_next_product_is() -> None:
    # To the host at first, and back at last.
    assert synchronisations(HOST) == 2
    assert synchronisations({"down": HOST}) == 2 * LAYERS
    assert synchronisations({"layers.3.mlp.gate_up": HOST, "layers.3.mlp.down": HOST}) == 2
    # Attention is the device's: its input and its result cross, in every layer.
    assert synchronisations(HOST, attention=True) == 2 * LAYERS + 2
    assert synchronisations({"attention.output": HOST}, attention=True) == 2 * LAYERS


def test_both_sides_of_a_split_exchange_their_parts() -> None:
    """Once a product, both ways at the same time; before it what attention put out."""
    assert synchronisations(HALF) == 16 + 1
    assert synchronisations(HALF, attention=True) == 4 * LAYERS + LAYERS + 1


def test_both_sides_of_a_split_work_at_once() -> None:
    shape = shape_of()
    got = step_time(machine(dram=1e12), shape, places(shape, HALF), ONE)
    assert got.seconds == pytest.approx(16 * SIZE / 2 / 1e12)
    # The slower side decides.
    slow = step_time(machine(), shape, places(shape, HALF), ONE)
    assert slow.seconds == pytest.approx(16 * SIZE / 2 / 100e9) and slow.limit == "DRAM"
    # What the device sends takes as long as what it gets.
    profile = machine(activation_bytes=2, link=1e6, link_back=LinkRate(1e3))
    crossing = step_time(profile, shape, places(shape, HALF), ONE)
    assert crossing.seconds == pytest.approx(16 * (SIZE / 2 / 1e12 + ROWS / 1e3), rel=1e-2)


def test_copies_run_beside_the_products() -> None:
    shape = shape_of()
    got = step_time(machine(), shape, places(shape, STREAM), ONE)
    assert got.seconds == pytest.approx(16 * SIZE / 10e9) and got.limit == "link"
    model = CostModel(machine(), shape, places(shape, STREAM), is_async=False)
    assert model.seconds(ONE) == pytest.approx(16 * SIZE * (1 / 10e9 + 1 / 1e12))
    limited = CostModel(machine(), shape, places(shape, STREAM), link_limit=1e9)
    assert limited.seconds(ONE) == pytest.approx(16 * SIZE / 1e9)
    late = CostModel(machine(latency=1.0), shape, places(shape, STREAM))
    assert late.seconds(ONE) == pytest.approx(16 + 16 * SIZE / 10e9)


def test_compressed_copies_are_shorter() -> None:
    """Where the link is the slower one; the device unpacks what arrives."""
    shape = shape_of()
    slow = CostModel(machine(), shape, places(shape, STREAM), compress=True)
    assert slow.seconds(ONE) == pytest.approx(16 * SIZE / 10e9 / TYPICAL_RATIO)
    fast = machine(link=2e12, dram=9e12)
    as_it_is, asked = (
        CostModel(fast, shape, places(shape, STREAM), compress=compress).seconds(ONE)
        for compress in (False, True)
    )
    assert as_it_is == asked, "nothing is compressed that would arrive later"
    # Rows that are shared with the host cross as they are.
    shared = CostModel(machine(), shape, places(shape, HALF), compress=True)
    plain = CostModel(machine(), shape, places(shape, HALF))
    assert shared.seconds(ONE, 1.0) == plain.seconds(ONE, 1.0)


def test_layers_that_do_not_stream_hide_no_more_than_fills_the_ring() -> None:
    """The last half of the layers streams; the device computes for long."""
    shape = shape_of()
    profile = machine(device_flops=1e14)
    of = {f"layers.{i}.mlp.{name}": STREAM for i in range(4, 8) for name in ("gate_up", "down")}
    load = StepLoad(1, 1000, 1000)
    product = 1000 * FLOPS / 1e14
    copy = SIZE / 10e9
    assert 8 * copy > 8 * product > copy / 2, "the ring is full before its layers begin"
    some_ahead = CostModel(profile, shape, places(shape, of), ring_bytes=SIZE // 2)
    all_ahead = CostModel(profile, shape, places(shape, of))
    without = CostModel(profile, shape, places(shape, of), ring_bytes=0)
    assert without.seconds(load) == pytest.approx(8 * product + max(8 * product, 8 * copy))
    assert some_ahead.seconds(load) == pytest.approx(8 * product + 8 * copy - copy / 2)
    assert all_ahead.seconds(load) == pytest.approx(8 * copy)


def test_copies_take_from_what_the_host_reads() -> None:
    """Both come out of one memory: together they take as long as all of its bytes."""
    shape = shape_of()
    model = CostModel(machine(link=90e9), shape, places(shape, WeightPlace(Placement.SPLIT, 0)))
    all_bytes = 16 * SIZE / 100e9
    for share in (0.0, 0.25, 0.5):
        assert model.seconds(ONE, share) == pytest.approx(all_bytes, rel=0.02)
    # Where the memory gives more than the processor reads, they do not.
    wide = machine(link=90e9, shared=200e9)
    model = CostModel(wide, shape, places(shape, WeightPlace(Placement.SPLIT, 0)))
    assert model.seconds(ONE, 0.5) == pytest.approx(all_bytes / 1.8, rel=0.02)


def test_streamed_bytes_cross_the_devices_memory_twice() -> None:
    shape = shape_of()
    profile = machine(link=10e12, dram=100e12)
    got = step_time(profile, shape, places(shape, STREAM), ONE)
    assert got.seconds == pytest.approx(2 * 16 * SIZE / 1e12) and got.limit == "HBM"


def test_experts_are_read_as_far_as_they_are_chosen() -> None:
    shape = shape_of(experts=64)
    got = step_time(machine(), shape, places(shape, HOST), ONE)
    # Two of 64, and one crossing there and back a layer.
    assert got.seconds == pytest.approx(16 * 2 * SIZE / 100e9, rel=0.02)


def test_a_table_is_looked_up() -> None:
    """A terabyte of embedding costs nothing; it is not read."""
    assert step_time(machine(), shape_of(), None, ONE).seconds < 1e-3


# --- shares and the bound -----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    link=st.floats(1e9, 100e9),
    dram=st.floats(10e9, 400e9),
    flops=st.floats(1e11, 1e13),
    tokens=st.integers(1, 2000),
)
def test_the_best_share_is_as_good_as_that_of_a_search(
    link: float, dram: float, flops: float, tokens: int
) -> None:
    """Over all shares of rows, and written down independently: one product after the other, the
    longer of both sides; the copies; the memory that both come from."""
    shape = shape_of()
    profile = machine(link=link, dram=dram, host_flops=flops, device_flops=1e14, activation_bytes=4)
    model = CostModel(profile, shape, places(shape, WeightPlace(Placement.SPLIT, 0)))
    load = StepLoad(tokens, 1, 1)

    def seconds(rows: int) -> float:
        streamed = rows / ROWS
        size, work = 16 * SIZE, 16 * FLOPS * tokens
        host = max((1 - streamed) * size / dram, (1 - streamed) * work / flops)
        device = max(streamed * size / 1e12, streamed * work / 1e14)
        number = 4 * tokens * ROWS / link
        crossings = 16 if 0 < rows < ROWS else 1 if rows == 0 else 0
        host += crossings * number * (1 - streamed)
        device += crossings * number * streamed
        if crossings:
            host += 4 * tokens * COLUMNS / link
        bytes_out = crossings * number * link * (1 - streamed)
        copies = (streamed * size + bytes_out) / link
        return max(host, device, copies, (size + bytes_out) / dram, 2 * streamed * size / 1e12)

    best = min(seconds(rows) for rows in range(0, ROWS + 1, 64))
    got = model.seconds(load, model.best_share(load))
    # Copies slow the host's reading down while it reads, which the search above does not know.
    assert 0.98 * best <= got <= 1.15 * best
    if model.best_share(load) in (0.0, 1.0):
        assert got == pytest.approx(min(model.seconds(load, n / 100) for n in range(101)), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    share=st.floats(0, 1),
    resident=st.integers(0, ROWS // 64),
    tokens=st.sampled_from([1, 3, 40, 600]),
    rates=st.tuples(*[st.floats(1e9, 1e12)] * 3),
)
def test_no_step_is_faster_than_the_bound(
    share: float, resident: int, tokens: int, rates: tuple[float, float, float]
) -> None:
    shape = shape_of(kv=(KVShape(LAYERS, 8, 128, 4096, None),))
    link, dram, flops = rates
    profile = machine(link=link, dram=dram, host_flops=flops, device_flops=1e13)
    where = places(shape, WeightPlace(Placement.SPLIT, 64 * resident))
    load = StepLoad(tokens, 1, 7)
    least = bound(profile, shape, 16 * SIZE * 64 * resident / ROWS, load)
    assert CostModel(profile, shape, where).seconds(load, share) >= least * (1 - 1e-6)


def test_the_bound_of_a_model_on_the_host() -> None:
    """DESIGN 2.3: around the break-even both together are twice as fast as either."""
    shape = shape_of()
    size = 16 * SIZE
    profile = machine(host_flops=1e12)
    # Few rows: the host's memory, which copies come out of too.
    assert bound(profile, shape, 0, ONE) == pytest.approx(size / 100e9)
    # T* = CPU flops / link: there both take as long.
    rows = int(1e12 / 10e9)
    both = bound(profile, shape, 0, StepLoad(rows, 1, 1))
    assert both == pytest.approx(size / 10e9 / 2, rel=0.01)
    # Far above streaming alone wins.
    assert bound(profile, shape, 0, StepLoad(100 * rows, 1, 1)) == pytest.approx(
        size / 10e9, rel=0.02
    )
    assert bound(profile, shape, size, ONE) == pytest.approx(size / 1e12)


def test_equal_layers_are_priced_once() -> None:
    shape = shape_of(head=True)
    model = CostModel(machine(), shape, places(shape, HALF))
    assert sum(len(segment.items) for segment in model._segments) <= 3
    assert sum(i.number for segment in model._segments for i in segment.items) == 17


# --- the table of a step ------------------------------------------------------------------------


def test_a_table_changes_evenly_between_its_points() -> None:
    table = SplitTable(((1, 0.0), (4, 0.3), (8, 1.0)))
    assert [table.share(n) for n in (1, 2, 4, 6, 8, 1000)] == pytest.approx(
        [0.0, 0.1, 0.3, 0.65, 1.0, 1.0]
    )
    assert SplitTable(((2, 0.5),)).share(1) == 0.5


def test_streamed_rows_are_whole_units_or_all() -> None:
    assert [streamed_rows(share, 200) for share in (0.0, 0.2, 0.5, 0.9, 1.0)] == [
        0,
        64,
        128,
        192,
        200,
    ]
    assert streamed_rows(0.5, 0) == 0
    for rows in (1, 63, 64, 65, 1000):
        counts = [streamed_rows(n / 50, rows) for n in range(51)]
        assert counts == sorted(counts) and counts[-1] == rows
        assert all(count % 64 == 0 or count == rows for count in counts)


def test_a_table_has_a_share_for_every_number_of_tokens() -> None:
    shape = shape_of()
    profile = machine(host_flops=1e12)
    model = CostModel(profile, shape, places(shape, WeightPlace(Placement.SPLIT, 0)))
    table = model.table(3000, 128, 1)
    assert [n for n, _ in table.points] == [*(1 << i for i in range(12)), 3000]
    shares = [share for _, share in table.points]
    # More rows, more streaming.
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] > 0.95
    assert math.isclose(table.share(100), model.best_share(StepLoad(100, 1, 1)), abs_tol=0.1)


def test_tokens_share_experts() -> None:
    """One token uses two of 64; each further one finds some of its own in use already."""
    weight = next(w for w in shape_of(experts=64).weights if w.kind is WeightKind.EXPERTS)
    used = [experts_used(weight, n) for n in (0, 1, 2, 32, 10_000)]
    assert used[:3] == pytest.approx([0, 2, 64 * (1 - (62 / 64) ** 2)])
    assert 40 < used[3] < 64 and used[4] == pytest.approx(64)
    plain = next(w for w in shape_of().weights if w.kind is WeightKind.MATRIX)
    assert [experts_used(plain, n) for n in (0, 1, 5)] == [0, 1, 1]
