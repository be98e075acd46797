"""Which experts of a mixture lie on the accelerator while the others are on the host: policy.

Every layer has room for some of its experts. Those that were used most of late are in it; it
changes a little at a time, between steps, so that copying does not fill the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ambidex.memory.cost_model import ComputeRate, LinkRate

#: What a use counts for after one more step: half of it after 140 steps.
DECAY = 0.995
#: An expert comes in if it was used that many times as often as the one that goes out, and that
#: many times more: chance alone does not make experts come and go.
HYSTERESIS = 1.5
LEAST_USES = 4.0
#: All layers are looked at in that many steps, and each changes one expert at a time.
SWEEP_STEPS = 8
#: The name of the copies in ledgers and among modules.
CACHED_EXPERTS = "cached experts"
#: Most rows of a step whose experts the two memories share.
MAX_ROWS = 64
#: Weights of uses grow instead of all scores shrinking; beyond this they all begin again at one.
_MOST_WEIGHT = 1e12


class Change(NamedTuple):
    """One expert of a layer takes another one's place."""

    layer: int
    expert_in: int
    expert_out: int


class ExpertCache:
    """What is cached of each layer; at first the experts with the lowest numbers.

    ``capacities``: experts that each layer has room for. With ``is_static`` it stays as it is at
    first, whatever is used: runs are alike to the byte that crosses the link.
    """

    def __init__(
        self, capacities: Sequence[int], num_experts: int, *, is_static: bool = False
    ) -> None:
        assert all(0 <= capacity <= num_experts for capacity in capacities), capacities
        self._is_static = is_static
        self._cached = [set(range(capacity)) for capacity in capacities]
        self._scores = [[0.0] * num_experts for _ in capacities]
        self._weight = 1.0
        #: The layer to look at next.
        self._next = 0

    @property
    def num_layers(self) -> int:
        return len(self._cached)

    @property
    def max_changes(self) -> int:
        """The most changes of one step."""
        return -(-self.num_layers // SWEEP_STEPS)

    def cached(self, layer: int) -> frozenset[int]:
        return frozenset(self._cached[layer])

    def record(self, layer: int, counts: Mapping[int, int]) -> None:
        """How often a step used experts of ``layer``, by expert."""
        scores = self._scores[layer]
        for expert, count in counts.items():
            scores[expert] += count * self._weight

    def changes(self) -> list[Change]:
        """What changes after a step; it counts as done."""
        if self._is_static:
            return []
        self._age()
        found = []
        for _ in range(self.max_changes):
            layer, self._next = self._next, (self._next + 1) % self.num_layers
            change = self._change(layer)
            if change is not None:
                self._cached[layer].remove(change.expert_out)
                self._cached[layer].add(change.expert_in)
                found.append(change)
        return found

    def _change(self, layer: int) -> Change | None:
        scores, cached = self._scores[layer], self._cached[layer]
        others = [expert for expert in range(len(scores)) if expert not in cached]
        if not cached or not others:
            return None
        # The lowest number of equals, so that the same uses make the same changes.
        best = min(others, key=lambda expert: (-scores[expert], expert))
        worst = min(cached, key=lambda expert: (scores[expert], expert))
        needed = HYSTERESIS * scores[worst] + LEAST_USES * self._weight
        return Change(layer, best, worst) if scores[best] >= needed else None

    def _age(self) -> None:
        self._weight /= DECAY
        if self._weight > _MOST_WEIGHT:
            self._scores = [[score / self._weight for score in each] for each in self._scores]
            self._weight = 1.0


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """One expert of a layer: its weights' bytes and number, and the numbers of a token's row."""

    num_bytes: int
    num_weights: int
    hidden: int


def expert_capacities(slot_bytes: Sequence[int], num_experts: int, cache_bytes: int) -> list[int]:
    """Experts of each layer that ``cache_bytes`` have room for: as many of each as of the others,
    or one more of the first ones. ``slot_bytes``: what one expert of each layer takes."""
    per_expert = sum(slot_bytes)
    if not per_expert:
        return [0] * len(slot_bytes)
    count = min(cache_bytes // per_expert, num_experts)
    left, capacities = cache_bytes - count * per_expert, []
    for size in slot_bytes:
        has_room = count < num_experts and size <= left
        left -= size if has_room else 0
        capacities.append(count + has_room)
    return capacities


def sharing_pays(
    num_rows: int,
    top_k: int,
    num_experts: int,
    capacity: int,
    size: ExpertSize,
    host: ComputeRate,
    device: ComputeRate,
    link: LinkRate,
) -> bool:
    """Whether a layer of ``num_rows`` tokens is done earlier where the accelerator computes its
    ``capacity`` experts than where the host computes all.

    Shared results cross the link before they are added up, ``top_k`` rows a token instead of one.
    Experts are taken to be used alike: in truth the cached ones are used more.
    """
    if not 0 < num_rows <= MAX_ROWS or not capacity:
        return False
    choices = num_rows * top_k
    read = num_experts * (1 - (1 - 1 / num_experts) ** choices)
    cached = capacity / num_experts
    row_bytes = 4 * size.hidden

    def seconds(rate: ComputeRate, share: float) -> float:
        flops = 2.0 * choices * size.num_weights
        return rate.seconds(share * flops, share * read * size.num_bytes)

    alone = seconds(host, 1.0) + link.seconds(num_rows * row_bytes)
    shared = max(seconds(host, 1.0 - cached), seconds(device, cached))
    return shared + link.seconds(choices * row_bytes) < alone
