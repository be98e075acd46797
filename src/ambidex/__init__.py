"""Ambidex: serve large language models with the CPU and the GPU of a machine as one engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ambidex.engine.output import CompletionOutput, RequestOutput
    from ambidex.llm import LLM
    from ambidex.request import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

# Threads of PyTorch's OpenMP runtime spin while they wait for each other, by default so long that
# two programs on the same cores bring each other to a halt: a step that takes 0.1 s alone took
# more than 4 s beside another. The runtime reads this when PyTorch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Looked up when asked for, so that `import ambidex` and the command line start at once.
_LAZY = {
    "LLM": "ambidex.llm",
    "SamplingParams": "ambidex.request",
    "RequestOutput": "ambidex.engine.output",
    "CompletionOutput": "ambidex.engine.output",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'ambidex' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(module), name)
