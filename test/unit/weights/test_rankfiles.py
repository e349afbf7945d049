"""Weight sets are verified by their manifest; damaged or foreign files are never loaded, others read as written."""

import errno
import json
import mmap
import os
import re
import resource
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from blake3 import blake3
from fuzz import on_random
from helpers import locked, one_thread, randn, said_to_an_ordinary_user, save_weights  # noqa: F401
from hypothesis import assume
from safetensors.torch import save_file

from ltx_neuron import artifacts
from ltx_neuron.backends.torchdist.rank import Rank
from ltx_neuron.engine import residency
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_checked, write_json
from ltx_neuron.weights import rankfiles, tensorfile
from ltx_neuron.weights.rankfiles import HOST_FILE, is_finished, load_rank_file, rank_file, verify
from ltx_neuron.weights.tensorfile import TORCH_DTYPES, TensorFile

MEGABYTE = 10**6
SLOWEST = 1.0  # CPU seconds until a damaged file is refused, whatever is wrong with it
TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(2, 3), "scale": torch.tensor(2.0)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.fixture
def folder(tmp_path):
    """A weight set of three ranks."""
    return save_weights(tmp_path / "weights", *[TENSORS] * 3)


def test_files_without_permission_are_not_called_damaged_nor_to_be_deleted(folder, monkeypatch):
    monkeypatch.setattr(artifacts, "folder", lambda *_: folder)
    identity = read_json(folder / MANIFEST)["identity"]
    find = partial(artifacts.find, folder.parent, identity, "COMMAND")
    for path in (folder / rank_file(1), folder / MANIFEST):
        uses = (lambda: verify(folder, quick=True)), (lambda: is_finished(folder, identity)), find
        with locked(path):
            for use in (*uses, lambda path=path: TensorFile(path, "DOWNLOAD")):
                printed = said_to_an_ordinary_user(use)
                assert printed.startswith(f"NoPermission: {path}: you may not read or write it")
                assert not re.search("rm -r|[Dd]elete|damaged|DOWNLOAD", printed)
    with locked(folder):  # as the folder of all weight sets
        printed = said_to_an_ordinary_user(find)
        assert printed.startswith(f"NoPermission: --artifacts-dir {folder}/") and "COMMAND" not in printed


def test_after_a_rank_refused_its_file_only_a_readable_folder_is_to_be_deleted(folder):
    def refused_by_the_ranks():
        with residency._remedy(folder):
            raise UserError("in the words of a rank")

    with locked(folder / rank_file(1)):
        assert "elete" not in said_to_an_ordinary_user(refused_by_the_ranks)
    with pytest.raises(UserError, match="words of a rank\nDelete "):
        refused_by_the_ranks()


def test_strict_loading_lists_every_problem_at_once(tmp_path):
    path, bf16 = tmp_path / "rank0.safetensors", torch.ones(4, dtype=torch.bfloat16)
    save_file({"kept": torch.ones(2, 3), "recast": bf16, "reshaped": torch.ones(2), "extra": torch.ones(1)}, path)
    shapes = {"kept": (2, 3), "recast": (4,), "reshaped": (3,), "lost": (1,), "lost too": (1,)}
    with pytest.raises(UserError) as error:
        load_rank_file(path, shapes, torch.float32)
    title, *problems = map(str.strip, str(error.value).splitlines())
    assert title == f"{path} does not have this model's weights:"
    assert problems[:3] == ["missing: lost", "missing: lost too", "recast: (4,) BF16, wanted (4,) F32"]
    assert problems[3:] == ["reshaped: (2,) F32, wanted (3,) F32", "unexpected: extra"]


def test_a_file_with_another_header_than_its_manifest_has_is_refused(folder):
    """Two tensors of one shape change places: names, shapes and dtypes are all as wanted."""
    path, order = folder / rank_file(0), dict(reversed(SHAPES.items()))
    loaded = load_rank_file(path, order, torch.float32)
    assert list(loaded) == list(order) and all(torch.equal(loaded[name], TENSORS[name]) for name in order)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"a.', b'"c.').replace(b'"b.', b'"a.').replace(b'"c.', b'"b.'))
    with pytest.raises(UserError, match="the header differs"):
        load_rank_file(path, SHAPES, torch.float32)
    assert not rankfiles.open_host_file(folder).shapes
    (folder / HOST_FILE).write_bytes(content)
    with pytest.raises(UserError, match="the header differs"):
        rankfiles.open_host_file(folder)


def test_a_manifest_with_the_digest_of_another_header_or_with_an_entry_without_digests_is_found(folder):
    manifest, name = read_json(folder / MANIFEST), rank_file(0)
    entry = manifest["files"][name]
    for changed, problem in (
        (entry | {"header_blake3": "0" * 64}, f"{name}: header differs from its blake3"),
        ({"bytes": entry["bytes"]}, "wanted size and digests of every file"),
    ):
        write_json(folder / MANIFEST, manifest | {"files": manifest["files"] | {name: changed}})
        (found,) = rankfiles.verify(folder)
        assert problem in found


def test_of_sound_alone_a_part_of_the_file_is_loaded_and_no_tensor_of_it_is_left_out(tmp_path):
    part = {"audio_patchify_proj.weight": (2,), "audio_patchify_proj.bias": (2,)}
    tensors = {name: torch.ones(2) for name in (*part, "patchify_proj.weight")}
    path = save_weights(tmp_path, tensors) / rank_file(0)
    assert [*load_rank_file(path, part, torch.float32)] == [*part]
    with pytest.raises(UserError, match="unexpected: audio_patchify_proj.bias"):
        load_rank_file(path, {"audio_patchify_proj.weight": (2,)}, torch.float32)


def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(folder):
    manifest = read_json(folder / MANIFEST)
    manifest["files"]["../secret"] = manifest["files"].pop(HOST_FILE)
    write_checked(folder, manifest)
    assert "does not describe a weight set" in verify(folder)[0]
    with pytest.raises(UserError, match="does not describe a weight set"):
        rankfiles.rank_path(folder, 0)


def mutated(right: bytes, limit: int, chance: Random) -> bytes:
    """One of the things that happen to files; only the first `limit` bytes are changed, anything may be cut off."""
    at = chance.randrange(limit)
    digit = chance.choice([i for i in range(limit) if chr(right[i]).isdigit()])
    texts = b"[" * 5000, b"9" * 400, b'{"a":', b"\x00", b"\xff\xfe", b"-", b"1e999", b"../", b"NaN"
    bit, end = bytes([right[at] ^ 1 << chance.randrange(8)]), chance.randrange(at, limit)
    return chance.choice(
        [
            right[:at] + bit + right[at + 1 :],
            right[:at] + chance.randbytes(8) + right[at + 8 :],
            right[: chance.randrange(len(right))],
            right[:at] + right[at + chance.randrange(1, 40) :],
            right[:at] + chance.choice(texts) + right[at:],
            right[:digit] + b"%d" % chance.randrange(10) + right[digit + 1 :],
            right[:at] + right[at:end][::-1] + right[end:],
        ]
    )


def meaning(manifest: bytes):
    """What of a manifest the loader goes by; None where it is none."""
    try:
        described = json.loads(manifest)
        return described["files"], described["identity"]["tp"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def test_damaged_headers_and_manifests_are_refused_at_once_without_much_memory(folder):
    rank, manifest = folder / rank_file(0), folder / MANIFEST
    right = {path: path.read_bytes() for path in (rank, manifest)}
    limits = {rank: 8 + int.from_bytes(right[rank][:8], "little"), manifest: len(right[manifest])}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def read() -> None:
        load_rank_file(rank, SHAPES, torch.float32)
        if problems := verify(folder):
            raise UserError(str(problems))

    def check(chance: Random) -> None:
        path = chance.choice([rank, manifest])
        wrong = mutated(right[path], limits[path], chance)
        assume(wrong != right[path])
        assume(path == rank or meaning(wrong) != meaning(right[manifest]))
        path.write_bytes(wrong)
        began = time.process_time()
        with pytest.raises(UserError):
            read()
        assert time.process_time() - began < SLOWEST
        path.write_bytes(right[path])

    read()
    on_random(check)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_of_a_damaged_checkpoint_no_byte_is_read_twice_or_left_out(tiny, tmp_path):
    """It has no manifest: a changed name or metadata makes another checkpoint, which the model's tables judge."""
    right, path = tiny.lora.read_bytes(), tmp_path / "lora.safetensors"
    header = 8 + int.from_bytes(right[:8], "little")

    def check(chance: Random) -> None:
        path.write_bytes(wrong := mutated(right, header, chance))
        began = time.process_time()
        with suppress(UserError):
            file = TensorFile(path, "")
            if all(dtype in TORCH_DTYPES for dtype in file.dtypes.values()):
                read = sum(file.read(name).nbytes for name in file.shapes)
                assert 8 + len(file.header) + read == len(wrong)
        assert time.process_time() - began < SLOWEST

    on_random(check)


@pytest.fixture
def stored(tmp_path):
    """stored(tensors): an opened file of them."""

    def file(**tensors: torch.Tensor) -> TensorFile:
        tensorfile.write_tensors(tmp_path / "file.safetensors", tensors, {})
        return TensorFile(tmp_path / "file.safetensors", "DOWNLOAD")

    return file


@pytest.mark.parametrize("group", [1, 100, 10_000])
def test_all_tensors_are_read_as_they_were_written_and_may_be_replaced_in_place(stored, monkeypatch, group):
    monkeypatch.setattr(tensorfile, "_GROUP_BYTES", group)
    values = {f"small.{number}": torch.full((1,), number % 256, dtype=torch.uint8) for number in range(1500)}
    values |= {"bias": torch.arange(3, dtype=torch.bfloat16), "half": torch.arange(70).view(7, 10).half()}
    values |= {"empty": torch.empty(0, 4), "flags": torch.tensor([True, False, True]), "long": torch.arange(999)}
    values |= {"scale": torch.tensor(2.0), "turned": torch.arange(6.0).view(2, 3).T}
    file = stored(**values)
    read = dict(file.tensors())
    assert list(read) == list(file.shapes) and read.keys() == values.keys()
    for name, value in values.items():
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
    # A file cut short would end a mapping with SIGBUS.
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: pytest.fail("a mapping"))
    tensor = file.read("a", 1, 9999)
    os.truncate(file.path, 0)
    assert torch.equal(tensor, torch.ones(9998))


@pytest.mark.parametrize(("number", "damaged"), [(errno.EMFILE, False), (errno.EIO, True)])
def test_what_the_machine_lacks_is_not_blamed_on_the_file(stored, monkeypatch, number, damaged):
    file, cannot = stored(a=torch.ones(4)), Mock(side_effect=OSError(number, os.strerror(number)))
    monkeypatch.setattr(mmap, "mmap", cannot)
    monkeypatch.setattr(os, "preadv", cannot)
    for read in (file.read, file.read_mapped, lambda _: dict(file.tensors())):
        with pytest.raises(UserError) as error:
            read("a")
        assert (str(error.value) == f"{file.path}: {os.strerror(number)}") is not damaged
        assert ("DOWNLOAD" in str(error.value)) is damaged


def peak() -> int:
    """The most memory that this process has held, in bytes. getrusage would count the one that started it."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def keep_one_copy(folder: Path, count: int, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # fewer open files than tensors
    tensorfile._GROUP_BYTES = 20 * MEGABYTE
    file, before = TensorFile(folder / rank_file(0), ""), peak()
    for _, tensor in file.tensors():
        assert tensor.sum() == 0
    # The group at hand, and three that are read ahead; 220 MB for the code depend on the system.
    assert peak() - before < 4 * 20 * MEGABYTE + 220 * MEGABYTE
    rank = SimpleNamespace(weights={}, weight_file=0, device=torch.device("cpu"))
    kept = Rank._load_weights(rank, folder, file.shapes, torch.float32)
    assert kept.keys() == file.shapes.keys()
    assert count * size < peak() - before < 1.1 * count * size + 200 * MEGABYTE


def test_loading_keeps_one_copy_in_memory_and_none_of_what_is_copied_to_a_device(tmp_path):
    count, size = 160, 4 * MEGABYTE
    path = save_weights(tmp_path, {"w": torch.zeros(1)}) / rank_file(0)
    manifest, entry = read_json(tmp_path / MANIFEST), {"dtype": "F32", "shape": [MEGABYTE]}
    entries = {f"w{n}": entry | {"data_offsets": [size * n, size * (n + 1)]} for n in range(count)}
    text = json.dumps(entries).encode()
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header)
    os.truncate(path, len(header) + count * size)  # sparse
    manifest["files"][path.name]["header_blake3"] = blake3(header).hexdigest()
    write_json(tmp_path / MANIFEST, manifest)
    # A new process: a forked one would take memory that this one's threads have freed, and not grow.
    process = get_context("spawn").Process(target=keep_one_copy, args=(tmp_path, count, size))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_tensor_in_an_unknown_dtype_is_refused_by_name_when_it_is_read(stored):
    file = stored(a=torch.ones(4), b=torch.ones(4).to(torch.float8_e5m2))
    assert torch.equal(file.read("a"), torch.ones(4))
    for read in (file.read, file.read_mapped, file.prefetch, file.torch_dtype, lambda _: list(file.tensors())):
        with pytest.raises(UserError, match="b is stored as F8_E5M2, which is not .*BF16(?s:.*)DOWN"):
            read("b")


@pytest.mark.parametrize("shape", ["[-1,-4]", "[2.0,2]"])
def test_a_header_with_sizes_that_are_no_whole_numbers_is_refused(stored, shape):
    path = stored(a=torch.ones(100, 100)).path
    content = path.read_bytes()
    path.write_bytes(content.replace(b"[100,100]", shape.ljust(9).encode()))
    with pytest.raises(UserError, match="sizes and offsets must be whole numbers"):
        TensorFile(path, "")
