"""The doctor on machines made of folders, tables of packages and outputs of neuron-ls."""

import json
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from conftest import ROOT
from helpers import one_thread  # noqa: F401
from packaging.requirements import Requirement

from ltx_neuron import artifacts, commands, invocation, plan
from ltx_neuron.doctor import checks, groups
from ltx_neuron.doctor.__main__ import main
from ltx_neuron.doctor.finding import Finding, finding_of
from ltx_neuron.doctor.sdk import DECOYS, LAST, nxd_support, release_of
from ltx_neuron.doctor.system import System, output_of
from ltx_neuron.errors import UserError
from ltx_neuron.machine import Machine, probe
from ltx_neuron.weights.tensorfile import TensorFile

GIB = 2**30
NXD_29 = {"torch": "2.9.0", "torch-neuronx": "2.9.0.2.15.32035", "torch-xla": "2.9.0", "neuronx-cc": "2.26.6360.0+a1"}
NXD_29 |= {"neuronx-distributed": "0.19.28492", "libneuronxla": "3.0.3854.0"}
TORCH_NEURON = {"torch": "2.14.1", "torch-neuronx": "2.14.3.0", "neuronx-cc": "2.28.1.0"}
CLIP = "--height", 64, "--width", 64, "--num-frames", 9


def chip(index: int = 0, holders: tuple = (), lnc: int = 2, cores: int = 4) -> dict:
    """A chip as the documentation of `neuron-ls -j` shows it."""
    listed = {"neuron_device": index, "nc_count": cores, "logical_neuroncore_config": lnc, "memory_size": 96 * GIB}
    listed["neuroncore_ids"] = list(range(cores * index, cores * (index + 1)))
    return listed | {"neuron_processes": [{"pid": pid, "command": command} for pid, command in holders]}


class Trn2(NamedTuple):
    """A trn2.3xlarge with SDK 2.31 on which all is well, unless told otherwise."""

    driver: str | None = "2.29.0.0"
    chips: int = 1
    listed: object = (chip(),)  # what neuron-ls prints; None: it is not installed
    packages: dict = NXD_29
    environment: dict = {}
    lnc_file: str | None = None
    meminfo: str | None = "MemTotal: 130000000 kB\nMemAvailable: 120000000 kB\n"
    disk: int = 500 * GIB
    broken: tuple = ()  # modules that do not import
    programs: tuple = ("neuronx-cc",)  # beside this Python
    libraries: tuple = ("libnrt.so.1", "libnccom.so.2")  # of the system
    instance: str = "trn2.3xlarge"
    python: str = "3.12.3"
    processes: dict = {}  # pid -> (command line, files it has open)

    def build(self, root: Path, monkeypatch) -> tuple[System, Machine]:
        files = {
            "sys/devices/virtual/dmi/id/product_name": self.instance,
            "sys/module/neuron/version": self.driver,
            "opt/aws/neuron/logical_nc_config": self.lnc_file,
            "proc/meminfo": self.meminfo,
            **{f"dev/neuron{index}": "" for index in range(self.chips)},
            **{f"opt/aws/neuron/lib/{name}": "" for name in self.libraries},
            **{f"bin/{name}": "" for name in self.programs},
            **{f"proc/{pid}/cmdline": command.replace(" ", "\0") for pid, (command, _) in self.processes.items()},
        }
        for name, text in files.items():
            if text is not None:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
                (root / name).chmod(0o755)
        for pid, (_, opened) in self.processes.items():
            (root / f"proc/{pid}/fd").mkdir()
            for number, target in enumerate(opened):
                (root / f"proc/{pid}/fd/{number}").symlink_to(target)
        real, faked = metadata.version, {*NXD_29, *TORCH_NEURON, *DECOYS, "islpy", *self.packages}

        def version(package: str) -> str:
            if package in faked - self.packages.keys():
                raise metadata.PackageNotFoundError(package)
            return self.packages.get(package) or real(package)

        monkeypatch.setattr(metadata, "version", version)
        printed = self.listed if self.listed is None or isinstance(self.listed, str) else json.dumps(self.listed)
        how: dict = {"environment": self.environment, "python": self.python, "prefix": str(root)}
        how["output"] = lambda *command: printed if command[0] == "neuron-ls" else None
        how["free_bytes"] = lambda path: self.disk
        how["import_error"] = lambda name: "OSError: no symbol" if name in self.broken else None
        return System(root, **how), probe(root)


NOT_NEURON = Trn2(driver=None, chips=0, instance="", packages={"torch": "2.13.0"})


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """A function (machine, *flags) -> (exit code, findings that are not "ok" by check, texts by check)."""

    def run(machine: Trn2, *flags: object) -> tuple[int, dict[str, Finding], dict[str, str]]:
        system, probed = machine.build(tmp_path / "root", monkeypatch)
        code = 0
        try:
            main([*map(str, flags), "--json"], system, probed)
        except SystemExit as leaving:
            code = leaving.code
        printed = json.loads(capsys.readouterr().out)
        assert printed["can_run"] == (code == 0)
        findings = [Finding(**finding) for finding in printed["findings"]]
        others = {f"{finding.check}: {finding.text}": finding for finding in findings if finding.state != "ok"}
        return code, others, {finding.check: finding.text for finding in findings}

    return run


def checks_of(others: dict[str, Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in others.values()}


def test_on_a_sound_trn2_nothing_blocks_and_the_end_of_nxd_is_told(doctor):
    code, others, texts = doctor(Trn2())
    assert code == 0 and checks_of(others).keys() == {"nxd", "checkpoint", "gemma"}
    assert texts["machine"].startswith("trn2.3xlarge; 1 Neuron chips")
    assert texts["profile"] == "trn2.3xlarge: 4 ranks, backend nxd (NxD, neuronx-distributed 0.19.28492)"
    assert texts["python"].startswith("3.12.3 in ")
    assert texts["driver"] == "2.29.0.0 (SDK 2.31)" and "neuronx-cc 2.26.6360.0+a1" in texts["sdk"]
    assert texts["cores"] == "4 of 4 logical cores are on free chips, 4 wanted"
    assert texts["can run here"].startswith("cpu, trn2.3xlarge; not cuda")
    assert "SDK 2.34 ends NxD" in texts["nxd"]


BUSY = [chip(holders=((113985, "python src/generate_ltx23.py"),))]
HOLDERS = {71: ("python train.py", ("/dev/null", "/dev/neuron0")), 72: ("bash", ("/dev/null",))}
TORCHAUDIO = {"torchaudio": "2.9.0+cu128"}
# What is wrong, as a machine or as flags on one where all is well -> the state and the check that finds it | words of
# the text | words of the fix
FINDINGS = [
    (Trn2(driver=None, chips=0), "blocks: driver | no Neuron device | sudo modprobe"),
    (Trn2(driver=None), "blocks: driver | no driver is loaded | apt-get install aws-neuronx-dkms"),
    (Trn2(driver="2.26.10.0"), "note: sdk | the driver is of SDK 2.28, the compiler of 2.31 | --only-upgrade"),
    (Trn2(packages={"torch": "2.9.0"}), "blocks: runtime | found neither | or NxD: pip"),
    (Trn2(libraries=("libnrt.so.1",)), "note: libraries | has no library of aws-neuronx-c | sudo apt-get install aws"),
    (Trn2(packages={**NXD_29, "neuronx-cc": "2.21.18209.0"}), "blocks: nxd | SDK is too old | SDK 2.27 to 2.33"),
    (Trn2(packages={**NXD_29, "neuronx-cc": "2.29.1.0"}), "blocks: nxd | no longer supported | of TorchNeuron"),
    (Trn2(packages={**NXD_29, "torch": "2.13.0"}), "blocks: torch | NxD needs 2.9 | ltx-neuron[neuron]"),
    (Trn2(packages={**NXD_29, "torch": "2.8.0"}), "blocks: torch | wanted torch>=2.9,<2.16 | pip install"),
    (Trn2(packages={**TORCH_NEURON, "torch": "2.13.0"}), "blocks: torch | this TorchNeuron needs 2.14 | [torchneu"),
    (Trn2(packages={**TORCH_NEURON, "neuronx-cc": "1.0.post1"}), "blocks: sdk | 1.0.post1 is a | Neuron's own"),
    (Trn2(packages={**NXD_29, "islpy": "2026.2.1"}), "blocks: islpy | NCC_ISMP902 | pip install 'islpy<2026.2'"),
    (Trn2(programs=(), environment={"PATH": "/nowhere"}), "blocks: sdk | neither in PATH nor in | --force-reinstall"),
    (Trn2(broken=("nkilib",)), "blocks: nki | kernels of nkilib | attention=matmul"),
    (Trn2(packages=TORCH_NEURON, python="3.11.9"), "blocks: python | needs 3.12 or later | python3.12 -m venv"),
    (Trn2(listed=BUSY), "blocks: cores | on free chips, 4 wanted; in use by 113985 | kill 113985"),
    (Trn2(listed=None, processes=HOLDERS), "note: cores | in use: neuron0: 71 (python train.py) | aws-neuronx-tools"),
    (Trn2(listed=[{"device": 0}]), "note: cores | does not answer | aws-neuronx-tools"),
    (Trn2(environment={"NEURON_RT_VISIBLE_CORES": "0,2-3"}), "blocks: cores | shows 3 cores, 4 wanted | unset"),
    (Trn2(environment={"NEURON_RT_VISIBLE_CORES": "all"}), "blocks: cores | shows 0 cores | unset"),
    (Trn2(environment={"NEURON_LOGICAL_NC_CONFIG": "1"}), "blocks: lnc | 1 from NEURON_LOGICAL_NC_CONFIG; | unset NEU"),
    (Trn2(lnc_file="NEURON_LOGICAL_NC_CONFIG=1"), "blocks: lnc | 1 from /opt/aws/neuron/logical_nc_config | sudo tee"),
    (Trn2(listed=[chip(lnc=1, cores=8)]), "blocks: lnc | 1 from neuron-ls | CONFIG=2"),
    (Trn2(instance="trn1.2xlarge"), "blocks: profile | has 1 Neuron devices but no profile | --profile"),
    (Trn2(meminfo=None), "note: host memory | /proc/meminfo cannot be read |"),
    (Trn2(packages=NXD_29 | TORCHAUDIO, broken=(*TORCHAUDIO,)), "note: torchaudio | (OSError: no | pip uninstall"),
    (Trn2(broken=("av",)), "blocks: ffmpeg | does not load | --force-reinstall"),
    (Trn2(broken=("torch",)), "blocks: torch | cannot be imported: OSError | make venv"),
    ("--checkpoint-path nowhere", "blocks: checkpoint | no such file: nowhere | hf download Lightricks"),
    ("--gemma-root nowhere", "blocks: gemma | nowhere is not a folder | hf download google"),
    ("--temporal-upsampler-path nowhere", "blocks: temporal upsampler | no such file: nowhere | hf"),
]


@pytest.mark.parametrize(("wrong", "found"), FINDINGS, ids=[found for _, found in FINDINGS])
def test_what_is_wrong_is_found_and_comes_with_what_to_type(doctor, wrong, found):
    state, text, fix = (word.strip() for word in f"{found} ".split(" | "))
    state, check = state.split(": ")
    code, others, _ = doctor(Trn2(), *wrong.split()) if isinstance(wrong, str) else doctor(wrong)
    (finding,) = [f for f in others.values() if f.check == check and text in f.text]
    assert finding.state == state and fix in finding.fix
    assert code == any(f.state == "blocks" for f in others.values())


def test_a_machine_without_neuron_and_a_trainium3_say_what_they_can_run_and_plan(doctor):
    code, others, texts = doctor(NOT_NEURON)
    assert code == 0 and checks_of(others).keys() == {"checkpoint", "gemma"} and "driver" not in texts
    can = texts["can run here"]
    assert can.startswith("cpu; not cuda") and "trn2.3xlarge (1 Neuron chips wanted" in can
    assert f"trn2.48xlarge, trn3: {invocation.command('plan')} --checkpoint-path FILE" in texts["can plan here"]
    assert doctor(NOT_NEURON, "--profile", "trn2.48xlarge")[0] == 1
    code, others, texts = doctor(Trn2(packages=TORCH_NEURON, driver="2.31.0.0", instance="trn3pd98.3xlarge"))
    assert code == 0 and checks_of(others).keys() == {"checkpoint", "gemma", "profile"}
    assert texts["profile"].startswith("not tried: the compiler flags")
    can = texts["can run here"]  # a Trainium3 is known by its family
    assert can.startswith("cpu, trn3; not cuda") and "trn2.3xlarge (this is a trn3pd98" in can


def test_doctor_plan_and_generate_name_the_backend_of_the_installed_stack(doctor, tiny, tmp_path, capsys):
    flags = "--profile", "trn2.3xlarge", "--checkpoint-path", tiny.checkpoint, "--gemma-root", tiny.gemma_root, *CLIP
    written = "--artifacts-dir", tmp_path / "made", "--prompt", "a cat", "--output-path", tmp_path / "a.mp4"
    for packages, backend in (
        (NXD_29, "nxd (NxD, neuronx-distributed 0.19.28492)"),
        ({**NXD_29, **TORCH_NEURON}, "torchdist (TorchNeuron, torch-neuronx 2.14.3.0)"),
    ):
        _, _, texts = doctor(Trn2(packages=packages, driver="2.31.0.0"))
        assert texts["profile"] == f"trn2.3xlarge: 4 ranks, backend {backend}"
        commands.dispatch(["plan", *map(str, flags)])
        assert f"backend {backend}" in capsys.readouterr().out.splitlines()
        with pytest.raises(UserError, match="no dit graphs"):
            commands.dispatch(["generate", *map(str, flags + written)])
        assert f"profile trn2.3xlarge: backend {backend}" in capsys.readouterr().out.splitlines()


def test_releases_are_told_by_their_packages_and_nxd_lives_from_2_27_to_2_33():
    # What the documentation of SDK 2.33.0 lists: release-notes/components/index.html.
    assert LAST == release_of("compiler", "2.28.7631.0") == release_of("driver", "2.31.7.0") == (2, 33)
    assert release_of("compiler", "2.22.1") == release_of("driver", "2.25.1") == (2, 27)
    assert release_of("compiler", "2.29.7") == release_of("driver", "2.32.0") == (2, 34)
    assert {release_of("compiler", other) for other in ("2.21.1", "0", "", None, "unknown")} == {None}
    alive = {(2, 27): "supported", (2, 29): "supported", (2, 31): "maintenance", (2, 33): "not in the machine images"}
    for release, words in (alive | {(2, 34): "no longer", None: "too old"}).items():
        state, usable = nxd_support(release)
        assert words in state and usable is (release in alive)


def test_an_extra_takes_the_packages_of_the_sdk_and_no_decoys_of_their_names():
    """What Neuron's own index has for an extra's SDK (n2-manifest.json for 2.31; of 2.33 the list of components in the
    documentation), and what its image has."""
    new = {"nki": "0.7.0", "neuronx-cc": "2.28.7631.0"}
    old = {"torch": "2.9.1", "nki": "0.5.0"} | {name: NXD_29[name] for name in ("torch-neuronx", "neuronx-cc")}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in (
        ("neuron", old),
        ("torchneuron", new | {"torch": "2.13.0", "torch-neuronx": "2.13.3.0"}),
        ("torchneuron", new | {"torch": "2.14.1", "torch-neuronx": "2.14.0"}),
    ):
        wanted = {r.name: r.specifier for r in map(Requirement, extras[extra])}
        assert all(wanted[name].contains(version) for name, version in packages.items())
        assert not any(wanted[name].contains(DECOYS[name]) for name in DECOYS.keys() & wanted.keys())


def test_published_files_are_read_strictly_and_missing_artifacts_come_with_their_command(doctor, tiny, tmp_path):
    flags = ["--gemma-root", tiny.gemma_root, "--spatial-upsampler-path", tiny.spatial_upsampler, "--two-stage", *CLIP]
    flags += ["--profile", "cpu", "--artifacts-dir", tmp_path]
    whole = [*flags, "--checkpoint-path", tiny.checkpoint]
    code, others, texts = doctor(NOT_NEURON, *whole)
    assert code == 0 and {finding.state for finding in others.values()} == {"todo"}
    fixes = {check: finding.fix for check, finding in checks_of(others).items()}
    assert "VAE weights" not in fixes
    assert invocation.command("shard transformer") in fixes["DiT weights"]
    assert invocation.command("compile gemma3") in fixes["Gemma graphs"]
    assert "--height 64 --width 64 --num-frames 9" in fixes["DiT graphs"]
    assert all("is whole" in texts[check] for check in ("checkpoint", "gemma", "spatial upsampler"))
    for more in ((), ("--profile-set", "sound_on_ranks=true")):
        fixes = {f.check: f.fix for f in doctor(NOT_NEURON, *whole, "--neuron-vae", *more)[1].values()}
        assert invocation.command("shard vae") in fixes["VAE weights"] and " ".join(more) in fixes["VAE weights"]
        assert invocation.command("compile vae") in fixes["video decoder graphs"]
        assert "--height 64 --width 64 --num-frames 9" in fixes["video decoder graphs"]
        assert ("sound decoder graphs" in fixes) == bool(more)
    damaged = tmp_path / "damaged.safetensors"  # as a broken download leaves it
    damaged.write_bytes(tiny.checkpoint.read_bytes()[:-100])
    code, others, _ = doctor(NOT_NEURON, *flags, "--checkpoint-path", damaged)
    broken = checks_of(others)["checkpoint"]
    assert code == 1 and "truncated?" in broken.text and "Download it again" in broken.fix


def test_the_files_of_a_download_of_ltx_2_5_are_found_and_a_mixture_blocks(doctor, split, tiny, tmp_path):
    flags = "--checkpoint-path", split.folder, "--profile", "cpu", "--artifacts-dir", tmp_path
    flags += *CLIP, "--recipe", "distilled"
    code, others, texts = doctor(NOT_NEURON, *flags)
    assert code == 0 and {finding.state for finding in others.values()} == {"todo"}
    assert "LTX 2.5.0" in texts["checkpoint"] and str(split.text_encoder) in texts["gemma"]
    assert f"{split.spatial_upsampler} is whole" in texts["spatial upsampler"]
    mixtures = ("--gemma-root", tiny.gemma_root, "gemma"), ("--video-vae-path", split.audio_vae, "checkpoint")
    for flag, path, check in mixtures:
        code, others, _ = doctor(NOT_NEURON, *flags, flag, path)
        (blocks,) = [finding for finding in others.values() if finding.state == "blocks"]
        assert (code, blocks.check) == (1, check) and f"{flag} {path}" in blocks.text
        assert "Lightricks/LTX-2.5" in blocks.fix


def test_artifacts_that_are_damaged_block_and_those_that_are_missing_do_not(tmp_path):
    identity = {"kind": "graphs", "model": "dit", "tp": 4, "dtype": "float32"}

    def actual() -> Finding:
        return finding_of("DiT graphs", partial(artifacts.find, tmp_path, identity, "make"), missing="todo")

    assert actual().state == "todo"
    artifacts.folder(tmp_path, identity).mkdir(parents=True)
    (artifacts.folder(tmp_path, identity) / "manifest.json").write_text('{"identity": {}}')
    assert actual().state == "blocks" and actual().fix.endswith("&& make")


def test_what_does_not_fit_the_host_or_the_chip_blocks_with_what_does_unless_it_is_mapped(doctor, tiny, monkeypatch):
    monkeypatch.setattr(TensorFile, "fingerprint", "0")
    flags, small = ("--checkpoint-path", tiny.checkpoint), Trn2(meminfo="MemAvailable: 100 kB\n", disk=1000)
    mapped = checks_of(doctor(small, *flags, "--profile", "cpu")[1])["host memory"]
    assert mapped.state == "note" and "are mapped; parts without room are read from the disk again" in mapped.text
    others = checks_of(doctor(small, *flags, "--profile", "trn2.3xlarge")[1])
    memory, disk = others["host memory"], others["disk"]
    assert memory.state == disk.state == "blocks"
    assert "of one model's weights are loaded at once" in memory.text and "more memory" in memory.fix
    assert "wanted for rank files" in disk.text and "--artifacts-dir" in disk.fix
    _, others, texts = doctor(Trn2(), *flags, *CLIP)
    assert "fits the 25.77 GB of a core" in texts["device memory"] and "device memory" not in checks_of(others)
    monkeypatch.setitem(plan.ASSUMED, "runtime_bytes_per_core", 30 * GIB)
    code, others, _ = doctor(Trn2(), *flags, *CLIP)
    finding = checks_of(others)["device memory"]
    assert code == 1 and "GB a core, trn2.3xlarge has 25.77 GB" in finding.text and "--tp-degree" in finding.fix


def test_the_table_ends_with_a_verdict_though_a_check_raises(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(System, "memory", lambda self: 1 / 0)
    main([], *Trn2().build(tmp_path / "sound", monkeypatch))
    text = capsys.readouterr().out
    assert "this check failed: ZeroDivisionError" in text and text.splitlines()[-1] == "nothing blocks this run"
    with pytest.raises(SystemExit):
        main([], *Trn2(listed=BUSY).build(tmp_path / "busy", monkeypatch))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "this run is blocked by: cores"
    assert any(line.strip().startswith("> end them: kill 113985") for line in lines)


def test_a_command_that_is_absent_fails_or_hangs_has_no_output(monkeypatch):
    monkeypatch.setattr("ltx_neuron.doctor.system.COMMAND_SECONDS", 0.2)
    assert output_of("no-such-command-at-all") is None
    assert output_of("false") is None and output_of("sleep", "5") is None and output_of("echo", "yes") == "yes\n"


class Stand(SimpleNamespace):
    """Ranks in groups of `partition`, as Ranks.put, run and get have them."""

    size = 4

    def put(self, program, rows):
        self.rows = rows[:, 0].view(self.size, -1)

    def run(self, program):
        return 0.25

    def get(self, program, name):
        return groups.expected(self.rows, self.partition)[name].flatten()[:, None].expand(-1, groups.WIDTH)


def test_the_probe_of_groups_finds_ranks_that_are_others_or_in_another_order():
    programs = {"cp": SimpleNamespace(graphs={"collectives": {"outputs": ["gathered", "summed"]}})}
    wanted = [[0, 2], [1, 3]]
    for partition, text in (
        (wanted, "gathered, summed in 0.25 ms"),
        ([[2, 0], [1, 3]], "rank 0 gathers from ranks [2, 0], wanted [0, 2]: tokens would be mixed"),
        ([[0, 2], [3, 1]], "rank 1 gathers from ranks [3, 1], wanted [1, 3]: tokens would be mixed"),
        ([[0, 1], [2, 3]], "gathered on rank 0 is wrong"),
    ):
        finding = groups._probed(Stand(partition=partition, programs=programs), "cp", wanted)
        assert (finding.check, finding.text) == ("group cp", f"2 groups of 2 ranks: {text}")
        assert (finding.state, bool(finding.fix)) == (("ok", False) if partition == wanted else ("blocks", True))


def test_groups_are_not_probed_where_something_blocks_or_a_run_has_one_group(doctor, monkeypatch):
    taken, flags = [], ("--profile", "trn2.48xlarge")
    context = *flags, "--profile-set", "context_parallel=4"
    monkeypatch.setattr(checks, "probe", lambda profile, tp: taken.append(tp) or ())
    machine = Trn2(instance="trn2.48xlarge", chips=2, listed=[chip(0), chip(1)])
    doctor(machine, *flags)
    code, _, texts = doctor(machine, *context)
    assert code == 1 and "8 of 8 logical cores are on free chips, 16 wanted" in texts["cores"]
    assert texts["profile"].startswith("trn2.48xlarge: 16 ranks, backend nxd (") and taken == []
    doctor(machine._replace(chips=16, listed=[chip(index) for index in range(16)]), *context)
    assert taken == [4]
