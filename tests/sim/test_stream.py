"""Streams: order, events, clocks, errors, and work that forgot to wait."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.device.hazards import Hazards
from ambidex.device.stream import Clock, Event, Graph, Stream
from ambidex.errors import DeviceError, OutOfMemory

#: No test waits for longer than this for what has to come.
PATIENCE_S = 20.0


class Streams:
    """Streams of one clock, closed in the end."""

    def __init__(self, is_virtual: bool = True) -> None:
        self.clock = Clock(is_virtual)
        self._made: dict[str, Stream] = {}

    def __getitem__(self, name: str) -> Stream:
        if name not in self._made:
            self._made[name] = Stream(name, self.clock)
        return self._made[name]

    def close(self) -> None:
        for stream in self._made.values():
            stream.close()


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    yield made
    made.close()


@pytest.fixture
def real() -> Iterator[Streams]:
    made = Streams(is_virtual=False)
    yield made
    made.close()


def nothing() -> None:
    pass


def fail() -> None:
    raise ValueError("no such expert")


def spans(clock: Clock) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start_s, span.end_s) for span in clock.timeline}


# ------------------------------------------------------------------------------------- order


def test_launching_returns_before_the_work_is_done(streams: Streams) -> None:
    gate, done = threading.Event(), []
    streams["a"].launch("slow", lambda: done.append(gate.wait(PATIENCE_S)), 1.0)
    event = streams["a"].record()
    assert not done and not event.is_done
    gate.set()
    event.wait()
    assert done == [True] and event.is_done and not event.is_failed


def test_work_of_a_stream_runs_in_order_and_in_one_thread(streams: Streams) -> None:
    ran: list[int] = []
    threads: set[str] = set()

    def work(index: int) -> None:
        ran.append(index)
        threads.add(threading.current_thread().name)

    for index in range(200):
        streams["a"].launch(str(index), lambda index=index: work(index), 0.001)
    streams["a"].synchronize()
    assert ran == list(range(200))
    assert threads == {"stream-a"}
    assert streams.clock.num_launches == 200
    assert [span.name for span in streams.clock.timeline] == [str(index) for index in range(200)]


def test_streams_do_not_wait_for_each_other(streams: Streams) -> None:
    gate = threading.Event()
    streams["a"].launch("held", lambda: gate.wait(PATIENCE_S), 1.0)
    streams["b"].launch("free", nothing, 0.5)
    streams["b"].synchronize()
    assert "free" in spans(streams.clock) and "held" not in spans(streams.clock)
    gate.set()
    streams["a"].synchronize()
    assert spans(streams.clock) == {"free": (0.0, 0.5), "held": (0.0, 1.0)}


def test_a_stream_waits_for_an_event_of_another(streams: Streams) -> None:
    gate, order = threading.Event(), []
    streams["a"].launch("first", lambda: (gate.wait(PATIENCE_S), order.append("first")), 1.0)
    streams["b"].wait(streams["a"].record())
    streams["b"].launch("second", lambda: order.append("second"), 1.0)
    event = streams["b"].record()
    assert not event.is_done
    gate.set()
    event.wait()
    assert order == ["first", "second"]
    assert spans(streams.clock) == {"first": (0.0, 1.0), "second": (1.0, 2.0)}


def test_an_event_stands_for_what_came_before_it_alone(streams: Streams) -> None:
    gate = threading.Event()
    streams["a"].launch("before", nothing, 1.0)
    event = streams["a"].record()
    streams["a"].launch("after", lambda: gate.wait(PATIENCE_S), 1.0)
    event.wait()
    assert streams.clock.host_s == 1.0
    gate.set()


def test_an_event_of_an_idle_stream_is_reached_at_once(streams: Streams) -> None:
    event = streams["a"].record()
    event.wait()
    assert event.is_done and event.time_s == 0.0


def test_prepare_runs_once_in_the_streams_thread() -> None:
    seen: list[str] = []
    stream = Stream("a", Clock(True), lambda: seen.append(threading.current_thread().name))
    assert not seen
    for _ in range(3):
        stream.launch("work", nothing, 0.0)
    stream.synchronize()
    assert seen == ["stream-a"]
    stream.close()


def test_closing_runs_what_was_launched(streams: Streams) -> None:
    ran: list[int] = []
    for index in range(50):
        streams["a"].launch("work", lambda index=index: ran.append(index), 0.0)
    streams["a"].close()
    assert len(ran) == 50
    assert not any(thread.name == "stream-a" for thread in threading.enumerate())
    streams["a"].close()


def test_work_is_let_go_of_when_it_has_run(streams: Streams) -> None:
    gone: list[int] = []

    class Held:
        def __del__(self) -> None:
            gone.append(1)

    held = Held()
    streams["a"].launch("work", lambda held=held: None, 0.0)
    del held
    streams["a"].synchronize()
    gc.collect()
    assert gone == [1]


# ------------------------------------------------------------------------------------- clocks


def test_virtual_times_are_those_of_the_model(streams: Streams) -> None:
    a, b, clock = streams["a"], streams["b"], streams.clock
    a.launch("a1", nothing, 2.0)
    b.launch("b1", nothing, 3.0)
    b.wait(a.record())
    b.launch("b2", nothing, 1.0)
    a.wait(b.record())
    a.launch("a2", nothing, 0.5)
    a.record().wait()
    assert spans(clock) == {"a1": (0, 2), "b1": (0, 3), "b2": (3, 4), "a2": (4, 4.5)}
    assert clock.host_s == 4.5
    # What the host launches after it has waited begins then.
    b.launch("b3", nothing, 1.0)
    b.record().wait()
    assert spans(clock)["b3"] == (4.5, 5.5)
    assert (a.busy_s, b.busy_s) == (2.5, 5.0)


def test_the_hosts_time_does_not_go_back(streams: Streams) -> None:
    early, late = streams["a"], streams["b"]
    early.launch("short", nothing, 1.0)
    late.launch("long", nothing, 5.0)
    late.record().wait()
    early.record().wait()
    assert streams.clock.host_s == 5.0


def test_bytes_and_late_costs_are_counted(streams: Streams) -> None:
    asked: list[str] = []

    def seconds() -> float:
        asked.append(threading.current_thread().name)
        return 0.25

    streams["a"].launch("copy", nothing, seconds, 100)
    streams["a"].launch("copy", nothing, 1, 20)
    streams["a"].synchronize()
    assert asked == ["stream-a"], "what it takes is asked for when it runs"
    assert (streams["a"].num_bytes, streams["a"].busy_s) == (120, 1.25)
    assert [span.num_bytes for span in streams.clock.timeline] == [100, 20]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, str, float]]:
    """Launches, and waits of one stream for another."""
    names = st.sampled_from(["a", "b", "c"])
    seconds = st.sampled_from([0.0, 0.25, 1.0, 3.5])
    kinds = st.sampled_from(["launch", "launch", "wait", "host"])
    return [
        (draw(names), draw(names) if kind == "wait" else kind, draw(seconds))
        for kind in draw(st.lists(kinds, max_size=20))
    ]


def timetable(program: list[tuple[str, str, float]]) -> list[tuple[str, float, float]]:
    """By hand: what every launch's times are."""
    now, host, times = {"a": 0.0, "b": 0.0, "c": 0.0}, 0.0, []
    for stream, what, seconds in program:
        if what == "launch":
            start = max(now[stream], host)
            now[stream] = start + seconds
            times.append((stream, start, now[stream]))
        elif what == "host":
            host = max(host, now[stream])
        else:
            now[stream] = max(now[stream], now[what])
    return times


@settings(max_examples=60, deadline=None)
@given(programs())
def test_any_program_has_the_times_of_its_order(program: list[tuple[str, str, float]]) -> None:
    streams = Streams()
    for index, (stream, what, seconds) in enumerate(program):
        if what == "launch":
            streams[stream].launch(str(index), nothing, seconds)
        elif what == "host":
            streams[stream].record().wait()
        else:
            streams[stream].wait(streams[what].record())
    for name in "abc":
        streams[name].synchronize()
    ran = sorted(streams.clock.timeline, key=lambda span: int(span.name))
    assert [(span.stream, span.start_s, span.end_s) for span in ran] == timetable(program)
    streams.close()


def test_the_real_clock_keeps_modelled_times(real: Streams) -> None:
    real["a"].launch("short", nothing, 0.05)
    real["b"].wait(real["a"].record())
    real["b"].launch("next", nothing, 0.05)
    began = real.clock.now_s()
    real["b"].record().wait()
    times = spans(real.clock)
    assert times["short"][1] - times["short"][0] == pytest.approx(0.05)
    assert times["next"][0] >= times["short"][1]
    # The host has really waited for both. How much longer it took is the machine's affair.
    assert real.clock.now_s() - began >= 0.09
    assert real.clock.now_s() >= times["next"][1] - 1e-3


def test_work_that_takes_longer_than_modelled_is_late(real: Streams) -> None:
    busy = threading.Event()
    real["a"].launch("late", lambda: busy.wait(0.05), 0.001)
    real["a"].launch("punctual", nothing, 0.5)
    real["a"].synchronize()
    assert real.clock.num_late == 1
    late, punctual = (spans(real.clock)[name] for name in ("late", "punctual"))
    # It counts with what it really took, and what follows begins then.
    assert late[1] - late[0] >= 0.05
    assert punctual[0] >= late[0] + 0.05


def test_nothing_is_late_on_the_virtual_clock(streams: Streams) -> None:
    busy = threading.Event()
    streams["a"].launch("slow", lambda: busy.wait(0.02), 1e-6)
    streams["a"].synchronize()
    assert streams.clock.num_late == 0
    assert streams.clock.host_s == 1e-6


# ------------------------------------------------------------------------------------- errors


def test_an_error_reaches_the_host_once(streams: Streams) -> None:
    a, ran = streams["a"], []
    a.launch("bad", fail, 1.0)
    a.launch("skipped", lambda: ran.append("skipped"), 1.0)
    with pytest.raises(DeviceError, match="no such expert") as caught:
        a.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)
    assert not ran, "nothing runs on what a failed launch should have made"
    a.synchronize()
    a.launch("good", lambda: ran.append("good"), 1.0)
    a.synchronize()
    assert ran == ["good"]


def test_an_event_carries_the_error_to_other_streams(streams: Streams) -> None:
    a, b, ran = streams["a"], streams["b"], []
    a.launch("bad", fail, 1.0)
    b.wait(a.record())
    b.launch("depends", lambda: ran.append("depends"), 1.0)
    event = b.record()
    with pytest.raises(DeviceError, match=r"^The work before an event failed: no such expert$"):
        event.wait()
    assert event.is_failed
    assert not ran
    for stream in (a, b):
        with pytest.raises(DeviceError, match="no such expert"):
            stream.synchronize()
    b.wait(a.record())
    b.launch("again", lambda: ran.append("again"), 1.0)
    b.synchronize()
    assert ran == ["again"]


def test_a_stream_that_depends_on_nothing_failed_goes_on(streams: Streams) -> None:
    ran: list[str] = []
    streams["a"].launch("bad", fail, 1.0)
    streams["b"].launch("good", lambda: ran.append("good"), 1.0)
    streams["b"].synchronize()
    assert ran == ["good"]
    with pytest.raises(DeviceError):
        streams["a"].synchronize()


def test_a_cost_that_cannot_be_computed_is_an_error_too(streams: Streams) -> None:
    def seconds() -> float:
        raise ZeroDivisionError("no blocks")

    streams["a"].launch("bad", nothing, seconds)
    with pytest.raises(DeviceError, match="no blocks"):
        streams["a"].synchronize()
    streams["a"].launch("good", nothing, 1.0)
    streams["a"].synchronize()


def test_a_thread_that_cannot_be_prepared_hangs_nobody() -> None:
    """As where the system takes the CPUs away that it should run on."""

    def refuse() -> None:
        raise OSError(22, "Invalid argument")

    stream = Stream("a", Clock(True), refuse)
    ran: list[str] = []
    stream.launch("work", lambda: ran.append("work"), 1.0)
    event = stream.record()
    assert event._done.wait(PATIENCE_S)
    with pytest.raises(DeviceError, match="Invalid argument"):
        stream.synchronize()
    assert not ran
    stream.close()


def test_what_goes_wrong_beside_the_work_hangs_nobody(real: Streams) -> None:
    """A time that no thread can sleep for."""
    real["a"].launch("for ever", nothing, 1e30)
    event = real["a"].record()
    assert event._done.wait(PATIENCE_S) and event.is_failed
    with pytest.raises(DeviceError, match="out of range"):
        event.wait()


def test_a_thread_that_cannot_be_had(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, and the stream can be used once there is one."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OutOfMemory, match="refused to start a thread"):
            streams["a"].launch("work", nothing, 1.0)
        with pytest.raises(OutOfMemory, match="refused to start a thread"):
            streams["a"].record()
        streams["a"].close()
    streams["a"].launch("work", lambda: ran.append("work"), 1.0)
    event = streams["a"].record()
    assert event._done.wait(PATIENCE_S)
    assert ran == ["work"] and streams.clock.num_launches == 1


def test_waiting_for_memory_moves_nobodys_clock(streams: Streams) -> None:
    streams["a"].launch("work", nothing, 3.0)
    event = streams["a"].record()
    event.settle()
    assert event.is_done and streams.clock.host_s == 0.0
    x = torch.zeros(4)
    streams["a"].launch("writes", nothing, 1.0, writes=[x])
    streams["a"].record().settle()
    with pytest.raises(DeviceError, match="an event is missing"):
        streams["b"].launch("reads", nothing, 1.0, reads=[x])


# ------------------------------------------------------------------------------------- hazards


@pytest.mark.parametrize("has_run", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("writes", "reads", "matmul on b reads memory that a has not yet written"),
        ("reads", "writes", "matmul on b overwrites memory that a still uses"),
        ("writes", "writes", "matmul on b overwrites memory that a still uses"),
    ],
)
def test_work_that_does_not_wait_fails_every_time(
    streams: Streams, first: str, second: str, message: str, has_run: bool
) -> None:
    """Whether the other stream was faster makes no difference."""
    x, gate = torch.zeros(64), threading.Event()
    streams["a"].launch("copy", lambda: gate.wait(PATIENCE_S), 1.0, **{first: [x]})
    if has_run:
        gate.set()
        streams["a"].record().settle()
    with pytest.raises(DeviceError, match=f"{message}.*: an event is missing"):
        streams["b"].launch("matmul", nothing, 1.0, **{second: [x[10:20]]})
    gate.set()
    # With the event it is right.
    streams["b"].wait(streams["a"].record())
    streams["b"].launch("matmul", nothing, 1.0, **{second: [x[10:20]]})
    streams["b"].synchronize()


def test_what_cannot_disturb_is_allowed(streams: Streams) -> None:
    x, y, gate = torch.zeros(64), torch.zeros(64), threading.Event()
    held = {"work": lambda: gate.wait(PATIENCE_S), "seconds": 1.0}
    streams["a"].launch("a", reads=[x[:32]], writes=[y[:32]], **held)
    b = streams["b"]
    b.launch("both read", nothing, 1.0, reads=[x])
    b.launch("the rest of it", nothing, 1.0, writes=[y[32:]])
    b.launch("nothing at all", nothing, 1.0, writes=[y[:0]])
    streams["a"].launch("itself", nothing, 1.0, reads=[y[:32]], writes=[y[:32]])
    gate.set()


def test_an_event_before_the_work_is_not_enough(streams: Streams) -> None:
    x = torch.zeros(8)
    early = streams["a"].record()
    streams["a"].launch("copy", nothing, 1.0, writes=[x])
    streams["b"].wait(early)
    with pytest.raises(DeviceError, match="an event is missing"):
        streams["b"].launch("matmul", nothing, 1.0, reads=[x])


def test_events_order_through_a_third_stream_and_the_host(streams: Streams) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    streams["a"].launch("copy", nothing, 1.0, writes=[x])
    streams["b"].wait(streams["a"].record())
    streams["c"].wait(streams["b"].record())
    streams["c"].launch("matmul", nothing, 1.0, reads=[x], writes=[y])
    streams["c"].record().wait()
    # The host has waited: whatever it launches is after it, on streams that never waited.
    streams["d"].launch("reads", nothing, 1.0, reads=[x, y])
    streams["e"].launch("overwrites", nothing, 1.0, writes=[x[:0]])
    with pytest.raises(DeviceError, match="d still uses"):
        streams["e"].launch("overwrites", nothing, 1.0, writes=[x])


def test_memory_that_is_used_again_is_no_hazard(streams: Streams) -> None:
    """An address says nothing: what lay there before has been let go of."""
    area = torch.zeros(1 << 16, dtype=torch.uint8).numpy()
    gate = threading.Event()
    first = torch.from_numpy(area)
    streams["a"].launch("old", lambda: gate.wait(PATIENCE_S), 1.0, writes=[first])
    del first
    gate.set()
    streams["a"].record().settle()
    second = torch.from_numpy(area)
    streams["b"].launch("new", nothing, 1.0, writes=[second])
    with pytest.raises(DeviceError):
        streams["a"].launch("newer", nothing, 1.0, reads=[second])


def test_a_launch_that_was_refused_leaves_no_trace(streams: Streams) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    streams["a"].launch("copy", nothing, 1.0, writes=[x])
    with pytest.raises(DeviceError):
        streams["b"].launch("refused", fail, 1.0, reads=[x], writes=[y])
    streams["c"].launch("other", nothing, 1.0, writes=[y])
    for name in "abc":
        streams[name].synchronize()
    assert streams.clock.num_launches == 2


def test_what_is_remembered_does_not_grow(streams: Streams) -> None:
    kept = torch.zeros(8)
    for index in range(6000):
        streams["a"].launch("work", nothing, 0.0, reads=[kept], writes=[torch.zeros(8)])
        if index % 50 == 0:
            streams["a"].record().wait()
    hazards = streams.clock.hazards
    assert len(hazards._uses) < 2500
    assert sum(len(uses) for uses in hazards._uses.values()) < 5000


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_missing_event_is_found(data: st.DataObject) -> None:
    """Against a plain model: two accesses are ordered if and only if there is a way from one to
    the other along streams and waits."""
    names, streams = "abc", Streams()
    tensors = [torch.zeros(8) for _ in range(3)]
    #: Launches so far: (stream, tensor, is it written, what it is certain to come after).
    launches: list[tuple[str, int, bool, set[int]]] = []
    after: dict[str, set[int]] = {name: set() for name in names}
    for _ in range(data.draw(st.integers(1, 14))):
        name, other = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
        if data.draw(st.booleans()):
            streams[name].wait(streams[other].record())
            after[name] |= after[other]
            continue
        index, is_write = data.draw(st.integers(0, 2)), data.draw(st.booleans())
        is_wrong = any(
            where == index and (is_write or wrote) and number not in after[name]
            for number, (_, where, wrote, _) in enumerate(launches)
        )
        touched = {"writes" if is_write else "reads": [tensors[index]]}
        if is_wrong:
            with pytest.raises(DeviceError):
                streams[name].launch("work", nothing, 1.0, **touched)
        else:
            streams[name].launch("work", nothing, 1.0, **touched)
            after[name] = after[name] | {len(launches)}
            launches.append((name, index, is_write, after[name]))
    streams.close()


def test_hazards_are_found_by_the_check_and_by_nothing_else(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off, the tests above would fail."""
    monkeypatch.setattr(Hazards, "launch", lambda self, *_: None)
    x = torch.zeros(8)
    streams["a"].launch("copy", nothing, 1.0, writes=[x])
    streams["b"].launch("matmul", nothing, 1.0, reads=[x])


# ------------------------------------------------------------------------------------- graphs


def capture(streams: Streams, launch: Callable[[], Any]) -> Graph:
    graph = Graph(streams.clock)
    with graph.capture():
        launch()
    return graph


def test_a_graph_runs_when_it_is_replayed(streams: Streams) -> None:
    ran: list[str] = []
    x = torch.zeros(8)

    def launch() -> None:
        streams["a"].launch("copy", lambda: ran.append("copy"), 2.0, 100, writes=[x])
        streams["b"].wait(streams["a"].record())
        streams["b"].launch("matmul", lambda: ran.append("matmul"), 1.0, reads=[x])

    graph = capture(streams, launch)
    assert not ran and streams.clock.num_launches == 0
    for round_ in range(3):
        graph.replay()
        streams["b"].record().wait()
        assert streams.clock.host_s == 3.0 * (round_ + 1)
    assert ran == ["copy", "matmul"] * 3
    assert (graph.num_replays, streams["a"].num_bytes) == (3, 300)


def test_a_replay_comes_after_everything_before(streams: Streams) -> None:
    x, gate = torch.zeros(8), threading.Event()
    graph = capture(streams, lambda: streams["a"].launch("reads", nothing, 1.0, reads=[x]))
    streams["a"].launch("slow", lambda: gate.wait(PATIENCE_S), 5.0, writes=[x])
    graph.replay()
    gate.set()
    streams["a"].record().wait()
    assert spans(streams.clock)["reads"] == (5.0, 6.0)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_replay_waits_for_all_of_its_streams(streams: Streams, is_ahead: bool) -> None:
    """Each begins when all are done, but for what runs ahead: nobody waits for that."""
    x, y, gate = torch.zeros(8), torch.zeros(8), threading.Event()

    def launch() -> None:
        streams["a"].launch("reads", nothing, 1.0, reads=[y if is_ahead else x])
        streams["b"].launch("copies", nothing, 1.0)

    graph = capture(streams, launch)
    streams["b"].launch("slow", lambda: gate.wait(PATIENCE_S), 5.0, writes=[x])
    graph.replay(streams["b"] if is_ahead else None)
    gate.set()
    for name in "ab":
        streams[name].record().wait()
    began_s = 0.0 if is_ahead else 5.0
    assert spans(streams.clock)["reads"] == (began_s, began_s + 1.0)
    assert spans(streams.clock)["copies"] == (5.0, 6.0)


def test_a_graph_that_lacks_an_event_fails_when_it_is_replayed(streams: Streams) -> None:
    x = torch.zeros(8)

    def launch() -> None:
        streams["a"].launch("copy", nothing, 2.0, writes=[x])
        streams["b"].launch("matmul", nothing, 1.0, reads=[x])

    graph = capture(streams, launch)
    for _ in range(2):
        with pytest.raises(DeviceError, match="matmul on b reads memory that a"):
            graph.replay()


def test_an_event_of_a_graph_cannot_be_waited_for(streams: Streams) -> None:
    events: list[Event] = []
    capture(streams, lambda: events.append(streams["a"].record()))
    assert events[0].is_failed
    with pytest.raises(AssertionError, match="never reached"):
        events[0].wait()


def test_what_runs_at_once_is_no_part_of_a_graph(streams: Streams) -> None:
    ran: list[str] = []

    def launch() -> None:
        streams["a"].launch("captured", lambda: ran.append("captured"), 1.0)
        with streams.clock.at_once():
            streams["a"].launch("now", lambda: ran.append("now"), 1.0)
            streams["a"].synchronize()

    graph = capture(streams, launch)
    assert ran == ["now"]
    graph.replay()
    streams["a"].synchronize()
    assert ran == ["now", "captured"]
