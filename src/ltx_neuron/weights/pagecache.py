"""Reading past the system's page cache, for what is wanted once, and asking what the cache has.

A page that goes through the cache is first made, then copied or mapped, then taken away from
something else: that costs more processor time than all else a byte needs on its way
(benchmarks/shard_full_size.md). What the cache has already is faster there than on any disk.
"""

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_HUGE_PAGE = 2 * 2**20
# madvise: read and map now, with an error where that fails; not named by Python 3.11
_POPULATE_READ = 22
_UNABLE = (
    errno.EINVAL,
    errno.EOPNOTSUPP,
)  # of a file system that cannot, and of a kernel that does not know it


def scratch(size: int) -> mmap.mmap:
    """Memory for `size` bytes from any place of a file: those before them in the first page come
    too.

    Of huge pages: a disk writes to few long stretches of memory three times as fast as to many
    short ones.
    """
    length = -(-(size + mmap.PAGESIZE) // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def map_pages(file: int, offset: int, size: int) -> mmap.mmap:
    """A file's pages from `offset`, a multiple of the page size, without reading them. Writing to
    it changes no file."""
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY, offset=offset)


def is_cached(pages: mmap.mmap) -> bool:
    """Whether the cache has the whole of a window. True also where the system does not tell
    (another user's file)."""
    states = ctypes.create_string_buffer(_pages(len(pages)))
    first = ctypes.c_char.from_buffer(pages)
    if _LIBC.mincore(ctypes.byref(first), ctypes.c_size_t(len(pages)), states):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return b"\0" not in states.raw


def populate(pages: mmap.mmap) -> None:
    """Have the whole of a window in the cache and in the process. OSError where the file cannot be
    read."""
    try:
        pages.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pages.madvise(
            mmap.MADV_WILLNEED
        )  # a kernel before 5.14: it begins to read, and does not say what fails


def read_direct(path: Path, offset: int, size: int, into: mmap.mmap) -> int | None:
    """Read from the disk to memory; returns the bytes that came, fewer than `size` where the file
    ends.

    `offset` is a multiple of the page size, `into` has whole pages for the bytes. None if this file
    system cannot.
    """
    view, got = memoryview(into)[: _pages(size) * mmap.PAGESIZE], 0
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            while got < size and (count := os.preadv(file, [view[got:]], offset + got)):
                got += count
                if count % mmap.PAGESIZE:  # the file's end
                    break
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _UNABLE:
            return None
        raise
    return min(got, size)


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE)
