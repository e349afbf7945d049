"""The oracle of what is given: a sound, a video to change, references, guides. ltx-pipelines
1.0.0's own functions and parts of its pipelines, with the numerics of later releases.

Besides what oracle.py and recipes_oracle.py patch, in later releases

  a frozen stream has sigma 0, for its own text and for the stream that listens to it
  a reference has a time scale: it is read and placed in time by that
  a clip to dub is a reference of both stages, and its sound's tokens lie before the clip

The text contexts are the caller's; the mel spectrogram is ours, which test_input_media.py compares
with its definition (torchaudio need not be there). Wrong ways to do it are subclasses of `Given`.
"""

import dataclasses
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import oracle
import recipes_oracle
import torch
from torch import Tensor

from ltx_neuron.host.spectrogram import log_mel, mel_sizes, resample

CPU, FP32 = torch.device("cpu"), torch.float32


@dataclasses.dataclass(frozen=True)
class Job(recipes_oracle.Job):
    """What to generate.

    sound           (path, start time, longest duration)
    retake          (path, start time, end time, "both", "video" or "audio")
    references      each (path, strength)
    scales          of their pixels and of their frames
    attention_mask  (path, strength)
    dubbing         (path, strength)
    voice           (path, longest duration)
    identity        scale of the guidance towards the voice
    sound_only      no video, which is then no stream
    stage_1_loras   besides `loras`
    """

    sound: tuple | None = None
    retake: tuple | None = None
    references: tuple = ()
    scales: tuple[int, int] = (1, 1)
    attention_mask: tuple | None = None
    dubbing: tuple | None = None
    voice: tuple | None = None
    identity: float = 0.0
    sound_only: bool = False
    images_as_guides: bool = False
    skip_stage_2: bool = False
    stage_1_loras: tuple = ()


class Stream(NamedTuple):
    """What a stream of a stage begins with (ModalitySpec of later releases)."""

    latent: Tensor | None = None
    noise_scale: float | Tensor = 1.0
    items: tuple = ()
    frozen: bool = False


@torch.no_grad()
def generate(assets, job: Job, contexts, recipe: type | None = None, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    """Latents and encoded inputs under --save-tensors' names; `contexts` is called with a prompt;
    `recipe` is a subclass of Given."""
    recipe = recipe or (Alone if job.sound_only else Given)
    with recipes_oracle.semantics("later"), _semantics(recipe), oracle.one_thread():
        return recipe(assets, job, contexts, dtype).run()


@cache
def _transformer(assets, loras: tuple, dtype: torch.dtype):
    return recipes_oracle._fused(assets, loras).to(dtype).eval()


@cache
def _encoders(assets, dtype: torch.dtype) -> tuple:
    """Of video and audio, loaded by ltx-core's factory, and that."""
    models = oracle.ledger(assets, dtype)
    return models, models.video_encoder(), models.audio_encoder()


class VoiceReference(NamedTuple):
    """AudioConditionByReferenceLatent of later releases: tokens behind the clip's, in time before
    it: they end `gap` seconds before 0; None: they begin at 0."""

    latent: Tensor
    gap: float | None = 0.04
    mask: float = 0.0

    def apply_to(self, latent_state, latent_tools):
        from ltx_core.types import AudioLatentShape

        tokens = latent_tools.patchifier.patchify(self.latent)
        shape = AudioLatentShape.from_torch_shape(self.latent.shape)
        positions = latent_tools.patchifier.get_patch_grid_bounds(shape, CPU)
        if self.gap is not None:
            positions = positions - positions.max().item() - self.gap
        mask = torch.full((1, tokens.shape[1], 1), self.mask)
        added = dict(latent=torch.zeros_like(tokens), clean_latent=tokens, denoise_mask=mask)
        joined = {name: torch.cat([getattr(latent_state, name), x], 1) for name, x in added.items()}
        positions = torch.cat([latent_state.positions, positions], 2)
        return dataclasses.replace(latent_state, **joined, positions=positions)


class FromZeros(NamedTuple):
    """An item whose tokens begin as zeros, as in later releases."""

    item: Any

    def apply_to(self, latent_state, latent_tools):
        state, before = self.item.apply_to(latent_state, latent_tools), latent_state.latent.shape[1]
        state.latent[:, before:] = 0
        return state


class Given(recipes_oracle.Recipe):
    """The stages of a2vid_two_stage, retake, ic_lora, keyframe_interpolation and dubit."""

    def __init__(self, assets, job: Job, contexts, dtype: torch.dtype = FP32):
        from ltx_core.components.noisers import GaussianNoiser

        self.assets, self.job, self.dtype, self.contexts = assets, job, dtype, contexts
        self.models, self.encoder, self.audio_encoder = _encoders(assets, dtype)
        self.step0: dict[str, Tensor] = {}
        self.noiser = GaussianNoiser(torch.Generator().manual_seed(job.seed))
        self.inputs: dict[str, Tensor] = {}

    def run(self) -> dict[str, Tensor]:
        from ltx_core.components.schedulers import LTX2Scheduler
        from ltx_core.model.upsampler import upsample_video
        from ltx_pipelines.utils import constants

        job, sizes = self.job, (self.job.height, self.job.width)
        self.inputs = self._encoded_inputs()
        sigmas = torch.tensor(constants.DISTILLED_SIGMA_VALUES)
        if job.video is not None:
            sigmas = LTX2Scheduler().execute(steps=job.steps, latent=self.counted_latent())
        first = [side // 2 for side in sizes] if job.two_stage else sizes
        loras = job.loras + job.stage_1_loras
        self.predict = self._simple(loras) if job.video is None else self._guided(loras)
        video, audio = self._stage(*first, sigmas)
        tensors = {**self.inputs, **self.step0, "s1_video": video, "s1_audio": audio}
        if not job.two_stage or job.skip_stage_2:
            return tensors
        upsampled = upsample_video(video, self.encoder, self.models.spatial_upsampler())
        self.predict = self._simple(self.loras_of_stage_2())
        sigmas = torch.tensor(constants.STAGE_2_DISTILLED_SIGMA_VALUES)
        video, audio = self._stage(*sizes, sigmas, upsampled, audio)
        return tensors | {"upsampled": upsampled, "s2_video": video, "s2_audio": audio}

    def _transformer(self, loras: tuple):
        return _transformer(self.assets, loras, self.dtype)

    # --- what the wrong ways change ---------------------------------------------------------------

    @staticmethod
    def frozen_sigma(sigma: Tensor) -> Tensor:
        return torch.zeros_like(sigma)

    def counted_latent(self) -> Tensor | None:
        """Whose tokens the dev schedule counts: HQ's alone."""
        job = self.job
        if job.sampler == "euler":
            return None
        sides = (side // (2 if job.two_stage else 1) // 32 for side in (job.height, job.width))
        return torch.empty(1, 128, (job.num_frames + 7) // 8, *sides)

    def loras_of_stage_2(self) -> tuple:
        return self.job.loras + self.job.refining_loras

    def negative_contexts(self) -> tuple[Tensor, Tensor | None]:
        """The negative pass of audio to video reads the positive prompt in the audio stream."""
        video, audio = self.contexts(self.job.negative_prompt)
        return video, None if self.job.sound else audio

    def given_sound(self, scale: float | Tensor) -> Stream:
        """Of either stage: not what the first one ended with, and without noise."""
        return Stream(self.inputs["audio_latent"], 0.0, frozen=True)

    def kept(self, latent: Tensor) -> Stream:
        """The stream that a retake does not touch."""
        return Stream(latent, items=(self.region(0.0, 0.0),), frozen=True)

    def dubbed(self, sound: Tensor | None) -> Stream:
        """The sound of a stage of dubbing or with a voice. sound: what the first one ended with."""
        if sound is None:
            return Stream(items=(VoiceReference(self.inputs["audio_reference"]),))
        items = (VoiceReference(sound),) if self.job.dubbing else ()
        return Stream(sound, 0.0, items, frozen=True)

    def seconds_of_voice(self) -> float:
        """How much of the sound of the clip to dub is read at most: all."""
        return 60.0  # without a limit 1.0.0 reads no Matroska

    def identified(self, kind: str, scale: float) -> float:
        """The scale of identity guidance of a stream."""
        return scale if kind == "audio" else 0.0

    def rescaled(self, calculate, own: int, cond: Tensor, *others: Tensor) -> Tensor:
        """A stream's guided prediction. calculate: ltx-core's, of whatever tokens."""
        return calculate(cond, *others)

    def negative(self, uncond: Tensor, without: Tensor) -> Tensor:
        """The sound of the negative pass. without: if it had no voice's tokens."""
        return uncond

    def _guided(self, loras: tuple):
        return self._with_identity(super()._guided(loras), self._transformer(loras))

    def _with_identity(self, denoise, model):
        """A guided step with one pass more, without the voice's tokens, whose term joins the others
        before any rescale: as a part of STG's, whose scale must not be 0."""
        from ltx_core.components.guiders import MultiModalGuider
        from ltx_pipelines.utils import helpers

        job, calculate = self.job, MultiModalGuider.calculate
        if not job.voice:
            return denoise
        own = round(job.num_frames / job.frame_rate * 25)

        def bare(state):
            names = ("latent", "denoise_mask", "clean_latent")
            cut = {name: getattr(state, name)[:, :own] for name in names}
            return dataclasses.replace(state, **cut, positions=state.positions[:, :, :own])

        def with_identity(video_state, audio_state, sigmas, step_index):
            states = video_state, bare(audio_state)

            def predict(prompt):
                modalities = (
                    helpers.modality_from_latent_state(state, context, sigmas[step_index])
                    for state, context in zip(states, self.contexts(prompt), strict=True)
                )
                pair = dict(zip(("video", "audio"), modalities, strict=True))
                return model(**pair, perturbations=None)

            without, negative = predict(job.prompt), predict(job.negative_prompt)

            def guided(guider, cond, uncond, perturbed, isolated):
                sound = cond.shape[1] == audio_state.latent.shape[1]
                count = own if sound else cond.shape[1]
                if sound:
                    uncond = torch.cat([self.negative(uncond[:, :own], negative[1]), uncond[:, own:]], 1)
                scale = self.identified("audio" if sound else "video", job.identity)
                perturbed, delta = perturbed.clone(), cond[:, :count] - without[int(sound)]
                perturbed[:, :count] -= scale / guider.params.stg_scale * delta
                of_tokens = lambda *predictions: calculate(guider, *predictions)  # noqa: E731
                return self.rescaled(of_tokens, count, cond, uncond, perturbed, isolated)

            assert video_state.latent.shape[1] != audio_state.latent.shape[1]
            with mock.patch.object(MultiModalGuider, "calculate", guided):
                return denoise(video_state, audio_state, sigmas, step_index)

        return with_identity

    def references_of(self, first: bool) -> tuple:
        """Each (path, strength), of a stage."""
        if self.job.dubbing:
            return (self.job.dubbing,)
        return self.job.references if first else ()

    def region(self, start: float, end: float):
        from ltx_pipelines.retake import TemporalRegionMask

        return TemporalRegionMask(start, end, self.job.frame_rate)

    def padded(self, sound: Tensor, frames: int) -> Tensor:
        """A sound's latent, as long as the video."""
        missing = max(0, frames - sound.shape[2])
        return torch.nn.functional.pad(sound, (0, 0, 0, missing))[:, :, :frames]

    def reference(self, item):
        """A reference's item, or the one inside an item that weighs it."""
        item.time_scale = self.job.scales[1]
        return item

    def mask_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in which the attention mask is read."""
        return height, width

    def weights(self, mask: Tensor, own_tokens: int) -> Tensor:
        """How much each token attends to each, (1, T, T); the clip's own tokens come first."""
        return mask

    def drawn(self, kind: str, before: Tensor, own_tokens: int) -> None:
        """Called after a stream's noise was drawn, with the generator's state before."""

    # --- the stages -------------------------------------------------------------------------------

    def _encoded_inputs(self) -> dict[str, Tensor]:
        from ltx_core.types import AudioLatentShape
        from ltx_pipelines.utils.media_io import load_video_conditioning

        job, inputs = self.job, {}
        seconds = job.num_frames / job.frame_rate
        frames = AudioLatentShape.from_duration(1, seconds).frames
        if job.retake:
            path, size = str(job.retake[0]), (job.height, job.width)
            pixels = load_video_conditioning(path, *size, job.num_frames, self.dtype, CPU)
            inputs["video_latent"] = self.encoder(pixels)
            sound = self._sound(path, 0.0, seconds)
            if sound is not None:
                inputs["audio_latent"] = self.padded(sound, frames)
        if job.sound:
            path, start, duration = job.sound
            sound = self._sound(path, start, seconds if duration is None else duration)
            inputs["audio_latent"] = sound[:, :, :frames]
        if voice := job.dubbing or job.voice:
            longest = job.voice[1] if job.voice else self.seconds_of_voice()
            sound = self._sound(voice[0], 0.0, longest)
            assert sound is not None
            inputs["audio_reference"] = sound
        return inputs

    def _sound(self, path, start: float, duration: float) -> Tensor | None:
        from ltx_pipelines.utils.media_io import decode_audio_from_file

        sound = decode_audio_from_file(str(path), CPU, start, duration)
        if sound is None:
            return None
        return self._latent_of_sound(sound.waveform[0], sound.sampling_rate)

    def _latent_of_sound(self, waveform: Tensor, rate: int) -> Tensor:
        sizes = mel_sizes(self.models.transformer_builder.model_config())
        mel = log_mel(resample(waveform, rate, sizes.rate), sizes)
        return self.audio_encoder(mel.to(self.dtype))

    def _stage(self, height: int, width: int, sigmas: Tensor, video=None, audio=None) -> tuple[Tensor, Tensor]:
        from ltx_core.types import VideoPixelShape
        from ltx_pipelines.utils.helpers import noise_audio_state, noise_video_state

        shape = VideoPixelShape(1, self.job.num_frames, height, width, self.job.frame_rate)
        streams = self._streams(height, width, sigmas, video, audio)
        begin = {"video": noise_video_state, "audio": noise_audio_state}
        begun = [self._begun(kind, begin[kind], shape, stream) for kind, stream in zip(begin, streams, strict=True)]
        states = self._loop(sigmas, *(state for state, _ in begun), None)
        return tuple(
            tools.unpatchify(tools.clear_conditioning(state)).latent
            for state, (_, tools) in zip(states, begun, strict=True)
        )

    def _streams(self, height: int, width: int, sigmas: Tensor, video, audio) -> tuple:
        job, scale = self.job, 1.0 if video is None else sigmas[0]
        if job.retake:
            return tuple(self._retaken(kind) for kind in ("video", "audio"))
        items = self._items(height, width, self.references_of(video is None))
        if job.dubbing or job.voice:
            return Stream(video, scale, items), self.dubbed(audio)
        sound = self.given_sound(scale) if job.sound else Stream(audio, scale)
        return Stream(video, scale, items), sound

    def _retaken(self, kind: str) -> Stream:
        _, start, end, regenerate = self.job.retake
        latent = self.inputs.get(f"{kind}_latent")
        if latent is None:
            return Stream()
        if regenerate not in (kind, "both"):
            return self.kept(latent)
        return Stream(latent, items=(self.region(start, end),))

    def _begun(self, kind: str, begin, shape, stream: Stream) -> tuple:
        """A stream's noised state, and ltx-core's tools for it."""
        from ltx_pipelines.utils.types import PipelineComponents

        before = self.noiser.generator.get_state()
        state, tools = begin(
            shape,
            self.noiser,
            list(stream.items),
            PipelineComponents(self.dtype, CPU),
            self.dtype,
            CPU,
            stream.noise_scale,
            stream.latent,
        )
        own_tokens = tools.target_shape.token_count()
        self.drawn(kind, before, own_tokens)
        if stream.frozen:
            mask = torch.zeros_like(state.denoise_mask)
            state = dataclasses.replace(state, denoise_mask=mask)
        if state.attention_mask is not None:
            weights = self.weights(state.attention_mask, own_tokens)
            state = dataclasses.replace(state, attention_mask=weights)
        return state, tools

    def _items(self, height: int, width: int, references: tuple) -> tuple:
        """Images and references, by the pipelines' own functions."""
        from ltx_pipelines import ic_lora
        from ltx_pipelines.utils import helpers
        from ltx_pipelines.utils.args import ImageConditioningInput

        job = self.job
        images = [ImageConditioningInput(str(path), *placed) for path, *placed in job.images]
        if job.images_as_guides:
            append = helpers.image_conditionings_by_adding_guiding_latent
            return tuple(append(images, height, width, self.encoder, self.dtype, CPU))
        pipeline = SimpleNamespace(
            dtype=self.dtype,
            device=CPU,
            reference_downscale_factor=job.scales[0],
            _downsample_mask_to_latent=ic_lora.ICLoraPipeline._downsample_mask_to_latent,
        )
        masked = job.attention_mask and references
        with mock.patch.object(ic_lora, "load_video_conditioning", self._read_slowly):
            items = ic_lora.ICLoraPipeline._create_conditionings(
                pipeline,
                images,
                [(str(path), strength) for path, strength in references],
                height,
                width,
                job.num_frames,
                self.encoder,
                job.attention_mask[1] if masked else 1.0,
                self._mask_pixels(height, width) if masked else None,
            )
        for item in items[len(images) :]:
            self.reference(getattr(item, "conditioning", item))
        if job.dubbing:
            items[len(images) :] = map(FromZeros, items[len(images) :])
        return tuple(items)

    def _read_slowly(self, *arguments, **named) -> Tensor:
        """A reference's pixels: of frames 0, 1, 1 + its time scale, and so on."""
        from ltx_pipelines.utils.media_io import load_video_conditioning

        pixels = load_video_conditioning(*arguments, **named)
        return pixels[:, :, [0, *range(1, pixels.shape[2], self.job.scales[1])]]

    def _mask_pixels(self, height: int, width: int) -> Tensor:
        from ltx_pipelines.utils.media_io import load_video_conditioning

        path, size = str(self.job.attention_mask[0]), self.mask_size(height, width)
        pixels = load_video_conditioning(path, *size, self.job.num_frames, self.dtype, CPU)
        return ((pixels.mean(dim=1, keepdim=True) + 1) / 2).clamp(0, 1)


class KeptBeginsAsNoise(Given):
    """ltx-pipelines 1.2.0."""

    def kept(self, latent):
        return Stream(latent, 1.0, frozen=True)


class TwoByTwo(Given):
    """The model sees four windows of the video, each of `window` x `window` cells in a corner of
    the picture, with the other tokens that overlap it. The whole video's prediction is their sum,
    in which the weights of neighbours change linearly over the cells that they share; that of a
    token of a reference is the mean of those that have it, and so is the sound's."""

    window = 3  # cells of 32 pixels

    def _transformer(self, loras: tuple):
        model = super()._transformer(loras)

        def predict(video, audio, perturbations):
            side = self.job.height // (2 if self.job.two_stage else 1) // 32
            own = (self.job.num_frames + 7) // 8 * side**2
            total, sounds = torch.zeros_like(video.latent), []
            seen = torch.zeros(video.latent.shape[1])
            for corner in ((y, x) for y in (0, side - self.window) for x in (0, side - self.window)):
                tokens, weights = [], []
                for token in range(video.latent.shape[1]):
                    weight = 1.0
                    for axis, begin in enumerate(corner):
                        start, end = (video.positions[0, 1 + axis, token] / 32).tolist()
                        cells = min(end, begin + self.window) - max(start, begin)
                        weight *= self.share(int(start), begin, side) if cells > 0 else 0.0
                    if weight:
                        tokens.append(token)
                        weights.append(weight if token < own else 1.0)
                origin = torch.tensor([0, *corner]).view(1, 3, 1, 1) * 32
                mask = video.attention_mask
                part = dataclasses.replace(
                    video,
                    latent=video.latent[:, tokens],
                    timesteps=video.timesteps[:, tokens],
                    positions=video.positions[:, :, tokens] - origin,
                    attention_mask=None if mask is None else mask[:, tokens][:, :, tokens],
                )
                picture, sound = model(video=part, audio=audio, perturbations=perturbations)
                total[:, tokens] += picture * torch.tensor(weights)[:, None]
                seen[tokens] += torch.tensor(weights)
                sounds.append(sound)
            return total / seen[:, None], torch.stack(sounds).mean(0)

        return predict

    def share(self, cell: int, begin: int, side: int) -> float:
        """The weight of a cell in the window that begins at `begin`, of one axis."""
        shared = 2 * self.window - side
        place = cell - (side - self.window)  # in the cells that both have
        if not 0 <= place < shared:
            return 1.0
        rising = (place + 1) / (shared + 1)
        return rising if begin else 1 - rising


class Alone(Given):
    """t2a_one_stage of later releases."""

    def run(self) -> dict[str, Tensor]:
        from ltx_core.components.diffusion_steps import EulerDiffusionStep
        from ltx_core.components.guiders import MultiModalGuider, MultiModalGuiderParams
        from ltx_core.components.schedulers import LTX2Scheduler
        from ltx_core.guidance import perturbations
        from ltx_core.types import VideoPixelShape
        from ltx_pipelines.utils import helpers

        job, model, stepper = self.job, self._transformer(self.job.loras), EulerDiffusionStep()
        guidance = job.guidance[1]
        guider = MultiModalGuider(params=MultiModalGuiderParams(**guidance), negative_context=None)
        kind, blocks = perturbations.PerturbationType.SKIP_AUDIO_SELF_ATTN, guidance["stg_blocks"]
        skip = perturbations.PerturbationConfig([perturbations.Perturbation(kind, [*blocks])])
        skipped = perturbations.BatchedPerturbationConfig([skip])
        # Of the video only its length counts.
        shape = VideoPixelShape(1, job.num_frames, 32, 32, job.frame_rate)
        state, tools = self._begun("audio", helpers.noise_audio_state, shape, Stream())
        sigmas = LTX2Scheduler().execute(steps=job.steps)
        for step, sigma in enumerate(sigmas[:-1]):

            def predict(prompt, skipped=None, state=state, sigma=sigma):
                context = self.contexts(prompt)[1]
                modality = helpers.modality_from_latent_state(state, context, sigma)
                return model(video=None, audio=modality, perturbations=skipped)[1]

            cond, uncond = predict(job.prompt), predict(job.negative_prompt)
            x0 = guider.calculate(cond, uncond, predict(job.prompt, skipped), cond)
            state = dataclasses.replace(state, latent=stepper.step(state.latent, x0, sigmas, step))
        return {"s1_audio": tools.unpatchify(state).latent}


@contextmanager
def _semantics(recipe: type):
    from ltx_core.conditioning import VideoConditionByReferenceLatent as Reference
    from ltx_pipelines.utils import helpers

    state_to_modality = helpers.modality_from_latent_state

    def modality(state, context, sigma, *enabled, **more):
        frozen = not state.denoise_mask.any()
        sigma = recipe.frozen_sigma(sigma) if frozen else sigma
        return state_to_modality(state, context, sigma, *enabled, **more)

    with (
        mock.patch.object(helpers, "modality_from_latent_state", modality),
        mock.patch.object(Reference, "apply_to", _slowed(Reference.apply_to)),
    ):
        yield


def _slowed(original):
    def apply_to(self, latent_state, latent_tools):
        appended, before = original(self, latent_state, latent_tools), latent_state.latent.shape[1]
        scale, positions = getattr(self, "time_scale", 1), appended.positions.clone()
        shift = getattr(self, "time_shift", scale - 1) / latent_tools.fps
        positions[:, 0, before:] = (positions[:, 0, before:] * scale - shift).clamp(min=0)
        return dataclasses.replace(appended, positions=positions)

    return apply_to
