"""The sections of test/device that say whether the device computes what the CPU computes."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from helpers import made_film
from tiny import make_tiny
from tiny.split import make_split

from device.bench import BF16, STEPS, WIDE, Bench, Model, doctor_flags, ltx25, tiny, wide
from device.measurements import times
from ltx_neuron.tune.trials import FACTOR, FLOOR
from ltx_neuron.tune.variant import rel_l2 as rel

# Frames of bfloat16 weights on both sides; ltx-core's own bfloat16 has 48 dB from its float32
# (benchmarks/vae_decode.md).
LEAST_PSNR = 40
# What else the ranks make -> its largest relative error. A frame or channel in the wrong place of bfloat16 latents
# leaves 10 %; a product of a float32 waveform may have an error of 1e-3 on trn2: -40 dB.
MOST = {"video_latent": 0.03, "waveform": 0.01}


def doctor(bench: Bench) -> Iterator[str]:
    """The doctor's findings and verdict; a failure where one blocks a run."""
    output = bench.run("doctor", "-m", "ltx_neuron.doctor", *doctor_flags(bench.args), codes=(0, 1))
    yield from ("```", output.strip(), "```")
    if "nothing blocks this run" not in output:
        pytest.fail("something blocks: python -m ltx_neuron.doctor says what to type", pytrace=False)


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
    words = [f"--{name.replace('_', '-')}={size}" for name, size in dataclasses.asdict(WIDE).items()]
    bench.run("wide-make", "-m", "tiny", bench.folder / "wide", *words)
    return compiles(bench, wide(bench), gemma=False)


def compiles(bench: Bench, model: Model, gemma: bool = True) -> Iterator[str]:
    target = bench.device(model)
    yield f"With {' '.join(target.settings) or 'no settings'}."
    yield bench.prepare(model, target, gemma)


def one_step(bench: Bench, model: Model) -> Iterator[str]:
    """One step by the three-way rule, and how long it takes on the device. The CPU's weights are sharded first."""
    target = bench.device(model)
    exact, _ = bench.step(model, target, "reference")
    bench.make(model, BF16, "shard_dit")
    on_cpu, _ = bench.step(model, BF16)
    on_device, result = bench.step(model, target, steps=STEPS)
    yield from three_way(on_device, on_cpu, exact, exact)
    yield ""
    yield from times(bench, model, result)


def three_way(device: dict, bf16: dict, fp32: dict, names: Iterable[str]) -> Iterator[str]:
    """A row for each tensor: its relative L2 distance from fp32 on the device and in bf16 on the CPU. A failure where
    the device's is larger than FACTOR times the CPU's plus FLOOR."""
    yield from ("| tensor | device | CPU bf16 | allowed |", "|---|---|---|---|")
    wrong = []
    for name in names:
        on_device, on_cpu = rel(device[name], fp32[name]), rel(bf16[name], fp32[name])
        allowed = FACTOR * on_cpu + FLOOR
        yield f"| {name} | {on_device:.4%} | {on_cpu:.4%} | {allowed:.4%} |"
        if not on_device <= allowed < math.inf:
            wrong.append(name)
    if wrong:
        pytest.fail(f"further from fp32 than the rule allows: {', '.join(wrong)}", pytrace=False)


def tiny_video(bench: Bench, model: Model) -> Iterator[str]:
    """Two stages through the real script: twice alike, and its text contexts by the three-way rule."""
    first, second = (bench.generate(model, bench.device(model), f"device-{n}") for n in (1, 2))
    on_cpu = {}
    for dtype in ("float32", "bfloat16"):
        target = BF16._replace(dtype=dtype)
        bench.prepare(model, target)
        on_cpu[dtype] = bench.generate(model, target, f"cpu-{dtype}")
    yield from three_way(first, on_cpu["bfloat16"], on_cpu["float32"], ("video_context", "audio_context"))
    latents = ("s1_video", "s1_audio", "s2_video", "s2_audio")
    drift = ", ".join(f"{name} {rel(first[name], on_cpu['bfloat16'][name]):.2%}" for name in latents)
    yield f"\nLatents against the CPU's in bf16 (not judged: every rounding grows over 8 and 3 steps): {drift}."
    if unequal := [name for name in first if not torch.equal(first[name], second[name])]:
        pytest.fail(f"two runs of one command differ in {', '.join(unequal)}", pytrace=False)
    yield "Two runs of the same command are equal bit for bit."


def decoded_on_ranks(bench: Bench, model: Model, *settings: str) -> Iterator[str]:
    """A video whose frames come from the ranks, against the host's of equal latents. With a film its latents do too,
    and with sound_on_ranks=true the sound."""
    target = bench.device(model)
    target = target._replace(settings=(*target.settings, *settings))
    yield bench.make(model, target, "shard_vae", "compile_vae", *["compile_dit"] * bool(model.film))
    places = {"host": (), "ranks": ("--neuron-vae",)}
    runs = (bench.generate(model, target, f"decoded-{place}", *more) for place, more in places.items())
    host, ranks = ({name: tensor.float() for name, tensor in tensors.items()} for tensors in runs)
    difference = (ranks["frames"] - host["frames"]).abs()
    psnr = 20 * math.log10(255 / max(difference.square().mean().sqrt().item(), 1e-9))
    most = f"at most {difference.max():.0f} of 255"
    yield f"Frames of the ranks against the host's: {psnr:.1f} dB, {most} (wanted: {LEAST_PSNR} dB)."
    wrong = ["frames"] if psnr < LEAST_PSNR else []
    for name in MOST.keys() & host.keys():
        error = rel(ranks[name], host[name])
        yield f"The ranks' {name} against the host's: {error:.1e} (wanted: less than {MOST[name]:.0e})."
        wrong += [] if error < MOST[name] else [name]
    if wrong:
        pytest.fail(f"the ranks give another result than the host: {', '.join(wrong)}", pytrace=False)


def clip_on_ranks(bench: Bench, model: Model) -> Iterator[str]:
    """A film that is made again as a whole: its latents are encoded, and change nothing of what is decoded."""
    model = model._replace(size=dataclasses.replace(model.size, two_stage=False), upsampler=None)
    size, path = model.size, bench.folder / f"{model.name}-film.mp4"
    model = model._replace(film=made_film(path, size.num_frames, size.height, size.width))
    # In a rehearsal on a CPU the encoder does not stay beside the transformer by itself.
    yield from decoded_on_ranks(bench, model, "resident=true", "sound_on_ranks=true")
