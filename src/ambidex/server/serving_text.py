"""``/tokenize``, ``/detokenize``, and ``/generate`` as vLLM's old ``api_server`` had it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ambidex.engine.output import RequestOutput
from ambidex.server import limits
from ambidex.server.chat_messages import check_messages
from ambidex.server.choices import collect
from ambidex.server.errors import ApiError
from ambidex.server.protocol import (
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    sampling_values,
)
from ambidex.server.responses import StreamResponse, encode, json_response, until_gone
from ambidex.server.serving_chat import render_prompt
from ambidex.server.serving_completions import DEFAULT_MAX_TOKENS
from ambidex.server.state import Job, Prompt, ServerState, new_id, submit

#: Token ids that /detokenize takes, whatever the context length.
MIN_DETOKENIZE = 1024 * 1024


def _tokenize_messages(request: TokenizeRequest) -> list[dict[str, Any]] | None:
    """The messages, checked; None where the prompt is a text."""
    if request.prompt is not None:
        return None
    if not request.messages:
        raise ApiError(400, "Neither 'prompt' nor 'messages' is given.", param="prompt")
    return check_messages(request.messages)


async def serve_tokenize(state: ServerState, http: Request) -> Response:
    request, messages = await limits.read_request(state, http, TokenizeRequest, _tokenize_messages)
    state.check_model(request.model)
    adds_special = request.add_special_tokens
    if messages is None:
        text = request.prompt or ""
    else:
        text = await render_prompt(state, request, messages, request.tools)
        # The template writes the special tokens.
        adds_special = bool(adds_special)
    tokenizer = state.engine.frontend.tokenizer

    def encode_text() -> tuple[list[int], list[str] | None]:
        limits.check_num_chars(state, len(text), "prompt" if messages is None else "messages")
        ids = tokenizer.encode(text, adds_special is not False)
        return ids, [tokenizer.token_text(i) for i in ids] if request.return_token_strs else None

    token_ids, names = await state.engine.in_pool(encode_text)
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": state.engine.info.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
    )


async def serve_detokenize(state: ServerState, http: Request) -> Response:
    info = state.engine.info
    tokenizer = state.engine.frontend.tokenizer

    def check_body(body: Mapping[str, Any]) -> None:
        _check_num_ids(body, "tokens", max(MIN_DETOKENIZE, info.max_model_len))

    def check(request: DetokenizeRequest) -> None:
        limit = max(tokenizer.vocab_size, info.vocab_size)
        largest = max(request.tokens, default=0)
        if largest >= limit:
            raise ApiError(
                400,
                f"'tokens' holds {largest}; this model's ids are 0 to {limit - 1}.",
                param="tokens",
            )

    request, _ = await limits.read_request(state, http, DetokenizeRequest, check, check_body)
    state.check_model(request.model)
    text = await state.engine.in_pool(tokenizer.decode, request.tokens, False)
    return json_response({"prompt": text})


def _check_num_ids(body: Mapping[str, Any], name: str, limit: int) -> None:
    value = body.get(name)
    if isinstance(value, list):
        limits.check_num_tokens(value, limit, name)


def _generate_prompt(request: GenerateRequest) -> Prompt:
    if request.prompt is None:
        raise ApiError(400, "'prompt' is missing.", param="prompt")
    return request.prompt


async def serve_generate(state: ServerState, http: Request) -> Response:
    max_model_len = state.engine.info.max_model_len
    request, prompt = await limits.read_request(
        state,
        http,
        GenerateRequest,
        _generate_prompt,
        lambda body: _check_num_ids(body, "prompt", max_model_len),
    )
    frontend = state.engine.frontend
    values = sampling_values(request)
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
    params = frontend.sampling_params(values, DEFAULT_MAX_TOKENS)
    # The old form repeats the prompt.
    if isinstance(prompt, str):
        shown = prompt
    else:
        shown = await state.engine.in_pool(frontend.tokenizer.decode, prompt, False)
    job = await submit(
        state,
        new_id("gen"),
        [prompt],
        params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        add_special_tokens=request.add_special_tokens is not False,
        is_max_tokens_strict=request.max_tokens is not None,
    )
    if request.stream:
        lines = _generate_lines(job, shown)
        return StreamResponse(lines, job.close, "application/x-ndjson", as_events=False)
    try:
        return await until_gone(http, _generate_whole(job, shown))
    finally:
        job.close()


def _texts(prompt: str, output: RequestOutput) -> dict[str, list[str]]:
    return {"text": [prompt + part.text for part in output.outputs]}


async def _generate_whole(job: Job, prompt: str) -> Response:
    (output,) = await collect(job)
    return json_response(_texts(prompt, output))


async def _generate_lines(job: Job, prompt: str) -> AsyncGenerator[bytes, None]:
    """One JSON object a line, each with the whole text so far."""
    async for _, output in job.outputs():
        yield encode(_texts(prompt, output)) + b"\n"
