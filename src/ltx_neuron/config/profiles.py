"""Hardware profiles: each machine's limits, and how models are split and placed on it.

A command resolves its profile once and passes it on. The values are documented or published, with
sources; we measured none on Neuron hardware.
"""

import dataclasses
import os
import typing
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.errors import UserError
from ltx_neuron.invocation import command
from ltx_neuron.machine import Machine, package_version, probe, version_numbers


@dataclass(frozen=True)
class Chip:
    """Documented limits of one accelerator chip."""

    cores: int  # physical ones; `lnc` of them are a logical core, which is a rank
    flops: float  # dense bf16, per second
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float  # between the chip's own cores
    chip_link_bytes_per_second: float  # to the instance's other chips, in one direction
    source: str
    torus_row: int = 0  # chips in a row of the instance's square torus; 0: a switch connects all


@dataclass(frozen=True)
class Profile:
    """How models run on a kind of machine."""

    name: str
    source: str
    # "torchdist": one process per rank; "nxd": one process drives all ranks; "auto", in PROFILES
    # alone: `resolve` replaces it by that of the installed Neuron stack
    backend: Literal["auto", "torchdist", "nxd"]
    tp: int  # ranks that share one model
    device: Literal["cpu", "cuda", "neuron"]  # of a rank
    # How a rank runs its exported graphs: "export" op by op, others through torch.compile
    # ("aot_eager": TorchNeuron's path without its compiler)
    compile_backend: Literal["export", "aot_eager", "inductor", "neuron"]
    # Of the DiT and the connectors (attention.KERNELS); Gemma's is always matmul and softmax
    attention: Literal["sdpa", "matmul", "nki"]
    # Transformer blocks in one graph, called num_layers / this many times; 0: the whole step
    blocks_per_graph: int = 4
    # Split the video's tokens over the ranks between layers, in buckets where that is possible
    sequence_parallel: bool = False
    context_parallel: int = 1  # groups of `tp` ranks that divide a clip's tokens, one per chip
    # Groups of ranks, each with the whole model, that share the passes or tiles of a step
    guidance_parallel: int = 1
    threads: int = 0  # CPU threads of one rank; 0: its share of the machine's
    drain_every: int = 0  # of torchdist: wait for the device after so many launches; 0: a step's
    # Of torchdist: how long a rank, or the host, waits for a rank while others do not: it may load,
    # or compile a graph at its first run. Also of a whole compile step
    first_run_seconds: int = 1800
    chips: int = 1
    lnc: int = 1
    chip: Chip | None = None  # None: its limits are unknown
    host_memory_bytes: int | None = None
    # Of the host's video models; "auto": bfloat16 for a bfloat16 run if the CPU multiplies it
    host_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # Longer side of a decoder's tile in pixels, the pixels that two tiles share, and the same in
    # time. The defaults are those of ltx-core since 1.1.3
    vae_tile: int = 768
    vae_overlap: int = 64
    vae_tile_frames: int = 80
    vae_overlap_frames: int = 24
    # Of --neuron-vae: latents (frames x rows x columns) in a tile at most; 0: tiles as on the host
    vae_tile_latents: int = 0
    # Of --neuron-vae: the video VAE's 3x3x3 convolutions, three 2D ones or one 3D one
    vae_convolution: Literal["conv2d", "conv3d"] = "conv2d"
    sound_on_ranks: bool = False  # with --neuron-vae the ranks decode sound, too, not the host
    # The ranks denoise a batch's next clip while the host decodes one; sound beside pictures
    overlap_decode: bool = True
    resident: bool = False  # keep all models on the device; otherwise one at a time
    text_buckets: tuple[int, ...] = (128, 256, 512, 1024)
    environment: tuple[tuple[str, str], ...] = ()  # of driving processes, set before torch's import
    compiler_flags: tuple[tuple[str, str], ...] = ()  # of neuronx-cc by model, without --lnc
    tuned: bool = True  # use the settings of ltx-neuron tune for this machine, if there are any
    note: str = ""  # a warning about the whole profile, for users
    # The user's --profile-set, without `tuned`, which affects no result by itself
    settings: tuple[str, ...] = ()

    @property
    def machine(self) -> str:
        """The name of the machine's own profile, without a layout."""
        return self.name.partition("-")[0]

    @property
    def return_hidden_states(self) -> bool:
        """Whether the text graph also returns all layers' states (49 x tokens x width)."""
        return self.device != "neuron"

    @property
    def maps_weights(self) -> bool:
        """Whether ranks compute with mapped pages of their weight files; devices have copies."""
        return self.device == "cpu"

    @property
    def cores(self) -> int | None:
        """Logical cores of the machine, one per rank; None if unknown."""
        return self.chip and self.chips * self.chip.cores // self.lnc

    @property
    def memory_bytes_per_core(self) -> int | None:
        """Device memory of one logical core."""
        return self.chip and self.chip.memory_bytes * self.lnc // self.chip.cores

    @property
    def vae_models(self) -> tuple[str, ...]:
        """The models that --neuron-vae places on the ranks."""
        return ("vae", "encoder", *["sound"] * self.sound_on_ranks)

    @property
    def may_keep_vae(self) -> bool:
        return self.resident or self.memory_bytes_per_core is not None

    def flops(self, tp: int) -> float | None:
        """FLOP/s of `tp` ranks together."""
        return self.chip and self.chip.flops * self.chips_of(tp)

    def memory_bytes_per_second(self, tp: int) -> float | None:
        """Memory bandwidth of `tp` ranks together."""
        return self.chip and self.chip.memory_bytes_per_second * self.chips_of(tp)

    def link_bytes_per_second(self, tp: int) -> float | None:
        """Bandwidth between `tp` ranks, all together; across chips, that of the slower link."""
        if self.chip is None:
            return None
        chip, chips = self.chip, self.chips_of(tp)
        link = chip.link_bytes_per_second if chips <= 1 else chip.chip_link_bytes_per_second
        return chips * link

    def chips_of(self, ranks: int) -> float:
        """The chips, or the share of one, of so many ranks."""
        assert self.chip
        return ranks * self.lnc / self.chip.cores

    def flags(self, model: str) -> str:
        """neuronx-cc's flags for the graphs of a model, one of MODELS."""
        return f"{dict(self.compiler_flags)[model]} --lnc={self.lnc}"

    def world_size(self, tp: int) -> int:
        """Ranks of one guidance group, which share collectives."""
        return tp * self.context_parallel

    def cores_needed(self, tp: int) -> int:
        """Logical cores of a run: the ranks of all guidance groups."""
        return self.world_size(tp) * self.guidance_parallel

    @property
    def cores_per_chip(self) -> int:
        return self.chip.cores // self.lnc if self.chip else 1

    @property
    def torus_row(self) -> int:
        """Logical cores in a row of the instance's torus; 0: its links form none."""
        return self.chip.torus_row * self.cores_per_chip if self.chip else 0

    def connected(self, tp: int) -> bool:
        """Whether the links between chips connect every group of ranks (mesh.groups). On a torus, a
        group's chips are one, two neighbours, a row, a column or a block of these, each with the
        same cores. The runtime refuses others with "no_hier no_mesh" (vllm-omni-neuron)."""
        fits = tp in (1, self.cores_per_chip, self.torus_row)
        return fits or self.context_parallel == 1 or not self.torus_row

    def rank_threads(self, tp: int) -> int:
        """CPU threads of one rank: fixed per machine, because the number affects output bits. Not
        divided by the guidance groups, which must have the bits of a single one."""
        return self.threads or max(1, (os.cpu_count() or 1) // self.world_size(tp))

    @property
    def host_threads(self) -> int:
        return os.cpu_count() or 1

    def degree(self, tp_degree: int | None) -> int:
        """Tensor-parallel ranks: --tp-degree, by default the profile's number."""
        return self.tp if tp_degree is None else tp_degree

    def check_degree(self, tp: int) -> None:
        """Raise UserError if the machine has too few cores for `tp` ranks, or its runtime does not
        support that number (NxD Inference: "TP=2 is NOT valid with LNC=2 on trn2.3xlarge")."""
        if self.device == "neuron" and tp != 1 and tp % 4:
            raise UserError(
                f"--tp-degree is {tp}: the Neuron runtime supports 1 or a multiple of 4 cores of a"
                f" {self.name}.\nType --tp-degree {self.tp}"
            )
        self.check_cores(tp)

    def check_cores(self, tp: int) -> None:
        """Raise UserError if the machine has too few cores for the ranks of a layout."""
        needed = self.cores_needed(tp)
        if self.cores is not None and needed > self.cores:
            one = "type --tp-degree with at most" if needed == tp else "together at most"
            layout = {
                "tp-degree": tp,
                "context_parallel": self.context_parallel,
                "guidance_parallel": self.guidance_parallel,
            }
            product = " x ".join(f"{name} {n}" for name, n in layout.items() if n > 1)
            raise UserError(
                f"{product or 'one rank'}: {needed} ranks need {needed} logical cores, {self.name}"
                f" has {self.cores} (LNC={self.lnc}).\n{one.capitalize()} {self.cores}"
            )
        if not self.connected(tp):
            raise UserError(
                f"tp-degree {tp} x context_parallel {self.context_parallel}: the torus of"
                f" {self.machine} does not connect some groups.\nType --tp-degree"
                f" {_or((1, self.cores_per_chip, self.torus_row))}, or --profile-set"
                " context_parallel=1"
            )


_HINTS = typing.get_type_hints(Profile)
# Models with their own compiler flags.
COMPILED_MODELS = ("dit", "gemma3", "connectors", "vae", "encoder", "sound")
_GIB = 2**30
TRAINIUM2 = Chip(
    cores=8,
    flops=667e12,
    memory_bytes=96 * _GIB,
    memory_bytes_per_second=2.9e12,
    link_bytes_per_second=3.5e12,
    chip_link_bytes_per_second=512e9,
    source=(
        "AWS Neuron docs, trainium2.rst and trn2-arch.rst: 8 NeuronCore-v3, 667 TF dense bf16, 96"
        " GiB HBM in four banks at 2.9 TB/s, DMA 3.5 TB/s, NeuronLink-v3 1024 GB/s within an"
        " instance, in both directions together; logical-neuroncore-config.rst: LNC=2 by default"
    ),
    torus_row=4,
)
TRAINIUM3 = Chip(
    cores=8,
    flops=671e12,
    memory_bytes=144 * _GIB,
    memory_bytes_per_second=4.9e12,
    link_bytes_per_second=4.9e12,
    chip_link_bytes_per_second=1024 * _GIB,
    source=(
        "AWS Neuron docs, trainium3.rst and trn3-arch.rst; NeuronLink-v4's 2048 GiB/s are taken for"
        " both directions together, as Trainium2's"
    ),
)

# The runtime's buffer for one collective, in bytes: read at its start, before sizes are known.
COLLECTIVES_BUFFER = "NEURON_RT_DBG_INTRA_RDH_CHANNEL_BUFFER_SIZE"
# Keys that `ltx-neuron tune` chooses: of a whole process, and of the DiT's graphs
RUN_KEYS = ("backend", "compile_backend", "threads", f"environment.{COLLECTIVES_BUFFER}")
GRAPH_KEYS = ("attention", "sequence_parallel", "blocks_per_graph", "compiler_flags.dit")
TUNED_KEYS = (*RUN_KEYS, *GRAPH_KEYS)
PLATFORM_TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"
_TRANSFORMER = "--model-type=transformer -O1 --auto-cast=none"
# The first are the profile's; the tuner tries the others. On two blocks of Wan 2.1 the second
# reduced 37.7 ms to 34.5 (Difflet, neuronx-cc 2.26); AWS adds both options to prefills.
DIT_FLAGS = tuple(
    f"{_TRANSFORMER} --tensorizer-options='--enable-ccop-compute-overlap{more}'"
    for more in (
        "",
        " --vectorize-strided-dma",
        " --vectorize-strided-dma --cc-pipeline-tiling-factor=2",
    )
)
# Published for the video decoder on trn2, in one graph.
_UNET = "--model-type=unet-inference -O1 --auto-cast=none"
_VIDEO_VAE = f"{_UNET} --internal-max-instruction-limit=15000000"
_TRN2: dict[str, Any] = dict(
    backend="auto",
    tp=4,
    device="neuron",
    compile_backend="neuron",
    attention="nki",
    drain_every=60,  # the largest queue has 63 launches
    # Published compiles of one graph took 40 to 111 minutes (Wan 2.2, a VAE).
    first_run_seconds=7200,
    # As a published decoder in one graph: 8 x 16 latents, 121 frames.
    vae_tile_latents=2048,
    lnc=2,
    chip=TRAINIUM2,
    environment=(
        # The slow first run of a graph must not count as a hang: the runtime's default is 30 s
        # (runtime configuration guide).
        ("NEURON_RT_EXEC_TIMEOUT", "600"),
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0"),
        # A build machine without a device compiles for trn2 as well.
        (PLATFORM_TARGET, "trn2"),
        # TorchNeuron. A step has 14 launches; published LTX runs use the largest queue (63).
        ("NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS", "63"),
        # Reuse DMA rings: one set of addresses per call of a step, at most 51 at the release's
        # depth (one block per graph, guided). Rings beyond the cache are rebuilt at each launch.
        ("NEURON_RT_IO_RING_CACHE_SIZE", "64"),
        # Both backends. Larger sums take a slower algorithm; the default is 40 MB, and the largest
        # sum of 512x768, 121 frames has 48 MiB. AWS's Wan 2.2 runs with this value.
        (COLLECTIVES_BUFFER, "167772160"),
        # The compiling rank locks the cache; others break the lock after 1200 s (FileLock.h).
        ("TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT", "7200"),
        # Raise for a graph that does not lower, instead of running it op by op.
        ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1"),
        # Raise for a tensor on the host, instead of uploading it at each call.
        ("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", "1"),
        ("NKI_ENABLE_TRACE_CACHE", "0"),  # a stale one replays old kernels
        ("OMP_NUM_THREADS", "1"),  # rank_threads sets the number
    ),
    compiler_flags=(
        # Published LTX-2.3 port, TP=4, trn2.3xlarge (SDK 2.28); ours casts nothing.
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
        ("vae", _VIDEO_VAE),
        ("encoder", _VIDEO_VAE),
        ("sound", _UNET),
    ),
)
_TRN3: dict[str, Any] = _TRN2 | dict(
    chip=TRAINIUM3,
    environment=tuple((dict(_TRN2["environment"]) | {PLATFORM_TARGET: "trn3"}).items()),
    note="not tried: the compiler flags, kernels and forecast rates are those of Trainium2",
)

PROFILES = {
    profile.name: profile
    for profile in (
        # 4 blocks per graph, as on TorchNeuron, so that CPU tests cover the same graphs. One
        # Inductor thread, because each rank would start a pool of processes.
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
        # The DiT in bf16 fits one GPU. Two of its blocks were measured, so without limits.
        Profile(
            "cuda",
            "any machine with a CUDA build of PyTorch; two blocks ran on an H200",
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
        # 16 replicas of 4 ranks; the profiles below use several chips for one clip.
        Profile(
            "trn2.48xlarge",
            "AWS Neuron docs, trn2-arch.rst: 16 chips, 192 vCPU, 2048 GiB host memory",
            chips=16,
            host_memory_bytes=2048 * _GIB,
            **_TRN2,
        ),
        # A chip with its share of a server of 16 (UltraServer Gen1). The documentation names no
        # instances; users have one of one chip, trn3pd98.3xlarge.
        Profile("trn3", "AWS Neuron docs, trn3-arch.rst", host_memory_bytes=128 * _GIB, **_TRN3),
    )
}
MACHINES = tuple(PROFILES)  # the profiles below are layouts of one
_INSTANCES = {name: name for name in MACHINES if name.startswith("trn2")}
_INSTANCES["trn2u.48xlarge"] = "trn2.48xlarge"


def blocks_per_graph(context_parallel: int, blocks: int = Profile.blocks_per_graph) -> int:
    """Blocks of a graph that has as many instructions as one of `blocks` blocks of a whole clip: a
    group has 1 / context_parallel of the tokens."""
    return min(blocks * context_parallel, 48)


def _layout(end: str, **fields: Any) -> Profile:
    blocks = blocks_per_graph(fields.get("context_parallel", 1))
    name = f"trn2.48xlarge-{end}"
    machine = PROFILES["trn2.48xlarge"]
    return dataclasses.replace(machine, name=name, blocks_per_graph=blocks, **fields)


PROFILES |= {
    profile.name: profile
    for profile in (
        _layout("cp4", context_parallel=4),
        _layout("cp8", context_parallel=8),
        _layout("g4", guidance_parallel=4, backend="torchdist"),
        _layout("g4cp4", guidance_parallel=4, context_parallel=4, backend="torchdist"),
    )
}


def resolve(
    name: str | None = None, settings: tuple[str, ...] = (), machine: Machine | None = None
) -> Profile:
    """The profile with this name, by default the machine's, changed by `settings` (key=value each).
    Raises UserError for an unknown name or key, and for an invalid value."""
    name = name or detect(machine or probe())
    if name not in PROFILES:
        raise UserError(
            f"unknown profile {name!r}; known: {', '.join(sorted(PROFILES))}. Type --profile with"
            " one of them"
        )
    profile = PROFILES[name]
    for setting in settings:
        profile = _changed(profile, setting)
    if profile.backend == "auto":
        backend: Any = (profile.device == "neuron" and installed_backend()) or "torchdist"
        profile = dataclasses.replace(profile, backend=backend)
    _check(profile)
    typed = tuple(setting for setting in settings if setting.partition("=")[0] != "tuned")
    return dataclasses.replace(profile, settings=typed)


# Device -> the possible values of compile_backend.
COMPILE_BACKENDS = {
    "cpu": ("export", "aot_eager", "inductor"),
    "cuda": ("export", "inductor"),
    "neuron": ("neuron",),
}


def _check(profile: Profile) -> None:
    known, on_neuron = COMPILE_BACKENDS[profile.device], profile.device == "neuron"
    right = {
        f"device={profile.device} needs compile_backend={' or '.join(known)}, got"
        f" {profile.compile_backend}": profile.compile_backend in known,
        "guidance_parallel needs backend=torchdist: with backend=nxd one process drives one group's"
        " cores only. Type --profile-set backend=torchdist": (
            profile.guidance_parallel == 1 or profile.backend == "torchdist"
        ),
        "backend=nxd needs a Neuron profile": on_neuron or profile.backend != "nxd",
        "attention=nki needs a Neuron profile": on_neuron or profile.attention != "nki",
        f"the last of text_buckets must be {TEXT_TOKENS}, the longest prompt": (
            profile.text_buckets[-1] == TEXT_TOKENS
        ),
        f"lnc is 1 or 2, got {profile.lnc}": profile.lnc in (1, 2),
    }
    if on_neuron:
        right |= _routes(profile)
    # The rules of ltx-core's TilingConfig; `unit` is the pixels or frames of a latent.
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


# Numbers of Trainium's chips in a group (one, two neighbours, a row, two rows, all). Observed by
# others, not documented (docs/scale-out.md).
CONTEXT_PARALLEL = 1, 2, 4, 8, 16


def _or(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def _routes(profile: Profile) -> dict[str, bool]:
    cp = profile.context_parallel
    more = "--profile trn2.48xlarge" if profile.torus_row else "--profile-set chips=N"
    return {
        f"context_parallel={cp} divides a clip over the chips of one machine, and a"
        f" {profile.machine} has one. Type context_parallel=1, or {more}": (
            cp == 1 or profile.chips > 1
        ),
        f"context_parallel={cp} needs lnc=2; type both, or context_parallel=1": (
            cp == 1 or profile.lnc == 2
        ),
        f"context_parallel={cp}: the torus of {profile.machine} connects groups of"
        f" {_or(CONTEXT_PARALLEL)} chips. Type one of these": (
            cp in CONTEXT_PARALLEL or not profile.torus_row
        ),
    }


def detect(machine: Machine) -> str:
    """The name of a machine's default profile."""
    known = "trn3" if machine.instance.startswith("trn3") else _INSTANCES.get(machine.instance)
    here = machine.instance or "no known EC2 instance type"
    type_one = f"Type --profile with one of {', '.join(sorted(PROFILES))}"
    if known and not machine.neuron_devices:
        raise UserError(
            f"this is a {here}, but there is no /dev/neuron*: the Neuron driver is not loaded.\n"
            f"Find out why: {command('doctor')}. {type_one} to run without it"
        )
    if machine.neuron_devices and not known:
        raise UserError(
            f"this machine ({here}) has {machine.neuron_devices} Neuron devices but no profile;"
            f" known: {', '.join(_INSTANCES)}, trn3.\n{type_one}"
        )
    return known or ("cuda" if machine.cuda_devices else "cpu")


def require_runtime(profile: Profile, tp: int, machine: Machine | None = None) -> None:
    """Raise UserError, with the command that installs it, if the backend's runtime is missing."""
    profile.check_degree(tp)
    if profile.device == "neuron":
        stack, here = STACKS[profile.backend], installed_backend()
        if not stack.version:
            free = profile.guidance_parallel == 1  # groups need TorchNeuron
            choices = [*STACKS.values()] if free and not here else [stack]
            packages = [supported.package for supported in STACKS.values()]
            present = [
                f"{name} {version}" for name in packages if (version := package_version(name))
            ]
            commands = "; or ".join(
                f"{supported.name}: {supported.install}" for supported in choices
            )
            other = f"--profile-set backend={here}" if free and here else "--profile cpu"
            raise UserError(
                f"profile {profile.name!r} needs {' or '.join(map(str, choices))}, found"
                f" {', '.join(present) or 'neither'}.\nInstall {commands}; or type {other}"
            )
    elif profile.device == "cuda":
        count = (machine or probe()).cuda_devices
        if count < (needed := profile.cores_needed(tp)):
            raise UserError(
                f"profile {profile.name!r} with {needed} ranks needs {needed} GPUs that PyTorch can"
                f" use, found {count}.\nInstall a CUDA build of torch, type --tp-degree, or type"
                " --profile cpu"
            )


class Stack(NamedTuple):
    """The Neuron packages of a backend: `package` of version `first` or later tells that they are
    installed, and our `extra` installs them."""

    name: str
    package: str
    first: str
    extra: str

    @property
    def version(self) -> str | None:
        version = package_version(self.package)
        return version if version_numbers(version) >= version_numbers(self.first) else None

    @property
    def install(self) -> str:
        return f'pip install "ltx-neuron[{self.extra}]"'

    def __str__(self) -> str:
        return f"{self.name} ({self.package} {self.first} or later)"


# Backend of Neuron profiles -> its stack, the newer first. NxD's torch-neuronx is 2.9.
STACKS = {
    "torchdist": Stack("TorchNeuron", "torch-neuronx", "2.13", "torchneuron"),
    "nxd": Stack("NxD", "neuronx-distributed", "0.16", "neuron"),
}


def installed_backend() -> str | None:
    """The backend of the installed Neuron stack, of two the newer; None without any."""
    return next((backend for backend, stack in STACKS.items() if stack.version), None)


def describe_backend(profile: Profile) -> str:
    """A profile's backend, on Neuron with its stack, for users."""
    if profile.device != "neuron":
        return f"backend {profile.backend}"
    stack = STACKS[profile.backend]
    version = f"{stack.package} {stack.version}" if stack.version else "assumed: not installed here"
    return f"backend {profile.backend} ({stack.name}, {version})"


_FIXED = ("name", "source", "chip", "settings", "host_memory_bytes", "note")
_TABLES = ("environment", "compiler_flags")  # --profile-set changes single entries
_TYPES = {key: _HINTS[key] for key in _HINTS if key not in _FIXED + _TABLES}
_FLAGS = "tp_degree", "dtype", "profile", "artifacts_dir", "neuron_gemma", "neuron_vae", "compat"
_MAY_BE_ZERO = (
    "blocks_per_graph",
    "drain_every",
    "threads",
    "vae_overlap",
    "vae_overlap_frames",
    "vae_tile_latents",
)


def _changed(profile: Profile, setting: str) -> Profile:
    key, equals, text = setting.partition("=")
    if not equals:
        raise UserError(
            f"--profile-set {setting}: wanted key=value, as in --profile-set attention=matmul"
        )
    table, _, entry = key.partition(".")
    flags = [f"compiler_flags.{model}" for model in COMPILED_MODELS]
    if key in flags or (table == "environment" and entry):
        entries = dict(getattr(profile, table)) | {entry: text}
        return dataclasses.replace(profile, **{table: tuple(entries.items())})
    if key in _FLAGS:
        flag = f"--{key.replace('_', '-')} {text}".removesuffix(" true")
        raise UserError(f"--profile-set {setting}: {key} is a flag of its own; type {flag}")
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
