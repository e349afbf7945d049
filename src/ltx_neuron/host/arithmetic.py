"""What the host computes with: the video VAE's dtype, and the library of float32 products.

A CPU's name and flags do not tell what is fastest. Some CPUs have bfloat16 dot products that are no
faster than float32, some compute it at a third of float32's rate, and AMX at ten times that. torch
multiplies float32 matrices by its BLAS, which is MKL on x86; oneDNN is in torch too. On CPUs that
are not Intel's MKL has half of oneDNN's rate or less; on Intel's it has up to 1.5 times as much.

So both are timed. Outputs' bits depend on what is chosen, so it is measured once per machine and
stored in <artifacts-dir>/calibration/. Another CPU, number of cores, version of torch or limit on
instructions is another machine, with a file of its own.
Figures: benchmarks/text_encode.md and vae_decode.md.
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ltx_neuron import machine
from ltx_neuron.config.common import digest
from ltx_neuron.errors import UserError, reason
from ltx_neuron.files import exclusive, read_json, write_json
from ltx_neuron.host.background import Workers

BLAS, ONEDNN = "blas", "onednn"
MANY_ROWS = 256  # of activations, from which on they are many
# Elements of a weight that are cast at once: 8 MB in float32, which a core's share of the cache
# holds. MKL is a tenth faster with twice as many. With many rows of activations casting costs
# little beside the product, and larger pieces are faster.
PIECE_ELEMENTS, LARGE_PIECE_ELEMENTS = 2**21, 2**23
_MIN_WEIGHT_ROWS = 64  # of a piece: fewer do not keep a product busy

# Rows of activations, inputs and outputs of the products that are timed: a piece of a weight of
# Gemma3, a core's share of one of the video connector, and a core's piece of a convolution of the
# video decoder.
_TIMED_PRODUCTS = {"few": (60, 3840, 1024), "many": (1024, 4096, 256), "tile": (128, 256, 256)}
_TILES = 50  # products of a tile in a turn
_TURNS, _ATTEMPTS = 5, 3

# Channels, frames, height and width of the convolution that is timed: 1.3 ms in float32, and not
# a second where bfloat16 is computed number by number.
_TIMED_CONVOLUTION = (64, 2, 16, 16)
_REPEATS = 10
# Measured ratio from which on -> what it counts as. The steps are wide apart: 0.3, 1 and 2 without
# AMX, 6 to 10 with it.
_SPEEDS = {4.0: 8, 1.4: 2}

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
# Fields of a run's identity that are measured choices: results depend on them in rounding alone.
CHOSEN_FIELDS = ("host_dtype", "host_dtype_speed", "host_products")
# By file, the choices of this process, which hold to its end.
_choices: dict[Path, dict[str, Any]] = {}


class Libraries(NamedTuple):
    """BLAS or ONEDNN, by what is multiplied.

    few   few rows of activations with a large weight: Gemma3's layers
    many  many rows: the connectors' blocks
    tile  what one core takes of a convolution (host/winograd.py)
    """

    few: str = ONEDNN
    many: str = ONEDNN
    tile: str = ONEDNN


class Arithmetic(NamedTuple):
    """dtype      of the video decoder's feature maps and direct convolutions
    speed      how many times as fast as in float32 this CPU convolves in it: 1, 2 or 8
    libraries  that multiply float32 matrices
    """

    dtype: torch.dtype = torch.float32
    speed: int = 1
    libraries: Libraries = Libraries()

    def of_latents(self, dtype: torch.dtype) -> "Arithmetic":
        """What latents are made in, by encoder and upsamplers, of a run in `dtype`: one in float32
        keeps them so whatever frames are decoded in."""
        if dtype == torch.bfloat16:
            return self
        return Arithmetic(libraries=self.libraries)

    def describe(self) -> dict:
        """What bits depend on: for reports and sidecars."""
        return {
            "host_dtype": str(self.dtype).removeprefix("torch."),
            "host_dtype_speed": self.speed,
            "host_products": self.libraries._asdict(),
        }


FLOAT32 = Arithmetic()


def multiply(x: Tensor, weight: Tensor, out: Tensor, library: str) -> None:
    """Write x (M, K) times the transpose of weight (N, K) to `out` (M, N), which may be columns of
    a larger matrix. All are float32."""
    if library == ONEDNN and torch.backends.mkldnn.is_available():
        # The operator that torch.compile's CPU backend puts in for a linear layer: no public call
        # reaches oneDNN for float32.
        out.copy_(torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    else:
        torch.mm(x, weight.t(), out=out)


class StoredProducts:
    """Products of float32 activations with weights of any dtype, which are cast piece by piece in
    the CPU's cache. Its memory is used again: fresh pages cost more than what is written to
    them."""

    def __init__(self, libraries: Libraries):
        self._libraries, self._cast_buffer = libraries, torch.empty(0)

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write x (M, K) times the transpose of weight (N, K) to `out` (M, N)."""
        library = self._libraries.few if len(x) < MANY_ROWS else self._libraries.many
        elements = LARGE_PIECE_ELEMENTS
        if len(x) < MANY_ROWS:
            elements = PIECE_ELEMENTS * (2 if library == BLAS else 1)
        weight_rows = max(_MIN_WEIGHT_ROWS, elements // weight.shape[1])
        parts = zip(weight.split(weight_rows), out.split(weight_rows, dim=1), strict=True)
        for piece, part in parts:
            multiply(x, self._as_float32(piece), part, library)

    def _as_float32(self, piece: Tensor) -> Tensor:
        """A piece of a weight in float32, valid until the next call."""
        if piece.dtype == torch.float32:
            return piece
        if self._cast_buffer.numel() < piece.numel():
            self._cast_buffer = torch.empty(piece.numel())
        return self._cast_buffer[: piece.numel()].view(piece.shape).copy_(piece)


def arithmetic(
    host_dtype: str, dtype: torch.dtype, artifacts_dir: Path | None = None
) -> Arithmetic:
    """What the video decoder computes in on this machine.

    host_dtype     "float32", "bfloat16", or "auto": bfloat16 for a run in it where that is faster
    dtype          of the run
    artifacts_dir  keeps what is measured; None: this process measures for itself
    """
    if host_dtype == "float32" or (host_dtype == "auto" and dtype != torch.bfloat16):
        return FLOAT32
    speed = bfloat16_speed(artifacts_dir)
    if host_dtype == "auto" and speed == 1:
        return FLOAT32
    return Arithmetic(torch.bfloat16, speed)


def bfloat16_speed(artifacts_dir: Path | None = None) -> int:
    """How many times as fast as in float32 this CPU convolves in bfloat16: 1, 2 or 8."""
    speeds = (1, *_SPEEDS.values())
    return _choice(artifacts_dir, "bfloat16_speed", _measured_speed, speeds)


def fastest_libraries(artifacts_dir: Path | None = None) -> Libraries:
    """Which library is faster on this CPU, for each kind of product."""
    all_libraries = itertools.product((BLAS, ONEDNN), repeat=len(Libraries._fields))
    values = [Libraries(*each)._asdict() for each in all_libraries]
    return Libraries(**_choice(artifacts_dir, "float32_products", _measured_libraries, values))


@cache
def _measured_speed() -> int:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 1
    turns = _on_one_core(lambda: _in_turns(_convolutions(), _REPEATS))
    least = {dtype: min(turn[dtype] for turn in turns) for dtype in turns[0]}
    ratio = least[torch.float32] / least[torch.bfloat16]
    return next((speed for bound, speed in _SPEEDS.items() if ratio >= bound), 1)


@cache
def _measured_libraries() -> dict[str, str]:
    products = {kind: _products(kind) for kind in Libraries._fields}
    return _on_one_core(lambda: {kind: _fastest(each) for kind, each in products.items()})


def _products(kind: str) -> dict[str, Callable[[], object]]:
    """The product of a kind by each library, as text encoder and video decoder make it."""
    rows, inputs, outputs = _TIMED_PRODUCTS[kind]
    x, out = torch.ones(rows, inputs), torch.ones(rows, outputs)
    weight = torch.ones(outputs, inputs)
    found = {}
    for library in (BLAS, ONEDNN):
        if kind == "tile":
            product = partial(multiply, x, weight, out, library)
            found[library] = lambda product=product: [product() for _ in range(_TILES)]
        else:
            products = StoredProducts(Libraries(library, library))
            found[library] = partial(products.multiply, x, weight.bfloat16(), out)
    return found


def _on_one_core(measure: Callable[[], Any]) -> Any:
    """What a function returns in a thread that computes on one core. Handing work to many takes
    longer than the work that is timed, above all on a busy machine."""
    with Workers(1) as workers:
        return workers.map(lambda _: measure(), [None])[0]


def _fastest(functions: dict[str, Callable[[], object]]) -> str:
    """The name of the function that takes the least time. Where the same one does not win every
    turn, the machine is busy or they are equal: all are timed again, and then the least times
    decide."""
    turns = []
    for _ in range(_ATTEMPTS):
        latest = _in_turns(functions, _TURNS)
        turns += latest
        if len({min(turn, key=turn.__getitem__) for turn in latest}) == 1:
            turns = latest
            break
    return min(functions, key=lambda name: min(turn[name] for turn in turns))


def _in_turns(functions: dict[Any, Callable[[], object]], count: int) -> list[dict[Any, float]]:
    """CPU seconds of the functions, which run in turns: other work on the machine slows down
    all."""
    for function in functions.values():
        function()  # the first call prepares

    def seconds(function: Callable[[], object]) -> float:
        began = time.thread_time()
        function()
        return time.thread_time() - began

    return [{name: seconds(function) for name, function in functions.items()} for _ in range(count)]


def _convolutions() -> dict[torch.dtype, Callable[[], object]]:
    """A convolution in either dtype, each in its fastest layout."""
    channels, *size = _TIMED_CONVOLUTION
    layouts = {torch.float32: torch.contiguous_format, torch.bfloat16: torch.channels_last_3d}
    convolutions = {}
    for dtype, layout in layouts.items():
        shapes = (1, channels, *(length + 2 for length in size)), (channels, channels, 3, 3, 3)
        operands = (
            torch.ones(shape, dtype=dtype).contiguous(memory_format=layout) for shape in shapes
        )
        convolutions[dtype] = partial(F.conv3d, *operands)
    return convolutions


# --- choices that are stored ----------------------------------------------------------------------


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


def choices_file(artifacts_dir: Path) -> Path:
    """<artifacts-dir>/calibration/<digest of this machine>.json"""
    return Path(artifacts_dir) / "calibration" / f"{digest(this_machine())[:8]}.json"


def _choice(
    artifacts_dir: Path | None, key: str, measure: Callable[[], Any], values: Sequence
) -> Any:
    """The stored choice of this machine, one of some JSON values. Where there is none it is
    measured, and `store_choices` writes it later: a run that is refused writes nothing."""
    if not artifacts_dir:
        return measure()
    path = choices_file(artifacts_dir)
    choices = _choices.setdefault(path, {})
    if key not in choices:
        stored = _stored_choices(path).get(key)
        choices[key] = stored if stored in values else measure()
    return choices[key]


def store_choices(artifacts_dir: Path) -> None:
    """Write the choices of this process. What another process wrote first stays: later runs take
    that. No artifacts folder is made for it."""
    path = choices_file(artifacts_dir)
    own = _choices.get(path, {})
    if not os.path.isdir(artifacts_dir) or own.keys() <= _stored_choices(path).keys():
        return
    try:
        with exclusive(path, "storing measurements in"):
            choices = own | _stored_choices(path)
            write_json(path, {"machine": this_machine(), "choices": choices})
    except OSError as error:
        _print_once(f"{path} cannot be written ({reason(error)}): what was measured is not kept")


def _stored_choices(path: Path) -> dict[str, Any]:
    """This machine's choices; empty where there are none. A file that is damaged or cannot be read
    is reported, and counts as none."""
    if not os.path.lexists(path):
        return {}
    try:
        content = read_json(path)
        choices = content.get("choices", {})
        if content.get("machine") != this_machine() or not isinstance(choices, dict):
            raise UserError(f"{path} is not of this machine")
    except UserError as error:
        _print_once(f"{error}; this machine is measured anew")
        return {}
    return choices


@cache
def _print_once(line: str) -> None:
    print(line, flush=True)
