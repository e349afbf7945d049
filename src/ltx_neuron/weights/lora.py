"""LoRA, merged into the weights during sharding, without a cost at run time.

Source: ltx-core loader/fuse_loras.py (1.0.0): W + sum of bf16((B * strength) @ A), with products in
the LoRA's dtype and sums in the checkpoint's. Factors of two dtypes and float8 ones are cast to
bfloat16 first (1.2.0). Any linear layer of the DiT may have a LoRA, including gates, AdaLN and
projections; so may the connectors and the text projections, which are in model "gemma3".

ltx-core reads one spelling. The tables read those of other trainers, and three methods of LyCORIS,
as ComfyUI does (comfy/lora.py, comfy/weight_adapter).
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config.common import digest
from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.format import few, print_once
from ltx_neuron.hub import RELEASE_FILES, download_released, hub_name, nearest
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.sharding import DIFFUSION, SHARDED_MODELS, Model, rename
from ltx_neuron.weights.tensorfile import TensorFile, WeightFile

# In an IC-LoRA's metadata: the ratios of stage 1's sides and frames to a reference's.
_FACTORS = "reference_downscale_factor", "reference_temporal_scale_factor"

# A tensor's name is PREFIX LAYER.PART. Underscores and dots of a layer's name are not told apart.
_PREFIX = re.compile(
    r"(lora_(unet|transformer)|lora|lycoris|base_model|velocity_model|model|diffusion_model"
    r"|transformer|unet|connectors)_"
)
# The checkpoint's names -> diffusers' (scripts/convert_ltx2_to_diffusers.py), in this order.
_DIFFUSERS = {
    r"av_ca_(video|audio)_scale_shift_adaln_single": r"av_cross_attn_\1_scale_shift",
    r"av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    r"av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
    r"prompt_adaln_single": "prompt_adaln",
    r"adaln_single": "time_embed",
    r"patchify_proj": "proj_in",
    r"(q|k)_norm": r"norm_\1",
    r"_embeddings_connector\.transformer_1d_blocks": "_connector.transformer_blocks",
    r"text_embedding_projection\.(video|audio)_aggregate_embed": r"\1_text_proj_in",
}
_MUSUBI = "video_embeddings_connector", "embeddings_connector"  # musubi-tuner's LTX-2 trainer
_ADAPTER = r"(\.(?!weight$|bias$)[^.]+)?"  # PEFT's name of an adapter, such as "default"
_PARTS = {
    rf"lora(_A|_down|\.down|_linear_layer\.down){_ADAPTER}": "lora_A",  # (rank, inputs)
    rf"lora(_B|_up|\.up|_linear_layer\.up){_ADAPTER}": "lora_B",  # (outputs, rank)
    r"(lokr|hada)_w[12](_[ab])?": r"\g<0>",  # two factors; each may be a product a @ b
    r"diff|w_norm": "diff",
    r"diff_b|b_norm": "bias",
    r"alpha": "alpha",  # products are times alpha / rank
    rf"dora_scale|lora_magnitude_vector{_ADAPTER}": "DoRA",
    r"oft_\w+(\.\w+)?": "OFT",  # these two do not add to a weight
}
_RANKED = "lora_A", "lokr_w2_b", "lokr_w1_b", "hada_w1_b"  # parts of shape (rank, ...)
_TENSOR = re.compile(rf"(?P<layer>.+?)[._](?P<part>{'|'.join(_PARTS)})(\.weight)?")
# Of text encoders, and moving averages: left out, as upstream does.
_ELSEWHERE = re.compile(r"((lora|lycoris)_)?(te\d?|text_encoders?(_\d)?|text_model|\w*ema)[._].+")
# In problems: layers that LTX-2.0 and LTX-Video have, alone or in another size.
_OLDER = re.compile(
    r"caption_projection|(?<!video_)(?<!audio_)(aggregate_embed|text_proj_in)"
    r"|does not fit \S*(adaln_single|connector)"
)


def is_lora(names: Iterable[str]) -> bool:
    return any(map(_TENSOR.fullmatch, names))


@dataclass(frozen=True)
class Lora:
    """A LoRA file and the factor of its products."""

    path: Path
    strength: float = 1.0

    def file(self) -> WeightFile:
        """The opened file. UserError where it is missing or broken."""
        if self.path.is_dir() or not os.path.exists(self.path):
            raise UserError(f"--lora {self.path}: {self._missing()}")
        return WeightFile(self.path, "from where you have it")

    def _missing(self) -> str:
        if self.path.is_dir():
            files = [*sorted(self.path.glob("*.safetensors")), self.path / "FILE"]
            return f"a folder; type its file: --lora {files[0]}"
        if typed := re.fullmatch(r"(.+):(-?[.\d]+)", str(self.path)):
            return f"no such file; a strength is a word of its own: --lora {typed[1]} {typed[2]}"
        for release, files in RELEASE_FILES.items():
            if Path(files.get("lora", "")).name == self.path.name:
                return f"no such file\nDownload it: {download_released('lora', release)}"
        near = nearest(self.path)
        return f"no such file{near}; type a .safetensors file, or its name on the Hugging Face Hub"

    @property
    def words(self) -> tuple[str, str, float]:
        """The flag to type for it."""
        return "--lora", hub_name(self.path), self.strength

    @property
    def beside(self) -> Path | None:
        """The file of PEFT's settings, where alpha is not in the weights' file."""
        path = self.path.with_name("adapter_config.json")
        return path if self.path.stem == "adapter_model" and path.is_file() else None

    @property
    def settings(self) -> dict:
        """PEFT's settings: beside its file, or in the metadata. UserError if damaged."""
        try:
            text = self.file().metadata.get("lora_adapter_metadata", "{}")
            text = self.beside.read_text() if self.beside else text
            return {name.removeprefix("transformer."): x for name, x in json.loads(text).items()}
        except (ValueError, AttributeError):
            raise UserError(f"--lora {self.path}: its PEFT settings are damaged") from None


WeightSet = tuple[Lora, ...]  # the LoRAs to merge into the model, in this order; (): none


def identity_of(loras: WeightSet) -> list:
    """[fingerprint, strength] of each LoRA, in order: the identity of a weight set."""
    # 1 and 1.0 are one weight set.
    return [[_fingerprint(lora.path, _version(lora.path)), float(lora.strength)] for lora in loras]


def _version(path: Path) -> tuple[int, int] | None:
    """(modification time, size) of a file, to detect a change."""
    state = path.stat() if path.is_file() else None
    return state and (state.st_mtime_ns, state.st_size)


@cache  # the lines of a batch repeat the same files
def _fingerprint(path: Path, version: tuple[int, int] | None) -> str:
    lora = Lora(path)
    content = lora.file().fingerprint
    return digest([content, lora.settings]) if lora.beside else content


def check_guided_stage_1(stage_1: WeightSet, stage_2: WeightSet) -> None:
    """Raise UserError for a LoRA of dev's stage 1 alone, where it has no references."""
    others = [lora for lora in stage_1 if lora.path not in {shared.path for shared in stage_2}]
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
        who = f"IC-LoRA{'s' * (len(loras) > 1)} {', '.join(str(lora.path) for lora in loras)}"
        say = "has" if len(loras) == 1 else "have"
        print_once(f"{who} {say} no reference scale: references get the size of stage 1 (factor 1)")
    space, time = (_factor(loras, name) for name in _FACTORS)
    return space, time


def dubbing_scale(lora: Lora) -> int:
    """The ratio of a stage's sides to those of the video to dub; there is none in time."""
    return _factor((lora,), _FACTORS[0], "--lora")


def detailing_scale(loras: WeightSet) -> int | None:
    """The ratio of stage 2's sides to those of the detailing LoRA's reference, stage 1's video; 2
    in a file without it. None without a LoRA."""
    if not loras:
        return None
    named = any(_FACTORS[0] in lora.file().metadata for lora in loras)
    return _factor(loras, _FACTORS[0], "--detailing-lora") if named else 2


def are_silent(loras: WeightSet) -> bool:
    """Whether no LoRA has a layer of the sound, which a reference's voice needs."""
    return not any("audio" in key for lora in loras for key in lora.file().shapes)


def _factor(loras: WeightSet, name: str, flag: str = "--ic-lora") -> int:
    factors: dict[int, Path] = {}
    for lora in loras:
        text = lora.file().metadata.get(name, "1")
        if not (text.isascii() and text.isdigit() and int(text)):
            raise UserError(
                f"{flag} {lora.path}: its metadata has {name} {text!r}, wanted a whole number"
                " from 1; download the file again"
            )
        if int(text) != 1:
            factors.setdefault(int(text), lora.path)
    if len(factors) > 1:
        listed = ", ".join(f"{factor} of {path}" for factor, path in factors.items())
        raise UserError(
            f"--ic-lora: the files need references with different {name}: {listed}; leave all but"
            " one out"
        )
    return next(iter(factors), 1)


class Adapter(NamedTuple):
    """What a file adds to a weight."""

    file: WeightFile
    method: str  # "lora", "lokr", "hada" (LoHa), or "diff" and "bias" (differences)
    parts: dict[str, str]  # names of its tensors, by part
    strength: float  # the LoRA's, times alpha / rank

    def _read(self) -> dict[str, Tensor]:
        parts = {part: self.file.read(key) for part, key in self.parts.items()}
        if len({tensor.dtype for tensor in parts.values()}) > 1:
            parts = {part: tensor.bfloat16() for part, tensor in parts.items()}
        return parts

    def delta(self) -> Tensor:
        """What is added, of the weight's shape."""
        return _delta(self.method, self._read(), self.strength)

    def added_to(self, total: Tensor) -> Tensor:
        """The sum of others and this one; a LoRA is rounded once (ltx-core 1.2.0)."""
        if self.method != "lora":
            return total + self.delta().to(total.dtype)
        parts = {part: tensor.to(total.dtype) for part, tensor in self._read().items()}
        return torch.addmm(total, parts["lora_B"], parts["lora_A"], alpha=self.strength)

    def misfit(self, checkpoint: TensorFile, name: str) -> str:
        """Why it cannot be added to a tensor of the checkpoint; empty if it can."""
        for key in self.parts.values():
            if problem := self.file.weight_problem(key):
                return f"{problem}: convert the file to BF16, or use one that is"
        shown, expected = name.removeprefix(DIFFUSION), checkpoint.shapes[name]
        if checkpoint.torch_dtype(name) != torch.bfloat16:
            return f"{shown} is not stored in BF16"
        shapes = {part: self.file.shapes[key] for part, key in self.parts.items()}
        try:
            empty = {part: torch.empty(shape, device="meta") for part, shape in shapes.items()}
            fits = _delta(self.method, empty, 1.0).shape == expected
        except KeyError as part:
            return f"its {part.args[0]} is missing"
        except RuntimeError:  # of a product
            fits = False
        got = ", ".join(f"{part} of shape {list(shape)}" for part, shape in shapes.items())
        return "" if fits else f"{got} does not fit {shown} of shape {list(expected)}"


def _delta(method: str, parts: Mapping[str, Tensor], strength: float) -> Tensor:
    def factor(name: str) -> Tensor:
        if name in parts or f"{name}_b" not in parts:
            return parts[name].float()
        return parts[f"{name}_a"].float() @ parts[f"{name}_b"].float()

    if method == "lora":
        return (parts["lora_B"] * strength) @ parts["lora_A"]
    if method == "lokr":
        return torch.kron(factor("lokr_w1"), factor("lokr_w2")) * strength
    if method == "hada":
        return factor("hada_w1") * factor("hada_w2") * strength
    return parts[method].float() * strength


def _spellings(checkpoint: TensorFile) -> dict[str, str]:
    """The tensors that a LoRA may change, by all spellings of their names; "" for shared ones."""
    keys: dict[str, str] = {}
    for key in checkpoint.shapes:
        if rename(SHARDED_MODELS["dit"], key) or rename(SHARDED_MODELS["gemma3"], key):
            plain = diffusers = key.removeprefix(DIFFUSION)
            for old, new in _DIFFUSERS.items():
                diffusers = re.sub(old, new, diffusers)
            for spelling in {plain, plain.replace(*_MUSUBI), diffusers}:
                spelling = spelling.replace(".", "_")
                keys[spelling] = "" if spelling in keys else key
    return keys


def _find(spellings: dict[str, str], layer: str, ends: tuple[str, ...] = ("_weight", "")) -> str:
    """The checkpoint's name of a tensor of a LoRA's layer; "" if it has none."""
    layer = layer.replace(".", "_")
    key = next(filter(None, (spellings.get(layer + end) for end in ends)), "")
    prefix = _PREFIX.match(layer)
    return key if key or not prefix else _find(spellings, layer[prefix.end() :], ends)


def _read(lora: Lora, checkpoint: TensorFile) -> tuple[dict[str, list[Adapter]], list[str]]:
    """What a LoRA adds to the checkpoint's tensors, and the names of other models' tensors in its
    file. UserError for a file that is not of this model, with its tensors."""
    file, settings, spellings = lora.file(), lora.settings, _spellings(checkpoint)
    layers: dict[tuple[str, str], dict[str, str]] = {}  # (weight, method) -> tensors by part
    problems, others = [], []
    for key in file.shapes:
        tensor = _TENSOR.fullmatch(key)
        if not tensor or _ELSEWHERE.fullmatch(key):
            known = any(_find(spellings, key.rsplit(".", n)[0]) for n in (1, 2, 3))
            problems += [f"{key}: is not a LoRA's tensor"] if known else []
            others += [] if known else [key]
            continue
        named = filter(None, (re.fullmatch(pattern, tensor["part"]) for pattern in _PARTS))
        part = next(match.expand(_PARTS[match.re.pattern]) for match in named)
        method, ends = part.partition("_")[0], ("_bias",) if part == "bias" else ("_weight", "")
        target = _find(spellings, tensor["layer"], ends)
        if not target:
            problems.append(f"{key}: matches no weight of the model")
        elif part in ("DoRA", "OFT"):
            raise UserError(
                f"--lora {file.path} is a {part} file ({key}), which cannot be merged; wanted LoRA,"
                " LoKr, LoHa or differences"
            )
        elif part == "alpha" and math.prod(file.shapes[key]) != 1:
            problems.append(f"{key}: shape {list(file.shapes[key])}, wanted one number")
        elif (same := layers.setdefault((target, method), {}).setdefault(part, key)) != key:
            problems.append(f"{key}: same weight as {same}; leave one out")
    adapters: dict[str, list[Adapter]] = {}
    for (target, method), parts in layers.items():
        if method == "alpha":
            continue
        scale, rank = 1.0, next((file.shapes[parts[x]][0] for x in _RANKED if x in parts), 0)
        if rank and (alpha := layers.get((target, "alpha"))):
            scale = file.read(alpha["alpha"]).item() / rank
        elif rank and settings:
            scale = _scale(settings, target.removesuffix(".weight"), rank)
        adapter = Adapter(file, method, parts, lora.strength * scale)
        if problem := adapter.misfit(checkpoint, target):
            problems.append(f"{next(iter(parts.values()))}: {problem}")
        adapters.setdefault(target, []).extend([] if problem else [adapter])
    if older := next(filter(_OLDER.search, problems), ""):
        title = "is of LTX-2.0 or LTX-Video, wanted one of the checkpoint's release:"
        raise UserError(f"--lora {file.path} {title}\n  {older}")
    if problems and not any(adapters.values()):
        layer = next(iter(spellings)).removesuffix("_weight")
        problems[1:] = [f"and {len(problems) - 1} more; wanted layers such as {layer}"]
    if problems or not adapters:
        shown = few(problems, 20) or ["it has no lora_A / lora_B tensors of this model"]
        title = f"--lora {file.path} is not a LoRA of this model:"
        raise UserError("\n  ".join([title, *shown]))
    return adapters, others


def _scale(settings: dict, layer: str, rank: int) -> float:
    patterns = settings.get("alpha_pattern") or {}
    matching = (patterns[key] for key in patterns if re.fullmatch(rf"(.*\.)?({key})", layer))
    alpha = next(matching, settings.get("lora_alpha") or rank)
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


class MergedSource(Source):
    """A model's tensors with LoRAs merged in. UserError if a LoRA tensor belongs to no weight of
    the checkpoint or does not fit its shape, or if the weight is not stored in BF16."""

    def __init__(
        self, model: Model, files: list[TensorFile], loras: WeightSet, *heads: dict[str, int]
    ):
        super().__init__(model, files, *heads)
        # Weight name -> what is added to it, in the order of `loras`.
        self.adapters: dict[str, list[Adapter]] = {}
        # Those that change the connectors or the text projections.
        self.text_loras, mine = (), []
        release = getattr(files[0], "release", None)
        # Each LoRA after the first is added without rounding its product. Not run by 1.0.0.
        self.rounds_once = bool(release and release.split)
        for lora in loras:
            additions, others = _read(lora, files[0])
            ours = {name: x for key, x in additions.items() if (name := rename(model, key))}
            mine += [lora] if ours else []
            for name, adapters in ours.items():
                self.adapters.setdefault(name, []).extend(adapters)
            if any(rename(SHARDED_MODELS["gemma3"], key) for key in additions):
                self.text_loras += (lora,)
            if others:
                number = f"{len(others)} tensors of other models, such as {others[0]}"
                self.notes.append(f"--lora {lora.path}: {number}, are left out")
        self.lora_identity = identity_of((*mine,))
        self.lora_identity += ["rounded once"] * (self.rounds_once and len(mine) > 1)

    def pieces(self, name: str, bounds: list[tuple[int, int]]) -> Iterator[Tensor]:
        """Rows start..stop of a tensor for each of `bounds`; for a merged tensor, views."""
        if name not in self.adapters:
            return super().pieces(name, bounds)
        whole = self.tensor(name)
        return (whole[start:stop] for start, stop in bounds)

    def read_mapped(self, name: str) -> Tensor:
        return self.tensor(name) if name in self.adapters else super().read_mapped(name)

    def tensor(self, name: str) -> Tensor:
        """A whole merged tensor: products of slices may round differently."""
        weight, adapters = super().tensor(name), self.adapters.get(name, [])
        if not adapters:
            return weight
        if self.rounds_once:
            total = adapters[0].delta().to(weight.dtype)
            return reduce(lambda x, y: y.added_to(x), adapters[1:], total) + weight
        deltas = [adapter.delta().to(weight.dtype) for adapter in adapters]
        return (deltas[0] if len(deltas) == 1 else torch.stack(deltas).sum(dim=0)) + weight


def merged_transformer(
    checkpoint: Checkpoint, loras: WeightSet, heads: dict[str, int]
) -> MergedSource:
    """The DiT with LoRAs. Those of another release are merged if they fit, with a note."""
    release = checkpoint.release
    files = {lora: lora.file() for lora in loras}
    releases = {lora: file.named_release or release for lora, file in files.items()}
    others = {lora: other for lora, other in releases.items() if other is not release}
    try:
        source = MergedSource(SHARDED_MODELS["dit"], [checkpoint], loras, heads)
    except UserError:
        for lora in others:
            files[lora].check_release("--lora", release, release.download("lora"))
        raise
    source.notes += [
        f"--lora {lora.path} is of LTX-{other.version}, the model of LTX-{release.version}: it"
        " is merged, as all its layers fit"
        for lora, other in others.items()
    ]
    return source
