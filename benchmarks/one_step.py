"""One denoising step on given noise and contexts: what on_device.py compares between the device and
the CPU.

    python benchmarks/one_step.py ASKED.json

It is the last step of stage 1, to sigma 0, which leaves the model's prediction itself. The first
one, from sigma 1 to 0.994, leaves almost what it began with: what a model predicts changes that by
about as much as the rule allows it to be off.

ASKED.json has checkpoint, artifacts, size (of job.Size), profile, settings, dtype, tp, inputs
(written by `write_inputs`) and output, a file that takes the latents after the step: video (1, 128,
F, h, w) and audio (1, 8, Ta, 16).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from ltx_neuron import errors  # noqa: E402
from ltx_neuron.backends import registry  # noqa: E402
from ltx_neuron.config import TEXT_TOKENS, transformer_config  # noqa: E402
from ltx_neuron.denoise import StageRun  # noqa: E402
from ltx_neuron.files import read_json  # noqa: E402
from ltx_neuron.job import Job, Size  # noqa: E402
from ltx_neuron.profiles import resolve  # noqa: E402
from ltx_neuron.sampling import latents  # noqa: E402
from ltx_neuron.sampling.compat import COMPAT  # noqa: E402
from ltx_neuron.text.encoders import Contexts  # noqa: E402
from ltx_neuron.weights.checkpoint import Checkpoint  # noqa: E402
from ltx_neuron.weights.rankfiles import open_host_file  # noqa: E402
from ltx_neuron.workspace import Workspace  # noqa: E402


def write_inputs(path: Path, checkpoint: Path, size: Size) -> None:
    """Random noise and contexts for a step, as numbers that bf16 holds: every run then starts from
    equal ones."""
    config, stage = transformer_config(Checkpoint(checkpoint).config), size.stages()[0]
    shape = latents.video_latent_shape(stage.height, stage.width, size.num_frames)
    audio = latents.audio_latent_frames(size.num_frames, size.frame_rate)
    shapes = {
        "video": (1, shape[0] * shape[1] * shape[2], config.in_channels),
        "audio": (1, audio, config.audio_in_channels),
        "video_context": (1, TEXT_TOKENS, config.video.inner),
        "audio_context": (1, TEXT_TOKENS, config.audio.inner),
    }
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(of, generator=generator).bfloat16() for name, of in shapes.items()}, path
    )


@torch.no_grad()
def take_step(asked: dict) -> None:
    """Run the last step of stage 1 on the inputs and write the latents of both streams."""
    inputs, job = load_file(asked["inputs"]), Job("contexts are given", Size(**asked["size"]))
    profile = resolve(asked["profile"], tuple(asked["settings"]))
    workspace = Workspace(
        asked["checkpoint"], profile, asked["artifacts"], asked["tp"], asked["dtype"]
    )
    dtype, stage = workspace.dtype, job.stages[0]
    torch.set_num_threads(profile.host_threads)
    bucket, manifest = workspace.dit_program_for(job.size, stage, (), job.recipe)
    weights = workspace.dit_weights()
    host = open_host_file(weights)
    shape = latents.video_latent_shape(stage.height, stage.width, job.size.num_frames)
    frames = latents.audio_latent_frames(job.size.num_frames, job.size.frame_rate)
    contexts = Contexts(
        inputs["video_context"].to(dtype),
        inputs["audio_context"].to(dtype),
        torch.ones(1, TEXT_TOKENS),
        None,
    )
    with registry.ranks(profile, asked["tp"], workspace.compiler_cache) as ranks:
        ranks.load(weights, {bucket.name: manifest}, dtype)
        run = StageRun(
            ranks, bucket, workspace, {name: host.read(name) for name in host.shapes}, COMPAT[None]
        )
        empty = (
            torch.zeros(1, latents.VIDEO_CHANNELS, *shape, dtype=dtype),
            torch.zeros(1, latents.AUDIO_CHANNELS, frames, latents.MEL_BINS, dtype=dtype),
        )
        run.prepare(job, stage, [contexts], *empty, torch.Generator().manual_seed(0), [])
        run.video, run.audio = inputs["video"].to(dtype), inputs["audio"].to(dtype)
        run.start()
        run.step(len(stage.sigmas) - 2)
        video, audio = run.result(shape)
    save_file({"video": video.contiguous(), "audio": audio.contiguous()}, asked["output"])


if __name__ == "__main__":
    errors.run(lambda: take_step(read_json(Path(sys.argv[1]))))
