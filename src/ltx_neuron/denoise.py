"""One stage on the ranks: what is uploaded once, the steps that follow, and what comes back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import NotFiniteError
from ltx_neuron.backends.torchdist import Ranks
from ltx_neuron.config import Bucket
from ltx_neuron.errors import RunError
from ltx_neuron.job import Job, Stage
from ltx_neuron.models.modulation import modulation_table
from ltx_neuron.models.rope import Rope, split_rope
from ltx_neuron.models.signatures import LATENTS, PASSES
from ltx_neuron.sampling import conditioning, latents
from ltx_neuron.sampling.compat import Compat
from ltx_neuron.sampling.schedules import sigma_pairs
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.workspace import Workspace


@dataclass(frozen=True)
class Program:
    """A compiled DiT step and the bucket it was compiled for."""

    bucket: Bucket
    manifest: Manifest


class StageRun:
    """One stage on the ranks: uploads what stays the same, then sends a step number per step."""

    def __init__(
        self, ranks: Ranks, bucket: Bucket, workspace: Workspace, adaln: dict, compat: Compat
    ):
        self.ranks, self.bucket, self.config, self.dtype = (
            ranks,
            bucket,
            workspace.transformer,
            workspace.dtype,
        )
        self.adaln, self.compat = adaln, compat

    def prepare(
        self,
        job: Job,
        stage: Stage,
        contexts: list,
        video: Tensor,
        audio: Tensor,
        generator,
        images,
    ) -> None:
        """Noise initial latents (1, 128, F, h, w) and (1, 8, Ta, 16) and upload all that the steps
        share."""
        self.stage, self.sequence = stage, ["main"] * self.bucket.max_steps
        first = self.compat.conditioning
        positions_dtype = self.dtype if self.compat.positions else torch.float32
        state = conditioning.video_state(video, job.size.frame_rate, images, first, positions_dtype)
        scale = stage.sigmas[0]
        self.video = conditioning.noised(
            state.latent, generator, scale, state.clean_latent, state.denoise_mask, first
        )
        self.audio = conditioning.noised(
            latents.patchify_audio(audio), generator, scale, compat_1_0_0=first
        )
        masks = conditioning.distinct_masks(job.images)
        rows, choice = conditioning.timestep_choice(
            state.denoise_mask, masks, self.bucket.timesteps, self.dtype
        )
        self.ranks.put(
            self.bucket.name,
            **self._schedule(stage, rows),
            **self._ropes(state.positions, audio.shape[2]),
            timestep_mask=choice,
            denoise_mask=state.denoise_mask,
            clean_latent=state.clean_latent,
            video_context=contexts[0].video,
            audio_context=contexts[0].audio,
        )
        if self.bucket.guided:
            self._guide(job, stage, contexts)

    def _guide(self, job: Job, stage: Stage, contexts: list[Contexts]) -> None:
        """Upload what guidance needs and name the step's passes; a pass that is not run is read
        from "cond"."""
        guidance, name, steps = job.resolved_guidance, self.bucket.name, len(stage.sigmas) - 1
        enabled, always = (
            guidance.enabled_steps(steps, self.bucket.max_steps),
            torch.ones(self.bucket.max_steps, 2),
        )
        self.ranks.put(name, guidance=guidance.weights(), enabled_steps=enabled)
        runs, unread = [], {}
        for kind in PASSES:
            if kind not in guidance.passes():
                unread |= {f"{kind}_{stream}": f"cond_{stream}" for stream in ("video", "audio")}
                continue
            reads = {"keep": f"keep_{kind}"}
            self.ranks.put(
                name,
                "keep",
                **{f"keep_{kind}": guidance.keep(kind, self.config.num_layers, self.dtype)},
            )
            if kind == "uncond":
                for stream, context in (("video", contexts[1].video), ("audio", contexts[1].audio)):
                    reads[f"{stream}_context"] = f"negative_{stream}_context"
                    self.ranks.put(
                        name, f"{stream}_context", **{f"negative_{stream}_context": context}
                    )
                if (
                    self.compat.conditioning
                ):  # the first release computes a skipped stream in this pass all the same
                    reads["enabled_steps"] = "enabled_always"
                    self.ranks.put(name, "enabled_steps", enabled_always=always)
            runs.append(
                (
                    "pass",
                    reads,
                    {f"{stream}_x0": f"{kind}_{stream}" for stream in ("video", "audio")},
                )
            )
        self.ranks.put(
            name,
            guided_video=torch.zeros_like(self.video),
            guided_audio=torch.zeros_like(self.audio),
        )
        self.ranks.define(name, "guided", [*runs, ("guide", unread, {})])
        self.ranks.define(name, "repeat", [("guide", unread, {})])
        computed = [
            any(stream.computes(step) for stream in guidance.streams) for step in range(steps)
        ]
        self.sequence = ["guided" if any_stream else "repeat" for any_stream in computed]

    def _schedule(self, stage: Stage, rows: Tensor) -> dict[str, Tensor]:
        pairs = sigma_pairs(stage.sigmas, self.bucket.max_steps)
        tables = {
            f"{stream}_modulation": modulation_table(
                self.adaln, self.config, stream, pairs[:, 0], masks, self.compat.cross_sigma
            )
            for stream, masks in (("video", rows), ("audio", torch.ones(1)))
        }
        return {
            "sigmas": pairs,
            "step_numbers": torch.arange(self.bucket.max_steps, dtype=torch.int32),
            **tables,
        }

    def _ropes(self, video_positions: Tensor, audio_tokens: int) -> dict[str, Tensor]:
        config, audio_positions = self.config, latents.audio_positions(audio_tokens)
        video_max, audio_max = (
            config.positional_embedding_max_pos,
            config.audio_positional_embedding_max_pos,
        )
        cross_max = (max(video_max[0], audio_max[0]),)
        heads, theta = config.video.heads, config.positional_embedding_theta
        tables = {
            "video": split_rope(video_positions, video_max, config.video.inner, heads, theta),
            "audio": split_rope(audio_positions, audio_max, config.audio.inner, heads, theta),
            "video_cross": split_rope(
                video_positions[:, :1], cross_max, config.audio.inner, heads, theta
            ),
            "audio_cross": split_rope(audio_positions, cross_max, config.audio.inner, heads, theta),
        }
        return {
            f"{name}_{part}": getattr(rope, part)
            for name, rope in tables.items()
            for part in Rope._fields
        }

    def start(self) -> None:
        """Put the noised latents where the steps find them."""
        self.ranks.put(self.bucket.name, video_latent=self.video, audio_latent=self.audio)

    def step(self, number: int) -> float:
        """One step, latents to next latents on the ranks; returns the device's milliseconds."""
        try:
            return self.ranks.run(self.bucket.name, self.sequence[number], step=number)
        except NotFiniteError as error:
            sigmas = self.stage.sigmas
            raise RunError(
                f"{error} after step {number + 1} of {len(sigmas) - 1} of {self.stage.name} (sigma"
                f" {sigmas[number]:.4g} to {sigmas[number + 1]:.4g}): the weights or the inputs are"
                f" broken, or {str(self.dtype).removeprefix('torch.')} is too narrow for them"
            ) from None

    def result(self, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """The latents (1, 128, F, h, w) and (1, 8, Ta, 16), which every rank must hold bit for bit
        alike."""
        hashes = self.ranks.hashes(*LATENTS)
        if len(set(hashes)) != 1:
            raise RunError(f"the ranks ended with different latents: {hashes}")
        video, audio = (self.ranks.get(self.bucket.name, name) for name in LATENTS)
        return latents.unpatchify_video(video, shape), latents.unpatchify_audio(audio)
