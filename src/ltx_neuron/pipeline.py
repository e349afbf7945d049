"""LTXPipeline, the Python API."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltx_neuron.decode_queue import UPSCALED
from ltx_neuron.engine import Engine
from ltx_neuron.errors import UserError, require
from ltx_neuron.host.video import check_output_path, write_video
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditioning import ImageCondition
from ltx_neuron.sampling.guidance import Guidance
from ltx_neuron.weights import lora
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
        """Open a sharded and compiled checkpoint; models load at the first call. loras: [(path,
        strength), ...].

        profile_set: what --profile-set takes, ("attention=matmul", ...).
        Raises UserError as the scripts do, with the command to type where an artifact is missing.
        """
        resolved = resolve(profile, tuple(profile_set))
        merged = [
            tuple(lora.Lora(Path(path), strength) for path, strength in given)
            for given in (loras, distilled_loras)
        ]
        workspace = Workspace(
            checkpoint_path,
            resolved,
            artifacts_dir,
            resolved.degree(tp_degree),
            dtype,
            gemma_root,
            None,
            *merged,
        )
        engine = Engine(
            workspace,
            Recorder(),
            neuron_gemma,
            COMPAT[compat],
            spatial_upsampler_path,
            temporal_upsampler_path,
        )
        return cls(engine, recipe)

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
            check_output_path(
                require(
                    output_path, "output_path", 'output_type="mp4"', "Give output_path='out.mp4'"
                )
            )
        images = image if isinstance(image, list) else [ImageCondition(str(image))] if image else []
        job = Job(
            prompt=prompt,
            size=Size(height, width, num_frames, frame_rate, two_stage),
            seed=seed,
            images=tuple(images),
            num_inference_steps=num_inference_steps,
            negative_prompt=negative_prompt,
            recipe=self.recipe,
            guidance=guidance,
            upscale=upscale,
        )
        callback = callback_on_step_end
        self.engine.on_step_end = callback and (
            lambda s, i: callback(self, i, s.sigmas[i], {"stage": s.name})
        )
        (result,) = self.engine.run(
            [job], keep=True, decode=output_type != "latent", generator=generator
        )
        output = LTXPipelineOutput(frame_rate=result.frame_rate, sample_rate=result.sample_rate)
        if output_type == "latent":
            last = "s2" if two_stage else "s1"
            video = next(
                (UPSCALED[k] for k in ("temporal", "spatial") if upscale in (k, "both")),
                f"{last}_video",
            )
            output.video_latent, output.audio_latent = (
                result.tensors[video],
                result.tensors[f"{last}_audio"],
            )
        elif output_type == "np":
            output.frames, output.audio = result.frames.numpy(), result.waveform.numpy()
        else:
            write_video(
                output_path, result.frames, result.frame_rate, result.waveform, result.sample_rate
            )
            output.path = Path(output_path)
        return output
