"""What else happened on the machine meanwhile: for the likely cause of slow steps, and for what a
measurement is worth.

All paths are under ``root``, so that a test can give a made-up machine.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from ambidex.cgroups import V2_MOUNTS, cgroup_path, folders, read_text

#: Each is worth naming above this share of the time that went by.
_LARGE_SHARE = 0.1
#: Pages read from disk a second.
_MANY_FAULTS = 10.0


@dataclass(frozen=True, slots=True)
class Strain:
    """Counters of the machine and of this process; all only grow."""

    at_s: float
    #: CPU seconds of everything that runs, of this process, and those that a hypervisor took.
    busy_s: float
    own_s: float
    stolen_s: float
    #: Seconds for which the container's quota stopped this process.
    throttled_s: float
    #: Pages that this process had to wait for the disk for.
    major_faults: int


def read_strain(root: Path = Path("/")) -> Strain:
    """The counters now; what a system does not tell counts as zero."""
    busy_s = stolen_s = 0.0
    first_line = (read_text(root / "proc/stat") or "").partition("\n")[0].split()
    if len(first_line) > 8 and first_line[0] == "cpu":
        ticks = [int(word) for word in first_line[1:9]]
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq, steal = ticks
        busy_s = (user + nice + system + irq + softirq) * tick_s
        stolen_s = steal * tick_s
    own = resource.getrusage(resource.RUSAGE_SELF)
    return Strain(
        at_s=time.monotonic(),
        busy_s=busy_s,
        own_s=own.ru_utime + own.ru_stime,
        stolen_s=stolen_s,
        throttled_s=_throttled_s(root),
        major_faults=own.ru_majflt,
    )


def _throttled_s(root: Path) -> float:
    path = cgroup_path(root, "")
    if path is None:
        return 0.0
    for mount in V2_MOUNTS:
        for folder in folders(root / mount, path):
            for line in (read_text(folder / "cpu.stat") or "").splitlines():
                name, _, value = line.partition(" ")
                if name == "throttled_usec" and value.isdigit():
                    return int(value) / 1e6
    return 0.0


def likely_cause(before: Strain, after: Strain) -> str | None:
    """What slowed this process down in between, in words; None where nothing is seen."""
    elapsed = max(after.at_s - before.at_s, 1e-9)
    if after.throttled_s - before.throttled_s > _LARGE_SHARE * elapsed:
        return (
            f"the container's CPU quota stopped it for {after.throttled_s - before.throttled_s:.1f}"
            f" of {elapsed:.1f} s"
        )
    if after.stolen_s - before.stolen_s > _LARGE_SHARE * elapsed:
        return (
            f"the hypervisor took {after.stolen_s - before.stolen_s:.1f} CPU seconds "
            f"in {elapsed:.1f} s"
        )
    if (after.major_faults - before.major_faults) / elapsed > _MANY_FAULTS:
        return (
            f"{after.major_faults - before.major_faults} pages had to be read from disk: "
            "memory is short"
        )
    others = other_cpus(before, after)
    if others:
        return f"other programs used {others:.1f} of the machine's CPUs"
    return None


def other_cpus(before: Strain, after: Strain) -> float:
    """How many of the machine's CPUs other programs kept busy in between, on average; 0 where that
    is too little to matter."""
    elapsed = max(after.at_s - before.at_s, 1e-9)
    others = ((after.busy_s - before.busy_s) - (after.own_s - before.own_s)) / elapsed
    return others if others > _LARGE_SHARE else 0.0
