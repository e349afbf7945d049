"""What the host does in a warm denoising step, ours beside the Neuron peer's, in one run: the DiT
without its blocks.

    PYTHONPATH=PEER python benchmarks/host_step.py --peer

Both have the released widths and the same random bf16 weights; the transformer blocks, which a
device computes, are left out. Ours runs the engine's own loop on a rank process that holds the
step's first and last graph: whatever passes between two ends of steps and is not within those
graphs counts as the host's, so also the pipe, the process that wakes up, the check for NaN, the
report and the callback. The peer's is its preprocessing and Euler update, in the loop of its
generate script, with a device that takes no time; and once more with one that makes its 24 inputs
whole, as a device must that is handed expanded views. All run in turn, a schedule of 8 steps each;
medians count. The last line is the smallest ratio to the peer's own code alone.

The peer is NxDI pull request 63 (github.com/aws-neuron/neuronx-distributed-inference,
contrib/models/LTX-2.3, commit cd966e6): check it out yourself, for example

    git clone https://github.com/aws-neuron/neuronx-distributed-inference nxdi && cd nxdi
    git fetch origin pull/63/head && git checkout cd966e6

and name the folder of its pipeline.py: PYTHONPATH=nxdi/contrib/models/LTX-2.3/src. Nothing of it is
part of this project.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.backends import registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config import TEXT_TOKENS, transformer_config
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.engine import Engine
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.job import Job, Size
from ltx_neuron.models.programs import Program, dit_program
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.tiny import TinySizes
from ltx_neuron.tiny.config import released_config, tiny_config
from ltx_neuron.tiny.weights import DIFFUSION, random_weight, save
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import open_host_file
from ltx_neuron.weights.sharder import shard_specs, shard_weights
from ltx_neuron.weights.sharding import MODELS
from ltx_neuron.weights.tensorfile import TensorFile
from ltx_neuron.workspace import Workspace

SIZES = {"384x512x25": Size(384, 512, 25), "512x768x121": Size(512, 768, 121)}
TINY_SIZES = {"64x64x9": Size(64, 64, 9)}
DTYPE = torch.bfloat16
# what the peer's graphs are compiled for (its generate script: TEXT_SEQ, APP_BACKBONE_TEXT_SEQ)
PEER_TEXT_TOKENS = 256


class Steps(NamedTuple):
    """Host milliseconds and bytes to the device of warm steps."""

    milliseconds: list[float]
    sent: list[int]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DTYPE)


def without_blocks(config: dict):
    """ltx-core's DiT of no blocks, on the meta device."""
    import_ltx_core()
    from ltx_core.model.transformer import LTXModelConfigurator

    with torch.device("meta"):
        return LTXModelConfigurator.from_config(
            config | {"transformer": config["transformer"] | {"num_layers": 0}}
        )


def write_checkpoint(path: Path, config: dict) -> None:
    """A checkpoint of everything in the DiT but its blocks, random."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, like in without_blocks(config).state_dict().items():
        dtype = torch.float32 if "scale_shift_table" in name else DTYPE
        weights[DIFFUSION + name] = random_weight(name, like, generator).to(dtype)
    save(path, weights, {"config": json.dumps(config), "model_version": "2.3.0"})


def loaded(checkpoint: Path, config: dict) -> torch.nn.Module:
    """ltx-core's DiT of no blocks with the weights of that checkpoint."""
    model, file = without_blocks(config), TensorFile(checkpoint, "made by this script")
    weights = {name.removeprefix(DIFFUSION): file.read(name).to(DTYPE) for name in file.shapes}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


class TimedStage(StageRun):
    """A stage whose steps' device milliseconds are kept."""

    def step(self, number: int) -> float:
        self.device_ms.append(super().step(number))
        return self.device_ms[-1]


class Ours:
    """The engine's denoising loop on ranks that hold the step's head and tail."""

    def __init__(self, checkpoint: Path, folder: Path, tp: int, cases: dict[str, Job]):
        self.tp = tp
        self.cases = cases
        self.workspace = Workspace(checkpoint, resolve("cpu"), folder / "artifacts", tp, "bfloat16")
        self.engine = Engine(self.workspace, Recorder())
        source = Source(MODELS["dit"], [self.workspace.checkpoint])
        self.weights = folder / "weights"
        shard_weights(
            source, self.weights, {"model": "dit", "tp": tp}, tp, DTYPE, shard_specs(source, tp, {})
        )
        host = open_host_file(self.weights)
        self.adaln = {name: host.read(name) for name in host.shapes}
        self.buckets = {case: job.buckets[0] for case, job in cases.items()}
        for bucket in set(self.buckets.values()):
            path = folder / bucket.name
            registry.compile_program(
                lambda b=bucket: self._program(b), path, {}, DTYPE, self.workspace.profile, tp
            )
        self.programs = {
            bucket.name: Manifest(folder / bucket.name) for bucket in self.buckets.values()
        }

    def _program(self, bucket) -> Program:
        """A bucket's step without its blocks: the tail takes what the head returns."""
        config, comm = transformer_config(self.workspace.checkpoint.config), TorchDistComm(self.tp)
        whole = dit_program(config, bucket, self.tp, comm, DTYPE, blocks_per_graph=1)
        graphs = {name: whole.graphs[name] for name in ("head", "tail")}
        return Program(graphs, {"main": (("head", 0), ("tail", 0))}, whole.fields)

    def __enter__(self) -> "Ours":
        self.ranks = registry.ranks(self.workspace.profile, self.tp, self.workspace.compiler_cache)
        self.ranks.load(self.weights, self.programs, DTYPE)
        return self

    def __exit__(self, *_) -> None:
        self.ranks.close()

    def prepare(self, case: str) -> None:
        """What a stage uploads before its steps."""
        job, config = self.cases[case], self.workspace.transformer
        size = job.size
        video, audio = latents.zeros(
            size.height, size.width, size.num_frames, size.frame_rate, DTYPE
        )
        held = 1, latents.VIDEO_CHANNELS, 1, *video.shape[3:]
        images = [(image, randn(*held)) for image in job.images]
        widths = config.video.inner, config.audio.inner
        contexts = Contexts(
            *(randn(1, TEXT_TOKENS, width) for width in widths), torch.ones(1, TEXT_TOKENS), None
        )
        self.run = TimedStage(
            self.ranks,
            CompiledStep(self.buckets[case], self.programs[self.buckets[case].name]),
            config,
            DTYPE,
            self.adaln,
            COMPAT[None],
        )
        self.run.prepare(
            job, job.stages[0], [contexts], video, audio, torch.Generator().manual_seed(0), images
        )

    def steps(self) -> Steps:
        """A schedule's warm steps, each from the end of the one before it to its own end."""
        ends = []  # of every step: the time, and the bytes so far, which are all of commands
        self.run.device_ms = []
        ranks = self.ranks
        self.engine.on_step_end = lambda *_: ends.append(
            (time.perf_counter(), ranks.bytes_sent + ranks.command_bytes)
        )
        with contextlib.redirect_stderr(io.StringIO()):  # the progress bar is drawn all the same
            self.engine._steps(self.run)
        times, sent = zip(*ends, strict=True)
        walls = [(after - before) * 1e3 for before, after in pairwise(times)]
        host = [wall - device for wall, device in zip(walls, self.run.device_ms[1:], strict=True)]
        return Steps(host, [after - before for before, after in pairwise(sent)])


class Peer:
    """The peer's host work. Its pipeline.py needs no Neuron; the device it drives here returns
    velocities at once.

    `whole`: the device makes its inputs contiguous first, as one must that takes no expanded views.
    """

    def __init__(self, model: torch.nn.Module, config: dict, cases: dict[str, Job], whole: bool):
        import pipeline  # the peer's

        self.whole = whole
        self.euler = pipeline.NeuronLTX23Pipeline.denoise_step
        self.wrapper = pipeline.NeuronTransformerWrapper(
            self._device,
            model,
            text_seq=PEER_TEXT_TOKENS,
            mask_4d=True,
            compiled_text_seq=PEER_TEXT_TOKENS,
        )
        self.config, self.cases = transformer_config(config), cases

    def _device(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        if self.whole:
            inputs = [tensor.contiguous() for tensor in inputs]
        self.input_bytes.append(sum(tensor.numel() * tensor.itemsize for tensor in inputs))
        return self.velocities

    def prepare(self, case: str) -> None:
        """Initial states as its generate script makes them."""
        from ltx_core import tools

        self.job = job = self.cases[case]
        size = job.size
        shape = latents.video_latent_shape(size.height, size.width, size.num_frames)
        video = tools.VideoLatentTools(
            target_shape=tools.VideoLatentShape(1, latents.VIDEO_CHANNELS, *shape),
            fps=size.frame_rate,
            patchifier=tools.VideoLatentPatchifier(patch_size=1),
            causal_fix=False,
            scale_factors=tools.SpatioTemporalScaleFactors.default(),
        )
        frames = latents.audio_latent_frames(size.num_frames, size.frame_rate)
        audio = tools.AudioLatentTools(
            patchifier=tools.AudioPatchifier(patch_size=16),
            target_shape=tools.AudioLatentShape(
                1, latents.AUDIO_CHANNELS, frames, latents.MEL_BINS
            ),
        )
        states = [
            stream.create_initial_state(device="cpu", dtype=DTYPE) for stream in (video, audio)
        ]
        self.positions = [state.positions for state in states]
        self.samples = [randn(*state.latent.shape) for state in states]
        self.velocities = tuple(randn(*state.latent.shape) for state in states)
        self.contexts = [
            randn(1, PEER_TEXT_TOKENS, size.inner)
            for size in (self.config.video, self.config.audio)
        ]
        self.mask = torch.ones(1, PEER_TEXT_TOKENS, dtype=torch.int64)
        self.denoise_mask = None
        if job.images:
            self.denoise_mask = torch.ones(1, self.samples[0].shape[1], 1, dtype=DTYPE)
            self.denoise_mask[:, : shape[1] * shape[2]] = 0
            self.clean = self.samples[0].clone()
        self.wrapper.clear_step_cache()

    def steps(self) -> Steps:
        """A schedule's warm steps."""
        sigmas = torch.tensor(self.job.stages[0].sigmas)
        milliseconds, self.input_bytes = [], []
        for sigma, following in zip(sigmas, sigmas[1:], strict=False):
            began = time.perf_counter()
            self._step(sigma, following)
            milliseconds.append((time.perf_counter() - began) * 1e3)
        return Steps(milliseconds[1:], self.input_bytes[1:])

    def _step(self, sigma: Tensor, following: Tensor) -> None:
        from ltx_core.model.transformer.modality import Modality

        timesteps = [sigma[None, None].expand(1, sample.shape[1]) for sample in self.samples]
        if self.denoise_mask is not None:
            timesteps[0] = self.denoise_mask.squeeze(-1) * sigma
        modalities = [
            Modality(sample, sigma[None], steps, positions, context, True, self.mask.clone(), None)
            for sample, steps, positions, context in zip(
                self.samples, timesteps, self.positions, self.contexts, strict=True
            )
        ]
        with torch.no_grad():
            velocities = self.wrapper(*modalities)
        self.samples = [
            self.euler(None, sample, velocity, sigma, following)
            for sample, velocity in zip(self.samples, velocities, strict=True)
        ]
        if self.denoise_mask is not None:
            kept = self.samples[0] * self.denoise_mask + self.clean * (1 - self.denoise_mask)
            self.samples[0] = kept.to(DTYPE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer",
        action="store_true",
        help="measure the peer, whose pipeline.py is on PYTHONPATH; without it, ours alone",
    )
    parser.add_argument(
        "--tp-degree",
        type=int,
        default=1,
        help="rank processes (default %(default)s: one core for the rank)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="schedules of 8 steps of each (default %(default)s)"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny widths and one tiny size: shows that this script runs",
    )
    args = parser.parse_args()
    config = tiny_config(TinySizes()) if args.tiny else released_config()
    image = ImageCondition("a random latent", 0, 1.0)
    cases = {
        f"{name} {kind}": Job("contexts are given", size, images=images)
        for name, size in (TINY_SIZES if args.tiny else SIZES).items()
        for kind, images in (("text to video", ()), ("image to video", (image,)))
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "without-blocks.safetensors"
        write_checkpoint(checkpoint, config)
        with Ours(checkpoint, Path(folder), args.tp_degree, cases) as ours:
            sides = {"ours": ours}
            if args.peer:
                model = loaded(checkpoint, config)
                sides |= {
                    "peer": Peer(model, config, cases, whole=False),
                    "peer, inputs whole": Peer(model, config, cases, whole=True),
                }
            print(
                f"TP={args.tp_degree}, {os.cpu_count()} cores, torch {torch.__version__}, ltx-core"
                f" {version('ltx-core')}, load average {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            medians = {case: measured(case, sides, args.repeats) for case in cases}
    if not args.peer:
        print("no --peer: ours alone, no ratio")
        return
    times, sizes = (
        min(of_case["peer"][i] / of_case["ours"][i] for of_case in medians.values()) for i in (0, 1)
    )
    print(
        f"at least {times:.0f} times less time on the host and {sizes:.0f} times fewer bytes from"
        " the host than the peer"
    )


def measured(case: str, sides: dict, repeats: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds and bytes of each side, printed; the sides run in turn."""
    steps = {name: Steps([], []) for name in sides}
    for side in sides.values():
        side.prepare(case)
        side.steps()  # cold: caches, allocations, the first run of the graphs
    for _ in range(repeats):
        for name, side in sides.items():
            for values, new in zip(steps[name], side.steps(), strict=True):
                values.extend(new)
    medians = {}
    for name, (milliseconds, sent) in steps.items():
        medians[name] = statistics.median(milliseconds), statistics.median(sent)
        slow = statistics.quantiles(milliseconds, n=10)[-1]
        print(
            f"{case:28} {name:18} {medians[name][0]:9.3f} ms a step (p90 {slow:.3f}, n"
            f" {len(milliseconds)}), {medians[name][1]:,.0f} bytes",
            flush=True,
        )
    return medians


if __name__ == "__main__":
    main()
