"""Logging: one line per event on standard error, as text or as JSON.

Loggers live below ``ambidex``. Events carry their numbers in ``fields(...)``, so that both
formats show them: ``log.info("request finished", extra=fields(id=..., output_tokens=12))``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

ROOT = "ambidex"

LEVELS: Mapping[str, int] = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}

_COLOURS: Mapping[int, str] = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31m",
}
_RESET = "\x1b[0m"

#: Control characters would let a client forge lines of the log, or steer a terminal.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """The ``extra`` argument of a logging call: named values of one event."""
    return {"fields": values}


def one_line(text: str) -> str:
    """The text with its control characters escaped."""
    return text.translate(_ESCAPES)


def _event_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return record.__dict__.get("fields") or {}


class TextFormatter(logging.Formatter):
    """``12:34:56 INFO request finished id=... output_tokens=12``; a traceback follows below."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [f"{clock} {record.levelname}", one_line(record.getMessage())]
        for name, value in _event_fields(record).items():
            shown = f"{value:.4g}" if isinstance(value, float) else one_line(str(value))
            parts.append(f"{name}={shown}")
        line = " ".join(parts)
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        start = _COLOURS.get(record.levelno, "") if self.colour else ""
        return f"{start}{line}{_RESET}" if start else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _event_fields(record).items():
            event.setdefault(name, value)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def configure(level: str = "INFO", format: str = "text", stream: TextIO | None = None) -> None:
    """Set up the ``ambidex`` logger of this process; calling it again replaces the set-up.

    Colour appears only on a terminal, and not where ``NO_COLOR`` is set. Libraries log from
    WARNING up, in the same form.
    """
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    if format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter(target.isatty() and not os.environ.get("NO_COLOR")))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(LEVELS.get(level.upper(), logging.INFO))
