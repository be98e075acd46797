"""Norms, activations and selections at every level: near the reference, and exact over rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ambidex.errors import KernelError
from ambidex.kernels import reference
from ambidex.kernels.cpu.small import SmallOps

_native = pytest.importorskip("ambidex.kernels.cpu._native")

LEVELS = _native.supported_levels()
FEW = settings(max_examples=25, deadline=None)

levels = st.sampled_from(LEVELS)
threads = st.integers(1, 3)
row_counts = st.integers(0, 9)
widths = st.integers(1, 80) | st.sampled_from([576, 1023, 1024, 1025, 3000])
activations = st.sampled_from(sorted(reference.ACTIVATIONS))

_tables: dict[tuple[str, int], SmallOps] = {}


def table(level: str, num_threads: int = 2) -> SmallOps:
    key = (level, num_threads)
    if key not in _tables:
        _tables[key] = SmallOps(num_threads, [], level)
    return _tables[key]


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-6)


# -- functions over their whole range --

SPECIAL = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 3e38, -3e38, 88.7, -88.7, 0.625, -0.625]


def whole_range(largest: float) -> torch.Tensor:
    linear = np.linspace(-largest, largest, 200_000)
    small = np.geomspace(1e-30, largest, 50_000)
    points = np.concatenate([linear, small, -small]).astype(np.float32)
    return torch.from_numpy(points)[None]


def exact(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        if name == "relu":
            return np.maximum(x, 0)
        if name in ("silu", "swish"):
            return x / (1 + np.exp(-x))
        if name == "gelu":
            return np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x])
        return x / (1 + np.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sorted(reference.ACTIVATIONS))
def test_activations_over_their_range(level: str, name: str) -> None:
    x = whole_range(100.0)
    out = table(level).activate(x, name).numpy()[0].astype(np.float64)
    expected = exact(name, x.numpy()[0].astype(np.float64))
    assert np.abs(out - expected).max() < 4e-6
    # Numbers that are not tiny are right in their digits, far below zero too.
    matter = np.abs(expected) > 1e-6
    error = np.abs(out - expected)[matter] / np.abs(expected)[matter]
    assert error.max() < 4e-6, x.numpy()[0][matter][error.argmax()]


@pytest.mark.parametrize("level", LEVELS)
def test_softcap_over_its_range(level: str) -> None:
    for cap in (1.0, 30.0, 50.0):
        x = whole_range(cap * 20)
        out = table(level).softcap(x, cap).numpy()[0].astype(np.float64)
        expected = cap * np.tanh(x.numpy()[0].astype(np.float64) / cap)
        assert (np.abs(out - expected) / np.abs(expected).clip(1e-35)).max() < 5e-7


@pytest.mark.parametrize("level", LEVELS)
def test_functions_of_numbers_at_the_edge(level: str) -> None:
    x = torch.tensor([[*SPECIAL, math.inf, math.nan]])
    ops = table(level)
    for name in reference.ACTIVATIONS:
        out = ops.activate(x, name)[0]
        expected = torch.from_numpy(exact(name, np.array(SPECIAL))).float()
        torch.testing.assert_close(out[:-2], expected, rtol=1e-5, atol=1e-37)
        assert out[-2] == math.inf and out[-1].isnan()
        assert not ops.activate(torch.tensor([[-math.inf]]), name).isinf().any()
    out = ops.softcap(x, 30.0)
    torch.testing.assert_close(
        out, reference.softcap(x, 30.0), rtol=1e-6, atol=1e-37, equal_nan=True
    )


# -- against the reference, over shapes --


@FEW
@given(levels, threads, row_counts, st.sampled_from([0, 1, 3]), widths, st.integers(0, 3))
def test_layer_norm(
    level: str, count: int, n: int, heads: int, width: int, given_ones: int
) -> None:
    x = torch.randn(n, heads, width) if heads else torch.randn(n, width)
    weight = torch.randn(width) if given_ones & 1 else None
    bias = torch.randn(width) if given_ones & 2 else None
    close(
        table(level, count).layer_norm(x + 3, weight, bias, 1e-5),
        reference.layer_norm(x + 3, weight, bias, 1e-5),
    )


@FEW
@given(levels, threads, row_counts, st.sampled_from([0, 2]), widths, st.booleans())
def test_rms_norm(level: str, count: int, n: int, heads: int, width: int, plus: bool) -> None:
    x = torch.randn(n, heads, width) if heads else torch.randn(n, width)
    weight = torch.randn(width)
    residual = torch.randn(n, max(heads, 1) * width) if plus else None
    out = table(level, count).rms_norm(x, weight, 1e-6, 1.0, residual)
    expected = reference.rms_norm(x, weight, 1e-6, 1.0)
    close(out, expected if residual is None else expected + residual.view(x.shape))


@FEW
@given(levels, threads, row_counts, widths, activations)
def test_activations(level: str, count: int, n: int, width: int, name: str) -> None:
    gate_up = torch.randn(n, 2 * width) * 4
    ops = table(level, count)
    # PyTorch's erf loses digits below zero; the test over the range is the strict one.
    loose = {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(
        ops.activate(gate_up, name), reference.activate(gate_up, name), **loose
    )
    torch.testing.assert_close(
        ops.activate_and_multiply(gate_up, name),
        reference.activate_and_multiply(gate_up, name),
        **loose,
    )
    close(ops.softcap(gate_up, 2.5), reference.softcap(gate_up, 2.5))
    close(ops.add(gate_up, gate_up.flip(1).contiguous()), gate_up + gate_up.flip(1))


@FEW
@given(levels, threads, st.integers(1, 9), widths, st.data())
def test_take_logit_rows(level: str, count: int, n: int, width: int, data: st.DataObject) -> None:
    x = torch.randn(n, width + 5)[:, :width]
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=12))
    assert torch.equal(table(level, count).take_logit_rows(x, rows), x[rows])


@FEW
@given(levels, st.integers(1, 30), widths, st.data())
def test_a_row_s_bits_depend_on_that_row_alone(
    level: str, n: int, width: int, data: st.DataObject
) -> None:
    x, weight, bias = torch.randn(n, 2 * width), torch.randn(2 * width), torch.randn(2 * width)
    calls: list[Callable[[SmallOps, torch.Tensor], torch.Tensor]] = [
        lambda ops, x: ops.rms_norm(x, weight, 1e-6),
        lambda ops, x: ops.layer_norm(x, weight, bias, 1e-6),
        lambda ops, x: ops.activate(x, "gelu"),
        lambda ops, x: ops.activate_and_multiply(x, "silu"),
        lambda ops, x: ops.softcap(x, 3.0),
    ]
    start = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(start + 1, n))
    for call in calls:
        whole = call(table(level, 1), x)
        for count in (1, 2, 3):
            assert torch.equal(call(table(level, count), x), whole)
            assert torch.equal(call(table(level, count), x[start:end]), whole[start:end])


@pytest.mark.parametrize("level", LEVELS)
def test_nan_stays_in_its_row(level: str) -> None:
    x = torch.randn(4, 70)
    x[1, 69] = math.nan
    ops = table(level)
    ones = torch.ones(70)
    for out in (ops.rms_norm(x, ones, 1e-6), ops.layer_norm(x, ones, ones, 1e-6)):
        assert out[1].isnan().all()
        assert not out[[0, 2, 3]].isnan().any()


# -- selections --


@FEW
@given(levels, threads, st.integers(0, 5), st.integers(1, 40) | st.sampled_from([8192, 20_001]))
def test_greedy(level: str, count: int, n: int, width: int) -> None:
    # Few distinct numbers: many ties, across pieces too.
    logits = torch.randint(-20, 20, (n, width + 3))[:, :width].float()
    ids, is_finite = table(level, count).greedy(logits)
    assert ids.tolist() == logits.numpy().argmax(-1).tolist()
    assert is_finite.all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 8191, 8192, 9999])
def test_greedy_says_what_is_not_finite(level: str, bad: float, column: int) -> None:
    logits = torch.randn(3, 10_000)
    logits[1, column] = bad
    ids, is_finite = table(level).greedy(logits)
    assert is_finite.tolist() == [True, False, True]
    assert (ids >= 0).all() and (ids < 10_000).all()
    all_bad = table(level).greedy(torch.full((2, 9000), bad))
    assert not all_bad[1].any() and (all_bad[0] < 9000).all()


@FEW
@given(
    levels,
    threads,
    st.integers(0, 4),
    st.integers(1, 40) | st.sampled_from([8192, 8200, 20_001]),
    st.integers(1, 1024),
    st.booleans(),
)
def test_top_k(level: str, count: int, n: int, width: int, k: int, has_ties: bool) -> None:
    k = min(k, width)
    logits = torch.randn(n, width + 1)[:, :width]
    if has_ties:
        logits = (logits * 3).round()
    values, ids = table(level, count).top_k(logits, k)
    expected, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected[:, :k])
    assert torch.equal(ids, order[:, :k])


@pytest.mark.parametrize("level", LEVELS)
def test_top_k_of_numbers_that_are_not_finite(level: str) -> None:
    logits = torch.randn(1, 9000)
    logits[0, 8998], logits[0, 17], logits[0, 8195] = math.nan, math.inf, -math.inf
    values, ids = table(level).top_k(logits, 2)
    assert ids.tolist() == [[8998, 17]]
    assert values[0, 0].isnan() and values[0, 1].isinf()
    values, ids = table(level).top_k(torch.full((2, 300), -math.inf), 300)
    assert ids.tolist() == [list(range(300))] * 2
    values, ids = table(level).top_k(torch.full((2, 300), math.nan), 5)
    assert ids.tolist() == [list(range(5))] * 2


# -- wrong arguments, recordings --


def test_wrong_arguments_raise() -> None:
    ops = table(LEVELS[-1])
    x, w = torch.randn(3, 8), torch.randn(8)
    calls = [
        lambda: ops.rms_norm(x, torch.randn(7), 1e-6),
        lambda: ops.rms_norm(x.double(), w, 1e-6),
        lambda: ops.rms_norm(x, w, 1e-6, 0.0, torch.randn(3, 7)),
        lambda: ops.layer_norm(x, torch.randn(7), None, 1e-6),
        lambda: ops.layer_norm(x, w, w.double(), 1e-6),
        lambda: ops.activate(x, "mish"),
        lambda: ops.activate(x.t(), "silu"),
        lambda: ops.activate_and_multiply(torch.randn(2, 7), "silu"),
        lambda: ops.softcap(x[0], 1.0),
        lambda: ops.add(x, torch.randn(3, 7)),
        lambda: ops.take_logit_rows(x, [3]),
        lambda: ops.take_logit_rows(x, [-1]),
        lambda: ops.greedy(torch.empty(2, 0)),
        lambda: ops.greedy(torch.empty(2, 4, device="meta")),
        lambda: ops.top_k(x, 0),
        lambda: ops.top_k(x, 9),
    ]
    for call in calls:
        with pytest.raises(KernelError):
            call()


def test_a_recording_takes_the_step_s_rows() -> None:
    class Recording(SmallOps):
        def _rows(self, x: torch.Tensor) -> int:
            return int(_native.ROWS_TOKENS)

    x = torch.randn(10, 20)
    for level in LEVELS:
        ops = Recording(2, [], level)
        ops._context.begin_recording()
        out = ops.take_logit_rows(x, [])
        program = ops._context.end_recording()
        for num_tokens, rows in ((10, [9, 0, 4]), (3, [2]), (1, []), (2, [1, 7])):
            indices = torch.tensor(rows, dtype=torch.int32)
            ops._context.set_tokens(num_tokens, 0, 0)
            ops._context.set_logit_rows(len(rows), indices.data_ptr())
            ops._context.replay(program)
            for at, row in enumerate(rows):
                if row < num_tokens:
                    assert torch.equal(out[at], x[row])
                else:
                    assert out[at].isnan().all()


def test_operands_with_other_rows_than_x_are_refused() -> None:
    kernels, x, ones = table(LEVELS[0]), torch.zeros(4, 8), torch.ones(8)
    for num_rows in (0, 1, 3, 5):
        other = torch.zeros(num_rows, 8)
        with pytest.raises(KernelError, match=f"residual has {num_rows} rows, and must have 4"):
            kernels.rms_norm(x, ones, 1e-6, residual=other)
        with pytest.raises(KernelError, match=f"y has {num_rows} rows, and must have 4"):
            kernels.add(x, other)


@pytest.mark.parametrize(("shape", "device"), [((2, 2), "cpu"), ((3,), "meta")])
def test_positions_that_native_code_cannot_read_are_refused(
    shape: tuple[int, ...], device: str
) -> None:
    positions = torch.zeros(shape, dtype=torch.int64, device=device)
    with pytest.raises(KernelError, match="positions is"):
        table(LEVELS[0]).position_rows(torch.zeros(4, 8), positions)
