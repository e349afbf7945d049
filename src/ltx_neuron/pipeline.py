"""LTXPipeline, the Python API."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltx_neuron.decode_queue import UPSCALED, Result
from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.errors import UserError, require
from ltx_neuron.files import check_outputs
from ltx_neuron.host.video import check_output_path, write_video
from ltx_neuron.job import UPSCALES, Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditioning import ImageCondition
from ltx_neuron.sampling.guidance import Guidance
from ltx_neuron.weights.lora import Lora
from ltx_neuron.workspace import Workspace


@dataclass
class LTXPipelineOutput:
    """What a call returns. Which fields are filled depends on output_type."""

    frames: Any = None  # "np": uint8 array (N, H, W, 3)
    audio: Any = None  # "np": float32 array (2, samples)
    frame_rate: float = 0.0
    sample_rate: int = 0
    video_latent: Tensor | None = None  # "latent": (1, 128, F, h, w)
    audio_latent: Tensor | None = None  # "latent": (1, 8, Ta, 16)
    path: Path | None = None  # "mp4"


class LTXPipeline:
    """The Python API, in diffusers' manner: from_pretrained(...), then call it. A context manager
    that frees the device."""

    def __init__(self, engine: Engine, recipe: str):
        self.engine, self.recipe = engine, recipe

    @classmethod
    def from_pretrained(
        cls,
        *,
        checkpoint_path: str | Path,
        gemma_root: str | Path,
        profile: str | None = None,
        artifacts_dir: str | Path = "artifacts",
        tp_degree: int | None = None,
        dtype: str = "bfloat16",
        neuron_gemma: bool = True,
        recipe: str = "distilled",
        spatial_upsampler_path: str | Path | None = None,
        temporal_upsampler_path: str | Path | None = None,
        loras: list[tuple] = (),
        distilled_loras: list[tuple] = (),
        compat: str | None = None,
        profile_set: tuple[str, ...] = (),
    ) -> "LTXPipeline":
        """Open a sharded and compiled checkpoint; models load at the first call.

        loras, distilled_loras  [(path, strength), ...], as merged when the weights were sharded
        profile_set             what --profile-set takes, as in ("attention=matmul",)

        Raises UserError as the scripts do, with the command to type where an artifact is missing.
        """
        resolved = resolve(profile, tuple(profile_set))
        workspace = Workspace(
            checkpoint_path,
            resolved,
            artifacts_dir,
            resolved.degree(tp_degree),
            dtype,
            gemma_root,
            loras=tuple(Lora(Path(path), strength) for path, strength in loras),
            distilled_loras=tuple(Lora(Path(path), strength) for path, strength in distilled_loras),
        )
        options = RunOptions(
            neuron_gemma=neuron_gemma,
            compat=compat,
            spatial_upsampler_path=spatial_upsampler_path,
            temporal_upsampler_path=temporal_upsampler_path,
        )
        return cls(Engine(workspace, Recorder(), options), recipe)

    def __enter__(self) -> "LTXPipeline":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Free the device; the next call loads again."""
        self.engine.close()

    def __call__(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        image: str | Path | list[ImageCondition] | None = None,
        height: int = Size.height,
        width: int = Size.width,
        num_frames: int = Size.num_frames,
        frame_rate: float = Size.frame_rate,
        two_stage: bool = False,
        num_inference_steps: int | None = None,
        guidance: Guidance | None = None,
        generator: torch.Generator | None = None,
        seed: int = Job.seed,
        upscale: str | None = None,
        output_type: str = "np",
        output_path: str | Path | None = None,
        callback_on_step_end: Callable[["LTXPipeline", int, float, dict], Any] | None = None,
    ) -> LTXPipelineOutput:
        """Generate one video.

        image                 a path held at frame 0, or ImageConditions
        generator             a CPU generator to draw noise from; else one seeded with `seed`
        output_type           "np" frames and waveform, "latent" the final latents, "mp4" a file at
                              output_path
        callback_on_step_end  called with (self, step, sigma, {"stage": name}) after every step
        """
        if output_type not in ("np", "latent", "mp4"):
            raise UserError(f"output_type {output_type!r} is not known; known: np, latent, mp4")
        if output_type == "mp4":
            example = "Give output_path='out.mp4'"
            require(output_path, "output_path", 'output_type="mp4"', example)
            check_output_path(output_path)
        job = Job(
            prompt=prompt,
            size=Size(height, width, num_frames, frame_rate, two_stage),
            seed=seed,
            images=_conditions(image),
            num_inference_steps=num_inference_steps,
            negative_prompt=negative_prompt,
            recipe=self.recipe,
            guidance=guidance,
            upscale=upscale,
        )
        if output_type == "mp4":
            inputs = self.engine.preflight.inputs([job])
            check_outputs({"output_path": Path(output_path)}, inputs)
        self.engine.on_step_end = callback_on_step_end and (
            lambda stage, step: callback_on_step_end(
                self, step, stage.sigmas[step], {"stage": stage.name}
            )
        )
        decode = output_type != "latent"
        (result,) = self.engine.run([job], keep=True, decode=decode, generator=generator)
        return _output(result, output_type, output_path)


def _conditions(image: str | Path | list[ImageCondition] | None) -> tuple[ImageCondition, ...]:
    if isinstance(image, list):
        return tuple(image)
    return (ImageCondition(str(image)),) if image else ()


def _output(result: Result, output_type: str, output_path: str | Path | None) -> LTXPipelineOutput:
    """What a call returns for a result."""
    output = LTXPipelineOutput(frame_rate=result.frame_rate, sample_rate=result.sample_rate)
    if output_type == "np":
        output.frames, output.audio = result.frames.numpy(), result.waveform.numpy()
    elif output_type == "mp4":
        write_video(
            output_path, result.frames, result.frame_rate, result.waveform, result.sample_rate
        )
        output.path = Path(output_path)
    else:
        last = result.job.stages[-1].key
        upscaled = [UPSCALED[kind] for kind in UPSCALES.get(result.job.upscale, ())]
        output.video_latent = result.tensors[upscaled[-1] if upscaled else f"{last}_video"]
        output.audio_latent = result.tensors[f"{last}_audio"]
    return output
