"""Starts the server, and ends it: sockets, signals, draining, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from ambidex import logs
from ambidex.config import EngineConfig, ServerConfig
from ambidex.engine.async_engine import DEFAULT_ENGINE, AsyncEngine, EngineUnavailableError
from ambidex.engine.frontend import FrontendFactory, default_frontend
from ambidex.engine.summary import describe
from ambidex.errors import OptionError
from ambidex.server.app import build_app
from ambidex.server.state import ServerState

log = logging.getLogger(__name__)

#: After the drain, what is left gets this long to receive its error.
LAST_WORDS_S = 2.0

#: Exit code of a second Ctrl-C: 128 + SIGINT.
INTERRUPTED = 130

#: The periodic line of statistics, as vLLM logs it.
STATS_LOG_EVERY_S = 10.0

_KEEP_ALIVE_S = 30
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises :class:`OptionError` where the address cannot be had.

    It listens at once: on Linux two programs can bind one port as long as neither listens, and
    the second would learn of it only after it has loaded its model.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        raise OptionError(
            f"--host {host} --port {port} is no address of this machine ({error}). Use 127.0.0.1 "
            "for this machine only, or 0.0.0.0 for all its networks."
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OptionError(_bind_sentence(host, port, error)) from None
    listener.setblocking(False)
    return listener


def _bind_sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host} is in use by another program. Stop that program, or choose "
            f"another port, for example --port {port + 1 if port < 65535 else 8000}."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"Port {port} needs rights that this user lacks ({error.strerror}). Choose one from "
            "1024 up, for example --port 8000."
        )
    return (
        f"{host}:{port} cannot be opened ({error.strerror}). Use --host 127.0.0.1 for this machine "
        "only, or 0.0.0.0 for all its networks."
    )


def check_tls(config: ServerConfig) -> None:
    """Raises :class:`OptionError` where certificate and key do not work."""
    if config.ssl_keyfile and not config.ssl_certfile:
        raise OptionError("--ssl-keyfile needs --ssl-certfile. Give both.")
    if not config.ssl_certfile:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise OptionError(
            f"TLS cannot be set up from --ssl-certfile {config.ssl_certfile} and --ssl-keyfile "
            f"{config.ssl_keyfile} ({error}). Give PEM files that belong together."
        ) from None


def announcement(config: ServerConfig, port: int) -> list[str]:
    """The URL, and how to open the server to others."""
    scheme = "https" if config.ssl_certfile else "http"
    host = config.host
    if _is_any(host):
        lines = [f"Ready on all networks: {scheme}://{socket.gethostname()}:{port}/v1"]
    else:
        shown = f"[{host}]" if ":" in host else host
        lines = [f"Ready: {scheme}://{shown}:{port}/v1"]
    if _is_loopback(host):
        lines.append("Only this machine can reach it; --host 0.0.0.0 --api-key KEY opens it.")
    return lines


def _is_any(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == ""


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class _Uvicorn(uvicorn.Server):
    """uvicorn, which leaves the signals to us: it would stop listening before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """SIGTERM and Ctrl-C ask for the end; a second Ctrl-C does not wait for it."""

    def __init__(self, kill_engine: Callable[[], None]) -> None:
        self.asked = asyncio.Event()
        self._kill_engine = kill_engine
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.asked.is_set() and number == signal.SIGINT:
            self._kill_engine()
            os._exit(INTERRUPTED)
        self.asked.set()


class _Server:
    """One run, from the bound socket to the exit code."""

    def __init__(
        self, engine: AsyncEngine, state: ServerState, listener: socket.socket, port: int
    ) -> None:
        self._engine = engine
        self._state = state
        self._port = port
        config = state.config
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                build_app(state),
                log_config=None,
                log_level=config.uvicorn_log_level,
                access_log=False,
                server_header=False,
                # Loopback-only views must see the real peer.
                proxy_headers=False,
                ws="none",
                lifespan="off",
                root_path=config.root_path,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(LAST_WORDS_S) + 1,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        self._signals = _Signals(engine.kill)
        self._web = asyncio.create_task(self._uvicorn.serve([listener]))
        self._asked = asyncio.create_task(self._signals.asked.wait())

    async def run(self) -> int:
        """Serves until asked to end (0) or until the engine cannot be kept alive (1)."""
        try:
            if not await self._load():
                return 0
            info = self._engine.info
            notes = (*info.notes, *self._engine.frontend.notes)
            for line in (*describe(info), *notes, *self._announcement()):
                log.info(line)
            reporter = asyncio.create_task(self._report())
            await asyncio.wait(
                (self._asked, self._engine.fatal, self._web), return_when=asyncio.FIRST_COMPLETED
            )
            reporter.cancel()
            if self._engine.fatal.done():
                log.error(self._engine.fatal.result())
                return 1
            if self._web.done():
                log.error("the web server ended by itself", exc_info=self._web.exception())
                return 1
            await self._drain()
            return 0
        finally:
            await self._end()

    async def _load(self) -> bool:
        """False where the end was asked for meanwhile; raises what the engine raised."""
        loading = asyncio.create_task(self._engine.start())
        await asyncio.wait((loading, self._asked, self._web), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return False
        loading.result()
        return True

    def _announcement(self) -> list[str]:
        config = self._state.config
        if not (config.api_keys or _is_loopback(config.host)):
            log.warning(
                "Anybody who can reach this machine can use the model: no --api-key is set."
            )
        return announcement(config, self._port)

    async def _drain(self) -> None:
        """Lets what runs come to its end, for at most ``shutdown_timeout_s``."""
        state = self._state
        state.is_draining = True
        self._engine.drain()
        log.info(
            "draining; Ctrl-C ends at once",
            extra=logs.fields(
                requests=state.num_in_flight, at_most_s=state.config.shutdown_timeout_s
            ),
        )
        limit_s = time.monotonic() + state.config.shutdown_timeout_s
        while state.num_in_flight and time.monotonic() < limit_s:
            await asyncio.sleep(0.05)
        if state.num_in_flight:
            log.warning("shutdown time is over", extra=logs.fields(requests=state.num_in_flight))

    async def _end(self) -> None:
        """What is left gets an error; then engine and web server end."""
        self._state.is_draining = True
        self._asked.cancel()
        self._engine.fail_all(EngineUnavailableError("The server is shutting down."))
        closing = asyncio.create_task(self._engine.close())
        limit_s = time.monotonic() + LAST_WORDS_S
        while self._state.num_in_flight and time.monotonic() < limit_s:
            await asyncio.sleep(0.02)
        self._uvicorn.should_exit = True
        await asyncio.gather(self._web, closing, return_exceptions=True)

    async def _report(self) -> None:
        """One line of statistics now and then, while there is something to say."""
        if self._state.engine_config.log.disable_log_stats:
            return
        engine = self._engine
        prompt, generation = engine.num_prompt_tokens, engine.num_generation_tokens
        while True:
            await asyncio.sleep(STATS_LOG_EVERY_S)
            new_prompt = engine.num_prompt_tokens - prompt
            new_generation = engine.num_generation_tokens - generation
            prompt += new_prompt
            generation += new_generation
            stats = engine.stats
            if not (new_prompt or new_generation or stats.num_running or stats.num_waiting):
                continue
            hit_rate = stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)
            log.info(
                "engine",
                extra=logs.fields(
                    prompt_tokens_per_s=round(new_prompt / STATS_LOG_EVERY_S, 1),
                    generation_tokens_per_s=round(new_generation / STATS_LOG_EVERY_S, 1),
                    running=stats.num_running,
                    waiting=stats.num_waiting,
                    kv_cache=f"{stats.kv_cache_usage:.1%}",
                    prefix_cache_hits=f"{hit_rate:.1%}",
                ),
            )


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    notes: Sequence[str] = (),
    *,
    engine_factory: str = DEFAULT_ENGINE,
    frontend_factory: FrontendFactory = default_frontend,
) -> int:
    """Serves until a signal; returns the process's exit code.

    Raises :class:`OptionError` for an address or certificate that does not work, before anything
    is loaded, and the engine's own :class:`AmbidexError` where the model cannot be loaded.
    ``notes`` are one-line remarks on the options.
    """
    logs.configure(engine_config.log.level, engine_config.log.format)
    check_tls(server_config)
    listener = bind(server_config.host, server_config.port)
    port: int = listener.getsockname()[1]
    for note in notes:
        log.info(note)

    async def main() -> int:
        engine = AsyncEngine(
            engine_config, engine_factory=engine_factory, frontend_factory=frontend_factory
        )
        state = ServerState(engine, engine_config, server_config)
        return await _Server(engine, state, listener, port).run()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())
