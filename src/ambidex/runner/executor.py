"""One thread a lane: submits a step, answers with a future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from ambidex.runner.decision import Decision, StepResult


class Runner(Protocol):
    """What executes a lane's steps; see ``runner.model_runner.ModelRunner``."""

    def execute(self, decision: Decision) -> StepResult: ...


class Executor:
    """Runs each lane's steps in that lane's own thread, in the order of submission."""

    def __init__(
        self, runners: dict[str, Runner], prepare_thread: Callable[[], None] | None = None
    ) -> None:
        self._runners = runners
        self._threads = {
            lane: ThreadPoolExecutor(
                1, thread_name_prefix=f"lane-{lane}", initializer=prepare_thread
            )
            for lane in runners
        }

    def submit(self, lane: str, decision: Decision) -> Future[StepResult]:
        return self._threads[lane].submit(self._runners[lane].execute, decision)

    def close(self) -> None:
        """Wait for the steps in flight, then end the threads."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        self._runners.clear()
