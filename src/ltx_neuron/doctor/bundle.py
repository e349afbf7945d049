"""ltx-neuron doctor --bundle: a bug report in one file. It has facts about the machine, and what
public.py allows of the compiler's messages and of the logs and reports of earlier runs.

Files are packed only if their names match the patterns of `bundled_files`. Names of weights,
latents, videos, images and prompts files match none.
"""

import argparse
import glob
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ltx_neuron.artifacts import stored_identity
from ltx_neuron.command_line import advanced
from ltx_neuron.doctor.public import numbers, public, stack_environment, trace
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError, os_reason
from ltx_neuron.files import check_regular, check_writable, whole_file
from ltx_neuron.format import format_bytes
from ltx_neuron.machine import installed_packages, load

REPOSITORY = Path(__file__).parents[3]
WORK_DIR = Path("outputs/on-device")  # default work folder of test/device
NAMES = (".tar.gz", ".tgz")
FOLDER = "ltx-neuron-bundle"  # the archive's top folder
CONTENTS = "contents.txt"
# Of a long log, the beginning and the end are read.
HEAD_BYTES, TAIL_BYTES = 64 * 2**10, 2**20
TOTAL_BYTES = 64 * 2**20
DOCTOR_SECONDS = 120
_COMPILER = ("log-neuron-cc*.txt", "command*.txt")  # logs of NxD and of TorchNeuron


def add_flags(parser: argparse.ArgumentParser) -> None:
    title = "One file with facts of this machine and of failed runs, without prompts and secrets."
    add = parser.add_argument_group("bug report", title).add_argument
    help = "write a bug report: findings, versions, traces of logs, times, compiler messages"
    add("--bundle", type=Path, metavar="FILE.tar.gz", help=help)
    help = "add a text file, or logs and JSON files of a failed run's folder; repeatable"
    add("--bundle-add", type=Path, action="append", default=[], metavar="PATH", help=help)
    help = f"work folder of the device tests (default: {WORK_DIR})"
    advanced(add("--work-dir", type=Path, default=WORK_DIR, metavar="DIR", help=help))


def write(args: argparse.Namespace, argv: list[str], system: System) -> None:
    """Pack what is allowed of all runs, and print the list of files. argv: the typed words."""
    check_target(args.bundle)
    for path in args.bundle_add:
        if not path.exists():
            raise UserError(f"--bundle-add {path}: no such file or folder")
    mine = argparse.ArgumentParser(add_help=False)
    add_flags(mine)
    artifacts = (args.artifacts_dir, args.work_dir / "artifacts")
    texts = {"doctor.txt": doctor(mine.parse_known_args(argv)[1])} | facts(system, artifacts)
    lines = pack(args.bundle, texts, bundled_files(args.work_dir, artifacts, args.bundle_add))
    print(*lines, sep="\n")
    if not (args.work_dir / "report.json").is_file():
        print(f"no run of test/device is in {args.work_dir}; choose another with --work-dir DIR")
    size = args.bundle.stat().st_size
    print(f"bundle: {args.bundle} ({size:,} bytes). Read it before you send it")


class BundledFile(NamedTuple):
    """A file to pack, its name in the bundle, and what the bundle has of its text."""

    name: str
    path: Path
    allowed: Callable[[str], str]


def check_target(path: Path) -> None:
    """Raise UserError unless a bundle can be written to `path`. It never replaces a file."""
    if not path.name.endswith(NAMES):
        raise UserError(f"--bundle {path}: wanted a name that ends with {' or '.join(NAMES)}")
    if os.path.lexists(path):
        raise UserError(f"--bundle {path} already exists\nType another name, or remove it")
    check_writable(path, "--bundle FILE.tar.gz")


def bundled_files(
    work_dir: Path, artifacts: Iterable[Path], added: Iterable[Path]
) -> Iterator[BundledFile]:
    """The files to pack, the most important first. work_dir: of test/device. artifacts: folders of
    weights and graphs. added: files, and folders of other runs."""
    logs, debug = ("**/*.log",), os.environ.get("TORCH_NEURONX_DEBUG_DIR")
    rows: list[tuple[str, Path, tuple[str, ...], Callable[[str], str]]] = [
        ("run", work_dir, ("report.md",), public),
        ("run", work_dir, ("logs/*.log", "**/*.failure.log"), trace),
        ("run", work_dir, ("*/perf.json", "*/video.json"), numbers),
        ("here", Path.cwd(), ("*.failure.log",), trace),  # README's command writes its log here
        ("compiler/here", Path.cwd(), _COMPILER[:1], public),
    ]
    for number, path in enumerate(added, 1):
        name = f"added-{number}"
        if path.is_dir():
            rows += [(name, path, logs, trace), (name, path, ("**/*.json",), numbers)]
        else:
            allowed = numbers if path.suffix == ".json" else trace
            rows.append((name, path.parent, (glob.escape(path.name),), allowed))
    deep = tuple(f"**/{pattern}" for pattern in _COMPILER)
    rows += [(f"compiler/{n}", folder, deep, public) for n, folder in enumerate(artifacts, 1)]
    if debug:
        rows.append(("torchneuron", Path(debug), ("**/*.txt", *logs, "**/*.mlir"), public))
    for name, folder, patterns, allowed in rows:
        with suppress(OSError):  # the folder was removed or is not readable
            for path in (path for pattern in patterns for path in sorted(folder.glob(pattern))):
                yield BundledFile(f"{name}/{path.relative_to(folder)}", path, allowed)


def read(path: Path) -> str:
    """A file's text; of a long one, the beginning and the end. Raises OSError for other files."""
    if path.is_symlink():  # its target is not checked
        raise OSError("a link")
    check_regular(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES if size > HEAD_BYTES + TAIL_BYTES else -1)
        if b"\0" in head[:1024]:
            raise OSError("not a text")
        if len(head) >= size:
            return head.decode(errors="replace")
        file.seek(size - TAIL_BYTES)
        # Cut at line ends: half a line may be another one's beginning.
        tail = file.read(TAIL_BYTES).partition(b"\n")[2]
    head = head.rpartition(b"\n")[0]
    cut = f"\n[... {size - len(head) - len(tail)} of {size} bytes are cut out here ...]\n"
    return head.decode(errors="replace") + cut + tail.decode(errors="replace")


def pack(path: Path, texts: Mapping[str, str], files: Iterable[BundledFile]) -> list[str]:
    """Write `texts` by name, then what is allowed of the files. Returns the table of contents."""
    members, left_out, total = {name: public(text) for name, text in texts.items()}, [], 0
    unique: dict[Path, BundledFile] = {}
    for file in files:  # the first rule counts
        unique.setdefault(file.path.absolute(), file)
    for file in unique.values():
        try:
            text = file.allowed(read(file.path))
            if total + len(text) > TOTAL_BYTES:
                raise ValueError(f"the bundle already has {format_bytes(TOTAL_BYTES)} of texts")
            total += len(text)
            members[public(file.name)] = text
        except (OSError, ValueError) as error:
            left_out.append(f"left out   {public(str(file.path))}: {public(os_reason(error))}")
    contents = {name: text.encode(errors="replace") for name, text in members.items()}
    lines = [f"{len(text):>9}  {name}" for name, text in contents.items()] + left_out
    contents = {CONTENTS: "\n".join([*lines, ""]).encode(), **contents}
    with whole_file(path) as partial, tarfile.open(partial, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")  # no owner, no path of this machine
            member.size, member.mtime = len(content), int(time.time())
            archive.addfile(member, io.BytesIO(content))
    return lines


def facts(system: System, artifacts: Iterable[Path]) -> dict[str, str]:
    """Texts about the machine and its packages, by name."""
    kernel_log = (system.output("dmesg") or "").splitlines()
    lines: dict[str, Iterable[str]] = {
        "versions.txt": _versions(system),
        "packages.txt": installed_packages(),
        "environment.txt": stack_environment(os.environ),
        "machine.txt": load(),
        "neuron-ls.txt": [system.output("neuron-ls") or ""],
        "driver-log.txt": [line for line in kernel_log if "neuron" in line.lower()][-500:],
        "artifacts.txt": chain.from_iterable(map(_artifacts, artifacts)),
    }
    texts = {name: "\n".join([*of_file, ""]) for name, of_file in lines.items()}
    return {name: text for name, text in texts.items() if text.strip()}


def commit(system: System) -> str:
    """The commit of this checkout, and the number of changed files."""
    git = ("git", "-C", str(REPOSITORY))
    name = (system.output(*git, "rev-parse", "HEAD") or "unknown").strip()
    changed = (system.output(*git, "status", "--porcelain") or "").splitlines()
    return name + (f", with {len(changed)} changed files" if changed else "")


def _versions(system: System) -> Iterator[str]:
    yield f"commit: {commit(system)}"
    yield f"ltx-neuron: {system.version('ltx-neuron') or 'not installed'}"
    yield f"python: {platform.python_version()}, {platform.machine()}, {platform.libc_ver()[1]}"
    yield f"kernel: {platform.release()} {platform.version()}"
    release = (system.text("etc/os-release") or "").splitlines()
    yield f"system: {next((line for line in release if line.startswith('PRETTY_NAME')), 'unknown')}"
    yield system.output("dpkg-query", "--show", "aws-neuronx*") or "no aws-neuronx package of dpkg"


def _artifacts(folder: Path) -> Iterator[str]:
    for path in sorted((*folder.glob("weights/*"), *folder.glob("graphs/*"))):
        identity = stored_identity(path)
        state = json.dumps(identity) if identity else "NOT finished"
        yield f"{path.parent.name}/{path.name}: {state}"


def doctor(words: list[str]) -> str:
    """The doctor's output, or a line that it did not end."""
    command = [sys.executable, "-m", "ltx_neuron.doctor", *words]
    how: dict = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, timeout=DOCTOR_SECONDS, **how)
    except subprocess.TimeoutExpired:
        return f"did not end within {DOCTOR_SECONDS} s\n"
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}\n"
