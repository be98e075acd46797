"""The native rotary embedding, KV cache and attention: right against the reference, and exact.

Exact means that the bits of a row depend on its own request alone: not on the batch, on how a
prompt was cut into steps, on the block size, on the number of threads, or on what lies in unused
slots.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex.errors import KernelError
from ambidex.kernels import reference
from ambidex.kernels.metadata import AttentionMetadata
from ambidex.kv.block import BLOCK_SIZES, NO_BLOCK

_native = pytest.importorskip("ambidex.kernels.cpu._native")

from ambidex.kernels.cpu.attention import AttentionOps  # noqa: E402

LEVELS = _native.supported_levels()
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
HEAD_DIMS = (1, 3, 8, 16, 17, 24, 39, 40, 64, 72, 80, 96, 128, 256)
OPS = {(level, n): AttentionOps(n, [], level) for level in LEVELS for n in (1, 2, 3)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    softcap: float = 0.0
    kv_dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a sequence, computed in one step."""

    sequence: int
    start: int
    end: int


class Sequences:
    """Queries, keys and values of some sequences, attended to in any cut."""

    def __init__(self, shape: Shape, lengths: Sequence[int], seed: int = 0) -> None:
        self.shape = shape
        self.qkv = [
            normal(n, shape.heads + 2 * shape.kv_heads, shape.head_dim, seed=seed + 100 + i)
            for i, n in enumerate(lengths)
        ]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as slices of one matrix, as a model's are."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        q, k, v = rows.split([heads, kv_heads, kv_heads], 1)
        return q, k, v

    def attend(
        self,
        ops: AttentionOps,
        chunks: Sequence[Chunk],
        block_size: int = 16,
        seed: int = 0,
        padding: int = 0,
    ) -> list[Tensor]:
        shape = self.shape
        num_blocks = sum(-(-chunk.end // block_size) for chunk in chunks) + 3
        free = random.Random(seed).sample(range(num_blocks), num_blocks)
        cache = tuple(
            torch.zeros(size, dtype=dtype)
            for size, dtype in ops.kv_layout(
                shape.kv_heads, (num_blocks + 1) * block_size, shape.head_dim, shape.kv_dtype
            )
        )
        # What lies in unused slots: NaN where the type has it.
        unused = num_blocks * block_size
        for tensor in cache:
            used = tensor[:, : unused // 8 if tensor.dim() == 4 else unused]
            used.fill_(float("nan") if tensor.is_floating_point() else 77)
        tables = []
        for chunk in chunks:
            table = [free.pop() for _ in range(-(-chunk.end // block_size))]
            if chunk.start:
                _, key, value = self.split(self.qkv[chunk.sequence][: chunk.start])
                earlier = self.metadata([chunk.start], [table], num_blocks, block_size)
                ops.write_kv(key, value, cache, earlier)
            if shape.window is not None:
                gone = max(0, chunk.start - shape.window + 1) // block_size
                table[:gone] = [NO_BLOCK] * gone
            tables.append(table)
        counts = [chunk.end - chunk.start for chunk in chunks]
        metadata = self.metadata(counts, tables, num_blocks, block_size)
        metadata.context_lens = [chunk.end for chunk in chunks]
        rows = [self.qkv[c.sequence][c.start : c.end] for c in chunks]
        rows.append(normal(padding, shape.heads + 2 * shape.kv_heads, shape.head_dim, seed=9))
        query, key, value = self.split(torch.cat(rows))
        kept = query.clone()
        ops.write_kv(key, value, cache, metadata)
        result = ops.attention(query, cache, metadata, shape.scale, shape.softcap)
        assert torch.equal(query, kept)
        assert result.shape == (sum(counts) + padding, shape.heads * shape.head_dim)
        assert not result[sum(counts) :].any()
        return list(result[: sum(counts)].split(counts)) if counts else []

    def metadata(
        self, counts: list[int], tables: list[list[int]], num_blocks: int, block_size: int
    ) -> AttentionMetadata:
        return AttentionMetadata(
            block_size=block_size,
            num_blocks=num_blocks,
            window=self.shape.window,
            query_starts=list(accumulate(counts, initial=0)),
            context_lens=list(counts),
            block_tables=tables,
        )

    def expected(self, sequence: int, start: int = 0, end: int | None = None) -> Tensor:
        """Rows of a sequence by plain formulas, in double precision."""
        shape = self.shape
        query, key, value = (x.double() for x in self.split(self.qkv[sequence]))
        if shape.kv_dtype is torch.int8:
            key, value = (self._rounded(x) for x in (key, value))
        else:
            key, value = (x.to(shape.kv_dtype).double() for x in (key, value))
        positions = torch.arange(len(query))
        queries, query = positions[start:end, None], query[start:end]
        group = shape.heads // shape.kv_heads
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * shape.scale
        if shape.softcap:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        hidden = positions > queries
        if shape.window is not None:
            hidden |= positions <= queries - shape.window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1).float()

    @staticmethod
    def _rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale


SHAPES = [
    Shape(),
    Shape(heads=9, kv_heads=3, head_dim=64),
    Shape(heads=14, kv_heads=2, head_dim=64, window=50),
    Shape(heads=8, kv_heads=1, head_dim=80),
    Shape(heads=2, kv_heads=1, head_dim=72),
    Shape(window=1),
    Shape(window=64, softcap=2.0),
    Shape(heads=4, kv_heads=4, head_dim=24, softcap=5.0, window=200),
    Shape(heads=16, kv_heads=1, head_dim=128, kv_dtype=torch.bfloat16),
    Shape(heads=4, kv_heads=2, head_dim=256, kv_dtype=torch.float16, window=129),
    Shape(heads=6, kv_heads=2, head_dim=96, kv_dtype=torch.int8),
    Shape(heads=5, kv_heads=5, head_dim=39, kv_dtype=torch.int8, window=70, softcap=3.0),
    Shape(heads=100, kv_heads=1, head_dim=16, kv_dtype=torch.bfloat16),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_right(shape: Shape, level: str) -> None:
    lengths = (1, 63, 64, 65, 200, 300)
    sequences = Sequences(shape, lengths)
    chunks = [Chunk(i, 0, n) for i, n in enumerate(lengths)]
    chunks[3] = Chunk(3, 64, 65)
    chunks[4] = Chunk(4, 199, 200)
    chunks[5] = Chunk(5, 131, 300)
    # A number that is rounded to another of int8's 255 is off by up to 1/254 of the largest.
    tolerance = 2e-5 if shape.kv_dtype is not torch.int8 else 2e-2
    for index, block_size in enumerate(BLOCK_SIZES[:: 4 if level == "generic" else 1]):
        ops = OPS[level, 1 + index % 3]
        results = sequences.attend(ops, chunks, block_size, padding=index)
        for chunk, result in zip(chunks, results, strict=True):
            expected = sequences.expected(chunk.sequence, chunk.start, chunk.end)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
def test_attention_is_the_references(level: str) -> None:
    """The same step through both tables, each with a cache in its own layout."""
    generator = random.Random(3)
    for dtype in DTYPES[:3]:
        counts, lens, size, num_blocks = [1, 1, 5, 70], [130, 7, 5, 170], 16, 40
        free = generator.sample(range(num_blocks), num_blocks)
        tables = [[free.pop() for _ in range(-(-n // size))] for n in lens]
        slots = [
            torch.tensor([tables[i][p // size] * size + p % size for p in range(n)])
            for i, n in enumerate(lens)
        ]
        ops = OPS[level, 2]
        plain = tuple(torch.zeros(2, (num_blocks + 1) * size, 48, dtype=dtype) for _ in range(2))
        own = tuple(
            torch.zeros(s, dtype=d) for s, d in ops.kv_layout(2, (num_blocks + 1) * size, 48, dtype)
        )
        for step_counts in (lens, counts):
            starts = [sum(step_counts[:i]) for i in range(len(lens) + 1)]
            metadata = AttentionMetadata(
                size,
                num_blocks,
                None,
                starts,
                lens,
                tables,
            )
            where = torch.cat([s[len(s) - n :] for s, n in zip(slots, step_counts, strict=True)])
            query, key, value = (normal(starts[-1], h, 48, seed=h + starts[-1]) for h in (6, 2, 2))
            reference.store_kv(key, value, plain, where)
            ops.write_kv(key, value, own, metadata)
            # Both hold the same numbers.
            assert torch.equal(own[0].transpose(2, 3).reshape(plain[0].shape), plain[0])
            assert torch.equal(own[1], plain[1])
            torch.testing.assert_close(
                ops.attention(query, own, metadata, 0.2),
                reference.attention(query, plain, metadata, 0.2),
                rtol=1e-5,
                atol=1e-5,
            )


def random_shape(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 3))
    return Shape(
        heads=kv_heads * draw(st.sampled_from((1, 2, 3, 4, 7, 8, 13))),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        window=draw(st.sampled_from((None, None, 1, 20, 64, 100, 150))),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0))),
        kv_dtype=draw(st.sampled_from(DTYPES)),
    )


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_attention_is_exact(level: str, data: st.DataObject) -> None:
    shape = data.draw(st.composite(random_shape)())
    lengths = data.draw(st.lists(st.integers(1, 260), min_size=1, max_size=4))
    sequences = Sequences(shape, lengths, seed=data.draw(st.integers(0, 999)))
    alone = [
        sequences.attend(OPS[level, 1], [Chunk(i, 0, n)], 64)[0] for i, n in enumerate(lengths)
    ]
    tolerance = 3e-5 if shape.kv_dtype is not torch.int8 else 5e-2
    torch.testing.assert_close(alone[0], sequences.expected(0), rtol=1e-4, atol=tolerance)
    for _ in range(3):
        chunks = []
        for sequence in data.draw(st.permutations(range(len(lengths)))):
            end = data.draw(st.integers(1, lengths[sequence]))
            start = data.draw(st.sampled_from((0, end - 1, max(0, end - 4), end // 2)))
            chunks.append(Chunk(sequence, start, end))
        chunks = chunks[: data.draw(st.integers(1, len(chunks)))]
        ops = OPS[level, data.draw(st.integers(1, 3))]
        block_size = data.draw(st.sampled_from(BLOCK_SIZES))
        results = sequences.attend(ops, chunks, block_size, seed=len(chunks), padding=len(chunks))
        for chunk, result in zip(chunks, results, strict=True):
            assert torch.equal(result, alone[chunk.sequence][chunk.start : chunk.end]), chunk


@pytest.mark.parametrize("level", LEVELS)
def test_a_long_sequence_is_cut_by_tiles(level: str) -> None:
    """So many heads and tiles that their results do not fit at once into the shared memory."""
    sequences = Sequences(Shape(heads=84, kv_heads=7, head_dim=16), [5000])
    chunk = [Chunk(0, 4999, 5000)]
    alone = sequences.attend(OPS[level, 1], chunk, 128)[0]
    torch.testing.assert_close(alone, sequences.expected(0, 4999), rtol=1e-5, atol=1e-5)
    for threads in (2, 3):
        assert torch.equal(sequences.attend(OPS[level, threads], chunk, 64)[0], alone)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_with_its_request(level: str, dtype: torch.dtype) -> None:
    shape = Shape(kv_dtype=dtype)
    sequences = Sequences(shape, [70, 90, 90])
    chunks = [Chunk(1, 89, 90), Chunk(0, 0, 70), Chunk(2, 0, 90)]
    before = sequences.attend(OPS[level, 2], chunks)
    key = sequences.split(sequences.qkv[0])[1]
    key[20, 1, 5] = float("nan")
    value = sequences.split(sequences.qkv[2])[2]
    value[88, 0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    after = sequences.attend(OPS[level, 2], chunks)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1][:20], before[1][:20])
    assert after[1][20:, -64:].isnan().all()  # the heads of the second KV head
    assert torch.equal(after[1][:, :64], before[1][:, :64])
    assert torch.equal(after[2][:88], before[2][:88])
    assert not after[2].isnan().any()


@pytest.mark.parametrize("level", LEVELS)
def test_scores_beyond_all_bounds(level: str) -> None:
    """The weight of a token far below the largest is zero, and a row of infinities is NaN."""
    sequences = Sequences(Shape(), [200])
    sequences.qkv[0][:, :4] *= 1e4
    result = sequences.attend(OPS[level, 2], [Chunk(0, 0, 200)])[0]
    torch.testing.assert_close(result, sequences.expected(0), rtol=1e-4, atol=1e-4)
    sequences.qkv[0][150, 0] = float("inf")
    result = sequences.attend(OPS[level, 2], [Chunk(0, 0, 200)])[0]
    assert result[150, :32].isnan().all()
    assert not result[151:].isnan().any()


@pytest.mark.parametrize("level", LEVELS)
def test_no_sequences(level: str) -> None:
    sequences = Sequences(Shape(), [])
    for padding in (0, 1, 8):
        assert sequences.attend(OPS[level, 2], [], padding=padding) == []


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_write_kv(level: str, dtype: torch.dtype, data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from(HEAD_DIMS))
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    earlier = [data.draw(st.integers(0, 30)) for _ in counts]
    size = data.draw(st.sampled_from(BLOCK_SIZES))
    ops = OPS[level, data.draw(st.integers(1, 3))]
    lens = [a + b for a, b in zip(counts, earlier, strict=True)]
    num_blocks = sum(-(-n // size) for n in lens) + 2
    free = random.Random(1).sample(range(num_blocks), num_blocks)
    tables = [[free.pop() for _ in range(-(-n // size))] for n in lens]
    starts = list(accumulate(counts, initial=0))
    num_slots = (num_blocks + 1) * size
    slots = [
        tables[i][p // size] * size + p % size
        for i in range(len(counts))
        for p in range(earlier[i], lens[i])
    ]
    metadata = AttentionMetadata(size, num_blocks, None, starts, lens, tables)
    where = torch.tensor(slots, dtype=torch.int64)
    rows = normal(starts[-1] + 3, 4, head_dim, seed=data.draw(st.integers(0, 99))) * 10
    key, value = rows[:, :2], rows[:, 2:]
    if starts[-1]:
        key[0, 0, 0], value[0, 1, 0] = float("nan"), float("nan")
        value[-4, 0, 0], value[-4, 1, -1] = float("inf"), -3e38
    cache = tuple(torch.zeros(s, dtype=d) for s, d in ops.kv_layout(2, num_slots, head_dim, dtype))
    ops.write_kv(key, value, cache, metadata)
    keys = cache[0].transpose(2, 3).reshape(2, num_slots, head_dim)
    if dtype is not torch.int8:
        plain = tuple(torch.zeros(2, num_slots, head_dim, dtype=dtype) for _ in range(2))
        count = starts[-1]
        reference.store_kv(key[:count], value[:count], plain, where)
        torch.testing.assert_close(keys, plain[0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(cache[1], plain[1], rtol=0, atol=0)
        return
    unused = torch.ones(num_slots, dtype=torch.bool)
    unused[slots] = False
    assert not any(tensor[:, unused].any() for tensor in (keys, *cache[1:]))
    for row, slot in enumerate(slots):
        for head in range(2):
            for given_, number, scale in (
                (key, keys, cache[2]),
                (value.nan_to_num(), cache[1], cache[3]),
            ):
                x, got = given_[row, head], scale[head, slot]
                if x.isnan().any():
                    assert got.isnan()
                    continue
                torch.testing.assert_close(got, x.abs().max() / 127)
                error = number[head, slot].double() * got.double() - x.double()
                assert error.abs().max() <= got * 0.501


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_rope(level: str, data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from(HEAD_DIMS[1:]))
    width = data.draw(st.integers(1, head_dim // 2))
    n, heads = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 5))
    rows = normal(n, heads + 4, head_dim, seed=1)
    query, key = rows[:, :heads], rows[:, heads : heads + 2]
    angles = normal(50, width, seed=2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor(
        data.draw(st.lists(st.integers(0, 49), min_size=n, max_size=n)), dtype=torch.int64
    )
    expected = reference.rope(query, key, cos, sin, positions)
    rest = rows[:, heads + 2 :].clone()
    alone = rows.clone()
    ops = OPS[level, data.draw(st.integers(1, 3))]
    results = ops.rope(query, key, cos, sin, positions)
    assert results[0] is query and results[1] is key
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(rows[:, heads + 2 :], rest)
    for i in range(n):
        one = alone[i : i + 1]
        OPS[level, 1].rope(
            one[:, :heads], one[:, heads : heads + 2], cos, sin, positions[i : i + 1]
        )
    assert torch.equal(alone, rows)


def test_rope_beyond_the_table() -> None:
    cos = torch.ones(10, 8)
    for level in LEVELS:
        query, key = normal(4, 2, 20), normal(4, 1, 20)
        kept = query.clone()
        OPS[level, 1].rope(query, key, cos, cos, torch.tensor([3, 10, -1, 1 << 60]))
        assert query[1:, :, :16].isnan().all() and key[1:, :, :16].isnan().all()
        assert not query[0].isnan().any()
        assert torch.equal(query[..., 16:], kept[..., 16:])


# ---------------------------------------------------------------- replay, bad input


class Recorder(AttentionOps):
    """Records calls for any number of rows."""

    recording = False

    def _rows(self, x: Tensor) -> int:
        rows: int = _native.ROWS_TOKENS if self.recording else x.shape[0]
        return rows


@pytest.mark.parametrize("level", LEVELS)
def test_replay(level: str) -> None:
    """One recording serves steps of any size."""
    shape, size, num_blocks = Shape(head_dim=40, window=100), 16, 60
    ops = Recorder(2, [], level)
    qkv, out = torch.zeros(200, 8, 40), torch.empty(0)
    cos, sin = normal(300, 20), normal(300, 20, seed=1)

    def caches() -> tuple[Tensor, ...]:
        layout = ops.kv_layout(2, (num_blocks + 1) * size, 40, torch.float32)
        return tuple(torch.zeros(s, dtype=d) for s, d in layout)

    def run(rows: Tensor, cache: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        query, key, value = rows.split([4, 2, 2], 1)
        query, key = ops.rope(query, key, cos, sin, positions)
        ops.write_kv(key, value, cache, metadata)
        return ops.attention(query, cache, metadata, 0.2)

    sequences = Sequences(shape, [])
    metadata = sequences.metadata([1], [[0]], num_blocks, size)
    replayed, at_once = caches(), caches()
    ops.recording = True
    ops._context.begin_recording()
    out = run(qkv, replayed, torch.zeros(0, dtype=torch.int64))
    program = ops._context.end_recording()
    ops.recording = False
    assert program.num_calls == 3
    tables = [list(range(1, 20)), [40, 3 + 20, 30], [50]]
    for step, (counts, lens) in enumerate(
        [([150, 30], [150, 30]), ([1, 1], [151, 31]), ([1, 1, 16], [152, 32, 16]), ([], [])]
    ):
        metadata = sequences.metadata(counts, tables[: len(counts)], num_blocks, size)
        metadata.context_lens = lens
        count = sum(counts)
        positions = torch.tensor(
            [p for n, end in zip(counts, lens, strict=True) for p in range(end - n, end)],
            dtype=torch.int64,
        )
        rows = normal(count, 8, 40, seed=step)
        qkv[:count] = rows
        expected = run(rows, at_once, positions)
        ops.set_metadata(metadata)
        ops._context.set_tokens(count, 0, positions.data_ptr())
        ops._context.replay(program)
        assert torch.equal(out[:count], expected)
    assert all(map(torch.equal, replayed, at_once))


def test_bad_input() -> None:
    ops = OPS[LEVELS[-1], 1]
    cache = tuple(torch.zeros(s, dtype=d) for s, d in ops.kv_layout(2, 48, 16, torch.float32))

    def metadata(**changes: object) -> AttentionMetadata:
        values: dict[str, object] = {
            "block_size": 16,
            "num_blocks": 2,
            "window": None,
            "query_starts": [0, 3],
            "context_lens": [20],
            "block_tables": [[0, 1]],
        }
        return AttentionMetadata(**{**values, **changes})  # type: ignore[arg-type]

    query, key = normal(3, 4, 16), normal(3, 2, 16)
    ops.write_kv(key, key, cache, metadata())
    ops.attention(query, cache, metadata(), 1.0)
    for given_metadata in (
        metadata(block_size=12),
        metadata(block_size=8),
        metadata(num_blocks=3),
        metadata(query_starts=[0, 4]),
        metadata(query_starts=[0]),
        metadata(query_starts=[1, 3]),
        metadata(context_lens=[2]),
        metadata(context_lens=[33]),
        metadata(block_tables=[]),
    ):
        with pytest.raises(KernelError):
            ops.attention(query, cache, given_metadata, 1.0)
        with pytest.raises(KernelError):
            ops.write_kv(key, key, cache, given_metadata)
    with pytest.raises(IndexError):
        ops.attention(query, cache, metadata(group=8), 1.0)
    # A block that does not exist is neither written nor read.
    ops.write_kv(key, key, cache, metadata(block_tables=[[0, 70000]]))
    ops.attention(query, cache, metadata(block_tables=[[70000, -5]]), 1.0)
    for bad in (query.double(), query[:, :, :15], query[:, :3], query[0], query[..., ::2]):
        with pytest.raises(KernelError):
            ops.attention(bad, cache, metadata(), 1.0)
    for bad_cache in (cache[:1], (cache[1], cache[0]), tuple(x.half() for x in cache)):
        with pytest.raises(KernelError):
            ops.write_kv(key, key.bfloat16(), bad_cache, metadata())
    with pytest.raises(KernelError):
        ops.write_kv(key, normal(2, 2, 16), cache, metadata())
    positions, table = torch.zeros(3, dtype=torch.int64), torch.ones(5, 8)
    for arguments in (
        (query, key, table, table, positions[:2]),
        (query, key, table, table, positions.int()),
        (query, key, table, table[:4], positions),
        (query, key, torch.ones(5, 9), torch.ones(5, 9), positions),
        (query, key[:2], table, table, positions),
        (query, key.double(), table, table, positions),
        (query, normal(3, 2, 8), table, table, positions),
        (query.transpose(0, 1), key, table, table, positions),
    ):
        with pytest.raises(KernelError):
            ops.rope(*arguments)
    for layout in ((2, 12, 16, torch.float32), (2, 16, 16, torch.float64), (0, 16, 16, torch.half)):
        with pytest.raises(KernelError):
            ops.kv_layout(*layout)
