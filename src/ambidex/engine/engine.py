"""The engine: a scheduler, a block manager and one executor thread a lane.

    decision = scheduler.schedule(lane)          # policy, plain data
    future = executor.submit(lane, decision)     # the lane's own thread computes
    outputs = scheduler.update(decision, result) # tokens, and who is finished

Only the thread that calls :meth:`Engine.step` touches the scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from ambidex.config import EngineConfig
from ambidex.engine.foretold import Foretelling, StepSpeed
from ambidex.engine.messages import EngineInfo
from ambidex.engine.progress import Progress
from ambidex.engine.scheduler import Scheduler, SchedulerStats
from ambidex.engine.summary import describe_engine
from ambidex.errors import EngineDeadError
from ambidex.kv.block_manager import BlockManager
from ambidex.memory.ledger import MemorySnapshot
from ambidex.request import EngineOutput, EngineRequest
from ambidex.runner.decision import Decision, StepResult
from ambidex.runner.executor import Executor
from ambidex.runner.loader import LoadedLane, load_lane

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineTimes:
    """Seconds spent since the start, for the share of a step outside the model."""

    num_steps: int = 0
    #: Forward passes, the head included.
    model_s: float = 0.0
    #: From the decision to the outputs, everything included.
    step_s: float = 0.0


class Engine:
    """Requests in, tokens out, one step at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.lanes = ("cpu",)
        self._process_id = os.getpid()
        self._executor = Executor(self.lanes)
        self.lane: LoadedLane = self._load()
        self.block_manager = BlockManager(
            self.lane.groups,
            self.lane.num_blocks,
            config.cache.block_size,
            config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            config.scheduler, self.block_manager, self.lane.max_model_len, self.lanes
        )
        self.times = EngineTimes()
        self._foretelling = Foretelling(self.lane.predict)
        self._in_flight: dict[str, tuple[Decision, float, Future[StepResult]]] = {}
        self._completions: queue.SimpleQueue[None] = queue.SimpleQueue()

    def _load(self) -> LoadedLane:
        """In the lane's thread; an interrupt ends it after the tensor that is being read."""
        is_cancelled = threading.Event()
        logger.info("loading %s", self.config.model.model)
        with Progress("Loading weights") as progress:

            def report(done: int, total: int) -> None:
                if is_cancelled.is_set():
                    raise CancelledError
                progress.update(done, total)

            try:
                return self._executor.call("cpu", load_lane, self.config, report).result()
            except BaseException:
                is_cancelled.set()
                self._executor.close()
                raise

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a forked child, which has none of the lanes' threads."""
        return os.getpid() != self._process_id

    def check_process(self) -> None:
        """Raises EngineDeadError in a forked child, which would wait for its threads for ever."""
        if self.is_forked:
            raise EngineDeadError(
                f"The model was loaded by process {self._process_id}, and process {os.getpid()} "
                "was forked from it without its threads. Load the model in the child."
            )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; it is answered by the outputs of later steps."""
        self.check_process()
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests early; unknown ids are ignored, since they may just have finished."""
        return self.scheduler.abort(request_ids)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Submit what idle lanes can do, wait for one completion, return its outputs.

        Returns an empty list where there is nothing to do or ``timeout_s`` has passed. Raises
        EngineDeadError in a forked child. Whoever may be interrupted waits in :meth:`wait`.
        """
        self.check_process()
        for lane in self.lanes:
            if lane in self._in_flight:
                continue
            began = time.perf_counter()
            decision = self.scheduler.schedule(lane)
            if decision is None:
                continue
            future = self._executor.submit(lane, self.lane.runner, decision)
            self._in_flight[lane] = (decision, began, future)
            future.add_done_callback(lambda _: self._completions.put(None))
        self.wait(timeout_s)
        for lane, (decision, began, future) in self._in_flight.items():
            if future.done():
                del self._in_flight[lane]
                with contextlib.suppress(queue.Empty):
                    # Or one would stay for each step that nobody waited for.
                    self._completions.get_nowait()
                result = future.result()
                outputs = self.scheduler.update(decision, result)
                self._account(decision, result, began)
                return outputs
        return []

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until :meth:`step` has something to return at once, or ``timeout_s`` has passed.
        Nothing changes here: it may be interrupted."""
        # What comes out of the queue says only that it is time to look: it may be lost, or old.
        while self._in_flight and not any(f.done() for _, _, f in self._in_flight.values()):
            try:
                self._completions.get(timeout=timeout_s)
            except queue.Empty:
                return

    def _account(self, decision: Decision, result: StepResult, began: float) -> None:
        elapsed = time.perf_counter() - began
        self.times.num_steps += 1
        self.times.model_s += result.model_s
        self.times.step_s += elapsed
        self._foretelling.record(decision, elapsed)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "step %d on %s: %d prefill tokens, %d decode tokens, %d requests, %.1f ms",
                decision.step,
                decision.lane,
                decision.num_prefill_tokens,
                decision.num_decode_tokens,
                len(decision.requests),
                elapsed * 1e3,
            )

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def memory(self) -> list[MemorySnapshot]:
        """What is reserved now, one entry a memory: the host's first."""
        return [ledger.snapshot() for ledger in self.lane.ledgers]

    def speed(self) -> dict[str, StepSpeed]:
        """How long steps took beside what was predicted, by kind; empty until there are enough."""
        return self._foretelling.report()

    def info(self) -> EngineInfo:
        """What a front end must know, and what the start-up table shows."""
        return describe_engine(self.config, self.lane)

    def close(self) -> None:
        """End the lanes' threads and give the memory back."""
        self._executor.close()
        self.lane.close()
