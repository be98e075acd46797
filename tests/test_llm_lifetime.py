"""The offline API: loading, what is held, and that nothing is left behind."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch import Tensor

from ambidex import LLM, SamplingParams
from ambidex.engine.engine import Engine
from ambidex.errors import (
    EngineDeadError,
    InvalidModelError,
    OptionError,
    OutOfMemory,
)
from ambidex.kernels.cpu.library import load
from ambidex.weights.hub import ResolvedModel
from llm_helpers import GREEDY, copy_model, ids_of, lane_threads, text_of


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def folder(tiny_model: Any) -> Path:
    path: Path = tiny_model("llama", tokenizer=True)
    return path


def test_one_parallel_device_has_no_effect_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(folder), tensor_parallel_size=1, gpu_memory_utilization=0.9) as llm:
        assert len(llm.generate("hello", GREEDY)) == 1
    assert "tensor_parallel_size" in caplog.text


def test_a_context_that_does_not_fit_shrinks_and_says_to_what(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LLM(str(folder), kv_cache_memory_bytes="64KiB") as llm:
        length = llm.info.max_model_len
        assert 16 <= length < 512
        assert f"{length} tokens instead of 512" in " ".join(llm.notes)
        assert f"{length} tokens instead of 512" in caplog.text
        (output,) = llm.generate("hello", replace(GREEDY, max_tokens=None))
        assert len(output.prompt_token_ids) + len(ids_of(output)) == length


def test_a_cap_on_the_context(folder: Path) -> None:
    for value, length in (("auto:100", 100), ("auto:131072", 512), ("auto", 512), ("0.25k", 250)):
        with LLM(str(folder), max_model_len=value) as llm:
            assert llm.info.max_model_len == length and llm.notes == []


def test_a_shrunk_context_is_a_context_like_any_other(folder: Path, tmp_path: Path) -> None:
    """Rope scalings that go by the longest context go by the one that is left."""
    scaling = {
        "rope_type": "longrope",
        "long_factor": [9.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 128,
    }
    model = copy_model(folder, tmp_path / "m", rope_scaling=scaling, rope_parameters=None)

    def score(llm: LLM) -> Any:
        return llm.generate("the rain in spain", scored)[0].outputs[0].cumulative_logprob

    scored = replace(GREEDY, logprobs=0)
    with LLM(str(model), kv_cache_memory_bytes="40KiB") as llm:
        length = llm.info.max_model_len
        assert 32 <= length <= 128
        shrunk = score(llm)
    with LLM(str(model), max_model_len=length) as llm:
        assert score(llm) == shrunk
    with LLM(str(model)) as llm:
        assert score(llm) != shrunk


def test_the_text_part_of_a_model_that_reads_images(tiny_model: Any, tmp_path: Path) -> None:
    """Its sizes are in an inner object, and may be left out where they are the architecture's."""
    source = tiny_model("gemma3_text", tokenizer=True)
    with LLM(str(source)) as llm:
        expected = ids_of(llm.generate("hello", GREEDY)[0])
    inner = json.loads((source / "config.json").read_text())
    del inner["max_position_embeddings"]
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": inner,
    }
    model = copy_model(source, tmp_path / "m")
    (model / "config.json").write_text(json.dumps(outer))
    with LLM(str(model), max_model_len="auto:1000") as llm:
        assert llm.info.max_model_len == 1000
        assert ids_of(llm.generate("hello", GREEDY)[0]) == expected


def test_the_revision_is_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve(name: str, *, revision: str | None = None) -> ResolvedModel:
        asked.append((name, revision))
        return ResolvedModel(folder, "hub", f"hub id {name}")

    monkeypatch.setattr("ambidex.runner.loader.resolve_model", resolve)
    with LLM("some/model", revision="v2"):
        pass
    assert asked == [("some/model", "v2")]


def test_unknown_and_refused_options(folder: Path) -> None:
    with pytest.raises((OptionError, TypeError), match="max_model_len"):
        LLM(str(folder), max_modle_len=64)
    with pytest.raises(OptionError, match="tensor_parallel_size"):
        LLM(str(folder), tensor_parallel_size=2)
    with pytest.raises(OptionError, match="block_size"):
        LLM(str(folder), block_size=7)
    assert lane_threads() == [] or len(lane_threads()) == 1  # the shared model's


def test_a_folder_without_a_tokenizer_leaves_nothing_behind(tiny_model: Any) -> None:
    before = lane_threads()
    with pytest.raises(InvalidModelError, match=r"no tokenizer\.json"):
        LLM(str(tiny_model("llama")))
    assert lane_threads() == before


def memory_of(llm: LLM) -> Sequence[weakref.ref[Any]]:
    """Weights, a layer of the KV cache, and what the recorded step writes."""
    runner = llm.engine.lane.runner
    weights = [parameter.data for _, parameter in runner.model.named_parameters()]
    tensors = [weight if isinstance(weight, Tensor) else weight.panels for weight in weights]
    tensors += runner.kv_cache.layer(0)
    assert runner.replayer is not None
    recording = runner.replayer._recording
    assert recording is not None
    tensors += [recording.hidden, recording.logits]
    return [weakref.ref(tensor) for tensor in tensors]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_context_manager_frees_everything(folder: Path, quantization: str | None) -> None:
    before = lane_threads()
    options = {"quantization": quantization, "cpu_threads": 3}
    with LLM(str(folder), **options) as llm:
        expected = ids_of(llm.generate("hello", GREEDY)[0])
        tensors = memory_of(llm)
        ledger = llm.engine.lane.device.ledger
        assert ledger.used_bytes > 0
        stream = llm.stream("hello", GREEDY)
        next(stream)
        assert lane_threads() != before
    gc.collect()
    assert [reference() for reference in tensors] == [None] * len(tensors)
    assert ledger.used_bytes == 0
    assert lane_threads() == before
    # Closing again is harmless; using it is one clear error, an open stream's too.
    llm.close()
    for use in (lambda: llm.generate("hello"), lambda: next(stream), lambda: llm.engine):
        with pytest.raises(EngineDeadError, match="closed"):
            use()
    with LLM(str(folder), **options) as second:
        assert ids_of(second.generate("hello", GREEDY)[0]) == expected


@pytest.mark.parametrize("starter", ["native", "python"])
def test_threads_that_cannot_be_had(
    folder: Path, monkeypatch: pytest.MonkeyPatch, starter: str
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(
            "Resource temporarily unavailable" if starter == "native" else "can't start new thread"
        )

    if starter == "native":
        library = SimpleNamespace(Context=refuse, supported_levels=load().supported_levels)
        monkeypatch.setattr("ambidex.kernels.cpu.base.load", lambda: library)
    else:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OutOfMemory, match="refused to start"):
        LLM(str(folder), cpu_threads=2, kv_cache_memory_bytes="1MiB")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_the_system_refuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    before = lane_threads()
    monkeypatch.setattr("ambidex.llm.default_frontend", refuse)
    with pytest.raises(OutOfMemory, match=r"refused to give more memory.*ulimit -v"):
        LLM(str(folder))
    assert lane_threads() == before


def test_a_mistake_of_ours_is_no_lack_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("ambidex.runner.loader.load_weights", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        LLM(str(folder))


def test_closing_while_others_generate_and_close(folder: Path) -> None:
    llm = LLM(str(folder), cpu_threads=2, kv_cache_memory_bytes="1MiB")
    prompts = ["hello"] * 8
    many = replace(GREEDY, max_tokens=200)
    with ThreadPoolExecutor(6) as pool:
        generating = [pool.submit(llm.generate, prompts, many) for _ in range(2)]
        while not llm.engine.times.num_steps:
            time.sleep(0.001)
        closing = [pool.submit(llm.close) for _ in range(4)]
        for closed in closing:
            closed.result(timeout=60)
        for generated in generating:
            with pytest.raises(EngineDeadError, match="closed"):
                generated.result(timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_to_load_for_itself(folder: Path) -> None:
    code = f"""
import os, signal
from ambidex import LLM
from ambidex.errors import EngineDeadError
llm = LLM({str(folder)!r}, cpu_threads=2, kv_cache_memory_bytes="1MiB")
llm._lock.acquire()  # as a thread that generates may have it during the fork
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        llm.generate("hello")
    except EngineDeadError as error:
        assert "Load the model in the child" in str(error), error
        os._exit(0)
    os._exit(1)
status = os.waitpid(child, 0)[1]
assert status == 0, status
llm._lock.release()
llm.generate("hello")
llm.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_snapshot_says_where_memory_is(tiny_model: Any, kind: str) -> None:
    folder = str(tiny_model(kind, tokenizer=True))
    with LLM(folder, kv_cache_memory_bytes="1MiB", quantization="int8") as llm:
        found = llm.memory_snapshot()
        weights = {p: w.held_bytes for p, w in llm.engine.lane.runner.model.named_parameters()}
        (host,) = found["memories"]
        assert host["name"] == "host"
        assert host["capacity_bytes"] == host["reserved_bytes"] + host["free_bytes"]
        assert host["reserved_bytes"] == sum(host["accounts"].values())
        assert host["accounts"]["kv_cache"] <= 1 << 20
        assert host["accounts"]["weights"] == sum(weights.values())
        assert host["accounts"]["runtime"] > 50 << 20
        # Each module with its device, to the byte.
        assert found["modules"]["layers.1.mlp.gate_up"] == {
            "host": weights["layers.1.mlp.gate_up" + (".weight" if kind == "llama" else "")]
        }
        assert sum(sizes["host"] for sizes in found["modules"].values()) == found["cpu_weights"]
        assert found["cpu_weights"] == sum(weights.values())
        assert (found["gpu_weights"], found["cpu_weight_share"]) == (0, 1.0)
        assert found["warnings"] == []
        assert json.loads(json.dumps(found)) == found
        # It tells of now: what is reserved later counts.
        llm.engine.lane.ledgers[0].reserve("staging", "ring", 4096)
        assert llm.memory_snapshot()["memories"][0]["accounts"]["staging"] == 4096
    with pytest.raises(EngineDeadError, match="closed"):
        llm.memory_snapshot()


def test_an_error_inside_the_context_frees_too(folder: Path) -> None:
    before = lane_threads()
    tensors: list[weakref.ref[Any]] = []

    def fail() -> None:
        with LLM(str(folder)) as llm:
            tensors.extend(memory_of(llm))
            next(llm.stream("hello", GREEDY))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    gc.collect()
    assert tensors
    assert [reference() for reference in tensors] == [None] * len(tensors)
    assert lane_threads() == before


def test_native_threads_end_with_their_llm(folder: Path) -> None:
    """At once, though somebody still holds the engine."""

    def num_threads() -> int:
        return psutil.Process().num_threads()

    def used(llm: LLM) -> Engine:
        llm.generate("hello", GREEDY)
        return llm.engine

    # PyTorch's own threads stay, once it has made them.
    with LLM(str(folder), cpu_threads=4) as llm:
        used(llm)
    before = num_threads()
    with LLM(str(folder), cpu_threads=4) as llm:
        engine = used(llm)
        # The lane's thread is the first of the four.
        assert num_threads() == before + 4
    # The system lists a thread for a moment after it was joined.
    deadline = time.monotonic() + 30
    while num_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_threads() == before
    assert engine.lane.device.ledger.used_bytes == 0


def test_a_failed_load_keeps_no_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though somebody keeps the exception."""
    with LLM(str(folder), cpu_threads=4):
        before = threading.active_count(), psutil.Process().num_threads() - 4

    def fail(*_: object) -> None:
        raise InvalidModelError("the first step failed")

    monkeypatch.setattr("ambidex.runner.loader.warm_up", fail)
    errors = []
    for _ in range(2):
        with pytest.raises(InvalidModelError) as caught:
            LLM(str(folder), cpu_threads=4)
        errors.append(caught.value)
    deadline = time.monotonic() + 30
    while psutil.Process().num_threads() > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert psutil.Process().num_threads() <= before[1]
    assert len(errors) == 2


@pytest.mark.model
def test_the_default_model(smollm2: Path) -> None:
    """Real weights: right answers, and their memory given back to the system."""
    process = psutil.Process()
    with LLM(str(smollm2), max_model_len=512, max_num_seqs=4, dtype="float32") as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer, again = llm.chat([question] * 2, SamplingParams(temperature=0.0, max_tokens=24))
        assert "Paris" in text_of(answer)
        assert ids_of(answer) == ids_of(again)
        assert answer.outputs[0].finish_reason == "stop"
        (counted,) = llm.generate(
            "1, 2, 3, 4, 5,", SamplingParams(temperature=0.0, max_tokens=6, stop=" 8")
        )
        assert text_of(counted).startswith(" 6, 7,")
        loaded = process.memory_info().rss
        weights = llm.memory_snapshot()["cpu_weights"]
    gc.collect()
    assert weights > 400 << 20
    assert loaded - process.memory_info().rss > 0.8 * weights
