"""The Neuron SDK's releases: their packages' versions, and their support of NxD."""

from ltx_neuron.machine import version_numbers

Version = tuple[int, ...]

# By how much a release's second number exceeds that of its compiler's version (neuronx-cc) and of
# its driver's (aws-neuronx-dkms), from the first to the last known release. Sources: the package
# manifest of the SDK's documentation repository (n2-manifest.json, 21 August 2026); of 2.33 and
# 2.33.1 the documentation's list of components (neuronx-cc 2.28.7631, driver 2.31.7).
OFFSETS = {"compiler": 5, "driver": 2}
FIRST, LAST = (2, 27), (2, 33)
# First release, its support of NxD's inference API (ModelBuilder), and whether the API may be used.
# Sources: release notes of 2.27, 2.30, 2.32; announcement of 16 October 2026 (Trn2, Trn3).
NXD_LIFECYCLE = (
    ((2, 27), "supported", True),
    ((2, 30), "in maintenance: only security fixes", True),
    (
        (2, 32),
        "in maintenance and not in the machine images; Neuron's pip repository has its wheels",
        True,
    ),
    ((2, 34), "no longer supported on Trainium2", False),
)
NXD_LAST = (2, 33)
# Packages of the public index with names of the SDK's packages. pip installs them if Neuron's own
# repository is not configured.
DECOYS = {
    "nki": "0.0.1",
    "nki-library": "0.0.2",
    "neuronx-cc": "1.0.post1",
    "torch-neuronx": "1.0",
    "libneuronxla": "1.0",
    "neuronx-distributed": "0.1",
    "nkipy": "0.0.2",
    "vllm-neuron": "0.1.0",
    "vllm-omni-neuron": "0.1.0",
}
# From this islpy on, neuronx-cc 2.27 fails with NCC_ISMP902. 2.28 is untested; 2.26 pins islpy.
ISLPY_TOO_NEW = (2026, 2)
# Supported versions: from the first, below the second. TORCH: as in pyproject.toml; PYTHON: Neuron
TORCH = (2, 9), (2, 16)
PYTHON = {"nxd": ((3, 11), (3, 14)), "torchdist": ((3, 12), (3, 15))}
NXD_TORCH = (2, 9)  # the last PyTorch with a PyTorch/XLA release, which NxD needs


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def release_of(part: str, version: str | None) -> Version | None:
    """The SDK release with this version of "compiler" or "driver"; None if it is older than FIRST.
    One after LAST is extrapolated."""
    major, minor = (*version_numbers(version), 0, 0)[:2]
    release = major, minor + OFFSETS[part]
    return release if release >= FIRST else None


def release_suffix(part: str, version: str | None) -> str:
    """The release as text to follow a version: " (SDK 2.31)"."""
    release = release_of(part, version)
    if release is None:
        return " (of an SDK before 2.27)" if version_numbers(version) else ""
    guessed = ", extrapolated from known releases" if release > LAST else ""
    return f" (SDK {dotted(release)}{guessed})"


def nxd_support(release: Version | None) -> tuple[str, bool]:
    """A release's support of NxD as text, and whether NxD may be used. None: an older release."""
    rows = [row for row in NXD_LIFECYCLE if release and row[0] <= release]
    if not rows:
        return "this SDK is too old; ModelBuilder V2 needs 2.27 or newer", False
    return rows[-1][1:]
