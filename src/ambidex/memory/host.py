"""How much host memory this process can really have: the machine's and the container's limits.

All paths are under ``root``, so that a test can give a made-up machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ambidex.cgroups import V2_MOUNTS, cgroup_path, folders, read_int, read_text
from ambidex.memory.nodes import read_nodes
from ambidex.sysfs import node_folders

#: Where the memory controller of cgroup v1 is mounted.
_V1_MOUNT = "sys/fs/cgroup/memory"

#: The share of physical memory to count on where a system does not tell what is available.
_SHARE_IF_UNKNOWN = 0.75


@dataclass(frozen=True, slots=True)
class HostLimit:
    """One limit: where it was read, and the bytes that it leaves to this process now."""

    source: str
    available_bytes: int


def host_capacity_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be had now: the least of :func:`host_limits`."""
    return min(limit.available_bytes for limit in host_limits(root))


def host_limits(root: Path = Path("/")) -> list[HostLimit]:
    """MemAvailable, and what every cgroup (v1 and v2; max, high and NUMA nodes; parents too)
    leaves.

    File pages that a cgroup is charged for do not count as used: the kernel drops them first, and
    a model file that was just downloaded or read would else count against itself. Where there is
    no ``/proc`` (macOS) it is a share of the physical memory.
    """
    available = _mem_available_bytes(root)
    if available is None:
        return [_limit_from_sysconf(os.sysconf)]
    return [
        HostLimit("MemAvailable", available),
        *_v2_limits(root),
        *_v1_limits(root),
        *_cpuset_limits(root),
    ]


def process_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process holds now, shared libraries included (VmRSS).

    Where there is no ``/proc`` (macOS) it is the most that it has ever held.
    """
    text = read_text(root / "proc/self/status")
    resident = _kib_fields(text or "").get("VmRSS")
    if resident is not None:
        return resident
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _limit_from_sysconf(sysconf: Callable[[str], int]) -> HostLimit:
    page_bytes = sysconf("SC_PAGE_SIZE")
    try:
        return HostLimit("SC_AVPHYS_PAGES", sysconf("SC_AVPHYS_PAGES") * page_bytes)
    except (ValueError, OSError):
        # macOS has no such name.
        num_bytes = int(sysconf("SC_PHYS_PAGES") * page_bytes * _SHARE_IF_UNKNOWN)
        return HostLimit("SC_PHYS_PAGES", num_bytes)


def _mem_available_bytes(root: Path) -> int | None:
    text = read_text(root / "proc/meminfo")
    if text is None:
        return None
    fields = _kib_fields(text)
    if "MemAvailable" in fields:
        return fields["MemAvailable"]
    # Kernels before 3.14.
    if "MemFree" in fields:
        return fields["MemFree"] + fields.get("Cached", 0)
    return None


def _kib_fields(text: str) -> dict[str, int]:
    """Lines such as ``VmRSS:  1024 kB``, in bytes."""
    fields = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    return fields


def _v2_limits(root: Path) -> Iterator[HostLimit]:
    path = cgroup_path(root, controller="")
    if path is None:
        return
    for mount in V2_MOUNTS:
        for folder in folders(root / mount, path):
            used = read_int(folder / "memory.current")
            if used is None:
                continue
            used -= _file_bytes(folder, ("inactive_file", "active_file"))
            for name in ("memory.max", "memory.high"):
                limit = read_int(folder / name)
                if limit is not None:
                    yield HostLimit(_shown(folder / name, root), max(0, limit - max(0, used)))


def _v1_limits(root: Path) -> Iterator[HostLimit]:
    path = cgroup_path(root, controller="memory")
    if path is None:
        return
    for folder in folders(root / _V1_MOUNT, path):
        used = read_int(folder / "memory.usage_in_bytes")
        limit = read_int(folder / "memory.limit_in_bytes")
        if used is None or limit is None:
            continue
        used -= _file_bytes(folder, ("total_inactive_file", "total_active_file"))
        source = _shown(folder / "memory.limit_in_bytes", root)
        yield HostLimit(source, max(0, limit - max(0, used)))


def _cpuset_limits(root: Path) -> Iterator[HostLimit]:
    """What the allowed NUMA nodes have free, where there are others: MemAvailable counts all."""
    nodes = read_nodes(root)
    if nodes and len(nodes) < len(node_folders(root)):
        yield HostLimit("Mems_allowed_list", sum(node.free_bytes for node in nodes))


def _file_bytes(folder: Path, names: tuple[str, str]) -> int:
    """Bytes of file pages in a cgroup's ``memory.stat``."""
    total = 0
    for line in (read_text(folder / "memory.stat") or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in names and words[1].isdigit():
            total += int(words[1])
    return total


def _shown(path: Path, root: Path) -> str:
    return "/" + path.relative_to(root).as_posix()


def give_freed_memory_back() -> None:
    """The C library keeps freed blocks of up to 32 MiB for later: most of a model's tensors."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)
