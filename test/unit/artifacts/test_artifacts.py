"""Artifacts are pushed to a store and pulled from it whole, each file once, and refused where a byte is another one."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
import torch
from botocore.exceptions import NoCredentialsError
from helpers import exit_code, forked, save_weights
from tqdm import tqdm
from typed import ended

from ltx_neuron import artifacts
from ltx_neuron.artifacts import find, folder, tuned_settings
from ltx_neuron.artifacts.__main__ import main, table
from ltx_neuron.artifacts.store import Store, names_in, without_user
from ltx_neuron.artifacts.transfer import pull, push
from ltx_neuron.backends.manifest import sha256
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_json
from ltx_neuron.invocation import command
from ltx_neuron.weights.rankfiles import verify

WEIGHTS = {"kind": "weights", "model": "dit", "source": "0123456789ab", "tp": 2, "dtype": "float32"}
WEIGHTS |= {"layout": 3, "loras": []}
GRAPHS = {"kind": "graphs", "model": "vae", "bucket": "8x8x4", "config": "abc", "tp": 2, "dtype": "float32"}
GRAPHS |= {"backend": "nxd", "code": "def", "torch": "2.9.0", "compiler_flags": "--lnc=2"}
GRAPHS |= {"neuron": {"neuronx-cc": "2.26.6360.0", "libneuronxla": None}}
ENTRY = {"bytes": 4, "blake3": "0" * 64, "header_blake3": "0" * 64}

# On a port that the system chooses: one that is free now may be another process's a moment later.
SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3 (moto), in a process of its own, and the environment that leads there."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], stderr=subprocess.DEVNULL, **pipes)
    port = server.stdout.readline().strip()
    assert port, "no S3 server: pip install -e .[dev]"
    # fsspec keeps file systems, also those of a server of an earlier set-up of this fixture.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anyone")
        yield fsspec.filesystem("s3")
    server.kill()
    server.wait()


@pytest.fixture
def url(request, tmp_path) -> str:
    """Of an empty store: a folder, memory or S3."""
    if request.param == "folder":
        return str(tmp_path / "store")
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://ltx"
    bucket = f"bucket-{random.randrange(10**9)}"
    request.getfixturevalue("s3").mkdir(bucket)
    return f"s3://{bucket}/some/where"


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def here(tmp_path) -> Path:
    """The artifacts of a second machine, which has none."""
    return tmp_path / "here"


def make_graphs(artifacts: Path, seed: int = 0) -> None:
    path, graphs = folder(artifacts, GRAPHS), {}
    path.mkdir(parents=True)
    for name in ("head", "blocks"):
        file = path / f"{name}.pt"
        file.write_bytes(random.Random(f"{seed}{name}").randbytes(40_000))
        graphs[name] = {"file": file.name, "sha256": sha256(file)}
    write_json(path / MANIFEST, {"identity": GRAPHS, "graphs": graphs})


@pytest.fixture
def source(tmp_path) -> Path:
    """Artifacts of one machine: weights, graphs, and what is the machine's own."""
    artifacts, generator = tmp_path / "source", torch.Generator().manual_seed(0)
    weights = save_weights(folder(artifacts, WEIGHTS), *({"w": torch.randn(50_000, generator=generator)} for _ in "01"))
    write_json(weights / MANIFEST, read_json(weights / MANIFEST) | {"identity": WEIGHTS})
    make_graphs(artifacts)
    for own in ("calibration", "prompts", "compiled/inductor"):
        (artifacts / own).mkdir(parents=True)
        (artifacts / own / "own.json").write_text("{}")
    return artifacts


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def sets_of(artifacts: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(artifacts).items() if name.startswith(("weights", "graphs", "tuned"))}


def killed_in_the_second_file(url: str, method: str, work) -> bool:
    """Whether a process was killed while it copied half of the second file, by a method of fsspec."""

    def run():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its progress bar
        tqdm.set_lock(threading.RLock())  # a killed process would leave the bars' own locked
        fs = Store(url).fs  # one for all stores of a kind
        copy = getattr(fs, method)

        def half(source, target, **_):
            with suppress(FileNotFoundError):  # S3 shows nothing of a half
                Path(target).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        def first(source, target, **more):
            setattr(fs, method, half)
            return copy(source, target, **more)

        setattr(fs, method, first)
        work()

    return exit_code(forked(run)) == -signal.SIGKILL


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("url", ["folder", "memory", "s3"], indirect=True)
def test_what_is_pulled_is_what_was_pushed_and_nothing_of_the_machine(url, source, here, capsys):
    push(Store(url), source, [])
    weights, graphs = sorted(pull(Store(url), here, []), reverse=True)
    assert content(here) == sets_of(source) and verify(weights) == []
    assert (find(here, WEIGHTS, ""), find(here, GRAPHS, "")) == (weights, graphs)
    push(Store(url), source, [])
    pull(Store(url), here, [])
    printed = capsys.readouterr().out
    assert [printed.count(words) for words in ("pushed: ", "pulled: ", "already present: ")] == [2, 2, 4]
    main(["list", url])
    first, of_graphs, second, of_weights = capsys.readouterr().out.splitlines()
    assert [first, second] == [f"graphs/{graphs.name}", f"weights/{weights.name}"]
    assert "graphs of the video decoder 8x8x4, TP 2, float32; 80.6 kB in 3 files, 20" in of_graphs
    assert 'neuron {"neuronx-cc": "2.26.6360.0", "libneuronxla": null}' in of_graphs
    assert "weights of the transformer, TP 2, float32; 401.1 kB in 4 files" in of_weights


def test_what_is_damaged_unfinished_or_of_another_name_here_is_not_sent(source, store):
    weights = folder(source, WEIGHTS)
    flip(weights / "rank0.safetensors")
    with pytest.raises(UserError, match=r"rank0.safetensors is damaged: .*\nMake it again: rm -r"):
        push(store, source, ["weights"])
    renamed = weights.rename(weights.with_name("dit-tp2-float32-01234567"))
    with pytest.raises(UserError, match="is not a valid manifest"):
        push(store, source, ["weights"])
    assert names_in(store.files()) == []
    (renamed / MANIFEST).unlink()
    assert push(store, source, []) == [f"graphs/{folder(source, GRAPHS).name}"]


def test_only_what_is_missing_or_damaged_here_is_taken(store, source, here, capsys):
    push(store, source, [])
    pull(store, here, [])
    weights, graphs = folder(here, WEIGHTS), folder(here, GRAPHS)
    with open(weights / "rank0.safetensors", "ab") as file:
        file.write(b"more")
    (graphs / "head.pt").unlink()
    capsys.readouterr()
    pull(store, here, [])
    assert content(here) == sets_of(source)
    assert re.findall(r" in (\d of \d) files", capsys.readouterr().out) == ["1 of 2", "1 of 3"]
    flip(weights / "rank1.safetensors")
    pull(store, here, [])
    assert content(here) != sets_of(source)  # sizes are compared, as a run does
    pull(store, here, [], check=True)
    assert content(here) == sets_of(source)
    # Graphs that another machine compiled to other bytes are as good.
    shutil.rmtree(here)
    make_graphs(here, seed=1)
    assert push(store, here, []) == []
    before = content(here)
    pull(store, here, ["graphs"])
    assert content(here) == before


def test_many_pushes_and_pulls_at_once_end_whole(store, source, here):
    for work in (lambda: push(store, source, [], force=True), lambda: pull(store, here, [])):
        children = [forked(work) for _ in range(3)]
        assert [exit_code(child) for child in children] == [0, 0, 0]
    assert content(here) == sets_of(source)
    assert not [name for name in store.files() if "partial" in name]


@pytest.mark.parametrize("url", ["folder", "s3"], indirect=True)  # other processes reach them
def test_a_killed_push_or_pull_is_nothing_to_use_and_goes_on_with_the_file(url, source, here, capsys):
    assert killed_in_the_second_file(url, "put_file", lambda: push(Store(url), source, ["weights"]))
    assert names_in(Store(url).files()) == []
    with pytest.raises(UserError, match="has no artifacts"):
        pull(Store(url), here, [])
    push(Store(url), source, ["weights"])
    assert " in 2 of 3 files\npushed: " in capsys.readouterr().out
    assert killed_in_the_second_file(url, "get_file", lambda: pull(Store(url), here, []))
    with pytest.raises(UserError, match="are not finished"):
        find(here, WEIGHTS, "make them")
    weights = folder(here, WEIGHTS)
    names = [path.name for path in weights.iterdir() if not path.name.startswith(".")]
    assert names == ["rank0.safetensors"]  # nothing half has a final name
    left = f".{MANIFEST}.1-01234567.partial", ".rank1.safetensors.1-01234567.partial"
    for name in (*left, "notes of a person"):
        (weights / name).write_text("left")
    pull(Store(url), here, [])
    assert capsys.readouterr().out.endswith(" in 2 of 3 files\n")
    (weights / "notes of a person").unlink()  # but what interrupted runs left is gone
    assert content(weights) == content(folder(source, WEIGHTS))


def test_a_damaged_file_is_refused_and_the_push_in_the_message_mends_it(store, source, here):
    push(store, source, [])
    for file in (f"{folder(Path(), WEIGHTS)}/rank1.safetensors", f"{folder(Path(), GRAPHS)}/head.pt"):
        flip(Path(store.root, file))
        with pytest.raises(UserError, match=f"{file} is damaged: it") as refused:
            pull(store, here, [])
        name = file.rpartition("/")[0]
        assert not (here / name / MANIFEST).exists()
        for path in (here / name).glob("*"):  # what has its name is right
            assert path.read_bytes() == (source / name / path.name).read_bytes()
        words = str(refused.value).rpartition(f"type: {command('artifacts')} ")[2].split()
        main([*words, "--artifacts-dir", str(source)])
        pull(store, here, [])
        assert content(here) == sets_of(source)
        shutil.rmtree(here)


def test_a_damaged_manifest_or_a_lost_file_is_refused_and_a_push_mends_it(store, source, tmp_path, here, capsys):
    (name,) = push(store, source, ["weights"])
    weights = Path(store.root, name)
    for damaged in (b"", b"[]", b"[" * 9999):
        (weights / MANIFEST).write_bytes(damaged)
        with pytest.raises(UserError, match=r"manifest\.json is damaged: "):
            pull(store, here, [])
        assert "is damaged" in table(store, [])
    assert not here.exists()
    assert push(store, source, ["weights"]) == [name]
    pull(store, here, [])
    os.truncate(weights / "rank0.safetensors", 1000)
    (weights / "rank1.safetensors").unlink()
    with pytest.raises(UserError, match="rank0.safetensors is damaged: it is missing or"):
        pull(store, tmp_path / "there", [])
    push(store, source, ["weights"])
    assert f" in 2 of 3 files\npushed: {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed",
    [
        {"files": {"/etc/passwd": ENTRY, "rank0.safetensors": ENTRY, "host.safetensors": ENTRY}},
        {"identity": WEIGHTS | {"model": "../../out"}},
        {"identity": GRAPHS, "graphs": {"../out": {"file": "../out.pt", "sha256": "0" * 64}}},
    ],
)
def test_a_manifest_that_leads_out_of_its_folder_is_refused(store, source, tmp_path, here, changed):
    (name,) = push(store, source, ["graphs" if "graphs" in changed else "weights"])
    path = Path(store.root, name, MANIFEST)
    write_json(path, read_json(path) | changed)
    before = content(tmp_path)
    with pytest.raises(UserError, match="manifest.json is damaged: "):
        pull(store, here, [])
    assert content(tmp_path) == before and not here.exists()


def test_neither_links_nor_names_that_lead_out_of_a_stores_folder_are_followed(store, source, tmp_path, here):
    (name,) = push(store, source, ["weights"])
    for file, message in (("rank0.safetensors", "it is missing or has another size"), (MANIFEST, "has no artifacts")):
        path = Path(store.root, name, file).rename(tmp_path / file)
        Path(store.root, name, file).symlink_to(path)
        with pytest.raises(UserError, match=message):
            pull(store, here, [])
    names = "weights/../../out", "graphs/.hidden", "prompts/x", "weights/a/b", "/tmp/x"
    files = [f"{name}/{MANIFEST}" for name in names] + ["tuned/../x.json", "tuned/.x.json"]
    assert names_in(dict.fromkeys(files, 1)) == []


def test_a_pull_needs_room_and_one_to_a_disk_that_fills_up_goes_on(store, source, small_disk, capsys, monkeypatch):
    push(store, source, ["weights"])
    (small_disk / "other").write_bytes(bytes(700_000))
    with pytest.raises(UserError, match=r"dit.* needs 40\d\.\d kB more in .* kB free"):
        pull(store, small_disk, [])
    assert content(small_disk).keys() == {"other"}
    # From here on its free space is not what it says.
    monkeypatch.setattr("ltx_neuron.artifacts.transfer.check_space", lambda *_: None)
    words = "pull", store.url, "--artifacts-dir", str(small_disk)
    assert ended("artifacts", *words) == 2
    assert "the disk is full: " in capsys.readouterr().err
    names = {name.rpartition("/")[2] for name in content(small_disk)}
    assert MANIFEST not in names and "rank0.safetensors" in names
    (small_disk / "other").unlink()
    main([*words])
    assert verify(folder(small_disk, WEIGHTS)) == []


def test_a_wrong_place_or_choice_is_refused_without_traceback_or_password(s3, source, tmp_path, capsys, monkeypatch):
    for words, code, message in (
        ("push nosuch://place", 2, "Protocol not known: nosuch"),
        ("push gs://bucket/ltx", 2, "nstall gcsfs"),
        ("push s3://no-such-bucket/ltx", 2, "bucket does not exist"),
        ("push ftp://me:secret@127.0.0.1:1/ltx", 1, "ftp://127.0.0.1:1/ltx: ConnectionRefusedError"),
        ("push /dev/null/store", 2, "a part of this path is a file, wanted a folder"),
        ("push data://x", 2, "NotImplementedError"),
        ("push EMPTY --artifacts-dir EMPTY", 2, "no finished weights or graphs in"),
        ("list EMPTY --verify", 2, "--verify needs pull, got list"),
        ("pull EMPTY --artifacts-dir /dev/null/x", 2, "is not a folder you may write to"),
        ("push ", 2, "the URL of the store is empty"),
    ):
        arguments = words.replace("EMPTY", str(tmp_path / "empty")).split(" ")
        more = ["--artifacts-dir", source] * ("--artifacts-dir" not in arguments)
        assert ended("artifacts", *arguments, *more) == code
        printed = capsys.readouterr()
        assert message in printed.err and "Traceback" not in printed.err
        assert "secret" not in printed.out + printed.err and not (tmp_path / "empty").exists()
    monkeypatch.setattr(type(s3), "find", Mock(side_effect=NoCredentialsError))  # the stand-in lets everybody in
    assert ended("artifacts", "list", "s3://closed/ltx") == 2
    message = capsys.readouterr().err  # it names whose credentials count
    assert "Unable to locate credentials" in message and "aws configure" in message
    text = without_user("see sftp://me:se:cr@et@host/x and https://host/a@b or s3://b/k")
    assert "et@" not in text and "host/x" in text and "https://host/a@b or s3://b/k" in text


TUNED = {"device": {"profile": "trn2.3xlarge", "chips": 1, "lnc": 2}, "versions": {}, "code": "c", "config": "d"}
TUNED |= {"tp": 4, "dtype": "bfloat16"}


def tuned(artifacts: Path, threads: int = 4) -> Path:
    path = tuned_settings.file_of(artifacts, TUNED)
    tuned_settings.TunedSettings(path, TUNED, {"threads": str(threads)}).write()
    return path


def test_tuned_settings_travel_and_never_replace_ones_own(store, source, here, capsys):
    tuned(source)
    push(store, source, [])
    pull(store, here, [])
    assert tuned_settings.load(here, TUNED).run == {"threads": "4"}
    assert push(store, source, []) == []
    assert "tuned settings; 20" in table(store, ["tuned"])
    own = tuned(here, threads=8)
    pull(store, here, ["tuned"])
    assert f"kept: {own} (the store's file differs)" in capsys.readouterr().out
    assert tuned_settings.load(here, TUNED).run == {"threads": "8"}
    tuned(source, threads=2)
    (name,) = push(store, source, ["tuned"])
    damaged = Path(store.root, "tuned/trn2-tp4-bfloat16-12345678.json")
    Path(store.root, f"{name}.json").rename(damaged)
    with pytest.raises(UserError, match="12345678.json is damaged: its identity does not match its name"):
        pull(store, here, ["tuned"])


def test_a_part_of_a_store_is_chosen_by_kind_model_or_name(store, source, here):
    main(["push", store.url, "--artifacts-dir", str(source)])
    with pytest.raises(UserError, match=r"(?s)--only weight matches nothing.*graphs/vae.*weights/dit"):
        pull(store, here, ["vae", "weight"])
    for only in ("graphs", "vae", "graphs/vae*", "*8x8x4*"):
        assert not here.exists()
        main(["pull", store.url, "--artifacts-dir", str(here), "--only", only])
        assert [path.name for path in here.glob("*/*")] == [folder(source, GRAPHS).name]
        shutil.rmtree(here)


def test_the_code_of_the_kernels_is_part_of_an_nxd_graphs_identity():
    others = (name for name in artifacts._TRACING["nxd"] if name != "backends/nki")
    assert artifacts.code_digest("nxd") != artifacts._digest_of_code(("models", *others))
