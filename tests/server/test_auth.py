"""API keys, inner views, other origins."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from ambidex.server.auth import KeyRing, bearer_key, is_loopback
from conftest import Server

KEYS = ["sk-one", "sk-zwei-\u00fc"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    shared = Server(
        server={
            "api_keys": KEYS,
            "admin_api_keys": ["root-key"],
            "allowed_origins": ["https://a.example"],
        }
    )
    try:
        yield shared.wait_ready()
    finally:
        shared.close()


def test_the_key_is_needed(guarded: Server) -> None:
    answer = guarded.client("sk-one").completions.create(model="fake", prompt="a", max_tokens=1)
    assert answer.choices[0].text == "b"
    for key in ("sk-other", "sk-on", "sk-one2", "SK-ONE"):
        with pytest.raises(openai.AuthenticationError) as caught:
            guarded.client(key).completions.create(model="fake", prompt="a")
        assert caught.value.code == "invalid_api_key"
    missing = guarded.post("/v1/completions", {"prompt": "a"})
    assert missing.status_code == 401
    assert missing.headers["www-authenticate"] == "Bearer"
    assert "Bearer" in missing.json()["error"]["message"]
    for secret in ("sk-one", "sk-other"):
        assert secret not in guarded.log


@pytest.mark.parametrize("header", ["", "Bearer", "Basic sk-one", "sk-one", "Bearer sk-one sk-one"])
def test_malformed_keys(guarded: Server, header: str) -> None:
    assert guarded.get("/v1/models", headers={"authorization": header}).status_code == 401


def test_key_forms(guarded: Server) -> None:
    for header in (b"Bearer sk-one", b"bearer sk-one", "Bearer sk-zwei-\u00fc".encode()):
        assert guarded.get("/v1/models", headers={"authorization": header}).status_code == 200


def test_what_is_open_and_what_is_not(guarded: Server) -> None:
    for path in ("/health", "/live", "/version", "/metrics"):
        assert guarded.get(path).status_code == 200, path
    for path in ("/", "/v1/models", "/v1/models/fake", "/ledger", "/server_info", "/nothing"):
        assert guarded.get(path).status_code == 401, path
    assert guarded.get("/health/").status_code == 401
    for path in ("/v1/chat/completions", "/tokenize", "/detokenize", "/generate"):
        assert guarded.post(path, {}).status_code == 401, path


def test_inner_views_want_the_admin_key(guarded: Server) -> None:
    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return guarded.get("/server_info", headers=headers).status_code

    assert status("root-key") == 200
    assert status("sk-one") == 401
    text = guarded.get("/server_info", headers={"authorization": "Bearer root-key"}).text
    assert "sk-one" not in text
    assert "root-key" not in text


def test_inner_views_without_keys_are_for_this_machine(server: Server) -> None:
    assert server.get("/server_info").status_code == 200
    passed_on = server.get("/server_info", headers={"x-forwarded-for": "127.0.0.1"})
    assert passed_on.status_code == 403
    assert "--admin-api-key" in passed_on.json()["error"]["message"]


def test_origins(guarded: Server, server: Server) -> None:
    def allowed(target: Server, origin: str) -> str | None:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        answer: httpx.Response = target._http.options(
            target.root + "/v1/completions", headers=headers
        )
        return answer.headers.get("access-control-allow-origin")

    assert allowed(guarded, "https://a.example") == "https://a.example"
    assert allowed(guarded, "https://b.example") is None
    assert allowed(server, "https://a.example") is None
    refused = guarded.get("/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_key_ring() -> None:
    ring = KeyRing(["a", "b"])
    assert ring.holds(b"a")
    assert ring.holds(b"b")
    assert not ring.holds(b"c")
    assert not ring.holds(b"")
    assert not KeyRing([])
    assert bearer_key([(b"authorization", b"Bearer  x ")]) == b"x"


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (("127.0.0.1", 1), True),
        (("127.8.8.8", 1), True),
        (("::1", 1), True),
        (("::ffff:127.0.0.1", 1), True),
        (("10.0.0.1", 1), False),
        (("::ffff:10.0.0.1", 1), False),
        (("name", 1), False),
        (None, False),
    ],
)
def test_loopback(client: tuple[str, int] | None, expected: bool) -> None:
    assert is_loopback({"type": "http", "headers": [], "client": client}) is expected
