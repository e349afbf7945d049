"""The sections of on_device.py that say whether the device computes what the CPU computes."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lib.bench import BF16, FP32, WIDE, Bench, Model, full, tiny, wide
from lib.sections import Failed, NotRun, rel, three_way
from ltx_neuron.format import format_bytes
from ltx_neuron.profiles import resolve
from ltx_neuron.tiny import make_tiny
from ltx_neuron.workspace import Workspace

# Frames of bfloat16 weights on both sides; ltx-core's own bfloat16 has 48 dB from its float32
# (benchmarks/vae_decode.md).
LEAST_PSNR = 40


def tiny_compiles(bench: Bench) -> list[str]:
    make_tiny(bench.folder / "tiny")
    settings = " ".join(bench.device(tiny(bench)).settings) or "no settings"
    return [f"With {settings}.", *_shard_and_compile(bench, tiny(bench), gemma=True)]


def wide_compiles(bench: Bench) -> list[str]:
    if bench.args.skip_wide:
        raise NotRun("--skip-wide")
    # In a process of its own, which can be ended and gives its 10 GB of memory back.
    sizes = dataclasses.asdict(WIDE).items()
    words = [word for name, size in sizes for word in (f"--{name.replace('_', '-')}", size)]
    bench.run("wide-make", "-m", "ltx_neuron.tiny", bench.folder / "wide", *words)
    checkpoint = wide(bench).checkpoint
    lines = [
        f"Checkpoint of {WIDE.layers} blocks, {WIDE.video_inner} and {WIDE.audio_inner} channels: "
        f"{format_bytes(checkpoint.stat().st_size)}."
    ]
    return lines + _shard_and_compile(bench, wide(bench), gemma=False)


def _shard_and_compile(bench: Bench, model: Model, gemma: bool) -> list[str]:
    return _sharded(bench, model, gemma) + _compiled(bench, model, gemma)


def _sharded(bench: Bench, model: Model, gemma: bool) -> list[str]:
    seconds = bench.shard(model, bench.device(model), gemma)
    return [f"Sharding for {bench.tp} ranks: {seconds:.1f} s."]


def _compiled(bench: Bench, model: Model, gemma: bool) -> list[str]:
    dit, text = bench.compile(model, bench.device(model), gemma)
    return [
        f"Compiling: DiT {dit:.1f} s"
        + (f", text encoder and connectors {text:.1f} s." if gemma else ".")
    ]


def full_shards(bench: Bench) -> list[str]:
    return _sharded(bench, full(bench), gemma=True)


def full_compiles(bench: Bench) -> list[str]:
    return _compiled(bench, full(bench), gemma=True)


def one_step(bench: Bench, model: Model) -> list[str]:
    """One step by the three-way rule. The CPU's runs are sharded and compiled first."""
    on_cpu = {}
    for target in (FP32, BF16):
        bench.shard(model, target, gemma=False)
        bench.compile(model, target, gemma=False)
        on_cpu[target] = bench.step(model, target)
    device = bench.step(model, bench.device(model))
    return three_way(device, on_cpu[BF16], on_cpu[FP32], ("video", "audio"))


def full_step(bench: Bench) -> list[str]:
    model = full(bench)
    transformer = Workspace(
        model.checkpoint, resolve("cpu"), model.artifacts, bench.tp, "float32"
    ).source("dit")
    need = sum(torch.Size(transformer.shape(name)).numel() for name in transformer.names) * 4
    available = bench.system.memory().get("MemAvailable", 0)
    if need > available:
        raise NotRun(
            f"the fp32 reference needs {format_bytes(need)} of host memory,"
            f" {format_bytes(available)} are available"
        )
    return one_step(bench, model)


def tiny_video(bench: Bench) -> list[str]:
    """Two stages through the real script: twice alike, and its text contexts by the three-way
    rule."""
    model = tiny(bench)
    device = bench.device(model)
    runs = [bench.generate(model, device, f"device-{number}") for number in (1, 2)]
    on_cpu = {}
    for target in (FP32, BF16):
        bench.shard(model, target, gemma=True)
        bench.compile(model, target, gemma=True)
        on_cpu[target] = bench.generate(model, target, f"cpu-{target.dtype}")[1]
    first, second = (tensors for _, tensors, _ in runs)
    lines = [
        f"End to end {runs[0][2]['end_to_end_seconds']:.1f} s, again"
        f" {runs[1][2]['end_to_end_seconds']:.1f} s."
    ]
    lines += [
        "",
        *three_way(first, on_cpu[BF16], on_cpu[FP32], ("video_context", "audio_context")),
        "",
    ]
    names = ("s1_video", "s1_audio", "s2_video", "s2_audio")
    drift = ", ".join(f"{name} {rel(first[name], on_cpu[BF16][name]):.2%}" for name in names)
    lines += [
        "Latents against the CPU's bf16 run from the same noise, after 8 and 3 steps (not judged:"
        f" every rounding grows over the steps): {drift}."
    ]
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    if unequal:
        raise Failed(f"two runs of one command differ in {', '.join(unequal)}", lines)
    return [*lines, "Two runs of the same command are equal bit for bit."]


def decoded_on_ranks(bench: Bench, model: Model) -> list[str]:
    """A video whose frames come from the ranks, against the host's frames of equal latents."""
    target, frames, lines = bench.device(model), {}, []
    sharding, compiling = bench.decoder(model, target)
    lines.append(f"Sharding the decoder: {sharding:.1f} s; compiling it: {compiling:.1f} s.")
    for name, more in (("host", ()), ("ranks", ("--neuron-vae",))):
        folder = bench.folder / f"{model.name}-frames-{name}"
        more = (*more, "--save-frames", folder)
        run, _, perf = bench.generate(model, target, f"decoded-{name}", *more)
        frames[name] = load_frames(folder)
        decoding = [p["seconds"] for p in perf["phases"] if p["name"] == "decode_video"]
        lines.append(
            f"Decoded by the {name}: {sum(decoding):.2f} s of it alone, a whole run"
            f" {run.seconds:.1f} s; at most a core"
            f" {format_bytes(max(run.memory.values())) if run.memory else 'not known'}."
        )
    difference = (frames["ranks"] - frames["host"]).abs()
    psnr = 20 * math.log10(255 / max(difference.square().mean().sqrt().item(), 1e-9))
    lines.append(
        f"Frames of the ranks against the host's: {psnr:.1f} dB, at most {difference.max():.0f} of"
        f" 255 (wanted: {LEAST_PSNR} dB)."
    )
    if psnr < LEAST_PSNR:
        raise Failed("the ranks decode other frames than the host", lines)
    return lines


def load_frames(folder: Path) -> Tensor:
    """The PNG pictures in a folder: float32 (N, H, W, 3)."""
    pictures = [np.asarray(Image.open(path)) for path in sorted(folder.glob("frame_*.png"))]
    return torch.from_numpy(np.stack(pictures)).float()
