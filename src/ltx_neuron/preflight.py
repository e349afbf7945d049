"""The options of a run, and all checks before a model loads."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config.release import RELEASES, Release
from ltx_neuron.config.sound import SPAN_LATENTS, span_sizes
from ltx_neuron.denoise import CompiledStep
from ltx_neuron.errors import UserError, require
from ltx_neuron.host import conditions
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size, Stage
from ltx_neuron.models.programs import spectrogram_program_name
from ltx_neuron.plan import CoreMemory
from ltx_neuron.sampling.latents import TIME_SCALE
from ltx_neuron.sampling.upscaling import upscaled
from ltx_neuron.text.speech import names_speech, say_no_speech
from ltx_neuron.weights import lora
from ltx_neuron.workspace import Workspace


@dataclass(frozen=True)
class RunOptions:
    """Settings of a run.

    neuron_gemma   encode prompts on the ranks, otherwise on the host's CPU
    neuron_vae     decode latents on the ranks, otherwise on the host's CPU; sound on the ranks only
                   with the profile's sound_on_ranks
    compat         a key of sampling.compat.COMPAT, the release whose numerics to follow; None: the
                   later releases
    warmup         a discarded first step per stage
    *_path         of models besides the checkpoint, or None
    cache_prompts  read contexts from the artifacts, and store new ones there
    """

    neuron_gemma: bool = False
    compat: str | None = None
    spatial_upsampler_path: str | Path | None = None
    temporal_upsampler_path: str | Path | None = None
    warmup: bool = False
    cache_prompts: bool = False
    neuron_vae: bool = False
    duration_head_path: str | Path | None = None


class Preflight:
    """Checks jobs against a workspace; their weight files and host models only once.

    vae        programs of the VAEs on the ranks for the last checked jobs
    vae_stays  whether they fit the device beside the transformer
    """

    def __init__(self, workspace: Workspace, host: HostModels, options: RunOptions):
        self.workspace, self.host, self.options = workspace, host, options
        self.vae_stays = False
        self.vae: dict[str, dict[str, Manifest]] = {}
        self._checked_models: set[str] = set()
        self._checked_weight_files = False

    def files_read(self, jobs: list[Job]) -> dict[str, Path]:
        """The files and folders that the jobs read, by flag. No output may be one of them."""
        workspace, upsamplers = self.workspace, self.host.upsampler_paths
        named = {
            "--checkpoint-path": workspace.checkpoint_path,
            "--gemma-root": workspace.gemma_root,
            "--artifacts-dir": workspace.artifacts,
            "--duration-head-path": self.options.duration_head_path,
            **{f"--{kind}-upsampler-path": path for kind, path in upsamplers.items()},
            **{f"--lora {each.path}": each.path for job in jobs for each in job.all_loras},
            **{flag: path for job in jobs for flag, path in job.files.items()},
        }
        return {name: Path(path) for name, path in named.items() if path}

    def check(self, jobs: list[Job]) -> dict[tuple[int, Stage], CompiledStep]:
        """Check the jobs' settings, then their files, then their weight sets and graphs. Loads
        nothing. Returns the compiled step by (id(job), stage); raises UserError.
        """
        workspace = self.workspace
        self.check_inputs(jobs)
        try:
            compiled = self._find_artifacts(jobs)
        except UserError:
            # If the job does not fit the device either, raise that error instead.
            for job in {tuple(job.buckets): job for job in jobs}.values():
                workspace.check_plan_fits(job, self.options.neuron_gemma)
            raise
        memories = self._memories(jobs, compiled)
        if self.vae.get("encoder") and not self.vae_stays:
            print(
                "the video encoder does not fit beside the transformer: the host encodes the input"
                " videos"
            )
            self.vae["encoder"] = {}
            memories = self._memories(jobs, compiled)
        for job, memory in zip(jobs, memories, strict=True):
            workspace.check_compiled_fits(memory, job, self.options.neuron_gemma)
        return compiled

    def _memories(
        self, jobs: list[Job], compiled: dict[tuple[int, Stage], CompiledStep]
    ) -> list[CoreMemory]:
        """The memory that each job needs per core. Sets vae_stays."""
        vae = [manifest for several in self.vae.values() for manifest in several.values()]
        memories = []
        for job in jobs:
            steps = (step for stage in job.stages for step in compiled[id(job), stage].programs)
            manifests = [step.manifest for step in steps]
            memories.append(
                self.workspace.compiled_memory(manifests, self.options.neuron_gemma, vae)
            )
        self.vae_stays = all(each.vae_stays(self.workspace.profile) for each in memories)
        return memories

    def check_inputs(self, jobs: list[Job]) -> None:
        """Check the jobs' settings and files. Raises UserError."""
        workspace, release = self.workspace, self.workspace.checkpoint.release
        release.check_compat(self.options.compat)
        for job in jobs:
            job.check()
            if job.recipe == "dev":
                job.resolved_guidance.check(workspace.transformer.num_layers)
            for kind, flag in job.upsamplers.items():
                download = f"Download it: {release.download(kind)}"
                require(self.upsampler(kind), f"--{kind}-upsampler-path", flag, download)
        check_distilled_loras(jobs, release)
        workspace.check_runtime()
        check_guidance_groups(jobs, workspace.profile.guidance_parallel)
        for job in jobs:
            conditions.check(job)
            if job.reference_audio:
                lora.say_silent(job.stages[0].loras)
            if job.voice:
                conditions.say_voice_length(job.voice)
            if (job.sound or job.reference_audio) and not names_speech(job.prompt):
                say_no_speech(conditions.SOUND if job.sound else conditions.voice_flag(job))
        models = dict.fromkeys(name for job in jobs for name in _host_models(job))
        new = models.keys() - self._checked_models
        if workspace.files.release.split and "video_decoder" in new:
            print(f"video decoder: {workspace.files.describe_decoder()}")
        self.host.check([name for name in models if name not in self._checked_models])
        self._checked_models.update(models)
        self._check_weight_files(jobs)

    def upsampler(self, kind: str) -> str | Path | None:
        """The path of an upsampler that a job needs. A Hub name's is downloaded."""
        paths = self.host.upsampler_paths
        paths[kind] = paths[kind] or self.workspace.files.find(kind)
        return paths[kind]

    def check_text(self) -> None:
        """Check the text encoder's files and, where the ranks encode, its weights and graphs.
        Raises UserError."""
        self._check_text_files()
        if self.options.neuron_gemma:
            self._find_text()

    @property
    def sound_on_ranks(self) -> bool:
        """Whether the ranks decode sound as well; they do so only in fp32."""
        asked = self.options.neuron_vae and self.workspace.profile.sound_on_ranks
        return asked and self.host.audio_dtype == torch.float32

    def decodes_on_ranks(self, latents: int) -> bool:
        """Whether the ranks decode a sound with this number of latents."""
        return spectrogram_program_name(span_sizes(latents)[0]) in self.vae.get("sound", ())

    def encodes_on_ranks(self, job: Job) -> bool:
        """Whether the ranks encode a job's videos."""
        return bool(self.vae.get("encoder") and self.workspace.encoder_tiles(job))

    def _check_weight_files(self, jobs: list[Job]) -> None:
        """Read the headers of all weight files and the tokenizer, once per engine."""
        workspace = self.workspace
        for loras in {stage.loras: None for job in jobs for stage in job.stages}:
            workspace.source("dit", loras)
        if self._checked_weight_files:
            return
        self._check_text_files()
        if self.options.neuron_vae:
            _ = workspace.video_decoder, workspace.source("vae")
            if self.sound_on_ranks:
                _ = workspace.audio_decoder, workspace.vocoder, workspace.source("sound")
        self._checked_weight_files = True

    def _check_text_files(self) -> None:
        workspace = self.workspace
        _ = workspace.gemma, workspace.source("gemma3"), workspace.tokenizer
        if self.options.neuron_gemma:
            workspace.gemma.check_tensor_parallel(workspace.tp)
        else:
            workspace.host_text_encoder().check()

    def _find_text(self) -> None:
        self.workspace.weights("gemma3")
        self.workspace.text_programs(self.workspace.profile.text_buckets)

    def _find_artifacts(self, jobs: list[Job]) -> dict[tuple[int, Stage], CompiledStep]:
        """The compiled step of every stage. Raises UserError for missing graphs or weight sets."""
        workspace = self.workspace
        compiled = {
            (id(job), stage): self._compiled_step(job, stage)
            for job in jobs
            for stage in job.stages
        }
        workspace.check_dit_weights(jobs)
        if self.options.neuron_gemma:
            self._find_text()
        self.vae = self._find_vae(jobs) if self.options.neuron_vae else {}
        workspace.say_tuned()
        return compiled

    def _compiled_step(self, job: Job, stage: Stage) -> CompiledStep:
        find, tiles = self.workspace.dit_program_for, range(len(job.stage_tiles(stage)))
        steps = tuple(CompiledStep(*find(job, stage, number)) for number in tiles)
        return replace(steps[0], tiles=steps) if steps else CompiledStep(*find(job, stage))

    def _find_vae(self, jobs: list[Job]) -> dict[str, dict[str, Manifest]]:
        """The programs of the VAEs by model. Raises UserError for missing ones."""
        workspace = self.workspace
        vae: dict[str, dict[str, Manifest]] = {"vae": {}, "encoder": {}, "sound": {}}
        seen = [job for job in jobs if not job.sound_only]
        latents = dict.fromkeys(upscaled(job.latent_shape, job.upscale) for job in seen)
        given = [job for job in jobs if workspace.encoder_tiles(job)]
        decoded = [job for job in jobs if not job.sound]  # an input sound is not decoded
        sounds = {job.audio_latents: size for job in decoded if (size := sound_size(job))}
        sounds = sounds if self.sound_on_ranks else {}
        for model, needed in zip(vae, (latents, given, sounds), strict=True):
            if needed:
                workspace.weights(model)
        for latent in latents:
            vae["vae"] |= workspace.tile_programs(latent)
        for job in given:
            vae["encoder"] |= workspace.encoder_programs(job)
        for count, size in sounds.items():
            vae["sound"] |= workspace.sound_programs(size, count)
        return vae


def check_distilled_loras(jobs: list[Job], release: Release = RELEASES[0]) -> None:
    """Raise UserError if stage 2 of dev lacks the distilled LoRA, or no stage uses a given one."""
    refining = [job for job in jobs if job.recipe == "dev" and job.stages[-1].upsampled]
    if not all(job.stage_2_loras for job in refining):
        raise UserError(
            "--recipe dev --two-stage needs --distilled-lora: stage 2 has 3 steps, too few without"
            f" the distilled LoRA\nDownload it: {release.download('lora')}"
        )
    given = [job for job in jobs if job.stage_2_loras]
    # In a batch, one-stage jobs may have it from the command's own flags.
    if any(job.recipe == "distilled" for job in given) or given and not refining:
        raise UserError(
            "--distilled-lora is for stage 2 of --recipe dev --two-stage, which no job runs; for a"
            " LoRA in every stage type --lora PATH [STRENGTH]"
        )


def check_guidance_groups(jobs: list[Job], groups: int) -> None:
    """Raise UserError for more guidance groups than any stage has passes."""
    most = max((len(job.passes) for job in jobs if job.stages[0].guided), default=1)
    if jobs and groups > most:  # a replica may have no capability jobs
        has = f"no stage of it has more than {most} passes" if most > 1 else "it has no guidance"
        raise UserError(
            f"guidance_parallel={groups}: each group runs a pass of a guided step, and {has}.\nType"
            f" --profile-set guidance_parallel={most}"
        )


def say_idle_groups(job: Job, stage: Stage, groups: int) -> None:
    """Print how many guidance groups have nothing to do in a stage, if there are any."""
    passes = len(job.passes) if stage.guided else 1
    if passes < groups:
        runs = f"{passes} passes" if passes > 1 else "one pass"
        idle = groups - passes
        print(f"{stage.title} has {runs} a step: {idle} of {groups} guidance groups wait")


def sound_size(job: Job) -> Size | None:
    """The size for which the decoders of a job's sound are compiled. None if the host decodes it:
    for an extended video shorter than a span, whose number of latents may be no size's."""
    if not job.extension:
        return job.size
    if job.audio_latents < SPAN_LATENTS:
        return None
    frames = job.extension.source_frames + job.extension.made_frames
    return replace(job.size, num_frames=TIME_SCALE * math.ceil(frames / TIME_SCALE) + 1)


def _host_models(job: Job) -> list[str]:
    """Names of the host models a job runs."""
    names = [] if job.sound_only else ["video_decoder"]
    names += [] if job.sound else ["audio_decoder", "vocoder"]  # an input sound is not decoded
    names += [f"{kind}_upsampler" for kind in job.upsamplers]
    names += ["video_encoder"] if job.images or job.encoded_clips else []
    names += ["audio_encoder"] if job.sound or job.retake or job.reference_audio else []
    names += ["video_statistics"] if job.upsamplers else []
    return names
