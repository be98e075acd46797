"""No more bytes than the rate allows, in any span of time, and no less."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.memory.token_bucket import TokenBucket

#: (seconds without anything to send, bytes, seconds that the link takes for them).
SENDS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 1e-6, 0.01, 3.0, 1e4]),
        st.sampled_from([1, 100, 1 << 20, 50_000_000]),
        st.sampled_from([0.0, 1e-6, 0.02, 5.0]),
    ),
    min_size=1,
    max_size=12,
)
RATES = st.sampled_from([1e-3, 1.0, 1e6, 8e9, 1e15])


@settings(max_examples=300, deadline=None)
@given(sends=SENDS, rate=RATES, burst=st.sampled_from([0.0, 1.0, float(1 << 20)]))
def test_no_span_has_more_than_the_rate(
    sends: list[tuple[float, int, float]], rate: float, burst: float
) -> None:
    bucket, now_s = TokenBucket(rate, burst), 0.0
    spans: list[tuple[float, float, int]] = []
    for gap_s, num_bytes, link_s in sends:
        start_s = now_s + gap_s
        seconds = bucket.seconds(num_bytes, start_s, link_s)
        assert seconds >= link_s
        now_s = start_s + seconds
        spans.append((start_s, now_s, num_bytes))
    for first in range(len(spans)):
        for last in range(first, len(spans)):
            sent = sum(size for _, _, size in spans[first : last + 1])
            span_s = spans[last][1] - spans[first][0]
            # Seconds since the start have fewer digits than those of one send.
            allowed = burst + rate * (span_s + 1e-14 * spans[last][1])
            assert sent <= allowed * (1 + 1e-9) + 1e-3


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 4096, 1 << 20, 30 << 20]), min_size=2, max_size=20),
    rate=st.sampled_from([1.0, 1e6, 8e9]),
)
def test_what_always_sends_has_the_rate(sizes: list[int], rate: float) -> None:
    """Whatever is sent at a time, with a link that is faster: after the burst, all of the rate."""
    bucket, now_s, burst = TokenBucket(rate, 1 << 20), 0.0, 1 << 20
    for size in sizes:
        now_s += bucket.seconds(size, now_s, 0.1 * size / rate)
    total = sum(sizes)
    assert now_s == pytest.approx(max((total - burst) / rate, 0.1 * total / rate), rel=0.12)


def test_a_link_that_is_slower_is_not_held_back() -> None:
    bucket, now_s = TokenBucket(1e9, 1 << 20), 0.0
    for _ in range(50):
        seconds = bucket.seconds(4 << 20, now_s, 0.01)
        assert seconds == 0.01
        now_s += seconds


def test_a_pause_saves_a_burst_and_no_more() -> None:
    bucket = TokenBucket(100.0, 50.0)
    assert bucket.seconds(50, 0.0, 0.0) == 0.0
    assert bucket.seconds(100, 0.0, 0.0) == 1.0
    # An hour's worth of tokens is not there after an hour.
    assert bucket.seconds(150, 3600.0, 0.0) == 1.0
