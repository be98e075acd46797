"""What of each memory is reserved: ``/ledger``, ``/metrics`` and the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from conftest import Server, is_alive, wait_until

GIB = 1 << 30

MEMORY = {
    "host": {"capacity": 16 * GIB, "accounts": {"weights": 3 * GIB, "kv_cache": GIB}},
    "sim:0": {"capacity": 2 * GIB, "accounts": {"weights": GIB, "kv_cache": 0}},
}
MODULES = {
    "layers.0.mlp.gate_up": {"host": 2 * GIB},
    "layers.0.mlp.down": {"host": GIB},
    "layers.0.attention.qkv": {"sim:0": GIB},
}

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def two_memories() -> Iterator[Server]:
    shared = Server(
        engine={"memory": MEMORY, "modules": MODULES, "speed": {"decode": [100, 0.5, 0.75]}},
        server={"api_keys": ["k"]},
    )
    try:
        yield shared.wait_ready()
    finally:
        shared.close()


def ledger(server: Server, key: str = "k") -> dict[str, Any]:
    answer = server.get("/ledger", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


def test_the_ledger(two_memories: Server) -> None:
    found = ledger(two_memories)
    host, sim = found.pop("memories")
    assert host == {
        "name": "host",
        "capacity_bytes": 16 * GIB,
        "reserved_bytes": 4 * GIB,
        "free_bytes": 12 * GIB,
        "accounts": {"weights": 3 * GIB, "kv_cache": GIB, "staging": 0},
    }
    assert (sim["name"], sim["reserved_bytes"], sim["free_bytes"]) == ("sim:0", GIB, GIB)
    (warning,) = found.pop("warnings")
    found.pop("speed")
    assert "75% of the weights" in warning and "sim:0" in warning
    assert found == {
        "modules": MODULES,
        "cpu_weights": 3 * GIB,
        "gpu_weights": GIB,
        "cpu_weight_share": 0.75,
    }
    # How fast steps were comes with the engine's first statistics.
    wait_until(lambda: "decode" in ledger(two_memories)["speed"], "the speed")
    assert ledger(two_memories)["speed"]["decode"] == pytest.approx(
        {
            "num_steps": 100,
            "predicted_ms": 5.0,
            "measured_ms": 7.5,
            "measured_over_predicted": 1.5,
        }
    )


def test_it_needs_the_key(two_memories: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = two_memories.get("/ledger", headers=headers)
        assert answer.status_code == 401
        assert "weights" not in answer.text
    assert (
        two_memories.post("/ledger", {}, headers={"authorization": "Bearer k"}).status_code == 405
    )


def test_it_tells_of_now(two_memories: Server) -> None:
    def staging() -> int:
        number: int = ledger(two_memories)["memories"][0]["accounts"]["staging"]
        return number

    client: openai.OpenAI = two_memories.client("k")
    stream = client.completions.create(model="fake", prompt="!slow", max_tokens=500, stream=True)
    next(iter(stream))
    wait_until(lambda: staging() == 1000, "the running request's staging is seen")
    gauge = {"memory": "host", "account": "staging"}
    assert two_memories.metric("ambidex:memory_reserved_bytes", **gauge) == 1000
    stream.close()
    wait_until(lambda: staging() == 0, "it is given back")


def test_gauges_for_every_memory_and_account(two_memories: Server) -> None:
    def reserved(memory: str, account: str) -> float:
        return two_memories.metric(
            "ambidex:memory_reserved_bytes", memory=memory, account=account, model_name="fake"
        )

    assert reserved("host", "weights") == 3 * GIB
    assert reserved("host", "kv_cache") == GIB
    assert reserved("sim:0", "weights") == GIB
    assert two_memories.metric("ambidex:memory_capacity_bytes", memory="host") == 16 * GIB
    assert two_memories.metric("ambidex:memory_capacity_bytes", memory="sim:0") == 2 * GIB


def test_the_log_shows_every_memory(two_memories: Server) -> None:
    for line in ("host memory", "host: weights", "host: free", "sim:0 memory", "sim:0: free"):
        assert line in two_memories.log


def test_without_an_accelerator(server: Server) -> None:
    """No keys: it is open, as the other views of the model are."""
    found = server.get("/ledger").json()
    assert (found["gpu_weights"], found["warnings"], found["modules"]) == (0, [], {})


def test_while_there_is_no_engine(start_server: Start) -> None:
    server = start_server(engine={"load_s": 5})
    port = wait_until(lambda: server.listening_port(), "it listens")
    address = f"http://127.0.0.1:{port}/ledger"
    answer = wait_until(lambda: _get(address), "it answers")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def _get(address: str) -> httpx.Response | None:
    try:
        return httpx.get(address)
    except httpx.HTTPError:
        return None


def test_a_new_engine_is_told_of_too(start_server: Start) -> None:
    server = start_server(engine={"memory": MEMORY, "modules": MODULES}).wait_ready()
    pid = server.info()["engine_pid"]
    with pytest.raises(openai.APIError):
        server.client().completions.create(model="fake", prompt="!crash", max_tokens=3)
    wait_until(lambda: not is_alive(pid), "it is gone")
    wait_until(lambda: server.get("/health").status_code == 200, "another one runs")
    assert server.get("/ledger").json()["cpu_weights"] == 3 * GIB
    assert server.metric("ambidex:memory_capacity_bytes", memory="host") == 16 * GIB
