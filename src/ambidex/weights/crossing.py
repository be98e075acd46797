"""Activations that cross the link between the host's memory and the accelerator's.

A crossing takes its latency, and a step has several a layer: what matters is how few of them wait
for each other. So a result that is made of parts of both sides is put together on both: each sends
its part to the other at the same time. What follows from it and is small (a sum, a norm) is
computed on both, too. The host's version is made only if somebody asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ambidex.device.queued import QueuedKernels, num_bytes

if TYPE_CHECKING:
    from ambidex.device.base import Accelerator, Event

#: Results whose version on the host has not been asked for keep what it would be made of, and
#: that what its own is made of: no further than this.
_MAX_DEPTH = 3


@dataclass(slots=True)
class _Twin:
    """The host's version of a tensor on the accelerator: made, or how to make it."""

    of: weakref.ref[Tensor]
    made: Tensor | None
    make: Callable[[], Tensor] | None
    depth: int


class Crossings:
    """Copies between both memories, on streams; ``host``: the host's table on its stream."""

    def __init__(self, device: Accelerator, host: QueuedKernels) -> None:
        self._device = device
        self._host = host
        self.num_bytes = 0
        #: By id of the accelerator's tensor.
        self._twins: dict[int, _Twin] = {}
        #: Memory of the host's latest product, and its copy.
        self._latest: tuple[StorageWeakRef, Tensor | None] | None = None
        #: Vectors that do not change, in the other memory; by address, part and memory.
        self._constants: dict[tuple[int, int, int, bool], Tensor] = {}

    def close(self) -> None:
        """Let go of what lies on the device."""
        self._twins.clear()
        self._constants.clear()
        self._latest = None

    # ---------------------------------------------------------------- to the accelerator

    def to_device(self, x: Tensor) -> Tensor:
        """``x`` for kernels of the accelerator that are launched from now on."""
        return self.begin(x)()

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Send ``x`` off; what is returned makes the accelerator wait for it. It does not wait for
        what is launched on the accelerator meanwhile."""
        if self._device.owns(x):
            return lambda: x
        storage = StorageWeakRef(x.untyped_storage())
        if self._latest is None or self._latest[0] != storage:
            return self._send(x)
        # Queries, keys and values are parts of one product: all of it crosses at once.
        count = x.untyped_storage().nbytes() // x.itemsize
        sent = self._latest[1]
        finish = (lambda: sent) if sent is not None else self._send(x.as_strided((count,), (1,), 0))

        def part() -> Tensor:
            made = finish()
            self._latest = (storage, made)
            return made.as_strided(x.shape, x.stride(), x.storage_offset())

        return part

    def note_product(self, x: Tensor) -> None:
        """``x`` is the host's, new, and nobody will write to it."""
        self._latest = (StorageWeakRef(x.untyped_storage()), None)

    def _send(self, x: Tensor) -> Callable[[], Tensor]:
        device = self._device
        made = device.empty(tuple(x.shape), x.dtype)
        # The memory may be in use by kernels that were launched before it was free.
        device.copy_in_small.wait(device.compute.record())
        device.copy_in_small.wait(self._host.stream.record())
        is_there = device.copy(made, x, "activations", is_small=True)
        self.num_bytes += num_bytes([x])

        def finish() -> Tensor:
            device.compute.wait(is_there)
            return made

        return finish

    # ---------------------------------------------------------------- to the host

    def to_host(self, x: Tensor) -> Tensor:
        """``x`` for kernels of the host that are launched from now on."""
        if not self._device.owns(x):
            return x
        twin = self._twins.get(id(x))
        if twin is None or twin.of() is not x:
            made = self.fetch_after(x, self._device.compute.record())
            self._keep(x, made, None, 0)
            return made
        if twin.made is None:
            assert twin.make is not None
            twin.made, twin.make = twin.make(), None
        return twin.made

    def fetch_after(self, x: Tensor, event: Event) -> Tensor:
        """Copy ``x`` of the accelerator, which is computed when ``event`` is reached."""
        device = self._device
        made = self._host.memory.empty(tuple(x.shape), x.dtype)
        device.copy_out.wait(event)
        self._host.stream.wait(device.copy(made, x, "activations"))
        self.num_bytes += num_bytes([x])
        return made

    def mirror(self, x: Tensor, make: Callable[[], Tensor], needs: Sequence[Tensor | None]) -> None:
        """``make`` gives ``x`` on the host out of its versions of ``needs``, by the host's kernels:
        if it is asked for, that takes the place of copying it."""
        twins = [self._twins.get(id(need)) for need in needs]
        waiting = [twin.depth for twin in twins if twin is not None and twin.make is not None]
        depth = 1 + max(waiting, default=0)
        if depth <= _MAX_DEPTH:
            self._keep(x, None, make, depth)

    def _keep(
        self, x: Tensor, made: Tensor | None, make: Callable[[], Tensor] | None, depth: int
    ) -> None:
        key = id(x)
        twins = self._twins
        self._twins[key] = _Twin(weakref.ref(x, lambda _: twins.pop(key, None)), made, make, depth)

    # ---------------------------------------------------------------- what never changes

    def constant(self, x: Tensor, ranges: Sequence[tuple[int, int]], on_host: bool) -> Tensor:
        """Rows of a vector that never changes (a bias, a norm's weight), where they are needed;
        copied once."""
        count = sum(end - start for start, end in ranges)
        if self._device.owns(x) != on_host:
            if count == len(x):
                return x
            if len(ranges) == 1:
                return x[slice(*ranges[0])]
        key = (x.data_ptr(), ranges[0][0], count, on_host)
        if key not in self._constants:
            plain = self._device.to_host(x) if self._device.owns(x) else x
            rows = torch.cat([plain[start:end] for start, end in ranges])
            if not on_host:
                size = num_bytes([rows])
                self._device.ledger.reserve("weights", "parts of a bias", size)
                rows = self._device.store(rows)
            self._constants[key] = rows
        return self._constants[key]
