"""Predicted beside measured, and the word where they part."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ambidex.engine.foretold import JUDGED_STEPS, Foretelling, StepSpeed
from ambidex.memory.operations import StepLoad
from ambidex.memory.strain import Strain, likely_cause, read_strain
from ambidex.runner.decision import Decision, ScheduledRequest

QUIET = Strain(at_s=0, busy_s=0, own_s=0, stolen_s=0, throttled_s=0, major_faults=0)
LATER = replace(QUIET, at_s=10, busy_s=20, own_s=20)


def decode(*starts: int) -> Decision:
    requests = [ScheduledRequest(str(i), [1], start, ([],), True) for i, start in enumerate(starts)]
    return Decision("cpu", 0, requests, num_decode_tokens=len(starts))


def prefill(length: int, start: int = 0) -> Decision:
    request = ScheduledRequest("p", [1] * length, start, ([],), True)
    return Decision("cpu", 0, [request], num_prefill_tokens=length)


def strains(*values: Strain) -> Iterator[Strain]:
    yield from values


def make(predicted_s: float, *, after: Strain = LATER) -> tuple[Foretelling, list[StepLoad]]:
    asked: list[StepLoad] = []

    def predict(load: StepLoad) -> float:
        asked.append(load)
        return predicted_s

    return Foretelling(predict, strains(QUIET, after).__next__), asked


def test_report_comes_after_a_hundred_steps_and_keeps_kinds_apart() -> None:
    foretelling, asked = make(0.010)
    for _ in range(20):
        foretelling.record(prefill(64), 0.020)
    for _ in range(JUDGED_STEPS - 21):
        foretelling.record(decode(10, 30), 0.011)
    assert foretelling.report() == {}
    foretelling.record(decode(10, 30), 0.011)
    report = foretelling.report()
    assert report["prefill"].num_steps == 20
    assert report["prefill"].ratio == pytest.approx(2.0)
    assert report["decode"].num_steps == 80
    assert report["decode"].ratio == pytest.approx(1.1)
    assert asked[0] == StepLoad(1, 64, 64)
    assert asked[-1] == StepLoad(2, 1, 21)
    foretelling.record(decode(10), 5.0)
    assert foretelling.report() == report


def test_a_step_of_both_kinds_is_left_out() -> None:
    foretelling, asked = make(0.010)
    mixed = decode(5)
    mixed.requests += prefill(8).requests
    mixed.num_prefill_tokens = 8
    foretelling.record(mixed, 1.0)
    foretelling.record(Decision("cpu", 0), 1.0)
    assert asked == []


@pytest.mark.parametrize("seconds", [0.0077, 0.010, 0.0129])
def test_within_a_third_nothing_is_said(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    foretelling, _ = make(0.010)
    for _ in range(JUDGED_STEPS):
        foretelling.record(decode(1), seconds)
    assert foretelling.is_judged
    assert caplog.records == []


def test_drift_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    foretelling, _ = make(0.010, after=replace(LATER, own_s=10))
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * JUDGED_STEPS):
            foretelling.record(decode(1), 0.020)
    (record,) = caplog.records
    message = record.getMessage()
    assert "decode steps took 20.0 ms instead of the predicted 10.0 ms (2.00x" in message
    assert "other programs used 1.0 of the machine's CPUs" in message


def test_a_machine_that_is_faster_than_its_profile(caplog: pytest.LogCaptureFixture) -> None:
    foretelling, _ = make(0.010)
    for _ in range(JUDGED_STEPS):
        foretelling.record(decode(1), 0.005)
    assert "--measure" in caplog.text


def test_too_few_steps_of_a_kind_are_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    foretelling, _ = make(0.010)
    foretelling.record(prefill(64), 9.0)
    for _ in range(JUDGED_STEPS):
        foretelling.record(decode(1), 0.010)
    assert foretelling.report()["prefill"] == StepSpeed(1, 0.010, 9.0)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"throttled_s": 4.0}, "CPU quota stopped it for 4.0 of 10.0 s"),
        ({"stolen_s": 3.0}, "hypervisor took 3.0 CPU seconds"),
        ({"major_faults": 5000}, "5000 pages had to be read from disk"),
        ({"own_s": 5.0}, "other programs used 1.5"),
    ],
)
def test_causes(changed: dict[str, float], words: str) -> None:
    assert likely_cause(QUIET, LATER) is None
    cause = likely_cause(QUIET, replace(LATER, **changed))  # type: ignore[arg-type]
    assert cause is not None
    assert words in cause


def test_strain_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 900 7 3 4 50 0 0\ncpu0 1 1 1 1\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    (tmp_path / "sys/fs/cgroup/box").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/box/cpu.stat").write_text("usage_usec 9\nthrottled_usec 2500000\n")
    strain = read_strain(tmp_path)
    assert strain.busy_s == pytest.approx(1.57)
    assert strain.stolen_s == pytest.approx(0.5)
    assert strain.throttled_s == 2.5
    assert strain.own_s > 0
    nothing = read_strain(tmp_path / "none")
    assert (nothing.busy_s, nothing.stolen_s, nothing.throttled_s) == (0, 0, 0)
