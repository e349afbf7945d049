"""LoRA, merged into the weights during sharding, without a cost at run time.

Source: ltx-core loader/fuse_loras.py (1.0.0): W + sum of bf16((B * strength) @ A), with products in
the LoRA's dtype and sums in the checkpoint's. There is no alpha. Any linear layer of the DiT may
have a LoRA, including gates, AdaLN and projections.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.hub import download_released
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.sharding import Model
from ltx_neuron.weights.tensorfile import TensorFile, listed

DOWNLOAD = download_released("lora")
_PREFIX = "diffusion_model."  # of the published files; some other files omit it
# In an IC-LoRA's metadata: the ratios of stage 1's sides and frames to a reference's.
_FACTORS = "reference_downscale_factor", "reference_temporal_scale_factor"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"  # (rank, inputs) and (outputs, rank)


@dataclass(frozen=True)
class Lora:
    """A LoRA file and the factor of its products. UserError for a strength that is not finite."""

    path: Path
    strength: float = 1.0

    def __post_init__(self) -> None:
        try:
            strength = float(self.strength)  # 1 and 1.0 are one weight set
        except (TypeError, ValueError):
            strength = float("nan")
        if not abs(strength) < float("inf"):
            raise UserError(f"--lora {self.path}: strength {self.strength} is not a finite number")
        object.__setattr__(self, "strength", strength)

    def file(self) -> TensorFile:
        """The opened file. UserError where it is missing or broken."""
        return TensorFile(self.path, DOWNLOAD)


WeightSet = tuple[Lora, ...]  # the LoRAs to merge into the model, in this order; (): none


def identity_of(loras: WeightSet) -> list:
    """[fingerprint, strength] of each LoRA, in order: the identity of a weight set."""
    return [[_fingerprint(lora.path, _version(lora.path)), lora.strength] for lora in loras]


def _version(path: Path) -> tuple[int, int] | None:
    """(modification time, size) of a file, to detect a change."""
    state = path.stat() if path.is_file() else None
    return state and (state.st_mtime_ns, state.st_size)


@cache  # the lines of a batch repeat the same files
def _fingerprint(path: Path, version: tuple[int, int] | None) -> str:
    return Lora(path).file().fingerprint


def check_guided_stage_1(stage_1: WeightSet, stage_2: WeightSet) -> None:
    """Raise UserError for a LoRA of the dev recipe's stage 1 that stage 2 does not have, where it
    has no references."""
    others = [lora for lora in stage_1 if lora.path not in {each.path for each in stage_2}]
    if others:
        raise FieldError(
            "{ic_lora} {path} needs a reference, {video_conditioning} FILE STRENGTH; a LoRA for all"
            " stages is {lora} PATH [STRENGTH]",
            path=others[0].path,
        )


def reference_scale(loras: WeightSet) -> tuple[int, int]:
    """The ratios of stage 1's sides and frames to a reference video's, from the metadata of its
    IC-LoRAs. UserError unless each is a whole number and the same in all files. Published files of
    factor 1 have no such metadata; a line is printed once for them."""
    if loras and not any(name in lora.file().metadata for lora in loras for name in _FACTORS):
        _say_unscaled(tuple(lora.path for lora in loras))
    space, time = (_factor(loras, name) for name in _FACTORS)
    return space, time


def dubbing_scale(lora: Lora) -> int:
    """The ratio of a stage's sides to those of the video to dub; there is none in time."""
    return _factor((lora,), _FACTORS[0], "--lora")


@cache
def _say_unscaled(paths: tuple[Path, ...]) -> None:
    who, say = ("IC-LoRA", "has") if len(paths) == 1 else ("IC-LoRAs", "have")
    print(
        f"{who} {', '.join(map(str, paths))} {say} no reference scale: references get the size of"
        " stage 1 (factor 1)"
    )


def are_silent(loras: WeightSet) -> bool:
    """Whether no LoRA has a layer of the sound, which a reference's voice needs."""
    return not any("audio" in key for lora in loras for key in lora.file().shapes)


def _factor(loras: WeightSet, name: str, flag: str = "--ic-lora") -> int:
    """The LoRAs' common factor; 1 if no file has one."""
    said: dict[int, Path] = {}
    for lora in loras:
        text = lora.file().metadata.get(name, "1")
        if not (text.isascii() and text.isdigit() and int(text)):
            raise UserError(
                f"{flag} {lora.path}: its metadata has {name} {text!r}, wanted a whole number"
                " from 1; download the file again"
            )
        if int(text) != 1:
            said.setdefault(int(text), lora.path)
    if len(said) > 1:
        listed = ", ".join(f"{factor} of {path}" for factor, path in said.items())
        raise UserError(
            f"--ic-lora: the files need references with different {name}: {listed}; leave all but"
            " one out"
        )
    return next(iter(said), 1)


class MergedSource(Source):
    """A model's tensors with LoRAs merged in.

    UserError if a LoRA tensor belongs to no weight of the model or does not fit its shape, or if
    the weight is not stored in BF16.
    """

    def __init__(
        self,
        model: Model,
        files: list[TensorFile],
        loras: WeightSet,
        heads: dict[str, int] | None = None,
    ):
        super().__init__(model, files, heads)
        self.lora_identity = identity_of(loras)
        # Weight name -> its LoRAs, in the order of `loras`.
        self.adapters: dict[str, list[tuple[TensorFile, float]]] = {}
        for lora in loras:
            file = lora.file()
            for name in self._target_weights(file):
                self.adapters.setdefault(name, []).append((file, lora.strength))

    def _target_weights(self, file: TensorFile) -> list[str]:
        """Names of the weights that a LoRA file changes; UserError that lists every tensor without
        a fitting weight."""
        problems, targets = [], {}  # weight name -> its A tensor
        for key in file.shapes:
            suffix = next((s for s in (_DOWN, _UP) if key.endswith(s)), None)
            name = f"{key.removesuffix(suffix).removeprefix(_PREFIX)}.weight" if suffix else None
            if problem := self._misfit(file, key, suffix, name):
                problems.append(f"{key}: {problem}")
            elif suffix == _DOWN and targets.setdefault(name, key) != key:
                problems.append(f"{key}: same weight as {targets[name]}; leave one out")
        if problems or not targets:
            shown = listed(problems) or ["it has no lora_A / lora_B tensors"]
            title = f"--lora {file.path} is not a LoRA of this model:"
            raise UserError("\n  ".join([title, *shown]))
        return list(targets)

    def _misfit(
        self, file: TensorFile, key: str, suffix: str | None, name: str | None
    ) -> str | None:
        """Why a tensor of a LoRA file does not fit the weight `name`; None if it fits."""
        if name not in self.locations:
            return "matches no weight of the model"
        shape, wanted = file.shapes[key], self.shape(name)
        partner_suffix, axis = (_UP, 1) if suffix == _DOWN else (_DOWN, 0)
        partner = key.removesuffix(suffix or "") + partner_suffix
        if len(shape) != 2 or len(wanted) != 2 or shape[axis] != wanted[axis]:
            return f"shape {list(shape)} does not fit {name} of shape {list(wanted)}"
        if partner not in file.shapes:
            return f"{partner} is missing"
        if problem := file.weight_problem(key):
            return f"{problem}: convert the file to BF16, or use one that is"
        if self.dtype(name) != torch.bfloat16:
            return f"{name} is not stored in BF16"
        if suffix == _DOWN and file.shapes[partner][1] != shape[0]:
            return f"rank {shape[0]}, but {partner} has {file.shapes[partner][1]}"
        if suffix == _DOWN and file.dtypes[partner] != file.dtypes[key]:
            stored = f"stored as {file.dtypes[key]}, but {partner} as {file.dtypes[partner]}"
            return f"{stored}: convert both to BF16"
        return None

    def pieces(self, name: str, bounds: list[tuple[int, int]]) -> Iterator[Tensor]:
        """Rows start..stop of a tensor for each of `bounds`; for a merged tensor, views."""
        if name not in self.adapters:
            return super().pieces(name, bounds)
        whole = self.tensor(name)
        return (whole[start:stop] for start, stop in bounds)

    def tensor(self, name: str) -> Tensor:
        """A whole merged tensor. Its product is computed whole, because slices may round
        differently."""
        weight, adapters = super().tensor(name), self.adapters.get(name, [])
        if not adapters:
            return weight
        deltas = [
            _product(file, name.removesuffix(".weight"), strength).to(weight.dtype)
            for file, strength in adapters
        ]
        return (deltas[0] if len(deltas) == 1 else torch.stack(deltas).sum(dim=0)) + weight


def _product(file: TensorFile, module: str, strength: float) -> Tensor:
    """(B * strength) @ A of one linear layer: (outputs, inputs), in the LoRA's dtype."""
    key = f"{_PREFIX}{module}" if f"{_PREFIX}{module}{_DOWN}" in file.shapes else module
    return (file.read(key + _UP) * strength) @ file.read(key + _DOWN)
