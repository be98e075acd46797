"""The server's side of the engine: many concurrent requests over one engine process.

All methods run in one event loop. One task reads the engine's messages and hands each request its
share; a second one watches the process, fails what ran in it when it dies, and starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq.asyncio

from ambidex import logs
from ambidex.config import EngineConfig
from ambidex.engine.engine_handle import EngineHandle, describe_exit
from ambidex.engine.frontend import Frontend, FrontendFactory, Submission, default_frontend
from ambidex.engine.messages import (
    AbortRequests,
    AddRequests,
    Alive,
    EngineInfo,
    EngineStats,
    FromEngine,
    Outputs,
    Ping,
)
from ambidex.engine.output import RequestOutput, merged
from ambidex.engine.summary import memory_report
from ambidex.errors import AmbidexError, EngineDeadError, RequestError
from ambidex.metrics import FinishedSequence, Metrics
from ambidex.request import EngineOutput, FinishReason, SamplingParams

log = logging.getLogger(__name__)

DEFAULT_ENGINE = "ambidex.engine.engine:Engine"

#: So many deaths within this many seconds end the server.
MAX_DEATHS = 3
DEATH_WINDOW_S = 60.0

#: Threads that tokenise; the tokenizer releases the GIL, and one long prompt must not hold up all.
TOKENIZER_THREADS = 2

#: Outputs that wait for a slow reader one by one. Each has all of the text: kept so to the end,
#: they would take memory with the square of the answer's length.
MAX_WAITING_OUTPUTS = 16

T = TypeVar("T")


class EngineUnavailableError(AmbidexError):
    """No engine can take the request now; the server answers HTTP 503."""


class RequestFailedError(AmbidexError):
    """The engine gave up on this one request; the server answers HTTP 500."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine works. ``state`` is starting, ready, restarting, dead, ended or closed."""

    is_ok: bool
    state: str
    message: str
    #: Seconds since the engine process was last heard of.
    heartbeat_age_s: float


@dataclass(slots=True)
class _Sequence:
    """One of a request's ``n`` sequences, for timing and for aborts."""

    request: RequestStream
    num_prompt_tokens: int
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0


class RequestStream:
    """An accepted request: iterate over its outputs, each of which holds what is new since the one
    before. A reader that is far behind finds several steps in one.

    Leaving the ``async with`` block, or :meth:`close`, aborts what still runs.
    """

    def __init__(
        self, engine: AsyncEngine, request_id: str, prompt_token_ids: list[int], arrival_s: float
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.arrival_s = arrival_s
        self._engine = engine
        self._ready: deque[RequestOutput] = deque()
        self._error: Exception | None = None
        self._is_ended = False
        self._event = asyncio.Event()

    # The engine's side.

    def put(self, output: RequestOutput) -> None:
        if len(self._ready) == MAX_WAITING_OUTPUTS:
            output = merged(self._ready.pop(), output)
        self._ready.append(output)
        self._is_ended = self._is_ended or output.finished
        self._event.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._is_ended = True
        self._event.set()

    # The reader's side.

    def notify(self, event: asyncio.Event) -> None:
        """Sets ``event`` whenever there is something new, so that one reader can serve many."""
        self._event = event
        if self._ready or self._is_ended:
            event.set()

    def pop(self) -> RequestOutput | None:
        """The next output, or None where there is none yet, or none any more. Raises the error
        that ended the request, once."""
        if self._ready:
            return self._ready.popleft()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    @property
    def is_drained(self) -> bool:
        """True when nothing more will come."""
        return self._is_ended and not self._ready and self._error is None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            self._event.clear()
            output = self.pop()
            if output is not None:
                return output
            if self.is_drained:
                raise StopAsyncIteration
            await self._event.wait()

    def close(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._engine.abort(self.request_id)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class AsyncEngine:
    """Starts, supervises and feeds the engine process.

    ``hang_s``: seconds of silence after which :meth:`health` says that the engine hangs; a single
    step of a large model on a slow machine may take tens of seconds. ``restart_wait_s``: how
    long a request waits for an engine that is being restarted.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_factory: str = DEFAULT_ENGINE,
        frontend_factory: FrontendFactory = default_frontend,
        hang_s: float = 120.0,
        restart_wait_s: float = 300.0,
    ) -> None:
        self._config = config
        self._engine_factory = engine_factory
        self._frontend_factory = frontend_factory
        self._hang_s = hang_s
        self._restart_wait_s = restart_wait_s
        self._context = zmq.asyncio.Context()
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._handle: EngineHandle | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._engine_ids: dict[str, list[str]] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._deaths: deque[float] = deque()
        self._heard_s = time.monotonic()
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._num_pings = 0
        self._frontend: Frontend | None = None
        self._info: EngineInfo | None = None
        self._metrics: Metrics | None = None
        self._is_draining = False
        self.state = "starting"
        self.stats = EngineStats()
        #: Since the server started, over all engine processes.
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        #: Resolves to a sentence when the engine cannot be kept alive.
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Loads the model. Raises the engine's :class:`AmbidexError` if it cannot."""
        self._handle = handle = self._new_handle()
        try:
            info = await self._load(handle)
        except BaseException:
            await handle.close(timeout_s=0)
            raise
        names = self._config.model.served_model_names
        self._metrics = Metrics(names[0] if names else info.model, info.max_model_len)
        self._metrics.set_cache_info(
            {
                "block_size": info.block_size,
                "num_gpu_blocks": info.num_gpu_blocks,
                "num_cpu_blocks": info.num_blocks,
                "cache_dtype": info.kv_cache_dtype,
                "enable_prefix_caching": info.enable_prefix_caching,
            }
        )
        self._metrics.memory(info.memory)
        self._set_ready()
        self._supervisor = asyncio.create_task(self._supervise(handle))
        self._supervisor.add_done_callback(self._supervision_ended)
        return info

    async def _load(self, handle: EngineHandle) -> EngineInfo:
        """Waits for the process, and reads the tokenizer beside the weights that it has loaded."""
        info = await handle.wait_ready()
        self._frontend = await self.in_pool(self._frontend_factory, self._config, info)
        self._info = info
        return info

    def _new_handle(self) -> EngineHandle:
        return EngineHandle(self._context, self._config, self._engine_factory)

    def _set_ready(self) -> None:
        self._heard_s = time.monotonic()
        self.state = "ready"
        self._ready.set()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Ends the engine process; what still runs fails with :class:`EngineUnavailableError`."""
        if self.state == "closed":
            return
        self.state = "closed"
        self._ready.set()
        self.fail_all(EngineUnavailableError("The server is shutting down."))
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._handle is not None:
            await self._handle.close(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=0)

    def drain(self) -> None:
        """What runs goes on, but a process that dies from now on has no successor."""
        self._is_draining = True

    def kill(self) -> None:
        """Ends the engine process at once."""
        if self._handle is not None:
            self._handle.kill()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailableError("The model is still being loaded.")
        return self._info

    @property
    def frontend(self) -> Frontend:
        if self._frontend is None:
            raise EngineUnavailableError("The model is still being loaded.")
        return self._frontend

    @property
    def metrics(self) -> Metrics:
        if self._metrics is None:
            raise EngineUnavailableError("The model is still being loaded.")
        return self._metrics

    @property
    def engine_pid(self) -> int | None:
        return self._handle.pid if self._handle is not None else None

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    # -- requests -------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        is_max_tokens_strict: bool = False,
    ) -> RequestStream:
        """Checks, tokenises and hands over one request; see :class:`Submission`.

        Raises :class:`RequestError` for a bad one, and :class:`EngineUnavailableError` where no
        engine can be had in time. While the engine restarts, the call waits.
        """
        submission = Submission(
            request_id=request_id or uuid.uuid4().hex,
            prompt=prompt,
            params=params,
            arrival_s=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            is_max_tokens_strict=is_max_tokens_strict,
        )
        frontend = None
        # The engine may die meanwhile, and the next one have other files before it.
        while frontend is not self._frontend or frontend is None:
            await self._wait_ready()
            frontend = self.frontend
            requests = await self.in_pool(frontend.prepare, submission)
            await self._wait_ready()
        assert self._handle is not None
        if submission.request_id in self._streams:
            raise RequestError(
                f"A request with the id '{submission.request_id}' is running already.", "request_id"
            )
        token_ids = requests[0].prompt_token_ids
        stream = RequestStream(self, submission.request_id, token_ids, submission.arrival_s)
        self._streams[submission.request_id] = stream
        self._engine_ids[submission.request_id] = [r.request_id for r in requests]
        for request in requests:
            self._sequences[request.request_id] = _Sequence(stream, len(token_ids))
        self.frontend.register(submission, requests)
        self._handle.send(AddRequests(requests))
        self.metrics.request_added(len(requests), requests[0].params.max_tokens)
        return stream

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """:meth:`submit` as one asynchronous generator; closing it aborts the request."""
        async with await self.submit(prompt, params, **options) as stream:
            async for output in stream:
                yield output

    def abort(self, request_id: str) -> None:
        """Stops a request and frees its blocks; an unknown id is ignored."""
        engine_ids = self._forget(request_id)
        live = [i for i in engine_ids if i in self._sequences]
        now = time.monotonic()
        for engine_id in live:
            self._finish(engine_id, FinishReason.ABORT, now)
        if live and self._handle is not None:
            self._handle.send(AbortRequests(live))

    def fail_all(self, error: AmbidexError) -> None:
        """Ends every running request with ``error``, and aborts it in the engine."""
        now = time.monotonic()
        running = list(self._sequences)
        for engine_id in running:
            self._finish(engine_id, FinishReason.ERROR, now)
        for request_id, stream in list(self._streams.items()):
            self._forget(request_id)
            stream.fail(error)
        if running and self._handle is not None and not self._handle.exited.done():
            self._handle.send(AbortRequests(running))

    async def in_pool(self, function: Callable[..., T], *args: Any) -> T:
        """Runs what may take long, such as tokenising, outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def _wait_ready(self) -> None:
        if self.state == "restarting":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), self._restart_wait_s)
        if self.state != "ready":
            sentences = {
                "starting": "The model is still being loaded. Try again in a few seconds.",
                "restarting": (
                    f"The engine is being restarted and was not ready in {self._restart_wait_s:g} "
                    "seconds. Try again later."
                ),
                "dead": "The engine died too often and is not restarted.",
                "ended": "The server is shutting down.",
                "closed": "The server is shutting down.",
            }
            raise EngineUnavailableError(sentences[self.state])

    def _forget(self, request_id: str) -> list[str]:
        """Drops a request's bookkeeping; returns its ids in the engine."""
        self._streams.pop(request_id, None)
        engine_ids = self._engine_ids.pop(request_id, [])
        if engine_ids:
            self.frontend.forget(request_id)
        return engine_ids

    # -- health ---------------------------------------------------------------------------------

    async def health(self, wait_s: float = 1.0) -> Health:
        """Asks the engine. One that is busy with a long step is well until ``hang_s`` passed."""
        if self.state == "ready" and self._handle is not None:
            self._num_pings += 1
            number = self._num_pings
            answer = asyncio.get_running_loop().create_future()
            self._pings[number] = answer
            self._handle.send(Ping(number))
            await asyncio.wait((answer,), timeout=wait_s)
            self._pings.pop(number, None)
        age_s = time.monotonic() - self._heard_s
        if self.state != "ready":
            return Health(False, self.state, f"The engine is {self.state}.", age_s)
        if age_s > self._hang_s:
            message = f"The engine has not answered for {age_s:.0f} seconds."
            return Health(False, "hung", message, age_s)
        return Health(True, "ready", "", age_s)

    def memory_report(self) -> dict[str, Any]:
        """See :func:`~ambidex.engine.summary.memory_report`; raises EngineUnavailableError while
        there is no engine."""
        if self.state != "ready":
            raise EngineUnavailableError(f"The engine is {self.state}. Try again later.")
        return memory_report(
            self.stats.memory or self.info.memory, self.info.modules, self.stats.speed
        )

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heard_s

    # -- the engine's messages ------------------------------------------------------------------

    async def _read(self, handle: EngineHandle) -> None:
        try:
            while True:
                self._take_in(await handle.receive())
        except Exception:
            # Nothing after it can be trusted, and without a reader everybody would wait for ever: a
            # new process is the way back to a known state.
            log.exception("a message of the engine's could not be taken in")
            handle.kill()

    def _take_in(self, message: FromEngine) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, Outputs):
            self._dispatch(message.outputs)
            stats = message.stats
        elif isinstance(message, Alive):
            stats = message.stats
            waiting = self._pings.get(message.number or 0)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        else:
            stats = None
        if stats is not None:
            self.stats = stats
            self.metrics.engine_stats(stats)

    def _dispatch(self, outputs: list[EngineOutput]) -> None:
        """One step's outputs: timing first, then text, then to the requests that wait."""
        now = time.monotonic()
        num_prompt_tokens = 0
        num_new_tokens = 0
        live: list[EngineOutput] = []
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            # Aborted here while the step ran: nobody wants it any more.
            if sequence is None:
                continue
            if output.finish_reason is FinishReason.ERROR:
                self._fail_request(sequence.request, output)
                continue
            live.append(output)
            if output.new_token_ids:
                num_new_tokens += len(output.new_token_ids)
                num_prompt_tokens += self._count_tokens(sequence, len(output.new_token_ids), now)
            elif output.finish_reason is FinishReason.LENGTH and sequence.num_tokens == 0:
                # max_tokens is 0: only the prompt was computed.
                num_prompt_tokens += sequence.num_prompt_tokens
        if num_new_tokens or num_prompt_tokens:
            self.num_prompt_tokens += num_prompt_tokens
            self.num_generation_tokens += num_new_tokens
            self.metrics.step(num_prompt_tokens, num_new_tokens)
        # A request that failed above may have had other sequences in this batch.
        live = [output for output in live if output.request_id in self._sequences]
        if not live:
            return
        try:
            request_outputs, stopped = self.frontend.process(live)
        except Exception:
            # A bug of ours in turning tokens into text ends these requests, not the server.
            log.exception("output processing failed")
            for output in live:
                if (sequence := self._sequences.get(output.request_id)) is not None:
                    failed = EngineOutput(output.request_id, [], FinishReason.ERROR)
                    self._fail_request(sequence.request, failed, is_running=True)
            return
        for output in live:
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason, now)
        # A stop string is found here, in the text: the engine still runs the sequence.
        running = [engine_id for engine_id in stopped if engine_id in self._sequences]
        for engine_id in running:
            self._finish(engine_id, FinishReason.STOP, now)
        if running and self._handle is not None:
            self._handle.send(AbortRequests(running))
        for request_output in request_outputs:
            stream = self._streams.get(request_output.request_id)
            if stream is None:
                continue
            if request_output.finished:
                self._forget(request_output.request_id)
            stream.put(request_output)

    def _count_tokens(self, sequence: _Sequence, num_tokens: int, now: float) -> int:
        """Times new tokens; returns the prompt tokens whose computation they complete."""
        sequence.num_tokens += num_tokens
        completed = 0
        if sequence.first_token_s is None or sequence.last_token_s is None:
            sequence.first_token_s = now
            completed = sequence.num_prompt_tokens
            self.metrics.first_token(now - sequence.request.arrival_s)
        else:
            self.metrics.later_tokens(now - sequence.last_token_s)
        sequence.last_token_s = now
        return completed

    def _finish(self, engine_id: str, reason: FinishReason, now: float) -> None:
        sequence = self._sequences.pop(engine_id)
        first_s = sequence.first_token_s
        self.metrics.finished(
            FinishedSequence(
                reason=reason.value,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_generation_tokens=sequence.num_tokens,
                e2e_s=now - sequence.request.arrival_s,
                decode_s=None if first_s is None else (sequence.last_token_s or now) - first_s,
            )
        )

    def _fail_request(
        self, stream: RequestStream, output: EngineOutput, is_running: bool = False
    ) -> None:
        """Ends a request with an error. ``is_running``: the failed sequence still runs, too."""
        now = time.monotonic()
        siblings = [i for i in self._forget(stream.request_id) if i in self._sequences]
        for engine_id in siblings:
            self._finish(engine_id, FinishReason.ERROR, now)
        others = [i for i in siblings if is_running or i != output.request_id]
        if others and self._handle is not None:
            self._handle.send(AbortRequests(others))
        stream.fail(RequestFailedError(output.error or "The engine could not run this request."))

    # -- supervision ----------------------------------------------------------------------------

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """Without a supervisor nothing works: whatever ended it is fatal."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.fatal.done():
            log.error("engine supervision failed", exc_info=error)
            self.state = "dead"
            self._ready.set()
            self.fail_all(EngineDeadError("The engine could not be restarted."))
            self.fatal.set_result(f"The engine could not be restarted: {error}")

    async def _supervise(self, handle: EngineHandle) -> None:
        """Reads until the process ends, then starts another, until it has died too often."""
        while True:
            reader = asyncio.create_task(self._read(handle))
            try:
                code = await asyncio.shield(handle.exited)
                # What it had sent before it died still counts.
                await asyncio.sleep(0.05)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            self._lost(handle, f"ended with {describe_exit(code)}")
            restarted = await self._restart()
            if restarted is None:
                return
            handle = restarted

    def _lost(self, handle: EngineHandle, how: str) -> None:
        """The process is gone: no request may wait for it."""
        handle.release()
        self.state = "restarting"
        self._ready.clear()
        self.stats = EngineStats()
        self.metrics.engine_died()
        running = len(self._streams)
        log.error("engine process %s", how, extra=logs.fields(pid=handle.pid, running=running))
        next_step = (
            "The server is shutting down: send the request to another one, or again later."
            if self._is_draining
            else "It is being restarted: send the request again."
        )
        self.fail_all(
            EngineDeadError(f"The engine process {how} while this request was running. {next_step}")
        )

    async def _restart(self) -> EngineHandle | None:
        """Another process that is ready; None where there were too many deaths, or no need."""
        while True:
            if self._is_draining:
                self.state = "ended"
                self._ready.set()
                return None
            now = time.monotonic()
            self._deaths.append(now)
            while now - self._deaths[0] > DEATH_WINDOW_S:
                self._deaths.popleft()
            if len(self._deaths) >= MAX_DEATHS:
                self.state = "dead"
                self._ready.set()
                self.fatal.set_result(
                    f"The engine process died {len(self._deaths)} times within "
                    f"{DEATH_WINDOW_S:.0f} seconds; it is not restarted. The lines above say why."
                )
                return None
            self._handle = handle = self._new_handle()
            try:
                # The model's files may be others than before.
                info = await self._load(handle)
            except AmbidexError as error:
                log.error("engine did not restart: %s", error)
                await handle.close(timeout_s=0)
                continue
            self.metrics.engine_restarted()
            self.metrics.memory(info.memory)
            log.warning("engine restarted", extra=logs.fields(pid=handle.pid))
            self._set_ready()
            return handle
