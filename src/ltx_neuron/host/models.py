"""The host models: video VAE, latent upsamplers, audio decoder and vocoder, run on the CPU with
ltx-core's modules."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from ltx_neuron.config import (
    CHECKPOINT_DOWNLOAD,
    SPAN_LATENTS,
    SPAN_ROWS,
    audio_decoder_config,
    upsampler_download,
    vocoder_config,
)
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic
from ltx_neuron.host.background import BackgroundTask, check_cancelled
from ltx_neuron.host.encoding import encode_tiled
from ltx_neuron.host.media import Sound
from ltx_neuron.host.spectrogram import log_mel, mel_sizes, resample
from ltx_neuron.profiles import Profile
from ltx_neuron.weights.finite import finite
from ltx_neuron.weights.tensorfile import TensorFile


def import_ltx_core() -> None:
    """Make ltx_core.model.audio_vae importable where torchaudio is not. Call it before importing
    that package.

    ltx_core.model.audio_vae.ops imports torchaudio at its top, though only audio *encoding* uses
    it. Where torchaudio is missing or does not fit the installed torch, an empty module takes its
    place.
    """
    try:
        import torchaudio  # noqa: F401
    except Exception:
        stub = ModuleType("torchaudio")
        # transformers and others ask importlib for the spec of imported modules; None is an error.
        stub.__spec__ = ModuleSpec("torchaudio", loader=None)
        sys.modules["torchaudio"] = stub


def lay_channels_last(module: torch.nn.Module) -> None:
    """Lay the weights of a module's convolutions in memory with their channels last, in place."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():
        if parameter.ndim in layouts:
            parameter.data = parameter.data.contiguous(memory_format=layouts[parameter.ndim])


class HostModels:
    """The models around the transformer. Each is built from its file at first use and kept until
    `release`.

    Latents are those that the transformer works on, normalised by the VAE's per-channel statistics:
    video (1, 128, F, h, w) with F = (frames - 1) / 8 + 1, h = height / 32 and w = width / 32; audio
    (1, 8, Ta, 16). Any floating dtype is accepted. Every method raises UserError when a file is
    absent or its tensors are not those that its config describes, and RunError where a model
    returns NaN or Inf.
    """

    def __init__(
        self,
        checkpoint_path: str | Path,
        config: dict,
        dtype: torch.dtype,
        spatial_upsampler_path: str | Path | None = None,
        temporal_upsampler_path: str | Path | None = None,
        audio_dtype: torch.dtype = torch.float32,
        profile: Profile | None = None,
        arithmetic: Arithmetic | None = None,
    ):
        """Nothing is read yet.

        checkpoint_path  the checkpoint; holds every model but the upsamplers
        config           the checkpoint's parsed `config` metadata
        dtype            of the latents that video encoder and upsamplers return
        *_path           the upsamplers' files; None where none was given
        audio_dtype      of audio decoder and vocoder. bfloat16 is audible, ltx-core has float32 too
        profile          says into which tiles a video is cut; without one they are ltx-core's
        arithmetic       of the released video decoder and encoder, from weights as they are stored;
                         in bfloat16 also of upsamplers. Without it all but the decoder are
                         ltx-core's
        """
        self.profile = profile
        self.checkpoint_path = checkpoint_path
        self.config = config
        self.dtype, self.audio_dtype, self.arithmetic = dtype, audio_dtype, arithmetic
        # A run in bfloat16 is computed in float32 where that is faster, and rounded then.
        self.latent_dtype = arithmetic.of_latents(dtype).dtype if arithmetic else dtype
        self.upsampler_paths = {
            "spatial": spatial_upsampler_path,
            "temporal": temporal_upsampler_path,
        }

    @torch.no_grad()
    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels (1, 3, 1, H, W) in [-1, 1] as a latent (1, 128, 1, H/32, W/32) in
        `self.dtype`."""
        return self.video_encoder(pixels.to(self.latent_dtype)).to(self.dtype)

    @torch.no_grad()
    def encode_video(self, pixels: torch.Tensor, whole: bool = False) -> torch.Tensor:
        """Encode pixels (1, 3, 8F-7, 32h, 32w) in [-1, 1] as a latent (1, 128, F, h, w) in
        `self.dtype`; long and large clips in tiles, unless they are to be encoded `whole`."""
        encode = self.video_encoder if whole else partial(encode_tiled, self.video_encoder)
        return encode(pixels.to(self.latent_dtype)).to(self.dtype)

    @torch.no_grad()
    def encode_audio(self, sound: Sound) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode stereo sound as its spectrogram, float32 (1, 2, frames, bins), and the latent
        (1, 8, ceil(frames / 4), 16) of that in `self.dtype`."""
        sizes = mel_sizes(self.config)
        mel = log_mel(resample(*sound, sizes.rate), sizes)
        return mel, self.audio_encoder(mel.to(self.audio_dtype)).to(self.dtype)

    @torch.no_grad()
    def upsample(self, latent: torch.Tensor, kind: str = "spatial") -> torch.Tensor:
        """Upsample a video latent (1, 128, F, h, w), in `self.dtype`.

        kind  "spatial": to (1, 128, F, 2h, 2w); "temporal": to (1, 128, 2F-1, h, w)

        The upsamplers work on un-normalised latents: ltx_core.model.upsampler.upsample_video.
        """
        upsampler = self.spatial_upsampler if kind == "spatial" else self.temporal_upsampler
        latent = self.video_statistics.un_normalize(latent.to(self.latent_dtype))
        return self.video_statistics.normalize(upsampler(latent)).to(self.dtype)

    # No torch.no_grad, which would keep what a generator yielded last: no weight has gradients.
    def decode_video(
        self, latent: torch.Tensor, rank_tiles: Callable | None = None
    ) -> Iterator[torch.Tensor]:
        """Decode a video latent (1, 128, F, h, w) to its 8F-7 frames: chunks of them in the order
        of time, each uint8 (N, 32h, 32w, 3). Nothing is decoded before it is asked for.

        Long or large videos are decoded in tiles as ltx-core's, which are blended: a chunk is
        what tiles of the same time give, without what those of later times change. A video of any
        length needs the memory of one such group of tiles, and of what the next one changes.

        rank_tiles  decodes the tiles on the ranks, as backends.tiles.RankTiles does
        """
        decoder, tiling = self._tiled_decoder(tuple(latent.shape[2:]), rank_tiles)
        from ltx_neuron.host.vae import FastVideoDecoder

        dtype = torch.float32 if isinstance(decoder, FastVideoDecoder) else self.dtype
        # The 2.3 decoder draws no noise; a decoder that does is then still reproducible.
        generator = torch.Generator().manual_seed(0)
        latent, spec = latent.to(dtype), self._spec("video_decoder")
        for frames in decoder.tiled_decode(latent, tiling, generator=generator):
            if not frames.shape[2]:  # the next tiles begin where these do
                continue
            # Bytes of NaN would be black; a hook of the module is not called for tiles.
            spec.check_output(decoder, (latent,), frames)
            chunk = _to_bytes(frames)
            del frames  # not kept while the next ones are decoded
            yield chunk
            del chunk

    def _tiled_decoder(
        self, clip: tuple[int, int, int], rank_tiles: Callable | None
    ) -> tuple[torch.nn.Module, object]:
        """What decodes a clip of latents (F, h, w), and ltx-core's TilingConfig for it."""
        self._spec("video_decoder")  # its imports of ltx-core come before all others
        from ltx_core.model.video_vae import TilingConfig

        from ltx_neuron.host import tiles

        if rank_tiles:
            config = tiles.tiling_for_ranks(self.profile, clip, rank_tiles.at_once)
            return tiles.TiledDecoder(rank_tiles, rank_tiles.at_once), config
        config = tiles.tiling(self.profile) if self.profile else TilingConfig.default()
        return self.video_decoder, config

    @torch.no_grad()
    def decode_audio(self, latent: torch.Tensor, rank_sound=None) -> torch.Tensor:
        """Decode an audio latent (1, 8, Ta, 16) to a stereo waveform, float32 (2, samples) in
        [-1, 1], `sample_rate` samples per second.

        rank_sound  decodes spans on the ranks, as backends.tiles.RankSound does
        """
        if rank_sound:
            return self._decode_audio_on(rank_sound, latent.float())
        # The first time the vocoder is read beside the decoder.
        with BackgroundTask(lambda: self.vocoder):
            mel = self.audio_decoder(latent.to(self.audio_dtype))
        return self.vocoder(mel)[0].float()

    def _decode_audio_on(self, rank_sound, latent: torch.Tensor) -> torch.Tensor:
        from ltx_neuron.host import sound

        reach = audio_decoder_config(self.config).reach, vocoder_config(self.config).reach
        spans = sound.cut(latent.shape[2], SPAN_LATENTS, reach[0])
        mel = sound.spectrogram(latent, spans, rank_sound.spectrogram)
        self._spec("audio_decoder").check_output(None, (latent,), mel)
        spans = sound.cut(mel.shape[2], SPAN_ROWS, reach[1])
        waveform = sound.waveform(mel, spans, rank_sound.waveform)
        self._spec("vocoder").check_output(None, (mel,), waveform)
        return waveform[0]

    @property
    def sample_rate(self) -> int:
        """Samples per second of `decode_audio`'s waveform: 48000 for LTX-2.3."""
        return self.config["vocoder"]["bwe"]["output_sampling_rate"]

    def release(self) -> None:
        """Drop every model built so far; the next use builds it again."""
        built = [name for name, value in vars(self).items() if isinstance(value, torch.nn.Module)]
        for name in built:
            delattr(self, name)

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError unless the files hold every tensor of the models of these names, such as
        "video_decoder". Only headers are read."""
        for name in names:
            self._spec(name).build_empty()

    @cached_property
    def video_encoder(self) -> torch.nn.Module:
        """A FastVideoEncoder where there is an arithmetic and the checkpoint's encoder is built as
        the released one, else ltx-core's own."""
        encoder = self._spec("video_encoder").load()
        from ltx_neuron.host.vae_encoder import FastVideoEncoder, unknown_modules

        if self.arithmetic is None or unknown_modules(encoder):
            return self._laid_out(encoder.to(self.latent_dtype))
        return FastVideoEncoder(encoder, self.arithmetic.of_latents(self.dtype))

    @cached_property
    def video_decoder(self) -> torch.nn.Module:
        """A FastVideoDecoder where the checkpoint's decoder is built as the released one, else
        ltx-core's own in `self.dtype`."""
        decoder = self._spec("video_decoder").load()
        from ltx_neuron.host.vae import FastVideoDecoder, unknown_modules

        if unknown_modules(decoder):
            return decoder.to(self.dtype)
        return FastVideoDecoder(decoder, self.arithmetic or FLOAT32)

    @cached_property
    def video_statistics(self) -> torch.nn.Module:
        return self._spec("video_statistics").load()

    @cached_property
    def audio_encoder(self) -> torch.nn.Module:
        return self._spec("audio_encoder").load()

    @cached_property
    def audio_decoder(self) -> torch.nn.Module:
        """The ranks' model on the host where the checkpoint's is built as the released one and in
        float32, else ltx-core's own."""
        return self._sound_model("audio_decoder", audio_decoder_config)

    @cached_property
    def vocoder(self) -> torch.nn.Module:
        """As audio_decoder."""
        return self._sound_model("vocoder", vocoder_config)

    def _sound_model(self, name: str, config_of: Callable[[dict], object]) -> torch.nn.Module:
        spec = self._spec(name)
        model = spec.load()
        try:
            config = config_of(self.config)
        except UserError:
            return model
        if self.audio_dtype != torch.float32:
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
        """The module, its weights as oneDNN is fastest with (benchmarks/upsample.md)."""
        if self.arithmetic and self.latent_dtype == torch.bfloat16:
            lay_channels_last(module)
        return module

    def _spec(self, name: str) -> "ModelSpec":
        """Where the model of a property's name comes from, such as "audio_decoder"."""
        import_ltx_core()
        from ltx_core.model import audio_vae, upsampler, video_vae
        from ltx_core.model.video_vae.ops import PerChannelStatistics

        if name.endswith("_upsampler"):
            kind = name.removesuffix("_upsampler")
            return ModelSpec(
                name=name.replace("_", " "),
                path=self.upsampler_paths[kind],
                flag=f"--{kind}-upsampler-path",
                download=upsampler_download(kind),
                from_config=upsampler.LatentUpsamplerConfigurator.from_config,
                config=self.upsampler_config(kind),
                prefixes={"": ""},
                dtype=self.latent_dtype,
            )

        def statistics(config: dict) -> torch.nn.Module:
            return PerChannelStatistics(config["vae"]["latent_channels"])

        encoder = video_vae.VideoEncoderConfigurator.from_config
        decoder = video_vae.VideoDecoderConfigurator.from_config
        audio_encoder = audio_vae.AudioEncoderConfigurator.from_config
        audio_decoder = audio_vae.AudioDecoderConfigurator.from_config
        vocoder = audio_vae.VocoderConfigurator.from_config
        from_config, prefix, dtype = {
            "video_encoder": (encoder, "vae.encoder.", None),
            "video_decoder": (decoder, "vae.decoder.", None),
            "video_statistics": (statistics, "vae.per_channel_statistics.", self.latent_dtype),
            "audio_encoder": (audio_encoder, "audio_vae.encoder.", self.audio_dtype),
            "audio_decoder": (audio_decoder, "audio_vae.decoder.", self.audio_dtype),
            "vocoder": (vocoder, "vocoder.", self.audio_dtype),
        }[name]
        # A checkpoint holds the statistics once for encoder and decoder, which both have a copy.
        shared = prefix.partition(".")[0] + ".per_channel_statistics."
        return ModelSpec(
            name=name.replace("_", " "),
            path=self.checkpoint_path,
            flag="--checkpoint-path",
            download=CHECKPOINT_DOWNLOAD,
            from_config=from_config,
            config=self.config,
            prefixes={"": prefix, "per_channel_statistics.": shared},
            dtype=dtype,
        )

    def upsampler_config(self, kind: str) -> dict:
        """The config of the "spatial" or "temporal" upsampler's own file.

        Raises UserError unless the file is an upsampler by factor 2 of that kind.
        """
        path, flag = self.upsampler_paths[kind], f"--{kind}-upsampler-path"
        download = upsampler_download(kind)
        if path is None:
            raise UserError(
                f"{kind} upsampling needs its own model and got none: pass its file with {flag}"
                f" FILE\nDownload it: {download}"
            )
        file = TensorFile(path, f"{download}\nand pass it with {flag} FILE")
        try:
            config = {**json.loads(file.metadata.get("config", "{}"))}
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}: the 'config' metadata is not a JSON object: {error}\n"
                f"Download it again: {download}"
            ) from None
        kinds = [name for name in ("spatial", "temporal") if config.get(f"{name}_upsample")]
        scale = config.get("spatial_scale", 2.0)
        if kinds != [kind] or (kind == "spatial" and scale != 2.0):
            got = "a file that describes none"
            if kinds:
                got = f"a {' and '.join(kinds)} one (spatial scale {scale})"
            raise UserError(
                f"{flag} wants a {kind} latent upsampler of factor 2, got {got}: {path}\n"
                f"pass the published {kind} x2 file with {flag} FILE: {download}"
            )
        return config


def _to_bytes(frames: torch.Tensor) -> torch.Tensor:
    """Frames (1, 3, N, H, W) in about [-1, 1], which are overwritten, as uint8 (N, H, W, 3), with
    the rounding of ltx_core's decode_video."""
    frames = frames.add_(1.0).div_(2.0).clamp_(0.0, 1.0).mul_(255.0)
    return frames[0].permute(1, 2, 3, 0).to(torch.uint8, memory_format=torch.contiguous_format)


class ModelSpec(NamedTuple):
    """Where one model comes from: its file, how it is built, and the names of its tensors there.

    name         of the model, for messages of errors
    path         the safetensors file
    flag         the command line's flag that names the file, for messages of errors
    download     the command that downloads the file, for messages of errors
    from_config  builds the module from `config`
    config       the parsed metadata of the file
    prefixes     start of a tensor's name in the module -> its start in the file. The first entry is
                 the model's own part of the file, which must hold nothing else. The entry of the
                 per-channel statistics may: a checkpoint has statistics that no model reads
    dtype        of every tensor; None leaves each as it is stored
    """

    name: str
    path: str | Path
    flag: str
    download: str
    from_config: Callable[[dict], torch.nn.Module]
    config: dict
    prefixes: dict[str, str]
    dtype: torch.dtype | None

    def build_empty(self) -> torch.nn.Module:
        """The module on the meta device.

        Raises UserError unless the file holds all of its tensors, in their shapes, and no others.
        """
        try:
            with torch.device("meta"):
                module = self.from_config(self.config)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the config in {self.path} describes no such model: {type(error).__name__}:"
                f" {error}\npass the published file with {self.flag} FILE: {self.download}"
            ) from None
        expected = {
            self._name_in_file(name): tuple(tensor.shape)
            for name, tensor in module.state_dict().items()
        }
        if problems := self._problems(expected):
            listing = "\n  ".join(problems)
            raise UserError(
                f"{self.path} does not hold the {type(module).__name__} its config describes:\n "
                f" {listing}\npass the published file with {self.flag} FILE: {self.download}"
            )
        return module

    def load(self) -> torch.nn.Module:
        """The module with its tensors from the file, in inference mode.

        Its forward can be cancelled before any layer (background.check_cancelled), and what it
        returns is checked.
        """
        module = self.build_empty()
        file = self._file()

        def read(name: str) -> torch.Tensor:
            tensor = file.read(self._name_in_file(name))
            return tensor.to(self.dtype or tensor.dtype)

        module.load_state_dict({name: read(name) for name in module.state_dict()}, assign=True)
        for layer in module.modules():
            layer.register_forward_pre_hook(check_cancelled)
        module.register_forward_hook(self.check_output)
        return module.eval().requires_grad_(False)

    def check_output(self, module: torch.nn.Module, given: tuple, output: torch.Tensor) -> None:
        """A hook of the module's forward: raise RunError where it returned NaN or Inf, which a
        picture shows as black, and a sound as silence or noise."""
        if finite(output):
            return
        if not all(finite(tensor) for tensor in given):
            raise RunError(
                f"NaN or Inf in what the {self.name} was given: what was made before it is broken,"
                f" not its weights in {self.path}\nType the same again, without --resume"
            )
        raise RunError(
            f"NaN or Inf in what the {self.name} returned, though what it was given is finite: its"
            f" weights in {self.path} are broken\nDownload the file again: {self.download}\nand"
            " type the same again"
        )

    def _file(self) -> TensorFile:
        return TensorFile(self.path, f"{self.download}\nand pass it with {self.flag} FILE")

    def _problems(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        """What is wrong with the file's tensors, a line each, given the shapes by name expected."""
        file = self._file()
        shapes = file.shapes
        if not any(name in shapes for name in expected):
            return [f"none of its {len(expected)} tensors is there"]
        own_prefix = next(iter(self.prefixes.values()))
        problems = [f"missing {name}" for name in expected if name not in shapes]
        problems += [
            f"unexpected {name}"
            for name in shapes
            if name.startswith(own_prefix) and name not in expected
        ]
        problems += [
            f"wrong shape {name}: got {shapes[name]}, wanted {shape}"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape
        ]
        problems += [
            f"{name}: {problem}"
            for name in expected
            if name in shapes and (problem := file.weight_problem(name))
        ]
        return problems

    def _name_in_file(self, name: str) -> str:
        """The name in the file of a tensor of the module: its longest known prefix replaced."""
        prefix = max((prefix for prefix in self.prefixes if name.startswith(prefix)), key=len)
        return self.prefixes[prefix] + name.removeprefix(prefix)
