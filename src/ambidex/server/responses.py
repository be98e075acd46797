"""Responses: JSON, errors, and streams that notice when the client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ambidex.errors import AmbidexError
from ambidex.server.errors import ApiError, to_api_error

log = logging.getLogger(__name__)

T = TypeVar("T")

_encoder = msgspec.json.Encoder()

#: The last event of a stream that went well.
DONE = b"data: [DONE]\n\n"

#: Proxies must hand events on as they come.
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(_encoder.encode(value), status, headers, "application/json")


#: Where a request's scope holds the sentence that was sent instead of an answer.
REASON = "ambidex.reason"


class _ErrorResponse(Response):
    """An answer whose reason the log of requests is told."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            _encoder.encode(error.body()), error.status, error.headers, "application/json"
        )
        self._reason = error.message

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REASON] = self._reason
        await super().__call__(scope, receive, send)


def error_response(error: Exception) -> Response:
    """The answer to any error; faults of our own are not described to the client."""
    return _ErrorResponse(to_api_error(error))


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer."""


async def _gone(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects first.

    Raises :class:`ClientGoneError` then.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


class StreamResponse(Response):
    """Sends ``chunks`` as they come. When the client goes, the generator is closed at once, even
    while it waits for its first output. An error becomes a last event with OpenAI's error object.

    ``close`` runs in every case: a generator that never started would not free what it stands for.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        media_type: str = "text/event-stream",
        as_events: bool = True,
    ) -> None:
        super().__init__(None, 200, _STREAM_HEADERS, media_type)
        # The length is not known.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._chunks = chunks
        self._close = close
        self._as_events = as_events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.gather(gone, pump, return_exceptions=True)
            self._close()

    async def _pump(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                await self._send_error(error, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, error: Exception, send: Send) -> None:
        if isinstance(error, OSError):
            # The connection itself broke.
            return
        api_error = to_api_error(error)
        if api_error is not error and api_error.status == 500:
            log.error("stream failed: %s", error, exc_info=_unexpected(error))
        body = event(api_error.body()) if self._as_events else encode(api_error.body()) + b"\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _unexpected(error: Exception) -> Exception | None:
    """The error where it deserves a traceback: faults of our own."""
    return None if isinstance(error, AmbidexError) else error
