"""LTXPipeline, the Python API."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ltx_neuron.decode_queue import UPSCALED, Clip, Result
from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.errors import FieldError, UserError, require
from ltx_neuron.files import check_outputs
from ltx_neuron.flags.resolve import retake_of, size_of
from ltx_neuron.host.media import footage
from ltx_neuron.host.video import check_output_path
from ltx_neuron.job import Job, Stage
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceVideo,
    Retake,
    SoundCondition,
)
from ltx_neuron.sampling.fields import check_type
from ltx_neuron.sampling.guidance import Guidance
from ltx_neuron.sampling.spec import RECIPES, JobSpec
from ltx_neuron.sampling.upscaling import UPSCALES
from ltx_neuron.weights.lora import Lora, WeightSet, reference_scale
from ltx_neuron.weights.tensorfile import DTYPES
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
    that frees the device.

    Threads may share a pipeline: their calls run one after another. Processes may not.
    """

    def __init__(self, engine: Engine, recipe: str):
        self.engine, self.recipe = engine, recipe
        self.loras: WeightSet = ()
        self.distilled_loras: WeightSet = ()
        self._turn = _Turn()

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
        neuron_vae: bool = False,
        recipe: str = "distilled",
        spatial_upsampler_path: str | Path | None = None,
        temporal_upsampler_path: str | Path | None = None,
        loras: list[tuple] = (),
        distilled_loras: list[tuple] = (),
        compat: str | None = None,
        profile_set: tuple[str, ...] = (),
        tuned: bool = False,
    ) -> "LTXPipeline":
        """Open a sharded and compiled checkpoint; models load at the first call.

        loras, distilled_loras  [(path, strength), ...], as merged when the weights were sharded:
                                of calls that do not say their own
        neuron_gemma            encode prompts on the ranks, else on the host's CPU
        neuron_vae              decode latents there, else on the host's CPU
        profile_set             what --profile-set takes, as in ("attention=matmul",)
        tuned                   take what python -m ltx_neuron.tune chose, as the scripts do

        Raises UserError as the scripts do, with the command to type where an artifact is missing.
        """
        _check_known("dtype", dtype, DTYPES)
        _check_known("recipe", recipe, RECIPES)
        _check_known("compat", compat, COMPAT)
        check_type("tp_degree", tp_degree, int | None)
        resolved = resolve(profile, tuple(profile_set))
        workspace = Workspace(
            checkpoint_path, resolved, artifacts_dir, resolved.degree(tp_degree), dtype, gemma_root
        )
        if tuned:
            workspace.take_tuned()
        options = RunOptions(
            neuron_gemma=neuron_gemma,
            neuron_vae=neuron_vae,
            compat=compat,
            spatial_upsampler_path=spatial_upsampler_path,
            temporal_upsampler_path=temporal_upsampler_path,
        )
        pipeline = cls(Engine(workspace, Recorder(), options), recipe)
        pipeline.loras, pipeline.distilled_loras = _loras(loras), _loras(distilled_loras)
        return pipeline

    def __enter__(self) -> "LTXPipeline":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Free the device; the next call loads again. While another thread's call runs, this waits
        for its end; in a forked process it does nothing."""
        if not self.engine.forked:
            with self._turn.taken("close"):
                self.engine.close()

    def __call__(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        image: str | Path | ImageCondition | list[ImageCondition] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        frame_rate: float | None = None,
        two_stage: bool = False,
        num_inference_steps: int | None = None,
        guidance: Guidance | None = None,
        generator: torch.Generator | None = None,
        seed: int = Job.seed,
        upscale: str | None = None,
        loras: list[tuple] | None = None,
        distilled_loras: list[tuple] | None = None,
        audio: str | Path | SoundCondition | None = None,
        video: str | Path | Retake | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        regenerate: str = Retake.regenerate,
        extend: float | None = None,
        reference: str | Path | ReferenceVideo | list[ReferenceVideo] | None = None,
        attention_mask: str | Path | AttentionMask | None = None,
        images_as_guides: bool = False,
        skip_stage_2: bool = False,
        sampler: str = Job.sampler,
        ic_loras: list[tuple] = (),
        output_type: str = "np",
        output_path: str | Path | None = None,
        callback_on_step_end: Callable[["LTXPipeline", int, float, dict], Any] | None = None,
    ) -> LTXPipelineOutput:
        """Generate one video, by default of 512x768 pixels, 121 frames at 24 a second.

        sampler               "res_2s" is HQ, of the dev recipe in two stages
        image                 a path held at frame 0, or one or several ImageConditions
        generator             a CPU generator to draw noise from; else one seeded with `seed`
        loras                 in all stages, in place of the pipeline's own; () is none
        distilled_loras       besides, in stage 2 of dev; ic_loras: in stage 1
        audio                 a sound that the video is made for
        video                 a Retake, or a path: made anew from start_time to end_time (regenerate
                              "both", "video", "audio"), or longer by `extend` seconds (< 0: before)
        reference             what ic_loras take, a path or one or several ReferenceVideos
        attention_mask        a video of how much of the references is attended to
        images_as_guides      an image at frame 0 is appended as the others are
        output_type           "np" frames and waveform, "latent" the latents, "mp4" at output_path
        callback_on_step_end  called with (self, step, sigma, {"stage": name}) after every step
        """
        said = dict(height=height, width=width, num_frames=num_frames, frame_rate=frame_rate)
        said |= dict(start_time=start_time, end_time=end_time, regenerate=regenerate, extend=extend)
        said["two_stage"] = two_stage
        job = Job(
            prompt,
            recipe=self.recipe,
            seed=_plain(seed),
            num_inference_steps=_plain(num_inference_steps),
            negative_prompt=negative_prompt,
            guidance=guidance,
            upscale=upscale,
            images=_conditions(image),
            images_as_guides=images_as_guides,
            skip_stage_2=skip_stage_2,
            sampler=sampler,
            references=_references(reference, ic_loras),
            **_given(audio, video, attention_mask, said, self._upright),
            **self._lora_fields(loras, distilled_loras, ic_loras, two_stage),
        )
        return self._generate(job, generator, output_type, output_path, callback_on_step_end)

    @property
    def _upright(self) -> bool:
        """Whether images and videos are taken as they are shown."""
        return not self.engine.compat.as_stored

    def _generate(
        self,
        job: Job,
        generator: torch.Generator | None,
        output_type: str,
        output_path: str | Path | None,
        callback_on_step_end: Callable[["LTXPipeline", int, float, dict], Any] | None,
    ) -> LTXPipelineOutput:
        self.engine.check_process()
        job = replace(job, upright=self._upright)
        _check_known("output_type", output_type, ("np", "latent", "mp4"))
        check_type("output_path", output_path, str | Path | None)
        check_type("callback_on_step_end", callback_on_step_end, Callable | None)
        _check_generator(generator)
        if output_type == "mp4":
            require(output_path, "output_path", 'output_type="mp4"', "Give output_path='out.mp4'")
            check_output_path(output_path)
            job.check()  # before its files are looked at
            inputs = self.engine.preflight.inputs([job])
            check_outputs({"output_path": Path(output_path)}, inputs)
        options = {"keep": True, "decode": output_type != "latent", "generator": generator}

        def write(clip: Clip) -> None:
            with self.engine.recorder.phase("encode_mp4"):
                clip.write_mp4(output_path)

        def on_step_end(stage: Stage, step: int) -> None:
            callback_on_step_end(self, step, stage.sigmas[step], {"stage": stage.name})

        if output_type == "mp4":
            options["write"] = write
        with self._turn.taken("call"):
            self.engine.on_step_end = callback_on_step_end and on_step_end
            (result,) = self.engine.run([job], **options)
        return _output(result, output_type, output_path)

    def _lora_fields(
        self,
        loras: list[tuple] | None,
        distilled: list[tuple] | None,
        ic: list[tuple],
        two_stage: bool,
    ) -> dict[str, WeightSet]:
        """A call's LoRAs as a Job's fields; the pipeline's own where it does not say, the distilled
        ones only where there is a stage for them."""
        own = self.distilled_loras if two_stage else ()
        return {
            "loras": self.loras if loras is None else _loras(loras),
            "stage_1_loras": _loras(ic),
            "stage_2_loras": own if distilled is None else _loras(distilled),
        }


class _Turn:
    """Which thread works with a pipeline: the others wait until it is done."""

    def __init__(self):
        self._lock, self._thread = threading.Lock(), None

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """Take a turn for a "call" or "close". UserError for the thread that has the turn: it would
        wait for itself."""
        if self._thread == threading.get_ident():
            raise UserError(
                f"{what} inside a call of the same pipeline, as in its callback: that call is not"
                " done. Do it after the call; an exception in the callback ends the call"
            )
        with self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None


def _check_known(name: str, value, known: Iterable) -> None:
    """Raise UserError for a value that is not among the known ones."""
    if value not in (names := list(known)):
        raise UserError(f"{name} {value!r} is not known; known: {', '.join(map(str, names))}")


def _plain(value):
    """Python's number for one of numpy's, which neither torch's generators nor JSON take."""
    return value.item() if isinstance(value, np.generic) else value


def _loras(given: list[tuple]) -> WeightSet:
    return tuple(Lora(Path(path), strength) for path, strength in given)


def _check_generator(generator: torch.Generator | None) -> None:
    check_type("generator", generator, torch.Generator | None)
    if generator is not None and generator.device.type != "cpu":
        raise UserError(
            f"generator is on {generator.device}; wanted one on the CPU, where noise is drawn, as"
            " in generator=torch.Generator().manual_seed(10)"
        )


def _conditions(
    image: str | Path | ImageCondition | list[ImageCondition] | None,
) -> tuple[ImageCondition, ...]:
    if isinstance(image, list | tuple):
        return tuple(image)
    if image is None or isinstance(image, ImageCondition):
        return () if image is None else (image,)
    check_type("image", image, str | Path | ImageCondition | list | None)
    return (ImageCondition(str(image)),)


def _given(
    audio: str | Path | SoundCondition | None,
    video: str | Path | Retake | None,
    mask: str | Path | AttentionMask | None,
    said: dict[str, Any],
    upright: bool,
) -> dict[str, Any]:
    """A Job's size, sound, retake and attention mask; of a video its file says the size.

    said  fields of a JobSpec
    """
    check_type("audio", audio, str | Path | SoundCondition | None)
    check_type("video", video, str | Path | Retake | None)
    check_type("attention_mask", mask, str | Path | AttentionMask | None)
    said = {name: _plain(value) for name, value in said.items()}
    check_type("extend", said["extend"], float | None)
    if said["regenerate"] == Retake.regenerate:
        said["regenerate"] = None
    path = str(video) if isinstance(video, str | Path) else None
    spec = JobSpec.model_construct(video_path=path, **said)
    try:
        retake = retake_of(spec, "video")
        if isinstance(video, Retake):
            own = {"video_path": str(video.path), "extend": video.extend or None}
            spec, retake = spec.model_copy(update=own), video
        size = size_of(spec, upright, "video")
    except FieldError as error:
        raise UserError(error.spelled(_name)) from None
    sound = SoundCondition(str(audio)) if isinstance(audio, str | Path) else audio
    mask = AttentionMask(str(mask), 1.0) if isinstance(mask, str | Path) else mask
    return {"size": size, "sound": sound, "retake": retake, "attention_mask": mask}


def _name(field: str) -> str:
    """A JobSpec's field, as a call names it."""
    return {"video_path": "video", "audio_path": "audio"}.get(field, field)


def _references(
    reference: str | Path | ReferenceVideo | list[ReferenceVideo] | None, ic_loras: list[tuple]
) -> tuple[ReferenceVideo, ...]:
    """A Job's references, scaled as the LoRAs that take them say."""
    check_type("reference", reference, str | Path | ReferenceVideo | list | tuple | None)
    if isinstance(reference, str | Path):
        frames = footage(reference, "reference").num_frames
        reference = ReferenceVideo(str(reference), 1.0, frames, *reference_scale(_loras(ic_loras)))
    if isinstance(reference, ReferenceVideo):
        reference = (reference,)
    return tuple(reference or ())


def _output(result: Result, output_type: str, output_path: str | Path | None) -> LTXPipelineOutput:
    """What a call returns for a result."""
    output = LTXPipelineOutput(frame_rate=result.frame_rate, sample_rate=result.sample_rate)
    if output_type == "np":
        output.frames, output.audio = result.frames.numpy(), result.waveform.numpy()
    elif output_type == "mp4":
        output.path = Path(output_path)
    else:
        upscaled = [UPSCALED[kind] for kind in UPSCALES.get(result.job.upscale, ())]
        output.video_latent = result.tensors[upscaled[-1] if upscaled else result.job.seen]
        output.audio_latent = result.tensors[result.job.heard]
    return output
