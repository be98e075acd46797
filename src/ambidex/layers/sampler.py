"""From logits to tokens: penalties, temperature, top-k, top-p, and one uniform number a token.

The order is vLLM's: raw log probabilities; min_tokens, logit_bias, bad_words; repetition,
presence and frequency penalties; temperature; min_p, top_k, top_p; then the draw.

Exact: a row's token and log probabilities depend on that row alone, bitwise; not on the other
rows, their number, or the number of threads. So every operation here is of one of three kinds:
rounded once, element by element (+, -, *, /, comparison); one of torch's operations along the
last dimension that work row by row (softmax, log_softmax, cumsum, amax); or numpy on one row.
``torch.sum`` is none of these: it cuts a single long row among threads, which changes bits.

Ties are broken by the lower token id everywhere: greedy, top_k, top_p, ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ambidex.errors import AmbidexError
from ambidex.kernels.philox import uniform
from ambidex.request import SamplingParams, TokenLogprobs

#: Below this a temperature is greedy (vLLM's value): dividing by it would only overflow.
MIN_TEMPERATURE = 1e-5
#: Above this a temperature is no float32: infinity would make NaN of a masked token's -infinity.
MAX_TEMPERATURE = float(np.finfo(np.float32).max)
#: Rows are worked on in chunks of about this many logits: 2 MiB of scratch memory in all,
#: whatever the batch and the vocabulary, and it stays in the cache. At least one row.
CHUNK_ELEMENTS = 1 << 18
#: Up to here torch's selection of the k best of a row is faster than numpy's.
_TORCH_TOPK_LIMIT = 512
#: ``SampleResult.token_ids`` of a row that failed.
NO_TOKEN = -1

Row = NDArray[np.float32]


class NonFiniteLogitsError(AmbidexError):
    """The model computed NaN or infinite logits for a prompt whose log probabilities are wanted."""


class TokenCounts:
    """Which tokens a request has seen, and how often it produced them.

    Counting goes on where it stopped, so a decode step costs one token, not the whole context.
    """

    __slots__ = ("_ids", "_index", "_output_counts", "num_counted")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.num_counted = 0
        self._index: dict[int, int] = {}
        self._ids = np.zeros(256, dtype=np.int64)
        self._output_counts = np.zeros(256, dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[num_distinct] token ids of prompt and output, in order of appearance."""
        return self._ids[: len(self._index)]

    @property
    def output_counts(self) -> Row:
        """[num_distinct] how often each of ``ids`` occurs in the output."""
        return self._output_counts[: len(self._index)]

    def update(self, token_ids: list[int], num_prompt_tokens: int, vocab_size: int) -> None:
        """Count what was appended to ``token_ids``; all of it again if the list has shrunk.

        Ids that have no logit (multimodal placeholders, padding) are passed over.
        """
        if len(token_ids) < self.num_counted:
            self._reset()
        index = self._index
        for position in range(self.num_counted, len(token_ids)):
            token = token_ids[position]
            if not 0 <= token < vocab_size:
                continue
            slot = index.setdefault(token, len(index))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._output_counts = np.concatenate(
                    [self._output_counts, np.zeros_like(self._output_counts)]
                )
            self._ids[slot] = token
            if position >= num_prompt_tokens:
                self._output_counts[slot] += 1
        self.num_counted = len(token_ids)


@dataclass(slots=True)
class SamplerRow:
    """What the sampler must know of the request whose logits are in one row.

    ``token_ids`` is the live list of prompt and output. Between two calls it may grow at its end;
    a row whose list was shortened and then extended again needs a new ``SamplerRow``.
    """

    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    _counts: TokenCounts = field(default_factory=TokenCounts, init=False, repr=False, compare=False)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_greedy(self) -> bool:
        # The single best token needs no draw.
        return self.params.temperature < MIN_TEMPERATURE or self.params.top_k == 1

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return (
            p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        )

    @property
    def has_modifiers(self) -> bool:
        """Whether anything changes this row's logits before the temperature does."""
        p = self.params
        return (
            p.min_tokens > self.num_output_tokens
            or bool(p.logit_bias)
            or bool(p.bad_words_token_ids)
            or self.has_penalties
        )

    @property
    def has_filters(self) -> bool:
        """Whether min_p, top_k or top_p leaves tokens out."""
        p = self.params
        return p.min_p > 0.0 or p.top_k > 0 or p.top_p < 1.0


@dataclass(slots=True)
class SampleResult:
    """One entry a row; ``errors`` maps a failed row to a sentence (its token is ``NO_TOKEN``)."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str]


class BestTokens(Protocol):
    """The part of a kernel table that finds each row's best token."""

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of ``logits`` [n, vocab]: the lowest best ids [n], and which rows are finite [n]."""


class Sampler:
    """Chooses one token a row. Nothing is kept between two calls but memory, one piece a thread.

    ``kernels``, a lane's kernel table, may be left out: the tokens are the same, found by one
    thread.
    """

    def __init__(self, kernels: BestTokens | None = None) -> None:
        self._kernels = kernels
        self._scratch = _Scratch()

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[SamplerRow],
        best: tuple[Tensor, Tensor] | None = None,
    ) -> SampleResult:
        """``logits``: [n, vocab] float32 in host memory, left unchanged; ``rows``: [n];
        ``best``: what :meth:`BestTokens.greedy` says of ``logits``, where that is known.

        A row with NaN or infinite logits, or with every token masked, fails alone.
        Every row that is not greedy needs ``params.seed``.
        """
        assert logits.dtype == torch.float32, logits.dtype
        assert logits.shape[0] == len(rows), (logits.shape, len(rows))
        logits = logits.detach().contiguous()
        result = SampleResult([NO_TOKEN] * len(rows), [None] * len(rows), {})
        plain = [i for i, row in enumerate(rows) if row.is_greedy and not row.has_modifiers]
        modified = [i for i, row in enumerate(rows) if row.is_greedy and row.has_modifiers]
        drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
        if plain and best is None and self._kernels is not None:
            best = self._kernels.greedy(logits)
        if plain and best is not None:
            plain = _choose_best_of_finite(best, plain, result)
        _choose_best(logits.numpy(), plain, result)
        _choose_best_modified(logits.numpy(), modified, rows, result)
        _draw(logits, drawn, rows, self._scratch, result)
        wanted = {
            i: row.params.logprobs
            for i, row in enumerate(rows)
            if row.params.logprobs is not None and i not in result.errors
        }
        if not wanted:
            return result
        indices = list(wanted)
        targets = [result.token_ids[i] for i in indices]
        entries = _logprobs(logits, indices, targets, list(wanted.values()))
        for i, entry in zip(indices, entries, strict=True):
            if np.isnan(entry.logprob):  # NaN or infinity in a token that was masked
                result.token_ids[i] = NO_TOKEN
                result.errors[i] = _failure(entry.logprob, False)
            else:
                result.logprobs[i] = entry
        return result


def prompt_logprobs(logits: Tensor, target_ids: list[int], k: int) -> list[TokenLogprobs]:
    """The log probability of each prompt token, and the ``k`` best in its place.

    ``logits``: [m, vocab] float32 in host memory, row ``i`` being the model's prediction of
    ``target_ids[i]``; ``k``: 0 for the token alone, -1 for the whole vocabulary.
    Raises :class:`NonFiniteLogitsError`.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.shape[0] == len(target_ids), (logits.shape, len(target_ids))
    logits = logits.detach().contiguous()
    if len(target_ids) == 0:
        return []
    bad = np.flatnonzero(~np.isfinite(logits.amax(-1).numpy()))
    if len(bad):
        raise NonFiniteLogitsError(
            f"The model computed logits that are not finite at {len(bad)} of the "
            f"{len(target_ids)} prompt positions, so their log probabilities are unknown. "
            "Load the model with --dtype float32, or check its files."
        )
    return list(_logprobs(logits, range(len(target_ids)), target_ids, [k] * len(target_ids)))


def sampler_bytes(num_rows: int, vocab_size: int) -> int:
    """An upper estimate of what choosing tokens for so many rows takes, in bytes."""
    chunk = min(num_rows, _chunk_rows(vocab_size)) * vocab_size
    # Scores and probabilities, or logits and log probabilities, of the rows of a chunk; sums,
    # candidates and places of one row. Twice, since the C library keeps what was freed, in pieces.
    return 2 * (4 * 4 * chunk + 40 * vocab_size)


# -- greedy --


def _choose_best_of_finite(
    best: tuple[Tensor, Tensor], indices: list[int], result: SampleResult
) -> list[int]:
    """Settle the rows ``indices`` that are finite; returns the others."""
    token_ids, is_finite = (tensor.tolist() for tensor in best)
    for i in indices:
        if is_finite[i]:
            result.token_ids[i] = token_ids[i]
    return [i for i in indices if not is_finite[i]]


def _choose_best(logits: NDArray[np.float32], indices: list[int], result: SampleResult) -> None:
    # numpy's argmax is ten times torch's speed, takes the first of equals, and finds any NaN.
    if len(indices) == len(logits):
        best = logits.argmax(-1).tolist() if len(indices) else []
    else:
        best = [int(logits[i].argmax()) for i in indices]
    for i, token in zip(indices, best, strict=True):
        _settle(i, token, float(logits[i, token]), False, result)


def _choose_best_modified(
    logits: NDArray[np.float32],
    indices: list[int],
    rows: Sequence[SamplerRow],
    result: SampleResult,
) -> None:
    for i in indices:
        scores = logits[i].copy()
        error = _modify(scores, rows[i])
        if error is not None:
            result.errors[i] = error
            continue
        token = int(scores.argmax())
        _settle(i, token, float(scores[token]), True, result)


def _settle(i: int, token: int, best: float, is_modified: bool, result: SampleResult) -> None:
    """Record row ``i``'s token, or why the row's largest logit ``best`` allows none."""
    if np.isfinite(best):
        result.token_ids[i] = token
    else:
        result.errors[i] = _failure(best, is_modified)


def _failure(best: float, is_modified: bool) -> str:
    if best == -np.inf and is_modified:
        return (
            "Every token is ruled out by logit_bias, bad_words or min_tokens together, "
            "so none can be chosen. Loosen one of them."
        )
    return (
        f"The model computed logits whose maximum is {best}, so no token can be chosen. "
        "Load the model with --dtype float32, or check its files."
    )


# -- what changes logits --


def _modify(scores: Row, row: SamplerRow) -> str | None:
    """Apply min_tokens, logit_bias, bad_words and the penalties to ``scores`` [vocab] in place.

    Returns a sentence if the parameters do not fit the model. A mask on an id that the model
    does not have is no error: it holds already.
    """
    params = row.params
    vocab_size = len(scores)
    if params.min_tokens > row.num_output_tokens:
        stops = [*params.eos_token_ids, *params.stop_token_ids]
        scores[[token for token in stops if 0 <= token < vocab_size]] = -np.inf
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids.max() if ids.max() >= vocab_size else ids.min()
            return (
                f"logit_bias names token id {wrong}, but this model's ids are 0 to "
                f"{vocab_size - 1}. Remove it."
            )
        scores[ids] += np.fromiter(params.logit_bias.values(), np.float32, len(ids))
    if params.bad_words_token_ids:
        banned = _banned_tokens(params.bad_words_token_ids, row)
        scores[[token for token in banned if 0 <= token < vocab_size]] = -np.inf
    if row.has_penalties:
        _penalise(scores, row)
    return None


def _banned_tokens(bad_words: Iterable[list[int]], row: SamplerRow) -> list[int]:
    """The last token of each bad word whose other tokens end the output so far."""
    banned = []
    for *prefix, last in filter(None, bad_words):
        num_prefix = len(prefix)
        if num_prefix <= row.num_output_tokens and (
            num_prefix == 0 or row.token_ids[-num_prefix:] == prefix
        ):
            banned.append(last)
    return banned


def _penalise(scores: Row, row: SamplerRow) -> None:
    params = row.params
    counts = row._counts
    counts.update(row.token_ids, row.num_prompt_tokens, len(scores))
    ids, output_counts = counts.ids, counts.output_counts
    values = scores[ids]
    with np.errstate(over="ignore"):  # an overflow to infinity is reported as the row's error
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty != 0.0:
            values -= np.float32(params.frequency_penalty) * output_counts
        if params.presence_penalty != 0.0:
            values -= np.float32(params.presence_penalty) * (output_counts > 0)
    scores[ids] = values


# -- drawing --


def _chunk_rows(vocab_size: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocab_size)


def _chunks(indices: Sequence[int], vocab_size: int) -> Iterator[Sequence[int]]:
    size = _chunk_rows(vocab_size)
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


class _Scratch(threading.local):
    """Memory that the chunks of all calls in one thread share: fresh pages cost more than the
    arithmetic."""

    def __init__(self) -> None:
        self._memory = np.empty((2, 0), dtype=np.float32)

    def for_rows(self, num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Scores and probabilities, both [chunk_rows, vocab] float32, of any content."""
        chunk_rows = min(num_rows, _chunk_rows(vocab_size))
        size = chunk_rows * vocab_size
        if self._memory.shape[1] < size:
            self._memory = np.empty((2, size), dtype=np.float32)
        # New tensors each time: those made in inference mode could not be written outside it.
        memory = torch.from_numpy(self._memory[:, :size].reshape(2, chunk_rows, vocab_size))
        return memory[0], memory[1]


def _draw(
    logits: Tensor,
    indices: list[int],
    rows: Sequence[SamplerRow],
    scratch: _Scratch,
    result: SampleResult,
) -> None:
    """Draw a token for the rows ``indices`` of ``logits`` [n, vocab]."""
    if not indices:
        return
    seeds = []
    for i in indices:
        seed = rows[i].params.seed
        assert seed is not None, f"row {i} draws a token without a seed"
        seeds.append(seed)
    uniforms = uniform(seeds, [rows[i].num_output_tokens for i in indices]).tolist()
    memory = scratch.for_rows(len(indices), logits.shape[1])
    start = 0
    for chunk in _chunks(indices, logits.shape[1]):
        probs = _probabilities(logits, chunk, rows, memory, result.errors)
        for local, i in enumerate(chunk):
            if i not in result.errors:
                result.token_ids[i] = _search(probs[local], uniforms[start + local])
        start += len(chunk)


def _search(probs: Row, u: float) -> int:
    """The first id at which the sum of ``probs`` [vocab] by ascending id exceeds its share ``u``:
    never a token of probability 0, which adds nothing."""
    is_possible = probs > 0
    # float64, so that no token's chance is rounded away beside the sum of those before it. What
    # adds nothing may be left out, which pays where that is most of it.
    if np.count_nonzero(is_possible) * 8 < len(probs):
        possible = np.flatnonzero(is_possible)
        sums = _sums(probs[possible])
        at = int(np.searchsorted(sums, sums[-1] * u, side="right"))
        # u times the sum of all may have been rounded up to it.
        return int(possible[min(at, len(possible) - 1)])
    sums = _sums(probs)
    at = int(np.searchsorted(sums, sums[-1] * u, side="right"))
    return at if at < len(probs) else int(np.flatnonzero(is_possible)[-1])


def _sums(values: Row) -> NDArray[np.float64]:
    # One after the other, as numpy's, in a third of the time.
    return torch.cumsum(torch.from_numpy(values), -1, dtype=torch.float64).numpy()


def _probabilities(
    logits: Tensor,
    indices: Sequence[int],
    rows: Sequence[SamplerRow],
    memory: tuple[Tensor, Tensor],
    errors: dict[int, str],
) -> NDArray[np.float32]:
    """[len(indices), vocab]: the weight of each token that a row may draw, 0 for the others.

    It lies in ``memory``. Adds to ``errors``; the line of a failed row means nothing.
    """
    n = len(indices)
    scores, probs = memory[0][:n], memory[1][:n]
    torch.index_select(logits, 0, torch.tensor(indices), out=scores)
    for local, i in enumerate(indices):
        if rows[i].has_modifiers:
            error = _modify(scores[local].numpy(), rows[i])
            if error is not None:
                errors[i] = error
    best = scores.amax(-1, keepdim=True)
    for i, value in zip(indices, best[:, 0].tolist(), strict=True):
        if i not in errors and not np.isfinite(value):
            errors[i] = _failure(value, rows[i].has_modifiers)
    temperatures = [[min(rows[i].params.temperature, MAX_TEMPERATURE)] for i in indices]
    temperature = torch.tensor(temperatures, dtype=torch.float32)
    # The best score becomes 0 first, so that a low temperature cannot overflow.
    scores.sub_(best).div_(temperature)
    torch.softmax(scores, -1, out=probs)
    for local, i in enumerate(indices):
        if rows[i].has_filters and i not in errors:
            _filter(scores[local].numpy(), probs[local].numpy(), rows[i].params)
    return probs.numpy()


def _filter(scores: Row, probs: Row, params: SamplingParams) -> None:
    """Set to 0 the probabilities that min_p, top_k and top_p leave out; both are [vocab].

    min_p compares with the best token's probability; top_k keeps k tokens; top_p keeps the
    fewest best tokens whose share of what is left by then reaches top_p, at least one.
    """
    vocab_size = len(probs)
    if params.min_p > 0.0:
        np.multiply(probs, probs >= np.float32(params.min_p) * probs.max(), out=probs)
    if 0 < params.top_k < vocab_size:
        _keep_best(scores, _kth_largest(scores, params.top_k), params.top_k, probs)
    if params.top_p < 1.0:
        _keep_best(probs, *_nucleus(probs, params.top_p), probs)


def _nucleus(probs: Row, top_p: float) -> tuple[np.float32, int]:
    """The smallest probability that top_p keeps in ``probs`` [vocab], and how many it keeps."""
    total = float(probs.sum(dtype=np.float64))
    target = top_p * total
    # All tokens below this weigh together less than what top_p may leave out, so only the
    # others matter: for a language model, a few hundred.
    floor = 0.5 * (1.0 - top_p) * total / len(probs)
    candidates = probs[np.flatnonzero(probs > floor)]
    # A float's upper 16 bits are buckets of one size class (1/128 of a factor of two). Sum each,
    # find the bucket in which the target falls, and sort that one only.
    buckets = candidates.view(np.int32) >> 16
    buckets = buckets.max() - buckets
    sums = np.cumsum(np.bincount(buckets, weights=candidates))
    last = min(int(np.searchsorted(sums, target)), len(sums) - 1)
    num_before = int(np.count_nonzero(buckets < last))
    inside = np.sort(candidates[buckets == last])[::-1]
    sums_inside = (sums[last - 1] if last else 0.0) + np.cumsum(inside, dtype=np.float64)
    num_inside = min(int(np.searchsorted(sums_inside, target)) + 1, len(inside))
    return inside[num_inside - 1], num_before + num_inside


def _kth_largest(values: Row, k: int) -> np.float32:
    if k <= _TORCH_TOPK_LIMIT:
        return np.float32(torch.from_numpy(values).topk(k, sorted=False).values.numpy().min())
    return np.float32(np.partition(values, len(values) - k)[len(values) - k])


def _keep_best(values: Row, threshold: np.float32, count: int, probs: Row) -> None:
    """Set to 0 all ``probs`` but those of the ``count`` largest ``values``, lower ids first.

    ``threshold`` is the count-th largest value.
    """
    keep = values >= threshold
    num_surplus = int(np.count_nonzero(keep)) - count
    if num_surplus:
        keep[np.flatnonzero(values == threshold)[-num_surplus:]] = False
    np.multiply(probs, keep, out=probs)


# -- log probabilities --


def _logprobs(
    logits: Tensor, indices: Sequence[int], target_ids: Sequence[int], ks: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """For each of the rows ``indices`` of ``logits``: its target's entry with the k best."""
    done = 0
    for chunk in _chunks(indices, logits.shape[1]):
        scores = logits[list(chunk)]
        logprobs = torch.log_softmax(scores, -1)
        for local in range(len(chunk)):
            yield _entry(scores[local].numpy(), logprobs[local].numpy(), target_ids[done], ks[done])
            done += 1


def _entry(scores: Row, logprobs: Row, target: int, k: int) -> TokenLogprobs:
    # Order is that of the logits: subtracting the normaliser can round two of them to one.
    value = scores[target]
    num_above = np.count_nonzero(scores > value) + np.count_nonzero(scores[:target] == value)
    k = len(scores) if k < 0 else min(k, len(scores))
    top: list[tuple[int, float]] = []
    if k:
        candidates = np.flatnonzero(scores >= _kth_largest(scores, k))
        # Stable, and the ids ascend: equals stay in the order of their ids.
        order = np.argsort(-scores[candidates], kind="stable")[:k]
        top = [(int(token), float(logprobs[token])) for token in candidates[order]]
    return TokenLogprobs(target, float(logprobs[target]), int(num_above) + 1, top)
