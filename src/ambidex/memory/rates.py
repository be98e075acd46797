"""How long an operation or a copy takes: rooflines, pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeRate:
    """What a processor reaches: bytes a second out of its memory, arithmetic operations a second,
    and a fixed cost of each operation in seconds."""

    bytes_per_s: float
    flops: float
    launch_s: float = 0.0

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Of one operation: the longer of reading and computing."""
        return self.launch_s + max(flops / self.flops, num_bytes / self.bytes_per_s)

    def scaled(self, factor: float) -> ComputeRate:
        """A processor ``factor`` times as fast."""
        return ComputeRate(self.bytes_per_s * factor, self.flops * factor, self.launch_s)


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A link between two memories, in one direction."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def limited(self, bytes_per_s: float | None) -> LinkRate:
        """The same link where no more than that may be used."""
        if bytes_per_s is None:
            return self
        return LinkRate(min(self.bytes_per_s, bytes_per_s), self.latency_s)
