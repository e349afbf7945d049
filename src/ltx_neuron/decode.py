"""The host models: video VAE, latent upsamplers, audio decoder and vocoder, run on the CPU with ltx-core's modules."""

import json
import sys
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

from ltx_neuron.errors import UserError


def import_ltx_core() -> None:
    """Make ltx_core.model.audio_vae importable, also where torchaudio is not. Call it before importing that package.

    ltx_core.model.audio_vae.ops imports torchaudio when it is itself imported, though only audio *encoding* uses it;
    where torchaudio is missing or does not fit the installed torch, an empty module takes its place.
    """
    try:
        import torchaudio  # noqa: F401
    except Exception:
        stub = ModuleType("torchaudio")
        # transformers and others ask importlib for the spec of what is already imported: None there is an error.
        stub.__spec__ = ModuleSpec("torchaudio", loader=None)
        sys.modules["torchaudio"] = stub


class HostModels:
    """The models around the transformer. Each is built from its file at first use and kept until `release`.

    Latents are normalised, (1, 128, F, h, w) for video and (1, 8, Ta, 16) for audio, of any floating dtype. Every
    method raises UserError when a file is absent or its tensors are not those its config describes.
    """

    def __init__(
        self,
        checkpoint_path: str | Path,
        config: dict,
        dtype: torch.dtype,
        spatial_upsampler_path: str | Path | None = None,
        temporal_upsampler_path: str | Path | None = None,
    ):
        """`config` is the checkpoint's parsed `config` metadata; video VAE and upsamplers run in `dtype`."""
        self.checkpoint_path = checkpoint_path
        self.config = config
        self.dtype = dtype
        self.upsampler_paths = {"spatial": spatial_upsampler_path, "temporal": temporal_upsampler_path}

    @torch.no_grad()
    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """The latent (1, 128, 1, H/32, W/32), in the models' dtype, of pixels (1, 3, 1, H, W) in [-1, 1]."""
        return self.video_encoder(pixels.to(self.dtype))

    @torch.no_grad()
    def upsample(self, latent: torch.Tensor, kind: str = "spatial") -> torch.Tensor:
        """The latent at twice the height and width ("spatial") or with 2F-1 frames ("temporal"), in the models' dtype.

        As ltx_core.model.upsampler.upsample_video: the upsamplers work on un-normalised latents.
        """
        upsampler = self.spatial_upsampler if kind == "spatial" else self.temporal_upsampler
        latent = self.video_statistics.un_normalize(latent.to(self.dtype))
        return self.video_statistics.normalize(upsampler(latent))

    @torch.no_grad()
    def decode_video(self, latent: torch.Tensor) -> torch.Tensor:
        """The frames, uint8 (8F-7, 32h, 32w, 3), of a video latent, decoded in the reference's default tiles."""
        decoder = self.video_decoder
        from ltx_core.model.video_vae import TilingConfig, decode_video

        # The 2.3 decoder draws no noise; a decoder that does is then still reproducible.
        generator = torch.Generator().manual_seed(0)
        return torch.cat(list(decode_video(latent.to(self.dtype), decoder, TilingConfig.default(), generator)))

    @torch.no_grad()
    def decode_audio(self, latent: torch.Tensor) -> torch.Tensor:
        """The waveform, float32 (2, samples) in [-1, 1] at `sample_rate`, of an audio latent.

        Always computed in float32: bfloat16 is audible in the vocoder, and ltx-core's later releases do the same.
        """
        decoder, vocoder = self.audio_decoder, self.vocoder
        from ltx_core.model.audio_vae import decode_audio

        return decode_audio(latent.float(), decoder, vocoder).waveform

    @property
    def sample_rate(self) -> int:
        """Samples per second of `decode_audio`'s waveform: 48000 for LTX-2.3."""
        return self.config["vocoder"]["bwe"]["output_sampling_rate"]

    def release(self) -> None:
        """Drop every model built so far; the next use builds it again."""
        for name in [name for name, value in vars(self).items() if isinstance(value, torch.nn.Module)]:
            delattr(self, name)

    @cached_property
    def video_encoder(self) -> torch.nn.Module:
        from ltx_core.model.video_vae import VideoEncoderConfigurator

        prefixes = {"": "vae.encoder.", "per_channel_statistics.": "vae.per_channel_statistics."}
        return self._from_checkpoint(VideoEncoderConfigurator.from_config, prefixes, self.dtype)

    @cached_property
    def video_decoder(self) -> torch.nn.Module:
        from ltx_core.model.video_vae import VideoDecoderConfigurator

        prefixes = {"": "vae.decoder.", "per_channel_statistics.": "vae.per_channel_statistics."}
        return self._from_checkpoint(VideoDecoderConfigurator.from_config, prefixes, self.dtype)

    @cached_property
    def video_statistics(self) -> torch.nn.Module:
        from ltx_core.model.video_vae.ops import PerChannelStatistics

        def build(config: dict) -> torch.nn.Module:
            return PerChannelStatistics(config["vae"]["latent_channels"])

        return self._from_checkpoint(build, {"": "vae.per_channel_statistics."}, self.dtype)

    @cached_property
    def audio_decoder(self) -> torch.nn.Module:
        import_ltx_core()
        from ltx_core.model.audio_vae import AudioDecoderConfigurator

        prefixes = {"": "audio_vae.decoder.", "per_channel_statistics.": "audio_vae.per_channel_statistics."}
        return self._from_checkpoint(AudioDecoderConfigurator.from_config, prefixes, torch.float32)

    @cached_property
    def vocoder(self) -> torch.nn.Module:
        import_ltx_core()
        from ltx_core.model.audio_vae import VocoderConfigurator

        return self._from_checkpoint(VocoderConfigurator.from_config, {"": "vocoder."}, torch.float32)

    @cached_property
    def spatial_upsampler(self) -> torch.nn.Module:
        return self._upsampler("spatial")

    @cached_property
    def temporal_upsampler(self) -> torch.nn.Module:
        return self._upsampler("temporal")

    def _from_checkpoint(self, build, prefixes: dict[str, str], dtype: torch.dtype) -> torch.nn.Module:
        return _load(self.checkpoint_path, "--checkpoint-path", lambda: build(self.config), prefixes, dtype)

    def upsampler_config(self, kind: str) -> dict:
        """The "spatial" or "temporal" upsampler file's own config, checked to be one of factor 2 of that kind."""
        path, flag = self.upsampler_paths[kind], f"--{kind}-upsampler-path"
        if path is None:
            raise UserError(f"{kind} upsampling needs its own model and got none: pass its file with {flag} FILE")
        with _open(path, flag) as file:
            config = json.loads((file.metadata() or {}).get("config", "{}"))
        found = [name for name in ("spatial", "temporal") if config.get(f"{name}_upsample")]
        scale = config.get("spatial_scale", 2.0)
        if found != [kind] or (kind == "spatial" and scale != 2.0):
            got = f"a {' and '.join(found)} one (spatial scale {scale})" if found else "a file that describes none"
            raise UserError(
                f"{flag} wants a {kind} latent upsampler of factor 2, got {got}: {path}\n"
                f"pass the published {kind} x2 file with {flag} FILE"
            )
        return config

    def _upsampler(self, kind: str) -> torch.nn.Module:
        config = self.upsampler_config(kind)
        from ltx_core.model.upsampler import LatentUpsamplerConfigurator

        path, flag = self.upsampler_paths[kind], f"--{kind}-upsampler-path"
        return _load(path, flag, lambda: LatentUpsamplerConfigurator.from_config(config), {"": ""}, self.dtype)


def _open(path: str | Path, flag: str):
    """The safetensors file at `path`, opened; UserError, naming the `flag` that sets it, where that fails."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read as a safetensors file: {error}\npass the published file with {flag} FILE"
        ) from None


def _load(path: str | Path, flag: str, build, prefixes: dict[str, str], dtype: torch.dtype) -> torch.nn.Module:
    """The module `build()` makes, with every tensor from the file at `path`, in `dtype`, ready for inference.

    `prefixes` maps the start of a module's tensor names to their start in the file. The first one is the module's own:
    what else the file holds under it is an error, while the per-channel statistics may have entries nobody reads.
    """
    with torch.device("meta"):
        module = build()
    wanted = {_name_in_file(name, prefixes): (name, tensor) for name, tensor in module.state_dict().items()}
    own = next(iter(prefixes.values()))
    with _open(path, flag) as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        problems = [f"missing {name}" for name in wanted if name not in found]
        problems += [f"unexpected {name}" for name in found if name.startswith(own) and name not in wanted]
        problems += [
            f"wrong shape {name}: got {found[name]}, wanted {tuple(tensor.shape)}"
            for name, (_, tensor) in wanted.items()
            if name in found and found[name] != tuple(tensor.shape)
        ]
        if problems:
            listing = "\n  ".join(problems)
            raise UserError(
                f"{path} does not hold the {type(module).__name__} its config describes:\n  {listing}\n"
                f"pass the published file with {flag} FILE"
            )
        state = {name: file.get_tensor(key).to(dtype) for key, (name, _) in wanted.items()}
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)


def _name_in_file(name: str, prefixes: dict[str, str]) -> str:
    """The file's name of a module's tensor: the longest matching prefix replaced."""
    prefix = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len)
    return prefixes[prefix] + name.removeprefix(prefix)
