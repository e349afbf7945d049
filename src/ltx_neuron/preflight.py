"""The options of a run, and all checks before a model loads."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.diffusion import is_diffusion_vae
from ltx_neuron.config.release import RELEASES, Release
from ltx_neuron.config.sound import SPAN_LATENTS, span_sizes
from ltx_neuron.denoise import CompiledStep
from ltx_neuron.errors import UserError, own_files, require
from ltx_neuron.host import conditions
from ltx_neuron.host.duration import duration_head_spec
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size, Stage
from ltx_neuron.models.programs import spectrogram_program_name
from ltx_neuron.plan import CoreMemory, independent_passes
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.latents import TIME_SCALE
from ltx_neuron.sampling.upscaling import upscaled
from ltx_neuron.text.inputs import cut_off
from ltx_neuron.weights import lora
from ltx_neuron.weights.model_files import spatial_scale
from ltx_neuron.workspace import Workspace

Compiled = dict[tuple[int, Stage], CompiledStep]  # by id(job) and stage
Failed = list[tuple[Job, UserError]]
_PROMPTS = "--prompt", "--negative-prompt"
_REMEMBERED_NOTES = 10_000  # jobs; a worker runs for months
INPUTS = "inputs"  # name of the check of jobs' own files


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
    thorough   whether to compare all tensors of the transformer with its config: takes a second,
               and a run needs only rank files, which were compared
    notes      of a job, which remain when its files are gone
    title_of   a job's name in messages: "line 9" in a batch
    """

    def __init__(
        self, workspace: Workspace, host: HostModels, options: RunOptions, thorough: bool = False
    ):
        self.workspace, self.host, self.options = workspace, host, options
        self.thorough = thorough
        self.notes = lru_cache(_REMEMBERED_NOTES)(partial(notes, workspace=workspace))
        self.title_of: Callable[[Job], str] = lambda job: ""
        self._said: set[str] = set()
        self.vae_stays = False
        self.vae: dict[str, dict[str, Manifest]] = {}
        self._checked_models: set[str] = set()
        self._checked_text = False

    @classmethod
    def of(cls, workspace: Workspace, options: RunOptions) -> "Preflight":
        """For commands that check the files of jobs and run none."""
        files = workspace.files
        host = HostModels(
            workspace.checkpoint_path,
            workspace.config,
            workspace.dtype,
            options.spatial_upsampler_path or files.beside("spatial"),
            options.temporal_upsampler_path or files.beside("temporal"),
            files=files,
        )
        return cls(workspace, host, options, thorough=True)

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

    def check_apart(self, jobs: list[Job], isolate: bool) -> tuple[list[Job], Failed, Compiled]:
        """As `check`. Returns the jobs that can run, if `isolate` those whose own files cannot be
        used, with their errors, and the compiled steps."""
        failed: Failed = []
        compiled = self.check(jobs, failed if isolate else None) if jobs else {}
        return [job for job in jobs if not any(job is each for each, _ in failed)], failed, compiled

    def check(self, jobs: list[Job], failed: Failed | None = None) -> Compiled:
        """Check the jobs' files and settings, then their weight sets and graphs. Loads nothing.
        Returns the compiled steps; raises UserError. failed: receives the jobs whose own files
        cannot be used, which are left out.
        """
        workspace = self.workspace
        jobs = self.check_inputs(jobs, failed)
        try:
            compiled = self._find_artifacts(jobs)
        except UserError:
            # If the files are not those of the model, raise that error instead.
            workspace.check_weights("dit")
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

    def _memories(self, jobs: list[Job], compiled: Compiled) -> list[CoreMemory]:
        """The memory that each job needs per core. Sets vae_stays."""
        vae = [manifest for several in self.vae.values() for manifest in several.values()]
        memories = []
        for job in jobs:
            steps = (compiled[id(job), stage].programs for stage in job.stages)
            stages = [[step.manifest for step in each] for each in steps]
            memories.append(
                self.workspace.compiled_memory(stages, self.options.neuron_gemma, vae, job)
            )
        self.vae_stays = all(each.vae_stays(self.workspace.profile) for each in memories)
        return memories

    def check_inputs(self, jobs: list[Job], failed: Failed | None = None) -> list[Job]:
        """Check the jobs' files and settings. Returns the jobs that can run. As `check`."""
        workspace, release = self.workspace, self.workspace.checkpoint.release
        release.check_compat(self.options.compat)
        jobs, given = [], jobs
        for job in given:
            try:
                with own_files():
                    job.check()
                    conditions.check(job)
                jobs.append(job)
            except UserError as error:
                if failed is None:
                    raise
                failed.append((job, error))
        check_distilled_loras(jobs, release)
        check_dfr(jobs)
        workspace.check_runtime()
        check_guidance_groups(jobs, workspace.profile.guidance_parallel)
        for name, check in self.file_checks(jobs).items():
            if name != INPUTS:  # checked above, job by job
                check()
        for job in jobs:
            if job.guided:
                job.resolved_guidance.check(workspace.transformer.num_layers)
        self.say(jobs)
        return jobs

    def check_files(self, jobs: list[Job], planned: bool = False) -> None:
        """Check every file that the jobs read. Raises UserError. planned: text encoder and
        upsamplers may be missing."""
        for check in self.file_checks(jobs, planned).values():
            check()

    def file_checks(
        self, jobs: list[Job], planned: bool = False
    ) -> dict[str, Callable[[], object]]:
        """The checks of all files that jobs read, by the files' names for the doctor. Each raises
        UserError, and reads headers and a tokenizer only, those of the models once."""
        workspace, head = self.workspace, self.options.duration_head_path
        kinds = {kind: flag for job in jobs for kind, flag in job.upsamplers.items()}
        if planned:
            kinds = {kind: flag for kind, flag in kinds.items() if self.host.upsampler_paths[kind]}
        checks: dict[str, Callable[[], object]] = {
            f"{kind} upsampler": partial(self._check_upsampler, kind, flag)
            for kind, flag in kinds.items()
        }
        if any(job.files for job in jobs):
            checks[INPUTS] = lambda: [(job.check_inputs(), conditions.check(job)) for job in jobs]
        checks["checkpoint"] = partial(self._check_models, jobs)
        sets = dict.fromkeys(stage.loras for job in jobs for stage in job.stages if stage.loras)
        if sets:
            checks["LoRAs"] = lambda: (
                [workspace.source("dit", loras) for loras in sets]
                + [workspace.text_loras(job) for job in jobs]
            )
        if not planned or workspace.files.beside("gemma"):
            checks["gemma"] = self._check_text_files
        if head:
            of = workspace.checkpoint, workspace.transformer
            checks["duration head"] = lambda: duration_head_spec(head, *of).build_empty()
        return checks

    def _check_upsampler(self, kind: str, flag: str) -> None:
        download = f"Download it: {self.workspace.checkpoint.release.download(kind)}"
        require(self.upsampler(kind), f"--{kind}-upsampler-path", flag, download)
        self._check_host([f"{kind}_upsampler"])
        # Of a file that was found later, beside the checkpoint; --upscale doubles.
        scale = spatial_scale(self.host.upsampler_paths[kind]) if kind == "spatial" else 2.0
        if scale != (2.0 if "--upscale" in flag else self.workspace.spatial_scale):
            raise UserError(
                f"--spatial-upsampler-path {self.host.upsampler_paths[kind]} enlarges the sides"
                f" {scale:g} times; {flag} needs the x2 file\n{download}"
            )

    def _check_models(self, jobs: list[Job]) -> None:
        workspace = self.workspace
        _ = workspace.check_weights("dit") if self.thorough else workspace.source("dit")
        models = dict.fromkeys(name for job in jobs for name in _host_models(job))
        if workspace.files.apart and "video_decoder" in models.keys() - self._checked_models:
            print(f"video decoder: {workspace.files.describe_decoder()}")
        self._check_host(models)
        if self.options.neuron_vae:
            _ = workspace.video_decoder, workspace.source("vae")
            if self.sound_on_ranks:
                _ = workspace.audio_decoder, workspace.vocoder, workspace.source("sound")

    def _check_host(self, names: Iterable[str]) -> None:
        self.host.check([name for name in names if name not in self._checked_models])
        self._checked_models.update(names)

    def say(self, jobs: list[Job]) -> None:
        """Print the jobs' notes. What is true of many jobs is one line, printed once."""
        all_notes = [(note, self.title_of(job)) for job in jobs for note in self.notes(job)]
        counts = Counter(note for note, _ in all_notes)
        for note, title in all_notes:
            if note not in self._said:
                more = f" and {counts[note] - 1:,} more" * (counts[note] > 1)
                print(f"{title}{more}: {note}" if title else note)
                self._said.add(note)

    def upsampler(self, kind: str) -> str | Path | None:
        """The path of an upsampler that a job needs. A Hub name's is downloaded."""
        paths = self.host.upsampler_paths
        paths[kind] = paths[kind] or self.workspace.files.find(kind)
        return paths[kind]

    def check_text(self, jobs: list[Job]) -> None:
        """Check the text encoder's files and, where the ranks encode, its weights and graphs.
        Raises UserError."""
        self._check_text_files()
        if self.options.neuron_gemma:
            self._find_text(jobs)

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

    def _check_text_files(self) -> None:
        workspace = self.workspace
        if self._checked_text:
            return
        _ = workspace.gemma, workspace.source("gemma3"), workspace.tokenizer
        if self.options.neuron_gemma:
            workspace.gemma.check_tensor_parallel(workspace.tp)
        else:
            workspace.host_text_encoder().check()
        self._checked_text = True

    def _find_text(self, jobs: list[Job]) -> None:
        for loras in {self.workspace.text_loras(job) for job in jobs}:
            self.workspace.weights("gemma3", loras)
        self.workspace.text_programs(self.workspace.profile.text_buckets)

    def _find_artifacts(self, jobs: list[Job]) -> Compiled:
        """The compiled step of every stage. Raises UserError for missing graphs or weight sets."""
        workspace = self.workspace
        compiled = {
            (id(job), stage): self._compiled_step(job, stage)
            for job in jobs
            for stage in job.stages
        }
        workspace.check_dit_weights(jobs)
        if self.options.neuron_gemma:
            self._find_text(jobs)
        self.vae = self._find_vae(jobs) if self.options.neuron_vae else {}
        workspace.say_tuned()
        return compiled

    def _compiled_step(self, job: Job, stage: Stage) -> CompiledStep:
        first, *others = [CompiledStep(*p) for p in self.workspace.dit_programs_for(job, stage)]
        return replace(first, tiles=(first, *others)) if others else first

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


def notes(job: Job, workspace: Workspace) -> list[str]:
    """Sentences on what changes a job's result though it is no error: inputs that are cut, padded
    or of another kind than the model knows. Printed, and written into the sidecar and the API's
    answer. Reads the job's files, so they must have been checked."""
    said = conditions.notes(job)
    if not job.prompt.strip():
        said.append("the prompt is empty: the references alone guide the video")
    if job.reference_sound and lora.are_silent(job.stages[0].loras):
        said.append("no LoRA has layers of the sound, so the voice may not be taken over")
    for loras in dict.fromkeys(stage.loras for stage in job.stages):
        said += workspace.source("dit", loras).notes if loras else []
    for number, text in enumerate(job.prompts):
        if len(text.encode()) < TEXT_TOKENS:  # a token has a byte or more, and there is a BOS
            continue
        count, lost = cut_off(workspace.tokenizer, text)
        if lost:
            flag, begins = _PROMPTS[number], " ".join(lost[:100].split())[:60]
            said.append(
                f"{flag} has {count:,} tokens and is cut to {TEXT_TOKENS:,}: the model does not"
                f" read what begins with {begins!r}"
            )
    if job.dfr and job.rendering.holds and is_diffusion_vae(workspace.config):
        said.append("--dfr: the diffusion decoder does not read the keyframes, as upstream's does")
    if job.seed == -1:
        said.append("--seed -1 is a seed like any other, not a random one")
    return said


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


def check_dfr(jobs: list[Job]) -> None:
    """Raise UserError for DFR on the checkpoint of another release."""
    for job in jobs:
        old = COMPAT[job.compat].plain_stage_2
        if job.dfr and old != (job.recipe == "dev"):
            raise UserError(
                f"--dfr: got --recipe {job.recipe} {'with' if old else 'without'} --compat, wanted"
                " --recipe distilled, or --recipe dev with --compat ltx-pipelines-1.2.0"
            )


def check_guidance_groups(jobs: list[Job], groups: int) -> None:
    """Raise UserError for more guidance groups than any stage has passes or tiles."""
    most = max((independent_passes(job, stage) for job in jobs for stage in job.stages), default=1)
    if jobs and groups > most:  # a replica may have no capability jobs
        has = f"no stage of it has more than {most}" if most > 1 else "it has neither"
        raise UserError(
            f"guidance_parallel={groups}: each group runs a pass of a guided step or a tile of a"
            f" tiled one, and {has}.\nType"
            f" --profile-set guidance_parallel={most}"
        )


def say_idle_groups(job: Job, stage: Stage, groups: int) -> None:
    """Print how many guidance groups have nothing to do in a stage, if there are any."""
    passes = independent_passes(job, stage)
    if passes < groups:
        kind = "passes" if stage.guided else "tiles"
        runs = f"{passes} {kind}" if passes > 1 else "one pass"
        idle = groups - passes
        print(f"{stage.title} has {runs} a step: {idle} of {groups} guidance groups wait")


def sound_size(job: Job) -> Size | None:
    """The size for which the decoders of a job's sound are compiled. None if the host decodes it:
    for an extended video shorter than a span, whose number of latents may be no size's."""
    if not job.extension:
        return job.of(job.stages[0]).size
    if job.audio_latents < SPAN_LATENTS:
        return None
    frames = job.extension.source_frames + job.extension.made_frames
    return replace(job.size, num_frames=TIME_SCALE * math.ceil(frames / TIME_SCALE) + 1)


def _host_models(job: Job) -> list[str]:
    """Names of the host models a job runs, besides upsamplers."""
    names = [] if job.sound_only else ["video_decoder"]
    names += [] if job.sound else ["audio_decoder", "vocoder"]  # an input sound is not decoded
    names += ["video_encoder"] if job.images or job.encoded_clips else []
    names += ["audio_encoder"] if job.sound or job.retake or job.reference_sound else []
    names += ["video_statistics"] if job.upsamplers else []
    return names
