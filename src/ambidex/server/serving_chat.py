"""``/v1/chat/completions``: a conversation goes through the model's chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ambidex.engine.output import CompletionOutput
from ambidex.server import limits
from ambidex.server.chat_messages import check_messages, check_template_kwargs, num_chars
from ambidex.server.choices import collect
from ambidex.server.errors import ApiError
from ambidex.server.logprobs import Position, TokenNames, chat_logprobs, prompt_logprobs
from ambidex.server.protocol import (
    ChatRequest,
    TokenizeRequest,
    Usage,
    sampling_values,
    usage,
)
from ambidex.server.responses import DONE, StreamResponse, event, json_response, until_gone
from ambidex.server.serving_completions import check_stream_options
from ambidex.server.state import Job, ServerState, new_id, submit


async def render_prompt(
    state: ServerState,
    request: ChatRequest | TokenizeRequest,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> str:
    """The prompt text that the chat template makes of ``messages``.

    Raises :class:`RequestError` where the template refuses them.
    """
    continues = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt
    if adds_prompt is None:
        adds_prompt = not continues
    if continues and adds_prompt:
        raise ApiError(
            400,
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="continue_final_message",
        )
    variables = check_template_kwargs(request.chat_template_kwargs)
    if request.documents:
        variables["documents"] = request.documents

    def render() -> str:
        limits.check_num_chars(state, num_chars(messages), "messages")
        return state.engine.frontend.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=adds_prompt,
            continue_final_message=continues,
            **variables,
        )

    return await state.engine.in_pool(render)


def chat_sampling_values(request: ChatRequest) -> dict[str, Any]:
    """The sampling parameters given; ``max_completion_tokens`` wins over the older name."""
    values = sampling_values(request)
    if request.max_completion_tokens is not None:
        values["max_tokens"] = request.max_completion_tokens
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    return values


@dataclass(slots=True)
class _Chat:
    """One request while it is answered."""

    state: ServerState
    request: ChatRequest
    model: str
    request_id: str
    messages: list[dict[str, Any]]
    created_s: int
    names: TokenNames
    n: int = 1

    async def run(self, http: Request) -> Response:
        request = self.request
        values = chat_sampling_values(request)
        # None: up to the context's end.
        params = self.state.engine.frontend.sampling_params(values, None)
        self.n = params.n
        tools = None if request.tool_choice == "none" else request.tools or None
        prompt = await render_prompt(self.state, request, self.messages, tools)
        job = await submit(
            self.state,
            self.request_id,
            [prompt],
            params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            # The template writes the special tokens.
            add_special_tokens=bool(request.add_special_tokens),
            is_max_tokens_strict="max_tokens" in values,
        )
        if request.stream:
            return StreamResponse(self._events(job), job.close)
        try:
            return await until_gone(http, self._whole(job))
        finally:
            job.close()

    @property
    def _role(self) -> str:
        """Who speaks: the assistant, unless the client lets its own last message go on."""
        if self.request.continue_final_message or self.request.add_generation_prompt is False:
            role: str = self.messages[-1]["role"]
            return role
        return self.state.config.response_role

    @property
    def _echo(self) -> str:
        """The start of the answer that the client wrote itself and wants to see again."""
        last = self.messages[-1]
        if self.request.echo and last["role"] == self._role:
            return last["content"] or ""
        return ""

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }

    async def _whole(self, job: Job) -> Response:
        (output,) = await collect(job)
        result = {
            **self._head("chat.completion"),
            "choices": [self._choice(part) for part in output.outputs],
            "usage": self._usage(job),
        }
        if self.request.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.request.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
        return json_response(result)

    def _usage(self, job: Job) -> Usage:
        return usage(job.num_prompt_tokens, job.num_output_tokens, job.num_cached_tokens)

    def _choice(self, part: CompletionOutput) -> dict[str, Any]:
        message = {"role": self._role, "content": self._echo + part.text, "refusal": None}
        result = {
            "index": part.index,
            "message": message,
            "logprobs": self._logprobs(part.token_ids, part.logprobs),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self.request.return_token_ids:
            result["token_ids"] = part.token_ids
        return result

    def _logprobs(
        self, token_ids: Sequence[int], positions: Sequence[Position] | None
    ) -> dict[str, Any] | None:
        if not self.request.logprobs or not positions:
            return None
        return chat_logprobs(token_ids, positions, self.request.top_logprobs or 0, self.names)

    async def _events(self, job: Job) -> AsyncGenerator[bytes, None]:
        options = self.request.stream_options
        include_usage = bool(options and options.include_usage)
        continuous = include_usage and bool(options and options.continuous_usage_stats)
        head = self._head("chat.completion.chunk")
        has_shown_prompt = self.request.prompt_logprobs is None

        def chunk(index: int, delta: Mapping[str, Any], **values: Any) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            body: dict[str, Any] = {**head, "choices": [{**choice, **values}]}
            if include_usage:
                body["usage"] = self._usage(job) if continuous else None
            return event(body)

        # The role comes first and at once: it tells the client that the request was accepted.
        for index in range(self.n):
            yield chunk(index, {"role": self._role, "content": self._echo})
        async for _, output in job.outputs():
            if not has_shown_prompt and any(part.token_ids for part in output.outputs):
                has_shown_prompt = True
                shown = prompt_logprobs(output.prompt_logprobs)
                yield event({**head, "choices": [], "prompt_logprobs": shown})
            for part in output.outputs:
                if part.is_updated and (told := self._part(part)) is not None:
                    delta, values = told
                    yield chunk(part.index, delta, **values)
        if include_usage:
            yield event({**head, "choices": [], "usage": self._usage(job)})
        yield DONE

    def _part(self, part: CompletionOutput) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Delta and further fields of one chunk; None where it would tell nothing."""
        values: dict[str, Any] = {}
        logprobs = self._logprobs(part.delta_token_ids, part.delta_logprobs)
        if logprobs is not None:
            values["logprobs"] = logprobs
        if part.finish_reason is not None:
            values["finish_reason"] = part.finish_reason
            values["stop_reason"] = part.stop_reason
        if self.request.return_token_ids:
            values["token_ids"] = part.delta_token_ids
        if not part.delta_text and not values:
            # Half a character, or the beginning of a stop string: a later token decides.
            return None
        return {"content": part.delta_text} if part.delta_text else {}, values


async def serve_chat(state: ServerState, http: Request) -> Response:
    request, messages = await limits.read_request(
        state, http, ChatRequest, lambda request: check_messages(request.messages)
    )
    check_stream_options(request.stream, request.stream_options)
    chat = _Chat(
        state=state,
        request=request,
        model=state.check_model(request.model),
        request_id=new_id("chatcmpl"),
        messages=messages,
        created_s=int(time.time()),
        names=TokenNames(state.engine.frontend.tokenizer, bool(request.return_tokens_as_token_ids)),
    )
    return await chat.run(http)
