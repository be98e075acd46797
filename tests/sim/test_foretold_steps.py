"""The cost model against the simulated accelerator's clock: what a step was expected to take, and
took, in every mode, to whichever side it leans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lane_harness import make_config, prompts, run

from ambidex.config import OffloadConfig
from ambidex.memory.cost_model import CostModel, StepLoad
from ambidex.memory.placement import PlacementPlan
from ambidex.memory.split import SplitTable
from ambidex.runner import placing

DEVICE = (
    "sim:memory=256MiB,core_bandwidth=10GB/s,core_flops=50G,link={link},latency=1us,speed={speed}"
)


@pytest.fixture(scope="module")
def folder(sim_model: Callable[..., Path]) -> Path:
    return sim_model("llama", hidden_size=256, intermediate_size=768, num_hidden_layers=12)


@pytest.mark.parametrize(
    ("mode", "patterns", "speed", "link"),
    [
        ("stream", ("layers.*",), 1.0, "10GB/s"),
        ("stream", ("layers.*",), 0.2, "10GB/s"),
        ("stream", ("layers.*",), 8.0, "1GB/s"),
        ("stream", ("layers.6:",), 1.0, "3GB/s"),
        ("compute", ("*.mlp",), 4.0, "10GB/s"),
        ("compute", ("layers.*",), 4.0, "10GB/s"),
        ("split", ("layers.*",), 1.0, "10GB/s"),
        ("split", ("layers.*",), 0.25, "4GB/s"),
        ("split", ("layers.*",), 4.0, "1GB/s"),
    ],
)
def test_a_step_takes_what_was_foretold(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    patterns: tuple[str, ...],
    speed: float,
    link: str,
) -> None:
    seen: dict[str, Any] = {}

    def plan(shape: Any, device: int, host: int, offload: Any, profile: Any, mix: Any) -> Any:
        seen.update(
            plan=plan_placement(shape, device, host, offload, profile, mix),
            shape=shape,
            profile=profile,
        )
        return seen["plan"]

    plan_placement = placing.plan_placement
    monkeypatch.setattr(placing, "plan_placement", plan)
    config = make_config(
        folder,
        DEVICE.format(link=link, speed=speed),
        OffloadConfig(patterns=patterns, mode=mode),
        dtype="float32",
    )
    ran = run(config, prompts((8,)), 14)
    steps = [step for step in ran.steady(1) if step.rows == (1, 1)][2:]
    took = sum(step.seconds for step in steps) / len(steps)
    placed: PlacementPlan = seen["plan"]
    assert placed.mode == mode
    model = CostModel(
        seen["profile"], seen["shape"], placed.places, ring_bytes=placed.staging_bytes
    )
    table = placed.split_table or SplitTable(((1, 0.0),))
    expected = model.step(StepLoad(1, 1, 16), table)
    assert 0.92 <= expected.seconds / took <= 1.08, (expected.seconds / took, expected, took)
