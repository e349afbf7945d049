"""The sections of test/device that say whether the device computes what the CPU computes."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import make_tiny
from tiny.split import make_split
from torch import Tensor

from device.bench import BF16, FP32, WIDE, Bench, Model, doctor_flags, ltx25, request, tiny, wide
from ltx_neuron.files import read_json
from ltx_neuron.format import format_bytes
from ltx_neuron.tune.trials import FACTOR, FLOOR
from ltx_neuron.tune.variant import rel_l2 as rel

# Frames of bfloat16 weights on both sides; ltx-core's own bfloat16 has 48 dB from its float32
# (benchmarks/vae_decode.md).
LEAST_PSNR = 40
# What the ranks encode or decode -> the result, and its largest relative error. A frame or channel in the wrong place
# of bfloat16 latents leaves 10 %; a product of a float32 waveform may have an error of 1e-3 on trn2: -40 dB.
PARTS = {"encoder": ("latents", 0.03), "sound": ("waveform", 0.01)}


def doctor(bench: Bench) -> Iterator[str]:
    """The doctor's findings and verdict; a failure where one blocks a run."""
    output = bench.run("doctor", "-m", "ltx_neuron.doctor", *doctor_flags(bench.args), codes=(0, 1)).output
    yield from ("```", output.strip(), "```")
    if "nothing blocks this run" not in output:
        pytest.fail("something blocks: python -m ltx_neuron.doctor says what to type")


def tiny_compiles(bench: Bench) -> Iterator[str]:
    make_tiny(bench.folder / "tiny")
    return compiles(bench, tiny(bench))


def ltx25_compiles(bench: Bench) -> Iterator[str]:
    assets = make_split(bench.folder / "ltx25")
    assets.diffusion_vae.replace(assets.video_vae)  # the file's config selects the decoder
    return compiles(bench, ltx25(bench))


def wide_compiles(bench: Bench) -> Iterator[str]:
    if bench.args.skip_wide:
        pytest.skip("--skip-wide")
    # In a process of its own, which can be ended and gives its 10 GB of memory back.
    sizes = dataclasses.asdict(WIDE).items()
    words = [word for name, size in sizes for word in (f"--{name.replace('_', '-')}", size)]
    bench.run("wide-make", "-m", "tiny", bench.folder / "wide", *words)
    size = format_bytes(wide(bench).checkpoint.stat().st_size)
    yield f"Checkpoint of {WIDE.layers} blocks, {WIDE.video_inner} and {WIDE.audio_inner} channels: {size}."
    yield from compiles(bench, wide(bench), gemma=False)


def compiles(bench: Bench, model: Model, gemma: bool = True) -> Iterator[str]:
    target = bench.device(model)
    yield f"With {' '.join(target.settings) or 'no settings'}."
    yield f"Sharding for {bench.tp} ranks: {bench.shard(model, target, gemma):.1f} s."
    seconds = [f"{seconds:.1f} s" for seconds in bench.compile(model, target, gemma)]
    yield f"Compiling: DiT {', text encoder and connectors '.join(seconds)}."


def one_step(bench: Bench, model: Model) -> Iterator[str]:
    """One step by the three-way rule. The CPU's runs are sharded and compiled first."""
    on_cpu = {}
    for target in (FP32, BF16):
        bench.shard(model, target, gemma=False)
        bench.compile(model, target, gemma=False)
        on_cpu[target] = bench.step(model, target)
    device = bench.step(model, bench.device(model))
    yield from three_way(device, on_cpu[BF16], on_cpu[FP32], ("video", "audio"))


def three_way(device: dict, bf16: dict, fp32: dict, names: tuple[str, ...]) -> Iterator[str]:
    """A row for each tensor: its relative L2 distance from fp32 on the device and in bf16 on the CPU. A failure where
    the device's is larger than FACTOR times the CPU's plus FLOOR."""
    yield from ("| tensor | device | CPU bf16 | allowed |", "|---|---|---|---|")
    wrong = []
    for name in names:
        on_device, on_cpu = rel(device[name], fp32[name]), rel(bf16[name], fp32[name])
        allowed = FACTOR * on_cpu + FLOOR
        yield f"| {name} | {on_device:.4%} | {on_cpu:.4%} | {allowed:.4%} |"
        if not on_device <= allowed < float("inf"):
            wrong.append(name)
    if wrong:
        pytest.fail(f"further from fp32 than the rule allows: {', '.join(wrong)}")


def tiny_video(bench: Bench, model: Model) -> Iterator[str]:
    """Two stages through the real script: twice alike, and its text contexts by the three-way rule."""
    runs = [bench.generate(model, bench.device(model), f"device-{number}") for number in (1, 2)]
    (_, first, report), (_, second, again) = runs
    yield f"End to end {report['end_to_end_seconds']:.1f} s, again {again['end_to_end_seconds']:.1f} s."
    yield ""
    on_cpu = {}
    for target in (FP32, BF16):
        bench.shard(model, target, gemma=True)
        bench.compile(model, target, gemma=True)
        on_cpu[target] = bench.generate(model, target, f"cpu-{target.dtype}")[1]
    yield from three_way(first, on_cpu[BF16], on_cpu[FP32], ("video_context", "audio_context"))
    latents = ("s1_video", "s1_audio", "s2_video", "s2_audio")
    drift = ", ".join(f"{name} {rel(first[name], on_cpu[BF16][name]):.2%}" for name in latents)
    yield ""
    yield f"Latents against the CPU's in bf16 (not judged: every rounding grows over 8 and 3 steps): {drift}."
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    if unequal:
        pytest.fail(f"two runs of one command differ in {', '.join(unequal)}")
    yield "Two runs of the same command are equal bit for bit."


def decoded_on_ranks(bench: Bench, model: Model) -> Iterator[str]:
    """A video whose frames come from the ranks, against the host's frames of equal latents."""
    target, frames = bench.device(model), {}
    sharding, compiling = bench.make(model, target, "shard_vae", "compile_vae")
    yield f"Sharding the decoder: {sharding:.1f} s; compiling it: {compiling:.1f} s."
    for name, more in (("host", ()), ("ranks", ("--neuron-vae",))):
        folder = bench.folder / f"{model.name}-frames-{name}"
        run, _, perf = bench.generate(model, target, f"decoded-{name}", *more, "--save-frames", folder)
        frames[name] = load_frames(folder)
        decoding = sum(phase["seconds"] for phase in perf["phases"] if phase["name"] == "decode_video")
        yield f"Decoded by the {name}: {decoding:.2f} s of it alone, a whole run {run.seconds:.1f} s."
    difference = (frames["ranks"] - frames["host"]).abs()
    psnr = 20 * math.log10(255 / max(difference.square().mean().sqrt().item(), 1e-9))
    most = f"at most {difference.max():.0f} of 255"
    yield f"Frames of the ranks against the host's: {psnr:.1f} dB, {most} (wanted: {LEAST_PSNR} dB)."
    if psnr < LEAST_PSNR:
        pytest.fail("the ranks decode other frames than the host")


def part_on_ranks(bench: Bench, model: Model, part: str) -> Iterator[str]:
    """The latents of a clip by the encoder on the ranks, or the sound of some latents, against the host's."""
    target, (result, most) = bench.device(model), PARTS[part]
    name = f"{model.name}-{part}-{target.profile}-{target.dtype}"
    found = read_json(bench.scripted("on_ranks", name, target, request(model, model.size) | {"part": part}))
    yield f"Seconds: {', '.join(f'{what} {seconds:.2f}' for what, seconds in found['seconds'].items())}."
    yield f"The ranks' {result} against the host's: {found['relative']:.1e} (wanted: at most {most:.0e})."
    if not found["relative"] < most:
        pytest.fail(f"the ranks give another result than the host: {result}")


def encoded_on_ranks(bench: Bench, model: Model) -> Iterator[str]:
    return part_on_ranks(bench, model, "encoder")


def sound_on_ranks(bench: Bench, model: Model) -> Iterator[str]:
    return part_on_ranks(bench, model, "sound")


def load_frames(folder: Path) -> Tensor:
    pictures = [np.asarray(Image.open(path)) for path in sorted(folder.glob("frame_*.png"))]
    return torch.from_numpy(np.stack(pictures)).float()
