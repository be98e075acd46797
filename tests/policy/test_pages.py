"""Pages that are taken before they are needed: all of them, and with what was in them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from collections.abc import Callable

import pytest

from ambidex.memory.pages import Populate, _populate, prefault

PAGE = mmap.PAGESIZE
NUM_PAGES = 64

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")


def address_of(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(area))


def resident_pages(area: mmap.mmap) -> list[bool]:
    """Whether each page is there, as the kernel says."""
    first = address_of(area) // PAGE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = file.read(8 * (len(area) // PAGE))
    return [
        bool(int.from_bytes(entries[i : i + 8], sys.byteorder) >> 63)
        for i in range(0, len(entries), 8)
    ]


def area_of(num_pages: int) -> mmap.mmap:
    area = mmap.mmap(-1, num_pages * PAGE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        area.madvise(mmap.MADV_NOHUGEPAGE)
    return area


def refuse(code: int) -> Callable[[int, int], int]:
    return lambda address, num_bytes: code


@needs_linux
@pytest.mark.parametrize(
    "populate", [None, refuse(errno.EINVAL), refuse(errno.ENOSYS)], ids=["new", "old", "sandbox"]
)
@pytest.mark.parametrize("chunk", [1 << 30, 5 * PAGE])
def test_every_page_is_there_and_keeps_its_bytes(
    monkeypatch: pytest.MonkeyPatch, populate: Populate | None, chunk: int
) -> None:
    monkeypatch.setattr("ambidex.memory.pages._CHUNK_BYTES", chunk)
    area = area_of(NUM_PAGES)
    area[3 * PAGE + 5] = 77
    assert sum(resident_pages(area)) == 1
    prefault(address_of(area), NUM_PAGES * PAGE, populate)
    assert all(resident_pages(area))
    assert area[3 * PAGE + 5] == 77
    assert bytes(area).count(b"\0") == NUM_PAGES * PAGE - 1


@needs_linux
@pytest.mark.parametrize("populate", [None, refuse(errno.EINVAL)], ids=["new", "old"])
@pytest.mark.parametrize(("start", "size"), [(PAGE - 1, 2), (PAGE + 9, 3 * PAGE), (100, 50)])
def test_parts_of_pages(populate: Populate | None, start: int, size: int) -> None:
    """Memory need not begin and end with a page, and no other page is taken."""
    area = area_of(NUM_PAGES)
    prefault(address_of(area) + start, size, populate)
    touched = {i for i, is_there in enumerate(resident_pages(area)) if is_there}
    assert touched == set(range(start // PAGE, (start + size - 1) // PAGE + 1))


def test_nothing_is_nothing() -> None:
    prefault(0, 0, refuse(errno.ENOMEM))


def test_what_the_system_says() -> None:
    area = area_of(2)
    with pytest.raises(MemoryError, match="annot allocate"):
        prefault(address_of(area), 2 * PAGE, refuse(errno.ENOMEM))
    answers = [errno.EINTR, 0]
    prefault(address_of(area), 2 * PAGE, lambda address, num_bytes: answers.pop(0))
    assert answers == []


def test_once_refused_it_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ambidex.memory.pages._CHUNK_BYTES", PAGE)
    area, asked = area_of(8), []

    def old_kernel(address: int, num_bytes: int) -> int:
        asked.append((address, num_bytes))
        return errno.EINVAL

    prefault(address_of(area), 8 * PAGE, old_kernel)
    assert asked == [(address_of(area), PAGE)]


@needs_linux
def test_memory_that_is_not_ours() -> None:
    """The system's own answer, if it knows the call."""
    assert _populate(0x1000, PAGE) in (errno.ENOMEM, errno.EINVAL, errno.ENOSYS)
