"""Both hands at once, on the virtual clock: how long steps take beside what their parts take.

Times are those of the cost model, so that they are the same on every machine: where a bound is
missed, work waits that need not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lane_harness import Chooser, Ran, make_config, num_rows, place_by, prompts, run

from ambidex.config import OffloadConfig
from ambidex.layers.module import Experts, Parameter, Place, Table

#: The accelerator is as fast as the link, or ``speed`` times as fast; a core of the host, too.
LINK = 10e9
DEVICE = "sim:memory=256MiB,core_bandwidth=10GB/s,core_flops=50G,link=10GB/s,latency=1us,speed={}"

LAYERS = ("layers.*",)
MLPS = ("*.mlp.*",)

CAPTURED = pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])


@pytest.fixture(scope="module")
def folder(sim_model: Callable[..., Path]) -> Path:
    """Enough layers that what begins and ends a step is little, and matrices beside whose time a
    copy's latency is."""
    return sim_model("llama", hidden_size=256, intermediate_size=768, num_hidden_layers=12)


@pytest.fixture
def measure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measured]:
    def make(
        speed: float, *, choose: Chooser | None = None, enforce_eager: bool = False, **offload: Any
    ) -> Measured:
        if choose is not None:
            place_by(monkeypatch, choose)
        config = make_config(
            folder,
            DEVICE.format(speed),
            OffloadConfig(**offload),
            dtype="float32",
            enforce_eager=enforce_eager,
        )
        return Measured(run(config, prompts((8,)), 14))

    return make


class Measured:
    """The steady steps of one request: seconds of a step and of its parts."""

    def __init__(self, ran: Ran) -> None:
        assert ran.errors == [None]
        self.ran = ran
        self.steps = [step for step in ran.steady(1) if step.rows == (1, 1)][2:]
        assert len(self.steps) >= 8
        self.step_s = sum(step.seconds for step in self.steps) / len(self.steps)
        busy = ran.busy(self.steps)
        self.device_s = busy["compute"]
        self.host_s = busy.get("host", 0.0)
        self.link_s = busy.get("copy_in", 0.0)
        # Both directions of what is computed.
        self.crossing_s = busy["copy_in_small"] + busy["copy_out"]
        for step in self.steps:
            assert step.streamed_bytes == ran.plan((1, 1))

    def __str__(self) -> str:
        parts = ("step_s", "device_s", "host_s", "link_s", "crossing_s")
        return ", ".join(f"{part} {getattr(self, part) * 1e3:.3f} ms" for part in parts)


@pytest.mark.parametrize(("prefetch_step", "enforce_eager"), [(1, False), (1, True), (3, False)])
def test_streaming_overlaps(
    measure: Callable[..., Measured], prefetch_step: int, enforce_eager: bool
) -> None:
    """The link takes as long as the computing: a step takes little longer than either."""
    got = measure(
        1.0,
        patterns=LAYERS,
        mode="stream",
        prefetch_step=prefetch_step,
        enforce_eager=enforce_eager,
    )
    assert 0.9 < got.link_s / got.device_s < 1.1, got
    assert got.step_s <= 1.15 * max(got.link_s, got.device_s), got
    bytes_per_s = sum(step.streamed_bytes for step in got.steps) / (got.step_s * len(got.steps))
    assert bytes_per_s >= 0.85 * LINK


@pytest.mark.parametrize("speed", [0.25, 8.0], ids=["computing", "link"])
def test_a_step_is_bound_by_the_longer(measure: Callable[..., Measured], speed: float) -> None:
    got = measure(speed, patterns=LAYERS, mode="stream")
    longer, shorter = max(got.link_s, got.device_s), min(got.link_s, got.device_s)
    assert longer > 3 * shorter, got
    assert (got.link_s > got.device_s) == (speed > 1)
    assert got.step_s <= 1.15 * longer, got


def test_without_overlap_it_takes_both(measure: Callable[..., Measured]) -> None:
    """What the bounds above would miss: one after the other."""
    got = measure(1.0, patterns=LAYERS, mode="stream", is_async=False)
    both = got.link_s + got.device_s + got.crossing_s
    assert got.step_s == pytest.approx(both, rel=0.01), got
    assert got.step_s > 1.9 * max(got.link_s, got.device_s), got


@CAPTURED
def test_mlps_on_the_host(measure: Callable[..., Measured], enforce_eager: bool) -> None:
    """One waits for the other, and for little else."""
    got = measure(4.0, patterns=MLPS, mode="compute", enforce_eager=enforce_eager)
    assert got.link_s == 0
    assert got.host_s > got.device_s > 0
    assert got.step_s <= 1.1 * (got.device_s + got.host_s), got


@CAPTURED
def test_split(measure: Callable[..., Measured], enforce_eager: bool) -> None:
    """Every matrix in thirds: what stays, what is copied and what the host computes take as long
    as each other, all at once."""
    got = measure(2.5, choose=thirds, enforce_eager=enforce_eager)
    parts = [got.device_s, got.link_s, got.host_s]
    assert max(parts) < 1.35 * min(parts), got
    assert got.step_s <= 1.15 * max(parts), got
    assert got.step_s < 0.5 * sum(parts), got
    counts = got.steps[0].counts
    assert counts["rows_resident"] > 0 < counts["rows_host"]


def thirds(path: str, parameter: Parameter) -> Place | None:
    if isinstance(parameter, Experts | Table):
        return None
    rows = num_rows(parameter)
    part = rows // 3 // 64 * 64
    return Place(rows - 2 * part, lambda _: part)


def test_the_same_times_every_time(measure: Callable[..., Measured]) -> None:
    """Nothing of this machine is in them."""
    first = measure(2.5, choose=thirds)
    again = measure(2.5, choose=thirds)
    assert [step.seconds for step in first.ran.steps] == [step.seconds for step in again.ran.steps]
    assert sorted(first.ran.timeline, key=str) == sorted(again.ran.timeline, key=str)


def test_a_limited_link_is_as_slow_as_asked(measure: Callable[..., Measured]) -> None:
    free = measure(8.0, patterns=LAYERS, mode="stream")
    got = measure(8.0, patterns=LAYERS, mode="stream", link_limit_bytes_per_s=LINK / 4)
    per_step = got.steps[0].streamed_bytes
    assert got.step_s == pytest.approx(per_step / (LINK / 4), rel=0.1)
    assert got.step_s > 3 * free.step_s
