"""The default model against transformers: greedy tokens on the float32 path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ambidex import LLM, SamplingParams

DATA = Path(__file__).parent.parent / "data"

#: Where the reference's best two logits are closer than this, either may win.
GAP = 1e-3


@pytest.fixture(scope="module")
def golden() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DATA / "golden_smollm2.json").read_text())["rows"]
    return rows


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Any:
    with LLM(str(smollm2), dtype="float32", kv_cache_memory_bytes="1GiB") as loaded:
        # The file's low bits are numbers again.
        assert loaded.engine.lane.kv_dtype == "float32"
        yield loaded


def num_comparable(gaps: list[float]) -> int:
    """Positions up to and with the first at which the reference itself is undecided."""
    return next((i for i, gap in enumerate(gaps) if gap < GAP), len(gaps))


@pytest.mark.model
@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_golden_tokens(
    llm: LLM, golden: list[dict[str, Any]], as_text: bool, record_property: Any
) -> None:
    assert len(golden) >= 12
    assert max(len(row["prompt_ids"]) for row in golden) >= 1500
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = [
        row["prompt"] if as_text else {"prompt_token_ids": row["prompt_ids"]} for row in golden
    ]
    outputs = llm.generate(prompts, params)
    compared = 0
    for row, output in zip(golden, outputs, strict=True):
        assert output.prompt_token_ids == row["prompt_ids"], row["name"]
        count = num_comparable(row["gaps"])
        assert output.outputs[0].token_ids[:count] == row["tokens"][:count], row["name"]
        compared += count
    record_property("positions_compared", compared)
    print(f"{len(golden)} prompts near-identical, {compared} of {64 * len(golden)} positions")
    assert compared >= 0.9 * 64 * len(golden)
