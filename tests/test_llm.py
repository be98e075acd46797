"""The offline API: what goes in, what comes out, and that nothing is left behind."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from ambidex import LLM, CompletionOutput, RequestOutput, SamplingParams
from ambidex.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, OffloadConfig
from ambidex.engine.engine import Engine
from ambidex.engine.summary import describe
from ambidex.errors import EngineDeadError, InvalidModelError, OptionError, RequestError
from ambidex.memory.nodes import MemoryNode
from ambidex.weights.hub import ResolvedModel

#: Texts of the tiny model run on to their limit: the random weights seldom say "end".
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["the rain in spain", {"prompt_token_ids": [5, 6, 7]}, {"prompt": "hello"}, " "]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def folder(tiny_model: Any) -> Path:
    path: Path = tiny_model("llama", tokenizer=True)
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_seqs=8, kv_cache_memory_bytes="16MiB") as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared model; every test must leave its engine idle and its blocks free."""
    yield shared
    assert_idle(shared)


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


# --- prompts, parameters, outputs -----------------------------------------------------------------


def test_one_prompt_and_many_in_every_form(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [ids_of(output) for output in together] == [ids_of(output) for output in alone]
    assert len({text_of(output) for output in together}) == len(PROMPTS)
    assert [output.prompt for output in together] == ["the rain in spain", None, "hello", " "]
    assert together[1].prompt_token_ids == [5, 6, 7]
    # The tokenizer's beginning-of-sequence token stands before a text, and only there.
    assert together[2].prompt_token_ids[0] == 1
    assert llm.generate([], GREEDY) == []


def test_fields_of_an_output(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert isinstance(output, RequestOutput)
    assert output.finished and output.error is None and output.prompt_logprobs is None
    tokenizer = llm.get_tokenizer()
    assert output.prompt_token_ids == tokenizer.encode("hello")
    (answer,) = output.outputs
    assert isinstance(answer, CompletionOutput)
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
    assert answer.logprobs is None and answer.cumulative_logprob is None
    assert len(answer.token_ids) == 12
    assert answer.text == tokenizer.decode(answer.token_ids)
    assert output.metrics.num_prompt_tokens == len(output.prompt_token_ids)
    assert output.metrics.num_output_tokens == 12


def test_outputs_have_the_order_of_the_prompts_not_of_finishing(llm: LLM) -> None:
    lengths = [9, 1, 5, 3, 7]
    params = [replace(GREEDY, max_tokens=length) for length in lengths]
    outputs = llm.generate(["same"] * 5, params)
    assert [len(ids_of(output)) for output in outputs] == lengths
    assert all(ids_of(output) == ids_of(outputs[0])[: len(ids_of(output))] for output in outputs)
    # More prompts than run at once: they wait for their turn.
    many = llm.generate(["same"] * 20, replace(GREEDY, max_tokens=3))
    assert len({tuple(ids_of(output)) for output in many}) == 1


def test_defaults_are_those_of_the_completions_api(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.max_tokens, params.temperature, params.top_p, params.n) == (16, 1.0, 1.0, 1)
    (output,) = llm.generate("hello")
    assert 1 <= len(ids_of(output)) <= 16


def test_generation_config_sets_defaults(folder: Path, tmp_path: Path) -> None:
    model = copy_model(folder, tmp_path / "m")
    (model / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 5}')
    with LLM(str(model)) as llm:
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 5, 1.0)


def test_n_samples_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    (output,) = llm.generate("hello", params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    # The first of them is the one that n=1 gives.
    (single,) = llm.generate("hello", replace(params, n=1))
    assert ids_of(single) == output.outputs[0].token_ids


def test_seed_reproduces_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(seed=11, max_tokens=10, ignore_eos=True)
    alone = ids_of(llm.generate("hello", params)[0])
    others = [replace(params, seed=seed) for seed in (1, 2, 3)]
    crowd = llm.generate(["hello", "x", "hello", "y"], [*others[:2], params, others[2]])
    assert ids_of(crowd[2]) == alone
    assert ids_of(crowd[0]) != alone
    # Without a seed no two are the same.
    free = llm.generate(["hello"] * 4, replace(params, seed=None))
    assert len({tuple(ids_of(output)) for output in free}) == 4


def test_stop_strings(llm: LLM) -> None:
    whole = text_of(llm.generate("the rain in spain", GREEDY)[0])
    stop = whole[5:8]
    end = whole.index(stop)
    assert end > 0
    (output,) = llm.generate("the rain in spain", replace(GREEDY, stop=["never seen", stop]))
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole[:end], "stop", stop)
    kept = replace(GREEDY, stop=stop, include_stop_str_in_output=True)
    assert text_of(llm.generate("the rain in spain", kept)[0]) == whole[: end + len(stop)]


def test_stop_token_ids(llm: LLM) -> None:
    ids = ids_of(llm.generate("the rain in spain", GREEDY)[0])
    chosen = next(token for token in ids if token != ids[0])
    params = replace(GREEDY, stop_token_ids=[chosen])
    answer = llm.generate("the rain in spain", params)[0].outputs[0]
    assert answer.token_ids == ids[: ids.index(chosen) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", chosen)


def test_logprobs(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("hello", params)
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 12
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(entries) == 3 and entries[token].rank == 1
        assert entries[token].decoded_token == llm.get_tokenizer().token_text(token)
        assert max(entry.logprob for entry in entries.values()) == entries[token].logprob <= 0
    chosen = [
        entries[token].logprob
        for token, entries in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    for token, scores in zip(output.prompt_token_ids[1:], rest, strict=True):
        assert scores is not None and token in scores and 2 <= len(scores) <= 3
    # Scored as a prompt, an answer has the log probabilities it was generated with.
    whole = {"prompt_token_ids": output.prompt_token_ids + answer.token_ids}
    (scored,) = llm.generate(whole, replace(GREEDY, max_tokens=0, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None
    again = [
        scores[token].logprob
        for token, scores in zip(answer.token_ids, scored.prompt_logprobs[-12:], strict=True)
        if scores is not None
    ]
    assert again == chosen


def test_max_tokens_zero_reads_the_prompt_only(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (text_of(output), ids_of(output)) == ("", [])
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_min_tokens_holds_back_the_end(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_ids[0]
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={eos: 100.0})
    assert ids_of(llm.generate("hello", params)[0]) == [eos]
    answer = llm.generate("hello", replace(params, min_tokens=4))[0].outputs[0]
    assert eos not in answer.token_ids[:-1] and answer.token_ids[-1] == eos
    assert len(answer.token_ids) == 5 and answer.finish_reason == "stop"
    # The end of sequence is no text, and going on after it is a choice.
    assert answer.text == llm.get_tokenizer().decode(answer.token_ids[:-1])
    assert ids_of(llm.generate("hello", replace(params, ignore_eos=True))[0]) == [eos] * 9


def test_logit_bias_and_bad_words(llm: LLM) -> None:
    ids = ids_of(llm.generate("the rain in spain", GREEDY)[0])
    biased = llm.generate("the rain in spain", replace(GREEDY, logit_bias={77: 100.0}))
    assert ids_of(biased[0]) == [77] * 12
    banned = llm.generate("the rain in spain", replace(GREEDY, logit_bias={ids[0]: -100.0}))
    assert ids[0] not in ids_of(banned[0])
    word = llm.get_tokenizer().token_text(ids[0])
    assert llm.get_tokenizer().encode(word, add_special_tokens=False) == [ids[0]]
    without = llm.generate("the rain in spain", replace(GREEDY, bad_words=[word]))
    assert ids[0] not in ids_of(without[0])


def test_priority_runs_first_where_it_is_asked_for(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=1, scheduling_policy="priority") as llm:
        ends: list[str] = []
        process = llm._frontend.process

        def record(outputs: Any) -> Any:
            results, stopped = process(outputs)
            ends.extend(result.request_id for result in results if result.finished)
            return results, stopped

        llm._frontend.process = record  # type: ignore[method-assign]
        outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[2, 0, 1])
        assert [output.request_id for output in outputs] == ["0", "1", "2"]
        assert ends == ["1", "2", "0"]


def test_a_request_may_fill_the_whole_context(folder: Path) -> None:
    """Just the blocks of one request of the longest context: it must end, and by its length."""
    with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=4) as llm:
        outputs = llm.generate(["hello", "world"], replace(GREEDY, max_tokens=None))
        for output in outputs:
            assert len(output.prompt_token_ids) + len(ids_of(output)) == 64
            assert output.outputs[0].finish_reason == "length"
        assert_idle(llm)


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


def copy_model(source: Path, target: Path, **changes: Any) -> Path:
    """The model with other fields in its config.json; None removes one."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


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


# --- chat -----------------------------------------------------------------------------------------

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
]


def test_chat_applies_the_template_once(llm: LLM) -> None:
    text = "system: Be brief.\nuser: Hello!\nassistant: "
    assert llm.render_chat(CONVERSATION) == text
    (output,) = llm.chat(CONVERSATION, GREEDY)
    assert output.prompt == text
    # The template writes what special tokens it wants: none is added.
    expected = llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert output.prompt_token_ids == expected
    (same,) = llm.generate({"prompt_token_ids": expected}, GREEDY)
    assert ids_of(same) == ids_of(output)


def test_chat_with_several_conversations(llm: LLM) -> None:
    other = [{"role": "user", "content": "Another."}]
    outputs = llm.chat([CONVERSATION, other], GREEDY)
    assert [ids_of(output) for output in outputs] == [
        ids_of(llm.chat(CONVERSATION, GREEDY)[0]),
        ids_of(llm.chat(other, GREEDY)[0]),
    ]


def test_chat_options(llm: LLM) -> None:
    begun = [*CONVERSATION, {"role": "assistant", "content": "Well, "}]
    (output,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    # As in transformers, the white space at the end of what is continued is kept.
    assert output.prompt is not None and output.prompt.endswith("assistant: Well, ")
    template = "{{ greeting }} {{ messages[0]['content'] }}"
    (output,) = llm.chat(
        CONVERSATION, GREEDY, chat_template=template, chat_template_kwargs={"greeting": "hey"}
    )
    assert output.prompt == "hey Be brief."
    parts = [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]
    assert llm.chat(parts, GREEDY)[0].prompt == "user: in parts\nassistant: "


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "named"),
    [
        (["fine", ""], replace(GREEDY, stop=[""]), "stop"),
        (["fine", {"prompt_token_ids": []}], GREEDY, "no tokens"),
        (["fine", {"prompt_token_ids": [3, 512]}], GREEDY, "512"),
        (["fine", {"prompt_token_ids": [3, "x"]}], GREEDY, "position 1"),
        (["fine", {"prompt_token_ids": [5] * 512}], GREEDY, "512 tokens"),
        (["fine", "word " * 2000], GREEDY, "context"),
        (["fine", "\ud800"], GREEDY, "Unicode"),
        (["fine", {"text": "x"}], GREEDY, "prompt_token_ids"),
        (["fine", 5], GREEDY, "prompt_token_ids"),
        (["fine", "x"], [GREEDY], "2 prompts and 1 sampling_params"),
        ("x", replace(GREEDY, temperature=float("nan")), "temperature"),
        ("x", replace(GREEDY, top_p=0.0), "top_p"),
        ("x", replace(GREEDY, n=0), "'n'"),
        ("x", replace(GREEDY, logprobs=21), "--max-logprobs"),
        ("x", replace(GREEDY, min_tokens=13), "min_tokens"),
        ("x", replace(GREEDY, logit_bias={512: 1.0}), "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, named: str
) -> None:
    steps = llm.engine.stats().num_steps
    with pytest.raises(RequestError, match=r"^[^\n]+$") as caught:
        llm.generate(prompts, params)
    assert named in str(caught.value)
    assert llm.engine.stats().num_steps == steps
    assert_idle(llm)


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_a_token(llm: LLM) -> None:
    assert llm.generate("", GREEDY)[0].prompt_token_ids == [1]
    with pytest.raises(RequestError, match="no tokens"):
        llm.stream("", GREEDY, add_special_tokens=False)


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(llm.generate("hello", GREEDY)[0])
    step = llm.engine.step
    calls = 0

    def interrupted(timeout_s: float | None = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return step(timeout_s)

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello"] * 3, replace(GREEDY, n=2))
    monkeypatch.undo()
    assert_idle(llm)
    assert ids_of(llm.generate("hello", GREEDY)[0]) == expected


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


# --- streams --------------------------------------------------------------------------------------


def test_stream_adds_up_to_what_generate_gives(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY)
    outputs = list(llm.stream("hello", GREEDY))
    assert "".join(output.outputs[0].delta_text for output in outputs) == text_of(whole)
    pieces = [token for output in outputs for token in output.outputs[0].delta_token_ids]
    assert pieces == ids_of(whole)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_stream_that_is_left_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("hello", replace(GREEDY, n=2, max_tokens=200, seed=1))
    next(stream)
    stats = llm.engine.stats()
    assert stats.num_running == 2 and stats.kv_usage > 0
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)
    # Leaving a loop does the same.
    for _ in llm.stream("hello", replace(GREEDY, max_tokens=200)):
        break
    gc.collect()
    assert_idle(llm)


def test_a_stream_checks_at_once_and_queues_when_it_is_read(llm: LLM) -> None:
    with pytest.raises(RequestError, match="temperature"):
        llm.stream("hello", replace(GREEDY, temperature=-1.0))
    stream = llm.stream("hello", GREEDY)
    assert_idle(llm)
    assert len(list(stream)) == 12


def test_streams_run_side_by_side(llm: LLM) -> None:
    """What a step computes for another stream waits for it, and is mixed up with nothing."""
    prompts = ["hello", "the rain", "x"]
    expected = [text_of(output) for output in llm.generate(prompts, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    texts = [""] * 3
    for outputs in zip(*streams, strict=True):
        for index, output in enumerate(outputs):
            texts[index] += output.outputs[0].delta_text
    assert texts == expected
    assert llm.engine.stats().num_running == 0
    stream = llm.stream("hello", GREEDY)
    text = next(stream).outputs[0].delta_text
    assert text_of(llm.generate("x", GREEDY)[0]) == expected[2]
    assert text + "".join(output.outputs[0].delta_text for output in stream) == expected[0]


# --- the end --------------------------------------------------------------------------------------


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


def test_no_progress_bar_without_a_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(ModelConfig(str(folder)), CacheConfig(kv_cache_bytes=16 << 20))
    with LLM(str(folder), config=config) as llm:
        llm.generate(["hello"] * 3, GREEDY)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


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


@pytest.mark.parametrize("mode", [None, "stream", "compute", "split"])
def test_several_memories(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    """On a machine whose node without CPUs is the faster one, weights go there, once."""
    expected = [ids_of(output) for output in llm.generate(PROMPTS, GREEDY)]
    nodes = [MemoryNode(0, (0,), 8 << 30, 4 << 30), MemoryNode(1, (), 2 << 30, 1 << 30)]
    placed: list[tuple[int, int]] = []

    def bind(address: int, num_bytes: int, node: int) -> int:
        placed.append((node, num_bytes))
        return 0

    monkeypatch.setattr("ambidex.device.host_nodes.read_nodes", lambda: nodes)
    monkeypatch.setattr("ambidex.device.host_nodes.measure_nodes", lambda *_: {0: 1e10, 1: 2e10})
    monkeypatch.setattr("ambidex.kernels.cpu.numa.system_bind", lambda: bind)
    config = llm.engine.config
    if mode is not None:
        config = replace(
            config,
            device=DeviceConfig("sim:memory=1GiB,clock=virtual"),
            offload=OffloadConfig(patterns=("*.mlp.*",), mode=mode),
        )
    with LLM(str(folder), config=config) as other:
        assert [ids_of(output) for output in other.generate(PROMPTS, GREEDY)] == expected
        host = other.engine.lane.hands.host.ledger
        near, far = host.children
        weights = host.reserved_bytes("weights")
        assert weights > 0
        assert (near.used_bytes, far.used_bytes) == (0, weights)
        assert {node for node, _ in placed} == {1}
        assert 0 < sum(size for _, size in placed) <= weights
        lines = describe(other.info)
    assert any("node0: CPUs 0, 4.00 GiB of 8.00 GiB free, read at 10.0" in line for line in lines)
    assert any("node1: no CPUs, " in line and "taken, read at 20.0 GB/s" in line for line in lines)
    assert (host.used_bytes, far.used_bytes) == (0, 0)
    assert not any(line.startswith("node ") for line in describe(llm.info))


def test_threads_share_the_engine(tiny_model: Any) -> None:
    """Four threads, each with its own calls: every one gets its own answers, and all end."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[{"prompt_token_ids": [3 + 5 * t + i, 7, 11]} for i in range(3)] for t in range(4)]
    with LLM(str(tiny_model("llama", tokenizer=True)), kv_cache_memory_bytes="64MiB") as llm:
        alone = [[o.outputs[0].token_ids for o in llm.generate(each, params)] for each in prompts]
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(llm.generate, each, params) for each in prompts]
            together = [[o.outputs[0].token_ids for o in job.result(timeout=120)] for job in jobs]
        assert together == alone
        assert llm.engine.stats().num_running == 0


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "replayed"])
def test_a_failed_request_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_eager: bool
) -> None:
    with LLM(str(folder), kv_cache_memory_bytes="64MiB", enforce_eager=is_eager) as llm:

        def fail(*_: Any) -> Any:
            raise RuntimeError("the model is broken")

        runner = llm.engine.lane.runner
        if is_eager:
            monkeypatch.setattr(runner, "model", fail)
        else:
            monkeypatch.setattr(runner.replayer, "replay", fail)
        (output,) = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(temperature=0))
    assert output.outputs[0].finish_reason == "error"
    assert output.error is not None and "the model is broken" in output.error
    assert "the model is broken" in caplog.text


@pytest.mark.parametrize("prompts", [None, 5, [5], [{"text": "x"}]])
def test_what_is_no_prompt(tiny_model: Any, prompts: Any) -> None:
    with (
        LLM(str(tiny_model("llama", tokenizer=True)), kv_cache_memory_bytes="64MiB") as llm,
        pytest.raises(RequestError, match="A prompt is a text"),
    ):
        llm.generate(prompts)
