"""Checks, defaults and ids of requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.engine.input import InputProcessor, ModelLimits
from ambidex.engine.tokenizer import Tokenizer
from ambidex.errors import RequestError
from ambidex.request import EngineRequest, SamplingParams

VOCAB = 600


@pytest.fixture
def processor(byte_level: Tokenizer) -> InputProcessor:
    return InputProcessor(byte_level, ModelLimits(max_model_len=64, vocab_size=VOCAB))


def make(processor: InputProcessor, **given_values: Any) -> SamplingParams:
    return processor.make_params(given_values, default_max_tokens=16)


def only(requests: list[EngineRequest]) -> EngineRequest:
    (request,) = requests
    return request


class TestRanges:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", -0.1),
            ("temperature", math.nan),
            ("temperature", math.inf),
            ("temperature", 10**400),
            ("temperature", "hot"),
            ("temperature", True),
            ("top_p", 0.0),
            ("top_p", 1.01),
            ("top_k", -2),
            ("top_k", 1.5),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("presence_penalty", 2.1),
            ("frequency_penalty", -2.1),
            ("repetition_penalty", 0.0),
            ("n", 0),
            ("n", 129),
            ("n", "3"),
            ("max_tokens", -1),
            ("min_tokens", -1),
            ("min_tokens", 17),
            ("logprobs", -1),
            ("logprobs", 21),
            ("prompt_logprobs", 21),
            ("seed", 1 << 63),
            ("seed", "x"),
            ("stop", ""),
            ("stop", ["a", ""]),
            ("stop", [5]),
            ("stop", 5),
            ("stop", ["x"] * 65),
            ("stop", "x" * 1025),
            ("stop", "\ud800"),
            ("stop_token_ids", [VOCAB]),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", ["a"]),
            ("stop_token_ids", 5),
            ("stop_token_ids", [1] * 129),
            ("bad_words", [""]),
            ("bad_words", "word"),
            ("bad_words", ["x"] * 65),
            ("logit_bias", {VOCAB: 1.0}),
            ("logit_bias", {"x": 1.0}),
            ("logit_bias", {"5": "much"}),
            ("logit_bias", {"5": math.nan}),
            ("logit_bias", [5]),
            ("logit_bias", {str(i): 0.0 for i in range(1025)}),
            ("ignore_eos", 1),
            ("skip_special_tokens", "yes"),
        ],
    )
    def test_refused(self, processor: InputProcessor, name: str, value: Any) -> None:
        with pytest.raises(RequestError) as caught:
            make(processor, **{name: value})
        assert caught.value.param == name
        assert name in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", 0),
            ("temperature", 5.0),
            ("top_p", 1),
            ("top_k", -1),
            ("top_k", 7.0),
            ("min_p", 1.0),
            ("presence_penalty", -2),
            ("n", 128),
            ("max_tokens", 0),
            ("logprobs", 0),
            ("logprobs", 20),
            ("seed", -1),
            ("stop", "a"),
            ("stop", []),
            ("stop", [" "]),
            ("bad_words", [" "]),
            ("logit_bias", {"5": 1000}),
            ("logit_bias", {}),
            ("temperature", None),
        ],
    )
    def test_accepted(self, processor: InputProcessor, name: str, value: Any) -> None:
        processor.process("r", "the", make(processor, **{name: value}))

    def test_unknown_name(self, processor: InputProcessor) -> None:
        with pytest.raises(RequestError, match="Did you mean 'temperature'"):
            make(processor, temprature=1)
        with pytest.raises(RequestError, match="is not a sampling parameter"):
            make(processor, eos_token_ids=[1])

    def test_stop_strings_need_text(self, processor: InputProcessor) -> None:
        with pytest.raises(RequestError, match="detokenize"):
            make(processor, stop="x", detokenize=False)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", math.nan),
            ("n", 2.0),
            ("n", None),
            ("top_p", None),
            ("min_tokens", None),
            ("stop", 5),
            ("bad_words", "ab"),
            ("stop_token_ids", 5),
            ("logit_bias", {VOCAB: 1.0}),
            ("logit_bias", [1]),
            ("ignore_eos", 1),
            ("detokenize", None),
        ],
    )
    def test_params_made_by_hand_are_checked(
        self, processor: InputProcessor, name: str, value: Any
    ) -> None:
        with pytest.raises(RequestError, match=f"'{name}'") as caught:
            processor.process("r", "the", SamplingParams(**{name: value}))
        assert caught.value.param == name

    @pytest.mark.parametrize("priority", [None, "x", 1.5])
    def test_a_priority_is_an_integer(self, processor: InputProcessor, priority: Any) -> None:
        """Others cannot be ordered, which would show in the requests that come after it."""
        with pytest.raises(RequestError, match="'priority' must be an integer"):
            processor.process("r", "the", SamplingParams(), priority)

    @settings(max_examples=200, deadline=None)
    @given(
        values=st.fixed_dictionaries(
            {},
            optional={
                name: st.one_of(
                    st.none(),
                    st.floats(),
                    st.integers(),
                    st.text(max_size=3),
                    st.lists(st.integers() | st.text(max_size=2), max_size=3),
                    st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
                )
                for name in ("n", "temperature", "stop", "logit_bias", "bad_words", "seed", "top_k")
            },
        )
    )
    def test_anything_is_served_or_refused(
        self, byte_level: Tokenizer, values: dict[str, Any]
    ) -> None:
        processor = InputProcessor(byte_level, ModelLimits(64, VOCAB))
        try:
            requests = processor.process("r", "the", make(processor, **values))
        except RequestError:
            return
        assert 1 <= len(requests) <= 128
        assert all(0 <= request.params.seed < 1 << 63 for request in requests)  # type: ignore[operator]


class TestPrompt:
    def test_white_space_is_a_prompt(self, processor: InputProcessor) -> None:
        request = only(processor.process("r", " \n", make(processor)))
        assert request.prompt_token_ids

    @pytest.mark.parametrize("prompt", ["", []])
    def test_empty(self, processor: InputProcessor, prompt: Any) -> None:
        with pytest.raises(RequestError, match="has no tokens") as caught:
            processor.process("r", prompt, make(processor))
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize("prompt", [[1, "a"], [1, True], [1, 2.0], [None]])
    def test_no_integers(self, processor: InputProcessor, prompt: Any) -> None:
        with pytest.raises(RequestError, match="no integer"):
            processor.process("r", prompt, make(processor))

    @pytest.mark.parametrize("bad", [VOCAB, -1, 10**30])
    def test_outside_the_vocabulary(self, processor: InputProcessor, bad: int) -> None:
        with pytest.raises(RequestError, match=rf"token id {bad}.*0 to 599"):
            processor.process("r", [1, bad], make(processor))

    def test_lone_surrogate(self, processor: InputProcessor) -> None:
        with pytest.raises(RequestError, match="lone surrogate") as caught:
            processor.process("r", "a\udfff", make(processor))
        assert caught.value.param == "prompt"
        with pytest.raises(RequestError, match="lone surrogate"):
            processor.process("r", "a", make(processor), cache_salt="\udfff")

    def test_too_long(self, processor: InputProcessor) -> None:
        processor.process("r", [5] * 63, make(processor))
        with pytest.raises(RequestError, match=r"64 tokens.*at least one.*has 64 tokens"):
            processor.process("r", [5] * 64, make(processor))
        # Nothing is generated: the whole context may be the prompt.
        processor.process("r", [5] * 64, make(processor, max_tokens=0))
        with pytest.raises(RequestError, match="has 65 tokens"):
            processor.process("r", [5] * 65, make(processor, max_tokens=0))

    def test_far_too_long_is_refused_before_encoding(
        self, processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processor.tokenizer, "backend", None)
        processor.tokenizer._max_chars_per_token = 20
        with pytest.raises(RequestError, match="10000 characters, which are more than 500 tokens"):
            processor.process("r", "x" * 10_000, make(processor))

    def test_special_tokens_are_optional(self, byte_fallback: Tokenizer) -> None:
        processor = InputProcessor(byte_fallback, ModelLimits(64, 10_000))
        params = make(processor)
        one = only(processor.process("r", "the", params))
        other = only(processor.process("r", "the", params, add_special_tokens=False))
        assert one.prompt_token_ids == byte_fallback.encode("the")
        assert other.prompt_token_ids == byte_fallback.encode("the", False)


class TestMaxTokens:
    def test_to_the_end_of_the_context(self, processor: InputProcessor) -> None:
        params = processor.make_params({}, default_max_tokens=None)
        assert only(processor.process("r", [5] * 10, params)).params.max_tokens == 54

    def test_more_than_remains(self, processor: InputProcessor) -> None:
        params = make(processor, max_tokens=60, min_tokens=58)
        cut = only(processor.process("r", [5] * 10, params)).params
        assert (cut.max_tokens, cut.min_tokens) == (54, 54)
        with pytest.raises(RequestError, match=r"requested 70 tokens \(10 in the prompt") as caught:
            processor.process("r", [5] * 10, params, strict_max_tokens=True)
        assert caught.value.param == "max_tokens"

    def test_order_of_defaults(self, byte_level: Tokenizer) -> None:
        config = {
            "temperature": 0.3,
            "top_p": 0.8,
            "top_k": 20,
            "repetition_penalty": 1.1,
            "max_new_tokens": 33,
            "min_p": None,
            "do_sample": True,
        }
        processor = InputProcessor(byte_level, ModelLimits(64, VOCAB), config)
        params = make(processor, temperature=0.9)
        assert (params.temperature, params.top_p, params.top_k) == (0.9, 0.8, 20)
        assert (params.repetition_penalty, params.max_tokens, params.min_p) == (1.1, 33, 0.0)
        assert make(processor, max_tokens=5).max_tokens == 5
        plain = InputProcessor(byte_level, ModelLimits(64, VOCAB))
        params = make(plain)
        assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
        assert params.max_tokens == 16

    def test_bad_generation_config_is_noted(self, byte_level: Tokenizer) -> None:
        config = {"top_p": 0, "temperature": "warm", "top_k": 5}
        processor = InputProcessor(byte_level, ModelLimits(64, VOCAB), config)
        assert processor.defaults == {"top_k": 5}
        assert len(processor.notes) == 2


class TestResolved:
    def test_fan_out(self, processor: InputProcessor) -> None:
        params = make(processor, n=3, seed=7, prompt_logprobs=1)
        requests = processor.process("r", "the", params, 5, "salt", 1.5)
        assert [r.request_id for r in requests] == ["r#0", "r#1", "r#2"]
        assert [r.params.seed for r in requests] == [7, 8, 9]
        assert [r.params.prompt_logprobs for r in requests] == [1, None, None]
        assert {(r.params.n, r.priority, r.cache_salt, r.arrival_s) for r in requests} == {
            (1, 5, "salt", 1.5)
        }
        assert only(processor.process("r", "the", make(processor))).request_id == "r"

    def test_seeds(self, byte_level: Tokenizer) -> None:
        def draw(seed: int | None) -> list[int | None]:
            processor = InputProcessor(byte_level, ModelLimits(64, VOCAB), seed=seed)
            params = make(processor)
            return [only(processor.process("r", "a", params)).params.seed for _ in range(3)]

        assert draw(1) == draw(1)
        assert draw(1) != draw(2)
        assert len(set(draw(None))) == 3

    def test_greedy_narrows_nothing(self, processor: InputProcessor) -> None:
        params = make(processor, temperature=0, top_p=0.5, top_k=3, min_p=0.1)
        resolved = only(processor.process("r", "the", params)).params
        assert (resolved.top_p, resolved.top_k, resolved.min_p) == (1.0, 0, 0.0)
        assert only(processor.process("r", "a", make(processor, top_k=-1))).params.top_k == 0

    def test_ids(self, processor: InputProcessor, byte_level: Tokenizer) -> None:
        params = make(
            processor,
            bad_words=["the"],
            logit_bias={"7": 500, 8: -500.0},
            stop="END",
            stop_token_ids=[9, "10"],
        )
        resolved = only(processor.process("r", "a", params)).params
        assert resolved.bad_words_token_ids == [
            byte_level.encode("the"),
            byte_level.encode(" the"),
        ]
        assert resolved.logit_bias == {7: 100.0, 8: -100.0}
        assert resolved.stop == ["END"]
        assert resolved.stop_token_ids == [9, 10]
        assert resolved.eos_token_ids == byte_level.eos_token_ids

    def test_eos_ids_beyond_the_model_are_left_out(self, byte_level: Tokenizer) -> None:
        processor = InputProcessor(byte_level, ModelLimits(64, 2))
        resolved = only(processor.process("r", [1], make(processor))).params
        assert resolved.eos_token_ids == [i for i in byte_level.eos_token_ids if i < 2]
