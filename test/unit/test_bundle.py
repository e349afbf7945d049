"""python -m ltx_neuron.doctor --bundle: what a bug report has after a failed run, and what it never
has: weights, prompts, secrets, and the names of people and machines."""

import json
import os
import shlex
import tarfile
import textwrap
from pathlib import Path

import pytest

from ltx_neuron.doctor import __main__ as command
from ltx_neuron.doctor import bundle, redact
from ltx_neuron.doctor.redact import Redactor
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError
from ltx_neuron.progress import logging_failure
from ltx_neuron.report import table
from ltx_neuron.report.recorder import Recorder

PROMPT = 'zebra\'s "violet" slow-motion waltz, 3 acts\nin Köln'
SECRET = "s3cr3t-value-of-mine"


@pytest.fixture
def ran(tmp_path, monkeypatch) -> Path:
    """The folder of a run that failed: what test/device, the scripts and both compilers leave."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "4")
    monkeypatch.setenv("TORCH_NEURONX_DEBUG_DIR", str(tmp_path / "debug"))
    work = tmp_path / "work"
    files = {
        "report.md": "# On the device\n",
        "report.json": "{}",
        "logs/full-compile-dit.log": f"[rank 0] NCC_EBVF030 in {Path.home()}/clips, {SECRET}\n",
        "full-in-turn-1/perf.json": json.dumps({"job": {"prompt": PROMPT}}),
        "artifacts/graphs/dit-x/neuronx-cc/step/1/log-neuron-cc.txt": "instruction limit\n",
        "artifacts/graphs/dit-x/neuronx-cc/step/1/command.txt": "neuronx-cc compile --lnc=2\n",
        "artifacts/graphs/dit-x/neuronx-cc/step/1/graph.neff": "GRAPHBYTES",
        "artifacts/weights/dit-y/rank0.safetensors": "WEIGHTBYTES",
        "artifacts/prompts/a.safetensors": "CONTEXTBYTES",
        "full-in-turn-1/video.resume.safetensors": "LATENTBYTES",
        "full-in-turn-1/video.mp4": "VIDEOBYTES",
        "jobs.jsonl": json.dumps({"prompt": PROMPT}),
        "../debug/fx_graphs/proc_0/dit.fx.txt": "def forward(x)\n",
        "../debug/neff/proc_0/dit.neff": "NEFFBYTES",
    }
    for name, text in files.items():
        path = (work / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("sys.argv", ["generate_ltx23.py", "--prompt", PROMPT, "--seed", "1"])
    log = work / "full-in-turn-1/video.failure.log"
    with pytest.raises(RuntimeError), logging_failure(log):
        raise RuntimeError(f"no tokens for {PROMPT!r}")
    return work


def packed(
    path: Path, work: Path, added: tuple[Path, ...] = (), prompts: bool = False
) -> tuple[dict[str, str], bundle.Packed]:
    """A bundle's members by name, and what was said of it."""
    artifacts = (work / "artifacts",)
    texts = bundle.facts(System(), bundle.REPOSITORY, artifacts)
    files = bundle.found(work, artifacts, added)
    said = bundle.pack(path, texts, files, Redactor(os.environ, prompts))
    return members(path), said


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        assert all((each.uname, each.uid) == ("", 0) for each in archive)
        return {
            each.name.removeprefix(f"{bundle.FOLDER}/"): archive.extractfile(each).read().decode()
            for each in archive
        }


def test_a_bundle_has_what_a_failed_run_left_and_says_so(ran, tmp_path):
    content, said = packed(tmp_path / "b.tar.gz", ran)
    compiler = "compiler/artifacts/graphs/dit-x/neuronx-cc/step/1"
    wanted = {
        *("run/report.md", "run/report.json", "run/logs/full-compile-dit.log"),
        *("run/full-in-turn-1/perf.json", "run/full-in-turn-1/video.failure.log"),
        *(f"{compiler}/log-neuron-cc.txt", f"{compiler}/command.txt"),
        *("torchneuron/debug/fx_graphs/proc_0/dit.fx.txt", "versions.txt", "packages.txt"),
        *("environment.txt", "machine.txt", "artifacts.txt", bundle.CONTENTS),
    }
    assert wanted <= set(content)
    assert said.sizes.keys() == content.keys() - {bundle.CONTENTS}
    assert content[bundle.CONTENTS].splitlines() == said.lines()
    assert "NCC_EBVF030" in content["run/logs/full-compile-dit.log"]
    assert "commit: " in content["versions.txt"] and "kernel: " in content["versions.txt"]
    assert "torch==" in content["packages.txt"]
    assert "NEURON_RT_NUM_CORES=4" in content["environment.txt"]
    assert "graphs/dit-x: NOT finished" in content["artifacts.txt"]


def test_no_weights_prompts_secrets_or_names_are_in_a_bundle(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(redact, "_user", lambda: "jdoe")
    monkeypatch.setattr(redact.platform, "node", lambda: "ip-10-1-2-3")
    monkeypatch.setenv("NEURON_SOME_TOKEN", "another-one")
    job = {"two_stage": False, "prompt": PROMPT, "seed": 10, "negative_prompt": PROMPT}
    job = {"height": 64, "width": 64, "num_frames": 9, **job, "recipe": "dev"}
    report = table.table(Recorder().report(job, "cpu", 4, {}, {}))
    assert "violet" in report
    (ran / "logs/generate.log").write_text(report)
    (ran / "logs/more.log").write_text(
        f"Köln, {shlex.quote(PROMPT)}\n/home/erika/x on ip-10-1-2-3 by jdoe\n"
        "hf_abcdefghijklmnopqrstuv https://me:pass@index\nAWS_SECRET_ACCESS_KEY=abcdefgh\n"
    )
    content, said = packed(tmp_path / "b.tar.gz", ran)
    everything = "\n".join([*content, *content.values()])
    planted = ["GRAPHBYTES", "WEIGHTBYTES", "CONTEXTBYTES", "LATENTBYTES", "VIDEOBYTES", "NEFFB"]
    planted += ["zebra", "violet", "waltz", SECRET, "another-one", "HF_TOKEN", "hf_abc", "me:pass"]
    planted += ["abcdefgh", "erika", "jdoe", "ip-10-1-2-3", str(Path.home()) + "/"]
    assert [word for word in planted if word in everything] == []
    assert "--seed 1" in content["run/full-in-turn-1/video.failure.log"]
    assert said.taken_out["prompts"] >= 4 and said.taken_out["secrets"] >= 4


def test_prompts_are_in_a_bundle_where_they_are_asked_for(ran, tmp_path):
    content, _ = packed(tmp_path / "b.tar.gz", ran, prompts=True)
    assert json.loads(content["run/full-in-turn-1/perf.json"])["job"]["prompt"] == PROMPT
    assert SECRET not in "".join(content.values())


# How a prompt stands in a text
@pytest.mark.parametrize(
    "shown",
    [
        f"--prompt {shlex.quote(PROMPT)} --seed 1",
        f"{shlex.quote('--prompt=' + PROMPT)} --seed 1",
        f"--negative-prompt={json.dumps(PROMPT)} --seed 1",
        "4711 python generate_ltx23.py --prompt a violet zebra in a list --seed 1",
        json.dumps({"negative_prompt": PROMPT, "--seed": "--seed 1"}),
        f"video = pipe(prompt={PROMPT!r}) --seed 1",
        f"{{'prompt': {PROMPT!r}}} --seed 1",
        f"two_stage False, prompt {textwrap.fill(PROMPT, 9)}, seed 10, upscale None --seed 1",
        f"two_stage False, seed 10, negative_prompt {PROMPT}, recipe dev --seed 1",
        f"--prompt {shlex.quote(PROMPT)} --seed 1: {textwrap.fill(PROMPT, 9)}",
        f"--prompt {shlex.quote(PROMPT)} --seed 1: cannot encode {PROMPT}, {json.dumps(PROMPT)}",
    ],
)
def test_a_prompt_is_found_however_it_is_written(shown):
    redactor = Redactor({})
    redactor.learn(shown)
    text = redactor(shown)
    assert not any(word in text for word in ("zebra", "violet", "waltz", "acts", "motion", "Köln"))
    assert "<prompt>" in text and "--seed 1" in text


def test_what_cannot_be_read_stops_nothing_and_is_listed(ran, tmp_path, monkeypatch):
    logs, access = ran / "logs", os.access
    (logs / "theirs.log").write_text("PRIVATE")
    # Root, which tests may be, is refused nothing.
    monkeypatch.setattr(os, "access", lambda at, *_: "theirs" not in str(at) and access(at, *_))
    os.mkfifo(logs / "pipe.log")
    (logs / "broken.log").write_bytes(b"before \xff\xfe after")
    (logs / "binary.log").write_bytes(b"\x80\1\0\0\0\0\0\0{WEIGHTS")
    (logs / "link.log").symlink_to(ran / "artifacts/weights/dit-y/rank0.safetensors")
    (logs / "folder.log").mkdir()
    (logs / "late.log").symlink_to(ran / "gone")
    content, said = packed(tmp_path / "b.tar.gz", ran, added=(ran / "artifacts/weights",))
    assert "before" in content["run/logs/broken.log"] and "after" in content["run/logs/broken.log"]
    reasons = {Path(path).name: why for path, why in said.left_out.items()}
    assert "you may not read" in reasons["theirs.log"]
    assert "named pipe" in reasons["pipe.log"] and reasons["binary.log"] == "not a text"
    assert reasons["link.log"] == reasons["late.log"] == "a link" and "folder.log" in reasons
    assert "WEIGHT" not in "".join(content.values())
    assert "pipe.log" in content[bundle.CONTENTS]


def test_of_a_long_log_its_begin_and_its_end_are_packed(ran, tmp_path):
    middle = b"middle\n" * 1_000_000
    (ran / "logs/long.log").write_bytes(b"first line\n" + middle + b"last line\n")
    content, _ = packed(tmp_path / "b.tar.gz", ran)
    text = content["run/logs/long.log"]
    assert text.startswith("first line\n") and text.endswith("last line\n")
    assert len(text) < bundle.HEAD_BYTES + bundle.TAIL_BYTES + 100 and "cut out here" in text
    assert set(text.splitlines()[1:5]) == {"middle"}


def test_a_bundle_has_a_limit_and_keeps_what_tells_most(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "TOTAL_BYTES", 200)
    (ran / "logs/zz.log").write_text("x" * 150)
    content, said = packed(tmp_path / "b.tar.gz", ran)
    assert "run/report.md" in content and "run/logs/zz.log" not in content
    assert any(path.endswith("zz.log") for path in said.left_out)


def test_a_folder_of_a_run_by_hand_and_a_log_where_one_stands_are_packed(ran, tmp_path):
    by_hand = tmp_path / "outputs"
    by_hand.mkdir()
    versions = {"profile": "cpu", "versions": {}, "identity": {}, "prompt": PROMPT}
    (by_hand / "out.json").write_text(json.dumps(versions))
    (by_hand / "mine.json").write_text('{"diary": "PRIVATE"}')
    (by_hand / "run.log").write_text("a line")
    for name in (by_hand / "out.failure.log", tmp_path / "clip.failure.log"):
        with pytest.raises(RuntimeError), logging_failure(name):
            raise RuntimeError("a rank died")
    (tmp_path / "theirs.failure.log").write_text("PRIVATE")
    content, _ = packed(tmp_path / "b.tar.gz", ran, added=(by_hand,))
    names = {"added/outputs/out.json", "added/outputs/run.log", "added/outputs/out.failure.log"}
    assert names | {"here/clip.failure.log"} <= set(content)
    assert "PRIVATE" not in "".join(content.values())


def test_a_bundle_is_whole_or_not_there(ran, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(OSError):
        packed(tmp_path / "b.tar.gz", ran)
    assert not [path for path in tmp_path.iterdir() if "b.tar.gz" in path.name]


def test_a_bundle_replaces_no_file(ran, tmp_path):
    kept = tmp_path / "kept.tar.gz"
    kept.write_text("mine")
    for path, said in ((kept, "already exists"), (ran / "report.md", "ends with")):
        with pytest.raises(UserError, match=said):
            bundle.check_target(path)
    with pytest.raises(UserError, match="cannot be written"):
        bundle.check_target(kept / "b.tar.gz")
    assert kept.read_text() == "mine"


def test_the_command_packs_where_nothing_ever_ran(tmp_path, monkeypatch, capsys):
    """Also on a machine whose profile cannot be found, where a run would end at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle, "doctor", lambda flags: f"asked with {[*map(str, flags)]}")
    words = ["--bundle", "b.tgz", "--profile", "no-such", "--profile-set", "lnc=2"]
    command.main(words)
    said = capsys.readouterr().out
    assert "bundle: b.tgz" in said and "versions.txt" in said
    assert "no run of test/device is in outputs/on-device" in said
    wanted = ["--profile", "no-such", "--artifacts-dir", "artifacts", "--profile-set", "lnc=2"]
    assert members(tmp_path / "b.tgz")["doctor.txt"] == f"asked with {wanted}"
    assert not (tmp_path / "outputs").exists()
    with pytest.raises(UserError, match="already"):
        command.main([*words, "--bundle-add", "nowhere"])
    with pytest.raises(UserError, match="--bundle-add no: no such"):
        command.main(["--bundle", "c.tgz", "--bundle-add", "no"])


def test_the_doctor_s_findings_are_taken_also_where_one_blocks(tmp_path):
    said = bundle.doctor(["--profile", "cpu", "--gemma-root", tmp_path / "no-such"])
    assert "blocks" in said and said.endswith("exit code 1\n")
