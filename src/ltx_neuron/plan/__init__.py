"""Plans a generation before anything is compiled: memory, FLOPs, collectives, step time. It reads
file headers and loads no weights.

`ltx-neuron plan` prints it.

FLOPs, collectives and activations are counted in the real graphs (plan/cost.py). ASSUMED lists the
assumptions, and the output prints them.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config.gemma import GEMMA_3_12B, GemmaConfig
from ltx_neuron.config.profiles import COLLECTIVES_BUFFER, Profile, describe_backend
from ltx_neuron.config.transformer import STREAMS, Bucket, TransformerConfig, transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.format import format_bytes
from ltx_neuron.host import dtypes
from ltx_neuron.invocation import command
from ltx_neuron.job import Job, Size, Stage
from ltx_neuron.models import programs
from ltx_neuron.models.signatures import upload_bytes
from ltx_neuron.plan.cost import score_bytes, step_cost, step_launches, text_weights
from ltx_neuron.plan.forecast import Forecast, forecast, is_measured
from ltx_neuron.sampling.conditions import EncodedClip
from ltx_neuron.sampling.samplers import SAMPLERS
from ltx_neuron.sampling.shapes import TIME_SCALE, video_latent_shape
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.sharding import ALONE, HOST, SHARDED_MODELS, local_shape, rule
from ltx_neuron.weights.tensorfile import DTYPES

ASSUMED = {
    # Compiled graphs, scratch, runtime; published peaks suggest 1 to 3 GB.
    "runtime_bytes_per_core": 2 * 2**30,
    "sdpa": "a flash kernel never stores attention scores, unless a stage lists them",
}
# The inputs of the tokens that a tile sees. The ranks keep those of every tile of a stage.
_ROPES = [f"{stream}{kind}" for stream in STREAMS for kind in ("", "_cross")]
TILE_INPUTS = {f"{rope}_{part}" for rope in _ROPES for part in ("cos", "sin")}
TILE_INPUTS |= {"timestep_mask", "denoise_mask", "clean_latent"}
TILE_INPUTS |= {"video_bias", "keyframes_mask", "padding_bias"}


@dataclass(frozen=True)
class StagePlan:
    """One stage's step. Times are lower bounds by the chip's documented limits, if known."""

    name: str
    height: int
    width: int
    steps: int
    evaluations: int  # of the model: res_2s has two per step and one more
    tiles: int  # 1: not tiled. The other numbers are the largest's, but upload_bytes is of all
    passes: int  # of an evaluation: up to five with guidance, or the tiles; counts are those of one
    video_tokens: int  # appended ones included, like the audio's
    audio_tokens: int
    nag: bool  # normalized attention guidance
    reference_tokens: tuple[int, int]  # of these, those of references: of video and of audio
    flops_per_step: int
    ideal_step_ms: float | None
    compute_ms: float | None
    memory_ms: float | None
    collectives_ms: float | None
    forecast: Forecast | None  # of one pass
    measured: bool  # others published a step of this many tokens on so many chips
    collectives_per_step: dict  # {"count", "bytes"} of one rank
    between_groups: dict  # of these, context parallelism's; {"count", "bytes"} that a rank receives
    largest_collective_bytes: int
    elementwise_bytes_per_step: int  # of one rank, read and written by operations that do not fuse
    sequence_parallel: bool
    # With sequence parallelism: collectives_per_step, collectives_ms and elementwise_bytes_per_step
    # without it; otherwise None
    whole: dict | None
    activation_bytes_per_core: int
    score_bytes_per_core: int  # of these: scores materialized at once, if no flash kernel is used
    score_ms: float | None  # to write and read all of them once, in all blocks
    upload_bytes: int  # once per stage: noise, contexts, RoPE and modulation tables, one rank's
    # Latents and predictions that cross the host in a step, each once; 0: the ranks have the state
    host_bytes_per_step: int


@dataclass(frozen=True)
class Plan:
    """A generation on a profile. Byte counts named per_core are those of one rank."""

    profile: str
    backend: str  # as text, like `note`: a warning about the profile, or empty
    note: str
    tp: int
    context_parallel: int
    guidance_parallel: int
    ranks: int  # tp x context_parallel x guidance_parallel, one per core
    dtype: str
    block_weight_bytes_per_rank: int
    dit_weight_bytes_per_rank: int
    gemma3_weight_bytes_per_rank: int
    flops_per_step: int  # of the last stage, like the next three
    ideal_step_ms: float | None
    collectives_per_step: dict
    hbm_bytes_per_core: int  # the DiT, in turn with Gemma
    hbm_bytes_per_core_resident: int  # both at once
    hbm_limit_bytes_per_core: int | None
    fits: bool | None
    fits_resident: bool | None
    nearest_that_fits: str | None
    # While weights are copied to a device: as much as the larger model has. Difflet observed that
    # the Neuron runtime needs this (64 GB) beside the files' pages. If ranks map their files it is
    # 0, and `host_bytes_mapped` has the files' bytes, which the system may evict.
    host_bytes_to_load: int
    host_bytes_mapped: int
    host_bytes_to_encode: int  # input images and videos, 0 without any; like decoding, with this
    host_bytes_to_decode: int  # machine's threads and dtype
    host_dtype: str  # of decoding on this machine
    host_limit_bytes: int | None
    disk_bytes: int
    quantised: str  # handling of the checkpoint's quantised weights, as text; empty without any
    collectives_buffer_bytes: int | None  # of the runtime, for one collective
    assumed: dict
    stages: list[StagePlan]


@dataclass(frozen=True)
class CoreMemory:
    """Bytes of one logical core's memory that a generation needs, without the runtime's own."""

    transformer: int  # one rank's weights
    text_encoder: int  # the same; 0 on the host
    activations: int  # the largest step's intermediates and uploaded tensors
    video_decoder: int = 0  # one rank's weights; 0 if the host decodes
    tile: int = 0  # the activations of the video decoder

    @property
    def in_turn(self) -> int:
        """With one model on the device at a time. Bytes."""
        step, decode = self.transformer + self.activations, self.video_decoder + self.tile
        return max(step, self.text_encoder, decode) + ASSUMED["runtime_bytes_per_core"]

    @property
    def resident(self) -> int:
        """With all models on the device together. Bytes."""
        weights = self.transformer + self.text_encoder + self.video_decoder
        return weights + max(self.activations, self.tile) + ASSUMED["runtime_bytes_per_core"]

    def vae_stays(self, profile: Profile) -> bool:
        """Whether the VAEs stay on the device beside the transformer, after the text encoder."""
        both = self.transformer + self.video_decoder + max(self.activations, self.tile)
        needed = max(both, self.text_encoder) + ASSUMED["runtime_bytes_per_core"]
        limit = profile.memory_bytes_per_core
        return profile.resident or (limit is not None and needed <= limit)

    def needed(self, profile: Profile) -> int:
        return self.resident if profile.resident else self.in_turn


def compiled_activations(stages: Iterable[Sequence[Manifest]]) -> int:
    """Activations (see CoreMemory) of each stage's compiled programs, one for each tile."""
    return max(
        max(_peak_bytes(m) + m.upload_bytes() - m.upload_bytes(TILE_INPUTS) for m in manifests)
        + sum(m.upload_bytes(TILE_INPUTS) for m in manifests)
        for manifests in stages
    )


def compiled_tile(manifests: Iterable[Manifest]) -> int:
    """CoreMemory.tile of compiled programs of the video decoder. A rank keeps every stage's
    features until those of the next tile replace them."""
    return max(
        (_peak_bytes(m) + sum(field.nbytes for field in m.fields.values()) for m in manifests),
        default=0,
    )


def _peak_bytes(manifest: Manifest) -> int:
    return max(manifest.cost(run)["peak_bytes"] for run in manifest.runs)


def check_fits(
    checkpoint: Checkpoint,
    profile: Profile,
    job: Job,
    tp: int,
    dtype: str,
    gemma: GemmaConfig | None,  # the text encoder's config; None if the host encodes prompts
) -> None:
    """Raise UserError, with the nearest size that fits, if a generation needs more memory than a
    core of the profile has. Loads nothing.
    """
    if profile.memory_bytes_per_core is None:
        return
    result = plan(checkpoint, profile, job, tp, dtype, gemma)
    resident = profile.resident and gemma is not None
    if result.fits_resident if resident else result.fits:
        return
    needed = result.hbm_bytes_per_core_resident if resident else result.hbm_bytes_per_core
    if result.fits:
        advice = "Type --profile-set resident=false: one model at a time fits"
    elif result.nearest_that_fits:
        advice = f"The nearest size that fits: {result.nearest_that_fits}"
    else:
        advice = "No length fits at this size; type a larger --tp-degree, or --dtype bfloat16"
    raise does_not_fit(profile, job.size, tp, needed, advice)


def does_not_fit(profile: Profile, size: Size, tp: int, needed: int, advice: str) -> UserError:
    """The error for a generation that needs `needed` bytes per core."""
    limit = profile.memory_bytes_per_core
    return UserError(
        f"{size} at tp {tp} needs {format_bytes(needed)} a core, {profile.name} has"
        f" {format_bytes(limit)} (LNC={profile.lnc}).\n{advice}. For details type"
        f" {command('plan')} with the same flags"
    )


def check_text_fits(
    profile: Profile, tp: int, dtype: str, gemma: GemmaConfig, config: TransformerConfig
) -> None:
    """Raise UserError if the text encoder alone needs more memory than a core has."""
    limit = profile.memory_bytes_per_core
    if limit is None:
        return
    weights = sum(text_weights(gemma, config, tp).values())
    needed = weights * DTYPES[dtype].itemsize + ASSUMED["runtime_bytes_per_core"]
    if needed > limit:
        raise UserError(
            f"the text encoder at tp {tp} needs {format_bytes(needed)} a core, {profile.name} has"
            f" {format_bytes(limit)} (LNC={profile.lnc}).\nType a larger --tp-degree, or generate"
            " without --neuron-gemma"
        )


def plan(
    checkpoint: Checkpoint,
    profile: Profile,
    job: Job,
    tp: int,
    dtype: str,
    gemma: GemmaConfig | None = GEMMA_3_12B,
    parts: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan a generation, of any prompt. UserError for sizes and TP degrees that cannot be. gemma:
    the text encoder's config; None if the host encodes the prompt. parts: the config of all parts
    of the model; None: the checkpoint's."""
    job.check_shape()
    config, torch_dtype = transformer_config(checkpoint.config), DTYPES[dtype]
    config.check_tensor_parallel(tp)
    profile.check_cores(tp)
    if gemma:
        gemma.check_tensor_parallel(tp)

    def stage_plans(of: Job) -> list[StagePlan]:
        # Windows are equal if their graphs are.
        kinds = [(x._replace(window=None, chunk=None), *of.stage_buckets(x)) for x in of.stages]
        apart = dict(zip(kinds, of.stages, strict=True)).items()
        plans = {kind: _stage(config, of, s, profile, tp, torch_dtype) for kind, s in apart}
        return [plans[kind] for kind in kinds]

    stages, weights = stage_plans(job), _dit_bytes(checkpoint, tp, torch_dtype)
    used = weights
    if job.sound_only or job.silent:
        used = _dit_bytes(checkpoint, tp, torch_dtype, ALONE[job.silent])
    gemma_bytes, embeddings = _gemma_bytes(gemma, config, tp, torch_dtype) if gemma else (0, 0)
    memory = CoreMemory(used["rank"], gemma_bytes, _activations(stages))
    weights_of_rank, ranks = max(used["rank"], gemma_bytes), profile.cores_needed(tp)
    last, limit = stages[: len(job.clips[0].stages)][-1], profile.memory_bytes_per_core
    buffer = dict(profile.environment).get(COLLECTIVES_BUFFER)
    dit_files = weights["rank"] * tp + weights["host"]
    fits = None if limit is None else memory.in_turn <= limit
    nearest = None
    if limit is not None and not fits and not job.sound_only:
        room = limit - weights["rank"] - ASSUMED["runtime_bytes_per_core"]
        nearest = _nearest(job, last, room, lambda of: _activations(stage_plans(of)))
    return Plan(
        profile=profile.name,
        backend=describe_backend(profile),
        note=profile.note,
        tp=tp,
        context_parallel=profile.context_parallel,
        guidance_parallel=profile.guidance_parallel,
        ranks=ranks,
        dtype=dtype,
        block_weight_bytes_per_rank=used["blocks"],
        dit_weight_bytes_per_rank=used["rank"],
        gemma3_weight_bytes_per_rank=gemma_bytes,
        flops_per_step=last.flops_per_step,
        ideal_step_ms=last.ideal_step_ms,
        collectives_per_step=last.collectives_per_step,
        hbm_bytes_per_core=memory.in_turn,
        hbm_bytes_per_core_resident=memory.resident,
        hbm_limit_bytes_per_core=limit,
        fits=fits,
        fits_resident=None if limit is None else memory.resident <= limit,
        nearest_that_fits=nearest,
        host_bytes_to_load=0 if profile.maps_weights else ranks * weights_of_rank,
        # The groups of tp ranks map the same files.
        host_bytes_mapped=tp * weights_of_rank if profile.maps_weights else 0,
        **_on_the_host(parts or checkpoint.config, profile, job, torch_dtype),
        host_limit_bytes=profile.host_memory_bytes,
        disk_bytes=weight_sets(job) * dit_files + tp * gemma_bytes + embeddings,
        quantised=checkpoint.describe_quantised(),
        collectives_buffer_bytes=int(buffer) if buffer else None,
        assumed=ASSUMED,
        stages=stages,
    )


def _gemma_bytes(
    gemma: GemmaConfig, config: TransformerConfig, tp: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Of a rank's weights, and of the token embeddings on the host."""
    of_rank = sum(text_weights(gemma, config, tp).values())
    return of_rank * dtype.itemsize, gemma.vocab_size * gemma.hidden_size * dtype.itemsize


def weight_sets(job: Job) -> int:
    """The transformer's weight sets: two if stages differ (IC-LoRA, dev's distilled LoRA)."""
    refined = job.guided and job.stages[-1].upsampled
    return 2 if refined else len({stage.loras for stage in job.stages})


def _on_the_host(config: Mapping[str, Any], profile: Profile, job: Job, dtype: torch.dtype) -> dict:
    """The host's dtype for videos, and its memory to encode and decode; 0 without a video VAE."""
    from ltx_neuron.host import tiles  # imports ltx-core: not needed for flags
    from ltx_neuron.host.vae_memory import decode_bytes, encode_bytes

    threads, has_vae = profile.host_threads, "vae" in config
    latent = job.decoded_shape
    host_dtype, clips = dtypes.of_video(profile.host_dtype, dtype), job.encoded_clips
    if job.images:  # one at a time, at the size of their stage
        clips += [EncodedClip((1, stage.height, stage.width)) for stage in job.stages]
    of_latents = dtypes.of_latents(host_dtype, dtype)
    encoded = (
        encode_bytes(config, clip.pixels, threads, of_latents, dtype, clip.whole)
        for clip in (clips if has_vae else ())
    )
    decoded = 0
    if has_vae and not job.sound_only:
        how = host_dtype, tiles.tiling(profile), job.reads_keyframes
        decoded = decode_bytes(config, latent, threads, *how)
    return {
        "host_bytes_to_encode": max(encoded, default=0),
        "host_bytes_to_decode": decoded,
        "host_dtype": str(host_dtype).removeprefix("torch."),
    }


def _activations(stages: list[StagePlan]) -> int:
    return max(stage.activation_bytes_per_core + stage.upload_bytes for stage in stages)


def _dit_bytes(
    checkpoint: Checkpoint, tp: int, dtype: torch.dtype, used: re.Pattern = re.compile(".*")
) -> dict[str, int]:
    """Bytes of the weights of a rank, its blocks and the host. used: names to count."""
    model = SHARDED_MODELS["dit"]
    source, totals = Source(model, [checkpoint]), {"rank": 0, "blocks": 0, "host": 0}
    for name in filter(used.fullmatch, source.locations):
        split = rule(model, name)
        size = math.prod(local_shape(source.shape(name), split, tp, name)) * dtype.itemsize
        totals["host" if split == HOST else "rank"] += size
        if name.startswith("transformer_blocks."):
            totals["blocks"] += size
    return totals


def independent_passes(job: Job, stage: Stage) -> int:
    """The passes of an evaluation that guidance groups share: those of guidance, or tiles."""
    return len(job.passes) if stage.guided else len(job.stage_buckets(stage))


def largest_bucket(job: Job, stage: Stage) -> Bucket:
    """A stage's bucket, or that of its largest tile."""
    return max(job.stage_buckets(stage), key=lambda bucket: bucket.video_tokens)


def _stage(
    config: TransformerConfig, job: Job, stage: Stage, profile: Profile, tp: int, dtype: torch.dtype
) -> StagePlan:
    buckets, bucket = job.stage_buckets(stage), largest_bucket(job, stage)
    cp = profile.context_parallel
    divides = profile.sequence_parallel and programs.may_divide(bucket, tp, cp)
    program, step = step_cost(config, bucket, profile, tp, dtype, divides)
    flops, graphs = step["flops"], program.graphs.values()
    inputs = {name for graph in graphs for name in graph.inputs}
    uploaded = program.fields, inputs, {name for graph in graphs for name in graph.outputs}
    undivided = step_cost(config, bucket, profile, tp, dtype)[1] if divides else {}
    whole = undivided and _between_ranks(undivided, profile, tp)
    compute_ms = memory_ms = score_ms = ideal_ms = expected = None
    rate, bandwidth = profile.flops(tp), profile.memory_bytes_per_second(tp)
    if rate and bandwidth:
        score_ms = step["score_bytes"] * tp / bandwidth * 1e3
        compute_ms = flops * tp / rate * 1e3
        memory_ms = step["weight_bytes"] * tp / bandwidth * 1e3
        ideal_ms = max(compute_ms, memory_ms)
        launches = step_launches(config, profile.blocks_per_graph)
        expected = forecast(profile, tp, config.num_layers, step, launches)
    return StagePlan(
        name=stage.name,
        height=stage.height,
        width=stage.width,
        steps=stage.steps,
        evaluations=len(stage.evaluations),
        tiles=len(buckets),
        passes=independent_passes(job, stage),
        video_tokens=bucket.video_tokens,
        audio_tokens=bucket.audio_tokens,
        nag=bucket.nag,
        reference_tokens=(_reference_tokens(job, stage), job.appended_audio(stage.upsampled)),
        flops_per_step=flops * profile.world_size(tp),
        ideal_step_ms=ideal_ms,
        compute_ms=compute_ms,
        memory_ms=memory_ms,
        forecast=expected,
        measured=expected is not None and is_measured(profile, tp, bucket.video_tokens),
        **_between_ranks(step, profile, tp),
        largest_collective_bytes=step["largest_collective_bytes"],
        sequence_parallel=divides,
        whole=whole or None,
        activation_bytes_per_core=step["peak_bytes"],
        score_bytes_per_core=score_bytes(config, bucket, profile, tp)[0],
        score_ms=score_ms,
        upload_bytes=upload_bytes(*uploaded)
        + (len(buckets) - 1) * upload_bytes(*uploaded, TILE_INPUTS),
        host_bytes_per_step=_host_bytes(config, stage, buckets, dtype),
    )


def _host_bytes(
    config: TransformerConfig, stage: Stage, buckets: Sequence[Bucket], dtype: torch.dtype
) -> int:
    if len(buckets) == 1 and not SAMPLERS[stage.sampler].host:
        return 0
    video = sum(bucket.video_tokens for bucket in buckets) * config.in_channels
    audio = sum(bucket.audio_tokens for bucket in buckets) * config.audio_in_channels
    return 2 * (video + audio) * dtype.itemsize * len(stage.evaluations) // stage.steps


def _reference_tokens(job: Job, stage: Stage) -> int:
    size, references = job.stage_size(stage.upsampled), job.appended_references(stage.upsampled)
    count = sum(math.prod(reference.latent_shape(size)) for reference in references)
    if job.of(stage).details(stage.upsampled):  # the reference is stage 1's video
        count += math.prod(video_latent_shape(*job.size.first.sides, size.num_frames))
    if tiles := job.stage_tiles(stage):
        tokens = max((tokens for _, tokens in tiles), key=len)
        plane = math.prod(video_latent_shape(stage.height, stage.width, 1))
        slots = plane * len(job.generated_keyframes(stage.upsampled))  # after the references
        end = job.bucket(stage).video_tokens - slots
        count = int(((tokens >= end - count) & (tokens < end)).sum())
    return count


def _between_ranks(step: dict[str, int], profile: Profile, tp: int) -> dict:
    rate, ms = profile.link_bytes_per_second(tp), None
    if rate and profile.chip:
        links = profile.chips_of(tp) * profile.chip.chip_link_bytes_per_second
        ms = tp * (step["moved_bytes"] / rate + step["context_bytes"] / links) * 1e3
    return {
        "collectives_ms": ms,
        "collectives_per_step": {"count": step["collectives"], "bytes": step["collective_bytes"]},
        "between_groups": {"count": step["context_collectives"], "bytes": step["context_bytes"]},
        "elementwise_bytes_per_step": step["elementwise_bytes"],
    }


def _nearest(
    job: Job, stage: StagePlan, room: int, activations: Callable[[Job], int]
) -> str | None:
    """The longest clip of this height and width whose activations fit into `room` bytes."""
    per_token = (stage.activation_bytes_per_core + stage.upload_bytes) / stage.video_tokens
    tokens_per_frame = math.prod(video_latent_shape(stage.height, stage.width, 1))
    # A first estimate, without the part that does not grow with the tokens.
    latent_frames = int(room / per_token) // tokens_per_frame
    for count in range(latent_frames, (job.tail_frames or 0) // TIME_SCALE, -1):
        shorter = dataclasses.replace(job.size, num_frames=TIME_SCALE * (count - 1) + 1)
        if activations(job.resized(shorter)) <= room:
            frames = shorter.num_frames - (job.tail_frames or 0)
            return str(dataclasses.replace(shorter, num_frames=frames))
    return None
