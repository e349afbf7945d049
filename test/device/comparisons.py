"""The sections of test/device that say whether the device computes what the CPU computes."""

import argparse
import dataclasses
import json
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

from device.bench import BF16, FP32, WIDE, Bench, Model, full, ltx25, request, tiny, wide
from device.report import cell
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.doctor.finding import Finding, verdict
from ltx_neuron.files import read_json
from ltx_neuron.format import format_bytes
from ltx_neuron.tune.trials import FACTOR, FLOOR
from ltx_neuron.tune.variant import rel_l2 as rel

# Frames of bfloat16 weights on both sides; ltx-core's own bfloat16 has 48 dB from its float32
# (benchmarks/vae_decode.md).
LEAST_PSNR = 40
# Latents of bfloat16 weights on both sides. A frame or channel in the wrong place leaves 10 %.
MOST_ENCODED = 0.03
# A waveform in float32, of which one product may have an error of 1e-3 on trn2: -40 dB.
MOST_HEARD = 0.01


def doctor_flags(args: argparse.Namespace) -> list[object]:
    """What the doctor is told of a run."""
    words = [word for setting in args.profile_set for word in ("--profile-set", setting)]
    for name in ("profile", "checkpoint_path", "gemma_root", "tp_degree", "artifacts_dir"):
        if value := getattr(args, name):
            words += [f"--{name.replace('_', '-')}", value]
    return words


def doctor(bench: Bench) -> Iterator[str]:
    """The doctor's verdict, and its findings that are not ok; a failure where one of them blocks a
    run."""
    flags = [*doctor_flags(bench.args), "--json"]
    output = bench.run("doctor", "-m", "ltx_neuron.doctor", *flags, codes=(0, 1)).output
    # Libraries may print warnings before and after the JSON.
    report, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))
    findings = [Finding(**finding) for finding in report["findings"]]
    others = [finding for finding in findings if finding.state != "ok"]
    yield f"{len(findings) - len(others)} checks are ok; {verdict(findings)}."
    if others:
        yield from ("", "| | check | |", "|---|---|---|")
    for finding in others:
        yield f"| {finding.state} | {finding.check} | {cell(finding.text)} |"
    if not report["can_run"]:
        pytest.fail("something blocks: python -m ltx_neuron.doctor says what to type")


def tiny_compiles(bench: Bench) -> Iterator[str]:
    make_tiny(bench.folder / "tiny")
    return _compiles(bench, tiny(bench))


def ltx25_compiles(bench: Bench) -> Iterator[str]:
    assets = make_split(bench.folder / "ltx25")
    assets.diffusion_vae.replace(assets.video_vae)  # the file's config selects the decoder
    return _compiles(bench, ltx25(bench))


def _compiles(bench: Bench, model: Model) -> Iterator[str]:
    settings = " ".join(bench.device(model).settings) or "no settings"
    yield f"With {settings}."
    yield sharded(bench, model)
    yield compiled(bench, model)


def wide_compiles(bench: Bench) -> Iterator[str]:
    if bench.args.skip_wide:
        pytest.skip("--skip-wide")
    # In a process of its own, which can be ended and gives its 10 GB of memory back.
    sizes = dataclasses.asdict(WIDE).items()
    words = [word for name, size in sizes for word in (f"--{name.replace('_', '-')}", size)]
    bench.run("wide-make", "-m", "tiny", bench.folder / "wide", *words)
    yield (
        f"Checkpoint of {WIDE.layers} blocks, {WIDE.video_inner} and {WIDE.audio_inner} channels: "
        f"{format_bytes(wide(bench).checkpoint.stat().st_size)}."
    )
    yield sharded(bench, wide(bench), gemma=False)
    yield compiled(bench, wide(bench), gemma=False)


def sharded(bench: Bench, model: Model, gemma: bool = True) -> str:
    seconds = bench.shard(model, bench.device(model), gemma)
    return f"Sharding for {bench.tp} ranks: {seconds:.1f} s."


def compiled(bench: Bench, model: Model, gemma: bool = True) -> str:
    dit, text = bench.compile(model, bench.device(model), gemma)
    text = f", text encoder and connectors {text:.1f} s" if gemma else ""
    return f"Compiling: DiT {dit:.1f} s{text}."


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
    """A table with a row for each tensor: its relative L2 distance from fp32 on the device and in
    bf16 on the CPU. A failure where the device's is larger than FACTOR times the CPU's plus
    FLOOR."""
    yield from ("| tensor | device | CPU bf16 | allowed |", "|---|---|---|---|")
    wrong = []
    for name in names:
        on_device = rel(device[name], fp32[name])
        on_cpu = rel(bf16[name], fp32[name])
        allowed = FACTOR * on_cpu + FLOOR
        yield f"| {name} | {on_device:.4%} | {on_cpu:.4%} | {allowed:.4%} |"
        if not on_device <= allowed < float("inf"):
            wrong.append(name)
    if wrong:
        pytest.fail(f"further from fp32 than the rule allows: {', '.join(wrong)}")


def full_step(bench: Bench) -> Iterator[str]:
    model = full(bench)
    transformer = Workspace(model.checkpoint, resolve("cpu"), model.artifacts, bench.tp, "float32").source("dit")
    need = sum(torch.Size(transformer.shape(name)).numel() for name in transformer.names) * 4
    available = bench.system.memory().get("MemAvailable", 0)
    if need > available:
        pytest.skip(
            f"the fp32 reference needs {format_bytes(need)} of host memory, {format_bytes(available)} are available"
        )
    yield from one_step(bench, model)


def tiny_video(bench: Bench, model: Model) -> Iterator[str]:
    """Two stages through the real script: twice alike, and its text contexts by the three-way
    rule."""
    device = bench.device(model)
    runs = [bench.generate(model, device, f"device-{number}") for number in (1, 2)]
    (_, first, report), (_, second, again) = runs
    seconds = (f"{each['end_to_end_seconds']:.1f} s" for each in (report, again))
    yield f"End to end {', again '.join(seconds)}."
    yield ""
    on_cpu = {}
    for target in (FP32, BF16):
        bench.shard(model, target, gemma=True)
        bench.compile(model, target, gemma=True)
        on_cpu[target] = bench.generate(model, target, f"cpu-{target.dtype}")[1]
    contexts = ("video_context", "audio_context")
    yield from three_way(first, on_cpu[BF16], on_cpu[FP32], contexts)
    names = ("s1_video", "s1_audio", "s2_video", "s2_audio")
    drift = ", ".join(f"{name} {rel(first[name], on_cpu[BF16][name]):.2%}" for name in names)
    yield ""
    yield (
        "Latents against the CPU's bf16 run from the same noise, after 8 and 3 steps (not judged:"
        f" every rounding grows over the steps): {drift}."
    )
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    if unequal:
        pytest.fail(f"two runs of one command differ in {', '.join(unequal)}")
    yield "Two runs of the same command are equal bit for bit."


def decoded_on_ranks(bench: Bench, model: Model) -> Iterator[str]:
    """A video whose frames come from the ranks, against the host's frames of equal latents."""
    target, frames = bench.device(model), {}
    sharding, compiling = bench.decoder(model, target)
    yield f"Sharding the decoder: {sharding:.1f} s; compiling it: {compiling:.1f} s."
    for name, more in (("host", ()), ("ranks", ("--neuron-vae",))):
        folder = bench.folder / f"{model.name}-frames-{name}"
        more = (*more, "--save-frames", folder)
        run, _, perf = bench.generate(model, target, f"decoded-{name}", *more)
        frames[name] = load_frames(folder)
        decoding = [p["seconds"] for p in perf["phases"] if p["name"] == "decode_video"]
        yield (
            f"Decoded by the {name}: {sum(decoding):.2f} s of it alone, a whole run"
            f" {run.seconds:.1f} s; at most a core"
            f" {format_bytes(max(run.memory.values())) if run.memory else 'not known'}."
        )
    difference = (frames["ranks"] - frames["host"]).abs()
    psnr = 20 * math.log10(255 / max(difference.square().mean().sqrt().item(), 1e-9))
    yield (
        f"Frames of the ranks against the host's: {psnr:.1f} dB, at most {difference.max():.0f} of"
        f" 255 (wanted: {LEAST_PSNR} dB)."
    )
    if psnr < LEAST_PSNR:
        pytest.fail("the ranks decode other frames than the host")


# What the ranks encode or decode -> the largest relative error of the result
PARTS = {"encoder": ("latents", MOST_ENCODED), "sound": ("waveform", MOST_HEARD)}


def part_on_ranks(bench: Bench, model: Model, part: str) -> Iterator[str]:
    """The latents of a clip by the encoder on the ranks, or the sound of some latents, against the host's."""
    target, (result, most) = bench.device(model), PARTS[part]
    name = f"{model.name}-{part}-{target.profile}-{target.dtype}"
    found = read_json(bench.scripted("on_ranks", name, target, request(model, model.size) | {"part": part}))
    seconds = {what: f"{taken:.2f} s" for what, taken in found["seconds"].items()}
    tiles = ", ".join("x".join(map(str, tile)) for tile in found.get("tiles", ()))
    yield f"Sharding: {seconds['shard']}; compiling{f' for tiles of {tiles}' if tiles else ''}: {seconds['compile']}."
    yield (
        f"By the ranks in {seconds['first']}, again in {seconds['second']}; by the host in {seconds['host']}, with its"
        " weights read."
    )
    yield f"The ranks' {result} against the host's: {found['relative']:.1e} (wanted: at most {most:.0e})."
    if not found["relative"] < most:
        pytest.fail(f"the ranks give another result than the host: {result}")


def encoded_on_ranks(bench: Bench, model: Model) -> Iterator[str]:
    return part_on_ranks(bench, model, "encoder")


def sound_on_ranks(bench: Bench, model: Model) -> Iterator[str]:
    return part_on_ranks(bench, model, "sound")


def load_frames(folder: Path) -> Tensor:
    """The PNG pictures in a folder: float32 (N, H, W, 3)."""
    pictures = [np.asarray(Image.open(path)) for path in sorted(folder.glob("frame_*.png"))]
    return torch.from_numpy(np.stack(pictures)).float()
