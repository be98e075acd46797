"""Reading a request's JSON under limits: size, encoding, depth, form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from ambidex.engine.input import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from ambidex.server.errors import ApiError
from ambidex.server.protocol import ApiRequest, parse
from ambidex.server.state import ServerState

R = TypeVar("R", bound=ApiRequest)
T = TypeVar("T")

#: Prompts in one completion request.
MAX_PROMPTS = 256

#: Prompts times ``n``: sequences that one HTTP request may start.
MAX_SEQUENCES = 1024

#: Larger bodies are parsed and checked in a worker thread: the event loop does not wait for them.
MAX_INLINE_BYTES = 256 * 1024

#: JSON values in one body. The parser holds the GIL, for up to 0.4 s per million.
MAX_JSON_VALUES = 1_200_000

#: Text that no context limits: for /tokenize, and before a chat template has made a prompt of it.
MIN_TEXT_CHARS = 1024 * 1024

#: Field -> entries, checked before any entry is looked at.
MAX_ENTRIES: Mapping[str, int] = {
    "messages": 4096,
    "tools": 1024,
    "documents": 4096,
    "chat_template_kwargs": 1024,
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "logit_bias": MAX_LOGIT_BIAS,
}

#: A string (ended or not), or the mark of one more value, in JSON without escaped quotation marks.
#: It matches at each quotation mark and takes no step back: the time goes with the length.
_JSON_MARK = re.compile(rb'"[^"]*+"?|[,\[{]')

#: Half of a surrogate pair, without its other half. It begins with plain text, which is quick to
#: look for; an escaped backslash before it means that this is no escape.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD](?<!\\\\u[dD])(?:"
    rb"[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)


def _too_large(max_bytes: int) -> ApiError:
    # The rest of the body is not read: the connection cannot be used again.
    return ApiError(
        413,
        f"The request's body is larger than this server's limit of {max_bytes} bytes.",
        headers={"Connection": "close"},
    )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; a 413 as soon as it is known to be larger than ``max_bytes``."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def check_num_values(body: bytes, what: str = "The request's body") -> None:
    """Raises a 400 for more than :data:`MAX_JSON_VALUES` values, before any is made."""
    limit = MAX_JSON_VALUES
    # Marks within texts count here, so that this finds too many, but quickly.
    if sum(map(body.count, (b",", b"[", b"{"))) <= limit:
        return
    found = 0
    # Backslashes first: an escaped one does not escape the quotation mark behind it.
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    for match in _JSON_MARK.finditer(bare):
        if bare[match.start()] != ord('"'):
            found += 1
            if found > limit:
                raise ApiError(
                    400,
                    f"{what} holds more than {limit} JSON values. Send less in one request.",
                )


def _not_json(body: bytes, error: Exception) -> ApiError:
    lone = _LONE_SURROGATE.search(body)
    if lone is not None:
        return ApiError(
            400,
            f"The request's body is not valid JSON text: a lone surrogate ({lone[0].decode()}) is "
            f"at byte {lone.start()}. Send surrogates in pairs, or the character as UTF-8.",
        )
    return ApiError(
        400,
        f"The request's body is not valid JSON: {error}. Send UTF-8, with surrogates in pairs "
        "and without NaN or Infinity.",
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``; a 400 that says what is wrong with it.

    msgspec is strict where it matters: no NaN, no invalid UTF-8, no lone surrogates (they could
    not be tokenised), numbers in range, bounded depth.
    """
    if not body:
        raise ApiError(400, "The request has no body; a JSON object is expected.")
    check_num_values(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from None
    except RecursionError:
        raise ApiError(400, "The request's body is nested too deeply.") from None
    except ValueError as error:
        raise ApiError(400, f"The request's body holds a value out of range: {error}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The request's body is JSON, but not an object.")
    # 16.0 is an integer in JSON, and some clients write it so.
    return {
        name: int(item) if isinstance(item, float) and item.is_integer() else item
        for name, item in value.items()
    }


def _check_entries(body: Mapping[str, Any]) -> None:
    for name, limit in MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise ApiError(
                400,
                f"'{name}' has {len(value)} entries; at most {limit} are accepted.",
                param=name,
            )


async def read_request(
    state: ServerState,
    http: Request,
    kind: type[R],
    check: Callable[[R], T],
    check_body: Callable[[Mapping[str, Any]], None] | None = None,
) -> tuple[R, T]:
    """The request of a body, and what ``check`` makes of it.

    ``check_body`` sees the JSON before it is converted, to refuse what is too long. Both may run
    in a worker thread, and raise. Raises a 400 or 413 that says what is wrong.
    """
    body = await read_body(http, state.config.max_body_bytes)

    def work() -> tuple[R, T]:
        values = parse_object(body)
        _check_entries(values)
        if check_body is not None:
            check_body(values)
        request = parse(values, kind)
        return request, check(request)

    if len(body) <= MAX_INLINE_BYTES:
        return work()
    return await state.engine.in_pool(work)


def check_num_tokens(token_ids: list[Any], limit: int, param: str) -> None:
    """Raises a 400 for more ids than ``limit``, the model's context or a bound of ours."""
    if len(token_ids) > limit:
        raise ApiError(
            400,
            f"'{param}' has {len(token_ids)} tokens; at most {limit} are accepted.",
            param=param,
        )


def check_num_chars(state: ServerState, num_chars: int, param: str) -> None:
    """Raises a 400 for text that no context of this model could hold, or 1 Mi characters."""
    tokenizer = state.engine.frontend.tokenizer
    fitting = state.engine.info.max_model_len * tokenizer.max_chars_per_token
    limit = max(MIN_TEXT_CHARS, fitting)
    if num_chars > limit:
        raise ApiError(
            400,
            f"'{param}' has {num_chars} characters; at most {limit} are accepted. Send less text.",
            param=param,
        )
