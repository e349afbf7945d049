"""This machine's devices and CPU, for choosing the profile, and its load."""

import importlib.metadata
import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Names of instruction sets in /proc/cpuinfo: x86, then Arm.
_MULTIPLYING = (
    *("fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_fp16", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)


@dataclass(frozen=True)
class Machine:
    instance: str = ""  # the EC2 instance type, "" outside of EC2
    neuron_devices: int = 0  # accelerator chips of the Neuron driver
    cuda_devices: int = 0  # GPUs that PyTorch can use


def probe(root: Path = Path("/")) -> Machine:
    """This machine. EC2's firmware has the instance type, the driver a device file per chip."""
    product = root / "sys/devices/virtual/dmi/id/product_name"
    try:
        name = product.read_text().strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    chips = [
        path
        for path in (root / "dev").glob("neuron*")
        if path.name.removeprefix("neuron").isdigit()
    ]
    # family.size, as in trn2.48xlarge; other machines have a product name there.
    is_instance_type = re.fullmatch(r"[a-z0-9]+\.[a-z0-9-]*[a-z0-9][a-z0-9-]*", name)
    return Machine(name if is_instance_type else "", len(chips), _cuda_devices())


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def processor() -> str:
    """The system's name of this machine's CPU."""
    lines = _lines_of("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def instructions() -> list[str]:
    """This CPU's instruction sets that affect the speed of multiplication."""
    lines = [line for line in _lines_of("/proc/cpuinfo") if line.startswith(("flags", "Features"))]
    flags = {*lines[0].split()} if lines else set()
    return [name for name in _MULTIPLYING if name in flags]


def gpus() -> list[str]:
    """The GPUs that PyTorch can use, by model."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(_cuda_devices())]


def load() -> list[str]:
    """The machine's load, as lines for the log of a failed run."""
    lines = [f"load: {' '.join(f'{number:.1f}' for number in os.getloadavg())}, {cpus()} CPUs"]
    for path in ("/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io"):
        lines += [f"{path}: {line}" for line in _lines_of(path)[:1]]
    memory = ("MemTotal:", "MemAvailable:", "SwapFree:")
    return lines + [line for line in _lines_of("/proc/meminfo") if line.startswith(memory)]


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not Linux, or an older one
        return []


def installed_packages() -> list[str]:
    """Every installed Python package as name==version."""
    installed = set()
    for distribution in importlib.metadata.distributions():
        with suppress(KeyError, TypeError, OSError):  # a partly removed one
            installed.add(f"{distribution.metadata['Name']}=={distribution.version}")
    return sorted(installed)


def version_numbers(version: str | None) -> tuple[int, ...]:
    """The first four numbers of a version: (2, 9, 0) of 2.9.0+cpu, () of a text without any."""
    return tuple(map(int, re.findall(r"\d+", (version or "").partition("+")[0])[:4]))


def package_version(package: str) -> str | None:
    """The version of an installed Python package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
