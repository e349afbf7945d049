"""Finished weight sets are verified by their manifest, and damaged or foreign files are never loaded."""

import json
import re
import resource
import time
from contextlib import suppress
from random import Random

import pytest
import torch
from fuzz import on_random
from helpers import locked, one_thread, said_to_an_ordinary_user, save_weights  # noqa: F401
from hypothesis import assume
from safetensors.torch import save_file

from ltx_neuron import artifacts
from ltx_neuron.engine import residency
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_checked
from ltx_neuron.weights.rankfiles import (
    HOST_FILE,
    is_finished,
    load_rank_file,
    open_host_file,
    rank_file,
    rank_path,
    verify,
)
from ltx_neuron.weights.tensorfile import TORCH_DTYPES, TensorFile

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

    def refused_by_the_ranks():
        with residency._remedy(folder):
            raise UserError("in the words of a rank")

    for path in (folder / rank_file(1), folder / MANIFEST):
        with locked(path):
            for use in (
                lambda: verify(folder, quick=True),
                lambda: is_finished(folder, identity),
                lambda: artifacts.find(folder.parent, identity, "COMMAND"),
                lambda path=path: TensorFile(path, "DOWNLOAD"),
            ):
                printed = said_to_an_ordinary_user(use)
                assert printed.startswith(f"NoPermission: {path}: you may not read or write it")
                assert not re.search("rm -r|[Dd]elete|damaged|DOWNLOAD", printed)
    with locked(folder):  # as the folder of all weight sets
        printed = said_to_an_ordinary_user(lambda: artifacts.find(folder.parent, identity, "COMMAND"))
        assert printed.startswith(f"NoPermission: --artifacts-dir {folder}/") and "COMMAND" not in printed
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
    assert [line.strip() for line in str(error.value).splitlines()] == [
        f"{path} does not have this model's weights:",
        "missing: lost",
        "missing: lost too",
        "recast: (4,) BF16, wanted (4,) F32",
        "reshaped: (2,) F32, wanted (3,) F32",
        "unexpected: extra",
    ]


def test_a_file_with_another_header_than_its_manifest_has_is_refused(folder):
    """Two tensors of one shape change places: names, shapes and dtypes are all as wanted."""
    path, order = folder / rank_file(0), dict(reversed(SHAPES.items()))
    loaded = load_rank_file(path, order, torch.float32)
    assert list(loaded) == list(order) and all(torch.equal(loaded[name], TENSORS[name]) for name in order)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"a.', b'"c.').replace(b'"b.', b'"a.').replace(b'"c.', b'"b.'))
    with pytest.raises(UserError, match="the header differs"):
        load_rank_file(path, SHAPES, torch.float32)
    assert not open_host_file(folder).shapes
    (folder / HOST_FILE).write_bytes(content)
    with pytest.raises(UserError, match="the header differs"):
        open_host_file(folder)


def test_of_sound_alone_a_part_of_the_file_is_loaded_and_no_tensor_of_it_is_left_out(tmp_path):
    names = "audio_patchify_proj.weight", "audio_patchify_proj.bias", "patchify_proj.weight"
    path = save_weights(tmp_path, {name: torch.ones(2) for name in names}) / rank_file(0)
    part = dict.fromkeys(names[:2], (2,))
    assert [*load_rank_file(path, part, torch.float32)] == [*part]
    with pytest.raises(UserError, match="unexpected: audio_patchify_proj.bias"):
        load_rank_file(path, {names[0]: (2,)}, torch.float32)
    with pytest.raises(UserError, match="missing: audio_proj_out.weight"):
        load_rank_file(path, part | {"audio_proj_out.weight": (2,)}, torch.float32)


def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(folder):
    manifest = read_json(folder / MANIFEST)
    manifest["files"]["../secret"] = manifest["files"].pop(HOST_FILE)
    write_checked(folder, manifest)
    assert "does not describe a weight set" in verify(folder)[0]
    with pytest.raises(UserError, match="does not describe a weight set"):
        rank_path(folder, 0)


# --- files that were damaged anyhow ---------------------------------------------------------------


def mutated(right: bytes, limit: int, chance: Random) -> bytes:
    """One of the things that happen to files; only the first `limit` bytes are changed, anything may be cut off."""
    wrong, at = bytearray(right), chance.randrange(limit)
    kind = chance.choice(("bit", "bytes", "cut", "gap", "insert", "digit", "reverse"))
    if kind == "bit":
        wrong[at] ^= 1 << chance.randrange(8)
    elif kind == "bytes":
        wrong[at : at + 8] = chance.randbytes(8)
    elif kind == "cut":
        del wrong[chance.randrange(len(wrong)) :]
    elif kind == "gap":
        del wrong[at : at + chance.randrange(1, 40)]
    elif kind == "insert":
        texts = b"[" * 5000, b"9" * 400, b'{"a":', b"\x00", b"\xff\xfe", b"-", b"1e999", b"../", b"NaN"
        wrong[at:at] = chance.choice(texts)
    elif kind == "digit":
        digits = [i for i in range(limit) if chr(wrong[i]).isdigit()]
        wrong[chance.choice(digits or [at])] = chance.choice(b"0123456789")
    else:
        end = chance.randrange(at, limit)
        wrong[at:end] = wrong[at:end][::-1]
    return bytes(wrong)


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
        if problems := verify(folder):
            raise UserError(str(problems))
        load_rank_file(rank, SHAPES, torch.float32)

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
