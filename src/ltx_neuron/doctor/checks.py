"""Findings about packages, host, files, artifacts and memory, and the order of all findings."""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ltx_neuron import flags, hub
from ltx_neuron.artifacts.workspace import Need, Workspace, needs
from ltx_neuron.config import profiles
from ltx_neuron.config.gemma import gemma_config, read_config
from ltx_neuron.config.profiles import Profile, resolve
from ltx_neuron.doctor import sdk
from ltx_neuron.doctor.finding import Finding, finding_if, finding_of, from_error
from ltx_neuron.doctor.groups import probe
from ltx_neuron.doctor.neuron import neuron
from ltx_neuron.doctor.system import System
from ltx_neuron.engine.preflight import Preflight, check_plans_fit
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST
from ltx_neuron.format import format_bytes
from ltx_neuron.host.models import HostModels
from ltx_neuron.invocation import command
from ltx_neuron.job import Job
from ltx_neuron.machine import Machine
from ltx_neuron.text.inputs import embedded_tokenizer, load_tokenizer
from ltx_neuron.weights.checkpoint import gemma_files
from ltx_neuron.weights.model_files import ModelFiles, TextEncoderFile
from ltx_neuron.weights.tensorfile import DTYPES

GRAPH_BYTES = 2 * 2**30  # room for compiled graphs: a guess
_PACKAGES = {
    # Its wheel depends on torchaudio, which does not load beside a CPU's torch.
    "ltx-core": ("VAE, vocoder and upsamplers", "pip install --no-deps ltx-core==1.0.0"),
    "transformers": ("the tokenizer", "pip install ltx-neuron"),
    "safetensors": ("weights", "pip install ltx-neuron"),
    "av": ("MP4 files", "pip install ltx-neuron"),
}


@dataclass(frozen=True)
class Examination:
    """The input of every check; `findings` are those of the checks before it."""

    args: argparse.Namespace
    job: Job
    profile: Profile
    machine: Machine
    system: System
    findings: list[Finding]

    @property
    def tp(self) -> int:
        return self.profile.degree(self.args.tp_degree)

    def needs(self, workspace: Workspace, job: Job) -> Iterator[Need]:
        """The weights and graphs of a job on the ranks; those of Gemma if it has a folder."""
        options = flags.run_options(self.args)
        return needs(workspace, [job], replace(options, neuron_gemma=bool(self.args.gemma_root)))

    def workspace(self) -> Workspace:
        resolved = argparse.Namespace(**vars(self.args) | {"profile": self.profile.name})
        return flags.workspace(resolved, writes=False)


@hub.no_downloads()
def examine(args: argparse.Namespace, system: System, machine: Machine) -> list[Finding]:
    """All findings, in the order of the table; a check that fails is a finding as well. Downloads
    nothing. Raises UserError for a flag's wrong value."""
    for flag in flags.MODEL_FILES:
        with suppress(hub.NotDownloaded):  # the check `files` reports it
            setattr(args, flag, flags.local(args, flag))
    _complete(args)
    flags.spec(args)  # a wrong value is no finding
    wrong, job = [], Job()
    try:
        job = flags.shape(args, flags.recipe(args))
    except UserError as error:
        wrong.append(from_error("inputs", error))
    named = machine.instance in profiles.PROFILES
    profile = resolve(machine.instance if named else "cpu")  # at first
    instance = machine.instance or "no known EC2 instance type"
    text = f"{instance}; {machine.neuron_devices} Neuron chips, {machine.cuda_devices} GPUs"
    findings = [Finding("machine", "ok", text), *wrong]
    examination = Examination(args, job, profile, machine, system, findings)
    try:
        profile = resolve(args.profile, tuple(args.profile_set), machine)
    except UserError as error:
        unresolved = from_error("profile", error)
        fix = unresolved.fix.replace(f"Find out why: {command('doctor')}. ", "")
        findings.append(replace(unresolved, fix=fix))
        checks = (on_chips, can_run)
    else:
        examination = replace(examination, profile=profile)
        ranks = profile.cores_needed(examination.tp)
        text = f"{profile.name}: {ranks} ranks, {profiles.describe_backend(profile)}"
        findings.append(Finding("profile", "ok", text))
        if profile.note:
            findings.append(Finding("profile", "note", profile.note))
        checks = (packages, media, on_chips, host, files, fits, artifacts, groups, can_run)
    for check in checks:
        try:  # one check that fails must not hide the others
            for finding in check(examination):
                findings.append(finding)
        except UserError as error:
            findings.append(from_error(check.__name__, error))
        except Exception as error:
            text = f"this check failed: {type(error).__name__}: {error}"
            findings.append(Finding(check.__name__, "note", text))
    return findings


def on_chips(examination: Examination) -> Iterator[Finding]:
    """Findings about the Neuron side of the machine."""
    return neuron(
        examination.profile, examination.tp, examination.machine.neuron_devices, examination.system
    )


def packages(examination: Examination) -> Iterator[Finding]:
    """Python, torch, the packages of the profile's backend and those of the host models."""
    profile = examination.profile
    yield Finding("python", "ok", f"{examination.system.python} in {examination.system.prefix}")
    version, (low, high) = examination.system.version("torch") or "", sdk.TORCH
    numbers = sdk.version_numbers(version)[:2]
    stack = profiles.STACKS[profile.backend]  # each runs with one torch
    needed = sdk.NXD_TORCH if profile.backend == "nxd" else sdk.version_numbers(stack.version)[:2]
    if not low <= numbers < high:
        requirement = f"torch>={sdk.dotted(low)},<{sdk.dotted(high)}"
        fix = f'pip install "{requirement}"'
        if profile.device == "neuron":
            fix = f"in an environment of its own: {stack.install}"
        yield Finding(
            "torch", "blocks", f"torch is {version or 'absent'}, wanted {requirement}", fix
        )
    elif profile.device == "neuron" and needed and numbers != needed:
        text = f"torch is {version}; this {stack.name} needs {sdk.dotted(needed)}"
        yield Finding("torch", "blocks", text, f"in an environment of its own: {stack.install}")
    else:
        yield Finding("torch", "ok", version)
    try:
        profiles.require_runtime(profile, examination.tp, examination.machine)
    except UserError as error:
        yield from_error("runtime", error)
    for package, (why, install) in _PACKAGES.items():
        version = examination.system.version(package)
        yield finding_if(package, bool(version), f"{version or 'not installed'} ({why})", install)


def media(examination: Examination) -> Iterator[Finding]:
    """PyAV, with ffmpeg's libraries in its wheel, and the optional torchaudio."""
    system = examination.system
    if system.version("av"):
        text = "PyAV encodes libx264 and aac; no ffmpeg command is needed"
        if error := system.import_error("av"):
            text = f"PyAV (with ffmpeg's libraries) does not load: {error}"
        elif lacking := [codec for codec in ("libx264", "aac") if not _encodes(codec)]:
            text = error = f"this build of PyAV cannot encode {', '.join(lacking)}"
        again = "pip install --force-reinstall --only-binary :all: av"
        yield finding_if("ffmpeg", not error, text, again)
    version = system.version("torchaudio")
    text = version or "absent, and not needed"
    if error := version and system.import_error("torchaudio"):
        text = (
            f"{version} does not load with this torch ({error}). An empty module replaces it; "
            "nothing here needs it"
        )
    yield finding_if("torchaudio", not error, text, "pip uninstall torchaudio", "note")


def _encodes(codec: str) -> bool:
    import av.codec

    try:
        av.codec.Codec(codec, "w")
    except Exception:  # the type differs between PyAV's versions
        return False
    return True


def host(examination: Examination) -> Iterator[Finding]:
    """Free memory and disk, compared with the size of the weights if files are given."""
    system, weights = examination.system, weight_bytes(examination)
    memory = system.memory()
    available, need = memory.get("MemAvailable"), max(weights.values(), default=0)
    if available is None:
        text = "/proc/meminfo cannot be read, so free memory is unknown"
        yield Finding("host memory", "note", text)
    else:
        text = f"{format_bytes(available)} of {format_bytes(memory.get('MemTotal', 0))} available"
        how, short = "loaded at once", "blocks"
        if examination.profile.maps_weights:
            how, short = "mapped", "note"
            how += "; parts without room are read from the disk again" * (need > available)
        text += f"; {format_bytes(need)} of one model's weights are {how}" if need else ""
        fix = "end other programs, or use a machine with more memory"
        yield finding_if("host memory", need <= available, text, fix, short)
    folder, need = examination.args.artifacts_dir, 0
    free = system.free_bytes(folder)
    text = f"{format_bytes(free)} free for {folder}"
    if not all((path / MANIFEST).is_file() for path in weights):
        need = sum(weights.values()) + GRAPH_BYTES
        text += f", {format_bytes(need)} wanted for rank files and graphs"
    fix = "type --artifacts-dir with a folder of a larger disk, or delete unneeded files"
    yield finding_if("disk", need <= free, text, fix)


def _complete(args: argparse.Namespace) -> None:
    """Set missing flags to the files beside the transformer in its download."""
    with suppress(UserError):
        files = ModelFiles(args.checkpoint_path or "", args.gemma_root)
        for flag in ("gemma_root", "spatial_upsampler_path", "temporal_upsampler_path"):
            setattr(args, flag, getattr(args, flag) or files.find(flag.partition("_")[0]))


def weight_bytes(examination: Examination) -> dict[Path, int]:
    """Bytes of the job's weight sets by folder, of all ranks together, from the headers of the
    published files. Empty without such files, or if they are damaged."""
    if not examination.args.checkpoint_path:
        return {}
    sizes = {}
    try:
        workspace = examination.workspace()
        for need in examination.needs(workspace, workspace.resolved(examination.job)):
            if source := need.source:
                numbers = sum(math.prod(source.shape(name)) for name in source.names)
                itemsize = DTYPES[need.identity["dtype"]].itemsize
                sizes[workspace.folder(need)] = numbers * itemsize
    except UserError:
        return {}  # the check `files` reports it
    return sizes


def files(examination: Examination) -> Iterator[Finding]:
    """The published files: every tensor's name, shape and length, as other commands check it."""
    args = examination.args
    checks: dict[str, Callable[[], object]] = {}
    if args.checkpoint_path:
        with suppress(UserError):  # the checkpoint's row has it
            preflight = Preflight.of(examination.workspace(), flags.run_options(args))
            checks = preflight.file_checks([examination.job])
    named: dict[str, tuple[object, Callable[[], str]]] = {
        "checkpoint": (args.checkpoint_path, partial(_checkpoint, examination)),
        "gemma": (args.gemma_root, partial(_gemma, examination)),
    }
    for kind in ("spatial", "temporal"):
        path = getattr(args, f"{kind}_upsampler_path")
        if path or f"{kind} upsampler" in checks:
            named[f"{kind} upsampler"] = path or "needed", partial(_upsampler, args, kind)
    others = {name: ("needed", lambda: "whole") for name in checks if name not in named}
    for name, (path, describe) in (named | others).items():
        if path:
            yield finding_of(name, checks.get(name, lambda: None), describe)
        else:
            typed = "--checkpoint-path FILE" if name == "checkpoint" else "--gemma-root DIR"
            yield Finding(name, "note", f"not checked: type {typed}")


def _checkpoint(examination: Examination) -> str:
    workspace = examination.workspace()
    path, files = workspace.checkpoint_path, workspace.files
    models = HostModels(path, workspace.config, workspace.dtype, files=files)
    models.check(("video_encoder", "video_decoder", "audio_decoder", "vocoder", "video_statistics"))
    _ = workspace.source("dit")
    config, quantised = workspace.transformer, workspace.checkpoint.describe_quantised()
    return (
        f"{workspace.checkpoint_path} is whole: LTX {workspace.checkpoint.model_version},"
        f" {config.num_layers} blocks of {config.video.inner} channels,"
        f" {format_bytes(workspace.checkpoint.size)}{quantised and f'; {quantised}'}"
    )


def _gemma(examination: Examination) -> str:
    checkpoint, root = examination.args.checkpoint_path, flags.local(examination.args, "gemma_root")
    if checkpoint and os.path.isfile(checkpoint):
        workspace = examination.workspace()
        config, weight_files = workspace.gemma, workspace.files.text_files()
    elif os.path.isfile(root):
        file = TextEncoderFile(root, "")
        config, weight_files = read_config(file.gemma_config, root), [file]
        embedded_tokenizer(file)
    else:
        config, weight_files = gemma_config(root), gemma_files(root)
        load_tokenizer(root)
    config.check_tensor_parallel(examination.tp)
    return (
        f"{root} is whole: {config.num_hidden_layers} layers of {config.hidden_size} channels, "
        f"{format_bytes(sum(file.size for file in weight_files))}, tokenizer"
    )


def _upsampler(args: argparse.Namespace, kind: str) -> str:
    name: Any = f"{kind}_upsampler_path"
    path = flags.local(args, name)
    HostModels(path, {}, torch.float32, **{name: path}).check([f"{kind}_upsampler"])
    return f"{path} is whole"


def fits(examination: Examination) -> Iterator[Finding]:
    """Whether a generation of the requested size fits the device's memory, according to the plan.
    No finding without a checkpoint or a limit of the profile."""
    args, limit = examination.args, examination.profile.memory_bytes_per_core
    if limit is None or not args.checkpoint_path or not os.path.isfile(args.checkpoint_path):
        return

    def check_memory() -> str:
        workspace = examination.workspace()
        job = workspace.resolved(examination.job)
        check_plans_fit(workspace, [job], args.gemma_root is not None)
        return f"fits the {format_bytes(limit)} of a core, according to {command('plan')}"

    yield finding_of("device memory", check_memory)


def artifacts(examination: Examination) -> Iterator[Finding]:
    """Rank files, and graphs of the requested size: finished, or the command that makes them."""
    args = examination.args
    if not args.checkpoint_path:
        return
    try:
        workspace = examination.workspace()
        examination.job.size.check()
    except UserError as error:
        if os.path.isfile(args.checkpoint_path):  # otherwise the check `files` reports it
            yield from_error("artifacts", error)
        return
    job = workspace.resolved(examination.job)

    def describe(needs: list[Need]) -> str:
        if needs[0].source:
            return ", ".join(map(str, workspace.find_all(needs)))
        if needs[0].model == "dit":  # other graphs may serve a stage
            found = (workspace.dit_program_for(job, stage)[1].folder for stage in job.stages)
            return ", ".join(map(str, dict.fromkeys(found) if job.windows else found))
        return f"{len(workspace.programs(needs))} are finished"

    listed = examination.needs(workspace, job)
    try:
        for title, group in groupby(listed, lambda need: need.title.partition(",")[0]):
            yield finding_of(title, partial(describe, [*group]), missing="todo")
    except UserError as error:  # of a file: the check `files` reports it
        yield from_error("artifacts", error, "todo")


def groups(examination: Examination) -> Iterator[Finding]:
    """The probe of context parallelism's groups, unless something blocks a run."""
    blocked = any(finding.state == "blocks" for finding in examination.findings)
    if examination.profile.context_parallel > 1 and not blocked:
        yield from probe(examination.profile, examination.tp)


def can_run(examination: Examination) -> Iterator[Finding]:
    """The profiles that this machine can run, and the reasons for the others."""
    can, cannot, machine = [], [], examination.machine
    for name in profiles.MACHINES:
        profile, instance, chips = resolve(name), machine.instance, machine.neuron_devices
        try:
            if profile.device == "neuron" and chips < profile.chips:
                raise UserError(f"{profile.chips} Neuron chips wanted, found {chips}")
            if profile.device == "neuron" and instance[:4] not in ("", name[:4]):
                raise UserError(f"this is a {instance}")
            profiles.require_runtime(profile, profile.tp, machine)
            can.append(name)
        except UserError as error:
            cannot.append(f"{name} ({str(error).splitlines()[0].rstrip('.')})")
    text = ", ".join(can) + (f"; not {', '.join(cannot)}" if cannot else "")
    yield Finding("can run here", "ok", text)
    plan = command("plan", "--checkpoint-path", "FILE", "--profile", "NAME")
    yield Finding("can plan here", "ok", f"{', '.join(profiles.MACHINES)}: {plan}")
