"""The files of one model. An LTX-2.3 checkpoint has all parts but Gemma and the upsamplers; LTX-2.5
is published in one file per part, in the folders of one download.

A file's metadata has its config. It shows the file's part and, except for upsamplers, its release,
which a published file's name has too.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ltx_neuron import hub
from ltx_neuron.config.common import gemma_download
from ltx_neuron.config.diffusion import is_diffusion_vae
from ltx_neuron.config.gemma import GemmaConfig, gemma_config, read_config
from ltx_neuron.config.parts import KINDS, PARTS
from ltx_neuron.errors import UserError
from ltx_neuron.files import other_format
from ltx_neuron.weights.checkpoint import DOWNLOAD, SHARD, Checkpoint, gemma_files
from ltx_neuron.weights.lora import is_lora
from ltx_neuron.weights.sharding import CONNECTORS, DIFFUSION
from ltx_neuron.weights.tensorfile import TensorFile, WeightFile

RECIPES = "distilled", "dev"
_TRANSFORMERS = "diffusion_models", "unet"  # the transformers' folder in a download
_TOKENIZER, _ASSET = "tokenizer_json", "hf_asset__"  # names of tensors that are files
_SIDECARS = "tokenizer_config.json", "processor_config.json", "chat_template.jinja"


_OWNERS = {section: name for name, part in PARTS.items() for section in part.sections}


def kind_of(file: TensorFile) -> str:
    """The kind of a file by its metadata and tensors: "transformer" (also a whole checkpoint),
    "gemma", one of PARTS, "spatial", "temporal", "duration_head", "lora", or "" if unknown."""
    config = config_of(file)
    if "gemma_config" in file.metadata:
        return "gemma"
    if "duration_head" in config:  # its config has a transformer section too
        return "duration_head"
    # Files that were cut from a checkpoint may keep the whole config, so that tensors count first.
    if any(name.endswith("patchify_proj.weight") for name in file.shapes):
        return "transformer"
    for kind, part in PARTS.items():
        if any(name.startswith(part.own) for name in file.shapes):
            return kind
    if is_lora(file.shapes):
        return "lora"
    if "transformer" in config:
        return "transformer"
    for section, kind in _OWNERS.items():
        if section in config:
            return kind
    for kind in ("spatial", "temporal"):
        if config.get(f"{kind}_upsample"):
            return kind
    return ""


def config_of(file: TensorFile) -> dict:
    """The `config` in a file's metadata; empty if it has none or a damaged one."""
    try:
        return {**json.loads(file.metadata.get("config", "{}"))}
    except (ValueError, TypeError):
        return {}


def spatial_scale(path: str | Path | None) -> float:
    """The factor by which a spatial upsampler's file enlarges the sides: 2, if it is not 1.5."""
    with suppress(UserError):
        scale = config_of(TensorFile(path, "")).get("spatial_scale") if path else None
        return 1.5 if scale == 1.5 else 2.0
    return 2.0  # a damaged file is refused where it is used


class TextEncoderFile(WeightFile):
    """LTX-2.5's text encoder in one file: Gemma 4, the text projections and the tokenizer.
    UserError for any other file."""

    def __init__(self, path: Path, download: str):
        super().__init__(path, download)
        if kind_of(self) != "gemma":
            raise UserError(
                f"--gemma-root {path}: wanted LTX-2.5's text encoder (with 'gemma_config' in its"
                f" metadata), got {described(self)}\nDownload it: {download}"
            )
        try:  # Gemma's config.json
            self.gemma_config = {**json.loads(self.metadata["gemma_config"])}
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}: the 'gemma_config' metadata is not a JSON object: {error}\nDownload it"
                f" again: {self.download}"
            ) from None
        # The other files of Gemma's folder -> their tensors, which are no weights, or None if the
        # text is in the metadata.
        self._assets: dict[str, str | None] = {n: None for n in _SIDECARS if n in self.metadata}
        for key in [key for key in self.shapes if key == _TOKENIZER or key.startswith(_ASSET)]:
            name = "tokenizer.json" if key == _TOKENIZER else key.removeprefix(_ASSET)
            self._assets[name] = key
        for key in filter(None, self._assets.values()):
            del self.shapes[key]
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if name not in self._assets:
                raise UserError(f"{path} has no {name}\nDownload it again: {self.download}")

    def asset(self, name: str) -> bytes:
        key = self._assets[name]
        if key is None:
            return self.metadata[name].encode()
        # ComfyUI stores signed bytes.
        return TensorFile(self.path, self.download).read(key).numpy().tobytes()


def described(file: TensorFile) -> str:
    kind, version = kind_of(file), file.metadata.get("model_version")
    named = f"{'the' if kind in PARTS else 'a'} {KINDS[kind].title}"
    return named + (f" of LTX {version}" if version else "")


class PartFile(WeightFile):
    """A file with one of PARTS. Its tensors have the names that a checkpoint gives them. config:
    from the metadata, or of the checkpoint, if that has the part's sections. UserError for a file
    of another part or of another release."""

    def __init__(self, path: Path, kind: str, checkpoint: Checkpoint):
        release = checkpoint.release
        part, download = PARTS[kind], release.download(kind)
        file = TensorFile(path, download)
        self.config = {name: checkpoint.config.get(name) for name in part.sections}
        self.config |= config_of(file)
        complete = all(isinstance(self.config[name], dict) for name in part.sections)
        whole = part.is_in(file.shapes)
        if not complete or not (whole or kind_of(file) == kind):
            raise UserError(
                f"{part.flag} {path}: wanted the {part.title} of LTX-{release.version}, got"
                f" {described(file)}\nDownload it: {download}"
            )
        file.check_release(part.flag, release, download)
        self._prefix = "" if whole or len(part.prefixes) > 1 else "".join(part.prefixes)
        # A transformer's own connectors are those it was trained with.
        connected = any(name.startswith((*CONNECTORS,)) for name in checkpoint.shapes)
        self._kept = part.prefixes if connected else (*part.prefixes, *CONNECTORS)
        super().__init__(path, download)
        if isinstance(encoder := self.config.get("vae", {}).get("encoder"), dict):
            # With its encoder's section at the top level, as in the convolutional VAE's config.
            names = {"out_channels": "latent_channels", "blocks": "encoder_blocks"}
            flat = {names.get(name, name): value for name, value in encoder.items()}
            self.config["vae"] = flat | self.config["vae"]

    def name_of(self, key: str) -> str | None:
        connector = f"{DIFFUSION}{key}".startswith((*CONNECTORS,))
        name = (DIFFUSION if connector else self._prefix) + key
        return name if name.startswith(self._kept) else None


def located(name: str | Path, kind: str) -> Path:
    """The local path of a file, of Gemma's folder, or of a Hub name (hub.local_path). In the folder
    of a download it is the file of this kind: the transformer of a recipe, or the text encoder.
    Raises UserError if the folder has none or several."""
    path = hub.local_path(name, kind)
    if kind in RECIPES and path.is_dir():
        return _transformer_in(path, kind)
    if kind == "gemma" and path.is_dir() and (files := files_in(path).get(kind)):
        return _only(files, path, "--gemma-root")
    return path


def named_recipe(path: Path) -> str:
    """The recipe in a checkpoint's file name, "" without one. Its metadata has none."""
    name = path.name.lower()
    return next((recipe for recipe in RECIPES if recipe in name), "")


def files_in(folder: Path) -> dict[str, list[Path]]:
    """The safetensors files of a download's folder and of its subfolders, by kind. Unreadable files
    are left out."""
    files: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")]):
        with suppress(UserError):
            file = TensorFile(path, "")
            files.setdefault(kind_of(file), []).append(path)
    return files


def _transformer_in(folder: Path, recipe: str) -> Path:
    names = {path.name for path in (*folder.glob("*"), *folder.glob("*/*"))}
    files = [p for p in files_in(folder).get("transformer", []) if not SHARD.search(p.name)]
    matching = [path for path in files if named_recipe(path) == recipe]
    if not files:
        what = "a folder without a transformer's file"
        if any(name.startswith(("model_index.json", "diffusion_pytorch_model")) for name in names):
            what = "a model in diffusers' layout, which only other programs read"
        elif shards := sorted(filter(SHARD.search, names)):
            what = f"a folder with a model in {len(shards)} parts, {shards[0]} and so on"
        raise UserError(
            f"--checkpoint-path {folder} is {what}\nDownload the"
            f" checkpoint of LTX-2.3: {DOWNLOAD}\nor the folder of LTX-2.5:"
            f" {hub.download('Lightricks/LTX-2.5', '--local-dir', str(folder))}"
        )
    return _only(matching or files, folder, "--checkpoint-path")


def _only(paths: list[Path], folder: Path, flag: str) -> Path:
    if len(paths) > 1:
        raise UserError(
            f"{folder} has {len(paths)} files for {flag}: {', '.join(path.name for path in paths)}"
            f"\nType {flag} with one of them, for example {paths[0]}"
        )
    return paths[0]


class ModelFiles:
    """The files of one model. UserError for a file of a part that the checkpoint has. The files of
    parts are opened at first use."""

    def __init__(
        self,
        checkpoint_path: str | Path,
        gemma_root: str | Path | None = None,
        **part_paths: str | Path | None,
    ):
        """part_paths: of PARTS, as video_vae_path=FILE."""
        # The whole checkpoint, or the file of the transformer.
        self.checkpoint = Checkpoint(Path(checkpoint_path))
        self.checkpoint.say_others()
        named = {"gemma_path": gemma_root, **part_paths}.items()
        # Files that the user named, by kind. The others are beside the transformer.
        self.given = {name.removesuffix("_path"): Path(path) for name, path in named if path}
        self.release = self.checkpoint.release
        # Kinds of the parts that the checkpoint lacks: each has a file of its own.
        apart = {kind for kind, part in PARTS.items() if not part.is_in(self.checkpoint.shapes)}
        self.apart = {"video_vae", "audio_vae"} if self.release.split else apart
        self._open: dict[str, PartFile] = {}
        for kind in self.given.keys() - {"gemma"} - self.apart:
            part = PARTS[kind]
            raise UserError(
                f"{part.flag} {self.given[kind]}: --checkpoint-path {checkpoint_path} is of"
                f" LTX-{self.release.version} and has its own {part.title}; leave {part.flag} out"
            )

    @property
    def config(self) -> Mapping[str, Any]:
        return _Config(self) if self.apart else self.checkpoint.config

    def of(self, section: str) -> PartFile | Checkpoint:
        """The file with the part that a section of the config describes, such as "vae"."""
        kind = _OWNERS.get(section)
        return self._part(kind) if kind in self.apart else self.checkpoint

    def _part(self, kind: str) -> PartFile:
        if kind not in self._open:
            self._open[kind] = PartFile(self.path(kind), kind, self.checkpoint)
        return self._open[kind]

    @property
    def identity(self) -> dict:
        """For reports and sidecars: fingerprints of the files besides the transformer's, and the
        kind of the video decoder. Empty for a whole checkpoint."""
        if not self.apart:
            return {}
        parts = {kind: self._part(kind) for kind in PARTS if kind in self.apart}
        files = {"text_encoder": self.text_encoder, **parts}
        fingerprints = {kind: file.fingerprint for kind, file in files.items() if file}
        return {"files": fingerprints, "video_decoder": self.decoder}

    def flag(self, section: str) -> str:
        kind = _OWNERS.get(section)
        return PARTS[kind].flag if kind and kind in self.apart else "--checkpoint-path"

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
        gemma_version, has = None, file.gemma_config.get("gemma_version")
        with suppress(ValueError, AttributeError):  # damaged metadata
            source = json.loads(self.checkpoint.metadata.get("gemma_source_checkpoint", "{}"))
            gemma_version = source.get("gemma_version")
        if gemma_version not in (None, has):
            raise UserError(
                f"--gemma-root {root} has Gemma of version {has}, but"
                f" --checkpoint-path {self.checkpoint.path} was trained with {gemma_version}\n"
                f"Download it: {download}"
            )
        return file

    def _check_folder(self, root: Path | None) -> None:
        if root is None or not root.is_file():
            return
        what = other_format(root) or "a file"
        with suppress(UserError):
            file = TensorFile(root, "")
            later = "the text encoder of a later release"
            what = later if kind_of(file) == "gemma" else described(file)
        raise UserError(
            f"--gemma-root {root} is {what}; --checkpoint-path {self.checkpoint.path} is of"
            f" LTX-{self.release.version}, which needs the folder of Gemma3-12B\nDownload it:"
            f" {gemma_download(root)}"
        )

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

    @property
    def projections(self) -> WeightFile:
        apart = "text_projection" in self.apart
        return self.text_encoder or (self._part("text_projection") if apart else self.checkpoint)

    def text_files(self) -> list[TensorFile]:
        """The files with Gemma's weights and, if the checkpoint lacks them, the projections."""
        if (file := self.text_encoder) is not None:
            return [file]
        assert self.gemma_root
        projections = [self.projections] if "text_projection" in self.apart else []
        return [*projections, *gemma_files(self.gemma_root)]

    def path(self, kind: str) -> Path:
        """The file of a part. Raises UserError if the user named none and none is beside the
        transformer."""
        if (path := self.find(kind)) is None:
            whole = "whole checkpoint, which has it\nDownload the checkpoint"
            if self.release.split:
                whole = "folder of the whole download\nDownload the file"
            raise UserError(
                f"--checkpoint-path {self.checkpoint.path} is the transformer of"
                f" LTX-{self.release.version} alone: the {KINDS[kind].title} is missing\nType"
                f" {KINDS[kind].flag} FILE, or --checkpoint-path with the {whole}:"
                f" {self.release.download(kind)}"
            )
        return path

    def find(self, kind: str) -> Path | None:
        """The file of a kind that the user named, or the one beside the transformer, or None. A
        file that is missing beside a transformer from the Hub is downloaded."""
        path, name = self.beside(kind), self.release.split and self._hub_name
        return hub.local_path(name, kind) if path is None and name else path

    def beside(self, kind: str) -> Path | None:
        """As `find`, without a download. Of several video VAEs it is the convolutional one."""
        published = self.release.split or kind in self.apart
        if kind in self.given or not published or self._folder is None:
            return self.given.get(kind)
        of = None, self.release  # a folder may have models of other releases
        files = [p for p in self._beside.get(kind, []) if TensorFile(p, "").named_release in of]
        if kind == "video_vae":
            configs = {path: config_of(TensorFile(path, "")) for path in files}
            convolutional = [path for path in files if not is_diffusion_vae(configs[path])]
            # The cached files of a Hub name must not decide which one a run takes.
            files = convolutional or ([] if self._hub_name else files)
        return _only(files, self._folder, KINDS[kind].flag) if files else None

    def describe_decoder(self) -> str:
        return f"{self.decoder}, from {self.of('vae').path}"

    @property
    def decoder(self) -> str:
        return "diffusion" if is_diffusion_vae(self.config) else "convolutional"

    @cached_property
    def _folder(self) -> Path | None:
        """The folder of the download that contains the transformer, if it is laid out as
        published. LTX-2.3's parts, which others publish, may also be beside the transformer."""
        folder = self.checkpoint.path.parent
        if folder.name in _TRANSFORMERS:
            return folder.parent
        return None if self.release.split else folder

    @cached_property
    def _hub_name(self) -> str:
        """The Hub name of the download; "" for a folder of the user's."""
        name = hub.hub_name(self._folder or "")
        return name if name != str(self._folder or "") else ""

    @cached_property
    def _beside(self) -> dict[str, list[Path]]:
        assert self._folder
        return files_in(self._folder)


class _Config(Mapping[str, Any]):
    """The config sections of the files of a split release. A section's file is opened when the
    section is read."""

    def __init__(self, files: ModelFiles):
        self._files = files

    def __getitem__(self, section: str) -> Any:
        return self._files.of(section).config[section]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._files.checkpoint.config, *_OWNERS]))

    def __len__(self) -> int:
        return len([*iter(self)])
