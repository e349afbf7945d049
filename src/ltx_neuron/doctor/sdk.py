"""The Neuron SDK's releases: which versions each installs, and whether NxD may be used with it."""

import re
from typing import NamedTuple

Version = tuple[int, ...]


class Sdk(NamedTuple):
    """A release, and the first two numbers of two of its packages' versions."""

    release: Version
    compiler: Version  # neuronx-cc
    driver: Version  # aws-neuronx-dkms


# The package manifest of the SDK's documentation repository (n2-manifest.json, 21 August 2026); of
# 2.33 and 2.33.1 the documentation's list of components (neuronx-cc 2.28.7631, driver 2.31.7).
SDKS = tuple(Sdk((2, n), (2, n - 5), (2, n - 2)) for n in range(27, 34))
# First release, how NxD's inference API (ModelBuilder) is supported from there on, and whether it
# may be used. Sources: release notes of 2.27, 2.30 and 2.32; the announcement of 16 October 2026 of
# the end of support on Trn2 and Trn3.
NXD_LIFECYCLE = (
    ((2, 27), "supported", True),
    ((2, 30), "in maintenance: fixes for security alone", True),
    (
        (2, 32),
        "in maintenance, and out of the machine images: its wheels stay in Neuron's pip repository",
        True,
    ),
    ((2, 34), "no longer supported on Trainium2", False),
)
NXD_LAST = (2, 33)
# Packages of the public index that have names of the SDK's and are not the SDK's: pip takes them
# where it was not told of Neuron's own repository.
DECOYS = {
    "nki": "0.0.1",
    "nki-library": "0.0.2",
    "neuronx-cc": "1.0.post1",
    "torch-neuronx": "1.0",
    "libneuronxla": "1.0",
    "neuronx-distributed": "0.1",
    "nkipy": "0.0.2",
    "vllm-neuron": "0.1.0",
}
# The first islpy with which neuronx-cc 2.27 ends every compile with NCC_ISMP902; of 2.28 it is not
# known. neuronx-cc 2.26 has a pin of its own.
ISLPY_TOO_NEW = (2026, 2)
# Versions from the first on, below the second. PYTHON: on Neuron, by backend.
TORCH = (2, 9), (2, 14)
PYTHON = {"nxd": ((3, 11), (3, 14)), "torchdist": ((3, 12), (3, 15))}
NXD_TORCH = (2, 9)  # the last PyTorch that PyTorch/XLA, and with it NxD, has


def version_numbers(version: str | None) -> Version:
    """The first four numbers of a version: (2, 9, 0) of 2.9.0+cpu, () of what has none."""
    return tuple(map(int, re.findall(r"\d+", (version or "").partition("+")[0])[:4]))


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def release_of(part: str, version: str | None) -> Version | None:
    """The SDK release that has a "compiler" or a "driver" of this version; None for one older than
    the table.

    Releases after the table's last are extrapolated: every release so far has raised both versions
    by one.
    """
    numbers, last = version_numbers(version)[:2], SDKS[-1]
    if numbers > getattr(last, part):
        return last.release[0], last.release[1] + numbers[1] - getattr(last, part)[1]
    return next((sdk.release for sdk in SDKS if getattr(sdk, part) == numbers), None)


def release_suffix(part: str, version: str | None) -> str:
    """The release as text to follow a version: " (SDK 2.31)"."""
    release = release_of(part, version)
    if release is None:
        return " (of an SDK before 2.27)" if version_numbers(version) else ""
    guessed = ", counted on from the releases known" if release > SDKS[-1].release else ""
    return f" (SDK {dotted(release)}{guessed})"


def nxd_support(release: Version | None) -> tuple[str, bool]:
    """How NxD is supported on a release, as text, and whether it may be used. A release of None is
    older than the table."""
    rows = [row for row in NXD_LIFECYCLE if release and row[0] <= release]
    if not rows:
        return "ModelBuilder V2 is used from SDK 2.27 on, this one is older", False
    return rows[-1][1:]
