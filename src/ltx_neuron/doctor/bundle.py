"""ltx-neuron doctor --bundle: a bug report in one file. It has facts about the machine and the
shortened logs and reports of earlier runs, without prompts, secrets and names.

Files are packed only if their names match the patterns below. Names of weights, latents, videos,
images and prompts files match none.
"""

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ltx_neuron.command_line import advanced
from ltx_neuron.doctor.redact import Redactor, told_environment
from ltx_neuron.doctor.system import System
from ltx_neuron.errors import UserError, reason
from ltx_neuron.files import (
    MANIFEST,
    check_regular,
    check_writable,
    has_keys,
    read_json,
    whole_file,
)
from ltx_neuron.format import format_bytes
from ltx_neuron.machine import installed_packages, load, probe
from ltx_neuron.progress import is_log

REPOSITORY = Path(__file__).parents[3]
WORK_DIR = Path("outputs/on-device")  # default work folder of test/device
NAMES = (".tar.gz", ".tgz")
FOLDER = "ltx-neuron-bundle"  # the archive's top folder
CONTENTS = "contents.txt"
# The report has the beginning and the end of a long log.
HEAD_BYTES, TAIL_BYTES = 64 * 2**10, 2**20
TOTAL_BYTES = 64 * 2**20
DOCTOR_SECONDS = 120
_LOGS = ("*.failure.log",)
_COMPILER = ("log-neuron-cc*.txt", "command*.txt")  # logs of NxD and of TorchNeuron
_RUN = ("report.md", "report.json", "logs/*.log", "*/perf.json", "*/video.json")
# TorchNeuron keeps these if TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS=1: graphs as text and the
# compiler's logs (neuron_dynamo_backend/config.py of its sources, early 2026).
_DEBUG = ("*.txt", "*.log", "*.mlir")
_REPORTS = {"profile", "versions", "identity"}  # keys of a latency report and of a video's JSON


def add_flags(parser: argparse.ArgumentParser) -> None:
    title = "One file with logs and reports of earlier runs, without weights, videos and secrets."
    add = parser.add_argument_group("bug report", title).add_argument
    help = "write a bug report: findings, versions, reports, logs and compiler messages"
    add("--bundle", type=Path, metavar="FILE.tar.gz", help=help)
    help = "add a text file, or logs and JSON files of a failed run's folder; repeatable"
    add("--bundle-add", type=Path, action="append", default=[], metavar="PATH", help=help)
    help = f"work folder of the device tests (default: {WORK_DIR})"
    advanced(add("--work-dir", type=Path, default=WORK_DIR, metavar="DIR", help=help))
    help = "keep prompts in the report (default: they are removed)"
    advanced(add("--with-prompts", action="store_true", help=help))


def write(args: argparse.Namespace, system: System) -> None:
    """Pack the logs and reports of successful and failed runs, and print the list of files."""
    check_target(args.bundle)
    for path in args.bundle_add:
        if not path.exists():
            raise UserError(f"--bundle-add {path}: no such file or folder")
    asked = {
        "--profile": args.profile,
        "--checkpoint-path": args.checkpoint_path,
        "--gemma-root": args.gemma_root,
        "--tp-degree": args.tp_degree,
        "--artifacts-dir": args.artifacts_dir,
    }
    words = [word for flag, value in asked.items() if value for word in (flag, value)]
    words += [word for setting in args.profile_set for word in ("--profile-set", setting)]
    artifacts = (args.artifacts_dir, args.work_dir / "artifacts")
    texts = {"doctor.txt": doctor(words)} | facts(system, REPOSITORY, artifacts)
    files = found(args.work_dir, artifacts, args.bundle_add)
    packed = pack(args.bundle, texts, files, Redactor(os.environ, args.with_prompts))
    print(*packed.lines(), sep="\n")
    if not (args.work_dir / "report.json").is_file():
        print(f"no run of test/device is in {args.work_dir}; choose another with --work-dir DIR")
    size = args.bundle.stat().st_size
    print(f"bundle: {args.bundle} ({size:,} bytes). Read it before you send it")


class Found(NamedTuple):
    """A file to pack, and its name in the bundle."""

    name: str
    path: Path


class Packed(NamedTuple):
    """A bundle's files (name: bytes), the omitted files (path: reason), and the number of removed
    texts by kind."""

    sizes: dict[str, int]
    left_out: dict[str, str]
    taken_out: dict[str, int]

    def lines(self) -> list[str]:
        taken = ", ".join(f"{count} {what}" for what, count in sorted(self.taken_out.items()))
        rows = [f"{size:>9}  {name}" for name, size in self.sizes.items()]
        rows += [f"left out   {path}: {why}" for path, why in self.left_out.items()]
        return [*rows, f"removed from these texts: {taken or 'nothing'}"]


def check_target(path: Path) -> None:
    """Raise UserError unless a bundle can be written to `path`. It never replaces a file, because
    that may be an input or another report."""
    if not path.name.endswith(NAMES):
        raise UserError(f"--bundle {path}: wanted a name that ends with {' or '.join(NAMES)}")
    if os.path.lexists(path):
        raise UserError(f"--bundle {path} already exists\nType another name, or remove it")
    check_writable(path, "--bundle FILE.tar.gz")


def found(work_dir: Path, artifacts: Iterable[Path], added: Iterable[Path]) -> Iterator[Found]:
    """The files to pack, the most important first.

    work_dir   of test/device
    artifacts  folders of weights and graphs
    added      files, and folders of other runs
    """
    yield from _in(work_dir, _RUN, "run", deep=False)
    yield from _in(work_dir, _LOGS, "run")
    # README's command writes its log here.
    yield from (file for file in _in(Path.cwd(), _LOGS, "here", deep=False) if is_log(file.path))
    for path in added:
        if path.is_dir():
            yield from _in(path, (*_LOGS, "*.log", "results.json"), f"added/{path.name}")
            reports = _in(path, ("*.json",), f"added/{path.name}")
            yield from (file for file in reports if has_keys(file.path, _REPORTS))
        else:
            yield Found(f"added/{path.name}", path)
    for folder in {path.absolute(): None for path in (work_dir / "artifacts", *artifacts)}:
        yield from _in(folder, _COMPILER, f"compiler/{folder.name}")
    for folder in (Path.cwd(), REPOSITORY):
        yield from _in(folder, _COMPILER[:1], "compiler/here", deep=False)
    for folder in debug_folders():
        yield from _in(folder, _DEBUG, f"torchneuron/{folder.name}")


def _in(folder: Path, patterns: Iterable[str], name: str, deep: bool = True) -> Iterator[Found]:
    for pattern in patterns:
        with suppress(OSError):  # the folder was removed or is not readable
            for path in sorted(folder.rglob(pattern) if deep else folder.glob(pattern)):
                yield Found(f"{name}/{path.relative_to(folder)}", path)


def debug_folders() -> list[Path]:
    """The folders in which TorchNeuron keeps compilation artifacts, if it keeps them."""
    named = os.environ.get("TORCH_NEURONX_DEBUG_DIR")
    if named:
        return [Path(named)]
    return sorted(Path(tempfile.gettempdir()).glob("neuron_backend*"))


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
        # Cut at line ends: the redactor would not recognize half a prompt.
        tail = file.read(TAIL_BYTES).partition(b"\n")[2]
    head = head.rpartition(b"\n")[0]
    cut = f"\n[... {size - len(head) - len(tail)} of {size} bytes are cut out here ...]\n"
    return head.decode(errors="replace") + cut + tail.decode(errors="replace")


def pack(
    path: Path, texts: Mapping[str, str], files: Iterable[Found], redactor: Redactor
) -> Packed:
    """Write the bundle: `texts` by name, then the readable files."""
    members, left_out, total = dict(texts), {}, 0
    taken: set[Path] = set()
    for file in files:
        if file.path in taken:
            continue
        taken.add(file.path)
        try:
            text = read(file.path)
        except (OSError, ValueError) as error:
            left_out[str(file.path)] = reason(error)
            continue
        total += len(text)
        if total > TOTAL_BYTES:
            total -= len(text)
            left_out[str(file.path)] = (
                f"the bundle already has {format_bytes(TOTAL_BYTES)} of texts"
            )
            continue
        members[_free(file.name, members)] = text
    for text in members.values():
        redactor.learn(text)
    clean: dict[str, bytes] = {}
    for name, text in members.items():
        clean[_free(redactor(name), clean)] = redactor(text).encode(errors="replace")
    left_out = {redactor(where): why for where, why in left_out.items()}
    packed = Packed({n: len(t) for n, t in clean.items()}, left_out, dict(redactor.counts))
    clean = {CONTENTS: "\n".join([*packed.lines(), ""]).encode(), **clean}
    with whole_file(path) as partial, tarfile.open(partial, "w:gz") as archive:
        for name, content in clean.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")  # no owner, no path of this machine
            member.size, member.mtime = len(content), int(time.time())
            archive.addfile(member, io.BytesIO(content))
    return packed


def _free(name: str, members: Mapping[str, object]) -> str:
    """The name, with a number if another member has it."""
    number, free = 1, name
    while free in members:
        number, free = number + 1, f"{name}.{number + 1}"
    return free


# --- the machine ----------------------------------------------------------------------------------


def facts(system: System, repository: Path, artifacts: Iterable[Path]) -> dict[str, str]:
    """Texts about the machine and its packages, by name."""
    environment = told_environment(os.environ)
    kernel_log = (system.output("dmesg") or "").splitlines()
    texts = {
        "versions.txt": "\n".join(_versions(system, repository)),
        "packages.txt": "\n".join(installed_packages()),
        "environment.txt": "\n".join(f"{name}={value}" for name, value in environment.items()),
        "machine.txt": "\n".join(load()),
        "neuron-ls.txt": system.output("neuron-ls") or "",
        "driver-log.txt": "\n".join(
            [line for line in kernel_log if "neuron" in line.lower()][-500:]
        ),
        "artifacts.txt": "\n".join(line for folder in artifacts for line in _artifacts(folder)),
    }
    return {name: text + "\n" for name, text in texts.items() if text.strip()}


def commit(system: System, repository: Path = REPOSITORY) -> str:
    """The commit of this checkout, and the number of changed files."""
    git = ("git", "-C", str(repository))
    name = (system.output(*git, "rev-parse", "HEAD") or "unknown").strip()
    changed = (system.output(*git, "status", "--porcelain") or "").splitlines()
    return name + (f", with {len(changed)} changed files" if changed else "")


def _versions(system: System, repository: Path) -> Iterator[str]:
    yield f"commit: {commit(system, repository)}"
    yield f"ltx-neuron: {system.version('ltx-neuron') or 'not installed'}"
    yield f"python: {platform.python_version()}, {platform.machine()}, {platform.libc_ver()[1]}"
    yield f"kernel: {platform.release()} {platform.version()}"
    release = (system.text("etc/os-release") or "").splitlines()
    yield f"system: {next((line for line in release if line.startswith('PRETTY_NAME')), 'unknown')}"
    machine = probe(system.root)
    yield f"instance: {machine.instance or 'no known EC2 type'}, {machine.neuron_devices} chips"
    yield f"driver: {system.driver or 'none'}"
    yield system.output("dpkg-query", "--show", "aws-neuronx*") or "no aws-neuronx package of dpkg"


def _artifacts(folder: Path) -> Iterator[str]:
    """The weights and graphs of a folder: their files and identities."""
    for path in sorted((*folder.glob("weights/*"), *folder.glob("graphs/*"))):
        name = f"{path.parent.name}/{path.name}"
        try:
            finished = (path / MANIFEST).is_file()
            yield f"{name}: {'finished' if finished else 'NOT finished'}"
            if finished:
                yield f"  {json.dumps(read_json(path / MANIFEST).get('identity'))}"
            files = sorted(file for file in path.rglob("*") if file.is_file())
            yield from (f"  {file.stat().st_size:>12} {file.relative_to(path)}" for file in files)
        except (OSError, UserError) as error:
            yield f"{name} cannot be read: {error}"


def doctor(flags: Iterable[object]) -> str:
    """The doctor's output, or a line that it did not end."""
    command = [sys.executable, "-m", "ltx_neuron.doctor", *map(str, flags)]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DOCTOR_SECONDS,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {DOCTOR_SECONDS} s\n"
    return f"{done.stdout}\nexit code {done.returncode}\n"
