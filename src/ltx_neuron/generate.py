"""What generate_ltx23.py does once its flags are parsed: flags -> Job -> Pipeline -> files and the latency table."""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ltx_neuron import cli, media, report
from ltx_neuron.artifacts import code_digest
from ltx_neuron.checkpoint import write_json
from ltx_neuron.config import SUPPORTED_VERSION
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job
from ltx_neuron.pipeline import Pipeline, Result

_PACKAGES = ("torch", "ltx-core", "transformers", "safetensors", "av")


def generate(args: argparse.Namespace) -> None:
    """Make one video; raises UserError before anything loads where the flags or files do not fit."""
    recorder = report.Recorder()
    job = job_of(args)
    job.check()
    for path in (args.save_tensors, args.perf_dump_path):
        check_folder(path)
    media.check_writable(args.output_path)
    workspace = cli.workspace(args)
    pipeline = Pipeline(
        workspace, recorder, neuron_gemma=args.neuron_gemma, compat_1_0_0=args.compat is not None,
        spatial_upsampler_path=args.spatial_upsampler_path, temporal_upsampler_path=args.temporal_upsampler_path,
        warmup=args.warmup,
    )  # fmt: skip
    (result,) = pipeline.run([job])
    with recorder.phase("encode_mp4"):
        write(result, args)
    identity = {
        "checkpoint": workspace.checkpoint.fingerprint, "model_version": workspace.checkpoint.model_version,
        "config": workspace.transformer.digest, "code": code_digest(), "dtype": workspace.dtype_name,
        "host_threads": workspace.profile.host_threads, "rank_threads": workspace.profile.rank_threads(workspace.tp),
    }  # fmt: skip
    said = recorder.report(job.describe(), workspace.profile.name, workspace.tp, versions(), identity)
    write_json(args.output_path.with_suffix(".json"), sidecar(job, said))
    if args.perf_dump_path:
        recorder.write(args.perf_dump_path)
    print(report.table(said))
    print(f"video: {args.output_path}")


def job_of(args: argparse.Namespace) -> Job:
    """The job the flags describe."""
    return Job(
        prompt=args.prompt, size=cli.size(args), seed=args.seed, images=cli.images(args),
        num_inference_steps=args.num_inference_steps, negative_prompt=args.negative_prompt, recipe=cli.recipe(args),
        guidance=cli.guidance(args, SUPPORTED_VERSION), upscale=args.upscale,
    )  # fmt: skip


def check_folder(path: Path | None) -> None:
    """A file to be written needs a folder that is there or can be made."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder, wanted a file name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None


def write(result: Result, args: argparse.Namespace) -> None:
    """The MP4 and what else was asked for; each appears under its name only when whole."""
    from safetensors.torch import save_file

    args.output_path.parent.mkdir(parents=True, exist_ok=True)
    if args.save_tensors:
        partial = args.save_tensors.with_name(args.save_tensors.name + ".partial")
        save_file({name: tensor.contiguous() for name, tensor in result.tensors.items()}, partial)
        partial.replace(args.save_tensors)
    media.write_video(args.output_path, result.frames, result.frame_rate, result.waveform, result.sample_rate)
    if args.save_frames:
        media.write_frames(args.save_frames, result.frames)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def sidecar(job: Job, said: dict) -> dict:
    """What made this video: enough to make it again."""
    sigmas = {stage.name: list(stage.sigmas) for stage in job.stages}
    timings = {phase["name"]: 0.0 for phase in said["phases"]}
    for phase in said["phases"]:
        timings[phase["name"]] += phase["seconds"]
    keys = ("profile", "tp", "versions", "identity")
    return {**said["job"], "sigmas": sigmas, **{key: said[key] for key in keys}, "seconds": timings,
            "torch_threads": torch.get_num_threads()}  # fmt: skip
