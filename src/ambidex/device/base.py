"""What the engine asks of a device. Everything that names a particular device lives here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ambidex.kernels.table import Kernels
    from ambidex.memory.cost_model import ComputeRate, LinkRate
    from ambidex.memory.ledger import Ledger


class Event(Protocol):
    """A point in a stream's work."""

    @property
    def is_done(self) -> bool: ...

    @property
    def is_failed(self) -> bool:
        """Whether the work before it failed, or it belongs to a graph that was not replayed."""

    def wait(self) -> None:
        """Block the host until it is reached. Raises what the work before it raised."""

    def reached(self) -> float:
        """Block; when it was reached, in seconds of the device's clock."""


class Graph(Protocol):
    """Launched work, captured once and replayed."""

    num_replays: int

    def capture(self) -> AbstractContextManager[None]:
        """What is launched within belongs to the graph, and is not run."""

    def replay(
        self, ahead: Stream | None = None, outer: Mapping[int, Event] | None = None
    ) -> Mapping[int, Event]:
        """Launch everything again, over the same memory, after everything launched before."""


class Stream(Protocol):
    """Work of one stream runs in the order of launching; streams wait for events alone."""

    def launch(
        self,
        name: str,
        work: Callable[[], None],
        seconds: float | Callable[[], float],
        num_bytes: int = 0,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        """Queue ``work``; ``seconds`` is what a simulated clock lets it take, ``num_bytes`` what it
        moves over a link, ``reads`` and ``writes`` are the memory that it touches."""

    def close(self) -> None:
        """End it, after what was launched."""

    def wait(self, event: Event) -> None:
        """Work launched from now on begins after ``event``."""

    def record(self) -> Event:
        """An event that is reached when everything launched so far is done."""


class Device(Protocol):
    """A memory and something that computes in it."""

    name: str
    ledger: Ledger
    num_threads: int
    #: Sentences that the user should read once.
    notes: list[str]

    @property
    def kernels(self) -> Kernels:
        """The kernel table: the operations that layers are made of."""

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, account: str = "activations"
    ) -> Tensor:
        """Uninitialised memory of ``account``; the caller holds a reservation for it."""

    def zeros(
        self, shape: tuple[int, ...], dtype: torch.dtype, account: str = "activations"
    ) -> Tensor:
        """Memory that reads as zero; the caller holds a reservation for it."""

    def store(self, tensor: Tensor, account: str = "weights") -> Tensor:
        """``tensor``, of the host, in this device's memory; itself where that is the same."""

    def write(self, destination: Tensor, source: Tensor) -> None:
        """Copy ``source``, of the host, into memory of this device, at once."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """``tensor`` in the host's memory, once it has been computed; itself where it is there."""

    def measure(self) -> None:
        """Ask anew what the memory offers: the ledger's capacity becomes what is reserved and what
        is free. To be called while all that is reserved is really held."""

    def prefault(self, tensors: Sequence[Tensor]) -> None:
        """Take the memory of ``tensors`` now, if that would happen when they are first used; what
        is in them stays. Raises OutOfMemory where it is not there any more."""

    def prepare_thread(self) -> None:
        """Called once in the thread that will run this device's lane."""

    def synchronize(self) -> None:
        """Wait until everything submitted has been computed. Raises what that raised, once."""

    def close(self) -> None:
        """Let go of the kernel table, whose threads end with it. Only the ledger can be used
        afterwards."""


class Accelerator(Device, Protocol):
    """A device with a memory of its own, at the end of a link, that computes while the host does
    something else.

    Memory that is let go of may be handed out again at once, in the order of ``compute``: to work
    launched there it is new, and other streams wait for what was launched there before. Both
    tensors of a copy, and what the work of a host's stream holds, are kept until it is done.
    """

    #: The host's NUMA node that it is near to; None: unknown.
    node: int | None
    #: What it reaches, and what the link to it does in each direction.
    rate: ComputeRate
    link: LinkRate
    #: Whether its clock is the one on the wall.
    is_real_time: bool

    @property
    def compute(self) -> Stream:
        """The launched work of the kernel table."""

    @property
    def copy_in(self) -> Stream:
        """Copies to the device."""

    @property
    def copy_in_small(self) -> Stream:
        """Small ones, which do not wait behind large ones."""

    @property
    def copy_out(self) -> Stream:
        """Copies from the device."""

    def new_stream(self, name: str, prepare: Callable[[], None]) -> Stream:
        """A stream of the host's work, which waits for this device's events, and it for its."""

    def host_rate(self, num_threads: int) -> ComputeRate:
        """What that many threads of the host reach, as far as this device's clock is concerned."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in this device's memory."""

    def settle(self) -> None:
        """Wait until what has been launched is over; it may have failed, and to a simulated clock
        nobody has waited."""

    def limit_link(self, bytes_per_s: float) -> None:
        """Let ``copy_in`` move no more than that on average."""

    def graph(self) -> Graph:
        """An empty graph; while it captures, memory is taken from the account ``graphs``."""

    def copy(
        self, destination: Tensor, source: Tensor, name: str = "copy", *, is_small: bool = False
    ) -> Event:
        """Copy between the host's memory and this device's, on ``copy_in`` (or
        ``copy_in_small``) or ``copy_out``; what has to happen before, that stream must have been
        told to wait for."""
