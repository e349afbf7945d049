"""All checks before a model loads."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import RunOptions, Workspace, needs, sound_on_ranks
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.diffusion import EMBEDDING, is_diffusion_vae
from ltx_neuron.config.release import RELEASES, Release
from ltx_neuron.config.sound import span_sizes
from ltx_neuron.denoise import CompiledStep
from ltx_neuron.errors import UserError, own_files, require
from ltx_neuron.host import input_files
from ltx_neuron.host.duration import duration_head_spec
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Stage
from ltx_neuron.models.programs import program_name
from ltx_neuron.plan import (
    CoreMemory,
    check_fits,
    compiled_activations,
    compiled_tile,
    does_not_fit,
    independent_passes,
)
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.text.inputs import cut_off
from ltx_neuron.weights import lora
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.weights.model_files import spatial_scale
from ltx_neuron.weights.rankfiles import rank_path

Compiled = dict[tuple[int, Stage], CompiledStep]  # by id(job) and stage
Failed = list[tuple[Job, UserError]]
_PROMPTS = "--prompt", "--negative-prompt"
_REMEMBERED_NOTES = 10_000  # jobs; a worker runs for months
INPUTS = "inputs"  # name of the check of jobs' own files


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
        self._printed: set[str] = set()
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
            **{f"--lora {lora.path}": lora.path for job in jobs for lora in job.all_loras},
            **{flag: path for job in jobs for flag, path in job.files.items()},
        }
        return {name: Path(path) for name, path in named.items() if path}

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
            build.check_weights(workspace, "dit")
            # If the job does not fit the device either, raise that error instead.
            check_plans_fit(workspace, jobs, self.options.neuron_gemma)
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
            self._check_fits(memory, job)
        return compiled

    def _memories(self, jobs: list[Job], compiled: Compiled) -> list[CoreMemory]:
        """The memory that each job needs per core. Sets vae_stays."""
        vae = [manifest for programs in self.vae.values() for manifest in programs.values()]
        memories = []
        for job in jobs:
            steps = (compiled[id(job), stage].programs for stage in job.stages)
            stages = [[step.manifest for step in tiles] for tiles in steps]
            memories.append(compiled_memory(self.workspace, stages, vae, job, self.options))
        self.vae_stays = all(memory.vae_stays(self.workspace.profile) for memory in memories)
        return memories

    def _check_fits(self, memory: CoreMemory, job: Job) -> None:
        """Raise UserError if a generation does not fit by its compiled_memory. Exports nothing."""
        workspace, profile = self.workspace, self.workspace.profile
        limit, needed = profile.memory_bytes_per_core, memory.needed(profile)
        if limit is not None and needed > limit:
            check_plans_fit(workspace, [job], self.options.neuron_gemma)  # names a size that fits
            advice = "Type a smaller size, a larger --tp-degree, or --dtype bfloat16"
            raise does_not_fit(profile, job.size, workspace.tp, needed, advice)

    def check_inputs(self, jobs: list[Job], failed: Failed | None = None) -> list[Job]:
        """Check the jobs' files and settings. Returns the jobs that can run. As `check`."""
        workspace, release = self.workspace, self.workspace.checkpoint.release
        release.check_compat(self.options.compat)
        usable = []
        for job in jobs:
            try:
                with own_files():
                    job.check()
                    input_files.check(job)
                usable.append(job)
            except UserError as error:
                if failed is None:
                    raise
                failed.append((job, error))
        jobs = usable
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
        self.print_notes(jobs)
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
            checks[INPUTS] = lambda: [(job.check_inputs(), input_files.check(job)) for job in jobs]
        checks["checkpoint"] = partial(self._check_models, jobs)
        sets = dict.fromkeys(stage.loras for job in jobs for stage in job.stages if stage.loras)
        if sets:
            checks["LoRAs"] = lambda: (
                [workspace.source("dit", loras) for loras in sets]
                + [workspace.text_loras(job) for job in jobs]
            )
        prompted = any(job.texts for job in jobs)
        if prompted and (not planned or workspace.files.beside("gemma")):
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
        workspace.source("dit")
        if self.thorough:
            build.check_weights(workspace, "dit")
        models = dict.fromkeys(name for job in jobs for name in _host_models(job))
        if workspace.files.apart and "video_decoder" in models.keys() - self._checked_models:
            print(f"video decoder: {workspace.files.describe_decoder()}")
        self._check_host(models)
        if self.options.neuron_vae:
            if is_diffusion_vae(workspace.config) and any(
                job.decode_with_keyframes for job in jobs
            ):
                raise UserError(
                    "--decode-with-keyframes cannot be combined with --neuron-vae: the host's"
                    " diffusion decoder reads the keyframes; leave one of them out"
                )
            _ = workspace.video_decoder, workspace.source("vae")
            if sound_on_ranks(workspace, self.options):
                _ = workspace.audio_decoder, workspace.vocoder, workspace.source("sound")

    def _check_host(self, names: Iterable[str]) -> None:
        self.host.check([name for name in names if name not in self._checked_models])
        self._checked_models.update(names)

    def print_notes(self, jobs: list[Job]) -> None:
        """Print the jobs' notes. What is true of many jobs is one line, printed once."""
        all_notes = [(note, self.title_of(job)) for job in jobs for note in self.notes(job)]
        counts = Counter(note for note, _ in all_notes)
        for note, title in all_notes:
            if note not in self._printed:
                more = f" and {counts[note] - 1:,} more" * (counts[note] > 1)
                print(f"{title}{more}: {note}" if title else note)
                self._printed.add(note)

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
            listed = needs(self.workspace, jobs, self.options)
            self.workspace.find_all(n for n in listed if n.model in ("gemma3", "connectors"))

    def decodes_on_ranks(self, latents: int) -> bool:
        """Whether the ranks decode a sound with this number of latents."""
        return program_name("mel", span_sizes(latents)[0]) in self.vae.get("sound", ())

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

    def _find_artifacts(self, jobs: list[Job]) -> Compiled:
        """The compiled step of every stage. Raises UserError for missing graphs or weight sets."""
        workspace = self.workspace
        compiled = {
            (id(job), stage): self._compiled_step(job, stage)
            for job in jobs
            for stage in job.stages
        }
        # A stage's graphs of the DiT were found above.
        listed = [n for n in needs(workspace, jobs, self.options) if n.source or n.model != "dit"]
        used = {"dit", "gemma3"} | {need.model for need in listed if need.program}
        workspace.find_all(need for need in listed if need.model in used)
        graphs = [need for need in listed if need.program]
        self.vae = {
            model: workspace.programs(need for need in graphs if need.model == model)
            for model in ("vae", "encoder", "sound")
        }
        workspace.print_tuned()
        return compiled

    def _compiled_step(self, job: Job, stage: Stage) -> CompiledStep:
        first, *others = [CompiledStep(*p) for p in self.workspace.dit_programs_for(job, stage)]
        return replace(first, tiles=(first, *others)) if others else first


def notes(job: Job, workspace: Workspace) -> list[str]:
    """Sentences on what changes a job's result though it is no error: inputs that are cut, padded
    or of another kind than the model knows. Printed, and written into the sidecar and the API's
    answer. Reads the job's files, so they must have been checked."""
    lines = input_files.notes(job)
    if job.texts and not any(map(str.strip, job.texts_of_windows)):
        lines.append("the prompt is empty: the references alone guide the video")
    if job.reference_sound and lora.are_silent(job.stages[0].loras):
        lines.append("no LoRA has layers of the sound, so the voice may not be taken over")
    for loras in dict.fromkeys(stage.loras for stage in job.stages):
        lines += workspace.source("dit", loras).notes if loras else []
    for number, text in enumerate(job.texts):
        if len(text.encode()) < TEXT_TOKENS:  # a token has a byte or more, and there is a BOS
            continue
        count, lost = cut_off(workspace.tokenizer, text)
        if lost:
            flag, begins = _PROMPTS[number], " ".join(lost[:100].split())[:60]
            lines.append(
                f"{flag} has {count:,} tokens and is cut to {TEXT_TOKENS:,}: the model does not"
                f" read what begins with {begins!r}"
            )
    lines += _notes_on_keyframes(job, workspace)
    if job.seed == -1:
        lines.append("--seed -1 is a seed like any other, not a random one")
    return lines


def _notes_on_keyframes(job: Job, workspace: Workspace) -> Iterator[str]:
    if not job.reads_keyframes:
        return
    if is_diffusion_vae(workspace.config):
        if job.dfr:
            yield (
                "--dfr: the diffusion decoder reads the keyframes on the host, as upstream's does,"
                " and not with --neuron-vae"
            )
        file = workspace.files.of("vae")
        if EMBEDDING not in file.shapes:
            yield f"{file.path} has no {EMBEDDING}: zeros take the place of this embedding"
    elif job.decode_with_keyframes:
        yield (
            "--decode-with-keyframes: the convolutional decoder does not read keyframes;"
            " --video-vae-path takes the file of the diffusion decoder"
        )


def check_distilled_loras(jobs: list[Job], release: Release = RELEASES[0]) -> None:
    """Raise UserError if stage 2 of dev lacks the distilled LoRA, or no stage uses a given one."""
    refining = [job for job in jobs if job.recipe == "dev" and job.stages[-1].upsampled]
    if not all(job.stage_2_loras for job in refining):
        raise UserError(
            "--recipe dev --two-stage needs --distilled-lora: stage 2 has 3 steps, too few without"
            f" the distilled LoRA\nDownload it: {release.download('lora')}"
        )
    merging = [job for job in jobs if job.stage_2_loras]
    # In a batch, one-stage jobs may have it from the command's own flags.
    if any(job.recipe == "distilled" for job in merging) or merging and not refining:
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


def check_plans_fit(workspace: Workspace, jobs: list[Job], neuron_gemma: bool) -> None:
    """Raise UserError if a generation does not fit by the plan, for which its graphs are exported.
    neuron_gemma: whether the ranks encode the prompt."""
    gemma = workspace.gemma if neuron_gemma else None
    for job in {tuple(job.buckets): job for job in jobs}.values():
        profile = workspace.dit_profile(job.buckets, used=False)
        check_fits(workspace.checkpoint, profile, job, workspace.tp, workspace.dtype_name, gemma)


def compiled_memory(
    workspace: Workspace,
    stages: list[list[Manifest]],
    decoders: list[Manifest],
    job: Job,
    options: RunOptions,
) -> CoreMemory:
    """The memory that a generation needs per core, from the weights and costs in its graphs'
    manifests and the sizes of other rank files.

    stages    manifests of each stage's program, or of those of its tiles
    decoders  manifests of the video VAE and of the decoders of sound on the ranks
    """

    def rank_bytes(model: str, loras: WeightSet = ()) -> int:  # the header is negligible
        return rank_path(workspace.weights(model, loras), 0).stat().st_size

    programs = chain.from_iterable(stages)
    weights = {n: shape for manifest in programs for n, shape in manifest.weights().items()}
    return CoreMemory(
        sum(map(math.prod, weights.values())) * workspace.dtype.itemsize,
        rank_bytes("gemma3", workspace.text_loras(job)) if options.neuron_gemma else 0,
        compiled_activations(stages),
        sum(map(rank_bytes, {manifest.identity["model"] for manifest in decoders})),
        compiled_tile(decoders),
    )


def _host_models(job: Job) -> list[str]:
    """Names of the host models a job runs, besides upsamplers."""
    names = [] if job.sound_only else ["video_decoder"]
    # An input sound is not decoded.
    names += [] if job.sound or job.silent else ["audio_decoder", "vocoder"]
    names += ["video_encoder"] if job.images or job.encoded_clips else []
    names += ["audio_encoder"] if job.sound or job.retake or job.reference_sound else []
    names += ["video_statistics"] if job.upsamplers else []
    return names
