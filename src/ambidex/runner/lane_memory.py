"""What a lane needs of its device's memory beside the weights: its steps and the KV cache."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ambidex.errors import OutOfMemory
from ambidex.memory.ledger import HOST, format_bytes
from ambidex.runner.placing import host_weight_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from ambidex.device.base import Device
    from ambidex.layers.module import Parameter
    from ambidex.memory.ledger import Ledger, Reservation
    from ambidex.memory.sizing import KVSize

logger = logging.getLogger(__name__)

#: How often the KV cache is made, each time for what is free by then, before the start fails.
MAX_TRIES = 3
#: Taking so much may last seconds, which is announced.
_SLOW_BYTES = 1 << 30

T = TypeVar("T")


class LaneMemory:
    """Sizes, reserves and makes.

    Other processes take and free memory all the time, and loading weights may take minutes. So
    the cache is sized once before, where a model that cannot run is refused at once, and again
    after it if there is no longer room: what changed is the cache, not whether the engine starts.
    """

    def __init__(
        self,
        device: Device,
        fit: Callable[[int], KVSize],
        step_bytes: Callable[[int], int],
        kv_bytes: Callable[[tuple[int, ...]], int],
    ) -> None:
        """``fit(free bytes)`` chooses a size, ``step_bytes(context)`` and ``kv_bytes(blocks)`` say
        what it takes. Raises OutOfMemory where nothing fits."""
        self._device = device
        self._ledger: Ledger = device.ledger
        self._fit = fit
        self._step_bytes = step_bytes
        self._kv_bytes = kv_bytes
        #: Sentences that the user should read once.
        self.notes: list[str] = []
        self.size = fit(self._ledger.free_bytes)
        self._steps, self._cache = self._reserve()

    def _reserve(self) -> tuple[Reservation, Reservation]:
        num_bytes = self._step_bytes(self.size.max_model_len)
        steps = self._ledger.reserve("activations", "steps", num_bytes)
        num_bytes = self._kv_bytes(self.size.num_blocks)
        return steps, self._ledger.reserve("kv_cache", "kv_cache", num_bytes)

    def make_cache(self, make: Callable[[KVSize], T]) -> T:
        """What ``make`` makes of the size, with the weights in place.

        The context may be shorter than planned; a rotation that goes by the longest one stays as
        it was built.
        """
        self._size_again()
        for number in range(1, MAX_TRIES + 1):
            tried = self.size
            try:
                with memory_refused(self._device):
                    return make(tried)
            except OutOfMemory:
                self._size_again()
                if self.size == tried or number == MAX_TRIES:
                    raise
        raise AssertionError("the last try returns or raises")

    def _size_again(self) -> None:
        """Measure, and choose another size if what is reserved is not free any more."""
        before, needed = self.size, self._steps.num_bytes + self._cache.num_bytes
        self._ledger.release(self._steps)
        self._ledger.release(self._cache)
        self._device.measure()
        free = self._ledger.free_bytes
        if needed > free:
            self.size = self._fit(free)
            note = (
                f"Other programs took memory while the model was loaded: {format_bytes(needed)} "
                f"were to be had for the KV cache and steps, {format_bytes(free)} are. The cache "
                f"has {min(self.size.num_blocks)} blocks instead of {min(before.num_blocks)}, the "
                f"longest context {self.size.max_model_len:,} tokens instead of "
                f"{before.max_model_len:,}."
            )
            self.notes.append(note)
        self._steps, self._cache = self._reserve()

    def settle_steps(self, parts: Mapping[str, int]) -> None:
        """``parts``, in bytes, take the place of what was estimated for steps."""
        self._ledger.release(self._steps)
        for name, num_bytes in parts.items():
            self._ledger.reserve("activations", name, num_bytes)

    def take_pages(self, tensors: Sequence[Tensor]) -> None:
        """Have the memory of ``tensors`` now rather than when requests need it."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        began = time.perf_counter()
        if num_bytes >= _SLOW_BYTES:
            logger.info("taking %s from the system for KV and steps", format_bytes(num_bytes))
        try:
            self._device.prefault(tensors)
        except (OutOfMemory, MemoryError) as error:
            self.notes.append(
                f"The KV cache is not taken from the system in advance ({error or 'refused'}). "
                "Requests may fail when it fills; free memory, or give less with "
                "--kv-cache-memory-bytes."
            )
            return
        seconds = time.perf_counter() - began
        logger.info("took %s for KV and steps in %.1f s", format_bytes(num_bytes), seconds)


@contextlib.contextmanager
def memory_refused(device: Device) -> Iterator[None]:
    """Memory that the ledger promised and the system refuses (``ulimit -v``) is an OutOfMemory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"The system refused memory that it had reported as free: "
            f"{format_bytes(device.ledger.used_bytes)} are needed. Raise this process's limit "
            "(ulimit -v), free memory, or give less with --kv-cache-memory-bytes."
        ) from None


def weight_bytes_by_memory(parameter: Parameter, memory: str) -> dict[str, int]:
    """Bytes that a loaded parameter takes in each memory; ``memory``: its device's."""
    on_host = host_weight_bytes(parameter)
    split = {HOST: on_host, memory: parameter.held_bytes - on_host}
    if memory == HOST:
        split = {HOST: parameter.held_bytes}
    return {name: num_bytes for name, num_bytes in split.items() if num_bytes}


def bytes_of_modules(
    parameters: Iterable[tuple[str, Parameter]], memory: str
) -> dict[str, dict[str, int]]:
    """Module -> memory -> bytes of its weights: ``layers.3.mlp.gate_up`` has weight and bias."""
    modules: dict[str, dict[str, int]] = {}
    for path, parameter in parameters:
        found = modules.setdefault(path.removesuffix(".weight").removesuffix(".bias"), {})
        for name, num_bytes in weight_bytes_by_memory(parameter, memory).items():
            found[name] = found.get(name, 0) + num_bytes
    return modules
