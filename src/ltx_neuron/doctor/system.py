"""Facts about a machine: files below a root, outputs of commands, installed packages.

Every source of facts is a field of System, so that tests can replace it. A missing or unreadable
fact raises nothing: it is None or empty.
"""

import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ltx_neuron.files import free_bytes
from ltx_neuron.machine import package_version

TOOLS = "/opt/aws/neuron/bin"  # commands of the Neuron packages, often outside PATH
COMMAND_SECONDS = 20.0  # a tool that waits for a broken driver must not stop the doctor


class Device(NamedTuple):
    """One chip in neuron-ls's list."""

    index: int
    cores: tuple[int, ...]  # numbers of its logical cores
    lnc: int | None  # physical cores per logical core
    holders: tuple[tuple[int, str], ...]  # (pid, command) of the processes that use it


def output_of(*command: str) -> str | None:
    """A command's standard output; None if the command is missing, fails or takes too long."""
    if (path := path_of(command[0])) is None:
        return None
    how: dict = {"capture_output": True, "text": True, "timeout": COMMAND_SECONDS, "check": True}
    try:
        return subprocess.run([path, *command[1:]], **how).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def path_of(command: str) -> str | None:
    return shutil.which(command, path=os.pathsep.join([os.environ.get("PATH", ""), TOOLS]))


def import_error(module: str) -> str | None:
    """Why a module cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    # A wheel for another torch fails with OSError, RuntimeError or any exception of its C++ code.
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no text"]
        return f"{type(error).__name__}: {lines[0]}"
    return None


@dataclass(frozen=True)
class System:
    """The sources of facts about a machine; the defaults are this machine's."""

    root: Path = Path("/")
    # Called with the words of a command, see `output_of`
    output: Callable[..., str | None] = output_of
    version: Callable[[str], str | None] = package_version
    import_error: Callable[[str], str | None] = import_error
    free_bytes: Callable[[Path], int] = free_bytes
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: str = platform.python_version()
    prefix: str = sys.prefix  # folder of the Python environment

    def text(self, path: str) -> str | None:
        """A small file's text; None if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def program(self, name: str) -> str | None:
        """Path of a program in PATH or in this Python's folder, as the ranks find it."""
        folders = [self.environment.get("PATH", os.defpath), f"{self.prefix}/bin"]
        return shutil.which(name, path=os.pathsep.join(folders))

    @property
    def driver(self) -> str | None:
        return self.text("sys/module/neuron/version")

    @property
    def lnc_file(self) -> str | None:
        """The machine's LNC setting (deploy/eks/prerequisites.rst of the SDK's documentation)."""
        text = self.text("opt/aws/neuron/logical_nc_config") or ""
        values = re.findall("^NEURON_LOGICAL_NC_CONFIG=(.*)", text, re.M)
        return values[-1].strip() if values else None

    def memory(self) -> dict[str, int]:
        """The values of /proc/meminfo in bytes, by name."""
        rows = re.findall(r"^(\S+):\s+(\d+)", self.text("proc/meminfo") or "", re.M)
        return {name: int(kilobytes) * 1024 for name, kilobytes in rows}

    def devices(self) -> list[Device] | None:
        """The chips in `neuron-ls --json-output`; None if it is missing or not understood."""
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
        """(pid, command) of the processes that have a chip's device file open, by the file's name.
        This needs no neuron-ls. Only root sees the processes of other users."""
        opened = set()
        for link in (self.root / "proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                file = os.readlink(link)
                if file.startswith("/dev/neuron"):
                    opened.add((int(link.parts[-3]), file.removeprefix("/dev/")))
        holders: dict[str, list[tuple[int, str]]] = {}
        for pid, name in sorted(opened):
            command = (self.text(f"proc/{pid}/cmdline") or "").replace("\0", " ").strip()
            holders.setdefault(name, []).append((pid, command))
        return holders
