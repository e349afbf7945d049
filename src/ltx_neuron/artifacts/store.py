"""A store: a place that fsspec reaches (a folder, S3, the Hugging Face hub, ...) with artifacts in
it.

    blobs/<how it was hashed>-<digest>    a file's content, once whatever number of sets has it
    sets/<weights|graphs>/<folder>.json   the files of a folder; written last
    sets/tuned/<profile>-....json         a choice of a tuning

Credentials are fsspec's own: nothing here reads, keeps or prints them.
"""

import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ltx_neuron.artifacts.sets import KEY, KINDS, ArtifactSet, decoded
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import whole_file

T = TypeVar("T")
_PIECE_BYTES = 16 * 2**20  # asked for at once
_AHEAD = 6  # pieces on their way at a time: a store gives one connection a part of the network
_MAX_SET_BYTES = 2**20
_USER = re.compile(r"(://)[^/\s]*@")
# What to install for protocols that fsspec has no code of its own for.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "hf": "huggingface_hub", "gs": "gcsfs", "gcs": "gcsfs"}
_PACKAGES |= dict.fromkeys(("az", "abfs"), "adlfs") | dict.fromkeys(("sftp", "ssh"), "paramiko")
_ADVICE = (
    "Wanted: a place that you may read (to push: write), as in /mnt/shared/ltx, s3://bucket/ltx or"
    " hf://owner/name/ltx.\nCredentials are the ones of its own tools: aws configure, hf auth login"
)


def without_user(text: str) -> str:
    """A URL, or a text with URLs in it, without the user and password that one may hold."""
    return _USER.sub(r"\1", text)


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
        except ImportError as error:
            package = _PACKAGES.get(url.partition(":")[0])
            remedy = f"Type: pip install {package}" if package else without_user(str(error))
            raise UserError(f"{self.url}: fsspec lacks the code for this\n{remedy}") from None
        except Exception as error:  # noqa: BLE001 - of any file system there is
            raise self._refusal(error) from None
        self.root = root.rstrip("/")
        self._local = isinstance(self.fs, LocalFileSystem)

    # --- reading ----------------------------------------------------------------------------------

    def blobs(self) -> dict[str, int]:
        """The bytes of every blob there is, by key."""
        return {key: size for key, size in self._listed("blobs").items() if KEY.fullmatch(key)}

    def names(self) -> list[str]:
        """The names of all sets, as in weights/dit-tp4-bfloat16-..."""
        return sorted(
            f"{kind}/{file.removesuffix('.json')}"
            for kind in (*KINDS, "tuned")
            for file, size in self._listed(f"sets/{kind}").items()
            if file.endswith(".json") and size <= _MAX_SET_BYTES
        )

    def _listed(self, folder: str) -> dict[str, int]:
        """The bytes of the files right in a folder, by name; links, pipes and devices are none."""
        with self._asked():
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(f"{self.root}/{folder}", maxdepth=1, detail=True)
            except FileNotFoundError:
                return {}
        return {
            path.rpartition("/")[2]: info["size"]
            for path, info in found.items()
            if info["type"] == "file"
        }

    def described(self, name: str) -> ArtifactSet:
        """A set, checked. UserError where it is damaged, or leads out of its folder."""
        return self.opened(name, decoded)

    def opened(self, name: str, decode: Callable[[bytes, str], T]) -> T:
        """What lies under the name of a set, by a function that raises ValueError for what is
        wrong. UserError then."""
        place = self._place(f"sets/{name}.json")
        try:
            with self._asked():
                text = self.fs.cat_file(place)
            return decode(text, name)
        except ValueError as error:
            raise UserError(f"{self.url}/sets/{name}.json is damaged: {error}") from None

    def read(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes start..stop of a blob, in pieces and in order."""
        place, waiting = self._place(f"blobs/{key}"), deque()
        with ThreadPoolExecutor(_AHEAD) as pool:
            try:
                for first in range(start, stop, _PIECE_BYTES):
                    last = min(first + _PIECE_BYTES, stop)
                    # By name: what comes second differs between file systems.
                    piece = pool.submit(self.fs.cat_file, place, start=first, end=last)
                    waiting.append(piece)
                    if len(waiting) == _AHEAD:
                        yield self._result(waiting)
                while waiting:
                    yield self._result(waiting)
            finally:
                for future in waiting:
                    future.cancel()

    def _result(self, waiting: deque) -> bytes:
        with self._asked():
            return waiting.popleft().result()

    # --- writing ----------------------------------------------------------------------------------

    def put(self, path: Path, key: str, sent: Callable[[int], None]) -> None:
        """Write a file's content as a blob; one that is there is replaced. sent: is told now and
        then how many bytes of it are written."""
        from fsspec.callbacks import Callback

        callback = Callback(hooks={"sent": lambda size, value, **_: sent(value)})
        with self._asked(), self._arriving(f"blobs/{key}") as place:
            self.fs.put_file(str(path), place, callback=callback)

    def write(self, name: str, text: bytes) -> None:
        """Write what is to lie under the name of a set, all of whose blobs are there."""
        with self._asked(), self._arriving(f"sets/{name}.json") as place:
            self.fs.pipe_file(place, text)

    @contextmanager
    def _arriving(self, name: str) -> Iterator[str]:
        """Where to write so that the store shows `name` when it is whole."""
        place = self._place(name)
        if self._local:
            with whole_file(place) as partial:
                yield str(partial)
        elif self.fs.root_marker:  # a file system: shows what is being written, and can rename
            folder, _, file = place.rpartition("/")
            self.fs.makedirs(folder, exist_ok=True)
            partial = f"{folder}/.{file}.{secrets.token_hex(4)}"
            try:
                yield partial
                self.fs.mv(partial, place)
            finally:
                with suppress(Exception):
                    self.fs.rm_file(partial)
        else:  # a store of objects: shows an object when all of it has come
            yield place

    def _place(self, name: str) -> str:
        return f"{self.root}/{name}"

    # --- what goes wrong --------------------------------------------------------------------------

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Say in words what goes wrong inside the block. What the system says of a path of a folder
        is said elsewhere (errors.run)."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            if isinstance(error, UserError) or (self._local and isinstance(error, OSError)):
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
