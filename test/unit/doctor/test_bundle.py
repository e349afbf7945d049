"""ltx-neuron doctor --bundle: what a bug report has after a failed run, and what it never has."""

import json
import os
import shlex
import tarfile
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from ltx_neuron.doctor import __main__ as command
from ltx_neuron.doctor import bundle, public
from ltx_neuron.doctor.system import System
from ltx_neuron.engine.outputs import logging_failure
from ltx_neuron.errors import UserError
from ltx_neuron.report import latency
from ltx_neuron.report.latency import Recorder

PROMPT = 'zebra\'s "violet" slow-motion waltz, 3 acts\nin Köln'
SECRET = "s3cr3t-value-of-mine"
REPORT = {"profile": "cpu", "versions": {"torch": "2"}}


@pytest.fixture
def ran(tmp_path, monkeypatch) -> Path:
    """The folder of a run that failed: what test/device, the scripts and both compilers leave."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "4")
    monkeypatch.setenv("TORCH_NEURONX_DEBUG_DIR", str(tmp_path / "debug"))
    work = tmp_path / "work"
    private = {"job": {"prompt": PROMPT, "seed": 1}, "inputs": {f"--image {Path.home()}/zebra.png": "a digest"}}
    files = {
        "report.md": "# On the device\n",
        "logs/full-compile-dit.log": f"[rank 0] NCC_EBVF030 in {Path.home()}/clips\n{SECRET}",
        "full-in-turn-1/perf.json": json.dumps(REPORT | private),
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
    with pytest.raises(RuntimeError), logging_failure(work / "full-in-turn-1/video.failure.log"):
        raise RuntimeError(f"no tokens for {PROMPT!r}")
    return work


def packed(work: Path, added: tuple[Path, ...] = ()) -> tuple[dict[str, str], list[str]]:
    """A bundle's members by name, and its table of contents."""
    artifacts, path = (work / "artifacts",), work / "bundle.tar.gz"
    lines = bundle.pack(path, bundle.facts(System(), artifacts), bundle.bundled_files(work, artifacts, added))
    return members(path), lines


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        assert all((each.uname, each.uid) == ("", 0) for each in archive)
        texts = {each.name: archive.extractfile(each).read().decode() for each in archive}
    return {name.removeprefix(f"{bundle.FOLDER}/"): text for name, text in texts.items()}


def test_a_bundle_has_what_a_failed_run_left_and_says_so(ran):
    content, lines = packed(ran)
    compiler = "compiler/1/graphs/dit-x/neuronx-cc/step/1"
    failure = content["run/full-in-turn-1/video.failure.log"]
    assert {line.split()[-1] for line in lines} == content.keys() - {bundle.CONTENTS}
    assert content[bundle.CONTENTS].splitlines() == lines
    assert content.keys() >= {"run/report.md", f"{compiler}/log-neuron-cc.txt", f"{compiler}/command.txt"}
    assert content.keys() >= {"torchneuron/fx_graphs/proc_0/dit.fx.txt", "machine.txt"}
    assert content["run/logs/full-compile-dit.log"] == "[rank 0] NCC_EBVF030 in …"
    assert "error: RuntimeError\n" in failure and "load: " in failure
    assert 'ltx_neuron/engine/outputs.py", line ' in failure
    assert json.loads(content["run/full-in-turn-1/perf.json"]) == REPORT | {"job": {"seed": 1}}
    assert f"\nltx-neuron: {System().version('ltx-neuron') or 'not installed'}\n" in content["versions.txt"]
    assert "commit: " in content["versions.txt"] and "kernel: " in content["versions.txt"]
    assert "torch==" in content["packages.txt"] and "NEURON_RT_NUM_CORES=4" in content["environment.txt"]
    assert "graphs/dit-x: NOT finished" in content["artifacts.txt"]


def test_no_weights_prompts_secrets_or_names_are_in_a_bundle(ran, monkeypatch):
    monkeypatch.setattr(public.getpass, "getuser", lambda: "jdoe")
    monkeypatch.setattr(public.platform, "node", lambda: "ip-10-1-2-3")
    monkeypatch.setenv("NEURON_SOME_TOKEN", "another-one")
    monkeypatch.setenv("SHORT_PASSWORD", "sixsix")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "/home/erika/cache")
    monkeypatch.setenv("TORCH_NEURONX_DEBUG_DIR", str(ran / "logs"))  # they are a run's logs still
    job = {"height": 64, "prompt": PROMPT, "seed": 10, "negative_prompt": PROMPT, "recipe": "dev"}
    report = latency.table(Recorder().report(job, "cpu", 4, {}, {}))
    assert "violet" in report
    private = (
        "/home/erika/x on ip-10-1-2-3 by jdoe\nwith another-one\nsixsix\n" + SECRET + "\n/home/erika\n"
        "hf_abcdefghijklmnopqrstuv\nhttps://me:pass@index\nAWS_SECRET_ACCESS_KEY=abcdefgh\n"
        f"{'q' * 64}\n~/zebra/violet.png\nfile:/home/erika/x\n{Path.home()}/clips\n--prompt waltz\n"
    )
    compiler = ran / "artifacts/graphs/dit-x/neuronx-cc/step/1/log-neuron-cc.txt"
    compiler.write_text(f"{private}NCC_EBVF030: 12 MB in /home/erika/graph.hlo\n")
    (ran / "logs/generate.log").write_text(report)
    (ran / "logs/more.log").write_text(f"Köln, {shlex.quote(PROMPT)}\n{private}")
    (ran / "report.md").write_text(f"# On the device\n{private}")
    content, _ = packed(ran)
    everything = "\n".join([*content, *content.values()])
    planted = "GRAPHBYTES WEIGHTBYTES CONTEXTBYTES LATENTBYTES VIDEOBYTES NEFFB zebra violet waltz another-one sixsix"
    planted += f" {SECRET} HF_TOKEN hf_abc me:pass abcdefgh erika jdoe ip-10-1-2-3 {Path.home()}/ qqqq Köln"
    assert [word for word in planted.split() if word in everything] == []
    messages = content["compiler/1/graphs/dit-x/neuronx-cc/step/1/log-neuron-cc.txt"]
    assert "NCC_EBVF030: 12 MB in …/graph.hlo\n" in messages
    assert "NEURON_COMPILE_CACHE_URL=…\n" in content["environment.txt"]


def test_of_a_log_no_prompt_is_kept_however_it_is_written_but_frames_types_and_messages_of_ranks():
    for shown in (
        f"{shlex.quote('--prompt=' + PROMPT)} --seed 1",
        "4711 python generate_ltx23.py --prompt a violet zebra in a list --seed 1",
        json.dumps({"negative_prompt": PROMPT}),
        f"two_stage False, prompt {textwrap.fill(PROMPT, 9)}, seed 10, upscale None",
        f"error: RuntimeError: cannot encode {PROMPT}, {json.dumps(PROMPT)}",
    ):
        text = public.trace(f"{shown}\nexit code 1\n")
        assert not any(word in text for word in ("zebra", "violet", "waltz", "acts", "motion", "Köln")), shown
        assert text.endswith("exit code 1")
    frame = '  File "{}/torch/nn/x.py", line 3, in f'
    for line, kept in (
        (frame.format("/home/erika/.venv/lib/python3.11/site-packages"), frame.format("…")),
        ("error: RankError: rank 0 of 4 failed: NRT_TIMEOUT", ...),
        ("load: 1.0 2.0 3.0, 2 CPUs", ...),
        ("MemAvailable: 12345 kB", ...),
        ("torch.OutOfMemoryError: a violet zebra", "torch.OutOfMemoryError"),
    ):
        assert public.trace(f"a violet zebra\n{line}\n") == (line if kept is ... else kept)
    paths = "/dev/neuron0 /opt/aws/neuron/bin /data/erika/a.neff /srv/erika ~/x outputs/on-device"
    assert public.public(paths) == "/dev/neuron0 /opt/aws/neuron/bin …/a.neff … … outputs/on-device"


def test_what_cannot_be_read_stops_nothing_and_is_listed(ran, monkeypatch):
    logs, access = ran / "logs", os.access
    (logs / "theirs.log").write_text("PRIVATE")
    # Root, which tests may be, is refused nothing.
    monkeypatch.setattr(os, "access", lambda at, *_: "theirs" not in str(at) and access(at, *_))
    os.mkfifo(logs / "pipe.log")
    (logs / "broken.log").write_bytes(b"[rank 0] before \xff\xfe after")
    (logs / "binary.log").write_bytes(b"\x80\1\0\0\0\0\0\0{WEIGHTS")
    (logs / "link.log").symlink_to(ran / "artifacts/weights/dit-y/rank0.safetensors")
    (logs / "folder.log").mkdir()
    content, lines = packed(ran, added=(ran / "artifacts/weights",))
    assert content["run/logs/broken.log"] == "[rank 0] before \ufffd\ufffd after"
    reasons = dict(line.removeprefix("left out   …/").split(": ", 1) for line in lines if line[0] == "l")
    wanted = {"theirs.log": "you may not read", "pipe.log": "named pipe", "binary.log": "not a text"}
    wanted |= {"link.log": "a link", "folder.log": ""}
    assert all(reason in reasons[name] for name, reason in wanted.items())
    assert "WEIGHT" not in "".join(content.values()) and "pipe.log" in content[bundle.CONTENTS]


def test_of_a_long_log_begin_and_end_are_packed_and_a_full_bundle_leaves_the_rest_out(ran, monkeypatch):
    long = ran / "artifacts/graphs/dit-x/log-neuron-cc.txt"
    long.write_bytes(b"first line\n" + b"middle\n" * 1_000_000 + b"last line\n")
    text = packed(ran)[0]["compiler/1/graphs/dit-x/log-neuron-cc.txt"]
    assert text.startswith("first line\n") and text.endswith("last line\n")
    assert len(text) < bundle.HEAD_BYTES + bundle.TAIL_BYTES + 100 and "cut out here" in text
    assert set(text.splitlines()[1:5]) == {"middle"}
    monkeypatch.setattr(bundle, "TOTAL_BYTES", 200)
    (ran / "logs/zz.log").write_text("[rank 0] " + "x" * 250)
    content, lines = packed(ran)
    assert "run/report.md" in content and "run/logs/zz.log" not in content
    assert any("left out   …/zz.log: the bundle already" in line for line in lines)


def test_a_folder_of_a_run_by_hand_and_a_log_in_the_current_folder_are_packed(ran, tmp_path):
    by_hand, private = tmp_path / "outputs", "PRIVATE\nexit code 1\n"
    by_hand.mkdir()
    (by_hand / "out.json").write_text(json.dumps(REPORT | {"identity": {}, "prompt": PROMPT}))
    (by_hand / "mine.json").write_text('{"diary": "PRIVATE"}')
    for path in (by_hand / "run.log", tmp_path / "clip.failure.log", tmp_path / "theirs.txt"):
        path.write_text(private)
    content, _ = packed(ran, added=(by_hand, tmp_path / "theirs.txt"))
    names = "added-1/out.json", "added-1/run.log", "here/clip.failure.log", "added-2/theirs.txt"
    assert {*names} <= content.keys() and "added-1/mine.json" not in content
    assert json.loads(content["added-1/out.json"])["profile"] == "cpu"
    assert "PRIVATE" not in "".join(content.values())


def test_a_bundle_is_whole_or_absent_and_replaces_no_file(ran, tmp_path):
    kept = tmp_path / "kept.tar.gz"
    kept.write_text("mine")
    for path, message in ((kept, "already exists"), (ran / "x.md", "ends with"), (kept / "b.tgz", "cannot be written")):
        with pytest.raises(UserError, match=message):
            bundle.check_target(path)
    full = OSError(28, "No space left on device")
    with mock.patch.object(tarfile.TarFile, "addfile", side_effect=full), pytest.raises(OSError):
        packed(ran)
    assert not [*ran.glob("*bundle.tar.gz*")] and kept.read_text() == "mine"


def test_the_command_packs_where_nothing_ever_ran_and_the_findings_of_the_doctor(tmp_path, monkeypatch, capsys):
    """Also on a machine whose profile cannot be found, where a run would end at once."""
    monkeypatch.chdir(tmp_path)
    findings = bundle.doctor(["--profile", "cpu", "--gemma-root", "no-such"])
    assert "blocks" in findings and findings.endswith("exit code 1\n")
    monkeypatch.setattr(bundle, "doctor", lambda flags: f"asked with {[*map(str, flags)]}")
    words = ["--bundle", "b.tgz", "--profile", "no-such", "--profile-set", "lnc=2"]
    command.main(words)
    message = capsys.readouterr().out
    assert "bundle: b.tgz" in message and "versions.txt" in message
    assert "no run of test/device is in outputs/on-device" in message
    assert members(tmp_path / "b.tgz")["doctor.txt"] == f"asked with {words[2:]}"
    assert not (tmp_path / "outputs").exists()
    for flags, error in ((words, "already"), (["--bundle", "c.tgz", "--bundle-add", "no"], "--bundle-add no: no such")):
        with pytest.raises(UserError, match=error):
            command.main(flags)
