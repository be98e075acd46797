"""Loading takes no more of either memory than what is kept, and one layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lane_harness import make_config, prompts, run
from safetensors.torch import load_file, save_file

from ambidex.kernels.rows import CHUNK_BYTES

HERE = Path(__file__).parent

MEMORY = 64 << 20
DEVICE = "sim:memory=64MiB,core_bandwidth=10GB/s,core_flops=50G,link=10GB/s,speed=4"

#: Of the host's memory beside weights, in bytes: stacks and heaps of new threads, what Python
#: makes, and pages at the ends of pieces (up to 2 MiB each where the system gives huge ones).
FIXED_BYTES = 12 << 20


@pytest.fixture(scope="module")
def large(sim_model: Callable[..., Path]) -> Path:
    """Three times what the device has, in many layers."""
    folder = sim_model(
        "llama",
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=19,
        num_attention_heads=16,
        num_key_value_heads=1,
    )
    assert (folder / "model.safetensors").stat().st_size > 3 * MEMORY
    return folder


def test_a_table_that_is_larger_than_layers(sim_model: Callable[..., Path], tmp_path: Path) -> None:
    """A table of another type than the file's is read, packed and put in its place some rows at a
    time: it is never there twice."""
    source, folder = sim_model("llama", vocab_size=131072, hidden_size=256), tmp_path / "wide"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    done = subprocess.run(
        [sys.executable, str(HERE / "load_and_measure.py"), str(sim_model("llama")), str(folder),
         DEVICE.replace("64MiB", "1GiB"), "compute", "4"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    got: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    table_bytes = 4 * 131072 * 256
    assert got["device_weights"] > table_bytes
    assert got["peak_beyond_end"] <= 3 * CHUNK_BYTES + FIXED_BYTES < table_bytes // 3, got


LAYER_BYTES = 4 * 512 * (512 + 2 * 32 + 512 + 3 * 1408)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_a_checkpoint_three_times_the_device(sim_model: Callable[..., Path], large: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "load_and_measure.py"), str(sim_model("llama")), str(large),
         DEVICE, "auto", "4"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    got: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    expected = run(make_config(large, dtype="float32"), prompts((5, 20)), 4)
    assert got["errors"] == [None, None]
    assert got["tokens"] == [[token for token, _, _ in trace] for trace in expected.traces]
    # The device: what is planned, and no more.
    assert got["device_used"] <= got["device_capacity"] <= MEMORY
    peak = got["device_peak"]
    assert peak["weights"] <= got["device_weights"] + LAYER_BYTES
    assert peak["staging"] == got["ring"]
    assert peak["weights"] + peak["staging"] <= got["device_used"]
    # The host: what it keeps, once.
    host = got["host_weights"]
    assert host == got["host_ledger"] > 2 * MEMORY
    assert got["weights"] - host == got["device_weights"]
    assert got["growth"] <= 1.02 * host + FIXED_BYTES, got
    assert got["growth"] >= 0.98 * host, "the measurement sees the weights"
    assert got["peak_beyond_end"] <= LAYER_BYTES + FIXED_BYTES, got
    # Two layers, of which each matrix has some rows on the device.
    assert LAYER_BYTES < got["ring"] < 2 * LAYER_BYTES
    assert got["counts"]["streamed_bytes"] > 0
