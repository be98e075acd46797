"""The reference kernels: right against plain formulas, and exact.

Exact means that the bits of a row depend on that row alone: not on the rows beside it, on how a
prompt was cut into steps, on the block size, on the number of threads, or on what other requests
left in memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex.kernels import reference
from ambidex.kernels.metadata import AttentionMetadata
from ambidex.kv.block import BLOCK_SIZES, NO_BLOCK

THREADS = (1, 2, 3, 4)
WIDTHS = (64, 100, 1536, 5000, 11008)
ROWS = (1, 2, 3, 5, 8, 11, 16, 33, 64)


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_rows(
    function: Callable[..., Tensor], *inputs: Tensor, rows: Sequence[int] = ROWS
) -> Tensor:
    """``function(*inputs)`` must give each row the same bits whatever rows and threads there are;
    ``inputs`` have one row each to every row of the result."""
    total = len(inputs[0])
    torch.set_num_threads(1)
    alone = torch.cat([function(*(x[i : i + 1] for x in inputs)) for i in range(total)])
    draw = random.Random(total)
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert torch.equal(function(*inputs), alone), f"all rows, {threads} threads"
        for count in rows:
            if count > total:
                continue
            first = draw.randrange(total - count + 1)
            picked: slice | list[int] = slice(first, first + count)
            if draw.random() < 0.5:
                picked = draw.sample(range(total), count)
            some = function(*(x[picked] for x in inputs))
            assert torch.equal(some, alone[picked]), f"{count} rows, {threads} threads"
    return alone


def naive(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x.double()).float()


# ---------------------------------------------------------------- products


@pytest.mark.parametrize(
    ("width", "out"), [(64, 64), (48, 200), (100, 1001), (576, 960), (1536, 576), (320, 5003)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(width: int, out: int, bias: bool) -> None:
    x, weight = normal(101, width), normal(out, width, seed=1) / width**0.5
    offset = normal(out, seed=2) if bias else None
    y = check_rows(lambda part: reference.linear(part, weight, offset), x)
    expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0)
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [257, 512, 1000, 2049])
def test_linear_of_a_long_prompt(rows: int) -> None:
    x, weight = normal(rows, 192), normal(323, 192, seed=1)
    torch.set_num_threads(1)
    last = reference.linear(x[-5:], weight)
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert torch.equal(reference.linear(x, weight)[-5:], last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_widens_low_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = normal(24, 128), normal(200, 128, seed=1).to(dtype)
    expected = reference.linear(x, weight.float())
    assert torch.equal(reference.linear(x, weight), expected)
    for elements in (1, 64 * 128, 96 * 128):
        monkeypatch.setattr(reference, "_PIECE_ELEMENTS", elements)
        assert torch.equal(check_rows(lambda part: reference.linear(part, weight), x), expected)


@pytest.mark.parametrize("width", [64, 200, 576])
def test_linear_of_some_output_rows(width: int) -> None:
    """A weight may be cut between two devices, at multiples of 64 rows."""
    x, weight = normal(21, width), normal(768, width, seed=1)
    whole = reference.linear(x, weight)
    for threads in THREADS:
        torch.set_num_threads(threads)
        for first, end in [(0, 64), (64, 256), (128, 768), (704, 768)]:
            part = reference.linear(x, weight[first:end].clone())
            assert torch.equal(part, whole[:, first:end])


# ---------------------------------------------------------------- norms, functions


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int) -> None:
    x, weight = normal(101, width) * 3, normal(width, seed=1)
    y = check_rows(lambda part: reference.rms_norm(part, weight, 1e-5), x)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(y, (expected * weight).float(), rtol=2e-6, atol=2e-6)
    shifted = reference.rms_norm(x, weight, 1e-5, offset=1.0)
    torch.testing.assert_close(shifted, (expected * (weight + 1)).float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_rms_norm_of_heads(heads: int, head_dim: int) -> None:
    """Rows are slices of a fused projection."""
    fused, weight = normal(101, 3 * heads * head_dim), normal(head_dim, seed=1)

    def norm(rows: Tensor) -> Tensor:
        part = rows.split(heads * head_dim, -1)[1].view(len(rows), heads, head_dim)
        return reference.rms_norm(part, weight, 1e-6)

    check_rows(norm, fused)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width: int) -> None:
    x, weight, bias = normal(101, width) + 2, normal(width, seed=1), normal(width, seed=2)
    y = check_rows(lambda part: reference.layer_norm(part, weight, bias, 1e-5), x)
    expected = torch.nn.functional.layer_norm(
        x.double(), (width,), weight.double(), bias.double(), 1e-5
    )
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)
    bare = reference.layer_norm(x, None, None, 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (width,), eps=1e-5)
    torch.testing.assert_close(bare, expected.float(), rtol=1e-5, atol=1e-5)


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}


@pytest.mark.parametrize("width", [1, 7, *WIDTHS, 33000])
@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name: str, width: int) -> None:
    x = normal(101 if width < 20000 else 8, width) * 4
    y = check_rows(lambda part: reference.activate(part, name), x)
    torch.testing.assert_close(y, naive(FORMULAS[name], x), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FORMULAS)
def test_activate_and_multiply(name: str, width: int) -> None:
    x = normal(101, 2 * width) * 4
    kept = x.clone()
    y = check_rows(lambda part: reference.activate_and_multiply(part, name), x)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(y, naive(FORMULAS[name], gate) * up, rtol=1e-5, atol=4e-5)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("width", [*WIDTHS, 50257])
def test_softcap(width: int) -> None:
    x = normal(40 if width < 20000 else 11, width) * 40
    y = check_rows(lambda part: reference.softcap(part, 30.0), x)
    torch.testing.assert_close(
        y, naive(lambda part: torch.tanh(part / 30) * 30, x), rtol=1e-5, atol=1e-5
    )


def test_every_activation_is_exact() -> None:
    x = normal(33, 1111) * 4
    for name in reference.ACTIVATIONS:
        check_rows(lambda part, name=name: reference.activate(part, name), x)


@pytest.mark.parametrize(("head_dim", "width"), [(64, 32), (24, 9), (128, 48), (80, 40)])
def test_rope(head_dim: int, width: int) -> None:
    x, angles = normal(101, 3, head_dim), normal(101, width, seed=1) * 9
    cos, sin = angles.cos(), angles.sin()

    def turn(part: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key = reference.rope(part, part + 1, cos, sin, torch.arange(len(part)))
        again, _ = reference.rope(part + 1, part, cos, sin, torch.arange(len(part)))
        assert torch.equal(key, again)
        return query

    y = check_rows(turn, x, cos, sin)
    shuffled = torch.randperm(101)
    query, _ = reference.rope(x[shuffled], x[shuffled], cos, sin, shuffled)
    assert torch.equal(query, y[shuffled])
    turned = (
        torch.view_as_complex(torch.stack([x[..., :width], x[..., width : 2 * width]], -1))
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    expected = torch.cat([turned.real, turned.imag, x[..., 2 * width :]], -1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(dtype: torch.dtype) -> None:
    table = normal(50, 96).to(dtype)
    ids = torch.tensor([3, 3, 49, 0])
    assert torch.equal(reference.embedding(ids, table), table[ids].float())


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (8, 3), (128, 8)])
@pytest.mark.parametrize("normalise", [False, True])
def test_route_experts(experts: int, top_k: int, normalise: bool) -> None:
    x = normal(101, experts) * 2

    def route(part: Tensor) -> Tensor:
        weights, chosen = reference.route_experts(part, top_k, normalise=normalise)
        return torch.cat([weights, chosen.float()], -1)

    weights = check_rows(route, x)[:, :top_k]
    expected = torch.softmax(x.double(), -1).topk(top_k).values
    if normalise:
        expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected.float(), rtol=1e-5, atol=1e-6)


def test_route_experts_softmax_of_the_chosen() -> None:
    x = normal(101, 16)
    weights, chosen = reference.route_experts(x, 4, normalise=False, softmax_first=False)
    assert torch.equal(chosen, x.topk(4).indices)
    torch.testing.assert_close(weights, torch.softmax(x.topk(4).values, -1))


@pytest.mark.parametrize(("hidden", "width"), [(64, 40), (96, 112)])
def test_moe(hidden: int, width: int) -> None:
    num_experts, top_k = 6, 2
    x, router = normal(101, hidden), normal(num_experts, hidden, seed=1)
    gate_up = normal(num_experts, 2 * width, hidden, seed=2) / hidden**0.5
    down = normal(num_experts, hidden, width, seed=3) / width**0.5

    def moe(part: Tensor) -> Tensor:
        weights, chosen = reference.route_experts(
            reference.linear(part, router), top_k, normalise=True
        )
        return reference.moe(part, gate_up, down, weights, chosen, "silu")

    y = check_rows(moe, x)
    probabilities = torch.softmax(x.double() @ router.double().T, -1)
    best = probabilities.topk(top_k)
    expected = torch.zeros(len(x), hidden, dtype=torch.float64)
    for row in range(len(x)):
        weights = best.values[row] / best.values[row].sum()
        for weight, expert in zip(weights, best.indices[row], strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected[row] += weight * (down[expert].double() @ inner)
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("owners", [(0,) * 6, (0, 1) * 3, (2, 0, 1, 1, 0, 2)])
def test_experts_of_several_memories(owners: tuple[int, ...]) -> None:
    """The bits of one call, however experts are dealt out."""
    hidden, width, top_k = 64, 40, 3
    x = normal(37, hidden)
    gate_up = normal(len(owners), 2 * width, hidden, seed=2) / hidden**0.5
    down = normal(len(owners), hidden, width, seed=3) / width**0.5
    weights, chosen = reference.route_experts(
        normal(37, len(owners), seed=4), top_k, normalise=True
    )
    whole = reference.moe(x, gate_up, down, weights, chosen, "silu")
    parts = []
    for part in range(3):
        held = [
            [w if owner == part else None for w, owner in zip(matrices, owners, strict=True)]
            for matrices in (gate_up, down)
        ]
        parts.append(reference.expert_outputs(x, held[0], held[1], chosen, "silu"))
        assert not parts[-1][torch.tensor(owners)[chosen] != part].any()
    total = reference.combine_experts(parts, weights, chosen)
    assert torch.equal(total.view(torch.int32), whole.view(torch.int32))


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    softcap: float = 0.0
    kv_dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return 1.5 * self.head_dim**-0.5


@dataclass(frozen=True)
class Chunk:
    """Query rows at positions ``start .. end-1`` of one sequence."""

    sequence: int
    start: int
    end: int


class Sequences:
    """Queries, keys and values of some sequences at every position."""

    def __init__(self, shape: Shape, lengths: Sequence[int], seed: int = 0) -> None:
        self.shape = shape
        self.lengths = lengths
        self.query, self.key, self.value = (
            [normal(n, heads, shape.head_dim, seed=seed + 9 * i + j) for i, n in enumerate(lengths)]
            for j, heads in enumerate((shape.heads, shape.kv_heads, shape.kv_heads))
        )

    def naive(self, sequence: int) -> Tensor:
        """[length, heads * head_dim], in float64."""
        shape = self.shape
        group = shape.heads // shape.kv_heads
        q = self.query[sequence].double().transpose(0, 1)
        k, v = (
            x[sequence].to(shape.kv_dtype).double().transpose(0, 1).repeat_interleave(group, 0)
            for x in (self.key, self.value)
        )
        scores = q @ k.transpose(1, 2) * shape.scale
        if shape.softcap:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        hidden = distance < 0
        if shape.window is not None:
            hidden |= distance >= shape.window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return (weights @ v).transpose(0, 1).reshape(q.shape[1], -1)

    def attend(self, chunks: Sequence[Chunk], block_size: int, seed: int = 0) -> list[Tensor]:
        """One call for all chunks, over a cache whose other slots hold garbage: keys of NaN, and
        values as large as they get (write_kv stores no others)."""
        shape = self.shape
        # The order that kernels are promised.
        order = sorted(
            range(len(chunks)),
            key=lambda i: (chunks[i].end - chunks[i].start > 1, -chunks[i].end),
        )
        needed = sum(-(-chunk.end // block_size) for chunk in chunks)
        num_blocks = needed + 5
        free = random.Random(seed).sample(range(num_blocks), num_blocks)
        cache = tuple(
            torch.full(
                (shape.kv_heads, (num_blocks + 1) * block_size, shape.head_dim),
                garbage,
                dtype=shape.kv_dtype,
            )
            for garbage in (float("nan"), torch.finfo(shape.kv_dtype).max)
        )
        for store in cache:
            store[:, num_blocks * block_size :] = 0
        tables, slots = [], []
        for index in order:
            chunk = chunks[index]
            table = [free.pop() for _ in range(-(-chunk.end // block_size))]
            where = torch.tensor(table).repeat_interleave(block_size) * block_size
            where = (where + torch.arange(block_size).repeat(len(table)))[: chunk.end]
            first = 0
            if shape.window is not None:
                # Blocks that even the first query cannot see may have been given back.
                gone = max(0, chunk.start - shape.window + 1) // block_size
                table[:gone] = [NO_BLOCK] * gone
                first = gone * block_size
            earlier = slice(first, chunk.start)
            reference.store_kv(
                self.key[chunk.sequence][earlier],
                self.value[chunk.sequence][earlier],
                cache,
                where[earlier],
            )
            tables.append(table)
            slots.append(where[chunk.start : chunk.end])
        rows = [slice(chunks[i].start, chunks[i].end) for i in order]
        starts = [0]
        for part in rows:
            starts.append(starts[-1] + part.stop - part.start)
        metadata = AttentionMetadata(
            block_size=block_size,
            num_blocks=num_blocks,
            window=shape.window,
            query_starts=starts,
            context_lens=[chunks[i].end for i in order],
            block_tables=tables,
        )
        query, key, value = (
            torch.cat([x[chunks[i].sequence][part] for i, part in zip(order, rows, strict=True)])
            for x in (self.query, self.key, self.value)
        )
        reference.write_kv(key, value, cache, metadata)
        written = reference._slots(metadata)
        assert torch.equal(written, torch.cat(slots))
        kept = query.clone()
        result = reference.attention(query, cache, metadata, shape.scale, shape.softcap)
        assert torch.equal(query, kept)
        again = reference.attention(query, cache, metadata, shape.scale, shape.softcap)
        assert torch.equal(result, again)
        parts = dict(zip(order, result.split([p.stop - p.start for p in rows]), strict=True))
        return [parts[i] for i in range(len(chunks))]


SHAPES = [
    Shape(),
    Shape(heads=3, kv_heads=3, head_dim=64),
    Shape(heads=8, kv_heads=1, head_dim=80),
    Shape(heads=9, kv_heads=3, head_dim=64, window=50),
    Shape(heads=2, kv_heads=1, head_dim=72),
    Shape(window=1),
    Shape(window=64, softcap=2.0),
    Shape(heads=4, kv_heads=4, head_dim=24, softcap=5.0, window=200),
    Shape(heads=2, kv_heads=1, head_dim=128, kv_dtype=torch.bfloat16),
    Shape(heads=4, kv_heads=2, head_dim=256, kv_dtype=torch.float16, window=129),
]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_right(shape: Shape, block_size: int) -> None:
    lengths = (1, 63, 64, 65, 200, 300)
    sequences = Sequences(shape, lengths)
    chunks = [Chunk(i, 0, n) for i, n in enumerate(lengths)]
    chunks[3] = Chunk(3, 64, 65)
    chunks[4] = Chunk(4, 199, 200)
    chunks[5] = Chunk(5, 131, 300)
    for chunk, result in zip(chunks, sequences.attend(chunks, block_size), strict=True):
        expected = sequences.naive(chunk.sequence)[chunk.start : chunk.end]
        torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_is_exact(shape: Shape) -> None:
    """Token by token, alone and with others, as in one prefill."""
    lengths = (130, 257, 20)
    sequences = Sequences(shape, lengths, seed=3)
    torch.set_num_threads(1)
    whole = [sequences.attend([Chunk(i, 0, n)], 16)[0] for i, n in enumerate(lengths)]
    for threads in THREADS:
        torch.set_num_threads(threads)
        for back in (0, 1, 19):
            chunks = [Chunk(i, n - back - 1, n - back) for i, n in enumerate(lengths)]
            for block_size in BLOCK_SIZES:
                results = sequences.attend(chunks, block_size, seed=back)
                for chunk, result in zip(chunks, results, strict=True):
                    expected = whole[chunk.sequence][chunk.start : chunk.end]
                    assert torch.equal(result, expected)


@st.composite
def compositions(draw: st.DrawFn) -> tuple[Shape, list[int], list[Chunk], int, int]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    shape = Shape(
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 8])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 24, 64, 80, 128])),
        window=draw(st.sampled_from([None, None, 1, 7, 64, 100, 250])),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        kv_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )
    lengths = draw(st.lists(st.integers(1, 330), min_size=1, max_size=5))
    chunks = []
    for index, length in enumerate(lengths):
        start = draw(st.integers(0, length - 1) | st.just(length - 1))
        chunks.append(Chunk(index, start, length))
    return (
        shape,
        lengths,
        chunks,
        draw(st.sampled_from(BLOCK_SIZES)),
        draw(st.sampled_from(THREADS)),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(compositions())
def test_attention_is_exact(
    composition: tuple[Shape, list[int], list[Chunk], int, int],
) -> None:
    """Chunks of any composition give the bits of each sequence's own whole prefill."""
    shape, lengths, chunks, block_size, threads = composition
    sequences = Sequences(shape, lengths, seed=sum(lengths))
    torch.set_num_threads(1)
    whole = [sequences.attend([Chunk(i, 0, n)], 16)[0] for i, n in enumerate(lengths)]
    torch.set_num_threads(threads)
    for chunk, result in zip(chunks, sequences.attend(chunks, block_size, seed=7), strict=True):
        expected = whole[chunk.sequence][chunk.start : chunk.end]
        assert torch.equal(result, expected), chunk
        plain = sequences.naive(chunk.sequence)[chunk.start : chunk.end]
        torch.testing.assert_close(result, plain.float(), rtol=1e-4, atol=1e-5)


def test_long_prefill_is_exact() -> None:
    """Long enough that the scores of one chunk are computed in several blocks."""
    shape = Shape(heads=6, kv_heads=2, head_dim=32)
    sequences = Sequences(shape, [900])
    whole = sequences.attend([Chunk(0, 0, 900)], 16)[0]
    for threads in THREADS:
        torch.set_num_threads(threads)
        for start, end in [(0, 511), (511, 639), (639, 900), (899, 900)]:
            part = sequences.attend([Chunk(0, start, end)], 32)[0]
            assert torch.equal(part, whole[start:end])
    expected = sequences.naive(0).float()
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=2e-6)


def test_many_decodes_of_one_step_are_exact() -> None:
    shape = Shape(heads=6, kv_heads=2, head_dim=64)
    lengths = [1 + 13 * i for i in range(40)]
    sequences = Sequences(shape, lengths)
    torch.set_num_threads(1)
    alone = [sequences.attend([Chunk(i, n - 1, n)], 64)[0] for i, n in enumerate(lengths)]
    for threads in THREADS:
        torch.set_num_threads(threads)
        together = sequences.attend([Chunk(i, n - 1, n) for i, n in enumerate(lengths)], 16)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write_kv(dtype: torch.dtype) -> None:
    cache = tuple(torch.zeros(2, 40, 8, dtype=dtype) for _ in range(2))
    key, value, slots = normal(5, 2, 8), normal(5, 2, 8, seed=1), torch.tensor([7, 39, 0, 12, 3])
    reference.store_kv(key, value, cache, slots)
    for store, new in zip(cache, (key, value), strict=True):
        assert torch.equal(store[:, slots], new.transpose(0, 1).to(dtype))
        rest = [slot for slot in range(40) if slot not in slots.tolist()]
        assert not store[:, rest].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stored_values_are_finite(dtype: torch.dtype) -> None:
    """A value that is not finite would reach other requests through a weight of zero; the key
    keeps its NaN, so that the request itself still fails."""
    cache = (torch.zeros(1, 16, 4, dtype=dtype), torch.zeros(1, 16, 4, dtype=dtype))
    new = torch.tensor([[[float("nan"), float("inf"), -float("inf"), 1e30]]])
    reference.store_kv(new, new, cache, torch.tensor([3]))
    key, value = (store[0, 3].float() for store in cache)
    assert key.isnan()[0]
    assert value.isfinite().all()
    assert value[0] == 0


@pytest.mark.parametrize(("width", "num_out"), [(64, 64), (96, 200), (576, 960), (1536, 576)])
def test_packed_weights(width: int, num_out: int) -> None:
    """A packed weight gives the same product, and a row's bits depend on that row alone: for all
    numbers of rows and threads, though its layout was chosen for one of them."""
    x, weight = normal(530, width), normal(num_out, width, seed=1)
    packed = reference.pack(weight.clone())
    torch.set_num_threads(1)
    whole = reference.linear(x, packed)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    for threads in THREADS:
        torch.set_num_threads(threads)
        for rows in (1, 2, 7, 8, 9, 16, 40, 129, 530):
            assert torch.equal(reference.linear(x[:rows], packed), whole[:rows]), rows
            assert torch.equal(reference.linear(x[-rows:], packed), whole[-rows:]), rows


def test_only_float32_matrices_are_packed() -> None:
    for weight in (normal(64, 64).bfloat16(), normal(8, 64)):
        assert reference.pack(weight) is weight
