"""What was measured of this machine, in <artifacts-dir>/calibration/: what the host computes with
(host/arithmetic.py). Outputs' bits depend on it, so it is measured once.

Another CPU, number of cores, version of torch or limit on instructions is another machine, with a
file of its own.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ltx_neuron import machine
from ltx_neuron.config.common import digest
from ltx_neuron.errors import UserError, reason
from ltx_neuron.files import exclusive, read_json, write_json

# Environment variables that limit which instructions torch, oneDNN and MKL use.
_LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
# Fields of a run's identity that are such choices: results depend on them in rounding alone.
CHOSEN_FIELDS = ("host_dtype", "host_dtype_speed", "host_products")
# By file, the choices of this process, which hold to its end.
_choices: dict[Path, dict[str, Any]] = {}
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


def read(artifacts_dir: Path) -> dict[str, dict]:
    """The sections of this machine's file; empty where there is none. A file that is damaged or
    cannot be read is reported, and counts as none."""
    path = file_of(artifacts_dir)
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


def update(artifacts_dir: Path, section: str, values: dict) -> None:
    """Write values to a section, by their keys. All else stays, also what another process writes
    at the same time. A file that cannot be written is reported."""
    path = file_of(artifacts_dir)
    try:
        with exclusive(path, "storing measurements in"):
            sections = read(artifacts_dir)
            sections[section] = sections.get(section, {}) | values
            write_json(path, {"machine": this_machine(), **sections})
    except OSError as error:
        _say(f"{path} cannot be written ({reason(error)}): what was measured is not kept")


def choice(artifacts_dir: Path, key: str, measure: Callable[[], Any]) -> Any:
    """The stored choice of this machine, a JSON value. Where there is none it is measured, and
    `store` writes it later: a run that is refused writes nothing."""
    choices = _choices.setdefault(file_of(artifacts_dir), {})
    if key not in choices:
        stored = read(artifacts_dir).get("choices", {})
        choices[key] = stored[key] if key in stored else measure()
    return choices[key]


def store(artifacts_dir: Path) -> None:
    """Write the choices of this process. What another process wrote first stays: later runs take
    that. No artifacts folder is made for it."""
    if os.path.isdir(artifacts_dir):
        stored = read(artifacts_dir).get("choices", {})
        own = _choices.get(file_of(artifacts_dir), {})
        if missing := {key: value for key, value in own.items() if key not in stored}:
            update(artifacts_dir, "choices", missing)


def _say(line: str) -> None:
    if line not in _said:
        print(line, flush=True)
    _said.add(line)
