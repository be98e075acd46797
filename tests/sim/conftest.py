"""Lets the tests of this folder import ``lane_harness``, which lies beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lane_harness import SIZES


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
