"""What the doctor reads from a machine: files below a root, commands, installed packages.

Every way in is a field of System, so that tests drive it with trees of files and tables. Nothing
here raises for what is absent or unreadable: the fact is None or empty.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

TOOLS = "/opt/aws/neuron/bin"  # where the Neuron packages put their commands, often outside PATH
COMMAND_SECONDS = 20.0  # a tool that waits for a broken driver must not stop the doctor


class Device(NamedTuple):
    """One chip as neuron-ls shows it: its logical cores' numbers, their LNC, and (pid, command) of
    who uses the chip."""

    index: int
    cores: tuple[int, ...]
    lnc: int | None
    holders: tuple[tuple[int, str], ...]


def output_of(*command: str) -> str | None:
    """What a command prints; None where it is absent, fails or takes too long."""
    path = shutil.which(command[0], path=os.pathsep.join([os.environ.get("PATH", ""), TOOLS]))
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *command[1:]],
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def version_of(package: str) -> str | None:
    """Of an installed package; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_error(module: str) -> str | None:
    """Why a module cannot be imported; None where it can."""
    try:
        importlib.import_module(module)
    except (
        Exception
    ) as error:  # a wheel for another torch fails with OSError, RuntimeError or what its C++ throws
        return (
            f"{type(error).__name__}:"
            f" {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}"
        )
    return None


def free_bytes(path: Path) -> int:
    """Of the file system that a path is on, or would be: the nearest folder that exists."""
    nearest = next(
        folder
        for folder in (Path(path).absolute(), *Path(path).absolute().parents)
        if folder.is_dir()
    )
    return shutil.disk_usage(nearest).free


@dataclass(frozen=True)
class System:
    """The ways into a machine; the defaults are this one's."""

    root: Path = Path("/")
    output: Callable[..., str | None] = output_of
    version: Callable[[str], str | None] = version_of
    import_error: Callable[[str], str | None] = import_error
    free_bytes: Callable[[Path], int] = free_bytes
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: str = platform.python_version()
    prefix: str = sys.prefix  # of the virtual environment

    def text(self, path: str) -> str | None:
        """A small file's text."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    @property
    def driver(self) -> str | None:
        """Version of the loaded Neuron driver."""
        return self.text("sys/module/neuron/version")

    @property
    def lnc_file(self) -> str | None:
        """The machine's own LNC setting (deploy/eks/prerequisites.rst of the SDK's
        documentation)."""
        lines = (self.text("opt/aws/neuron/logical_nc_config") or "").splitlines()
        said = [
            line.partition("=")[2].strip()
            for line in lines
            if line.startswith("NEURON_LOGICAL_NC_CONFIG=")
        ]
        return said[-1] if said else None

    def memory(self) -> dict[str, int]:
        """Bytes by the names of /proc/meminfo."""
        rows = (line.split() for line in (self.text("proc/meminfo") or "").splitlines())
        return {
            row[0].rstrip(":"): int(row[1]) * 1024
            for row in rows
            if len(row) > 1 and row[1].isdigit()
        }

    def devices(self) -> list[Device] | None:
        """The chips that neuron-ls lists (`neuron-ls --json-output`); None where it says nothing
        that can be read."""
        try:
            rows = json.loads(self.output("neuron-ls", "--json-output") or "")
            return [
                Device(
                    int(row["neuron_device"]),
                    tuple(row.get("neuroncore_ids") or range(int(row["nc_count"]))),
                    row.get("logical_neuroncore_config"),
                    tuple(
                        (int(p["pid"]), str(p.get("command", "")))
                        for p in row.get("neuron_processes") or ()
                    ),
                )
                for row in rows
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def holders(self) -> dict[str, list[tuple[int, str]]]:
        """Who has a chip's device file open, by the file's name: what shows where neuron-ls is not
        installed.

        Other users' processes show to root alone.
        """
        found: dict[str, list[tuple[int, str]]] = {}
        for folder in self._processes():
            open_files = set()
            with contextlib.suppress(OSError):
                for file in (folder / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        open_files.add(os.readlink(file))
            for name in sorted(
                file.removeprefix("/dev/") for file in open_files if file.startswith("/dev/neuron")
            ):
                found.setdefault(name, []).append((int(folder.name), self._command(folder)))
        return found

    def _processes(self) -> list[Path]:
        try:
            return sorted(
                (p for p in (self.root / "proc").iterdir() if p.name.isdigit()),
                key=lambda p: int(p.name),
            )
        except OSError:
            return []

    @staticmethod
    def _command(folder: Path) -> str:
        try:
            return (
                (folder / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
        except OSError:
            return ""

    def core_memory(self) -> dict[str, int]:
        """Device memory in use, bytes, of every core that the driver shows
        ("neuron0/neuron_core1").

        neuron-sysfs-user-guide.rst: of memory counters `total` is what is used now.
        """
        found = {}
        base = self.root / "sys/devices/virtual/neuron_device"
        for path in sorted(base.glob("neuron*/neuron_core*/stats/memory_usage/device_mem/total")):
            with contextlib.suppress(OSError, ValueError):
                found[str(path.relative_to(base).parents[3])] = int(path.read_text())
        return found
