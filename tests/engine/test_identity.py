"""Exactness: the same bits whatever else happens. Each test also asserts, from the engine's own
counters, that the path in question was taken."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ambidex.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from ambidex.engine.engine import Engine
from ambidex.engine.scheduler import SchedulerStats
from ambidex.errors import InvalidModelError
from ambidex.kernels.cpu.float_linear import FloatWeight
from ambidex.kernels.cpu.quantized_linear import PackedWeight
from ambidex.request import EngineRequest, SamplingParams

#: Models, and the options that each runs with in all tests.
SUBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "gemma3_text": ("gemma3_text", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "llama-int8": ("llama", {"quantization": "int8"}),
    "llama-int8-kv_int8": ("llama", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "qwen3_moe-int8": ("qwen3_moe", {"quantization": "int8", "kv_cache_dtype": "float16"}),
}

#: A token and the bits of its log probabilities.
Trace = list[tuple[int, float, tuple[tuple[int, float], ...]]]


def make_config(folder: Path, **changes: Any) -> EngineConfig:
    names = {
        "model": ("dtype", "quantization"),
        "cache": ("block_size", "enable_prefix_caching", "num_blocks", "kv_cache_dtype"),
        "scheduler": ("max_num_seqs", "max_num_batched_tokens"),
    }
    parts: dict[str, Any] = {
        part: {name: changes.pop(name) for name in each if name in changes}
        for part, each in names.items()
    }
    cache = {"kv_cache_bytes": 64 << 20, "enable_prefix_caching": False, **parts["cache"]}
    if "num_blocks" in cache:
        cache["kv_cache_bytes"] = None
    return EngineConfig(
        model=ModelConfig(str(folder), max_model_len=320, **parts["model"]),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**parts["scheduler"]),
        cpu_threads=changes.pop("cpu_threads", 2),
        **changes,
    )


@dataclass
class Outcome:
    traces: list[Trace]
    stats: SchedulerStats
    #: Forms that the model's matrices are held in.
    weights: set[type]
    kv_dtype: str
    #: Steps of requests, and those of them that were one replay of the recording.
    num_steps: int
    num_replays: int


def weight_types(engine: Engine) -> set[type]:
    found = set()
    for _, parameter in engine.lane.runner.model.named_parameters():
        if parameter.is_matrix:
            held = parameter.data if isinstance(parameter.data, list) else [parameter.data]
            found |= {type(weight) for weight in held}
    return found


def prompts(seed: int = 0) -> list[list[int]]:
    """Uneven lengths, around every tile and block boundary that matters."""
    choose = random.Random(seed)
    lengths = (1, 3, 8, 17, 33, 63, 64, 65, 100, 150, 129, 40)
    return [[choose.randrange(3, 500) for _ in range(length)] for length in lengths]


def params(index: int, num_tokens: int = 24) -> SamplingParams:
    """Greedy, and sampled in two ways."""
    common: dict[str, Any] = {
        "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 2, "seed": index,
    }  # fmt: skip
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
    ]
    return SamplingParams(**common, **kinds[index % 3])


def run(
    config: EngineConfig, inputs: Sequence[list[int]], *, together: bool, rounds: int = 1
) -> Outcome:
    """All requests at once, or one after the other; the last round's traces."""
    engine = Engine(config)
    try:
        for number in range(rounds):
            traces: dict[str, Trace] = {}
            groups = [list(range(len(inputs)))] if together else [[i] for i in range(len(inputs))]
            for group in groups:
                for index in group:
                    name = f"{number}.{index}"
                    traces[name] = []
                    engine.add_request(EngineRequest(name, inputs[index], params(index), 0.0))
                while engine.has_work:
                    for output in engine.step():
                        assert output.error is None
                        for token, entry in zip(
                            output.new_token_ids, output.logprobs or [], strict=True
                        ):
                            traces[output.request_id].append(
                                (token, entry.logprob, tuple(entry.top))
                            )
        replayer = engine.lane.runner.replayer
        return Outcome(
            list(traces.values()),
            engine.stats(),
            weight_types(engine),
            engine.lane.kv_dtype,
            engine.times.num_steps,
            # Without the warm-up's.
            replayer.num_replays - 1 if replayer is not None else 0,
        )
    finally:
        engine.close()


@dataclass
class Subject:
    """A model with options, and what it says to each prompt alone."""

    folder: Path
    options: dict[str, Any]
    alone: Outcome

    def config(self, **changes: Any) -> EngineConfig:
        return make_config(self.folder, **self.options, **changes)


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Subject:
    kind, options = SUBJECTS[request.param]
    folder = tiny_model(kind)
    return Subject(folder, options, run(make_config(folder, **options), prompts(), together=False))


def assert_same(got: Outcome, expected: Outcome) -> None:
    for index, (ours, theirs) in enumerate(zip(got.traces, expected.traces, strict=True)):
        assert len(ours) == len(theirs) == 24
        assert ours == theirs, f"prompt {index}"


def test_texts_differ(subject: Subject) -> None:
    """The subject can tell right from wrong: prompts lead to different, non-constant texts."""
    texts = [tuple(token for token, _, _ in trace) for trace in subject.alone.traces]
    assert len(set(texts)) == len(texts)
    assert max(len(set(text)) for text in texts) > 6


def test_the_path_that_is_meant(subject: Subject) -> None:
    is_low_bit = "quantization" in subject.options
    alone = subject.alone
    assert alone.weights == {PackedWeight if is_low_bit else FloatWeight}
    kv_dtype = "float16" if is_low_bit else "float32"
    assert alone.kv_dtype == subject.options.get("kv_cache_dtype", kv_dtype)
    assert alone.num_replays == alone.num_steps > 0


def test_batch(subject: Subject) -> None:
    together = run(subject.config(), prompts(), together=True)
    assert together.stats.num_steps < subject.alone.stats.num_steps / 4, "nothing was batched"
    assert_same(together, subject.alone)


@pytest.mark.parametrize("budget", [13, 48])
def test_chunks(subject: Subject, budget: int) -> None:
    chunked = run(subject.config(max_num_batched_tokens=budget), prompts(), together=True)
    assert chunked.stats.num_chunked_prefills >= 8
    assert_same(chunked, subject.alone)


def test_prefix_hits(subject: Subject) -> None:
    config = subject.config(enable_prefix_caching=True)
    first = run(config, prompts(), together=True)
    again = run(config, prompts(), together=True, rounds=2)
    assert first.stats.prefix_cache_hits == 0
    assert again.stats.prefix_cache_hits >= 300
    assert_same(again, subject.alone)


def test_prefix_hits_end_with_the_cache_off(subject: Subject) -> None:
    off = run(subject.config(), prompts(), together=True, rounds=2)
    assert off.stats.prefix_cache_hits == 0


def test_preemption(subject: Subject) -> None:
    # A sliding window gives blocks back as it goes, so that it takes fewer to run out.
    num_blocks = 20 if subject.folder.name.startswith("mistral") else 48
    config = subject.config(num_blocks=num_blocks, max_num_batched_tokens=64, block_size=8)
    pressed = run(config, prompts(), together=True)
    assert pressed.stats.num_preemptions >= 1
    assert_same(pressed, subject.alone)


@pytest.mark.parametrize("block_size", [8, 32, 64, 128])
def test_block_size(subject: Subject, block_size: int) -> None:
    assert_same(run(subject.config(block_size=block_size), prompts(), together=True), subject.alone)


@pytest.mark.parametrize("cpu_threads", [1, 3])
def test_threads(subject: Subject, cpu_threads: int) -> None:
    assert_same(
        run(subject.config(cpu_threads=cpu_threads), prompts(), together=True), subject.alone
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_is_exact_too(tiny_model: Callable[[str], Path], dtype: str) -> None:
    config = make_config(tiny_model("llama"), dtype=dtype)
    alone = run(config, prompts(), together=False)
    chunked = replace(config, scheduler=SchedulerConfig(max_num_batched_tokens=29))
    assert_same(run(chunked, prompts(), together=True), alone)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_prompt_logprobs_do_not_depend_on_chunks(
    tiny_model: Callable[[str], Path], quantization: str | None
) -> None:
    options = {"quantization": quantization}

    def scores(budget: int) -> list[Any]:
        engine = Engine(make_config(tiny_model("llama"), max_num_batched_tokens=budget, **options))
        wanted = SamplingParams(max_tokens=2, prompt_logprobs=1, seed=0)
        engine.add_request(EngineRequest("a", prompts()[9], wanted, 0.0))
        found: list[Any] = []
        while engine.has_work:
            for output in engine.step():
                found += output.prompt_logprobs or []
        engine.close()
        return found

    whole = scores(2048)
    assert len(whole) == 150
    assert whole[0] is None
    assert all(entry is not None for entry in whole[1:])
    assert scores(16) == whole


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "replayed"])
def test_a_request_that_fails_fails_alone(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, is_eager: bool
) -> None:
    """A step that raises (out of memory, say) is computed again request by request: the one at
    fault gets an error, the others their tokens, unchanged, and its blocks come back."""
    config = make_config(tiny_model("llama"), enforce_eager=is_eager)
    alone = run(config, prompts()[:6], together=False)
    engine = Engine(config)
    runner = engine.lane.runner
    # A token that is in no prompt, nor in what the others generate.
    used = {token for prompt in prompts() for token in prompt}
    used |= {token for trace in alone.traces for token, _, _ in trace}
    poison = next(token for token in range(3, 512) if token not in used)
    failures = 0

    def failing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(batch: Any, *rest: Any) -> Any:
            nonlocal failures
            if poison in batch.token_ids[: batch.num_tokens].tolist():
                failures += 1
                raise RuntimeError("[enforce fail] can't allocate memory: you tried 1 TB")
            return compute(batch, *rest)

        return computed

    if is_eager:
        assert runner.replayer is None
        model = failing(runner.model)
        model.head = runner.model.head  # type: ignore[attr-defined]
        monkeypatch.setattr(runner, "model", model)
    else:
        assert runner.replayer is not None
        monkeypatch.setattr(runner.replayer, "replay", failing(runner.replayer.replay))
    for index, prompt in enumerate(prompts()[:6]):
        engine.add_request(EngineRequest(str(index), prompt, params(index), 0.0))
    engine.add_request(EngineRequest("victim", [5, poison, 6], params(0), 0.0))
    traces: dict[str, Trace] = {str(i): [] for i in range(6)}
    error = None
    while engine.has_work:
        for output in engine.step():
            if output.request_id == "victim":
                error = output.error
                continue
            for token, entry in zip(output.new_token_ids, output.logprobs or [], strict=True):
                traces[output.request_id].append((token, entry.logprob, tuple(entry.top)))
    assert failures == 2, "once in the batch, once alone"
    assert error is not None and "can't allocate memory" in error
    assert list(traces.values()) == alone.traces
    assert engine.stats().kv_usage == 0
    engine.close()


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "replayed"])
@pytest.mark.parametrize("kind", [IndexError, InvalidModelError])
def test_whatever_fails_in_one_request_fails_it_alone(
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    is_eager: bool,
    kind: type[Exception],
) -> None:
    """Errors of every kind, where a request's tokens are chosen or its prompt is scored."""
    config = make_config(tiny_model("llama"), enforce_eager=is_eager)
    alone = run(config, prompts()[:4], together=False)
    engine = Engine(config)

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            if any(row.params.seed == 666 for row in arguments[1]):
                raise kind("out of bounds")
            return call(*arguments)

        return called

    sampler = engine.lane.runner._sampler
    monkeypatch.setattr(engine.lane.runner, "_sampler", failing(sampler))

    def scored(*_: Any) -> Any:
        raise kind("out of bounds")

    monkeypatch.setattr("ambidex.runner.model_runner.prompt_logprobs", scored)
    for index, prompt in enumerate(prompts()[:4]):
        engine.add_request(EngineRequest(str(index), prompt, params(index), 0.0))
    engine.add_request(EngineRequest("drawn", [5, 6], SamplingParams(seed=666), 0.0))
    engine.add_request(
        EngineRequest("scored", [7, 8], SamplingParams(seed=1, prompt_logprobs=0), 0.0)
    )
    traces: dict[str, Trace] = {str(i): [] for i in range(4)}
    errors: dict[str, str | None] = {}
    while engine.has_work:
        for output in engine.step():
            if output.request_id not in traces:
                errors[output.request_id] = output.error
                continue
            for token, entry in zip(output.new_token_ids, output.logprobs or [], strict=True):
                traces[output.request_id].append((token, entry.logprob, tuple(entry.top)))
    sentence = "Computing this request failed: out of bounds"
    assert errors == {"drawn": sentence, "scored": sentence}
    assert list(traces.values()) == alone.traces
    assert engine.stats().kv_usage == 0
    engine.close()
