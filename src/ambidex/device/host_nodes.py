"""The host's NUMA nodes in use: read, measured where that decides something, and accounted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ambidex.device.node_probe import measure_nodes
from ambidex.kernels.cpu.topology import ThreadPlan
from ambidex.memory.ledger import Ledger, Reservation
from ambidex.memory.nodes import (
    MemoryNode,
    describe_nodes,
    host_memory_notes,
    memory_order,
    node_ledgers,
    plan_host_memory,
    read_nodes,
    reserve_on_nodes,
)

#: measure(nodes, threads) -> bytes per second by node.
Measure = Callable[[Sequence[MemoryNode], int], Mapping[int, float]]


class HostNodes:
    """Where the host's weights go, for one lane: its threads, and its accelerator's node if any.

    On a machine of one memory all of it is empty. Ledgers of the nodes are children of ``host``.
    """

    def __init__(
        self,
        host: Ledger,
        threads: ThreadPlan,
        near_node: int | None = None,
        nodes: Sequence[MemoryNode] | None = None,
        measure: Measure | None = None,
    ) -> None:
        self._host = host
        self._thread_nodes = threads.nodes
        self._near_node = near_node
        found = read_nodes() if nodes is None else nodes
        self.ledgers = node_ledgers(host, found)
        #: Those with memory, where they are several.
        self.nodes = [node for node in found if node.id in self.ledgers]
        #: Measured only where there is a node without CPUs, which could be faster or slower.
        self.bytes_per_s: Mapping[int, float] = {}
        if not all(node.has_cpus for node in self.nodes):
            self.bytes_per_s = (measure or measure_nodes)(self.nodes, threads.num_threads)

    @property
    def is_filled(self) -> bool:
        """Whether weights are laid on the nodes one behind the other: near the accelerator, or
        first on a faster memory. Else each part lies beside its threads."""
        if not self.nodes or self._thread_nodes:
            return False
        order = memory_order(self.nodes, None, self.bytes_per_s)
        return self._near_node is not None or not order[0].has_cpus

    def plan(self, weight_bytes: int) -> list[tuple[int, int]]:
        """(node, bytes), see ``plan_host_memory``; empty where the system chooses."""
        if not self.is_filled and not self._thread_nodes:
            return []
        return plan_host_memory(
            self.nodes,
            self._near_node,
            weight_bytes,
            thread_nodes=self._thread_nodes,
            bytes_per_s=self.bytes_per_s,
        )

    def notes(self, weight_bytes: int) -> list[str]:
        """Sentences on what is not where it is wanted."""
        parts = self.plan(weight_bytes)
        if not parts:
            return []
        return host_memory_notes(parts, self.nodes, self._near_node, weight_bytes)

    def reserve(self, account: str, name: str, num_bytes: int) -> list[tuple[Ledger, Reservation]]:
        """Reserve ``num_bytes`` where :meth:`plan` has them; raises OutOfMemory."""
        parts = self.plan(num_bytes)
        return reserve_on_nodes(self._host, self.ledgers, account, name, num_bytes, parts)

    def describe(self) -> list[str]:
        """A line for each memory at start-up, where there are several."""
        used = {number: ledger.used_bytes for number, ledger in self.ledgers.items()}
        return describe_nodes(self.nodes, self.bytes_per_s, used)
