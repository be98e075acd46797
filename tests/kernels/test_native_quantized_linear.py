"""Products with packed low-bit matrices, at every instruction-set level that this host has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

_native = pytest.importorskip("ambidex.kernels.cpu._native")

from ambidex.errors import KernelError  # noqa: E402
from ambidex.kernels.cpu.quantized_linear import QuantizedLinearOps  # noqa: E402
from ambidex.kernels.quantized import BY_ROW, Quantized, are_of_one_form  # noqa: E402

LEVELS = _native.supported_levels()
THREADS = (1, 2, 3)
OPS = {
    (level, threads): QuantizedLinearOps(threads, [], level)
    for level in LEVELS
    for threads in THREADS
}
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
MXFP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
NF4 = [
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
]
SCALES = ("f16", "f32", "i8", "u8")
ZEROS = ("none", "constant", "codes", "min_f16", "min_f32", "min_codes")
FORMS = st.tuples(
    st.sampled_from((4, 5, 6, 8, "iq4_nl", "mxfp4", "nf4")),
    st.sampled_from((16, 32, 64, 128, "row")),
    st.sampled_from(SCALES),
    st.sampled_from(ZEROS),
    st.booleans(),
)
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 300))
FEW = settings(deadline=None, max_examples=25)


def make(form: tuple, shape: tuple[int, int], seed: int) -> Quantized:
    """A random matrix of ``form``: bits or codebook, group, scale, zero, permuted."""
    kind, group, scale, zero, permuted = form
    rows, columns = shape
    random = torch.Generator().manual_seed(seed)
    group = columns if group == "row" else group
    groups, supers = -(-columns // group), -(-columns // 256)

    def numbers(width: int, dtype: torch.dtype) -> Tensor:
        return (torch.rand(rows, width, generator=random) + 0.1).to(dtype)

    def whole(width: int, end: int, dtype: torch.dtype = torch.uint8, start: int = 0) -> Tensor:
        return torch.randint(start, end, (rows, width), generator=random, dtype=dtype)

    bits = kind if isinstance(kind, int) else 4
    parts: dict = {"codes": whole(columns, 1 << bits)}
    if scale in ("f16", "f32"):
        parts["scale"] = numbers(groups, torch.float16 if scale == "f16" else torch.float32)
    else:
        unsigned = scale == "u8"
        parts["scale_codes"] = (
            whole(groups, 64) if unsigned else whole(groups, 32, torch.int8, start=-32)
        )
        parts["super_scale"] = numbers(supers, torch.float16)
    if not isinstance(kind, int):
        parts["codebook"] = torch.tensor({"iq4_nl": IQ4_NL, "mxfp4": MXFP4, "nf4": NF4}[kind])
        parts["codebook"] = parts["codebook"].float()
    elif zero == "constant":
        parts["zero"] = 1 << (bits - 1)
    elif zero == "codes":
        parts["zeros"] = whole(groups, 1 << bits)
    elif zero in ("min_f16", "min_f32"):
        dtype = torch.float16 if zero == "min_f16" else torch.float32
        parts["minimum"] = -numbers(groups, dtype)
    elif zero == "min_codes":
        parts["minimum_codes"] = whole(groups, 64)
        parts["super_minimum"] = numbers(supers, torch.float16)
    if permuted:
        parts["permutation"] = torch.randperm(columns, generator=random).int()
    return Quantized("w", bits, group, **parts)


def inputs(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def quantised(x: Tensor, permutation: Tensor | None, share: int) -> Tensor:
    """``x`` as the product sees it, in float64; ``share``: columns a scale."""
    n, columns = x.shape
    order = torch.arange(columns) if permutation is None else permutation.long()
    blocks = -(-columns // 32)
    padded = torch.zeros(n, blocks * 32)
    padded[:, :columns] = x[:, order]
    padded = padded.view(n, blocks * 32 // share, share)
    scale = padded.abs().amax(-1, keepdim=True) / 127
    whole = (padded / scale).round().nan_to_num(0.0)
    flat = (whole.double() * scale.double()).view(n, blocks * 32)[:, :columns]
    out = torch.empty_like(flat)
    out[:, order] = flat
    return out


def seen(weight: Quantized) -> Quantized:
    """``weight`` with the codebook that the product sees, where that is held to 16 bits."""
    if weight.codebook is None or not torch.equal(weight.codebook, torch.tensor(NF4)):
        return weight
    return replace(weight, codebook=((weight.codebook * 32767.0).round().double() / 32767).float())


def close(out: Tensor, x: Tensor, weight: Quantized, precise: bool = False) -> None:
    """``out`` is the product, to the rounding of float32."""
    share = 16 if precise or weight.group == 16 else 32
    weight = seen(weight)
    dense = weight.dequantise().double()
    factors = replace(weight, minimum=None, minimum_codes=None, super_minimum=None)
    factors = factors.dequantise().double()
    activations = quantised(x, weight.permutation, share)
    size = activations.abs() @ (factors.abs() + (dense - factors).abs()).T
    assert ((out.double() - activations @ dense.T).abs() <= 1e-6 * size).all()


@given(FORMS, SHAPES, st.integers(0, 40), st.integers(0, 99))
@settings(deadline=None, max_examples=100)
def test_product(form, shape, num_rows, seed):
    weight = make(form, shape, seed)
    x = inputs(num_rows, shape[1], seed)
    for level in LEVELS:
        ops = OPS[level, 1 + seed % 3]
        for precise in (False, True):
            packed = ops.pack_quantized(weight, precise)
            close(ops.linear_quantized(x, packed), x, weight, precise)


def test_a_precise_product_rounds_its_inputs_less() -> None:
    weight = make((4, 32, "f16", "min_f16", False), (64, 256), 3)
    x = inputs(20, 256, 5)
    exact = x.double() @ weight.dequantise().double().T
    ops = OPS[LEVELS[-1], 1]
    errors = [
        (ops.linear_quantized(x, ops.pack_quantized(weight, precise)) - exact).norm()
        for precise in (False, True)
    ]
    assert errors[1] < 0.95 * errors[0]


@given(FORMS, SHAPES, st.integers(1, 40), st.integers(0, 99))
@FEW
def test_levels_give_the_same_bits(form, shape, num_rows, seed):
    weight = make(form, shape, seed)
    x = inputs(num_rows, shape[1], seed)
    results = []
    for level in LEVELS:
        ops = OPS[level, 1]
        results.append(ops.linear_quantized(x, ops.pack_quantized(weight)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("level", LEVELS)
@given(FORMS, SHAPES, st.integers(2, 300), st.integers(0, 99))
@FEW
def test_a_row_alone_has_the_same_bits(level, form, shape, num_rows, seed):
    weight = make(form, shape, seed)
    x = inputs(num_rows, shape[1], seed)
    ops = OPS[level, 1]
    packed = ops.pack_quantized(weight)
    whole = ops.linear_quantized(x, packed)
    for threads in THREADS:
        assert torch.equal(OPS[level, threads].linear_quantized(x, packed), whole)
    for start, end in ((0, 1), (num_rows - 1, num_rows), (1, 2 + seed % num_rows)):
        part = OPS[level, 1 + seed % 3].linear_quantized(x[start:end], packed)
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("level", LEVELS)
def test_every_small_number_of_rows(level):
    weight = make((4, 32, "f16", "min_f16", False), (33, 160), 5)
    ops = OPS[level, 2]
    packed = ops.pack_quantized(weight)
    x = inputs(50, 160)
    whole = ops.linear_quantized(x, packed)
    for n in range(50):
        assert torch.equal(ops.linear_quantized(x[:n], packed), whole[:n])


@pytest.mark.parametrize("level", LEVELS)
def test_more_rows_than_a_group(level):
    weight = make((8, 32, "f16", "constant", False), (40, 96), 1)
    ops = OPS[level, 3]
    packed = ops.pack_quantized(weight)
    x = inputs(530, 96)
    out = ops.linear_quantized(x, packed)
    close(out, x, weight)
    assert torch.equal(ops.linear_quantized(x[256:], packed), out[256:])


@given(FORMS, SHAPES, st.integers(1, 20), st.integers(0, 99))
@FEW
def test_bias_and_residual(form, shape, num_rows, seed):
    weight = make(form, shape, seed)
    x = inputs(num_rows, shape[1] + 3, seed)[:, 1:-2]
    bias = inputs(1, shape[0], 7)[0]
    residual = inputs(num_rows, shape[0] + 5, 8)[:, 2:-3]
    for level in LEVELS:
        ops = OPS[level, 2]
        packed = ops.pack_quantized(weight)
        plain = ops.linear_quantized(x, packed)
        assert torch.equal(ops.linear_quantized(x, packed, bias), plain + bias)
        assert torch.equal(ops.linear_quantized(x, packed, None, residual), plain + residual)
        both = ops.linear_quantized(x, packed, bias, residual)
        assert torch.equal(both, plain + bias + residual)


@given(FORMS, st.integers(1, 4), st.integers(1, 200), st.integers(1, 40), st.integers(0, 99))
@FEW
def test_gated(form, panels, columns, num_rows, seed):
    width = 16 * panels
    weight = make(form, (2 * width, columns), seed)
    x = inputs(num_rows, columns, seed)
    bias = inputs(1, 2 * width, 7)[0] if seed % 2 else None
    for level in LEVELS:
        ops = OPS[level, 1 + seed % 3]
        packed = ops.pack_quantized(weight)
        gate, up = ops.linear_quantized(x, packed, bias).split(width, 1)
        relu = ops.gated_linear_quantized(x, packed, "relu", bias)
        assert torch.equal(relu, gate.relu() * up)
        for activation, function in (
            ("silu", torch.nn.functional.silu),
            ("gelu_tanh", lambda t: torch.nn.functional.gelu(t, approximate="tanh")),
        ):
            out = ops.gated_linear_quantized(x, packed, activation, bias)
            bound = 1e-6 * float((gate * up).abs().max())
            torch.testing.assert_close(out, function(gate) * up, rtol=2e-6, atol=bound)
            alone = ops.gated_linear_quantized(x[-1:], packed, activation, bias)
            assert torch.equal(alone, out[-1:])


def test_gated_in_two_steps():
    ops = OPS[LEVELS[-1], 1]
    weight = ops.pack_quantized(make((4, 32, "f16", "none", False), (24, 32), 0))
    assert ops.gated_linear_quantized(inputs(1, 32), weight, "silu") is None
    weight = ops.pack_quantized(make((4, 32, "f16", "none", False), (32, 32), 0))
    assert ops.gated_linear_quantized(inputs(1, 32), weight, "gelu") is None


@given(FORMS, SHAPES, st.integers(0, 99))
@FEW
def test_embedding(form, shape, seed):
    weight = make(form, shape, seed)
    ids = torch.randint(0, shape[0], (9,), generator=torch.Generator().manual_seed(seed))
    for level in LEVELS:
        ops = OPS[level, 1 + seed % 3]
        packed = ops.pack_quantized(weight)
        assert torch.equal(ops.embedding_quantized(ids, packed), weight.dequantise()[ids])
        scaled = ops.embedding_quantized(ids, packed, 2.5)
        assert torch.equal(scaled, weight.dequantise()[ids] * 2.5)


@pytest.mark.parametrize("level", LEVELS)
def test_embedding_of_unknown_ids(level):
    ops = OPS[level, 2]
    weight = ops.pack_quantized(make((5, 32, "f16", "none", True), (20, 40), 0))
    ids = torch.tensor([3, -1, 20, 1 << 40, 19])
    unknown = ops.embedding_quantized(ids, weight).isnan()
    assert unknown.all(1).tolist() == [False, True, True, True, False]
    assert not unknown[0].any() and not unknown[4].any()
    assert ops.embedding_quantized(ids[:0], weight).shape == (0, 40)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("zero", ZEROS)
def test_not_finite(level, bad, zero):
    ops = OPS[level, 2]
    for kind in (4, 8, "nf4"):
        for group in (16, 32):
            packed = ops.pack_quantized(make((kind, group, "f16", zero, False), (20, 70), 0))
            x = inputs(5, 70)
            good = ops.linear_quantized(x, packed)
            x[2, 69] = bad
            out = ops.linear_quantized(x, packed)
            assert out[2].isnan().all()
            assert torch.equal(out[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_inputs(level):
    ops = OPS[level, 1]
    weight = make((8, 32, "f32", "constant", False), (16, 64), 0)
    packed = ops.pack_quantized(weight)
    assert torch.equal(ops.linear_quantized(torch.zeros(2, 64), packed), torch.zeros(2, 16))
    tiny = torch.full((1, 64), 1e-44)
    assert ops.linear_quantized(tiny, packed).isfinite().all()
    # The largest sums: every code and every input at its end.
    for bits in (4, 5, 6, 8):
        codes = torch.full((16, 64), (1 << bits) - 1, dtype=torch.uint8)
        for zero in (0, (1 << bits) - 1):
            ends = Quantized("w", bits, 32, codes, scale=torch.ones(16, 2), zero=zero)
            out = ops.linear_quantized(torch.full((3, 64), -127.0), ops.pack_quantized(ends))
            assert torch.equal(out, torch.full((3, 16), -127.0 * 64 * ((1 << bits) - 1 - zero)))


@given(FORMS, st.integers(1, 200), st.integers(0, 99))
@FEW
def test_rows_of_a_weight(form, columns, seed):
    weight = make(form, (70, columns), seed)
    ops = OPS[LEVELS[seed % len(LEVELS)], 2]
    packed = ops.pack_quantized(weight)
    x = inputs(4, columns, seed)
    whole = ops.linear_quantized(x, packed)
    for start, end in ((0, 16), (16, 64), (48, 70), (32, 32), (0, 70)):
        part = packed.rows(start, end)
        assert part.shape == (end - start, columns)
        assert torch.equal(ops.linear_quantized(x, part), whole[:, start:end])
    assert packed.rows(0, 70).num_bytes == packed.num_bytes
    inner = packed.rows(16, 64).panels
    assert inner.untyped_storage().data_ptr() == packed.panels.untyped_storage().data_ptr()
    for start, end in ((1, 16), (0, 17), (0, 80), (32, 16)):
        with pytest.raises(KernelError):
            packed.rows(start, end)


@given(FORMS, st.integers(1, 300), st.integers(0, 99))
@FEW
def test_parts_below_each_other(form, columns, seed):
    """Packed one by one where they stay: the panels of the whole."""
    weight = make(form, (55, columns), seed)
    ops = OPS[LEVELS[seed % len(LEVELS)], 2]
    names = [name for name in BY_ROW if getattr(weight, name) is not None]
    parts = [
        replace(weight, **{name: getattr(weight, name)[start:end] for name in names})
        for start, end in ((0, 16), (16, 48), (48, 55))
    ]
    assert are_of_one_form(parts)
    whole, packed = ops.pack_quantized(weight), ops.pack_quantized(parts[0], below=parts[1:])
    assert packed.shape == whole.shape and packed.num_bytes == whole.num_bytes
    assert torch.equal(packed.panels, whole.panels)
    x = inputs(3, columns, seed)
    assert torch.equal(ops.linear_quantized(x, packed), ops.linear_quantized(x, whole))


def test_native_size():
    ops = OPS[LEVELS[-1], 1]
    for form, bits in (
        ((4, 32, "f16", "constant", False), 4.5),
        ((4, 32, "f16", "min_f16", False), 5.0),
        ((5, 32, "f16", "constant", False), 5.5),
        ((8, 32, "f16", "constant", False), 8.5),
        ((4, 32, "u8", "min_codes", False), 4.625),
        ((6, 16, "i8", "constant", False), 6.5625),
    ):
        packed = ops.pack_quantized(make(form, (64, 512), 0))
        assert packed.num_bytes * 8 == bits * 64 * 512


def test_refusals():
    ops = OPS[LEVELS[-1], 1]
    weight = make((4, 32, "f16", "none", False), (32, 64), 0)
    packed = ops.pack_quantized(weight)
    x = inputs(3, 64)
    for call in (
        lambda: ops.linear_quantized(x[:, :32], packed),
        lambda: ops.linear_quantized(x.double(), packed),
        lambda: ops.linear_quantized(x.to("meta"), packed),
        lambda: ops.linear_quantized(x.t().contiguous().t(), packed),
        lambda: ops.linear_quantized(x, packed, torch.zeros(31)),
        lambda: ops.linear_quantized(x, packed, None, torch.zeros(3, 31)),
        lambda: ops.linear_quantized(x, packed, None, torch.zeros(2, 32)),
        lambda: ops.gated_linear_quantized(x[:, :32], packed, "silu"),
        lambda: ops.gated_linear_quantized(x, packed, "silu", torch.zeros(16)),
        lambda: ops.embedding_quantized(torch.zeros(2), packed),
        lambda: ops.embedding_quantized(torch.zeros(2, 2, dtype=torch.int64), packed),
    ):
        with pytest.raises(KernelError):
            call()
    order = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(KernelError, match="permutation"):
        ops.pack_quantized(
            Quantized("w", 4, 32, weight.codes, scale=weight.scale, permutation=order)
        )
    codes = torch.zeros(4, 0, dtype=torch.uint8)
    empty = Quantized("w", 4, 32, codes, scale=torch.zeros(4, 0))
    with pytest.raises(KernelError, match="columns"):
        ops.pack_quantized(empty)


class Recorder(QuantizedLinearOps):
    """Rows are a symbol."""

    def _rows(self, x: Tensor) -> int:
        return _native.ROWS_TOKENS


@pytest.mark.parametrize("level", LEVELS)
def test_one_recording_serves_every_batch(level):
    recorder, ops = Recorder(2, [], level), OPS[level, 1]
    table = ops.pack_quantized(make((8, 32, "f16", "constant", False), (50, 96), 0))
    matrix = ops.pack_quantized(make((4, 32, "f16", "min_f16", False), (64, 96), 1))
    most = torch.zeros(300, dtype=torch.int64)
    context = recorder._context
    context.begin_recording()
    embedded = recorder.embedding_quantized(most, table)
    out = recorder.linear_quantized(embedded, matrix)
    gated = recorder.gated_linear_quantized(embedded, matrix, "silu")
    program = context.end_recording()
    for count in (1, 300, 7, 0, 33):
        ids = torch.randint(0, 50, (count,))
        context.set_tokens(count, ids.data_ptr(), 0)
        context.replay(program)
        rows = ops.embedding_quantized(ids, table)
        assert torch.equal(embedded[:count], rows)
        assert torch.equal(out[:count], ops.linear_quantized(rows, matrix))
        assert torch.equal(gated[:count], ops.gated_linear_quantized(rows, matrix, "silu"))
