"""What each step computes: the policy between requests and lanes. No torch, no tensors.

The engine's loop is ``decision = schedule(lane)``, the lane runs it, ``update(decision, result)``.
A request counts tokens, not phases: a step computes some more of the tokens that are known.
A first prompt, a chunk of one, decode and recomputation after a preemption are one rule.

Order is by *rank*: arrival (``fcfs``), or priority number and then arrival (``priority``).
Running requests come first, best rank first, then waiting ones, and these are never overtaken.
Where blocks lack, the request of the worst rank is preempted: its blocks are freed, and it is
computed again later. So the best-ranked request always runs, and every request ends.

``schedule()`` advances ``num_computed_tokens`` at once. A request with tokens in flight is left
alone until their step is done: not scheduled again, not preempted, its blocks not freed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ambidex.config import SchedulerConfig
from ambidex.errors import OptionError, RequestError
from ambidex.kv.block_manager import BlockManager
from ambidex.request import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    Request,
    RequestStatus,
    TokenLogprobs,
)
from ambidex.runner.decision import Decision, NewRequest, ScheduledRequest, StepResult


@dataclass(slots=True)
class SchedulerStats:
    """Gauges of this moment, and counters since the start (all ``num_`` below ``num_steps``)."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    #: Used blocks over all blocks, 0 to 1, of the fullest KV group.
    kv_usage: float = 0.0
    num_steps: int = 0
    num_steps_by_lane: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    #: Tokens that were looked up, and found, in the prefix cache when first scheduled.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    #: Tokens of prompts that are computed (or found) to their end.
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    #: Chunks that left a rest of their request's known tokens for a later step.
    num_chunked_prefills: int = 0
    #: Cached blocks that were given up to make room.
    num_evictions: int = 0


class _Tracked(Request):
    """A request with what only the scheduler needs, worked out once."""

    __slots__ = (
        "eos_ids",
        "is_known_to_runner",
        "max_num_tokens",
        "min_num_tokens",
        "num_prompt_logprobs_seen",
        "num_prompt_logprobs_sent",
        "preempt_when_done",
        "rank",
        "stop_ids",
    )

    def __init__(
        self, source: EngineRequest, sequence: int, max_model_len: int, by_priority: bool
    ) -> None:
        super().__init__(source, sequence)
        params = source.params
        #: Lower is better; unique.
        self.rank = (source.priority if by_priority else 0, sequence)
        #: Bounds on prompt and output together.
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.eos_ids = frozenset(() if params.ignore_eos else params.eos_token_ids)
        self.stop_ids = frozenset(params.stop_token_ids)
        self.is_known_to_runner = False
        #: A promise to give way, made while a step of it was in flight.
        self.preempt_when_done = False
        #: Prompt log probabilities that went out, and those computed since the last (re)start.
        self.num_prompt_logprobs_sent = 0
        self.num_prompt_logprobs_seen = 0

    @property
    def wants_token(self) -> bool:
        return len(self.token_ids) < self.max_num_tokens

    def stop_check(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Finish reason and stop reason after ``token_id`` was appended."""
        num_tokens = len(self.token_ids)
        if num_tokens >= self.min_num_tokens:
            if token_id in self.eos_ids:
                return FinishReason.STOP, None
            if token_id in self.stop_ids:
                return FinishReason.STOP, token_id
        if num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None


def _rank(request: _Tracked) -> tuple[int, int]:
    return request.rank


class _WaitingQueue:
    """Waiting requests, best rank first. A discarded one is dropped when it is next met."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], _Tracked]] = []
        self._num_discarded = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_discarded

    def push(self, request: _Tracked) -> None:
        heapq.heappush(self._heap, (request.rank, request))

    def head(self) -> _Tracked | None:
        while self._heap and self._heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)
            self._num_discarded -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Remove what :meth:`head` returned."""
        heapq.heappop(self._heap)

    def discard(self) -> None:
        """Note that a request in the queue has left the status WAITING."""
        self._num_discarded += 1
        if self._num_discarded > len(self._heap) // 2:
            self._heap = [e for e in self._heap if e[1].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
            self._num_discarded = 0


class Scheduler:
    """Decides what each lane computes next. Only the engine thread may call it.

    Raises :class:`OptionError` where the limits contradict each other, or where the pools cannot
    hold one request of ``max_model_len`` tokens: that guarantee is what lets every request end.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        max_model_len: int,
        lanes: Sequence[str] = ("cpu",),
    ) -> None:
        _check_limits(config, block_manager, max_model_len)
        self.config = config
        self.block_manager = block_manager
        self.max_model_len = max_model_len
        self._by_priority = config.policy == "priority"
        self._requests: dict[str, _Tracked] = {}
        self._waiting = _WaitingQueue()
        #: Sorted by rank, best first.
        self._running: dict[str, list[_Tracked]] = {lane: [] for lane in lanes}
        self._forget: dict[str, list[str]] = {lane: [] for lane in lanes}
        self._in_flight: dict[int, list[_Tracked]] = {}
        #: Waits for a worse-ranked request in flight to give way; nobody is admitted before it.
        self._blocked: _Tracked | None = None
        self._next_sequence = 0
        self._stats = SchedulerStats(num_steps_by_lane=dict.fromkeys(lanes, 0))

    # -- requests come and go ---------------------------------------------------------------

    def add(self, source: EngineRequest) -> None:
        """Queue a request; raises :class:`RequestError` where it can never be served."""
        num_tokens = len(source.prompt_token_ids)
        if source.request_id in self._requests:
            raise RequestError(
                f"A request with the id '{source.request_id}' is running already. Use another id, "
                "or wait until that one has ended.",
                "request_id",
            )
        if num_tokens == 0:
            raise RequestError("The prompt has no tokens. Send at least one.", "prompt")
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"The prompt has {num_tokens} tokens; the limit is {self.max_model_len} for prompt "
                "and output together. Shorten the prompt.",
                "prompt",
            )
        request = _Tracked(source, self._next_sequence, self.max_model_len, self._by_priority)
        self._next_sequence += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests; ids that are not (or no longer) there are ignored.

        Each ended one gets an output with the finish reason ABORT. The blocks of one in flight
        are freed when its step is done.
        """
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._retire(request, FinishReason.ABORT)
                outputs.append(
                    EngineOutput(
                        request_id,
                        [],
                        finish_reason=FinishReason.ABORT,
                        num_cached_tokens=request.num_cached_tokens,
                    )
                )
        return outputs

    # -- views ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a step is in flight."""
        return bool(self._requests or self._in_flight)

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running.values()))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._requests)

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        return replace(
            self._stats,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_usage=self.block_manager.usage,
            num_evictions=self.block_manager.num_evicted,
            num_steps_by_lane=dict(self._stats.num_steps_by_lane),
        )

    # -- a step begins ----------------------------------------------------------------------

    def schedule(self, lane: str) -> Decision | None:
        """The lane's next step, or None where nothing can be computed now.

        Every decision must come back through :meth:`update`. A runner handles ``forget`` before
        ``requests``: an id may be in both, after a preemption or when a client uses it again.
        """
        if not self._running[lane] and not len(self._waiting):
            return None
        decision = Decision(lane=lane, step=self._stats.num_steps)
        members: list[_Tracked] = []
        if self._blocked is not None and self._blocked.lane in (lane, None):
            self._blocked = None
        if self._by_priority:
            self._make_room_for_better(lane)
        if self._schedule_running(decision, members):
            self._schedule_waiting(decision, members)
        if not members:
            return None
        decision.forget, self._forget[lane] = self._forget[lane], []
        self._in_flight[decision.step] = members
        self._stats.num_steps += 1
        self._stats.num_steps_by_lane[lane] += 1
        return decision

    def _schedule_running(self, decision: Decision, members: list[_Tracked]) -> bool:
        """Give running requests their share. False where blocks lacked: then nobody is admitted."""
        budget = self.config.max_num_batched_tokens - self._whole_prompt_tokens(decision.lane)
        for request in tuple(self._running[decision.lane]):
            if budget <= 0:
                break
            # Those behind may have been preempted for one before.
            if request.num_in_flight_tokens or request.status is not RequestStatus.RUNNING:
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            if not self._find_blocks(request, num_new):
                return False
            self._take(decision, members, request, num_new)
            budget -= num_new
        return True

    def _find_blocks(self, request: _Tracked, num_new: int) -> bool:
        """Allocate, preempting requests of worse rank as needed, the worst first."""
        while not self.block_manager.allocate(request, num_new):
            victim = max((r[-1] for r in self._running.values() if r), key=_rank)
            if victim is request:
                # It keeps what it holds until a better one wants it; better ones do make progress.
                assert self.num_running > 1 or self._in_flight, "the pool cannot hold one request"
                return False
            if victim.num_in_flight_tokens:
                victim.preempt_when_done = True
                self._blocked = request
                return False
            self._preempt(victim)
        return True

    def _schedule_waiting(self, decision: Decision, members: list[_Tracked]) -> None:
        """Admit waiting requests in order, until the first that finds no slot, budget or room."""
        running = self._running[decision.lane]
        budget = self.config.max_num_batched_tokens - decision.num_tokens
        while budget > 0 and len(running) < self.config.max_num_seqs:
            request = self._waiting.head()
            if request is None or self._someone_is_blocked():
                return
            num_cached = self.block_manager.lookup(request)
            num_left = request.num_tokens - num_cached
            if num_left > budget and not self.config.enable_chunked_prefill:
                return
            if not self._has_room(request, num_cached, without=()):
                return
            num_new = min(num_left, budget)
            request.num_computed_tokens = num_cached
            if not self.block_manager.allocate(request, num_new):
                request.num_computed_tokens = 0
                return
            self._waiting.pop()
            request.move_to(RequestStatus.RUNNING)
            request.lane = decision.lane
            insort(running, request, key=_rank)
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached
                if self.block_manager.reads_cache(request):
                    self._stats.prefix_cache_queries += request.num_tokens
                    self._stats.prefix_cache_hits += num_cached
            self._take(decision, members, request, num_new)
            budget -= num_new

    def _take(
        self, decision: Decision, members: list[_Tracked], request: _Tracked, num_new: int
    ) -> None:
        """Put ``num_new`` more tokens of the request into the step."""
        start = request.num_computed_tokens
        end = start + num_new
        is_last = end == request.num_tokens
        new = None
        if not request.is_known_to_runner:
            # A copy: the runner keeps it and appends to it.
            new = NewRequest(request.params, list(request.token_ids), request.num_prompt_tokens)
            request.is_known_to_runner = True
        if is_last and new is None and start >= request.num_prompt_tokens:
            decision.num_decode_tokens += num_new
        else:
            decision.num_prefill_tokens += num_new
        if not is_last:
            self._stats.num_chunked_prefills += 1
        decision.requests.append(
            ScheduledRequest(
                request_id=request.request_id,
                token_ids=request.token_ids[start:end],
                start=start,
                block_tables=self.block_manager.block_tables(request),
                sample=is_last and request.wants_token,
                new=new,
            )
        )
        members.append(request)
        request.num_computed_tokens = end
        request.num_in_flight_tokens = num_new

    # -- room -------------------------------------------------------------------------------

    def _someone_is_blocked(self) -> bool:
        return self._blocked is not None and self._blocked.status is RequestStatus.RUNNING

    def _blocks_planned(self, request: _Tracked) -> tuple[int, ...]:
        """Blocks, by group, for the known tokens and one more block's worth of output."""
        num_tokens = min(request.num_tokens + self.block_manager.block_size, request.max_num_tokens)
        return self.block_manager.num_blocks_needed(
            max(num_tokens, request.num_tokens), self.config.max_num_batched_tokens
        )

    def _has_room(self, request: _Tracked, num_cached: int, without: Sequence[_Tracked]) -> bool:
        """Whether all known tokens of a waiting request fit beside what runs.

        Its whole prompt counts, not the first chunk, and those that run keep enough for theirs and
        a block of output each: else it would soon be preempted, and its work lost. ``without``
        names running requests that would be preempted for it (an estimate where it shares blocks
        with them). Alone it always fits.
        """
        manager = self.block_manager
        others = [r for lane in self._running.values() for r in lane if r not in without]
        if not others:
            return True
        wanted = list(self._blocks_planned(request))
        for group, in_use in enumerate(manager.num_hits_in_use(request, num_cached)):
            wanted[group] -= in_use
        for other in others:
            planned, held = self._blocks_planned(other), manager.num_held(other)
            for group, num_blocks in enumerate(planned):
                wanted[group] += max(0, num_blocks - held[group])
        for victim in without:
            for group, num_blocks in enumerate(manager.num_held_alone(victim)):
                wanted[group] -= num_blocks
        return all(w <= a for w, a in zip(wanted, manager.num_available, strict=True))

    def _make_room_for_better(self, lane: str) -> None:
        """Preempt running requests of a worse priority number than the head of the queue's.

        Only as many as it takes for a slot and blocks, the worst first, and none where that would
        not be enough, or where the others leave it no tokens in this step.
        """
        head = self._waiting.head()
        running = self._running[lane]
        if head is None or not running or head.priority >= running[-1].priority:
            return
        num_cached = self.block_manager.lookup(head)
        victims: list[_Tracked] = []
        candidates = [r for r in reversed(running) if r.priority > head.priority]
        while not (
            len(running) - len(victims) < self.config.max_num_seqs
            and self._has_room(head, num_cached, victims)
        ):
            if len(victims) == len(candidates):
                return
            victims.append(candidates[len(victims)])
        stays = running[: len(running) - len(victims)]
        num_busy = sum(r.num_tokens - r.num_computed_tokens for r in stays)
        if num_busy >= self.config.max_num_batched_tokens:
            return
        for victim in victims:
            if victim.num_in_flight_tokens:
                victim.preempt_when_done = True
            else:
                self._preempt(victim)

    def _whole_prompt_tokens(self, lane: str) -> int:
        """Tokens of a step to keep for the head of the queue, where prompts are not chunked.

        Without this a long prompt would wait until enough decodes have ended to fit beside them.
        """
        head = self._waiting.head()
        if (
            self.config.enable_chunked_prefill
            or head is None
            or len(self._running[lane]) >= self.config.max_num_seqs
            or self._someone_is_blocked()
        ):
            return 0
        num_cached = self.block_manager.lookup(head)
        if not self._has_room(head, num_cached, without=()):
            return 0
        return head.num_tokens - num_cached

    def _preempt(self, request: _Tracked) -> None:
        """Free a running request's blocks; it is computed again when its turn comes."""
        assert request.num_in_flight_tokens == 0, "its blocks are being written"
        request.move_to(RequestStatus.PREEMPTED)
        self._leave_lane(request)
        self.block_manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.num_prompt_logprobs_seen = 0
        request.preempt_when_done = False
        self._stats.num_preemptions += 1
        request.move_to(RequestStatus.WAITING)
        self._waiting.push(request)

    def _leave_lane(self, request: _Tracked) -> None:
        assert request.lane is not None
        running = self._running[request.lane]
        del running[bisect_left(running, request.rank, key=_rank)]
        self._forget[request.lane].append(request.request_id)
        request.is_known_to_runner = False
        request.lane = None

    def _retire(self, request: _Tracked, reason: FinishReason) -> None:
        """End a request. Blocks that a step in flight writes stay until that step is done."""
        was_waiting = request.status is RequestStatus.WAITING
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        del self._requests[request.request_id]
        if was_waiting:
            self._waiting.discard()
        else:
            self._leave_lane(request)
        if request.num_in_flight_tokens == 0:
            self.block_manager.free(request)

    # -- a step is done ---------------------------------------------------------------------

    def update(self, decision: Decision, result: StepResult) -> list[EngineOutput]:
        """Take in what a step computed: new tokens, known blocks, and who has ended.

        Returns an output for each request with news. A request named in ``result.errors`` ends
        alone. What came for an aborted request is dropped.
        """
        assert result.step == decision.step, "this result belongs to another step"
        members = self._in_flight.pop(decision.step)
        outputs = []
        for request, scheduled in zip(members, decision.requests, strict=True):
            request.num_in_flight_tokens = 0
            if request.is_finished:
                self.block_manager.free(request)
                continue
            output = self._take_in(request, scheduled, result)
            if output is not None:
                outputs.append(output)
            if request.preempt_when_done and not request.is_finished:
                self._preempt(request)
        return outputs

    def _take_in(
        self, request: _Tracked, scheduled: ScheduledRequest, result: StepResult
    ) -> EngineOutput | None:
        request_id = request.request_id
        sampled = result.sampled.get(request_id, ()) if scheduled.sample else ()
        error = result.errors.get(request_id)
        if error is None and scheduled.sample and not sampled:
            error = f"Lane {request.lane} returned no token for request '{request_id}'."
        if error is not None:
            # What the failed step wrote is never made known to the prefix cache.
            self._retire(request, FinishReason.ERROR)
            return EngineOutput(
                request_id,
                [],
                finish_reason=FinishReason.ERROR,
                num_cached_tokens=request.num_cached_tokens,
                error=error,
            )
        self.block_manager.commit(request)
        prompt_logprobs = self._unsent_prompt_logprobs(request, result)
        is_all_computed = request.num_computed_tokens == request.num_tokens
        if is_all_computed and request.num_output_tokens == 0:
            self._stats.num_prompt_tokens += request.num_prompt_tokens
        reason: FinishReason | None = None
        stop_reason: int | None = None
        new_token_ids: list[int] = []
        for token_id in sampled:
            request.token_ids.append(token_id)
            new_token_ids.append(token_id)
            reason, stop_reason = request.stop_check(token_id)
            if reason is not None:
                break
        if is_all_computed and not scheduled.sample:
            # max_tokens is 0, or the prompt fills the context: there is nothing to sample.
            reason = FinishReason.LENGTH
        if reason is None and not new_token_ids and not prompt_logprobs:
            return None
        logprobs = result.logprobs.get(request_id)
        self._stats.num_generation_tokens += len(new_token_ids)
        if reason is not None:
            self._retire(request, reason)
        return EngineOutput(
            request_id,
            new_token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=logprobs[: len(new_token_ids)] if logprobs and new_token_ids else None,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _unsent_prompt_logprobs(
        self, request: _Tracked, result: StepResult
    ) -> list[TokenLogprobs | None] | None:
        """Each entry goes out once, also where a preemption has it computed again."""
        entries = result.prompt_logprobs.get(request.request_id)
        if not entries or request.params.prompt_logprobs is None:
            return None
        num_known = request.num_prompt_logprobs_sent - request.num_prompt_logprobs_seen
        request.num_prompt_logprobs_seen += len(entries)
        request.num_prompt_logprobs_sent = max(
            request.num_prompt_logprobs_sent, request.num_prompt_logprobs_seen
        )
        return entries[max(0, num_known) :] or None


def _check_limits(config: SchedulerConfig, block_manager: BlockManager, max_model_len: int) -> None:
    """Raise :class:`OptionError` where the limits contradict each other."""
    if config.policy not in ("fcfs", "priority"):
        raise OptionError(f"--scheduling-policy is '{config.policy}'; it must be fcfs or priority.")
    limits = {
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--max-model-len": max_model_len,
    }
    for option, value in limits.items():
        if value < 1:
            raise OptionError(f"{option} is {value}; it must be at least 1.")
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise OptionError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}, below the "
            f"{max_model_len} tokens of --max-model-len, and chunked prefill is off, so that a "
            f"long prompt would never fit in a step. Use --max-num-batched-tokens {max_model_len}, "
            "or --enable-chunked-prefill."
        )
    needed = block_manager.num_blocks_needed(max_model_len, config.max_num_batched_tokens)
    for num_blocks, pool in zip(needed, block_manager.pools, strict=True):
        if num_blocks > pool.num_blocks:
            fitting = min(p.num_blocks for p in block_manager.pools) * block_manager.block_size
            raise OptionError(
                f"KV cache: one request of {max_model_len} tokens needs {num_blocks} blocks, and "
                f"there are {pool.num_blocks}. Lower --max-model-len to {fitting}, or give the KV "
                "cache more memory."
            )
