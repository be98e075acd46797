"""Pages of weights on NUMA nodes: always one copy, cut into parts.

Where threads of several nodes share a weight, each part lies where its threads are. Chunks of a
weight (its panels) are split among workers as ``Worker::next`` does: of n chunks, worker w of k
has those from n * w // k to n * (w + 1) // k. Else weights can be laid on nodes one behind the
other, as ``memory/nodes.py`` plans. On a machine of one node nothing is done.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Callable, Sequence
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


class Placer:
    """Puts pages on nodes; one for all weights of a lane, so that a refusal is told once.

    Containers often refuse it (EPERM, ENOSYS): then pages stay where the system put them, which
    costs speed only.
    """

    def __init__(self, bind: Bind | None = None, page_bytes: int | None = None) -> None:
        self._page_bytes = page_bytes or os.sysconf("SC_PAGE_SIZE")
        self._bind = bind
        self._works = True
        #: Bytes of whole pages that were placed, by node.
        self.placed_bytes: dict[int, int] = {}

    def place(self, address: int, num_chunks: int, chunk_bytes: int) -> bool:
        """Binds the pages of ``num_chunks * chunk_bytes`` bytes at ``address``.

        A page with bytes of two nodes goes to the one that has its first byte. False where there
        is nothing to do, or the system refuses.
        """
        if not self._works:
            return False
        self._bind = self._bind or system_bind()
        end = address + num_chunks * chunk_bytes
        for share in self._shares(num_chunks, chunk_bytes):
            # Rounded up on both sides; what is only partly ours at either end is left alone.
            first = self._page_after(address + share.start)
            last = min(self._page_after(address + share.start + share.num_bytes), self._page(end))
            if first >= last:
                continue
            code = self._bind(first, last - first, share.node)
            if code != 0:
                self._works = False
                logger.warning(
                    "the system refuses to place memory on NUMA node %d (mbind: %s), so weights "
                    "stay where they are and threads of other nodes read them more slowly; in a "
                    "container the capability SYS_NICE allows it",
                    share.node,
                    errno.errorcode.get(code, code),
                )
                return False
            self.placed_bytes[share.node] = self.placed_bytes.get(share.node, 0) + last - first
        return True

    def _shares(self, num_chunks: int, chunk_bytes: int) -> Sequence[Share]:
        raise NotImplementedError

    def _page(self, address: int) -> int:
        return address // self._page_bytes * self._page_bytes

    def _page_after(self, address: int) -> int:
        return -(-address // self._page_bytes) * self._page_bytes


class PagePlacer(Placer):
    """Cuts every weight: the part that a worker reads goes to its node, one of ``nodes``."""

    def __init__(
        self, nodes: Sequence[int], bind: Bind | None = None, page_bytes: int | None = None
    ) -> None:
        super().__init__(bind, page_bytes)
        self.nodes = tuple(nodes)
        self._works = len(set(self.nodes)) > 1

    def _shares(self, num_chunks: int, chunk_bytes: int) -> Sequence[Share]:
        return node_shares(num_chunks, chunk_bytes, self.nodes)


class FillingPlacer(Placer):
    """Lays weights one behind the other: ``parts`` are (node, bytes) in the order in which they
    are used up, see ``plan_host_memory``. What comes after the last stays where the system puts
    it."""

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        bind: Bind | None = None,
        page_bytes: int | None = None,
    ) -> None:
        super().__init__(bind, page_bytes)
        self._left = [Share(node, 0, size) for node, size in parts if size]
        self._works = bool(self._left)

    def _shares(self, num_chunks: int, chunk_bytes: int) -> Sequence[Share]:
        shares = []
        start, size = 0, num_chunks * chunk_bytes
        while start < size and self._left:
            node, room = self._left[0].node, self._left[0].num_bytes
            taken = min(room, size - start)
            shares.append(Share(node, start, taken))
            start += taken
            self._left[:1] = [Share(node, 0, room - taken)] if taken < room else []
        return shares


def system_bind() -> Bind:
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
