"""What the host computes with: convolutions in float32, or in bfloat16 where this CPU is faster in
it, and float32 products by the library that is faster on it.

Whether it is cannot be told by a CPU's name or flags: some have bfloat16 dot products that are no
faster than float32, some compute it at a third of float32's rate, and AMX at ten times. So a small
convolution is timed in both, in milliseconds and once a machine: bits depend on what was chosen,
and a busy machine may measure something else. The same for the libraries.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ltx_neuron.host.calibration import measured_once
from ltx_neuron.host.products import AMX, BLAS, ONEDNN, ONEDNN_ALONE, Libraries, has_amx, multiplier
from ltx_neuron.host.winograd import Workers

# Channels, frames, height and width of the convolution that is timed: 1.3 ms in float32, and not
# a second where bfloat16 is computed number by number.
_TIMED = (64, 2, 16, 16)
_REPEATS = 10
# Measured ratio from which on -> what it counts as. The steps are wide apart: 0.3, 1 and 2 without
# AMX, 6 to 10 with it.
_SPEEDS = {4.0: 8, 1.4: 2}
# Of MKL's time: with larger pieces and on all cores it gains more than the others.
_MARGIN = 0.9
# Rows of activations, inputs and outputs of the products that are timed.
_TIMED_PRODUCTS = Libraries(few=(64, 4096, 512), many=(512, 2048, 512), tile=(128, 256, 256))


class Arithmetic(NamedTuple):
    """dtype      of the video decoder's feature maps and direct convolutions
    speed      how many times as fast as in float32 this CPU convolves in it: 1, 2 or 8
    libraries  that multiply float32 matrices
    """

    dtype: torch.dtype = torch.float32
    speed: int = 1
    libraries: Libraries = ONEDNN_ALONE

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


@cache
def bfloat16_speed(artifacts_dir: Path | None = None) -> int:
    """How many times as fast as in float32 this CPU convolves in bfloat16: 1, 2 or 8."""
    if artifacts_dir:
        speed = measured_once(artifacts_dir, "choices", "bfloat16_speed", bfloat16_speed)
        return speed if speed in (1, *_SPEEDS.values()) else bfloat16_speed()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 1
    seconds = _on_one_core(_time_convolutions)
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    return next((speed for least, speed in _SPEEDS.items() if ratio >= least), 1)


@cache
def fastest_libraries(artifacts_dir: Path | None = None) -> Libraries:
    """Which library is faster on this CPU, for each kind of product."""
    large = (BLAS, ONEDNN, AMX) if has_amx() else (BLAS, ONEDNN)
    names = Libraries(few=large, many=large, tile=(BLAS, ONEDNN))
    if artifacts_dir:
        chosen = measured_once(
            artifacts_dir, "choices", "products", lambda: fastest_libraries()._asdict()
        )
        with suppress(TypeError):  # not what this function stores
            found = Libraries(**chosen)
            if all(name in known for name, known in zip(found, names, strict=True)):
                return found
        return fastest_libraries()
    timed = zip(_TIMED_PRODUCTS, names, strict=True)
    return Libraries(*(_on_one_core(_fastest_library, *kind) for kind in timed))


def _on_one_core(function: Callable, *args) -> Any:
    """Call a function in a thread that computes on one core: handing work to many takes longer
    than the work that is timed, above all on a busy machine."""
    results = []
    with Workers(1) as workers:
        workers.run(lambda _: results.append(function(*args)), [None])
    return results[0]


def _fastest_library(shape: tuple[int, int, int], names: tuple[str, ...]) -> str:
    """The library that multiplies in the least time."""
    rows, inputs, outputs = shape
    x, out = torch.ones(rows, inputs), torch.ones(rows, outputs)
    products = {}
    for name in names:
        dtype = torch.bfloat16 if name == AMX else torch.float32
        weight = torch.ones(outputs, inputs, dtype=dtype)
        products[name] = partial(multiplier(name), x, weight, out)
    seconds = _least_seconds(products)
    seconds[BLAS] *= _MARGIN
    return min(seconds, key=seconds.get)


def _time_convolutions() -> dict[torch.dtype, float]:
    """The least seconds of a convolution in either dtype, each in its fastest layout."""
    channels, *size = _TIMED
    layouts = {torch.float32: torch.contiguous_format, torch.bfloat16: torch.channels_last_3d}
    convolutions = {}
    for dtype, layout in layouts.items():
        shapes = (1, channels, *(length + 2 for length in size)), (channels, channels, 3, 3, 3)
        operands = (
            torch.ones(shape, dtype=dtype).contiguous(memory_format=layout) for shape in shapes
        )
        convolutions[dtype] = partial(F.conv3d, *operands)
    return _least_seconds(convolutions)


def _least_seconds(functions: dict[Any, Callable]) -> dict[Any, float]:
    """The least seconds that each function takes."""
    seconds = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        function()  # the first call prepares
    for _ in range(_REPEATS):  # in turn: other work on the machine slows all down
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds
