"""What the tests of the offline API share."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

from ambidex import LLM, RequestOutput, SamplingParams

#: Texts of the tiny model run on to their limit: the random weights seldom say "end".
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def assert_idle(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert not llm.engine.has_work


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


def ids_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def lane_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("lane-")]


def copy_model(source: Path, target: Path, **changes: Any) -> Path:
    """The model with other fields in its config.json; None removes one."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target
