"""The endpoints, through the real ``openai`` client over a real socket."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from conftest import Server, wait_until

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def expected(prompt: str, count: int) -> str:
    """What the fake engine writes after ``prompt``."""
    start = LETTERS.index(prompt[-1]) + 1 if prompt[-1] in LETTERS else 0
    return "".join(LETTERS[(start + i) % 26] for i in range(count))


def test_completion(server: Server) -> None:
    answer = server.client().completions.create(model="fake", prompt="a", max_tokens=5)
    assert answer.choices[0].text == "bcdef"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == "fake"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 5)


def test_completion_defaults_to_16_tokens(server: Server) -> None:
    answer = server.client().completions.create(model="fake", prompt="a")
    assert answer.choices[0].text == expected("a", 16)


def test_several_prompts_and_n(server: Server) -> None:
    answer = server.client().completions.create(model="fake", prompt=["a", "m"], n=3, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == ["bc"] * 3 + ["no"] * 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 12


def test_token_id_prompts(server: Server) -> None:
    create = server.client().completions.create
    assert create(model="fake", prompt=[ord("x")], max_tokens=2).choices[0].text == "yz"
    two = create(model="fake", prompt=[[ord("x")], [ord("a")]], max_tokens=1)
    assert [choice.text for choice in two.choices] == ["y", "b"]


def test_echo(server: Server) -> None:
    create = server.client().completions.create
    assert create(model="fake", prompt="a", max_tokens=2, echo=True).choices[0].text == "abc"
    ids = create(model="fake", prompt=[97, 98], max_tokens=1, echo=True)
    assert ids.choices[0].text == "abc"
    scored = create(model="fake", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    choice = scored.choices[0]
    assert choice.text == "abc"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_streamed_completion(server: Server) -> None:
    stream = server.client().completions.create(
        model="fake",
        prompt=["a", "m"],
        max_tokens=4,
        stream=True,
        echo=True,
        stream_options={"include_usage": True},
    )
    texts = {0: "", 1: ""}
    reasons = {}
    usages = []
    for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "abcde", 1: "mnopq"}
    assert reasons == {0: "length", 1: "length"}
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == 8
    assert all(usage is None for usage in usages[:-1])


def test_continuous_usage(server: Server) -> None:
    stream = server.client().completions.create(
        model="fake",
        prompt="a",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == [1, 2, 3, 3]


def test_chat(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=3
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "abc"
    assert answer.object == "chat.completion"


def test_chat_forms_of_content(server: Server) -> None:
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": "two"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "three"},
    ]
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    found = server.post("/tokenize", {"messages": messages, "tools": tools}).json()
    text = server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert "[system] one" in text
    assert "[tool] three" in text
    assert "[tools] 1" in text
    answer = server.client().chat.completions.create(
        model="fake", messages=messages, tools=tools, max_tokens=2
    )
    assert answer.choices[0].message.content == "ab"


def test_continue_final_message(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "abc"}],
        max_tokens=2,
        extra_body={"continue_final_message": True, "echo": True},
    )
    assert (answer.choices[0].message.content or "").startswith("abc")


def test_streamed_chat(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=4,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = {0: "", 1: "", 2: ""}
    roles = []
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.role:
                roles.append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "abcd", 1: "abcd", 2: "abcd"}
    assert roles == ["assistant"] * 3
    assert usage is not None
    assert usage.completion_tokens == 12


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(server: Server, stream: bool) -> None:
    answer: Any = server.client().completions.create(
        model="fake", prompt="a", max_tokens=50, stop=["fg"], stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "bcde"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == "fg"
    # The engine was told: nothing runs on.
    wait_until(lambda: server.info()["stats"]["num_running"] == 0, "the stopped request is gone")


def test_stop_token_id(server: Server) -> None:
    answer = server.client().completions.create(
        model="fake", prompt="a", max_tokens=50, extra_body={"stop_token_ids": [ord("d")]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == ord("d")  # type: ignore[attr-defined]


def test_completion_logprobs(server: Server) -> None:
    answer = server.client().completions.create(model="fake", prompt="a", max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["b", "c"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}]
    assert logprobs.text_offset == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(server: Server, stream: bool) -> None:
    answer: Any = server.client().chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
        stream=stream,
    )
    chunks = list(answer) if stream else [answer]
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in entries] == ["a", "b"]
    assert entries[0].bytes == [97]
    assert [top.token for top in entries[0].top_logprobs] == ["a", "b"]


def test_return_token_ids(server: Server) -> None:
    body = {"model": "fake", "prompt": "a", "max_tokens": 2, "return_token_ids": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["token_ids"] == [98, 99]
    assert choice["prompt_token_ids"] == [97]


def test_models(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 2048


def test_tokenize_and_back(server: Server) -> None:
    found = server.post("/tokenize", {"prompt": "h\u00e9", "return_token_strs": True}).json()
    assert found["tokens"] == list("h\u00e9".encode())
    assert found["count"] == 3
    assert found["max_model_len"] == 2048
    assert len(found["token_strs"]) == 3
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == "h\u00e9"


def test_old_generate(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 3, "n": 2, "temperature": 0.0}
    assert server.post("/generate", body).json() == {"text": ["abcd", "abcd"]}
    text = server.post("/generate", {**body, "n": 1, "stream": True}).text
    assert [json.loads(line)["text"] for line in text.splitlines()] == [["ab"], ["abc"], ["abcd"]]


def test_views(server: Server) -> None:
    assert server.get("/health").json()["status"] == "ready"
    assert server.get("/live").status_code == 200
    assert "version" in server.get("/version").json()
    assert "fake" in server.get("/").text
    assert server.info()["model"]["block_size"] == 16


def test_request_id_is_echoed(server: Server) -> None:
    assert server.get("/live", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert "x-request-id" not in server.get("/live", headers={"x-request-id": "a b"}).headers


def test_64_concurrent_requests(server: Server) -> None:
    client = server.client()

    def ask(number: int) -> str:
        prompt = f"{number} {LETTERS[number % 26]}"
        if number % 2:
            whole = client.completions.create(model="fake", prompt=prompt, max_tokens=20)
            return whole.choices[0].text
        stream = client.completions.create(model="fake", prompt=prompt, max_tokens=20, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(ask, range(64)))
    assert texts == [expected(LETTERS[number % 26], 20) for number in range(64)]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_request(server: Server, stream: bool) -> None:
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    body = {"model": "fake", "prompt": "!slow", "max_tokens": 2000, "stream": stream}
    with httpx.Client() as client:
        request = client.build_request("POST", server.root + "/v1/completions", json=body)
        if stream:
            response = client.send(request, stream=True)
            next(response.iter_raw())
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(request.url, json=body, timeout=0.5)
    wait_until(
        lambda: server.metric("vllm:request_success_total", finished_reason="abort") > aborted,
        "the abort is counted",
    )
    wait_until(lambda: server.info()["stats"]["num_running"] == 0, "the engine dropped it")
    assert server.info()["num_requests"] == 0


def test_disconnect_before_the_first_token(server: Server) -> None:
    body = {"model": "fake", "prompt": ["!slow"] * 3, "n": 2, "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", server.root + "/v1/completions", json=body, timeout=60):
        pass
    wait_until(lambda: server.info()["num_requests"] == 0, "the request is gone")
    wait_until(lambda: server.info()["stats"]["num_running"] == 0, "the engine dropped it")


def test_engine_errors_are_the_requests_own(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.InternalServerError, match="gave up"):
        client.completions.create(model="fake", prompt="!fail", max_tokens=5, n=2)
    with pytest.raises(openai.InternalServerError, match="refuses"):
        client.completions.create(model="fake", prompt="!refuse")
    with pytest.raises(openai.InternalServerError, match="its log says why"):
        client.completions.create(model="fake", prompt="!bug")
    with pytest.raises(openai.APIError, match="gave up"):
        list(client.completions.create(model="fake", prompt="!fail", max_tokens=5, stream=True))
    assert client.completions.create(model="fake", prompt="a", max_tokens=1).choices[0].text == "b"
    assert server.info()["num_requests"] == 0


def test_metrics_move(server: Server) -> None:
    def snapshot() -> dict[str, float]:
        names = (
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:time_to_first_token_seconds_count",
            "vllm:inter_token_latency_seconds_count",
            "vllm:time_per_output_token_seconds_count",
            "vllm:request_time_per_output_token_seconds_count",
            "vllm:e2e_request_latency_seconds_count",
            "vllm:request_success_total",
            "vllm:request_prompt_tokens_sum",
            "vllm:request_generation_tokens_sum",
            "vllm:iteration_tokens_total_sum",
        )
        return {name: server.metric(name, model_name="fake", engine="0") for name in names}

    before = snapshot()
    server.client().completions.create(model="fake", prompt="abc", max_tokens=10)
    after = snapshot()
    assert {name: after[name] - before[name] for name in before} == {
        "vllm:prompt_tokens_total": 3,
        "vllm:generation_tokens_total": 10,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 9,
        "vllm:time_per_output_token_seconds_count": 9,
        "vllm:request_time_per_output_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_success_total": 1,
        "vllm:request_prompt_tokens_sum": 3,
        "vllm:request_generation_tokens_sum": 10,
        "vllm:iteration_tokens_total_sum": 13,
    }
    page = server.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:cache_config_info",
    ):
        assert f"\n{name}{{" in page, name


def test_the_log_holds_no_prompts(server: Server) -> None:
    secret = "correct horse battery staple"
    server.client(key="sk-secret").completions.create(model="fake", prompt=secret, max_tokens=1)
    # The log is read beside the answer, and tells of earlier requests, too.
    told = ("request finished id=cmpl-", "prompt_tokens=28")
    wait_until(
        lambda: any(all(word in line for word in told) for line in server.lines),
        "the log tells of the request",
    )
    assert secret not in server.log
    assert "sk-secret" not in server.log
