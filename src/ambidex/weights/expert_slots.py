"""Experts of the host with copies of the hot ones on the accelerator, each computed where it is.

An expert's copy lies in a slot; which expert that is changes between steps only, when nothing
computes. A copy travels during a whole step: until the next one begins, the host still computes
that expert.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ambidex.memory.expert_cache import (
    MAX_ROWS,
    Change,
    ExpertCache,
    ExpertSize,
    sharing_pays,
)
from ambidex.weights.streamer import staged_bytes

if TYPE_CHECKING:
    from ambidex.device.base import Accelerator, Event
    from ambidex.device.queued import QueuedKernels

#: Pieces within a slot begin at multiples of this many bytes.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class HostExperts:
    """A layer's experts in the host's memory, and the list that its kernel call is given."""

    key: list[Any]
    gate_up: list[Any]
    down: list[Any]

    @property
    def slot_bytes(self) -> int:
        """What the largest expert takes on the accelerator."""
        pairs = zip(self.gate_up, self.down, strict=True)
        return max(sum(_whole_bytes(weight) for weight in pair) for pair in pairs)

    @property
    def size(self) -> ExpertSize:
        pair = (self.gate_up[0], self.down[0])
        num_weights = sum(weight.shape[0] * weight.shape[1] for weight in pair)
        num_bytes = sum(weight.num_bytes for weight in pair)
        return ExpertSize(num_bytes, num_weights, self.down[0].shape[0])


def _whole_bytes(weight: Any) -> int:
    return staged_bytes(weight, ((0, weight.shape[0]),))


@dataclass(slots=True, eq=False)
class SharedExperts:
    """A layer's experts by who computes them: one of the two has a matrix, the other None. Calls
    read the lists when they run; they are changed in place."""

    index: int
    experts: HostExperts
    capacity: int
    host_gate_up: list[Any]
    host_down: list[Any]
    device_gate_up: list[Any]
    device_down: list[Any]
    #: The memory of each expert that has some on the device.
    slots: dict[int, Tensor] = field(default_factory=dict)

    def give_to_device(self, expert: int, gate_up: Any, down: Any) -> None:
        self.device_gate_up[expert], self.device_down[expert] = gate_up, down
        self.host_gate_up[expert] = self.host_down[expert] = None

    def give_to_host(self, expert: int) -> None:
        self.host_gate_up[expert] = self.experts.gate_up[expert]
        self.host_down[expert] = self.experts.down[expert]
        self.device_gate_up[expert] = self.device_down[expert] = None


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A copy under way."""

    layer: SharedExperts
    expert: int
    gate_up: Any
    down: Any
    is_there: Event


@dataclass(frozen=True, slots=True)
class _Use:
    """What a layer of a step chose; ``counts``: by expert, None where all was the host's."""

    layer: SharedExperts
    num_choices: int
    counts: dict[int, int] | None


class ExpertSlots:
    """The cached experts of all layers; ``host``: the host's table, on its stream.

    It takes ``num_bytes`` of the account ``weights``, which the caller has reserved, and copies
    the first experts before it returns.
    """

    def __init__(
        self,
        device: Accelerator,
        host: QueuedKernels,
        layers: Sequence[HostExperts],
        capacities: Sequence[int],
        *,
        is_static: bool = False,
    ) -> None:
        self._device = device
        self._host = host
        num_experts = max((len(layer.gate_up) for layer in layers), default=0)
        self._policy = ExpertCache(capacities, num_experts, is_static=is_static)
        self._by_key: dict[int, SharedExperts] = {}
        self._layers: list[SharedExperts] = []
        self._due: list[Change] = []
        self._arriving: list[_Arriving] = []
        #: Filled by the host's stream, in the order of its work.
        self._used: deque[_Use] = deque()
        self._pays: dict[tuple[int, int, int], bool] = {}
        #: Rows of the step that are requests': a captured step may have more, to fill it up.
        self.num_filled_rows = 0
        #: Choices of a token computed on the accelerator and on the host; experts that took
        #: another's place; bytes copied for them.
        self.num_hits = 0
        self.num_misses = 0
        self.num_swaps = 0
        self.num_bytes = 0
        for layer, capacity in zip(layers, capacities, strict=True):
            self._add(layer, capacity)
        self._enter()
        self.num_bytes = 0

    @staticmethod
    def reserved_bytes(layers: Sequence[HostExperts], capacities: Sequence[int]) -> int:
        """What the slots take of the accelerator's memory."""
        pairs = zip(layers, capacities, strict=True)
        return sum(layer.slot_bytes * capacity for layer, capacity in pairs)

    def _add(self, experts: HostExperts, capacity: int) -> None:
        count, slot_bytes = len(experts.gate_up), experts.slot_bytes
        nothing: list[Any] = [None] * count
        layer = SharedExperts(
            len(self._layers),
            experts,
            capacity,
            list(experts.gate_up),
            list(experts.down),
            list(nothing),
            list(nothing),
        )
        self._layers.append(layer)
        # The key's own list is kept, so that its id stays its own.
        self._by_key[id(experts.key)] = layer
        if not capacity:
            return
        memory = self._device.empty((capacity * slot_bytes,), torch.uint8, "weights")
        for slot, expert in enumerate(sorted(self._policy.cached(layer.index))):
            layer.slots[expert] = memory[slot * slot_bytes : (slot + 1) * slot_bytes]
            self._arriving.append(self._copy(layer, expert))

    def find(self, gate_up: Sequence[Any], num_rows: int, top_k: int) -> SharedExperts | None:
        """The layer with that list of matrices, where sharing pays for that many rows."""
        layer = self._by_key.get(id(gate_up))
        if layer is None or num_rows > MAX_ROWS:
            return None
        key = (layer.index, num_rows, top_k)
        if key not in self._pays:
            self._pays[key] = sharing_pays(
                num_rows,
                top_k,
                len(layer.experts.gate_up),
                layer.capacity,
                layer.experts.size,
                self._host.rate,
                self._device.rate,
                self._device.link,
            )
        return layer if self._pays[key] else None

    def note_use(
        self, gate_up: Sequence[Any], num_rows: int, top_k: int, experts: Tensor | None = None
    ) -> None:
        """Count a layer's choices when the host's stream gets there: ``experts`` [num_rows, top_k],
        of the host; None where the host computes all of them."""
        layer = self._by_key.get(id(gate_up))
        if layer is None:
            return

        def count() -> None:
            counts = None
            rows = min(num_rows, self.num_filled_rows)
            if experts is not None:
                ids, numbers = experts[:rows].unique(return_counts=True)
                counts = dict(zip(ids.tolist(), numbers.tolist(), strict=True))
            self._used.append(_Use(layer, rows * top_k, counts))

        self._host.stream.launch("count_experts", count, 0.0)

    def begin_step(self, num_rows: int) -> None:
        """Change what is cached: nothing of earlier steps is running. Raises DeviceError where
        something of them had failed."""
        self._take_counts()
        self.num_filled_rows = num_rows
        self._due += self._policy.changes()
        if not self._due and not self._arriving:
            return
        # Usually long done: the host has read the last step's logits.
        self._host.stream.record().wait()
        self._device.compute.record().wait()
        self._enter()
        due, self._due = self._due, []
        for change in due:
            layer = self._layers[change.layer]
            layer.give_to_host(change.expert_out)
            layer.slots[change.expert_in] = layer.slots.pop(change.expert_out)
            self._arriving.append(self._copy(layer, change.expert_in))
            self.num_swaps += 1

    def counts(self) -> dict[str, int]:
        """What has been computed and copied so far, by name."""
        self._take_counts()
        return {
            "expert_hits": self.num_hits,
            "expert_misses": self.num_misses,
            "expert_swaps": self.num_swaps,
            "expert_bytes": self.num_bytes,
        }

    def cached(self, index: int) -> frozenset[int]:
        """The experts of a layer that the accelerator computes."""
        held = enumerate(self._layers[index].device_gate_up)
        return frozenset(expert for expert, weight in held if weight is not None)

    def _take_counts(self) -> None:
        while self._used:
            use = self._used.popleft()
            hits = 0
            if use.counts is not None:
                held = use.layer.device_gate_up
                hits = sum(n for expert, n in use.counts.items() if held[expert] is not None)
                self._policy.record(use.layer.index, use.counts)
            self.num_hits += hits
            self.num_misses += use.num_choices - hits

    def _enter(self) -> None:
        """Let the accelerator compute what has arrived."""
        # An expert whose copy failed stays with the host.
        arriving, self._arriving = self._arriving, []
        for arrival in arriving:
            arrival.is_there.wait()
            arrival.layer.give_to_device(arrival.expert, arrival.gate_up, arrival.down)

    def _copy(self, layer: SharedExperts, expert: int) -> _Arriving:
        """Launch the copies of an expert to its slot."""
        slot, end = layer.slots[expert], 0

        def store(pieces: list[Tensor]) -> Tensor:
            nonlocal end
            first = end
            for piece in pieces:
                size = piece.numel()
                self._device.copy(slot[end : end + size], piece, "expert")
                end += size
                self.num_bytes += size
            stored = slot[first:end]
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            return stored

        gate_up, down = (
            weight.gather(((0, weight.shape[0]),), store)
            for weight in (layer.experts.gate_up[expert], layer.experts.down[expert])
        )
        return _Arriving(layer, expert, gate_up, down, self._device.copy_in.record())
