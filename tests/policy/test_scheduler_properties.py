"""Random requests, aborts, failures and delays over tiny pools; the lane checks every slot.

A list of operations drives the real scheduler and block manager. Steps are scheduled, run and
taken in at times of hypothesis's choosing, several in flight at once, perhaps on two lanes. After
each operation the pools must add up; at the end every request must have ended, with the tokens
that it gives when it runs alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from fake_lane import EOS, FakeLane, engine_request, expected_output, group
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ambidex.config import SchedulerConfig
from ambidex.engine.scheduler import Scheduler, SchedulerStats
from ambidex.kv.block_manager import BlockManager
from ambidex.request import EngineOutput, EngineRequest, FinishReason, RequestStatus
from ambidex.runner.decision import Decision, StepResult

SIZE = 8
MAX_IN_FLIGHT = 3
WINDOWS = [(None,), (12,), (None, 8), (None, 20), (1, 16), (None, 5, 24)]


@dataclass(frozen=True)
class Setup:
    windows: tuple[int | None, ...]
    max_model_len: int
    spare_blocks: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    is_chunked: bool
    is_caching: bool
    policy: str
    lanes: tuple[str, ...]


SETUPS = st.builds(
    Setup,
    windows=st.sampled_from(WINDOWS),
    max_model_len=st.integers(10, 60),
    spare_blocks=st.tuples(*[st.integers(0, 8)] * 3),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 50),
    is_chunked=st.booleans(),
    is_caching=st.sampled_from([True, True, True, False]),
    policy=st.sampled_from(["fcfs", "priority"]),
    lanes=st.sampled_from([("cpu",), ("cpu",), ("cpu", "gpu")]),
)

# Prompts are a shared prefix and a tail of few different tokens: hits of every length occur.
ADDS = st.fixed_dictionaries(
    {
        "prefix": st.tuples(st.integers(50, 51), st.integers(0, 40)),
        "tail": st.lists(st.integers(1, 3), max_size=12),
        "priority": st.integers(0, 2),
        "cache_salt": st.sampled_from([None, None, None, "x"]),
        "max_tokens": st.one_of(st.none(), st.integers(0, 30)),
        "ignore_eos": st.sampled_from([True, True, False]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(st.integers(1, 22), max_size=1),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    }
)
NUMBERS = st.integers(0, 9)
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), ADDS),
    st.tuples(st.just("add"), ADDS),
    st.tuples(st.just("schedule"), NUMBERS),
    st.tuples(st.just("run"), NUMBERS),
    st.tuples(st.just("update"), NUMBERS),
    st.tuples(st.just("steps"), NUMBERS),
    st.tuples(st.sampled_from(["abort", "fail", "reset_cache"]), NUMBERS),
)


class World:
    """The scheduler under test, its lanes, and all that must hold."""

    def __init__(self, setup: Setup) -> None:
        max_num_batched_tokens = setup.max_num_batched_tokens
        if not setup.is_chunked:
            max_num_batched_tokens = max(max_num_batched_tokens, setup.max_model_len)
        groups = [group(window) for window in setup.windows]
        # As small as the scheduler allows, and a little more.
        probe = BlockManager(groups, [1] * len(groups), SIZE)
        needed = probe.num_blocks_needed(setup.max_model_len, max_num_batched_tokens)
        num_blocks = [n + spare for n, spare in zip(needed, setup.spare_blocks, strict=False)]
        self.manager = BlockManager(groups, num_blocks, SIZE, setup.is_caching)
        self.config = SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=setup.is_chunked,
            policy=setup.policy,
        )
        self.scheduler = Scheduler(self.config, self.manager, setup.max_model_len, setup.lanes)
        shared: dict[str, Any] = {"store": {}, "salts": {}}
        self.lanes = {name: FakeLane(self.manager, **shared) for name in setup.lanes}
        self.salts = shared["salts"]
        #: Steps that a lane has still to run, and results that are still to be taken in.
        self.queued: dict[str, deque[Decision]] = {name: deque() for name in setup.lanes}
        self.done: dict[str, deque[tuple[Decision, StepResult]]] = {
            name: deque() for name in setup.lanes
        }
        self.sources: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    # -- operations -------------------------------------------------------------------------

    def do(self, name: str, argument: Any) -> None:
        if name == "add":
            self.add(**argument)
        else:
            getattr(self, name)(argument)
        self.manager.check()
        for pool in self.manager.pools:
            assert pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks

    def add(self, prefix: tuple[int, int], tail: list[int], **options: Any) -> None:
        token, count = prefix
        prompt = ([token] * count + tail)[: self.scheduler.max_model_len] or [1]
        request_id = f"r{len(self.sources)}"
        source = engine_request(request_id, prompt, **options)
        self.sources[request_id] = source
        self.salts[request_id] = source.cache_salt
        self.tokens[request_id] = []
        self.scheduler.add(source)

    def abort(self, number: int) -> None:
        """One of the latest ten requests, finished or not."""
        self.take(self.scheduler.abort([f"r{len(self.sources) - 1 - number}"]))

    def reset_cache(self, number: int) -> None:
        self.manager.reset_prefix_cache()

    def schedule(self, number: int) -> None:
        lane = self.pick(dict.fromkeys(self.lanes, True), number)
        if lane is not None and len(self.queued[lane]) + len(self.done[lane]) < MAX_IN_FLIGHT:
            self.schedule_on(lane)

    def run(self, number: int, is_failing: bool = False) -> None:
        """A lane computes the oldest of its steps, perhaps failing for one request."""
        lane = self.pick(self.queued, number)
        if lane is None:
            return
        decision = self.queued[lane].popleft()
        ids = [scheduled.request_id for scheduled in decision.requests]
        failing = [ids[number % len(ids)]] if is_failing else []
        self.done[lane].append((decision, self.lanes[lane].run(decision, failing)))

    def fail(self, number: int) -> None:
        self.run(number, is_failing=True)

    def update(self, number: int) -> None:
        lane = self.pick(self.done, number)
        if lane is not None:
            self.take(self.scheduler.update(*self.done[lane].popleft()))

    def steps(self, count: int) -> None:
        """Whole steps, so that requests get somewhere."""
        self.settle()
        for _ in range(count):
            for lane in self.lanes:
                self.schedule_on(lane)
            self.settle()

    # -- parts ------------------------------------------------------------------------------

    def pick(self, by_lane: dict[str, Any], number: int) -> str | None:
        names = [name for name, value in by_lane.items() if value]
        return names[number % len(names)] if names else None

    def schedule_on(self, lane: str) -> None:
        scheduler = self.scheduler
        is_idle = not any(self.queued.values()) and not any(self.done.values())
        running = scheduler._running[lane]
        best = running[0] if running else None
        num_elsewhere = scheduler.num_running - len(running)
        decision = scheduler.schedule(lane)
        if decision is None:
            # With nothing in flight, and no other lane to wait for, there is always a step.
            assert not is_idle or num_elsewhere or not scheduler.request_ids, "stuck"
            return
        ids = {scheduled.request_id for scheduled in decision.requests}
        if is_idle and not num_elsewhere and best in running and self.config.enable_chunked_prefill:
            assert best is not None
            assert best.request_id in ids, "the best-ranked request always runs"
        self.check_decision(decision)
        self.queued[lane].append(decision)

    def check_decision(self, decision: Decision) -> None:
        scheduler, config = self.scheduler, self.config
        num_tokens = sum(len(scheduled.token_ids) for scheduled in decision.requests)
        assert 0 < num_tokens == decision.num_tokens <= config.max_num_batched_tokens
        assert len(scheduler._running[decision.lane]) <= config.max_num_seqs
        waiting = [r for r in scheduler._requests.values() if r.status is RequestStatus.WAITING]
        assert len(waiting) == scheduler.num_waiting
        assert all(r.num_computed_tokens == r.num_in_flight_tokens == 0 for r in waiting)
        for scheduled in decision.requests:
            source = self.sources[scheduled.request_id]
            if scheduled.new is not None:
                rank = scheduler._requests[scheduled.request_id].rank
                assert all(rank < r.rank for r in waiting), "a waiting request was overtaken"
                assert scheduled.start == 0 or source.params.prompt_logprobs is None
            if not config.enable_chunked_prefill:
                wants_none = source.params.max_tokens == 0
                is_full = len(source.prompt_token_ids) == scheduler.max_model_len
                assert scheduled.sample or wants_none or is_full, "a prompt was cut"

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            request_id = output.request_id
            assert request_id not in self.reasons, "news of a request that has ended"
            assert output.new_token_ids or output.finish_reason is not None, "no news"
            assert output.num_cached_tokens < len(self.sources[request_id].prompt_token_ids)
            self.tokens[request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[request_id] = output.finish_reason

    def settle(self) -> None:
        """Run and take in all that is in flight."""
        for lane, queue in self.queued.items():
            while self.done[lane]:
                self.take(self.scheduler.update(*self.done[lane].popleft()))
            while queue:
                decision = queue.popleft()
                self.take(self.scheduler.update(decision, self.lanes[lane].run(decision)))

    def end(self) -> SchedulerStats:
        """Let everything end, and judge what came out."""
        num_steps = 0
        while self.scheduler.has_work:
            self.do("steps", 1)
            num_steps += 1
            assert num_steps < 5000, "requests do not end"
        assert set(self.reasons) == set(self.sources), "a request was dropped in silence"
        for request_id in self.sources:
            self.check_answer(request_id)
        assert all(pool.num_used == 0 for pool in self.manager.pools), "blocks leaked"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        return self.scheduler.stats()

    def check_answer(self, request_id: str) -> None:
        source, tokens = self.sources[request_id], self.tokens[request_id]
        expected = expected_output(source, self.scheduler.max_model_len)
        reason = self.reasons[request_id]
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert tokens == expected[: len(tokens)]
            return
        assert tokens == expected
        params = source.params
        stops = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
        is_stop = bool(tokens) and len(tokens) >= params.min_tokens and tokens[-1] in stops
        assert reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(setup=SETUPS, operations=st.lists(OPERATIONS, min_size=25, max_size=70))
def test_whatever_happens(setup: Setup, operations: list[tuple[str, Any]]) -> None:
    world = World(setup)
    for name, argument in operations:
        world.do(name, argument)
    stats = world.end()
    event(f"preemptions: {stats.num_preemptions > 0}")
    event(f"prefix hits: {stats.prefix_cache_hits > 0}")
    event(f"evictions: {stats.num_evictions > 0}")
    event(f"chunks: {stats.num_chunked_prefills > 0}")


def test_the_paths_are_taken() -> None:
    """One fixed world in which the counters say that what is tested above does happen."""
    setup = Setup((None, 12), 60, (2, 4, 0), 6, 24, True, True, "priority", ("cpu",))
    world = World(setup)
    for number in range(40):
        request = {
            "prefix": (50 + number % 2, 7 * (number % 5)),
            "tail": [1, number % 3 + 1],
            "priority": number % 3,
            "max_tokens": 5 + number % 25,
            "ignore_eos": True,
        }
        world.do("add", request)
        world.do("steps", 2)
    stats = world.end()
    assert stats.num_preemptions > 2
    assert stats.prefix_cache_hits > 50
    assert stats.num_evictions > 20
    assert stats.num_chunked_prefills > 5
