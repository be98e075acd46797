"""OpenAI's error object, and which HTTP status each kind of error has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ambidex.engine.async_engine import EngineUnavailableError, RequestFailedError
from ambidex.errors import AmbidexError, EngineDeadError, RequestError

#: HTTP status -> OpenAI's ``type``.
ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}

#: Our errors -> HTTP status; any other :class:`AmbidexError` is a 500.
STATUS_OF: Mapping[type[AmbidexError], int] = {
    RequestError: 400,
    EngineUnavailableError: 503,
    EngineDeadError: 500,
    RequestFailedError: 500,
}

#: What a client may be told of a fault of ours; the log has the rest.
INTERNAL_ERROR = "The server met an internal error; its log says more."


class ApiError(Exception):
    """An answer other than 200, with OpenAI's fields."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def to_api_error(error: Exception) -> ApiError:
    """What the client is told. Only :class:`AmbidexError` sentences are shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, AmbidexError):
        status = STATUS_OF.get(type(error), 500)
        headers = {"Retry-After": "5"} if status == 503 else {}
        return ApiError(status, str(error), headers=headers)
    return ApiError(500, INTERNAL_ERROR)


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`$")


def from_validation(error: msgspec.ValidationError) -> ApiError:
    """A field that is missing, of the wrong type, or out of range, as a 400 that names it."""
    missing = _MISSING.search(str(error))
    if missing is not None:
        return ApiError(400, f"The field '{missing[1]}' is missing.", param=missing[1])
    match = _AT.match(str(error))
    assert match is not None
    where = match["where"]
    what = match["what"].replace("`", "'").replace(" | null", "")
    if not where:
        return ApiError(400, f"{what}.")
    param = re.split(r"[.\[]", where)[0]
    return ApiError(400, f"{what}, in the field '{where}'.", param=param)
