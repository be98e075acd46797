"""Products whose rows lie in two memories: the bits of one table, and only what has to cross."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ambidex.device.cpu import CPUDevice
from ambidex.device.host_memory import HostMemory
from ambidex.device.queued import QueuedKernels
from ambidex.device.sim import SimDevice, make_sim
from ambidex.errors import DeviceError, OutOfMemory
from ambidex.kernels import rows
from ambidex.kernels.quantized import Quantized
from ambidex.layers.module import Place
from ambidex.memory.cost_model import ComputeRate
from ambidex.quant import lossless
from ambidex.quant.on_load import quantise
from ambidex.weights.compressed import Compression
from ambidex.weights.placed import PlacedKernels
from ambidex.weights.placed_weight import (
    Ordered,
    PlacedWeight,
    decompressed_bytes,
    ring_bytes,
    row_ranges,
)
from ambidex.weights.streamer import Streamer, staged_bytes

RATE = ComputeRate(10e9, 50e9)
RESERVED = {"weights": 16 << 20, "activations": 16 << 20, "staging": 16 << 20}


class Lane:
    """A table over two memories, and the table of one."""

    def __init__(self, is_async: bool = True) -> None:
        self.host = CPUDevice(1, kernels="native")
        self.device: SimDevice = make_sim("memory=64MiB", lambda: RATE, ())
        for account, num_bytes in RESERVED.items():
            self.device.ledger.reserve(account, account, num_bytes)
        queue = QueuedKernels(
            self.host.kernels,
            self.device.new_stream("host", self.host.prepare_thread),
            HostMemory(self.device),
            RATE,
            "the host's",
        )
        # One thread at a time may use a table, and the host's has its stream's.
        self._beside = CPUDevice(1, kernels="native")
        self.plain: Any = self._beside.kernels
        self.kernels = PlacedKernels(self.device, queue, cast("Any", self.host.kernels))
        self.is_async = is_async
        self.order: list[Ordered] = []

    def place(
        self, weight: torch.Tensor | Quantized, place: Place, *, is_paired: bool = False
    ) -> Any:
        held = self.kernels.place([weight], False, place, is_paired)
        if isinstance(held, PlacedWeight):
            self.order.append(Ordered(held, f"layers.{len(self.order)}", False))
        return held

    def stream(self, groups: int = 2, max_rows: int = 32) -> Streamer:
        """Make the ring for what has been placed."""
        size = ring_bytes(self.order, groups, max_rows)
        streamer = Streamer(self.device, size, self.is_async) if size else None
        self.kernels.set_order(self.order, streamer)
        return cast(Streamer, streamer)

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.fetch(x).clone()

    def close(self) -> None:
        self.kernels.close()
        self.device.close()
        self.host.close()
        del self.plain
        self._beside.close()


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Lane]:
    """For tests of many examples."""
    made = Lane()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("rows", "is_paired", "expected"),
    [
        ((0, 64, 192), False, ((0, 64),)),
        ((64, 192, 192), False, ((64, 192),)),
        ((0, 64, 192), True, ((0, 64), (192, 256))),
        ((64, 192, 192), True, ((64, 192), (256, 384))),
        ((0, 192, 192), True, ((0, 384),)),
    ],
)
def test_ranges_of_rows(
    rows: tuple[int, int, int], is_paired: bool, expected: tuple[tuple[int, int], ...]
) -> None:
    assert row_ranges(*rows, is_paired) == expected


# ------------------------------------------------------------------------------------- products


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """``(rows, resident, streamed, tokens)``."""
    rows = draw(st.sampled_from([64, 100, 128, 192, 320]))
    resident = 64 * draw(st.integers(0, -(-rows // 64)))
    left = rows - min(resident, rows)
    return (
        rows,
        resident,
        draw(st.sampled_from([0, left // 128 * 64, left])),
        draw(st.integers(1, 17)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cut=cuts(),
    form=st.sampled_from(["float32", "bfloat16", "float16", "int8", "int4"]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    x_is_there=st.booleans(),
)
def test_linear(
    shared: Lane,
    cut: tuple[int, int, int, int],
    form: str,
    has_bias: bool,
    has_residual: bool,
    x_is_there: bool,
) -> None:
    rows, resident, streamed, tokens = cut
    generator = torch.Generator().manual_seed(rows + 7 * resident + 13 * streamed + tokens)
    weight = matrix(torch.randn(rows, 96, generator=generator), form)
    x = torch.randn(tokens, 96, generator=generator)
    bias = torch.randn(rows, generator=generator) if has_bias else None
    residual = torch.randn(tokens, rows, generator=generator) if has_residual else None
    expected = shared.plain.linear(x, shared.plain.pack(weight), bias, residual)
    shared.order.clear()
    held = shared.place(weight, Place(resident, lambda _: streamed))
    shared.stream()
    shared.kernels.begin_step(tokens, 0)
    before = dict(shared.kernels.num_rows)
    store = shared.device.store
    out = shared.kernels.linear(
        store(x, "activations") if x_is_there else x,
        held,
        None if bias is None else store(bias),
        residual,
    )
    assert torch.equal(shared.fetch(out), expected)
    counted = {place: shared.kernels.num_rows[place] - before[place] for place in before}
    here = min(resident, rows)
    assert counted == {"resident": here, "streamed": streamed, "host": rows - here - streamed}
    shared.kernels._crossings._constants.clear()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cut=cuts(),
    form=st.sampled_from(["float32", "bfloat16", "int8"]),
    activation=st.sampled_from(["silu", "gelu_pytorch_tanh", "relu"]),
    has_bias=st.booleans(),
)
def test_gated_linear(
    shared: Lane, cut: tuple[int, int, int, int], form: str, activation: str, has_bias: bool
) -> None:
    """Row i of the gate and row i of the other belong together, wherever they lie."""
    rows, resident, streamed, tokens = cut
    generator = torch.Generator().manual_seed(rows + 7 * resident + 13 * streamed + tokens)
    weight = matrix(torch.randn(2 * rows, 64, generator=generator), form)
    x = torch.randn(tokens, 64, generator=generator)
    bias = torch.randn(2 * rows, generator=generator) if has_bias else None
    expected = shared.plain.gated_linear(x, shared.plain.pack(weight), activation, bias)
    shared.order.clear()
    held = shared.place(weight, Place(resident, lambda _: streamed), is_paired=True)
    shared.stream()
    shared.kernels.begin_step(tokens, 0)
    out = shared.kernels.gated_linear(
        x, held, activation, None if bias is None else shared.device.store(bias)
    )
    assert torch.equal(shared.fetch(out), expected)
    shared.kernels._crossings._constants.clear()


def matrix(weight: torch.Tensor, form: str) -> torch.Tensor | Quantized:
    if form in ("int8", "int4"):
        return quantise("weight", weight, form)
    return weight.to(getattr(torch, form))


def test_no_tokens(lane: Lane) -> None:
    held = lane.place(torch.randn(128, 64), Place(64, lambda _: 0))
    lane.stream()
    assert lane.fetch(lane.kernels.linear(torch.zeros(0, 64), held)).shape == (0, 128)


def test_where_a_weight_lies(lane: Lane) -> None:
    held = lane.place(torch.randn(320, 64), Place(64, lambda _: 128))
    assert (held.num_rows, held.num_resident, held.num_host) == (320, 64, 256)
    assert held.device_bytes == 64 * 64 * 4 and held.host_bytes == 256 * 64 * 4
    assert held.num_bytes == 320 * 64 * 4
    assert lane.device.taken_bytes("weights") == held.device_bytes
    assert held.staged(128).num_bytes == 128 * 64 * 4
    assert held.staged(128) is held.staged(128), "so that it is known again in every step"
    everything = lane.place(torch.randn(320, 64), Place(320, lambda _: 0))
    assert not isinstance(everything, PlacedWeight)
    assert lane.device.taken_bytes("weights") == held.device_bytes + everything.num_bytes


def test_a_weight_that_does_not_fit_is_refused(lane: Lane) -> None:
    with pytest.raises(OutOfMemory, match=r"16\.00 MiB wanted for weights|wanted for weights"):
        lane.place(torch.zeros(4096, 1100), Place(4096, lambda _: 0))
    assert lane.device.taken_bytes("weights") == 0


# ------------------------------------------------------------------------------------- crossing


def test_between_two_matrices_of_the_host_nothing_crosses(lane: Lane) -> None:
    gate_up, down = torch.randn(640, 128), torch.randn(128, 320)
    up_there = lane.place(gate_up, Place(0, lambda _: 0), is_paired=True)
    down_there = lane.place(down, Place(0, lambda _: 0))
    lane.stream()
    x = torch.randn(5, 128)
    crossing = lane.kernels.num_activation_bytes
    there = lane.device.store(x, "activations")
    inner = lane.kernels.gated_linear(there, up_there, "silu")
    assert not lane.device.owns(inner)
    out = lane.kernels.linear(inner, down_there)
    assert lane.kernels.num_activation_bytes - crossing == x.nbytes
    lane.device.copy_out.synchronize()
    assert lane.device.copy_out.num_bytes == x.nbytes
    plain = lane.plain
    expected = plain.linear(plain.gated_linear(x, plain.pack(gate_up), "silu"), plain.pack(down))
    got = lane.kernels.add(out, lane.device.store(torch.zeros(5, 128), "activations"))
    assert lane.device.owns(got)
    assert lane.kernels.num_activation_bytes - crossing == 2 * x.nbytes
    assert torch.equal(lane.fetch(got), expected)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_activations_and_caps_stay_where_their_input_is(lane: Lane, activation: str) -> None:
    up = torch.randn(128, 64)
    held = lane.place(up, Place(0, lambda _: 0))
    lane.stream()
    x = torch.randn(3, 64)
    here = lane.kernels.activate(lane.kernels.linear(x, held), activation)
    capped = lane.kernels.softcap(here, 5.0)
    assert not lane.device.owns(here) and not lane.device.owns(capped)
    product = lane.plain.linear(x, lane.plain.pack(up))
    expected = lane.plain.softcap(lane.plain.activate(product, activation), 5.0)
    assert torch.equal(lane.fetch(capped), expected)
    there = lane.kernels.activate(lane.device.store(product, "activations"), activation)
    assert lane.device.owns(lane.kernels.softcap(there, 5.0))
    assert lane.kernels.num_activation_bytes == 0


def test_a_table_on_the_host_is_looked_up_there(lane: Lane) -> None:
    table = torch.randn(512, 64)
    held = lane.place(table, Place(0, lambda _: 0))
    ids = torch.tensor([3, 3, 511, 0])
    rows = lane.kernels.embedding(ids, held, 2.0)
    assert not lane.device.owns(rows)
    assert torch.equal(lane.fetch(rows), table[ids] * 2)
    assert lane.kernels.num_rows["host"] == 4
    assert lane.kernels.num_activation_bytes == 0
    resident = lane.kernels.pack_table(table)
    assert torch.equal(lane.fetch(lane.kernels.embedding(ids, resident)), table[ids])


@pytest.mark.parametrize("is_there", [True, False])
def test_experts_lie_together(lane: Lane, is_there: bool) -> None:
    place = Place(0, lambda _: 0)
    gate_up = [torch.randn(128, 64) for _ in range(4)]
    down = [torch.randn(64, 64) for _ in range(4)]

    def held(weights: list[torch.Tensor]) -> list[Any]:
        return [lane.kernels.place([w], False, None if is_there else place) for w in weights]

    x, weights = torch.randn(6, 64), torch.rand(6, 2)
    experts = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [1, 0], [3, 2]])
    store = lane.device.store
    routed = store(weights, "activations"), store(experts, "activations")
    there = held(gate_up), held(down)
    got = lane.kernels.moe(store(x, "activations"), *there, *routed, "silu")
    pack = lane.plain.pack
    expected = lane.plain.moe(
        x, [pack(w) for w in gate_up], [pack(w) for w in down], weights, experts, "silu"
    )
    assert lane.device.owns(got) == is_there
    assert torch.equal(lane.fetch(got), expected)
    assert lane.kernels.num_rows["host"] == (0 if is_there else 12)


def test_biases_are_copied_once(lane: Lane) -> None:
    weight, bias = torch.randn(320, 64), torch.randn(320)
    held = lane.place(weight, Place(64, lambda _: 128))
    lane.stream()
    there = lane.device.store(bias)
    x = torch.randn(2, 64)
    taken = lane.device.taken_bytes("weights")
    for _ in range(3):
        lane.kernels.begin_step(2, 0)
        got = lane.fetch(lane.kernels.linear(x, held, there))
        assert torch.equal(got, lane.plain.linear(x, lane.plain.pack(weight), bias))
    # Its parts on the device are parts of it.
    assert lane.device.taken_bytes("weights") == taken
    to_host = [span for span in lane.device.clock.timeline if span.name == "to_host"]
    assert [span.num_bytes for span in to_host if span.num_bytes == bias.nbytes] == [bias.nbytes]


# ------------------------------------------------------------------------------------- the ring


def chain(lane: Lane, count: int, place: Place) -> list[Any]:
    """Weights of ``count`` layers, 64 by 64."""
    generator = torch.Generator().manual_seed(3)
    return [lane.place(torch.randn(64, 64, generator=generator), place) for _ in range(count)]


def step(lane: Lane, weights: list[Any], x: torch.Tensor) -> torch.Tensor:
    lane.kernels.begin_step(len(x), 0)
    for weight in weights:
        x = lane.kernels.linear(x, weight)
    lane.kernels.end_step()
    return lane.fetch(x)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 9])
def test_a_ring_of_any_size(lane: Lane, groups: int) -> None:
    weights = chain(lane, 5, Place(0, lambda _: 64))
    streamer = lane.stream(groups)
    size = 64 * 64 * 4
    assert streamer.ring_bytes == groups * size
    x = torch.randn(3, 64)
    expected = x
    for weight in weights:
        expected = lane.plain.linear(expected, weight.host)
    for number in range(1, 4):
        assert torch.equal(step(lane, weights, x), expected)
        held = min(groups, 5)
        assert streamer.num_ahead == held and streamer.num_bytes_ahead == held * size
        assert streamer.num_bytes == (5 * number + held) * size
        assert streamer.num_prefetched == 5 * number
    assert streamer.num_wasted_bytes == 0
    assert lane.device.peak_bytes("staging") == groups * size


def test_without_copies_ahead(lane: Lane) -> None:
    lane.is_async = False
    weights = chain(lane, 4, Place(0, lambda _: 64))
    streamer = lane.stream(1)
    x = torch.randn(3, 64)
    step(lane, weights, x)
    step(lane, weights, x)
    assert (streamer.num_copies, streamer.num_prefetched, streamer.num_ahead) == (8, 0, 0)
    # Nothing computes while a weight is copied.
    spans = [s for s in lane.device.clock.timeline if s.name in ("weights", "linear")]
    spans.sort(key=lambda span: (span.start_s, span.end_s))
    for before, after in itertools.pairwise(spans):
        assert before.end_s <= after.start_s + 1e-12


def test_nothing_waits_for_what_a_failed_step_used(lane: Lane) -> None:
    """What lies in the ring's end was used after something had failed, and is still there when the
    next step needs its place."""
    place = Place(0, lambda _: 128)
    weights = [lane.place(torch.randn(128, 128), place) for _ in range(2)]
    weights.append(lane.place(torch.randn(64, 128), Place(0, lambda _: 64)))
    streamer = Streamer(lane.device, 192 * 128 * 4)
    lane.kernels.set_order(lane.order, streamer)
    x = torch.randn(3, 128)
    expected = x
    for weight in weights:
        expected = lane.plain.linear(expected, weight.host)
    assert torch.equal(step(lane, weights, x), expected)

    def fail() -> None:
        raise RuntimeError("for once")

    lane.device.compute.launch("fails", fail, 0.0)
    with pytest.raises(DeviceError, match="for once"):
        step(lane, weights, x)
    with pytest.raises(DeviceError, match="for once"):
        lane.device.synchronize()
    assert torch.equal(step(lane, weights, x), expected)


def test_without_copies_ahead_the_host_waits_too(lane: Lane) -> None:
    """Nothing is launched meanwhile, on any stream."""
    lane.is_async = False
    (weight,) = chain(lane, 1, Place(0, lambda _: 64))
    lane.stream(1)
    lane.kernels.begin_step(3, 0)
    clock = lane.device.clock
    assert clock.host_s == 0.0
    lane.kernels.linear(lane.device.store(torch.randn(3, 64), "activations"), weight)
    copied = next(span for span in clock.timeline if span.name == "weights")
    assert clock.host_s == copied.end_s > 0.0


def test_a_decompressed_weight_leaves_the_ring_before_its_product(lane: Lane) -> None:
    """The next one is copied over what crossed, while the accelerator multiplies."""
    lane.kernels.compression = Compression(1e9, 1e12)
    place = Place(0, lambda _: 1024, is_compressed=True)
    weights = [lane.place(torch.randn(1024, 1024).bfloat16(), place) for _ in range(3)]
    streamer = lane.stream(1)
    streamer.decompress_into(decompressed_bytes(lane.order))
    x = torch.randn(200, 1024)
    expected = x
    for weight in weights:
        words = lossless.decompress(weight.host._compressed).view(torch.bfloat16)
        plain = weight.host.form.gather([(0, 1024)], lambda _, words=words: words.view(torch.uint8))
        expected = lane.plain.linear(expected, plain)
    assert torch.equal(step(lane, weights, x), expected)
    lane.device.synchronize()
    spans = lane.device.clock.timeline
    copies, products = ([s for s in spans if s.name == name] for name in ("weights", "linear"))
    assert len(copies) == 4 and len(products) == 3
    for copy, product in zip(copies[1:], products, strict=True):
        assert copy.start_s <= product.start_s < product.end_s


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_order_of_steps(data: st.DataObject) -> None:
    """Numbers of tokens for which other rows are streamed, weights that are left out or used twice,
    steps that end early: always the right product, and never memory that is in use."""
    lane = Lane()
    tables = st.sampled_from([(64, 64), (64, 128), (0, 64), (64, 0), (128, 128)])
    weights = []
    for _ in range(data.draw(st.integers(1, 5), label="weights")):
        few, many = data.draw(tables)
        place = Place(0, lambda count, few=few, many=many: few if count < 3 else many)
        weights.append(lane.place(torch.randn(128, 64), place))
    lane.stream(data.draw(st.integers(1, 4), label="groups"), 8)
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        tokens = data.draw(st.integers(1, 8), label="tokens")
        x = torch.randn(tokens, 64)
        which = st.integers(0, len(weights) - 1)
        used = [weights[i] for i in data.draw(st.lists(which, max_size=8), label="used")]
        if data.draw(st.booleans(), label="in order"):
            used = weights
        lane.kernels.begin_step(tokens, 0)
        results = [lane.kernels.linear(x, weight) for weight in used]
        if data.draw(st.booleans(), label="ends"):
            lane.kernels.end_step()
        for weight, result in zip(used, results, strict=True):
            assert torch.equal(lane.fetch(result), lane.plain.linear(x, weight.host))
    lane.close()


def test_what_a_ring_takes(lane: Lane) -> None:
    """The largest layer times their number, at the number of tokens that streams most."""
    small = lane.place(torch.randn(64, 64), Place(0, lambda _: 64))
    large = lane.place(torch.randn(320, 64), Place(0, lambda count: 64 if count < 8 else 256))
    order = [Ordered(small, "layers.0", False), Ordered(large, "layers.0", False),
             Ordered(large, "layers.1", False)]  # fmt: skip
    row = 64 * 4
    assert ring_bytes(order, 1, 32) == (64 + 256) * row
    assert ring_bytes(order, 3, 32) == 3 * (64 + 256) * row
    assert ring_bytes(order, 2, 7) == 2 * 128 * row
    assert ring_bytes([], 2, 32) == 0
    host = lane.place(torch.randn(64, 64), Place(0, lambda _: 0))
    assert ring_bytes([Ordered(host, "head", True)], 2, 32) == 0


def test_staged_bytes_are_aligned(lane: Lane) -> None:
    weight = lane.plain.pack(torch.randn(64, 3))
    # 16 rows of 3 columns are 192 bytes.
    assert staged_bytes(weight, ((0, 16),)) == 192
    assert staged_bytes(lane.plain.pack(torch.randn(64, 1)), ((0, 16), (32, 48))) == 128


def test_without_its_event_a_ring_fails(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = chain(lane, 3, Place(0, lambda _: 64))
    lane.stream(2)
    x = torch.randn(3, 64)
    monkeypatch.setattr(type(lane.device.compute), "wait", lambda self, event: None)
    with pytest.raises(DeviceError, match="reads memory that copy_in has not yet written"):
        step(lane, weights, lane.device.store(x, "activations"))


@pytest.mark.parametrize("count", [0, 64, 192, 200])
def test_rows_that_are_read_a_few_at_a_time(
    lane: Lane, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each goes to its place; what is there in the end is what a whole matrix would be."""
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 14)
    weight, asked = torch.randn(200, 48), list[int]()

    def read(start: int, end: int) -> torch.Tensor:
        asked.append(end - start)
        return weight[start:end]

    place = Place(count, lambda _: 0)
    made = lane.kernels.place([rows.TensorRows((200, 48), torch.float32, read)], True, place)
    lane.stream()
    assert max(asked) <= 64 and sum(asked) == 200
    assert isinstance(made, PlacedWeight) == (count < 200)
    if isinstance(made, PlacedWeight):
        assert (made.num_resident, made.num_host) == (count, 200 - count)
    x = torch.randn(3, 48)
    got = lane.fetch(lane.kernels.linear(x, made))
    assert torch.equal(got, lane.plain.linear(x, lane.plain.pack(weight)))
