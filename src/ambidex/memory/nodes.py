"""The NUMA nodes of the host as memories, and on which of them weights go: arithmetic, no torch.

There is always one copy of a weight, on one node or cut over several. A node without CPUs (memory
behind CXL, or HBM beside the cores) is a memory like any other, which is used last, unless it was
measured to be faster. All paths are under ``root``, so that a test can give a made-up machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ambidex.cgroups import read_text
from ambidex.memory.ledger import Ledger, Reservation, format_bytes
from ambidex.sysfs import format_cpus, node_distances, node_folders, parse_cpus, status_list

#: What the system writes for a node that cannot be reached.
_UNREACHABLE = 255

#: Of ``meminfo``: what can be had now. File pages are dropped for whoever needs memory.
_FREE_FIELDS = ("MemFree:", "Active(file):", "Inactive(file):")


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """One memory of the host."""

    id: int
    #: All CPUs near it that are online, whether or not this process may use them.
    cpus: tuple[int, ...]
    total_bytes: int
    #: Free, or held by file pages, at the time of reading.
    free_bytes: int
    #: Of every node from this one, in the system's units (10 is itself); empty: not told.
    distances: Mapping[int, int] = field(default_factory=dict)

    @property
    def has_cpus(self) -> bool:
        return bool(self.cpus)

    @property
    def name(self) -> str:
        """As ledgers and start-up call it."""
        return f"node{self.id}" if self.has_cpus else f"node{self.id} (no CPUs)"


def read_nodes(root: Path = Path("/"), excluded: Collection[int] = ()) -> list[MemoryNode]:
    """The nodes that this process may take memory of, ascending; empty where the system tells of
    none. ``excluded``: nodes that are an accelerator's own memory.

    A control group (cpuset.mems) can forbid some.
    """
    allowed = status_list(root, "Mems_allowed_list")
    nodes = []
    for number, folder in node_folders(root).items():
        if number in excluded or (allowed and number not in allowed):
            continue
        sizes = _meminfo(read_text(folder / "meminfo") or "")
        nodes.append(
            MemoryNode(
                number,
                parse_cpus(read_text(folder / "cpulist") or "") or (),
                sizes.get("MemTotal:", 0),
                sum(sizes.get(name, 0) for name in _FREE_FIELDS),
                node_distances(root, number),
            )
        )
    return nodes


def _meminfo(text: str) -> dict[str, int]:
    """``Node 0 MemTotal:  16318400 kB``: bytes by field."""
    lines = [line.split() for line in text.splitlines()]
    return {
        words[2]: int(words[3]) * 1024
        for words in lines
        if len(words) == 5 and words[3].isdigit() and words[4] == "kB"
    }


def memory_order(
    nodes: Sequence[MemoryNode],
    near_node: int | None,
    bytes_per_s: Mapping[int, float] | None = None,
) -> list[MemoryNode]:
    """The nodes in the order in which host weights fill them.

    Nodes with CPUs from ``near_node`` on, then those without. One without CPUs comes first where
    ``bytes_per_s``, the measured bandwidth by node, has it faster than every node with CPUs; a
    bandwidth that is not known proves nothing.
    """
    known = bytes_per_s or {}
    others = [known.get(node.id) for node in nodes if node.has_cpus and node.total_bytes]

    def is_faster(node: MemoryNode) -> bool:
        own = known.get(node.id)
        return own is not None and all(other is not None and own > other for other in others)

    def rank(node: MemoryNode) -> tuple[int, bool, int, int]:
        group = 1 if node.has_cpus else 0 if is_faster(node) else 2
        distance = 0 if near_node is None else node.distances.get(near_node, _UNREACHABLE)
        return group, node.id != near_node, distance, node.id

    return sorted((node for node in nodes if node.total_bytes), key=rank)


def plan_host_memory(
    nodes: Sequence[MemoryNode],
    near_node: int | None,
    weight_bytes: int,
    *,
    thread_nodes: Sequence[int] = (),
    bytes_per_s: Mapping[int, float] | None = None,
) -> list[tuple[int, int]]:
    """(node, bytes) for ``weight_bytes`` of host weights, in the order in which they are filled.

    ``near_node`` is the accelerator's; ``thread_nodes`` the node of each thread where they are on
    several (``ThreadPlan.nodes``), which then get the part that they read, each as far as it has
    room. What has no room goes on by :func:`memory_order`. The sum is less than ``weight_bytes``
    only where all nodes together have less free.
    """
    free = {node.id: node.free_bytes for node in nodes}
    placed: dict[int, int] = {}

    def take(node: int, wanted: int) -> None:
        taken = min(wanted, free.get(node, 0))
        if taken > 0:
            free[node] -= taken
            placed[node] = placed.get(node, 0) + taken

    count = len(thread_nodes) if len(set(thread_nodes)) > 1 else 0
    for thread in range(count):
        share = weight_bytes * (thread + 1) // count - weight_bytes * thread // count
        take(thread_nodes[thread], share)
    for node in memory_order(nodes, near_node, bytes_per_s):
        take(node.id, weight_bytes - sum(placed.values()))
    return list(placed.items())


def host_memory_notes(
    parts: Sequence[tuple[int, int]],
    nodes: Sequence[MemoryNode],
    near_node: int | None,
    weight_bytes: int,
) -> list[str]:
    """Sentences on what ``plan_host_memory`` could not put where it is wanted."""
    by_id = {node.id: node for node in nodes}
    placed = dict(parts)
    total = format_bytes(weight_bytes)
    far = [(by_id[node], size) for node, size in parts if node != near_node]
    listed = ", ".join(f"{format_bytes(size)} on {node.name}" for node, size in far)
    full = {node.id for node in nodes if placed.get(node.id, 0) == node.free_bytes}
    notes = []
    if near_node is None:
        if any(not node.has_cpus for node, _ in far) and all(
            node.id in full for node in nodes if node.has_cpus
        ):
            notes.append(
                f"{total} of host weights do not fit the NUMA nodes that have CPUs: {listed}. "
                "Free memory, or choose a smaller model, if they are read too slowly."
            )
    elif near_node not in by_id:
        notes.append(
            f"This process may use no memory of NUMA node {near_node}, the accelerator's, so its "
            f"host weights go elsewhere: {listed}. Allow that node (in a container, "
            "--cpuset-mems) for the shortest way."
        )
    elif far and near_node in full:
        notes.append(
            f"{total} of host weights do not fit NUMA node {near_node}, the accelerator's, which "
            f"has {format_bytes(by_id[near_node].free_bytes)} free. The rest goes on: {listed}. "
            "Free memory on that node, or offload less."
        )
    unplaced = weight_bytes - sum(placed.values())
    if unplaced > 0:
        notes.append(
            f"{format_bytes(unplaced)} of {total} of host weights are more than the NUMA nodes "
            "report as free; the system finds a place for them. Free memory, or choose a smaller "
            "model."
        )
    return notes


def node_ledgers(host: Ledger, nodes: Sequence[MemoryNode]) -> dict[int, Ledger]:
    """A ledger for each memory of the host, by node, whose reservations count in ``host`` too;
    none where there is one memory, which is the host's own."""
    memories = [node for node in nodes if node.total_bytes]
    if len(memories) < 2:
        return {}
    return {node.id: host.child(node.name, node.free_bytes) for node in memories}


def reserve_on_nodes(
    host: Ledger,
    ledgers: Mapping[int, Ledger],
    account: str,
    name: str,
    num_bytes: int,
    parts: Sequence[tuple[int, int]],
) -> list[tuple[Ledger, Reservation]]:
    """Reserve ``num_bytes``: ``parts`` of it in their nodes' ledgers, the rest in the host's own.

    Raises :class:`OutOfMemory` and then holds nothing.
    """
    wanted = [(ledgers[node], size) for node, size in parts if node in ledgers]
    rest = num_bytes - sum(size for _, size in wanted)
    assert rest >= 0, f"{parts} are more than {num_bytes} bytes"
    held: list[tuple[Ledger, Reservation]] = []
    try:
        for ledger, size in [*wanted, (host, rest)]:
            if size:
                held.append((ledger, ledger.reserve(account, name, size)))
    except BaseException:
        for ledger, reservation in held:
            ledger.release(reservation)
        raise
    return held


def describe_nodes(
    nodes: Sequence[MemoryNode],
    bytes_per_s: Mapping[int, float] | None = None,
    used_bytes: Mapping[int, int] | None = None,
) -> list[str]:
    """A line for each memory at start-up, where there are several. ``used_bytes``: reserved, by
    node."""
    memories = [node for node in nodes if node.total_bytes]
    lines = []
    for node in memories if len(memories) > 1 else ():
        speed = (bytes_per_s or {}).get(node.id)
        used = (used_bytes or {}).get(node.id, 0)
        lines.append(
            f"node{node.id}: "
            + (f"CPUs {format_cpus(node.cpus)}, " if node.has_cpus else "no CPUs, ")
            + f"{format_bytes(node.free_bytes)} of {format_bytes(node.total_bytes)} free"
            + (f", {format_bytes(used)} taken" if used else "")
            + ("" if speed is None else f", read at {speed / 1e9:.1f} GB/s")
        )
    return lines
