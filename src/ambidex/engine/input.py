"""From what a client asked to what the engine runs: checks, defaults, ids.

Everything a request can hold is checked here, once, for the server, the CLI and the offline API
alike; behind this point parameters are complete and within their limits. A mistake is a
:class:`RequestError` that names the field.
"""

from __future__ import annotations

import difflib
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ambidex.engine.tokenizer import Tokenizer, check_unicode
from ambidex.errors import RequestError
from ambidex.request import EngineRequest, SamplingParams

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 64
MAX_LOGIT_BIAS = 1024
#: As OpenAI's API says.
LOGIT_BIAS_RANGE = (-100.0, 100.0)

_INT_FIELDS = ("n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed")
_FLOAT_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)
_BOOL_FIELDS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
#: Filled in here, never by a client.
_INTERNAL_FIELDS = ("eos_token_ids", "bad_words_token_ids")
_CLIENT_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name not in _INTERNAL_FIELDS)
_MAY_BE_NONE = {f.name for f in fields(SamplingParams) if f.default is None}
_MAY_BE_NONE |= {"max_tokens", "stop_token_ids", "bad_words"}

#: generation_config.json's names -> ours.
_GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the loaded model can take."""

    #: Tokens of prompt and output together.
    max_model_len: int
    #: Rows of the model's embedding; token ids are below it.
    vocab_size: int
    max_logprobs: int = 20


class InputProcessor:
    """Checks requests against one model and completes them.

    ``generation_config`` holds the model's own defaults (empty: none). ``seed`` makes the seeds
    of requests without one repeatable, in order of arrival.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        generation_config: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._seeds = random.Random(seed)
        self._eos_token_ids = [i for i in tokenizer.eos_token_ids if i < limits.vocab_size]
        #: Sentences for the start-up log.
        self.notes: list[str] = []
        #: Defaults that generation_config.json sets, by our names.
        self.defaults: dict[str, Any] = {}
        for name, ours in _GENERATION_CONFIG_FIELDS.items():
            value = (generation_config or {}).get(name)
            if value is None:
                continue
            try:
                self.verify(SamplingParams(**{ours: _typed(ours, value)}))
            except RequestError as error:
                self.notes.append(f"generation_config.json: '{name}' is ignored: {error}")
            else:
                self.defaults[ours] = _typed(ours, value)

    def make_params(
        self, given: Mapping[str, Any], *, default_max_tokens: int | None
    ) -> SamplingParams:
        """Parameters from what was given by name; a null counts as not given.

        What is not given comes from the model's generation_config.json, then from OpenAI's
        defaults; ``default_max_tokens`` is the API's own (None: to the context's end).
        """
        values: dict[str, Any] = {"max_tokens": default_max_tokens, **self.defaults}
        for name, value in given.items():
            if name not in _CLIENT_FIELDS:
                near = difflib.get_close_matches(name, _CLIENT_FIELDS, 1)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise RequestError(f"'{name}' is not a sampling parameter.{hint}", param=name)
            if value is not None:
                values[name] = _typed(name, value)
        params = SamplingParams(**values)
        self.verify(params)
        return params

    def verify(self, params: SamplingParams) -> None:
        """Raises :class:`RequestError` for the first value outside its range."""
        _verify_types(params)
        _verify_numbers(params)
        _verify_lengths(params)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and not 0 <= wanted <= self.limits.max_logprobs:
                raise RequestError(
                    f"'{name}' must be between 0 and {self.limits.max_logprobs}, got {wanted}. The "
                    "server's limit is set with --max-logprobs.",
                    param=name,
                )
        self._verify_ids("stop_token_ids", params.stop_token_ids or ())
        if params.logit_bias:
            self._verify_ids("logit_bias", list(params.logit_bias))

    def process(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
        *,
        add_special_tokens: bool = True,
        strict_max_tokens: bool = False,
    ) -> list[EngineRequest]:
        """One engine request for each of ``params.n`` outputs.

        Their ids are ``request_id``, or ``request_id#i`` where n > 1. ``arrival_s`` is
        ``time.monotonic()`` by default. A chat prompt is given with ``add_special_tokens=False``:
        its template has written them. With ``strict_max_tokens`` (the client gave max_tokens)
        more tokens than the context holds are an error; otherwise they are cut to what remains.
        Raises :class:`RequestError`.
        """
        self.verify(params)
        if type(priority) is not int:
            raise RequestError(f"'priority' must be an integer, got {priority!r:.60}.", "priority")
        if cache_salt is not None:
            _verify_texts("cache_salt", [cache_salt], 1)
        prompt_ids = self.encode_prompt(prompt, add_special_tokens)
        self._verify_prompt_length(len(prompt_ids), params)
        max_tokens = self._resolve_max_tokens(len(prompt_ids), params, strict_max_tokens)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        is_greedy = params.temperature == 0.0
        resolved = replace(
            params,
            n=1,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            stop=stop_strings(params),
            stop_token_ids=[_as_token_id(i) for i in params.stop_token_ids or ()],
            # Greedy takes the best token: what narrows the choice is left out.
            top_p=1.0 if is_greedy else params.top_p,
            top_k=0 if is_greedy or params.top_k == -1 else params.top_k,
            min_p=0.0 if is_greedy else params.min_p,
            logit_bias=_clamped_bias(params.logit_bias),
            eos_token_ids=list(self._eos_token_ids),
            bad_words_token_ids=self._bad_words_ids(params.bad_words or ()),
        )
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        return [
            EngineRequest(
                request_id=request_id if params.n == 1 else f"{request_id}#{i}",
                prompt_token_ids=prompt_ids,
                params=replace(
                    resolved,
                    seed=(seed + i) & _SEED_MASK,
                    # The prompt is the same for all: its log probabilities are wanted once.
                    prompt_logprobs=params.prompt_logprobs if i == 0 else None,
                ),
                arrival_s=arrival_s,
                priority=priority,
                cache_salt=cache_salt,
            )
            for i in range(params.n)
        ]

    def encode_prompt(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True
    ) -> list[int]:
        """The prompt's token ids, checked. White space is a prompt like any other."""
        if isinstance(prompt, str):
            check_unicode(prompt, param="prompt")
            self._verify_text_size(prompt)
            ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            ids = list(prompt)
            for position, token_id in enumerate(ids):
                if type(token_id) is not int:
                    raise RequestError(
                        f"The prompt's token at position {position} is no integer but "
                        f"{type(token_id).__name__}.",
                        param="prompt",
                    )
        if not ids:
            raise RequestError(
                "The prompt is empty: it has no tokens. Give at least one.", param="prompt"
            )
        vocab_size = self.limits.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise RequestError(
                f"The prompt holds the token id {bad}, which is outside the model's vocabulary: "
                f"ids go from 0 to {vocab_size - 1}.",
                param="prompt",
            )
        return ids

    def _verify_text_size(self, text: str) -> None:
        # Encoding megabytes only to refuse them would hold up everyone else.
        limit = self.limits.max_model_len
        if len(text) <= limit:
            return
        at_least = len(text) // self.tokenizer.max_chars_per_token
        if at_least > limit:
            raise RequestError(
                f"The prompt has {len(text)} characters, which are more than {at_least} tokens; "
                f"this model's maximum context length is {limit} tokens. Shorten the prompt.",
                param="prompt",
            )

    def _verify_prompt_length(self, num_tokens: int, params: SamplingParams) -> None:
        max_len = self.limits.max_model_len
        limit = max_len if params.max_tokens == 0 else max_len - 1
        if num_tokens > limit:
            room = "" if params.max_tokens == 0 else ", and at least one must remain for the output"
            raise RequestError(
                f"This model's maximum context length is {max_len} tokens{room}. However, the "
                f"prompt has {num_tokens} tokens. Shorten the prompt.",
                param="prompt",
            )

    def _resolve_max_tokens(self, num_prompt: int, params: SamplingParams, strict: bool) -> int:
        room = self.limits.max_model_len - num_prompt
        wanted = params.max_tokens
        if wanted is None:
            return room
        if wanted > room and strict:
            raise RequestError(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. "
                f"However, you requested {num_prompt + wanted} tokens ({num_prompt} in the prompt, "
                f"{wanted} in the completion). Shorten the prompt, or lower max_tokens to {room}.",
                param="max_tokens",
            )
        return min(wanted, room)

    def _verify_ids(self, name: str, ids: Sequence[Any]) -> None:
        bad = [i for i in map(_as_token_id, ids) if not 0 <= i < self.limits.vocab_size]
        if bad:
            raise RequestError(
                f"'{name}' holds token ids outside the model's vocabulary: {bad[:5]}. Ids go from "
                f"0 to {self.limits.vocab_size - 1}.",
                param=name,
            )

    def _bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as it is written at a text's start, and after a space."""
        sequences: list[list[int]] = []
        for word in words:
            bare = word.lstrip()
            for text in (bare, f" {bare}"):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences


def stop_strings(params: SamplingParams) -> list[str]:
    """The stop strings as a list."""
    if params.stop is None:
        return []
    return [params.stop] if isinstance(params.stop, str) else list(params.stop)


def _verify_types(params: SamplingParams) -> None:
    """Of parameters that were made by hand, too."""
    for name in _CLIENT_FIELDS:
        value = getattr(params, name)
        if value is None and name in _MAY_BE_NONE:
            continue
        if name in _INT_FIELDS and type(value) is not int:
            raise RequestError(f"'{name}' must be an integer, got {value!r:.60}.", param=name)
        _typed(name, value)


def _verify_numbers(params: SamplingParams) -> None:
    _require(params.temperature >= 0, "temperature", "0 or more", params.temperature)
    _require(0 < params.top_p <= 1, "top_p", "above 0 and at most 1", params.top_p)
    _require(params.top_k >= -1, "top_k", "-1 or 0 (all tokens), or at least 1", params.top_k)
    _require(0 <= params.min_p <= 1, "min_p", "between 0 and 1", params.min_p)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        _require(-2 <= value <= 2, name, "between -2 and 2", value)
    # Beyond these, logits overflow.
    is_sane = 0.001 <= params.repetition_penalty <= 1000
    _require(is_sane, "repetition_penalty", "between 0.001 and 1000", params.repetition_penalty)
    _require(1 <= params.n <= MAX_N, "n", f"between 1 and {MAX_N}", params.n)
    if params.max_tokens is not None:
        _require(params.max_tokens >= 0, "max_tokens", "0 or more", params.max_tokens)
    _require(params.min_tokens >= 0, "min_tokens", "0 or more", params.min_tokens)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"'min_tokens' ({params.min_tokens}) must be at most 'max_tokens' "
            f"({params.max_tokens}).",
            param="min_tokens",
        )
    if params.seed is not None:
        is_small = -(1 << 63) <= params.seed < 1 << 63
        _require(is_small, "seed", "a signed 64-bit integer", params.seed)


def _verify_lengths(params: SamplingParams) -> None:
    stops = stop_strings(params)
    _verify_texts("stop", stops, MAX_STOPS)
    if stops and not params.detokenize:
        raise RequestError(
            "'stop' strings need the text: set 'detokenize' to true, or use 'stop_token_ids'.",
            param="stop",
        )
    _verify_texts("bad_words", params.bad_words or (), MAX_BAD_WORDS)
    for name, limit in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_LOGIT_BIAS)):
        size = len(getattr(params, name) or ())
        if size > limit:
            raise RequestError(
                f"'{name}' has {size} entries; at most {limit} are accepted.", param=name
            )
    for value in (params.logit_bias or {}).values():
        _number(value, "logit_bias")


def _verify_texts(name: str, texts: Sequence[str], limit: int) -> None:
    if len(texts) > limit:
        raise RequestError(
            f"'{name}' has {len(texts)} entries; at most {limit} are accepted.", param=name
        )
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"'{name}' must hold texts that are not empty.", param=name)
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(
                f"'{name}' holds a text of {len(text)} characters; at most {MAX_STOP_CHARS} are "
                "accepted.",
                param=name,
            )
        check_unicode(text, param=name)


def _require(is_valid: bool, name: str, range_text: str, value: Any) -> None:
    if not is_valid:
        raise RequestError(f"'{name}' must be {range_text}, got {value}.", param=name)


def _as_token_id(value: Any) -> int:
    """A token id; JSON objects have texts for keys. -1 for what is none."""
    if type(value) is int:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        return int(value)
    return -1


def _clamped_bias(bias: Mapping[Any, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    low, high = LOGIT_BIAS_RANGE
    return {_as_token_id(i): min(max(float(v), low), high) for i, v in bias.items()}


def _number(value: Any, param: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"'{param}' must be a number, got {value!r:.60}.", param=param)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"'{param}' must be a finite number, got {number}.", param=param)
    return number


def _typed(name: str, value: Any) -> Any:
    """``value`` as the type of the field ``name``; raises :class:`RequestError`."""
    if name in _FLOAT_FIELDS:
        return _number(value, name)
    if name in _INT_FIELDS:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if type(value) is not int:
            raise RequestError(f"'{name}' must be an integer, got {value!r:.60}.", param=name)
        return value
    if name in _BOOL_FIELDS:
        if not isinstance(value, bool):
            raise RequestError(f"'{name}' must be true or false, got {value!r:.60}.", param=name)
        return value
    if name == "logit_bias":
        if not isinstance(value, Mapping):
            raise RequestError(f"'{name}' must be an object of token ids and numbers.", param=name)
        return dict(value)
    if name == "stop" and isinstance(value, str):
        return [value]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"'{name}' must be a list, got {value!r:.60}.", param=name)
    return list(value)
