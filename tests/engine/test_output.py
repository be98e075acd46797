"""Text, stop strings, log probabilities and times of running requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.engine.input import InputProcessor, ModelLimits
from ambidex.engine.output import OutputProcessor, RequestOutput, StopMatcher, merged
from ambidex.engine.tokenizer import Tokenizer
from ambidex.request import EngineOutput, FinishReason, TokenLogprobs


class Harness:
    """An output processor with requests that were really processed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.input = InputProcessor(tokenizer, ModelLimits(512, tokenizer.vocab_size))
        self.output = OutputProcessor(tokenizer)

    def add(self, request_id: str = "r", prompt: str = "Say", **given_values: Any) -> None:
        params = self.input.make_params(given_values, default_max_tokens=None)
        requests = self.input.process(request_id, prompt, params, arrival_s=1.0)
        self.output.add_requests(request_id, prompt, requests)

    def run(
        self, ids: Sequence[int], reason: FinishReason | None = None, engine_id: str = "r"
    ) -> tuple[list[RequestOutput], list[str]]:
        """One token a step; stops where the processor wants an abort."""
        outputs: list[RequestOutput] = []
        for i, token_id in enumerate(ids):
            ended = reason if i == len(ids) - 1 else None
            new, aborted = self.output.process([EngineOutput(engine_id, [token_id], ended)])
            outputs += new
            if aborted:
                return outputs, aborted
        return outputs, []

    def run_text(self, text: str, **given_values: Any) -> tuple[RequestOutput, str]:
        """The last output, and the concatenation of all deltas."""
        self.add(**given_values)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        outputs, _ = self.run(ids, FinishReason.LENGTH)
        deltas = "".join(o.outputs[0].delta_text for o in outputs)
        delta_ids = [i for o in outputs for i in o.outputs[0].delta_token_ids]
        assert delta_ids == outputs[-1].outputs[0].token_ids
        return outputs[-1], deltas


@pytest.fixture
def harness(byte_level: Tokenizer) -> Harness:
    return Harness(byte_level)


def naive_stop(text: str, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that is complete first; the longest of those that end together."""
    for end in range(len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return max(ending, key=len), end
    return None


class TestStopMatcher:
    @settings(max_examples=500, deadline=None)
    @given(
        stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
        pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
    )
    def test_against_a_naive_search(self, stops: list[str], pieces: list[str]) -> None:
        matcher = StopMatcher(stops)
        text = ""
        for piece in pieces:
            found = matcher.feed(piece)
            if found is not None:
                assert naive_stop(text + piece, stops) == (found[0], len(text) + found[1])
                return
            text += piece
            assert naive_stop(text, stops) is None
            held = [
                size
                for size in range(1, 6)
                if any(len(s) > size and text.endswith(s[:size]) for s in stops)
                and len(text) >= size
            ]
            assert matcher.num_held == max(held, default=0)


class TestStopStrings:
    @settings(max_examples=100, deadline=None)
    @given(
        text=st.text(alphabet="ab c\u00e9", min_size=1, max_size=30),
        stops=st.lists(st.text(alphabet="ab c\u00e9", min_size=1, max_size=4), max_size=3),
        include=st.booleans(),
    )
    def test_streamed_text_is_the_cut_text(
        self, byte_level: Tokenizer, text: str, stops: list[str], include: bool
    ) -> None:
        harness = Harness(byte_level)
        last, deltas = harness.run_text(text, stop=stops, include_stop_str_in_output=include)
        output = last.outputs[0]
        assert last.finished
        assert deltas == output.text
        found = naive_stop(text, stops)
        if found is None:
            assert (output.text, output.finish_reason) == (text, "length")
        else:
            stop, end = found
            assert output.text == text[: end if include else end - len(stop)]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    def test_held_back_until_it_is_certain(self, harness: Harness) -> None:
        harness.add(stop=["END"])
        seen = []
        for char in "a E ENx":
            ids = harness.tokenizer.encode(char)
            seen.append(harness.run(ids)[0][-1].outputs[0].delta_text)
        assert seen == ["a", " ", "", "E ", "", "", "ENx"]

    def test_the_engine_is_told_once(self, harness: Harness) -> None:
        harness.add(stop=["b"])
        outputs, aborted = harness.run(harness.tokenizer.encode("a b c"))
        assert aborted == ["r"]
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].text == "a "
        # What the engine had already computed comes too late.
        assert harness.output.process([EngineOutput("r", [5])]) == ([], [])
        assert harness.output.num_requests == 0

    def test_no_abort_where_the_engine_has_ended(self, harness: Harness) -> None:
        harness.add(stop=["b"])
        ids = harness.tokenizer.encode("b")
        outputs, aborted = harness.output.process([EngineOutput("r", ids, FinishReason.LENGTH)])
        assert aborted == []
        assert outputs[0].outputs[0].stop_reason == "b"

    def test_several_tokens_a_step(self, harness: Harness) -> None:
        harness.add(stop=["b"], logprobs=0)
        ids = [harness.tokenizer.encode(char)[0] for char in "abcd"]
        logprobs = [TokenLogprobs(i, -1.0, 1, []) for i in ids]
        outputs, _ = harness.output.process([EngineOutput("r", ids, logprobs=logprobs)])
        output = outputs[0].outputs[0]
        assert (output.text, output.token_ids) == ("a", ids[:2])
        assert output.logprobs is not None
        assert len(output.logprobs) == 2
        assert output.cumulative_logprob == -2.0

    def test_min_tokens(self, harness: Harness) -> None:
        ids = harness.tokenizer.encode("x")
        harness.add(stop=["x"], min_tokens=3)
        outputs, aborted = harness.run(ids * 5)
        assert aborted == ["r"]
        assert len(outputs) == 3
        assert outputs[-1].outputs[0].text == "xx"


class TestEnds:
    def test_end_of_sequence(self, harness: Harness) -> None:
        harness.add()
        eos = harness.tokenizer.eos_token_ids[0]
        outputs, _ = harness.run([*harness.tokenizer.encode("hi"), eos], FinishReason.STOP)
        output = outputs[-1].outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("hi", "stop", None)
        assert output.token_ids[-1] == eos

    @pytest.mark.parametrize("include", [True, False])
    def test_stop_token(self, harness: Harness, include: bool) -> None:
        stop_id = harness.tokenizer.encode("x")[0]
        harness.add(stop_token_ids=[stop_id], include_stop_str_in_output=include)
        update = EngineOutput("r", [stop_id], FinishReason.STOP, stop_reason=stop_id)
        outputs, _ = harness.output.process([update])
        output = outputs[0].outputs[0]
        assert output.text == ("x" if include else "")
        assert (output.token_ids, output.stop_reason) == ([stop_id], stop_id)

    def test_a_character_cut_short(self, harness: Harness) -> None:
        last, deltas = harness.run_text("ok \U0001f980")
        assert last.outputs[0].text == deltas == "ok \U0001f980"
        harness.add("s")
        ids = harness.tokenizer.encode("ok \U0001f980")[:-1]
        outputs, _ = harness.run(ids, FinishReason.LENGTH, "s")
        assert outputs[-1].outputs[0].text == "ok \ufffd"

    def test_held_text_comes_at_the_end(self, harness: Harness) -> None:
        last, deltas = harness.run_text("a E", stop=["END"])
        assert deltas == last.outputs[0].text == "a E"

    def test_error_and_abort(self, harness: Harness) -> None:
        for reason in (FinishReason.ERROR, FinishReason.ABORT):
            harness.add()
            error = "Out of memory." if reason is FinishReason.ERROR else None
            outputs, _ = harness.output.process([EngineOutput("r", [], reason, error=error)])
            assert outputs[0].finished
            assert outputs[0].outputs[0].finish_reason == reason.value
            assert outputs[0].error == error

    def test_all_fail(self, harness: Harness) -> None:
        harness.add("a", n=2)
        harness.add("b")
        outputs = harness.output.fail_all("The engine died.")
        assert [(o.request_id, o.error, o.finished) for o in outputs] == [
            ("a", "The engine died.", True),
            ("b", "The engine died.", True),
        ]
        assert harness.output.num_requests == 0

    def test_client_gone(self, harness: Harness) -> None:
        harness.add("a", n=2)
        harness.output.process([EngineOutput("a#0", [5], FinishReason.LENGTH)])
        assert harness.output.abort("a") == ["a#1"]
        assert harness.output.abort("a") == []
        assert harness.output.process([EngineOutput("a#1", [5])]) == ([], [])

    def test_without_text(self, harness: Harness) -> None:
        harness.add(detokenize=False)
        outputs, _ = harness.run([5, 6], FinishReason.LENGTH)
        assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].token_ids) == ("", [5, 6])

    def test_no_tokens_at_all(self, harness: Harness) -> None:
        harness.add(max_tokens=0)
        outputs, _ = harness.output.process([EngineOutput("r", [], FinishReason.LENGTH)])
        assert outputs[0].finished
        assert outputs[0].outputs[0].token_ids == []


class TestRequests:
    def test_several_sequences(self, harness: Harness) -> None:
        harness.add(n=3)
        ids = [harness.tokenizer.encode(char)[0] for char in "abc"]
        first, _ = harness.output.process([EngineOutput(f"r#{i}", [ids[i]]) for i in range(3)])
        assert [o.text for o in first[0].outputs] == ["a", "b", "c"]
        second, _ = harness.output.process(
            [EngineOutput("r#1", [ids[0]], FinishReason.LENGTH)], now_s=9.0
        )
        (request,) = second
        assert not request.finished
        assert [o.is_updated for o in request.outputs] == [False, True, False]
        assert [o.delta_text for o in request.outputs] == ["", "a", ""]
        ends = [EngineOutput(f"r#{i}", [], FinishReason.LENGTH) for i in (0, 2)]
        third, _ = harness.output.process(ends)
        assert third[0].finished
        assert [o.text for o in third[0].outputs] == ["a", "ba", "c"]
        assert [o.is_updated for o in third[0].outputs] == [True, False, True]
        # An earlier output is not changed by later steps.
        assert first[0].outputs[1].text == "b"

    def test_two_steps_as_one_output(self, harness: Harness) -> None:
        harness.add(n=3)
        a, b = (harness.tokenizer.encode(char)[0] for char in "ab")
        process = harness.output.process
        first, _ = process(
            [EngineOutput("r#0", [a], FinishReason.LENGTH), EngineOutput("r#1", [a])]
        )
        second, _ = process([EngineOutput("r#1", [b])])
        parts = merged(first[0], second[0]).outputs
        assert [part.is_updated for part in parts] == [True, True, False]
        assert [part.delta_text for part in parts] == ["a", "ab", ""]
        assert [part.delta_token_ids for part in parts] == [[a], [a, b], []]
        assert [part.finish_reason for part in parts] == ["length", None, None]

    def test_times(self, harness: Harness) -> None:
        harness.add()
        harness.output.process([EngineOutput("r", [5], num_cached_tokens=2)], now_s=3.0)
        outputs, _ = harness.output.process([EngineOutput("r", [5])], now_s=4.5)
        assert outputs[0].outputs[0].inter_token_s == 1.5
        outputs, _ = harness.output.process([EngineOutput("r", [], FinishReason.ABORT)], now_s=5.0)
        times = outputs[0].metrics
        assert outputs[0].num_cached_tokens == times.num_cached_tokens == 2
        assert outputs[0].outputs[0].inter_token_s is None
        assert (times.arrival_s, times.first_token_s) == (1.0, 3.0)
        assert (times.last_token_s, times.finished_s) == (4.5, 5.0)
        assert times.num_output_tokens == 2
        assert times.num_prompt_tokens == len(outputs[0].prompt_token_ids)

    def test_logprobs(self, harness: Harness) -> None:
        harness.add(logprobs=2)
        a, b, c = (harness.tokenizer.encode(char)[0] for char in "abc")
        entry = TokenLogprobs(c, -3.0, 7, [(a, -0.5), (b, -1.5)])
        outputs, _ = harness.output.process([EngineOutput("r", [c], logprobs=[entry])])
        output = outputs[0].outputs[0]
        assert output.logprobs == output.delta_logprobs
        assert output.logprobs is not None
        (mapping,) = output.logprobs
        assert [(i, e.logprob, e.rank, e.decoded_token) for i, e in mapping.items()] == [
            (c, -3.0, 7, "c"),
            (a, -0.5, 1, "a"),
            (b, -1.5, 2, "b"),
        ]
        assert output.cumulative_logprob == -3.0

    def test_prompt_logprobs_over_chunks(self, harness: Harness) -> None:
        harness.add(prompt="Say it", prompt_logprobs=0)
        ids = harness.tokenizer.encode("Say it")
        entries = [None, *(TokenLogprobs(i, -1.0, 1, []) for i in ids[1:])]
        process = harness.output.process
        process([EngineOutput("r", [], prompt_logprobs=entries[:2])])
        # After a preemption the prompt is reported from its beginning.
        process([EngineOutput("r", [], prompt_logprobs=entries[:1])])
        process([EngineOutput("r", [], prompt_logprobs=entries[1:])])
        outputs, _ = process([EngineOutput("r", [5], prompt_logprobs=entries)])
        known = outputs[0].prompt_logprobs
        assert known is not None
        assert len(known) == len(ids)
        assert known[0] is None
        assert [next(iter(entry)) for entry in known[1:] if entry] == ids[1:]

    def test_first_space_belongs_to_the_prompt(self, byte_fallback: Tokenizer) -> None:
        harness = Harness(byte_fallback)
        harness.add(prompt="Say")
        ids = byte_fallback.encode("the", add_special_tokens=False)
        outputs, _ = harness.run(ids, FinishReason.LENGTH)
        assert outputs[-1].outputs[0].text == " the"
