"""Finds work of one stream that does not wait for work of another whose memory it touches.

On a GPU that is a wrong answer now and then. Here it is an error every time, whoever was faster:
what counts is whether events order the two. Each stream knows how many launches of every other are
certain to be done before its next one (a vector clock); an event carries what its stream knew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ambidex.errors import DeviceError

#: Launches of each stream, by its name, that are certain to be done.
Known = dict[str, int]

#: Memories that are remembered before those that are gone are looked for.
_FEW = 1024


def learn(known: Known, more: Mapping[str, int]) -> None:
    """Add ``more`` to what is ``known``."""
    for stream, count in more.items():
        if count > known.get(stream, 0):
            known[stream] = count


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of memory. ``memory`` tells apart what lies at one address at different times; it does
    not keep it."""

    memory: StorageWeakRef
    start: int
    end: int


def ranges_of(tensors: Iterable[Tensor]) -> list[Range]:
    """What ``tensors`` lie in, from their first to their last byte."""
    ranges = []
    for tensor in tensors:
        if tensor.numel():
            first = tensor.data_ptr()
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            end = first + (last + 1) * tensor.itemsize
            ranges.append(Range(StorageWeakRef(tensor.untyped_storage()), first, end))
    return ranges


@dataclass(frozen=True, slots=True)
class _Use:
    """The ``number``-th launch of ``stream`` reads or writes these bytes."""

    stream: str
    number: int
    start: int
    end: int
    is_write: bool


class Hazards:
    """The memory that launches touch which the host has not waited for yet."""

    def __init__(self) -> None:
        self._uses: dict[StorageWeakRef, list[_Use]] = {}
        self._num_looked_at = _FEW

    def launch(
        self,
        name: str,
        stream: str,
        number: int,
        known: Known,
        of_host: Known,
        reads: Iterable[Range],
        writes: Iterable[Range],
    ) -> None:
        """Note the ``number``-th launch of ``stream``. ``known``: what it waits for; ``of_host``:
        what the host has waited for. Raises DeviceError where that is too little."""
        touched = [(item, False) for item in reads] + [(item, True) for item in writes]
        for item, is_write in touched:
            for use in self._recent(item, of_host):
                if (
                    use.stream != stream
                    and use.number > known.get(use.stream, 0)
                    and use.start < item.end
                    and item.start < use.end
                    and (is_write or use.is_write)
                ):
                    what = (
                        f"overwrites memory that {use.stream} still uses"
                        if is_write
                        else f"reads memory that {use.stream} has not yet written"
                    )
                    raise DeviceError(
                        f"{name} on {stream} {what}: an event is missing between them."
                    )
        for item, is_write in touched:
            use = _Use(stream, number, item.start, item.end, is_write)
            self._uses.setdefault(item.memory, []).append(use)
        if len(self._uses) > self._num_looked_at:
            self._forget_the_gone()

    def hand_out(self, stream: str, number: int, items: Iterable[Range]) -> None:
        """Note memory that is new to whoever has it now: the first ``number`` launches of
        ``stream`` may use it."""
        for item in items:
            use = _Use(stream, number, item.start, item.end, True)
            self._uses.setdefault(item.memory, []).append(use)

    def is_unused(self, item: Range, of_host: Known) -> bool:
        """Whether the host has waited for everything that touches ``item``."""
        recent = self._recent(item, of_host)
        return not any(use.start < item.end and item.start < use.end for use in recent)

    def _recent(self, item: Range, of_host: Known) -> list[_Use]:
        uses = self._uses.get(item.memory)
        if not uses:
            return []
        uses[:] = [use for use in uses if use.number > of_host.get(use.stream, 0)]
        return uses

    def _forget_the_gone(self) -> None:
        self._uses = {
            memory: uses for memory, uses in self._uses.items() if uses and not memory.expired()
        }
        self._num_looked_at = max(_FEW, 2 * len(self._uses))
