"""Artifacts are pushed to a store and pulled from it whole, each byte once, and refused where a
byte is another one. Over a folder, fsspec's memory, and a server that speaks S3."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from blake3 import blake3
from helpers import exit_code, forked, save_weights
from tqdm import tqdm

from ltx_neuron import errors
from ltx_neuron.artifacts import choices, find, folder, sets, transfer
from ltx_neuron.artifacts import store as stores
from ltx_neuron.artifacts.__main__ import main, table
from ltx_neuron.artifacts.sets import Blob
from ltx_neuron.artifacts.store import Store
from ltx_neuron.artifacts.transfer import pull, push
from ltx_neuron.backends.manifest import sha256
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import MANIFEST, read_json, write_json
from ltx_neuron.tune import tuned_settings
from ltx_neuron.weights.rankfiles import verify

FLOATS = 50_000  # of a rank's file: 0.2 MB, in pieces of
PIECE = 2**14
WEIGHTS = {
    "kind": "weights",
    "model": "dit",
    "source": "0123456789ab",
    "tp": 2,
    "dtype": "float32",
    "layout": 3,
    "loras": [],
}
GRAPHS = {
    "kind": "graphs",
    "model": "vae",
    "bucket": "8x8x4",
    "config": "abc",
    "tp": 2,
    "dtype": "float32",
    "backend": "nxd",
    "code": "def",
    "torch": "2.9.0",
    "compiler_flags": "--lnc=2",
    "neuron": {"neuronx-cc": "2.26.6360.0", "libneuronxla": None},
}


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3 (moto), in a process of its own, and the environment that leads
    there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert server.poll() is None and time.monotonic() < until, (
            "no S3 server: pip install -e .[dev]"
        )
        time.sleep(0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "anyone")
        yield fsspec.filesystem("s3")
    server.kill()
    server.wait()


def url_of(kind: str, request, tmp_path: Path) -> str:
    """An empty place of a kind."""
    if kind == "folder":
        return str(tmp_path / "store")
    if kind == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://ltx"
    bucket = f"bucket-{random.randrange(10**9)}"
    request.getfixturevalue("s3").mkdir(bucket)
    return f"s3://{bucket}/some/where"


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request, tmp_path):
    return url_of(request.param, request, tmp_path)


@pytest.fixture(params=["folder", "s3"])
def lasting(request, tmp_path):
    """Of a store that other processes reach."""
    return url_of(request.param, request, tmp_path)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(stores, "_PIECE_BYTES", PIECE)


def make_weights(artifacts: Path, seed: int = 0, **changed) -> Path:
    identity = WEIGHTS | changed
    generator = torch.Generator().manual_seed(seed)
    ranks = [{"w": torch.randn(FLOATS, generator=generator)} for _ in range(identity["tp"])]
    path = save_weights(folder(artifacts, identity), *ranks)
    write_json(path / MANIFEST, read_json(path / MANIFEST) | {"identity": identity})
    return path


def make_graphs(artifacts: Path, seed: int = 0, **changed) -> Path:
    identity, path = GRAPHS | changed, folder(artifacts, GRAPHS | changed)
    path.mkdir(parents=True)
    graphs = {}
    for name in ("head", "blocks"):
        file = path / f"{name}.pt"
        file.write_bytes(random.Random(f"{seed}{name}").randbytes(40_000))
        graphs[name] = {"file": file.name, "sha256": sha256(file)}
    write_json(path / MANIFEST, {"identity": identity, "graphs": graphs})
    return path


@pytest.fixture
def made(tmp_path):
    """Artifacts of one machine: weights, graphs, and what is the machine's own."""
    artifacts = tmp_path / "made"
    make_weights(artifacts)
    make_graphs(artifacts)
    for own in ("calibration", "prompts", "compiled/inductor"):
        (artifacts / own).mkdir(parents=True)
        (artifacts / own / "own.json").write_text("{}")
    return artifacts


def content(root: Path) -> dict[str, bytes]:
    """All files under a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def sets_of(artifacts: Path) -> dict[str, bytes]:
    return {n: data for n, data in content(artifacts).items() if n.startswith(sets.KINDS)}


def fetched(monkeypatch) -> list[int]:
    """The bytes of each piece that stores give from now on."""
    read, pieces = Store.read, []

    def counted(self, key, start, stop):
        for piece in read(self, key, start, stop):
            pieces.append(len(piece))
            yield piece

    monkeypatch.setattr(Store, "read", counted)
    return pieces


def sent(monkeypatch) -> list[str]:
    """The keys of the blobs that are written from now on."""
    put, keys = Store.put, []

    def counted(self, path, key, show):
        keys.append(key)
        put(self, path, key, show)

    monkeypatch.setattr(Store, "put", counted)
    return keys


def in_a_process(work) -> int:
    """The exit code of a process that does some work; negative if a signal ended it."""

    def quietly():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its progress bar
        tqdm.set_lock(threading.RLock())  # a killed process would leave the bars' own locked
        work()

    return exit_code(forked(quietly))


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def blob_of(file: Path) -> Blob:
    return Blob(f"blake3-{blake3(file.read_bytes()).hexdigest()}", file.stat().st_size)


def change(url: str, name: str, change) -> None:
    """Replace what a store has under a name by what a function makes of it."""
    store = Store(url)
    place = f"{store.root}/{name}"
    store.fs.pipe_file(place, change(store.fs.cat_file(place)))


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


# --- whole ----------------------------------------------------------------------------------------


def test_what_is_pulled_is_what_was_pushed_and_nothing_of_the_machine(url, made, tmp_path):
    push(Store(url), made, [])
    folders = pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") == sets_of(made)
    weights, graphs = sorted(folders, reverse=True)
    assert verify(weights) == []
    assert find(tmp_path / "here", WEIGHTS, "") == weights
    assert find(tmp_path / "here", GRAPHS, "") == graphs


def test_the_same_command_sends_and_takes_nothing_again(url, made, tmp_path, monkeypatch, capsys):
    push(Store(url), made, [])
    pull(Store(url), tmp_path / "here", [])
    keys, pieces = sent(monkeypatch), fetched(monkeypatch)
    push(Store(url), made, [])
    pull(Store(url), tmp_path / "here", [])
    assert (keys, pieces) == ([], [])
    assert capsys.readouterr().out.count("already there: ") == 4


def test_what_two_sets_share_is_sent_and_stored_once(url, made, monkeypatch):
    push(Store(url), made, [])
    make_graphs(made, code="newer")
    keys = sent(monkeypatch)
    push(Store(url), made, [])
    assert len(keys) == 1  # its manifest; the graphs have the same bytes


def test_files_of_one_content_come_once(url, tmp_path, monkeypatch):
    path = make_weights(tmp_path / "made")
    same = {"w": torch.ones(FLOATS)}
    identity = read_json(path / MANIFEST)["identity"]
    save_weights(path, same, same)
    write_json(path / MANIFEST, read_json(path / MANIFEST) | {"identity": identity})
    lines = read_json(path / MANIFEST)["files"]
    assert lines["rank0.safetensors"] == lines["rank1.safetensors"]
    push(Store(url), tmp_path / "made", [])
    pieces = fetched(monkeypatch)
    pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") == content(tmp_path / "made")
    assert sum(pieces) < 1.1 * (path / "rank0.safetensors").stat().st_size
    (folder(tmp_path / "here", WEIGHTS) / "host.safetensors").unlink()
    pieces.clear()
    copied = []
    monkeypatch.setattr(transfer, "_blocks", lambda path, start: copied.append(path))
    pull(Store(url), tmp_path / "here", [])
    assert sum(pieces) < 10_000 and copied == []  # both are here


def test_a_folder_that_was_never_finished_is_not_sent(made, tmp_path):
    (folder(made, WEIGHTS) / MANIFEST).unlink()
    assert push(Store(tmp_path / "store"), made, []) == [f"graphs/{folder(made, GRAPHS).name}"]


def test_what_is_damaged_here_is_not_sent(url, made):
    path = folder(made, WEIGHTS) / "rank1.safetensors"
    path.write_bytes(flipped(path.read_bytes()))
    with pytest.raises(UserError, match=r"rank1.safetensors is damaged: .*\nMake it again: rm -r"):
        push(Store(url), made, ["weights"])
    assert Store(url).names() == []


def test_only_what_is_missing_or_damaged_here_is_taken(url, made, tmp_path, monkeypatch):
    push(Store(url), made, [])
    pull(Store(url), tmp_path / "here", [])
    here = folder(tmp_path / "here", WEIGHTS)
    with open(here / "rank0.safetensors", "ab") as file:
        file.write(b"more")
    (folder(tmp_path / "here", GRAPHS) / "head.pt").unlink()
    pieces = fetched(monkeypatch)
    pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") == sets_of(made)
    lost = (folder(made, WEIGHTS) / "rank0.safetensors").stat().st_size + 40_000
    assert lost <= sum(pieces) < lost + 10_000  # and the manifests


def test_a_flipped_byte_of_weights_here_is_found_where_all_bytes_are_read(made, tmp_path):
    store = Store(tmp_path / "store")
    push(store, made, [])
    pull(store, tmp_path / "here", [])
    path = folder(tmp_path / "here", WEIGHTS) / "rank1.safetensors"
    path.write_bytes(flipped(path.read_bytes()))
    pull(store, tmp_path / "here", [])
    assert content(tmp_path / "here") != sets_of(made)  # sizes are compared, as a run does
    pull(store, tmp_path / "here", [], check=True)
    assert content(tmp_path / "here") == sets_of(made)


def test_graphs_that_another_machine_compiled_to_other_bytes_are_as_good(
    url, made, tmp_path, capsys
):
    push(Store(url), made, [])
    make_graphs(tmp_path / "other", seed=1)
    assert push(Store(url), tmp_path / "other", []) == []
    before = content(tmp_path / "other")
    pull(Store(url), tmp_path / "other", ["graphs"])
    assert content(tmp_path / "other") == before


def test_many_pushes_and_pulls_at_once_end_whole(made, tmp_path):
    store, here = str(tmp_path / "store"), tmp_path / "here"
    pushes = [forked(lambda: push(Store(store), made, [], again=True)) for _ in range(3)]
    assert [exit_code(child) for child in pushes] == [0, 0, 0]
    pulls = [forked(lambda: pull(Store(store), here, [])) for _ in range(3)]
    assert [exit_code(child) for child in pulls] == [0, 0, 0]
    assert content(here) == sets_of(made)
    assert not [name for name in content(tmp_path / "store") if "partial" in name]


# --- interrupted ----------------------------------------------------------------------------------


def test_a_killed_pull_goes_on_with_what_came(url, made, tmp_path, monkeypatch, capsys):
    push(Store(url), made, [])
    here, weights = tmp_path / "here", folder(tmp_path / "here", WEIGHTS)

    def killed_in_the_second_file():
        pieces = fetched(monkeypatch)
        show = transfer._shower

        def counting(bar):
            shown = show(bar)
            return lambda count: kill_this_process() if len(pieces) == 20 else shown(count)

        monkeypatch.setattr(transfer, "_shower", counting)
        pull(Store(url), here, ["weights"])

    assert in_a_process(killed_in_the_second_file) == -signal.SIGKILL
    with pytest.raises(UserError, match="were never finished"):
        find(here, WEIGHTS, "make them")
    kept = sum(len(data) for data in content(weights).values())
    total = sum(file.stat().st_size for file in folder(made, WEIGHTS).iterdir())
    assert 0.5 * total < kept < total
    assert [name for name in content(weights) if name.endswith(".partial")]
    pieces = fetched(monkeypatch)
    pull(Store(url), here, ["weights"])
    assert sum(pieces) == total - kept
    assert f", {transfer.in_units(total - kept)} of 0.40 MB fetched" in capsys.readouterr().out
    assert content(weights) == content(folder(made, WEIGHTS))


def test_a_killed_push_is_nothing_to_pull_and_goes_on_with_what_it_sent(
    lasting, made, tmp_path, monkeypatch
):
    def killed_in_the_second_file():
        keys = sent(monkeypatch)
        fs = Store(lasting).fs  # one for all stores of a kind
        put_file = fs.put_file

        def half(path, place, **more):
            if len(keys) < 2:
                return put_file(path, place, **more)
            if not lasting.startswith("s3"):  # which shows nothing of a half
                Path(place).write_bytes(Path(path).read_bytes()[: PIECE // 2])
            return kill_this_process()

        monkeypatch.setattr(fs, "put_file", half)
        push(Store(lasting), made, ["weights"])

    assert in_a_process(killed_in_the_second_file) == -signal.SIGKILL
    assert Store(lasting).names() == [] and len(Store(lasting).blobs()) == 1
    with pytest.raises(UserError, match="holds no artifacts"):
        pull(Store(lasting), tmp_path / "here", [])
    keys = sent(monkeypatch)
    push(Store(lasting), made, ["weights"])
    assert len(keys) == len(content(folder(made, WEIGHTS))) - 1
    pull(Store(lasting), tmp_path / "here", [])
    assert content(tmp_path / "here") == {
        name: data for name, data in sets_of(made).items() if name.startswith("weights")
    }


def test_what_interrupted_runs_left_is_removed_when_the_folder_is_finished(made, tmp_path):
    """A sharding, which leaves a journal and files without a dot, and pulls of other bytes."""
    store, weights = Store(tmp_path / "store"), folder(tmp_path / "here", WEIGHTS)
    push(store, made, ["weights"])
    weights.mkdir(parents=True)
    names = "rank0.safetensors.partial", "journal.json", ".rank1.safetensors.0123.partial"
    for name in (*names, "notes of a person"):
        (weights / name).write_text("left")
    pull(store, tmp_path / "here", [])
    left = {path.name for path in weights.iterdir()} - {*content(folder(made, WEIGHTS))}
    assert left == {"notes of a person"}


def test_a_blob_that_was_cut_off_is_sent_again(url, made, tmp_path, monkeypatch):
    """As a file system leaves it whose renames are none, or a copy by hand."""
    push(Store(url), made, [])
    key = blob_of(folder(made, WEIGHTS) / "rank0.safetensors").key
    change(url, f"blobs/{key}", lambda data: data[:-1])
    with pytest.raises(UserError, match=f"{key} is damaged: got \\d+ bytes, wanted \\d+ bytes"):
        pull(Store(url), tmp_path / "here", [])
    keys = sent(monkeypatch)
    push(Store(url), made, [])
    assert keys == [key]
    pull(Store(url), tmp_path / "here", [])


def test_what_was_kept_and_is_damaged_is_not_blamed_on_the_store(made, tmp_path, capsys):
    """A machine that lost its power may have kept a part's size and not its content."""
    store, here = Store(tmp_path / "store"), tmp_path / "here"
    push(store, made, ["weights"])
    weights, blob = folder(here, WEIGHTS), blob_of(folder(made, WEIGHTS) / "rank0.safetensors")
    weights.mkdir(parents=True)
    for size in (1000, blob.bytes, blob.bytes + 1):
        partial = weights / f".rank0.safetensors.{blob.key[-16:]}.partial"
        partial.write_bytes(bytes(size))
        pull(store, here, [])
        assert content(weights) == content(folder(made, WEIGHTS))
        (weights / MANIFEST).unlink()
        (weights / "rank0.safetensors").unlink()


def test_a_network_that_breaks_ends_the_pull_which_goes_on(url, made, tmp_path, monkeypatch):
    push(Store(url), made, [])
    fs, calls = Store(url).fs, []  # one for all stores of a kind
    cat_file = fs.cat_file

    def breaking(*arguments, **more):
        calls.append(arguments)
        if len(calls) > 20:
            raise ConnectionResetError("reset by peer")
        return cat_file(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "cat_file", breaking)
        refusal = (RunError, ConnectionResetError)  # the latter from a folder: errors.run says it
        with pytest.raises(refusal, match="reset by peer"):
            pull(Store(url), tmp_path / "here", ["weights"])
    pieces = fetched(monkeypatch)
    pull(Store(url), tmp_path / "here", ["weights"])
    total = sum(file.stat().st_size for file in folder(made, WEIGHTS).iterdir())
    assert verify(folder(tmp_path / "here", WEIGHTS)) == [] and sum(pieces) < 0.8 * total


# --- refused --------------------------------------------------------------------------------------


def test_a_flipped_byte_of_any_file_is_refused_and_a_push_again_mends_it(url, made, tmp_path):
    push(Store(url), made, [])
    described = [Store(url).described(name) for name in Store(url).names()]
    keys = {blob.key: each.name for each in described for blob in each.files.values()}
    assert len(keys) == 7
    for number, (key, name) in enumerate(random.Random(0).sample([*keys.items()], 4)):
        here = tmp_path / f"here{number}"
        change(url, f"blobs/{key}", flipped)
        with pytest.raises(UserError) as refused:
            pull(Store(url), here, [])
        kind = key.partition("-")[0]
        assert f"blobs/{key} is damaged: got {kind}-" in str(refused.value)
        assert f"wanted {key}" in str(refused.value)
        assert not (here / name / MANIFEST).exists()
        for file in (here / name).glob("*"):  # what has its name is right
            assert file.read_bytes() == (made / name / file.name).read_bytes()
        typed = str(refused.value).rpartition("type: python -m ltx_neuron.artifacts ")[2].split()
        main([*typed, "--artifacts-dir", str(made)])
        pull(Store(url), here, [])
        assert content(here) == sets_of(made)


def test_a_flipped_byte_of_a_description_is_refused_and_a_push_mends_it(url, made, tmp_path):
    push(Store(url), made, ["weights"])
    name = Store(url).names()[0]
    text = Store(url).fs.cat_file(f"{Store(url).root}/sets/{name}.json")
    for place in random.Random(0).sample(range(len(text)), 10):
        damaged = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
        change(url, f"sets/{name}.json", lambda _, damaged=damaged: damaged)
        with pytest.raises(UserError, match=r"\.json is damaged: "):
            pull(Store(url), tmp_path / "here", [])
        assert "is damaged" in table(Store(url), [])
    assert not (tmp_path / "here").exists()
    assert push(Store(url), made, ["weights"]) == [name]
    pull(Store(url), tmp_path / "here", [])


def forge(url: str, name: str, **changed) -> None:
    """Put a description of that name that carries the right digest of itself."""
    store = Store(url)
    real = json.loads(store.fs.cat_file(f"{store.root}/sets/{store.names()[0]}.json"))
    content = {**real, **changed}
    content.pop("blake3")
    content["blake3"] = sets._digest_of(content)
    store.fs.pipe_file(f"{store.root}/sets/{name}.json", json.dumps(content).encode())


LINE = ["blake3-" + "0" * 64, 4]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"files": {MANIFEST: LINE, "../../../out": LINE}}, "it names the file '../../../out'"),
        ({"files": {MANIFEST: LINE, "/etc/passwd": LINE}}, "it names the file '/etc/passwd'"),
        ({"files": {MANIFEST: LINE, "..": LINE}}, r"it names the file '\.\.'"),
        ({"files": {MANIFEST: LINE, ".bashrc": LINE}}, r"it names the file '\.bashrc'"),
        ({"files": {MANIFEST: ["blake3-../../x", 4]}}, "is no digest"),
        ({"files": {MANIFEST: [LINE[0], -4]}}, "has -4 bytes"),
        ({"files": {MANIFEST: [LINE[0], 10**12]}}, "has 1000000000000 bytes"),
        ({"files": {"rank0.safetensors": LINE}}, "it has no manifest.json"),
        ({"files": [1, 2]}, "it is no set of artifacts"),
        ({"identity": WEIGHTS | {"model": "../../out"}}, "its identity is that of"),
        ({"identity": WEIGHTS | {"kind": "calibration"}}, "its identity is that of"),
        ({"identity": WEIGHTS | {"kind": "/tmp"}}, "its identity is that of"),
        ({"identity": []}, "it is no set of artifacts"),
        ({"schema": 2}, "schema 2, wanted 1"),
    ],
)
def test_a_description_that_leads_out_of_its_folder_is_refused(made, tmp_path, changed, said):
    url = str(tmp_path / "store")
    push(Store(url), made, ["weights"])
    name = Store(url).names()[0]
    forge(url, name, **changed)
    before = content(tmp_path)
    with pytest.raises(UserError, match=f"{name}.json is damaged: .*{said}"):
        pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path) == before and not (tmp_path / "here").exists()


@pytest.mark.parametrize("file", ["notes.txt", "journal.json", "rank7.safetensors"])
def test_a_manifest_and_a_description_that_say_different_things_are_refused(made, tmp_path, file):
    url = str(tmp_path / "store")
    push(Store(url), made, ["weights"])
    (name,) = Store(url).names()
    real = Store(url).described(name).files
    forge(url, name, files={**{n: [*b] for n, b in real.items()}, file: [*real[MANIFEST]]})
    with pytest.raises(UserError, match="manifest.json describes other files"):
        pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") == {}


@pytest.mark.parametrize("graph", ["../out", "a/b", "..", "/etc/passwd"])
def test_a_manifest_whose_graph_leads_out_of_its_folder_is_refused(made, tmp_path, graph):
    """One that the description agrees with: whoever forged it wrote both."""
    url, path = str(tmp_path / "store"), folder(made, GRAPHS) / MANIFEST
    push(Store(url), made, ["graphs"])
    (name,) = Store(url).names()
    manifest = read_json(path)
    manifest["graphs"] = {graph: manifest["graphs"]["head"] | {"file": f"{graph}.pt"}}
    write_json(tmp_path / "forged.json", manifest)
    blob = blob_of(tmp_path / "forged.json")
    shutil.copy(tmp_path / "forged.json", f"{url}/blobs/{blob.key}")
    forge(url, name, files={MANIFEST: [*blob]})
    with pytest.raises(UserError, match="manifest.json is damaged|is damaged: graphs"):
        pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") == {}


@pytest.mark.parametrize("what", ["blobs", "sets"])
def test_a_link_in_a_stores_folder_is_not_followed(made, tmp_path, what):
    url = str(tmp_path / "store")
    push(Store(url), made, ["weights"])
    for path in (tmp_path / "store" / what).rglob("*"):
        if path.is_file():
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
    said = "got no file" if what == "blobs" else "holds no artifacts"
    with pytest.raises(UserError, match=said):
        pull(Store(url), tmp_path / "here", [])


def test_a_disk_without_room_is_refused_before_the_first_byte(url, made, tmp_path, monkeypatch):
    push(Store(url), made, ["weights"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(
        UserError, match=r"weights/dit.* needs 0\.40 MB more, the disk of .* has 0\.10 MB free"
    ):
        pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") == {}
    kept = folder(tmp_path / "here", WEIGHTS)
    kept.mkdir()
    for rank in range(2):  # what an earlier run got takes no room again
        data = (folder(made, WEIGHTS) / f"rank{rank}.safetensors").read_bytes()
        tag = blake3(data).hexdigest()[-16:]
        (kept / f".rank{rank}.safetensors.{tag}.partial").write_bytes(data[:160_000])
    pull(Store(url), tmp_path / "here", [])


def ended(*words: str) -> int:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as end:
        errors.run(lambda: main([*words]))
    return end.value.code


def test_a_disk_that_fills_up_is_said_and_the_pull_goes_on(made, tmp_path, capsys):
    """A file system of 0.3 MiB, whose free space is not what it says."""
    push(Store(tmp_path / "store"), made, ["weights"])
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system could not be mounted (needs root): NOT tested")
    try:
        words = "pull", str(tmp_path / "store"), "--artifacts-dir", str(disk)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "_check_space", lambda *_: None)
            assert ended(*words) == 2
        assert "the disk is full: " in capsys.readouterr().err
        names = {name.rpartition("/")[2] for name in content(disk)}
        assert MANIFEST not in names and "rank0.safetensors" in names
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        main([*words])
        assert verify(folder(disk, WEIGHTS)) == []
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("nosuch://place", 2, "Protocol not known: nosuch"),
        ("gs://bucket/ltx", 2, "Type: pip install gcsfs"),
        ("az://container/ltx", 2, "Type: pip install adlfs"),
        ("s3://no-such-bucket/ltx", 2, "bucket does not exist"),
        ("ftp://me:secret@127.0.0.1:1/ltx", 1, "ftp://127.0.0.1:1/ltx: ConnectionRefusedError"),
        ("/dev/null/store", 2, "a part of this path is a file, wanted a folder"),
        ("data://x", 2, "NotImplementedError"),
    ],
)
def test_a_place_that_cannot_be_used_is_said_without_a_traceback(s3, made, capsys, url, code, said):
    assert ended("push", url, "--artifacts-dir", str(made)) == code
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
    assert "secret" not in printed.out + printed.err


def test_a_store_that_may_not_be_entered_is_said_with_whose_credentials_count(
    s3, made, capsys, monkeypatch
):
    from botocore.exceptions import NoCredentialsError

    def nobody(*_, **__):
        raise NoCredentialsError

    s3.mkdir("closed")
    monkeypatch.setattr(type(s3), "find", nobody)  # the stand-in lets everybody in
    assert ended("list", "s3://closed/ltx") == 2
    assert "Unable to locate credentials" in (said := capsys.readouterr().err)
    assert "aws configure" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pull", "EMPTY"), "holds no artifacts\nWanted: what python -m ltx_neuron.artifacts push"),
        (("push", "EMPTY", "--artifacts-dir", "EMPTY"), "no finished weights or graphs in"),
        (("push", "EMPTY", "--only", "gemma3"), "--only gemma3 fits nothing in"),
        (("pull", "EMPTY", "--again"), "--again goes with push, got pull"),
        (("list", "EMPTY", "--verify"), "--verify goes with pull, got list"),
        (("pull", "EMPTY", "--artifacts-dir", "/dev/null/x"), "is not a folder you may write to"),
        (("take", "EMPTY"), "invalid choice: 'take'"),
        (("push", ""), "the URL of the store is empty"),
    ],
)
def test_what_cannot_be_done_is_said_with_what_to_type(made, tmp_path, capsys, words, said):
    words = [word.replace("EMPTY", str(tmp_path / "empty")) for word in words]
    if "--artifacts-dir" not in words:
        words += ["--artifacts-dir", str(made)]
    assert ended(*words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "empty").exists()


# --- what a tuning chose --------------------------------------------------------------------------

DEVICE = {"profile": "trn2.3xlarge", "chips": 1, "lnc": 2}
TUNED = {"device": DEVICE, "versions": {}, "code": "c", "config": "d", "tp": 4, "dtype": "bfloat16"}


def tuned(artifacts: Path, threads: int = 4) -> tuned_settings.TunedSettings:
    choice = tuned_settings.TunedSettings(
        tuned_settings.file_of(artifacts, TUNED), TUNED, {"threads": str(threads)}
    )
    choice.write()
    return choice


def test_what_a_tuning_chose_travels_with_the_graphs_that_were_compiled_for_it(url, made, tmp_path):
    written = tuned(made)
    push(Store(url), made, [])
    pull(Store(url), tmp_path / "here", [])
    assert tuned_settings.load(tmp_path / "here", TUNED).run == written.run
    assert push(Store(url), made, []) == []
    assert "settings of a tuning of 0 sizes; 20" in table(Store(url), ["tuned"])
    assert push(Store(url), tuned(made, threads=2).path.parents[1], ["tuned"])


def test_ones_own_choice_is_never_replaced(made, tmp_path, capsys):
    url, own = tmp_path / "store", tuned(tmp_path / "here", threads=8)
    tuned(made)
    push(Store(url), made, [])
    pull(Store(url), tmp_path / "here", ["tuned"])
    assert f"kept: {own.path}, which differs from the store's" in capsys.readouterr().out
    assert tuned_settings.load(tmp_path / "here", TUNED).run == {"threads": "8"}


@pytest.mark.parametrize("name", ["tuned/..", "tuned/.hidden", "tuned/trn2-tp4-12345678"])
def test_a_choice_of_another_name_is_refused(made, tmp_path, name):
    store = Store(tmp_path / "store")
    (name_sent,) = push(store, tuned(made).path.parents[1], ["tuned"])
    real = store.opened(name_sent, choices.decoded)
    with pytest.raises(ValueError, match="its identity is that of another choice"):
        choices.decoded(sets.sealed(real), name)
    change(store.url, f"sets/{name_sent}.json", flipped)
    with pytest.raises(UserError, match="is damaged"):
        pull(store, tmp_path / "here", [])
    assert not (tmp_path / "here").exists()


# --- shown and chosen -----------------------------------------------------------------------------


def test_list_shows_what_each_set_is_and_was_made_for(url, made, capsys):
    push(Store(url), made, [])
    capsys.readouterr()
    main(["list", url])
    graphs, of_graphs, weights, of_weights = capsys.readouterr().out.splitlines()
    assert graphs == f"graphs/{folder(made, GRAPHS).name}"
    assert "graphs of the video decoder 8x8x4, TP 2, float32; 0.08 MB in 3 files, 20" in of_graphs
    assert "backend nxd; code def; torch 2.9.0; compiler_flags --lnc=2; neuron" in of_graphs
    assert "neuronx-cc 2.26.6360.0, libneuronxla none" in of_graphs
    assert weights == f"weights/{folder(made, WEIGHTS).name}"
    assert "weights of the transformer, TP 2, float32; 0.40 MB in 4 files" in of_weights
    assert "source 0123456789ab; loras none" in of_weights


@pytest.mark.parametrize("only", ["graphs", "vae", "graphs/vae*", "*8x8x4*"])
def test_a_part_of_a_store_is_chosen_by_kind_model_or_name(made, tmp_path, only):
    url, name = str(tmp_path / "store"), folder(made, GRAPHS).name
    main(["push", url, "--artifacts-dir", str(made)])
    main(["pull", url, "--artifacts-dir", str(tmp_path / "here"), "--only", only])
    assert [path.name for path in (tmp_path / "here").glob("*/*")] == [name]


def test_a_choice_that_fits_nothing_lists_what_there_is(made, tmp_path):
    store = Store(tmp_path / "store")
    push(store, made, [])
    with pytest.raises(UserError, match=r"(?s)--only weight fits nothing.*graphs/vae.*weights/dit"):
        pull(store, tmp_path / "here", ["graphs", "weight"])
    assert not (tmp_path / "here").exists()


def test_no_user_and_no_password_of_a_url_is_kept():
    shown = stores.without_user("see sftp://me:se:cr@et@host/x and https://host/a@b or s3://b/k")
    assert "et@" not in shown and "host/x" in shown and "https://host/a@b or s3://b/k" in shown
