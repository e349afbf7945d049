"""The host models: video VAE, latent upsamplers, audio decoder and vocoder, on the CPU."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ltx_neuron.config.diffusion import is_diffusion_vae
from ltx_neuron.config.profiles import Profile
from ltx_neuron.config.sound import SPAN_LATENTS, SPAN_ROWS, audio_decoder_config, vocoder_config
from ltx_neuron.config.video import video_decoder_config, video_encoder_config
from ltx_neuron.errors import UserError
from ltx_neuron.host import dtypes
from ltx_neuron.host.background import Background, wait_for
from ltx_neuron.host.input_files import Sound
from ltx_neuron.host.loading import (
    ModelFile,
    checkpoint_spec,
    import_ltx_core,  # noqa: F401 - other modules import it from here
    upsampler_spec,
)
from ltx_neuron.host.spectrogram import log_mel, mel_sizes, resample
from ltx_neuron.weights.model_files import ModelFiles

Config = TypeVar("Config")


def lay_channels_last(module: torch.nn.Module) -> None:
    """Store the weights of a module's convolutions with channels last, in place."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():
        if parameter.ndim in layouts:
            parameter.data = parameter.data.contiguous(memory_format=layouts[parameter.ndim])


class HostModels:
    """The models around the transformer: each is built at first use and kept until `release`.
    Latents are the transformer's, normalised by the VAE's per-channel statistics: video
    (1, 128, F, h, w) with F = (frames - 1) / 8 + 1, h = height / 32 and w = width / 32; audio
    (1, 8, Ta, 16). Any floating dtype is accepted. Every method raises UserError if a file is
    missing or its tensors do not match its config, and RunError if a model returns NaN or Inf."""

    def __init__(
        self,
        checkpoint_path: str | Path,  # with every model but the upsamplers
        config: Mapping[str, Any],  # the checkpoint's parsed `config` metadata
        dtype: torch.dtype,  # of the latents from video encoder and upsamplers
        spatial_upsampler_path: str | Path | None = None,
        temporal_upsampler_path: str | Path | None = None,
        # Of audio decoder and vocoder. bfloat16 is audible, and ltx-core uses float32
        audio_dtype: torch.dtype = torch.float32,
        profile: Profile | None = None,  # determines the video's tiles; None: the defaults
        # Of the released video decoder and encoder, and in bfloat16 of upsamplers. None: only the
        # video decoder is ours, all others are ltx-core's
        host_dtype: torch.dtype | None = None,
        tiles_1_0_0: bool = False,  # see Compat.tiles
        # Of a model with one file per part; None: the checkpoint has all parts
        files: ModelFiles | None = None,
    ):
        """Nothing is read yet."""
        self.profile, self.tiles_1_0_0 = profile, tiles_1_0_0
        self.checkpoint_path, self.files = checkpoint_path, files
        self.config = config
        self.dtype, self.audio_dtype, self.host_dtype = dtype, audio_dtype, host_dtype
        # A bfloat16 run may compute in float32, and rounds the result.
        self.latent_dtype = dtypes.of_latents(host_dtype, dtype) if host_dtype else dtype
        self.upsampler_paths = {
            "spatial": spatial_upsampler_path,
            "temporal": temporal_upsampler_path,
        }

    @cached_property
    def exact(self) -> "HostModels":
        """The video VAE in float32, for HDR."""
        exact = copy(self)
        exact.release()
        exact.dtype = exact.latent_dtype = torch.float32
        exact.host_dtype = self.host_dtype and torch.float32
        return exact

    @torch.no_grad()
    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels (1, 3, 1, H, W) in [-1, 1] as a latent (1, 128, 1, H/32, W/32)."""
        return self.video_encoder(pixels.to(self.latent_dtype)).to(self.dtype)

    @torch.no_grad()
    def encode_video(
        self, pixels: torch.Tensor, whole: bool = False, rank_tiles: Any = None
    ) -> torch.Tensor:
        """Encode pixels (1, 3, 8F-7, 32h, 32w) in [-1, 1] as a latent (1, 128, F, h, w) in
        `self.dtype`; long and large clips in tiles, unless `whole`. rank_tiles: encodes the tiles
        on the ranks: backends.tiles.RankEncoder."""
        from ltx_neuron.host.tiles import encode_tiled

        if rank_tiles and not whole:
            latent = encode_tiled(lambda tiles: map(torch.Tensor.float, rank_tiles(tiles)), pixels)
            self._spec("video_encoder").check_output(None, (pixels,), latent)
            return latent.to(self.dtype)
        pixels, encoder = pixels.to(self.latent_dtype), self.video_encoder
        latent = encoder(pixels) if whole else encode_tiled(partial(map, encoder), pixels)
        return latent.to(self.dtype)

    @torch.no_grad()
    def encode_audio(self, sound: Sound) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode stereo sound. Returns its spectrogram, float32 (1, 2, frames, bins), and its
        latent (1, 8, ceil(frames / 4), 16) in `self.dtype`."""
        sizes = mel_sizes(self.config)
        mel = log_mel(resample(*sound, sizes.rate), sizes)
        return mel, self.audio_encoder(mel.to(self.audio_dtype)).to(self.dtype)

    @torch.no_grad()
    def upsample(self, latent: torch.Tensor, kind: str = "spatial") -> torch.Tensor:
        """Upsample a video latent (1, 128, F, h, w), in `self.dtype`. kind: "spatial": to
        (1, 128, F, 2h, 2w); "temporal": to (1, 128, 2F-1, h, w). The upsamplers work on
        un-normalised latents: ltx_core.model.upsampler.upsample_video."""
        upsampler = self.spatial_upsampler if kind == "spatial" else self.temporal_upsampler
        statistics: Any = self.video_statistics
        latent = statistics.un_normalize(latent.to(self.latent_dtype))
        return statistics.normalize(upsampler(latent)).to(self.dtype)

    # Without torch.no_grad, which would keep a generator's last item; no weight has gradients.
    def decode_video(
        self,
        latent: torch.Tensor,
        # Decodes on the ranks: backends.tiles.RankTiles, or RankSpans for the diffusion decoder
        rank_tiles: Any = None,
        seed: int = 0,  # of the diffusion decoder's noise
        # Latents (1, 128, 1, h, w) by frame; the diffusion decoder reads them on the host
        keyframes: Mapping[int, torch.Tensor] | None = None,
        exact: bool = False,  # to chunks that are float32 in [0, 1]
    ) -> Iterator[torch.Tensor]:
        """Decode a video latent (1, 128, F, h, w) to its 8F-7 frames, lazily, in chunks in order of
        time, each uint8 (N, 32h, 32w, 3).

        The convolutional decoder decodes long or large videos in ltx-core's blended tiles. A chunk
        has the frames of one time span that later tiles do not change. Memory therefore does not
        depend on the length: it is that of one time span, and of the frames that the next one
        changes. The diffusion decoder decodes every clip as a whole, in memory that does not depend
        on the length either (host/diffusion.py)."""
        frames, height, width = latent.shape[2:]
        clip, spec = (frames, height, width), self._spec("video_decoder")
        if is_diffusion_vae(self.config):
            from ltx_neuron.host.diffusion import DiffusionDecoder

            spans: Any = rank_tiles or self.video_decoder
            chunks = DiffusionDecoder(spans.config, clip, spans).pixels(latent, seed, keyframes)
        else:
            chunks = self._decoded_in_tiles(latent, rank_tiles)
        for frames in chunks:
            if not frames.shape[2]:  # the next tiles begin at the same frame
                continue
            # NaN would become black pixels, and the module's hook is not called for tiles.
            spec.check_output(None, (latent,), frames)
            chunk = _of_unit_range(frames) if exact else to_bytes(_of_unit_range(frames))
            del frames  # freed while the next ones are decoded
            yield chunk
            del chunk

    def _decoded_in_tiles(self, latent: torch.Tensor, rank_tiles: Any) -> Iterator[torch.Tensor]:
        self._spec("video_decoder")  # imports ltx-core before all others
        from ltx_neuron.host import tiles
        from ltx_neuron.host.vae import HostVideoModel

        tiling = tiles.tiling(self.profile or Profile, self.tiles_1_0_0)
        if rank_tiles:
            assert self.profile  # of the ranks
            frames, height, width = latent.shape[2:]
            clip = frames, height, width
            tiling = tiles.tiling_for_ranks(self.profile, clip, rank_tiles.tp)
            decoder = tiles.TiledDecoder(rank_tiles, rank_tiles.at_once)
        elif isinstance(self.video_decoder, HostVideoModel):
            return tiles.TiledDecoder(partial(map, self.video_decoder)).tiled_decode(latent, tiling)
        else:
            decoder: Any = self.video_decoder
        # The 2.3 decoder draws no noise; a decoder that does stays reproducible.
        generator = torch.Generator().manual_seed(0)
        return decoder.tiled_decode(latent.to(self.dtype), tiling, generator=generator)

    @torch.no_grad()
    def decode_audio(self, latent: torch.Tensor, rank_sound=None) -> torch.Tensor:
        """Decode an audio latent (1, 8, Ta, 16) to a stereo waveform, float32 (2, samples) in
        [-1, 1], `sample_rate` samples per second. rank_sound: decodes spans on the ranks, as
        backends.tiles.RankSound does."""
        if rank_sound:
            from ltx_neuron.host import sound

            latent = latent.float()
            reach = audio_decoder_config(self.config).reach, vocoder_config(self.config).reach
            spans = sound.cut(latent.shape[2], SPAN_LATENTS, reach[0])
            mel = sound.spectrogram(latent, spans, rank_sound.spectrogram)
            self._spec("audio_decoder").check_output(None, (latent,), mel)
            spans = sound.cut(mel.shape[2], SPAN_ROWS, reach[1])
            waveform = sound.waveform(mel, spans, rank_sound.waveform)
            self._spec("vocoder").check_output(None, (mel,), waveform)
            return waveform[0]
        # At the first call the vocoder is loaded while the decoder runs.
        with Background() as thread:
            vocoder = thread.submit(lambda: self.vocoder)
            mel = self.audio_decoder(latent.to(self.audio_dtype))
            return wait_for(vocoder)(mel)[0].float()

    @property
    def sample_rate(self) -> int:
        """Samples per second of `decode_audio`'s waveform: 48000 for LTX-2.3."""
        return self.config["vocoder"]["bwe"]["output_sampling_rate"]

    def release(self) -> None:
        """Free all models; the next use builds them again."""
        kinds = torch.nn.Module, HostModels
        built = [name for name, value in vars(self).items() if isinstance(value, kinds)]
        for name in built:
            delattr(self, name)

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError unless the files hold every tensor of the models of these names, such as
        "video_decoder". Only headers are read."""
        for name in names:
            self._spec(name).build_empty()

    @cached_property
    def video_encoder(self) -> torch.nn.Module:
        """The ranks' model on the host if there is a host dtype and the checkpoint's has the
        released structure, otherwise ltx-core's."""
        spec = self._spec("video_encoder")
        encoder, config = spec.load(), self._released(video_encoder_config)
        if self.host_dtype is None or config is None:
            return self._laid_out(encoder.to(self.latent_dtype))
        from ltx_neuron.host.vae import host_encoder

        model = host_encoder(config, encoder.state_dict(), self.latent_dtype)
        model.register_forward_hook(spec.check_output)
        return model

    @cached_property
    def video_decoder(self) -> torch.nn.Module:
        """The ranks' model on the host if the checkpoint's has the released structure, HostSpans if
        it is a diffusion decoder, otherwise ltx-core's in `self.dtype`."""
        decoder = self._spec("video_decoder").load()
        if is_diffusion_vae(self.config):
            return decoder.to(self.host_dtype or torch.float32)
        if (config := self._released(video_decoder_config)) is None:
            return decoder.to(self.dtype)
        from ltx_neuron.host.vae import host_decoder

        return host_decoder(config, decoder.state_dict(), self.host_dtype or torch.float32)

    @cached_property
    def video_statistics(self) -> torch.nn.Module:
        return self._spec("video_statistics").load()

    @cached_property
    def audio_encoder(self) -> torch.nn.Module:
        return self._spec("audio_encoder").load()

    @cached_property
    def audio_decoder(self) -> torch.nn.Module:
        """The ranks' model, or ltx-core's without float32 or the released structure."""
        return self._sound_model("audio_decoder", audio_decoder_config)

    @cached_property
    def vocoder(self) -> torch.nn.Module:
        return self._sound_model("vocoder", vocoder_config)

    def _released(self, config_of: Callable[[Any], Config]) -> Config | None:
        """A model's config; None if it has another structure than the released one."""
        try:
            return config_of(self.config)
        except UserError:
            return None

    def _sound_model(self, name: str, config_of: Callable[[Any], object]) -> torch.nn.Module:
        spec = self._spec(name)
        model, config = spec.load(), self._released(config_of)
        if config is None or self.audio_dtype != torch.float32:
            return model
        from ltx_neuron.host import sound

        kind = {"audio_decoder": sound.HostSpectrogram, "vocoder": sound.HostVocoder}[name]
        model = kind(config, model.state_dict())
        model.register_forward_hook(spec.check_output)
        return model

    @cached_property
    def spatial_upsampler(self) -> torch.nn.Module:
        return self._laid_out(self._spec("spatial_upsampler").load())

    @cached_property
    def temporal_upsampler(self) -> torch.nn.Module:
        return self._laid_out(self._spec("temporal_upsampler").load())

    def _laid_out(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with oneDNN's fastest layout of weights (benchmarks/upsample.md)."""
        if self.host_dtype and self.latent_dtype == torch.bfloat16:
            lay_channels_last(module)
        return module

    def _spec(self, name: str) -> ModelFile:
        kind, _, model = name.rpartition("_")
        if model == "upsampler":
            release = self.files and self.files.release
            return upsampler_spec(kind, self.upsampler_paths[kind], self.latent_dtype, release)
        # The video encoder and decoder keep the stored dtype of their weights.
        of_video = {"encoder": None, "decoder": None, "statistics": self.latent_dtype}
        dtype = of_video[model] if kind == "video" else self.audio_dtype
        return checkpoint_spec(name, self.checkpoint_path, self.config, dtype, self.files)


def _of_unit_range(frames: torch.Tensor) -> torch.Tensor:
    """Frames (1, 3, N, H, W) in about [-1, 1], which are overwritten, as (N, H, W, 3) in [0, 1]."""
    return frames.add_(1.0).div_(2.0).clamp_(0.0, 1.0)[0].permute(1, 2, 3, 0)


def to_bytes(frames: torch.Tensor) -> torch.Tensor:
    """Frames (N, H, W, 3) in [0, 1], which are overwritten, as uint8, with the rounding of
    ltx_core's decode_video."""
    return frames.mul_(255.0).to(torch.uint8, memory_format=torch.contiguous_format)
