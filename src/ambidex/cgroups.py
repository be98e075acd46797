"""Where this process stands in the control groups, and files of one number, for what limits it.

All paths are under a ``root``, so that a test can give a made-up machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: Where v2 is mounted: alone, or beside v1.
V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")


def cgroup_path(root: Path, controller: str) -> PurePosixPath | None:
    """This process's path in the hierarchy of ``controller`` ("" is v2's), if there is one."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            return PurePosixPath(parts[2])
    return None


def folders(mount: Path, path: PurePosixPath) -> Iterator[Path]:
    """The folder of ``path``, then its parents up to the mount itself; only those that exist.

    In a container the mount may show the container's own cgroup as its root while the path is
    the host's: then only the mount itself exists, and it is the right one.
    """
    names = [name for name in path.parts if name not in ("/", "..", ".")]
    for count in range(len(names), -1, -1):
        folder = mount.joinpath(*names[:count])
        if folder.is_dir():
            yield folder


def read_int(path: Path) -> int | None:
    """The number in a file; None where there is no file, or it says ``max`` (no limit)."""
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def read_text(path: Path) -> str | None:
    """The text of a file; None where there is none, or it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
