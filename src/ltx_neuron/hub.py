"""Hugging Face Hub names in place of paths: OWNER/REPO[@REVISION][/FILE].

huggingface_hub downloads the files into its cache, with its token, endpoint and offline mode. A
cached file is used without a request.
"""

import errno
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path

from ltx_neuron.errors import UserError, to_user_error
from ltx_neuron.files import free_bytes
from ltx_neuron.format import format_bytes

DEFAULT_REPO = "Lightricks/LTX-2.3"
_UPSCALERS = "latent_upscale_models"
# The files of OWNER/REPO without FILE, from Lightricks' MODELS-LTX-2.3.md and README, also fp8.
RELEASE_FILES: dict[str, dict[str, str]] = {
    DEFAULT_REPO: {
        "distilled": "ltx-2.3-22b-distilled-1.1.safetensors",
        "dev": "ltx-2.3-22b-dev.safetensors",
        "lora": "ltx-2.3-22b-distilled-lora-384-1.1.safetensors",
        "spatial": "ltx-2.3-spatial-upscaler-x2-1.1.safetensors",
        "temporal": "ltx-2.3-temporal-upscaler-x2-1.0.safetensors",
    },
    "Lightricks/LTX-2.3-fp8": {
        "distilled": "ltx-2.3-22b-distilled-fp8.safetensors",
        "dev": "ltx-2.3-22b-dev-fp8.safetensors",
    },
    "Lightricks/LTX-2.5": {
        "distilled": "diffusion_models/ltx-2.5-22b-distilled-transformer-bf16.safetensors",
        "dev": "diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors",
        "gemma": "text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors",
        "video_vae": "vae/ltx-2.5-video-vae-conv-bf16.safetensors",
        "audio_vae": "vae/ltx-2.5-audio-vae-bf16.safetensors",
        "lora": "loras/ltx-2.5-22b-distilled-lora-450-bf16.safetensors",
        "spatial": f"{_UPSCALERS}/ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors",
        "temporal": f"{_UPSCALERS}/ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0.safetensors",
        "duration_head": "model_patches/ltx-2.5-duration-head-bf16.safetensors",
    },
}
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^/]+))?(?:/(.+))?", re.ASCII)
_CACHED = re.compile(r"(.*/models--([^/]+?)--([^/]+))/snapshots/([^/]+)(/.+)?")
_SHARD = re.compile(r"model(?:-\d+-of-(\d+))?\.safetensors")
_GEMMA = "config.json", "tokenizer.json", "tokenizer_config.json"  # besides the shards
_GEMMA_TOO = "model.safetensors.index.json", "special_tokens_map.json", "added_tokens.json"
_may_download = ContextVar("may_download", default=True)


class NotDownloaded(UserError):
    """A file of the Hub is not in the cache, and downloads are disabled."""


@contextmanager
def no_downloads() -> Iterator[None]:
    """In this context, local_path raises NotDownloaded instead of downloading."""
    token = _may_download.set(False)
    try:
        yield
    finally:
        _may_download.reset(token)


def local_path(name: str | Path, kind: str) -> Path:
    """The path of a file or of Gemma's folder. Downloads the files of a Hub name once.

    An existing path takes precedence. A name that can only be a path is returned unchanged.

    kind  "distilled" or "dev" (a checkpoint of this recipe), "gemma" (a folder, or the file of
          LTX-2.5's text encoder), "video_vae", "audio_vae", "duration_head", "lora", "spatial" or
          "temporal" (an upsampler)
    Raises UserError if the Hub lacks or refuses the file, or the disk has no room for it.
    """
    if not (match := _match(name)):
        main = Path(name, "refs", "main")  # of a repository's folder in the cache
        return Path(name, "snapshots", main.read_text()) if main.is_file() else Path(name)
    repo, revision = match[1], match[2] or "main"
    file = match[3] or RELEASE_FILES.get(repo, {}).get(kind, "")
    if kind == "gemma" and _SHARD.fullmatch(file):
        raise UserError(f"{name} is one file; Gemma needs a whole repository\nType {repo}")
    kind = "" if file else kind
    full = str(name) if match[3] or not file else f"{name}/{file}"
    with _as_user_errors(full, repo, revision):
        path = _cached(repo, revision, file, kind)
        if path is None:
            file = _download(full, repo, revision, file, kind)
            path = _cached(repo, revision, file, kind)
    if path is None:
        raise UserError(f"{repo} changed during its download\nType the same command again")
    return path


def absolute(name: str | Path) -> str:
    """An absolute path, for processes in other folders; a Hub name unchanged."""
    return str(name) if _match(name) else os.path.abspath(name)


def _match(name: str | Path) -> re.Match | None:
    match = None if os.path.exists(name) else _NAME.fullmatch(str(name))
    is_file = match and match[0] == match[1] and match[1].endswith(".safetensors")
    return None if is_file else match


def hub_name(path: str | Path) -> str:
    """A path as the user may type it: the Hub name of a file in the Hub's cache."""
    if not (match := _CACHED.fullmatch(str(path))):
        return str(path)
    storage, owner, repo, commit, file = match.groups()
    main = Path(storage, "refs", "main")
    latest = main.is_file() and main.read_text() == commit
    return f"{owner}/{repo}{'' if latest else f'@{commit}'}{file or ''}"


def download(name: str, *options: str) -> str:
    """The hf command that downloads a Hub name's files."""
    [(repo, revision, file)] = _NAME.findall(name)
    options += ("--revision", revision) if revision else ()
    return shlex.join(["hf", "download", repo, *([file] if file else []), *options])


def download_released(kind: str, release: str = DEFAULT_REPO) -> str:
    """The hf command that downloads the released file of a kind to this folder."""
    return download(f"{release}/{RELEASE_FILES[release][kind]}", "--local-dir", ".")


def download_again(path: Path) -> str:
    """The hf command that downloads a missing or damaged file to its place: a file of the cache, or
    one with a published name; "" for any other file."""
    if _CACHED.fullmatch(str(path)):
        return download(hub_name(path), "--force-download")
    for repo, files in RELEASE_FILES.items():
        for file in map(Path, files.values()):
            if path.parts[-len(file.parts) :] == file.parts:
                folder = str(path.parents[len(file.parts) - 1])
                return download(f"{repo}/{file}", "--local-dir", folder)
    return ""


def nearest(path: str | Path) -> str:
    """For a missing path, " (nearest: PATH)" if its folder has a similar name; else ""."""
    folder, name = os.path.split(path)
    with suppress(OSError, ValueError):  # no folder, or a character that no path can have
        names = [] if os.path.lexists(path) else os.listdir(folder or ".")
        for near in get_close_matches(name, names, 1):
            return f" (nearest: {os.path.join(folder, near)})"
    return ""


def _cached(repo: str, revision: str, file: str, kind: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    if not file and kind != "gemma":
        return None
    path = try_to_load_from_cache(repo, file or _GEMMA[0], revision=revision)
    if not isinstance(path, str):  # None, or a mark of a file that the repository lacks
        return None
    if file:
        return Path(path)
    folder = Path(path).parent
    shards = [shard for name in os.listdir(folder) if (shard := _SHARD.fullmatch(name))]
    whole = shards and len(shards) == int(shards[0][1] or 1)
    return folder if whole and all((folder / name).is_file() for name in _GEMMA) else None


def _download(name: str, repo: str, revision: str, file: str, kind: str) -> str:
    from huggingface_hub import HfApi, constants, hf_hub_download

    if not _may_download.get():
        raise NotDownloaded(f"{name} is not downloaded yet\n{download(name)}")
    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    listed = {entry.rfilename: entry for entry in info.siblings or ()}
    files = _chosen(f"{constants.ENDPOINT}/{repo}", list(listed), file, kind)
    beside = re.sub(r"adapter_model\.safetensors$", "adapter_config.json", files[0])  # PEFT's
    files += [beside] if beside in {*listed} - {*files} else []
    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    blob_of = {entry: str(of.lfs.sha256 if of.lfs else of.blob_id) for entry, of in listed.items()}
    absent = [entry for entry in files if not (blobs / blob_of[entry]).exists()]
    if absent:
        size = sum(listed[entry].size or 0 for entry in absent)
        what = f"{repo}/{absent[0]}" if len(absent) == 1 else f"{repo}, {len(absent)} files"
        if size > (free := free_bytes(cache)):
            raise UserError(
                f"{what}: {format_bytes(size)} do not fit {cache}: {format_bytes(free)} free\n"
                "Free some space, or choose a larger disk with HF_HOME=DIR"
            )
        print(f"downloading {what} ({format_bytes(size)}) to {cache}", flush=True)
    for entry in sorted(files, key=lambda entry: listed[entry].size or 0):
        hf_hub_download(repo, entry, revision=revision)
    return "" if kind == "gemma" else files[0]


def _chosen(url: str, listed: list[str], file: str, kind: str) -> list[str]:
    if kind == "gemma":
        if absent := {*_GEMMA} - {*listed}:
            raise UserError(
                f"{url} is not Gemma: it has no {min(absent)}\n"
                "Type google/gemma-3-12b-it-qat-q4_0-unquantized"
            )
        return [f for f in listed if f in _GEMMA + _GEMMA_TOO or _SHARD.fullmatch(f)]
    if not file and "model_index.json" in listed:
        raise UserError(
            f"{url} is a model in diffusers' layout, which only other programs read\n"
            f"Type {' or '.join(name for name in RELEASE_FILES if '-fp8' not in name)}"
        )
    weights = [name for name in listed if name.endswith(".safetensors")]
    if file in listed or (not file and len(weights) == 1):
        return [file or weights[0]]
    shown = get_close_matches(file, listed, 3) or weights[:8]
    what = f"has no file {file}" if file else f"has {len(weights)} files of weights; which one?"
    raise UserError(
        f"{url} {what}\nType OWNER/REPO/FILE with one of {url}/tree/main: {', '.join(shown) or '-'}"
    )


@contextmanager
def _as_user_errors(name: str, repo: str, revision: str) -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub import errors as of

    url = f"{constants.ENDPOINT}/{repo}"
    try:
        yield
    except UserError:
        raise
    except of.GatedRepoError:
        text = f"{repo} is gated: you must accept its licence once"
        fix = f"Accept it on {url}, then type hf auth login (or set HF_TOKEN)"
    except (of.RepositoryNotFoundError, of.HFValidationError):
        text = f"{name}: no such file here{nearest(name)}, and no public repository {url}"
        fix = (
            f"Type a path or a name such as {DEFAULT_REPO}; for a private one, hf auth login first"
        )
    except of.RevisionNotFoundError:
        text, fix = f"{repo} has no revision {revision}", f"Its commits: {url}/commits/main"
    except of.OfflineModeIsEnabled:
        text = f"{name}: no such file here{nearest(name)}, nor in {constants.HF_HUB_CACHE}; "
        text += "HF_HUB_OFFLINE forbids a download"
        fix = f"Unset HF_HUB_OFFLINE, or type where there is a network: {download(name)}"
    except Exception as error:
        if isinstance(error, OSError) and error.filename:  # a file of the cache
            raise to_user_error(error) from None
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            text = f"{name}: the disk of {constants.HF_HUB_CACHE} is full"
            fix = "Free some space, or choose a larger disk with HF_HOME=DIR"
        else:
            cause = error.__cause__ or error
            why = f"{type(cause).__name__}: {cause}".partition("\n")[0][:150]
            text = f"{name}: no such file here{nearest(name)}, and no download from {url} ({why})"
            fix = "Check the network and the token (hf auth whoami), then type the command again"
    else:
        return
    raise UserError(f"{text}\n{fix}") from None
