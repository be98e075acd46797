"""Products with plain numbers, at every level: near the reference, and exact over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.errors import KernelError
from ambidex.kernels import reference
from ambidex.kernels.cpu.float_linear import FloatLinearOps, FloatWeight

_native = pytest.importorskip("ambidex.kernels.cpu._native")

LEVELS = _native.supported_levels()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FEW = settings(max_examples=25, deadline=None)

levels = st.sampled_from(LEVELS)
dtypes = st.sampled_from(DTYPES)
threads = st.integers(1, 3)
# One row, one part, several parts, several blocks of rows.
row_counts = st.sampled_from([0, 1, 2, 3, 5, 6, 7, 13, 16, 17, 25, 73, 145, 160])
in_sizes = st.integers(1, 80) | st.sampled_from([511, 512, 513, 1100])
out_sizes = st.integers(1, 200)

_tables: dict[tuple[str, int], FloatLinearOps] = {}


def table(level: str, num_threads: int = 2) -> FloatLinearOps:
    key = (level, num_threads)
    if key not in _tables:
        _tables[key] = FloatLinearOps(num_threads, [], level)
    return _tables[key]


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) * 2 - 1


@FEW
@given(levels, threads, dtypes, row_counts, in_sizes, out_sizes, st.booleans(), st.integers(0, 9))
def test_linear(
    level: str,
    count: int,
    dtype: torch.dtype,
    n: int,
    num_in: int,
    num_out: int,
    extra: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weight, x = rand(num_out, num_in).to(dtype), rand(n, num_in)
    bias, residual = (rand(num_out), rand(n, num_out)) if extra else (None, None)
    ops = table(level, count)
    out = ops.linear_float(x, ops.pack_float(weight), bias, residual)
    expected = reference.linear(x, weight, bias)
    if residual is not None:
        expected = expected + residual
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@FEW
@given(
    levels,
    threads,
    dtypes,
    row_counts,
    in_sizes,
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["silu", "swish", "gelu_pytorch_tanh", "relu"]),
)
def test_gated_linear(
    level: str,
    count: int,
    dtype: torch.dtype,
    n: int,
    num_in: int,
    panels: int,
    with_bias: bool,
    activation: str,
) -> None:
    weight, x = rand(panels * 32, num_in).to(dtype), rand(n, num_in)
    bias = rand(panels * 32) if with_bias else None
    ops = table(level, count)
    packed = ops.pack_float(weight)
    out = ops.gated_linear_float(x, packed, activation, bias)
    assert out is not None
    both = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, up = both.chunk(2, -1)
    expected = reference.activate(gate.float(), activation).double() * up
    # Each factor is a sum of `num_in` terms, wrong by its rounding, and the other multiplies that.
    sums = x.double().abs() @ weight.double().abs().T + 1
    error = sums[:, : panels * 16] * (up.abs() + 1) + sums[:, panels * 16 :] * (gate.abs() + 1)
    assert ((out - expected).abs() <= 1e-6 * error).all()


def test_a_gate_that_is_not_one_kernel() -> None:
    ops = table(LEVELS[-1])
    assert ops.gated_linear_float(rand(2, 8), ops.pack_float(rand(64, 8)), "gelu") is None
    assert ops.gated_linear_float(rand(2, 8), ops.pack_float(rand(48, 8)), "silu") is None


@FEW
@given(levels, dtypes, in_sizes, st.integers(1, 5), st.data())
def test_a_row_s_bits_depend_on_that_row_alone(
    level: str, dtype: torch.dtype, num_in: int, panels: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, 180))
    weight, x = rand(panels * 32, num_in).to(dtype), rand(n, num_in)
    residual = rand(n, panels * 32)
    whole, gated = [], []
    for count in (1, 2, 3):
        ops = table(level, count)
        packed = ops.pack_float(weight)
        whole.append(ops.linear_float(x, packed, None, residual))
        gated.append(ops.gated_linear_float(x, packed, "silu"))
        assert torch.equal(whole[0], whole[-1])
        assert torch.equal(gated[0], gated[-1])
        start = data.draw(st.integers(0, n - 1))
        end = data.draw(st.integers(start + 1, n))
        part = ops.linear_float(x[start:end], packed, None, residual[start:end])
        assert torch.equal(part, whole[0][start:end])
        assert torch.equal(
            ops.gated_linear_float(x[start:end], packed, "silu"), gated[0][start:end]
        )
        # A cut of the weight gives the same columns.
        first = 16 * data.draw(st.integers(0, 2 * panels - 1))
        cut = packed.rows(first, panels * 32)
        assert torch.equal(
            ops.linear_float(x, cut, None, residual[:, first:].contiguous()), whole[0][:, first:]
        )


@FEW
@given(levels, threads, dtypes, st.integers(1, 300), st.integers(1, 100), st.integers(0, 40))
def test_embedding(
    level: str, count: int, dtype: torch.dtype, width: int, vocab: int, n: int
) -> None:
    weight = rand(vocab, width).to(dtype)
    ids = torch.randint(vocab, (n,))
    ops = table(level, count)
    packed = ops.pack_float(weight)
    assert torch.equal(
        ops.embedding_float(ids, packed, 1.5), reference.embedding(ids, weight) * 1.5
    )
    assert torch.equal(ops.embedding_float(ids, packed), reference.embedding(ids, weight))


@pytest.mark.parametrize("level", LEVELS)
def test_ids_that_are_no_rows_give_nan(level: str) -> None:
    ops = table(level)
    packed = ops.pack_float(rand(20, 33))
    out = ops.embedding_float(torch.tensor([-1, 3, 20, 1 << 40, -(1 << 60)]), packed)
    assert out.isnan().all(1).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("level", LEVELS)
def test_nan_stays_in_its_row(level: str) -> None:
    ops = table(level)
    weight, x = rand(64, 40), rand(5, 40)
    clean = ops.linear_float(x, ops.pack_float(weight))
    x[2, 7] = float("nan")
    out = ops.linear_float(x, ops.pack_float(weight))
    gated = ops.gated_linear_float(x, ops.pack_float(weight), "relu")
    assert gated is not None
    assert out[2].isnan().all() and gated[2].isnan().all()
    rest = [0, 1, 3, 4]
    assert torch.equal(out[rest], clean[rest])
    assert not gated[rest].isnan().any()


def test_strided_memory() -> None:
    ops = table(LEVELS[-1])
    weight, x, residual = rand(50, 70), rand(9, 90), rand(9, 60)
    view = weight[:, :64]
    expected = ops.linear_float(
        x[:, :64].contiguous(), ops.pack_float(view.contiguous()), None, residual[:, :50].clone()
    )
    assert torch.equal(
        ops.linear_float(x[:, :64], ops.pack_float(view), None, residual[:, :50]), expected
    )


def test_what_a_packed_weight_says_of_itself() -> None:
    ops = table(LEVELS[-1])
    packed = ops.pack_float(rand(40, 10).half())
    assert packed.shape == (40, 10) and packed.dtype is torch.float16
    assert packed.num_bytes == 48 * 10 * 2
    assert packed.panels.data_ptr() % 64 == 0
    assert packed.rows(16, 40).shape == (24, 10)
    for start, end in ((3, 16), (0, 17), (16, 48), (32, 16)):
        with pytest.raises(KernelError):
            packed.rows(start, end)


def test_wrong_arguments_raise() -> None:
    ops = table(LEVELS[-1])
    packed: FloatWeight = ops.pack_float(rand(32, 16))
    x = rand(2, 16)
    calls = [
        lambda: ops.pack_float(rand(4)),
        lambda: ops.pack_float(rand(4, 4).double()),
        lambda: ops.pack_float(rand(4, 6).t()),
        lambda: ops.linear_float(rand(2, 15), packed),
        lambda: ops.linear_float(x.double(), packed),
        lambda: ops.linear_float(rand(16, 2).t(), packed),
        lambda: ops.linear_float(x, packed, rand(31)),
        lambda: ops.linear_float(x, packed, None, rand(2, 31)),
        lambda: ops.linear_float(x, packed, None, rand(1, 32)),
        lambda: ops.linear_float(torch.empty(2, 16, device="meta"), packed),
        lambda: ops.gated_linear_float(rand(2, 15), packed, "silu"),
        lambda: ops.embedding_float(torch.zeros(2, dtype=torch.int32), packed),
        lambda: ops.embedding_float(torch.zeros(2, 2, dtype=torch.int64), packed),
    ]
    for call in calls:
        with pytest.raises(KernelError):
            call()


def test_a_recording_reads_rows_and_ids_from_the_step() -> None:
    class Recording(FloatLinearOps):
        def _rows(self, x: torch.Tensor) -> int:
            return int(_native.ROWS_TOKENS)

    for level in LEVELS:
        ops = Recording(2, [], level)
        weight, head = ops.pack_float(rand(30, 24)), ops.pack_float(rand(40, 24))
        ids = torch.zeros(8, dtype=torch.int64)
        ops._context.begin_recording()
        hidden = ops.embedding_float(ids, weight)
        out = ops.linear_float(hidden, head)
        program = ops._context.end_recording()
        for step in ([5, 7, 29], [1], [], [3] * 8):
            tokens = torch.tensor(step, dtype=torch.int64)
            ops._context.set_tokens(len(step), tokens.data_ptr(), 0)
            ops._context.replay(program)
            plain = table(level)
            expected = plain.linear_float(plain.embedding_float(tokens, weight), head)
            assert torch.equal(out[: len(step)], expected)
