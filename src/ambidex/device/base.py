"""What the engine asks of a device. Everything that names a particular device lives here."""

from __future__ import annotations

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

    def prepare_thread(self) -> None:
        """Called once in the thread that will run this device's lane."""

    def synchronize(self) -> None:
        """Wait until everything submitted has been computed."""

    def close(self) -> None:
        """Let go of the kernel table, whose threads end with it. Only the ledger can be used
        afterwards."""
