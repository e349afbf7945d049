"""Artifacts are pushed to a store and pulled from it whole, each file once, and refused where a byte is another one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
from helpers import exit_code, forked, save_weights
from tqdm import tqdm

from ltx_neuron import artifacts, errors
from ltx_neuron.artifacts import find, folder, tuned_settings
from ltx_neuron.artifacts.__main__ import main, table
from ltx_neuron.artifacts.store import Store, names_in, without_user
from ltx_neuron.artifacts.transfer import pull, push
from ltx_neuron.backends.manifest import sha256
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_json
from ltx_neuron.invocation import command
from ltx_neuron.weights.rankfiles import verify

FLOATS = 50_000  # of a rank's file: 0.2 MB
WEIGHTS = {"kind": "weights", "model": "dit", "source": "0123456789ab", "tp": 2, "dtype": "float32"}
WEIGHTS |= {"layout": 3, "loras": []}
GRAPHS = {"kind": "graphs", "model": "vae", "bucket": "8x8x4", "config": "abc", "tp": 2, "dtype": "float32"}
GRAPHS |= {"backend": "nxd", "code": "def", "torch": "2.9.0", "compiler_flags": "--lnc=2"}
GRAPHS |= {"neuron": {"neuronx-cc": "2.26.6360.0", "libneuronxla": None}}


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
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "anyone")
        yield fsspec.filesystem("s3")
    server.kill()
    server.wait()


def url_of(kind: str, request, tmp_path: Path) -> str:
    if kind == "folder":
        return str(tmp_path / "store")
    if kind == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://ltx"
    bucket = f"bucket-{random.randrange(10**9)}"
    request.getfixturevalue("s3").mkdir(bucket)
    return f"s3://{bucket}/some/where"


@pytest.fixture
def url(request, tmp_path):
    return url_of(getattr(request, "param", "folder"), request, tmp_path)


FOLDER_AND_MEMORY = pytest.mark.parametrize("url", ["folder", "memory"], indirect=True)


def make_weights(artifacts: Path) -> None:
    generator, path = torch.Generator().manual_seed(0), folder(artifacts, WEIGHTS)
    save_weights(path, *({"w": torch.randn(FLOATS, generator=generator)} for _ in range(2)))
    write_json(path / MANIFEST, read_json(path / MANIFEST) | {"identity": WEIGHTS})


def make_graphs(artifacts: Path, seed: int = 0) -> None:
    path, graphs = folder(artifacts, GRAPHS), {}
    path.mkdir(parents=True)
    for name in ("head", "blocks"):
        file = path / f"{name}.pt"
        file.write_bytes(random.Random(f"{seed}{name}").randbytes(40_000))
        graphs[name] = {"file": file.name, "sha256": sha256(file)}
    write_json(path / MANIFEST, {"identity": GRAPHS, "graphs": graphs})


@pytest.fixture
def source(tmp_path):
    """Artifacts of one machine: weights, graphs, and what is the machine's own."""
    artifacts = tmp_path / "source"
    make_weights(artifacts)
    make_graphs(artifacts)
    for own in ("calibration", "prompts", "compiled/inductor"):
        (artifacts / own).mkdir(parents=True)
        (artifacts / own / "own.json").write_text("{}")
    return artifacts


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def sets_of(artifacts: Path) -> dict[str, bytes]:
    kinds = "weights", "graphs", "tuned"
    return {name: data for name, data in content(artifacts).items() if name.startswith(kinds)}


@pytest.fixture
def copied(monkeypatch):
    """copied.put, copied.get: the names of the files that travel from now on."""
    names, put, get = SimpleNamespace(put=[], get=[]), Store.put, Store.get

    def noting_put(self, path, name, bar):
        names.put.append(name)
        return put(self, path, name, bar)

    def noting_get(self, name, path, bar):
        names.get.append(name)
        return get(self, name, path, bar)

    monkeypatch.setattr(Store, "put", noting_put)
    monkeypatch.setattr(Store, "get", noting_get)
    return names


def killed_in_the_second_file(url: str, names: list[str], method: str, work) -> bool:
    """Whether a process was killed while it copied half of the second file, by a method of fsspec."""

    def run():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its progress bar
        tqdm.set_lock(threading.RLock())  # a killed process would leave the bars' own locked
        fs = Store(url).fs  # one for all stores of a kind
        copy = getattr(fs, method)

        def half(source, target, **more):
            if len(names) < 2:
                return copy(source, target, **more)
            if not url.startswith("s3"):  # which shows nothing of a half
                Path(target).write_bytes(b"half")
            return os.kill(os.getpid(), signal.SIGKILL)

        setattr(fs, method, half)
        work()

    return exit_code(forked(run)) == -signal.SIGKILL


def change(url: str, name: str, change) -> None:
    store = Store(url)
    place = f"{store.root}/{name}"
    store.fs.pipe_file(place, change(store.fs.cat_file(place)))


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("url", ["folder", "memory", "s3"], indirect=True)
def test_what_is_pulled_is_what_was_pushed_and_nothing_of_the_machine(url, source, tmp_path, copied, capsys):
    here = tmp_path / "here"
    push(Store(url), source, [])
    weights, graphs = sorted(pull(Store(url), here, []), reverse=True)
    assert content(here) == sets_of(source) and verify(weights) == []
    assert (find(here, WEIGHTS, ""), find(here, GRAPHS, "")) == (weights, graphs)
    copied.put.clear()
    copied.get.clear()
    push(Store(url), source, [])
    pull(Store(url), here, [])
    assert copied.put == copied.get == []
    assert capsys.readouterr().out.count("already present: ") == 4
    main(["list", url])
    first, of_graphs, second, of_weights = capsys.readouterr().out.splitlines()
    assert [first, second] == [f"graphs/{graphs.name}", f"weights/{weights.name}"]
    assert "graphs of the video decoder 8x8x4, TP 2, float32; 80.6 kB in 3 files, 20" in of_graphs
    assert 'backend "nxd"; code "def"; torch "2.9.0"; compiler_flags "--lnc=2"' in of_graphs
    assert 'neuron {"neuronx-cc": "2.26.6360.0", "libneuronxla": null}' in of_graphs
    assert "weights of the transformer, TP 2, float32; 401.1 kB in 4 files" in of_weights
    assert 'source "0123456789ab"; loras []' in of_weights


@pytest.mark.parametrize("identity", [WEIGHTS, GRAPHS])
def test_what_is_damaged_unfinished_or_of_another_name_here_is_not_sent(source, tmp_path, identity):
    place, store = folder(source, identity), Store(tmp_path / "store")
    path = next(path for path in sorted(place.iterdir()) if path.suffix != ".json")
    path.write_bytes(flipped(path.read_bytes()))
    with pytest.raises(UserError, match=rf"{path.name} is damaged: .*\nMake it again: rm -r"):
        push(store, source, [identity["kind"]])
    renamed = place.rename(place.with_name("dit-tp2-float32-01234567"))
    with pytest.raises(UserError, match="is not a valid manifest"):
        push(store, source, [identity["kind"]])
    assert names_in(store.files()) == []
    (renamed / MANIFEST).unlink()
    (other,) = (of for of in (WEIGHTS, GRAPHS) if of != identity)
    assert push(store, source, []) == [f"{other['kind']}/{folder(source, other).name}"]


def test_only_what_is_missing_or_damaged_here_is_taken(url, source, tmp_path, copied):
    push(Store(url), source, [])
    pull(Store(url), tmp_path / "here", [])
    here, graphs = folder(tmp_path / "here", WEIGHTS), folder(tmp_path / "here", GRAPHS)
    with open(here / "rank0.safetensors", "ab") as file:
        file.write(b"more")
    (graphs / "head.pt").unlink()
    copied.get.clear()
    pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") == sets_of(source)
    assert {name.rpartition("/")[2] for name in copied.get} == {"rank0.safetensors", "head.pt"}
    path = here / "rank1.safetensors"
    path.write_bytes(flipped(path.read_bytes()))
    pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") != sets_of(source)  # sizes are compared, as a run does
    pull(Store(url), tmp_path / "here", [], check=True)
    assert content(tmp_path / "here") == sets_of(source)


def test_graphs_that_another_machine_compiled_to_other_bytes_are_as_good(url, source, tmp_path):
    push(Store(url), source, [])
    make_graphs(tmp_path / "other", seed=1)
    assert push(Store(url), tmp_path / "other", []) == []
    before = content(tmp_path / "other")
    pull(Store(url), tmp_path / "other", ["graphs"])
    assert content(tmp_path / "other") == before


def test_many_pushes_and_pulls_at_once_end_whole(source, tmp_path):
    store, here = str(tmp_path / "store"), tmp_path / "here"
    for work in (lambda: push(Store(store), source, [], force=True), lambda: pull(Store(store), here, [])):
        children = [forked(work) for _ in range(3)]
        assert [exit_code(child) for child in children] == [0, 0, 0]
    assert content(here) == sets_of(source)
    assert not [name for name in content(tmp_path / "store") if "partial" in name]


@FOLDER_AND_MEMORY
def test_a_killed_pull_goes_on_with_the_file(url, source, tmp_path, copied):
    push(Store(url), source, [])
    here, weights = tmp_path / "here", folder(tmp_path / "here", WEIGHTS)
    assert killed_in_the_second_file(url, copied.get, "get_file", lambda: pull(Store(url), here, ["weights"]))
    with pytest.raises(UserError, match="are not finished"):
        find(here, WEIGHTS, "make them")
    names = [path.name for path in weights.iterdir() if not path.name.startswith(".")]
    assert names == ["rank0.safetensors"]  # nothing half has a final name
    left = f".{MANIFEST}.1-01234567.partial", ".rank1.safetensors.1-01234567.partial"
    for name in (*left, "notes of a person"):
        (weights / name).write_text("left")
    pull(Store(url), here, ["weights"])
    assert [name.rpartition("/")[2] for name in copied.get] == ["rank1.safetensors", "host.safetensors"]
    (weights / "notes of a person").unlink()  # but what interrupted runs left is gone
    assert content(weights) == content(folder(source, WEIGHTS))


@pytest.mark.parametrize("url", ["folder", "s3"], indirect=True)  # other processes reach them
def test_a_killed_push_is_nothing_to_pull_and_goes_on_with_the_file(url, source, tmp_path, copied):
    assert killed_in_the_second_file(url, copied.put, "put_file", lambda: push(Store(url), source, ["weights"]))
    assert names_in(Store(url).files()) == []
    with pytest.raises(UserError, match="has no artifacts"):
        pull(Store(url), tmp_path / "here", [])
    push(Store(url), source, ["weights"])
    sent = [name.rpartition("/")[2] for name in copied.put]
    assert sent == ["rank1.safetensors", "host.safetensors", MANIFEST]
    (weights,) = pull(Store(url), tmp_path / "here", [])
    assert content(weights) == content(folder(source, WEIGHTS))


@FOLDER_AND_MEMORY
@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-1]])
def test_a_damaged_file_is_refused_and_the_push_in_the_message_mends_it(url, source, tmp_path, damage):
    push(Store(url), source, [])
    files = [name for name in Store(url).files() if not name.endswith(MANIFEST)]
    for number, file in enumerate(random.Random(0).sample(files, 3)):
        name, here = file.rpartition("/")[0], tmp_path / f"here{number}"
        change(url, file, damage)
        with pytest.raises(UserError, match=f"{file} is damaged: it") as refused:
            pull(Store(url), here, [])
        assert not (here / name / MANIFEST).exists()
        for path in (here / name).glob("*"):  # what has its name is right
            assert path.read_bytes() == (source / name / path.name).read_bytes()
        words = str(refused.value).rpartition(f"type: {command('artifacts')} ")[2].split()
        main([*words, "--artifacts-dir", str(source)])
        pull(Store(url), here, [])
        assert content(here) == sets_of(source)


def test_a_damaged_manifest_or_a_lost_file_is_refused_and_a_push_mends_it(url, source, tmp_path, copied):
    (name,) = push(Store(url), source, ["weights"])
    for damaged in (b"", b"[]", b"\xff", b"{}", b'{"identity": []}', b"[" * 9999):
        change(url, f"{name}/{MANIFEST}", lambda _, damaged=damaged: damaged)
        with pytest.raises(UserError, match=r"manifest\.json is damaged: "):
            pull(Store(url), tmp_path / "here", [])
        assert "is damaged" in table(Store(url), [])
    assert not (tmp_path / "here").exists()
    assert push(Store(url), source, ["weights"]) == [name]
    pull(Store(url), tmp_path / "here", [])
    one, two = (f"{name}/rank{rank}.safetensors" for rank in (0, 1))
    change(url, one, lambda data: data[:-1])
    Store(url).fs.rm_file(f"{Store(url).root}/{two}")
    with pytest.raises(UserError, match="rank0.safetensors is damaged: it is missing or"):
        pull(Store(url), tmp_path / "there", [])
    copied.put.clear()
    push(Store(url), source, ["weights"])
    assert copied.put[:2] == [one, two] and len(copied.put) == 3  # and the manifest


ENTRY = {"bytes": 4, "blake3": "0" * 64, "header_blake3": "0" * 64}
GRAPH = {"file": "../out.pt", "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("weights", {"files": {"../../../out": ENTRY}}),
        ("weights", {"files": {"/etc/passwd": ENTRY, "rank0.safetensors": ENTRY, "host.safetensors": ENTRY}}),
        ("weights", {"identity": WEIGHTS | {"model": "../../out"}}),
        ("weights", {"identity": WEIGHTS | {"kind": "/tmp"}}),
        ("weights", {"identity": WEIGHTS | {"tp": 3}}),
        *(("graphs", {"graphs": {name: GRAPH | {"file": f"{name}.pt"}}}) for name in ("../out", "a/b", "..", "/etc/x")),
    ],
)
def test_a_manifest_that_leads_out_of_its_folder_is_refused(source, tmp_path, kind, changed):
    store = Store(tmp_path / "store")
    (name,) = push(store, source, [kind])
    path = tmp_path / "store" / name / MANIFEST
    write_json(path, read_json(path) | changed)
    before = content(tmp_path)
    with pytest.raises(UserError, match="manifest.json is damaged: "):
        pull(store, tmp_path / "here", [])
    assert content(tmp_path) == before and not (tmp_path / "here").exists()


@pytest.mark.parametrize("what", ["rank0.safetensors", MANIFEST])
def test_neither_links_nor_names_that_lead_out_of_a_stores_folder_are_followed(source, tmp_path, what):
    store = Store(tmp_path / "store")
    (name,) = push(store, source, ["weights"])
    path = tmp_path / "store" / name / what
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    message = "it is missing or has another size" if what != MANIFEST else "has no artifacts"
    with pytest.raises(UserError, match=message):
        pull(store, tmp_path / "here", [])
    names = "weights/../../out", "graphs/.hidden", "prompts/x", "weights/a/b", "/tmp/x"
    files = [f"{name}/{MANIFEST}" for name in names] + ["tuned/../x.json", "tuned/.x.json"]
    assert names_in(dict.fromkeys(files, 1)) == []


def test_a_disk_without_room_is_refused_before_the_first_byte(url, source, tmp_path, monkeypatch):
    push(Store(url), source, ["weights"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(UserError, match=r"dit.* needs 40\d\.\d kB more in .*100\.0 kB free"):
        pull(Store(url), tmp_path / "here", [])
    assert content(tmp_path / "here") == {}


def exit_of(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        errors.run(lambda: main([*words]))
    return end.value.code


def test_a_pull_to_a_disk_that_fills_up_goes_on(source, tmp_path, small_disk, capsys, monkeypatch):
    """Its free space is not what it says."""
    push(Store(tmp_path / "store"), source, ["weights"])
    (small_disk / "other").write_bytes(bytes(700_000))
    words = "pull", str(tmp_path / "store"), "--artifacts-dir", str(small_disk)
    monkeypatch.setattr("ltx_neuron.artifacts.transfer.check_space", lambda *_: None)
    assert exit_of(*words) == 2
    assert "the disk is full: " in capsys.readouterr().err
    names = {name.rpartition("/")[2] for name in content(small_disk)}
    assert MANIFEST not in names and "rank0.safetensors" in names
    (small_disk / "other").unlink()
    main([*words])
    assert verify(folder(small_disk, WEIGHTS)) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("push nosuch://place", 2, "Protocol not known: nosuch"),
        ("push gs://bucket/ltx", 2, "nstall gcsfs"),
        ("push s3://no-such-bucket/ltx", 2, "bucket does not exist"),
        ("push ftp://me:secret@127.0.0.1:1/ltx", 1, "ftp://127.0.0.1:1/ltx: ConnectionRefusedError"),
        ("push /dev/null/store", 2, "a part of this path is a file, wanted a folder"),
        ("push data://x", 2, "NotImplementedError"),
        ("pull EMPTY", 2, "has no artifacts\nWanted: weights/, graphs/"),
        ("push EMPTY --artifacts-dir EMPTY", 2, "no finished weights or graphs in"),
        ("list EMPTY --verify", 2, "--verify needs pull, got list"),
        ("pull EMPTY --artifacts-dir /dev/null/x", 2, "is not a folder you may write to"),
        ("push ", 2, "the URL of the store is empty"),
    ],
)
def test_a_place_or_a_choice_that_cannot_be_is_refused_without_a_traceback(
    s3, source, tmp_path, capsys, words, code, message
):
    arguments = words.replace("EMPTY", str(tmp_path / "empty")).split(" ")
    if "--artifacts-dir" not in arguments:
        arguments += ["--artifacts-dir", str(source)]
    assert exit_of(*arguments) == code
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert "secret" not in printed.out + printed.err and not (tmp_path / "empty").exists()


def test_a_store_that_may_not_be_entered_names_whose_credentials_count(s3, capsys, monkeypatch):
    from botocore.exceptions import NoCredentialsError

    def nobody(*_, **__):
        raise NoCredentialsError

    s3.mkdir("closed")
    monkeypatch.setattr(type(s3), "find", nobody)  # the stand-in lets everybody in
    assert exit_of("list", "s3://closed/ltx") == 2
    message = capsys.readouterr().err
    assert "Unable to locate credentials" in message and "aws configure" in message


DEVICE = {"profile": "trn2.3xlarge", "chips": 1, "lnc": 2}
TUNED = {"device": DEVICE, "versions": {}, "code": "c", "config": "d", "tp": 4, "dtype": "bfloat16"}


def tuned(artifacts: Path, threads: int = 4) -> tuned_settings.TunedSettings:
    choice = tuned_settings.TunedSettings(tuned_settings.file_of(artifacts, TUNED), TUNED, {"threads": str(threads)})
    choice.write()
    return choice


def test_tuned_settings_travel_and_never_replace_ones_own(url, source, tmp_path, capsys):
    choice = tuned(source)
    push(Store(url), source, [])
    pull(Store(url), tmp_path / "here", [])
    assert tuned_settings.load(tmp_path / "here", TUNED).run == choice.run
    assert push(Store(url), source, []) == []
    assert "tuned settings; 20" in table(Store(url), ["tuned"])
    own = tuned(tmp_path / "here", threads=8)
    pull(Store(url), tmp_path / "here", ["tuned"])
    assert f"kept: {own.path} (the store's file differs)" in capsys.readouterr().out
    assert tuned_settings.load(tmp_path / "here", TUNED).run == {"threads": "8"}
    assert push(Store(url), tuned(source, threads=2).path.parents[1], ["tuned"])


def test_tuned_settings_of_another_name_or_that_are_damaged_are_refused(source, tmp_path):
    store = Store(tmp_path / "store")
    (name,) = push(store, tuned(source).path.parents[1], ["tuned"])
    path = tmp_path / "store" / f"{name}.json"
    path = path.rename(path.with_name("trn2-tp4-bfloat16-12345678.json"))
    with pytest.raises(UserError, match="12345678.json is damaged: its identity does not match its name"):
        pull(store, tmp_path / "here", [])
    path.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        pull(store, tmp_path / "here", [])
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("only", ["graphs", "vae", "graphs/vae*", "*8x8x4*"])
def test_a_part_of_a_store_is_chosen_by_kind_model_or_name(source, tmp_path, only):
    url, name = str(tmp_path / "store"), folder(source, GRAPHS).name
    main(["push", url, "--artifacts-dir", str(source)])
    with pytest.raises(UserError, match=r"(?s)--only weight matches nothing.*graphs/vae.*weights/dit"):
        pull(Store(url), tmp_path / "here", [only, "weight"])
    assert not (tmp_path / "here").exists()
    main(["pull", url, "--artifacts-dir", str(tmp_path / "here"), "--only", only])
    assert [path.name for path in (tmp_path / "here").glob("*/*")] == [name]


def test_no_user_and_no_password_of_a_url_is_kept():
    text = without_user("see sftp://me:se:cr@et@host/x and https://host/a@b or s3://b/k")
    assert "et@" not in text and "host/x" in text and "https://host/a@b or s3://b/k" in text


def test_the_code_of_the_kernels_is_part_of_an_nxd_graphs_identity():
    others = (name for name in artifacts._TRACING["nxd"] if name != "backends/nki")
    assert artifacts.code_digest("nxd") != artifacts._digest_of_code(("models", *others))
