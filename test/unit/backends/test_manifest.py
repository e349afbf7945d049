"""The manifest of a program: costs of its runs, digests of its files, damage and its remedies."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import reduce
from pathlib import Path

import pytest
import torch
from conftest import QUICK, words
from helpers import locked, said_to_an_ordinary_user
from torch import Tensor, nn

from ltx_neuron import invocation
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Need, Workspace
from ltx_neuron.backends import manifest, registry
from ltx_neuron.backends.export import TorchDistComm, compile_program, cost, fake_process_group, peak_bytes, trace
from ltx_neuron.backends.manifest import Manifest, sha256
from ltx_neuron.commands import dispatch
from ltx_neuron.config.profiles import resolve
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_json
from ltx_neuron.models.programs import Program
from ltx_neuron.models.signatures import Field

ROWS = Field((4, 8), torch.float32)
INPUTS = {"x": ROWS, "video_latent": ROWS}
BYTES = 4 * 8 * 4  # of one tensor of the toy


class Chain(nn.Module):
    def __init__(self, summands: int, tp: int = 1):
        super().__init__()
        self.summands, self.comm = summands, TorchDistComm(tp)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        summands = [inputs["x"] * (number + 2) for number in range(self.summands)]
        (total,) = self.comm.sum(reduce(torch.add, summands))
        return {"y": total.view(8, 4).view(4, 8) * 2, "video_latent": inputs["video_latent"] * 2}


def program(*summands: int) -> Program:
    graphs = {f"chain{n}": Chain(n) for n in summands}
    runs = {"main": (*((name, 0) for name in graphs), ("chain2", 0))}
    return Program(graphs, runs, INPUTS, {"y": ROWS})


def test_the_cost_of_a_run_is_the_sum_over_its_calls_and_the_largest_peak(tmp_path):
    compile_program(made := program(2, 5), tmp_path, {}, torch.float32)
    two, five = (cost(trace(made, name, torch.float32)) for name in made.graphs)
    total = Manifest(tmp_path).cost()
    assert total.keys() == two.keys() >= {"collective_bytes", "elementwise_bytes", "attention_flops"}
    # All summands and the first sum are alive at once; of one summand, itself and what is returned of it.
    assert total["peak_bytes"] == five["peak_bytes"] == 6 * BYTES
    assert peak_bytes(trace(program(1), "chain1", torch.float32)) == 2 * BYTES
    assert total["flops"] == 2 * two["flops"] + five["flops"]
    # x, and the latent that is returned too
    assert Manifest(tmp_path).upload_bytes() == 2 * BYTES
    with fake_process_group(2):
        counted = cost(trace(Program({"chain": Chain(1, 2)}, {}, INPUTS, {"y": ROWS}), "chain", torch.float32))
    assert (counted["collectives"], counted["collective_bytes"]) == (1, BYTES)


def test_the_file_of_a_graph_is_the_same_whenever_and_wherever_it_is_made(tmp_path):
    for folder in "one", "two":
        compile_program(program(2), tmp_path / folder, {}, torch.float32)
    assert len({path.read_bytes() for path in tmp_path.glob("*/chain2.pt2")}) == 1


def test_a_file_is_hashed_once_a_process_and_again_when_it_changed(tmp_path, monkeypatch):
    path, other, hashed = tmp_path / "graph.pt2", tmp_path / "other", []
    digest = hashlib.file_digest
    monkeypatch.setattr(manifest.hashlib, "file_digest", lambda file, kind: hashed.append(1) or digest(file, kind))
    # Another time, another size, another inode.
    for content, written in ((b"one", path), (b"two", path), (b"three", path), (b"other", other)):
        written.write_bytes(content)
        os.utime(written, ns=(0, len(hashed) > 0))
        written.replace(path)
        assert {sha256(path) for _ in range(3)} == {hashlib.sha256(content).hexdigest()}
    assert len(hashed) == 4


def test_a_second_compile_of_the_same_graphs_waits_for_the_first_and_takes_them(tiny, tmp_path, monkeypatch, capsys):
    compile_graphs, second = registry.compile_program, []
    identity = {"kind": "graphs", "model": "toy", "tp": 1, "dtype": "float32"}
    need = Need("graphs", identity, "compile", program=lambda: program(2, 3))
    workspace = Workspace(tiny.checkpoint, resolve("cpu"), tmp_path, 1, "float32")

    def meanwhile(*how) -> None:
        assert not second, "both compiled"
        second.append(pool.submit(build.make, workspace, [need]))
        assert not wait(second, timeout=0.3).done
        compile_graphs(*how)

    monkeypatch.setattr(registry, "compile_program", meanwhile)
    with ThreadPoolExecutor(1) as pool:
        assert build.make(workspace, [need]) == second[0].result()
    assert capsys.readouterr().out.count(f"another process ({os.getpid()}) is compiling") == 1


def test_a_graph_without_read_permission_is_refused_by_its_name(tmp_path):
    compile_program(program(2), tmp_path, {}, torch.float32)
    made = Manifest(tmp_path)
    with locked(tmp_path / "chain2.pt2") as path:
        for use in (lambda: manifest.damaged_graphs(tmp_path), lambda: made.load("chain2")):
            message = said_to_an_ordinary_user(lambda use=use: (manifest._digests.clear(), use()))
            assert message.startswith(f"NoPermission: {path}: you may not read")


# --- a manifest's own damage ----------------------------------------------------------------------

# What of a manifest's text a bit is flipped in, by what it is there for.
FLIPPED = {
    "a digit of a size in bytes": rb'"bytes": (\d)',
    "a weight's name": rb"(attn1)",
    "a field's name": rb'"(identity)"',
    "a digest": rb'"[0-9a-f]{8}([0-9a-f])[0-9a-f]{55}"',
    "the syntax": rb"^(\{)",
}


@pytest.fixture(scope="module")
def prepared(tiny, tmp_path_factory) -> list[str]:
    flags = {"checkpoint_path": tiny.checkpoint, "gemma_root": tiny.gemma_root}
    flags |= {"artifacts_dir": tmp_path_factory.mktemp("prepared") / "artifacts", "profile": "cpu", "tp_degree": 1}
    flags |= {"dtype": "float32", "height": 64, "width": 64, "num_frames": 9, "profile_set": QUICK[0]}
    assert refusal_of(command := ["prepare", *words(**flags)]) == ""
    return command


def refusal_of(command: list) -> str:
    try:
        dispatch([*map(str, command)])
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["weights", "graphs"])
def test_a_flipped_bit_of_a_manifest_is_blamed_on_it_and_its_remedy_mends_it(prepared, kind):
    """And on no other file: rank files of 40 GB need not be made again."""
    (path, *_) = sorted(Path(prepared[6]).glob(f"{kind}/*/{MANIFEST}"))
    whole, tried = path.read_bytes(), 0
    for what, pattern in FLIPPED.items():
        if actual := re.search(pattern, whole):
            tried, flipped = tried + 1, bytearray(whole)
            flipped[actual.start(1)] ^= 1
            path.write_bytes(flipped)
            message = refusal_of([*prepared, "--dry-run"])
            assert message.startswith(f"{path.parent} is damaged:\n") and MANIFEST in message, what
            assert not re.search(r"rank\d|\.pt2", message), (what, message)
    assert tried > 3
    path.write_bytes(whole if kind == "weights" else flipped)
    remedy, program = message.rpartition("\nMake it again: ")[2], invocation.command("prepare")
    assert remedy.startswith(f"rm -r {path.parent} && {program} --checkpoint-path ")
    if kind == "graphs":
        again = f"{shlex.quote(sys.executable)} -m ltx_neuron prepare"
        subprocess.run(remedy.replace(program, again), shell=True, check=True, capture_output=True)
        assert json.loads(path.read_bytes())["identity"] == json.loads(whole)["identity"]
    assert refusal_of([*prepared, "--dry-run"]) == ""


def test_a_store_is_filled_and_repaired_by_the_commands_that_are_printed(prepared, tmp_path, monkeypatch):
    """In the folder of the default artifacts: the commands leave --artifacts-dir out."""
    shutil.copytree(prepared[6], tmp_path / "artifacts")
    (store := tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)

    def type_in(message: str, before: str) -> None:
        typed = shlex.split(re.split(before, message)[1].partition("\n")[0])
        assert refusal_of(typed[typed.index("artifacts") :]) == ""

    pulled = ["artifacts", "pull", store, "--artifacts-dir", "pulled"]
    type_in(refusal_of(pulled).replace("URL", str(store)), "or tuned/ from ")
    (path, *_) = sorted(store.glob(f"graphs/*/{MANIFEST}"))
    path.write_bytes(path.read_bytes().replace(b'"tp": 1', b'"tp": 0'))
    type_in(refusal_of(pulled), "type: ")
    assert refusal_of(pulled) == ""


def test_a_manifest_without_checksum_is_read_and_a_recorded_size_makes_no_damaged_one_whole(tmp_path):
    compile_program(program(2), tmp_path, {}, torch.float32)
    content = read_json(tmp_path / MANIFEST)
    write_json(tmp_path / MANIFEST, content | {"runs": {}})
    manifest.record_size(tmp_path, {"height": 64})
    assert "its content differs from its checksum" in manifest.damaged_graphs(tmp_path)[0]
    assert content.pop("checksum")  # as an earlier version wrote it
    write_json(tmp_path / MANIFEST, content)
    assert manifest.damaged_graphs(tmp_path) == []
