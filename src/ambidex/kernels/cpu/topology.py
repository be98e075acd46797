"""Which of the machine's CPUs this process may use, and how many threads compute where.

All paths are under ``root``, so that a test can give a made-up machine. A *CPU* is what the system
numbers; a *core* has one of them, or several (siblings, SMT).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ambidex.cgroups import V2_MOUNTS, cgroup_path, folders, read_int, read_text
from ambidex.errors import OptionError
from ambidex.sysfs import format_cpus, node_distances, node_folders, parse_cpus, status_list

#: Where the CPU controller of cgroup v1 is mounted.
_V1_MOUNTS = ("sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpu")


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node: the CPUs near it that this process may use (maybe none), and how far others
    are. Its memory: ``memory/nodes.py``."""

    number: int
    cpus: tuple[int, ...]
    #: By number, in the system's units; empty where it does not say.
    distances: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topology:
    """What this process has of the machine."""

    #: CPUs in its affinity mask that are online, ascending.
    cpus: tuple[int, ...]
    #: The CPU time a second that its control groups allow, in CPUs; None: no limit.
    quota: float | None
    #: Those CPUs by physical core, by the core's first CPU.
    cores: tuple[tuple[int, ...], ...]
    #: All nodes, those without CPUs too; one where the system tells of none.
    nodes: tuple[Node, ...]

    def node_of(self, cpu: int) -> int:
        """The number of the node that ``cpu`` is near."""
        return next((node.number for node in self.nodes if cpu in node.cpus), 0)

    def nearest_first(self, number: int) -> list[Node]:
        """The nodes with CPUs, from the one that is nearest to node ``number``."""

        def distance(node: Node) -> tuple[bool, int, int]:
            # 255 is the system's word for unreachable.
            return node.number != number, node.distances.get(number, 255), node.number

        return sorted((node for node in self.nodes if node.cpus), key=distance)


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """The threads of one lane. Thread i is worker i of its group."""

    #: Where each thread is pinned; empty: the system places them.
    cpus: tuple[int, ...]
    num_threads: int
    #: The node of each pinned thread, those of one node side by side, where they are on several;
    #: else empty.
    nodes: tuple[int, ...] = ()
    #: Lines for the start: what was asked for and is not done.
    notes: tuple[str, ...] = ()
    #: A CPU for each thread, for :func:`cut`; empty where threads must not be pinned.
    seats: tuple[int, ...] = ()
    #: The CPUs among which the system places threads that are not pinned; empty: all.
    within: tuple[int, ...] = ()


def read_topology(root: Path = Path("/")) -> Topology:
    """Reads the affinity mask, the control groups and ``/sys`` under ``root``."""
    cpus = _allowed_cpus(root)
    cores = []
    seen: set[int] = set()
    for cpu in cpus:
        if cpu in seen:
            continue
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = parse_cpus(read_text(folder / "thread_siblings_list") or "") or (cpu,)
        core = tuple(sorted({cpu, *siblings}.intersection(cpus) - seen))
        seen.update(core)
        cores.append(core)
    return Topology(cpus, _quota(root), tuple(cores), _nodes(root, cpus))


def plan_threads(
    cpu_threads: int | None,
    cpu_bind: str | None,
    environment: Mapping[str, str],
    topology: Topology | None = None,
    near_node: int | None = None,
) -> ThreadPlan:
    """How many threads compute, and where they are pinned.

    ``cpu_bind`` is what ``--cpu-bind`` or VLLM_CPU_OMP_THREADS_BIND says: ``auto``, ``none`` (or
    ``nobind``), CPUs ``0-15`` or ``0,2,4``, nodes ``numa:0`` or ``numa:0,1``, or vLLM's
    ``0-31|32-63``, a part for each rank. Where an argument is None ``environment`` is asked.
    ``near_node`` is the accelerator's node, where it has one: with ``auto`` that node's cores
    compute, others only where more threads are asked for, from the nearest node on.
    Raises :class:`OptionError` for CPUs and nodes that this process does not have.
    """
    found = topology or read_topology()
    notes: list[str] = []
    if cpu_threads is None:
        # OpenMP writes one number a nesting level; the first counts.
        text = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        cpu_threads = int(text) if is_number and int(text) > 0 else None
    bind = cpu_bind or environment.get("VLLM_CPU_OMP_THREADS_BIND", "") or "auto"
    bind = _first_rank(bind.strip().lower(), notes)
    if bind == "auto" and near_node is not None and len(found.nodes) > 1:
        return _plan_near(cpu_threads, near_node, found, notes)
    if bind in ("auto", "none", "nobind"):
        return _plan_free(cpu_threads, bind == "auto", found, notes)
    if bind.startswith("numa:"):
        named = _cpus_of_nodes(bind, cpu_threads, found)
    else:
        named = _cpus_of_list(bind, found)
    if cpu_threads is not None and cpu_threads > len(named):
        notes.append(
            f"{cpu_threads} threads were asked for; the {len(named)} CPUs of --cpu-bind {bind} "
            "get one each."
        )
    chosen = named[:cpu_threads]
    if found.quota is not None and len(chosen) > math.ceil(found.quota):
        notes.append(
            f"{len(chosen)} threads are bound by --cpu-bind {bind}, and the control group allows "
            f"the time of {found.quota:g} CPUs: they will wait for each other. Leave it out for "
            f"{math.ceil(found.quota)} threads."
        )
    return _pinned(chosen, found, notes)


def cut(plan: ThreadPlan, shares: Sequence[float]) -> list[ThreadPlan]:
    """The plan's threads for several groups that run at once, in proportion to ``shares``, at
    least one each; no core is in two of them.

    Raises :class:`OptionError` where there are fewer threads than groups.
    """
    if len(shares) > plan.num_threads:
        raise OptionError(
            f"{len(shares)} groups of threads are needed, and there are {plan.num_threads} "
            f"threads. Give --cpu-threads {len(shares)} or more."
        )
    total = sum(shares)
    if not shares or min(shares) < 0 or not total > 0:
        raise ValueError(f"shares {list(shares)} are not parts of something")
    counts = [1] * len(shares)
    for _ in range(plan.num_threads - len(shares)):
        # The next thread goes where most is missing.
        missing = [plan.num_threads * s / total - n for s, n in zip(shares, counts, strict=True)]
        counts[missing.index(max(missing))] += 1
    parts = []
    first = 0
    for count in counts:
        end = first + count
        # Side by side, groups are pinned even where one alone would not be: the system would
        # else put threads of two groups on one core while both wait for their slowest.
        parts.append(
            replace(
                plan,
                cpus=plan.seats[first:end],
                num_threads=count,
                nodes=_several(plan.nodes[first:end]),
                notes=(),
                seats=plan.seats[first:end],
            )
        )
        first = end
    return parts


def _plan_free(
    cpu_threads: int | None, may_pin: bool, found: Topology, notes: list[str]
) -> ThreadPlan:
    """No CPUs are named: one thread a core, and no more than the quota."""
    cores = len(found.cores)
    count = _count(cpu_threads, cores, found, notes)
    if not may_pin or _quota_cpus(found) < cores or count > cores:
        return ThreadPlan((), count, notes=tuple(notes))
    seats = _spread([core[0] for core in found.cores], count, found)
    # On one node a pinned thread was never faster than one that the system places, and where
    # other programs ran on the same two cores it took a third longer: it cannot go where there is
    # room. On several nodes it must stay where its share of the weights lies, which is only worth
    # it when no core is left free for others to push threads to.
    if count == cores and len({found.node_of(cpu) for cpu in seats}) > 1:
        return _pinned(seats, found, notes)
    return ThreadPlan((), count, notes=tuple(notes), seats=tuple(seats))


def _plan_near(
    cpu_threads: int | None, near_node: int, found: Topology, notes: list[str]
) -> ThreadPlan:
    """As many threads as the accelerator's node has cores, kept on that node but not pinned to
    single CPUs, for the reason above; more than that are pinned, each beside its share."""
    if near_node not in {node.number for node in found.nodes}:
        notes.append(
            f"The accelerator's NUMA node {near_node} is not one of this machine's "
            f"({format_cpus(node.number for node in found.nodes)}): threads run on all of them."
        )
        return _plan_free(cpu_threads, True, found, notes)
    nodes = found.nearest_first(near_node)
    if not nodes or nodes[0].number != near_node:
        where = f"on node {nodes[0].number}, the nearest" if nodes else "where there is room"
        notes.append(
            f"None of the {len(found.cpus)} CPUs that this process may use is on the accelerator's "
            f"NUMA node {near_node}: its threads run {where}. If node {near_node} has CPUs, "
            "allow them (in a container, --cpuset-cpus)."
        )
    if len(nodes) < 2:
        return _plan_free(cpu_threads, True, found, notes)
    near = nodes[0]
    cores = [cpu for node in nodes for cpu in _first_cpus(found, node.cpus)]
    num_near = len(_first_cpus(found, near.cpus))
    count = _count(cpu_threads, num_near, found, notes)
    if cpu_threads is None and count == num_near < min(len(cores), _quota_cpus(found)):
        whose = "the accelerator's NUMA node" if near.number == near_node else "NUMA node"
        notes.append(
            f"{count} of {len(cores)} cores compute, those of {whose} {near.number}. Give "
            f"--cpu-threads {len(cores)} to use the others too."
        )
    may_pin = _quota_cpus(found) >= len(found.cores)
    if count <= num_near:
        seats = tuple(cores[:count]) if may_pin else ()
        return ThreadPlan((), count, notes=tuple(notes), seats=seats, within=near.cpus)
    if count > len(cores) or not may_pin:
        return ThreadPlan((), count, notes=tuple(notes))
    # The first thread, which gives the accelerator its work, is one of the near node's.
    return _pinned(cores[:count], found, notes, [node.number for node in nodes])


def _first_cpus(found: Topology, cpus: Sequence[int]) -> list[int]:
    """One of ``cpus`` for each core that has some of them."""
    near = set(cpus)
    return [next(cpu for cpu in core if cpu in near) for core in found.cores if near & {*core}]


def _quota_cpus(found: Topology) -> float:
    return math.inf if found.quota is None else math.ceil(found.quota)


def _count(cpu_threads: int | None, cores: int, found: Topology, notes: list[str]) -> int:
    """The threads that were asked for, or one for each of ``cores`` within the quota."""
    usable = int(min(_quota_cpus(found), len(found.cpus)))
    standard = max(1, min(cores, usable))
    if cpu_threads is None or cpu_threads <= usable:
        return cpu_threads or standard
    notes.append(
        f"{cpu_threads} threads were asked for and this process may use {usable} CPUs: they will "
        f"wait for each other. Leave --cpu-threads and OMP_NUM_THREADS out for {standard} threads."
    )
    return cpu_threads


def _pinned(
    cpus: Sequence[int], found: Topology, notes: list[str], order: Sequence[int] | None = None
) -> ThreadPlan:
    """``order``: of the nodes; None: by number."""
    # By node, so that each node's threads have neighbouring shares of a weight.
    rank = {number: place for place, number in enumerate(order or ())}
    seats = tuple(sorted(cpus, key=lambda cpu: rank.get(found.node_of(cpu), found.node_of(cpu))))
    nodes = tuple(found.node_of(cpu) for cpu in seats)
    return ThreadPlan(seats, len(seats), _several(nodes), tuple(notes), seats)


def _several(nodes: tuple[int, ...]) -> tuple[int, ...]:
    return nodes if len(set(nodes)) > 1 else ()


def _spread(cpus: Sequence[int], count: int, found: Topology) -> list[int]:
    """``count`` of ``cpus``, as evenly from their nodes as can be, by node."""
    queues: dict[int, list[int]] = {}
    for cpu in cpus:
        queues.setdefault(found.node_of(cpu), []).append(cpu)
    chosen: list[int] = []
    while len(chosen) < count and any(queues.values()):
        for queue in queues.values():
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return sorted(chosen, key=lambda cpu: (found.node_of(cpu), cpus.index(cpu)))


def _first_rank(bind: str, notes: list[str]) -> str:
    ranks = bind.split("|")
    if len(ranks) > 1:
        notes.append(
            f"--cpu-bind {bind} is for {len(ranks)} ranks; the one rank here takes {ranks[0]}."
        )
    return ranks[0].strip()


def _cpus_of_list(bind: str, found: Topology) -> Sequence[int]:
    cpus = parse_cpus(bind)
    if cpus is None:
        raise OptionError(
            f"--cpu-bind must be auto, none, numa:0 or CPUs such as 0-15 or 0,2,4, not "
            f"'{bind:.200}'."
        )
    absent = [cpu for cpu in cpus if cpu not in found.cpus]
    if absent:
        raise OptionError(
            f"--cpu-bind {bind}: CPU {format_cpus(absent)} is not among the {len(found.cpus)} "
            f"that this process may use ({format_cpus(found.cpus)}). Name some of these, or leave "
            "it out."
        )
    return cpus


def _cpus_of_nodes(bind: str, cpu_threads: int | None, found: Topology) -> Sequence[int]:
    """A CPU of every core of the named nodes, and their siblings behind if threads need them."""
    numbers = parse_cpus(bind.removeprefix("numa:"))
    if numbers is None:
        raise OptionError(f"--cpu-bind names nodes as in numa:0 or numa:0,1, not '{bind:.200}'.")
    nodes = {node.number: node for node in found.nodes}
    for number in numbers:
        if number not in nodes:
            raise OptionError(
                f"--cpu-bind {bind}: there is no NUMA node {number}; this machine has "
                f"{format_cpus(nodes)}."
            )
        if not nodes[number].cpus:
            raise OptionError(
                f"--cpu-bind {bind}: node {number} has no CPU that this process may use; "
                f"{_with_cpus(found)}."
            )
    near = [cpu for number in numbers for cpu in nodes[number].cpus]
    firsts = _first_cpus(found, near)
    others = [cpu for cpu in found.cpus if cpu in near and cpu not in firsts]
    if cpu_threads is None or cpu_threads == len(firsts):
        return firsts
    if cpu_threads < len(firsts):
        return _spread(firsts, cpu_threads, found)
    return firsts + others


def _with_cpus(found: Topology) -> str:
    return "; ".join(
        f"node {node.number} has {format_cpus(node.cpus)}" for node in found.nodes if node.cpus
    )


def _allowed_cpus(root: Path) -> tuple[int, ...]:
    allowed = status_list(root, "Cpus_allowed_list")
    if allowed:
        online = parse_cpus(read_text(root / "sys/devices/system/cpu/online") or "")
        return tuple(sorted(set(allowed).intersection(online or allowed))) or allowed
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))  # macOS


def _quota(root: Path) -> float | None:
    """The least that a control group of this process, or one above it, allows."""
    limits = []
    path = cgroup_path(root, controller="")
    if path is not None:
        for mount in V2_MOUNTS:
            for folder in folders(root / mount, path):
                words = (read_text(folder / "cpu.max") or "").split()
                if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                    limits.append((int(words[0]), int(words[1])))
    path = cgroup_path(root, controller="cpu")
    if path is not None:
        for mount in _V1_MOUNTS:
            for folder in folders(root / mount, path):
                quota_us = read_int(folder / "cpu.cfs_quota_us")  # -1, no limit, is no number
                period_us = read_int(folder / "cpu.cfs_period_us")
                if quota_us is not None and period_us is not None:
                    limits.append((quota_us, period_us))
    return min((quota / period for quota, period in limits if quota and period), default=None)


def _nodes(root: Path, cpus: tuple[int, ...]) -> tuple[Node, ...]:
    nodes = []
    for number, folder in node_folders(root).items():
        near = parse_cpus(read_text(folder / "cpulist") or "") or ()
        own = tuple(cpu for cpu in cpus if cpu in near)
        nodes.append(Node(number, own, node_distances(root, number)))
    return tuple(nodes) or (Node(0, cpus),)
