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


def find_length_limit(config: CheckpointConfig) -> int | None:
    """:func:`model_length_limit`; None where the configuration does not say."""
    if config.get("max_position_embeddings") is None:
        return None
    return model_length_limit(config)


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
    that limit, but no more than ``cap``. A limit that is missing takes nothing but what was asked
    for (InvalidModelError)."""
    limit = find_length_limit(config)
    if limit is None:
        if asked is None:
            raise InvalidModelError(
                f"{config.source} lacks the field 'max_position_embeddings', so nothing says how "
                "long a context may be. Give --max-model-len, or the field with --hf-overrides "
                "'{\"max_position_embeddings\": ...}'."
            )
        return asked
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
    step_bytes: Callable[[int], int],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int,
    is_length_given: bool,
    memory: str = "host memory",
    share: float = DEFAULT_KV_SHARE,
) -> KVSize:
    """Blocks for every group.

    ``available_bytes`` is what the memory still offers after the weights, ``step_bytes(length)``
    what a step needs of it for contexts of ``length`` tokens. The cache never exceeds what
    ``max_num_seqs`` sequences of ``max_model_len`` tokens can use. A context that was not asked
    for shrinks to what fits; one that was asked for raises OutOfMemory, which names the longest
    that fits. ``share`` of what is left goes to a cache whose size nobody gave; ``memory`` names
    the memory in messages.
    """
    sizes = _Sizes(groups, cache.block_size, scheduler.max_num_batched_tokens)

    def offered(length: int, share: float = 1.0) -> int:
        return int(share * (available_bytes - step_bytes(length)))

    def longest_within(part: float) -> int:
        return _largest(max_model_len, lambda n: sizes.request_bytes(n) <= offered(n, part))

    if offered(1) < 0:
        raise OutOfMemory(
            f"A step needs {format_bytes(step_bytes(1))}; {format_bytes(available_bytes)} of "
            f"{memory} are left beside the weights. Lower --max-num-batched-tokens or "
            "--max-num-seqs, or free memory."
        )
    most = [scheduler.max_num_seqs * count for count in sizes.blocks(max_model_len)]
    if cache.num_blocks is not None:
        counts = tuple(min(cache.num_blocks, limit) for limit in most)
        budget = sizes.num_bytes(counts)
        longest = fitting = _largest(
            max_model_len, lambda n: sizes.are_enough(counts, n) and budget <= offered(n)
        )
        remedy = "Leave --num-gpu-blocks-override out"
    elif cache.kv_cache_bytes is not None:
        budget = cache.kv_cache_bytes
        longest = fitting = _largest(
            max_model_len, lambda n: sizes.request_bytes(n) <= budget <= offered(n)
        )
        counts = sizes.spread(sizes.blocks(longest), most, budget)
        remedy = f"Give at most --kv-cache-memory-bytes {offered(1, SUGGESTED_KV_SHARE)}"
    else:
        longest = longest_within(ASKED_KV_SHARE if is_length_given else share)
        budget = max(sizes.request_bytes(longest), offered(longest, share))
        counts = sizes.spread(sizes.blocks(longest), most, budget)
        fitting = longest_within(SUGGESTED_KV_SHARE)
        remedy = ""
    held = format_bytes(budget)
    if budget > offered(1):
        raise OutOfMemory(
            f"A KV cache of {held} was asked for; {format_bytes(offered(1))} of {memory} are "
            f"left beside the weights. {remedy}, or free memory."
        )
    if longest == max_model_len:
        return KVSize(counts, longest)

    def room_for(length: int, is_second: bool = False) -> str:
        """The flag that makes room for a context, if there is one that is certain to;
        ``is_second``: after another."""
        needed, certain = sizes.request_bytes(length), offered(length, SUGGESTED_KV_SHARE)
        if needed > certain:
            remedy = "Free memory"
            if cache.kv_cache_bytes is not None:
                # Beside an accelerator weights make room for a cache of any other size.
                remedy = "Leave --kv-cache-memory-bytes out, free memory"
            return (
                f"{format_bytes(max(certain, 0))} of {memory} can be counted on beside the "
                f"weights. {remedy}, or choose a smaller model."
            )
        if cache.num_blocks is not None:
            return f"{'Or leave' if is_second else 'Leave'} --num-gpu-blocks-override out."
        return f"{'Or give' if is_second else 'Give'} --kv-cache-memory-bytes {needed}."

    if longest < cache.block_size:
        raise OutOfMemory(
            f"A KV cache of {held} does not hold one block of {cache.block_size} tokens. "
            + room_for(cache.block_size)
        )
    if is_length_given:
        # Where a block is all that fits there is nothing shorter to be certain of.
        lower = fitting if fitting >= cache.block_size else longest
        raise OutOfMemory(
            f"--max-model-len {max_model_len} needs "
            f"{format_bytes(sizes.request_bytes(max_model_len))} of KV cache for one request; "
            f"there are {held}. Lower it to {lower}, which fits. {room_for(max_model_len, True)}"
        )
    return KVSize(
        counts,
        longest,
        f"The context is {longest:,} tokens instead of {max_model_len:,}: the KV cache of {held} "
        "holds no more.",
    )


def least_kv_bytes(
    groups: Sequence[GroupSize],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int,
    is_length_given: bool,
) -> int:
    """Bytes of the cache that weights have to leave room for: what was asked for, else one request
    of the length that was asked for, else one of a step's tokens."""
    sizes = _Sizes(groups, cache.block_size, scheduler.max_num_batched_tokens)
    if cache.num_blocks is not None:
        return sizes.num_bytes([cache.num_blocks] * len(groups))
    if cache.kv_cache_bytes is not None:
        return cache.kv_cache_bytes
    length = max_model_len
    if not is_length_given:
        length = min(max_model_len, scheduler.max_num_batched_tokens)
    return sizes.request_bytes(length)


def kv_bytes_within(
    groups: Sequence[GroupSize],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int,
    most_bytes: int,
) -> int:
    """Bytes of the cache for the longest request that takes no more than ``most_bytes``."""
    sizes = _Sizes(groups, cache.block_size, scheduler.max_num_batched_tokens)
    longest = _largest(max_model_len, lambda n: sizes.request_bytes(n) <= most_bytes)
    return sizes.request_bytes(longest) if longest else 0


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

    def request_bytes(self, length: int) -> int:
        """Bytes of a cache for one sequence of ``length`` tokens."""
        return self.num_bytes(self.blocks(length))

    def spread(self, least: Sequence[int], most: Sequence[int], budget: int) -> tuple[int, ...]:
        """``least`` for certain; what is left of ``budget`` bytes is shared alike by the groups,
        each up to its ``most``."""

        def counts(number: int) -> tuple[int, ...]:
            return tuple(max(low, min(number, high)) for low, high in zip(least, most, strict=True))

        return counts(_largest(max(most), lambda n: self.num_bytes(counts(n)) <= budget))

    def are_enough(self, counts: Sequence[int], length: int) -> bool:
        """Whether one sequence of ``length`` tokens finds its blocks among these."""
        return all(have >= need for have, need in zip(counts, self.blocks(length), strict=True))


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to ``high`` that fits; 0 where none does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
