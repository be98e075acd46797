"""Steps of an accelerator's lane, captured once for a number of rows and replayed.

A graph holds every launch of a step: on the accelerator, on the host for what it computes, and the
copies between them. It is captured for powers of two; a step with fewer rows is filled up with rows
of no request.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ambidex.kernels.metadata import AttentionMetadata
from ambidex.layers.batch import Batch
from ambidex.layers.module import submodules
from ambidex.layers.rope import Rope
from ambidex.runner.replay import Replayed

if TYPE_CHECKING:
    from ambidex.device.base import Accelerator, Event, Graph
    from ambidex.device.host_memory import HostMemory
    from ambidex.kv.cache import KVCache
    from ambidex.models.registry import CausalLM
    from ambidex.weights.placed import PlacedKernels
    from ambidex.weights.streamer import StagedRows


#: Of a block that Python hands out, with what of tensors lies outside of it: as measured. Launches
#: are many small objects.
_BLOCK_BYTES = 130


@dataclass(slots=True)
class _Captured:
    graph: Graph
    batch: Batch
    positions: Tensor
    hidden: Tensor
    logits: Tensor
    #: What a replay adds to the kernels' counters.
    counts: dict[str, int]
    #: When what lies in the ring of streamed weights is there, before and after the step.
    arrivals_before: dict[StagedRows, Event]
    arrivals_after: dict[StagedRows, Event]


class GraphReplayer:
    """Captures steps with one row a request and replays them; others are launched call by call.

    A number of rows is captured when it comes for the second time: the first makes what is made
    once.
    """

    num_calls = 0
    arena_bytes = 0

    def __init__(
        self,
        device: Accelerator,
        kernels: PlacedKernels,
        host_memory: HostMemory,
        model: CausalLM,
        kv_cache: KVCache,
        rows: Sequence[int],
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._host_memory = host_memory
        self._model = model
        self._kv_cache = kv_cache
        self._rows = sorted(rows)
        self._seen: set[int] = set()
        self._captured: dict[int, _Captured] = {}
        self._ropes = [module for module in submodules(model) if isinstance(module, Rope)]
        self.num_replays = 0
        #: What captured launches take of the host: on the simulated accelerator Python's objects.
        self.launch_bytes = 0

    @property
    def warm_up_rows(self) -> Sequence[int]:
        """Numbers of rows that have to be captured before a server is ready."""
        return self._rows

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def record(self) -> bool:
        """Nothing yet: steps are captured as they come."""
        return True

    def fits(self, batch: Batch, num_logit_rows: int) -> bool:
        if not batch.num_tokens == num_logit_rows <= self._rows[-1]:
            return False
        rows = self._bucket(batch)
        if rows in self._captured or rows in self._seen:
            return True
        self._seen.add(rows)
        return False

    def _bucket(self, batch: Batch) -> int:
        return next(rows for rows in self._rows if rows >= batch.num_tokens)

    def replay(self, batch: Batch, logit_rows: Sequence[int]) -> Replayed:
        """Compute ``batch``, and the logits of all its rows."""
        rows = self._bucket(batch)
        for rope in self._ropes:
            rope.prepare(batch.max_position)
        # The copies ahead of the step have to lie where they did at the capture.
        self._kernels.begin_step(rows, rows)
        self._kernels.set_filled_rows(batch.num_tokens)
        captured = self._captured.get(rows)
        if captured is None:
            captured = self._captured[rows] = self._capture(rows)
        self._fill(captured, batch)
        kernels = self._kernels
        # What the capture waited for is what has been fetched ahead by now.
        now = kernels.arrivals()
        outer = {id(event): now[rows] for rows, event in captured.arrivals_before.items()}
        events = captured.graph.replay(self._device.copy_in, outer)
        kernels.set_arrivals(
            {rows: events[id(event)] for rows, event in captured.arrivals_after.items()}
        )
        kernels.add_counts(captured.counts)
        self.num_replays += 1
        count = batch.num_tokens
        return Replayed(captured.hidden[:count], captured.logits[:count], None)

    def _fill(self, captured: _Captured, batch: Batch) -> None:
        """Put a batch where the graph's launches look for it."""
        count = batch.num_tokens
        for static, values in (
            (captured.batch.token_ids, batch.token_ids),
            (captured.positions, batch.positions),
        ):
            static.zero_()
            static[:count] = values[:count]
        for metadata, given in zip(captured.batch.attention, batch.attention, strict=True):
            metadata.query_starts = given.query_starts
            metadata.context_lens = given.context_lens
            metadata.block_tables = given.block_tables
            metadata.derived.clear()

    def _capture(self, rows: int) -> _Captured:
        cache = self._kv_cache
        ids, positions = (torch.zeros(rows, dtype=torch.int64) for _ in range(2))
        attention = [
            AttentionMetadata(cache.block_size, count, group.window, [0], [], [], group=index)
            for index, (count, group) in enumerate(zip(cache.num_blocks, cache.groups, strict=True))
        ]
        kernels = self._kernels
        batch = Batch(ids, positions, rows, cache, attention, max_position=0)
        graph = self._device.graph()
        before, arrivals = kernels.counts(), kernels.arrivals()
        blocks = sys.getallocatedblocks()
        with self._host_memory.kept(), graph.capture():
            batch.positions = kernels.put(positions)
            hidden = self._model(batch)
            logits = self._model.head(kernels.take_logit_rows(hidden, range(rows)))
            kernels.end_step()
        self.launch_bytes += _BLOCK_BYTES * max(sys.getallocatedblocks() - blocks, 0)
        after = kernels.counts()
        counts = {name: after[name] - before[name] for name in after}
        # They are counted by the replay that follows.
        kernels.add_counts({name: -count for name, count in counts.items()})
        arrivals_after = kernels.arrivals()
        # The replay that follows begins as the capture did.
        kernels.set_arrivals(arrivals)
        return _Captured(graph, batch, positions, hidden, logits, counts, arrivals, arrivals_after)
