"""The host models: video VAE, latent upsamplers, audio decoder and vocoder, run on the CPU with
ltx-core's modules."""

import json
import sys
from collections.abc import Callable, Iterable
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from ltx_neuron.config import CHECKPOINT_DOWNLOAD, upsampler_download
from ltx_neuron.errors import UserError
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.weights.tensorfile import TensorFile


def import_ltx_core() -> None:
    """Make ltx_core.model.audio_vae importable, also where torchaudio is not. Call it before
    importing that package.

    ltx_core.model.audio_vae.ops imports torchaudio when it is itself imported, though only audio
    *encoding* uses it; where torchaudio is missing or does not fit the installed torch, an empty
    module takes its place.
    """
    try:
        import torchaudio  # noqa: F401
    except Exception:
        stub = ModuleType("torchaudio")
        # transformers and others ask importlib for the spec of what is already imported: None there
        # is an error.
        stub.__spec__ = ModuleSpec("torchaudio", loader=None)
        sys.modules["torchaudio"] = stub


class HostModels:
    """The models around the transformer. Each is built from its file at first use and kept until
    `release`.

    Latents are normalised, (1, 128, F, h, w) for video and (1, 8, Ta, 16) for audio, of any
    floating dtype. Every method raises UserError when a file is absent or its tensors are not those
    its config describes.
    """

    def __init__(
        self,
        checkpoint_path: str | Path,
        config: dict,
        dtype: torch.dtype,
        spatial_upsampler_path: str | Path | None = None,
        temporal_upsampler_path: str | Path | None = None,
        audio_dtype: torch.dtype = torch.float32,
    ):
        """`config` is the checkpoint's parsed `config` metadata; video encoder and upsamplers run
        in `dtype`.

        The released video decoder computes in float32, from weights as they are stored. Audio runs
        in float32: bfloat16 is audible in the vocoder, and ltx-core's later releases do the same.
        """
        self.checkpoint_path = checkpoint_path
        self.config = config
        self.dtype, self.audio_dtype = dtype, audio_dtype
        self.upsampler_paths = {
            "spatial": spatial_upsampler_path,
            "temporal": temporal_upsampler_path,
        }

    @torch.no_grad()
    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """The latent (1, 128, 1, H/32, W/32), in the models' dtype, of pixels (1, 3, 1, H, W) in
        [-1, 1]."""
        return self.video_encoder(pixels.to(self.dtype))

    @torch.no_grad()
    def upsample(self, latent: torch.Tensor, kind: str = "spatial") -> torch.Tensor:
        """The latent at twice the height and width ("spatial") or with 2F-1 frames ("temporal"), in
        the models' dtype.

        As ltx_core.model.upsampler.upsample_video: the upsamplers work on un-normalised latents.
        """
        upsampler = self.spatial_upsampler if kind == "spatial" else self.temporal_upsampler
        latent = self.video_statistics.un_normalize(latent.to(self.dtype))
        return self.video_statistics.normalize(upsampler(latent))

    @torch.no_grad()
    def decode_video(self, latent: torch.Tensor) -> torch.Tensor:
        """The frames, uint8 (8F-7, 32h, 32w, 3), of a video latent, decoded in the reference's
        default tiles."""
        decoder = self.video_decoder
        from ltx_core.model.video_vae import TilingConfig, decode_video

        from ltx_neuron.host.vae import FastVideoDecoder

        dtype = torch.float32 if isinstance(decoder, FastVideoDecoder) else self.dtype
        # The 2.3 decoder draws no noise; a decoder that does is then still reproducible.
        generator = torch.Generator().manual_seed(0)
        return torch.cat(
            list(decode_video(latent.to(dtype), decoder, TilingConfig.default(), generator))
        )

    @torch.no_grad()
    def decode_audio(self, latent: torch.Tensor) -> torch.Tensor:
        """The waveform, float32 (2, samples) in [-1, 1] at `sample_rate`, of an audio latent."""
        decoder, vocoder = self.audio_decoder, self.vocoder
        from ltx_core.model.audio_vae import decode_audio

        return decode_audio(latent.to(self.audio_dtype), decoder, vocoder).waveform.float()

    @property
    def sample_rate(self) -> int:
        """Samples per second of `decode_audio`'s waveform: 48000 for LTX-2.3."""
        return self.config["vocoder"]["bwe"]["output_sampling_rate"]

    def release(self) -> None:
        """Drop every model built so far; the next use builds it again."""
        for name in [
            name for name, value in vars(self).items() if isinstance(value, torch.nn.Module)
        ]:
            delattr(self, name)

    def check(self, names: Iterable[str]) -> None:
        """Raise UserError unless the files hold every tensor of the models of these names. Only
        headers are read."""
        for name in names:
            self._part(name).empty()

    @cached_property
    def video_encoder(self) -> torch.nn.Module:
        return self._part("video_encoder").load()

    @cached_property
    def video_decoder(self) -> torch.nn.Module:
        """Ours if it is built as the released one; if not, ltx-core's own, in the models' dtype."""
        decoder = self._part("video_decoder").load()
        from ltx_neuron.host.vae import FastVideoDecoder, unknown_parts

        return decoder.to(self.dtype) if unknown_parts(decoder) else FastVideoDecoder(decoder)

    @cached_property
    def video_statistics(self) -> torch.nn.Module:
        return self._part("video_statistics").load()

    @cached_property
    def audio_decoder(self) -> torch.nn.Module:
        return self._part("audio_decoder").load()

    @cached_property
    def vocoder(self) -> torch.nn.Module:
        return self._part("vocoder").load()

    @cached_property
    def spatial_upsampler(self) -> torch.nn.Module:
        return self._part("spatial_upsampler").load()

    @cached_property
    def temporal_upsampler(self) -> torch.nn.Module:
        return self._part("temporal_upsampler").load()

    def _part(self, name: str) -> "_Part":
        """What the model of that name is made from."""
        import_ltx_core()
        from ltx_core.model import audio_vae, upsampler, video_vae
        from ltx_core.model.video_vae.ops import PerChannelStatistics

        def statistics(config: dict) -> torch.nn.Module:
            return PerChannelStatistics(config["vae"]["latent_channels"])

        if name.endswith("_upsampler"):
            kind = name.removesuffix("_upsampler")
            config, flag = self.upsampler_config(kind), f"--{kind}-upsampler-path"
            build = upsampler.LatentUpsamplerConfigurator.from_config
            return _Part(
                self.upsampler_paths[kind],
                flag,
                upsampler_download(kind),
                build,
                config,
                {"": ""},
                self.dtype,
            )
        build, prefix, dtype = {
            "video_encoder": (
                video_vae.VideoEncoderConfigurator.from_config,
                "vae.encoder.",
                self.dtype,
            ),
            "video_decoder": (video_vae.VideoDecoderConfigurator.from_config, "vae.decoder.", None),
            "video_statistics": (statistics, "vae.per_channel_statistics.", self.dtype),
            "audio_decoder": (
                audio_vae.AudioDecoderConfigurator.from_config,
                "audio_vae.decoder.",
                self.audio_dtype,
            ),
            "vocoder": (audio_vae.VocoderConfigurator.from_config, "vocoder.", self.audio_dtype),
        }[name]
        # The statistics lie beside the encoder and the decoder, not in them.
        prefixes = {
            "": prefix,
            "per_channel_statistics.": prefix.partition(".")[0] + ".per_channel_statistics.",
        }
        return _Part(
            self.checkpoint_path,
            "--checkpoint-path",
            CHECKPOINT_DOWNLOAD,
            build,
            self.config,
            prefixes,
            dtype,
        )

    def upsampler_config(self, kind: str) -> dict:
        """The "spatial" or "temporal" upsampler file's own config, checked to be one of factor 2 of
        that kind."""
        path, flag = self.upsampler_paths[kind], f"--{kind}-upsampler-path"
        if path is None:
            raise UserError(
                f"{kind} upsampling needs its own model and got none: pass its file with {flag}"
                f" FILE\nDownload it: {upsampler_download(kind)}"
            )
        text = TensorFile(
            path, f"{upsampler_download(kind)}\nand pass it with {flag} FILE"
        ).metadata.get("config", "{}")
        try:
            config = {**json.loads(text)}
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}: the 'config' metadata is not a JSON object: {error}\n"
                f"Download it again: {upsampler_download(kind)}"
            ) from None
        found = [name for name in ("spatial", "temporal") if config.get(f"{name}_upsample")]
        scale = config.get("spatial_scale", 2.0)
        if found != [kind] or (kind == "spatial" and scale != 2.0):
            got = (
                f"a {' and '.join(found)} one (spatial scale {scale})"
                if found
                else "a file that describes none"
            )
            raise UserError(
                f"{flag} wants a {kind} latent upsampler of factor 2, got {got}: {path}\n"
                f"pass the published {kind} x2 file with {flag} FILE: {upsampler_download(kind)}"
            )
        return config


class _Part(NamedTuple):
    """What a model is made from: its file and the flag that names it, the configurator and its
    config, names and dtype.

    A dtype of None leaves every tensor as it is stored.

    `prefixes` maps the start of a module's tensor names to their start in the file. The first one
    is the module's own: what else the file holds under it is an error, while the per-channel
    statistics may have entries nobody reads.
    """

    path: str | Path
    flag: str
    download: str
    build: Callable[[dict], torch.nn.Module]
    config: dict
    prefixes: dict[str, str]
    dtype: torch.dtype | None

    def empty(self) -> torch.nn.Module:
        """The module without memory. Raises UserError unless the file holds every tensor of it, and
        no other."""
        try:
            with torch.device("meta"):
                module = self.build(self.config)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the config in {self.path} describes no such model: {type(error).__name__}:"
                f" {error}\npass the published file with {self.flag} FILE: {self.download}"
            ) from None
        wanted = {
            _name_in_file(name, self.prefixes): tensor
            for name, tensor in module.state_dict().items()
        }
        own = next(iter(self.prefixes.values()))
        found = self.file().shapes
        problems = [f"missing {name}" for name in wanted if name not in found]
        problems += [
            f"unexpected {name}" for name in found if name.startswith(own) and name not in wanted
        ]
        problems += [
            f"wrong shape {name}: got {found[name]}, wanted {tuple(tensor.shape)}"
            for name, tensor in wanted.items()
            if name in found and found[name] != tuple(tensor.shape)
        ]
        if not any(name in found for name in wanted):
            problems = [f"none of its {len(wanted)} tensors is there"]
        if problems:
            listing = "\n  ".join(problems)
            raise UserError(
                f"{self.path} does not hold the {type(module).__name__} its config describes:\n "
                f" {listing}\npass the published file with {self.flag} FILE: {self.download}"
            )
        return module

    def load(self) -> torch.nn.Module:
        """The module with every tensor from the file, in its dtype, ready for inference, which may
        be stopped at any layer."""
        module = self.empty()
        file = self.file()

        def read(name: str) -> torch.Tensor:
            tensor = file.read(_name_in_file(name, self.prefixes))
            return tensor.to(self.dtype or tensor.dtype)

        module.load_state_dict({name: read(name) for name in module.state_dict()}, assign=True)
        for layer in module.modules():
            layer.register_forward_pre_hook(check_cancelled)
        return module.eval().requires_grad_(False)

    def file(self) -> TensorFile:
        return TensorFile(self.path, f"{self.download}\nand pass it with {self.flag} FILE")


def _name_in_file(name: str, prefixes: dict[str, str]) -> str:
    """The file's name of a module's tensor: the longest matching prefix replaced."""
    prefix = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len)
    return prefixes[prefix] + name.removeprefix(prefix)
