"""Loads the host's models: ltx-core's modules with a checkpoint's or an upsampler's tensors."""

# ltx-core's from_config is a class method that names the class that it builds as its own.
# pyright: reportAttributeAccessIssue=false

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ltx_neuron.config.common import CHECKPOINT_DOWNLOAD
from ltx_neuron.config.diffusion import (
    EMBEDDING,
    UNREAD,
    diffusion_decoder_config,
    is_diffusion_vae,
)
from ltx_neuron.config.release import Release
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.hub import download_released
from ltx_neuron.weights.model_files import ModelFiles, config_of, described
from ltx_neuron.weights.tensorfile import TensorFile, WeightFile, finite, missing_and_unexpected


def import_ltx_core() -> None:
    """Make ltx_core.model.audio_vae importable without torchaudio. Call it before its import.
    ltx_core.model.audio_vae.ops imports torchaudio at its top, though only audio *encoding* uses
    it. If torchaudio is missing or does not fit the installed torch, an empty module replaces it.
    """
    try:
        import torchaudio  # noqa: F401
    except Exception:
        stub = ModuleType("torchaudio")
        # transformers and others read the spec of imported modules; None is an error.
        stub.__spec__ = ModuleSpec("torchaudio", loader=None)
        sys.modules["torchaudio"] = stub


class ModelFile(NamedTuple):
    """The source of one model: its file, its constructor, and its tensors' names in the file."""

    name: str  # for messages, like flag and download
    path: str | Path  # the safetensors file
    flag: str  # of the file
    download: str  # the command that downloads it
    build: Callable[[], torch.nn.Module]  # returns the module
    # Prefix of a tensor's name in the module -> prefix in the file. The first entry is the model's
    # part of the file, which must contain no other tensors. Other parts may: a checkpoint has
    # per-channel statistics that no model reads
    prefixes: dict[str, str]
    dtype: torch.dtype | None  # of every tensor; None keeps the stored dtypes
    # Pattern of names of the model's tensors in the file that the model does not read
    unread: str = ""
    file: WeightFile | None = None  # the file at `path` if it is open

    def build_empty(self) -> torch.nn.Module:
        """The module on the meta device. Raises UserError unless the file has all of its tensors,
        with their shapes, and no others."""
        try:
            with torch.device("meta"):
                module = self.build()
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the config in {self.path} does not fit the {self.name}: {type(error).__name__}:"
                f" {error}\npass the published file with {self.flag} FILE: {self.download}"
            ) from None
        tensors = module.state_dict().items()
        expected = {self._name_in_file(name): tuple(tensor.shape) for name, tensor in tensors}
        if problems := self._problems(expected):
            listing = "\n  ".join(problems)
            raise UserError(
                f"{self.path} does not have the {type(module).__name__} of its config:\n "
                f" {listing}\npass the published file with {self.flag} FILE: {self.download}"
            )
        return module

    def load(self) -> torch.nn.Module:
        """The module with its tensors from the file, in inference mode. Outputs are checked."""
        module = self.build_empty()
        file = self._file()

        def read(name: str) -> torch.Tensor:
            tensor = file.read(self._name_in_file(name))
            return tensor.to(self.dtype or tensor.dtype)

        module.load_state_dict({name: read(name) for name in module.state_dict()}, assign=True)
        module.register_forward_hook(self.check_output)
        return module.eval().requires_grad_(False)

    def check_output(
        self, module: torch.nn.Module | None, inputs: tuple, output: torch.Tensor
    ) -> None:
        """A hook of the module's forward: raise RunError for NaN or Inf in the output."""
        if finite(output):
            return
        if not all(finite(tensor) for tensor in inputs):
            raise RunError(
                f"NaN or Inf in the inputs of the {self.name}: an earlier stage failed, not its"
                f" weights in {self.path}\nRun the command again, without --resume"
            )
        raise RunError(
            f"NaN or Inf in the outputs of the {self.name}, from finite inputs: its weights in"
            f" {self.path} are damaged\nDownload the file again: {self.download}\nand run the"
            " command again"
        )

    def _file(self) -> WeightFile:
        return self.file or WeightFile(
            self.path, f"{self.download}\nand pass it with {self.flag} FILE"
        )

    def _problems(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        file = self._file()
        shapes = file.shapes
        if shapes.keys().isdisjoint(expected):
            return [f"none of its {len(expected)} tensors"]
        prefix = next(iter(self.prefixes.values()))
        model = {n for n in shapes if n.startswith(prefix) and not re.fullmatch(self.unread, n)}
        stored = {name: shapes[name] for name in model | shapes.keys() & expected.keys()}
        unreadable = ((n, file.weight_problem(n)) for n in expected if n in shapes)
        problems = missing_and_unexpected(expected, stored)
        return [*problems, *(f"{name}: {problem}" for name, problem in unreadable if problem)]

    def _name_in_file(self, name: str) -> str:
        """The name in the file of a tensor of the module: its longest known prefix replaced."""
        prefix = max((prefix for prefix in self.prefixes if name.startswith(prefix)), key=len)
        return self.prefixes[prefix] + name.removeprefix(prefix)


def checkpoint_spec(
    name: str,
    path: str | Path,  # of the checkpoint
    config: Mapping[str, Any],  # the checkpoint's
    dtype: torch.dtype | None,
    files: ModelFiles | None = None,  # of a model with one file per part
) -> ModelFile:
    import_ltx_core()
    from ltx_core.model import audio_vae, video_vae
    from ltx_core.model.video_vae.ops import PerChannelStatistics

    from_config, prefix = {
        "video_encoder": (video_vae.VideoEncoderConfigurator.from_config, "vae.encoder."),
        "video_decoder": (video_vae.VideoDecoderConfigurator.from_config, "vae.decoder."),
        "video_statistics": (
            lambda config: PerChannelStatistics(config["vae"]["latent_channels"]),
            "vae.per_channel_statistics.",
        ),
        "audio_encoder": (audio_vae.AudioEncoderConfigurator.from_config, "audio_vae.encoder."),
        "audio_decoder": (audio_vae.AudioDecoderConfigurator.from_config, "audio_vae.decoder."),
        "vocoder": (audio_vae.VocoderConfigurator.from_config, "vocoder."),
    }[name]
    # A checkpoint has the statistics once, for encoder and decoder.
    section = prefix.partition(".")[0]
    shared = f"{section}.per_channel_statistics."
    flag, download, file = "--checkpoint-path", CHECKPOINT_DOWNLOAD, None
    if files:
        flag, file = files.flag(section), files.of(section)
        path, download = file.path, file.download
    spec = ModelFile(
        name=name.replace("_", " "),
        path=path,
        flag=flag,
        download=download,
        build=partial(from_config, config),
        prefixes={"": prefix, "per_channel_statistics.": shared},
        dtype=dtype,
        file=file,
    )
    if name == "video_decoder" and is_diffusion_vae(config):
        from ltx_neuron.host.diffusion import HostSpans

        names = spec._file().shapes
        build = partial(HostSpans, diffusion_decoder_config(config, names), EMBEDDING in names)
        return spec._replace(build=build, unread=prefix + UNREAD)
    return spec


def upsampler_spec(
    kind: str, path: str | Path | None, dtype: torch.dtype, release: Release | None = None
) -> ModelFile:
    """The source of the "spatial" or "temporal" upsampler. UserError unless the file is one of that
    kind, by factor 2 (spatial also 1.5), and not of another release than `release`."""
    import_ltx_core()
    from ltx_core.model import upsampler

    download = release.download(kind) if release else download_released(kind)
    flag = f"--{kind}-upsampler-path"
    if path is None:
        raise UserError(
            f"{kind} upsampling needs its own model: pass its file with {flag} FILE\nDownload it:"
            f" {download}"
        )
    file = TensorFile(path, f"{download}\nand pass it with {flag} FILE")
    if release:
        file.check_release(flag, release, download)
    config = config_of(file)
    kinds = [name for name in ("spatial", "temporal") if config.get(f"{name}_upsample")]
    scale = config.get("spatial_scale", 2.0)
    if kinds != [kind] or (kind == "spatial" and scale not in (2.0, 1.5)):
        scaled = f" (spatial scale {scale})" * bool(kinds)
        raise UserError(
            f"{flag}: wanted a {kind} latent upsampler of factor 2, got {described(file)}{scaled}:"
            f" {path}\npass the published {kind} x2 file with {flag} FILE: {download}"
        )
    return ModelFile(
        name=f"{kind} upsampler",
        path=path,
        flag=flag,
        download=download,
        build=partial(upsampler.LatentUpsamplerConfigurator.from_config, config),
        prefixes={"": ""},
        dtype=dtype,
    )
