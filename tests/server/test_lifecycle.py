"""Start, death, restart and end: of the server, and of the engine below it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from conftest import Server, is_alive, wait_until

Start = Callable[..., Server]


def ask(server: Server, prompt: str = "a", **options: Any) -> Any:
    options.setdefault("max_tokens", 3)
    return server.client().completions.create(model="fake", prompt=prompt, **options)


def engine_pid(server: Server) -> int:
    return server.info()["engine_pid"]


def wait_restarted(server: Server, old: int) -> int:
    wait_until(lambda: server.get("/health").status_code == 200, "the engine is back")
    new = engine_pid(server)
    assert new != old
    return new


class Streaming:
    """A stream of one long completion that is read in a thread."""

    def __init__(self, server: Server) -> None:
        self.lines: list[str] = []
        self.began = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(server,))
        self._thread.start()
        assert self.began.wait(60)

    def _run(self, server: Server) -> None:
        body = {"prompt": "!slow", "max_tokens": 2000, "stream": True}
        url = server.url + "/completions"
        try:
            with httpx.stream("POST", url, json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.began.set()
        except httpx.HTTPError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def last(self) -> Any:
        """The last event, once the stream has ended well."""
        self.join()
        assert self.error is None
        return json.loads(self.lines[-1].removeprefix("data: "))


# -- the engine dies ----------------------------------------------------------------------------


def test_engine_death_is_a_500_and_a_restart(start_server: Start) -> None:
    server = start_server().wait_ready()
    ask(server)
    tokens = server.metric("vllm:generation_tokens_total")
    assert tokens == 3
    pid = engine_pid(server)
    stream = Streaming(server)
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(ask, server, "!slow", max_tokens=2000)
        wait_until(lambda: server.info()["num_requests"] == 2, "both run")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.InternalServerError, match=r"engine process ended with signal 9"):
            whole.result(60)
    error = stream.last()["error"]
    assert "signal 9" in error["message"]
    assert error["type"] == "server_error"
    # A request that comes now waits for the new process.
    assert ask(server).choices[0].text == "bcd"
    wait_restarted(server, pid)
    assert server.metric("vllm:generation_tokens_total") > tokens
    assert server.metric("ambidex:engine_restarts_total") == 1
    assert server.metric("vllm:num_requests_running") == 0
    assert server.process.poll() is None


def test_prefix_counters_survive_a_restart(start_server: Start) -> None:
    server = start_server().wait_ready()

    def queried() -> float:
        return server.metric("vllm:prefix_cache_queries_total")

    ask(server, "abcdefgh")
    wait_until(lambda: queried() == 8, "counted")
    pid = engine_pid(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: engine_pid(server) != pid, "another process")
    ask(server, "abcd")
    wait_until(lambda: queried() == 12, "counted on top")


def test_a_request_that_kills_the_engine(start_server: Start) -> None:
    server = start_server().wait_ready()
    pid = engine_pid(server)
    with pytest.raises(openai.InternalServerError, match="ended with signal 9"):
        ask(server, "!crash")
    assert ask(server).choices[0].text == "bcd"
    wait_restarted(server, pid)


def test_an_engine_that_dies_while_draining_is_not_replaced(start_server: Start) -> None:
    server = start_server(server={"shutdown_timeout_s": 30}).wait_ready()
    pid = engine_pid(server)
    stream = Streaming(server)
    server.signal(signal.SIGTERM)
    wait_until(lambda: "draining" in server.log, "draining")
    os.kill(pid, signal.SIGKILL)
    message = stream.last()["error"]["message"]
    assert "signal 9" in message
    assert "shutting down" in message
    assert server.wait_exit() == 0
    assert "restarted" not in server.log
    assert "Traceback" not in server.log
    assert list(server.temp.iterdir()) == []


def test_three_deaths_end_the_server(start_server: Start) -> None:
    server = start_server().wait_ready()
    for _ in range(2):
        pid = engine_pid(server)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.info()["engine_state"] == "ready", "restarted")
        wait_until(lambda old=pid: engine_pid(server) != old, "another process")
    os.kill(engine_pid(server), signal.SIGKILL)
    assert server.wait_exit() == 1
    assert "died 3 times" in server.log
    assert "Traceback" not in server.log
    assert list(server.temp.iterdir()) == []


def test_a_hung_engine_is_told_by_health(start_server: Start) -> None:
    server = start_server().wait_ready()
    pid = engine_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        first = server.get("/health").json()
        # Not yet long enough to call it hung, but the silence is shown.
        assert first["status"] == "ready"
        assert first["heartbeat_age_s"] > 0.5
        wait_until(lambda: server.metric("ambidex:engine_heartbeat_age_seconds") > 2, "it grows")
        assert server.get("/live").status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ask(server).choices[0].text == "bcd"
    assert server.get("/health").json()["heartbeat_age_s"] < 2


# -- the server ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(start_server: Start, number: int) -> None:
    server = start_server().wait_ready()
    pid = engine_pid(server)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ask, server, "!slow", max_tokens=20)
        wait_until(lambda: server.info()["num_requests"] == 1, "it runs")
        server.signal(number)
        wait_until(lambda: server.get("/health").status_code == 503, "health says so")
        assert server.get("/health").json() == {"status": "draining"}
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        assert server.get("/live").status_code == 200
        # What ran was answered.
        assert running.result(60).usage.completion_tokens == 20
    assert server.wait_exit() == 0
    wait_until(lambda: not is_alive(pid), "the engine is gone")
    assert "Traceback" not in server.log
    assert list(server.temp.iterdir()) == []


def test_a_signal_without_requests_ends_at_once(start_server: Start) -> None:
    server = start_server(server={"shutdown_timeout_s": 3600}).wait_ready()
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_what_does_not_end_in_time_gets_an_error(start_server: Start) -> None:
    server = start_server(server={"shutdown_timeout_s": 0.3}).wait_ready()
    stream = Streaming(server)
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(ask, server, "!slow", max_tokens=2000)
        wait_until(lambda: server.info()["num_requests"] == 2, "both run")
        server.signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            whole.result(60)
    assert caught.value.status_code == 503
    assert "shutting down" in stream.last()["error"]["message"]
    assert server.wait_exit() == 0
    assert "Traceback" not in server.log


def test_a_second_interrupt_ends_now(start_server: Start) -> None:
    server = start_server(server={"shutdown_timeout_s": 3600}).wait_ready()
    pid = engine_pid(server)
    stream = Streaming(server)
    server.signal(signal.SIGINT)
    wait_until(lambda: server.get("/health").status_code == 503, "it drains")
    server.signal(signal.SIGINT)
    assert server.wait_exit() == 130
    wait_until(lambda: not is_alive(pid), "the engine is gone")
    stream.join()
    assert isinstance(stream.error, httpx.RemoteProtocolError)


def test_kill_of_the_server_ends_the_engine(start_server: Start) -> None:
    server = start_server().wait_ready()
    pid = engine_pid(server)
    shared_before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    assert is_alive(pid)
    # The socket's folder is gone as soon as both sides are connected.
    assert list(server.temp.iterdir()) == []
    server.signal(signal.SIGKILL)
    server.wait_exit()
    wait_until(lambda: not is_alive(pid), "the engine is gone")
    if shared_before:
        assert set(Path("/dev/shm").iterdir()) <= shared_before


def test_kill_of_the_server_ends_even_a_stuck_engine(start_server: Start) -> None:
    server = start_server().wait_ready()
    pid = engine_pid(server)
    with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(server.url + "/completions", json={"prompt": "!hang"}, timeout=0.3)
    server.signal(signal.SIGKILL)
    server.wait_exit()
    wait_until(lambda: not is_alive(pid), "the engine is gone")


# -- the start ----------------------------------------------------------------------------------


def test_a_model_that_cannot_be_loaded_is_one_line(start_server: Start) -> None:
    server = start_server(engine={"fail_start": "model.gguf is truncated. Get it again."})
    assert server.wait_exit() == 1
    assert server.lines == ["ambidex: model.gguf is truncated. Get it again."]
    assert list(server.temp.iterdir()) == []


def test_an_engine_that_dies_while_it_loads(start_server: Start) -> None:
    server = start_server(engine={"crash_start": 3})
    assert server.wait_exit() == 1
    assert "exit code 3" in server.log
    assert "Traceback" not in server.log
    assert list(server.temp.iterdir()) == []


def test_a_port_in_use(start_server: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # The engine would fail if it were ever started.
        server = start_server(server={"port": port}, engine={"fail_start": "loaded too early"})
        assert server.wait_exit() == 1
    assert server.lines == [
        f"ambidex: Port {port} on 127.0.0.1 is in use by another program. Stop that program, or "
        f"choose another port, for example --port {port + 1}."
    ]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"host": "203.0.113.7"}, "--host"),
        ({"host": "no such host"}, "--host"),
        ({"ssl_certfile": "missing.pem"}, "--ssl-certfile"),
        ({"ssl_keyfile": "missing.pem"}, "--ssl-certfile"),
    ],
    ids=str,
)
def test_bad_addresses_and_certificates(
    start_server: Start, settings: dict[str, str], word: str
) -> None:
    server = start_server(server=settings)
    assert server.wait_exit() == 1
    assert len(server.lines) == 1
    assert word in server.log


def test_while_the_model_loads(start_server: Start) -> None:
    server = start_server(engine={"load_s": 5})
    port = wait_until(lambda: server.listening_port(), "it listens")
    root = f"http://127.0.0.1:{port}"

    def status(path: str) -> int:
        try:
            return httpx.get(root + path).status_code
        except httpx.HTTPError:
            return 0

    wait_until(lambda: status("/live") == 200, "it is live")
    assert httpx.get(root + "/health").status_code == 503
    assert httpx.get(root + "/health").json()["status"] == "starting"
    answer = httpx.post(root + "/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert "loaded" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert status("/metrics") == 503
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert list(server.temp.iterdir()) == []


def test_the_start_says_where_it_is(start_server: Start) -> None:
    server = start_server(notes=["--swap-space has no effect here."]).wait_ready()
    assert "--swap-space has no effect here." in server.log
    assert "GPU blocks: 0, CPU blocks: 64" in server.log
    assert "Maximum concurrency for 2048 tokens per request: 0.50x" in server.log
    assert "--host 0.0.0.0 --api-key KEY" in server.log
    assert "no --api-key is set" not in server.log


@pytest.mark.parametrize(("keys", "warnings"), [((), 1), (("k",), 0)])
def test_an_open_server_warns_once(start_server: Start, keys: tuple[str], warnings: int) -> None:
    server = start_server(server={"host": "0.0.0.0", "api_keys": keys}).wait_ready()
    assert server.log.count("no --api-key is set") == warnings


def test_tls(start_server: Start, tmp_path: Path, need_program: Callable[[str], str]) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(
        [
            *(
                need_program("openssl"),
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "1",
            ),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    server = start_server(server={"ssl_certfile": certificate, "ssl_keyfile": key}).wait_ready()
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=certificate)
    assert httpx.get(server.root + "/health", verify=context).status_code == 200


def test_a_root_path(start_server: Start) -> None:
    settings = {"root_path": "/llm", "api_keys": ["k"], "admin_api_keys": ["r"]}
    server = start_server(server=settings).wait_ready()
    assert server.get("/health").status_code == 200
    assert server.get("/v1/models").status_code == 401
    assert server.get("/server_info", headers={"authorization": "Bearer k"}).status_code == 401
    assert server.get("/server_info", headers={"authorization": "Bearer r"}).status_code == 200


def test_log_as_json(start_server: Start) -> None:
    server = start_server(log={"format": "json"})
    wait_until(lambda: "Ready" in server.log, "ready")
    events = [json.loads(line) for line in server.lines]
    assert {"time", "level", "logger", "message"} <= set(events[0])


def test_request_logging_is_opt_in(start_server: Start) -> None:
    server = start_server(log={"enable_log_requests": True}).wait_ready()
    ask(server, "the prompt\nin two lines")
    assert "the prompt\\nin two lines" in server.log
