"""A token bucket: bytes over a link, at no more than a rate on average."""

from __future__ import annotations


class TokenBucket:
    """At most ``bytes_per_s`` on average, and ``burst_bytes`` at once after a pause."""

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        assert bytes_per_s > 0, "a rate is positive"
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = burst_bytes
        self._tokens = burst_bytes
        #: Until when bytes that were let through are under way.
        self._until_s = 0.0

    def seconds(self, num_bytes: float, now_s: float, link_s: float) -> float:
        """How long ``num_bytes`` that begin at ``now_s`` take, over a link that takes ``link_s``
        for them; they are counted as sent."""
        elapsed_s = max(now_s - self._until_s, 0.0)
        tokens = min(self._tokens + elapsed_s * self.bytes_per_s, self.burst_bytes)
        seconds = max(link_s, (num_bytes - tokens) / self.bytes_per_s)
        self._tokens = min(tokens + seconds * self.bytes_per_s - num_bytes, self.burst_bytes)
        self._until_s = now_s + seconds
        return seconds
