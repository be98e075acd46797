"""What a step takes of memory beside weights and KV: upper estimates from a model's sizes alone.

Loading reserves by them before anything is there, and the planner prints the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ambidex.config import CacheConfig, CheckpointConfig, OffloadConfig, SchedulerConfig
from ambidex.errors import OutOfMemory
from ambidex.memory.expert_cache import MAX_ROWS
from ambidex.memory.ledger import Ledger, Reservation, format_bytes
from ambidex.memory.model_shape import KVShape, ModelShape
from ambidex.memory.sizing import ASKED_KV_SHARE, GroupSize, kv_bytes_within, least_kv_bytes

#: Most rows of a captured step: beyond, launching takes little beside computing.
MAX_CAPTURED_ROWS = 16
#: Attention gathers keys and values of at least so many positions.
MIN_GATHERED = 1 << 15
#: Where weights leave an accelerator anyway, one request may take this part of its memory.
KV_DIVISOR = 8
#: Limits that are proposed where steps take too much: tokens of a step, requests at a time.
SMALLER_STEPS = ((512, 16), (128, 16))
#: Rotation tables grow by this many positions.
ROPE_CHUNK = 1024
#: Logits of prompt tokens are computed for this many rows at a time, to bound their memory.
LOGIT_ROWS = 64
#: What kernels' threads hold, rotations, and what a sampler takes however small a vocabulary is.
FIXED_BYTES = 8 << 20
#: The name of the KV cache among what an accelerator needs beside weights.
OF_KV = "the KV cache"
#: The name of what steps beside an accelerator take of the host.
HOST_PART = "the host's part of steps"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Numbers that the results of a step's operations have, a token."""

    hidden: int
    inner: int
    vocab: int
    #: Of all heads together.
    query: int
    #: Of the widest layer's heads.
    kv_width: int
    num_layers: int
    num_experts: int = 0
    #: Experts that a token chooses.
    num_chosen: int = 0
    #: Whether attention gathers keys and values before it reads them; see ``kernels/table.py``.
    gathers_kv: bool = False

    @classmethod
    def of_config(
        cls,
        config: CheckpointConfig,
        groups: Sequence[tuple[int, int, int]],
        gathers_kv: bool = False,
    ) -> StepSizes:
        """``groups``: layers, KV heads and head size of each KV group."""
        hidden = int(config.require("hidden_size"))
        experts = int(config.get("num_experts", config.get("num_local_experts", 0)) or 0)
        return cls(
            hidden=hidden,
            inner=int(config.get("intermediate_size", 4 * hidden)),
            vocab=int(config.require("vocab_size")),
            query=int(config.require("num_attention_heads")) * groups[0][2],
            kv_width=max(heads * size for _, heads, size in groups),
            num_layers=sum(layers for layers, _, _ in groups),
            num_experts=experts,
            num_chosen=int(config.get("num_experts_per_tok", 2)) if experts else 0,
            gathers_kv=gathers_kv,
        )

    @classmethod
    def of_shape(cls, shape: ModelShape, gathers_kv: bool = False) -> StepSizes:
        return cls(
            hidden=shape.hidden_size,
            inner=shape.intermediate_size,
            vocab=shape.vocab_size,
            query=shape.num_heads * shape.head_dim,
            kv_width=max(map(_width, shape.kv)),
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            num_chosen=shape.num_chosen,
            gathers_kv=gathers_kv,
        )


def _width(group: KVShape) -> int:
    return group.num_kv_heads * group.head_dim


def activation_bytes(
    sizes: StepSizes, limits: SchedulerConfig, max_model_len: int, *, chooses: bool = True
) -> int:
    """An upper estimate of what a step needs beside weights and KV, in bytes. ``chooses``: tokens
    are chosen in the same memory; beside an accelerator that is the host's."""
    rows = limits.max_num_batched_tokens
    if chooses:
        # Logits, and about three temporaries of the sampler.
        fixed, logits = FIXED_BYTES, 4 * sizes.vocab * max(limits.max_num_seqs, 2 * LOGIT_ROWS)
    else:
        # Those of a head in pieces, and what they are put together in.
        fixed, logits = 0, 2 * sizes.vocab * max(limits.max_num_seqs, LOGIT_ROWS)
    gathered = 0
    if sizes.gathers_kv:
        # Keys and values of one layer, narrow and widened.
        gathered = 4 * sizes.kv_width * max(max_model_len, MIN_GATHERED)
    shared = 3 * sizes.num_chosen * sizes.hidden * min(rows, MAX_ROWS)
    return layer_bytes(sizes, limits) + 4 * (logits + gathered + shared) + fixed


def layer_bytes(sizes: StepSizes, limits: SchedulerConfig) -> int:
    """Of that: an upper estimate of the results of a layer."""
    row = 8 * sizes.hidden + 4 * sizes.inner + 4 * sizes.kv_width
    return 4 * limits.max_num_batched_tokens * row


def check_room_for_weights(
    ledger: Ledger, needs: Mapping[str, int], sizes: StepSizes, limits: SchedulerConfig
) -> None:
    """Raises OutOfMemory where what an accelerator ``needs`` beside weights, for steps of
    ``limits``, leaves nothing."""
    total, free = sum(needs.values()), ledger.free_bytes
    if total < free:
        return
    parts = [f"{format_bytes(size)} for {what}" for what, size in needs.items() if size]
    # Where no smaller steps are enough, nothing else that is asked for is named, but for a cache.
    advice, others = "Give", total - needs.get(OF_KV, 0)
    if others < free:
        advice = (
            f"{format_bytes(free - others)} are left for cache and weights: lower "
            "--kv-cache-memory-bytes, --num-gpu-blocks-override or --max-model-len, or give"
        )
    for tokens, seqs in SMALLER_STEPS:
        smaller = smaller_steps(limits, tokens, seqs)
        # Results of a context cancel out.
        saved = activation_bytes(sizes, limits, 1, chooses=False)
        saved -= activation_bytes(sizes, smaller, 1, chooses=False)
        left = free - total + saved
        if left >= free / 8:
            advice = (
                f"--max-num-batched-tokens {smaller.max_num_batched_tokens} --max-num-seqs "
                f"{smaller.max_num_seqs} leave {format_bytes(left)} for weights. Or lower "
                "--kv-cache-memory-bytes or --max-model-len, or give"
            )
            break
    raise OutOfMemory(
        f"{ledger.name} has {format_bytes(free)}, and steps leave nothing of it for weights: they "
        f"need {format_bytes(total)}, {', '.join(parts)}. {advice} more than "
        f"{format_bytes(total)} of the accelerator, weights apart (--device, --gpu-memory-limit, "
        "--gpu-memory-utilization)."
    )


def smaller_steps(limits: SchedulerConfig, tokens: int, seqs: int) -> SchedulerConfig:
    """``limits`` with no more than so many tokens a step and requests at a time."""
    return replace(
        limits,
        max_num_seqs=min(limits.max_num_seqs, seqs),
        max_num_batched_tokens=min(limits.max_num_batched_tokens, tokens),
    )


def reserve_host_part(host: Ledger, num_bytes: int) -> Reservation:
    """Of the host, what steps beside an accelerator take there; raises OutOfMemory where weights
    leave too little."""
    if num_bytes > host.free_bytes:
        raise OutOfMemory(
            f"Steps need {format_bytes(num_bytes)} of host memory beside the accelerator's, and "
            f"{format_bytes(host.free_bytes)} are free for them: weights there take "
            f"{format_bytes(host.reserved_bytes('weights'))}. Lower --max-num-batched-tokens or "
            "--max-num-seqs, or free memory."
        )
    return host.reserve("activations", HOST_PART, num_bytes)


def graph_rows(max_num_seqs: int) -> list[int]:
    """Numbers of rows that steps of an accelerator are captured for."""
    rows = [1]
    while rows[-1] * 2 <= min(MAX_CAPTURED_ROWS, max_num_seqs):
        rows.append(rows[-1] * 2)
    return rows


def graph_bytes(sizes: StepSizes, rows: Sequence[int]) -> int:
    """An upper estimate of the results of captured steps with those numbers of rows, in bytes.
    Each result has memory of its own, on the device and, where it crosses, on the host."""
    row = sizes.num_layers * (
        12 * sizes.hidden
        + 6 * sizes.query
        + 8 * sizes.kv_width
        + 4 * sizes.inner
        + 4 * sizes.num_experts
        # Experts' results before they are added up, from both memories.
        + 3 * sizes.num_chosen * sizes.hidden
    )
    row += 3 * sizes.vocab
    # Each result is rounded up to a piece of memory.
    return sum(rows) * 4 * row + len(rows) * sizes.num_layers * 32 * 256


def room_for_kv(
    groups: Sequence[GroupSize],
    cache: CacheConfig,
    limits: SchedulerConfig,
    max_model_len: int,
    is_length_given: bool,
    comfortable_bytes: int = 0,
) -> int:
    """What weights leave for the KV cache on an accelerator. A cache whose size nobody gave takes
    a share of what is left, and the least that it has to hold must be within that; where neither a
    size nor a length was given, that is a longer request within ``comfortable_bytes``."""
    least = least_kv_bytes(groups, cache, limits, max_model_len, is_length_given)
    if cache.num_blocks is not None or cache.kv_cache_bytes is not None:
        return least
    if not is_length_given:
        # Steps take no more for it than for one token.
        longest = min(max_model_len, MIN_GATHERED)
        least = max(least, kv_bytes_within(groups, cache, limits, longest, comfortable_bytes))
    return math.ceil(least / ASKED_KV_SHARE) + 1


def comfortable_kv_bytes(
    offload: OffloadConfig,
    weight_bytes: int,
    left_bytes: int,
    capacity_bytes: int,
    host_bytes: int,
) -> int:
    """What of an accelerator's memory a KV cache of nobody's choice may push weights out of.

    Where weights fit (``left_bytes`` are left for them), or it was said which leave: nothing. Where
    some leave anyway, a few more make room for a request of a useful length, if ``host_bytes`` of
    the host take them.
    """
    room = capacity_bytes // KV_DIVISOR
    is_asked = offload.cpu_offload_bytes is not None or offload.patterns
    leaving = weight_bytes - left_bytes
    return 0 if is_asked or leaving <= 0 or leaving + 2 * room > host_bytes else room


def plan_beside_cache(plan: Callable[[int], T], comfortable: int, least: int) -> T:
    """``plan(bytes of the KV cache)`` with a ``comfortable`` cache; with the ``least`` one where
    weights cannot make more room than that. Raises what ``plan`` raises then."""
    if comfortable > least:
        with contextlib.suppress(OutOfMemory):
            return plan(comfortable)
    return plan(least)


def rope_bytes(shape: ModelShape, max_model_len: int) -> int:
    """Bytes of the rotation tables."""
    return shape.rope_bytes_per_position * -(-max_model_len // ROPE_CHUNK) * ROPE_CHUNK
