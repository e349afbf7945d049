"""Runs a job of ltx-neuron by Lightricks' own packages: the functions of ltx-pipelines 1.0.0 and parts
of its pipelines, with the numerics of later releases (patches.py), on any tiny assets.

Weights are loaded by ltx-core's own loaders, Gemma3 by transformers. Of ltx_neuron come the job's
settings, and the mel spectrogram, which unit tests compare with its definition (torchaudio need not be
there).
"""

import dataclasses
import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from golden.nag import Nag, guided
from golden.patches import numerics
from ltx_neuron.host.spectrogram import log_mel, mel_sizes, resample
from ltx_neuron.sampling import extension

CPU, FP32 = torch.device("cpu"), torch.float32
STREAMS = ("video", "audio")


@torch.no_grad()
def generate(assets, job, contexts=None, dtype: torch.dtype = FP32, decode: bool = False) -> dict[str, Tensor]:
    """Tensors under the names of --save-tensors, and "step0.<pass>.<stream>" of a guided first step,
    "guided" being what guidance makes of the passes.

    job        a Job of ltx_neuron, whose `compat` chooses the release
    contexts   called with a prompt, returns those of video and audio; None: Gemma3 encodes it
    decode     frames and waveform, too, in float32
    """
    release = "1.0.0" if job.compat == "ltx-core-1.0.0" else "later"
    with numerics(release):
        run = _class_of(job)(assets, job, contexts or (lambda prompt: _encoded(assets, prompt, dtype)), dtype)
        with _negative_prompt(run):
            tensors = run.run()
        if decode:
            tensors["frames"] = decode_video(assets, tensors[job.video_key])
            tensors["waveform"] = decode_audio(assets, tensors[job.audio_key])
        if job.upscale in ("spatial", "both"):
            tensors["upsampled"] = upsampled(assets, tensors["s1_video"], assets.spatial_upsampler)
        if job.upscale in ("temporal", "both"):
            latent = tensors["upsampled" if job.upscale == "both" else "s1_video"]
            tensors["temporal_video"] = upsampled(assets, latent, assets.temporal_upsampler)
    return tensors


def _class_of(job) -> type:
    if job.sound_only:
        return SoundAlone
    if job.tile:
        return TwoByTwo
    if job.retake and job.retake.extend:
        return Longer
    if job.compat == "ltx-pipelines-1.2.0":
        return KeptBeginsAsNoise
    return Pipeline


def _negative_prompt(run):
    """Of a job with normalized attention guidance, within the block."""
    job = run.job
    if job.guided or job.nag_scale is None:
        return nullcontext()
    video, audio = run.contexts(job.negative_prompt)
    if job.sound:  # it is not generated, so nothing guides it
        audio = run.contexts(job.prompt)[1]
    return guided(Nag(job.nag_scale, job.nag_alpha, job.nag_tau), video, audio)


# --- models ---------------------------------------------------------------------------------------


@cache
def encode(assets, prompt: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every hidden state of Gemma3 over the padded prompt, its mask, and both contexts."""
    from ltx_core.text_encoders.gemma import GemmaTextEncoder
    from ltx_core.text_encoders.gemma.encoders import encoder_configurator
    from ltx_core.text_encoders.gemma.tokenizer import LTXVGemmaTokenizer
    from transformers import Gemma3ForConditionalGeneration

    root = str(assets.gemma_root)
    gemma = Gemma3ForConditionalGeneration.from_pretrained(root, dtype=dtype, local_files_only=True).eval()
    encoder = GemmaTextEncoder(gemma, LTXVGemmaTokenizer(root, 1024), dtype=dtype)
    with torch.no_grad():
        states, mask = encoder.encode(prompt)
        # The projections' width follows from a configuration of Gemma3-12B written out in ltx-core.
        config = json.loads((assets.gemma_root / "config.json").read_text())
        sizes = SimpleNamespace(text_config=SimpleNamespace(**config["text_config"]))
        with mock.patch.object(encoder_configurator, "GEMMA3_CONFIG_FOR_LTX", sizes):
            processor = ledger(assets, dtype).gemma_embeddings_processor()
        contexts = processor.process_hidden_states(states, mask)
    return {
        "hidden_states": torch.stack(states, dim=-1),
        "attention_mask": mask,
        "video_context": contexts.video_encoding,
        "audio_context": contexts.audio_encoding,
    }


def _encoded(assets, prompt: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    encoded = encode(assets, prompt, dtype)
    return encoded["video_context"], encoded["audio_context"]


def ledger(assets, dtype: torch.dtype):
    """The pipelines' model factory; without Gemma, whose loading in 1.0.0 is for transformers 4."""
    from ltx_pipelines.utils import ModelLedger

    paths = dict(checkpoint_path=str(assets.checkpoint), spatial_upsampler_path=str(assets.spatial_upsampler))
    return ModelLedger(dtype=dtype, device=CPU, **paths)


@torch.no_grad()
def decode_video(assets, latent: Tensor) -> Tensor:
    """Frames, uint8 (N, H, W, 3), decoded in the latent's dtype and the default tiles."""
    from ltx_core.model.video_vae import TilingConfig
    from ltx_core.model.video_vae import decode_video as decode

    return torch.cat(list(decode(latent, ledger(assets, latent.dtype).video_decoder(), TilingConfig.default())))


@torch.no_grad()
def decode_audio(assets, latent: Tensor) -> Tensor:
    """Waveform, float32 (2, samples)."""
    from ltx_core.model.audio_vae import decode_audio as decode

    models = ledger(assets, FP32)
    return decode(latent.float(), models.audio_decoder(), models.vocoder()).waveform


@torch.no_grad()
def upsampled(assets, latent: Tensor, path) -> Tensor:
    """A latent after an upsampler."""
    from ltx_core.loader.single_gpu_model_builder import SingleGPUModelBuilder
    from ltx_core.model.upsampler import LatentUpsamplerConfigurator, upsample_video

    upsampler = SingleGPUModelBuilder(LatentUpsamplerConfigurator, str(path)).build(device=CPU, dtype=FP32)
    return upsample_video(latent, ledger(assets, FP32).video_encoder(), upsampler)


def fused_state(assets, loras: tuple) -> dict[str, Tensor]:
    """The DiT's tensors as ltx-core's loader fuses (path, strength) of LoRAs, in the checkpoint's own
    dtypes, under the DiT's names."""
    return {name.removeprefix("velocity_model."): tensor for name, tensor in _fused(assets, loras).state_dict().items()}


def _fused(assets, loras: tuple):
    from ltx_core.loader import LTXV_LORA_COMFY_RENAMING_MAP, LoraPathStrengthAndSDOps
    from ltx_core.model.transformer import X0Model

    builder = ledger(assets, FP32).transformer_builder
    named = tuple(
        LoraPathStrengthAndSDOps(str(path), strength, LTXV_LORA_COMFY_RENAMING_MAP) for path, strength in loras
    )
    return X0Model(dataclasses.replace(builder, loras=named).build(device=CPU, dtype=None))


@cache
def _transformer(assets, loras: tuple, dtype: torch.dtype):
    return _fused(assets, loras).to(dtype).eval()


@cache
def _encoders(assets, dtype: torch.dtype) -> tuple:
    """Of video and audio, loaded by ltx-core's factory, and that."""
    models = ledger(assets, dtype)
    return models, models.video_encoder(), models.audio_encoder()


# --- inputs of a stage ----------------------------------------------------------------------------


class Stream(NamedTuple):
    """What a stream of a stage begins with (ModalitySpec of later releases)."""

    latent: Tensor | None = None
    noise_scale: float | Tensor = 1.0
    items: tuple = ()
    frozen: bool = False


class VoiceReference(NamedTuple):
    """AudioConditionByReferenceLatent of later releases: tokens behind the clip's, in time before
    it: they end 40 ms before 0."""

    latent: Tensor

    def apply_to(self, latent_state, latent_tools):
        from ltx_core.types import AudioLatentShape

        tokens = latent_tools.patchifier.patchify(self.latent)
        shape = AudioLatentShape.from_torch_shape(self.latent.shape)
        positions = latent_tools.patchifier.get_patch_grid_bounds(shape, CPU)
        positions = positions - positions.max().item() - 0.04
        mask = torch.zeros(1, tokens.shape[1], 1)
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


def _named(loras) -> tuple:
    return tuple((lora.path, lora.strength) for lora in loras)


def passes(video, audio) -> list[str]:
    """The passes that ltx-pipelines runs for two streams' guidance, in its order."""
    needs = {"uncond": ("cfg_scale", 1.0), "perturbed": ("stg_scale", 0.0), "isolated": ("modality_scale", 1.0)}
    used = (name for name, (scale, off) in needs.items() if any(getattr(s, scale) != off for s in (video, audio)))
    return ["cond", *used]


class Pipeline:
    """The stages of distilled, ti2vid_one_stage, ti2vid_two_stages, a2vid_two_stage, retake, ic_lora,
    keyframe_interpolation and dubit, with one generator."""

    def __init__(self, assets, job, contexts, dtype: torch.dtype = FP32):
        from ltx_core.components.noisers import GaussianNoiser

        self.assets, self.job, self.dtype, self.contexts = assets, job, dtype, contexts
        self.models, self.encoder, self.audio_encoder = _encoders(assets, dtype)
        self.step0: dict[str, Tensor] = {}
        self.noiser = GaussianNoiser(torch.Generator().manual_seed(job.seed))
        self.inputs: dict[str, Tensor] = {}
        retake = job.retake
        self.region = retake and (retake.start_time, retake.end_time)
        self.num_frames, self.voice = job.size.num_frames, job.reference_sound
        self.identity_scale = self.voice.identity_scale if self.voice and job.guided else 0.0

    @property
    def seconds(self) -> float:
        return self.num_frames / self.job.size.frame_rate

    def run(self) -> dict[str, Tensor]:
        from ltx_core.components.schedulers import LTX2Scheduler
        from ltx_core.model.upsampler import upsample_video
        from ltx_pipelines.utils import constants

        job, sizes = self.job, (self.job.size.height, self.job.size.width)
        two_stage = job.size.two_stage
        self.inputs = self._encoded_inputs()
        first = [side // 2 for side in sizes] if two_stage else sizes
        sigmas = torch.tensor(constants.DISTILLED_SIGMA_VALUES)
        if job.guided:
            # HQ alone counts the tokens.
            cells = torch.empty(1, 128, (self.num_frames + 7) // 8, *(side // 32 for side in first))
            counted = cells if job.sampler == "res_2s" else None
            sigmas = LTX2Scheduler().execute(steps=job.steps, latent=counted)
        loras = _named(job.loras + job.stage_1_loras)
        self.predict = self._guided(loras) if job.guided else self._simple(loras)
        video, audio = self._stage(*first, sigmas)
        tensors = {**self.inputs, **self.step0, "s1_video": video, "s1_audio": audio}
        if not two_stage or job.skip_stage_2:
            return tensors
        upsampled = upsample_video(video, self.encoder, self.models.spatial_upsampler())
        self.predict = self._simple(_named(job.loras + job.stage_2_loras))
        sigmas = torch.tensor(constants.STAGE_2_DISTILLED_SIGMA_VALUES)
        video, audio = self._stage(*sizes, sigmas, upsampled, audio)
        return tensors | {"upsampled": upsampled, "s2_video": video, "s2_audio": audio}

    # --- predictions ------------------------------------------------------------------------------

    def _transformer(self, loras: tuple):
        return _transformer(self.assets, loras, self.dtype)

    def _simple(self, loras: tuple):
        from ltx_pipelines.utils.helpers import simple_denoising_func

        return simple_denoising_func(*self.contexts(self.job.prompt), self._transformer(loras))

    def _guided(self, loras: tuple):
        """The denoising function of a guided stage, which records the passes of the first step."""
        from ltx_core.components.guiders import MultiModalGuiderParams, create_multimodal_guider_factory
        from ltx_pipelines.utils.helpers import multi_modal_guider_factory_denoising_func

        job, model, calls = self.job, self._transformer(loras), []
        streams = job.resolved_guidance.streams

        def recorded(**inputs):
            calls.append(model(**inputs))
            return calls[-1]

        video, audio = self.contexts(job.negative_prompt)
        # The negative pass of audio to video reads the positive prompt in the audio stream.
        negative = video, None if job.sound else audio
        factories = [
            create_multimodal_guider_factory(MultiModalGuiderParams(**vars(stream)), negative_context=context)
            for stream, context in zip(streams, negative, strict=True)
        ]
        denoise = multi_modal_guider_factory_denoising_func(*factories, *self.contexts(job.prompt), recorded)
        names = [*passes(*streams), "guided"]

        def first_step_recorded(video_state, audio_state, sigmas, step_index):
            guided = denoise(video_state, audio_state, sigmas, step_index)
            if not self.step0:
                for name, predictions in zip(names, [*calls, guided], strict=True):
                    self.step0 |= {f"step0.{name}.{s}": p for s, p in zip(STREAMS, predictions, strict=True)}
            return guided

        return self._with_identity(first_step_recorded, model) if self.voice else first_step_recorded

    def _with_identity(self, denoise, model):
        """A guided step with one pass more, without the voice's tokens, whose term joins the others
        before any rescale: as a part of STG's, whose scale must not be 0."""
        from ltx_core.components.guiders import MultiModalGuider
        from ltx_pipelines.utils import helpers

        job, calculate = self.job, MultiModalGuider.calculate
        clip = round(self.seconds * 25)  # tokens

        def bare(state):
            names = ("latent", "denoise_mask", "clean_latent")
            cut = {name: getattr(state, name)[:, :clip] for name in names}
            return dataclasses.replace(state, **cut, positions=state.positions[:, :, :clip])

        def with_identity(video_state, audio_state, sigmas, step_index):
            states = video_state, bare(audio_state)
            modalities = (
                helpers.modality_from_latent_state(state, context, sigmas[step_index])
                for state, context in zip(states, self.contexts(job.prompt), strict=True)
            )
            without = model(**dict(zip(STREAMS, modalities, strict=True)), perturbations=None)

            def guided(guider, cond, uncond, perturbed, isolated):
                if cond.shape[1] == audio_state.latent.shape[1]:
                    perturbed = perturbed.clone()
                    share = self.identity_scale / guider.params.stg_scale
                    perturbed[:, :clip] -= share * (cond[:, :clip] - without[1])
                return calculate(guider, cond, uncond, perturbed, isolated)

            assert video_state.latent.shape[1] != audio_state.latent.shape[1]
            with mock.patch.object(MultiModalGuider, "calculate", guided):
                return denoise(video_state, audio_state, sigmas, step_index)

        return with_identity

    def _loop(self, sigmas: Tensor, video, audio) -> tuple:
        from ltx_core.components.diffusion_steps import EulerDiffusionStep, Res2sDiffusionStep
        from ltx_pipelines.utils import euler_denoising_loop
        from ltx_pipelines.utils.samplers import res2s_audio_video_denoising_loop

        if self.job.sampler == "euler":
            return euler_denoising_loop(sigmas, video, audio, EulerDiffusionStep(), self.predict)
        stepper = Res2sDiffusionStep()
        return res2s_audio_video_denoising_loop(sigmas, video, audio, stepper, self.predict, model_dtype=self.dtype)

    # --- streams ----------------------------------------------------------------------------------

    def kept(self, latent: Tensor) -> Stream:
        """The stream that a retake does not touch."""
        return Stream(latent, items=(self._region(0.0, 0.0),), frozen=True)

    def _with_voice(self, sound: Tensor | None) -> Stream:
        """The sound of a stage of dubbing or with a voice. sound: what the first one ended with."""
        if sound is None:
            return Stream(items=(VoiceReference(self.inputs["audio_reference"]),))
        items = (VoiceReference(sound),) if self.job.dubbing else ()
        return Stream(sound, 0.0, items, frozen=True)

    def _region(self, start: float, end: float):
        from ltx_pipelines.retake import TemporalRegionMask

        return TemporalRegionMask(start, end, self.job.size.frame_rate)

    def padded(self, sound: Tensor, frames: int) -> Tensor:
        """A sound's latent, as long as the video."""
        missing = max(0, frames - sound.shape[2])
        return torch.nn.functional.pad(sound, (0, 0, 0, missing))[:, :, :frames]

    def _encoded_inputs(self) -> dict[str, Tensor]:
        from ltx_core.types import AudioLatentShape
        from ltx_pipelines.utils.media_io import load_video_conditioning

        job, inputs, seconds = self.job, {}, self.seconds
        frames = AudioLatentShape.from_duration(1, seconds).frames
        if job.retake:
            path, size = str(job.retake.path), (job.size.height, job.size.width)
            pixels = load_video_conditioning(path, *size, self.num_frames, self.dtype, CPU)
            inputs["video_latent"] = self.encoder(pixels)
            sound = self._sound(path, 0.0, seconds)
            if sound is not None:
                inputs["audio_latent"] = self.padded(sound, frames)
        if clip := job.sound:
            duration = seconds if clip.max_duration is None else clip.max_duration
            inputs["audio_latent"] = self._sound(clip.path, clip.start_time, duration)[:, :, :frames]
        if self.voice:
            # All of a clip's sound; without a limit 1.0.0 reads no Matroska.
            duration = 60.0 if job.dubbing else self.voice.max_duration
            inputs["audio_reference"] = self._sound(self.voice.path, 0.0, duration)
        return inputs

    def _sound(self, path, start: float, duration: float) -> Tensor | None:
        """The latent of a file's sound."""
        from ltx_pipelines.utils.media_io import decode_audio_from_file

        sound = decode_audio_from_file(str(path), CPU, start, duration)
        if sound is None:
            return None
        sizes = mel_sizes(self.models.transformer_builder.model_config())
        mel = log_mel(resample(sound.waveform[0], sound.sampling_rate, sizes.rate), sizes)
        return self.audio_encoder(mel.to(self.dtype))

    def _stage(self, height: int, width: int, sigmas: Tensor, video=None, audio=None) -> tuple[Tensor, Tensor]:
        """From noise, or from latents noised to the first sigma, to the latents at the end of the
        schedule."""
        from ltx_core.types import VideoPixelShape
        from ltx_pipelines.utils.helpers import noise_audio_state, noise_video_state

        shape = VideoPixelShape(1, self.num_frames, height, width, self.job.size.frame_rate)
        streams = self._streams(height, width, sigmas, video, audio)
        begun = [
            self._begun(begin, shape, stream)
            for begin, stream in zip((noise_video_state, noise_audio_state), streams, strict=True)
        ]
        states = self._loop(sigmas, *(state for state, _ in begun))
        return tuple(
            tools.unpatchify(tools.clear_conditioning(state)).latent
            for state, (_, tools) in zip(states, begun, strict=True)
        )

    def _streams(self, height: int, width: int, sigmas: Tensor, video, audio) -> tuple[Stream, Stream]:
        job, scale = self.job, 1.0 if video is None else sigmas[0]
        if job.retake:
            return self._retaken("video"), self._retaken("audio")
        picture = Stream(video, scale, self._items(height, width, self._references(video is None)))
        if self.voice:
            return picture, self._with_voice(audio)
        if job.sound:  # in either stage: not what the first one ended with, and without noise
            return picture, Stream(self.inputs["audio_latent"], 0.0, frozen=True)
        return picture, Stream(audio, scale)

    def _references(self, first: bool) -> tuple:
        """Those of a stage."""
        if self.job.dubbing:
            return (self.job.dubbing,)
        return tuple(self.job.references or ()) if first else ()

    def _retaken(self, kind: str) -> Stream:
        latent = self.inputs.get(f"{kind}_latent")
        if latent is None:
            return Stream()
        if self.job.retake.regenerate not in (kind, "both"):
            return self.kept(latent)
        return Stream(latent, items=(self._region(*self.region),))

    def _begun(self, begin, shape, stream: Stream) -> tuple:
        """A stream's noised state, and ltx-core's tools for it."""
        from ltx_pipelines.utils.types import PipelineComponents

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
        if stream.frozen:
            state = dataclasses.replace(state, denoise_mask=torch.zeros_like(state.denoise_mask))
        return state, tools

    def _items(self, height: int, width: int, references: tuple) -> tuple:
        """Images and references, by the pipelines' own functions."""
        from ltx_pipelines import ic_lora
        from ltx_pipelines.utils import helpers
        from ltx_pipelines.utils.args import ImageConditioningInput

        job = self.job
        images = [
            ImageConditioningInput(str(i.path), i.frame_index, i.strength, *(() if i.crf is None else (i.crf,)))
            for i in job.images
        ]
        if job.images_as_guides:
            append = helpers.image_conditionings_by_adding_guiding_latent
            return tuple(append(images, height, width, self.encoder, self.dtype, CPU))
        scales = next(((r.space_scale, r.time_scale) for r in references), (1, 1))
        pipeline = SimpleNamespace(
            dtype=self.dtype,
            device=CPU,
            reference_downscale_factor=scales[0],
            _downsample_mask_to_latent=ic_lora.ICLoraPipeline._downsample_mask_to_latent,
        )
        mask = job.attention_mask if references else None

        def read(*arguments, **named) -> Tensor:
            """A reference's pixels: of frames 0, 1, 1 + its time scale, and so on."""
            pixels = load_video_conditioning(*arguments, **named)
            return pixels[:, :, [0, *range(1, pixels.shape[2], scales[1])]]

        load_video_conditioning = ic_lora.load_video_conditioning
        with mock.patch.object(ic_lora, "load_video_conditioning", read):
            items = ic_lora.ICLoraPipeline._create_conditionings(
                pipeline,
                images,
                # A video that shows nothing but it stands beside a still picture.
                [(str(Path(r.path).with_suffix(".mkv") if r.still else r.path), r.strength) for r in references],
                height,
                width,
                self.num_frames,
                self.encoder,
                mask.strength if mask else 1.0,
                self._mask_pixels(mask.path, height, width) if mask else None,
            )
        for item in items[len(images) :]:
            getattr(item, "conditioning", item).time_scale = scales[1]
        if job.dubbing:
            items[len(images) :] = map(FromZeros, items[len(images) :])
        return tuple(items)

    def _mask_pixels(self, path, height: int, width: int) -> Tensor:
        from ltx_pipelines.utils.media_io import load_video_conditioning

        pixels = load_video_conditioning(str(path), height, width, self.num_frames, self.dtype, CPU)
        return ((pixels.mean(dim=1, keepdim=True) + 1) / 2).clamp(0, 1)


class KeptBeginsAsNoise(Pipeline):
    """A retake of ltx-pipelines 1.1.0 to 1.2.0."""

    def kept(self, latent):
        return Stream(latent, 1.0, frozen=True)


class Longer(Pipeline):
    """A video made longer in one window, as a retake of the longer clip: what is known, then zeros."""

    def __init__(self, assets, job, contexts, dtype: torch.dtype = FP32):
        super().__init__(assets, job, contexts, dtype)
        self.known_frames = job.retake.source_frames
        self.num_frames = self.known_frames + round(job.retake.extend * job.size.frame_rate)
        self.region = self.known_frames / job.size.frame_rate, self.seconds

    def _encoded_inputs(self):
        whole, rate = self.num_frames, self.job.size.frame_rate
        self.num_frames = self.known_frames
        known = super()._encoded_inputs()
        self.num_frames = whole
        clip = extension.Extension((whole - self.known_frames) / rate, self.known_frames, whole, rate)
        video = torch.zeros(1, 128, clip.video_latents, *known["video_latent"].shape[3:])
        audio = torch.zeros(1, 8, clip.audio_latents, 16)
        video[:, :, clip.known_video] = known["video_latent"]
        audio[:, :, clip.known_audio] = known["audio_latent"][:, :, clip.known_audio]
        return {"video_latent": video, "audio_latent": audio}

    def padded(self, sound, frames):
        return sound


class TwoByTwo(Pipeline):
    """The model sees four windows of the video, each of `window` x `window` cells in a corner of
    the picture, with the other tokens that overlap it. The whole video's prediction is their sum,
    in which the weights of neighbours change linearly over the cells that they share; that of a
    token of a reference is the mean of those that have it, and so is the sound's."""

    def _transformer(self, loras: tuple):
        model = super()._transformer(loras)
        size = self.job.size
        side, window = size.height // (2 if size.two_stage else 1) // 32, self.job.tile_height // 32

        def share(cell: int, begin: int) -> float:
            """The weight of a cell in the window that begins at `begin`, of one axis."""
            shared = 2 * window - side
            place = cell - (side - window)  # in the cells that both have
            if not 0 <= place < shared:
                return 1.0
            rising = (place + 1) / (shared + 1)
            return rising if begin else 1 - rising

        def predict(video, audio, perturbations):
            clip = (self.num_frames + 7) // 8 * side**2  # tokens
            total, sounds = torch.zeros_like(video.latent), []
            seen = torch.zeros(video.latent.shape[1])
            for corner in ((y, x) for y in (0, side - window) for x in (0, side - window)):
                tokens, weights = [], []
                for token in range(video.latent.shape[1]):
                    weight = 1.0
                    for axis, begin in enumerate(corner):
                        start, end = (video.positions[0, 1 + axis, token] / 32).tolist()
                        cells = min(end, begin + window) - max(start, begin)
                        weight *= share(int(start), begin) if cells > 0 else 0.0
                    if weight:
                        tokens.append(token)
                        weights.append(weight if token < clip else 1.0)
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


class SoundAlone(Pipeline):
    """t2a_one_stage of later releases."""

    def run(self) -> dict[str, Tensor]:
        from ltx_core.components.diffusion_steps import EulerDiffusionStep
        from ltx_core.components.guiders import MultiModalGuider, MultiModalGuiderParams
        from ltx_core.components.schedulers import LTX2Scheduler
        from ltx_core.guidance import perturbations
        from ltx_core.types import VideoPixelShape
        from ltx_pipelines.utils import helpers

        job, model, stepper = (self.job, self._transformer(_named(self.job.loras)), EulerDiffusionStep())
        guidance = job.resolved_guidance.streams[1]
        guider = MultiModalGuider(params=MultiModalGuiderParams(**vars(guidance)), negative_context=None)
        kind, blocks = perturbations.PerturbationType.SKIP_AUDIO_SELF_ATTN, guidance.stg_blocks
        skip = perturbations.PerturbationConfig([perturbations.Perturbation(kind, [*blocks])])
        skipped = perturbations.BatchedPerturbationConfig([skip])
        # Of the video only its length counts.
        shape = VideoPixelShape(1, self.num_frames, 32, 32, job.size.frame_rate)
        state, tools = self._begun(helpers.noise_audio_state, shape, Stream())
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
