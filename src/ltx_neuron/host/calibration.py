"""What was measured of this machine, kept in the artifacts folder: rates cannot be told by a CPU's
name, and what was chosen by them must stay the same from run to run, as bits depend on it.

A file holds sections that do not know of each other:

    choices  what the host computes with: host/arithmetic.py, host/products.py
    rates    what the plan counts with

Another CPU, number of cores, version of torch or limit on instructions is another machine, with a
file of its own.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ltx_neuron import machine
from ltx_neuron.config import digest
from ltx_neuron.errors import UserError, reason
from ltx_neuron.files import exclusive, read_json, write_json

# By which torch, oneDNN and MKL are told what to use of a CPU.
_LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
# Sections by file, of what holds for this process: measured by it, or refused by the folder.
_unwritten: dict[Path, dict] = {}
# What of a run's identity such choices decide: results depend on it in rounding alone.
CHOSEN_FIELDS = ("host_dtype", "host_dtype_speed", "host_products")
_said: set[str] = set()


def this_machine() -> dict:
    """What measurements hold for, for a person to read."""
    return {
        "processor": machine.processor(),
        "instructions": machine.instructions(),
        "cpus": os.cpu_count(),
        "cpus_allowed": machine.cpus(),
        "torch": torch.__version__,
        "limits": {name: os.environ[name] for name in _LIMITS if name in os.environ},
    }


def file_of(artifacts_dir: Path) -> Path:
    """<artifacts-dir>/calibration/<digest of this machine>.json"""
    return Path(artifacts_dir) / "calibration" / f"{digest(this_machine())[:8]}.json"


def read(artifacts_dir: Path) -> dict:
    """All sections of this machine's file; empty where there is none. A file that is damaged or may
    not be read stops nothing: that is said, and all is measured anew."""
    path = file_of(artifacts_dir)
    sections = _read(path)
    for section, values in _unwritten.get(path, {}).items():
        sections[section] = sections.get(section, {}) | values
    return sections


def update(artifacts_dir: Path, section: str, values: dict) -> None:
    """Store values in a section, by their keys; all else stays, also what another process writes
    now. Where nothing can be written, they hold for this process, and that is said."""
    path = file_of(artifacts_dir)
    try:
        with exclusive(path, "storing measurements in"):
            sections = _read(path)
            sections[section] = sections.get(section, {}) | values
            write_json(path, {"machine": this_machine(), **sections})
        for key in values:
            _unwritten_section(path, section).pop(key, None)
    except OSError as error:
        _say(f"{path} cannot be written ({reason(error)}): what was measured is not kept")
        _unwritten_section(path, section).update(values)


def measured_once(artifacts_dir: Path, section: str, key: str, measure: Callable[[], Any]) -> Any:
    """What is stored of this machine under a section's key, a JSON value. Where nothing is, it is
    measured and holds for this process; `store` writes it. A run that is refused writes nothing."""
    found = read(artifacts_dir).get(section, {})
    if key in found:
        return found[key]
    return _unwritten_section(file_of(artifacts_dir), section).setdefault(key, measure())


def store(artifacts_dir: Path) -> None:
    """Write what this process measured. Where another one was first, what it wrote stays: later
    runs take that. No artifacts folder is made for it."""
    path = file_of(artifacts_dir)
    if not os.path.isdir(artifacts_dir):
        return
    for section, values in [*_unwritten.get(path, {}).items()]:
        stored = _read(path).get(section, {})
        if missing := {key: value for key, value in values.items() if key not in stored}:
            update(artifacts_dir, section, missing)


def _read(path: Path) -> dict:
    """The sections in a file."""
    if not os.path.lexists(path):
        return {}
    try:
        content = read_json(path)
        if content.pop("machine", None) != this_machine():
            raise UserError(f"{path} is not of this machine")
        if not all(isinstance(section, dict) for section in content.values()):
            raise UserError(f"{path} is not what a calibration writes")
    except UserError as error:
        _say(f"{error}; this machine is measured anew")
        return {}
    return content


def _unwritten_section(path: Path, section: str) -> dict:
    return _unwritten.setdefault(path, {}).setdefault(section, {})


def _say(line: str) -> None:
    if line not in _said:
        print(line, flush=True)
    _said.add(line)
