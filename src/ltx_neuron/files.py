"""Writing files so that they are whole or absent, reading files that others may have written,
making a folder in one process at a time, and checking early that an output can be written and lies
over no input.
"""

import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from ltx_neuron.errors import UserError, reason, refusal
from ltx_neuron.format import format_bytes

MANIFEST = "manifest.json"  # of every finished folder; written last
MARK = "ltx-neuron"  # by which files made beside a named one are known again: logs, frames
MAX_JSON_BYTES = 64 * 2**20  # the manifest of the released weights has 0.5 MB
_MAX_NAME_BYTES = 200  # file systems allow 255, and whole_file's temporary names are longer
_PARTIAL = ".partial"


@contextmanager
def whole_file(path: str | Path, suffix: str = "") -> Iterator[Path]:
    """The path of a temporary file beside `path` to write to. On leaving the context it is synced
    to the disk and renamed to `path`, replacing what was there; on an error it is removed.

    This is the only way in which this package writes a file whole. (Rank files, which a later run
    of the sharder goes on with, keep one .partial name until they are finished.)

    The temporary name is unique to this call: of two writers at once each writes its own file, and
    the one that ends last is kept. A process that is killed leaves its temporary file behind.

    suffix  what the temporary name must end with, for writers that choose a format by it
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    partial = path.with_name(f".{path.name}.{unique}{_PARTIAL}{suffix}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left. Only for a caller that knows
    (by a lock) that nobody is writing it now."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}*"):
        leftover.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path, doing: str) -> Iterator[None]:
    """Hold the lock of a folder while it is made. Where another process holds it, this says so once
    and waits: the folder may be finished then.

    The lock is a file beside the folder, with the number of the process that holds it, and is
    removed at the end. The system releases that of a killed process; the next one takes it over.

    doing  what is done with the folder, for the process that waits: "compiling"
    """
    path = folder.with_name(f".{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _locked(path, f"{doing} {folder}")
    try:
        yield
    finally:
        # Removed first: a process that waits for this file then knows that it is not the lock.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path, doing: str) -> int:
    """The descriptor of the file at `path`, locked, with this process's number in it."""
    said = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _lock_at_once(descriptor, path):
                if not said:
                    holder = os.read(descriptor, 20).decode(errors="replace") or "just begun"
                    print(f"another process ({holder}) is {doing}; waiting for it", flush=True)
                said = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # Ctrl-C ends it
            if _is_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock_at_once(descriptor: int, path: Path) -> bool:
    """Whether the file could be locked without waiting. Where the file system knows no locks, a
    warning has to do."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(
            f"{path.parent} cannot be locked ({reason(error)}): start nothing else that writes it"
        )
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at `path`: who held the lock removes it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object through whole_file."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file through whole_file."""
    from safetensors.torch import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with whole_file(path) as partial:
        partial.write_bytes(save(contiguous, metadata))


def read_json(path: Path) -> dict:
    """The JSON object of a file. UserError where the file is missing, larger than MAX_JSON_BYTES,
    or holds anything else."""
    try:
        check_regular(path)
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise UserError(f"{path} has {size} bytes, wanted at most {MAX_JSON_BYTES} of JSON")
        content = json.loads(path.read_bytes())
    except PermissionError as error:
        raise refusal(error) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {reason(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: got {type(content).__name__}, wanted a JSON object")
    return content


def first_bytes(path: Path, count: int) -> bytes:
    """What a file begins with; nothing where there is no file, or none that can be read."""
    with suppress(OSError):
        if path.is_file():  # a FIFO would keep the reader waiting
            with open(path, "rb") as file:
                return file.read(count)
    return b""


# What a path may be instead of a regular file or a folder.
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_regular(path: str | Path) -> None:
    """Raise OSError unless `path` is a regular file that may be read. Opens nothing: a named pipe
    would not answer, a device may never end."""
    try:
        mode = os.stat(path).st_mode
    except ValueError:  # a character that no path can have
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
    """Raise UserError unless `path` is a regular file that may be read.

    flag    what the user typed before it
    advice  ends the message: what to type instead
    """
    try:
        check_regular(path)
    except OSError as error:
        raise refusal(error, flag, advice) from None


def check_writable(path: Path, flag: str) -> None:
    """Raise UserError where a file could not be written to `path`, so that a long run finds out
    before it begins. Creates nothing.

    flag  what the user types to choose another place, with its kind of value: "--output FILE"
    """
    path = Path(path)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder, wanted a file: pass a name inside it with {flag}")
    if len(os.fsencode(path.name)) > _MAX_NAME_BYTES:
        raise UserError(
            f"{path.name}: a file name this long cannot be written; pass a shorter one with {flag}"
        )
    check_folder(path.parent, flag, path)


def check_folder(folder: Path, flag: str, path: Path | None = None) -> None:
    """Raise UserError where files could not be written to `folder`, which may be missing if it
    could be made. Creates nothing.

    flag  what the user types to choose another place, with its kind of value
    path  what the user named, if that is not the folder: the message names it
    """
    nearest = next(
        parent
        for parent in (folder.absolute(), *folder.absolute().parents)
        if os.path.lexists(parent)
    )
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"{path or folder} cannot be written: {nearest} is not a folder you may write to; pass"
            f" another place with {flag}"
        )


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise UserError where the disk of a folder has no room for `needed` bytes more. what: begins
    the message, as in "the weights need"."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{what} {format_bytes(needed)} more in {folder}, its disk has {format_bytes(free)}"
            " free.\nFree some, or choose another place with --artifacts-dir DIR"
        )


def check_outputs(outputs: dict[str, Path], inputs: dict[str, Path]) -> None:
    """Raise UserError where an output is an input, lies in a folder that is an input, or is another
    output: however it is spelled, and through symbolic links.

    outputs  files that are written, by what they are; the last word is the flag that moves them
    inputs   files and folders that are read, by flag
    """
    read = {_real(path): name for name, path in inputs.items()}
    for name, folder in inputs.items():  # that may hold links, as Hugging Face's cache does
        read |= {_real(path): name for path in Path(folder).rglob("*") if path.is_symlink()}
    files: dict[Path, str] = {}
    folders: dict[Path, str] = {}  # around an output
    for name, path in outputs.items():
        real, advice = _real(path), f"pass another {name.split()[-1]}"
        # A link is replaced where it lies, and not what it leads to.
        around = {*real.parents, *(_real(path.parent) / path.name).parents}
        if other := next((read[folder] for folder in around if folder in read), None):
            raise UserError(
                f"{name}: {path} lies in the folder of {other}, which is read; {advice}"
            )
        if other := read.get(real) or files.get(real):
            raise UserError(f"{other} and {name} are the same file {path}; {advice}")
        above = next((folder for folder in real.parents if folder in files), real)
        if other := files.get(above) or folders.get(above):
            raise UserError(
                f"{above} is a file for one and a folder for the other of {other} and {name};"
                f" {advice}"
            )
        files[real] = name
        folders |= dict.fromkeys(real.parents, name)


def _real(path: Path) -> Path:
    """A path without links and "..", of which the end may be missing."""
    return Path(os.path.realpath(path))
