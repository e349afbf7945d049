"""Findings about packages, host, files and artifacts, and all findings for what the flags ask."""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ltx_neuron import flags
from ltx_neuron.config import gemma_config
from ltx_neuron.doctor import sdk
from ltx_neuron.doctor.finding import Finding, attempt, blocked, gb
from ltx_neuron.doctor.neuron import neuron
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError
from ltx_neuron.host.models import HostModels
from ltx_neuron.machine import Machine
from ltx_neuron.profiles import PROFILES, Profile, require_runtime, resolve
from ltx_neuron.text.inputs import load_tokenizer
from ltx_neuron.weights.checkpoint import Source, gemma_files
from ltx_neuron.weights.sharding import MODELS
from ltx_neuron.weights.tensorfile import DTYPES
from ltx_neuron.workspace import Workspace

GRAPH_BYTES = 2 * 2**30  # room for compiled graphs: a guess
_REQUIREMENTS = "pip install -r requirements.txt"
_PACKAGES = {
    "ltx-core": ("VAE, vocoder and upsamplers", "pip install --no-deps -r requirements-ltx.txt"),
    "transformers": ("the tokenizer", _REQUIREMENTS),
    "safetensors": ("weights", _REQUIREMENTS),
    "av": ("MP4 files", _REQUIREMENTS),
}


@dataclass(frozen=True)
class Asked:
    """What is to be possible, as far as the flags say it, and where facts come from."""

    args: argparse.Namespace
    profile: Profile
    machine: Machine
    system: System

    @property
    def tp(self) -> int:
        return self.profile.degree(self.args.tp_degree)

    def workspace(self) -> Workspace:
        return flags.workspace(self.args, writes=False)


def examine(args: argparse.Namespace, system: System, machine: Machine) -> list[Finding]:
    """Every finding for what the flags ask. Raises nothing: what cannot be looked at is a finding
    as well."""
    instance = machine.instance or "no known EC2 instance type"
    found = [
        Finding(
            "machine",
            "ok",
            f"{instance}; {machine.neuron_devices} Neuron chips, {machine.cuda_devices} GPUs",
        )
    ]
    try:
        profile = resolve(args.profile, tuple(args.profile_set), machine)
    except UserError as error:
        text, _, fix = str(error).partition("\n")
        found.append(
            Finding(
                "profile",
                "blocks",
                text,
                fix.replace("Find out why: python -m ltx_neuron.doctor. ", ""),
            )
        )
        asked = Asked(args, PROFILES.get(machine.instance, PROFILES["cpu"]), machine, system)
        return [*found, *_guarded(on_chips, asked), *_guarded(can_run, asked)]
    args = argparse.Namespace(**vars(args) | {"profile": profile.name})  # found once, handed down
    asked = Asked(args, profile, machine, system)
    found.append(
        Finding("profile", "ok", f"{profile.name}: {asked.tp} ranks, backend {profile.backend}")
    )
    for check in (packages, media, on_chips, host, files, fits, artifacts, can_run):
        found += _guarded(check, asked)
    return found


def _guarded(check: Callable[[Asked], Iterable[Finding]], asked: Asked) -> Iterator[Finding]:
    """The findings of a check as far as it comes: a doctor that falls over is of no use to
    anybody."""
    try:
        yield from check(asked)
    except UserError as error:
        yield blocked(check.__name__, error)
    except Exception as error:
        yield Finding(
            check.__name__,
            "note",
            f"could not be looked at to the end: {type(error).__name__}: {error}",
        )


def on_chips(asked: Asked) -> Iterator[Finding]:
    return neuron(asked.profile, asked.tp, asked.machine.neuron_devices, asked.system)


def packages(asked: Asked) -> Iterator[Finding]:
    """Python's side: torch, what the host's stages run on, and what the profile's backend runs
    on."""
    yield Finding("python", "ok", f"{asked.system.python} in {asked.system.prefix}")
    version, low, high = asked.system.version("torch"), *sdk.TORCH
    if not low <= sdk.numbers(version)[:2] < high:
        wanted = f"torch>={sdk.said(low)},<{sdk.said(high)}"
        yield Finding(
            "torch",
            "blocks",
            f"torch is {version or 'absent'}, wanted {wanted}",
            f'pip install "{wanted}"',
        )
    elif asked.profile.backend == "nxd" and sdk.numbers(version)[:2] != sdk.NXD_TORCH:
        yield Finding(
            "torch",
            "blocks",
            f"torch is {version}; NxD needs {sdk.said(sdk.NXD_TORCH)}, the last of PyTorch/XLA",
            "in an environment of its own: pip install -r requirements-neuron.txt; or, with"
            " torch-neuronx 2.13, --profile-set backend=torchdist",
        )
    else:
        yield Finding("torch", "ok", version)
    try:
        require_runtime(asked.profile, asked.tp, asked.machine)
    except UserError as error:
        yield blocked("runtime", error)
    for package, (why, install) in _PACKAGES.items():
        if version := asked.system.version(package):
            yield Finding(package, "ok", f"{version} ({why})")
        else:
            yield Finding(package, "blocks", f"not installed ({why})", install)


def media(asked: Asked) -> Iterator[Finding]:
    """PyAV has ffmpeg's libraries in its wheel, so no ffmpeg command is needed; torchaudio is not
    used at run time."""
    system = asked.system
    if system.version("av"):
        again = "pip install --force-reinstall --only-binary :all: av"
        if error := system.import_error("av"):
            yield Finding(
                "ffmpeg",
                "blocks",
                f"PyAV, which has ffmpeg's libraries, does not load: {error}",
                again,
            )
        elif lacking := [codec for codec in ("libx264", "aac") if not _encodes(codec)]:
            yield Finding(
                "ffmpeg", "blocks", f"this build of PyAV cannot encode {', '.join(lacking)}", again
            )
        else:
            yield Finding(
                "ffmpeg", "ok", "PyAV encodes libx264 and aac; no ffmpeg command is needed"
            )
    version = system.version("torchaudio")
    if version and (error := system.import_error("torchaudio")):
        yield Finding(
            "torchaudio",
            "note",
            f"{version} does not load beside this torch ({error}). An empty module takes its "
            "place, and nothing here needs it",
            "pip uninstall torchaudio",
        )
    else:
        yield Finding("torchaudio", "ok", version or "absent, and not needed")


def _encodes(codec: str) -> bool:
    import av

    try:
        av.codec.Codec(codec, "w")
    except Exception:  # PyAV's error for it has had several types
        return False
    return True


def host(asked: Asked) -> Iterator[Finding]:
    """Memory and disk, compared with the weights where files are given."""
    memory, weights, system = asked.system.memory(), weight_bytes(asked), asked.system
    available, need = memory.get("MemAvailable"), max(weights.values(), default=0)
    if available is None:
        yield Finding(
            "host memory",
            "note",
            "/proc/meminfo cannot be read, so memory is not compared with what is needed",
        )
    else:
        text = f"{gb(available)} of {gb(memory.get('MemTotal', 0))} available"
        text += f"; {gb(need)} of one model's weights are held at once" if need else ""
        fix = "end other programs, or use a machine with more memory"
        yield Finding(
            "host memory",
            "ok" if need <= available else "blocks",
            text,
            "" if need <= available else fix,
        )
    folder = asked.args.artifacts_dir
    free, need = system.free_bytes(folder), 0
    if weights and not _finished(asked):
        need = sum(weights.values()) + GRAPH_BYTES
    text = f"{gb(free)} free for {folder}" + (
        f", {gb(need)} wanted for rank files and graphs" if need else ""
    )
    fix = "type --artifacts-dir with a folder of a larger disk, or delete what is not needed"
    yield Finding("disk", "ok" if need <= free else "blocks", text, "" if need <= free else fix)


def weight_bytes(asked: Asked) -> dict[str, int]:
    """Bytes of each model's rank files, all ranks, from the headers; {} without files, or where
    those are broken."""
    if not asked.args.checkpoint_path:
        return {}
    try:
        workspace = asked.workspace()
        sources = [Source(MODELS["dit"], [workspace.checkpoint])]
        sources += [workspace.gemma_source] if asked.args.gemma_root else []
    except UserError:
        return {}  # a finding of `files`
    size = DTYPES[asked.args.dtype].itemsize
    return {
        source.model.name: sum(math.prod(source.shape(n)) for n in source.names) * size
        for source in sources
    }


def _finished(asked: Asked) -> bool:
    """Whether the rank files are there."""
    try:
        workspace = asked.workspace()
        workspace.dit_weights()
        if asked.args.gemma_root:
            workspace.gemma3_weights()
    except UserError:
        return False
    return True


def files(asked: Asked) -> Iterator[Finding]:
    """The published files, read as strictly as the scripts read them: every name, shape and length;
    no data."""
    args = asked.args
    for flag, name, look in (
        ("--checkpoint-path FILE", "checkpoint", _checkpoint),
        ("--gemma-root DIR", "gemma", _gemma),
    ):
        given = args.checkpoint_path if name == "checkpoint" else args.gemma_root
        yield (
            attempt(name, lambda look=look: look(asked))
            if given
            else Finding(name, "note", f"not looked at: type {flag}")
        )
    for kind in ("spatial", "temporal"):
        if path := getattr(args, f"{kind}_upsampler_path"):
            yield attempt(f"{kind} upsampler", lambda kind=kind, path=path: _upsampler(kind, path))


def _checkpoint(asked: Asked) -> str:
    workspace = asked.workspace()
    _ = workspace.dit_source
    models = HostModels(workspace.checkpoint_path, workspace.checkpoint.config, workspace.dtype)
    models.check(("video_encoder", "video_decoder", "audio_decoder", "vocoder", "video_statistics"))
    config = workspace.transformer
    return (
        f"{workspace.checkpoint_path} is whole: LTX {workspace.checkpoint.model_version},"
        f" {config.num_layers} blocks of {config.video.inner} channels,"
        f" {gb(workspace.checkpoint.size)}"
    )


def _gemma(asked: Asked) -> str:
    root = asked.args.gemma_root
    config, found = gemma_config(root), gemma_files(root)
    config.check_tensor_parallel(asked.tp)
    load_tokenizer(root)
    if asked.args.checkpoint_path and asked.args.checkpoint_path.is_file():
        workspace = asked.workspace()
        _ = workspace.gemma, workspace.gemma_source  # that the two belong together
    return (
        f"{root} is whole: {config.num_hidden_layers} layers of {config.hidden_size} channels, "
        f"{gb(sum(file.size for file in found))}, tokenizer"
    )


def _upsampler(kind: str, path: Path) -> str:
    models = HostModels(path, {}, torch.float32)
    models.upsampler_paths[kind] = path
    models.check([f"{kind}_upsampler"])
    return f"{path} is whole"


def fits(asked: Asked) -> Iterator[Finding]:
    """Whether a generation of the size asked for fits the device's memory, by the plan's
    arithmetic."""
    args = asked.args
    limit = asked.profile.memory_bytes_per_core
    if limit is None or not args.checkpoint_path or not args.checkpoint_path.is_file():
        return

    def planned() -> str:
        asked.workspace().check_memory(
            flags.size(args), args.recipe or "distilled", text=args.gemma_root is not None
        )
        return (
            f"fits the {gb(limit)} of a core, by the plan's arithmetic (python -m ltx_neuron.plan)"
        )

    yield attempt("device memory", planned)


def artifacts(asked: Asked) -> Iterator[Finding]:
    """Rank files, and graphs of the size asked for: finished, or the command that makes them."""
    if not asked.args.checkpoint_path:
        return
    try:
        workspace, size = asked.workspace(), flags.size(asked.args)
        size.check()
    except UserError as error:
        if asked.args.checkpoint_path.is_file():  # else it is a finding of `files`
            yield blocked("artifacts", error)
        return
    recipe, images = asked.args.recipe or "distilled", flags.images(asked.args)
    yield attempt("DiT weights", lambda: str(workspace.dit_weights()), "todo")
    for stage in size.stages(recipe):
        yield attempt(
            f"DiT graphs, {stage.name}",
            lambda stage=stage: _graphs(workspace, size, stage, images, recipe),
            "todo",
        )
    if asked.args.gemma_root:
        buckets = asked.profile.text_buckets
        yield attempt("Gemma3 weights", lambda: str(workspace.gemma3_weights()), "todo")
        yield attempt(
            "Gemma3 graphs", lambda: f"{len(workspace.text_programs(buckets))} are finished", "todo"
        )


def _graphs(workspace: Workspace, size, stage, images: tuple, recipe: str) -> str:
    return str(workspace.dit_program_for(size, stage, images, recipe)[1].folder)


def can_run(asked: Asked) -> Iterator[Finding]:
    """What this machine can run, profile by profile."""
    runs, lacks = [], []
    for name, profile in PROFILES.items():
        try:
            if profile.device == "neuron" and asked.machine.neuron_devices < profile.chips:
                raise UserError(
                    f"{profile.chips} Neuron chips wanted, found {asked.machine.neuron_devices}"
                )
            require_runtime(profile, profile.tp, asked.machine)
            runs.append(name)
        except UserError as error:
            lacks.append(f"{name} ({str(error).splitlines()[0].rstrip('.')})")
    yield Finding(
        "can run here", "ok", ", ".join(runs) + (f"; not {', '.join(lacks)}" if lacks else "")
    )
    plan = "python -m ltx_neuron.plan --checkpoint-path FILE --profile NAME"
    yield Finding("can plan here", "ok", f"{', '.join(PROFILES)}: {plan}")
