"""The HTTP application: routes, and what wraps every request."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ambidex
from ambidex import logs
from ambidex.errors import AmbidexError
from ambidex.server.auth import OPEN_PATHS, AdminGuard, AuthMiddleware, route_path
from ambidex.server.errors import INTERNAL_ERROR, ApiError
from ambidex.server.responses import REASON, ClientGoneError, error_response, json_response
from ambidex.server.serving_chat import serve_chat
from ambidex.server.serving_completions import serve_completions
from ambidex.server.serving_text import serve_detokenize, serve_generate, serve_tokenize
from ambidex.server.state import ServerState

log = logging.getLogger(__name__)

Handler = Callable[[ServerState, Request], Awaitable[Response]]

#: nginx's status for a client that left; nobody sees it but the log.
CLIENT_GONE = 499

#: A client's own id of a request, which we hand back.
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

HELLO = (
    "Ambidex {version} serves {model}.\n"
    "OpenAI's API is below /v1; also /tokenize, /detokenize, /generate, /health, /live, "
    "/version, /metrics and /ledger.\n"
)


async def health(state: ServerState, http: Request) -> Response:
    """200 while the engine answers; 503 while it loads, restarts, hangs, or the server drains."""
    if state.is_draining:
        return json_response({"status": "draining"}, 503)
    found = await state.engine.health()
    body = {"status": found.state, "heartbeat_age_s": round(found.heartbeat_age_s, 3)}
    if found.message:
        body["message"] = found.message
    return json_response(body, 200 if found.is_ok else 503)


async def live(state: ServerState, http: Request) -> Response:
    return json_response({"status": "live"})


async def version(state: ServerState, http: Request) -> Response:
    return json_response({"version": ambidex.__version__})


async def metrics(state: ServerState, http: Request) -> Response:
    recorded = state.engine.metrics
    recorded.heartbeat_age(state.engine.heartbeat_age_s)
    page, content_type = recorded.render(http.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type})


async def ledger(state: ServerState, http: Request) -> Response:
    """Each memory's ledger, and where the weights are."""
    return json_response(state.engine.memory_report())


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started_s,
        "owned_by": "ambidex",
        "root": state.engine_config.model.model,
        "parent": None,
        "max_model_len": state.engine.info.max_model_len,
    }


async def models(state: ServerState, http: Request) -> Response:
    data = [_model(state, name) for name in state.model_names]
    return json_response({"object": "list", "data": data})


async def model(state: ServerState, http: Request) -> Response:
    name = http.path_params["name"]
    if not name:
        # A request's empty name means the default model, but here it is no model's path.
        raise HTTPException(404)
    state.check_model(name)
    return json_response(_model(state, name))


async def hello(state: ServerState, http: Request) -> Response:
    return PlainTextResponse(HELLO.format(version=ambidex.__version__, model=state.model_names[0]))


async def server_info(state: ServerState, http: Request) -> Response:
    """The inside, for the administrator; never prompts or keys."""
    engine = state.engine
    return json_response(
        {
            "version": ambidex.__version__,
            "engine_pid": engine.engine_pid,
            "engine_state": engine.state,
            "num_requests": engine.num_requests,
            "stats": asdict(engine.stats),
            "model": msgspec.to_builtins(engine.info),
            "config": msgspec.to_builtins(state.engine_config),
        }
    )


#: Method, path, handler.
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", hello),
    ("GET", "/health", health),
    ("GET", "/live", live),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/ledger", ledger),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
    ("POST", "/v1/chat/completions", serve_chat),
    ("POST", "/v1/completions", serve_completions),
    ("POST", "/tokenize", serve_tokenize),
    ("POST", "/detokenize", serve_detokenize),
    ("POST", "/generate", serve_generate),
)

#: The same, for the administrator.
ADMIN_ROUTES: tuple[tuple[str, str, Handler], ...] = (("GET", "/server_info", server_info),)


class Gate:
    """Counts requests, turns them away while the server drains, and logs each one's end."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_probe = route_path(scope) in OPEN_PATHS
        if self._state.is_draining and not is_probe:
            error = ApiError(
                503,
                "The server is shutting down. Send the request to another one, or again later.",
                headers={"Retry-After": "5", "Connection": "close"},
            )
            await error_response(error)(scope, receive, send)
            return
        status = 0
        echoed = _client_request_id(scope)

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if echoed is not None:
                    message["headers"] = [*message["headers"], (b"x-request-id", echoed)]
            await send(message)

        began_s = time.monotonic()
        self._state.num_in_flight += not is_probe
        try:
            await self._app(scope, receive, send_on)
        finally:
            self._state.num_in_flight -= not is_probe
            # A sentence of ours about the request: it may name a field, and holds no prompt.
            reason = scope.get(REASON)
            log.log(
                logging.DEBUG if is_probe else logging.INFO,
                "%s %s %d",
                scope["method"],
                scope["path"],
                status,
                extra=logs.fields(
                    client=(scope.get("client") or ["?"])[0],
                    seconds=round(time.monotonic() - began_s, 3),
                    **({"reason": f"{reason:.300}"} if reason else {}),
                ),
            )


def _client_request_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value if _REQUEST_ID.fullmatch(value) else None
    return None


async def _on_http_exception(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"There is no {http.method} {http.url.path} here."
        return error_response(ApiError(404, message, code="not_found"))
    if error.status_code == 405:
        message = f"{http.url.path} does not take {http.method}."
        return error_response(ApiError(405, message, headers=error.headers))
    return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))


async def _on_error(http: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_client_gone(http: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _on_bug(http: Request, error: Exception) -> Response:
    # The framework logs the traceback.
    return error_response(ApiError(500, INTERNAL_ERROR))


def build_app(state: ServerState) -> FastAPI:
    """The application over a started (or starting) engine."""
    app = FastAPI(
        title="Ambidex", version=ambidex.__version__, openapi_url=None, redirect_slashes=False
    )
    for method, path, handler in ROUTES:
        app.add_route(path, _endpoint(state, handler), methods=[method])
    guard = AdminGuard(state.config.admin_api_keys)
    for method, path, handler in ADMIN_ROUTES:
        app.add_route(path, _endpoint(state, handler, guard), methods=[method])
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(AmbidexError, _on_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    # The last one added is the outermost.
    config = state.config
    app.add_middleware(AuthMiddleware, api_keys=config.api_keys, admin_keys=config.admin_api_keys)
    app.add_middleware(Gate, state=state)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


def _endpoint(
    state: ServerState, handler: Handler, guard: AdminGuard | None = None
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if guard is not None:
            guard.check(request.scope)
        return await handler(state, request)

    return endpoint
