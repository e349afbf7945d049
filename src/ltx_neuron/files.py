"""Files: atomic writes, reads of untrusted files, locks of folders, and early checks that outputs
can be written and overwrite no input.
"""

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ltx_neuron.errors import UserError, os_reason, to_user_error
from ltx_neuron.format import format_bytes

MANIFEST = "manifest.json"  # of every finished folder; written last
MARK = "ltx-neuron"  # marks our logs and frames, so that a later run may overwrite them
MAX_JSON_BYTES = 64 * 2**20  # the manifest of the released weights has 0.5 MB
_MAX_NAME_BYTES = 200  # file systems allow 255, and whole_file's temporary names are longer
PARTIAL = ".partial"
_CHECKSUM = "checksum"  # of a manifest's other fields


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """The path of a temporary file beside `path`. On leaving the context it is synced to the disk
    and renamed to `path`, replacing an older file; on an error it is removed. All finished files of
    this package are written so. The temporary name is unique, so concurrent writers write separate
    files and the last one finished is kept. A killed process leaves its temporary file, which the
    next writer removes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    partial, writer = _locked_partial(path)
    try:
        with writer:
            yield partial
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            if not partial.stat().st_size:
                raise FileNotFoundError(errno.ENOENT, "nothing was written", str(path))
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _locked_partial(path: Path) -> tuple[Path, BinaryIO]:
    """A new temporary file of `path`, locked. Another writer may take it for a leftover before it
    is locked and remove it; then it is made again."""
    while True:
        unique = f"{os.getpid()}-{secrets.token_hex(4)}"
        partial = path.with_name(f".{path.name}.{unique}{PARTIAL}")
        writer = open(partial, "wb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(writer, fcntl.LOCK_EX)
        if partial.exists():
            return partial, writer
        writer.close()


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed writers of `path`: those that nobody has locked."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}*"):
        with suppress(OSError), open(leftover, "rb+") as file:  # a writer's, or without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path, doing: str) -> Iterator[None]:
    """Hold the lock of a folder while it is made. If another process holds it, print that once and
    wait; the folder may be finished afterwards. The lock is a file beside the folder with the
    holder's process number, removed at the end. The system releases the lock of a killed process.
    doing: the work on the folder, for the message of a waiting process: "compiling"."""
    path, waited = folder.with_name(f".{folder.name}.lock"), False
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "ab+", buffering=0) as file:
            if not _lock_at_once(file.fileno(), path):
                if not waited:
                    file.seek(0)
                    holder = file.read(20).decode(errors="replace") or "just begun"
                    text = f"another process ({holder}) is {doing} {folder}; waiting for it"
                    print(text, flush=True)
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)  # Ctrl-C ends it
            if not _is_at(path, file.fileno()):
                continue
            with suppress(OSError):  # a full disk: the number is for messages alone
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            try:
                yield
            finally:
                # Removed first, so that a waiting process detects that this is no longer the lock.
                path.unlink(missing_ok=True)
            return


def _lock_at_once(descriptor: int, path: Path) -> bool:
    """Lock a file without waiting; returns whether. Without locks: a warning, and True."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        why = os_reason(error)
        print(f"{path.parent} cannot be locked ({why}): start nothing else that writes it")
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at `path`; the lock's holder removes it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_json(path: Path, content: dict) -> None:
    with whole_file(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")


def write_checked(folder: Path, content: dict) -> None:
    """Write a folder's manifest with a checksum of its content; it marks the folder as finished."""
    write_json(folder / MANIFEST, content | {_CHECKSUM: _checksum(content)})


def changed(manifest: dict) -> bool:
    """Whether a manifest's content differs from its checksum. Manifests of 0.1 have none."""
    return manifest.get(_CHECKSUM) not in (None, _checksum(manifest))


def _checksum(manifest: dict) -> str:
    text = json.dumps({key: manifest[key] for key in manifest if key != _CHECKSUM})
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> dict:
    """The JSON object of a file of at most MAX_JSON_BYTES. UserError if it is none."""
    try:
        check_regular(path)
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise UserError(f"{path} has {size} bytes, wanted at most {MAX_JSON_BYTES} of JSON")
        content = json.loads(path.read_bytes())
    except PermissionError as error:
        raise to_user_error(error) from None
    except (OSError, ValueError, RecursionError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else os_reason(error)
        raise UserError(f"{path} cannot be read as JSON: {why}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: got {type(content).__name__}, wanted a JSON object")
    return content


def has_keys(path: Path, keys: set[str]) -> bool:
    try:
        return read_json(path).keys() >= keys
    except UserError:
        return False


def first_bytes(path: Path, count: int) -> bytes:
    """The first bytes of a file; empty if it is missing or unreadable."""
    with suppress(OSError):
        if path.is_file():  # reading a FIFO would block
            with open(path, "rb") as file:
                return file.read(count)
    return b""


def content_digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes, which identifies a job's input independent of its name.
    "unreadable" if the file cannot be read; the checks of a job raise the error."""
    try:
        if os.path.isdir(path):  # of HDR's input: its files, in the order of their names
            digests = map(content_digest, sorted(Path(path).glob("*")))
            return hashlib.sha256("".join(digests).encode()).hexdigest()
        check_regular(path)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "unreadable"


# What people have in place of a safetensors file: first bytes -> name.
_FORMATS = {
    b"GGUF": "a GGUF file, which only other programs read",
    b"PK": "a pickle of torch.save, or another zip archive; pickles may run code and are not read",
    b"\x80": "a pickle; pickles may run code and are not read",
    b"version https://git-lfs": "a pointer of git-lfs, not the file itself",
    b"<": "a web page, not the file itself",
    b"{": "JSON text, such as the list of a checkpoint's parts, not weights",
}
_UNFINISHED = ".part", ".partial", ".incomplete", ".crdownload", ".aria2", ".download"


def other_format(path: Path) -> str:
    """What a file is that is no safetensors file, for a message; "" if unknown."""
    if path.suffix in _UNFINISHED:
        return "an unfinished download"
    begin = first_bytes(path, 64)
    if not any(begin[4:8]):  # a safetensors file begins with the length of its header
        return ""
    begin = begin.lstrip()
    return next((name for first, name in _FORMATS.items() if begin.startswith(first)), "")


# Kinds of paths other than regular files and folders.
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_regular(path: str | Path) -> None:
    """Raise OSError unless `path` is a readable regular file. Opens nothing: a pipe blocks."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if re.match(r"\w{2,}:/", str(path)):  # Path makes one slash of two
            text = "that is an address (URL), wanted a file of this machine: download it first"
            raise OSError(errno.EINVAL, text, str(path)) from None
        raise
    except ValueError:  # an invalid character in a path
        raise _refused(FileNotFoundError, errno.ENOENT, path) from None
    if stat.S_ISDIR(mode):
        raise _refused(IsADirectoryError, errno.EISDIR, path)
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
        raise OSError(errno.EINVAL, f"that is {kind}, wanted a regular file", str(path))
    if not os.access(path, os.R_OK):
        raise _refused(PermissionError, errno.EACCES, path)


def _refused(kind: type[OSError], number: int, path: str | Path) -> OSError:
    return kind(number, os.strerror(number), str(path))


def check_readable(path: str | Path, flag: str = "", advice: str = "") -> None:
    """Raise UserError unless `path` is a readable regular file. flag: of the path, for the message.
    advice: end of the message: what to type instead."""
    try:
        check_regular(path)
    except OSError as error:
        raise to_user_error(error, flag, advice) from None


def check_writable(path: Path, flag: str) -> None:
    """Raise UserError if a file cannot be written to `path`. Creates nothing. flag: the flag that
    chooses another path, with its value: "--output FILE"."""
    path = Path(path)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder, wanted a file: pass a name inside it with {flag}")
    if len(os.fsencode(path.name)) > _MAX_NAME_BYTES:
        raise UserError(
            f"{path.name}: a file name this long cannot be written; pass a shorter one with {flag}"
        )
    check_folder(path.parent, flag, path)


def check_folder(folder: Path, flag: str, path: Path | None = None) -> None:
    """Raise UserError if files cannot be written to `folder`, or it cannot be created. flag: the
    flag that chooses another path, with its value. path: the user's path for the message, if it is
    not the folder."""
    there = nearest_existing(folder)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"{path or folder} cannot be written: {there} is not a folder you may write to; pass"
            f" another place with {flag}"
        )


def nearest_existing(path: Path) -> Path:
    """The path, or the lowest folder above it that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if os.path.lexists(p))


def free_bytes(path: Path) -> int:
    """Free bytes of a path's disk. The path may be missing."""
    return shutil.disk_usage(nearest_existing(Path(path))).free


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise UserError unless a folder's disk has `needed` free bytes. what: "the weights need"."""
    if needed > (free := free_bytes(folder)):
        raise UserError(
            f"{what} {format_bytes(needed)} more in {folder}, its disk has {format_bytes(free)}"
            " free.\nFree some, or choose another place with --artifacts-dir DIR"
        )


FRAME_NAME = re.compile(r"frame_[0-9]{5}\.(png|exr)")
# What marks our frames: the text chunk right after the PNG's header, an attribute of the EXR's.
FRAME_MARK = "Software", MARK
_MARKED = re.compile(rf"(?s)(tEXtSoftware\0|software\0string\0.{{4}}){MARK}".encode())


def frames_in(folder: Path) -> list[Path]:
    """Files with a frame's name in a folder, which may be missing."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if FRAME_NAME.fullmatch(path.name)]


def check_frames(folder: Path, flag: str = "--save-frames DIR") -> None:
    """Raise UserError if `write_frames` would overwrite pictures that it did not make."""
    for path in frames_in(folder):
        if not is_our_frame(path):
            raise UserError(
                f"{path} exists and this toolkit did not write it; pass an empty folder with {flag}"
            )


def is_our_frame(picture: Path) -> bool:
    return bool(_MARKED.search(first_bytes(picture, 1024)))


def check_outputs(outputs: dict[str, Path], inputs: dict[str, Path]) -> None:
    """Raise UserError if an output is an input, is inside an input folder, or is another output.
    Other spellings and symbolic links are resolved. outputs: written files by description; the last
    word is the flag that changes their path. inputs: files and folders that are read, by flag."""
    read = {_real(path): name for name, path in inputs.items()}
    for name, folder in inputs.items():  # a folder may contain links, as Hugging Face's cache
        read |= {_real(path): name for path in Path(folder).rglob("*") if path.is_symlink()}
    files: dict[Path, str] = {}
    folders: dict[Path, str] = {}  # around an output
    for name, path in outputs.items():
        real, advice = _real(path), f"pass another {name.split()[-1]}"
        # Writing replaces a link itself, not its target.
        around = {*real.parents, *(_real(path.parent) / path.name).parents}
        if other := next((read[folder] for folder in around if folder in read), None):
            raise UserError(f"{name}: {path} is in the input folder of {other}; {advice}")
        if other := read.get(real) or files.get(real):
            raise UserError(f"{other} and {name} are the same file {path}; {advice}")
        above = next((folder for folder in real.parents if folder in files), real)
        if other := files.get(above) or folders.get(above):
            raise UserError(
                f"{above} is a file for one of {other} and {name} and a folder for the other;"
                f" {advice}"
            )
        files[real] = name
        folders |= dict.fromkeys(real.parents, name)


def _real(path: Path) -> Path:
    """A path without links and ".."; its last parts may be missing."""
    return Path(os.path.realpath(path))
