"""The files of one model. An LTX-2.3 checkpoint has all parts but Gemma and the upsamplers; LTX-2.5
is published in one file per part, in the folders of one download.

A file's metadata has its config. It shows the file's part and, except for upsamplers, its release,
which a published file's name has too.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ltx_neuron import hub
from ltx_neuron.config.common import CHECKPOINT_DOWNLOAD, gemma_download
from ltx_neuron.config.diffusion import is_diffusion_vae
from ltx_neuron.config.gemma import GemmaConfig, gemma_config, read_config
from ltx_neuron.config.release import Release, release_of
from ltx_neuron.errors import UserError
from ltx_neuron.weights.checkpoint import Checkpoint, gemma_files
from ltx_neuron.weights.float8 import WeightFile
from ltx_neuron.weights.lora import is_lora
from ltx_neuron.weights.tensorfile import TensorFile

RECIPES = "distilled", "dev"
_TRANSFORMERS = "diffusion_models"  # the transformers' folder in a download
_TOKENIZER, _ASSET = "tokenizer_json", "hf_asset__"  # names of tensors that are files
_SIDECARS = "tokenizer_config.json", "processor_config.json", "chat_template.jinja"
_RELEASE_IN_NAME = re.compile(r"ltx-?(\d+\.\d+)")  # of the published files


class Part(NamedTuple):
    """A part that a split release has in a file of its own.

    title     for messages
    flag      of its file
    sections  of the config that describe it
    prefix    of all its tensors in a checkpoint; its own file may leave it out
    """

    title: str
    flag: str
    sections: tuple[str, ...]
    prefix: str = ""


PARTS = {
    "video_vae": Part("video VAE", "--video-vae-path", ("vae",), "vae."),
    "audio_vae": Part("audio VAE", "--audio-vae-path", ("audio_vae", "vocoder")),
}
_OWNERS = {section: kind for kind, part in PARTS.items() for section in part.sections}
# Results of kind_of, for messages.
_TITLES = {kind: part.title for kind, part in PARTS.items()} | {
    "": "file without known metadata",
    "transformer": "transformer",
    "gemma": "text encoder",
    "duration_head": "duration head",
    "lora": "LoRA",
    "spatial": "spatial upsampler",
    "temporal": "temporal upsampler",
}


def kind_of(file: TensorFile) -> str:
    """The kind of a file by its metadata: "transformer" (also a whole checkpoint), "gemma",
    "video_vae", "audio_vae", "spatial", "temporal", "duration_head", "lora", or "" if unknown."""
    config = config_of(file)
    if "gemma_config" in file.metadata:
        return "gemma"
    if "duration_head" in config:  # its config has a transformer section too
        return "duration_head"
    if "transformer" in config:
        return "transformer"
    for section, kind in _OWNERS.items():
        if section in config:
            return kind
    for kind in ("spatial", "temporal"):
        if config.get(f"{kind}_upsample"):
            return kind
    return "lora" if is_lora(file.shapes) else ""


def config_of(file: TensorFile) -> dict:
    """The `config` in a file's metadata; empty if it has none or a damaged one."""
    try:
        return {**json.loads(file.metadata.get("config", "{}"))}
    except (ValueError, TypeError):
        return {}


class TextEncoderFile(WeightFile):
    """LTX-2.5's text encoder in one file: Gemma 4, the text projections and the tokenizer.

    gemma_config  Gemma's config.json, from the metadata
    assets        names of the other files of Gemma's folder in it; `asset` reads them. They are
                  not weights, so `shapes` leaves them out

    UserError for any other file.
    """

    def __init__(self, path: Path, download: str):
        super().__init__(path, download)
        if kind_of(self) != "gemma":
            raise UserError(
                f"--gemma-root {path}: wanted LTX-2.5's text encoder (with 'gemma_config' in its"
                f" metadata), got {described(self)}\nDownload it: {download}"
            )
        try:
            self.gemma_config = {**json.loads(self.metadata["gemma_config"])}
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}: the 'gemma_config' metadata is not a JSON object: {error}\nDownload it"
                f" again: {self.download}"
            ) from None
        # Name of a file -> its tensor, or None if its text is in the metadata.
        self._assets: dict[str, str | None] = {n: None for n in _SIDECARS if n in self.metadata}
        for key in [key for key in self.shapes if key == _TOKENIZER or key.startswith(_ASSET)]:
            name = "tokenizer.json" if key == _TOKENIZER else key.removeprefix(_ASSET)
            self._assets[name] = key
        for key in filter(None, self._assets.values()):
            del self.shapes[key]
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if name not in self._assets:
                raise UserError(f"{path} has no {name}\nDownload it again: {self.download}")

    @property
    def assets(self) -> tuple[str, ...]:
        return tuple(sorted(self._assets))

    @property
    def gemma_version(self) -> str | None:
        """The version of Gemma's weights, which a transformer's file names too."""
        return self.gemma_config.get("gemma_version")

    def asset(self, name: str) -> bytes:
        """The content of one of `assets`, such as tokenizer.json."""
        key = self._assets[name]
        if key is None:
            return self.metadata[name].encode()
        # ComfyUI stores signed bytes.
        return TensorFile(self.path, self.download).read(key).numpy().tobytes()


def described(file: TensorFile) -> str:
    """A file's kind and release, for a message."""
    kind, version = kind_of(file), file.metadata.get("model_version")
    named = f"{'the' if kind in PARTS else 'a'} {_TITLES[kind]}"
    return named + (f" of LTX {version}" if version else "")


class PartFile(WeightFile):
    """A file with one of PARTS. Its tensors have the names that a checkpoint gives them.

    config  from the metadata

    UserError for a file of another part or of another release.
    """

    def __init__(self, path: Path, kind: str, release: Release):
        part, download = PARTS[kind], release.download(kind)
        super().__init__(path, download)
        self.config = config_of(self)
        if not all(isinstance(self.config.get(name), dict) for name in part.sections):
            raise UserError(
                f"{part.flag} {path}: wanted the {part.title} of LTX-{release.version}, got"
                f" {described(self)}\nDownload it: {download}"
            )
        check_release(self, part.flag, release, download)
        if isinstance(encoder := self.config.get("vae", {}).get("encoder"), dict):
            self.config["vae"] = _flattened(self.config["vae"], encoder)
        if not any(name.startswith(part.prefix) for name in self.shapes):
            self._prefix_names(part.prefix)

    def _prefix_names(self, prefix: str) -> None:
        self.shapes = {prefix + name: shape for name, shape in self.shapes.items()}
        self.dtypes = {prefix + name: dtype for name, dtype in self.dtypes.items()}
        self._offsets = {prefix + name: offset for name, offset in self._offsets.items()}
        self.scales = {prefix + name: scale for name, scale in self.scales.items()}


def _flattened(vae: dict, encoder: dict) -> dict:
    """A video VAE's config with the values of its encoder's section at the top level, as in the
    convolutional VAE's config."""
    names = {"out_channels": "latent_channels", "blocks": "encoder_blocks"}
    return {names.get(name, name): value for name, value in encoder.items()} | vae


def check_release(file: TensorFile, flag: str, release: Release, download: str) -> None:
    """Raise UserError if a file is of another supported release by its metadata or, without a
    version there, by its name: upsamplers and many LoRAs have no `model_version`."""
    version, by_name, rename = file.metadata.get("model_version", ""), "", ""
    if not version and (named := _RELEASE_IN_NAME.search(file.path.name.lower())):
        version, by_name = named[1], " by its name"
        rename = f"\nIf it is of LTX-{release.version}, rename it"
    if release_of(version) not in (None, release):
        raise UserError(
            f"{flag} {file.path} is of LTX {version}{by_name}, but the checkpoint is of"
            f" LTX-{release.version}\nDownload the file of that release: {download}{rename}"
        )


def located(name: str | Path, kind: str) -> Path:
    """The local path of a file, of Gemma's folder, or of a Hub name (hub.local_path). In the folder
    of a download it is the file of this kind: the transformer of a recipe, or the text encoder.
    Raises UserError if the folder has none or several."""
    path = hub.local_path(name, kind)
    if kind in RECIPES and path.is_dir():
        return _transformer_in(path, kind)
    if kind == "gemma" and path.is_dir() and (found := files_in(path).get(kind)):
        return _only(found, path, "--gemma-root")
    return path


def named_recipe(path: Path) -> str:
    """The recipe in a checkpoint's file name, "" without one. Its metadata has none."""
    name = path.name.lower()
    return next((recipe for recipe in RECIPES if recipe in name), "")


def files_in(folder: Path) -> dict[str, list[Path]]:
    """The safetensors files of a download's folder and of its subfolders, by kind. Unreadable files
    are left out."""
    found: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")]):
        with suppress(UserError):
            file = TensorFile(path, "")
            found.setdefault(kind_of(file), []).append(path)
    return found


def _transformer_in(folder: Path, recipe: str) -> Path:
    found = files_in(folder).get("transformer", [])
    several = [path for path in found if named_recipe(path) == recipe]
    if not found:
        raise UserError(
            f"--checkpoint-path {folder} is a folder without a transformer's file\nDownload the"
            f" checkpoint of LTX-2.3: {CHECKPOINT_DOWNLOAD}\nor the folder of LTX-2.5:"
            f" {hub.download('Lightricks/LTX-2.5', '--local-dir', str(folder))}"
        )
    return _only(several or found, folder, "--checkpoint-path")


def _only(paths: list[Path], folder: Path, flag: str) -> Path:
    if len(paths) > 1:
        raise UserError(
            f"{folder} has {len(paths)} files for {flag}: {', '.join(path.name for path in paths)}"
            f"\nType {flag} with one of them, for example {paths[0]}"
        )
    return paths[0]


class ModelFiles:
    """The files of one model.

    checkpoint  the whole checkpoint, or the transformer's file of a split release
    given       files that the user named, by kind. The other files of a split release are beside
                the transformer in its download

    UserError for a file that a checkpoint's release does not take. The files of a split release are
    opened at first use.
    """

    def __init__(
        self,
        checkpoint_path: str | Path,
        gemma_root: str | Path | None = None,
        video_vae_path: str | Path | None = None,
        audio_vae_path: str | Path | None = None,
    ):
        self.checkpoint = Checkpoint(Path(checkpoint_path))
        named = {"gemma": gemma_root, "video_vae": video_vae_path, "audio_vae": audio_vae_path}
        self.given = {kind: Path(path) for kind, path in named.items() if path}
        self.release = self.checkpoint.release
        self._open: dict[str, PartFile] = {}
        for kind in PARTS.keys() & self.given.keys() if not self.release.split else ():
            part = PARTS[kind]
            raise UserError(
                f"{part.flag} {self.given[kind]}: --checkpoint-path {checkpoint_path} is of"
                f" LTX-{self.release.version} and has its own {part.title}; leave {part.flag} out"
            )

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of all parts, as that of a whole checkpoint."""
        return _Config(self) if self.release.split else self.checkpoint.config

    def of(self, section: str) -> WeightFile:
        """The file with the part that a section of the config describes, such as "vae"."""
        kind = _OWNERS.get(section)
        return self._part(kind) if self.release.split and kind else self.checkpoint

    def _part(self, kind: str) -> "PartFile":
        if kind not in self._open:
            self._open[kind] = PartFile(self.path(kind), kind, self.release)
        return self._open[kind]

    @property
    def identity(self) -> dict:
        """For reports and sidecars: fingerprints of a split release's files, except the
        transformer's, and the kind of the video decoder. Empty for a whole checkpoint."""
        if not self.release.split:
            return {}
        parts = {kind: self.of(part.sections[0]) for kind, part in PARTS.items()}
        files = {"text_encoder": self.text_encoder, **parts}
        fingerprints = {kind: file.fingerprint for kind, file in files.items() if file}
        return {"files": fingerprints, "video_decoder": self.decoder}

    def flag(self, section: str) -> str:
        """The flag of the file with a section's part."""
        kind = _OWNERS.get(section)
        return PARTS[kind].flag if self.release.split and kind else "--checkpoint-path"

    @property
    def gemma_root(self) -> Path | None:
        """Gemma's folder, or a split release's text encoder."""
        return self.path("gemma") if self.release.split else self.given.get("gemma")

    @cached_property
    def text_encoder(self) -> TextEncoderFile | None:
        """The text encoder of a split release; None for Gemma's folder. Raises UserError unless it
        is the one that the transformer was trained with."""
        if not self.release.split:
            self._check_folder(self.gemma_root)
            return None
        root, version = self.path("gemma"), self.release.version
        download = self.release.download("gemma")
        if root.is_dir():
            raise UserError(
                f"--gemma-root {root} is a folder; LTX-{version} has its text encoder in one file:"
                f" type --gemma-root FILE\nDownload it: {download}"
            )
        file = TextEncoderFile(root, download)
        if (wanted := self._gemma_version) not in (None, file.gemma_version):
            raise UserError(
                f"--gemma-root {root} has Gemma of version {file.gemma_version}, but"
                f" --checkpoint-path {self.checkpoint.path} was trained with {wanted}\nDownload it:"
                f" {download}"
            )
        return file

    def _check_folder(self, root: Path | None) -> None:
        """Raise UserError for the text encoder of a split release."""
        if root is None or not root.is_file():
            return
        kind = ""
        with suppress(UserError):
            kind = kind_of(TensorFile(root, ""))
        if kind == "gemma":
            raise UserError(
                f"--gemma-root {root} is the text encoder of a later release; --checkpoint-path"
                f" {self.checkpoint.path} is of LTX-{self.release.version}, which needs the folder"
                f" of Gemma3-12B: type --gemma-root gemma-3-12b\nDownload it:"
                f" {gemma_download(Path('gemma-3-12b'))}"
            )

    @property
    def _gemma_version(self) -> str | None:
        """The version of Gemma that the transformer's metadata names."""
        try:
            source = json.loads(self.checkpoint.metadata.get("gemma_source_checkpoint", "{}"))
            return source.get("gemma_version")
        except (ValueError, AttributeError):
            return None

    @cached_property
    def gemma(self) -> GemmaConfig:
        """The text encoder's config. Raises UserError if it is that of another release."""
        assert self.gemma_root
        file, root = self.text_encoder, self.gemma_root
        config = read_config(file.gemma_config, file.path) if file else gemma_config(root)
        if config.norms_add_one != self.release.gemma.norms_add_one:
            raise UserError(
                f"--gemma-root {root} is another Gemma than that of LTX-{self.release.version}, the"
                f" release of --checkpoint-path {self.checkpoint.path}"
            )
        return config

    def text_files(self) -> list[TensorFile]:
        """The files with Gemma's weights and, if the checkpoint lacks them, the projections."""
        if (file := self.text_encoder) is not None:
            return [file]
        assert self.gemma_root
        return [*gemma_files(self.gemma_root)]

    def path(self, kind: str) -> Path:
        """The file of a part. Raises UserError if the user named none and none is beside the
        transformer."""
        if (path := self.find(kind)) is None:
            raise UserError(
                f"--checkpoint-path {self.checkpoint.path} is the transformer of"
                f" LTX-{self.release.version} alone: the {_TITLES[kind]} is missing\nType"
                f" {_flag(kind)} FILE, or"
                " --checkpoint-path with the folder of the whole download\nDownload the file:"
                f" {self.release.download(kind)}"
            )
        return path

    def find(self, kind: str) -> Path | None:
        """The file of a kind that the user named, or the one beside the transformer, or None. A
        file that is missing beside a transformer from the Hub is downloaded."""
        path = self.beside(kind)
        return hub.local_path(self._hub_name, kind) if path is None and self._hub_name else path

    def beside(self, kind: str) -> Path | None:
        """As `find`, without a download. Of several video VAEs it is the convolutional one."""
        if kind in self.given or not self.release.split or self._folder is None:
            return self.given.get(kind)
        found = self._beside.get(kind, [])
        if kind == "video_vae":
            configs = {path: config_of(TensorFile(path, "")) for path in found}
            convolutional = [path for path in found if not is_diffusion_vae(configs[path])]
            # The cached files of a Hub name must not decide which one a run takes.
            found = convolutional or ([] if self._hub_name else found)
        return _only(found, self._folder, _flag(kind)) if found else None

    def describe_decoder(self) -> str:
        """The kind of the video VAE's decoder, and its file, as text."""
        return f"{self.decoder}, from {self.of('vae').path}"

    @property
    def decoder(self) -> str:
        """The kind of the video VAE's decoder."""
        return "diffusion" if is_diffusion_vae(self.config) else "convolutional"

    @cached_property
    def _folder(self) -> Path | None:
        """The folder of the download that contains the transformer, if it is laid out as
        published."""
        folder = self.checkpoint.path.parent
        return folder.parent if folder.name == _TRANSFORMERS else None

    @cached_property
    def _hub_name(self) -> str:
        """The Hub name of the download; "" for a folder of the user's."""
        name = hub.spelled(self._folder or "")
        return name if name != str(self._folder or "") else ""

    @cached_property
    def _beside(self) -> dict[str, list[Path]]:
        assert self._folder
        return files_in(self._folder)


def _flag(kind: str) -> str:
    """The flag of a kind of file."""
    others = {"gemma": "--gemma-root", "duration_head": "--duration-head-path"}
    if kind in PARTS:
        return PARTS[kind].flag
    return others.get(kind, f"--{kind}-upsampler-path")


class _Config(Mapping[str, Any]):
    """The config sections of the files of a split release. A section's file is opened when the
    section is read."""

    def __init__(self, files: ModelFiles):
        self._files = files

    def __getitem__(self, section: str) -> Any:
        if section in _OWNERS:
            return self._files._part(_OWNERS[section]).config[section]
        return self._files.checkpoint.config[section]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._files.checkpoint.config, *_OWNERS])

    def __len__(self) -> int:
        return len(self._files.checkpoint.config) + len(_OWNERS)
