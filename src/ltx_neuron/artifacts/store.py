"""A store of artifacts at any URL of fsspec (a folder, S3, the Hugging Face Hub, ...). It has the
same folders as --artifacts-dir.

    weights/<folder>/...  graphs/<folder>/...   the files of a finished folder; its manifest last
    tuned/<profile>-....json                    tuned settings

fsspec finds the credentials. This module never reads, stores or prints them.
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
# The name of a folder or, without its suffix, of a file of tuned settings; never ".." or hidden.
_NAME = re.compile(rf"(?:{'|'.join(KINDS)})/[A-Za-z0-9][A-Za-z0-9._-]*")
_USER = re.compile(r"(://)[^/\s]*@")
_ADVICE = (
    "Wanted: a place with read access (push: write access), as in /mnt/shared/ltx, s3://bucket/ltx"
    " or hf://owner/name/ltx.\nSet credentials with the store's tools: aws configure, hf auth login"
)


def without_user(text: str) -> str:
    """A text without the user and password of URLs in it."""
    return _USER.sub(r"\1", text)


def names_in(files: dict[str, int]) -> list[str]:
    """The names of a store's artifacts: weights/<folder> and graphs/<folder> if finished, and
    tuned/<file without its suffix>."""
    names = [file.removesuffix(f"/{MANIFEST}") for file in files if file.endswith(f"/{MANIFEST}")]
    tuned = [file for file in files if file.startswith("tuned/") and file.endswith(".json")]
    names += [file.removesuffix(".json") for file in tuned]
    return sorted(filter(_NAME.fullmatch, names))


class Store:
    """The store at a URL. Raises UserError if its protocol is not supported.

    url  without user and password
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
        """The bytes of every regular file by name, as in
        weights/dit-tp4-bfloat16-.../rank0.safetensors."""
        files = {}
        for kind in KINDS:
            with self._in_words(), suppress(FileNotFoundError):
                self.fs.invalidate_cache()
                files |= self.fs.find(self._place(kind), detail=True)
        return {
            path.removeprefix(f"{self.root}/"): info["size"]
            for path, info in files.items()
            if info["type"] == "file"
        }

    def read(self, name: str) -> bytes:
        with self._in_words():
            return self.fs.cat_file(self._place(name))

    def written(self, name: str) -> str:
        """When a file was written, as in 2026-11-22T10:00:00Z; empty if unknown."""
        try:
            time = self.fs.modified(self._place(name)).astimezone(UTC)
        except Exception:  # noqa: BLE001 - the time is optional
            return ""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ")

    def get(self, name: str, path: Path, bar: tqdm) -> None:
        with self._in_words(), _shown(bar, path) as callback:
            self.fs.get_file(self._place(name), str(path), callback=callback)

    def put(self, path: Path, name: str, bar: tqdm) -> None:
        """Copy a file into the store. Replaces a file of that name."""
        place = self._place(name)
        with self._in_words(), _shown(bar, path) as callback:
            if self._local:
                with whole_file(place) as partial:
                    self.fs.put_file(str(path), str(partial))
                return
            if self.fs.root_marker:  # it has folders; object stores do not
                self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(path), place, callback=callback)

    def _place(self, name: str) -> str:
        return f"{self.root}/{name}"

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Convert errors of the store in the block. Errors of this machine's paths are passed on to
        errors.run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            if isinstance(error, OSError) and (self._local or full):
                raise
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> UserError | RunError:
        """A UserError if the user can fix the file system's error, else a RunError."""
        text = without_user(f"{self.url}: {type(error).__name__}: {error}")
        # A read-only file system has no put_file: NotImplementedError.
        of_user = PermissionError | FileNotFoundError | ValueError | NotImplementedError
        if isinstance(error, of_user) or "Credential" in type(error).__name__:
            return UserError(f"{text}\n{_ADVICE}")
        return RunError(f"{text}\nType the command again: it continues with the missing files")


@contextmanager
def _shown(bar: tqdm, path: Path) -> Iterator:
    """A callback for fsspec that shows the bytes copied from or to `path` in a bar."""
    from fsspec.callbacks import Callback

    before = bar.n
    yield Callback(hooks={"bar": lambda size, value, **_: bar.update(before + value - bar.n)})
    bar.update(before + path.stat().st_size - bar.n)  # some file systems call nothing
