"""When compressed streaming pays: numbers in, a decision and its sentence out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.memory.compression import (
    MIN_GAIN,
    compressed_bytes_per_s,
    decompressed_bytes_per_s,
    worth_compressing,
)

GB = 1e9


def test_a_slow_link_gains_the_ratio() -> None:
    is_on, sentence = worth_compressing(1.42, 4 * GB, 20 * GB)
    assert is_on
    assert sentence == (
        "Streamed weights are compressed by a factor of 1.42: 5.7 GB/s of weights over a link of "
        "4.0 GB/s, decompressed at 20.0 GB/s."
    )


def test_decompression_bounds_the_gain() -> None:
    assert compressed_bytes_per_s(1.42, 4 * GB, 5 * GB) == 5 * GB
    is_on, sentence = worth_compressing(1.42, 4 * GB, 5 * GB)
    assert is_on and "5.0 GB/s of weights" in sentence


def test_what_is_not_used_says_why() -> None:
    is_on, sentence = worth_compressing(1.42, 25 * GB, 20 * GB)
    assert not is_on
    assert sentence == (
        "Streamed weights are not compressed (--offload-compress): they are decompressed at 20.0 "
        "GB/s, and the link carries them as they are at 25.0 GB/s."
    )
    is_on, sentence = worth_compressing(1.0, 4 * GB, 20 * GB)
    assert not is_on
    assert sentence == (
        "Streamed weights are not compressed (--offload-compress): what is streamed would shrink "
        "by a factor of 1.00, and 1.05 is the least that pays. Only bfloat16 weights compress."
    )
    is_on, sentence = worth_compressing(1.42, math.inf, 20 * GB)
    assert not is_on and "at any rate" in sentence


def test_an_accelerator_that_is_busy_multiplying_has_no_time_to_decompress() -> None:
    is_on, _ = worth_compressing(1.42, 4 * GB, 5 * GB, 30 * GB)
    assert is_on
    is_on, sentence = worth_compressing(1.42, 4 * GB, 5 * GB, 5 * GB)
    assert not is_on
    assert "decompressed at 5.0 GB/s and multiplied with at 5.0 GB/s" in sentence


def test_decompressing_reads_and_writes() -> None:
    assert decompressed_bytes_per_s(1.5, 10 * GB) == pytest.approx(6 * GB)


rates = st.floats(1e6, 1e13)


@given(ratio=st.floats(0.9, 3), link=rates, decompress=rates, multiply=rates)
def test_it_is_on_only_where_a_model_of_the_pipeline_is_faster(
    ratio: float, link: float, decompress: float, multiply: float
) -> None:
    num_bytes = 1e9
    raw_s = max(num_bytes / link, num_bytes / multiply)
    device_s = num_bytes / decompress + num_bytes / multiply
    compressed_s = max(num_bytes / ratio / link, device_s)
    is_on, sentence = worth_compressing(ratio, link, decompress, multiply)
    gain = raw_s / compressed_s
    if gain == pytest.approx(MIN_GAIN):
        return
    assert is_on == (gain > MIN_GAIN)
    assert sentence.endswith(".")
