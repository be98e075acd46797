"""What is asked of the engine and what comes back: plain data, no tensors, no torch.

:class:`SamplingParams`, :class:`EngineRequest` and :class:`EngineOutput` cross the process
boundary as msgpack; :class:`Request` is the scheduler's own record of a running request.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from ambidex.errors import InvalidRequestError


class FinishReason(enum.StrEnum):
    """Why a request ended; the value is what OpenAI's API calls ``finish_reason``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    """How far a request is. Which device computes it is ``Request.lane``."""

    WAITING = "waiting"
    TRANSFER = "transfer"
    RUNNING = "running"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_S = RequestStatus

#: The transitions of docs/architecture.md; anything else is a bug of ours.
TRANSITIONS: frozenset[tuple[RequestStatus, RequestStatus]] = frozenset(
    [
        (_S.WAITING, _S.TRANSFER),
        (_S.TRANSFER, _S.WAITING),
        (_S.WAITING, _S.RUNNING),
        (_S.RUNNING, _S.TRANSFER),
        (_S.TRANSFER, _S.RUNNING),
        (_S.RUNNING, _S.SWAPPED),
        (_S.SWAPPED, _S.RUNNING),
        (_S.RUNNING, _S.PREEMPTED),
        (_S.SWAPPED, _S.PREEMPTED),
        (_S.TRANSFER, _S.PREEMPTED),
        (_S.PREEMPTED, _S.WAITING),
    ]
    + [(status, _S.FINISHED) for status in RequestStatus if status is not _S.FINISHED]
)


@dataclass(slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; names and defaults are vLLM's.

    ``top_k`` of 0 or -1 means all tokens. ``max_tokens=None`` means up to the context's end.
    ``seed=None`` draws a random seed when the request is accepted. ``logprobs=k`` returns the
    chosen token's log probability and the ``k`` best (``0``: the chosen token alone).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    #: Filled in by the input processor: every end-of-sequence id of the model.
    eos_token_ids: list[int] = field(default_factory=list)
    #: Filled in by the input processor from ``bad_words``.
    bad_words_token_ids: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate, with everything resolved (``n`` is 1, ``seed`` is set)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities (natural, of the unmodified distribution) at one position.

    ``rank`` is 1 for the most likely token. ``top`` holds ``(token_id, logprob)``, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class EngineOutput:
    """What one step added to one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    #: The token id that stopped the request, where it was one of ``stop_token_ids``.
    stop_reason: int | None = None
    #: One entry a new token, if asked for.
    logprobs: list[TokenLogprobs] | None = None
    #: Positions 0..len-1 of the prompt computed in this step; the prompt's first token has none.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    #: A sentence, with ``finish_reason`` ERROR.
    error: str | None = None


class Request:
    """The scheduler's record of one sequence.

    It counts tokens, not phases: each step computes some more of ``token_ids``. Prompt, decode,
    chunked prefill and recomputation after a preemption are one rule.
    """

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "cache_salt",
        "finish_reason",
        "lane",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "priority",
        "request_id",
        "sequence",
        "status",
        "token_ids",
    )

    def __init__(self, source: EngineRequest, sequence: int) -> None:
        self.request_id = source.request_id
        self.params = source.params
        self.arrival_s = source.arrival_s
        self.priority = source.priority
        self.cache_salt = source.cache_salt
        #: Order of arrival in this engine, which breaks ties.
        self.sequence = sequence
        self.token_ids: list[int] = list(source.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        #: Tokens whose KV is in the cache, or will be once the steps in flight are done.
        self.num_computed_tokens = 0
        #: Tokens of ``num_computed_tokens`` that belong to a step still in flight.
        self.num_in_flight_tokens = 0
        #: Tokens found in the prefix cache when first scheduled.
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        #: Chained hashes of the full blocks so far, kept by the block manager.
        self.block_hashes: list[bytes] = []
        self.status = RequestStatus.WAITING
        self.lane: str | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; raises :class:`InvalidRequestError` for a forbidden transition."""
        if (self.status, status) not in TRANSITIONS:
            raise InvalidRequestError(
                f"request {self.request_id}: {self.status.name} -> {status.name} is not allowed"
            )
        self.status = status
