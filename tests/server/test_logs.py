from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from ambidex import logs


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger(logs.ROOT)
    before = (list(root.handlers), root.level, ours.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_is_one_line_an_event() -> None:
    stream = io.StringIO()
    logs.configure("INFO", "text", stream)
    log = logging.getLogger("ambidex.test")
    log.info("hello\nINFO forged \x1b[31m", extra=logs.fields(id="a\r\nb", seconds=0.123456))
    log.debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"INFO hello\nINFO forged \x1b[31m id=a\r\nb seconds=0.1235")


def test_json() -> None:
    stream = io.StringIO()
    logs.configure("DEBUG", "json", stream)
    log = logging.getLogger("ambidex.test")
    log.debug("hello", extra=logs.fields(id="a\nb", message="not this"))
    try:
        raise ValueError("x")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "hello"
    assert first["id"] == "a\nb"
    assert first["level"] == "DEBUG"
    assert first["time"].endswith("Z")
    assert "ValueError" in second["exception"]


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, expected in ((Terminal(), True), (io.StringIO(), False)):
        logs.configure("INFO", "text", stream)
        logging.getLogger("ambidex.test").warning("careful")
        assert ("\x1b[" in stream.getvalue()) is expected
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    logs.configure("INFO", "text", stream)
    logging.getLogger("ambidex.test").warning("careful")
    assert "\x1b[" not in stream.getvalue()


def test_libraries_log_from_warning_up() -> None:
    stream = io.StringIO()
    logs.configure("DEBUG", "text", stream)
    logging.getLogger("somelib").info("chatter")
    logging.getLogger("somelib").warning("trouble")
    assert "chatter" not in stream.getvalue()
    assert "trouble" in stream.getvalue()
