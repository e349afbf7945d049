"""The system's page cache: what it holds, and reading past it what is wanted only once.

A page that is read through the cache has to be allocated, filled, copied or mapped, and later
evicted: that costs more processor time than all else that sharding does with a byte
(benchmarks/trust.md). What the cache holds already is faster there than on any disk.
"""

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_HUGE_PAGE = 2 * 2**20
_POPULATE_READ = 22  # MADV_POPULATE_READ (Linux 5.14), which Python 3.11 does not name
# Of a file system without direct reads, and of a kernel that does not know them.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


def scratch(size: int) -> mmap.mmap:
    """Memory that `size` bytes can be read into from any offset of a file: it has room for the
    bytes that come before them in their first page.

    Huge pages are asked for: a disk fills few long stretches of memory three times as fast as many
    short ones.
    """
    length = -(-(size + mmap.PAGESIZE) // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def map_pages(file: int, offset: int, size: int) -> mmap.mmap:
    """Map `size` bytes of an open file from `offset`, a multiple of the page size, without reading
    them. Writing to the pages does not change the file."""
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY, offset=offset)


def is_cached(pages: mmap.mmap) -> bool:
    """Whether the page cache holds all pages of a mapping. True also where the system does not
    tell (another user's file)."""
    states = ctypes.create_string_buffer(_pages(len(pages)))
    first = ctypes.c_char.from_buffer(pages)
    if _LIBC.mincore(ctypes.byref(first), ctypes.c_size_t(len(pages)), states):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return b"\0" not in states.raw


def populate(pages: mmap.mmap) -> None:
    """Read all pages of a mapping into the cache and map them into the process. OSError where the
    file cannot be read."""
    try:
        pages.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel before 5.14: this begins to read and reports no error.
        pages.madvise(mmap.MADV_WILLNEED)


def read_direct(path: Path, offset: int, size: int, into: mmap.mmap) -> int | None:
    """Read `size` bytes of a file from the disk into memory, past the page cache.

    offset  a multiple of the page size
    into    memory with room for `size` bytes in whole pages

    Returns the bytes read, fewer than `size` where the file ends; None if the file system cannot
    read past its cache.
    """
    view, done = memoryview(into)[: _pages(size) * mmap.PAGESIZE], 0
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            while done < size and (count := os.preadv(file, [view[done:]], offset + done)):
                done += count
                if count % mmap.PAGESIZE:  # the file's end
                    break
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return min(done, size)


def _pages(size: int) -> int:
    """How many pages hold `size` bytes."""
    return -(-size // mmap.PAGESIZE)
