"""Findings about packages, host, files, artifacts and memory, and the order of all findings."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.doctor import sdk
from ltx_neuron.doctor.finding import Finding, attempt, blocked, judged
from ltx_neuron.doctor.neuron import neuron
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError
from ltx_neuron.format import format_bytes
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size, Stage
from ltx_neuron.machine import Machine
from ltx_neuron.profiles import PROFILES, Profile, require_runtime, resolve
from ltx_neuron.sampling.latents import video_latent_shape
from ltx_neuron.text.inputs import load_tokenizer
from ltx_neuron.weights.checkpoint import Source, gemma_files
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.weights.sharding import MODELS
from ltx_neuron.weights.tensorfile import DTYPES
from ltx_neuron.workspace import Workspace

GRAPH_BYTES = 2 * 2**30  # room for compiled graphs: a guess
_REQUIREMENTS = "pip install -r requirements.txt"
_ON_NEURON = {
    "nxd": "pip install -r requirements-neuron.txt",
    "torchdist": "pip install -r requirements-torchneuron.txt",
}
_PACKAGES = {
    "ltx-core": ("VAE, vocoder and upsamplers", "pip install --no-deps -r requirements-ltx.txt"),
    "transformers": ("the tokenizer", _REQUIREMENTS),
    "safetensors": ("weights", _REQUIREMENTS),
    "av": ("MP4 files", _REQUIREMENTS),
}


@dataclass(frozen=True)
class Request:
    """The generation that the machine is examined for, as far as the user described it.

    profile_name     None: the machine's own
    profile_changes  "key=value" each, as in --profile-set
    tp_degree        None: the profile's
    open_workspace   makes the workspace for the resolved profile; raises UserError
    neuron_vae       whether the ranks decode
    weight_sets      of the DiT, which the LoRAs name
    """

    checkpoint_path: Path | None
    gemma_root: Path | None
    spatial_upsampler_path: Path | None
    temporal_upsampler_path: Path | None
    artifacts_dir: Path
    profile_name: str | None
    profile_changes: tuple[str, ...]
    tp_degree: int | None
    dtype: str
    job: Job
    open_workspace: Callable[[Profile], Workspace]
    neuron_vae: bool = False
    weight_sets: tuple[WeightSet, ...] = ((),)


@dataclass(frozen=True)
class Examination:
    """What every check gets: the request, its resolved profile, and where facts come from."""

    request: Request
    profile: Profile
    machine: Machine
    system: System

    @property
    def tp(self) -> int:
        return self.profile.degree(self.request.tp_degree)

    def workspace(self) -> Workspace:
        return self.request.open_workspace(self.profile)


def examine(request: Request, system: System, machine: Machine) -> list[Finding]:
    """All findings, in the order of the table.

    Raises nothing: a fact that cannot be had is a finding as well.
    """
    instance = machine.instance or "no known EC2 instance type"
    text = f"{instance}; {machine.neuron_devices} Neuron chips, {machine.cuda_devices} GPUs"
    findings = [Finding("machine", "ok", text)]
    try:
        profile = resolve(request.profile_name, request.profile_changes, machine)
    except UserError as error:
        unresolved = blocked("profile", error)
        fix = unresolved.fix.replace("Find out why: python -m ltx_neuron.doctor. ", "")
        findings.append(replace(unresolved, fix=fix))
        nearest = PROFILES.get(machine.instance, PROFILES["cpu"])
        examination = Examination(request, nearest, machine, system)
        checks = (on_chips, can_run)
    else:
        examination = Examination(request, profile, machine, system)
        text = f"{profile.name}: {examination.tp} ranks, backend {profile.backend}"
        findings.append(Finding("profile", "ok", text))
        checks = (packages, media, on_chips, host, files, fits, artifacts, can_run)
    for check in checks:
        findings += _guarded(check, examination)
    return findings


def _guarded(
    check: Callable[[Examination], Iterable[Finding]], examination: Examination
) -> Iterator[Finding]:
    """The findings of a check up to its error, which is a finding too: one check that fails must
    not hide the others."""
    try:
        yield from check(examination)
    except UserError as error:
        yield blocked(check.__name__, error)
    except Exception as error:
        text = f"could not be looked at to the end: {type(error).__name__}: {error}"
        yield Finding(check.__name__, "note", text)


def on_chips(examination: Examination) -> Iterator[Finding]:
    """Findings about the Neuron side of the machine."""
    return neuron(
        examination.profile, examination.tp, examination.machine.neuron_devices, examination.system
    )


def packages(examination: Examination) -> Iterator[Finding]:
    """Python, torch, the packages of the profile's backend and those of the host models."""
    yield Finding("python", "ok", f"{examination.system.python} in {examination.system.prefix}")
    version, low, high = examination.system.version("torch"), *sdk.TORCH
    numbers = sdk.version_numbers(version)[:2]
    if not low <= numbers < high:
        wanted = f"torch>={sdk.dotted(low)},<{sdk.dotted(high)}"
        fix = f'pip install "{wanted}"'
        if examination.profile.device == "neuron":  # torch-neuronx is for one torch alone
            fix = f"in an environment of its own: {_ON_NEURON[examination.profile.backend]}"
        yield Finding("torch", "blocks", f"torch is {version or 'absent'}, wanted {wanted}", fix)
    elif examination.profile.backend == "nxd" and numbers != sdk.NXD_TORCH:
        yield Finding(
            "torch",
            "blocks",
            f"torch is {version}; NxD needs {sdk.dotted(sdk.NXD_TORCH)}, the last of PyTorch/XLA",
            "in an environment of its own: pip install -r requirements-neuron.txt; or, with"
            " torch-neuronx 2.13, --profile-set backend=torchdist",
        )
    else:
        yield Finding("torch", "ok", version)
    try:
        require_runtime(examination.profile, examination.tp, examination.machine)
    except UserError as error:
        yield blocked("runtime", error)
    for package, (why, install) in _PACKAGES.items():
        version = examination.system.version(package)
        yield judged(package, bool(version), f"{version or 'not installed'} ({why})", install)


def media(examination: Examination) -> Iterator[Finding]:
    """PyAV, whose wheel has ffmpeg's libraries, and torchaudio, which nothing needs."""
    system = examination.system
    if system.version("av"):
        text = "PyAV encodes libx264 and aac; no ffmpeg command is needed"
        if error := system.import_error("av"):
            text = f"PyAV, which has ffmpeg's libraries, does not load: {error}"
        elif lacking := [codec for codec in ("libx264", "aac") if not _encodes(codec)]:
            text = error = f"this build of PyAV cannot encode {', '.join(lacking)}"
        again = "pip install --force-reinstall --only-binary :all: av"
        yield judged("ffmpeg", not error, text, again)
    version = system.version("torchaudio")
    text = version or "absent, and not needed"
    if error := version and system.import_error("torchaudio"):
        text = (
            f"{version} does not load beside this torch ({error}). An empty module takes its "
            "place, and nothing here needs it"
        )
    yield judged("torchaudio", not error, text, "pip uninstall torchaudio", "note")


def _encodes(codec: str) -> bool:
    import av

    try:
        av.codec.Codec(codec, "w")
    except Exception:  # PyAV's error for it has had several types
        return False
    return True


def host(examination: Examination) -> Iterator[Finding]:
    """Free memory and disk, compared with the size of the weights where files are given."""
    system, weights = examination.system, weight_bytes(examination)
    memory = system.memory()
    available, need = memory.get("MemAvailable"), max(weights.values(), default=0)
    if available is None:
        text = "/proc/meminfo cannot be read, so memory is not compared with what is needed"
        yield Finding("host memory", "note", text)
    else:
        text = f"{format_bytes(available)} of {format_bytes(memory.get('MemTotal', 0))} available"
        mapped = examination.profile.maps_weights
        if need:
            how = "mapped" if mapped else "held at once"
            text += f"; {format_bytes(need)} of one model's weights are {how}"
            if mapped and need > available:
                text += ", and what has no room is read from the disk again"
        fix = "end other programs, or use a machine with more memory"
        short = "note" if mapped else "blocks"
        yield judged("host memory", need <= available, text, fix, short)
    folder, need = examination.request.artifacts_dir, 0
    free = system.free_bytes(folder)
    text = f"{format_bytes(free)} free for {folder}"
    if weights and not _rank_files_exist(examination):
        need = sum(weights.values()) + GRAPH_BYTES
        text += f", {format_bytes(need)} wanted for rank files and graphs"
    fix = "type --artifacts-dir with a folder of a larger disk, or delete what is not needed"
    yield judged("disk", need <= free, text, fix)


def weight_bytes(examination: Examination) -> dict[str, int]:
    """Bytes of the rank files of every model, all ranks together, from the headers of the published
    files; empty without those, or where they are broken."""
    if not examination.request.checkpoint_path:
        return {}
    try:
        workspace = examination.workspace()
        sources = [Source(MODELS["dit"], [workspace.checkpoint])]
        sources += [workspace.source("gemma3")] if examination.request.gemma_root else []
        if examination.request.neuron_vae:
            sources += [workspace.source("vae"), workspace.source("sound")]
    except UserError:
        return {}  # `files` reports it
    size = DTYPES[examination.request.dtype].itemsize
    sizes = {"sound": 4}  # bytes of a float32: sound is decoded in it whatever the run's dtype
    return {
        source.model.name: sum(math.prod(source.shape(n)) for n in source.names)
        * sizes.get(source.model.name, size)
        for source in sources
    }


def _rank_files_exist(examination: Examination) -> bool:
    try:
        workspace = examination.workspace()
        for loras in examination.request.weight_sets:
            workspace.dit_weights(loras)
        if examination.request.gemma_root:
            workspace.weights("gemma3")
        if examination.request.neuron_vae:
            workspace.weights("vae")
            workspace.weights("sound")
    except UserError:
        return False
    return True


def files(examination: Examination) -> Iterator[Finding]:
    """The published files, read as strictly as the scripts read them: every name, shape and length,
    but no data."""
    request = examination.request
    if request.checkpoint_path:
        yield attempt("checkpoint", lambda: _checkpoint(examination))
    else:
        yield Finding("checkpoint", "note", "not looked at: type --checkpoint-path FILE")
    if request.gemma_root:
        yield attempt("gemma", lambda: _gemma(examination))
    else:
        yield Finding("gemma", "note", "not looked at: type --gemma-root DIR")
    for kind in ("spatial", "temporal"):
        if path := getattr(request, f"{kind}_upsampler_path"):
            yield attempt(f"{kind} upsampler", partial(_upsampler, path, kind))


def _checkpoint(examination: Examination) -> str:
    workspace = examination.workspace()
    for loras in examination.request.weight_sets:
        workspace.source("dit", loras)  # raises UserError unless every tensor of the DiT is there
    models = HostModels(workspace.checkpoint_path, workspace.checkpoint.config, workspace.dtype)
    models.check(("video_encoder", "video_decoder", "audio_decoder", "vocoder", "video_statistics"))
    config = workspace.transformer
    return (
        f"{workspace.checkpoint_path} is whole: LTX {workspace.checkpoint.model_version},"
        f" {config.num_layers} blocks of {config.video.inner} channels,"
        f" {format_bytes(workspace.checkpoint.size)}"
    )


def _gemma(examination: Examination) -> str:
    request = examination.request
    root = request.gemma_root
    config, weight_files = gemma_config(root), gemma_files(root)
    config.check_tensor_parallel(examination.tp)
    load_tokenizer(root)
    if request.checkpoint_path and os.path.isfile(request.checkpoint_path):
        workspace = examination.workspace()
        # Raise UserError unless Gemma is the one that the checkpoint's connectors were made for.
        _ = workspace.gemma
        _ = workspace.source("gemma3")
    return (
        f"{root} is whole: {config.num_hidden_layers} layers of {config.hidden_size} channels, "
        f"{format_bytes(sum(file.size for file in weight_files))}, tokenizer"
    )


def _upsampler(path: Path, kind: str) -> str:
    models = HostModels(path, {}, torch.float32, **{f"{kind}_upsampler_path": path})
    models.check([f"{kind}_upsampler"])
    return f"{path} is whole"


def fits(examination: Examination) -> Iterator[Finding]:
    """Whether a generation of the requested size fits the device's memory, by the plan's
    arithmetic. Nothing without a checkpoint, or where the profile has no limit."""
    request, limit = examination.request, examination.profile.memory_bytes_per_core
    if limit is None or not request.checkpoint_path or not os.path.isfile(request.checkpoint_path):
        return

    def check_memory() -> str:
        text = request.gemma_root is not None
        examination.workspace().check_plan_fits(request.job, text)
        core = f"fits the {format_bytes(limit)} of a core"
        return f"{core}, by the plan's arithmetic (python -m ltx_neuron.plan)"

    yield attempt("device memory", check_memory)


def artifacts(examination: Examination) -> Iterator[Finding]:
    """Rank files, and graphs of the requested size: finished, or the command that makes them."""
    request = examination.request
    if not request.checkpoint_path:
        return
    size = request.job.size
    try:
        workspace = examination.workspace()
        size.check()
    except UserError as error:
        if os.path.isfile(request.checkpoint_path):  # else `files` reports it
            yield blocked("artifacts", error)
        return

    def graphs(stage: Stage) -> str:
        _, manifest = workspace.dit_program_for(request.job, stage)
        return str(manifest.folder)

    def weights() -> str:
        return ", ".join(str(workspace.dit_weights(loras)) for loras in request.weight_sets)

    yield attempt("DiT weights", weights, "todo")
    for stage in request.job.stages:
        yield attempt(f"DiT graphs, {stage.name}", partial(graphs, stage), "todo")
    if request.gemma_root:
        buckets = examination.profile.text_buckets
        yield attempt("Gemma3 weights", lambda: str(workspace.weights("gemma3")), "todo")
        yield attempt(
            "Gemma3 graphs", lambda: f"{len(workspace.text_programs(buckets))} are finished", "todo"
        )
    if request.neuron_vae:
        yield from _decoder_artifacts(workspace, size)


def _decoder_artifacts(workspace: Workspace, size: Size) -> Iterator[Finding]:
    clip = video_latent_shape(size.height, size.width, size.num_frames)
    yield attempt("VAE weights", lambda: str(workspace.weights("vae")), "todo")
    yield attempt(
        "VAE graphs", lambda: f"{len(workspace.tile_programs(clip))} are finished", "todo"
    )
    yield attempt("sound weights", lambda: str(workspace.weights("sound")), "todo")
    yield attempt(
        "sound graphs",
        lambda: f"{len(workspace.sound_programs(size, size.audio_frames))} are finished",
        "todo",
    )


def can_run(examination: Examination) -> Iterator[Finding]:
    """The profiles that this machine can run, and what it lacks for the others."""
    can, cannot = [], []
    for name, profile in PROFILES.items():
        try:
            chips = examination.machine.neuron_devices
            if profile.device == "neuron" and chips < profile.chips:
                raise UserError(f"{profile.chips} Neuron chips wanted, found {chips}")
            require_runtime(profile, profile.tp, examination.machine)
            can.append(name)
        except UserError as error:
            cannot.append(f"{name} ({str(error).splitlines()[0].rstrip('.')})")
    text = ", ".join(can) + (f"; not {', '.join(cannot)}" if cannot else "")
    yield Finding("can run here", "ok", text)
    plan = "python -m ltx_neuron.plan --checkpoint-path FILE --profile NAME"
    yield Finding("can plan here", "ok", f"{', '.join(PROFILES)}: {plan}")
