"""From the engine's tokens to what a client reads: text, stop strings, log probabilities.

The engine gives token ids, step by step. Here they become text, that text is searched for stop
strings, and the ``n`` sequences of a request become one :class:`RequestOutput` a step, which
holds everything so far and what is new.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ambidex.engine.input import stop_strings
from ambidex.engine.tokenizer import Tokenizer
from ambidex.request import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
)


@dataclass(slots=True)
class Logprob:
    """A token's natural log probability, its rank (1: the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of ``time.monotonic()``."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_prompt_tokens: int = 0
    #: Of all sequences of the request.
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One sequence. ``text``, ``token_ids`` and ``logprobs`` hold everything so far (the lists
    grow as the request runs); the ``delta_`` fields what came with this step."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    #: A mapping of token id to :class:`Logprob` for each token; the chosen token is first.
    logprobs: list[dict[int, Logprob]] | None = None
    #: stop | length | abort | error, or None while it runs.
    finish_reason: str | None = None
    #: The stop string or stop token id that ended it; None for end of sequence.
    stop_reason: int | str | None = None
    #: A sentence, where ``finish_reason`` is error.
    error: str | None = None
    #: False: nothing about this sequence changed in this step.
    is_updated: bool = False
    delta_text: str = ""
    delta_token_ids: list[int] = field(default_factory=list)
    delta_logprobs: list[dict[int, Logprob]] | None = None
    #: Seconds since this sequence's previous token; None without new tokens or before.
    inter_token_s: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request after a step."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    #: One entry a prompt token (the first is None), or None where not asked for.
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestTimes
    num_cached_tokens: int = 0
    #: A sentence, where the request failed.
    error: str | None = None


def merged(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """``later``, changed in place to hold what is new in ``earlier``, too: for a reader that has
    seen neither."""
    for before, part in zip(earlier.outputs, later.outputs, strict=True):
        if not before.is_updated:
            continue
        part.is_updated = True
        part.delta_text = before.delta_text + part.delta_text
        part.delta_token_ids = before.delta_token_ids + part.delta_token_ids
        if before.delta_logprobs is not None:
            part.delta_logprobs = before.delta_logprobs + (part.delta_logprobs or [])
        if part.inter_token_s is None:
            part.inter_token_s = before.inter_token_s
    return later


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    First is what is complete first, character by character, so it does not depend on where the
    pieces are cut; of two that end together the longer wins. Knuth-Morris-Pratt for each string:
    nothing is read twice.
    """

    __slots__ = ("_failures", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first: it wins where several end at one character.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)

    def feed(self, text: str, armed: bool = True) -> tuple[str, int] | None:
        """The stop string that ``text`` completes, and the offset in ``text`` just behind it.

        Unless ``armed`` a match is passed over.
        """
        found: tuple[str, int] | None = None
        for k, stop in enumerate(self._stops):
            state = self._states[k]
            if state == 0 and stop[0] not in text:
                continue
            failure = self._failures[k]
            end = len(text) if found is None else found[1] - 1
            for at in range(end):
                char = text[at]
                while state and stop[state] != char:
                    state = failure[state]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        if armed:
                            found = (stop, at + 1)
                            break
                        state = failure[state]
            self._states[k] = state
        return found

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a match."""
        return max(self._states, default=0)


def _failure_table(pattern: str) -> list[int]:
    """``table[i]``: the longest proper prefix of ``pattern`` that ends ``pattern[:i]``."""
    table = [0, 0]
    state = 0
    for char in pattern[1:]:
        while state and pattern[state] != char:
            state = table[state]
        if pattern[state] == char:
            state += 1
        table.append(state)
    return table


class _Sequence:
    """One sequence of a request as it grows."""

    __slots__ = ("detokenizer", "full_text", "last_token_s", "matcher", "output", "params")

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer, continues: bool
    ) -> None:
        self.params = params
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self.detokenizer = (
            tokenizer.stream(params.skip_special_tokens, continues) if params.detokenize else None
        )
        stops = stop_strings(params)
        self.matcher = StopMatcher(stops) if stops and params.detokenize else None
        #: All text, with what is held back because a stop string may begin there.
        self.full_text = ""
        self.last_token_s: float | None = None

    def clear_delta(self) -> None:
        output = self.output
        if output.is_updated:
            output.is_updated = False
            output.delta_text = ""
            output.delta_token_ids = []
            output.delta_logprobs = None
            output.inter_token_s = None

    def add_tokens(self, update: EngineOutput) -> bool:
        """Append tokens and their text; True where a stop string ended the sequence."""
        output = self.output
        ids = update.new_token_ids
        if self.detokenizer is None:
            output.token_ids += ids
            output.delta_token_ids = output.delta_token_ids + ids
            return False
        # The token that stops is no text, unless it was asked for.
        hide_last = (
            update.finish_reason is FinishReason.STOP
            and not self.params.include_stop_str_in_output
            and bool(ids)
            and self._is_stop_token(ids[-1])
        )
        visible = ids[:-1] if hide_last else ids
        if self.matcher is None:
            self.full_text += self.detokenizer.push(visible)
        else:
            for i, token_id in enumerate(visible):
                if self._push_searching(token_id, len(output.token_ids) + i + 1):
                    # What came behind the stop string was never asked for.
                    ids = ids[: i + 1]
                    break
        output.token_ids += ids
        output.delta_token_ids = output.delta_token_ids + ids
        return output.finish_reason is not None

    def _push_searching(self, token_id: int, num_tokens: int) -> bool:
        assert self.matcher is not None
        assert self.detokenizer is not None
        text = self.detokenizer.push((token_id,))
        if not text:
            return False
        match = self.matcher.feed(text, armed=num_tokens >= self.params.min_tokens)
        start = len(self.full_text)
        self.full_text += text
        if match is None:
            return False
        self._stop_at(match[0], start + match[1])
        return True

    def _stop_at(self, stop: str, end: int) -> None:
        if not self.params.include_stop_str_in_output:
            end -= len(stop)
        self.full_text = self.full_text[:end]
        self.output.finish_reason = FinishReason.STOP.value
        self.output.stop_reason = stop

    def _is_stop_token(self, token_id: int) -> bool:
        params = self.params
        if token_id in params.stop_token_ids:
            return True
        return not params.ignore_eos and token_id in params.eos_token_ids

    def show_text(self, is_final: bool) -> None:
        """Move text from what is held to what the client sees."""
        output = self.output
        shown = len(self.full_text)
        if not is_final and self.matcher is not None:
            shown -= self.matcher.num_held
        before = len(output.text)
        if shown > before:
            output.delta_text += self.full_text[before:shown]
            output.text = (
                self.full_text if shown == len(self.full_text) else (self.full_text[:shown])
            )

    def finish(self, update: EngineOutput) -> None:
        """End the sequence for the engine's reason; a character cut short becomes U+FFFD."""
        assert update.finish_reason is not None
        if self.detokenizer is not None:
            rest = self.detokenizer.flush()
            start = len(self.full_text)
            self.full_text += rest
            if rest and self.matcher is not None:
                armed = len(self.output.token_ids) >= self.params.min_tokens
                match = self.matcher.feed(rest, armed)
                if match is not None:
                    self._stop_at(match[0], start + match[1])
                    return
        self.output.finish_reason = update.finish_reason.value
        self.output.stop_reason = update.stop_reason
        self.output.error = update.error


@dataclass(slots=True)
class _Request:
    """A request that is not finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    sequences: list[_Sequence]
    engine_ids: list[str]
    metrics: RequestTimes
    num_unfinished: int
    num_cached_tokens: int = 0

    def to_output(self) -> RequestOutput:
        outputs = [sequence.output for sequence in self.sequences]
        errors = [output.error for output in outputs if output.error is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[_snapshot(output) for output in outputs],
            finished=self.num_unfinished == 0,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=errors[0] if errors else None,
        )


class OutputProcessor:
    """Turns the engine's outputs into the clients'. Not thread-safe: one thread feeds it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        #: Engine id -> its request and which of its sequences.
        self._by_engine_id: dict[str, tuple[_Request, int]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        n: int | None = None,
        arrival_s: float | None = None,
    ) -> None:
        """Expect outputs for ``n`` sequences (``params.n`` by default), whose engine ids are as
        :meth:`InputProcessor.process` makes them; ``params`` are the resolved ones."""
        assert request_id not in self._requests, f"request id {request_id} is in use"
        n = params.n if n is None else n
        engine_ids = [request_id] if n == 1 else [f"{request_id}#{i}" for i in range(n)]
        # Behind a prompt with text, the first space of the output belongs to it.
        is_special = self._tokenizer.is_special
        continues = not params.skip_special_tokens or not all(map(is_special, prompt_token_ids))
        request = _Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            sequences=[_Sequence(i, params, self._tokenizer, continues) for i in range(n)],
            engine_ids=engine_ids,
            metrics=RequestTimes(
                arrival_s=time.monotonic() if arrival_s is None else arrival_s,
                num_prompt_tokens=len(prompt_token_ids),
            ),
            num_unfinished=n,
        )
        self._requests[request_id] = request
        for index, engine_id in enumerate(engine_ids):
            self._by_engine_id[engine_id] = (request, index)

    def add_requests(
        self, request_id: str, prompt: str | None, requests: Sequence[EngineRequest]
    ) -> None:
        """Expect outputs for what :meth:`InputProcessor.process` returned."""
        first = requests[0]
        self.add(
            request_id,
            prompt,
            first.prompt_token_ids,
            first.params,
            n=len(requests),
            arrival_s=first.arrival_s,
        )

    def process(
        self, updates: Iterable[EngineOutput], now_s: float | None = None
    ) -> tuple[list[RequestOutput], list[str]]:
        """One output for each request that changed, and the engine ids to abort because a stop
        string was found. Updates of requests that are gone are passed over."""
        now_s = time.monotonic() if now_s is None else now_s
        changed: dict[str, _Request] = {}
        to_abort: list[str] = []
        for update in updates:
            entry = self._by_engine_id.get(update.request_id)
            if entry is None:
                continue
            request, index = entry
            if request.request_id not in changed:
                changed[request.request_id] = request
                for sequence in request.sequences:
                    sequence.clear_delta()
            self._apply(request, request.sequences[index], update, now_s, to_abort)
        outputs = []
        for request in changed.values():
            if request.num_unfinished == 0:
                request.metrics.finished_s = now_s
                self._requests.pop(request.request_id, None)
            outputs.append(request.to_output())
        return outputs, to_abort

    def abort(self, request_id: str) -> list[str]:
        """Forget a request whose client has gone; returns the engine ids to abort."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        return [i for i in request.engine_ids if self._by_engine_id.pop(i, None) is not None]

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every request with an error, as when the engine died."""
        updates = [
            EngineOutput(engine_id, [], FinishReason.ERROR, error=message)
            for engine_id in list(self._by_engine_id)
        ]
        return self.process(updates)[0]

    def _apply(
        self,
        request: _Request,
        sequence: _Sequence,
        update: EngineOutput,
        now_s: float,
        to_abort: list[str],
    ) -> None:
        output = sequence.output
        output.is_updated = True
        if update.prompt_logprobs is not None and output.index == 0:
            self._add_prompt_logprobs(request, update.prompt_logprobs)
        if update.num_cached_tokens > request.num_cached_tokens:
            request.num_cached_tokens = update.num_cached_tokens
            request.metrics.num_cached_tokens = update.num_cached_tokens
        has_stopped = False
        if update.new_token_ids:
            before = len(output.token_ids)
            has_stopped = sequence.add_tokens(update)
            num_new = len(output.token_ids) - before
            self._record_times(request.metrics, sequence, num_new, now_s)
            if update.logprobs is not None and output.logprobs is not None:
                self._add_logprobs(output, update.logprobs[:num_new])
        if has_stopped:
            if update.finish_reason is None:
                to_abort.append(update.request_id)
        elif update.finish_reason is not None:
            sequence.finish(update)
        sequence.show_text(is_final=output.finished)
        if output.finished:
            request.num_unfinished -= 1
            del self._by_engine_id[update.request_id]

    def _record_times(
        self, times: RequestTimes, sequence: _Sequence, num_new: int, now_s: float
    ) -> None:
        if times.first_token_s is None:
            times.first_token_s = now_s
        times.last_token_s = now_s
        times.num_output_tokens += num_new
        if sequence.last_token_s is not None:
            sequence.output.inter_token_s = now_s - sequence.last_token_s
        sequence.last_token_s = now_s

    def _add_logprobs(self, output: CompletionOutput, entries: Sequence[TokenLogprobs]) -> None:
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        new = [self._to_mapping(entry) for entry in entries]
        output.logprobs += new
        output.delta_logprobs = (
            new if output.delta_logprobs is None else (output.delta_logprobs + new)
        )
        output.cumulative_logprob += sum(entry.logprob for entry in entries)

    def _add_prompt_logprobs(
        self, request: _Request, entries: Sequence[TokenLogprobs | None]
    ) -> None:
        known = request.prompt_logprobs
        if known is None or len(known) >= len(request.prompt_token_ids):
            return
        if entries and entries[0] is None:
            # The prompt's first position: after a preemption it is computed from there again.
            known.clear()
        known += [None if entry is None else self._to_mapping(entry) for entry in entries]

    def _to_mapping(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        text = self._tokenizer.token_text
        mapping = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            if token_id not in mapping:
                mapping[token_id] = Logprob(logprob, rank, text(token_id))
        return mapping


def _snapshot(output: CompletionOutput) -> CompletionOutput:
    # The lists are shared: copying all tokens each step would cost more than the rest.
    return CompletionOutput(
        output.index,
        output.text,
        output.token_ids,
        output.cumulative_logprob,
        output.logprobs,
        output.finish_reason,
        output.stop_reason,
        output.error,
        output.is_updated,
        output.delta_text,
        output.delta_token_ids,
        output.delta_logprobs,
        output.inter_token_s,
    )
