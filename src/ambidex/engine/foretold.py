"""Predicted against measured: how long steps take, and a word where the two part."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ambidex.memory.operations import StepLoad
from ambidex.memory.strain import Strain, likely_cause, read_strain
from ambidex.runner.decision import Decision

logger = logging.getLogger(__name__)

#: Steps after which the two are compared.
JUDGED_STEPS = 100
#: Of one kind; of fewer nothing is said.
_LEAST_STEPS = 10
#: Drift beyond it is logged, once.
MAX_DRIFT = 0.3


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """Steps of one kind: how many, and the seconds that they should have taken and took."""

    num_steps: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else 1.0


class Foretelling:
    """Adds up what steps take beside what ``predict(load)`` says that they take, in seconds;
    nothing where there is no prediction.

    Steps that compute prompts and outputs together are left out, and so is all that follows the
    first ``JUDGED_STEPS``: the report is of the machine as it was at the start.
    """

    def __init__(
        self,
        predict: Callable[[StepLoad], float] | None,
        strain: Callable[[], Strain] = read_strain,
    ) -> None:
        self._predict = predict
        self._strain = strain
        self._before: Strain | None = None
        self._num_steps = 0
        self._sums: dict[str, StepSpeed] = {}

    @property
    def is_judged(self) -> bool:
        return self._num_steps >= JUDGED_STEPS

    def record(self, decision: Decision, seconds: float) -> None:
        """One step, and how long it took from the decision to its outputs."""
        if self._predict is None or self.is_judged:
            return
        load = _load(decision)
        if load is None:
            return
        if self._before is None:
            self._before = self._strain()
        kind = "decode" if load.num_new == 1 else "prefill"
        old = self._sums.get(kind, StepSpeed())
        self._sums[kind] = StepSpeed(
            old.num_steps + 1, old.predicted_s + self._predict(load), old.measured_s + seconds
        )
        self._num_steps += 1
        if self.is_judged:
            self._judge(self._before)

    def report(self) -> dict[str, StepSpeed]:
        """By kind of step: decode, prefill; empty until there are enough steps."""
        return dict(self._sums) if self.is_judged else {}

    def _judge(self, before: Strain) -> None:
        for kind, speed in self._sums.items():
            if speed.num_steps < _LEAST_STEPS:
                continue
            if 1 / (1 + MAX_DRIFT) <= speed.ratio <= 1 + MAX_DRIFT:
                continue
            each = [1e3 * s / speed.num_steps for s in (speed.measured_s, speed.predicted_s)]
            logger.warning(
                "%s steps took %.1f ms instead of the predicted %.1f ms (%.2fx, over %d steps); %s",
                kind,
                *each,
                speed.ratio,
                speed.num_steps,
                self._cause(before, speed.ratio > 1),
            )
            return

    def _cause(self, before: Strain, is_slower: bool) -> str:
        again = "measure it again with `ambidex plan MODEL --this-machine --measure`"
        if not is_slower:
            return f"likely the machine was busy when its profile was measured: {again}"
        cause = likely_cause(before, self._strain())
        if cause is not None:
            return f"likely because {cause}"
        return f"nothing else was seen to run: if the machine has changed, {again}"


def _load(decision: Decision) -> StepLoad | None:
    """What the step computes, as the cost model sees it; None where it is of two kinds."""
    count = len(decision.requests)
    if not count or (decision.num_prefill_tokens and decision.num_decode_tokens):
        return None
    new = sum(len(request.token_ids) for request in decision.requests)
    end = sum(request.start + len(request.token_ids) for request in decision.requests)
    if decision.num_decode_tokens:
        return StepLoad(count, 1, max(round(end / count), 1)) if new == count else None
    return StepLoad(count, max(round(new / count), 1), max(round(end / count), 1))
