"""API keys: who may call what.

Without keys everything is open, except the inner views, which then answer loopback only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from ambidex.server.errors import ApiError
from ambidex.server.responses import error_response

#: Open to everybody: probes and scrapers have no key.
OPEN_PATHS = frozenset({"/health", "/live", "/version", "/metrics"})

#: A request that a proxy passed on does not come from this machine, whatever its address.
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})


def _digest(key: bytes) -> bytes:
    # Digests have one length, so that comparing them tells nothing of the key's.
    return hashlib.sha256(key).digest()


class KeyRing:
    """A set of keys; looking one up takes the same time whether, and where, it matches."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holds(self, key: bytes) -> bool:
        given = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(given, known)
        return found


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key of an ``Authorization: Bearer KEY`` header, or None."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None


def is_loopback(scope: Scope) -> bool:
    """True where the client runs on this machine and no proxy stands between."""
    if any(name in _FORWARDED for name, _ in scope["headers"]):
        return False
    client = scope.get("client")
    if not client:
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def route_path(scope: Scope) -> str:
    """The path below ``--root-path``, as the router sees it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(f"{root}/"):
        return path[len(root) :]
    return path


class AuthMiddleware:
    """Answers 401 without a valid key. An administrator's key opens everything."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._app = app
        self._is_open = not api_keys
        self._keys = KeyRing([*api_keys, *admin_keys])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open and route_path(scope) not in OPEN_PATHS:
            key = bearer_key(scope["headers"])
            if key is None or not self._keys.holds(key):
                await error_response(_wrong_key(key))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AdminGuard:
    """For views of the inside: the administrator's key, or, where none is set, this machine."""

    def __init__(self, admin_keys: Iterable[str]) -> None:
        self._keys = KeyRing(admin_keys)

    def check(self, scope: Scope) -> None:
        """Raises :class:`ApiError` (401 or 403) for a client that may not look."""
        if self._keys:
            key = bearer_key(scope["headers"])
            if key is None or not self._keys.holds(key):
                raise _wrong_key(key)
        elif not is_loopback(scope):
            raise ApiError(
                403,
                "This view answers only clients on the server's own machine. Start the server "
                "with --admin-api-key to open it to those who have that key.",
            )


def _wrong_key(key: bytes | None) -> ApiError:
    message = (
        "No API key was given. Send it as 'Authorization: Bearer KEY'."
        if key is None
        else "The API key is wrong."
    )
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
