"""LTXPipeline, the Python API."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ltx_neuron import hub
from ltx_neuron.decode import UPSCALED, Result
from ltx_neuron.durations import with_durations
from ltx_neuron.errors import FieldError, UserError, require
from ltx_neuron.files import check_outputs
from ltx_neuron.flags.resolve import (
    dubbing_of,
    reference_of,
    retake_of,
    size_of,
    voice_of,
    with_auto_duration,
)
from ltx_neuron.host.video import check_output_path
from ltx_neuron.job import Job, Stage
from ltx_neuron.preflight import RunOptions
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.resume import JobRun
from ltx_neuron.run import Engine
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
from ltx_neuron.sampling.latents import TIME_SCALE
from ltx_neuron.sampling.spec import RECIPES, JobSpec, validated
from ltx_neuron.sampling.upscaling import UPSCALES
from ltx_neuron.weights.lora import Lora, WeightSet
from ltx_neuron.weights.model_files import located, spatial_scale
from ltx_neuron.weights.tensorfile import DTYPES
from ltx_neuron.workspace import Workspace

# Types of arguments that determine a size or are read with a file.
_KINDS = {
    "extend": float | None,
    "tail_frames": int | None,
    "reference_video": str | Path | None,
    "reference_audio": str | Path | None,
    "reference_audio_max_duration": float | None,
    "identity_guidance_scale": float | None,
    "auto_duration": tuple | None,
}


@dataclass
class LTXPipelineOutput:
    """The result of a call. output_type determines which fields are set."""

    frames: Any = None  # "np": uint8 array (N, H, W, 3)
    audio: Any = None  # "np": float32 array (2, samples)
    frame_rate: float = 0.0
    sample_rate: int = 0
    video_latent: Tensor | None = None  # "latent": (1, 128, F, h, w)
    audio_latent: Tensor | None = None  # "latent": (1, 8, Ta, 16)
    path: Path | None = None  # "mp4", "wav"


class LTXPipeline:
    """The Python API, in the style of diffusers: from_pretrained(...), then call it. As a context
    manager it frees the device.

    A pipeline is thread-safe: calls are serialized. Processes cannot share one.
    """

    def __init__(self, engine: Engine, recipe: str):
        self.engine, self.recipe = engine, recipe
        self.loras: WeightSet = ()
        self.distilled_loras: WeightSet = ()
        self._lock, self._thread = threading.Lock(), None  # the thread of the current call

    @classmethod
    def from_pretrained(
        cls,
        *,
        checkpoint_path: str | Path,
        gemma_root: str | Path | None = None,
        video_vae_path: str | Path | None = None,
        audio_vae_path: str | Path | None = None,
        text_projection_path: str | Path | None = None,
        profile: str | None = None,
        artifacts_dir: str | Path = "artifacts",
        tp_degree: int | None = None,
        dtype: str = "bfloat16",
        neuron_gemma: bool = True,
        neuron_vae: bool = False,
        recipe: str = "distilled",
        spatial_upsampler_path: str | Path | None = None,
        temporal_upsampler_path: str | Path | None = None,
        duration_head_path: str | Path | None = None,
        loras: Sequence[tuple] = (),
        distilled_loras: Sequence[tuple] = (),
        compat: str | None = None,
        profile_set: tuple[str, ...] = (),
        tuned: bool = False,
    ) -> "LTXPipeline":
        """Open a sharded and compiled checkpoint; models load at the first call.

        The checkpoint, Gemma, upsamplers and LoRAs are local paths or Hugging Face Hub names,
        OWNER/REPO[@REVISION][/FILE]. Their files are downloaded. With LTX-2.5, checkpoint_path
        may also be the folder of the download. The other files default to those beside the
        transformer; with a Hub name, spatial_upsampler_path must be given.

        loras, distilled_loras  [(path, strength), ...], as merged during sharding: the defaults of
                                calls
        neuron_gemma            encode prompts on the ranks, else on the host's CPU
        neuron_vae              decode videos on the ranks, else on the host's CPU
        duration_head_path      LTX-2.5: predicts num_frames from the prompt where it is left out
        profile_set             values of --profile-set, as in ("attention=matmul",)
        tuned                   use the settings of ltx-neuron tune, as the command line does

        Raises UserError, with the command that makes missing weights and graphs.
        """
        _check_known("dtype", dtype, DTYPES)
        _check_known("recipe", recipe, RECIPES)
        _check_known("compat", compat, COMPAT)
        check_type("tp_degree", tp_degree, int | None)
        resolved = resolve(profile, tuple(profile_set))
        workspace = Workspace(
            located(checkpoint_path, recipe),
            resolved,
            artifacts_dir,
            resolved.degree(tp_degree),
            dtype,
            _located(gemma_root, "gemma"),
            video_vae_path=_located(video_vae_path, "video_vae"),
            audio_vae_path=_located(audio_vae_path, "audio_vae"),
            text_projection_path=_located(text_projection_path, "text_projection"),
        )
        workspace.compat = compat
        workspace.spatial_scale = spatial_scale(_located(spatial_upsampler_path, "spatial"))
        if tuned:
            workspace.take_tuned()
        options = RunOptions(
            neuron_gemma=neuron_gemma,
            neuron_vae=neuron_vae,
            compat=compat,
            spatial_upsampler_path=_located(spatial_upsampler_path, "spatial"),
            temporal_upsampler_path=_located(temporal_upsampler_path, "temporal"),
            duration_head_path=_located(duration_head_path, "duration_head"),
        )
        pipeline = cls(Engine(workspace, Recorder(), options), recipe)
        pipeline.loras, pipeline.distilled_loras = _loras(loras), _loras(distilled_loras)
        return pipeline

    def __enter__(self) -> "LTXPipeline":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Free the device; the next call loads the models again. Waits for another thread's current
        call. Does nothing in a forked process."""
        if not self.engine.forked:
            with self._exclusively("close"):
                self.engine.close()

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        """Hold the lock of calls. what: "call" or "close", for the error."""
        if self._thread == threading.get_ident():
            raise UserError(
                f"{what} inside a call of the same pipeline, as in its callback: that call has not"
                " finished. Do it after the call; an exception in the callback ends the call"
            )
        with self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None

    def __call__(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        image: str | Path | ImageCondition | list[ImageCondition] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        auto_duration: tuple[float, float] | None = None,
        frame_rate: float | None = None,
        two_stage: bool = False,
        num_inference_steps: int | None = None,
        guidance: Guidance | None = None,
        nag_scale: float | None = None,
        nag_alpha: float = Job.nag_alpha,
        nag_tau: float = Job.nag_tau,
        generator: torch.Generator | None = None,
        seed: int = Job.seed,
        upscale: str | None = None,
        loras: Sequence[tuple] | None = None,
        distilled_loras: Sequence[tuple] | None = None,
        audio: str | Path | SoundCondition | None = None,
        video: str | Path | Retake | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        regenerate: str = Retake.regenerate,
        extend: float | None = None,
        reference_video: str | Path | None = None,
        reference_strength: float | None = None,
        reference_audio: str | Path | None = None,
        reference_audio_max_duration: float | None = None,
        identity_guidance_scale: float | None = None,
        reference: str | Path | ReferenceVideo | list[ReferenceVideo] | None = None,
        attention_mask: str | Path | AttentionMask | None = None,
        images_as_guides: bool = False,
        skip_stage_2: bool = False,
        sound_only: bool = False,
        tail_frames: int | None = None,
        num_generated_keyframes: int | None = None,
        decode_with_keyframes: bool = False,
        sampler: str = Job.sampler,
        ic_loras: Sequence[tuple] = (),
        output_type: str = "np",
        output_path: str | Path | None = None,
        callback_on_step_end: Callable[["LTXPipeline", int, float, dict], Any] | None = None,
    ) -> LTXPipelineOutput:
        """Generate one video, by default 512x768 pixels and 121 frames at 24 fps.

        auto_duration         LTX-2.5: predict the length, between (min_seconds, max_seconds);
                              default: (1, 20) with duration_head_path and without num_frames
        sampler               "res_2s" is the HQ pipeline: the dev recipe in two stages
        nag_scale             distilled recipe: avoid negative_prompt by normalized attention
                              guidance, for example 11; 1: off
        image                 path of an image condition at frame 0, or ImageConditions
        generator             CPU generator for the noise; default: one seeded with `seed`
        loras                 for all stages; replaces the pipeline's LoRAs, () removes them
        distilled_loras       additional LoRAs in stage 2 of dev; ic_loras: in stage 1
        audio                 sound to generate the video for: a path, or a SoundCondition, whose
                              `bed` is noise in what the model hears
        video                 Retake, or path of a video: regenerate it ("both", "video", "audio")
                              from start_time to end_time, or extend it by seconds (< 0: before)
        reference_video       video to dub, of two stages: its speakers say the prompt's words; its
                              length and frame rate are the video's, and loras the dubbing LoRA;
                              reference_strength: see --reference-strength
        reference_audio       sound with the voice of the speaker, for the LoRA in ic_loras;
                              reference_audio_max_duration, identity_guidance_scale: see the flags
        reference             reference video of ic_loras: a path or ReferenceVideos
        attention_mask        video with the attention weights of the references
        images_as_guides      append an image at frame 0 like the others
        sound_only            generate no video (dev recipe); its file is a "wav"
        tail_frames           generate this many more frames, a multiple of 8, and cut them off
        num_generated_keyframes  LTX-2.5: generate this many keyframes beside the clip in stage 1;
                              decode_with_keyframes: the diffusion decoder reads them
        output_type           "np": frames and waveform, "latent": latents, "mp4": file output_path
        callback_on_step_end  called with (self, step, sigma, {"stage": name}) after every step
        """
        size = dict(height=height, width=width, num_frames=num_frames, frame_rate=frame_rate)
        size |= {"two_stage": two_stage, "tail_frames": tail_frames}
        size |= {"auto_duration": auto_duration}
        part = dict(start_time=start_time, end_time=end_time, regenerate=regenerate, extend=extend)
        sound = _condition("audio", audio, SoundCondition)
        heard = dict(
            reference_video=reference_video,
            reference_strength=reference_strength,
            reference_audio=reference_audio,
            reference_audio_max_duration=reference_audio_max_duration,
            identity_guidance_scale=identity_guidance_scale,
            sound_only=sound_only,
            audio_path=sound and str(sound.path),
        )
        recipe = self._recipe_fields(loras, distilled_loras, ic_loras, two_stage)
        job = Job(
            prompt,
            seed=_plain(seed),
            num_inference_steps=_plain(num_inference_steps),
            negative_prompt=negative_prompt,
            guidance=guidance,
            nag_scale=_plain(nag_scale),
            nag_alpha=_plain(nag_alpha),
            nag_tau=_plain(nag_tau),
            upscale=upscale,
            images=_several("image", image, ImageCondition, ImageCondition),
            sound=sound,
            references=_references(reference, ic_loras),
            attention_mask=_condition("attention_mask", attention_mask, AttentionMask),
            images_as_guides=images_as_guides,
            skip_stage_2=skip_stage_2,
            tail_frames=_plain(tail_frames),
            num_generated_keyframes=_plain(num_generated_keyframes),
            decode_with_keyframes=decode_with_keyframes,
            sampler=sampler,
            **self._sized(video, size | part | heard, recipe["loras"]),
            **recipe,
        )
        return self._generate(job, generator, output_type, output_path, callback_on_step_end)

    def _generate(
        self,
        job: Job,
        generator: torch.Generator | None,
        output_type: str,
        output_path: str | Path | None,
        callback_on_step_end: Callable[["LTXPipeline", int, float, dict], Any] | None,
    ) -> LTXPipelineOutput:
        self.engine.check_process()
        file = "wav" if job.sound_only else "mp4"
        _check_known("output_type", output_type, ("np", "latent", file))
        check_type("output_path", output_path, str | Path | None)
        check_type("callback_on_step_end", callback_on_step_end, Callable | None)
        _check_generator(generator)
        options: dict[str, Any] = {"keep": True, "decode": output_type != "latent"}
        options["resume"] = partial(JobRun, generator=generator)
        if output_type == file:
            example = f"Give output_path='out.{file}'"
            require(output_path, "output_path", f'output_type="{file}"', example)
            assert output_path
            check_output_path(output_path, job.sound_only)
            job = job.scaled(self.engine.workspace.spatial_scale)
            job.check()  # before its files are read
            inputs = self.engine.preflight.files_read([job])
            check_outputs({"output_path": (path := Path(output_path))}, inputs)
            options["write"] = lambda clip: clip.write(path, self.engine.recorder)

        def on_step_end(stage: Stage, step: int) -> None:
            assert callback_on_step_end
            callback_on_step_end(self, step, stage.sigmas[step], {"stage": stage.name})

        with self._exclusively("call"):
            self.engine.on_step_end = callback_on_step_end and on_step_end
            (result,) = self.engine.run(with_durations(self.engine, [job]), **options)
        assert isinstance(result, Result)  # a failed job raises
        return _output(result, output_type, output_path)

    def _sized(
        self, video: str | Path | Retake | None, fields: dict[str, Any], loras: WeightSet
    ) -> dict[str, Any]:
        """A call's size, and its retake, dubbed video or voice, as a Job's fields; `fields` are a
        JobSpec's, and `loras` those of all stages."""
        check_type("video", video, str | Path | Retake | None)
        fields = {name: _plain(value) for name, value in fields.items()}
        for name, kind in _KINDS.items():
            check_type(name, fields[name], kind)
        for name in ("reference_video", "reference_audio"):
            fields[name] = fields[name] and str(fields[name])
        if fields["regenerate"] == Retake.regenerate:
            fields["regenerate"] = None
        path = str(video) if isinstance(video, str | Path) else None
        spec = JobSpec.model_construct(video_path=path, **fields)
        orientation = self.engine.compat.orientation
        try:
            given = validated({name: fields[name] for name in _KINDS})
            spec = spec.model_copy(update={"auto_duration": given.auto_duration})
            retake = retake_of(spec, "video")
            if isinstance(video, Retake):
                own = {"video_path": str(video.path), "extend": video.extend or None}
                spec, retake = spec.model_copy(update=own), video
            if self.engine.options.duration_head_path:
                spec = with_auto_duration(spec)
            size = size_of(spec, orientation == "shown", "video")
            heard = {"reference_audio": voice_of(spec)} | dubbing_of(spec, size, loras)
        except FieldError as error:
            raise UserError(error.spelled(_name)) from None
        sized = {"size": size, "retake": retake, "orientation": orientation}
        sized["auto_duration"] = spec.auto_duration
        return sized | heard | {"sound_only": fields["sound_only"]}

    def _recipe_fields(
        self,
        loras: Sequence[tuple] | None,
        distilled: Sequence[tuple] | None,
        ic: Sequence[tuple],
        two_stage: bool,
    ) -> dict[str, Any]:
        """The recipe and LoRAs of a call as a Job's fields; the pipeline's are the defaults."""
        own = self.distilled_loras if two_stage else ()
        return {
            "recipe": self.recipe,
            "loras": self.loras if loras is None else _loras(loras),
            "stage_1_loras": _loras(ic),
            "stage_2_loras": own if distilled is None else _loras(distilled),
        }


def _check_known(name: str, value, known: Iterable) -> None:
    """Raise UserError for an unknown value."""
    if value not in (names := list(known)):
        raise UserError(f"{name}: unknown {value!r}; known: {', '.join(map(str, names))}")


def _plain(value):
    """A numpy number as a Python number, for torch's generators and JSON."""
    return value.item() if isinstance(value, np.generic) else value


def _located(name: str | Path | None, kind: str) -> Path | None:
    return located(name, kind) if name else None


def _loras(given: Sequence[tuple]) -> WeightSet:
    return tuple(Lora(hub.local_path(path, "lora"), strength) for path, strength in given)


def _check_generator(generator: torch.Generator | None) -> None:
    check_type("generator", generator, torch.Generator | None)
    if generator is not None and generator.device.type != "cpu":
        raise UserError(
            f"generator is on {generator.device}; wanted one on the CPU, as in"
            " generator=torch.Generator().manual_seed(10)"
        )


def _condition(name: str, value: Any, kind: Any) -> Any:
    """A condition of a kind, given as such or as a path."""
    check_type(name, value, str | Path | kind | None)
    return kind(str(value)) if isinstance(value, str | Path) else value


def _several(name: str, value: Any, kind: Any, of_path: Callable[[str], Any]) -> tuple:
    """A tuple of conditions, given as None, a path, one or several conditions of a kind."""
    check_type(name, value, str | Path | kind | list | tuple | None)
    if isinstance(value, str | Path):
        value = of_path(str(value))
    return (value,) if isinstance(value, kind) else tuple(value or ())


def _references(reference: Any, ic_loras: Sequence[tuple]) -> tuple[ReferenceVideo, ...]:
    """A Job's references. A path's reference gets the scale in the IC-LoRAs' metadata."""

    def of_path(path: str) -> ReferenceVideo:
        return reference_of(path, 1.0, _loras(ic_loras), "reference")

    return _several("reference", reference, ReferenceVideo, of_path)


def _name(field: str) -> str:
    """The argument's name for a JobSpec's field."""
    return {"video_path": "video", "audio_path": "audio"}.get(field, field)


def _output(result: Result, output_type: str, output_path: str | Path | None) -> LTXPipelineOutput:
    """A call's output for a result."""
    output = LTXPipelineOutput(
        frame_rate=result.job.output_frame_rate, sample_rate=result.sample_rate
    )
    if output_type == "np":
        frames, waveform = result.frames, result.waveform
        assert waveform is not None
        output.frames, output.audio = frames if frames is None else frames.numpy(), waveform.numpy()
    elif output_type in ("mp4", "wav"):
        assert output_path
        output.path = Path(output_path)
    else:
        upscaled = [UPSCALED[kind] for kind in UPSCALES.get(result.job.upscale, ())]
        video = result.tensors.get(upscaled[-1] if upscaled else result.job.seen)
        audio = result.tensors[result.job.heard]
        if video is not None and result.job.tail_frames:
            video = video[:, :, : (result.job.output_frames - 1) // TIME_SCALE + 1]
            audio = audio[:, :, : result.job.output_size.audio_frames]
        output.video_latent, output.audio_latent = video, audio
    return output
