"""The Neuron SDK's releases, told by the versions of what they install, and what each means for
NxD."""

import re
from typing import NamedTuple

Version = tuple[int, ...]


class Sdk(NamedTuple):
    """A release, and the first two numbers of two of its packages' versions."""

    release: Version
    compiler: Version  # neuronx-cc
    driver: Version  # aws-neuronx-dkms


# The package manifest of the SDK's documentation repository (n2-manifest.json, 21 August 2026).
SDKS = (
    Sdk((2, 27), (2, 22), (2, 25)),
    Sdk((2, 28), (2, 23), (2, 26)),
    Sdk((2, 29), (2, 24), (2, 27)),
    Sdk((2, 30), (2, 25), (2, 28)),
    Sdk((2, 31), (2, 26), (2, 29)),
    Sdk((2, 32), (2, 27), (2, 30)),
)
# From which release on, what NxD's inference API (ModelBuilder) is there, and whether it may be
# used. Sources: release notes of 2.27, 2.30 and 2.32; the announcement of the end of support on
# Trn2 and Trn3, of 16 October 2026.
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
TORCH = (2, 9), (2, 14)  # from, and below
PYTHON = {
    "nxd": ((3, 11), (3, 14)),
    "torchdist": ((3, 12), (3, 15)),
}  # on Neuron, by backend: from, and below
NXD_TORCH = (2, 9)  # the last PyTorch that PyTorch/XLA, and with it NxD, has


def numbers(version: str | None) -> Version:
    """(2, 9, 0) of 2.9.0+cpu; () of what has no numbers."""
    return tuple(map(int, re.findall(r"\d+", (version or "").partition("+")[0])[:4]))


def said(version: Version) -> str:
    return ".".join(map(str, version))


def release_of(part: str, version: str | None) -> Version | None:
    """The release that a "compiler" or a "driver" is of; None for one older than the table.

    Releases after the table's last are counted on: every release so far has raised both by one.
    """
    found, last = numbers(version)[:2], SDKS[-1]
    if found > getattr(last, part):
        return last.release[0], last.release[1] + found[1] - getattr(last, part)[1]
    return next((sdk.release for sdk in SDKS if getattr(sdk, part) == found), None)


def of_sdk(part: str, version: str | None) -> str:
    """ " (SDK 2.31)", to be put behind a version."""
    release = release_of(part, version)
    guessed = (
        ", counted on from the releases known" if release and release > SDKS[-1].release else ""
    )
    return (
        f" (SDK {said(release)}{guessed})"
        if release
        else " (of an SDK before 2.27)"
        if numbers(version)
        else ""
    )


def nxd_on(release: Version | None) -> tuple[str, bool]:
    """What NxD is on a release, and whether it may be used; a release of None is older than the
    table."""
    rows = [row for row in NXD_LIFECYCLE if release and row[0] <= release]
    return (
        rows[-1][1:]
        if rows
        else ("ModelBuilder V2 is used from SDK 2.27 on, this one is older", False)
    )
