"""Exactness over two memories: the CPU lane's tokens and log probabilities, bit for bit, wherever
the weights lie. Each test also asserts, from the engine's own counters, that the path in question
was taken; the last ones that without a mechanism it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lane_harness import (
    SIM,
    Ran,
    assert_same,
    assert_streamed,
    make_config,
    num_rows,
    place_by,
    prompts,
    run,
)

from ambidex.config import OffloadConfig
from ambidex.device.stream import Stream
from ambidex.engine.engine import Engine
from ambidex.layers.module import Experts, Matrix, Parameter, Place, Table
from ambidex.weights.streamer import Streamer

KINDS = ["llama", "qwen2", "gemma3_text", "qwen3_moe"]

LAYERS = ("layers.*",)
MLPS = ("*.mlp.*",)


class Subject:
    """A model with options, and what the CPU lane says."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.options = options
        #: Path, kind and rows of each matrix.
        self.matrices: list[tuple[str, type, int]] = []
        self.expected = run(make_config(folder, **options), prepare=self._look)

    def _look(self, engine: Engine) -> None:
        for path, parameter in engine.lane.runner.model.named_parameters():
            if isinstance(parameter, Matrix | Experts):
                self.matrices.append((path, type(parameter), num_rows(parameter)))

    def run(self, device: str = SIM, *, prepare: Any = None, **offload: Any) -> Ran:
        changes = {name: offload.pop(name) for name in ("enforce_eager",) if name in offload}
        config = make_config(
            self.folder, device, OffloadConfig(**offload), **self.options, **changes
        )
        return run(config, prepare=prepare)


@pytest.fixture(scope="module")
def subjects(sim_model: Callable[..., Path]) -> Callable[..., Subject]:
    made: dict[Any, Subject] = {}

    def make(kind: str, **options: Any) -> Subject:
        key = (kind, *sorted(options.items()))
        if key not in made:
            made[key] = Subject(sim_model(kind), **options)
        return made[key]

    return make


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, subjects: Callable[..., Subject]) -> Subject:
    return subjects(request.param, dtype="float32")


def test_texts_differ(subject: Subject) -> None:
    """The subject can tell right from wrong: prompts lead to different, non-constant texts."""
    texts = [tuple(token for token, _, _ in trace) for trace in subject.expected.traces]
    assert len(set(texts)) == len(texts)
    bits = {entry[1] for trace in subject.expected.traces for entry in trace}
    assert len(bits) > 24


# ------------------------------------------------------------------------------------- placements


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_all_resident(subject: Subject, enforce_eager: bool) -> None:
    ran = subject.run(enforce_eager=enforce_eager)
    assert_same(ran, subject.expected)
    assert ran.counts["rows_resident"] > 0
    assert ran.counts["rows_host"] == ran.counts["rows_streamed"] == 0
    assert "streamed_bytes" not in ran.counts and ran.host_bytes == 0
    assert (ran.num_replays > 0) != enforce_eager


def test_mlps_computed_on_the_host(subject: Subject) -> None:
    ran = subject.run(patterns=MLPS, mode="compute")
    assert_same(ran, subject.expected)
    assert ran.counts["rows_host"] > 0
    assert ran.counts["rows_resident"] > 0
    assert "streamed_bytes" not in ran.counts
    assert ran.host_bytes > 0 and ran.num_replays > 0


def test_mlps_streamed(subject: Subject) -> None:
    ran = subject.run(patterns=("*.mlp.*",), mode="stream")
    assert_same(ran, subject.expected)
    assert_streamed(ran)
    assert ran.counts["rows_streamed"] > 0
    assert ran.counts["prefetched"] > 0


@pytest.mark.parametrize(
    ("is_async", "prefetch_step", "enforce_eager"),
    [(False, None, False), (True, 1, False), (True, 1, True), (True, 2, False), (True, 3, False)],
    ids=["sync", "1 ahead", "1 ahead, eager", "2 ahead", "3 ahead"],
)
def test_all_layers_streamed(
    subject: Subject, is_async: bool, prefetch_step: int | None, enforce_eager: bool
) -> None:
    ran = subject.run(
        patterns=LAYERS,
        mode="stream",
        is_async=is_async,
        prefetch_step=prefetch_step,
        enforce_eager=enforce_eager,
    )
    assert_same(ran, subject.expected)
    assert_streamed(ran)
    count = ran.counts
    # The warm-up's step came before.
    total = sum(ran.plan(step.rows) for step in ran.steps) + ran.plan((8, 1))
    if is_async:
        assert count["prefetched"] == count["copies"] - ran.num_ahead
        assert count["streamed_bytes"] == total + ran.ahead_bytes
        assert (ran.num_replays > 0) != enforce_eager
    else:
        assert count["prefetched"] == 0 and ran.ahead_bytes == 0
        assert count["streamed_bytes"] == total
        assert ran.num_replays == 0


def test_the_ring_grows_with_what_is_ahead(subject: Subject) -> None:
    rings = [
        subject.run(patterns=LAYERS, mode="stream", prefetch_step=ahead, is_async=ahead > 0)
        for ahead in range(3)
    ]
    one = rings[0].ring_bytes
    assert [ran.ring_bytes for ran in rings] == [one, 2 * one, 3 * one]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_split(subject: Subject, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix in three parts, as far as it has rows."""
    place_by(monkeypatch, lambda _, parameter: thirds(parameter))
    ran = subject.run(enforce_eager=enforce_eager)
    assert_same(ran, subject.expected)
    assert_streamed(ran)
    assert all(ran.counts[f"rows_{place}"] > 0 for place in ("resident", "streamed", "host"))
    assert (ran.num_replays > 0) != enforce_eager


def thirds(parameter: Parameter) -> Place:
    rows = num_rows(parameter)
    if isinstance(parameter, Experts | Table):
        return Place(0, lambda _: 0)
    resident = rows // 3 // 64 * 64
    streamed = min(max((rows - resident) // 128 * 64, 64), rows)
    return Place(resident, lambda _: streamed)


@pytest.mark.parametrize("mode", ["compute", "stream", "split"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"], ids=["tied", "untied"])
def test_embedding_and_head_on_the_host(
    subjects: Callable[..., Subject], kind: str, mode: str
) -> None:
    subject = subjects(kind, dtype="float32")
    patterns = ("embedding*",) if kind == "llama" else ("embedding*", "head*")
    ran = subject.run(patterns=patterns, mode=mode)
    assert_same(ran, subject.expected)
    # Each token's row is looked up there; a head computed there has all of its rows.
    steps = ran.steady(4)
    assert steps and all(step.counts["rows_host"] >= 4 for step in steps)
    if mode == "stream":
        assert_streamed(ran)
        assert {step.counts["rows_host"] for step in steps} == {4}
        assert {step.counts["rows_streamed"] for step in steps} == {512}
        assert {step.streamed_bytes for step in steps} == {512 * 128 * 4}
    elif mode == "compute":
        assert {step.counts["rows_host"] for step in steps} == {4 + 512}


def test_experts_on_the_host(subjects: Callable[..., Subject]) -> None:
    subject = subjects("qwen3_moe", dtype="float32")
    ran = subject.run(patterns=("*.gate_up", "*.down"), mode="compute")
    assert_same(ran, subject.expected)
    # Two experts a token in each of three layers.
    assert {step.counts["rows_host"] for step in ran.steady(4)} == {4 * 2 * 3}
    experts = 3 * 8 * 3 * 64 * 128 * 4
    assert ran.host_bytes == experts


@pytest.mark.parametrize("link", ["link=1MB/s,latency=5ms", "link=1TB/s,latency=0"])
def test_the_links_speed_changes_nothing_but_the_time(subject: Subject, link: str) -> None:
    device = SIM.replace("link=4GB/s,latency=20us", link)
    ran = subject.run(device, patterns=LAYERS, mode="stream")
    assert_same(ran, subject.expected)
    assert_streamed(ran)
    # Each weight takes the latency once at least.
    slowest = max(step.seconds for step in ran.steps)
    assert (slowest > 0.05) == ("5ms" in link)


def test_a_limited_link(subject: Subject) -> None:
    limit = 1e6
    ran = subject.run(patterns=LAYERS, mode="stream", link_limit_bytes_per_s=limit)
    assert_same(ran, subject.expected)
    assert_streamed(ran)
    streamed = sum(step.streamed_bytes for step in ran.steps)
    # What came ahead of the first step, and a burst, were let through before.
    burst = 2 * ran.ring_bytes + (1 << 20)
    assert sum(step.seconds for step in ran.steps) >= (streamed - burst) / limit


def test_on_the_real_clock(subjects: Callable[..., Subject]) -> None:
    subject = subjects("llama", dtype="float32")
    device = SIM + ",clock=real"
    for mode in ("stream", "split"):
        ran = subject.run(device, patterns=LAYERS, mode=mode)
        assert_same(ran, subject.expected)
        assert_streamed(ran, is_constant=mode == "stream")


# ------------------------------------------------------------------------------------- drawn


def drawn_place(draw: Any, path: str, kind: type, rows: int) -> Place | None:
    """Any place that a matrix may have."""
    resident = 0 if kind is Table else 64 * draw(st.integers(0, rows // 64), label=path)
    if kind is Table and draw(st.booleans(), label=f"{path} stays"):
        return None
    left = rows - resident
    shares = st.sampled_from([0, left // 128 * 64, left])
    few, many = draw(shares, label=f"{path} streamed"), draw(shares, label="or")
    limit = draw(st.sampled_from([1, 2, 3, 16]), label="for more tokens than")
    return Place(resident, lambda count: few if count <= limit else many)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Making one small would take minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(data=st.data())
def test_any_places(data: st.DataObject, kind: str, subjects: Callable[..., Subject]) -> None:
    """Every matrix at a place of its own, by tables that change with the number of tokens."""
    subject = subjects(kind, dtype="float32")
    chosen: dict[str, Place | None] = {}
    experts: dict[str, bool] = {}
    for path, form, rows in subject.matrices:
        if form is Experts:
            layer = path.rpartition(".")[0]
            if layer not in experts:
                experts[layer] = data.draw(st.booleans(), label=f"{layer} on the host")
            chosen[path] = Place(0, lambda _: 0) if experts[layer] else None
        else:
            chosen[path] = drawn_place(data.draw, path, form, rows)
    is_eager = data.draw(st.booleans(), label="enforce_eager")
    is_async = data.draw(st.booleans(), label="is_async")
    ahead = data.draw(st.integers(1, 3), label="prefetch_step")
    with pytest.MonkeyPatch.context() as patch:
        place_by(patch, lambda path, _: chosen[path])
        ran = subject.run(is_async=is_async, prefetch_step=ahead, enforce_eager=is_eager)
    assert_same(ran, subject.expected)
    for step in ran.steady():
        assert step.streamed_bytes == ran.plan(step.rows)


# ------------------------------------------------------------------------------------- low bits


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("mode", ["resident", "compute", "stream", "split"])
def test_fewer_bits(
    subjects: Callable[..., Subject],
    kind: str,
    mode: str,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are offloaded as they are held."""
    subject = subjects(kind, **options)
    if mode == "split":
        place_by(monkeypatch, lambda _, parameter: thirds(parameter))
    patterns = () if mode in ("resident", "split") else ("*",)
    ran = subject.run(patterns=patterns, mode="auto" if not patterns else mode)
    assert_same(ran, subject.expected)
    assert_streamed(ran)
    full = subjects(kind, dtype="float32").run(patterns=patterns or LAYERS, mode="compute")
    if mode == "compute":
        share = ran.host_bytes / full.host_bytes
        assert share == pytest.approx(0.5 if "dtype" in options else 0.28, abs=0.02)
    assert (ran.counts["rows_streamed"] > 0) == (mode in ("stream", "split"))
