"""Servers in processes of their own, over real sockets, with the fake engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"

# Also for the engine processes that tests start: they import what this process can.
sys.path.insert(0, str(HERE))

#: Seconds; generous, since test machines are slow and shared.
DEADLINE_S = 60.0


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of ``condition``."""
    limit = time.monotonic() + deadline_s
    while time.monotonic() < limit:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not in {deadline_s} s: {what}")


class Server:
    """One server process: ``run_server.py`` with these settings, or a ``command``; ``log`` is its
    standard error so far."""

    def __init__(self, *, command: Sequence[str] = (), **settings: Any) -> None:
        # Short, for the path of a Unix socket.
        self.temp = Path(tempfile.mkdtemp(prefix="amb-"))
        environment = {**os.environ, "TMPDIR": str(self.temp), "PYTHONPATH": str(SOURCES)}
        self.process = subprocess.Popen(
            command or [sys.executable, str(HERE / "run_server.py"), json.dumps(settings)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.lines: list[str] = []
        self._http = httpx.Client(timeout=DEADLINE_S)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> Server:
        def ready() -> str | None:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            found = [line for line in self.lines if "Ready" in line]
            return found[0] if found else None

        line = wait_until(ready, "ready")
        self.url = line[line.index("http") :]
        self.root = self.url.removesuffix("/v1")
        return self

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        options.setdefault("max_retries", 0)
        return openai.OpenAI(base_url=self.url, api_key=key, timeout=DEADLINE_S, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(self.root + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self._http.post(self.root + path, **options)

    def info(self) -> dict[str, Any]:
        return self.get("/server_info").json()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(("#", f"{name}_created")):
                continue
            head, _, value = line.rpartition(" ")
            found, _, rest = head.partition("{")
            if found == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += float(value)
        return total

    def listening_port(self) -> int | None:
        """The TCP port that the process listens on, before it says so."""
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{self.log}")
        for connection in psutil.Process(self.process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
        return None

    def wait_exit(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self._http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(DEADLINE_S)
        shutil.rmtree(self.temp, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """False for a process that has ended, zombies included."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """Starts servers with given settings (see ``run_server.py``) and ends them."""
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        server = Server(**settings)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that a module's tests share; they must not harm it."""
    shared = Server()
    try:
        yield shared.wait_ready()
    finally:
        shared.close()
