"""Records of what Lightricks' packages make of a job, which tools/golden writes: elements and shapes of each tensor. A
CPU without AVX2 draws other weights for the tiny models, and ends up to 5e-5 away."""

import json
import math
from functools import cached_property

import torch
from conftest import ROOT
from helpers import furthest, rel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FOLDER = ROOT / "test/golden"
ELEMENTS, PIXELS = 512, 4096  # of a tensor, and of frames
# As far from the truth as ltx-core's own bf16 run, twice that where rounding falls out differently, and a floor of one
# rounding (2**-8 = 0.004) for tensors that only one operation separates from exact ones.
BF16_FACTOR, BF16_FLOOR = 2, 0.005
# Frames are cut to whole numbers, so one of 1e-6 below a number and one above it are a count apart.
FRAME_COUNTS = 1
# A vocoder of random weights answers a change of the latents with about 200 times as much (measured).
WAVEFORM_FACTOR = 250


def sample(tensor: Tensor) -> Tensor:
    """The recorded elements of a tensor: all of a small one."""
    flat, count = tensor.flatten(), PIXELS if tensor.dtype == torch.uint8 else ELEMENTS
    if len(flat) <= count:
        return flat.clone()
    step = round(len(flat) * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, len(flat)) > 1:
        step += 1
    return flat[torch.arange(count) * step % len(flat)]


def comparable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a run as records have them: hidden states where the prompt has tokens."""
    if "hidden_states" not in tensors:
        return dict(tensors)
    return tensors | {"hidden_states": tensors["hidden_states"][:, tensors["attention_mask"].bool().flatten()]}


def write(name: str, tensors: dict[str, Tensor], **metadata) -> None:
    """metadata: text, or what JSON can hold."""
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    samples = {key: sample(tensor) for key, tensor in tensors.items()}
    save_file(samples, FOLDER / f"{name}.safetensors", texts | {"shapes": json.dumps(shapes)})


class Record:
    """The tensors of a job as upstream makes them."""

    def __init__(self, name: str):
        self.path = FOLDER / f"{name}.safetensors"
        with safe_open(self.path, "pt") as file:
            self.metadata = file.metadata()
            self.samples = {key: file.get_tensor(key) for key in file.keys()}
        self.shapes = json.loads(self.metadata["shapes"])

    @cached_property
    def bfloat16(self) -> dict[str, float]:
        """How far from these, in relative L2, upstream's own run in bfloat16 ends."""
        return json.loads(self.metadata["bfloat16"])

    def distances(self, got: dict[str, Tensor]) -> dict[str, float]:
        """Relative L2 of each recorded tensor, of which `got` must have all, with their shapes; of frames the largest
        difference."""
        got = comparable(got)
        assert {key: list(got[key].shape) for key in self.samples} == self.shapes
        pairs = {key: (sample(got[key]), expected) for key, expected in self.samples.items()}
        return {key: (furthest if pair[1].dtype == torch.uint8 else rel)(*pair) for key, pair in pairs.items()}

    def assert_equal(self, got: dict[str, Tensor], bound: float) -> None:
        """A run in float32 is as near to the record as `bound` says of latents."""
        bounds = {"frames": FRAME_COUNTS, "waveform": WAVEFORM_FACTOR * bound}
        distances = self.distances(got)
        print({key: f"{distance:.1e}" for key, distance in distances.items()})
        assert {key: d for key, d in distances.items() if not d <= bounds.get(key, bound)} == {}

    def assert_as_near_as_upstreams_bfloat16(self, got: dict[str, Tensor]) -> None:
        distances = {key: d for key, d in self.distances(got).items() if key in self.bfloat16}
        print({key: f"{d:.4f} {self.bfloat16[key]:.4f}" for key, d in distances.items()})
        assert distances.keys() == self.bfloat16.keys()
        limits = {key: BF16_FACTOR * theirs + BF16_FLOOR for key, theirs in self.bfloat16.items()}
        assert {key: d for key, d in distances.items() if not d <= limits[key]} == {}
