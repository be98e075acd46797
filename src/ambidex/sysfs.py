"""What Linux tells of NUMA nodes and devices below ``/sys``, and its lists of CPUs.

All paths are under a ``root``, so that a test can give a made-up machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ambidex.cgroups import read_int, read_text

#: Domain (four digits, or eight as NVML writes it), bus, device, function.
_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


def parse_cpus(text: str) -> tuple[int, ...] | None:
    """The numbers of ``0-3,8``, as they stand there, each once; None where it is no such list."""
    numbers: dict[int, None] = {}
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()):
            return None
        if dash and not (last.isascii() and last.isdigit()):
            return None
        try:
            low, high = int(first), int(last or first)
        except ValueError:  # Python reads no number of thousands of digits.
            return None
        # Far beyond what a kernel can be built for; a range must not fill the memory.
        if high < low or high >= 2**16:
            return None
        numbers.update(dict.fromkeys(range(low, high + 1)))
    return tuple(numbers)


def format_cpus(cpus: Iterable[int]) -> str:
    """``0-3,8``: the reverse of :func:`parse_cpus`, ascending."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def status_list(root: Path, name: str) -> tuple[int, ...] | None:
    """A list of this process's status, such as ``Cpus_allowed_list``; None where there is none.

    Of the process rather than of this thread, which may be pinned already.
    """
    for line in (read_text(root / "proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return parse_cpus(value)
    return None


def node_folders(root: Path) -> dict[int, Path]:
    """The folder of each NUMA node that is online, ascending; empty where the system tells none."""
    folder = root / "sys/devices/system/node"
    numbers = parse_cpus(read_text(folder / "online") or "")
    return {number: folder / f"node{number}" for number in sorted(numbers or ())}


def node_distances(root: Path, number: int) -> dict[int, int]:
    """How far each node is from node ``number``, in the system's units (10 is itself)."""
    folders = node_folders(root)
    folder = folders.get(number)
    words = (read_text(folder / "distance") or "").split() if folder else []
    # A row has a number for each node that is online, in their order, whatever their numbers.
    if len(words) != len(folders) or not all(word.isdigit() for word in words):
        return {}
    return {other: int(word) for other, word in zip(folders, words, strict=True)}


def device_node(address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of the PCI device at ``address`` (``0000:3b:00.0``; capitals and the eight
    digits of ``00000000:3B:00.0`` are the same); None where the system does not know it.

    Raises ValueError for what is no such address.
    """
    match = _PCI_ADDRESS.fullmatch(address.strip().lower())
    if match is None:
        raise ValueError(f"{address!r} is not the address of a PCI device, as 0000:3b:00.0 is.")
    domain = int(match[1] or "0", 16)
    # The system writes -1, which is no number to read_int, where the firmware does not say.
    return read_int(root / f"sys/bus/pci/devices/{domain:04x}:{match[2]}/numa_node")
