"""A store: a place that fsspec reaches (a folder, S3, the Hugging Face hub, ...) with artifacts in
it, in the folders that they have under --artifacts-dir.

    weights/<folder>/...  graphs/<folder>/...   the files of a finished folder; its manifest last
    tuned/<profile>-....json                    what a tuning chose

Credentials are fsspec's own: nothing here reads, keeps or prints them.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC
from pathlib import Path

from tqdm import tqdm

from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import MANIFEST, whole_file

KINDS = ("weights", "graphs", "tuned")
# Of a folder, or of a tuning's file without its ending: never "..", nothing hidden.
_NAME = re.compile(rf"(?:{'|'.join(KINDS)})/[A-Za-z0-9][A-Za-z0-9._-]*")
_USER = re.compile(r"(://)[^/\s]*@")
_ADVICE = (
    "Wanted: a place that you may read (to push: write), as in /mnt/shared/ltx, s3://bucket/ltx or"
    " hf://owner/name/ltx.\nCredentials are the ones of its own tools: aws configure, hf auth login"
)


def without_user(text: str) -> str:
    """A URL, or a text with URLs in it, without the user and password that one may hold."""
    return _USER.sub(r"\1", text)


def names_in(files: dict[str, int]) -> list[str]:
    """What a store's files are of: weights/<folder>, graphs/<folder> of the finished folders, and
    tuned/<file without its ending>."""
    names = [file.removesuffix(f"/{MANIFEST}") for file in files if file.endswith(f"/{MANIFEST}")]
    tuned = [file for file in files if file.startswith("tuned/") and file.endswith(".json")]
    names += [file.removesuffix(".json") for file in tuned]
    return sorted(filter(_NAME.fullmatch, names))


class Store:
    """What a URL leads to. UserError where there is no code for its protocol.

    url  as it may be shown
    """

    def __init__(self, url: str | Path):
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        url = str(url)
        if not url:  # fsspec would take the working directory
            raise UserError(f"the URL of the store is empty\n{_ADVICE}")
        self.url = without_user(url.rstrip("/") or url)
        try:
            self.fs, root = url_to_fs(url)
        except ImportError as error:  # it names the package to install
            raise UserError(f"{self.url}: {without_user(str(error))}") from None
        except Exception as error:  # noqa: BLE001 - of any file system there is
            raise self._refusal(error) from None
        self.root = root.rstrip("/")
        self._local = isinstance(self.fs, LocalFileSystem)

    def files(self) -> dict[str, int]:
        """The bytes of every file, by name as in weights/dit-tp4-bfloat16-.../rank0.safetensors.
        Links, pipes and devices are none."""
        found = {}
        for kind in KINDS:
            with self._in_words(), suppress(FileNotFoundError):
                self.fs.invalidate_cache()
                found |= self.fs.find(self._place(kind), detail=True)
        return {
            path.removeprefix(f"{self.root}/"): info["size"]
            for path, info in found.items()
            if info["type"] == "file"
        }

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        with self._in_words():
            return self.fs.cat_file(self._place(name))

    def written(self, name: str) -> str:
        """When a file was written, as in 2026-11-22T10:00:00Z; empty where that is unknown."""
        try:
            time = self.fs.modified(self._place(name)).astimezone(UTC)
        except Exception:  # noqa: BLE001 - it is only shown
            return ""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ")

    def get(self, name: str, path: Path, bar: tqdm) -> None:
        """Copy a file from the store to `path`."""
        with self._in_words(), _shown(bar, path) as callback:
            self.fs.get_file(self._place(name), str(path), callback=callback)

    def put(self, path: Path, name: str, bar: tqdm) -> None:
        """Copy a file into the store; one of that name is replaced."""
        place = self._place(name)
        with self._in_words(), _shown(bar, path) as callback:
            if self._local:
                with whole_file(place) as partial:
                    self.fs.put_file(str(path), str(partial))
                return
            if self.fs.root_marker:  # it has folders; a store of objects has none to make
                self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(path), place, callback=callback)

    def _place(self, name: str) -> str:
        return f"{self.root}/{name}"

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Say in words what goes wrong inside the block. What the system says of a path of this
        machine is said elsewhere (errors.run)."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            if isinstance(error, OSError) and (self._local or full):
                raise
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> UserError | RunError:
        """What a file system refuses, by whether the user can mend it."""
        said = without_user(f"{self.url}: {type(error).__name__}: {error}")
        # A file system that can only be read has no put_file: NotImplementedError.
        of_user = PermissionError | FileNotFoundError | ValueError | NotImplementedError
        if isinstance(error, of_user) or "Credential" in type(error).__name__:
            return UserError(f"{said}\n{_ADVICE}")
        return RunError(f"{said}\nType the same again: what has come so far is kept")


@contextmanager
def _shown(bar: tqdm, path: Path) -> Iterator:
    """What fsspec tells how many bytes it has copied from or to `path`: a bar shows it."""
    from fsspec.callbacks import Callback

    before = bar.n
    yield Callback(hooks={"bar": lambda size, value, **_: bar.update(before + value - bar.n)})
    bar.update(before + path.stat().st_size - bar.n)  # some file systems tell nothing
