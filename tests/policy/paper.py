"""``benchmarks/on_paper.py`` for tests: shapes of large models, and the two tables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load() -> ModuleType:
    if "on_paper" in sys.modules:
        return sys.modules["on_paper"]
    path = Path(__file__).parents[2] / "benchmarks" / "on_paper.py"
    spec = importlib.util.spec_from_file_location("on_paper", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look up the types of their fields.
    sys.modules["on_paper"] = module
    spec.loader.exec_module(module)
    return module
