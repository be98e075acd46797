"""The ledger of one memory, and what the host really offers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.errors import OutOfMemory
from ambidex.memory.host import (
    _limit_from_sysconf,
    host_capacity_bytes,
    host_limits,
    process_bytes,
)
from ambidex.memory.ledger import ACCOUNTS, Ledger, format_bytes, is_host_memory

GiB = 1 << 30
MiB = 1 << 20


def test_reserve_and_release() -> None:
    ledger = Ledger("host", 10 * GiB)
    weights = ledger.reserve("weights", "layers", 6 * GiB)
    ledger.reserve("kv_cache", "blocks", 2 * GiB)
    assert (ledger.used_bytes, ledger.free_bytes) == (8 * GiB, 2 * GiB)
    ledger.release(weights)
    assert (ledger.used_bytes, ledger.free_bytes) == (2 * GiB, 8 * GiB)


def test_beyond_capacity_is_refused_with_the_numbers_and_takes_nothing() -> None:
    ledger = Ledger("host", 4 * GiB)
    ledger.reserve("weights", "layers", 3 * GiB)
    with pytest.raises(OutOfMemory) as caught:
        ledger.reserve("kv_cache", "blocks", 2 * GiB)
    assert str(caught.value) == (
        "host: 2.00 GiB wanted for blocks (kv_cache), 1.00 GiB of 4.00 GiB free. "
        "Reserved so far: weights 3.00 GiB."
    )
    assert ledger.used_bytes == 3 * GiB
    ledger.reserve("kv_cache", "blocks", GiB)
    assert ledger.free_bytes == 0


def test_the_table_has_every_account_in_order() -> None:
    ledger = Ledger("host", GiB)
    ledger.reserve("staging", "ring", 5)
    ledger.reserve("weights", "a", 10)
    ledger.reserve("weights", "b", 30)
    rows = ledger.table()
    assert tuple(row.account for row in rows) == ACCOUNTS
    sizes = {row.account: (row.num_bytes, row.num_reservations) for row in rows}
    assert sizes["weights"] == (40, 2)
    assert sizes["staging"] == (5, 1)
    assert sizes["graphs"] == (0, 0)
    assert [r.name for r in ledger.reservations("weights")] == ["b", "a"]
    assert len(ledger.reservations()) == 3


def test_equal_reservations_are_told_apart() -> None:
    ledger = Ledger("host", 100)
    first = ledger.reserve("weights", "x", 10)
    ledger.reserve("weights", "x", 10)
    ledger.release(first)
    assert ledger.used_bytes == 10
    with pytest.raises(AssertionError, match="not reserved here"):
        ledger.release(first)


def test_an_unknown_account_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="no account lunch"):
        Ledger("host", 1).reserve("lunch", "x", 0)


def test_threads_never_take_more_than_there_is() -> None:
    ledger = Ledger("host", 1000)
    refused = []

    def take() -> None:
        for _ in range(100):
            try:
                ledger.reserve("staging", "x", 3)
            except OutOfMemory:
                refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.used_bytes == 999
    assert len(refused) == 800 - 333


@given(sizes=st.lists(st.integers(0, 50), max_size=30))
def test_used_is_always_the_sum_of_the_table(sizes: list[int]) -> None:
    ledger = Ledger("host", 200)
    held = []
    for index, size in enumerate(sizes):
        if index % 3 == 2 and held:
            ledger.release(held.pop(size % len(held)))
        elif size <= ledger.free_bytes:
            held.append(ledger.reserve(ACCOUNTS[size % len(ACCOUNTS)], "x", size))
        else:
            with pytest.raises(OutOfMemory):
                ledger.reserve("weights", "x", size)
        assert ledger.used_bytes == sum(row.num_bytes for row in ledger.table())
        assert ledger.used_bytes == sum(r.num_bytes for r in held) <= 200


def test_what_was_held_before_the_measurement_takes_nothing_of_it() -> None:
    ledger = Ledger("host", 4 * GiB)
    ledger.record("runtime", "process", GiB)
    assert (ledger.capacity_bytes, ledger.used_bytes, ledger.free_bytes) == (5 * GiB, GiB, 4 * GiB)
    ledger.reserve("weights", "layers", 4 * GiB)
    with pytest.raises(OutOfMemory, match=r"5\.00 GiB free.*weights 4\.00 GiB, runtime 1\.00 GiB"):
        ledger.reserve("kv_cache", "blocks", 1)


def test_a_new_measurement_changes_what_is_free_and_not_what_is_reserved() -> None:
    ledger = Ledger("host", 8 * GiB)
    weights = ledger.reserve("weights", "layers", 3 * GiB)
    ledger.set_free(GiB)
    assert (ledger.capacity_bytes, ledger.used_bytes, ledger.free_bytes) == (4 * GiB, 3 * GiB, GiB)
    with pytest.raises(OutOfMemory):
        ledger.reserve("kv_cache", "blocks", 2 * GiB)
    ledger.release(weights)
    assert ledger.free_bytes == 4 * GiB
    ledger.set_free(0)
    assert ledger.capacity_bytes == 0


def test_a_snapshot_is_of_its_moment() -> None:
    ledger = Ledger("sim:0", 100)
    ledger.reserve("weights", "a", 30)
    ledger.reserve("weights", "b", 5)
    ledger.reserve("kv_cache", "c", 7)
    snapshot = ledger.snapshot()
    ledger.release_all()
    assert (snapshot.name, snapshot.capacity_bytes) == ("sim:0", 100)
    assert tuple(snapshot.accounts) == ACCOUNTS
    assert {name: size for name, size in snapshot.accounts.items() if size} == {
        "weights": 35,
        "kv_cache": 7,
    }
    assert (snapshot.reserved_bytes, snapshot.free_bytes) == (42, 58)
    assert ledger.snapshot().reserved_bytes == 0


def test_memories_of_the_machine_and_of_accelerators() -> None:
    assert is_host_memory("host") and is_host_memory("host:node2")
    assert not is_host_memory("sim:0") and not is_host_memory("hostess")


def test_sizes_for_people() -> None:
    assert format_bytes(0) == "0 bytes"
    assert format_bytes(1023) == "1023 bytes"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(5 * MiB) == "5.00 MiB"
    assert format_bytes(692 * GiB) == "692.00 GiB"


# -- the host -----------------------------------------------------------------------------------


def machine(root: Path, files: dict[str, str], available_kib: int = 600 * MiB) -> Path:
    """A made-up machine: ``/proc/meminfo`` and the given files."""
    files = {
        "proc/meminfo": f"MemTotal: {700 * MiB} kB\nMemAvailable: {available_kib} kB\n"
    } | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(path: str, *, limit: str, high: str = "max", current: int, stat: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{current}\n",
        f"{folder}/memory.stat": stat,
    }


def test_no_cgroup_limit_leaves_mem_available(tmp_path: Path) -> None:
    assert host_capacity_bytes(machine(tmp_path, {})) == 600 * GiB


def test_v2_max_of_the_own_group(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod/me\n"} | v2(
        "/pod/me", limit=str(150 * GiB), current=10 * GiB
    )
    root = machine(tmp_path, files)
    assert host_capacity_bytes(root) == 140 * GiB
    assert [limit.source for limit in host_limits(root)] == [
        "MemAvailable",
        "/sys/fs/cgroup/pod/me/memory.max",
    ]


def test_v2_high_counts_too(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/me\n"} | v2(
        "/me", limit=str(150 * GiB), high=str(100 * GiB), current=10 * GiB
    )
    assert host_capacity_bytes(machine(tmp_path, files)) == 90 * GiB


def test_v2_a_parents_limit_counts_with_the_parents_usage(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod/me\n"}
    files |= v2("/pod/me", limit="max", current=10 * GiB)
    files |= v2("/pod", limit=str(60 * GiB), current=50 * GiB)
    assert host_capacity_bytes(machine(tmp_path, files)) == 10 * GiB


def test_v2_file_pages_do_not_count_as_used(tmp_path: Path) -> None:
    stat = f"anon {GiB}\nfile {9 * GiB}\ninactive_file {6 * GiB}\nactive_file {2 * GiB}\n"
    files = {"proc/self/cgroup": "0::/me\n"}
    files |= v2("/me", limit=str(16 * GiB), current=10 * GiB, stat=stat)
    assert host_capacity_bytes(machine(tmp_path, files)) == 14 * GiB


def test_v2_inside_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../../docker/abc\n"}
    files |= v2("", limit=str(8 * GiB), current=GiB)
    assert host_capacity_bytes(machine(tmp_path, files)) == 7 * GiB


def test_more_used_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/me\n"}
    files |= v2("/me", limit=str(8 * GiB), high=str(GiB), current=2 * GiB)
    assert host_capacity_bytes(machine(tmp_path, files)) == 0


def v1(path: str, *, limit: int, usage: int, stat: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


def test_v1_limit_and_parent(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/docker/abc\n0::/x\n"}
    files |= v1("/docker/abc", limit=20 * GiB, usage=6 * GiB, stat=f"total_inactive_file {GiB}\n")
    files |= v1("/docker", limit=9223372036854771712, usage=7 * GiB)
    assert host_capacity_bytes(machine(tmp_path, files)) == 15 * GiB
    files |= v1("/docker", limit=10 * GiB, usage=7 * GiB)
    assert host_capacity_bytes(machine(tmp_path, files)) == 3 * GiB


def test_v1_inside_a_container_without_a_cgroup_namespace(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "5:memory:/docker/abc\n"} | v1("", limit=4 * GiB, usage=GiB)
    assert host_capacity_bytes(machine(tmp_path, files)) == 3 * GiB


def test_hybrid_the_least_of_both(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "5:memory:/me\n0::/me\n"}
    files |= v1("/me", limit=30 * GiB, usage=GiB)
    files |= {
        "sys/fs/cgroup/unified/me/memory.max": str(12 * GiB),
        "sys/fs/cgroup/unified/me/memory.current": str(2 * GiB),
    }
    assert host_capacity_bytes(machine(tmp_path, files)) == 10 * GiB


def test_damaged_files_are_no_limits(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "nonsense\n0::/me\n"}
    files |= v2("/me", limit="soon", current=GiB)
    assert host_capacity_bytes(machine(tmp_path, files)) == 600 * GiB


def test_an_old_kernel_without_mem_available(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/meminfo": "MemFree: 1048576 kB\nCached: 1048576 kB\n"})
    assert host_capacity_bytes(root) == 2 * GiB


def test_no_proc_at_all_counts_on_a_share_of_physical_memory(tmp_path: Path) -> None:
    (limit,) = host_limits(tmp_path)
    assert limit.available_bytes > 0

    def macos(name: str) -> int:
        values = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}
        if name not in values:
            raise ValueError("unrecognized configuration name")
        return values[name]

    assert _limit_from_sysconf(macos).available_bytes == 3 * GiB


def test_this_machine() -> None:
    assert 0 < host_capacity_bytes() < 1 << 50


# -- the process --------------------------------------------------------------------------------


def test_what_a_process_holds(tmp_path: Path) -> None:
    root = machine(
        tmp_path, {"proc/self/status": "VmHWM:\t 900 kB\nVmRSS:\t 512 kB\nThreads:\t3\n"}
    )
    assert process_bytes(root) == 512 << 10
    # Without /proc, what it held at most: this one has an interpreter, at least.
    assert MiB < process_bytes(tmp_path / "nothing") < 1 << 40
    assert MiB < process_bytes() < 1 << 40
