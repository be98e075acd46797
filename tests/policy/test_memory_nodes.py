"""The host's NUMA nodes as memories: what they have, where weights go, and their ledgers."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.device.host_nodes import HostNodes
from ambidex.device.node_probe import measure_nodes, read_bandwidth
from ambidex.errors import OutOfMemory
from ambidex.kernels.cpu.topology import ThreadPlan
from ambidex.memory.host import host_capacity_bytes, host_limits
from ambidex.memory.ledger import Ledger
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

GiB = 1 << 30
MiB = 1 << 20


def machine(
    root: Path,
    nodes: Mapping[int, tuple[str, int, int, str]],
    files: Mapping[str, str] | None = None,
) -> Path:
    """``nodes``: CPUs, GiB in all, GiB free (a half of it as file pages), distances."""
    texts = {
        "sys/devices/system/node/online": ",".join(map(str, nodes)) + "\n",
        "proc/meminfo": f"MemAvailable: {600 * MiB} kB\n",
    }
    for number, (cpus, total, free, distances) in nodes.items():
        folder = f"sys/devices/system/node/node{number}"
        fields = {
            "MemTotal": total * MiB,
            "MemFree": free * MiB // 2,
            "MemUsed": (total - free) * MiB,
            "Active(anon)": 77,
            "Active(file)": free * MiB // 4,
            "Inactive(file)": free * MiB // 4,
        }
        lines = [f"Node {number} {name}: {size:15} kB" for name, size in fields.items()]
        texts[f"{folder}/meminfo"] = "\n".join([*lines, f"Node {number} HugePages_Total:  0", ""])
        texts[f"{folder}/cpulist"] = f"{cpus}\n"
        texts[f"{folder}/distance"] = f"{distances}\n"
    for name, text in {**texts, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


ONE = {0: ("0-7", 64, 60, "10")}
TWO = {0: ("0-3", 64, 40, "10 21"), 1: ("4-7", 64, 20, "21 10")}
#: Two sockets, and memory behind CXL at the first.
CXL = {
    0: ("0-3", 64, 40, "10 21 14"),
    1: ("4-7", 64, 20, "21 10 24"),
    2: ("", 256, 256, "14 24 10"),
}


def nodes_of(root: Path, nodes: Mapping[int, tuple[str, int, int, str]]) -> list[MemoryNode]:
    return read_nodes(machine(root, nodes))


# --- what there is -----------------------------------------------------------------------------


def test_one_node(tmp_path: Path) -> None:
    (node,) = nodes_of(tmp_path, ONE)
    assert (node.id, node.name, node.cpus, node.has_cpus) == (0, "node0", tuple(range(8)), True)
    assert (node.total_bytes, node.free_bytes) == (64 * GiB, 60 * GiB)
    assert node.distances == {0: 10}
    assert describe_nodes([node]) == []


def test_nodes_with_and_without_cpus(tmp_path: Path) -> None:
    found = nodes_of(tmp_path, CXL)
    assert [node.name for node in found] == ["node0", "node1", "node2 (no CPUs)"]
    assert [node.has_cpus for node in found] == [True, True, False]
    assert [node.free_bytes for node in found] == [40 * GiB, 20 * GiB, 256 * GiB]
    assert found[1].distances == {0: 21, 1: 10, 2: 24}
    assert describe_nodes(found, {2: 31.25e9}, {0: 3 * GiB}) == [
        "node0: CPUs 0-3, 40.00 GiB of 64.00 GiB free, 3.00 GiB taken",
        "node1: CPUs 4-7, 20.00 GiB of 64.00 GiB free",
        "node2: no CPUs, 256.00 GiB of 256.00 GiB free, read at 31.2 GB/s",
    ]


def test_numbers_with_gaps(tmp_path: Path) -> None:
    """A row of distances has a number for each node that is online, not for each number."""
    found = nodes_of(tmp_path, {0: ("0", 1, 1, "10 40"), 8: ("1", 1, 1, "40 10")})
    assert [(node.id, node.distances) for node in found] == [
        (0, {0: 10, 8: 40}),
        (8, {0: 40, 8: 10}),
    ]


def test_nodes_that_are_forbidden_or_an_accelerators(tmp_path: Path) -> None:
    root = machine(tmp_path, CXL, {"proc/self/status": "Mems_allowed_list:\t1-2\n"})
    assert [node.id for node in read_nodes(root)] == [1, 2]
    assert read_nodes(root)[0].distances == {0: 21, 1: 10, 2: 24}
    assert [node.id for node in read_nodes(root, excluded=[2])] == [1]


def test_damaged_files_tell_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: ("0", 1, 1, "10 x"), 1: ("soon", 1, 1, "10")})
    (root / "sys/devices/system/node/node0/meminfo").write_text("Node 0 MemTotal: much kB\n\nNode")
    first, second = read_nodes(root)
    assert (first.total_bytes, first.free_bytes, first.distances) == (0, 0, {})
    assert (second.cpus, second.distances) == ((), {})
    assert read_nodes(tmp_path / "nothing") == []


def test_this_machine() -> None:
    assert all(0 < node.free_bytes <= node.total_bytes for node in read_nodes() if node.has_cpus)


# --- the host's capacity -----------------------------------------------------------------------


def test_several_nodes_leave_the_hosts_capacity(tmp_path: Path) -> None:
    root = machine(tmp_path, CXL, {"proc/self/status": "Mems_allowed_list:\t0-2\n"})
    assert host_capacity_bytes(root) == 600 * GiB
    assert [limit.source for limit in host_limits(root)] == ["MemAvailable"]


def test_forbidden_nodes_do_not_count(tmp_path: Path) -> None:
    root = machine(tmp_path, CXL, {"proc/self/status": "Mems_allowed_list:\t0-1\n"})
    assert host_capacity_bytes(root) == 60 * GiB
    files = {
        "proc/self/status": "Mems_allowed_list:\t0-1\n",
        "proc/self/cgroup": "0::/me\n",
        "sys/fs/cgroup/me/memory.max": f"{8 * GiB}\n",
        "sys/fs/cgroup/me/memory.current": f"{GiB}\n",
    }
    assert host_capacity_bytes(machine(tmp_path, CXL, files)) == 7 * GiB


# --- where weights go --------------------------------------------------------------------------


def test_weights_that_fit_are_near_the_accelerator(tmp_path: Path) -> None:
    found = nodes_of(tmp_path, TWO)
    parts = plan_host_memory(found, 1, 20 * GiB)
    assert parts == [(1, 20 * GiB)]
    assert host_memory_notes(parts, found, 1, 20 * GiB) == []
    assert plan_host_memory(found, 0, 20 * GiB) == [(0, 20 * GiB)]
    assert plan_host_memory(found, 1, 0) == []


def test_what_does_not_fit_goes_on_to_the_nearest_node(tmp_path: Path) -> None:
    found = nodes_of(
        tmp_path,
        {
            0: ("0", 8, 8, "10 32 32 32"),
            1: ("1", 8, 8, "32 10 32 21"),
            2: ("2", 8, 8, "32 32 10 12"),
            3: ("3", 8, 8, "32 21 12 10"),
        },
    )
    parts = plan_host_memory(found, 3, 19 * GiB)
    assert parts == [(3, 8 * GiB), (2, 8 * GiB), (1, 3 * GiB)]
    (note,) = host_memory_notes(parts, found, 3, 19 * GiB)
    assert note.startswith(
        "19.00 GiB of host weights do not fit NUMA node 3, the accelerator's, which has 8.00 GiB "
        "free. The rest goes on: 8.00 GiB on node2, 3.00 GiB on node1. Free memory"
    )


def test_memory_behind_cxl_is_the_last(tmp_path: Path) -> None:
    found = nodes_of(tmp_path, CXL)
    assert [node.id for node in memory_order(found, 0)] == [0, 1, 2], "though node 2 is nearer"
    assert [node.id for node in memory_order(found, 1)] == [1, 0, 2]
    parts = plan_host_memory(found, 0, 100 * GiB)
    assert parts == [(0, 40 * GiB), (1, 20 * GiB), (2, 40 * GiB)]
    (note,) = host_memory_notes(parts, found, 0, 100 * GiB)
    assert "20.00 GiB on node1, 40.00 GiB on node2 (no CPUs)" in note
    (note,) = host_memory_notes(parts, found, None, 100 * GiB)
    assert "do not fit the NUMA nodes that have CPUs" in note


@pytest.mark.parametrize(
    ("bytes_per_s", "order"),
    [
        ({0: 100e9, 1: 90e9, 2: 30e9}, [1, 0, 2]),
        ({0: 100e9, 1: 90e9, 2: 95e9}, [1, 0, 2]),
        ({0: 100e9, 1: 90e9, 2: 400e9}, [2, 1, 0]),
        # What is not known proves nothing.
        ({0: 100e9, 2: 400e9}, [1, 0, 2]),
        ({0: 100e9, 1: 90e9}, [1, 0, 2]),
    ],
)
def test_a_faster_memory_without_cpus_is_the_first(
    tmp_path: Path, bytes_per_s: dict[int, float], order: list[int]
) -> None:
    found = nodes_of(tmp_path, CXL)
    assert [node.id for node in memory_order(found, 1, bytes_per_s)] == order
    parts = plan_host_memory(found, 1, 10 * GiB, bytes_per_s=bytes_per_s)
    assert parts == [(order[0], 10 * GiB)]
    assert host_memory_notes(parts, found, 1, 10 * GiB) == []


def test_threads_of_several_nodes_have_their_part_each(tmp_path: Path) -> None:
    found = nodes_of(tmp_path, CXL)
    threads = (1, 1, 1, 0)
    parts = plan_host_memory(found, 1, 16 * GiB, thread_nodes=threads)
    assert parts == [(1, 12 * GiB), (0, 4 * GiB)]
    # Node 1 has 20 GiB: what of its 45 does not fit goes to node 0, then behind CXL.
    parts = plan_host_memory(found, 1, 60 * GiB, thread_nodes=threads)
    assert parts == [(1, 20 * GiB), (0, 40 * GiB)]
    assert dict(plan_host_memory(found, 1, 61 * GiB, thread_nodes=threads))[2] == GiB


def test_more_than_there_is(tmp_path: Path) -> None:
    found = nodes_of(tmp_path, TWO)
    parts = plan_host_memory(found, 1, 62 * GiB)
    assert parts == [(1, 20 * GiB), (0, 40 * GiB)]
    assert (
        "2.00 GiB of 62.00 GiB of host weights" in host_memory_notes(parts, found, 1, 62 * GiB)[1]
    )


def test_a_node_whose_memory_is_forbidden(tmp_path: Path) -> None:
    root = machine(tmp_path, CXL, {"proc/self/status": "Mems_allowed_list:\t0,2\n"})
    found = read_nodes(root)
    parts = plan_host_memory(found, 1, 50 * GiB)
    assert parts == [(0, 40 * GiB), (2, 10 * GiB)]
    (note,) = host_memory_notes(parts, found, 1, 50 * GiB)
    assert "no memory of NUMA node 1" in note and "--cpuset-mems" in note


@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 50)), min_size=1, max_size=5),
    near=st.none() | st.integers(0, 5),
    weight_bytes=st.integers(0, 300),
    threads=st.lists(st.integers(0, 5), max_size=6),
    speeds=st.dictionaries(st.integers(0, 5), st.floats(1, 100)),
)
def test_there_is_always_one_copy(
    sizes: list[tuple[bool, int]],
    near: int | None,
    weight_bytes: int,
    threads: list[int],
    speeds: dict[int, float],
) -> None:
    nodes = [
        MemoryNode(number, (number,) if has_cpus else (), 64, free)
        for number, (has_cpus, free) in enumerate(sizes)
    ]
    parts = plan_host_memory(nodes, near, weight_bytes, thread_nodes=threads, bytes_per_s=speeds)
    assert len(dict(parts)) == len(parts)
    assert all(0 < size <= nodes[number].free_bytes for number, size in parts)
    total = sum(size for _, size in parts)
    assert total == min(weight_bytes, sum(node.free_bytes for node in nodes))
    host_memory_notes(parts, nodes, near, weight_bytes)


# --- ledgers -----------------------------------------------------------------------------------


def test_a_nodes_reservations_count_in_the_hosts(tmp_path: Path) -> None:
    host = Ledger("host", 100 * GiB)
    ledgers = node_ledgers(host, nodes_of(tmp_path, CXL))
    assert [ledger.name for ledger in host.children] == ["node0", "node1", "node2 (no CPUs)"]
    weights = ledgers[1].reserve("weights", "layers", 15 * GiB)
    assert (ledgers[1].free_bytes, host.used_bytes) == (5 * GiB, 15 * GiB)
    assert {row.account: row.num_bytes for row in host.table()}["weights"] == 15 * GiB
    with pytest.raises(OutOfMemory, match=r"node1: 6\.00 GiB wanted for layers"):
        ledgers[1].reserve("weights", "layers", 6 * GiB)
    host.reserve("kv_cache", "blocks", 80 * GiB)
    with pytest.raises(OutOfMemory, match=r"host: 6\.00 GiB wanted for layers"):
        ledgers[2].reserve("weights", "layers", 6 * GiB)
    assert ledgers[2].used_bytes == 0
    ledgers[1].release(weights)
    assert (ledgers[1].used_bytes, host.used_bytes) == (0, 80 * GiB)
    with pytest.raises(AssertionError, match="not reserved here"):
        ledgers[1].release(weights)


def test_one_memory_needs_no_ledger_of_its_own(tmp_path: Path) -> None:
    host = Ledger("host", GiB)
    assert node_ledgers(host, nodes_of(tmp_path, ONE)) == {}
    # A node without memory is none.
    assert node_ledgers(host, nodes_of(tmp_path, {**ONE, 1: ("8-15", 0, 0, "20")})) == {}
    assert host.children == ()


def test_giving_everything_back(tmp_path: Path) -> None:
    host = Ledger("host", 100 * GiB)
    ledgers = node_ledgers(host, nodes_of(tmp_path, TWO))
    for ledger in (host, *ledgers.values()):
        ledger.reserve("staging", "ring", 3)
    ledgers[0].release_all()
    assert (host.used_bytes, ledgers[0].used_bytes, ledgers[1].used_bytes) == (6, 0, 3)
    host.release_all()
    assert (host.used_bytes, ledgers[1].used_bytes) == (0, 0)
    assert host.reservations() == ledgers[1].reservations() == []


def test_a_plan_is_reserved_whole_or_not(tmp_path: Path) -> None:
    host = Ledger("host", 50 * GiB)
    found = nodes_of(tmp_path, TWO)
    ledgers = node_ledgers(host, found)
    parts = plan_host_memory(found, 1, 25 * GiB)
    held = reserve_on_nodes(host, ledgers, "weights", "weights", 26 * GiB, parts)
    assert [ledger.name for ledger, _ in held] == ["node1", "node0", "host"]
    assert [ledgers[number].used_bytes for number in (0, 1)] == [5 * GiB, 20 * GiB]
    assert host.used_bytes == 26 * GiB
    with pytest.raises(OutOfMemory, match="host: "):
        reserve_on_nodes(host, ledgers, "weights", "more", 26 * GiB, [(0, 20 * GiB)])
    assert (host.used_bytes, ledgers[0].used_bytes) == (26 * GiB, 5 * GiB)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.booleans()), max_size=30))
def test_a_parent_has_the_sum_of_its_children(steps: list[tuple[int, int, bool]]) -> None:
    host = Ledger("host", 120)
    ledgers = [host, host.child("node0", 60), host.child("node1", 90)]
    held: list[tuple[Ledger, object]] = []
    own = 0
    for which, size, releases in steps:
        ledger = ledgers[which]
        if releases and held:
            ledger, reservation = held.pop(size % len(held))
            ledger.release(reservation)  # type: ignore[arg-type]
            own -= reservation.num_bytes if ledger is host else 0  # type: ignore[attr-defined]
        elif size <= min(ledger.free_bytes, host.free_bytes):
            held.append((ledger, ledger.reserve("weights", "x", size)))
            own += size if ledger is host else 0
        else:
            with pytest.raises(OutOfMemory):
                ledger.reserve("weights", "x", size)
        assert host.used_bytes == own + ledgers[1].used_bytes + ledgers[2].used_bytes <= 120
        for each in ledgers:
            assert each.used_bytes == sum(row.num_bytes for row in each.table())


# --- in use ------------------------------------------------------------------------------------


class FakeMeasure:
    def __init__(self, bytes_per_s: Mapping[int, float]) -> None:
        self.bytes_per_s = bytes_per_s
        self.num_calls = 0

    def __call__(self, nodes: Sequence[MemoryNode], threads: int) -> Mapping[int, float]:
        self.num_calls += 1
        return self.bytes_per_s


def in_use(
    root: Path,
    nodes: Mapping[int, tuple[str, int, int, str]],
    *,
    near_node: int | None = None,
    thread_nodes: tuple[int, ...] = (),
    bytes_per_s: Mapping[int, float] | None = None,
) -> tuple[HostNodes, Ledger, FakeMeasure]:
    host = Ledger("host", 500 * GiB)
    measure = FakeMeasure(bytes_per_s or {})
    threads = ThreadPlan((), 4, thread_nodes)
    return HostNodes(host, threads, near_node, nodes_of(root, nodes), measure), host, measure


def test_one_memory_is_the_hosts(tmp_path: Path) -> None:
    used, host, measure = in_use(tmp_path, ONE, near_node=0)
    assert (used.nodes, used.describe(), used.plan(GiB), used.is_filled) == ([], [], [], False)
    used.reserve("weights", "weights", GiB)
    assert host.used_bytes == GiB
    assert measure.num_calls == 0


def test_without_an_accelerator_the_system_or_the_threads_choose(tmp_path: Path) -> None:
    used, host, measure = in_use(tmp_path, TWO)
    assert not used.is_filled and used.plan(GiB) == [] and used.notes(GiB) == []
    used.reserve("weights", "weights", GiB)
    assert host.used_bytes == GiB and all(not each.used_bytes for each in used.ledgers.values())
    used, host, measure = in_use(tmp_path, TWO, thread_nodes=(0, 0, 1, 1))
    assert not used.is_filled
    used.reserve("weights", "weights", 2 * GiB)
    assert [ledger.used_bytes for ledger in used.ledgers.values()] == [GiB, GiB]
    assert host.used_bytes == 2 * GiB
    assert used.describe()[0].endswith("free, 1.00 GiB taken")
    assert measure.num_calls == 0


def test_near_the_accelerator(tmp_path: Path) -> None:
    used, host, _ = in_use(tmp_path, TWO, near_node=1)
    assert used.is_filled
    assert used.plan(30 * GiB) == [(1, 20 * GiB), (0, 10 * GiB)]
    assert len(used.notes(30 * GiB)) == 1
    used.reserve("weights", "weights", 30 * GiB)
    assert used.ledgers[1].free_bytes == 0
    assert host.used_bytes == 30 * GiB


def test_a_memory_without_cpus_is_measured(tmp_path: Path) -> None:
    used, _, measure = in_use(tmp_path, CXL, bytes_per_s={0: 90e9, 1: 90e9, 2: 30e9})
    assert measure.num_calls == 1 and not used.is_filled
    assert "read at 30.0 GB/s" in used.describe()[2]
    used, _, _ = in_use(tmp_path, CXL, bytes_per_s={0: 90e9, 1: 90e9, 2: 800e9})
    assert used.is_filled and used.plan(GiB) == [(2, GiB)]


# --- measuring ---------------------------------------------------------------------------------


def test_the_whole_memory_is_placed_before_it_is_read() -> None:
    calls: list[tuple[int, int, int]] = []

    def bind(address: int, num_bytes: int, node: int) -> int:
        calls.append((address % 4096, num_bytes, node))
        return 0

    speed = read_bandwidth(3, 4 * MiB, 2, bind)
    assert speed is not None and speed > 0
    assert calls == [(0, 4 * MiB, 3)]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_refusal_is_one_warning_and_no_figure(
    code: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    asked: list[int] = []

    def read(node: int, num_bytes: int, threads: int) -> float | None:
        asked.append(node)
        return read_bandwidth(node, MiB, threads, lambda address, size, number: code)

    with caplog.at_level("WARNING"):
        assert measure_nodes(nodes_of(tmp_path, CXL), 2, read) == {}
    assert asked == [0]
    assert len(caplog.records) == 1
    assert errno.errorcode[code] in caplog.records[0].getMessage()


def test_what_is_measured(tmp_path: Path) -> None:
    asked: list[tuple[int, int, int]] = []

    def read(node: int, num_bytes: int, threads: int) -> float:
        asked.append((node, num_bytes, threads))
        return 1e9 * (node + 1)

    found = [
        *nodes_of(tmp_path, CXL),
        MemoryNode(5, (), GiB, 100 * MiB),
        MemoryNode(6, (), GiB, GiB),
    ]
    assert measure_nodes(found, 7, read) == {0: 1e9, 1: 2e9, 2: 3e9, 6: 7e9}
    assert asked == [(0, GiB // 2, 7), (1, GiB // 2, 7), (2, GiB // 2, 7), (6, GiB // 4, 7)]
