"""How much host memory this process can really have: the machine's and the container's limits.

All paths are under ``root``, so that a test can give a made-up machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: Where the memory controller is mounted: cgroup v2 (alone, or beside v1) and v1.
_V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
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
    """MemAvailable, and what every cgroup (v1 and v2; max and high; parents too) leaves.

    File pages that a cgroup is charged for do not count as used: the kernel drops them first, and
    a model file that was just downloaded or read would else count against itself. Where there is
    no ``/proc`` (macOS) it is a share of the physical memory.
    """
    available = _mem_available_bytes(root)
    if available is None:
        return [_limit_from_sysconf(os.sysconf)]
    return [HostLimit("MemAvailable", available), *_v2_limits(root), *_v1_limits(root)]


def _limit_from_sysconf(sysconf: Callable[[str], int]) -> HostLimit:
    page_bytes = sysconf("SC_PAGE_SIZE")
    try:
        return HostLimit("SC_AVPHYS_PAGES", sysconf("SC_AVPHYS_PAGES") * page_bytes)
    except (ValueError, OSError):
        # macOS has no such name.
        num_bytes = int(sysconf("SC_PHYS_PAGES") * page_bytes * _SHARE_IF_UNKNOWN)
        return HostLimit("SC_PHYS_PAGES", num_bytes)


def _mem_available_bytes(root: Path) -> int | None:
    text = _read(root / "proc/meminfo")
    if text is None:
        return None
    fields = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    if "MemAvailable" in fields:
        return fields["MemAvailable"]
    # Kernels before 3.14.
    if "MemFree" in fields:
        return fields["MemFree"] + fields.get("Cached", 0)
    return None


def _v2_limits(root: Path) -> Iterator[HostLimit]:
    path = _cgroup_path(root, controller="")
    if path is None:
        return
    for mount in _V2_MOUNTS:
        for folder in _folders(root / mount, path):
            used = _read_int(folder / "memory.current")
            if used is None:
                continue
            used -= _file_bytes(folder, ("inactive_file", "active_file"))
            for name in ("memory.max", "memory.high"):
                limit = _read_int(folder / name)
                if limit is not None:
                    yield HostLimit(_shown(folder / name, root), max(0, limit - max(0, used)))


def _v1_limits(root: Path) -> Iterator[HostLimit]:
    path = _cgroup_path(root, controller="memory")
    if path is None:
        return
    for folder in _folders(root / _V1_MOUNT, path):
        used = _read_int(folder / "memory.usage_in_bytes")
        limit = _read_int(folder / "memory.limit_in_bytes")
        if used is None or limit is None:
            continue
        used -= _file_bytes(folder, ("total_inactive_file", "total_active_file"))
        source = _shown(folder / "memory.limit_in_bytes", root)
        yield HostLimit(source, max(0, limit - max(0, used)))


def _cgroup_path(root: Path, controller: str) -> PurePosixPath | None:
    """This process's path in the hierarchy of ``controller`` ("" is v2's), if there is one."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            return PurePosixPath(parts[2])
    return None


def _folders(mount: Path, path: PurePosixPath) -> Iterator[Path]:
    """The folder of ``path``, then its parents up to the mount itself; only those that exist.

    In a container the mount may show the container's own cgroup as its root while the path is
    the host's: then only the mount itself exists, and it is the right one.
    """
    names = [name for name in path.parts if name not in ("/", "..", ".")]
    for count in range(len(names), -1, -1):
        folder = mount.joinpath(*names[:count])
        if folder.is_dir():
            yield folder


def _file_bytes(folder: Path, names: tuple[str, str]) -> int:
    """Bytes of file pages in a cgroup's ``memory.stat``."""
    total = 0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in names and words[1].isdigit():
            total += int(words[1])
    return total


def _read_int(path: Path) -> int | None:
    """The number in a file; None where there is no file, or it says ``max`` (no limit)."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _shown(path: Path, root: Path) -> str:
    return "/" + path.relative_to(root).as_posix()
