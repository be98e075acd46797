"""What a start tells of a lane with two memories, and that the largest steps run before it is
ready."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lane_harness import SIM, make_config

from ambidex.config import OffloadConfig
from ambidex.engine.engine import Engine
from ambidex.engine.summary import describe, memory_report
from ambidex.errors import InvalidModelError, OutOfMemory
from ambidex.runner import loader
from ambidex.runner.model_runner import ModelRunner


def test_both_memories_are_described(sim_model: Callable[..., Path]) -> None:
    offload = OffloadConfig(patterns=("*.mlp",), mode="compute")
    engine = Engine(make_config(sim_model("llama"), SIM, offload))
    try:
        info = engine.info()
        lines = describe(info)
        count = min(engine.lane.num_blocks)
        assert f"GPU blocks: {count}, CPU blocks: 0" in lines
        kernels = next(line for line in lines if line.startswith("kernels"))
        assert "simulated, virtual clock" in kernels
        assert kernels.endswith("1 thread")
        assert any(line.startswith("sim:0: weights") for line in lines)
        assert any(line.startswith("host: weights") for line in lines)
        report = memory_report(info.memory, info.modules)
        host, device = report["memories"]
        assert report["cpu_weights"] == host["accounts"]["weights"] > 0
        assert report["gpu_weights"] == device["accounts"]["weights"] > 0
        assert report["modules"]["layers.0.mlp.down"].keys() == {"host"}
        assert report["modules"]["layers.0.attention.qkv"].keys() == {"sim:0"}
    finally:
        engine.close()


def test_the_largest_steps_run_before_the_engine_is_ready(
    sim_model: Callable[..., Path],
) -> None:
    config = make_config(sim_model("llama"), SIM, warm_up_fully=True)
    engine = Engine(config)
    try:
        replayer = engine.lane.runner.replayer
        assert replayer is not None
        # Every number of rows that is captured: 1, 2, 4 and 8 of eight requests.
        assert list(replayer.warm_up_rows) == [1, 2, 4, 8]
        assert replayer.num_graphs == 4  # type: ignore[union-attr]
        tokens = config.scheduler.max_num_batched_tokens
        launches = [
            span
            for span in engine.lane.hands.accelerator.clock.timeline  # type: ignore[union-attr]
            if span.name == "embedding"
        ]
        assert tokens == 64
        assert len(launches) >= 6
        assert engine.times.num_steps == 0
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (OutOfMemory("sim:0: full."), OutOfMemory, "sim:0: full. Lower --max-num-batched-tokens"),
        (RuntimeError("can't allocate memory: 1 TB"), OutOfMemory, "--max-num-seqs"),
        (RuntimeError("a bad kernel"), InvalidModelError, "failed: a bad kernel"),
    ],
    ids=["full", "refused", "other"],
)
@pytest.mark.parametrize("device", ["cpu", SIM], ids=["cpu", "sim"])
def test_a_largest_step_that_only_runs_in_parts_is_no_start(
    sim_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    error: Exception,
    expected: type[Exception],
    words: str,
) -> None:
    """Its requests one by one would do, and each such step of a server would be a failed one."""
    execute = ModelRunner._execute

    def failing(self: ModelRunner, requests: Sequence[Any], result: Any) -> None:
        if len(requests) > 1:
            raise error
        execute(self, requests, result)

    monkeypatch.setattr(ModelRunner, "_execute", failing)
    with pytest.raises(expected, match=f"A step with [0-9]+ tokens of .*{re.escape(words)}"):
        Engine(make_config(sim_model("llama"), device, warm_up_fully=True))


def test_steps_that_leave_nothing_for_weights(sim_model: Callable[..., Path]) -> None:
    """What takes the accelerator's memory is said, with numbers that add up; more of it helps."""
    folder = sim_model("llama")
    with pytest.raises(OutOfMemory) as raised:
        Engine(make_config(folder, SIM.replace("256MiB", "2MiB"), dtype="float32"))
    text = str(raised.value)
    assert text.startswith("sim:0 has 1.84 MiB, and steps leave nothing of it for weights")
    sizes = {"MiB": 1.0, "KiB": 2.0**-10}
    found = re.findall(r"([0-9.]+) ([KM]iB)", text)
    total, *parts = [float(number) * sizes[unit] for number, unit in found[1:-1]]
    assert len(parts) >= 3 and sum(parts) == pytest.approx(total, abs=0.1)
    for name in ("the largest step", "captured steps", "the KV cache"):
        assert f"for {name}" in text
    lowered = make_config(
        folder,
        SIM.replace("256MiB", f"{1.1 * total + 4:.0f}MiB"),
        OffloadConfig(),
        dtype="float32",
    )
    Engine(lowered).close()


#: Of a KV cache and a context nobody gave a size.
FREE: dict[str, Any] = {"kv_cache_bytes": None, "max_model_len": None, "dtype": "float32"}


def needed_bytes(folder: Path) -> int:
    """What steps and the least KV cache need of an accelerator, beside weights."""
    with pytest.raises(OutOfMemory) as raised:
        Engine(make_config(folder, SIM.replace("256MiB", "2MiB"), **FREE))
    number = re.search(r"they need ([0-9.]+) MiB", str(raised.value))
    assert number is not None
    return int((float(number[1]) + 0.01) * (1 << 20))


def test_a_comfortable_cache_gives_way_to_weights(sim_model: Callable[..., Path]) -> None:
    """What does not fit beside a cache of an eighth of the accelerator is tried beside the
    least."""
    folder = sim_model("llama")
    # Vectors and few rows of matrices: an eighth of it all is many times as much.
    size = int((needed_bytes(folder) + (16 << 10)) / 0.92)
    engine = Engine(make_config(folder, SIM.replace("256MiB", f"{size}B"), **FREE))
    try:
        accounts = engine.lane.device.ledger.snapshot().accounts
        assert 0 < accounts["weights"] < 32 << 10
        assert 0 < accounts["kv_cache"] < size // 8
    finally:
        engine.close()


def test_a_refused_plan_keeps_nothing(
    sim_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though somebody keeps the exception."""
    opened: list[weakref.ref[Any]] = []
    open_checkpoint = loader.open_checkpoint

    def noted(*args: Any) -> Any:
        made = open_checkpoint(*args)
        opened.append(weakref.ref(made))
        return made

    folder = sim_model("llama")
    size = int((needed_bytes(folder) + (1 << 10)) / 0.92)
    monkeypatch.setattr(loader, "open_checkpoint", noted)
    offload = OffloadConfig(mode="stream")
    with pytest.raises(OutOfMemory, match=r"has .* for weights") as raised:
        Engine(make_config(folder, SIM.replace("256MiB", f"{size}B"), offload, **FREE))
    gc.collect()
    assert [reference() for reference in opened] == [None]
    assert raised.value.__traceback__ is not None
