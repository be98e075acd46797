"""A lane without a model: it keeps a made-up KV store and checks every read and write.

Each slot of the store remembers the *chain* of the token written there: a number that stands for
the token and all before it, as real KV does. A request that reads a slot of its context must find
its own chain; so a block that is shared, evicted or reused wrongly cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ambidex.kv.block import NO_BLOCK, KVGroup
from ambidex.kv.block_manager import BlockManager
from ambidex.request import EngineRequest, SamplingParams, TokenLogprobs
from ambidex.runner.decision import Decision, ScheduledRequest, StepResult

VOCAB_SIZE = 23
EOS = 0
GARBAGE = -1


def group(window: int | None = None) -> KVGroup:
    return KVGroup(layers=(0,), num_kv_heads=1, head_dim=8, window=window, bytes_per_token=64)


def engine_request(
    request_id: str,
    prompt: list[int],
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    **params: object,
) -> EngineRequest:
    params.setdefault("eos_token_ids", [EOS])
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        arrival_s=0.0,
        priority=priority,
        cache_salt=cache_salt,
    )


def chain_of(tokens: list[int], salt: str | None) -> list[int]:
    """The chain at each position."""
    # Not hash(str): that one differs from run to run.
    link = sum(ord(c) * 31**i for i, c in enumerate(salt)) + 1 if salt is not None else 0
    chain = []
    for token in tokens:
        link = hash((link, token))
        chain.append(link)
    return chain


def next_token(link: int) -> int:
    return (link >> 7) % VOCAB_SIZE


def expected_output(source: EngineRequest, max_model_len: int) -> list[int]:
    """What a request answers when it runs alone and undisturbed."""
    params = source.params
    tokens = list(source.prompt_token_ids)
    limit = max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(tokens) + params.max_tokens)
    output: list[int] = []
    while len(tokens) < limit:
        token = next_token(chain_of(tokens, source.cache_salt)[-1])
        tokens.append(token)
        output.append(token)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= set(params.eos_token_ids)
        if len(output) >= params.min_tokens and token in stops:
            break
    return output


@dataclass
class FakeLane:
    block_manager: BlockManager
    #: By request id; the store must keep salts apart, and the decision does not carry them.
    salts: dict[str, str | None] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    #: Tokens computed since the last (re)start, by request id.
    num_computed: dict[str, int] = field(default_factory=dict)
    #: The chain at (group, block, offset).
    store: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def run(self, decision: Decision, failing: Collection[str] = ()) -> StepResult:
        """Compute a step, or fail for some requests, which leave garbage in what they write."""
        for request_id in decision.forget:
            del self.tokens[request_id]
        result = StepResult(step=decision.step)
        ids = [scheduled.request_id for scheduled in decision.requests]
        assert len(set(ids)) == len(ids), "a request is twice in one step"
        writers: dict[tuple[int, int], str] = {}
        for scheduled in decision.requests:
            self._learn(scheduled)
            self._write(scheduled, writers, garbage=scheduled.request_id in failing)
        for scheduled in decision.requests:
            request_id = scheduled.request_id
            if request_id in failing:
                result.errors[request_id] = "It was told to fail."
                continue
            chain = self._read(scheduled)
            end = scheduled.start + len(scheduled.token_ids)
            if scheduled.sample:
                assert end == len(self.tokens[request_id]), "sampled before all is computed"
                token = next_token(chain[-1])
                result.sampled[request_id] = [token]
                result.logprobs[request_id] = [TokenLogprobs(token, -1.0, 1, [])]
        return result

    def _learn(self, scheduled: ScheduledRequest) -> None:
        request_id, start = scheduled.request_id, scheduled.start
        if scheduled.new is not None:
            assert request_id not in self.tokens, "the runner knows this request already"
            self.tokens[request_id] = list(scheduled.new.token_ids)
            self.num_computed[request_id] = start
        tokens = self.tokens[request_id]
        assert start == self.num_computed[request_id], "a chunk was skipped or repeated"
        assert scheduled.token_ids, "nothing to compute"
        for position, token in enumerate(scheduled.token_ids, start):
            if position < len(tokens):
                assert tokens[position] == token
            else:
                tokens.append(token)
        self.num_computed[request_id] = start + len(scheduled.token_ids)

    def _write(
        self, scheduled: ScheduledRequest, writers: dict[tuple[int, int], str], garbage: bool
    ) -> None:
        manager, request_id = self.block_manager, scheduled.request_id
        size = manager.block_size
        chain = chain_of(self.tokens[request_id], self.salts.get(request_id))
        end = scheduled.start + len(scheduled.token_ids)
        assert len(scheduled.block_tables) == len(manager.groups)
        for index, (pool, table) in enumerate(
            zip(manager.pools, scheduled.block_tables, strict=True)
        ):
            assert len(table) == -(-end // size), "the table covers the tokens, no more, no less"
            for position in range(scheduled.start, end):
                block = table[position // size]
                assert block != NO_BLOCK, "a token to write has no block"
                owner = writers.setdefault((index, block), request_id)
                assert owner == request_id, "two requests write one block"
                assert pool.ref_count(block) == 1, "a block is written while another holds it"
                assert pool.hash_of(block) is None, "a known block is written"
                self.store[index, block, position % size] = GARBAGE if garbage else chain[position]

    def _read(self, scheduled: ScheduledRequest) -> list[int]:
        manager, request_id = self.block_manager, scheduled.request_id
        size = manager.block_size
        end = scheduled.start + len(scheduled.token_ids)
        chain = chain_of(self.tokens[request_id][:end], self.salts.get(request_id))
        for index, (kv_group, table) in enumerate(
            zip(manager.groups, scheduled.block_tables, strict=True)
        ):
            first = 0
            if kv_group.window is not None:
                first = max(0, scheduled.start - kv_group.window + 1)
            for position in range(first, end):
                block = table[position // size]
                assert block != NO_BLOCK, f"position {position} is seen, and has no block"
                found = self.store.get((index, block, position % size))
                assert found == chain[position], f"position {position} holds another's KV"
        return chain
