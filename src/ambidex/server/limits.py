"""Reading a request's JSON under limits: size, encoding, depth, form."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from ambidex.server.errors import ApiError

#: Prompts in one completion request.
MAX_PROMPTS = 256

#: Prompts times ``n``: sequences that one HTTP request may start.
MAX_SEQUENCES = 1024


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


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``; a 400 that says what is wrong with it.

    msgspec is strict where it matters: no NaN, no invalid UTF-8, no lone surrogates (they could
    not be tokenised), numbers in range, bounded depth.
    """
    if not body:
        raise ApiError(400, "The request has no body; a JSON object is expected.")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(
            400,
            f"The request's body is not valid JSON: {error}. Send UTF-8, with surrogates in pairs "
            "and without NaN or Infinity.",
        ) from None
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


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    return parse_object(await read_body(request, max_bytes))
