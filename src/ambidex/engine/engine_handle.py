"""One engine process as the server sees it: start it, talk to it, learn that it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from ambidex import errors
from ambidex.config import EngineConfig
from ambidex.engine.engine_process import frame, remove_socket
from ambidex.engine.messages import (
    EngineInfo,
    FromEngine,
    Hello,
    Ready,
    Shutdown,
    StartFailed,
    StartUp,
    ToEngine,
)
from ambidex.errors import AmbidexError, EngineDeadError

#: The child imports what the parent could import, but not what lies in the working directory.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[1:]; from ambidex.engine.engine_process import run; run()"
)

#: A Unix socket's path has room for 107 bytes (103 on macOS), of which our names take 37.
_MAX_PARENT_BYTES = 66

_FOLDER_PREFIX = "ambidex-ipc-"


def _make_folder() -> str:
    """A new folder that only this user can enter; clears away those of servers that were killed
    before their engine had connected."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
        parent = "/tmp"
    for old in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
        match = re.fullmatch(rf"{_FOLDER_PREFIX}(\d+)-\w+", old.name)
        with contextlib.suppress(OSError):
            if match and old.stat().st_uid == os.getuid() and not _is_alive(int(match[1])):
                remove_socket(str(old))
    return tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=parent)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _to_error(failure: StartFailed) -> AmbidexError:
    """The engine's error as the same class here, so that callers see what it saw."""
    kind = getattr(errors, failure.kind, AmbidexError)
    if not (isinstance(kind, type) and issubclass(kind, AmbidexError)):
        kind = AmbidexError
    error: AmbidexError = kind(failure.message)
    return error


def describe_exit(code: int) -> str:
    """An exit status in words: ``exit code 1`` or ``signal 9``."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class EngineHandle:
    """Created in a running event loop; ``exited`` resolves to the child's exit status."""

    def __init__(self, context: zmq.asyncio.Context, config: EngineConfig, factory: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._folder = _make_folder()
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._folder}/engine"
        try:
            self._socket.bind(address)
            self._process = self._spawn()
        except BaseException:
            self._socket.close()
            remove_socket(self._folder)
            raise
        self.pid = self._process.pid
        self.exited: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()
        start = StartUp(
            config=config,
            factory=factory,
            address=address,
            folder=self._folder,
            parent_pid=os.getpid(),
            parent_is_main_thread=threading.current_thread() is threading.main_thread(),
        )
        assert self._process.stdin is not None
        # A child that is gone already is noticed through ``exited``.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(frame(msgspec.msgpack.encode(start)))
            self._process.stdin.flush()

    def _spawn(self) -> subprocess.Popen[bytes]:
        paths = [entry or os.getcwd() for entry in sys.path]
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, *paths],
            stdin=subprocess.PIPE,
            # Whatever a library prints must not end up in the server's standard output.
            stdout=2,
        )

    def _wait(self) -> None:
        code = self._process.wait()

        def tell() -> None:
            if not self.exited.done():
                self.exited.set_result(code)

        # The loop may be closed: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(tell)

    async def wait_ready(self) -> EngineInfo:
        """The loaded model; raises the engine's own :class:`AmbidexError` if it cannot start."""
        while True:
            message = await self._receive_or_exit()
            if isinstance(message, Hello):
                # Both ends are connected: the file has no further use, and cannot be left behind.
                remove_socket(self._folder)
            elif isinstance(message, Ready):
                return message.info
            elif isinstance(message, StartFailed):
                raise _to_error(message)

    async def _receive_or_exit(self) -> FromEngine:
        receiving = asyncio.ensure_future(self.receive())
        try:
            await asyncio.wait((receiving, self.exited), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # Its last words may still be on their way.
                await asyncio.wait((receiving,), timeout=0.5)
            if receiving.done():
                return receiving.result()
        finally:
            receiving.cancel()
        raise EngineDeadError(
            f"The engine process ended with {describe_exit(self.exited.result())} while it "
            "started. Its last lines above say why; a signal 9 is often the kernel's answer to "
            "too little memory."
        )

    async def receive(self) -> FromEngine:
        message: FromEngine = self._decoder.decode(await self._socket.recv())
        return message

    def send(self, message: ToEngine) -> None:
        """Never blocks: the queue is unlimited. Nothing happens once the process is released."""
        if not self._socket.closed:
            self._socket.send(self._encoder.encode(message))

    def kill(self) -> None:
        self._process.kill()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Asks the engine to end, kills it after ``timeout_s``, and leaves nothing behind."""
        if not self.exited.done() and timeout_s > 0:
            self.send(Shutdown())
            await asyncio.wait((self.exited,), timeout=timeout_s)
        if not self.exited.done():
            self.kill()
            await asyncio.wait((self.exited,), timeout=5.0)
        self.release()

    def release(self) -> None:
        """Closes this side's socket and pipe; the process ends with the pipe, if it still runs."""
        self._socket.close(linger=0)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        remove_socket(self._folder)
