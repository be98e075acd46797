"""docs/claims.md says what the planner says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "claims.py"
    spec = importlib.util.spec_from_file_location("claims", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    sys.modules["claims"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_planner_says(claims: ModuleType) -> None:
    written = claims.DOCUMENT.read_text()
    assert written == "\n".join(claims.document()) + "\n", "run benchmarks/claims.py --write"


def test_what_no_schedule_reaches_stays_impossible(claims: ModuleType) -> None:
    verdicts = {
        one.claim: one.verdict
        for judges in claims.SECTIONS.values()
        for one in (judge() for judge in judges)
    }
    assert len(verdicts) == 17
    assert verdicts["the same: 8,192 tokens of prefill on the CPU in 150 ms"] == "impossible"
    assert verdicts["70B fp16 on an A100-80 with 24 to 64 GB of offload"] == "impossible"
    assert set(verdicts.values()) == {"reproduced", "impossible", "lacking data"}
