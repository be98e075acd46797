"""The engine's process: reads requests from the server, steps the engine, sends what it produced.

Started by ``engine_handle.py`` as a fresh interpreter (never a fork). It ends when the server
says so, when its standard input ends, or, on Linux, when the kernel tells it that the server died.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, Protocol

import msgspec
import zmq

from ambidex import logs
from ambidex.config import EngineConfig
from ambidex.engine.foretold import StepSpeed
from ambidex.engine.messages import (
    FRAME_HEADER_BYTES,
    HEARTBEAT_S,
    AbortRequests,
    AddRequests,
    Alive,
    EngineInfo,
    EngineStats,
    Hello,
    Outputs,
    Ping,
    Ready,
    Shutdown,
    StartFailed,
    StartUp,
    ToEngine,
)
from ambidex.engine.scheduler import SchedulerStats
from ambidex.errors import AmbidexError, memory_refusal
from ambidex.memory.ledger import MemorySnapshot
from ambidex.request import EngineOutput, EngineRequest, FinishReason

log = logging.getLogger(__name__)

#: How long one ``Engine.step`` may wait for a lane before messages are looked at again.
STEP_WAIT_S = 0.05

#: A busy engine sends its statistics at most this often; one that has just become idle, at once.
STATS_EVERY_S = 0.25

#: Linux: ``prctl(PR_SET_PDEATHSIG, signal)``.
_PR_SET_PDEATHSIG = 1


class SteppingEngine(Protocol):
    """What this process needs of an engine; ``ambidex.engine.engine.Engine`` is the real one."""

    @property
    def has_work(self) -> bool: ...
    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def step(self, timeout_s: float) -> list[EngineOutput]: ...
    def stats(self) -> SchedulerStats | EngineStats: ...
    def memory(self) -> list[MemorySnapshot]: ...
    def speed(self) -> dict[str, StepSpeed]: ...
    def info(self) -> EngineInfo: ...
    def close(self) -> None: ...


def load_factory(spec: str) -> Callable[..., Any]:
    """The object that ``module:name`` names."""
    module, _, name = spec.partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return factory


def read_frame(stream: BinaryIO) -> bytes:
    """One length-prefixed frame; empty where the stream ended before it was whole."""
    header = stream.read(FRAME_HEADER_BYTES)
    if len(header) < FRAME_HEADER_BYTES:
        return b""
    length = int.from_bytes(header, "little")
    frame = stream.read(length)
    return frame if len(frame) == length else b""


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(FRAME_HEADER_BYTES, "little") + payload


def to_stats(
    stats: SchedulerStats | EngineStats,
    memory: Sequence[MemorySnapshot] = (),
    speed: Mapping[str, StepSpeed] | None = None,
) -> EngineStats:
    """The scheduler's statistics, the ledgers and the speed as they cross the process boundary."""
    if isinstance(stats, EngineStats):
        return replace(stats, memory=list(memory), speed=dict(speed or {}))
    return EngineStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_swapped=stats.num_swapped,
        kv_cache_usage=stats.kv_usage,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        num_preemptions=stats.num_preemptions,
        memory=list(memory),
        speed=dict(speed or {}),
    )


def remove_socket(folder: str) -> None:
    """Removes the private folder of the ZeroMQ socket; it may be gone already."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            os.unlink(entry.path)
        os.rmdir(folder)


def _watch_lifeline(stream: BinaryIO, folder: str) -> None:
    """Ends this process when the server's end of the pipe closes, for whatever reason."""
    while stream.read(4096):
        pass
    remove_socket(folder)
    os._exit(1)


def _die_with_parent(parent_pid: int) -> None:
    """Linux: SIGKILL when the parent dies, even while native code holds the GIL."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call.
    if os.getppid() != parent_pid:
        os._exit(1)


class EngineLoop:
    """Messages in, steps, messages out; all in one thread."""

    def __init__(self, engine: SteppingEngine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = False
        self._failed: list[EngineOutput] = []
        self._last_sent_s = 0.0
        self._last_stats_s = 0.0
        self._was_busy = False

    def run(self) -> None:
        while not self._closing:
            self._receive()
            busy = self._engine.has_work
            outputs = self._engine.step(STEP_WAIT_S) if busy else []
            if self._failed:
                outputs = self._failed + outputs
                self._failed = []
            self._report(outputs)

    def _receive(self) -> None:
        """Takes every waiting message; without work, sleeps until one comes or a beat is due."""
        if not self._engine.has_work and not self._failed:
            due_s = self._last_sent_s + HEARTBEAT_S - time.monotonic()
            if not self._socket.poll(max(0, int(due_s * 1000))):
                return
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(self._decoder.decode(payload))

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, AddRequests):
            for request in message.requests:
                self._add(request)
        elif isinstance(message, AbortRequests):
            self._engine.abort(message.request_ids)
        elif isinstance(message, Ping):
            self._send(Alive(self._stats(), message.number))
        elif isinstance(message, Shutdown):
            self._closing = True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add_request(request)
        except Exception as error:  # One bad request must not take down the others.
            if isinstance(error, AmbidexError):
                sentence = str(error)
            else:
                log.exception("request refused", extra=logs.fields(id=request.request_id))
                sentence = "The engine could not accept this request; its log says why."
            self._failed.append(
                EngineOutput(request.request_id, [], FinishReason.ERROR, error=sentence)
            )

    def _report(self, outputs: list[EngineOutput]) -> None:
        now = time.monotonic()
        busy = self._engine.has_work
        became_idle = self._was_busy and not busy
        self._was_busy = busy or bool(outputs)
        with_stats = became_idle or now - self._last_stats_s >= STATS_EVERY_S
        if outputs:
            self._send(Outputs(outputs, self._stats() if with_stats else None))
        elif became_idle or now - self._last_sent_s >= HEARTBEAT_S:
            self._send(Alive(self._stats()))

    def _stats(self) -> EngineStats:
        self._last_stats_s = time.monotonic()
        return to_stats(self._engine.stats(), self._engine.memory(), self._engine.speed())

    def _send(self, message: Outputs | Alive) -> None:
        self._socket.send(self._encoder.encode(message))
        self._last_sent_s = time.monotonic()


def _serve(start: StartUp, socket: zmq.Socket[bytes]) -> int:
    encode = msgspec.msgpack.encode
    config: EngineConfig = start.config
    try:
        engine: SteppingEngine = load_factory(start.factory)(config)
        info = engine.info()
    except (AmbidexError, MemoryError, OSError, RuntimeError) as error:
        known = error if isinstance(error, AmbidexError) else memory_refusal(error)
        if known is None:
            raise
        socket.send(encode(StartFailed(type(known).__name__, str(known))))
        return 1
    socket.send(encode(Ready(info)))
    try:
        EngineLoop(engine, socket).run()
    finally:
        engine.close()
    return 0


def main() -> int:
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group: the server decides
    # when the engine ends, or a drain would have nothing left to drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lifeline = sys.stdin.buffer
    payload = read_frame(lifeline)
    if not payload:
        return 1
    start = msgspec.msgpack.decode(payload, type=StartUp)
    threading.Thread(
        target=_watch_lifeline, args=(lifeline, start.folder), name="lifeline", daemon=True
    ).start()
    logs.configure(start.config.log.level, start.config.log.format)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    # Results are never dropped, and a sender never blocks: the server reads all the time.
    socket.set_hwm(0)
    # Time to hand over the last message, for example why the start failed.
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(start.address)
    socket.send(msgspec.msgpack.encode(Hello(os.getpid())))
    if start.parent_is_main_thread:
        _die_with_parent(start.parent_pid)
    try:
        code = _serve(start, socket)
    except Exception:
        log.exception("engine process failed")
        code = 1
    socket.close()
    context.term()
    return code


def run() -> None:
    """Entry point of the child interpreter."""
    code = main()
    # No interpreter teardown: the lifeline thread sits in a read, and libraries' threads may too.
    sys.stderr.flush()
    os._exit(code)
