"""A simulated accelerator: memory, streams and a link of its own, on this machine's processor.

It computes with the host's kernels in a thread of its own, so its results are the CPU lane's bit
for bit, while everything around it is as with a GPU: launches return at once, copies take their
time, memory is small, tensors of another memory are refused, and work that forgot to wait for other
work fails. It is asked for by name: ``--device sim:memory=2GiB,link=4GB/s,clock=virtual``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ambidex.device.cpu import CPUDevice
from ambidex.device.queued import QueuedKernels, num_bytes
from ambidex.device.region import Region
from ambidex.device.stream import Clock, Event, Graph, Stream
from ambidex.errors import DeviceError, OptionError, OutOfMemory
from ambidex.memory.cost_model import ComputeRate, LinkRate
from ambidex.memory.ledger import Ledger
from ambidex.memory.token_bucket import TokenBucket
from ambidex.option_types import to_size

if TYPE_CHECKING:
    from ambidex.kernels.table import Kernels

#: What memory reads as while a copy to it is under way: NaN in every type of float.
_POISON = 0xFF
#: What a limited link may move at once after a pause.
_BURST_BYTES = 1 << 20
#: As of --cpu-threads: with more a step does not end.
_MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class SimSpec:
    """What comes after ``sim:``."""

    memory_bytes: int = 2 << 30
    #: Of the link, in each direction.
    link_bytes_per_s: float = 4e9
    latency_s: float = 20e-6
    #: How fast it computes, next to one core of this machine.
    speed: float = 0.25
    #: virtual | real
    clock: str = "virtual"
    #: Threads that it computes with, whatever its clock says.
    threads: int = 1
    #: What one core of this machine reaches; 0: it is measured.
    core_bytes_per_s: float = 0.0
    core_flops: float = 0.0


_NUMBER = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


def _to_rate(text: str) -> float:
    return float(to_size(text.removesuffix("/s")))


def _to_seconds(text: str) -> float:
    for unit, seconds in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * seconds
    return float(text)


_KEYS: dict[str, tuple[str, Callable[[str], object]]] = {
    "memory": ("memory_bytes", to_size),
    "link": ("link_bytes_per_s", _to_rate),
    "latency": ("latency_s", _to_seconds),
    "speed": ("speed", float),
    "clock": ("clock", str),
    "threads": ("threads", int),
    "core_bandwidth": ("core_bytes_per_s", _to_rate),
    "core_flops": ("core_flops", lambda text: float(to_size(text))),
}
assert {field for field, _ in _KEYS.values()} == {field.name for field in fields(SimSpec)}

#: Quantities with a unit, and one of theirs: a number alone would be bytes, or seconds.
_UNITS = {
    "memory": "GiB",
    "link": "GB/s",
    "latency": "us",
    "core_bandwidth": "GB/s",
    "core_flops": "G",
}

EXAMPLE = "sim:memory=2GiB,link=4GB/s,latency=20us,speed=0.25,clock=virtual"


def parse_spec(text: str) -> SimSpec:
    """``key=value,key=value``. Raises OptionError with the nearest key."""
    values: dict[str, object] = {}
    texts: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            raise OptionError(
                f"--device sim: '{key}' is no setting of the simulated accelerator."
                f"{f' Did you mean {near[0]}?' if near else ''} Known are {', '.join(_KEYS)}; for "
                f"example {EXAMPLE}."
            )
        if not equals or not value:
            raise OptionError(f"--device sim: '{key}' has no value; for example {EXAMPLE}.")
        name, parse = _KEYS[key]
        if key in _UNITS and _NUMBER.fullmatch(value) and float(value):
            raise OptionError(
                f"--device sim: '{key}={value}' has no unit, such as {_UNITS[key]}; for example "
                f"{EXAMPLE}."
            )
        if name in values:
            raise OptionError(f"--device sim: '{key}' is given twice.")
        texts[key] = value
        try:
            values[name] = parse(value)
        except (ValueError, OptionError):
            raise OptionError(
                f"--device sim: '{value}' is no value of '{key}'; for example {EXAMPLE}."
            ) from None
    spec = SimSpec(**values)  # type: ignore[arg-type]
    if spec.clock not in ("virtual", "real"):
        raise OptionError(f"--device sim: clock is virtual or real, not '{spec.clock}'.")
    for key, (name, _) in _KEYS.items():
        value = getattr(spec, name)
        lowest_is_zero = name in ("latency_s", "core_bytes_per_s", "core_flops")
        if name != "clock" and not (0 < value < math.inf or (lowest_is_zero and value == 0)):
            least = "at least 0" if lowest_is_zero else "more than 0"
            end = "" if value < math.inf else " and finite"
            raise OptionError(f"--device sim: '{key}' must be {least}{end}, not {texts[key]}.")
    if spec.threads > _MAX_THREADS:
        raise OptionError(
            f"--device sim: 'threads' must be at most {_MAX_THREADS:,}, not {spec.threads:,}."
        )
    return spec


def _clear(tensor: Tensor) -> None:
    tensor.zero_()


def _poison(tensor: Tensor) -> None:
    tensor.view(torch.uint8).fill_(_POISON)


def make_sim(settings: str, core_rate: Callable[[], ComputeRate], cpus: Sequence[int]) -> SimDevice:
    """See ``device.registry.Maker``."""
    spec = parse_spec(settings)
    core = ComputeRate(spec.core_bytes_per_s, spec.core_flops)
    if not spec.core_bytes_per_s or not spec.core_flops:
        measured = core_rate()
        core = ComputeRate(
            spec.core_bytes_per_s or measured.bytes_per_s, spec.core_flops or measured.flops
        )
    return SimDevice(spec, core, cpus=cpus)


class SimDevice:
    """The simulated accelerator; ``core``: what one core of this machine reaches."""

    is_accelerator = True

    def __init__(
        self, spec: SimSpec, core: ComputeRate, *, index: int = 0, cpus: Sequence[int] = ()
    ) -> None:
        self.spec = spec
        self.name = f"sim:{index}"
        self.ledger = Ledger(self.name, spec.memory_bytes)
        self.num_threads = spec.threads
        self.node: int | None = None
        #: Sentences that the user should read once.
        self.notes: list[str] = []
        #: What one core of the host reaches, on this device's clock.
        self.core = core
        self.rate = core.scaled(spec.speed)
        self.link = LinkRate(spec.link_bytes_per_s, spec.latency_s)
        self.is_real_time = spec.clock == "real"
        self.clock = Clock(not self.is_real_time)
        self._region = Region(self.ledger)
        self._host = CPUDevice(spec.threads, cpus=cpus)
        if self._host.kernels.name != "native":
            raise OptionError(
                "--device sim needs the native kernels, and AMBIDEX_CPU_KERNELS asks for others. "
                "Leave it out."
            )
        prepare = self._host.prepare_thread
        self.compute = Stream("compute", self.clock, prepare)
        self.copy_in = Stream("copy_in", self.clock)
        self.copy_in_small = Stream("copy_in_small", self.clock)
        self.copy_out = Stream("copy_out", self.clock)
        self._streams = [self.copy_in, self.copy_in_small, self.compute, self.copy_out]
        self._kernels = QueuedKernels(
            self._host.kernels, self.compute, self, self.rate, f"simulated, {spec.clock} clock"
        )

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    @property
    def num_late(self) -> int:
        """Operations whose arithmetic took longer than the real clock gave them."""
        return self.clock.num_late

    def new_stream(self, name: str, prepare: Callable[[], None]) -> Stream:
        """A stream of the host's work, on this device's clock."""
        stream = Stream(name, self.clock, prepare)
        self._streams.append(stream)
        return stream

    def host_rate(self, num_threads: int) -> ComputeRate:
        """What that many threads of the host reach, for this device's clock."""
        return self.core.scaled(num_threads)

    def owns(self, tensor: Tensor) -> bool:
        return self._region.owns(tensor)

    def limit_link(self, bytes_per_s: float) -> None:
        self.copy_in.throttle = TokenBucket(bytes_per_s, _BURST_BYTES)

    def graph(self) -> Graph:
        return Graph(self.clock)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, account: str = "activations"
    ) -> Tensor:
        if self.clock.graph is not None and account == "activations":
            account = "graphs"
        try:
            made = self._region.empty(shape, dtype, account)
        except OutOfMemory:
            # What was launched ahead holds memory until it has run.
            if account != "activations":
                raise
            self.settle()
            made = self._region.empty(shape, dtype, account)
        self.compute.hand_out(made)
        return made

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, account: str = "activations"
    ) -> Tensor:
        made = self.empty(shape, dtype, account)
        with self.clock.at_once():
            self.compute.launch("zeros", lambda: _clear(made), 0.0, writes=[made])
            self.compute.synchronize()
        return made

    def taken_bytes(self, account: str) -> int:
        """Bytes of an account's live tensors."""
        return self._region.taken_bytes(account)

    def peak_bytes(self, account: str) -> int:
        """The most that an account took at a time."""
        return self._region.peak_bytes(account)

    def copy(
        self, destination: Tensor, source: Tensor, name: str = "copy", *, is_small: bool = False
    ) -> Event:
        """See ``Accelerator``. What is read from ``destination`` before it is done is poison: from
        now on where nothing else may be using that memory, else from the copy's beginning."""
        inward = self.owns(destination)
        if inward == self.owns(source) and destination.numel():
            raise DeviceError(
                f"A copy between the host and {self.name} needs one tensor of each; "
                f"{'both are' if inward else 'neither is'} on {self.name}."
            )
        assert destination.shape == source.shape, (destination.shape, source.shape)
        assert destination.dtype == source.dtype, (destination.dtype, source.dtype)
        stream = self.copy_out
        if inward:
            stream = self.copy_in_small if is_small else self.copy_in
        size = num_bytes([source])
        is_poisoned = self.clock.is_unused(destination)
        if is_poisoned:
            _poison(destination)

        def work() -> None:
            if not is_poisoned:
                _poison(destination)
            destination.copy_(source)

        stream.launch(
            name,
            work,
            self.link.seconds(size),
            size,
            reads=[source],
            writes=[destination],
        )
        return stream.record()

    def store(self, tensor: Tensor, account: str = "weights") -> Tensor:
        stored = self.empty(tuple(tensor.shape), tensor.dtype, account)
        self.write(stored, tensor)
        return stored

    def write(self, destination: Tensor, source: Tensor) -> None:
        with self.clock.at_once():
            self.copy_in.wait(self.compute.record())
            self.copy(destination, source, "write").wait()

    def to_host(self, tensor: Tensor) -> Tensor:
        if not self.owns(tensor) or not tensor.numel():
            return tensor
        on_host = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        with self.clock.at_once():
            self.copy_out.wait(self.compute.record())
            self.copy(on_host, tensor, "to_host").wait()
        return on_host

    def measure(self) -> None:
        """Nothing changes what it offers."""

    def prefault(self, tensors: Sequence[Tensor]) -> None:
        """Its memory is its own: nothing else can take it."""

    def prepare_thread(self) -> None:
        torch.set_num_threads(1)

    def settle(self) -> None:
        """See ``Accelerator``. How far launches are ahead of the arithmetic is this machine's
        affair."""
        with self.clock.at_once():
            events = [stream.record() for stream in self._streams]
        for event in events:
            event.settle()

    def synchronize(self) -> None:
        errors = []
        for stream in self._streams:
            try:
                stream.synchronize()
            except DeviceError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        del self._kernels
        self._host.close()
