"""The time of a whole warm clip, by the phases of a latency report.

FLOPs are counted; rates are documented or assumed, and every row names its source. A warm clip has
a new prompt and models that an earlier clip loaded.
"""

# ltx-core's from_config is a class method that names the class that it builds as its own.
# pyright: reportAttributeAccessIssue=false

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from ltx_core.model.upsampler import LatentUpsamplerConfigurator
from ltx_core.model.video_vae import VideoDecoderConfigurator, VideoEncoderConfigurator
from torch.utils.flop_counter import FlopCounterMode

from ltx_neuron import machine
from ltx_neuron.config.diffusion import diffusion_decoder_config, is_diffusion_vae
from ltx_neuron.config.profiles import Profile
from ltx_neuron.config.sound import AUDIO_SCALE
from ltx_neuron.format import format_bytes, format_flops
from ltx_neuron.host import diffusion, tiles
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.host.spectrogram import mel_sizes
from ltx_neuron.invocation import command
from ltx_neuron.job import Job
from ltx_neuron.plan import Plan, StagePlan, weight_sets
from ltx_neuron.report.price import Price
from ltx_neuron.sampling import shapes

SHARE = 0.3  # of a chip's documented peak: assumed
# Of the video VAE: others' decoder of 3D convolutions reached 51 % on trn2 (vllm-omni-neuron).
_VAE_SHARE = 0.4
PROMPT_TOKENS, CONTEXT_TOKENS = 128, 1024
# FLOP/s of one CPU. Two AVX-512 units make 64 FLOPs a cycle in float32, AMX makes 2048 in bfloat16:
# documented of the Intel CPUs beside Trainium2, here at 2 GHz, and of a hyperthread the half.
_PEAKS = {"float32": 64 * 2e9 / 2, "bfloat16": 2048 * 2e9 / 2}
# At most half of what a core reached in benchmarks/vae_decode.md, vae_encode.md and text_encode.md.
# FLOPs are those of direct convolutions; a prompt's products are small.
_SHARES = {
    "decode_video float32": 1.0,
    "decode_video bfloat16": 0.2,
    "encode_video float32": 1.0,
    "encode_video bfloat16": 0.17,
    "encode_text float32": 0.8,
    "encode_text bfloat16": 0.08,
}
# Bytes per second, to the ranks of a chip and from the disk. LTX-2's 37.8 GB took 11 to 15 s from
# the page cache and 310 s more from the disk (Difflet); a gp3 volume of EBS begins at 125 MiB/s.
_LOAD, _DISK = 2.7e9, 125 * 2**20
_FIRST_STEP_SECONDS = 39.0  # more of a first request than of later ones (vllm-omni-neuron, LTX-2.5)
# Of one CPU, assumed: seconds of sound, pixels and bytes per second. Sound: what a core of a busy
# machine reached in benchmarks/audio_decode.md.
_ASSUMED = {"decode_audio": 0.25, "encode_mp4": 10e6, "copy": 2e9}
# From the instances' documentation; other profiles run on this machine.
_CPUS = {"trn2.3xlarge": 12, "trn2.48xlarge": 192, "trn3": 12}


@dataclass(frozen=True)
class PhaseRow:
    name: str
    where: str  # "host" or "device"
    seconds: float | None
    rate: str  # source of its seconds, as text


@dataclass(frozen=True)
class ClipPlan:
    """A warm clip's phases in order; None for unknown times."""

    rows: list[PhaseRow]
    seconds: float | None  # from the prompt to the MP4
    # Per clip of a batch, in which the ranks denoise the next clip meanwhile
    batch_seconds: float | None
    overlaps: str  # phases that run at the same time, as text
    # What the first clip has besides, once the ranks run; empty without Neuron
    cold: list[PhaseRow]
    # Of a clip of a batch, as report.price.Price gives it, with --price-per-hour
    price: dict[str, float] | None


@dataclass(frozen=True)
class ClipPlanner:
    """The planned job, and the settings of its run."""

    plan: Plan
    config: Mapping[str, Any]  # the checkpoint's parsed `config` metadata
    text_weights: dict[str, int]  # numbers in one rank's "gemma3" and "connectors"
    profile: Profile
    job: Job
    neuron_gemma: bool
    neuron_vae: bool
    tuned_step_ms: float | None = None
    price: Price | None = None

    def planned(self) -> ClipPlan:
        of, count, parts = self.plan.stages, len(self.job.clips[0].stages), []
        for number, job in enumerate(self.job.clips):
            plan = replace(self.plan, stages=of[number * count : (number + 1) * count])
            parts.append(replace(self, job=job, plan=plan))
        first = [*(self._text() if self.job.texts else ()), *self._inputs()]
        first += _together(row for part in parts for row in part._denoising())
        # An input sound is muxed unchanged.
        silent = self.job.sound or self.job.silent
        last = [] if silent else _together(part._sound() for part in parts)
        if not self.job.sound_only:
            last = [*_together(part._video() for part in parts), *last, self._mp4()]
        rows, seconds, batch_seconds = [*first, *last], None, None
        if all(row.seconds is not None for row in rows):
            before = sum(row.seconds or 0 for row in first)
            device = sum(row.seconds or 0 for row in last if row.where == "device")
            host = sum(row.seconds or 0 for row in last if row.where == "host")
            seconds = before + device + host
            if self.profile.overlap_decode:
                seconds, batch_seconds = before + max(device, host), max(before + device, host)
                if self.neuron_vae:  # the next clip waits for the MP4
                    batch_seconds = seconds
        price, length = None, self.job.output_frames / self.job.output_frame_rate
        if seconds and self.price:
            price = self.price.of(batch_seconds or seconds, 1, length)
        return ClipPlan(rows, seconds, batch_seconds, self._overlaps(), self._cold(rows), price)

    def _cold(self, rows: Sequence[PhaseRow]) -> list[PhaseRow]:
        """What the first clip has besides `rows`, with nothing in the page cache."""
        if self.profile.device != "neuron":
            return []
        files, loaded = self.plan.disk_bytes, {row.name for row in rows}
        models = ["gemma3"] * self.neuron_gemma + ["transformer"]
        loads = (self._load(model, "once") for model in models)
        disk = f"{format_bytes(files)} of rank files at 125 MiB/s, a gp3 volume as it comes (AWS)"
        graphs = "graphs to the ranks (vllm-omni-neuron); up to 175 s (NxD Inference's LTX-2.3)"
        return [
            PhaseRow("read_weights", "host", files / _DISK, disk),
            *(row for row in loads if row.name not in loaded),
            PhaseRow("first_step", "device", _FIRST_STEP_SECONDS, graphs),
        ]

    def _overlaps(self) -> str:
        if self.job.sound_only:
            return "nothing"
        if not self.profile.overlap_decode:
            return "nothing: ranks and host share the cores"
        if self.neuron_vae:
            sound = "sound and " * (not self.profile.sound_on_ranks)
            return f"{sound}MP4 on the host beside decoding on the ranks"
        return "sound and MP4 beside decoding, on the same cores: their times add up"

    def _rate(self, kind: str) -> tuple[float, str]:
        cpus = _CPUS.get(self.profile.machine) or machine.cpus()
        if kind in _ASSUMED:
            return _ASSUMED[kind] * cpus, "assumed, not measured"
        rate = _PEAKS[kind.rpartition(" ")[2]] * _SHARES[kind] * cpus
        return rate, f"{_SHARES[kind]:.0%} of a documented peak, not measured"

    def _host(self, name: str, amount: float, kind: str, what: str) -> PhaseRow:
        rate, source = self._rate(kind)
        return PhaseRow(name, "host", amount / rate, f"{what} ({source})")

    def _at_peak(self, name: str, flops: float, what: str, share: float = SHARE) -> PhaseRow:
        """A phase on the ranks, from their total FLOPs."""
        peak = self.profile.flops(self.plan.tp)
        if peak is None:
            return PhaseRow(name, "device", None, f"{what}: this profile has no documented peak")
        text = f"{what} at {share:.0%} of {peak / 1e12:.0f} TFLOP/s, documented, not measured"
        return PhaseRow(name, "device", flops / (share * peak), text)

    def _text(self) -> list[PhaseRow]:
        plan, profile, weights = self.plan, self.profile, self.text_weights
        products = PROMPT_TOKENS * weights["gemma3"] + CONTEXT_TOKENS * weights["connectors"]
        flops = 2 * plan.tp * products
        what = f"{format_flops(flops)} for a prompt of {PROMPT_TOKENS} tokens"
        if not self.neuron_gemma:
            name = f"encode_text {self.plan.host_dtype}"
            return [self._host("encode_text", flops, name, what)]
        rows = [self._at_peak("encode_text", flops, what)]
        if profile.resident:
            return rows
        why = "one model at a time"
        return [self._load("gemma3", why), *rows, self._load("transformer", why)]

    def _load(self, model: str, why: str) -> PhaseRow:
        plan, profile, name = self.plan, self.profile, f"load_{model}"
        of_gemma = model == "gemma3"
        size = plan.gemma3_weight_bytes_per_rank if of_gemma else plan.dit_weight_bytes_per_rank
        size *= plan.ranks
        what = f"{format_bytes(size)} to the ranks, {why}"
        if profile.chip is None:
            return self._host(name, size, "copy", what)
        seconds = size / (_LOAD * max(1, profile.chips_of(plan.ranks)))
        return PhaseRow(name, "host", seconds, f"{what}, at {_LOAD / 1e9} GB/s a chip (Difflet)")

    def _inputs(self) -> list[PhaseRow]:
        size, rows = self.job.size, []
        for clip in self.job.encoded_clips:
            counts = Counter([clip.pixels]) if clip.whole else tiles.tile_counts(clip.pixels)
            of_tile = {shape: self._encoder_flops(*shape) for shape in counts}
            flops = sum(count * of_tile[shape] for shape, count in counts.items())
            tiles_of = " + ".join(f"{n} x {'x'.join(map(str, t))}" for t, n in counts.items())
            what = f"video, {format_flops(flops)}, {tiles_of}"
            if self.neuron_vae and self.profile.may_keep_vae and not clip.whole:
                flops = self._on_ranks(of_tile, counts)
                rows.append(self._at_peak("encode_inputs", flops, what, _VAE_SHARE))
            else:
                rows.append(
                    self._host("encode_inputs", flops, f"encode_video {self.plan.host_dtype}", what)
                )
        voice = self.job.reference_sound
        if self.job.sound or self.job.retake or voice:
            import_ltx_core()  # this part of it needs torchaudio
            from ltx_core.model.audio_vae import AudioEncoderConfigurator

            length = voice.latents if voice else size.audio_frames
            shape = 2, AUDIO_SCALE * length, mel_sizes(self.config).bins
            flops = _counted(AudioEncoderConfigurator.from_config, self.config, *shape)
            what = f"sound, {format_flops(flops)}, {length / shapes.AUDIO_LATENTS_PER_SECOND:.1f} s"
            rows.append(self._host("encode_inputs", flops, "encode_video float32", what))
        return rows

    def _images(self, stage: StagePlan) -> list[PhaseRow]:
        if not (count := len(self.job.images)):
            return []
        flops = count * self._encoder_flops(1, stage.height, stage.width)
        what, rate = (
            f"images, {count}, {format_flops(flops)}",
            f"encode_video {self.plan.host_dtype}",
        )
        return [self._host(f"denoise_{stage.name}", flops, rate, what)]

    def _encoder_flops(self, *pixels: int) -> int:
        """FLOPs of encoding 8k+1 frames. pixels: frames, rows, columns."""
        return _counted(VideoEncoderConfigurator.from_config, self.config, 3, *pixels)

    def _denoising(self) -> list[PhaseRow]:
        rows = []
        of_stages, job = self.job.stages, self.job
        frames = job.of(of_stages[0]).size.num_frames
        for number, stage in enumerate(self.plan.stages):
            window = of_stages[number].temporal
            if number and not job.extension and not (window and window.number):
                before = self.plan.stages[number - 1]
                latent = shapes.video_latent_shape(before.height, before.width, frames)
                if weight_sets(job) > 1 and (not window or window.round == 1):
                    new, old = (1, 2) if window else (2, 1)
                    why = f"stage {new}'s weight set replaces stage {old}'s"
                    rows.append(self._load("transformer", why))
                rows.append(self._upsampling(latent, "temporal" if window else "spatial"))
                frames += (frames - 1) * bool(window)
            rows += [*self._images(stage), self._steps(stage)]
        latent = self.job.latent_shape
        for kind in shapes.UPSCALES.get(self.job.upscale, ()):
            rows.append(self._upsampling(latent, kind))
            latent = shapes.upsampled(latent, kind)
        return rows

    def _steps(self, stage: StagePlan) -> PhaseRow:
        ms, source = self._step_ms(stage)
        plan, tiled = self.plan, stage.tiles > 1
        # A tile's inputs go to one group.
        ranks = plan.ranks // (plan.guidance_parallel if tiled else 1)
        name, size = f"denoise_{stage.name}", ranks * stage.upload_bytes
        if ms is None:
            return PhaseRow(name, "device", None, source)
        upload = size / self._rate("copy")[0]
        rounds = -(-stage.passes // plan.guidance_parallel)
        # Tuning measures a step with all of its passes, or one tile.
        count = stage.evaluations
        passes = 1 if self.tuned_step_ms and not tiled else rounds
        runs = f"{count} x {passes} {'tiles' if tiled else 'passes'}" if passes > 1 else f"{count}"
        what = f"{runs} x {ms:.0f} ms, {source}; {format_bytes(size)} uploaded once"
        return PhaseRow(name, "device", count * passes * ms / 1e3 + upload, what)

    def _step_ms(self, stage: StagePlan) -> tuple[float | None, str]:
        if self.tuned_step_ms:
            return self.tuned_step_ms, f"measured by {command('tune')}"
        if stage.forecast is None:
            return None, f"not measured; type {command('tune')}"
        return stage.forecast.middle, "the forecast's middle, not measured"

    def _upsampling(self, latent: tuple[int, int, int], kind: str) -> PhaseRow:
        # The released upsampler's: its file may be absent.
        config: dict = {f"{name}_upsample": name == kind for name in ("spatial", "temporal")}
        if kind == "spatial" and self.job.size.spatial_scale != 2:
            config |= {"spatial_scale": self.job.size.spatial_scale, "rational_resampler": True}
        flops = _counted(LatentUpsamplerConfigurator.from_config, config, 128, *latent)
        rate = f"decode_video {self.plan.host_dtype}"
        return self._host("upsample", flops, rate, f"{kind}, {format_flops(flops)}")

    def _video(self) -> PhaseRow:
        clip, text, share = self.job.decoded_shape, "diffusion", SHARE
        if is_diffusion_vae(self.config):
            total = diffusion.decode_flops(diffusion_decoder_config(self.config), clip)
        else:
            for_ranks = self.neuron_vae and tiles.tiling_for_ranks(self.profile, clip, self.plan.tp)
            cuts = tiles.cut(clip, for_ranks or tiles.tiling(self.profile))
            counts = Counter(map(tiles.tile_shape, cuts))
            decoder = VideoDecoderConfigurator.from_config
            flops = {shape: _counted(decoder, self.config, 128, *shape) for shape in counts}
            text = " + ".join(f"{n} tiles of {'x'.join(map(str, s))}" for s, n in counts.items())
            if len(counts) > 2:
                text = f"{sum(counts.values())} tiles of {len(counts)} shapes"
            total, share = sum(flops[shape] * n for shape, n in counts.items()), _VAE_SHARE
            total = self._on_ranks(flops, counts) if self.neuron_vae else total
        what = f"{format_flops(total)}, {text}"
        if self.neuron_vae:
            return self._at_peak("decode_video", total, what, share)
        return self._host("decode_video", total, f"decode_video {self.plan.host_dtype}", what)

    def _on_ranks(self, flops: Mapping[tuple, int], counts: Mapping[tuple, int]) -> int:
        """FLOPs of tp of the ranks that share tiles, some idle. flops: of a tile of each shape."""
        rounds = {shape: math.ceil(count / self.plan.ranks) for shape, count in counts.items()}
        return sum(flops[shape] * rounds[shape] * self.plan.tp for shape in counts)

    def _sound(self) -> PhaseRow:
        longer, size = self.job.extension, self.job.of(self.job.stages[0]).size
        seconds = (longer or size).num_frames / size.frame_rate
        text = f"{seconds:.1f} s of sound"
        if self.neuron_vae and self.profile.sound_on_ranks:
            why = "not known: filters of 16 and 32 channels fill a 32nd of the tensor engine"
            return PhaseRow("decode_audio", "device", None, why)
        return self._host("decode_audio", seconds, "decode_audio", text)

    def _mp4(self) -> PhaseRow:
        _, rows, columns = self.job.decoded_shape
        frames, tail = self.job.output_frames, self.job.tail_frames
        pixels = frames * rows * columns * shapes.SPACE_SCALE**2
        what = f"{frames} frames" + (f"; the tail of {tail} is cut off" if tail else "")
        return self._host("encode_mp4", pixels, "encode_mp4", what)


def _together(rows: Iterable[PhaseRow]) -> list[PhaseRow]:
    """The rows, equal ones of several windows as one."""
    return [
        replace(row, seconds=row.seconds and n * row.seconds, rate=f"{n} x " * (n > 1) + row.rate)
        for row, n in Counter(rows).items()
    ]


def _counted(
    from_config: Callable[[Any], torch.nn.Module], config: Mapping[str, Any], *shape: int
) -> int:
    """FLOPs of one of ltx-core's modules for a tensor (1, *shape), on the meta device.
    Convolutions count as direct ones."""
    return _counted_once(from_config, json.dumps({**config}), shape)


@cache
def _counted_once(
    from_config: Callable[[Any], torch.nn.Module], text: str, shape: tuple[int, ...]
) -> int:
    config = json.loads(text)
    with torch.device("meta"):
        module = from_config(config)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(torch.empty(1, *shape))
    return counter.get_total_flops()
