"""The requests that the server understands, as typed structs, and what it refuses.

Fields and names are OpenAI's, with vLLM's extra ones. Unknown fields are ignored, since clients
send many; known ones that would change the answer and do not work yet are refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ambidex.server.errors import ApiError, from_validation

log = logging.getLogger(__name__)

#: What crosses to the engine as msgpack: 64 bits.
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

T = TypeVar("T", bound="ApiRequest")


class ApiRequest(msgspec.Struct, kw_only=True):
    """Base of all requests."""

    model: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(ApiRequest, kw_only=True):
    """Fields that all generating endpoints share; None means: not given."""

    n: Int | None = None
    best_of: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    priority: Int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Any = None
    echo: bool | None = None
    logprobs: Int | None = None


class TemplateFields(ApiRequest, kw_only=True):
    """What the chat template is given."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class TokenizeRequest(TemplateFields, kw_only=True):
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiRequest, kw_only=True):
    tokens: list[TokenId]


class GenerateRequest(SamplingFields, kw_only=True):
    """vLLM's old ``api_server``: no model name, one prompt."""

    prompt: str | list[TokenId] | None = None
    logprobs: Int | None = None


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _is_text_only(value: Any) -> bool:
    return value == ["text"]


def _is_free_choice(value: Any) -> bool:
    return value in ("none", "auto")


def _never(_: Any) -> bool:
    return False


_STRUCTURED = (
    "Structured output does not work yet. Leave '{name}' out and describe the wanted form in the "
    "prompt."
)
_STRUCTURED_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "structural_tag",
)
_NOT_YET = "'{name}' does not work yet. Leave it out."
_NOT_YET_FIELDS = (
    "truncate_prompt_tokens",
    "logits_processors",
    "prompt_embeds",
    "allowed_token_ids",
    "kv_transfer_params",
)

#: Field -> (values that change nothing, the sentence for all others). Empty values are harmless.
REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "suffix": (_never, "'suffix' does not work: no model here is trained to fill in the middle."),
    "response_format": (_is_text_format, _STRUCTURED),
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "structural_tag",
        ),
        (_never, _STRUCTURED),
    ),
    "tool_choice": (
        _is_free_choice,
        "A required or named 'tool_choice' does not work yet. Use 'auto', or leave it out.",
    ),
    "functions": (_never, "'functions' is OpenAI's old form. Use 'tools'."),
    "function_call": (_is_free_choice, "'function_call' is OpenAI's old form. Use 'tools'."),
    "chat_template": (
        _never,
        "A chat template in a request is not accepted: it would run on the server. Start the "
        "server with --chat-template, or send the whole prompt to /v1/completions.",
    ),
    "use_beam_search": (_never, "Beam search does not exist here. Leave 'use_beam_search' out."),
    "modalities": (_is_text_only, "Only text can be generated. Leave 'modalities' out."),
    "audio": (_never, "Audio cannot be generated. Leave 'audio' out."),
    "web_search_options": (_never, "This server searches no web. Leave 'web_search_options' out."),
    **dict.fromkeys(
        (
            "truncate_prompt_tokens",
            "logits_processors",
            "prompt_embeds",
            "allowed_token_ids",
            "kv_transfer_params",
        ),
        (_never, _NOT_YET),
    ),
}


def parse(body: Mapping[str, Any], kind: type[T]) -> T:
    """The typed request; raises a 400 that names the field at fault."""
    for name, (is_harmless, sentence) in REFUSED.items():
        value = body.get(name)
        if value and not is_harmless(value):
            raise ApiError(400, sentence.format(name=name), param=name)
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    if log.isEnabledFor(logging.DEBUG):
        unknown = sorted(set(body) - set(kind.__struct_fields__) - set(REFUSED))
        if unknown:
            log.debug("ignored fields: %s", ", ".join(unknown)[:500])
    return request


#: Fields that go to the sampler under their own name.
SAMPLING_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
)


def sampling_values(request: SamplingFields) -> dict[str, Any]:
    """The sampling parameters that the client gave, by their names in ``SamplingParams``.

    Raises a 400 for ``best_of`` other than ``n`` and for a ``logit_bias`` that names no token.
    """
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        raise ApiError(
            400,
            f"'best_of' is {request.best_of} and 'n' is {n}: only 'best_of' equal to 'n' works. "
            "Raise 'n' and choose on your side.",
            param="best_of",
        )
    values = {
        name: value for name in SAMPLING_NAMES if (value := getattr(request, name)) is not None
    }
    if request.logit_bias:
        values["logit_bias"] = {_token_id(key): v for key, v in request.logit_bias.items()}
    return values


def _token_id(text: str) -> int:
    # isdecimal() is true of other scripts' digits too, which int() reads as well.
    if not text.isdecimal() or len(text) > 10:
        raise ApiError(
            400, f"'logit_bias' names {text[:20]!r}, which is no token id.", param="logit_bias"
        )
    return int(text)


class Usage(msgspec.Struct, frozen=True):
    """Token counts; ``prompt_tokens_details.cached_tokens`` came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


def usage(num_prompt: int, num_completion: int, num_cached: int) -> Usage:
    return Usage(
        num_prompt, num_completion, num_prompt + num_completion, {"cached_tokens": num_cached}
    )
