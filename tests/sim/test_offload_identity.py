"""Exactness over two memories: the CPU lane's tokens and log probabilities, bit for bit, wherever
the weights lie. Each test also asserts, from the engine's own counters, that the path in question
was taken; the last ones that without a mechanism it fails."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as files
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lane_harness import (
    SIM,
    Ran,
    assert_same,
    assert_streamed,
    drive,
    make_config,
    num_rows,
    place_by,
    prompts,
    run,
    thirds,
)

from ambidex.config import OffloadConfig
from ambidex.device.sim import SimDevice
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


def test_the_ring_grows_with_what_is_ahead(subjects: Callable[..., Subject]) -> None:
    subject = subjects("llama", dtype="float32")
    rings = [
        subject.run(patterns=LAYERS, mode="stream", prefetch_step=ahead, is_async=ahead > 0)
        for ahead in range(3)
    ]
    one = rings[0].ring_bytes
    assert [ran.ring_bytes for ran in rings] == [one, 2 * one, 3 * one]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_a_ring_that_is_not_filled_evenly(
    sim_model: Callable[..., Path], enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step leaves at the ring's end does no harm to the next."""
    streamed = {0: "gate_up", 1: "down", 2: "gate_up", 3: "down", 4: "down"}
    wanted = {f"layers.{layer}.mlp.{name}.weight" for layer, name in streamed.items()}

    def choose(path: str, parameter: Parameter) -> Place | None:
        return Place(0, lambda _: num_rows(parameter)) if path in wanted else None

    subject = Subject(sim_model("llama", num_hidden_layers=5), dtype="float32")
    place_by(monkeypatch, choose)
    ran = subject.run(enforce_eager=enforce_eager)
    assert_same(ran, subject.expected)
    assert_streamed(ran)
    assert ran.ring_bytes == 2 * 640 * 128 * 4
    assert ran.ahead_bytes == ran.ring_bytes // 4 * 3
    assert (ran.num_replays > 0) != enforce_eager


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_split(subject: Subject, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix in three parts, as far as it has rows."""
    place_by(monkeypatch, lambda _, parameter: thirds(parameter))
    ran = subject.run(enforce_eager=enforce_eager)
    assert_same(ran, subject.expected)
    assert_streamed(ran)
    assert all(ran.counts[f"rows_{place}"] > 0 for place in ("resident", "streamed", "host"))
    assert (ran.num_replays > 0) != enforce_eager


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
    ran = subject.run(patterns=("*.gate_up", "*.down"), mode="compute", moe_expert_cache="off")
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
    max_examples=6,
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
    if mode == "compute":
        full = subjects(kind, dtype="float32").run(patterns=patterns, mode="compute")
        share = ran.host_bytes / full.host_bytes
        assert share == pytest.approx(0.5 if "dtype" in options else 0.28, abs=0.02)
    assert (ran.counts["rows_streamed"] > 0) == (mode in ("stream", "split"))


FILES = {
    # A permutation of the columns, and a codebook, lie beside the rows of each.
    "gptq-order": (
        files.gptq(4, 32, symmetric=False, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    ),
    "nf4": (
        files.four_bits("nf4", 64, nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("mode", ["compute", "stream", "split"])
def test_quantised_files(
    sim_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    mode: str,
) -> None:
    folder = shutil.copytree(sim_model("llama"), tmp_path / case)
    files.quantise_folder(folder, *FILES[case])
    subject = Subject(folder)
    if mode == "split":
        place_by(monkeypatch, lambda _, parameter: thirds(parameter))
        ran = subject.run()
    else:
        ran = subject.run(patterns=LAYERS, mode=mode)
    assert_same(ran, subject.expected)
    assert (ran.counts["rows_streamed"] > 0) == (mode != "compute")
    assert (ran.counts["rows_host"] > 0) == (mode != "stream")
    if mode == "stream":
        assert_streamed(ran)


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("offload_bytes", [None, 200 << 10])
def test_quantised_files_take_what_was_planned(
    sim_model: Callable[..., Path], tmp_path: Path, case: str, offload_bytes: int | None
) -> None:
    """A permutation and a codebook are in every memory that has rows of the matrix."""
    folder = shutil.copytree(sim_model("llama"), tmp_path / case)
    files.quantise_folder(folder, *FILES[case])
    subject = Subject(folder)
    ran = subject.run(mode="split", cpu_offload_bytes=offload_bytes)
    assert_same(ran, subject.expected)
    assert ran.counts["rows_resident"] > 0
    assert (ran.host_bytes > 0) == (offload_bytes is not None)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_smollm2(smollm2: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model as its file holds it, in low bits, and as numbers."""
    options: dict[str, Any] = {"dtype": dtype, "cpu_threads": 2, "kv_cache_bytes": 16 << 20}
    device = SIM.replace("256MiB", "1GiB")
    expected = run(make_config(smollm2, **options), INPUTS, 4)
    cases: dict[str, OffloadConfig] = {
        "compute": OffloadConfig(patterns=MLPS, mode="compute"),
        "stream": OffloadConfig(patterns=LAYERS, mode="stream"),
    }
    if dtype == "float32":
        cases = {"split": OffloadConfig()}
    for name, offload in cases.items():
        if name == "split":
            place_by(monkeypatch, lambda _, parameter: thirds(parameter))
        ran = run(make_config(smollm2, device, offload, **options), INPUTS, 4)
        assert_same(ran, expected, 4)
        is_streamed = name in ("stream", "split")
        assert (ran.counts["rows_streamed"] > 0) == is_streamed, name
        assert (ran.counts["rows_host"] > 0) == (name != "stream"), name
        if name == "stream":
            assert_streamed(ran)


INPUTS = prompts((3, 40))


# ------------------------------------------------------------------------------------- odd shapes


@pytest.mark.parametrize("mode", ["compute", "stream", "split"])
def test_widths_that_no_unit_divides(sim_model: Callable[..., Path], mode: str) -> None:
    """A gate of 200 rows above 200 others: neither half is a whole number of panels."""
    subject = Subject(sim_model("llama", intermediate_size=200, vocab_size=509), dtype="float32")
    ran = subject.run(patterns=("*",), mode=mode)
    assert_same(ran, subject.expected)


# ------------------------------------------------------------------------------------- failures


STREAMS = ["compute", "copy_in", "copy_in_small", "copy_out", "host"]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_without_waiting_it_fails(
    subjects: Callable[..., Subject],
    monkeypatch: pytest.MonkeyPatch,
    stream: str,
    enforce_eager: bool,
) -> None:
    """Every stream's waits matter: without them each request fails, and says so. With them the
    same engine gives the right tokens again."""
    subject = subjects("qwen2", dtype="float32")
    place_by(monkeypatch, lambda _, parameter: thirds(parameter))
    engine = Engine(
        make_config(subject.folder, SIM, enforce_eager=enforce_eager, **subject.options)
    )
    wait = Stream.wait
    with monkeypatch.context() as patch:
        patch.setattr(
            Stream,
            "wait",
            lambda self, event: None if self.name == stream else wait(self, event),
        )
        broken = drive(engine, prompts(), 8)
    whole = drive(engine, prompts(), 8, first=100)
    engine.close()
    for error in broken.errors:
        assert error is not None and f"on {stream}" in error
        assert "an event is missing between them" in error
    assert_same(whole, subject.expected)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_work_that_fails_once(
    subjects: Callable[..., Subject],
    monkeypatch: pytest.MonkeyPatch,
    stream: str,
    enforce_eager: bool,
) -> None:
    """Wherever something of a step fails, its requests are computed again, and nothing is taken
    for a weight that was never copied."""
    subject = subjects("qwen2", dtype="float32")
    place_by(monkeypatch, lambda _, parameter: thirds(parameter))
    execute = Stream._execute
    for number in (17,) if enforce_eager else (0, 60):
        left = [number]

        def failing(self: Stream, item: Any, left: list[int] = left) -> None:
            if self.name == stream:
                if left[0] == 0:
                    item.work = fail
                left[0] -= 1
            execute(self, item)

        with monkeypatch.context() as patch:
            ran = subject.run(
                enforce_eager=enforce_eager,
                prepare=lambda _, patch=patch: patch.setattr(Stream, "_execute", failing),
            )
        assert left[0] < 0, "it has failed"
        assert_same(ran, subject.expected, has_failed=True)


def test_a_part_of_a_prompt_that_fails_once(
    sim_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads a result of such a step, and the host does nothing in it."""
    folder = sim_model("llama")
    limits: dict[str, int] = {"max_num_batched_tokens": 128, "max_model_len": 512}
    inputs = prompts((300,))
    expected = run(make_config(folder, **limits), inputs, 4)
    execute = Stream._execute
    left = [5]

    def failing(self: Stream, item: Any) -> None:
        if self.name == "compute":
            if left[0] == 0:
                item.work = fail
            left[0] -= 1
        execute(self, item)

    ran = run(
        make_config(folder, SIM, **limits),
        inputs,
        4,
        prepare=lambda _: monkeypatch.setattr(Stream, "_execute", failing),
    )
    assert left[0] < 0, "it has failed"
    assert_same(ran, expected, 4, has_failed=True)


def fail() -> None:
    raise RuntimeError("the simulated accelerator has fallen off its bus")


def test_without_prefetching_nothing_is_ahead(
    subjects: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters come from the mechanism: without it they are zero."""
    monkeypatch.setattr(Streamer, "_fetch_ahead", lambda self, place: None)
    subject = subjects("llama", dtype="float32")
    ran = subject.run(patterns=LAYERS, mode="stream", enforce_eager=True)
    assert_same(ran, subject.expected)
    assert ran.counts["prefetched"] == ran.ahead_bytes == 0


def test_a_step_as_large_as_the_limit(
    sim_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is launched than memory holds at a time: it is waited for, and no clock notices."""
    folder = sim_model("llama", num_hidden_layers=16)
    limits: dict[str, int] = {
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "kv_cache_bytes": 16 << 20,
    }
    inputs = prompts((500, 3))
    expected = run(make_config(folder, **limits), inputs, 4)
    config = make_config(folder, SIM, **limits)
    at_leisure = run(config, inputs, 4)
    assert_same(at_leisure, expected, 4)
    gate, execute, settle = threading.Event(), Stream._execute, SimDevice.settle

    def held(self: Stream, item: Any) -> None:
        if self.name == "compute":
            gate.wait(20)
        execute(self, item)

    def noted(self: SimDevice) -> None:
        gate.set()
        settle(self)

    def hold(engine: Engine) -> None:
        accelerator: Any = engine.lane.hands.accelerator
        peaks.append(accelerator.ledger.reserved_bytes("activations"))
        monkeypatch.setattr(Stream, "_execute", held)
        monkeypatch.setattr(SimDevice, "settle", noted)

    peaks: list[int] = []
    ran = run(config, inputs, 4, prepare=hold)
    assert gate.is_set(), "memory has run out"
    assert_same(ran, expected, 4)
    assert [step.seconds for step in ran.steps] == [step.seconds for step in at_leisure.steps]
    assert 0.8 * peaks[0] < ran.activation_bytes <= peaks[0]
