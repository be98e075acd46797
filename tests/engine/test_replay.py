"""A recorded step: the same bits as its calls, and no Python a layer."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ambidex.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ambidex.engine.engine import Engine
from ambidex.request import EngineRequest, SamplingParams

KINDS = ("llama", "mistral", "gemma3_text", "qwen3_moe")

Trace = dict[str, list[tuple[int, float]]]


def make_config(folder: Path, **changes: Any) -> EngineConfig:
    scheduler = {
        name: changes.pop(name)
        for name in ("max_num_seqs", "max_num_batched_tokens")
        if name in changes
    }
    return EngineConfig(
        model=ModelConfig(str(folder), max_model_len=320, **changes.pop("model", {})),
        cache=CacheConfig(kv_cache_bytes=32 << 20),
        scheduler=SchedulerConfig(**scheduler),
        cpu_threads=2,
        **changes,
    )


def generate(engine: Engine, num_prompts: int = 7, num_tokens: int = 12) -> Trace:
    """What an engine says to prompts of uneven lengths, all at once."""
    traces: Trace = {}
    for index in range(num_prompts):
        name = f"request-{index}"
        prompt = [3 + (7 * index + 5 * i) % 500 for i in range(1 + 23 * index)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
        traces[name] = []
        engine.add_request(EngineRequest(name, prompt, params, 0.0))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            entries = output.logprobs or []
            for token, entry in zip(output.new_token_ids, entries, strict=True):
                traces[output.request_id].append((token, entry.logprob))
    return traces


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_replayed_and_eager_steps_agree(
    tiny_model: Callable[[str], Path], kind: str, quantization: str | None
) -> None:
    model = {"quantization": quantization}
    replaying = Engine(make_config(tiny_model(kind), model=model))
    eager = Engine(make_config(tiny_model(kind), model=model, enforce_eager=True))
    try:
        ours, theirs = generate(replaying), generate(eager)
        assert ours == theirs
        replayer = replaying.lane.runner.replayer
        assert eager.lane.runner.replayer is None
        assert replayer is not None
        # The warm-up's step, then one replay a step.
        assert replayer.num_replays == replaying.times.num_steps + 1
    finally:
        replaying.close()
        eager.close()


def test_a_replay_chooses_the_best_tokens(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(make_config(tiny_model("llama")))
    try:

        def not_again(logits: object) -> None:
            raise AssertionError("the replay has chosen already")

        monkeypatch.setattr(engine.lane.device.kernels, "greedy", not_again)
        replayed = generate(engine)
    finally:
        engine.close()
    eager = Engine(make_config(tiny_model("llama"), enforce_eager=True))
    try:
        assert generate(eager) == replayed
    finally:
        eager.close()


@pytest.mark.parametrize(("budget", "seqs"), [(16, 16), (17, 3), (64, 8)])
def test_limits_of_a_recording(tiny_model: Callable[[str], Path], budget: int, seqs: int) -> None:
    """Any number of tokens and sequences up to the limits, equal limits too."""
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
    replaying = Engine(make_config(tiny_model("llama"), **limits))
    eager = Engine(make_config(tiny_model("llama"), enforce_eager=True))
    try:
        assert generate(replaying) == generate(eager)
        assert replaying.lane.runner.replayer is not None
        assert replaying.lane.runner.replayer.num_replays > 12
    finally:
        replaying.close()
        eager.close()


def _deeper(folder: Path, target: Path, num_layers: int) -> Path:
    """The same model with its two layers repeated."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if ".layers.1." in name:
            for layer in range(2, num_layers):
                copy = tensors[name].clone()
                tensors[name.replace(".layers.1.", f".layers.{layer}.")] = copy
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _python_calls(engine: Engine) -> tuple[int, int]:
    """Python and C functions called by the runner in one decode step, and starts of the lane's
    threads."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engine.add_request(EngineRequest("counted", [5, 6, 7], params, 0.0))
    for _ in range(4):
        engine.step()
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    runner = engine.lane.runner
    execute, runs = runner.execute, []

    def counted(decision: Any) -> Any:
        before = engine.lane.device.kernels.num_runs  # type: ignore[attr-defined]
        sys.setprofile(profile)
        try:
            return execute(decision)
        finally:
            sys.setprofile(None)
            runs.append(engine.lane.device.kernels.num_runs - before)  # type: ignore[attr-defined]

    runner.execute = counted  # type: ignore[method-assign]
    engine.step()
    return count, runs[0]


def test_the_arena_does_not_grow_with_layers(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A layer's results lie where an earlier layer's lay."""
    deep = _deeper(tiny_model("llama"), tmp_path / "deep", 10)
    sizes = []
    for folder in (tiny_model("llama"), deep):
        engine = Engine(make_config(folder))
        replayer = engine.lane.runner.replayer
        assert replayer is not None
        sizes.append(replayer.arena_bytes)
        engine.close()
    assert 0 < sizes[0] == sizes[1]


def test_python_calls_do_not_grow_with_layers(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shallow = tiny_model("llama")
    deep = _deeper(shallow, tmp_path / "deep", 10)
    counts = {}
    for name, folder, is_eager in (
        ("shallow", shallow, False),
        ("deep", deep, False),
        ("shallow eager", shallow, True),
        ("deep eager", deep, True),
    ):
        engine = Engine(make_config(folder, enforce_eager=is_eager))
        counts[name] = _python_calls(engine)
        engine.close()
    assert counts["deep"] == counts["shallow"]
    assert counts["deep eager"][0] > counts["shallow eager"][0] + 8 * 20
    assert counts["deep eager"][1] > counts["shallow eager"][1] + 8 * 5
    assert counts["deep"][1] <= 3
