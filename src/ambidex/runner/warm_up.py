"""The first steps of a lane, which nobody asked for: what is made at first use is made in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ambidex.errors import InvalidModelError, OutOfMemory, memory_refusal
from ambidex.request import SamplingParams
from ambidex.runner.decision import Decision, NewRequest, ScheduledRequest

if TYPE_CHECKING:
    from ambidex.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest steps: tokens and requests of one, and tokens of a request."""

    num_tokens: int
    num_requests: int
    max_model_len: int


def warm_up(runner: ModelRunner, largest: Largest | None = None) -> None:
    """Record the step, then compute a few tokens; with ``largest`` the largest steps too, so that
    none of them fails later. Raises OutOfMemory where a step gets too little memory, and
    InvalidModelError where it fails otherwise."""
    if runner.replayer is not None and not runner.replayer.record():
        runner.replayer = None
    _step(runner, [8])
    if largest is None:
        return
    prompts: list[int] = []
    while sum(prompts) < largest.num_tokens and len(prompts) < largest.num_requests:
        prompts.append(min(largest.max_model_len, largest.num_tokens - sum(prompts)))
    _step(runner, prompts)
    for count in runner.replayer.warm_up_rows if runner.replayer is not None else ():
        # Once to make, once to capture.
        for _ in range(2):
            _step(runner, [1] * count)
    _step(runner, [1] * largest.num_requests)


def _step(runner: ModelRunner, lengths: Sequence[int]) -> None:
    """A step with a prompt of each length. What it writes to the KV cache nobody reads."""
    size, requests = runner.kv_cache.block_size, []
    params = SamplingParams(temperature=0.0)
    first = 0
    for index, length in enumerate(lengths):
        count = -(-length // size)
        tables = tuple(
            [(first + block) % blocks for block in range(count)]
            for blocks in runner.kv_cache.num_blocks
        )
        first += count
        new = NewRequest(params, [0] * length, length)
        name = f"warm-up-{index}"
        requests.append(ScheduledRequest(name, new.token_ids, 0, tables, sample=True, new=new))
    what = f"A step with {sum(lengths)} tokens of {len(lengths)} requests"
    try:
        # As a whole: that its requests can be computed one by one is of no use to a server.
        result = runner.execute(Decision("warm-up", -1, requests), retries=False)
    except Exception as error:
        refused = error if isinstance(error, OutOfMemory) else memory_refusal(error)
        if refused is not None:
            advice = "Lower --max-num-batched-tokens or --max-num-seqs."
            raise OutOfMemory(f"{what} gets too little memory: {refused} {advice}") from error
        raise InvalidModelError(f"{what} failed: {error}") from error
    finally:
        runner.forget_all()
    if result.errors:
        reason = next(iter(result.errors.values()))
        raise InvalidModelError(f"{what} failed: {reason}")
