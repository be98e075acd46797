"""The host's results beside an accelerator: what is launched ahead does not take all memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lane_harness import SIM, assert_same, drive, make_config, prompts, run

from ambidex.config import OffloadConfig
from ambidex.device.host_memory import HostMemory
from ambidex.device.sim import SimDevice, make_sim
from ambidex.engine.engine import Engine
from ambidex.memory.cost_model import ComputeRate


@pytest.fixture
def device() -> Iterator[SimDevice]:
    made = make_sim("memory=1MiB", lambda: ComputeRate(1e9, 1e9), ())
    yield made
    made.close()


def test_it_counts_what_is_in_use(device: SimDevice) -> None:
    memory = HostMemory(device)
    first = memory.empty((4, 8), torch.float32)
    part = memory.empty((16,), torch.int64)[2:4]
    assert (memory.taken_bytes, memory.peak_bytes) == (256, 256)
    del first
    # A part keeps all of it.
    memory.collect()
    assert memory.taken_bytes == 128
    part.fill_(3)
    del part
    memory.collect()
    assert (memory.taken_bytes, memory.peak_bytes) == (0, 256)
    assert not device.owns(memory.empty((4,), torch.float32))


def test_results_use_the_same_memory_again(device: SimDevice) -> None:
    memory = HostMemory(device)
    memory.hold(1000)
    first = memory.empty((4, 8), torch.float32)
    place = first.data_ptr()
    del first
    again = memory.empty((64,), torch.uint8)
    assert again.data_ptr() == place
    # More than is held lies beside it, and is counted alike.
    large = memory.empty((1 << 26,), torch.uint8)
    assert memory.taken_bytes == memory.peak_bytes == 64 + (1 << 26)
    again.fill_(1)
    large[-1] = 2
    del again, large
    assert memory.taken_bytes == 0


def test_what_is_needed_is_what_is_kept_and_the_most_beside(device: SimDevice) -> None:
    memory = HostMemory(device)
    large = memory.empty((500,), torch.uint8)
    del large
    with memory.kept():
        kept = memory.empty((300,), torch.uint8)
        passing = memory.empty((50,), torch.uint8)
        del passing
    assert (memory.peak_bytes, memory.needed_bytes) == (500, 800)
    beside = memory.empty((400,), torch.uint8)
    assert (memory.taken_bytes, memory.needed_bytes) == (700, 800)
    del kept, beside


def test_at_its_limit_launching_waits_for_what_was_launched(device: SimDevice) -> None:
    memory = HostMemory(device)
    memory.limit_bytes = 1000
    held = [memory.empty((100,), torch.float32) for _ in range(2)]
    stream = device.new_stream("host", lambda: None)
    gate = threading.Event()
    stream.launch("work", lambda: (gate.wait(20), held.clear())[1], 0.0)
    threading.Timer(0.1, gate.set).start()
    memory.empty((100,), torch.float32)
    assert gate.is_set() and memory.peak_bytes == 800


def test_a_step_takes_what_a_layer_needs(sim_model: Callable[..., Path]) -> None:
    """Sixteen layers on the host, launched at once: without the limit all of their results are
    there at a time. The tokens and the times are the same."""
    folder = sim_model("llama", num_hidden_layers=16)
    limits = {"max_num_batched_tokens": 256, "max_model_len": 512, "kv_cache_bytes": 16 << 20}
    inputs, offload = prompts((250,)), OffloadConfig(patterns=("layers.*",), mode="compute")
    expected = run(make_config(folder, dtype="float32", **limits), inputs, 4)
    peaks, seconds = [], []
    for is_limited in (True, False):
        memories: list[Any] = []

        def prepare(
            engine: Engine, is_limited: bool = is_limited, memories: list[Any] = memories
        ) -> None:
            memories.append(engine.lane.hands.host_memory)
            memories[0].peak_bytes = memories[0].taken_bytes
            if not is_limited:
                memories[0].limit_bytes = float("inf")

        config = make_config(folder, SIM, offload, dtype="float32", **limits)
        ran = run(config, inputs, 4, prepare=prepare)
        assert_same(ran, expected, 4)
        peaks.append(memories[0].peak_bytes)
        seconds.append([step.seconds for step in ran.steps])
    layer_bytes = 4 * 256 * (8 * 128 + 4 * 320 + 4 * 64)
    assert peaks[0] <= 1.25 * layer_bytes
    assert seconds[0] == seconds[1]


def test_captured_steps_leave_what_a_layer_needs(
    sim_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of captured steps are kept: launching does not wait for what will never be free."""
    folder = sim_model("llama", num_hidden_layers=8)
    offload = OffloadConfig(patterns=("*.mlp.*",), mode="compute")
    config = make_config(folder, SIM, offload, max_num_seqs=16, warm_up_fully=True)
    settle, settled = SimDevice.settle, []

    def noted(self: SimDevice) -> None:
        settled.append(1)
        settle(self)

    monkeypatch.setattr(SimDevice, "settle", noted)
    engine = Engine(config)
    try:
        memory = engine.lane.hands.host_memory
        assert memory is not None
        memory.collect()
        # What is captured is more than a layer may take.
        layer_bytes = 4 * 64 * (8 * 128 + 4 * 320 + 4 * 64)
        assert memory.taken_bytes > layer_bytes
        assert memory.limit_bytes == memory.taken_bytes + layer_bytes
        settled.clear()
        # All layers' results of so few tokens fit at a time.
        drive(engine, prompts((8,)), 4)
        assert not settled
    finally:
        engine.close()
