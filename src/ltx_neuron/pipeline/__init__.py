"""LTXPipeline, the Python API."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any

import torch
from PIL import Image

from ltx_neuron import hub
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.decode import UPSCALED, Result
from ltx_neuron.engine.outputs import JobRun, check_output_path
from ltx_neuron.engine.run import Engine, with_durations
from ltx_neuron.errors import FieldError, UserError, require
from ltx_neuron.files import check_outputs
from ltx_neuron.job import Job, Stage
from ltx_neuron.pipeline.diffusers import (
    DiffusersWords,
    LTXPipelineOutput,
    StepValues,
    unknown_word,
)
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceVideo,
    Retake,
    SoundCondition,
    WeightedFile,
)
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.sampling.rules import GUIDANCE
from ltx_neuron.sampling.shapes import TIME_SCALE, UPSCALES
from ltx_neuron.sampling.spec import RECIPES, JobFields, LoraFile
from ltx_neuron.weights.model_files import located, spatial_scale
from ltx_neuron.weights.tensorfile import DTYPES

# Arguments of a call with another name than the job's field.
_ARGUMENTS = {
    "video_path": "video",
    "audio_path": "audio",
    "video_conditioning": "reference",
    "conditioning_attention_mask": "attention_mask",
    "lora": "loras",
    "ic_lora": "ic_loras",
    "distilled_lora": "distilled_loras",
}


class LTXPipeline(DiffusersWords):
    """The Python API, in the style of diffusers: from_pretrained(...), then call it. As a context
    manager it frees the device. docs/python.md compares the words of both.

    A pipeline is thread-safe: calls are serialized. Processes cannot share one.
    """

    def __init__(self, engine: Engine, recipe: str):
        self.engine, self.recipe = engine, recipe
        self.loras: Sequence[tuple] = ()
        self.distilled_loras: Sequence[tuple] = ()
        self._lock, self._thread = threading.Lock(), None  # the thread of the current call

    @classmethod
    def from_pretrained(
        cls,
        checkpoint_path: str | Path,
        *,
        gemma_root: str | Path | None = None,
        video_vae_path: str | Path | None = None,
        audio_vae_path: str | Path | None = None,
        text_projection_path: str | Path | None = None,
        profile: str | None = None,
        artifacts_dir: str | Path = "artifacts",
        tp_degree: int | None = None,
        dtype: str | torch.dtype = "bfloat16",
        torch_dtype: str | torch.dtype | None = None,
        neuron_gemma: bool = False,
        neuron_vae: bool = False,
        recipe: str = "distilled",
        spatial_upsampler_path: str | Path | None = None,
        temporal_upsampler_path: str | Path | None = None,
        duration_head_path: str | Path | None = None,
        loras: Sequence[tuple] = (),
        distilled_loras: Sequence[tuple] = (),
        compat: str | None = None,
        profile_set: tuple[str, ...] = (),
        tuned: bool = True,
        **unknown: Any,
    ) -> "LTXPipeline":
        """Open a sharded and compiled checkpoint; models load at the first call.

        The checkpoint, Gemma, upsamplers and LoRAs are local paths or Hugging Face Hub names,
        OWNER/REPO[@REVISION][/FILE]. Their files are downloaded. With LTX-2.5, checkpoint_path
        may also be the folder of the download. The other files default to those beside the
        transformer; with a Hub name, spatial_upsampler_path must be given.

        torch_dtype             diffusers' name of dtype
        loras, distilled_loras  [(path, strength), ...], as merged during sharding: the defaults of
                                calls
        neuron_gemma            encode prompts on the ranks, else on the host's CPU
        neuron_vae              decode videos on the ranks, else on the host's CPU
        duration_head_path      LTX-2.5: predicts num_frames from the prompt where it is left out
        profile_set             values of --profile-set, as in ("attention=matmul",)
        tuned                   use the settings of ltx-neuron tune, as the command line does

        Raises UserError, with the command that makes missing weights and graphs, and TypeError for
        an unknown argument, with the nearest one.
        """
        for word in unknown:
            known = signature(cls.from_pretrained).parameters
            raise TypeError(f"from_pretrained: {unknown_word(word, known)}")
        dtype = str(torch_dtype or dtype).removeprefix("torch.")
        _check_known("dtype", dtype, DTYPES)
        _check_known("recipe", recipe, RECIPES)
        _check_known("compat", compat, COMPAT)
        _check_kind("tp_degree", tp_degree, int)
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
        pipeline.engine.progress = True  # bars in a notebook too, as diffusers has them
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
        prompt: str | list[str],
        *,
        image: str | Path | Image.Image | ImageCondition | list[ImageCondition] | None = None,
        audio: str | Path | SoundCondition | None = None,
        video: str | Path | Retake | None = None,
        reference: str | Path | ReferenceVideo | list[ReferenceVideo] | None = None,
        attention_mask: str | Path | AttentionMask | None = None,
        guidance: Guidance | None = None,
        loras: Sequence[tuple] | None = None,
        distilled_loras: Sequence[tuple] | None = None,
        ic_loras: Sequence[tuple] = (),
        generator: torch.Generator | list[torch.Generator] | None = None,
        num_videos_per_prompt: int = 1,
        output_type: str = "pil",
        output_path: str | Path | None = None,
        return_dict: bool = True,
        callback_on_step_end: Callable[["LTXPipeline", int, float, dict], Any] | None = None,
        **fields: Any,
    ) -> LTXPipelineOutput | tuple:
        """Generate a video for each prompt, by default 512x768 pixels and 121 frames at 24 fps.

        image                 image condition at frame 0: a path or a PIL image; or ImageConditions,
                              whose path may be a PIL image too
        audio                 sound to generate the video for: a path, or a SoundCondition, whose
                              `bed` is noise in what the model hears
        video                 Retake, or path of a video: regenerate it from start_time to end_time,
                              or extend it by seconds (< 0: before)
        reference             reference video of ic_loras: a path or ReferenceVideos
        attention_mask        video with the attention weights of the references
        loras                 for all stages; replaces the pipeline's LoRAs, () removes them
        distilled_loras       additional LoRAs in stage 2 of dev; ic_loras: in stage 1
        generator             CPU generator for the noise of all videos, or one a video; default:
                              seeded with `seed`, and seed + 1, seed + 2, ... for the others
        output_type           "pil", "np" or "pt": form of the frames, with the sound; "latent":
                              latents, "mp4": file output_path, "wav": that of sound_only
        return_dict           False: the tuple (frames, audio)
        callback_on_step_end  called after a step with (self, step, timestep, callback_kwargs):
                              timestep is 1000 sigma, callback_kwargs has "stage" and "sigma"
        fields                other settings, named as the flags of `ltx-neuron generate`: height,
                              width, num_frames, seed=10, two_stage=True, negative_prompt, upscale,
                              nag_scale, sampler="res_2s", reference_audio, tail_frames, ...
        """
        known = JobFields.model_fields.keys() - {*_ARGUMENTS, "recipe"}
        for word in sorted(fields.keys() - known):
            raise TypeError(unknown_word(word, {*known, *signature(self.__call__).parameters}))
        if distilled_loras is None:
            distilled_loras = self.distilled_loras if fields.get("two_stage") else ()
        with ExitStack() as folders:
            values = {
                **fields,
                "image": _images(image, folders),
                "lora": _loras(self.loras if loras is None else loras),
                "distilled_lora": _loras(distilled_loras),
                "ic_lora": _loras(ic_loras),
                "video_conditioning": _weighted(reference, ReferenceVideo),
                "conditioning_attention_mask": _weighted(attention_mask, AttentionMask),
                **_sound(audio),
                **_video(video),
                **_guidance(guidance, audio is not None, bool(fields.get("sound_only"))),
            }
            jobs = self._jobs(prompt, num_videos_per_prompt, values)
            output = self._generate(jobs, generator, output_type, output_path, callback_on_step_end)
        return output if return_dict else (output.frames, output.audio)

    def _jobs(self, prompt: Any, copies: int, values: dict[str, Any]) -> list[Job]:
        """The jobs of a call: `copies` of every prompt, whose seeds count up."""
        prompts = prompt if isinstance(prompt, list | tuple) else [prompt]
        if not prompts or type(copies) is not int or copies < 1:
            counts = f"got {len(prompts)} prompts, num_videos_per_prompt={copies!r}"
            raise UserError(f"{counts}; wanted at least one of each")
        jobs = []
        for text in (text for text in prompts for _ in range(copies)):
            seed = {"seed": jobs[0].seed + len(jobs)} if jobs else {}
            jobs.append(self._job(**values | {"prompt": text} | seed))
        return jobs

    def _job(self, **values: Any) -> Job:
        """The job of a call's values, by field. Raises UserError with the arguments' names."""
        values |= {name: str(x) for name, x in values.items() if isinstance(x, Path)}
        try:
            job = Job.validated({"recipe": self.recipe} | values, strict=True)
            job = job.replaced(orientation=self.engine.compat.orientation)
            if self.engine.options.duration_head_path:
                job = job.with_auto_duration()
            job.check_rules()
            job = job.with_upscaling()
            _ = job.size  # reads the files
        except FieldError as error:
            raise UserError(error.render(lambda field: _ARGUMENTS.get(field, field))) from None
        return job

    def _generate(
        self,
        jobs: list[Job],
        generator: torch.Generator | list[torch.Generator] | None,
        output_type: str,
        output_path: str | Path | None,
        callback_on_step_end: Callable[["LTXPipeline", int, float, dict], Any] | None,
    ) -> LTXPipelineOutput:
        self.engine.check_process()
        file = "wav" if jobs[0].sound_only else "mp4"
        forms = () if jobs[0].media.hdr else ("pil", "np", "pt")  # of 8 bits
        latent = ["latent"] * (not jobs[0].windows)  # which overlap
        _check_known("output_type", output_type, (*forms, *latent, file))
        _check_kind("output_path", output_path, str, Path)
        if not (callback_on_step_end is None or callable(callback_on_step_end)):
            raise UserError(
                f"callback_on_step_end: got {callback_on_step_end!r}, wanted a function or None"
            )
        generators = iter(_generators(generator, len(jobs)))
        options: dict[str, Any] = {"keep": True, "decode": output_type != "latent"}
        options["resume"] = lambda job: JobRun(job, generator=next(generators))
        path = None
        if output_type == file:
            example = f"Give output_path='out.{file}'"
            require(output_path, "output_path", f'output_type="{file}"', example)
            assert output_path
            path, (job, *others) = Path(output_path), jobs
            if others:
                raise UserError(
                    f"output_path: got one path for {len(jobs)} videos. Leave out output_type and"
                    f" output_path, and type result.save({str(path)!r}): it numbers the files"
                )
            check_output_path(path, job.sound_only)
            jobs = [job := job.scaled(self.engine.workspace.spatial_scale)]
            job.check()  # before its files are read
            check_outputs({"output_path": path}, self.engine.preflight.files_read(jobs))
            options["write"] = lambda clip: clip.write(path, self.engine.recorder)

        def on_step_end(stage: Stage, step: int) -> None:
            assert callback_on_step_end
            sigma = stage.sigmas[step]
            values = StepValues(stage=stage.name, sigma=sigma)
            callback_on_step_end(self, step, 1000 * sigma, values)

        with self._exclusively("call"):
            self.engine.on_step_end = callback_on_step_end and on_step_end
            run = self.engine.run(with_durations(self.engine, jobs), **options)
            results = [_trimmed(result, output_type == "latent") for result in run]
        return LTXPipelineOutput(output_type, results, path)


def _check_known(name: str, value, known: Iterable) -> None:
    if value not in (names := list(known)):
        raise UserError(f"{name}: unknown {value!r}; known: {', '.join(map(str, names))}")


def _check_kind(name: str, value: Any, *kinds: type) -> None:
    """Raise UserError for a value of another kind; None is of every kind."""
    if isinstance(value, bool) or not isinstance(value, (*kinds, NoneType)):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{name}: got {value!r}, wanted {wanted}")


def _located(name: str | Path | None, kind: str) -> Path | None:
    return located(name, kind) if name else None


def _generators(generator: Any, count: int) -> list[torch.Generator | None]:
    """The generator of each of `count` videos. Raises UserError unless all are on the CPU."""
    generators = generator if isinstance(generator, list) else [generator] * count
    for one in generators:
        _check_kind("generator", one, torch.Generator)
        if one is not None and one.device.type != "cpu":
            raise UserError(
                f"generator is on {one.device}; wanted one on the CPU, as in"
                " generator=torch.Generator().manual_seed(10)"
            )
    if len(generators) != count:
        raise UserError(f"generator: got {len(generators)} for {count} videos; wanted one a video")
    return generators


def _loras(files: Sequence[tuple]) -> tuple[LoraFile, ...]:
    """LoRAs of paths or Hub names, which are downloaded."""
    return tuple(LoraFile(str(hub.local_path(path, "lora")), scale) for path, scale in files)


def _several(value: Any, kind: Any) -> tuple:
    """A tuple of conditions, from None, a file, or one or several conditions of a kind."""
    if isinstance(value, str | Path | Image.Image):
        value = kind(value if isinstance(value, Image.Image) else str(value))
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


def _images(value: Any, folders: ExitStack) -> tuple:
    """Image conditions. PIL images are written into temporary folders."""
    conditions = [*_several(value, ImageCondition)]
    for number, condition in enumerate(conditions):
        if isinstance(picture := getattr(condition, "path", None), Image.Image):
            folder = folders.enter_context(TemporaryDirectory(prefix="ltx-neuron-"))
            picture.save(path := Path(folder, "image.tiff"))  # takes all modes and the profile
            conditions[number] = replace(condition, path=path)
    return tuple(conditions)


def _weighted(value: Any, kind: Any) -> tuple:
    """Files with their strengths, as `_several`."""
    if isinstance(value, str | Path):
        return (WeightedFile(str(value), 1.0),)
    return tuple(
        WeightedFile(str(file.path), file.strength) if isinstance(file, kind) else file
        for file in _several(value, kind)
    )


def _sound(audio: Any) -> dict[str, Any]:
    if not isinstance(audio, SoundCondition):
        return {"audio_path": audio}
    return {
        "audio_path": str(audio.path),
        "audio_start_time": audio.start_time,
        "audio_max_duration": audio.max_duration,
        "audio_bed": audio.bed,
    }


def _video(video: Any) -> dict[str, Any]:
    """The fields of a video to retake, in place of the call's own."""
    if not isinstance(video, Retake):
        return {"video_path": video}
    if video.extend:
        return {"video_path": str(video.path), "extend": video.extend}
    part = {"start_time": video.start_time, "end_time": video.end_time}
    return part | {"video_path": str(video.path), "regenerate": video.regenerate}


def _guidance(guidance: Guidance | None, sound: bool, sound_only: bool) -> dict[str, Any]:
    """The fields of a guidance. A given sound and an absent picture have none."""
    _check_kind("guidance", guidance, Guidance)
    fields = {}
    for stream, names, absent in zip(
        guidance.streams if guidance else (), GUIDANCE, (sound_only, sound), strict=False
    ):
        if not (absent and stream == StreamGuidance()):
            fields |= dict(zip(names, vars(stream).values(), strict=True))
    if sound_only and fields.get("v2a_guidance_scale") == StreamGuidance.modality_scale:
        del fields["v2a_guidance_scale"]  # off, as without a picture
    return fields


def _trimmed(result: Any, latent: bool) -> Result:
    """A result with its frames and waveform alone, or with its latents, "video" and "audio"."""
    kept = {name: result.tensors.get(name) for name in ("frames", "waveform")}
    if latent:
        upscaled = [UPSCALED[kind] for kind in UPSCALES.get(result.job.upscale, ())]
        video = result.tensors.get(upscaled[-1] if upscaled else result.job.video_key)
        audio = result.tensors.get(result.job.audio_key)
        if video is not None and result.job.tail_frames:
            video = video[:, :, : (result.job.output_frames - 1) // TIME_SCALE + 1]
            audio = audio[:, :, : result.job.output_size.audio_frames]
        kept = {"video": video, "audio": audio}
    return replace(result, tensors={name: x for name, x in kept.items() if x is not None})
