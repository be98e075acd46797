"""How fast the memory of each NUMA node is read, measured."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ambidex.kernels.cpu.numa import Bind, system_bind
from ambidex.memory.nodes import MemoryNode

logger = logging.getLogger(__name__)

#: More than the caches of most machines hold; written and read in a second or so.
_PROBE_BYTES = 512 << 20
#: A node that cannot spare this much is not measured: what the caches hold would be.
_LEAST_BYTES = 64 << 20
_PASSES = 3

#: read(node, bytes, threads) -> bytes per second, or None.
Read = Callable[[int, int, int], float | None]


def measure_nodes(
    nodes: Sequence[MemoryNode], threads: int, read: Read | None = None
) -> dict[int, float]:
    """Bytes per second by node, of nodes that can spare the memory, measured one after the other.

    Nothing after a node whose memory the system does not give: it would give no other's.
    """
    measured: dict[int, float] = {}
    for node in nodes:
        # A quarter: the rest of the machine goes on.
        num_bytes = min(_PROBE_BYTES, node.free_bytes // 4)
        if num_bytes < _LEAST_BYTES:
            continue
        speed = (read or read_bandwidth)(node.id, num_bytes, threads)
        if speed is None:
            break
        measured[node.id] = speed
    return measured


def read_bandwidth(
    node: int, num_bytes: int, threads: int, bind: Bind | None = None
) -> float | None:
    """Bytes per second with which ``threads`` threads, where the caller may run, read
    ``num_bytes`` of memory on ``node``; the best of some passes.

    None, and a warning, where the system refuses to place memory (containers often do).
    """
    assert threads > 0 and num_bytes >= 8 * threads, "every thread reads something"
    area = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # As weights are. Kernels without huge pages do not know it.
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
    words = np.frombuffer(area, np.uint64, num_bytes // 8)
    code = (bind or system_bind())(words.ctypes.data, num_bytes, node)
    if code != 0:
        logger.warning(
            "how fast the memory of NUMA node %d is stays unknown: the system refuses to place "
            "memory there (mbind: %s); in a container the capability SYS_NICE allows it",
            node,
            errno.errorcode.get(code, code),
        )
        return None
    # Memory that was never written is one page of zeros.
    words.fill(1)
    return num_bytes / min(_read_s(np.array_split(words, threads)) for _ in range(_PASSES))


def _read_s(parts: Sequence[np.ndarray]) -> float:
    """Seconds from the first thread's start to the last one's end."""
    barrier = threading.Barrier(len(parts))

    def read(part: np.ndarray) -> tuple[float, float]:
        barrier.wait()
        began = time.perf_counter()
        # The other threads run meanwhile: numpy lets go of the interpreter's lock.
        np.bitwise_or.reduce(part)
        return began, time.perf_counter()

    with ThreadPoolExecutor(len(parts)) as pool:
        times = list(pool.map(read, parts))
    return max(end for _, end in times) - min(began for began, _ in times)
