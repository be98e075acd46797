"""The whole path with the default model: command line, two processes, real socket, real client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from conftest import DEADLINE_S, Server, is_alive, wait_until

pytestmark = pytest.mark.model

NAME = "smol"
GOLDEN = Path(__file__).parent.parent / "data" / "golden_smollm2.json"


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    command = [
        *(sys.executable, "-m", "ambidex.entrypoints.openai.api_server"),
        *("--model", str(smollm2), "--served-model-name", NAME, "--port", "0"),
        *("--max-model-len", "2048", "--kv-cache-memory-bytes", "1GiB", "--api-key", "secret"),
        *("--dtype", "float32", "--max_num_seqs", "64"),
    ]
    shared = Server(command=command)
    try:
        yield shared.wait_ready()
    finally:
        shared.close()


def client(server: Server) -> openai.OpenAI:
    return server.client("secret")


def golden(name: str) -> dict[str, Any]:
    rows = json.loads(GOLDEN.read_text())["rows"]
    found: dict[str, Any] = next(row for row in rows if row["name"] == name)
    return found


def test_chat_answers(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(golden("chat-fact")["prompt_ids"])


def test_stream_is_the_same_text(server: Server) -> None:
    options: dict[str, Any] = {
        "model": NAME, "prompt": golden("scripts")["prompt"], "temperature": 0, "max_tokens": 48,
    }  # fmt: skip
    whole = client(server).completions.create(**options)
    pieces = client(server).completions.create(**options, stream=True)
    text = "".join(piece.choices[0].text for piece in pieces if piece.choices)
    assert text == whole.choices[0].text
    assert "\ufffd" not in text.rstrip("\ufffd")


def test_sixty_four_at_once_answer_as_alone(server: Server) -> None:
    """Greedy and seeded requests, half of them with a shared prefix, all at the same time."""
    prefix = golden("novel-300")["prompt"]
    prompts = [
        f"{prefix if i % 2 else ''}Question {i}: what is {i} plus {i + 1}?" for i in range(64)
    ]

    def options(index: int) -> dict[str, Any]:
        sampled: dict[str, Any] = {"temperature": 0.9, "seed": index} if index % 3 else {}
        return {
            "model": NAME, "prompt": prompts[index], "max_tokens": 12, "temperature": 0, **sampled,
        }  # fmt: skip

    async def ask_all() -> list[str]:
        asynchronous = openai.AsyncOpenAI(
            base_url=server.url, api_key="secret", timeout=10 * DEADLINE_S, max_retries=0
        )
        async with asynchronous:
            answers = await asyncio.gather(
                *(asynchronous.completions.create(**options(i)) for i in range(64))
            )
        return [answer.choices[0].text for answer in answers]

    hits = server.metric("vllm:prefix_cache_hits_total")
    together = asyncio.run(ask_all())
    for index in range(0, 64, 5):
        alone = client(server).completions.create(**options(index))
        assert alone.choices[0].text == together[index], index
    assert server.metric("vllm:prefix_cache_hits_total") > hits
    assert server.metric("vllm:num_requests_running") == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_the_ledger_is_true(server: Server) -> None:
    """Within 5% of what the operating system says that the engine's process held at most."""
    headers = {"Authorization": "Bearer secret"}
    (host,) = server.get("/ledger", headers=headers).json()["memories"]
    pid = server.get("/server_info", headers=headers).json()["engine_pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) * 1024
    assert host["accounts"]["kv_cache"] > 900 << 20
    assert 0.95 * peak <= host["reserved_bytes"] <= 1.05 * peak


def test_no_key(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    assert server.get("/health").status_code == 200


def test_disconnect_frees_the_blocks(server: Server) -> None:
    stream = client(server).completions.create(
        model=NAME, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.metric("vllm:kv_cache_usage_perc") >= 0
    wait_until(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
    stream.close()
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "the request is gone")
    wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0, "its blocks are free")
    assert server.metric("vllm:request_success_total", finished_reason="abort") >= 1


def test_engine_death(server: Server) -> None:
    """A request under way gets a 500; the next one works; counters go on."""
    tokens = server.metric("vllm:generation_tokens_total")
    assert tokens > 0
    headers = {"Authorization": "Bearer secret"}
    pid = server.get("/server_info", headers=headers).json()["engine_pid"]
    errors: list[openai.APIStatusError] = []

    def ask() -> None:
        try:
            client(server).completions.create(
                model=NAME, prompt="Once", max_tokens=1500, extra_body={"ignore_eos": True}
            )
        except openai.APIStatusError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
    os.kill(pid, signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert [error.status_code for error in errors] == [500]
    assert "engine" in str(errors[0]).lower()
    answer = client(server).completions.create(
        model=NAME, prompt=golden("prose")["prompt"], max_tokens=4, temperature=0
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert server.metric("vllm:generation_tokens_total") >= tokens + 4
    assert not is_alive(pid)


def test_terminate(server: Server) -> None:
    """Last, since it ends the shared server."""
    headers = {"Authorization": "Bearer secret"}
    pid = server.get("/server_info", headers=headers).json()["engine_pid"]
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    wait_until(lambda: not is_alive(pid), "the engine has ended")
    assert "Traceback" not in server.log
    assert not list(server.temp.iterdir())
