"""Seconds of a step's operations: properties of the arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.memory.cost_model import CostModel
from ambidex.memory.model_shape import KVShape, ModelShape, WeightShape
from ambidex.memory.operations import (
    StepLoad,
    attention_parts,
    fit_reading,
    host_step_parts,
    host_step_s,
    prefill_steps,
    product_parts,
    small_parts,
    step_bytes,
)
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.memory.weight_places import WeightKind

HOST = Processor(
    name="host",
    memory_bytes=32 << 30,
    bytes_per_s=30e9,
    products={
        "float32": ProductRate(((1, 80e9), (4, 200e9), (64, 200e9)), 33e9, 1.5),
        "int8": ProductRate(((1, 200e9), (8, 500e9), (256, 600e9)), 28e9, 3.0),
    },
    launch_s=1e-6,
    step_s=5e-4,
    token_s=5e-6,
    prompt_token_s=1e-7,
    num_threads=2,
    attention={"float32": ProductRate(((1, 50e9), (8, 140e9), (96, 200e9)), 30e9, 2.0)},
    small_bytes_per_s=20e9,
    kept=((16e6, 0.9), (64e6, 0.3), (128e6, 0.0)),
)


def make_shape(layers: int = 2, form: str = "int8", num_experts: int = 1) -> ModelShape:
    hidden, inner, vocab = 64, 192, 1000

    def weight(
        path: str, rows: int, columns: int, kind: WeightKind, experts: int = 1
    ) -> WeightShape:
        size = 4 if form == "float32" or kind is WeightKind.VECTOR else 1
        chosen = min(experts, 2)
        num_bytes = rows * columns * size * experts
        return WeightShape(path, rows, columns, kind, form, num_bytes, experts, chosen)

    weights = [weight("embedding.weight", vocab, hidden, WeightKind.TIED)]
    mlp = WeightKind.EXPERTS if num_experts > 1 else WeightKind.MATRIX
    for layer in range(layers):
        at = f"layers.{layer}"
        weights += [
            weight(f"{at}.attention_norm.weight", hidden, 1, WeightKind.VECTOR),
            weight(f"{at}.attention.qkv.weight", 128, hidden, WeightKind.MATRIX),
            weight(f"{at}.mlp.gate_up.weight", 2 * inner, hidden, mlp, num_experts),
            weight(f"{at}.mlp.down.weight", hidden, inner, mlp, num_experts),
        ]
    return ModelShape(
        name="tiny",
        model_type="llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocab,
        num_heads=4,
        head_dim=16,
        weights=tuple(weights),
        kv=(KVShape(layers, 2, 16, layers * 2 * 2 * 16 * 4, None),),
        max_positions=4096,
    )


SHAPE = make_shape()
counts = st.integers(1, 64)


@given(seqs=counts, new=st.integers(1, 512), before=st.integers(0, 2000))
def test_more_work_never_takes_less(seqs: int, new: int, before: int) -> None:
    least = host_step_s(HOST, SHAPE, StepLoad(seqs, new, new + before))
    for more in (
        StepLoad(seqs + 1, new, new + before),
        StepLoad(seqs, new + 1, new + 1 + before),
        StepLoad(seqs, new, new + before + 64),
    ):
        assert host_step_s(HOST, SHAPE, more) >= least * (1 - 1e-9)


@given(
    tokens=st.integers(1, 600),
    factor=st.floats(1.0, 4.0),
    form=st.sampled_from(["int8", "float32"]),
)
def test_more_bytes_never_take_less(tokens: int, factor: float, form: str) -> None:
    weight = make_shape(form=form).weights[2]
    larger = dataclasses.replace(weight, num_bytes=int(weight.num_bytes * factor))
    assert max(product_parts(HOST, larger, tokens)) >= max(product_parts(HOST, weight, tokens))


def test_a_product_takes_longer_than_reading_and_than_arithmetic() -> None:
    weight = SHAPE.weights[2]
    rate = HOST.products["int8"]
    for tokens in (1, 8, 64):
        read = weight.num_bytes / rate.bytes_per_s
        compute = 2.0 * weight.rows * weight.columns * tokens / rate.flops(tokens)
        parts = product_parts(HOST, weight, tokens)
        # The longer one is stretched by what of the shorter does not hide; the shorter stands.
        assert max(read, compute) < max(parts) <= read + compute
        assert (parts[0] > parts[1]) == (read > compute)
        assert min(parts) == pytest.approx(min(read, compute))
    perfect = dataclasses.replace(HOST, products={"int8": ProductRate(rate.points, 28e9)})
    assert max(product_parts(perfect, weight, 1)) == pytest.approx(weight.num_bytes / 28e9)


def test_inputs_count_however_few_outputs_they_have() -> None:
    weight = SHAPE.weights[2]
    points = ((1, 1e12),)
    plain = dataclasses.replace(HOST, products={"int8": ProductRate(points)})
    rounding = dataclasses.replace(HOST, products={"int8": ProductRate(points, input_s=1e-9)})
    for rows in (weight.rows, weight.rows // 2):
        one = dataclasses.replace(weight, rows=rows)
        more = product_parts(rounding, one, 100)[1] - product_parts(plain, one, 100)[1]
        assert more == pytest.approx(100 * weight.columns * 1e-9)


def test_half_of_the_rows_takes_half() -> None:
    whole = product_parts(HOST, SHAPE.weights[2], 5)
    assert product_parts(HOST, SHAPE.weights[2], 5, 0.5) == pytest.approx([p / 2 for p in whole])


def test_what_caches_keep_is_not_read() -> None:
    weight = SHAPE.weights[2]
    reads = [product_parts(HOST, weight, 1, kept=kept) for kept in (0.0, 0.5, 1.0)]
    assert max(reads[0]) > max(reads[1]) > max(reads[2])
    assert reads[2][0] == 0
    assert [HOST.kept_share(n) for n in (0, 16e6, 40e6, 64e6, 96e6, 1e9)] == pytest.approx(
        [1.0, 0.9, 0.6, 0.3, 0.15, 0.0]
    )
    assert dataclasses.replace(HOST, kept=()).kept_share(1.0) == 0


def test_experts_are_read_as_far_as_they_are_used() -> None:
    shape = make_shape(num_experts=8)
    weight = shape.weights[3]
    plain = dataclasses.replace(HOST, products={"int8": ProductRate(((1, 1e15),))})
    # Each token leaves three quarters of them out.
    for tokens, used in ((1, 2), (2, 3.5), (3, 4.625), (50, 8)):
        read, _ = product_parts(plain, weight, tokens)
        assert read == pytest.approx(used / 8 * weight.num_bytes / plain.bytes_per_s, rel=1e-5)
    more = step_bytes(shape, StepLoad(3, 1, 1)) - step_bytes(shape, StepLoad(1, 1, 1))
    experts = sum(w.num_bytes for w in shape.weights if w.num_experts > 1)
    assert more == (4.625 - 2) / 8 * experts + 2 * shape.kv_bytes_per_token


def test_attention_counts_what_is_seen() -> None:
    group = SHAPE.kv[0]
    short = attention_parts(HOST, SHAPE, group, StepLoad(1, 1, 100))
    assert max(attention_parts(HOST, SHAPE, group, StepLoad(1, 1, 1000))) > 5 * max(short)
    window = dataclasses.replace(group, window=100)
    assert attention_parts(HOST, SHAPE, window, StepLoad(1, 1, 1000)) == pytest.approx(short)
    # A prompt sees half of itself on average: twice as long, four times as much at last.
    times = [
        max(attention_parts(HOST, SHAPE, group, StepLoad(1, length, length)))
        for length in (4096, 8192)
    ]
    assert 3.8 < times[1] / times[0] < 4.0


def test_a_profile_without_attention_rates_has_rooflines() -> None:
    plain = Processor("gpu", 0, 1e12, {"float32": ProductRate(((1, 100e12),))}, 50e12, 5e11)
    group = SHAPE.kv[0]
    read, compute = attention_parts(plain, SHAPE, group, StepLoad(1, 1, 1000))
    assert read == pytest.approx(1000 * group.bytes_per_token / 5e11)
    assert compute == pytest.approx(4 * 1000 * 4 * 16 * group.num_layers / 50e12)


def test_the_head_has_a_row_for_each_sequence() -> None:
    prompt = host_step_parts(HOST, SHAPE, StepLoad(2, 100, 100))
    assert prompt["head"] == host_step_parts(HOST, SHAPE, StepLoad(2, 1, 100))["head"]
    assert prompt["products"] > host_step_parts(HOST, SHAPE, StepLoad(2, 1, 100))["products"]


def test_fixed_costs_are_counted() -> None:
    load = StepLoad(4, 1, 10)
    operations, _ = small_parts(HOST, SHAPE, load)
    # 2 layers: a norm, 3 products, rotation, keys and values, 3 of attention; embedding, rows,
    # head, choice.
    assert operations == 2 * (1 + 3 + 1 + 1 + 3) + 4
    fixed = host_step_parts(HOST, SHAPE, load)["fixed"]
    assert fixed == pytest.approx(operations * 1e-6 + 5e-4 + 4 * 5e-6 + 4 * 1e-7)


def test_a_long_prompt_is_cut_and_short_ones_go_together() -> None:
    assert list(prefill_steps(1000, 400)) == [
        StepLoad(1, 400, 400),
        StepLoad(1, 400, 800),
        StepLoad(1, 200, 1000),
    ]
    assert list(prefill_steps(100, 250, 5)) == [
        StepLoad(2, 100, 100),
        StepLoad(2, 100, 100),
        StepLoad(1, 100, 100),
    ]
    for prompt, chunk, seqs in itertools.product((1, 7, 100), (1, 7, 64), (1, 3)):
        steps = list(prefill_steps(prompt, chunk, seqs))
        assert sum(step.num_tokens for step in steps) == prompt * seqs
        assert all(step.num_tokens <= chunk for step in steps)


@given(
    rows=st.integers(1, 300),
    flops=st.lists(st.floats(1e9, 1e12), min_size=3, max_size=3).map(sorted),
)
def test_rates_between_points_lie_between_them(rows: int, flops: list[float]) -> None:
    rate = ProductRate(tuple(zip((1, 8, 256), flops, strict=True)))
    assert flops[0] * (1 - 1e-9) <= rate.flops(rows) <= flops[2] * (1 + 1e-9)
    for at, reached in zip((1, 8, 256), flops, strict=True):
        assert rate.flops(at) == pytest.approx(reached)
    assert rate.scaled(2).flops(rows) == pytest.approx(2 * rate.flops(rows))


@pytest.mark.parametrize("overlap", [1.25, 1.5, 3.0, math.inf])
def test_the_fit_finds_what_the_times_were_made_of(overlap: float) -> None:
    read_s = 4e-5
    rate = ProductRate(((1, 1.0),), overlap=overlap)
    compute = [8e-6, 1e-5, 2e-5, 4e-5, 7e-5]
    found = fit_reading([(c, rate.together(read_s, c)) for c in compute])
    fitted = ProductRate(((1, 1.0),), overlap=found[1])
    assert found[0] == pytest.approx(read_s, rel=0.02)
    for c in compute:
        assert fitted.together(found[0], c) == pytest.approx(rate.together(read_s, c), rel=0.02)


@given(seqs=counts, new=st.integers(1, 512), before=st.integers(0, 2000))
def test_plans_say_the_same(seqs: int, new: int, before: int) -> None:
    load = StepLoad(seqs, new, new + before)
    for shape in (SHAPE, make_shape(5, "float32"), make_shape(3, num_experts=8)):
        planned = CostModel(HardwareProfile("here", HOST), shape).seconds(load)
        assert planned == pytest.approx(host_step_s(HOST, shape, load))
