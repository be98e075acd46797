"""What low-bit weights cost in quality on the default model: benchmarks/fidelity.py, in small."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ambidex import LLM
from ambidex.kernels.cpu.float_linear import FloatWeight
from ambidex.kernels.cpu.quantized_linear import PackedWeight

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 1024
CONTEXT = 512


@pytest.fixture(scope="module")
def fidelity() -> ModuleType:
    path = ROOT / "benchmarks" / "fidelity.py"
    spec = importlib.util.spec_from_file_location("fidelity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look up the types of their fields.
    sys.modules["fidelity"] = module
    spec.loader.exec_module(module)
    return module


def weight_types(llm: LLM) -> set[type]:
    parameters = llm.engine.lane.runner.model.named_parameters()
    return {type(parameter.data) for _, parameter in parameters if parameter.is_matrix}


@pytest.mark.model
def test_low_bits_change_little(smollm2: Path, fidelity: ModuleType, record_property: Any) -> None:
    """As the file holds it, against float32 arithmetic with the same numbers."""
    text = (ROOT / "tests" / "data" / "northanger_abbey_opening.txt").read_text(encoding="utf-8")
    with (
        fidelity.load(str(smollm2), CONTEXT) as ours,
        fidelity.load(str(smollm2), CONTEXT, dtype="float32") as reference,
    ):
        assert weight_types(ours) == {PackedWeight}
        assert ours.engine.lane.kv_dtype == "float16"
        assert weight_types(reference) == {FloatWeight}
        token_ids = ours.get_tokenizer().encode(text)[:NUM_TOKENS]
        assert len(token_ids) == NUM_TOKENS
        found = fidelity.compare(ours, reference, token_ids, CONTEXT)
    record_property("perplexity_change", found.perplexity_change)
    record_property("mean_kl", found.mean_kl)
    print(found)
    # The first token of a window is scored by none.
    assert found.num_tokens == NUM_TOKENS - NUM_TOKENS // CONTEXT
    assert 1 < found.reference_perplexity < 60
    assert abs(found.perplexity_change) < 0.01
    # Above zero: two different computations were compared.
    assert 0 < found.mean_kl < 0.005
    assert math.isfinite(found.max_kl)
    assert found.same_best > 0.95
