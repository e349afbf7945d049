"""Findings about the Neuron side of a machine: driver, SDK, support of NxD, free cores, LNC."""

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ltx_neuron.backends import nki
from ltx_neuron.backends.environment import visible_cores
from ltx_neuron.config.profiles import STACKS, Profile
from ltx_neuron.doctor import sdk
from ltx_neuron.doctor.finding import Finding, finding_if
from ltx_neuron.doctor.system import System

DRIVER = "sudo modprobe neuron; if it finds no module: sudo apt-get install aws-neuronx-dkms"
TOOLS = "sudo apt-get install aws-neuronx-tools && export PATH=/opt/aws/neuron/bin:$PATH"
_PACKAGES = ("neuronx-cc", "neuronx-distributed", "torch-neuronx", "torch-xla", "libneuronxla")
LIBRARIES = {"aws-neuronx-runtime-lib": "libnrt", "aws-neuronx-collectives": "libnccom"}
_FOLDER = "opt/aws/neuron/lib"  # where libneuronxla looks for libnrt
_OTHER_ENVIRONMENT = (
    f"use an environment of {STACKS['torchdist']}, NxD's successor; or of SDK 2.27 to"
    f" {sdk.dotted(sdk.NXD_LAST)} with torch {sdk.dotted(sdk.NXD_TORCH)}"
)
_LNC_FILE = "/opt/aws/neuron/logical_nc_config"


def neuron(profile: Profile, tp: int, chips: int, system: System) -> Iterator[Finding]:
    """All findings of this module: none without Neuron chips, unless the profile needs them. tp:
    ranks. chips: Neuron chips of the machine."""
    if not chips:
        if profile.device == "neuron":
            text = f"no Neuron device (/dev/neuron*); profile {profile.name} needs one"
            fix = f"on a trn2 instance: {DRIVER}. Here: --profile cpu"
            yield Finding("driver", "blocks", text, fix)
        return
    text, driver = "device files exist, but no driver is loaded", system.driver
    if driver:
        text = driver + sdk.release_suffix("driver", driver)
    yield finding_if("driver", driver is not None, text, DRIVER)
    yield libraries(system)
    yield from sdk_packages(profile, driver, system)
    yield from cores(profile, tp, system)
    yield lnc(profile, system)


def libraries(system: System) -> Finding:
    """The libraries of the runtime and of its collectives, which base images lack."""
    folder = system.root / _FOLDER
    lacking = [name for name, file in LIBRARIES.items() if not any(folder.glob(f"{file}.so*"))]
    text = ", ".join(LIBRARIES)
    if lacking:
        text = f"/{_FOLDER} has no library of {' and '.join(lacking)}; device runs need them"
    fix = f"sudo apt-get install {' '.join(lacking)}"
    return finding_if("libraries", not lacking, text, fix, "note")


def sdk_packages(profile: Profile, driver: str | None, system: System) -> Iterator[Finding]:
    """The SDK's packages here, their release, and its support of the profile's backend."""
    low, high = sdk.PYTHON[profile.backend]
    if profile.device == "neuron" and not low <= sdk.version_numbers(system.python)[:2] < high:
        text = (
            f"Python is {system.python}; backend {profile.backend} needs {sdk.dotted(low)} or"
            f" later, below {sdk.dotted(high)}"
        )
        yield Finding("python", "blocks", text, "python3.12 -m venv DIR, and README, Install")
    installed = {name: version for name in _PACKAGES if (version := system.version(name))}
    compiler = installed.get("neuronx-cc")
    text = "this Python environment has no package of the Neuron SDK"
    if installed:
        names = ", ".join(f"{name} {version}" for name, version in installed.items())
        text = names + sdk.release_suffix("compiler", compiler)
    fix = "source /opt/aws_neuronx_venv_torch_neuronx_2_14_0/bin/activate, or README, Install"
    yield finding_if("sdk", bool(installed), text, fix, "note")
    for name, version in sdk.DECOYS.items():
        if system.version(name) == version:
            text = f"{name} {version} is a package of the public index with an SDK package's name"
            fix = f"pip uninstall {name}; add Neuron's own pip repository as in the Neuron setup"
            yield Finding("sdk", "blocks", text, f"{fix} guide, and install again")
    release, of_driver = sdk.release_of("compiler", compiler), sdk.release_of("driver", driver)
    if release and of_driver and of_driver < release:
        text = (
            f"the driver is of SDK {sdk.dotted(of_driver)}, the compiler of {sdk.dotted(release)}:"
            " the runtime may refuse the graphs"
        )
        fix = "sudo apt-get install --only-upgrade aws-neuronx-dkms"
        yield Finding("sdk", "note", text, fix)
    if profile.attention == "nki" and (error := system.import_error(nki.PACKAGE)):
        text = f"attention=nki needs the kernels of {nki.PACKAGE}; importing it failed: {error}"
        yield Finding("nki", "blocks", text, nki.MISSING)
    islpy = system.version("islpy")
    if compiler and sdk.version_numbers(islpy) >= sdk.ISLPY_TOO_NEW:
        text = f"islpy {islpy}: neuronx-cc 2.27 fails with it (NCC_ISMP902)"
        yield Finding("islpy", "blocks", text, "pip install 'islpy<2026.2'")
    if compiler and not system.program("neuronx-cc"):
        text = f"neuronx-cc {compiler} is installed, but its program is neither in PATH nor in this"
        fix = "install it again: pip install --force-reinstall --no-deps neuronx-cc"
        yield Finding("sdk", "blocks", f"{text} Python's folder", fix)
    if profile.backend != "nxd" or "neuronx-distributed" not in installed or not compiler:
        return  # `checks.packages` reports a missing package
    state, usable = sdk.nxd_support(release)
    yield finding_if("nxd", usable, state, _OTHER_ENVIRONMENT)
    if usable and release and release >= (2, 30):
        text = (
            f"SDK 2.34 ends NxD on Trainium2: keep this environment at {sdk.dotted(sdk.NXD_LAST)}"
            f" or older. Its successor is {STACKS['torchdist']}, in an environment of its own"
        )
        yield Finding("nxd", "note", text)


def cores(profile: Profile, tp: int, system: System) -> Iterator[Finding]:
    devices, needed = system.devices(), profile.cores_needed(tp)
    if devices is None:
        in_use = [f"{name}: {_describe(users)}" for name, users in system.holders().items()]
        text = "neuron-ls is missing or does not answer, so free cores are not counted; "
        text += f"chips in use: {'; '.join(in_use)}" if in_use else "no process has a chip open"
        yield Finding("cores", "note", text, TOOLS)
    else:
        total = sum(len(device.cores) for device in devices)
        free = sum(len(device.cores) for device in devices if not device.holders)
        holders = sorted({holder for device in devices for holder in device.holders})
        text = f"{free} of {total} logical cores are on free chips, {needed} wanted"
        fix = "type a smaller --tp-degree"
        if holders:
            text += f"; in use by {_describe(holders)}"
            pids = " ".join(str(pid) for pid, _ in holders)
            fix = f"end them: kill {pids}; wait a few seconds and type the command again"
        yield finding_if("cores", free >= needed or profile.device != "neuron", text, fix)
    visible, count = system.environment.get("NEURON_RT_VISIBLE_CORES", ""), 0
    with suppress(ValueError):
        count = len(visible_cores(visible))
    if visible and profile.device == "neuron" and count < needed:
        text = f"NEURON_RT_VISIBLE_CORES={visible} shows {count} cores, {needed} wanted"
        yield Finding("cores", "blocks", text, "unset NEURON_RT_VISIBLE_CORES")


def _describe(processes: Iterable[tuple[int, str]]) -> str:
    return ", ".join(
        f"{pid} ({textwrap.shorten(command, 60) or 'unknown command'})"
        for pid, command in processes
    )


def lnc(profile: Profile, system: System) -> Finding:
    """Whether the runtime's LNC (physical cores per logical core) matches the compiled graphs. The
    runtime reads it from the environment or else from its file. neuron-ls shows the default."""
    lnc = str(profile.lnc)
    listed = sorted({str(device.lnc) for device in system.devices() or () if device.lnc})
    variables = "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"
    settings = {n: value for n in variables if (value := system.environment.get(n))}
    if not settings and system.lnc_file:
        settings = {_LNC_FILE: system.lnc_file}
    elif not settings and listed:
        settings = {"neuron-ls": ", ".join(listed)}
    wrong = [name for name, value in settings.items() if value != lnc]
    sources = ", ".join(f"{value} from {name}" for name, value in settings.items())
    text = sources or "not set; 2 is Trainium2's default"
    good = not wrong or profile.device != "neuron"
    if not good:
        text = f"{text}; profile {profile.name} compiles for {lnc}"
    fixes = {
        _LNC_FILE: f"echo NEURON_LOGICAL_NC_CONFIG={lnc} | sudo tee {_LNC_FILE}",
        "neuron-ls": f"export NEURON_LOGICAL_NC_CONFIG={lnc}",
    }
    fix = "; ".join(fixes.get(name, f"unset {name}") for name in wrong)
    return finding_if("lnc", good, text, fix)
