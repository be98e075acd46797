"""An engine on a machine whose speed is known says what to expect, and compares."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ambidex import LLM, SamplingParams
from ambidex.config import EngineConfig
from ambidex.device import profile_cache
from ambidex.device.profile_cache import known_machine, this_machine
from ambidex.engine.foretold import JUDGED_STEPS
from ambidex.engine.summary import describe
from ambidex.errors import InvalidModelError, ModelNotFoundError, OutOfMemory
from ambidex.memory.operations import StepLoad
from ambidex.memory.profile import HardwareProfile, Processor, ProductRate
from ambidex.options import resolve_keywords
from ambidex.runner.foretelling import host_profile
from ambidex.runner.loader import load_lane

SLOW = HardwareProfile(
    "slow",
    Processor("slow", 1 << 30, 1e6, {"float32": ProductRate(((1, 1e6),))}),
    origin="measured",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AMBIDEX_CACHE", str(tmp_path))
    return tmp_path


def config_of(model: Path) -> EngineConfig:
    return resolve_keywords({"model": str(model)}, {}).engine_config()


def test_a_known_machine_foretells_and_is_compared(
    tiny_model: Callable[..., Path], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model("llama", tokenizer=True)
    this_machine(config_of(folder), cache, measure=lambda *_: SLOW)
    with LLM(model=str(folder), enable_prefix_caching=False) as llm:
        expected = llm.info.expected
        assert [name for name in expected if name.startswith("first token of a prompt of")]
        assert expected["a token of each, 128 requests"] > expected["a token, 1 request"] > 0
        assert any(line.startswith("expected: a token, 1 request") for line in describe(llm.info))
        predict = llm.engine.lane.predict
        assert predict is not None
        assert predict(StepLoad(1, 1, 64)) >= expected["a token, 1 request"] * 0.5
        assert llm.memory_snapshot()["speed"] == {}
        params = SamplingParams(max_tokens=JUDGED_STEPS, ignore_eos=True, temperature=0)
        prompt = {"prompt_token_ids": [1, 2, 3]}
        with caplog.at_level(logging.WARNING):
            llm.generate([prompt, prompt], params)
        decode = llm.memory_snapshot()["speed"]["decode"]
        assert decode["num_steps"] == JUDGED_STEPS - 1
        # The profile is a thousand times too slow, and somebody must say so.
        assert decode["measured_over_predicted"] < 0.5
        assert "instead of the predicted" in caplog.text


def test_an_unknown_machine_is_not_measured_for_one_answer(
    tiny_model: Callable[..., Path], cache: Path
) -> None:
    with LLM(model=str(tiny_model("llama", tokenizer=True))) as llm:
        assert llm.info.expected == {}
        assert llm.engine.lane.predict is None
        llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=4))
        assert llm.memory_snapshot()["speed"] == {}
    assert list(cache.glob("machine-*")) == []


def test_a_server_measures_once_and_starts_without_a_measurement(
    tiny_model: Callable[..., Path],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = replace(config_of(tiny_model("llama")), warm_up_fully=True)
    measured = []

    def measure(*arguments: object) -> HardwareProfile:
        measured.append(arguments)
        return SLOW

    def fail(*_: object) -> HardwareProfile:
        raise OutOfMemory("no memory for that")

    monkeypatch.setattr(profile_cache, "_measure", fail)
    assert host_profile(config) is None
    assert "no memory for that" in caplog.text
    monkeypatch.setattr(profile_cache, "_measure", measure)
    assert host_profile(config) == host_profile(config) == known_machine(config, cache) == SLOW
    assert len(measured) == 1


@pytest.mark.parametrize("broken", [False, True])
def test_what_is_no_model_fails_before_anything_is_measured(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    def measure(*_: object) -> HardwareProfile:
        raise AssertionError("it was measured")

    monkeypatch.setattr(profile_cache, "_measure", measure)
    if broken:
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text("null")
    config = replace(config_of(tmp_path / "model"), warm_up_fully=True)
    with pytest.raises((ModelNotFoundError, InvalidModelError)):
        load_lane(config)
    assert not list(cache.glob("machine-*"))


def test_beside_an_accelerator_the_plan_foretells(tiny_model: Callable[..., Path]) -> None:
    sim = "sim:memory=64MiB,core_bandwidth=10GB/s,core_flops=50G"
    model = str(tiny_model("llama", tokenizer=True))
    options: dict[str, Any] = {"model": model, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with LLM(device=f"{sim},clock=real", **options) as llm:
        assert llm.info.expected["a token of each, 4 requests"] > 0
        assert llm.engine.lane.predict is not None
    with LLM(device=f"{sim},clock=virtual", **options) as llm:
        assert llm.info.expected["a token of each, 4 requests"] > 0
        # Its time is not that on the wall.
        assert llm.engine.lane.predict is None
