"""Tensors are read as they were written, whatever their layout; files cut short and lacks of the machine are errors."""

import errno
import json
import mmap
import os
import resource
import threading
from types import SimpleNamespace

import pytest
import torch
from blake3 import blake3
from helpers import exit_code, forked, one_thread, randn, save_weights  # noqa: F401
from safetensors.torch import save_file

from ltx_neuron.backends.torchdist.rank import Rank
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_json
from ltx_neuron.weights import tensorfile
from ltx_neuron.weights.rankfiles import rank_file
from ltx_neuron.weights.tensorfile import TensorFile

VALUES = {
    "bias": torch.arange(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(70, dtype=torch.float16).view(7, 10),
    "scale": torch.tensor(2.0),
    "long": torch.arange(999),
    **{f"small.{number}": torch.full((1,), number % 256, dtype=torch.uint8) for number in range(1500)},
}


@pytest.fixture
def stored(tmp_path):
    """stored(tensors): an opened file of them."""

    def file(**tensors: torch.Tensor) -> TensorFile:
        save_file(tensors, tmp_path / "file.safetensors")
        return TensorFile(tmp_path / "file.safetensors", "DOWNLOAD")

    return file


@pytest.mark.parametrize("group", [1, 100, 10_000])
def test_all_tensors_are_read_as_they_were_written_and_may_be_replaced_in_place(stored, monkeypatch, group):
    monkeypatch.setattr(tensorfile, "_GROUP_BYTES", group)
    file = stored(**VALUES)
    read = dict(file.tensors())
    assert list(read) == list(file.shapes) and read.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value), name
        assert read[name].data_ptr() % 64 == 0 and read[name].is_contiguous()
        read[name].fill_(1)
    assert all((tensor == 1).all() for tensor in read.values())


@pytest.mark.parametrize("populate", [tensorfile._POPULATE_READ, 9999], ids=["populate", "an older kernel"])
def test_rows_that_begin_anywhere_are_read_and_mapped(stored, monkeypatch, populate):
    monkeypatch.setattr(tensorfile, "_POPULATE_READ", populate)
    values = randn(600, 1001)  # no whole number of pages
    file = stored(a=values[0, :3].clone(), b=values)
    for start, stop in ((0, 1), (0, 600), (7, 8), (1, 599), (599, 600), (3, 3)):
        for read in (file.read, file.read_mapped):
            assert torch.equal(read("b", start, stop), values[start:stop])


@pytest.mark.parametrize("left", [mmap.PAGESIZE, mmap.PAGESIZE + 100, 0, -4], ids=str)
def test_a_file_cut_short_meanwhile_is_an_error_that_names_it_and_leaves_no_thread(stored, left):
    file = stored(a=randn(600, 1001))
    threads = threading.active_count()
    os.truncate(file.path, left if left >= 0 else file.size + left)
    for read in (file.read, file.read_mapped, lambda _: dict(file.tensors())):
        with pytest.raises(UserError, match="file.safetensors is not a whole .*: it ends .*within a tensor .*\n.*DOWN"):
            read("a")
    assert threading.active_count() == threads


def test_a_tensor_read_into_memory_outlives_its_file(stored, monkeypatch):
    file = stored(a=torch.ones(10_000))

    def never(*_, **__):
        raise AssertionError("a mapping, which a file cut short would end with SIGBUS")

    monkeypatch.setattr(mmap, "mmap", never)
    tensor = file.read("a", 1, 9999)
    os.truncate(file.path, 0)
    assert torch.equal(tensor, torch.ones(9998))


@pytest.mark.parametrize(("number", "damaged"), [(errno.EMFILE, False), (errno.ENOMEM, False), (errno.EIO, True)])
def test_what_the_machine_lacks_is_not_blamed_on_the_file(stored, monkeypatch, number, damaged):
    file = stored(a=torch.ones(4))

    def cannot(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mmap, "mmap", cannot)
    monkeypatch.setattr(os, "preadv", cannot)
    for read in (file.read, file.read_mapped, lambda _: dict(file.tensors())):
        with pytest.raises(UserError) as error:
            read("a")
        assert (str(error.value) == f"{file.path}: {os.strerror(number)}") is not damaged
        assert ("DOWNLOAD" in str(error.value)) is damaged


COUNT, MEGABYTE = 160, 10**6


def test_loading_keeps_one_copy_in_memory_and_none_of_what_is_copied_to_a_device(tmp_path, monkeypatch):
    names = [f"w{number}" for number in range(COUNT)]
    save_weights(tmp_path, {name: torch.zeros(1) for name in names})
    path, manifest = tmp_path / rank_file(0), read_json(tmp_path / MANIFEST)
    size = 4 * MEGABYTE
    offsets = [[size * n, size * (n + 1)] for n in range(COUNT)]
    entries = [{"dtype": "F32", "shape": [MEGABYTE], "data_offsets": place} for place in offsets]
    text = json.dumps(dict(zip(names, entries, strict=True))).encode()
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header)
    os.truncate(path, len(header) + COUNT * size)  # sparse
    manifest["files"][path.name]["header_blake3"] = blake3(header).hexdigest()
    write_json(tmp_path / MANIFEST, manifest)
    monkeypatch.setattr(tensorfile, "_GROUP_BYTES", 20 * MEGABYTE)

    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731

    def load() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # fewer open files than tensors
        file, before = TensorFile(path, ""), peak()
        for _, tensor in file.tensors():
            assert tensor.sum() == 0
        # The group at hand, and three that are read ahead; 220 MB for the code depend on the system.
        assert peak() - before < 4 * 20 * MEGABYTE + 220 * MEGABYTE
        rank = SimpleNamespace(weights={}, weight_file=0, device=torch.device("cpu"))
        kept = Rank._load_weights(rank, tmp_path, file.shapes, torch.float32)
        assert kept.keys() == file.shapes.keys()
        assert COUNT * size < peak() - before < 1.1 * COUNT * size + 200 * MEGABYTE

    assert exit_code(forked(load)) == 0


def test_a_tensor_in_an_unknown_dtype_is_refused_by_name_when_it_is_read(stored):
    file = stored(a=torch.ones(4), b=torch.ones(4).to(torch.float8_e5m2))
    assert torch.equal(file.read("a"), torch.ones(4))
    for read in (file.read, file.read_mapped, file.prefetch, file.torch_dtype, lambda _: list(file.tensors())):
        with pytest.raises(UserError, match="b is stored as F8_E5M2, which is not .*BF16(?s:.*)DOWN"):
            read("b")


@pytest.mark.parametrize("shape", [[-1, -4], [2.0, 2], [True, 4]], ids=str)
def test_a_header_with_sizes_that_are_no_whole_numbers_is_refused(tmp_path, shape):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(UserError, match="sizes and offsets must be whole numbers"):
        TensorFile(path, "")


def test_a_named_pipe_is_no_tensor_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: that is a named pipe, wanted a regular file"):
        TensorFile(tmp_path / "pipe", "")
