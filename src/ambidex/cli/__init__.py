"""The command line. This file holds the table of commands and imports nothing heavy: a command's
own imports are inside its function, so that ``ambidex --help`` answers at once."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from ambidex.errors import AmbidexError, OptionError, memory_refusal

#: Command -> (module with ``main(argv) -> exit code``, what it does).
COMMANDS = {
    "run": ("ambidex.cli.run", "answer one prompt, streaming to the terminal"),
    "chat": ("ambidex.cli.chat", "talk to a model in the terminal"),
    "serve": ("ambidex.cli.serve", "serve a model over OpenAI's HTTP API"),
    "plan": ("ambidex.cli.plan", "say what fits, where it lies and how fast, without loading it"),
    "pull": ("ambidex.cli.pull", "fetch a model into the cache"),
}

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. What the user can mend is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except AmbidexError as error:
        return _fail(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone.
        _discard(sys.stdout, sys.stderr)
        return EXIT_CLOSED_PIPE
    except (MemoryError, OSError, RuntimeError) as error:
        explained = _explain(error)
        if explained is None:
            raise
        _discard(sys.stdout)
        return _fail(explained)


def _fail(error: AmbidexError) -> int:
    print(f"ambidex: error: {error}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, OptionError) else EXIT_ERROR


def _explain(error: Exception) -> AmbidexError | None:
    """The user's situation behind a system's error; None where it is a mistake of ours."""
    refused = memory_refusal(error)
    if refused is not None:
        return refused
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return AmbidexError("The output cannot be written: the disk is full. Free space on it.")
    if number in (errno.EMFILE, errno.ENFILE):
        return AmbidexError("Too many files are open. Raise the limit (ulimit -n).")
    return None


def _prepare_streams() -> None:
    """Closed streams become empty ones; a character that a terminal lacks becomes '?'."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _discard(*streams: TextIO) -> None:
    """Python would complain at its end about what it could not write to these."""
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(sink, stream.fileno())


def _dispatch(words: list[str]) -> int:
    if len(words) > 1 and words[0] == "help":
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "-v", "--version", "version"):
        from ambidex import __version__

        print(f"ambidex {__version__}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Commands: {', '.join(COMMANDS)}."
        raise OptionError(f"There is no command '{command}'. {hint} See ambidex --help.")
    code: int = importlib.import_module(COMMANDS[command][0]).main(rest)
    return code


def _usage() -> str:
    lines = ["usage: ambidex COMMAND [MODEL] [OPTIONS]", "", "Commands:"]
    lines += [f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "MODEL is a folder, a GGUF file, an alias such as smollm2-135m-instruct, or a hub id",
        "(org/name[:file]). `ambidex COMMAND --help` lists a command's options.",
        "`ambidex --version` prints the version.",
    ]
    return "\n".join(lines)
