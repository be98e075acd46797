"""How many KV blocks there are, and how long a context may be: arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ambidex.config import CacheConfig, CheckpointConfig, SchedulerConfig
from ambidex.errors import InvalidModelError, OptionError, OutOfMemory
from ambidex.memory.ledger import format_bytes

#: Share of the memory left after weights and activations that an unsized KV cache may take. The
#: rest is for the page cache, the user's other programs and what grows later.
DEFAULT_KV_SHARE = 0.5
#: The same where a length was asked for, if one request of it needs that much.
ASKED_KV_SHARE = 0.95
#: What errors suggest stays within this share: free memory is not quite the same at the next try.
SUGGESTED_KV_SHARE = 0.9

#: Rope scalings whose ``max_position_embeddings`` is the length before stretching. (llama3 and
#: longrope name the stretched one.)
_STRETCHING = ("linear", "dynamic", "yarn")


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One KV group: bytes per token over its layers, and its sliding window if it has one."""

    bytes_per_token: int
    window: int | None


@dataclass(frozen=True, slots=True)
class KVSize:
    """The outcome: blocks of each group, and the longest request."""

    num_blocks: tuple[int, ...]
    max_model_len: int
    #: A sentence, if the context was shrunk.
    note: str = ""


def model_length_limit(config: CheckpointConfig) -> int:
    """The longest context that the model's configuration allows, rope scaling included."""
    limit = _positive(config, "max_position_embeddings", config.require("max_position_embeddings"))
    scaling: Mapping[str, object] = config.get("rope_scaling") or config.get("rope_parameters", {})
    kind = scaling.get("rope_type") or scaling.get("type")
    # Gemma 3 scales the base of its global layers, and names the length that results.
    is_gemma = str(config.get("model_type", "")).startswith("gemma3")
    if kind not in _STRETCHING or is_gemma:
        return int(limit)
    name = "original_max_position_embeddings"
    original = _positive(config, name, scaling.get(name) or config.get(name, limit))
    factor = _positive(config, "factor", scaling.get("factor") or 1.0)
    return int(max(limit, original * factor))


def _positive(config: CheckpointConfig, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise InvalidModelError(
            f"{config.source}: the field '{name}' is {value!r:.60}, and must be a number of at "
            f"least 1. Repair the file, or give the value with --hf-overrides."
        )
    return value


def resolve_max_model_len(
    asked: int | None, config: CheckpointConfig, cap: int | None = None
) -> int:
    """The context that was asked for, which may not exceed the model's limit (OptionError); or
    that limit, but no more than ``cap``."""
    limit = model_length_limit(config)
    if asked is None:
        return limit if cap is None else min(limit, cap)
    if asked > limit:
        raise OptionError(
            f"--max-model-len {asked} is more than the model's {limit} tokens "
            f"(max_position_embeddings and rope scaling in {config.source}). Ask for at most "
            f"{limit}, or correct the field with --hf-overrides."
        )
    return asked


def sequence_tokens(
    group: GroupSize, max_model_len: int, max_num_batched_tokens: int, block_size: int
) -> int:
    """Tokens of a group's pool that one sequence may hold at once."""
    if group.window is None:
        return max_model_len
    # The window, the chunk that is being computed, and a block at either end.
    return min(max_model_len, group.window + max_num_batched_tokens + 2 * block_size)


def size_kv_cache(
    groups: Sequence[GroupSize],
    available_bytes: int,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int,
    is_length_given: bool,
) -> KVSize:
    """Blocks for every group.

    ``available_bytes`` is what the memory still offers after weights and activations. The cache
    never exceeds what ``max_num_seqs`` sequences of ``max_model_len`` tokens can use. A context
    that was not asked for shrinks to what fits; one that was asked for raises OutOfMemory, which
    names the longest that fits.
    """
    sizes = _Sizes(groups, cache.block_size, scheduler.max_num_batched_tokens)
    one_request = sizes.blocks(max_model_len)
    needed = sizes.num_bytes(one_request)
    most = [scheduler.max_num_seqs * count for count in one_request]
    safe_bytes = int(available_bytes * SUGGESTED_KV_SHARE)
    if cache.num_blocks is not None:
        counts = tuple(min(cache.num_blocks, limit) for limit in most)
        budget = sizes.num_bytes(counts)
        longest = fitting = sizes.longest(max_model_len, counts)
        remedy = "Leave --num-gpu-blocks-override out"
    elif cache.kv_cache_bytes is not None:
        budget = cache.kv_cache_bytes
        longest, counts = sizes.fit(max_model_len, most, budget)
        fitting = longest
        remedy = f"Give at most --kv-cache-memory-bytes {safe_bytes}"
    else:
        budget = int(available_bytes * DEFAULT_KV_SHARE)
        if is_length_given:
            budget = max(budget, min(needed, int(available_bytes * ASKED_KV_SHARE)))
        longest, counts = sizes.fit(max_model_len, most, budget)
        fitting, _ = sizes.fit(max_model_len, most, min(budget, safe_bytes))
        remedy = ""
    held = format_bytes(budget)
    if budget > available_bytes:
        raise OutOfMemory(
            f"A KV cache of {held} was asked for; {format_bytes(available_bytes)} of host memory "
            f"are left beside the weights. {remedy}, or free memory."
        )
    if longest == max_model_len:
        return KVSize(counts, longest)
    least = sizes.num_bytes(sizes.blocks(cache.block_size))
    if longest < cache.block_size:
        raise OutOfMemory(
            f"A KV cache of {held} does not hold one block of {cache.block_size} tokens. "
            + _room_for(least, cache, safe_bytes)
        )
    if is_length_given:
        raise OutOfMemory(
            f"--max-model-len {max_model_len} needs {format_bytes(needed)} of KV cache for one "
            f"request; there are {held}. Lower it to {fitting}, which fits. "
            + _room_for(needed, cache, safe_bytes)
        )
    return KVSize(
        counts,
        longest,
        f"The context is {longest} tokens instead of {max_model_len}: the KV cache of {held} "
        "holds no more.",
    )


def _room_for(num_bytes: int, cache: CacheConfig, safe_bytes: int) -> str:
    """The flag that makes room, if there is one that is certain to."""
    if num_bytes > safe_bytes:
        return (
            f"It takes {format_bytes(num_bytes)} of host memory beside the weights; "
            f"{format_bytes(safe_bytes)} can be counted on. Free memory, or choose a smaller model."
        )
    if cache.num_blocks is not None:
        return "Or leave --num-gpu-blocks-override out."
    return f"Or give --kv-cache-memory-bytes {num_bytes}."


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Tokens, blocks and bytes of a model's KV groups."""

    groups: Sequence[GroupSize]
    block_size: int
    max_num_batched_tokens: int

    def blocks(self, length: int) -> tuple[int, ...]:
        """Blocks of each group that one sequence of ``length`` tokens may hold."""
        tokens = (
            sequence_tokens(group, length, self.max_num_batched_tokens, self.block_size)
            for group in self.groups
        )
        return tuple(-(-count // self.block_size) for count in tokens)

    def num_bytes(self, counts: Sequence[int]) -> int:
        """Bytes of a cache; one zero block a group comes on top, see kv/cache.py."""
        return sum(
            (count + 1) * self.block_size * group.bytes_per_token
            for count, group in zip(counts, self.groups, strict=True)
        )

    def fit(self, length: int, most: Sequence[int], budget: int) -> tuple[int, tuple[int, ...]]:
        """The longest sequence, up to ``length``, that ``budget`` bytes hold, and the blocks.

        That sequence is certain of its blocks; what is left is shared alike by the groups, each
        up to its ``most``.
        """
        longest = _largest(length, lambda n: self.num_bytes(self.blocks(n)) <= budget)
        least = self.blocks(longest)

        def counts(number: int) -> tuple[int, ...]:
            return tuple(max(low, min(number, high)) for low, high in zip(least, most, strict=True))

        number = _largest(max(most), lambda n: self.num_bytes(counts(n)) <= budget)
        return longest, counts(number)

    def longest(self, length: int, counts: Sequence[int]) -> int:
        """The longest sequence, up to ``length``, that these blocks hold."""
        return _largest(
            length,
            lambda n: all(h >= need for h, need in zip(counts, self.blocks(n), strict=True)),
        )


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to ``high`` that fits; 0 where none does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
