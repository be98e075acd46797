"""Streams: queues of work, each with a thread and a clock of its own.

A stream is to the simulated accelerator what a CUDA stream is to a GPU: launching returns at once,
work of one stream runs in order, and streams wait for each other's events alone.

There are two clocks. On the **virtual** one a piece of work takes exactly the time that the cost
model gives it, whatever the arithmetic really took: times are deterministic. On the **real** one
the thread sleeps until the modelled end; work whose arithmetic took longer is counted as late.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ambidex.device.hazards import Hazards, Known, Range, learn, ranges_of
from ambidex.errors import DeviceError, starting_thread
from ambidex.memory.token_bucket import TokenBucket

if TYPE_CHECKING:
    from ambidex.device.base import Event as AnyEvent
    from ambidex.device.base import Stream as AnyStream

#: On the real clock, work ahead of its modelled end by less than this is not slept for: sleeping
#: is not that exact. It is made up for by the next event.
_SLEEP_RESOLUTION_S = 200e-6

#: What work takes, or how to find out when it runs.
Seconds = float | Callable[[], float]


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on a timeline; seconds of the clock that all streams share."""

    stream: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int


class Clock:
    """What streams of one device agree on: the time of the host, and what has been computed.

    ``host_s`` is when the host submits: work launched after the host has waited for an event does
    not begin before it.
    """

    def __init__(self, is_virtual: bool) -> None:
        self.is_virtual = is_virtual
        self.host_s = 0.0
        self._began = time.perf_counter()
        #: Work whose arithmetic took longer than the real clock gave it, and by how much in all.
        self.num_late = 0
        self.late_s = 0.0
        self.num_launches = 0
        self.timeline: deque[Span] = deque(maxlen=100_000)
        self.hazards = Hazards()
        #: What the host has waited for: everything that it launches comes after it.
        self.known: Known = {}
        #: What is launched while it is set is captured, not run.
        self.graph: Graph | None = None

    def now_s(self) -> float:
        """Seconds since the start of the real clock."""
        return time.perf_counter() - self._began

    def submitted_s(self) -> float:
        return self.host_s if self.is_virtual else self.now_s()

    def is_unused(self, tensor: Tensor) -> bool:
        """Whether the host has waited for everything launched that touches ``tensor``."""
        if self.graph is not None:
            return False
        return all(self.hazards.is_unused(item, self.known) for item in ranges_of([tensor]))

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """What is launched within is run, even while a graph is captured."""
        graph, self.graph = self.graph, None
        try:
            yield
        finally:
            self.graph = graph


class Event:
    """A point in a stream. ``time_s`` is when it was reached."""

    __slots__ = ("_clock", "_done", "_error", "is_captured", "known", "time_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.time_s = 0.0
        #: What is done when it is reached.
        self.known: Known = {}
        #: It belongs to a graph: each replay reaches one of its own.
        self.is_captured = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def is_failed(self) -> bool:
        return self.is_captured or self._error is not None

    def complete(self, time_s: float, error: BaseException | None = None) -> None:
        self.time_s = time_s
        self._error = error
        self._done.set()

    def reached(self) -> float:
        """Block; the event's time. Raises what the work before it raised."""
        self.settle()
        if self._error is not None:
            raise DeviceError(f"The work before an event failed: {self._error}") from self._error
        return self.time_s

    def settle(self) -> None:
        """Block until the work is really over; to the clocks nobody has waited."""
        assert not self.is_captured, "an event of a graph is never reached"
        self._done.wait()

    def wait(self) -> None:
        """Block the host until the event is reached. Raises what the work before it raised."""
        self.settle()
        learn(self._clock.known, self.known)
        self._clock.host_s = max(self._clock.host_s, self.reached())


@dataclass(slots=True)
class _Launch:
    name: str
    work: Callable[[], None]
    seconds: Seconds
    num_bytes: int
    reads: Sequence[Range]
    writes: Sequence[Range]
    submitted_s: float = 0.0

    def again(self) -> _Launch:
        """The same work, to be launched once more."""
        return replace(self)


@dataclass(slots=True)
class _Wait:
    event: AnyEvent


@dataclass(slots=True)
class _Record:
    event: Event
    #: The host looks at errors here, and goes on.
    is_last: bool = False


@dataclass(slots=True)
class Stream:
    """``prepare`` is called once in the stream's thread, which starts with the first launch."""

    name: str
    clock: Clock
    prepare: Callable[[], None] | None = None
    #: Holds back what moves bytes.
    throttle: TokenBucket | None = None
    #: Seconds for which the stream had work, and bytes that it moved.
    busy_s: float = 0.0
    num_bytes: int = 0
    _items: queue.SimpleQueue[_Launch | _Wait | _Record | None] = field(
        default_factory=queue.SimpleQueue
    )
    _thread: threading.Thread | None = None
    #: When the stream's last work ended.
    _now_s: float = 0.0
    _error: BaseException | None = None
    #: What is done before that which is launched next; of its own, how much there is.
    _known: Known = field(default_factory=dict)

    def launch(
        self,
        name: str,
        work: Callable[[], None],
        seconds: Seconds,
        num_bytes: int = 0,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        """Queue ``work``, which takes ``seconds`` on the clock; ``num_bytes``: what it moves over a
        link. ``reads`` and ``writes``: the memory that it touches; raises DeviceError where another
        stream may not be done with that."""
        self.submit(
            _Launch(name, work, seconds, num_bytes, ranges_of(reads), ranges_of(writes)),
        )

    def hand_out(self, tensor: Tensor) -> None:
        """``tensor`` is new. Memory that was let go of is handed out again in the order of this
        stream: what was launched here before may use it, so that others have to wait for that."""
        if self.clock.graph is None:
            number = self._known.get(self.name, 0)
            self.clock.hazards.hand_out(self.name, number, ranges_of([tensor]))

    def wait(self, event: AnyEvent) -> None:
        """Work launched from now on begins after ``event``."""
        self.submit(_Wait(event))

    def record(self) -> Event:
        """An event that is reached when everything launched so far is done."""
        event = Event(self.clock)
        self.submit(_Record(event))
        return event

    def synchronize(self) -> None:
        """Block the host until everything launched so far is done; raises what it raised, once:
        afterwards the stream can be used again."""
        event = Event(self.clock)
        self.submit(_Record(event, is_last=True))
        event.wait()

    def close(self) -> None:
        """End the thread, after what was launched."""
        if self._thread is not None:
            self._items.put(None)
            self._thread.join()
            self._thread = None

    def submit(self, item: _Launch | _Wait | _Record) -> None:
        if self.clock.graph is not None:
            if isinstance(item, _Record):
                item.event.is_captured = True
            self.clock.graph.items.append((self, item))
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"stream-{self.name}", daemon=True)
            with starting_thread():
                thread.start()
            self._thread = thread
        if isinstance(item, _Launch):
            self._note(item)
        elif isinstance(item, _Record):
            item.event.known = dict(self._known)
        elif isinstance(item.event, Event):
            learn(self._known, item.event.known)
        self._items.put(item)

    def _note(self, item: _Launch) -> None:
        """Take the time, and find what it should have waited for."""
        item.submitted_s = self.clock.submitted_s()
        learn(self._known, self.clock.known)
        number = self._known.get(self.name, 0) + 1
        self.clock.hazards.launch(
            item.name, self.name, number, self._known, self.clock.known, item.reads, item.writes
        )
        self._known[self.name] = number
        self.clock.num_launches += 1

    def _run(self) -> None:
        # Nothing ends the thread but close(): without it whoever waits would wait for ever. What
        # is raised is told by the next event.
        try:
            if self.prepare is not None:
                self.prepare()
        except BaseException as error:
            self._error = error
        # What is launched in inference mode makes tensors that nothing else may write.
        with torch.inference_mode():
            while (item := self._items.get()) is not None:
                try:
                    self._do(item)
                except BaseException as error:
                    self._error = self._error or error
                    if isinstance(item, _Record):
                        item.event.complete(self._now_s, error)
                # What it holds is freed now, not when the next item comes.
                del item

    def _do(self, item: _Launch | _Wait | _Record) -> None:
        if isinstance(item, _Record):
            self._pace(None)
            error = self._error
            if item.is_last:
                self._error = None
            item.event.complete(self._now_s, error)
        elif isinstance(item, _Wait):
            self._wait(item.event)
        else:
            self._execute(item)

    def _wait(self, event: AnyEvent) -> None:
        try:
            self._now_s = max(self._now_s, event.reached())
        except BaseException as error:
            # What failed first, not the events that told of it.
            self._error = self._error or error.__cause__ or error

    def _execute(self, item: _Launch) -> None:
        start_s = max(self._now_s, item.submitted_s)
        if not self.clock.is_virtual:
            start_s = max(start_s, self.clock.now_s() - _SLEEP_RESOLUTION_S)
        seconds = 0.0
        try:
            # After an error nothing runs until the host has seen it.
            if self._error is None:
                item.work()
                seconds = item.seconds() if callable(item.seconds) else item.seconds
                if self.throttle is not None and item.num_bytes:
                    seconds = self.throttle.seconds(item.num_bytes, start_s, seconds)
        except BaseException as error:
            self._error = error
        self._now_s = start_s + seconds
        self._pace(item)
        self.busy_s += seconds
        self.num_bytes += item.num_bytes
        self.clock.timeline.append(Span(self.name, item.name, start_s, self._now_s, item.num_bytes))

    def _pace(self, item: _Launch | None) -> None:
        """On the real clock: sleep until the modelled time; what is behind it is late."""
        if self.clock.is_virtual:
            return
        ahead_s = self._now_s - self.clock.now_s()
        if ahead_s > (_SLEEP_RESOLUTION_S if item is not None else 0):
            time.sleep(ahead_s)
        elif ahead_s < -_SLEEP_RESOLUTION_S:
            if item is not None:
                self.clock.num_late += 1
                self.clock.late_s -= ahead_s
            self._now_s = self.clock.now_s()


class Graph:
    """Launches of several streams, captured once and launched again by :meth:`replay`, over the
    same memory.

    What was launched before it is over when a replay begins, on all of its streams but those that
    run ahead.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.items: list[tuple[Stream, _Launch | _Wait | _Record]] = []
        self.num_replays = 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """What is launched within belongs to the graph, and is not run."""
        assert self._clock.graph is None, "another graph is being captured"
        self._clock.graph = self
        try:
            yield
        finally:
            self._clock.graph = None

    def replay(
        self,
        ahead: AnyStream | None = None,
        outer: Mapping[int, AnyEvent] | None = None,
    ) -> Mapping[int, AnyEvent]:
        """Launch everything again. Nothing waits for what was launched on ``ahead`` before, but
        where the capture did: ``outer`` has what stands for an event of before the capture, by its
        ``id``. Returns the events of this replay by those of the capture."""
        streams = {id(stream): stream for stream, _ in self.items}
        before = [stream.record() for stream in streams.values() if stream is not ahead]
        for stream in streams.values():
            for event in before:
                stream.wait(event)
        events: dict[int, AnyEvent] = dict(outer or {})
        for stream, item in self.items:
            if isinstance(item, _Record):
                events[id(item.event)] = stream.record()
            elif isinstance(item, _Launch):
                stream.submit(item.again())
            elif id(item.event) in events:
                stream.wait(events[id(item.event)])
        self.num_replays += 1
        return events
