"""What the host's convolutions compute in: float32, or bfloat16 where this CPU is faster in it.

Whether it is cannot be told by a CPU's name or flags: some have bfloat16 dot products that are no
faster than float32, some compute it at a third of float32's rate, and AMX at ten times. So a small
convolution is timed in both, in milliseconds and once a machine: frames depend on what was chosen,
and a busy machine may measure something else.
"""

import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ltx_neuron.host.calibration import measured_once
from ltx_neuron.host.winograd import Workers

# Channels, frames, height and width of the convolution that is timed: 1.3 ms in float32, and not
# a second where bfloat16 is computed number by number.
_TIMED = (64, 2, 16, 16)
_REPEATS = 10
# Measured ratio from which on -> what it counts as. The steps are wide apart: 0.3, 1 and 2 without
# AMX, 6 to 10 with it.
_SPEEDS = {4.0: 8, 1.4: 2}


class Arithmetic(NamedTuple):
    """dtype  of feature maps and of direct convolutions
    speed  how many times as fast as in float32 this CPU convolves in it: 1, 2 or 8
    """

    dtype: torch.dtype = torch.float32
    speed: int = 1

    def describe(self) -> dict[str, str | int]:
        """What frames depend on: for reports and sidecars."""
        name = str(self.dtype).removeprefix("torch.")
        return {"host_dtype": name, "host_dtype_speed": self.speed}


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
    seconds = {}
    # On one thread, as handing work to many takes longer than this work.
    with Workers(1) as workers:
        workers.run(lambda _: seconds.update(_time_convolutions()), [None])
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    return next((speed for least, speed in _SPEEDS.items() if ratio >= least), 1)


def _time_convolutions() -> dict[torch.dtype, float]:
    """The least seconds of a convolution in either dtype, each in its fastest layout."""
    channels, *size = _TIMED
    layouts = {torch.float32: torch.contiguous_format, torch.bfloat16: torch.channels_last_3d}
    operands, seconds = {}, dict.fromkeys(layouts, float("inf"))
    for dtype, layout in layouts.items():
        shapes = (1, channels, *(length + 2 for length in size)), (channels, channels, 3, 3, 3)
        operands[dtype] = [
            torch.ones(shape, dtype=dtype).contiguous(memory_format=layout) for shape in shapes
        ]
        F.conv3d(*operands[dtype])  # the first call prepares
    for _ in range(_REPEATS):  # in turn: other work on the machine slows both down
        for dtype in layouts:
            start = time.perf_counter()
            F.conv3d(*operands[dtype])
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds
