"""Whatever a client sends, the answer is OpenAI's error object, and others are unharmed."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from conftest import DEADLINE_S, Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def check_error(response: httpx.Response, status: int, param: str | None = None) -> str:
    """The message of a well-formed error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param
    return error["message"]


@pytest.fixture(autouse=True)
def _unharmed(server: Server) -> Any:
    yield
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud800\\u0041"}',
        b'{"prompt": "\\udc00x"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"prompt": "a"} {}',
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate", "/tokenize"])
def test_bad_json(server: Server, path: str, body: bytes) -> None:
    check_error(server.post(path, content=body), 400)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1_000_000}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt_logprobs": 10_000}, "prompt_logprobs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"structured_outputs": {"regex": "a*"}}, "structured_outputs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_values(server: Server, path: str, values: dict[str, Any], param: str) -> None:
    body = {"prompt": "a", "messages": HELLO, **values}
    check_error(server.post(path, body), 400, param)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        (None, "missing"),
        ("", "no tokens"),
        ([], "prompt"),
        ([[]], "no tokens"),
        ([""], "no tokens"),
        ([1, "a"], "token ids"),
        ([1.5], "token ids"),
        ([-1], "token ids"),
        ([True], "token ids"),
        ([99999], "vocabulary"),
        (["a", None], "token ids"),
        ({"a": 1}, "prompt"),
        (["a"] * 257, "256"),
        ("a" * 3000, "2048"),
        ("a" * 3_000_000, "2048"),
        ([97] * 3000, "2048"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_bad_prompts(server: Server, prompt: Any, word: str) -> None:
    message = check_error(server.post(COMPLETIONS, {"prompt": prompt}), 400, "prompt")
    assert word in message


def test_too_many_sequences(server: Server) -> None:
    body = {"prompt": ["a"] * 200, "n": 100}
    assert "20000" in check_error(server.post(COMPLETIONS, body), 400, "n")


def test_white_space_is_a_prompt(server: Server) -> None:
    assert server.post(COMPLETIONS, {"prompt": " ", "max_tokens": 1}).status_code == 200


def test_suffix_is_refused(server: Server) -> None:
    check_error(server.post(COMPLETIONS, {"prompt": "a", "suffix": "b"}), 400, "suffix")
    assert server.post(COMPLETIONS, {"prompt": "a", "suffix": ""}).status_code == 200


def test_best_of_equal_to_n_works(server: Server) -> None:
    body = {"prompt": "a", "best_of": 2, "n": 2, "max_tokens": 1}
    assert len(server.post(COMPLETIONS, body).json()["choices"]) == 2


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10_000}, None),
        ({"continue_final_message": True, "add_generation_prompt": True}, None),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
    ids=str,
)
def test_bad_chats(server: Server, values: dict[str, Any], param: str | None) -> None:
    check_error(server.post(CHAT, {"messages": HELLO, **values}), 400, param)


def test_what_clients_send_and_nobody_needs_is_ignored(server: Server) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 2.0,
        "user": "me",
        "store": True,
        "metadata": {"a": 1},
        "reasoning_effort": "high",
        "parallel_tool_calls": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "logit_bias": {},
        "some_new_field": [1, 2],
    }
    assert server.post(CHAT, body).status_code == 200


def test_unknown_model(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
    check_error(server.get("/v1/models/gpt-4"), 404, "model")


def test_unknown_route_and_method(server: Server) -> None:
    assert "/v1/nothing" in check_error(server.get("/v1/nothing"), 404)
    check_error(server.get(COMPLETIONS), 405)
    check_error(server.post("/v1/models", {}), 405)


def test_detokenize_checks_ids(server: Server) -> None:
    check_error(server.post("/detokenize", {"tokens": [5000]}), 400, "tokens")
    check_error(server.post("/detokenize", {"tokens": [-1]}), 400, "tokens")
    check_error(server.post("/detokenize", {}), 400, "tokens")


def test_error_in_a_stream_is_still_http(server: Server) -> None:
    """What can be known before the first token is a status, not an event."""
    body = {"prompt": "a" * 5000, "stream": True}
    check_error(server.post(COMPLETIONS, body), 400, "prompt")


def _raw(server: Server, head: str, body: bytes) -> bytes:
    """Sends part of a request and reads the answer's first line."""
    host, _, port = server.root.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode() + body)
        return connection.makefile("rb").readline()


def test_large_bodies_are_refused_before_they_are_read(start_server: Any) -> None:
    server = start_server(server={"max_body_bytes": 10_000}).wait_ready()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
    assert b" 413 " in _raw(server, head, b"{")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in _raw(server, head, b"2710\r\n" + b"x" * 10_000 + b"\r\n5\r\nxxxxx\r\n")
    body = json.dumps({"prompt": "a" * 20_000}).encode()
    message = check_error(server.post(COMPLETIONS, content=body), 413)
    assert "10000" in message
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
