"""The hardware registry: what each machine has, and how the models are cut and placed on it.

A profile is resolved once at start and handed down; no layer looks one up. Its entries are
documented or published values, with their sources; nothing here was measured on Neuron hardware by
us.
"""

import dataclasses
import os
import typing
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.errors import UserError
from ltx_neuron.invocation import command
from ltx_neuron.machine import Machine, package_version, probe


@dataclass(frozen=True)
class Chip:
    """Documented limits of one accelerator chip."""

    cores: int  # physical ones; `lnc` of them make a logical core, which is a rank
    flops: float  # dense bf16, per second
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float  # between the chip's own cores
    chip_link_bytes_per_second: float  # to the instance's other chips
    source: str


@dataclass(frozen=True)
class Profile:
    """One way of running. `chip` is None where no limit is known and a percentage of one would mean
    nothing.

    backend         "torchdist": one process per rank; "nxd": one process drives all ranks
    tp              ranks that share one model
    device          of a rank
    compile_backend what runs its exported graphs: "export" op by op, others through torch.compile
                    ("aot_eager" is TorchNeuron's way without its compiler)
    threads         CPU threads of one rank; 0: its share of the machine's
    drain_every     of torchdist: wait for the device after so many launches, 0: at the end of a
                    step
    first_run_seconds  of torchdist: how long ranks may do nothing while they load, compile, or run
                    what they have never run; and how long a compile step may take in all
    blocks_per_graph  transformer blocks in one graph, called num_layers / this many times; 0: the
                      whole step
    attention       kernel of the DiT and the connectors (attention.KERNELS); Gemma3's is always
                    matmul and softmax
    sequence_parallel  the video's tokens are divided over the ranks between the layers, for buckets
                    whose tokens divide; others stay whole
    host_dtype      of the host's video models; "auto": bfloat16 for a run in it where this
                    machine's CPU is measured to be faster in it, else float32
    vae_tile        pixels of a tile's longer side where latents are decoded, and `vae_overlap` of
                    them that it shares with the next one; vae_tile_frames and vae_overlap_frames
                    the same in time. The defaults are ltx-core's
    vae_tile_latents  of --neuron-vae: at most so many latents (frames x rows x columns) in a tile;
                      the overlaps are those above. 0: tiles as on the host
    overlap_decode  while the host decodes and writes a clip, the ranks denoise the batch's next
                    one, and sound is decoded beside pictures
    resident        both models stay on the device; else one enters when the other has left
    environment     of the processes that drive the device, set before torch is imported
    compiler_flags  of neuronx-cc by model, without --lnc
    tuned           take the settings that ltx-neuron tune chose for this machine, if there are any
    settings        what --profile-set changed, as it was typed; without `tuned`, which no result
                    depends on by itself
    """

    name: str
    source: str
    backend: Literal["torchdist", "nxd"]
    tp: int
    device: Literal["cpu", "cuda", "neuron"]
    compile_backend: Literal["export", "aot_eager", "inductor", "neuron"]
    attention: Literal["sdpa", "matmul", "nki", "nki_const_max"]
    blocks_per_graph: int = 4
    sequence_parallel: bool = False
    threads: int = 0
    drain_every: int = 0
    first_run_seconds: int = 1800
    chips: int = 1
    lnc: int = 1
    chip: Chip | None = None
    host_memory_bytes: int | None = None
    host_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    vae_tile: int = 512
    vae_overlap: int = 64
    vae_tile_frames: int = 64
    vae_overlap_frames: int = 24
    vae_tile_latents: int = 0
    overlap_decode: bool = True
    resident: bool = False
    text_buckets: tuple[int, ...] = (128, 256, 512, 1024)
    environment: tuple[tuple[str, str], ...] = ()
    compiler_flags: tuple[tuple[str, str], ...] = ()
    tuned: bool = True
    settings: tuple[str, ...] = ()

    @property
    def return_hidden_states(self) -> bool:
        """Whether the text graph hands back all layers (49 x tokens x width) as well."""
        return self.device != "neuron"

    @property
    def connector_attention(self) -> str:
        """Of the text connectors, which run once a prompt: what is good for the DiT's steps alone
        is left out."""
        return "nki" if self.attention == "nki_const_max" else self.attention

    @property
    def maps_weights(self) -> bool:
        """Whether ranks compute with the pages of their weight files: a CPU's do. A device has
        weights of its own."""
        return self.device == "cpu"

    @property
    def cores(self) -> int | None:
        """Logical cores of the machine, each good for a rank; None where it is not known."""
        return self.chip and self.chips * self.chip.cores // self.lnc

    @property
    def memory_bytes_per_core(self) -> int | None:
        """Device memory of one logical core."""
        return self.chip and self.chip.memory_bytes * self.lnc // self.chip.cores

    def flops(self, tp: int) -> float | None:
        """FLOP/s of `tp` ranks together."""
        return self.chip and self.chip.flops * self._chips_of(tp)

    def memory_bytes_per_second(self, tp: int) -> float | None:
        """What `tp` ranks together read from their memory."""
        return self.chip and self.chip.memory_bytes_per_second * self._chips_of(tp)

    def link_bytes_per_second(self, tp: int) -> float | None:
        """What moves between `tp` ranks, all together; the slower link decides where they span
        chips."""
        if self.chip is None:
            return None
        chip, chips = self.chip, self._chips_of(tp)
        link = chip.link_bytes_per_second if chips <= 1 else chip.chip_link_bytes_per_second
        return chips * link

    def _chips_of(self, tp: int) -> float:
        assert self.chip
        return tp * self.lnc / self.chip.cores

    def flags(self, model: str) -> str:
        """neuronx-cc's flags for the graphs of a model, one of MODELS."""
        return f"{dict(self.compiler_flags)[model]} --lnc={self.lnc}"

    def rank_threads(self, tp: int) -> int:
        """CPU threads of one rank: fixed per machine, because results change with the count."""
        return self.threads or max(1, (os.cpu_count() or 1) // tp)

    @property
    def host_threads(self) -> int:
        """CPU threads of the host's own stages."""
        return os.cpu_count() or 1

    def degree(self, tp_degree: int | None) -> int:
        """Tensor-parallel ranks: what --tp-degree says, else the profile's own number."""
        return self.tp if tp_degree is None else tp_degree

    def check_degree(self, tp: int) -> None:
        """Raise UserError where the machine has too few cores for `tp` ranks, or its runtime takes
        no such number (NxD Inference: "TP=2 is NOT valid with LNC=2 on trn2.3xlarge")."""
        if self.device == "neuron" and tp != 1 and tp % 4:
            raise UserError(
                f"--tp-degree is {tp}: the Neuron runtime takes 1 or a multiple of 4 cores of a"
                f" {self.name}.\nType --tp-degree {self.tp}"
            )
        if self.cores is not None and tp > self.cores:
            raise UserError(
                f"{tp} ranks need {tp} logical cores, {self.name} has {self.cores}"
                f" (LNC={self.lnc}).\nType --tp-degree with at most {self.cores}"
            )


# Of attention's values, those that launch NKI kernels, with the models' operations that these do.
NKI_KERNELS = {"nki": ("attention_cte",), "nki_const_max": ("attention_cte", "attention_const_max")}
_HINTS = typing.get_type_hints(Profile)
# Whose graphs are compiled with flags of their own.
MODELS = ("dit", "gemma3", "connectors", "vae", "sound")
_GIB = 2**30
TRAINIUM2 = Chip(
    cores=8,
    flops=667e12,
    memory_bytes=96 * _GIB,
    memory_bytes_per_second=2.9e12,
    link_bytes_per_second=3.5e12,
    chip_link_bytes_per_second=1.024e12,
    source=(
        "AWS Neuron docs, trainium2.rst and trn2-arch.rst: 8 NeuronCore-v3, 667 TF dense bf16, 96"
        " GiB HBM in four banks at 2.9 TB/s, DMA 3.5 TB/s, NeuronLink-v3 1024 GB/s within an"
        " instance; logical-neuroncore-config.rst: LNC=2 by default"
    ),
)

# The runtime's buffer for one collective, in bytes: read once, when the runtime starts, before a
# size is known.
COLLECTIVES_BUFFER = "NEURON_RT_DBG_INTRA_RDH_CHANNEL_BUFFER_SIZE"
_TRANSFORMER = "--model-type=transformer -O1 --auto-cast=none"
# The first are the profile's; the tuner tries the others. On two blocks of Wan 2.1 the second took
# 34.5 ms for 37.7 (Difflet, neuronx-cc 2.26); AWS adds both options to prefills.
DIT_FLAGS = tuple(
    f"{_TRANSFORMER} --tensorizer-options='--enable-ccop-compute-overlap{more}'"
    for more in (
        "",
        " --vectorize-strided-dma",
        " --vectorize-strided-dma --cc-pipeline-tiling-factor=2",
    )
)
_TRN2: dict[str, Any] = dict(
    backend="nxd",
    tp=4,
    device="neuron",
    compile_backend="neuron",
    attention="nki",
    drain_every=60,  # the largest queue holds 63 launches
    # Published compiles of one graph took 40 to 111 minutes (Wan 2.2, a VAE).
    first_run_seconds=7200,
    # What a published decoder was compiled for as one graph: 8 x 16 latents of 121 frames.
    vae_tile_latents=2048,
    lnc=2,
    chip=TRAINIUM2,
    environment=(
        # The slow first run of a graph must not count as a hang: the runtime's default is 30 s
        # (runtime configuration guide).
        ("NEURON_RT_EXEC_TIMEOUT", "600"),
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0"),
        # Replica groups and targets are those of trn2 on a build machine too.
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2"),
        # TorchNeuron. 14 launches a step do not fit the default queue; published LTX runs use the
        # largest (63).
        ("NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS", "63"),
        # Reuse DMA rings: one set of addresses for each call of a step, at most 51 at the release's
        # depth (a block per graph, guided). Rings that do not fit are built again at each launch.
        ("NEURON_RT_IO_RING_CACHE_SIZE", "64"),
        # Both backends. Larger sums take a slower algorithm; the default is 40 MB, and the largest
        # sum of 512x768, 121 frames has 48 MiB. AWS's Wan 2.2 runs with this value.
        (COLLECTIVES_BUFFER, "167772160"),
        # The rank that compiles holds the lock of the cache; others break it after 1200 s
        # (FileLock.h).
        ("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", "7200"),
        # A graph that does not lower is an error, not op by op.
        ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1"),
        # A tensor left on the host is an error, not an upload per call.
        ("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", "1"),
        ("NKI_ENABLE_TRACE_CACHE", "0"),  # a stale one replays old kernels
        ("OMP_NUM_THREADS", "1"),  # rank_threads says how many
    ),
    compiler_flags=(
        # Published LTX-2.3 port at TP=4 on trn2.3xlarge (SDK 2.28); ours casts nothing
        # (--auto-cast=none).
        ("dit", DIT_FLAGS[0]),
        (
            "gemma3",
            (
                f"{_TRANSFORMER} --tensorizer-options='--enable-ccop-compute-overlap"
                " --cc-pipeline-tiling-factor=1 --vectorize-strided-dma"
                " --enable-scalar-dge-vectorization'"
            ),
        ),
        ("connectors", _TRANSFORMER),
        # Published for the same decoder on trn2, there in one graph.
        (
            "vae",
            "--model-type=unet-inference -O1 --auto-cast=none"
            " --internal-max-instruction-limit=15000000",
        ),
        ("sound", "--model-type=unet-inference -O1 --auto-cast=none"),
    ),
)

PROFILES = {
    profile.name: profile
    for profile in (
        # The cut is TorchNeuron's fastest one (4 blocks per graph), so what is proven on a CPU is
        # what runs there.
        # Each rank would start a pool of processes.
        Profile(
            "cpu",
            "any machine",
            "torchdist",
            tp=4,
            device="cpu",
            compile_backend="export",
            attention="sdpa",
            overlap_decode=False,
            environment=(("TORCHINDUCTOR_COMPILE_THREADS", "1"),),
        ),
        # One GPU holds the DiT in bf16; not run by us, so no peaks are claimed.
        Profile(
            "cuda",
            "any machine with a CUDA build of PyTorch; not measured",
            "torchdist",
            tp=1,
            device="cuda",
            compile_backend="inductor",
            attention="sdpa",
        ),
        Profile(
            "trn2.3xlarge",
            "users' reports: 1 chip, 12 vCPU, 124 to 128 GiB host memory; the SDK does not"
            " describe it",
            host_memory_bytes=124 * _GIB,
            **_TRN2,
        ),
        # 16 replicas of 4 ranks: one DiT over several chips was not faster (docs/trainium.md).
        Profile(
            "trn2.48xlarge",
            "AWS Neuron docs, trn2-arch.rst: 16 chips, 192 vCPU, 2048 GiB host memory",
            chips=16,
            host_memory_bytes=2048 * _GIB,
            **_TRN2,
        ),
    )
}
_INSTANCES = {name: name for name in PROFILES if name.startswith("trn")}
_INSTANCES["trn2u.48xlarge"] = "trn2.48xlarge"


def resolve(
    name: str | None = None, settings: tuple[str, ...] = (), machine: Machine | None = None
) -> Profile:
    """The profile of that name, else the machine's own, with `settings` (key=value each) in the
    place of its values. Raises UserError, listing what is known, for an unknown name or key, and
    for a value of another type."""
    name = name or detect(machine or probe())
    if name not in PROFILES:
        raise UserError(
            f"unknown profile {name!r}; known: {', '.join(sorted(PROFILES))}. Type --profile with"
            " one of them"
        )
    profile = PROFILES[name]
    for setting in settings:
        profile = _changed(profile, setting)
    _check(profile)
    kept = tuple(setting for setting in settings if setting.partition("=")[0] != "tuned")
    return dataclasses.replace(profile, settings=kept)


# By device: what may run a rank's graphs.
COMPILE_BACKENDS = {
    "cpu": ("export", "aot_eager", "inductor"),
    "cuda": ("export", "inductor"),
    "neuron": ("neuron",),
}


def _check(profile: Profile) -> None:
    """Refuse values that do not go together."""
    known, on_neuron = COMPILE_BACKENDS[profile.device], profile.device == "neuron"
    right = {
        f"device={profile.device} needs compile_backend={' or '.join(known)}, got"
        f" {profile.compile_backend}": profile.compile_backend in known,
        "backend=nxd needs a Neuron profile": on_neuron or profile.backend != "nxd",
        f"attention={profile.attention} needs a Neuron profile": (
            on_neuron or profile.attention not in NKI_KERNELS
        ),
        f"the last of text_buckets must be {TEXT_TOKENS}, the longest prompt": (
            profile.text_buckets[-1] == TEXT_TOKENS
        ),
        f"lnc is 1 or 2, got {profile.lnc}": profile.lnc in (1, 2),
    }
    # The rules of ltx-core's TilingConfig. So many pixels or frames are one latent:
    for unit, axis in ((32, ""), (8, "_frames")):
        size, overlap = f"vae_tile{axis}", f"vae_overlap{axis}"
        pixels, shared = getattr(profile, size), getattr(profile, overlap)
        right |= {
            f"{size} is a multiple of {unit} from {2 * unit} on, got {pixels}": (
                pixels >= 2 * unit and pixels % unit == 0
            ),
            f"{overlap} is a multiple of {unit} below {size}, got {shared}": (
                shared % unit == 0 and shared < pixels
            ),
        }
    for rule, holds in right.items():
        if not holds:
            raise UserError(f"--profile-set: {rule}")


def detect(machine: Machine) -> str:
    """The name of the profile a machine has by itself."""
    known, here = _INSTANCES.get(machine.instance), machine.instance or "no known EC2 instance type"
    type_one = f"Type --profile with one of {', '.join(sorted(PROFILES))}"
    if known and not machine.neuron_devices:
        raise UserError(
            f"this is a {here}, but there is no /dev/neuron*: the Neuron driver is not loaded.\n"
            f"Find out why: {command('doctor')}. {type_one} to run without it"
        )
    if machine.neuron_devices and not known:
        raise UserError(
            f"this machine ({here}) has {machine.neuron_devices} Neuron devices and no profile of"
            f" its own; known are {', '.join(_INSTANCES)}.\n{type_one}"
        )
    return known or ("cuda" if machine.cuda_devices else "cpu")


def require_runtime(profile: Profile, tp: int, machine: Machine | None = None) -> None:
    """Raise UserError, saying what to install, where this machine lacks what the profile's backend
    runs on."""
    profile.check_degree(tp)
    if profile.device == "neuron":
        (package, _), install = _RUNTIMES[profile.backend], install_runtime(profile.backend)
        version = package_version(package)
        if version is None:
            other = "torchdist" if profile.backend == "nxd" else "nxd"
            raise UserError(
                f"profile {profile.name!r} runs on {package}, which is not installed.\nInstall it:"
                f" {install}; or type --profile-set backend={other} in an"
                f" environment with {_RUNTIMES[other][0]}, or --profile cpu"
            )
        if profile.backend == "torchdist" and [*map(int, version.split(".")[:2])] < [2, 13]:
            raise UserError(
                f"torch-neuronx {version} is for torch-xla; TorchNeuron begins with 2.13.\nInstall"
                f" it: {install}, or type --profile-set backend=nxd"
            )
    elif profile.device == "cuda":
        count = (machine or probe()).cuda_devices
        if count < tp:
            raise UserError(
                f"profile {profile.name!r} with {tp} ranks needs {tp} GPUs that PyTorch can use,"
                f" found {count}.\nInstall a CUDA build of torch, type --tp-degree, or type"
                " --profile cpu"
            )


def install_runtime(backend: str) -> str:
    """What to type for the packages that a Neuron profile's backend runs on."""
    return f'pip install "ltx-neuron[{_RUNTIMES[backend][1]}]"'


# What Neuron profiles run on, by backend: a package, and the extra of this one that names all.
_RUNTIMES = {
    "nxd": ("neuronx-distributed", "neuron"),
    "torchdist": ("torch-neuronx", "torchneuron"),
}
_FIXED = ("name", "source", "chip", "settings", "host_memory_bytes")
_TABLES = ("environment", "compiler_flags")  # --profile-set names their entries
_TYPES = {key: _HINTS[key] for key in _HINTS if key not in _FIXED + _TABLES}
_MAY_BE_ZERO = (
    "blocks_per_graph",
    "drain_every",
    "threads",
    "vae_overlap",
    "vae_overlap_frames",
    "vae_tile_latents",
)


def _changed(profile: Profile, setting: str) -> Profile:
    """A profile with one key=value of --profile-set."""
    key, equals, text = setting.partition("=")
    if not equals:
        raise UserError(
            f"--profile-set {setting}: wanted key=value, as in --profile-set attention=matmul"
        )
    table, _, entry = key.partition(".")
    flags = [f"compiler_flags.{model}" for model in MODELS]
    if key in flags or (table == "environment" and entry):
        entries = dict(getattr(profile, table)) | {entry: text}
        return dataclasses.replace(profile, **{table: tuple(entries.items())})
    if key not in _TYPES:
        known = [*_TYPES, "environment.NAME", *flags]
        near = get_close_matches(key, known, 1)
        hint = f"; did you mean {near[0]}?\nKeys: " if near else "; known: "
        raise UserError(f"--profile-set {setting}: unknown key {key!r}{hint}{', '.join(known)}")
    try:
        value = _parsed(_TYPES[key], text, 0 if key in _MAY_BE_ZERO else 1)
    except ValueError as wanted:
        raise UserError(f"--profile-set {setting}: {text!r} is not {wanted}") from None
    return dataclasses.replace(profile, **{key: value})


def _parsed(kind: Any, text: str, least: int) -> Any:
    """A value of a type from what was typed; ValueError says what is wanted."""
    if kind is bool:
        if text not in ("yes", "no", "true", "false"):
            raise ValueError("yes or no")
        return text in ("yes", "true")
    if kind is int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise ValueError(f"a whole number of at least {least}")
        return int(text)
    if typing.get_origin(kind) is Literal:
        if text not in typing.get_args(kind):
            raise ValueError(f"one of {', '.join(typing.get_args(kind))}")
        return text
    parts = text.split(",")  # tuple[int, ...]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError("whole numbers above 0 with commas between them, as in 128,256")
    return tuple(sorted({int(part) for part in parts}))
