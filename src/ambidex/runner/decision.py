"""What the scheduler decides and what a lane reports back: plain data, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ambidex.request import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class NewRequest:
    """What a runner must know of a request that it sees for the first time (or again after
    a preemption): the parameters and all tokens so far, for penalties and positions."""

    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: ``token_ids`` at positions from ``start`` on."""

    request_id: str
    token_ids: Sequence[int]
    start: int
    #: One list of block ids a KV group, covering positions 0 .. start+len(token_ids)-1.
    block_tables: tuple[list[int], ...]
    #: True when the last token's logits are wanted: a new token is sampled.
    sample: bool
    new: NewRequest | None = None


@dataclass(slots=True)
class Decision:
    """One step of one lane."""

    lane: str
    step: int
    requests: list[ScheduledRequest] = field(default_factory=list)
    #: Requests whose runner state can be dropped: finished, aborted or preempted.
    forget: list[str] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens


@dataclass(slots=True)
class StepResult:
    """What a lane computed. All mappings are by request id."""

    step: int
    #: New tokens of each request that asked for a sample.
    sampled: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    #: Log probabilities of the prompt tokens computed in this step (entry 0 of a prompt is None).
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    #: Requests that failed in this step, with a sentence each; the others are unharmed.
    errors: dict[str, str] = field(default_factory=dict)
    #: Seconds: the model's forward pass, and the whole step in the lane's thread.
    model_s: float = 0.0
    step_s: float = 0.0
