"""Pages of a packed weight on the node whose threads read them.

Chunks of a weight (its panels) are split among workers as ``Worker::next`` does: of n chunks,
worker w of k has those from n * w // k to n * (w + 1) // k. On one node nothing is done.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

#: A preference, not a demand: a full node spills over instead of ending the process.
_MPOL_PREFERRED = 1
#: Pages that are there already move, those that only this process uses.
_MPOL_MF_MOVE = 2
#: mbind where there is no libnuma.
_SYSCALLS = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}

#: mbind(address, bytes, node) -> 0, or an error number.
Bind = Callable[[int, int, int], int]


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of a weight, from ``start`` on, whose readers are on ``node``."""

    node: int
    start: int
    num_bytes: int


def node_shares(num_chunks: int, chunk_bytes: int, nodes: Sequence[int]) -> list[Share]:
    """What the threads of each node read first of ``num_chunks`` chunks of equal size.

    ``nodes``: the node of each worker, ``ThreadPlan.nodes``. Neighbours on one node are joined.
    """
    shares: list[Share] = []
    for worker, node in enumerate(nodes):
        first = num_chunks * worker // len(nodes)
        end = num_chunks * (worker + 1) // len(nodes)
        if first == end:
            continue
        size = (end - first) * chunk_bytes
        if shares and shares[-1].node == node:
            size += shares[-1].num_bytes
            shares[-1] = Share(node, shares[-1].start, size)
        else:
            shares.append(Share(node, first * chunk_bytes, size))
    return shares


class PagePlacer:
    """Puts pages on nodes; one for all weights of a lane, so that a refusal is told once.

    Containers often refuse it (EPERM, ENOSYS): then pages stay where the system put them, which
    costs speed only.
    """

    def __init__(
        self, nodes: Sequence[int], bind: Bind | None = None, page_bytes: int | None = None
    ) -> None:
        self.nodes = tuple(nodes)
        self._page_bytes = page_bytes or os.sysconf("SC_PAGE_SIZE")
        self._bind = bind
        self._works = len(set(self.nodes)) > 1

    def place(self, address: int, num_chunks: int, chunk_bytes: int) -> bool:
        """Binds the pages of ``num_chunks * chunk_bytes`` bytes at ``address``.

        A page with bytes of two nodes goes to the one that has its first byte. False where there
        is nothing to do, or the system refuses.
        """
        if not self._works:
            return False
        if self._bind is None:
            self._bind = _system_bind()
        for first, size, node in self._pages(address, num_chunks, chunk_bytes):
            code = self._bind(first, size, node)
            if code != 0:
                self._works = False
                logger.warning(
                    "the system refuses to place memory on NUMA node %d (mbind: %s), so weights "
                    "stay where they are and threads of other nodes read them more slowly; in a "
                    "container the capability SYS_NICE allows it",
                    node,
                    errno.errorcode.get(code, code),
                )
                return False
        return True

    def _pages(
        self, address: int, num_chunks: int, chunk_bytes: int
    ) -> Iterator[tuple[int, int, int]]:
        """(address, bytes, node) of whole pages that lie in this memory, without overlaps."""
        page = self._page_bytes
        end = (address + num_chunks * chunk_bytes) // page * page
        for share in node_shares(num_chunks, chunk_bytes, self.nodes):
            # Rounded up on both sides; what is only partly ours at either end is left alone.
            first = -(-(address + share.start) // page) * page
            last = min(end, -(-(address + share.start + share.num_bytes) // page) * page)
            if first < last:
                yield first, last - first, share.node


def _system_bind() -> Bind:
    """mbind of libnuma where it is installed, else the system call itself."""
    if platform.system() != "Linux":
        return lambda address, num_bytes, node: errno.ENOSYS
    leading: tuple[ctypes.c_long, ...] = ()
    try:
        function = ctypes.CDLL("libnuma.so.1", use_errno=True).mbind
    except (OSError, AttributeError):
        # Not installed: the system call does.
        if platform.machine() not in _SYSCALLS:
            return lambda address, num_bytes, node: errno.ENOSYS
        function = ctypes.CDLL(None, use_errno=True).syscall
        leading = (ctypes.c_long(_SYSCALLS[platform.machine()]),)
    function.restype = ctypes.c_long

    def bind(address: int, num_bytes: int, node: int) -> int:
        words = (ctypes.c_ulong * (node // 64 + 1))()
        words[node // 64] = 1 << (node % 64)
        # The kernel counts one bit less than it is told.
        num_bits = ctypes.c_ulong(64 * len(words) + 1)
        result = function(
            *leading,
            ctypes.c_void_p(address),
            ctypes.c_ulong(num_bytes),
            ctypes.c_int(_MPOL_PREFERRED),
            words,
            num_bits,
            ctypes.c_uint(_MPOL_MF_MOVE),
        )
        return 0 if result == 0 else ctypes.get_errno()

    return bind
