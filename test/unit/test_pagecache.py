"""Reading what is wanted once: from the disk past the page cache, or from the cache what it has."""

import mmap
import os

import pytest
import torch
from safetensors.torch import save_file

from ltx_neuron.errors import UserError
from ltx_neuron.weights import pagecache
from ltx_neuron.weights.tensorfile import TensorFile

ROWS, WIDTH = 600, 1001  # no whole number of pages, and more of them than the least scratch has


@pytest.fixture
def file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, generator=generator),
        "b": torch.randn(ROWS, WIDTH, generator=generator),
    }
    save_file(tensors, tmp_path / "file.safetensors")
    return TensorFile(tmp_path / "file.safetensors", "make it again")


def drop(path) -> bool:
    """Take a file out of the cache; whether this file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return not cached(path)


def cached(path, offset=0, size=None):
    with open(path, "rb") as opened:
        return pagecache.is_cached(
            pagecache.map_pages(opened.fileno(), offset, size or path.stat().st_size)
        )


@pytest.mark.parametrize("rows", [(0, 1), (0, ROWS), (7, 8), (1, 599), (599, 600)], ids=str)
def test_rows_that_pass_by_are_those_of_the_file_and_the_cache_has_none_of_them(file, rows):
    wanted = file.read("b", *rows)
    dropped = drop(file.path)
    scratch = pagecache.scratch(wanted.nbytes)
    assert torch.equal(file.read_uncached("b", *rows, scratch), wanted)
    assert (
        wanted.numpy().tobytes() in scratch[:]
    ) == dropped  # a file system in memory has all of it in the cache
    assert (
        cached(file.path, file.size // 2 // mmap.PAGESIZE * mmap.PAGESIZE, mmap.PAGESIZE) != dropped
    )


def test_what_the_cache_has_is_not_read_from_the_disk_again(file, monkeypatch):
    file.path.read_bytes()
    assert cached(file.path)
    monkeypatch.setattr(pagecache, "read_direct", lambda *_: pytest.fail("read from the disk"))
    assert torch.equal(
        file.read_uncached("b", 0, ROWS, pagecache.scratch(file.size)), file.read("b")
    )


def test_what_is_larger_than_the_scratch_is_whole_all_the_same(file):
    drop(file.path)
    assert torch.equal(file.read_uncached("b", 0, ROWS, pagecache.scratch(0)), file.read("b"))


def test_a_file_system_that_cannot_read_past_its_cache_gives_the_same_rows(file, monkeypatch):
    drop(file.path)
    monkeypatch.setattr(pagecache, "read_direct", lambda *_: None)
    assert torch.equal(
        file.read_uncached("b", 3, 200, pagecache.scratch(file.size)), file.read("b", 3, 200)
    )


def test_a_kernel_that_cannot_fetch_at_once_gives_the_same_rows(file, monkeypatch):
    drop(file.path)
    monkeypatch.setattr(pagecache, "_POPULATE_READ", 9999)
    assert torch.equal(file.read_mapped("b", 3, 200), file.read("b", 3, 200))


@pytest.mark.parametrize("left", [mmap.PAGESIZE, mmap.PAGESIZE + 100, 0], ids=str)
def test_a_file_cut_short_meanwhile_is_an_error_that_names_it(file, left):
    drop(file.path)
    os.truncate(file.path, left)
    with pytest.raises(UserError, match="file.safetensors is not a whole safetensors file"):
        file.read_uncached("b", 0, ROWS, pagecache.scratch(file.size))
