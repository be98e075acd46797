"""The sampler: exact over batches and threads, equal to a slow reference, and a fair draw."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ambidex.kernels.philox import uniform
from ambidex.layers import sampler as sampler_module
from ambidex.layers.sampler import (
    NO_TOKEN,
    NonFiniteLogitsError,
    Sampler,
    SampleResult,
    SamplerRow,
    TokenCounts,
    prompt_logprobs,
)
from ambidex.request import SamplingParams, TokenLogprobs

VOCAB = 24
f32 = np.float32


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_row(
    output: list[int] | None = None, prompt: list[int] | None = None, **params: Any
) -> SamplerRow:
    prompt = [1, 2, 3] if prompt is None else prompt
    params.setdefault("seed", 0)
    return SamplerRow(SamplingParams(**params), prompt + (output or []), len(prompt))


def sample(logits: torch.Tensor, *rows: SamplerRow) -> SampleResult:
    return Sampler()(logits, rows)


def sample_one(logits: list[float], row: SamplerRow) -> int:
    result = sample(torch.tensor([logits]), row)
    assert result.errors == {}
    return result.token_ids[0]


# -- a slow reference, one token at a time --


def slow_modify(logits: list[float], row: SamplerRow) -> list[np.float32]:
    p = row.params
    output = row.token_ids[row.num_prompt_tokens :]
    scores = [f32(x) for x in logits]
    if len(output) < p.min_tokens:
        for token in p.eos_token_ids + p.stop_token_ids:
            scores[token] = f32(-math.inf)
    for token, bias in (p.logit_bias or {}).items():
        scores[token] = scores[token] + f32(bias)
    for word in p.bad_words_token_ids:
        prefix = word[:-1]
        if output[len(output) - len(prefix) :] == prefix and len(output) >= len(prefix):
            scores[word[-1]] = f32(-math.inf)
    counts = Counter(output)
    for token in range(len(scores)):
        x = scores[token]
        if token in row.token_ids and p.repetition_penalty != 1.0:
            r = f32(p.repetition_penalty)
            x = x / r if x > 0 else x * r
        if counts[token]:
            x = x - f32(p.frequency_penalty) * f32(counts[token])
            x = x - f32(p.presence_penalty)
        scores[token] = x
    return scores


def slow_allowed(
    scores: list[np.float32], probs: list[np.float32], p: SamplingParams
) -> tuple[set[int], float]:
    """The tokens that the filters keep, and how near top_p's cut was to being another one."""
    by_score = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    kept = set(by_score[: p.top_k] if p.top_k > 0 else by_score)
    kept &= {token for token, x in enumerate(probs) if x >= f32(p.min_p) * max(probs)}
    if p.top_p >= 1.0:
        return kept, math.inf
    total = math.fsum(probs[token] for token in kept)
    sums: list[float] = []
    nucleus: set[int] = set()
    margin = math.inf
    for token in sorted(kept, key=lambda token: (-probs[token], token)):
        if sums and sums[-1] >= p.top_p * total:
            break
        nucleus.add(token)
        sums.append(math.fsum(probs[t] for t in nucleus))
        margin = min(margin, abs(sums[-1] - p.top_p * total))
    return nucleus, margin


logit_lists = st.lists(
    st.integers(-40, 40).map(lambda x: x / 4) | st.floats(-12, 12, width=32),
    min_size=VOCAB,
    max_size=VOCAB,
)
tokens = st.integers(0, VOCAB - 1)


@st.composite
def sampler_rows(draw: st.DrawFn) -> SamplerRow:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, VOCAB, 100])),
        top_p=draw(st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.3])),
        min_tokens=draw(st.sampled_from([0, 2, 8])),
        logit_bias=draw(st.none() | st.dictionaries(tokens, st.floats(-100, 100, width=32))),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=draw(st.lists(tokens, max_size=2)),
        eos_token_ids=draw(st.lists(tokens, max_size=2)),
        bad_words_token_ids=draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3)),
    )
    prompt = draw(st.lists(tokens, min_size=1, max_size=6))
    return SamplerRow(params, prompt + draw(st.lists(tokens, max_size=6)), len(prompt))


def check_against_reference(logits: list[float], row: SamplerRow, token: int) -> None:
    p = row.params
    scores = slow_modify(logits, row)
    if p.temperature == 0 or p.top_k == 1:
        assert token == scores.index(max(scores))
        return
    best = max(scores)
    scaled = [(x - best) / f32(p.temperature) for x in scores]
    probs = torch.softmax(torch.tensor(np.array(scaled)), -1).numpy().tolist()
    allowed, margin = slow_allowed(scaled, [f32(x) for x in probs], p)
    assume(margin > 1e-9)
    assert token in allowed
    assert probs[token] > 0
    total = math.fsum(probs[t] for t in allowed)
    target = total * uniform([cast(int, p.seed)], [row.num_output_tokens]).item()
    below = math.fsum(probs[t] for t in allowed if t < token)
    assert below - 1e-9 <= target <= below + probs[token] + 1e-9


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(logit_lists, sampler_rows()), min_size=1, max_size=5))
def test_tokens_of_a_mixed_batch_are_the_slow_reference_s(
    batch: list[tuple[list[float], SamplerRow]],
) -> None:
    rows = [row for _, row in batch]
    result = sample(torch.tensor([logits for logits, _ in batch]), *rows)
    assert result.errors == {}
    for (logits, row), token in zip(batch, result.token_ids, strict=True):
        check_against_reference(logits, row, token)


@settings(max_examples=200, deadline=None)
@given(logit_lists, sampler_rows())
def test_modified_logits_are_the_slow_reference_s_bitwise(
    logits: list[float], row: SamplerRow
) -> None:
    scores = np.array(logits, dtype=np.float32)
    assert sampler_module._modify(scores, row) is None
    assert scores.tolist() == [float(x) for x in slow_modify(logits, row)]


@settings(max_examples=300, deadline=None)
@given(logit_lists, sampler_rows(), st.integers(0, 3))
def test_filters_keep_the_slow_reference_s_tokens(
    logits: list[float], row: SamplerRow, repeats: int
) -> None:
    scores = torch.tensor(logits * (repeats + 1))  # repeated: every value is a tie
    probs = torch.softmax(scores, -1)
    expected, margin = slow_allowed(list(scores.numpy()), list(probs.numpy()), row.params)
    assume(margin > 1e-9)
    kept = probs.clone()
    sampler_module._filter(scores.numpy(), kept.numpy(), row.params)
    assert set(kept.nonzero()[:, 0].tolist()) == expected
    assert all(kept[token] == probs[token] for token in expected)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 6.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.0), (0, 0.9), (0, 1 - 1e-7), (700, 0.5), (50, 1)]
)
def test_filters_on_a_large_vocabulary(scale: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50_257, generator=generator) * scale
    probs = torch.softmax(scores, -1)
    kept = probs.clone()
    params = SamplingParams(top_k=top_k, top_p=top_p)
    sampler_module._filter(scores.numpy(), kept.numpy(), params)
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[: top_k or None]
    sums = torch.cumsum(probs[order].double(), -1)
    count = int((sums < top_p * sums[-1] - 1e-12).sum()) + 1 if top_p < 1 else len(order)
    num_kept = int((kept > 0).sum())
    assert abs(num_kept - count) <= (1 if scale else 0)
    assert kept[order[:num_kept]].count_nonzero() == num_kept


# -- exactness --


def mixed_rows(n: int, vocab: int, rng: random.Random) -> list[SamplerRow]:
    rows = []
    for i in range(n):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 0, 1, 40, 600]),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.4]),
            min_p=rng.choice([0.0, 0.0, 0.02]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
            logit_bias=rng.choice([None, None, {3: 5.0}]),
            logprobs=rng.choice([None, 0, 3, 20]),
            seed=1000 + i,
        )
        ids = [rng.randrange(vocab) for _ in range(rng.randrange(5, 60))]
        rows.append(SamplerRow(params, ids, rng.randrange(1, 5)))
    return rows


def cumulative(logits: torch.Tensor, rows: list[SamplerRow]) -> torch.Tensor:
    """What the draw searches: any bit that differs shows here, long before a token changes."""
    memory = sampler_module._Scratch().for_rows(len(rows), logits.shape[1])
    errors: dict[int, str] = {}
    probs = sampler_module._probabilities(logits, range(len(rows)), rows, memory, errors)
    return torch.from_numpy(probs).double().cumsum(-1)


def outcome(result: SampleResult, i: int) -> tuple[int, TokenLogprobs | None, str | None]:
    return result.token_ids[i], result.logprobs[i], result.errors.get(i)


@pytest.mark.parametrize("vocab", [97, 5_003, 50_257])
def test_a_row_alone_equals_the_row_in_any_batch_with_any_threads(vocab: int) -> None:
    n = 64
    rng = random.Random(vocab)
    rows = mixed_rows(n, vocab, rng)
    # Values of bfloat16, as models give them, have many ties.
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[::3] = logits[::3].bfloat16().float()
    logits[5, 7] = math.nan
    untouched = logits.clone()
    torch.set_num_threads(1)
    alone = [outcome(sample(logits[i : i + 1], rows[i]), 0) for i in range(n)]
    assert [i for i in range(n) if alone[i][2]] == [5]
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        if num_threads > 1:
            for i in range(0, n, 5):
                assert outcome(sample(logits[i : i + 1], rows[i]), 0) == alone[i]
        for size in (2, 3, 4, 5, 7, 8, 11, 16, 31, 63, 64):
            picked = rng.sample(range(n), size)
            result = sample(logits[picked], *[rows[i] for i in picked])
            for at, i in enumerate(picked):
                assert outcome(result, at) == alone[i], (num_threads, size, i)
    assert torch.equal(logits.nan_to_num(7.5), untouched.nan_to_num(7.5))


@pytest.mark.parametrize("vocab", [97, 5_003, 50_257])
def test_a_row_s_distribution_is_bitwise_the_same_in_any_batch_with_any_threads(vocab: int) -> None:
    n = min(64, sampler_module.CHUNK_ELEMENTS // vocab)
    rng = random.Random(vocab)
    rows = mixed_rows(n, vocab, rng)
    for row in rows:
        row.params.temperature = rng.choice([0.3, 1.0, 1.7])
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    torch.set_num_threads(1)
    alone = torch.cat([cumulative(logits[i : i + 1], [rows[i]]) for i in range(n)])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for size in range(1, n + 1):
            picked = rng.sample(range(n), size)
            together = cumulative(logits[picked], [rows[i] for i in picked])
            assert torch.equal(together, alone[picked]), (num_threads, size)


@pytest.mark.parametrize("vocab", [97, 20_003])
def test_a_kernel_table_s_best_tokens_change_nothing(vocab: int) -> None:
    native = pytest.importorskip("ambidex.kernels.cpu._native")
    from ambidex.kernels.cpu.small import SmallOps

    rng = random.Random(vocab)
    rows = mixed_rows(40, vocab, rng)
    rows += [make_row(temperature=0.0) for _ in range(10)]
    logits = torch.randn(50, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[::3] = logits[::3].bfloat16().float()
    for at, value in enumerate([math.nan, math.inf, -math.inf]):
        logits[40 + at, vocab - 1 - at] = value
    logits[44] = -math.inf
    logits[45] = 1.0
    expected = sample(logits, *rows)
    assert sorted(i for i in expected.errors if i >= 40) == [40, 41, 44]
    for level in native.supported_levels():
        sampler = Sampler(SmallOps(2, [], level))
        assert sampler(logits, rows) == expected
        for i in range(0, 50, 7):
            assert outcome(sampler(logits[i : i + 1], [rows[i]]), 0) == outcome(expected, i)


@pytest.mark.parametrize("chunk", [1, 5_000, 1 << 24])
def test_the_chunk_size_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(40, 2_001, random.Random(3))
    logits = torch.randn(40, 2_001, generator=torch.Generator().manual_seed(3)) * 3
    expected = sample(logits, *rows)
    monkeypatch.setattr(sampler_module, "CHUNK_ELEMENTS", chunk)
    assert sample(logits, *rows) == expected


def test_the_default_dtype_of_torch_changes_nothing() -> None:
    rows = mixed_rows(16, 301, random.Random(4))
    drawn = [make_row(temperature=0.3 + i / 100) for i in range(16)]
    logits = torch.randn(16, 301, generator=torch.Generator().manual_seed(4)) * 3
    expected, expected_sums = sample(logits, *rows), cumulative(logits, drawn)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert sample(logits, *rows) == expected
        assert torch.equal(cumulative(logits, drawn), expected_sums)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_strided_view_gives_the_same() -> None:
    rows = mixed_rows(8, 100, random.Random(5))
    logits = torch.randn(8, 128, generator=torch.Generator().manual_seed(5))
    assert sample(logits[:, :100], *rows) == sample(logits[:, :100].clone(), *rows)


# -- the draw --


def chi_square(drawn: list[int], expected: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    counts, wanted = counts[expected > 0], expected[expected > 0] * len(drawn)
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    ("params", "critical"),
    # 99.9% points of chi-square with 31, 31, 9 and 6 degrees of freedom.
    [({}, 61.1), ({"temperature": 1.6}, 61.1), ({"top_k": 10}, 27.9), ({"top_p": 0.61}, 22.5)],
)
def test_20000_draws_follow_the_distribution(
    vary: str, params: dict[str, Any], critical: float
) -> None:
    n, vocab = 20_000, 32
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(9))
    expected = torch.softmax(logits.double() / params.get("temperature", 1.0), -1)
    order = expected.argsort(descending=True)
    if "top_k" in params:
        expected[order[10:]] = 0
    if "top_p" in params:
        num_kept = int((expected[order].cumsum(0) < 0.61).sum()) + 1
        assert num_kept == 7, "the critical value above is for 7 tokens"
        expected[order[num_kept:]] = 0
    expected /= expected.sum()
    rows = [
        # A range serves as a list of which only the length matters.
        SamplerRow(SamplingParams(seed=i, **params), [], 0)
        if vary == "seed"
        else SamplerRow(SamplingParams(seed=77, **params), cast(list[int], range(i)), 0)
        for i in range(n)
    ]
    drawn = sample(logits.expand(n, vocab), *rows).token_ids
    assert chi_square(drawn, expected) < critical


def test_a_seed_repeats_and_another_differs() -> None:
    logits = torch.zeros(1, 1000)

    def text(seed: int) -> list[int]:
        row = make_row(seed=seed, prompt=[1])
        for _ in range(30):
            row.token_ids += sample(logits, row).token_ids
        return row.token_ids

    assert text(5) == text(5)
    assert text(5) != text(6)
    assert len(set(text(5))) > 20


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_the_ends_of_the_uniform_never_give_a_token_of_probability_0(
    u: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "uniform", lambda seeds, positions: np.full(len(seeds), u))
    never = -math.inf
    for possible in ([0], [7], [3], [2, 5]):
        logits = [0.1 * i if i in possible else never for i in range(8)]
        assert sample_one(logits, make_row()) in possible
    # All but two tokens filtered out, and a total that is no round number.
    logits = [0.3, 2.1, 0.3, 0.7, 2.0, 0.1, 0.0]
    assert sample_one(logits, make_row(top_k=2)) in (1, 4)
    assert sample_one(logits, make_row(top_p=0.4)) in (1, 4)


def test_rounding_up_to_the_total_gives_the_last_possible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler_module, "uniform", lambda seeds, positions: np.ones(len(seeds)))
    assert sample_one([1.0, 2.0, 1.0, -math.inf], make_row()) == 2


def test_the_draw_is_the_first_sum_above_the_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampler_module, "uniform", lambda seeds, positions: np.full(len(seeds), 0.5)
    )
    assert sample_one([0.0, 0.0], make_row()) == 1
    assert sample_one([0.0, -math.inf, 0.0], make_row()) == 2


# -- single parameters --


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = [0.0, 2.0, -1.0, 2.0, 2.0]
    greedy: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}]
    for params in greedy:
        assert sample_one(logits, make_row(**params)) == 1
        assert sample_one(logits, make_row(**params, logit_bias={0: 1.0})) == 1
    assert sample_one([-0.0, 0.0], make_row(temperature=0.0)) == 0


def test_low_temperatures_neither_overflow_nor_divide_by_zero() -> None:
    for temperature in (0.0, 1e-45, 1e-20, 1e-6, 1e-5, 1e-3):
        row = make_row(temperature=temperature)
        assert sample_one([3e38, -3e38, 2.9e38], row) == 0
        assert sample_one([80.0, 81.0, 0.0], row) == 1


@pytest.mark.parametrize("temperature", [3.5e38, 1e300])
def test_a_temperature_beyond_float32_is_the_highest(temperature: float) -> None:
    """As infinity it made NaN of what a mask rules out, and there was no token to draw."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 9.0
    masked = {"min_tokens": 1, "eos_token_ids": [3], "bad_words_token_ids": [[4]]}
    highest = [
        sample(logits, make_row(temperature=t, seed=seed, **masked)).token_ids[0]
        for t in (temperature, float(np.finfo(np.float32).max))
        for seed in range(200)
    ]
    assert highest[:200] == highest[200:]
    assert set(highest) == set(range(VOCAB)) - {3, 4}, "all that is allowed, equally likely"


def test_greedy_needs_no_seed() -> None:
    assert sample_one([0.0, 1.0], make_row(temperature=0.0, seed=None)) == 1


def test_min_tokens_masks_eos_and_stops_until_reached() -> None:
    logits = [0.0, 9.0, 8.0, 1.0]
    params: dict[str, Any] = {
        "temperature": 0.0,
        "min_tokens": 2,
        "eos_token_ids": [1, 99],
        "stop_token_ids": [2],
    }
    assert sample_one(logits, make_row(output=[0], **params)) == 3
    assert sample_one(logits, make_row(output=[0, 0], **params)) == 1


def test_bad_words_look_at_the_output_only() -> None:
    logits = [0.0, 9.0, 8.0, 1.0]
    params: dict[str, Any] = {
        "temperature": 0.0,
        "bad_words_token_ids": [[3, 0, 1], [2], [50_000], []],
    }
    assert sample_one(logits, make_row(prompt=[3, 0], output=[], **params)) == 1
    assert sample_one(logits, make_row(prompt=[3], output=[0], **params)) == 1
    assert sample_one(logits, make_row(prompt=[3], output=[3, 0], **params)) == 3


def test_penalties_leave_rows_without_them_alone() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]] * 3)
    penalised = make_row(prompt=[0], temperature=0.0, repetition_penalty=2.0)
    plain = make_row(prompt=[0], temperature=0.0)
    assert sample(logits, penalised, plain, penalised).token_ids == [1, 0, 1]


def test_counts_grow_with_the_list_and_start_again_when_it_shrinks() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(700) for _ in range(1500)]
    counts = TokenCounts()

    def check(num_prompt: int) -> None:
        counts.update(ids, num_prompt, 600)
        have = dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True))
        output = Counter(ids[num_prompt:])
        assert have == {token: output[token] for token in ids if token < 600}

    check(1000)
    for _ in range(400):
        ids.append(rng.randrange(700))
        counts.update(ids, 1000, 600)
    check(1000)
    del ids[1200:]
    check(1000)


def test_a_token_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row = make_row(temperature=0.0, frequency_penalty=0.5, prompt=[0] * 2000)
    logits = torch.zeros(1, 50)
    for _ in range(60):
        row.token_ids += sample(logits, row).token_ids
        assert row._counts.num_counted == len(row.token_ids) - 1
    # 60 draws over 50 equal tokens: round after round, in the order of the ids.
    assert row.token_ids[2000:] == [*range(50), *range(10)]


# -- failures stay in their row --


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 500, 1000])
def test_logits_that_are_not_finite_fail_their_row_alone(value: float, column: int) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {},
        {"top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"logprobs": 3},
    ]
    rows = [make_row(**kind, seed=3) for kind in kinds for _ in range(2)]
    logits = torch.randn(len(rows), 1001, generator=torch.Generator().manual_seed(2))
    expected = sample(logits, *rows)
    logits[::2, column] = value
    result = sample(logits, *rows)
    assert sorted(result.errors) == list(range(0, len(rows), 2))
    assert all("max" in text and "--dtype float32" in text for text in result.errors.values())
    assert all(result.token_ids[i] == NO_TOKEN for i in result.errors)
    assert all(result.logprobs[i] is None for i in result.errors)
    for i in range(1, len(rows), 2):
        assert outcome(result, i) == outcome(expected, i)


def test_all_tokens_masked_is_an_error_that_names_the_parameters() -> None:
    banned: dict[str, Any] = {"bad_words_token_ids": [[0], [1], [2]]}
    rows = [make_row(temperature=t, **banned) for t in (0.0, 1.0)] + [make_row(temperature=0.0)]
    result = sample(torch.tensor([[0.0, 1.0, 2.0]] * 3), *rows)
    assert sorted(result.errors) == [0, 1]
    assert "bad_words" in result.errors[0]
    assert result.token_ids == [NO_TOKEN, NO_TOKEN, 2]


def test_a_bias_on_a_token_that_is_not_there_fails_its_row_alone() -> None:
    rows = [make_row(temperature=t, logit_bias={3: 1.0}) for t in (0.0, 1.0)]
    rows.append(make_row(temperature=0.0))
    result = sample(torch.tensor([[0.0, 1.0, 2.0]] * 3), *rows)
    assert sorted(result.errors) == [0, 1]
    assert "token id 3" in result.errors[0]
    assert "0 to 2" in result.errors[0]
    assert result.token_ids[2] == 2


def test_minus_infinity_in_some_logits_is_no_error() -> None:
    logits = [-math.inf, 0.0, -math.inf, 1.0]
    assert sample_one(logits, make_row(temperature=0.0)) == 3
    assert sample_one(logits, make_row()) in (1, 3)


def test_nan_behind_a_mask_does_not_reach_the_log_probabilities() -> None:
    row = make_row(temperature=0.0, bad_words_token_ids=[[0]], logprobs=1)
    result = sample(torch.tensor([[math.nan, 0.0, 1.0]]), row)
    assert outcome(result, 0)[:2] == (NO_TOKEN, None)
    assert 0 in result.errors


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10)) == SampleResult([], [], {})


# -- log probabilities --


def check_entry(entry: TokenLogprobs, logits: torch.Tensor, k: int) -> None:
    expected = torch.log_softmax(logits.double(), -1)
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    assert [token for token, _ in entry.top] == order[:k]
    assert order[entry.rank - 1] == entry.token_id
    for token, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-5)


@pytest.mark.parametrize("k", [0, 1, 5, 600, 5000])
def test_logprobs_are_those_of_the_raw_distribution(k: int) -> None:
    vocab = 701
    logits = (torch.randn(6, vocab, generator=torch.Generator().manual_seed(8)) * 2).bfloat16()
    logits = logits.float()
    rows = [
        make_row(logprobs=k, temperature=0.0),
        make_row(logprobs=k, seed=2),
        make_row(logprobs=k, seed=3, temperature=0.4, top_k=4, logit_bias={9: 50.0}),
        make_row(logprobs=k, temperature=0.0, repetition_penalty=4.0, prompt=list(range(vocab))),
        make_row(),
        make_row(logprobs=k, temperature=0.0, bad_words_token_ids=[[int(logits[5].argmax())]]),
    ]
    result = sample(logits, *rows)
    for i, entry in enumerate(result.logprobs):
        if i == 4:
            assert entry is None
            continue
        assert entry is not None
        assert entry.token_id == result.token_ids[i]
        check_entry(entry, logits[i], k)
    assert result.token_ids[2] == 9
    assert cast(TokenLogprobs, result.logprobs[0]).rank == 1
    assert cast(TokenLogprobs, result.logprobs[5]).rank == 2


@pytest.mark.parametrize("k", [0, 3, -1])
def test_prompt_logprobs(k: int) -> None:
    vocab, m = 301, 37
    logits = torch.randn(m, vocab, generator=torch.Generator().manual_seed(8)).bfloat16().float()
    targets = [(i * 31) % vocab for i in range(m)]
    entries = prompt_logprobs(logits, targets, k)
    assert [entry.token_id for entry in entries] == targets
    for i, entry in enumerate(entries):
        check_entry(entry, logits[i], vocab if k < 0 else k)
        # Chunked prefill cuts the prompt anywhere.
        assert prompt_logprobs(logits[i : i + 1], targets[i : i + 1], k) == [entry]
    assert prompt_logprobs(logits[:0], [], k) == []


def test_prompt_logprobs_of_nan_raise() -> None:
    logits = torch.zeros(4, 10)
    logits[2, 3] = math.nan
    with pytest.raises(NonFiniteLogitsError, match="1 of the 4 prompt positions"):
        prompt_logprobs(logits, [1, 2, 3, 4], 2)
