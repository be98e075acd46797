"""``/v1/completions``: prompts as text or token ids, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ambidex.engine.output import CompletionOutput, RequestOutput
from ambidex.server import limits
from ambidex.server.choices import collect
from ambidex.server.errors import ApiError
from ambidex.server.logprobs import Position, TokenNames, completion_logprobs, prompt_logprobs
from ambidex.server.protocol import (
    CompletionRequest,
    TokenId,
    Usage,
    sampling_values,
    usage,
)
from ambidex.server.responses import DONE, StreamResponse, event, json_response, until_gone
from ambidex.server.state import Job, Prompt, ServerState, new_id, submit

#: OpenAI's default for this endpoint.
DEFAULT_MAX_TOKENS = 16


def parse_prompts(value: Any, max_model_len: int) -> list[Prompt]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    if value is None:
        raise ApiError(400, "'prompt' is missing.", param="prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ApiError(
            400, "'prompt' must be a text, a list of token ids, or a list of these.", param="prompt"
        )
    if isinstance(value[0], int):
        return [_token_ids(value, max_model_len)]
    if len(value) > limits.MAX_PROMPTS:
        raise ApiError(
            400,
            f"'prompt' holds {len(value)} prompts; the limit is {limits.MAX_PROMPTS}. Send several "
            "requests.",
            param="prompt",
        )
    return [
        entry if isinstance(entry, str) else _token_ids(entry, max_model_len) for entry in value
    ]


def _token_ids(value: Any, max_model_len: int) -> list[int]:
    if isinstance(value, list):
        limits.check_num_tokens(value, max_model_len, "prompt")
    try:
        return msgspec.convert(value, list[TokenId])
    except msgspec.ValidationError:
        raise ApiError(
            400,
            "'prompt' must be a text, a list of token ids, or a list of these; token ids are whole "
            "numbers from 0.",
            param="prompt",
        ) from None


@dataclass(slots=True)
class _Completion:
    """One request while it is answered."""

    state: ServerState
    request: CompletionRequest
    model: str
    request_id: str
    prompts: list[Prompt]
    n: int
    created_s: int
    names: TokenNames

    async def run(self, http: Request) -> Response:
        request = self.request
        values = sampling_values(request)
        if request.logprobs is not None:
            values["logprobs"] = request.logprobs
            if request.echo:
                values.setdefault("prompt_logprobs", request.logprobs)
        params = self.state.engine.frontend.sampling_params(values, DEFAULT_MAX_TOKENS)
        self.n = params.n
        _check_num_sequences(len(self.prompts), params.n)
        job = await submit(
            self.state,
            self.request_id,
            self.prompts,
            params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            add_special_tokens=request.add_special_tokens is not False,
            is_max_tokens_strict=request.max_tokens is not None,
        )
        if request.stream:
            return StreamResponse(self._events(job), job.close)
        try:
            return await until_gone(http, self._whole(job))
        finally:
            job.close()

    async def _whole(self, job: Job) -> Response:
        choices = [
            self._choice(index, output, part)
            for index, output in enumerate(await collect(job))
            for part in output.outputs
        ]
        return json_response({**self._head(), "choices": choices, "usage": self._usage(job)})

    def _usage(self, job: Job) -> Usage:
        return usage(job.num_prompt_tokens, job.num_output_tokens, job.num_cached_tokens)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
        }

    def _prompt_text(self, index: int, output: RequestOutput) -> str:
        prompt = self.prompts[index]
        return prompt if isinstance(prompt, str) else self.names.text(output.prompt_token_ids)

    def _choice(self, index: int, output: RequestOutput, part: CompletionOutput) -> dict[str, Any]:
        request = self.request
        text = part.text
        token_ids = part.token_ids
        positions: list[Position | None] = [*(part.logprobs or ())]
        if request.echo:
            text = self._prompt_text(index, output) + text
            token_ids = output.prompt_token_ids + token_ids
            positions = [*(output.prompt_logprobs or ()), *positions]
        result = {
            "index": index * self.n + part.index,
            "text": text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if request.logprobs is not None:
            result["logprobs"], _ = completion_logprobs(
                token_ids, positions, request.logprobs, self.names, 0
            )
        if request.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if request.return_token_ids:
            result["token_ids"] = part.token_ids
            result["prompt_token_ids"] = output.prompt_token_ids
        return result

    async def _events(self, job: Job) -> AsyncGenerator[bytes, None]:
        options = self.request.stream_options
        include_usage = bool(options and options.include_usage)
        continuous = include_usage and bool(options and options.continuous_usage_stats)
        head = self._head()
        #: Text offset of each choice's next token; a choice is absent until its first event.
        offsets: dict[int, int] = {}
        async for index, output in job.outputs():
            for part in output.outputs:
                choice = self._delta(index, output, part, offsets) if part.is_updated else None
                if choice is None:
                    continue
                chunk = {**head, "choices": [choice]}
                if include_usage:
                    chunk["usage"] = self._usage(job) if continuous else None
                yield event(chunk)
        if include_usage:
            yield event({**head, "choices": [], "usage": self._usage(job)})
        yield DONE

    def _delta(
        self, index: int, output: RequestOutput, part: CompletionOutput, offsets: dict[int, int]
    ) -> dict[str, Any] | None:
        """What the client is sent of one part; None where that would be nothing."""
        request = self.request
        number = index * self.n + part.index
        is_first = number not in offsets
        if is_first and not part.token_ids and part.finish_reason is None:
            # A part of the prompt is computed; the prompt goes out whole, with the first token.
            return None
        token_ids = part.delta_token_ids
        positions: list[Position | None] = [*(part.delta_logprobs or ())]
        result: dict[str, Any] = {"index": number, "text": part.delta_text, "logprobs": None}
        if is_first:
            if request.echo:
                result["text"] = self._prompt_text(index, output) + part.delta_text
                token_ids = output.prompt_token_ids + token_ids
                positions = [*(output.prompt_logprobs or ()), *positions]
            if request.prompt_logprobs is not None:
                result["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if request.logprobs is not None and positions:
            result["logprobs"], offsets[number] = completion_logprobs(
                token_ids, positions, request.logprobs, self.names, offsets.get(number, 0)
            )
        if request.return_token_ids:
            result["token_ids"] = part.delta_token_ids
            if is_first:
                result["prompt_token_ids"] = output.prompt_token_ids
        result["finish_reason"] = part.finish_reason
        result["stop_reason"] = part.stop_reason
        is_empty = not (result["text"] or part.finish_reason or result["logprobs"])
        if is_empty and not request.return_token_ids:
            # Half a character, or the beginning of a stop string: a later token decides.
            return None
        offsets.setdefault(number, 0)
        return result


def _check_num_sequences(num_prompts: int, n: int) -> None:
    if num_prompts * n > limits.MAX_SEQUENCES:
        raise ApiError(
            400,
            f"{num_prompts} prompts with n={n} are {num_prompts * n} sequences; the limit for one "
            f"request is {limits.MAX_SEQUENCES}.",
            param="n",
        )


def check_stream_options(stream: bool | None, options: Any) -> None:
    if options is not None and not stream:
        raise ApiError(400, "'stream_options' needs 'stream' to be true.", param="stream_options")


async def serve_completions(state: ServerState, http: Request) -> Response:
    max_model_len = state.engine.info.max_model_len
    request, prompts = await limits.read_request(
        state,
        http,
        CompletionRequest,
        lambda request: parse_prompts(request.prompt, max_model_len),
    )
    check_stream_options(request.stream, request.stream_options)
    completion = _Completion(
        state=state,
        request=request,
        model=state.check_model(request.model),
        request_id=new_id("cmpl"),
        prompts=prompts,
        n=1,
        created_s=int(time.time()),
        names=TokenNames(state.engine.frontend.tokenizer, bool(request.return_tokens_as_token_ids)),
    )
    return await completion.run(http)
