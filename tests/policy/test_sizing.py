"""How long a context may be and how many KV blocks there are: numbers in, numbers out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.config import CacheConfig, CheckpointConfig, SchedulerConfig
from ambidex.errors import InvalidModelError, OptionError, OutOfMemory
from ambidex.kv.block import BLOCK_SIZES, KVGroup
from ambidex.kv.block_manager import BlockManager
from ambidex.memory.sizing import (
    ASKED_KV_SHARE,
    DEFAULT_KV_SHARE,
    GroupSize,
    KVSize,
    model_length_limit,
    resolve_max_model_len,
    size_kv_cache,
)

GIB = 1 << 30
#: Llama 3 8B with a KV cache of float16: 128 KiB a token.
LLAMA = GroupSize(2 * 32 * 8 * 128 * 2, None)
#: Gemma 3 12B: 8 layers see everything, 40 a window of 1,024 tokens.
GEMMA = (GroupSize(2 * 8 * 8 * 256 * 2, None), GroupSize(2 * 40 * 8 * 256 * 2, 1024))


def size(
    *groups: GroupSize,
    available: int,
    length: int,
    given: bool = False,
    step: int = 0,
    step_per_token: int = 0,
    num_seqs: int = 128,
    chunk: int = 2048,
    share: float = DEFAULT_KV_SHARE,
    **cache: Any,
) -> KVSize:
    return size_kv_cache(
        groups,
        available,
        lambda tokens: step + step_per_token * tokens,
        CacheConfig(**cache),
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=chunk),
        length,
        given,
        share=share,
    )


def num_bytes(groups: tuple[GroupSize, ...], result: KVSize, block_size: int = 16) -> int:
    return sum(
        (count + 1) * block_size * group.bytes_per_token
        for count, group in zip(result.num_blocks, groups, strict=True)
    )


def config(**values: Any) -> CheckpointConfig:
    return CheckpointConfig({"model_type": "llama", **values}, "m/config.json")


# --- the model's limit (cases 11 and 12) ----------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        # llama3 and longrope name the stretched length.
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            },
            131072,
        ),
        # linear, dynamic and yarn name the length before.
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384),
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            },
            8192,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        # Some files name the stretched length with yarn too: it is not stretched twice.
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        # The newer spelling, also one for each kind of layer.
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
            8192,
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            4096,
        ),
        # Gemma 3 scales the global layers' base, and names what results.
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
    ],
)
def test_effective_limit(values: dict[str, Any], limit: int) -> None:
    assert model_length_limit(config(**values)) == limit


def test_asked_length_is_compared_with_the_effective_limit() -> None:
    short = config(max_position_embeddings=32768)
    assert resolve_max_model_len(4096, short) == 4096
    assert resolve_max_model_len(32768, short) == 32768
    assert resolve_max_model_len(None, short) == 32768
    with pytest.raises(OptionError, match=r"32769 .* 32768 tokens .*m/config\.json.*at most 32768"):
        resolve_max_model_len(32769, short)
    stretched = config(
        max_position_embeddings=32768, rope_scaling={"rope_type": "yarn", "factor": 4.0}
    )
    assert resolve_max_model_len(131072, stretched) == 131072


def test_a_cap_is_no_wish() -> None:
    model = config(max_position_embeddings=32768)
    assert resolve_max_model_len(None, model, cap=131072) == 32768
    assert resolve_max_model_len(None, model, cap=1000) == 1000


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "max_position_embeddings"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": "x"}},
            "factor",
        ),
    ],
)
def test_a_wrong_config_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidModelError, match=rf"m/config\.json.*'{named}'"):
        model_length_limit(config(**values))


# --- the size of the cache (cases 11, 14, 15, 18) -------------------------------------------------


def test_sized_from_what_is_there() -> None:
    small = size(LLAMA, available=8 * GIB, length=131072)
    large = size(LLAMA, available=256 * GIB, length=131072)
    assert num_bytes((LLAMA,), small) <= 4 * GIB
    assert small.max_model_len < 131072 and "instead of 131,072" in small.note
    assert f"{small.max_model_len:,}" in small.note
    # Plenty: the model's whole context, for more than one request, with no flag.
    assert large.max_model_len == 131072 and large.note == ""
    assert large.num_blocks[0] * 16 > 4 * 131072


def test_never_more_than_can_be_used() -> None:
    result = size(LLAMA, available=512 * GIB, length=1024, num_seqs=1)
    assert result.num_blocks == (64,)
    assert num_bytes((LLAMA,), result) < GIB // 4
    result = size(LLAMA, available=512 * GIB, length=1024, num_seqs=8, kv_cache_bytes=100 * GIB)
    assert result.num_blocks == (8 * 64,)
    assert size(LLAMA, available=512 * GIB, length=1024, num_blocks=10**6, num_seqs=2) == KVSize(
        (128,), 1024
    )


def test_an_asked_length_may_take_most_of_the_memory() -> None:
    asked = size(LLAMA, available=20 * GIB, length=131072, given=True)
    assert asked.max_model_len == 131072 and asked.note == ""
    assert 16 * GIB < num_bytes((LLAMA,), asked) <= 19 * GIB


def test_an_asked_length_that_does_not_fit() -> None:
    with pytest.raises(OutOfMemory) as caught:
        size(LLAMA, available=8 * GIB, length=131072, given=True)
    text = str(caught.value)
    assert "--max-model-len 131072 needs 16.00 GiB" in text
    longest = int(re.findall(r"Lower it to (\d+)", text)[0])
    assert 55_000 < longest < 65_536
    assert size(LLAMA, available=8 * GIB, length=longest, given=True).max_model_len == longest
    # No flag is named that would not work.
    assert "--kv-cache-memory-bytes" not in text
    with pytest.raises(OutOfMemory, match=r"Or give --kv-cache-memory-bytes (\d+)"):
        size(LLAMA, available=20 * GIB, length=131072, given=True, kv_cache_bytes=GIB)
    with pytest.raises(OutOfMemory, match="leave --num-gpu-blocks-override out"):
        size(LLAMA, available=20 * GIB, length=131072, given=True, num_blocks=100)


def test_more_than_there_is() -> None:
    with pytest.raises(OutOfMemory, match=r"40\.00 GiB was asked for; 10\.00 GiB") as caught:
        size(LLAMA, available=11 * GIB, length=4096, step=GIB, kv_cache_bytes=40 * GIB)
    fitting = int(re.findall(r"--kv-cache-memory-bytes (\d+)", str(caught.value))[0])
    result = size(LLAMA, available=11 * GIB, length=4096, step=GIB, kv_cache_bytes=fitting)
    assert result.max_model_len == 4096
    with pytest.raises(OutOfMemory, match="num-gpu-blocks-override"):
        size(LLAMA, available=GIB, length=131072, num_blocks=10**6)
    with pytest.raises(OutOfMemory, match=r"A step needs 2\.00 GiB.*--max-num-batched-tokens"):
        size(LLAMA, available=GIB, length=4096, step=2 * GIB)
    with pytest.raises(OutOfMemory, match="one block of 16 tokens"):
        size(LLAMA, available=3 << 20, length=4096)


def test_a_block_that_just_fits() -> None:
    """What is left is a block and the one of zeros, and a little of what may be taken besides."""
    available = int(2 * 16 * LLAMA.bytes_per_token / ASKED_KV_SHARE) + 1
    result = size(LLAMA, available=available, length=4096, share=ASKED_KV_SHARE)
    assert (result.max_model_len, result.num_blocks) == (16, (1,))
    with pytest.raises(OutOfMemory, match=r"Lower it to 16, which fits\."):
        size(LLAMA, available=available, length=4096, share=ASKED_KV_SHARE, given=True)


def test_a_step_over_long_contexts_takes_its_share() -> None:
    free = size(LLAMA, available=8 * GIB, length=131072)
    beside = size(LLAMA, available=8 * GIB, length=131072, step_per_token=LLAMA.bytes_per_token)
    assert 0.4 < beside.max_model_len / free.max_model_len < 0.8
    taken = num_bytes((LLAMA,), beside) + beside.max_model_len * LLAMA.bytes_per_token
    assert taken <= 8 * GIB


def test_sliding_layers_need_no_blocks_for_what_they_do_not_see() -> None:
    full = size(GEMMA[0], available=100 * GIB, length=131072, num_seqs=1)
    both = size(*GEMMA, available=100 * GIB, length=131072, num_seqs=1)
    assert both.num_blocks[0] == full.num_blocks[0] == 131072 // 16
    assert both.num_blocks[1] == (1024 + 2048 + 2 * 16) // 16
    # With memory for one request only, that request finds its blocks in both groups.
    exact = num_bytes(GEMMA, both)
    tight = size(*GEMMA, available=2 * exact, length=131072)
    assert tight.max_model_len == 131072


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(
        st.lists(
            st.builds(
                GroupSize,
                st.integers(1, 1 << 20),
                st.none() | st.integers(1, 4096),
            ),
            min_size=1,
            max_size=3,
        )
    )
    sizes: dict[str, Any] = draw(
        st.sampled_from(["auto", "bytes", "blocks"]).flatmap(
            lambda kind: st.fixed_dictionaries(
                {
                    "bytes": {"kv_cache_bytes": st.integers(1, 1 << 36)},
                    "blocks": {"num_blocks": st.integers(1, 1 << 16)},
                    "auto": {},
                }[kind]
            )
        )
    )
    return {
        "groups": tuple(groups),
        "available": draw(st.integers(0, 1 << 36)),
        "length": draw(st.integers(1, 1 << 20)),
        "given": draw(st.booleans()),
        "step": draw(st.integers(0, 1 << 30)),
        "step_per_token": draw(st.integers(0, 1 << 14)),
        "num_seqs": draw(st.integers(1, 300)),
        "chunk": draw(st.integers(1, 8192)),
        "block_size": draw(st.sampled_from(BLOCK_SIZES)),
        "share": draw(st.sampled_from([DEFAULT_KV_SHARE, ASKED_KV_SHARE])),
        **sizes,
    }


def assert_suggestions_work(
    text: str, groups: tuple[GroupSize, ...], machine: dict[str, Any]
) -> None:
    assert "\n" not in text
    for number in re.findall(r"Lower it to (\d+), which fits", text):
        shorter = {**machine, "length": int(number)}
        assert size(*groups, **shorter).max_model_len == int(number) >= machine["block_size"]
    for number in re.findall(r"[Gg]ive --kv-cache-memory-bytes (\d+)", text):
        # Where not even a block fitted, a length that was asked for is the next thing to lower.
        is_next = "one block" in text
        larger = {**machine, "kv_cache_bytes": int(number), "num_blocks": None}
        result = size(*groups, **{**larger, "given": machine["given"] and not is_next})
        assert is_next or result.max_model_len == machine["length"]


@given(machines())
def test_what_is_promised_holds(machine: dict[str, Any]) -> None:
    """The result fits, one longest request finds its blocks, and every suggestion works."""
    groups = machine.pop("groups")
    try:
        result = size(*groups, **machine)
    except OutOfMemory as error:
        assert_suggestions_work(str(error), groups, machine)
        return
    length = machine["length"]
    assert 1 <= result.max_model_len <= length
    assert (result.max_model_len < length) == bool(result.note)
    assert not (result.note and machine["given"])
    taken = num_bytes(groups, result, machine["block_size"])
    step = machine["step"] + machine["step_per_token"] * result.max_model_len
    assert taken + step <= machine["available"]
    manager = BlockManager(
        [KVGroup((i,), 1, 1, g.window, g.bytes_per_token) for i, g in enumerate(groups)],
        [min(count, 1 << 12) for count in result.num_blocks],
        machine["block_size"],
        False,
    )
    needed = manager.num_blocks_needed(result.max_model_len, machine["chunk"])
    assert all(have >= need for have, need in zip(result.num_blocks, needed, strict=True))
