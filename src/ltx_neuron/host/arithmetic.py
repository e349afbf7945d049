"""The host's arithmetic: the video VAE's dtype, and the library of float32 products.

A CPU's name and flags do not determine the fastest choice. bfloat16 runs at a third of float32's
rate on some CPUs, at the same rate on others, and at ten times that with AMX. torch multiplies
float32 matrices with its BLAS (MKL on x86) and also contains oneDNN. MKL has at most half of
oneDNN's rate on CPUs of other vendors, and up to 1.5 times its rate on Intel's.

Both choices are therefore measured. They affect output bits, so they are measured once per machine
and stored in <artifacts-dir>/calibration/. A change of CPU, number of cores, version of torch or
limit on instructions counts as another machine, with another file.
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
from ltx_neuron.errors import UserError, os_reason
from ltx_neuron.files import exclusive, read_json, write_json
from ltx_neuron.format import print_once
from ltx_neuron.host.background import Workers

BLAS, ONEDNN = "blas", "onednn"
MANY_ROWS = 256  # of activations: from this number on they count as many
# Elements of a weight that are cast at once: 8 MB in float32, which fit a core's share of the
# cache. MKL is a tenth faster with twice as many. With many rows of activations casting costs
# little compared with the product, and larger pieces are faster.
PIECE_ELEMENTS, LARGE_PIECE_ELEMENTS = 2**21, 2**23
_MIN_WEIGHT_ROWS = 64  # of a piece: fewer do not keep a product busy

# Rows of activations, inputs and outputs of the timed products: a piece of a weight of Gemma3, a
# core's share of one of the video connector.
_TIMED_PRODUCTS = {"few": (60, 3840, 1024), "many": (1024, 4096, 256)}
_ROUNDS, _ATTEMPTS = 5, 3

# Frames, channels, height and width of the timed convolution: 1.3 ms in float32, and less than a
# second where bfloat16 has no vector instructions.
_TIMED_CONVOLUTION = (2, 64, 16, 16)
_REPEATS = 10
# Lower bound of the rate of bfloat16's convolutions to float32's at which it is used. Rates: 0.3, 1
# and 2 without AMX, 6 to 10 with it.
_FASTER = 1.4

# Environment variables that limit which instructions torch, oneDNN and MKL use.
_LIMITS = (
    *("ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR"),
    *("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA"),
)
# Fields of a run's identity that are measured choices, which change only rounding.
CHOSEN_FIELDS = ("host_dtype", "host_products")
# File -> the choices of this process, which do not change until it ends.
_choices: dict[Path, dict[str, Any]] = {}


class MatmulLibraries(NamedTuple):
    """BLAS or ONEDNN, by kind of product."""

    few: str = ONEDNN  # few rows of activations with a large weight: Gemma3's layers
    many: str = ONEDNN  # many rows: the connectors' blocks


class Arithmetic(NamedTuple):
    """How the host computes its models."""

    dtype: torch.dtype = torch.float32  # of the video decoder's feature maps and convolutions
    libraries: MatmulLibraries = MatmulLibraries()  # for products of float32 matrices

    def of_latents(self, dtype: torch.dtype) -> "Arithmetic":
        """The arithmetic of encoder and upsamplers for a run in `dtype`. A float32 run makes
        latents in float32, also if frames are decoded in bfloat16."""
        if dtype == torch.bfloat16:
            return self
        return Arithmetic(libraries=self.libraries)

    def describe(self) -> dict:
        """The choices that affect output bits, for reports and sidecars."""
        return {
            "host_dtype": str(self.dtype).removeprefix("torch."),
            "host_products": self.libraries._asdict(),
        }


FLOAT32 = Arithmetic()


def multiply(x: Tensor, weight: Tensor, out: Tensor, library: str) -> None:
    """Write x (M, K) times the transpose of weight (N, K) to `out` (M, N), which may be columns of
    a larger matrix. All are float32."""
    if library == ONEDNN and torch.backends.mkldnn.is_available():
        # The operator that torch.compile's CPU backend uses for a linear layer, because no public
        # function uses oneDNN for float32.
        out.copy_(torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    else:
        torch.mm(x, weight.t(), out=out)


class StoredProducts:
    """Products of float32 activations with weights of any dtype, which are cast in pieces that
    fit the CPU's cache. The memory is reused, because new pages cost more than writing to them."""

    def __init__(self, libraries: MatmulLibraries):
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
    """The video decoder's arithmetic on this machine.

    host_dtype     "float32", "bfloat16", or "auto": bfloat16 if the run is in it and it is faster
    dtype          of the run
    artifacts_dir  stores measurements; None: this process measures again
    """
    if host_dtype == "auto":
        fast = dtype == torch.bfloat16 and bfloat16_is_faster(artifacts_dir)
        host_dtype = "bfloat16" if fast else "float32"
    return Arithmetic(torch.bfloat16) if host_dtype == "bfloat16" else FLOAT32


def bfloat16_is_faster(artifacts_dir: Path | None = None) -> bool:
    """Whether this CPU convolves faster in bfloat16 than in float32."""
    return _choice(artifacts_dir, "bfloat16_is_faster", _measured_bfloat16, (False, True))


def fastest_libraries(artifacts_dir: Path | None = None) -> MatmulLibraries:
    all_libraries = itertools.product((BLAS, ONEDNN), repeat=len(MatmulLibraries._fields))
    values = [MatmulLibraries(*libraries)._asdict() for libraries in all_libraries]
    return MatmulLibraries(
        **_choice(artifacts_dir, "float32_products", _measured_libraries, values)
    )


@cache
def _measured_bfloat16() -> bool:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    rounds = _on_one_core(lambda: _alternate(_convolutions(), _REPEATS))
    least = {dtype: min(times[dtype] for times in rounds) for dtype in rounds[0]}
    return least[torch.float32] >= _FASTER * least[torch.bfloat16]


@cache
def _measured_libraries() -> dict[str, str]:
    products = {kind: _products(kind) for kind in MatmulLibraries._fields}
    return _on_one_core(lambda: {kind: _fastest(shapes) for kind, shapes in products.items()})


def _products(kind: str) -> dict[str, Callable[[], object]]:
    rows, inputs, outputs = _TIMED_PRODUCTS[kind]
    x, out = torch.ones(rows, inputs), torch.ones(rows, outputs)
    weight = torch.ones(outputs, inputs, dtype=torch.bfloat16)
    products = {name: StoredProducts(MatmulLibraries(name, name)) for name in (BLAS, ONEDNN)}
    return {name: partial(products[name].multiply, x, weight, out) for name in products}


def _on_one_core(measure: Callable[[], Any]) -> Any:
    """The function's result on one core: distributing takes longer than the timed work."""
    with Workers(1) as workers:
        return workers.map(lambda _: measure(), [None])[0]


def _fastest(functions: dict[str, Callable[[], object]]) -> str:
    """The name of the fastest function. If none wins every round, the machine is busy or they are
    equally fast: all are timed again, and the least times decide."""
    rounds = []
    for _ in range(_ATTEMPTS):
        latest = _alternate(functions, _ROUNDS)
        rounds += latest
        if len({min(times, key=times.__getitem__) for times in latest}) == 1:
            rounds = latest
            break
    return min(functions, key=lambda name: min(times[name] for times in rounds))


def _alternate(functions: dict[Any, Callable[[], object]], count: int) -> list[dict[Any, float]]:
    """CPU seconds of the functions, in alternating rounds: other work slows down all of them."""
    for function in functions.values():
        function()  # warm-up

    def seconds(function: Callable[[], object]) -> float:
        began = time.thread_time()
        function()
        return time.thread_time() - began

    return [{name: seconds(function) for name, function in functions.items()} for _ in range(count)]


def _convolutions() -> dict[torch.dtype, Callable[[], object]]:
    frames, channels, *sides = _TIMED_CONVOLUTION
    shapes = (frames, channels, *sides), (channels, channels, 3, 3)
    operands = [torch.ones(shape).contiguous(memory_format=torch.channels_last) for shape in shapes]
    return {
        dtype: partial(F.conv2d, *(operand.to(dtype) for operand in operands), padding=1)
        for dtype in (torch.float32, torch.bfloat16)
    }


def this_machine() -> dict:
    """A readable description of the machine for which measurements are valid."""
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
    """This machine's stored choice, one of some JSON values. A missing one is measured, and
    `store_choices` writes it later, so that a refused run writes nothing."""
    if not artifacts_dir:
        return measure()
    path = choices_file(artifacts_dir)
    choices = _choices.setdefault(path, {})
    if key not in choices:
        stored = _stored_choices(path).get(key)
        choices[key] = stored if stored in values else measure()
    return choices[key]


def store_choices(artifacts_dir: Path) -> None:
    """Write this process's choices, but keep another's. Does not create the artifacts folder."""
    path = choices_file(artifacts_dir)
    measured = _choices.get(path, {})
    if not os.path.isdir(artifacts_dir) or measured.keys() <= _stored_choices(path).keys():
        return
    try:
        with exclusive(path, "storing measurements in"):
            choices = measured | _stored_choices(path)
            write_json(path, {"machine": this_machine(), "choices": choices})
    except OSError as error:
        print_once(f"{path} cannot be written ({os_reason(error)}): measurements are not saved")


def _stored_choices(path: Path) -> dict[str, Any]:
    """This machine's choices; empty if there are none. A damaged file is reported and ignored."""
    if not os.path.lexists(path):
        return {}
    try:
        content = read_json(path)
        choices = content.get("choices", {})
        if content.get("machine") != this_machine() or not isinstance(choices, dict):
            raise UserError(f"{path} is from another machine")
    except UserError as error:
        print_once(f"{error}; measuring this machine again")
        return {}
    return choices
