"""Which CPUs and how many threads, on made-up machines; and where pages go on several nodes."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.device.cpu import CPUDevice
from ambidex.errors import OptionError
from ambidex.kernels.cpu.numa import FillingPlacer, PagePlacer, Placer, Share, node_shares
from ambidex.kernels.cpu.topology import ThreadPlan, Topology, cut, plan_threads, read_topology
from ambidex.kernels.native import NativeKernels
from ambidex.sysfs import device_node, format_cpus, parse_cpus


def machine(
    root: Path,
    *,
    cores: int,
    threads_a_core: int = 1,
    nodes: Mapping[int, str] | None = None,
    distances: Mapping[int, str] | None = None,
    allowed: str | None = None,
    files: Mapping[str, str] | None = None,
) -> Topology:
    """Core c has the CPUs c, c + cores, ...; ``nodes``: the cpulist of each."""
    total = cores * threads_a_core
    texts = {
        "proc/self/status": f"Name:\tx\nCpus_allowed_list:\t{allowed or f'0-{total - 1}'}\n",
        "sys/devices/system/cpu/online": f"0-{total - 1}\n",
    }
    for cpu in range(total):
        siblings = format_cpus(range(cpu % cores, total, cores))
        texts[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings + "\n"
    for number, cpus in (nodes or {}).items():
        folder = f"sys/devices/system/node/node{number}"
        texts[f"{folder}/cpulist"] = cpus + "\n"
    for number, row in (distances or {}).items():
        texts[f"sys/devices/system/node/node{number}/distance"] = row + "\n"
    if nodes:
        texts["sys/devices/system/node/online"] = format_cpus(nodes) + "\n"
    for name, text in {**texts, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_topology(root)


def plan(
    found: Topology,
    cpu_threads: int | None = None,
    cpu_bind: str | None = None,
    environment: Mapping[str, str] | None = None,
    near_node: int | None = None,
) -> ThreadPlan:
    return plan_threads(cpu_threads, cpu_bind, environment or {}, found, near_node)


def refused(found: Topology, cpu_bind: str) -> str:
    with pytest.raises(OptionError) as caught:
        plan(found, cpu_bind=cpu_bind)
    return str(caught.value)


# --- what the machine has ----------------------------------------------------------------------


def test_this_machine() -> None:
    found = read_topology()
    assert found.cpus and set(found.cpus) <= set(range(os.cpu_count() or 1))
    assert sorted(cpu for core in found.cores for cpu in core) == list(found.cpus)
    assert 1 <= plan(found).num_threads <= len(found.cpus)


def test_siblings_share_a_core(tmp_path: Path) -> None:
    found = machine(tmp_path, cores=4, threads_a_core=2, allowed="0-1,4-7")
    assert found.cores == ((0, 4), (1, 5), (6,), (7,))
    assert plan(found).num_threads == 4
    assert found.quota is None
    assert [(node.number, node.cpus) for node in found.nodes] == [(0, found.cpus)]


def test_offline_cpus_are_not_used(tmp_path: Path) -> None:
    found = machine(tmp_path, cores=4, allowed="0-63")
    assert found.cpus == (0, 1, 2, 3)


def test_nodes_without_cpus_are_memories(tmp_path: Path) -> None:
    found = machine(tmp_path, cores=4, nodes={0: "0-1", 1: "2-3", 2: ""})
    assert [(node.number, node.cpus) for node in found.nodes] == [(0, (0, 1)), (1, (2, 3)), (2, ())]
    message = refused(found, "numa:2")
    assert "no CPU" in message and "node 1 has 2-3" in message
    assert "there is no NUMA node 5; this machine has 0-2" in refused(found, "numa:5")


V2 = {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n"}
V1 = {"proc/self/cgroup": "7:cpu,cpuacct:/docker/a\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        (V2, None),
        (V2 | {"sys/fs/cgroup/pod/box/cpu.max": "200000 100000\n"}, 2.0),
        # A group above allows less; and in a container the mount is its own group.
        (V2 | {"sys/fs/cgroup/pod/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            V1
            | {
                "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_quotas(tmp_path: Path, files: Mapping[str, str], quota: float | None) -> None:
    found = machine(tmp_path, cores=8, files=files)
    assert found.quota == quota
    made = plan(found)
    assert made.num_threads == (8 if quota is None else max(1, -(-quota // 1)))
    assert made.cpus == ()
    if quota is not None:
        # Which CPUs the time is spent on is the system's choice.
        assert made.seats == ()


# --- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", ["10-11", "0,63"])
def test_two_of_64_cpus(tmp_path: Path, allowed: str) -> None:
    found = machine(tmp_path, cores=64, allowed=allowed)
    assert plan(found).num_threads == 2
    message = refused(found, "99")
    assert "CPU 99 is not among the 2 that this process may use" in message
    assert f"({format_cpus(found.cpus)})" in message


def test_quota_of_two_on_64_cpus(tmp_path: Path) -> None:
    limit = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
    found = machine(tmp_path, cores=64, files=limit)
    assert plan(found).num_threads == 2
    made = plan(found, cpu_bind="0-7")
    assert made.num_threads == 8 and "the time of 2 CPUs" in made.notes[0]
    made = plan(found, environment={"OMP_NUM_THREADS": "64"})
    assert made.num_threads == 64 and "may use 2 CPUs" in made.notes[0]


def test_numbers_of_threads(tmp_path: Path) -> None:
    found = machine(tmp_path, cores=4, threads_a_core=2)
    assert plan(found).num_threads == 4
    assert plan(found, 3).num_threads == 3
    assert plan(found, None, None, {"OMP_NUM_THREADS": "2,1"}).num_threads == 2
    assert plan(found, 3, None, {"OMP_NUM_THREADS": "2"}).num_threads == 3
    assert plan(found, 8).notes == ()
    assert "may use 8 CPUs" in plan(found, 9).notes[0]


def test_one_node_is_not_pinned_unasked(tmp_path: Path) -> None:
    made = plan(machine(tmp_path, cores=4))
    assert made == ThreadPlan((), 4, seats=(0, 1, 2, 3))


def test_several_nodes_are_pinned_when_every_core_has_a_thread(tmp_path: Path) -> None:
    found = machine(tmp_path, cores=4, threads_a_core=2, nodes={0: "0,2,4,6", 1: "1,3,5,7"})
    made = plan(found)
    assert made.cpus == (0, 2, 1, 3)
    assert made.nodes == (0, 0, 1, 1)
    assert plan(found, 2).cpus == ()
    assert plan(found, 2).seats == (0, 1)
    assert plan(found, cpu_bind="none") == ThreadPlan((), 4)
    assert plan(found, cpu_bind="nobind") == ThreadPlan((), 4)


def test_binding(tmp_path: Path) -> None:
    found = machine(tmp_path, cores=8, threads_a_core=2, nodes={0: "0-3,8-11", 1: "4-7,12-15"})
    assert plan(found, cpu_bind="0,2,4").cpus == (0, 2, 4)
    assert plan(found, cpu_bind="0,2,4").nodes == (0, 0, 1)
    assert plan(found, cpu_bind="5,1").cpus == (1, 5)
    assert plan(found, cpu_bind="0-3").nodes == ()
    assert plan(found, 2, "4-7").cpus == (4, 5)
    assert plan(found, cpu_bind="numa:1").cpus == (4, 5, 6, 7)
    assert plan(found, 5, "numa:1").cpus == (4, 5, 6, 7, 12)
    assert plan(found, 4, "numa:0,1").cpus == (0, 1, 4, 5)
    assert plan(found, cpu_bind="numa:0-1").num_threads == 8
    made = plan(found, 9, "numa:1")
    assert made.num_threads == 8 and "9 threads were asked for" in made.notes[0]


@pytest.mark.parametrize("bind", ["9" * 5000, "0-" + "9" * 5000, "numa:" + "9" * 5000])
def test_a_number_that_python_does_not_read(tmp_path: Path, bind: str) -> None:
    found = machine(tmp_path, cores=2)
    message = refused(found, bind)
    assert message.startswith("--cpu-bind ") and len(message) < 400
    assert plan(found, environment={"OMP_NUM_THREADS": "9" * 5000}) == plan(found)


def test_vllms_variable(tmp_path: Path) -> None:
    found = machine(tmp_path, cores=8)
    variable = "VLLM_CPU_OMP_THREADS_BIND"
    assert plan(found, environment={variable: "auto"}) == plan(found)
    assert plan(found, environment={variable: "nobind"}).seats == ()
    assert plan(found, environment={variable: "0-3"}).cpus == (0, 1, 2, 3)
    made = plan(found, environment={variable: "0-3|4-7"})
    assert made.cpus == (0, 1, 2, 3)
    assert "2 ranks" in made.notes[0] and "takes 0-3" in made.notes[0]
    assert plan(found, cpu_bind="4", environment={variable: "0-3"}).cpus == (4,)
    assert "CPU 8-31 is not among the 8" in refused(found, "0-31|32-63")


@pytest.mark.parametrize("bind", ["0-", "x", "numa:", "numa:x", "-1", "3-1", "0-99999999999"])
def test_what_is_no_list_is_refused(tmp_path: Path, bind: str) -> None:
    assert "--cpu-bind" in refused(machine(tmp_path, cores=2), bind)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 300), min_size=1))
def test_lists_of_cpus(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus))


# --- beside an accelerator ---------------------------------------------------------------------


def test_a_devices_node(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices"
    for address, text in (("0000:3b:00.0", "1\n"), ("0000:86:00.1", "-1\n"), ("10de:01:00.0", "3")):
        (folder / address).mkdir(parents=True)
        (folder / address / "numa_node").write_text(text)
    for address in ("0000:3b:00.0", "00000000:3B:00.0", "3b:00.0"):
        assert device_node(address, tmp_path) == 1
    assert device_node("10DE:01:00.0", tmp_path) == 3
    assert device_node("0000:86:00.1", tmp_path) is None, "the firmware does not say"
    assert device_node("0000:99:00.0", tmp_path) is None, "there is no such device"
    for wrong in ("", "gpu0", "0000:3b:00.8", "../../../etc", "0000:3b:00.0/x"):
        with pytest.raises(ValueError, match="is not the address of a PCI device"):
            device_node(wrong, tmp_path)


def test_one_node_is_always_near(tmp_path: Path) -> None:
    found = machine(tmp_path, cores=4, nodes={0: "0-3"})
    assert plan(found, near_node=0) == plan(found)


def two_nodes(root: Path, **more: Any) -> Topology:
    """Cores 0 to 3 are on node 0, 4 to 7 on node 1, each with a sibling."""
    return machine(root, cores=8, threads_a_core=2, nodes={0: "0-3,8-11", 1: "4-7,12-15"}, **more)


def test_unknown_near_node_changes_nothing(tmp_path: Path) -> None:
    made = plan(two_nodes(tmp_path), near_node=None)
    assert (made.num_threads, made.nodes, made.within) == (8, (0,) * 4 + (1,) * 4, ())


def test_threads_stay_on_the_accelerators_node(tmp_path: Path) -> None:
    found = two_nodes(tmp_path)
    made = plan(found, near_node=1)
    assert (made.num_threads, made.cpus, made.nodes) == (4, (), ())
    assert made.within == (4, 5, 6, 7, 12, 13, 14, 15)
    assert made.seats == (4, 5, 6, 7)
    assert "4 of 8 cores compute" in made.notes[0] and "--cpu-threads 8" in made.notes[0]
    few = plan(found, 3, near_node=1)
    assert (few.num_threads, few.within, few.seats) == (3, made.within, (4, 5, 6))
    assert few.notes == ()
    first, second = cut(made, [1, 1])
    assert (first.cpus, second.cpus) == ((4, 5), (6, 7))


def test_more_threads_than_the_accelerators_node_has_cores(tmp_path: Path) -> None:
    found = two_nodes(tmp_path)
    made = plan(found, 6, near_node=1)
    assert made.cpus == (4, 5, 6, 7, 0, 1)
    assert made.nodes == (1, 1, 1, 1, 0, 0)
    assert (made.within, made.notes) == ((), ())
    assert plan(found, 8, near_node=1).num_threads == 8
    every = plan(found, 16, near_node=1)
    assert (every.num_threads, every.cpus, every.within) == (16, (), ())
    assert "may use 16 CPUs" in plan(found, 17, near_node=1).notes[0]


def test_what_the_user_binds_counts_more_than_the_accelerator(tmp_path: Path) -> None:
    found = two_nodes(tmp_path)
    for bind in ("0-1", "numa:0", "none", "nobind"):
        assert plan(found, cpu_bind=bind, near_node=1) == plan(found, cpu_bind=bind)
        variable = {"VLLM_CPU_OMP_THREADS_BIND": bind}
        assert plan(found, environment=variable, near_node=1) == plan(found, cpu_bind=bind)
    assert plan(found, cpu_bind="auto", near_node=1) == plan(found, near_node=1)


@pytest.mark.parametrize(("quota_us", "num_threads"), [(200000, 2), (600000, 4)])
def test_a_quota_beside_an_accelerator(tmp_path: Path, quota_us: int, num_threads: int) -> None:
    limit = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota_us} 100000\n"}
    found = two_nodes(tmp_path, files=limit)
    made = plan(found, near_node=1)
    assert made.num_threads == num_threads
    assert (made.cpus, made.seats) == ((), ()), "which CPUs: the system's choice on that node"
    assert made.within == (4, 5, 6, 7, 12, 13, 14, 15)
    assert plan(found, 6, near_node=1).within == ()


def test_a_node_without_cpus_has_no_threads(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        cores=4,
        nodes={0: "0-1", 1: "2-3", 2: ""},
        distances={0: "10 21 14", 1: "21 10 24", 2: "14 24 10"},
    )
    assert plan(found, near_node=1).within == (2, 3)
    made = plan(found, near_node=2)
    assert made.within == (0, 1)
    assert "NUMA node 2: its threads run on node 0, the nearest" in made.notes[0]


def test_a_cpuset_without_the_accelerators_node(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        cores=8,
        nodes={0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"},
        distances={0: "10 32 32 32", 1: "32 10 32 21", 2: "32 32 10 12", 3: "32 21 12 10"},
        allowed="0-5",
    )
    made = plan(found, near_node=3)
    assert made.within == (4, 5)
    assert "None of the 6 CPUs that this process may use is on" in made.notes[0]
    assert "node 2, the nearest" in made.notes[0] and "--cpuset-cpus" in made.notes[0]
    assert plan(found, 4, near_node=3).cpus == (4, 5, 2, 3)
    assert plan(found, 4, near_node=3).nodes == (2, 2, 1, 1)


def test_a_cpuset_of_one_far_node(tmp_path: Path) -> None:
    found = two_nodes(tmp_path, allowed="0-3", distances={0: "10 21", 1: "21 10"})
    made = plan(found, near_node=1)
    assert (made.num_threads, made.cpus, made.seats) == (4, (), (0, 1, 2, 3))
    assert len(made.notes) == 1 and "node 0, the nearest" in made.notes[0]


def test_a_node_that_is_not_there(tmp_path: Path) -> None:
    made = plan(two_nodes(tmp_path), near_node=7)
    assert made.num_threads == 8
    assert "node 7 is not one of this machine's (0-1)" in made.notes[0]


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_the_lanes_thread_stays_within(kernels: str) -> None:
    def allowed_in(within: tuple[int, ...]) -> set[int]:
        device = CPUDevice(1, within=within, kernels=kernels)
        device.close()
        return os.sched_getaffinity(0)

    own = os.sched_getaffinity(0)
    one = min(own)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(allowed_in, ()).result() == own
        assert pool.submit(allowed_in, (one,)).result() == {one}
    assert os.sched_getaffinity(0) == own


# --- groups ------------------------------------------------------------------------------------


def test_cutting(tmp_path: Path) -> None:
    made = plan(machine(tmp_path, cores=8))
    first, second = cut(made, [3, 1])
    assert first.cpus == (0, 1, 2, 3, 4, 5) and second.cpus == (6, 7)
    assert [part.num_threads for part in cut(made, [1000, 1, 1])] == [6, 1, 1]
    assert cut(made, [1])[0].num_threads == 8
    unbound = cut(ThreadPlan((), 3), [1, 1])
    assert [(part.num_threads, part.cpus) for part in unbound] == [(2, ()), (1, ())]
    with pytest.raises(OptionError, match="2 groups of threads are needed, and there are 1"):
        cut(ThreadPlan((), 1), [1, 1])
    for shares in ([], [0, 0], [2, -1], [float("nan")]):
        with pytest.raises(ValueError):
            cut(made, shares)


def test_cutting_follows_nodes(tmp_path: Path) -> None:
    made = plan(machine(tmp_path, cores=4, nodes={0: "0-1", 1: "2-3"}))
    assert [part.nodes for part in cut(made, [1, 1])] == [(), ()]
    assert [part.nodes for part in cut(made, [3, 1])] == [(0, 0, 1), ()]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_groups_share_no_core(num_threads: int, shares: list[float]) -> None:
    made = ThreadPlan((), num_threads, seats=tuple(range(num_threads)))
    if len(shares) > num_threads:
        with pytest.raises(OptionError):
            cut(made, shares)
        return
    parts = cut(made, shares)
    assert [cpu for part in parts for cpu in part.cpus] == list(range(num_threads))
    assert all(len(part.cpus) == part.num_threads >= 1 for part in parts)


# --- pages on nodes ----------------------------------------------------------------------------


def test_shares_are_those_of_the_workers() -> None:
    assert node_shares(10, 100, (0, 0, 1, 1)) == [Share(0, 0, 500), Share(1, 500, 500)]
    assert node_shares(1, 100, (0, 0, 1, 1)) == [Share(1, 0, 100)]
    assert node_shares(0, 100, (0, 1)) == []
    assert node_shares(7, 10, (0, 0, 2)) == [Share(0, 0, 40), Share(2, 40, 30)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 10_000),
    st.lists(st.integers(0, 3), min_size=2, max_size=9).map(sorted),
    st.integers(1, 20_000),
)
def test_pages_are_placed_once(
    num_chunks: int, chunk_bytes: int, nodes: list[int], address: int
) -> None:
    calls: list[tuple[int, int, int]] = []

    def bind(first: int, num_bytes: int, node: int) -> int:
        calls.append((first, num_bytes, node))
        return 0

    placer = PagePlacer(nodes, bind, page_bytes=4096)
    end = address + num_chunks * chunk_bytes
    assert placer.place(address, num_chunks, chunk_bytes) == (len(set(nodes)) > 1)
    assert calls or len(set(nodes)) == 1 or end // 4096 * 4096 <= -(-address // 4096) * 4096
    pages = [page for first, size, _ in calls for page in range(first, first + size, 4096)]
    assert pages == sorted(set(pages))
    for first, size, node in calls:
        assert first % 4096 == size % 4096 == 0
        assert address <= first and first + size <= end
        share = next(
            share
            for share in reversed(node_shares(num_chunks, chunk_bytes, nodes))
            if address + share.start <= first
        )
        assert share.node == node


def whole_pages(placer: Placer) -> int:
    """Bytes of 40 weights of 10 chunks of 1 MiB, on page boundaries, that ``placer`` was given."""
    for weight in range(40):
        assert placer.place(2**30 + weight * 10 * 2**20, 10, 2**20)
    return 40 * 10 * 2**20


def test_threads_of_two_nodes_share_one_copy(tmp_path: Path) -> None:
    made = plan(two_nodes(tmp_path), 6, near_node=1)
    placer = PagePlacer(made.nodes, lambda first, size, node: 0, page_bytes=4096)
    assert whole_pages(placer) == sum(placer.placed_bytes.values())
    # Four of six threads are on node 1: they have 6 of 10 chunks.
    assert placer.placed_bytes == {1: 40 * 6 * 2**20, 0: 40 * 4 * 2**20}


def test_filling_nodes_is_one_copy() -> None:
    calls: list[tuple[int, int, int]] = []

    def bind(first: int, num_bytes: int, node: int) -> int:
        calls.append((first, num_bytes, node))
        return 0

    MiB = 2**20
    placer = FillingPlacer([(1, 255 * MiB), (0, 0), (2, 100 * MiB)], bind, page_bytes=4096)
    whole_pages(placer)
    assert placer.placed_bytes == {1: 255 * MiB, 2: 100 * MiB}, "the last 45 MiB: as may be"
    assert calls[24] == (2**30 + 240 * MiB, 10 * MiB, 1)
    assert calls[25:27] == [
        (2**30 + 250 * MiB, 5 * MiB, 1),
        (2**30 + 255 * MiB, 5 * MiB, 2),
    ]
    assert not FillingPlacer([], bind).place(0, 1, MiB)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30_000)), max_size=5),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    st.integers(1, 20_000),
)
def test_filled_pages_are_placed_once(
    parts: list[tuple[int, int]], sizes: list[int], address: int
) -> None:
    calls: list[tuple[int, int]] = []

    def bind(first: int, num_bytes: int, node: int) -> int:
        calls.append((first, num_bytes))
        return 0

    placer = FillingPlacer(parts, bind, page_bytes=4096)
    first, start = address, address
    for size in sizes:
        placer.place(start, 1, size)
        start += size
    pages = [page for begin, size in calls for page in range(begin, begin + size, 4096)]
    assert pages == sorted(set(pages))
    assert all(first <= page and page + 4096 <= start for page in pages)
    assert sum(placer.placed_bytes.values()) == 4096 * len(pages)
    for node, placed in placer.placed_bytes.items():
        # Pages are rounded to the node of their first byte: less than one a weight and part.
        room = sum(size for number, size in parts if number == node)
        assert placed < room + 4096 * (len(sizes) + len(parts))


def test_only_weights_that_stay_are_placed() -> None:
    """What is packed to be cut is not: it would use up the nodes' room."""
    device = CPUDevice(1, kernels="native")
    kernels = cast(NativeKernels, device.kernels)
    placer = FillingPlacer([(1, 2**30)], lambda first, size, node: 0, page_bytes=4096)
    kernels.fill_nodes(placer)
    with kernels.temporary_weights():
        kernels.pack(torch.zeros(512, 1024))
        assert placer.placed_bytes == {}
        kept = kernels.keep([torch.zeros(2**20, dtype=torch.uint8)])
        # All but parts of pages at both ends.
        assert 2**20 - 8192 < placer.placed_bytes[1] <= kept.nbytes == 2**20
    kernels.pack(torch.zeros(512, 1024))
    assert 3 * 2**20 - 16384 < placer.placed_bytes[1] <= 3 * 2**20
    device.close()


def test_one_node_needs_no_placing() -> None:
    def bind(first: int, num_bytes: int, node: int) -> int:
        raise AssertionError

    assert not PagePlacer((), bind).place(0, 8, 2**20)
    assert not PagePlacer((1, 1), bind).place(0, 8, 2**20)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, 4711])
def test_a_refusal_is_one_warning(code: int, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def bind(first: int, num_bytes: int, node: int) -> int:
        calls.append(node)
        return code

    placer = PagePlacer((0, 1), bind)
    with caplog.at_level("WARNING"):
        assert not placer.place(0, 8, 2**20)
        assert not placer.place(2**24, 8, 2**20)
    assert len(calls) == 1
    assert len(caplog.records) == 1
    assert errno.errorcode.get(code, str(code)) in caplog.records[0].getMessage()


@pytest.mark.skipif(sys.platform != "linux", reason="mbind is Linux's")
def test_the_system_call(caplog: pytest.LogCaptureFixture) -> None:
    """Node 0 exists everywhere; node 1023 nowhere: placed, or refused with one warning."""
    from ctypes import addressof, c_char

    memory = mmap.mmap(-1, 2**20)
    view = (c_char * len(memory)).from_buffer(memory)
    memory[:5] = b"words"
    with caplog.at_level("WARNING"):
        placer = PagePlacer((0, 0, 0, 1023))
        assert not placer.place(addressof(view), 4, 2**18)
    assert len(caplog.records) == 1
    assert memory[:5] == b"words"
    del view
