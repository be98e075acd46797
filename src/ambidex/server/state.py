"""What the handlers share, and the prompts of one HTTP request as one job."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ambidex import logs
from ambidex.config import EngineConfig, ServerConfig
from ambidex.engine.async_engine import AsyncEngine, RequestStream
from ambidex.engine.output import RequestOutput
from ambidex.request import SamplingParams
from ambidex.server.errors import ApiError

log = logging.getLogger(__name__)

#: Characters of a prompt that ``--enable-log-requests`` shows.
MAX_LOGGED_CHARS = 2000

#: A prompt: text, or token ids.
Prompt = str | list[int]


@dataclass(slots=True)
class ServerState:
    """One per server; handlers get it from the app."""

    engine: AsyncEngine
    engine_config: EngineConfig
    config: ServerConfig
    #: Unix time in seconds.
    started_s: int = field(default_factory=lambda: int(time.time()))
    #: Set by SIGTERM: nothing new is taken.
    is_draining: bool = False
    #: HTTP requests being answered, probes aside.
    num_in_flight: int = 0

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first one is the name in metrics."""
        config = self.engine_config.model
        return config.served_model_names or (config.model,)

    def check_model(self, name: str | None) -> str:
        """The name to answer with; raises a 404 for a model that is not here."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"The model '{name[:200]}' is not served here. "
                f"Served: {', '.join(self.model_names)}.",
                param="model",
                code="model_not_found",
            )
        return name


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


class Job:
    """One HTTP request's prompts, running. ``close`` aborts what is not finished."""

    def __init__(self, request_id: str, streams: Sequence[RequestStream]) -> None:
        self.request_id = request_id
        self.streams = streams
        self.began_s = time.monotonic()
        self.num_prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self.num_output_tokens = 0
        self._num_cached = [0] * len(streams)
        self._num_open = len(streams)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._num_cached)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """``(index of the prompt, what is new)`` of all prompts, as they come."""
        event = asyncio.Event()
        for stream in self.streams:
            stream.notify(event)
        live = dict(enumerate(self.streams))
        while live:
            event.clear()
            for index, stream in list(live.items()):
                while (output := stream.pop()) is not None:
                    self._count(index, output)
                    yield index, output
                if stream.is_drained:
                    del live[index]
                    self._num_open -= 1
            if live:
                await event.wait()
        self._log("request finished")

    def _count(self, index: int, output: RequestOutput) -> None:
        self.num_output_tokens += sum(len(part.delta_token_ids) for part in output.outputs)
        self._num_cached[index] = max(self._num_cached[index], output.num_cached_tokens or 0)

    def close(self) -> None:
        if self._num_open:
            self._num_open = 0
            for stream in self.streams:
                stream.close()
            self._log("request ended early")

    def _log(self, what: str) -> None:
        log.info(
            what,
            extra=logs.fields(
                id=self.request_id,
                prompt_tokens=self.num_prompt_tokens,
                cached_tokens=self.num_cached_tokens,
                output_tokens=self.num_output_tokens,
                seconds=round(time.monotonic() - self.began_s, 3),
            ),
        )


async def submit(
    state: ServerState,
    request_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    priority: int | None,
    cache_salt: str | None,
    add_special_tokens: bool,
    is_max_tokens_strict: bool,
) -> Job:
    """Hands all prompts to the engine; where one is refused, none runs."""
    if state.engine_config.log.enable_log_requests:
        _log_prompts(request_id, prompts, params)
    submissions = [
        asyncio.ensure_future(
            state.engine.submit(
                prompt,
                params,
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                priority=priority or 0,
                cache_salt=cache_salt,
                add_special_tokens=add_special_tokens,
                is_max_tokens_strict=is_max_tokens_strict,
            )
        )
        for index, prompt in enumerate(prompts)
    ]
    try:
        return Job(request_id, await asyncio.gather(*submissions))
    except BaseException:
        for submission in submissions:
            submission.cancel()
        for result in await asyncio.gather(*submissions, return_exceptions=True):
            if isinstance(result, RequestStream):
                result.close()
        raise


def _log_prompts(request_id: str, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    # Each cut first: only so much is shown, and all of it may be megabytes.
    values: Any = [prompt[:MAX_LOGGED_CHARS] for prompt in prompts]
    log.info(
        "request received",
        extra=logs.fields(
            id=request_id,
            prompts=json.dumps(values, ensure_ascii=False)[:MAX_LOGGED_CHARS],
            params=str(params),
        ),
    )
