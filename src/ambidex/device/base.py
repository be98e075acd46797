"""What the engine asks of a device. Everything that names a particular device lives here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ambidex.kernels.table import Kernels
    from ambidex.memory.ledger import Ledger


class Device(Protocol):
    """A memory and something that computes in it."""

    name: str
    ledger: Ledger
    num_threads: int

    @property
    def kernels(self) -> Kernels:
        """The kernel table: the operations that layers are made of."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory; the caller holds a reservation for it."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that reads as zero; the caller holds a reservation for it."""

    def measure(self) -> None:
        """Ask anew what the memory offers: the ledger's capacity becomes what is reserved and what
        is free. To be called while all that is reserved is really held."""

    def prefault(self, tensors: Sequence[Tensor]) -> None:
        """Take the memory of ``tensors`` now, if that would happen when they are first used; what
        is in them stays. Raises OutOfMemory where it is not there any more."""

    def prepare_thread(self) -> None:
        """Called once in the thread that will run this device's lane."""

    def synchronize(self) -> None:
        """Wait until everything submitted has been computed."""

    def close(self) -> None:
        """Let go of the kernel table, whose threads end with it. Only the ledger can be used
        afterwards."""
