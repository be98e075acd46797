"""``/tokenize``, ``/detokenize``, and ``/generate`` as vLLM's old ``api_server`` had it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

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
    parse,
    sampling_values,
)
from ambidex.server.responses import StreamResponse, encode, json_response, until_gone
from ambidex.server.serving_chat import render_prompt
from ambidex.server.serving_completions import DEFAULT_MAX_TOKENS
from ambidex.server.state import Job, ServerState, new_id, submit


async def serve_tokenize(state: ServerState, http: Request) -> Response:
    body = await limits.read_json(http, state.config.max_body_bytes)
    request = parse(body, TokenizeRequest)
    state.check_model(request.model)
    text = request.prompt
    adds_special = request.add_special_tokens
    if text is None:
        if not request.messages:
            raise ApiError(400, "Neither 'prompt' nor 'messages' is given.", param="prompt")
        messages = check_messages(request.messages)
        text = await render_prompt(state, request, messages, request.tools)
        # The template writes the special tokens.
        adds_special = bool(adds_special)
    tokenizer = state.engine.frontend.tokenizer
    token_ids = await state.engine.in_pool(tokenizer.encode, text, adds_special is not False)
    names = [tokenizer.token_text(i) for i in token_ids] if request.return_token_strs else None
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": state.engine.info.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
    )


async def serve_detokenize(state: ServerState, http: Request) -> Response:
    body = await limits.read_json(http, state.config.max_body_bytes)
    request = parse(body, DetokenizeRequest)
    state.check_model(request.model)
    tokenizer = state.engine.frontend.tokenizer
    limit = max(tokenizer.vocab_size, state.engine.info.vocab_size)
    largest = max(request.tokens, default=0)
    if largest >= limit:
        raise ApiError(
            400,
            f"'tokens' holds {largest}; this model's ids are 0 to {limit - 1}.",
            param="tokens",
        )
    text = await state.engine.in_pool(tokenizer.decode, request.tokens, False)
    return json_response({"prompt": text})


async def serve_generate(state: ServerState, http: Request) -> Response:
    body = await limits.read_json(http, state.config.max_body_bytes)
    request = parse(body, GenerateRequest)
    if request.prompt is None:
        raise ApiError(400, "'prompt' is missing.", param="prompt")
    frontend = state.engine.frontend
    values = sampling_values(request)
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
    params = frontend.sampling_params(values, DEFAULT_MAX_TOKENS)
    job = await submit(
        state,
        new_id("gen"),
        [request.prompt],
        params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        add_special_tokens=request.add_special_tokens is not False,
        is_max_tokens_strict=request.max_tokens is not None,
    )
    # The old form repeats the prompt.
    prompt = (
        request.prompt
        if isinstance(request.prompt, str)
        else frontend.tokenizer.decode(request.prompt, skip_special_tokens=False)
    )
    if request.stream:
        lines = _generate_lines(job, prompt)
        return StreamResponse(lines, job.close, "application/x-ndjson", as_events=False)
    try:
        return await until_gone(http, _generate_whole(job, prompt))
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
