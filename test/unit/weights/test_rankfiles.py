"""Weight sets that can be trusted: written in one pass, written again after any kill,
verified, and loaded strictly."""

import errno
import json
import math
import mmap
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from fuzz import on_random, times
from helpers import (
    exit_code,
    forked,
    locked,
    one_thread,  # noqa: F401
    randn,
    said_to_an_ordinary_user,
    save_weights,
)
from hypothesis import assume
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from xxhash import xxh3_128

from ltx_neuron import artifacts
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.engine import residency
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_checked, write_json
from ltx_neuron.weights import sharder, tensorfile
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.rankfiles import (
    HOST_FILE,
    SHARED_FILE,
    file_entries,
    file_names,
    is_finished,
    load_rank_file,
    open_host_file,
    rank_file,
    rank_path,
    verify,
)
from ltx_neuron.weights.sharder import check_specs, compare, shard_specs, shard_weights
from ltx_neuron.weights.sharding import HOST, SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TORCH_DTYPES, TensorFile

TP = 4
IDENTITY = {"kind": "weights", "model": "dit", "tp": TP, "dtype": "float32"}
SLOWEST = 1.0  # seconds until a damaged file is refused, whatever is wrong with it


@pytest.fixture(scope="module")
def source(tiny):
    checkpoint = Checkpoint(tiny.checkpoint)
    return Source(SHARDED_MODELS["dit"], [checkpoint], transformer_config(checkpoint.config).heads)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """An undisturbed run's folder; tests must not change it."""
    folder = tmp_path_factory.mktemp("whole") / "weights"
    write(source, folder)
    return folder


def write(source, folder: Path, dtype: torch.dtype = torch.float32, tp: int = TP) -> bool:
    return shard_weights(source, folder, IDENTITY | {"tp": tp}, tp, dtype, shard_specs(source, tp, {}))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "weights"))


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces smaller than most tensors."""
    monkeypatch.setattr(sharder, "_PIECE_BYTES", 500)


# one pass


def test_a_tensor_that_gives_fewer_bytes_than_the_header_says_ends_the_run(source, tmp_path, monkeypatch):
    """A file has its full length from the beginning: only what was written tells."""
    pieces = Source.pieces

    def short(self, name, bounds):
        for piece in pieces(self, name, bounds):
            yield piece[:-1] if name == "proj_out.bias" else piece

    monkeypatch.setattr(Source, "pieces", short)
    with pytest.raises(RuntimeError, match=r"wrote \d+ bytes, the header says"):
        write(source, tmp_path / "weights")
    assert not (tmp_path / "weights" / MANIFEST).exists()


def test_the_files_names_are_on_the_disk_before_the_manifest_is_written(source, tmp_path, monkeypatch):
    folder, fsync, synced = tmp_path / "weights", os.fsync, []

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if synced[-1] == folder:
            assert content(folder).keys() == {*file_names(TP)}
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write(source, folder)
    assert folder in synced


def test_the_source_is_read_once_in_pieces_of_bounded_size(source, whole, tmp_path, small_pieces, monkeypatch):
    sizes, read = [], TensorFile.read

    def counted(self, *args):
        tensor = read(self, *args)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(TensorFile, "read", counted)
    write(source, tmp_path / "weights")
    assert sum(sizes) == sum(source.nbytes(name) for name in source.names)
    row = max(source.nbytes(name) // source.shape(name)[0] for name in source.names)
    assert max(sizes) <= max(500, row) < source.nbytes("transformer_blocks.0.attn1.to_q.weight")
    assert content(tmp_path / "weights") == content(whole)


def test_the_same_input_gives_the_same_bytes_and_just_these_files(source, whole, tmp_path):
    assert write(source, tmp_path / "weights")
    assert content(tmp_path / "weights") == content(whole)
    assert content(whole).keys() == {MANIFEST, *file_names(TP)}
    written = TensorFile(whole / rank_file(0), "").shapes
    # An order of their own, not that of a set, which differs from run to run: small ones last,
    # which begin anywhere.
    assert list(written) == sorted(written, key=lambda name: (math.prod(written[name]) % 64 != 0, name))


def test_weights_are_cast_to_the_wanted_dtype_and_data_is_aligned(source, tmp_path):
    write(source, tmp_path / "weights", torch.bfloat16, tp=2)
    path = tmp_path / "weights" / rank_file(0)
    with safe_open(path, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
        name = "transformer_blocks.0.scale_shift_table"
        assert torch.equal(file.get_tensor(name), source.tensor(name).bfloat16())
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0


def test_a_finished_set_is_left_alone_and_one_with_a_lost_file_is_written_again(source, copy, whole):
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert write(source, copy) is False
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == before
    (copy / rank_file(2)).unlink()
    assert write(source, copy) and content(copy) == content(whole)


def test_the_manifest_accounts_for_every_tensor_of_the_source(source, whole, tiny):
    described, file = read_json(whole / MANIFEST)["source"], TensorFile(tiny.checkpoint, "")
    assert described["tensors_xxh3_128"].keys() == set(source.names)
    assert len(described["tensors_xxh3_128"]) + sum(described["elsewhere"].values()) == len(file.shapes)
    name = "transformer_blocks.1.ff.net.2.weight"
    assert described["tensors_xxh3_128"][name] == xxh3_128(source.tensor(name).view(torch.uint8).numpy()).hexdigest()
    assert described["files"] == [
        {"name": tiny.checkpoint.name, "bytes": tiny.checkpoint.stat().st_size, "header_blake3": digest(file.header)}
    ]


def digest(value) -> str:
    data = value if isinstance(value, bytes) else value.contiguous().view(torch.uint8).numpy().tobytes()
    return blake3(data).hexdigest()


def test_what_a_model_lacks_has_too_many_of_or_wants_otherwise_is_listed_before_a_byte_is_written(source):
    cuts = {cut.name: cut for cut in shard_specs(source, TP, {})}
    expected = {name: cut.stored for name, cut in cuts.items() if cut.split != HOST}
    host = {name: cut.stored for name, cut in cuts.items() if cut.split == HOST}
    check_specs(list(cuts.values()), expected, host)
    del expected["proj_out.weight"]
    with pytest.raises(UserError) as error:
        check_specs(list(cuts.values()), expected | {"proj_out.bias": (3,)}, host | {"new.weight": (1,)})
    lines = str(error.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "missing: new.weight",
        "proj_out.bias: (128,), wanted (3,)",
        "unexpected: proj_out.weight",
    ]


def test_a_checkpoint_without_a_tensor_of_its_model_is_refused_by_the_workspace(tiny, tmp_path):
    from safetensors.torch import load_file

    file, tensors = TensorFile(tiny.checkpoint, ""), load_file(tiny.checkpoint)
    lost = "model.diffusion_model.transformer_blocks.1.attn1.to_q.weight"
    del tensors[lost]
    save_file(tensors, tmp_path / "lacking.safetensors", metadata=file.metadata)
    workspace = Workspace(tmp_path / "lacking.safetensors", resolve("cpu"), tmp_path / "artifacts", TP, "float32")
    with pytest.raises(UserError, match=r"missing: transformer_blocks\.1\.attn1\.to_q\.weight"):
        build.make(workspace, workspace.weight_sets("dit"))
    assert not (tmp_path / "artifacts").exists()


# stopped and written again


class Stop(Exception):
    """What stops a run here."""


def stop_at(monkeypatch, name: str) -> None:
    """Every run stops when it comes to a tensor, until the patch is undone."""
    pieces = Source.pieces

    def stopping(self, expected, bounds):
        if expected == name:
            raise Stop
        return pieces(self, expected, bounds)

    monkeypatch.setattr(Source, "pieces", stopping)


LATE = "transformer_blocks.1.scale_shift_table"


def test_a_stopped_run_leaves_nothing_and_the_next_one_writes_the_set(source, whole, tmp_path):
    folder = tmp_path / "weights"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, LATE)
        with pytest.raises(Stop):
            write(source, folder)
    assert not folder.exists()
    write(source, folder)
    assert content(folder) == content(whole)


def test_a_run_stopped_over_a_finished_set_does_not_count_as_finished(source, copy, monkeypatch):
    stop_at(monkeypatch, LATE)
    with pytest.raises(Stop):
        shard_weights(source, copy, IDENTITY | {"changed": True}, TP, torch.float32, shard_specs(source, TP, {}))
    assert not is_finished(copy, IDENTITY) and not [*copy.iterdir()]


def test_after_a_kill_at_any_moment_the_next_run_writes_the_same_bytes(source, whole, tmp_path, small_pieces):
    """kill -9, in a process of its own; moments are spread over the time that an undisturbed run
    takes, which is corrected while a busy machine makes it shorter than it was measured."""
    choose, expected, unfinished = random.Random(1), content(whole), 0
    kills = times(4, 20)
    began = time.monotonic()
    write(source, tmp_path / "timed")
    lasts = time.monotonic() - began
    for number in range(kills):
        folder = tmp_path / f"killed{number}"
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its progress bar
            # The bars' own lock is this process's too: a killed child would leave it locked.
            tqdm.set_lock(threading.RLock())
            write(source, folder)
            os._exit(0)
        time.sleep(choose.uniform(0, lasts))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if (folder / MANIFEST).is_file():
            lasts *= 0.8
        else:
            unfinished += 1
        write(source, folder)
        assert content(folder) == expected, number
        shutil.rmtree(folder)
    assert unfinished > kills / 4  # most kills met a run at work


def test_files_of_killed_runs_and_of_another_identity_are_replaced(source, whole, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in (f".{rank_file(1)}.123-0123abcd.partial", f".{MANIFEST}.123-0123abcd.partial"):
        (folder / name).write_text("{")
    (folder / rank_file(0)).write_text("of another identity")
    write(source, folder)
    assert content(folder) == content(whole)


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_run_waits_for_the_first_and_writes_only_what_that_did_not(
    source, whole, tmp_path, monkeypatch, capsys, fails
):
    """The first run may fail: it then removes the folder, which it made, and the second makes it
    anew."""
    pieces, folder, second = Source.pieces, tmp_path / "weights", []

    def meanwhile(self, name, bounds):
        monkeypatch.setattr(Source, "pieces", pieces)
        second.append(pool.submit(write, source, folder))
        assert not wait(second, timeout=0.3).done
        if fails:
            raise OSError("as the disk may")
        return pieces(self, name, bounds)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Source, "pieces", meanwhile)
        with pytest.raises(OSError, match="as the disk may") if fails else nullcontext():
            assert write(source, folder)
        assert second[0].result() == fails
    printed = f"another process ({os.getpid()}) is writing {folder}; waiting for it"
    assert capsys.readouterr().out.count(printed) == 1
    assert content(folder) == content(whole) and [*tmp_path.iterdir()] == [folder]


# the disk


def test_a_disk_without_room_is_refused_before_the_first_byte(source, tmp_path, monkeypatch):
    write(source, tmp_path / "a")
    total = sum(entry["bytes"] for entry in file_entries(tmp_path / "a").values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total - 1))
    with pytest.raises(UserError, match=r"(?s)need [\d.]+ kB more in .* [\d.]+ kB free.*choose another place with"):
        write(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total))
    assert write(source, tmp_path / "b")


def fill_meanwhile(patch, disk: Path, left: int) -> None:
    """Somebody else's file takes the room, but for so many bytes, while rank files are written."""
    pieces = Source.pieces

    def filling(self, name, bounds):
        if name == "transformer_blocks.0.ff.net.2.weight":
            free = shutil.disk_usage(disk).free
            (disk / "other").write_bytes(bytes(free - free % 4096 - left))
        return pieces(self, name, bounds)

    patch.setattr(Source, "pieces", filling)


def test_the_room_for_rank_files_is_taken_before_the_first_byte(source, whole, small_disk, small_pieces, monkeypatch):
    fill_meanwhile(monkeypatch, small_disk, left=128 * 1024)  # as much as the manifest takes
    write(source, small_disk / "weights")
    assert content(small_disk / "weights") == content(whole)


def test_a_disk_that_fills_up_leaves_nothing_and_the_next_run_writes_the_set(source, whole, small_disk, small_pieces):
    folder = small_disk / "weights"

    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", cannot)  # a file system that cannot keep room
        fill_meanwhile(patch, small_disk, left=4096)
        # errors.run says so without a traceback: test_refused_files.py.
        with pytest.raises(OSError, match="No space left"):
            write(source, folder)
    assert not folder.exists()
    (small_disk / "other").unlink()
    write(source, folder)
    assert content(folder) == content(whole)


# damage


def test_verify_names_what_is_missing_cut_or_changed(copy):
    assert verify(copy) == []
    (copy / rank_file(0)).unlink()
    rank = (copy / rank_file(1)).read_bytes()
    (copy / rank_file(1)).write_bytes(rank[:-1])
    (copy / rank_file(2)).write_bytes(rank)
    assert verify(copy) == [
        f"{rank_file(0)}: missing",
        f"{rank_file(1)}: {len(rank) - 1} bytes, wanted {len(rank)}",
        f"{rank_file(2)}: content differs from its blake3",
    ]


def test_a_rank_file_that_one_may_not_read_is_not_called_damaged(copy, monkeypatch):
    """It need not be made again, so nothing says to delete its folder."""
    monkeypatch.setattr(artifacts, "folder", lambda *_: copy)

    def refused_by_the_ranks():
        with residency._remedy(copy):
            raise UserError("in the words of a rank")

    for path in (copy / rank_file(1), copy / MANIFEST):
        with locked(path):
            for use in (
                lambda: verify(copy, quick=True),
                lambda: is_finished(copy, IDENTITY),
                lambda: artifacts.find(copy.parent, IDENTITY, "COMMAND"),
                lambda path=path: TensorFile(path, "DOWNLOAD"),
            ):
                printed = said_to_an_ordinary_user(use)
                assert printed.startswith(f"NoPermission: {path}: you may not read or write it")
                assert not re.search("rm -r|[Dd]elete|damaged|DOWNLOAD", printed)
    with locked(copy):  # as the folder of all weight sets
        printed = said_to_an_ordinary_user(lambda: artifacts.find(copy.parent, IDENTITY, "COMMAND"))
        assert printed.startswith(f"NoPermission: --artifacts-dir {copy}/") and "COMMAND" not in printed
    with locked(copy / rank_file(1)):
        assert "elete" not in said_to_an_ordinary_user(refused_by_the_ranks)
    with pytest.raises(UserError, match="words of a rank\nDelete "):
        refused_by_the_ranks()


def test_comparing_with_the_source_names_the_tensor_even_where_the_manifest_was_forged(source, copy):
    assert compare(source, copy, torch.float32, shard_specs(source, TP, {})) == []
    name, path = "transformer_blocks.0.attn2.to_out.0.weight", copy / rank_file(3)
    file, wrong = TensorFile(path, ""), bytearray(path.read_bytes())
    wrong[8 + len(file.header) + file._offsets[name] + 5] ^= 4
    path.write_bytes(wrong)
    manifest = read_json(copy / MANIFEST)
    manifest["files"][path.name]["blake3"] = digest(bytes(wrong))
    write_checked(copy, manifest)
    assert verify(copy) == []
    assert compare(source, copy, torch.float32, shard_specs(source, TP, {})) == [
        f"{path.name}: {name} differs from the source"
    ]


def test_strict_loading_lists_every_problem_at_once(tmp_path):
    path = tmp_path / "rank0.safetensors"
    kept, recast = torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16)
    save_file({"kept": kept, "recast": recast, "reshaped": torch.ones(2), "extra": torch.ones(1)}, path)
    with pytest.raises(UserError) as error:
        load_rank_file(
            path, {"kept": (2, 3), "recast": (4,), "reshaped": (3,), "lost": (1,), "lost too": (1,)}, torch.float32
        )
    message = str(error.value).splitlines()
    assert message[0] == f"{path} does not have this model's weights:"
    assert [line.strip() for line in message[1:]] == [
        "missing: lost",
        "missing: lost too",
        "recast: (4,) BF16, wanted (4,) F32",
        "reshaped: (2,) F32, wanted (3,) F32",
        "unexpected: extra",
    ]


def test_every_tensor_is_read_as_it_was_written_however_many_are_read_at_once(tmp_path, monkeypatch):
    values = {
        "bias": torch.arange(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "half": torch.arange(70, dtype=torch.float16).view(7, 10),
        "scale": torch.tensor(2.0),
        "long": torch.arange(999),
        **{f"small.{number}": torch.full((1,), number % 256, dtype=torch.uint8) for number in range(1500)},
    }
    save_file(values, tmp_path / "all.safetensors")
    for group in (1, 100, 10_000):
        monkeypatch.setattr(tensorfile, "_GROUP_BYTES", group)
        read = dict(TensorFile(tmp_path / "all.safetensors", "").tensors())
        assert list(read) == list(TensorFile(tmp_path / "all.safetensors", "").shapes) and read.keys() == values.keys()
        for name, value in values.items():
            assert read[name].dtype == value.dtype and torch.equal(read[name], value), (group, name)
            assert read[name].data_ptr() % 64 == 0 and read[name].is_contiguous()
            read[name].fill_(1)  # weights may be replaced in place: this memory is theirs alone
        assert all((tensor == 1).all() for tensor in read.values())


def test_rows_that_begin_anywhere_are_read_mapped_and_on_a_kernel_that_cannot_fetch_at_once(tmp_path, monkeypatch):
    values = randn(600, 1001)  # no whole number of pages
    save_file({"a": values[0, :3].clone(), "b": values}, tmp_path / "file.safetensors")
    file = TensorFile(tmp_path / "file.safetensors", "")
    for kernel in (tensorfile._POPULATE_READ, 9999):
        monkeypatch.setattr(tensorfile, "_POPULATE_READ", kernel)
        for start, stop in ((0, 1), (0, 600), (7, 8), (1, 599), (599, 600), (3, 3)):
            for read in (file.read, file.read_mapped):
                assert torch.equal(read("b", start, stop), values[start:stop])


@pytest.mark.parametrize("left", [mmap.PAGESIZE, mmap.PAGESIZE + 100, 0], ids=str)
def test_a_file_cut_short_meanwhile_is_an_error_that_names_it(tmp_path, left):
    save_file({"a": randn(600, 1001)}, tmp_path / "file.safetensors")
    file = TensorFile(tmp_path / "file.safetensors", "make it again")
    os.truncate(file.path, left)
    for read in (file.read, file.read_mapped):
        with pytest.raises(UserError, match="file.safetensors is not a whole safetensors file"):
            read("a")


def test_many_tensors_are_loaded_where_few_files_may_be_open(tmp_path):
    """The released DiT has 4,138 tensors a rank, and many systems allow 1024 open files."""
    values = {f"w{number}": torch.full((16,), float(number)) for number in range(2000)}
    path = save_weights(tmp_path, values) / rank_file(0)

    def load() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        loaded = dict(TensorFile(path, "").tensors())
        assert all(torch.equal(loaded[name], value) for name, value in values.items())

    assert exit_code(forked(load)) == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV])
def test_what_the_machine_lacks_is_not_said_of_the_files_content(tmp_path, monkeypatch, number):
    save_file({"a": torch.ones(4)}, tmp_path / "file.safetensors")
    file = TensorFile(tmp_path / "file.safetensors", "DOWNLOAD")

    def cannot(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mmap, "mmap", cannot)
    monkeypatch.setattr(os, "preadv", cannot)
    for read in (file.read, file.read_mapped, lambda _: dict(file.tensors())):
        with pytest.raises(UserError) as error:
            read("a")
        assert str(error.value) == f"{file.path}: {os.strerror(number)}"


def test_a_tensor_read_into_memory_outlives_its_file(tmp_path, monkeypatch):
    save_file({"a": torch.ones(10_000)}, tmp_path / "file.safetensors")
    file = TensorFile(tmp_path / "file.safetensors", "")

    def never(*_, **__):
        raise AssertionError("a mapping, which a file cut short would end with SIGBUS")

    monkeypatch.setattr(mmap, "mmap", never)
    tensor = file.read("a", 1, 9999)
    os.truncate(file.path, 0)
    assert torch.equal(tensor, torch.ones(9998))


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_and_leaves_no_thread(tmp_path):
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors", "the one at home")
    threads = threading.active_count()
    os.truncate(file.path, file.size - 4)
    with pytest.raises(UserError, match="within a tensor.*\n.*the one at home"):
        dict(file.tensors())
    assert threading.active_count() == threads


MEGABYTE = 10**6
_IN_A_PROCESS = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from ltx_neuron.backends.torchdist.rank import Rank
from ltx_neuron.weights import tensorfile
from ltx_neuron.weights.tensorfile import TensorFile
tensorfile._GROUP_BYTES = 20_000_000
folder = Path(sys.argv[1])
file = TensorFile(folder / "rank0.safetensors", "")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[2] == "kept":
    rank = SimpleNamespace(weights={}, weight_file=0, device=torch.device("cpu"))
    held = Rank._load_weights(rank, folder, file.shapes, torch.float32)
    assert held.keys() == file.shapes.keys()
else:
    for name, tensor in file.tensors():
        tensor.sum()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


# Of a file of 640 MB. Memory for the code that reads it, up to 200 MB, depends on the system.
@pytest.mark.parametrize("weights, megabytes", [("kept", 1.1 * 640 + 200), ("copied away", 300)])
def test_loading_keeps_one_copy_in_memory_and_none_of_what_is_copied_to_a_device(tmp_path, weights, megabytes):
    """Copied away: the group at hand, and three that are read ahead, of 20 MB each; and some for
    the rest."""
    save_weights(tmp_path, {f"w{number}": torch.zeros(1) for number in range(160)})
    path = tmp_path / rank_file(0)
    entries = {
        f"w{n}": {"dtype": "F32", "shape": [MEGABYTE], "data_offsets": [4 * MEGABYTE * n, 4 * MEGABYTE * (n + 1)]}
        for n in range(160)
    }
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 640 * MEGABYTE)  # sparse
    manifest = read_json(tmp_path / MANIFEST)
    manifest["files"][path.name]["header_blake3"] = digest(len(header).to_bytes(8, "little") + header)
    write_json(tmp_path / MANIFEST, manifest)
    command = [sys.executable, "-c", _IN_A_PROCESS, tmp_path, weights]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < megabytes * MEGABYTE


def test_a_file_with_another_header_than_its_manifest_says_is_refused(tmp_path, copy):
    """Two tensors of one shape change places: names, shapes and dtypes are all as wanted."""
    path = save_weights(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2)}) / rank_file(0)
    loaded = load_rank_file(path, {"b": (2,), "a": (2,)}, torch.float32)
    assert list(loaded) == ["b", "a"] and torch.equal(loaded["a"], torch.ones(2))
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"a"', b'"c"').replace(b'"b"', b'"a"').replace(b'"c"', b'"b"'))
    with pytest.raises(UserError, match="the header differs"):
        load_rank_file(path, {"a": (2,), "b": (2,)}, torch.float32)
    assert open_host_file(copy).shapes
    (copy / HOST_FILE).write_bytes((copy / HOST_FILE).read_bytes().replace(b"linear_1.bias", b"linear_9.bias"))
    with pytest.raises(UserError, match="the header differs"):
        open_host_file(copy)


# other people's files


def outcome_of(act) -> tuple[str, float]:
    """How reading a file ended, and how long that took."""
    began = time.monotonic()
    try:
        act()
        ended = "accepted"
    except UserError:
        ended = "refused"
    return ended, time.monotonic() - began


def mutated(right: bytes, limit: int, choose: random.Random) -> bytes:
    """One of the things that happen to files; only the first `limit` bytes are changed, anything
    may be cut off."""
    wrong, at = bytearray(right), choose.randrange(limit)
    kind = choose.randrange(7)
    if kind == 0:
        wrong[at] ^= 1 << choose.randrange(8)
    elif kind == 1:
        wrong[at : at + 8] = choose.randbytes(8)
    elif kind == 2:
        del wrong[choose.randrange(len(wrong)) :]
    elif kind == 3:
        del wrong[at : at + choose.randrange(1, 40)]
    elif kind == 4:
        wrong[at:at] = choose.choice(
            [b"[" * 5000, b"9" * 400, b'{"a":', b"\x00", b"\xff\xfe", b"-", b"1e999", b"../", b"NaN"]
        )
    elif kind == 5:
        digits = [i for i in range(limit) if chr(wrong[i]).isdigit()]
        wrong[choose.choice(digits or [at])] = choose.choice(b"0123456789")
    else:
        end = choose.randrange(at, limit)
        wrong[at:end] = wrong[at:end][::-1]
    return bytes(wrong)


def test_damaged_headers_and_manifests_and_truncated_files_are_refused(tmp_path):
    """At load, where the manifest's digests are looked at; also none takes long, or memory."""
    tensors = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(4)}
    save_weights(tmp_path, tensors | {"scale": torch.tensor(2.0)})
    expected = {"a.weight": (2, 3), "b.bias": (4,), "scale": ()}
    rank, manifest = tmp_path / rank_file(0), tmp_path / MANIFEST
    right = {path: path.read_bytes() for path in (rank, manifest)}
    header = 8 + int.from_bytes(right[rank][:8], "little")
    described = json.loads(right[manifest])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def read() -> None:
        if problems := verify(tmp_path):
            raise UserError(str(problems))
        load_rank_file(rank, expected, torch.float32)

    def check(chance: random.Random) -> None:
        path = chance.choice([rank, manifest])
        limit = header if path == rank else len(right[path])
        wrong = mutated(right[path], limit, chance)
        assume(wrong != right[path])
        assume(path == rank or means(wrong) != means_to_us(described))
        path.write_bytes(wrong)
        ended, seconds = outcome_of(read)
        path.write_bytes(right[path])
        assert ended == "refused" and seconds < SLOWEST, (path.name, ended, seconds)

    assert outcome_of(read)[0] == "accepted"
    on_random(check)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def means(raw: bytes):
    """What of a manifest the loader goes by; None where it is no JSON."""
    try:
        return means_to_us(json.loads(raw))
    except (ValueError, RecursionError):
        return None


def means_to_us(described):
    try:
        return described["files"], described["identity"]["tp"]
    except (KeyError, TypeError):
        return None


def test_of_a_damaged_checkpoint_no_byte_is_read_twice_or_left_out(tiny, tmp_path):
    """It has no manifest: a changed name or metadata makes another checkpoint, which the model's
    tables judge."""
    right, path = tiny.lora.read_bytes(), tmp_path / "lora.safetensors"
    header = 8 + int.from_bytes(right[:8], "little")

    def check(chance: random.Random) -> None:
        path.write_bytes(wrong := mutated(right, header, chance))
        began = time.monotonic()
        with suppress(UserError):
            file = TensorFile(path, "")
            if all(dtype in TORCH_DTYPES for dtype in file.dtypes.values()):
                read = sum(file.read(name).nbytes for name in file.shapes)
                assert 8 + len(file.header) + read == len(wrong)
        assert time.monotonic() - began < SLOWEST

    on_random(check)


def test_a_tensor_in_an_unknown_dtype_is_refused_by_name_when_it_is_read(tmp_path):
    path = tmp_path / "float8.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(4).to(torch.float8_e5m2)}, path)
    file = TensorFile(path, "DOWNLOAD")
    assert torch.equal(file.read("a"), torch.ones(4))
    reads = (file.read, file.read_mapped, file.prefetch, file.torch_dtype)
    for read in (*reads, lambda name: list(file.tensors())):
        with pytest.raises(UserError, match="b is stored as F8_E5M2, which is not .*BF16(?s:.*)DOWN"):
            read("b")


def test_a_named_pipe_is_no_tensor_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: that is a named pipe, wanted a regular file"):
        TensorFile(tmp_path / "pipe", "")


def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(copy, tmp_path):
    manifest = read_json(copy / MANIFEST)
    manifest["files"]["../secret"] = manifest["files"].pop(HOST_FILE)
    write_checked(copy, manifest)
    assert "does not describe a weight set" in verify(copy)[0]
    with pytest.raises(UserError, match="does not describe a weight set"):
        rank_path(copy, 0)


def test_weights_that_all_ranks_have_are_one_file_and_sets_of_equal_files_are_still_read(tiny, tmp_path):
    source = Source(SHARDED_MODELS["vae"], [Checkpoint(tiny.checkpoint)])
    specs, identity = shard_specs(source, TP, {}), IDENTITY | {"model": "vae"}
    folder, old = tmp_path / "weights", tmp_path / "old"
    assert shard_weights(source, folder, identity, TP, torch.float32, specs)
    assert content(folder).keys() == {SHARED_FILE, HOST_FILE, MANIFEST}
    assert {rank_path(folder, rank) for rank in range(TP)} == {folder / SHARED_FILE}
    expected = {name: source.shape(name) for name in source.names}
    loaded = load_rank_file(rank_path(folder, TP - 1), expected, torch.float32)
    assert all(torch.equal(loaded[name], source.tensor(name).float()) for name in expected)
    # As an earlier version wrote it: a file a rank.
    save_weights(old, *[loaded] * TP)
    write_checked(old, read_json(folder / MANIFEST) | {"files": file_entries(old)})
    assert [*file_entries(old)] == file_names(TP) and is_finished(old, identity)
    assert shard_weights(source, old, identity, TP, torch.float32, specs) is False
    assert rank_path(old, 2) == old / rank_file(2)
    shared = bytearray((folder / SHARED_FILE).read_bytes())
    shared[-1] ^= 1
    (folder / SHARED_FILE).write_bytes(shared)
    assert verify(folder) == [f"{SHARED_FILE}: content differs from its blake3"]
    (problem,) = compare(source, folder, torch.float32, specs)
    assert re.fullmatch(f"{SHARED_FILE}: .* differs from the source", problem)


@pytest.mark.parametrize("shape", [[-1, -4], [2.0, 2], [True, 4]], ids=str)
def test_a_header_with_sizes_that_are_no_whole_numbers_is_refused(tmp_path, shape):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(UserError, match="sizes and offsets must be whole numbers"):
        TensorFile(path, "")


def test_of_sound_alone_a_part_of_the_file_is_loaded_and_no_tensor_of_it_is_left_out(tmp_path):
    names = "audio_patchify_proj.weight", "audio_patchify_proj.bias", "patchify_proj.weight"
    path = save_weights(tmp_path, {name: torch.ones(2) for name in names}) / rank_file(0)
    loaded = load_rank_file(path, dict.fromkeys(names[:2], (2,)), torch.float32)
    assert [*loaded] == [*names[:2]]
    with pytest.raises(UserError, match="unexpected: audio_patchify_proj.bias"):
        load_rank_file(path, {names[0]: (2,)}, torch.float32)
