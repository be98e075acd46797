"""Which rows of a split weight are copied, and which are computed where they lie."""

from __future__ import annotations

from dataclasses import dataclass

from ambidex.memory.weight_places import ROW_UNIT


@dataclass(frozen=True, slots=True)
class SplitTable:
    """The share of the host's rows that is copied to the accelerator, by the rows of a product
    (tokens): pairs, ascending. Made at load; a step only looks it up."""

    points: tuple[tuple[int, float], ...]

    @property
    def streams(self) -> bool:
        """Whether anything is copied, at any number of tokens."""
        return any(share for _, share in self.points)

    def share(self, num_tokens: int) -> float:
        """Between two points it changes evenly, so that it is never more than at either."""
        low = self.points[0]
        for high in self.points:
            if num_tokens <= high[0]:
                if high[0] == low[0]:
                    return high[1]
                part = (num_tokens - low[0]) / (high[0] - low[0])
                return low[1] + part * (high[1] - low[1])
            low = high
        return low[1]


def streamed_rows(share: float, num_rows: int) -> int:
    """Of ``num_rows`` rows of the host, those that are copied: a multiple of 64, or all."""
    if share >= 1.0:
        return num_rows
    return min(int(share * num_rows / ROW_UNIT + 0.5) * ROW_UNIT, num_rows)
