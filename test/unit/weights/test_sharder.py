"""Weight sets are written in one pass, are whole or absent however a run ends, and are compared with the source."""

import errno
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from math import prod
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from helpers import exit_code, forked, one_thread, rewrite, save_weights  # noqa: F401
from xxhash import xxh3_128

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_checked
from ltx_neuron.weights import rankfiles, sharder
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.rankfiles import HOST_FILE, SHARED_FILE, file_names, is_finished, rank_file, rank_path, verify
from ltx_neuron.weights.sharder import check_specs, compare, shard_specs, shard_weights
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import TensorFile

TP = 4
IDENTITY = {"kind": "weights", "model": "dit", "tp": TP, "dtype": "float32"}
MIDDLE, LATE = "transformer_blocks.0.ff.net.2.weight", "transformer_blocks.1.scale_shift_table"
PIECES = Source.pieces


@pytest.fixture(scope="module")
def source(tiny):
    return Source(SHARDED_MODELS["dit"], [Checkpoint(tiny.checkpoint)])


def write(source, folder: Path, dtype: torch.dtype = torch.float32, tp: int = TP, **identity) -> bool:
    return shard_weights(source, folder, IDENTITY | {"tp": tp} | identity, tp, dtype, shard_specs(source, tp, {}))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """The folder of an undisturbed run; tests must not change it."""
    folder = tmp_path_factory.mktemp("whole") / "weights"
    write(source, folder)
    return folder


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces smaller than most tensors."""
    monkeypatch.setattr(sharder, "_PIECE_BYTES", 500)


@pytest.fixture
def interrupted(monkeypatch):
    """interrupted(name, action): runs call action() when they come to a tensor; interrupted() ends that."""

    def patch(name: str = "", action=None) -> None:
        def pieces(self, tensor, bounds):
            if tensor == name:
                action()
            return PIECES(self, tensor, bounds)

        monkeypatch.setattr(Source, "pieces", pieces)

    return patch


def stop() -> None:
    raise KeyboardInterrupt


def test_a_set_is_the_same_bytes_in_one_pass_over_bounded_pieces(source, whole, tmp_path, small_pieces, monkeypatch):
    sizes, read, fsync, synced, folder = [], TensorFile.read, os.fsync, [], tmp_path / "weights"

    def counted(self, *args):
        sizes.append((tensor := read(self, *args)).nbytes)
        return tensor

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if synced[-1] == folder:  # the files' names are on the disk before the manifest is
            assert content(folder).keys() == {*file_names(TP)}
        fsync(descriptor)

    monkeypatch.setattr(TensorFile, "read", counted)
    monkeypatch.setattr(os, "fsync", noted)
    assert write(source, folder) and folder in synced
    assert content(folder) == content(whole)
    assert content(whole).keys() == {MANIFEST, *file_names(TP)}
    assert sum(sizes) == sum(source.nbytes(name) for name in source.names)
    row = max(source.nbytes(name) // source.shape(name)[0] for name in source.names)
    assert max(sizes) <= max(500, row) < source.nbytes("transformer_blocks.0.attn1.to_q.weight")


def test_a_file_is_cast_and_aligned_and_the_manifest_accounts_for_every_tensor_of_the_source(source, tiny, tmp_path):
    write(source, tmp_path / "weights", torch.bfloat16, tp=2)
    stored = TensorFile(tmp_path / "weights" / rank_file(0), "")
    assert torch.equal(stored.read(LATE), source.tensor(LATE).bfloat16()) and {*stored.dtypes.values()} == {"BF16"}
    assert (8 + len(stored.header)) % 64 == 0
    # Small ones, which begin anywhere, are last.
    assert list(stored.shapes) == sorted(stored.shapes, key=lambda name: (prod(stored.shapes[name]) % 64 != 0, name))
    described, file = read_json(tmp_path / "weights" / MANIFEST)["source"], TensorFile(tiny.checkpoint, "")
    assert described["tensors_xxh3_128"].keys() == set(source.names)
    assert len(described["tensors_xxh3_128"]) + sum(described["elsewhere"].values()) == len(file.shapes)
    digest = xxh3_128(source.tensor(MIDDLE).view(torch.uint8).numpy()).hexdigest()
    assert described["tensors_xxh3_128"][MIDDLE] == digest
    header = blake3(file.header).hexdigest()
    assert described["files"] == [{"name": tiny.checkpoint.name, "bytes": file.size, "header_blake3": header}]


def test_tensors_that_do_not_fit_the_model_are_listed_and_nothing_is_written(source, tiny, tmp_path):
    specs = shard_specs(source, TP, {})
    graphs = {spec.name: spec.stored for spec in specs}
    check_specs(specs, graphs, {})
    del graphs["proj_out.weight"]
    with pytest.raises(UserError) as error:
        check_specs(specs, graphs | {"proj_out.bias": (3,)}, {"new.weight": (1,)})
    problems = "missing: new.weight", "proj_out.bias: (128,), wanted (3,)", "unexpected: proj_out.weight"
    assert tuple(line.strip() for line in str(error.value).splitlines()[1:]) == problems
    path = rewrite(
        tiny.checkpoint, tmp_path / "lacking", lambda tensors: tensors.pop(f"model.diffusion_model.{MIDDLE}")
    )
    workspace = Workspace(path, resolve("cpu"), tmp_path / "artifacts", TP, "float32")
    with pytest.raises(UserError, match=f"missing: {MIDDLE}"):
        build.make(workspace, workspace.weight_sets("dit"))
    assert not (tmp_path / "artifacts").exists()


def test_weights_that_all_ranks_have_are_one_file_and_sets_of_equal_files_are_still_read(tiny, tmp_path):
    source = Source(SHARDED_MODELS["vae"], [Checkpoint(tiny.checkpoint)])
    specs, folder, old = shard_specs(source, TP, {}), tmp_path / "weights", tmp_path / "old"
    assert write(source, folder, model="vae")
    assert content(folder).keys() == {SHARED_FILE, HOST_FILE, MANIFEST}
    assert {rank_path(folder, rank) for rank in range(TP)} == {folder / SHARED_FILE}
    shapes = {name: source.shape(name) for name in source.names}
    loaded = rankfiles.load_rank_file(rank_path(folder, TP - 1), shapes, torch.float32)
    assert all(torch.equal(loaded[name], source.tensor(name).float()) for name in shapes)
    # As an earlier version wrote it: a file a rank.
    save_weights(old, *[loaded] * TP)
    write_checked(old, read_json(folder / MANIFEST) | {"files": rankfiles.file_entries(old)})
    assert [*rankfiles.file_entries(old)] == file_names(TP)
    assert write(source, old, model="vae") is False
    assert rank_path(old, 2) == old / rank_file(2)
    (folder / SHARED_FILE).write_bytes((folder / SHARED_FILE).read_bytes()[:-1] + b"x")
    assert verify(folder) == [f"{SHARED_FILE}: content differs from its blake3"]
    (problem,) = compare(source, folder, torch.float32, specs)
    assert re.fullmatch(f"{SHARED_FILE}: .* differs from the source", problem)


# --- runs that end early --------------------------------------------------------------------------


def test_a_finished_set_is_left_alone_and_one_with_a_lost_file_is_written_again(source, whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "weights")
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert write(source, copy) is False
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == before
    (copy / rank_file(2)).unlink()
    assert write(source, copy) and content(copy) == content(whole)


def test_a_tensor_with_fewer_bytes_than_the_header_says_ends_the_run(source, tmp_path, monkeypatch):
    """A file has its full length from the beginning: only what was written tells."""

    def short(self, name, bounds):
        return (piece[:-1] if name == "proj_out.bias" else piece for piece in PIECES(self, name, bounds))

    monkeypatch.setattr(Source, "pieces", short)
    with pytest.raises(RuntimeError, match=r"wrote \d+ bytes, the header says"):
        write(source, tmp_path / "weights")
    assert not (tmp_path / "weights" / MANIFEST).exists()


def test_a_stopped_run_leaves_no_folder_and_no_earlier_set_that_counts_as_finished(
    source, whole, tmp_path, interrupted
):
    new, copy = tmp_path / "new", shutil.copytree(whole, tmp_path / "weights")
    interrupted(LATE, stop)
    for folder in (new, copy):
        with pytest.raises(KeyboardInterrupt):
            write(source, folder, changed=True)
    assert not new.exists() and not is_finished(copy, IDENTITY) and not [*copy.iterdir()]


def test_after_a_kill_the_next_run_writes_the_same_bytes_and_removes_what_was_left(
    source, whole, tmp_path, interrupted
):
    folder = tmp_path / "weights"

    def killed() -> None:
        interrupted(LATE, lambda: os.kill(os.getpid(), signal.SIGKILL))
        write(source, folder)

    assert exit_code(forked(killed)) == -signal.SIGKILL
    assert [*folder.iterdir()] and not is_finished(folder, IDENTITY)
    write(source, folder)
    assert content(folder) == content(whole)


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_run_waits_for_the_first_and_writes_the_set_if_that_failed(
    source, whole, tmp_path, interrupted, capsys, fails
):
    folder, second = tmp_path / "weights", []

    def meanwhile() -> None:
        interrupted()
        second.append(pool.submit(write, source, folder))
        assert not wait(second, timeout=0.3).done
        if fails:
            stop()

    with ThreadPoolExecutor(1) as pool:
        interrupted(MIDDLE, meanwhile)
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            assert write(source, folder)
        assert second[0].result() == fails
    waiting = f"another process ({os.getpid()}) is writing {folder}; waiting for it"
    assert capsys.readouterr().out.count(waiting) == 1
    assert content(folder) == content(whole) and [*tmp_path.iterdir()] == [folder]


# --- the disk -------------------------------------------------------------------------------------


def test_a_disk_without_room_is_refused_before_the_first_byte(source, whole, tmp_path, monkeypatch):
    total = sum(entry["bytes"] for entry in rankfiles.file_entries(whole).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total - 1))
    with pytest.raises(UserError, match=r"(?s)need [\d.]+ kB more in .* [\d.]+ kB free.*choose another place with"):
        write(source, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total))
    assert write(source, tmp_path / "weights")


@pytest.mark.parametrize("reserves", [True, False])
def test_rank_files_reserve_their_room_and_a_disk_that_fills_up_leaves_nothing(
    source, whole, small_disk, small_pieces, interrupted, monkeypatch, reserves
):
    folder, other = small_disk / "weights", small_disk / "other"

    def fill() -> None:
        """Somebody else takes the room, but for the manifest's where the rank files have theirs."""
        free = shutil.disk_usage(small_disk).free
        other.write_bytes(bytes(free - free % 4096 - (128 * 1024 if reserves else 4096)))

    def unsupported(*_) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    interrupted(MIDDLE, fill)
    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
        with pytest.raises(OSError, match="No space left"):  # errors.run prints it without a traceback
            write(source, folder)
        assert not folder.exists()
        interrupted()
        other.unlink()
    write(source, folder)
    assert content(folder) == content(whole)
