"""Programs: a model's graphs, and the order in which a backend calls them.

A program has fixed shapes (a bucket), a number of ranks and a dtype. Its modules are on the meta
device, because they are only traced; rank files provide the weights.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ltx_neuron.config.common import TEXT_TOKENS, AttentionSize
from ltx_neuron.config.diffusion import DiffusionDecoderConfig, cut, volumes
from ltx_neuron.config.gemma import GemmaConfig
from ltx_neuron.config.sound import GENERATOR_BINS, AudioDecoderConfig, VocoderConfig
from ltx_neuron.config.transformer import BUCKET_KINDS, Bucket, TransformerConfig
from ltx_neuron.config.video import Resampling, VideoDecoderConfig, VideoEncoderConfig
from ltx_neuron.models import (
    audio_decoder,
    diffusion_decoder,
    signatures,
    video_decoder,
    video_encoder,
    vocoder,
)
from ltx_neuron.models.attention import KERNELS
from ltx_neuron.models.connectors import Connectors
from ltx_neuron.models.diffusion_decoder import OF_SPAN, TIMESTEP_FEATURES, Neighbourhood
from ltx_neuron.models.dit import AncestralTail, Blocks, Head, Step, Tail, X0Tail
from ltx_neuron.models.gemma3 import Gemma3Encoder
from ltx_neuron.models.guided import Guide
from ltx_neuron.models.modulation import MODULATION_ROWS
from ltx_neuron.models.parallel import Comm, ContextParallel, Mesh
from ltx_neuron.models.signatures import FINITE, Dim, Field


class Graph(NamedTuple):
    """A module to trace (on the meta device), and the names of the fields that it takes and
    returns, both as dicts."""

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


# (graph, first block) each
Calls = tuple[tuple[str, int], ...]
# Prefix of a graph's parameter names: the part of a whole step, or the model.
_PART = re.compile(r"^(?:head|blocks|tail|decoder)\.")
_BLOCK = re.compile(
    r"((?:transformer_|res_|diff_)blocks\.|det_stages\.\d+\.)(\d+)"
)  # a graph serves any of these


@dataclass(frozen=True)
class Program:
    """A model's graphs, runs of them, and the fields that describe every named value. A run is a
    sequence of calls. A call is (graph, first block): the graph's `transformer_blocks.j`
    (of a video VAE `res_blocks.j`) has the weights of block first + j. Most programs have one run,
    "main"."""

    modules: dict[str, nn.Module]  # of the graphs by name, in the order of their calls
    runs: dict[str, Calls]
    inputs: Mapping[str, Field]  # that no graph returns before another one takes them
    returned: Mapping[str, Field]  # what the ranks divide of the fields that graphs return
    dtype: torch.dtype = torch.float32

    @property
    def graphs(self) -> dict[str, Graph]:
        return self._derived[0]

    @property
    def fields(self) -> dict[str, Field]:
        """Of every tensor that a graph takes or returns."""
        return self._derived[1]

    @cached_property
    def _derived(self) -> tuple[dict[str, Graph], dict[str, Field]]:
        """Graphs and fields, from a run of each module on meta tensors: a graph takes the fields
        that its module reads."""
        fields, graphs = dict(self.inputs), {}
        for name, module in self.modules.items():
            values = _Values(fields)
            with torch.no_grad():
                outputs = module.to(self.dtype)(values)
            for field, value in outputs.items():
                like = fields.get(field) or self.returned[field]
                got = like._replace(shape=tuple(value.shape), dtype=value.dtype)
                if fields.setdefault(field, got) != got:
                    raise ValueError(f"{name} returns {field} as {got}, wanted {fields[field]}")
            inputs = tuple(field for field in values if field in values.read)
            graphs[name] = Graph(module, inputs, tuple(outputs))
        used = {field for graph in graphs.values() for field in (*graph.inputs, *graph.outputs)}
        return graphs, {name: field for name, field in fields.items() if name in used}

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape on one rank of every weight the program's calls use."""
        return {
            weight_name(parameter, first): tuple(value.shape)
            for calls in self.runs.values()
            for name, first in calls
            for parameter, value in self.modules[name].named_parameters()
        }

    def call(
        self, graph: str, first: int, weight: Callable[[str], Tensor], values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What a graph returns for the blocks from `first` on, computed here. weight: returns a
        weight by its name in the rank files; values: the fields that the graph takes."""
        module = self.modules[graph]
        weights = {name: weight(weight_name(name, first)) for name, _ in module.named_parameters()}
        return functional_call(module, weights, (values,), strict=True)


class _Values(dict[str, Tensor]):
    """Meta tensors of fields. `read` has the names of those that a module read."""

    def __init__(self, fields: Mapping[str, Field]):
        tensors = {n: torch.empty(f.shape, dtype=f.dtype, device="meta") for n, f in fields.items()}
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default=None):
        return self[name] if name in self else default  # noqa: SIM401 - get is not []


def weight_name(parameter: str, first_block: int) -> str:
    """The name in the rank file of a graph's parameter, if the graph runs blocks first_block,
    first_block + 1, ..."""
    name = _PART.sub("", parameter)
    return _BLOCK.sub(lambda block: f"{block[1]}{int(block[2]) + first_block}", name)


def cut_graphs(runs: Mapping[str, Iterable[tuple[str, int]]]) -> set[str]:
    """The graphs that serve several groups of blocks, so that their weights differ between
    calls."""
    calls = {call for run in runs.values() for call in run}
    called = [name for name, _ in calls]
    return {name for name in called if called.count(name) > 1}


def group_size(layers: int, blocks_per_graph: int) -> int:
    """Blocks per graph: the largest divisor of the depth up to the requested number, so that all
    groups have equal size."""
    return max(n for n in range(1, min(blocks_per_graph, layers) + 1) if layers % n == 0)


def own_tokens(tokens: int, parts: int) -> int:
    """The tokens of one of several equal parts, the last of which may have padding."""
    return -(-tokens // parts)


def may_divide(bucket: Bucket, tp: int, cp: int = 1) -> bool:
    """Whether sequence parallelism is possible: the video's tokens divide evenly over the ranks, or
    context parallelism pads them."""
    return tp > 1 and bucket.video_tokens > 0 and (cp > 1 or bucket.video_tokens % tp == 0)


def dit_program(
    config: TransformerConfig,
    bucket: Bucket,
    tp: int,
    comm: Comm,
    dtype: torch.dtype,
    blocks_per_graph: int,
    attention: str = "sdpa",
    sequence_parallel: bool = False,
    context: ContextParallel | None = None,
) -> Program:
    """The DiT step of a bucket; blocks_per_graph 0 is one graph for the whole step. attention is a
    key of KERNELS; sequence_parallel needs a bucket that `may_divide`. context: the collectives of
    context parallelism; graphs of sound alone have none. A guided bucket has two runs instead of
    "main": "pass" predicts x0, and "guide" combines the predictions and performs the Euler step."""
    count = group_size(config.num_layers, blocks_per_graph or config.num_layers)
    mesh, streams = Mesh(comm, sequence_parallel), bucket.streams
    if context and bucket.video_tokens:
        ranks = tp if sequence_parallel else 1
        own = ranks * own_tokens(bucket.video_tokens, context.groups.size * ranks)
        mesh = replace(mesh, context=replace(context, tokens=bucket.video_tokens, own=own))
    # A guided pass ends with its prediction; "guide" needs those of all passes.
    tail = X0Tail if bucket.guided else AncestralTail if bucket.ancestral else Tail
    # Shapes are those of any rank. On the meta device the released size needs no memory.
    with torch.device("meta"):
        modules: dict[str, nn.Module] = {
            "head": Head(config, mesh, streams),
            "blocks": Blocks(config, tp, mesh, KERNELS[attention], count, streams),
            "tail": tail(config, mesh, streams),
        }
    # One graph of blocks, called with each group's weights: it is compiled once, and its size does
    # not grow with the depth.
    groups = tuple(("blocks", first) for first in range(0, config.num_layers, count))
    runs = {"main": (("head", 0), *groups, ("tail", 0))}
    if blocks_per_graph == 0:
        modules, runs = {"step": Step(modules)}, {"main": (("step", 0),)}
    if bucket.guided:
        modules["guide"] = Guide(streams)
        runs = {"pass": runs["main"], "guide": (("guide", 0),)}
    kinds = {kind: getattr(bucket, kind) for kind in BUCKET_KINDS} | {
        "divided": mesh.selects,
        "padded": bool(mesh.context and mesh.context.padding),
        "held": bucket.audio_timesteps > 1,
        "keyframes": config.use_keyframes_abs_pos_embedding,
    }
    sizes = _dit_sizes(config, bucket, tp, mesh) | {"B": Dim(count, per_block=True)}
    return Program(modules, runs, *signatures.fields(signatures.DIT, sizes, dtype, kinds), dtype)


def _dit_sizes(
    config: TransformerConfig, bucket: Bucket, tp: int, mesh: Mesh
) -> dict[str, int | Dim]:
    """The letters of signatures.DIT but B."""
    tokens, in_groups = bucket.video_tokens, mesh.context is not None
    ranks, groups = tp if mesh.divided else 1, mesh.context.groups.size if mesh.context else 1
    group = mesh.context.own if mesh.context else tokens
    return {
        **dict(N=bucket.max_steps, R=MODULATION_ROWS, S=TEXT_TOKENS, P=ranks * groups),
        **_attention_sizes("v", config.video, tp),
        **dict(Tv=tokens, Uv=bucket.timesteps, Cv=config.in_channels),
        "r": Dim(1, mesh.divided, in_groups),
        "tv": Dim(group // ranks, mesh.divided, in_groups),
        "gv": Dim(group, context_split=in_groups),
        **_attention_sizes("a", config.audio, tp),
        **dict.fromkeys(("Ta", "ta", "ga"), bucket.audio_tokens),
        **dict(Ua=bucket.audio_timesteps, Ca=config.audio_in_channels),
    }


def _attention_sizes(stream: str, size: AttentionSize, tp: int) -> dict[str, int | Dim]:
    heads = Dim(size.heads // tp, split=True)
    return {f"D{stream}": size.inner, f"H{stream}": heads, f"F{stream}": size.head_dim // 2}


def gemma3_program(
    gemma: GemmaConfig,
    config: TransformerConfig,
    tokens: int,
    tp: int,
    comm: Comm,
    dtype: torch.dtype,
    states: bool,
) -> Program:
    """The text encoder for a bucket of tokens; with `states` it returns every hidden state too."""
    with torch.device("meta"):
        encoder = Gemma3Encoder(gemma, config, tp, comm, states)
    sizes = {
        "S": tokens,
        "W": gemma.hidden_size,
        "F": gemma.attention(full=False).head_dim // 2,
        "G": gemma.attention(full=True).head_dim // 2,
        "O": Dim(0, split=True),
    }
    fields = signatures.fields(signatures.GEMMA, sizes, dtype, {})
    return Program({"gemma3": encoder}, {"main": (("gemma3", 0),)}, *fields, dtype)


def connector_program(
    config: TransformerConfig, tp: int, comm: Comm, dtype: torch.dtype, attention: str = "sdpa"
) -> Program:
    """The two text connectors. attention is a key of KERNELS."""
    with torch.device("meta"):
        connectors = Connectors(config, tp, comm, KERNELS[attention])
    sizes = _attention_sizes("v", config.video_connector, tp)
    sizes |= _attention_sizes("a", config.audio_connector, tp) | {"S": TEXT_TOKENS}
    fields = signatures.fields(signatures.CONNECTORS, sizes, dtype, {})
    return Program({"connectors": connectors}, {"main": (("connectors", 0),)}, *fields, dtype)


def program_name(model: str, *sizes: int) -> str:
    """The name of a program: "vae-4x16x24" for tiles or clips of latents (f, h, w), "encoder-..."
    for tiles of pixels, "mel-57" and "vocoder-208" for spans of sound, "gemma3-..." for tokens."""
    return f"{model}-{'x'.join(map(str, sizes))}"


def tile_program(
    config: VideoDecoderConfig, tile: tuple[int, int, int], dtype: torch.dtype
) -> Program:
    """The video decoder for tiles of latents (f, h, w), one on each rank: a graph for the residual
    blocks of a stage, called for each of them."""
    names = "decoder", "up_blocks", "upsample", "tile_pixels"
    inputs = {"tile_latent": Field.of_ranks((1, config.latent_channels, *tile), dtype)}
    return _by_stages(config, 8 * config.base_channels, config.up_blocks, names, inputs)


def with_convolution(program: Program, form: str) -> Program:
    """A video VAE's program with its convolutions in a form: Profile.vae_convolution."""
    for part in (part for graph in program.modules.values() for part in graph.modules()):
        if isinstance(part, video_decoder.Convolution):
            part.whole = form == "conv3d"
    return program


def encoder_program(
    config: VideoEncoderConfig, tile: tuple[int, int, int], dtype: torch.dtype
) -> Program:
    """The video encoder for tiles of pixels (8f - 7, 32h, 32w), cut as the decoder is."""
    names = "encoder", "down_blocks", "downsample", "tile_latent"
    inputs = {"tile_pixels": Field.of_ranks((1, config.in_channels, *tile), dtype)}
    return _by_stages(config, config.latent_channels, config.down_blocks, names, inputs)


def _by_stages(
    config: VideoDecoderConfig | VideoEncoderConfig,
    channels: int,
    blocks: tuple[int | Resampling, ...],
    names: tuple[str, ...],
    inputs: dict[str, Field],
) -> Program:
    """A video VAE's program. channels: of the first stage; names: of the model, its blocks, a
    change of resolution and the last graph's tile."""
    (model, path, resample, tile), features = names, "features_0"
    parts: Any = video_decoder if model == "decoder" else video_encoder
    resampling = parts.DepthToSpace if model == "decoder" else parts.SpaceToDepth
    calls, changes = [("conv_in", 0)], itertools.count(1)
    with torch.device("meta"):
        modules = {"conv_in": (model, parts.ConvIn(config), features)}
        for number, block in enumerate(blocks):
            if isinstance(block, Resampling):
                name, module = f"{resample}_{number}", resampling(channels, block)
                channels, features = module.channels, f"features_{next(changes)}"
                calls.append((name, 0))
            else:
                name, module = f"residual_{number}", parts.Stage(channels)
                calls += [(name, first) for first in range(block)]
            modules[name] = f"{model}.{path}.{number}", module, features
        modules["conv_out"] = model, parts.ConvOut(config, channels), tile, FINITE
    return _chained(modules, inputs, (*calls, ("conv_out", 0)))


def _chained(
    modules: Mapping[str, tuple[Any, ...]], inputs: dict[str, Field], calls: Calls = ()
) -> Program:
    """A program of modules, each of which takes the first field that the previous one returns.
    modules: graph -> (name in the rank files, module, names of the fields that it returns); inputs:
    the first module's input, then others; calls: of graphs that are called more than once."""
    parts, before = {}, next(iter(inputs))
    for graph, (path, module, *outputs) in modules.items():
        parts[graph] = Part(path, module, [before], outputs)
        before = outputs[0]
    runs = {"main": calls or tuple((graph, 0) for graph in parts)}
    return Program(parts, runs, inputs, _own(), next(iter(inputs.values())).dtype)


def _own() -> Mapping[str, Field]:
    """`Program.returned` of graphs whose results differ between the ranks of the world."""
    return defaultdict(lambda: Field.of_ranks((), torch.float32))


class Part(nn.Module):
    """A graph of a decoder: a module under its name in the rank files, such as
    "audio_decoder.up.0", and the fields that are its arguments and its results."""

    def __init__(self, path: str, module: nn.Module, inputs: list[str], outputs: list[str]):
        super().__init__()
        self.path, self.inputs, self.outputs = path, inputs, outputs
        first, *names = path.split(".")
        for name in reversed(names):
            module = nn.ModuleDict({name: module})
        self.add_module(first, module)

    @property
    def module(self) -> nn.Module:
        return self.get_submodule(self.path)

    def forward(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = self.module(*(fields[name] for name in self.inputs))
        results = results if isinstance(results, tuple) else (results,)
        return dict(zip(self.outputs, results, strict=True))


def call_name(graph: str, first: int) -> str:
    """The name of the run of one call of a graph of the diffusion decoder."""
    return f"{graph}-{first}"


def diffusion_program(
    config: DiffusionDecoderConfig,
    clip: tuple[int, int, int],
    dtype: torch.dtype,
    attention: str = "matmul",
) -> Program:
    """The diffusion decoder for a clip of latents (F, h, w), a span of frames on each rank. Every
    call is a run of its own, because the host divides frames into spans anew for each. attention
    is a key of KERNELS; only `matmul` compiles with a mask."""
    attend, last, parts = KERNELS[attention], len(config.channels) - 1, diffusion_decoder
    near = [[f"{name}_{stage}" for name in Neighbourhood._fields] for stage in range(last + 1)]
    region, span = f"region_{last}", f"span_{last}"
    calls: dict[str, Iterable[int]] = {}
    with torch.device("meta"):
        modules = {"latents_in": (parts.LatentsIn(config), ["latent_frames"], ["span_0"])}
        for stage, upsampling in enumerate(config.upsamplings):
            block, inputs = f"stage_{stage}", [f"region_{stage}", *near[stage]]
            modules[block] = parts.Stage(config, stage, attend), inputs, [f"span_{stage}"]
            calls[block] = range(config.depths[stage])
            module = parts.PixelShuffle(config.channels[stage], stage, upsampling)
            fields = [f"features_{stage}"], [f"upsampled_{stage}"]
            modules[f"upsample_{stage}"] = module, *fields
        modules["noise_in"] = parts.NoiseIn(config), ["noise", "context"], [span]
        inputs = [region, "timestep", "context", *near[last]]
        modules["denoise"] = parts.Denoise(config, attend), inputs, [span]
        inputs = [region, "timestep", *near[last]]
        modules["pixels_out"] = parts.PixelsOut(config, attend), inputs, ["patches", FINITE]
    final = config.depths[last] - 1
    calls |= {"denoise": range(final), "pixels_out": [final]}
    graphs = {name: Part("decoder", *part) for name, part in modules.items()}
    named = [(name, first) for name in graphs for first in calls.get(name, [0])]
    runs = {call_name(*call): (call,) for call in named}
    return Program(graphs, runs, _diffusion_inputs(config, clip, dtype), _own(), dtype)


def _diffusion_inputs(
    config: DiffusionDecoderConfig, clip: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Field]:
    """Inputs of the diffusion decoder's graphs. Ranks have a span of frames each."""
    inputs = {"timestep": Field((1, TIMESTEP_FEATURES), dtype)}
    for stage, (frames, *picture) in enumerate(volumes(config, clip)):
        channels, kernel = config.channels[stage], config.kernels[stage]
        times = cut(frames, config.span, kernel[0])
        shapes = {
            f"region_{stage}": (times.window, *picture, channels),
            f"features_{stage}": (times.size, *picture, channels),
            "context": (times.size, *picture, channels),  # of the last stage, as is the noise
            "noise": (times.size, *picture, config.patch_channels),
        }
        if stage == 0:
            shapes["latent_frames"] = times.size, *picture, config.latent_channels
        inputs |= {name: Field.of_ranks(shape, dtype) for name, shape in shapes.items()}
        sides = [cut(n, config.tile, k) for n, k in zip(picture, kernel[1:], strict=True)]
        shapes = [(times.size, times.window)] * 2
        shapes += [(len(side.starts), side.size, side.window) for side in sides]
        turned = zip((times.window, *picture), config.rope_split, strict=True)
        shapes += [(2, positions, channels // 2) for positions, channels in turned]
        for name, shape in zip(Neighbourhood._fields, shapes, strict=True):
            field = Field.of_ranks if name in OF_SPAN else Field
            inputs[f"{name}_{stage}"] = field(shape, torch.float32)
    return inputs


def spectrogram_program(config: AudioDecoderConfig, latents: int) -> Program:
    """The mel decoder for one span of `latents` latents per rank, a graph per level."""
    levels = [*reversed(range(len(config.multipliers)))]
    widths = [config.base_channels * config.multipliers[level] for level in levels]
    path, before = "audio_decoder", (widths[0], *widths)
    with torch.device("meta"):
        modules = {"mel_in": (path, audio_decoder.ConvIn(config, widths[0]), "features_0")}
        for stage, level in enumerate(levels, 1):
            sizes = before[stage - 1], widths[stage - 1], config.blocks
            module = audio_decoder.Level(*sizes, level > 0)
            modules[f"mel_level_{level}"] = f"{path}.up.{level}", module, f"features_{stage}"
        modules["mel_out"] = path, audio_decoder.ConvOut(config, widths[-1]), "span_mel", FINITE
    shape = 1, config.latent_channels, latents, config.latent_bins
    return _chained(modules, {"span_latent": Field.of_ranks(shape, torch.float32)})


def waveform_program(config: VocoderConfig, rows: int) -> Program:
    """The vocoder for one span of `rows` mel spectrogram rows per rank, a graph per upsampling."""
    generators = {"vocoder": config.vocoder, "bwe_generator": config.bwe}
    modules, features = {}, (f"features_{stage}" for stage in itertools.count())
    with torch.device("meta"):
        for name, generator in generators.items():
            inner = name == "vocoder"
            pre = vocoder.ConvPre(generator) if inner else vocoder.ConvPreOfWaveform(config)
            post = vocoder.ConvPost(generator) if inner else vocoder.AddWaveform(config)
            results = ["low_waveform"] if inner else ["span_waveform", FINITE]
            modules[f"{name}_in"] = name, pre, next(features)
            for number in range(len(generator.rates)):
                modules[f"{name}_{number}"] = name, vocoder.Stage(generator, number), next(features)
            modules[f"{name}_out"] = name, post, *results
    inputs = {
        "span_mel": Field.of_ranks((1, 2, rows, GENERATOR_BINS), torch.float32),
        "resampling": Field(config.resampling, torch.float32),
    }
    program = _chained(modules, inputs)
    last: Any = program.modules["bwe_generator_out"]
    last.inputs += ["low_waveform", "resampling"]
    return program
