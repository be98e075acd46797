"""One thread a lane, in which everything of that lane happens: loading, then steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from ambidex.errors import starting_thread
from ambidex.runner.decision import Decision, StepResult

T = TypeVar("T")


class Runner(Protocol):
    """What executes a lane's steps; see ``runner.model_runner.ModelRunner``."""

    def execute(self, decision: Decision) -> StepResult: ...


class Executor:
    """Runs each lane's work in that lane's own thread, in the order of submission.

    Models are loaded there too: an OpenMP runtime keeps a team of threads for every thread that
    has computed anything, and spins less in all of them once there are more threads than cores.
    Loading in another thread costs each step a third more.
    """

    def __init__(self, lanes: Iterable[str]) -> None:
        self._threads = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"lane-{lane}") for lane in lanes
        }

    def call(self, lane: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Raises OutOfMemory where the system does not give the lane's thread."""
        with starting_thread():
            return self._threads[lane].submit(function, *arguments)

    def submit(self, lane: str, runner: Runner, decision: Decision) -> Future[StepResult]:
        return self.call(lane, runner.execute, decision)

    def close(self) -> None:
        """Wait for what is in flight, then end the threads."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)
