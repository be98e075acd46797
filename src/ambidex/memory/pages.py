"""Pages of memory, taken from the system before they are needed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable

#: Linux 5.14: hand out the pages of a range as if each had been written.
_MADV_POPULATE_WRITE = 23
#: Taken at a time, in bytes: where pages are touched one by one, other threads wait that long.
_CHUNK_BYTES = 64 << 20

#: madvise(address, bytes) -> 0, or an error number.
Populate = Callable[[int, int], int]


def prefault(address: int, num_bytes: int, populate: Populate | None = None) -> None:
    """Have the system hand out the pages of ``num_bytes`` of this process's memory at ``address``.

    What is in them stays. Nobody may write there meanwhile; other threads run. Raises MemoryError
    where the system has no pages left (or ends the process, as a container's limit does).
    """
    if num_bytes == 0:
        return
    populate = populate or _populate
    page = mmap.PAGESIZE
    first = address // page * page
    # Whole pages: parts of one at either end are of the same mapping.
    end = -(-(address + num_bytes) // page) * page
    is_known = True
    while first < end:
        size = min(_CHUNK_BYTES, end - first)
        code = populate(first, size) if is_known else errno.EINVAL
        if code in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
            # An older kernel, another system, or a sandbox.
            is_known = False
            _touch(max(first, address), min(first + size, address + num_bytes))
        elif code == errno.EINTR:
            continue
        elif code != 0:
            raise MemoryError(os.strerror(code))
        first += size


def _touch(begin: int, end: int) -> None:
    """Write one byte of each page of [begin, end) with what it holds."""
    memory = memoryview((ctypes.c_ubyte * (end - begin)).from_address(begin)).cast("B")
    for each in (slice(None, None, mmap.PAGESIZE), slice(-1, None)):
        memory[each] = bytes(memory[each])


def _populate(address: int, num_bytes: int) -> int:
    if not sys.platform.startswith("linux"):
        return errno.ENOSYS
    # Found through ctypes, the call releases the interpreter's lock.
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE
    )
    return 0 if result == 0 else ctypes.get_errno()
