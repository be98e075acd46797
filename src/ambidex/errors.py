"""Every error that a user can meet, as a typed exception whose text is a full sentence.

A message names what was wrong, the numbers, and the next step. Mistakes of our own are asserts,
except a forbidden status transition, which is :class:`InvalidRequestError`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator


class AmbidexError(Exception):
    """Base of all errors that are shown to a user in one line, without a traceback."""


class OptionError(AmbidexError):
    """A command-line option, an environment variable or a configuration file is wrong."""


class InstallationError(AmbidexError):
    """A library that Ambidex is built on is missing or does not work here."""


class ModelNotFoundError(AmbidexError):
    """MODEL is no path, no alias and no hub id that can be had here."""


class InvalidModelError(AmbidexError):
    """A model's files are damaged, incomplete or contradict each other."""


class UnsupportedModelError(AmbidexError):
    """The files are sound, but this architecture, tensor type or tokenizer is not supported."""


class DownloadError(AmbidexError):
    """A model could not be fetched: no network, no space, a wrong checksum, an unwritable cache."""


class OutOfMemory(AmbidexError):
    """A reservation would exceed the capacity of a memory, or the system gives no more."""


def memory_refusal(error: BaseException) -> OutOfMemory | None:
    """The OutOfMemory behind an error of Python's, PyTorch's or the system's that means that no
    memory was given; None for any other error."""
    # PyTorch has no class of its own for it.
    is_torch_s = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    is_system_s = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or is_torch_s or is_system_s):
        return None
    return OutOfMemory(
        "The system refused to give more memory. Free memory, raise this process's limit "
        "(ulimit -v), or ask for less: --max-model-len, --max-num-batched-tokens."
    )


@contextlib.contextmanager
def starting_thread() -> Iterator[None]:
    """Raises OutOfMemory where the system does not give the thread that is started within."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise OutOfMemory(
            "The system refused to start a thread. End other programs, or raise this process's "
            "limits (ulimit -u, ulimit -v)."
        ) from None


class RequestError(AmbidexError):
    """A client's request cannot be served; the server answers HTTP 400.

    ``param`` names the offending field, as in OpenAI's error object.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(AmbidexError):
    """The engine process died while requests were running; the server answers HTTP 500."""


class InvalidRequestError(AssertionError):
    """A request was moved between two statuses that the transition table does not join: our bug."""


class KernelError(RuntimeError):
    """A kernel was given a tensor that it cannot work on: wrong shape, type, stride or owner."""


class DeviceError(RuntimeError):
    """Work on a device failed, or a tensor of another device was given to it."""
