"""Lets the tests of this folder import ``lane_harness``, which lies beside them, and the
quantised checkpoints that the tests of weights make."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "weights")]

from lane_harness import SIZES  # noqa: E402


@pytest.fixture(scope="session")
def sim_model(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """``sim_model(kind, **changes)``: a folder with a model whose matrices can be cut."""

    def make(kind: str, **changes: int) -> Path:
        sizes = {**SIZES, **changes}
        if kind == "gemma3_text":
            # It names the kind of each of its four layers.
            del sizes["num_hidden_layers"]
        return tiny_model(kind, **sizes)

    return make
