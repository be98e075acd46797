"""The ledger against the operating system: what an engine's process really held at most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")

#: An engine in a process of its own: it starts, computes its largest step and one of every kind
#: of choice, and tells what it held.
PROGRAM = """
import json, sys
from dataclasses import asdict
import ambidex.runner.loader
from ambidex.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ambidex.engine.engine import Engine
from ambidex.request import EngineRequest, SamplingParams

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

settings = json.loads(sys.argv[1])
engine = Engine(EngineConfig(
    model=ModelConfig(settings["model"], max_model_len=settings["length"]),
    cache=CacheConfig(kv_cache_bytes=settings["kv_cache_bytes"], prefault=settings["prefault"]),
    scheduler=SchedulerConfig(max_num_seqs=settings["seqs"], max_num_batched_tokens=512),
    cpu_threads=1,
    enforce_eager=settings["eager"],
))
ready = status("VmRSS")
chosen = [{"temperature": 0.0, "prompt_logprobs": 2}, {"temperature": 0.0}, {"seed": 1},
          {"seed": 2, "top_p": 0.9, "top_k": 40}, {"temperature": 0.0, "logprobs": 5}]
for number in range(settings["requests"]):
    params = SamplingParams(max_tokens=3, ignore_eos=True, **chosen[number % len(chosen)])
    prompt = [3 + (number + i) % 500 for i in range(16 if number else 256)]
    engine.add_request(EngineRequest(str(number), prompt, params, 0.0))
while engine.has_work:
    for output in engine.step():
        assert output.error is None, output.error
(host,) = engine.memory()
print(json.dumps({"ready": ready, "peak": status("VmHWM"), "accounts": host.accounts}))
engine.close()
"""


def held(model: Path, **settings: Any) -> dict[str, Any]:
    values = {
        "model": str(model),
        "length": 512,
        "kv_cache_bytes": None,
        "prefault": True,
        "eager": False,
        "requests": 32,
        "seqs": 32,
    } | settings
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(values)],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_true(found: dict[str, Any]) -> None:
    """Within 5% of each other."""
    reserved, peak = sum(found["accounts"].values()), found["peak"]
    assert 0.95 * peak <= reserved <= 1.05 * peak, (found, reserved / peak)


def test_a_tiny_model_with_a_large_cache(tiny_model: Callable[[str], Path]) -> None:
    """Nearly all of it is the cache and what Python and PyTorch take."""
    found = held(tiny_model("llama"), kv_cache_bytes=200 << 20, seqs=512)
    assert_true(found)
    accounts = found["accounts"]
    assert accounts["kv_cache"] > 100 << 20
    assert accounts["runtime"] > 100 << 20
    assert accounts["weights"] < accounts["activations"] < 16 << 20


def test_pages_are_taken_before_the_engine_is_ready(tiny_model: Callable[[str], Path]) -> None:
    settings = {"kv_cache_bytes": 1 << 30, "requests": 0, "seqs": 512}
    lazy = held(tiny_model("llama"), prefault=False, **settings)
    taken = held(tiny_model("llama"), **settings)
    cache = taken["accounts"]["kv_cache"]
    assert cache == lazy["accounts"]["kv_cache"] > 100 << 20
    assert taken["ready"] - lazy["ready"] > 0.8 * cache


@pytest.mark.model
def test_the_default_model(smollm2: Path) -> None:
    found = held(smollm2, length=2048, kv_cache_bytes=256 << 20)
    assert_true(found)
    accounts = found["accounts"]
    assert accounts["weights"] > 90 << 20
    assert accounts["kv_cache"] > 200 << 20
