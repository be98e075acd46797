"""The offline API: what goes in, and what comes out."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ambidex import LLM, CompletionOutput, RequestOutput, SamplingParams
from ambidex.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, OffloadConfig
from ambidex.engine.summary import describe
from ambidex.errors import (
    RequestError,
)
from ambidex.memory.nodes import MemoryNode
from llm_helpers import GREEDY, assert_idle, copy_model, ids_of, text_of

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
    # A step that was under way ends, and is taken in.
    llm.engine.step()
    assert_idle(llm)
    assert ids_of(llm.generate("hello", GREEDY)[0]) == expected


@pytest.mark.parametrize(
    "where",
    [
        "engine.scheduler.add",
        "engine.scheduler.schedule",
        "engine._executor.submit",
        "engine.wait",
        "engine.scheduler.update",
        "_frontend.process",
        "engine.scheduler.abort",
    ],
)
def test_an_interrupt_leaves_nothing_half_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C raises between any two instructions: a step's tokens, its blocks, or that there was a
    step at all would be lost, and the next answer would wait for ever."""
    *path, name = where.split(".")
    with LLM(str(folder)) as llm:
        expected = ids_of(llm.generate("hello", GREEDY)[0])
        owner: Any = llm
        for part in path:
            owner = getattr(owner, part)
        call = getattr(owner, name)
        calls = 0

        def interrupted(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                signal.raise_signal(signal.SIGINT)
            return call(*arguments, **named)

        def leave_early() -> None:
            with contextlib.closing(llm.stream("hello", GREEDY)) as stream:  # type: ignore[type-var]
                next(stream)

        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            leave_early()
        monkeypatch.undo()
        assert calls
        # What is still under way ends, and is taken in.
        for _ in range(3):
            llm.engine.step(timeout_s=5)
        assert_idle(llm)
        assert ids_of(llm.generate("hello", GREEDY)[0]) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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


def test_no_progress_bar_without_a_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(ModelConfig(str(folder)), CacheConfig(kv_cache_bytes=16 << 20))
    with LLM(str(folder), config=config) as llm:
        llm.generate(["hello"] * 3, GREEDY)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


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
