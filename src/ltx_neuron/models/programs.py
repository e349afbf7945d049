"""Programs: a model's graphs, and the order in which a backend calls them.

A program has fixed shapes (a bucket), a number of ranks and a dtype. Its modules are on the meta
device, because they are only traced; rank files provide the weights.
"""

import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ltx_neuron.config.diffusion import DiffusionDecoderConfig
from ltx_neuron.config.gemma import GemmaConfig
from ltx_neuron.config.sound import AudioDecoderConfig, VocoderConfig
from ltx_neuron.config.transformer import STREAMS, Bucket, TransformerConfig
from ltx_neuron.config.video import Resampling, VideoDecoderConfig, VideoEncoderConfig
from ltx_neuron.models import (
    audio_decoder,
    diffusion_decoder,
    signatures,
    video_decoder,
    video_encoder,
    vocoder,
)
from ltx_neuron.models.ancestral import AncestralTail
from ltx_neuron.models.attention import KERNELS
from ltx_neuron.models.connectors import Connectors
from ltx_neuron.models.dit import Blocks, Head, Step, Tail, X0Tail
from ltx_neuron.models.gemma3 import Gemma3Encoder
from ltx_neuron.models.guided import Guide
from ltx_neuron.models.parallel import Comm, ContextParallel, Mesh
from ltx_neuron.models.signatures import Field, own_tokens, stage_features


class Graph(NamedTuple):
    """A module to trace (on the meta device) and the named values it takes and returns."""

    module: nn.Module
    inputs: type
    outputs: type


# (graph, first block) each
Calls = tuple[tuple[str, int], ...]
# Prefix of a graph's parameter names: the part of a whole step, or the model.
_PART = re.compile(r"^(?:head|blocks|tail|decoder)\.")
_BLOCK = re.compile(
    r"((?:transformer_|res_|diff_)blocks\.|det_stages\.\d+\.)(\d+)"
)  # a graph serves any of these


@dataclass(frozen=True)
class Program:
    """Graphs by name, runs of them, and the fields that describe every named value.

    A run is a sequence of calls. A call is (graph, first block): the graph's `transformer_blocks.j`
    (of a video VAE `res_blocks.j`) has the weights of block first + j. Most programs have one
    run, "main".
    """

    graphs: dict[str, Graph]
    runs: dict[str, Calls]
    fields: dict[str, Field]

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape on one rank of every weight the program's calls use."""
        return {
            weight_name(parameter, first): tuple(value.shape)
            for calls in self.runs.values()
            for name, first in calls
            for parameter, value in self.graphs[name].module.named_parameters()
        }


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
    context parallelism; graphs of sound alone have none.

    A guided bucket has two runs instead of "main": "pass" predicts x0, and "guide" combines the
    predictions and performs the Euler step.
    """
    count = group_size(config.num_layers, blocks_per_graph or config.num_layers)
    mesh = _mesh(bucket, tp, comm, sequence_parallel, context)
    cp = mesh.context.groups.size if mesh.context else 1
    fields = signatures.dit_fields(config, bucket, tp, dtype, sequence_parallel, cp)
    kinds = _kinds(config, bucket, mesh)
    inputs = {
        "head": signatures.HeadInputs,
        "blocks": signatures.BlockInputs,
        "tail": signatures.TailInputs,
    }
    streams = bucket.streams
    of_streams = partial(signatures.of_streams, streams=streams)
    inputs = {
        part: of_streams(signatures.extended(base, part, kinds)) for part, base in inputs.items()
    }
    head_outputs, tail_outputs = signatures.HeadOutputs, signatures.TailOutputs
    tail: type[X0Tail] = AncestralTail if bucket.ancestral else Tail
    if bucket.guided:
        fields |= signatures.guided_fields(config, bucket, tp, dtype, count)
        # A pass ends with its prediction; "guide" needs those of all passes.
        head_outputs, tail = signatures.GuidedHeadOutputs, X0Tail
        tail_outputs = signatures.X0Outputs
    if streams != STREAMS:
        fields = {name: fields[name] for name in signatures.fields_of(streams, fields)}
    outputs = [*map(of_streams, (head_outputs, signatures.BlockOutputs, tail_outputs))]
    # Shapes are those of any rank. On the meta device the released size needs no memory.
    with torch.device("meta"):
        modules = {
            "head": Head(config, mesh, streams),
            "blocks": Blocks(config, tp, mesh, KERNELS[attention], count, streams),
            "tail": tail(config, mesh, streams),
        }
    if blocks_per_graph == 0:
        parts = tuple(inputs.values())
        whole = signatures.step_inputs(parts, head_outputs)
        graphs = {"step": Graph(Step(modules, parts), whole, outputs[-1])}
        calls = (("step", 0),)
    else:
        graphs = {
            part: Graph(module, inputs[part], returned)
            for (part, module), returned in zip(modules.items(), outputs, strict=True)
        }
        # One graph of blocks, called with each group's weights: it is compiled once, and its size
        # does not grow with the depth.
        groups = tuple(("blocks", first) for first in range(0, config.num_layers, count))
        calls = (("head", 0), *groups, ("tail", 0))
    if not bucket.guided:
        return Program(graphs, {"main": calls}, fields)
    guide = signatures.extended(signatures.GuideInputs, "guide", kinds)
    graphs["guide"] = Graph(Guide(), of_streams(guide), of_streams(signatures.GuideOutputs))
    return Program(graphs, {"pass": calls, "guide": (("guide", 0),)}, fields)


def _mesh(
    bucket: Bucket, tp: int, comm: Comm, sequence_parallel: bool, context: ContextParallel | None
) -> Mesh:
    """The mesh of a bucket's graphs."""
    if context is None or not bucket.video_tokens:
        return Mesh(comm, sequence_parallel)
    ranks = tp if sequence_parallel else 1
    own = ranks * own_tokens(bucket.video_tokens, context.groups.size * ranks)
    return Mesh(comm, sequence_parallel, replace(context, tokens=bucket.video_tokens, own=own))


def _kinds(config: TransformerConfig, bucket: Bucket, mesh: Mesh) -> tuple[str, ...]:
    """The kinds of a DiT's graphs, which have further inputs (signatures.extended)."""
    flags = {
        "guided": bucket.guided,
        "divided": mesh.selects,
        "padded": bool(mesh.context and mesh.context.padding),
        "masked": bucket.audio_timesteps > 1,
        "biased": bucket.biased,
        "nag": bucket.nag,
        "identity": bucket.identity,
        "keyframes": config.use_keyframes_abs_pos_embedding,
        "ancestral": bucket.ancestral,
    }
    return tuple(kind for kind, applies in flags.items() if applies)


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
    outputs = signatures.Gemma3OutputsWithStates if states else signatures.Gemma3Outputs
    graph = Graph(encoder, signatures.Gemma3Inputs, outputs)
    fields = signatures.gemma3_fields(gemma, config, tokens, tp, dtype)
    return Program({"gemma3": graph}, {"main": (("gemma3", 0),)}, fields)


def connector_program(
    config: TransformerConfig, tp: int, comm: Comm, dtype: torch.dtype, attention: str = "sdpa"
) -> Program:
    """The two text connectors. attention is a key of KERNELS."""
    with torch.device("meta"):
        connectors = Connectors(config, tp, comm, KERNELS[attention])
    graph = Graph(connectors, signatures.ConnectorInputs, signatures.ConnectorOutputs)
    fields = signatures.connector_fields(config, tp, dtype)
    return Program({"connectors": graph}, {"main": (("connectors", 0),)}, fields)


def tile_program_name(tile: tuple[int, int, int]) -> str:
    """The name of the program that decodes tiles, or clips by diffusion, of latents (f, h, w)."""
    return f"vae-{'x'.join(map(str, tile))}"


def tile_program(
    config: VideoDecoderConfig, tile: tuple[int, int, int], dtype: torch.dtype
) -> Program:
    """The video decoder for tiles of latents (f, h, w), one on each rank: a graph for the residual
    blocks of a stage, called for each of them."""
    made = video_decoder
    parts = made.ConvIn, made.Stage, made.DepthToSpace, made.ConvOut
    names = "decoder", "up_blocks", "upsample"
    ends = signatures.TileInputs, signatures.TileOutputs
    fields = signatures.tile_fields(config, tile, dtype)
    return _by_stages(config, config.up_blocks, names, parts, ends, fields)


def with_convolution(program: Program, form: str) -> Program:
    """A video VAE's program with its convolutions in a form: Profile.vae_convolution."""
    for part in (part for graph in program.graphs.values() for part in graph.module.modules()):
        if isinstance(part, video_decoder.Convolution):
            part.whole = form == "conv3d"
    return program


def encoder_program_name(tile: tuple[int, int, int]) -> str:
    """The name of the program that encodes tiles of pixels (frames, rows, columns)."""
    return f"encoder-{'x'.join(map(str, tile))}"


def encoder_program(
    config: VideoEncoderConfig, tile: tuple[int, int, int], dtype: torch.dtype
) -> Program:
    """The video encoder for tiles of pixels (8f - 7, 32h, 32w), cut as the decoder is."""
    made = video_encoder
    parts = made.ConvIn, made.Stage, made.SpaceToDepth, made.ConvOut
    names = "encoder", "down_blocks", "downsample"
    ends = signatures.EncoderInputs, signatures.EncoderOutputs
    fields = signatures.encoder_fields(config, tile, dtype)
    return _by_stages(config, config.down_blocks, names, parts, ends, fields)


def _by_stages(
    config: VideoDecoderConfig | VideoEncoderConfig,
    blocks: tuple[int | Resampling, ...],
    names: tuple[str, str, str],
    parts: tuple[Callable[..., nn.Module], ...],
    ends: tuple[type, type],
    fields: dict[str, Field],
) -> Program:
    """A video VAE's program. names: of the model, its blocks and a change of resolution; parts:
    modules of the first convolution, a stage, a change of resolution and the last convolution;
    ends: what the first graph takes and the last one returns."""
    (model, path, resample), stage = names, 0
    conv_in, residual, resampling, conv_out = parts
    chain, calls = [ends[0], stage_features(0)], [("conv_in", 0)]
    with torch.device("meta"):
        modules = {"conv_in": (model, conv_in(config))}
        for number, block in enumerate(blocks):
            channels = fields[f"features_{stage}"].shape[1]
            if isinstance(block, Resampling):
                stage += 1
                name, module = f"{resample}_{number}", resampling(channels, block)
                calls.append((name, 0))
            else:
                name, module = f"residual_{number}", residual(channels)
                calls += [(name, first) for first in range(block)]
            modules[name] = f"{model}.{path}.{number}", module
            chain.append(stage_features(stage))
        channels = fields[f"features_{stage}"].shape[1]
        modules["conv_out"] = model, conv_out(config, channels)
    calls.append(("conv_out", 0))
    return _chained(modules, [*chain, ends[1]], fields, tuple(calls))


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
    attend, last, made = KERNELS[attention], len(config.channels) - 1, diffusion_decoder
    spans = [*map(signatures.span_outputs, range(last + 1))]
    blocks = partial(signatures.diffusion_inputs, last, "timestep")
    latents, noise = signatures.LatentsInInputs, signatures.NoiseInInputs
    calls: dict[str, Iterable[int]] = {}
    with torch.device("meta"):
        modules = {"latents_in": (made.LatentsIn(config), latents, spans[0])}
        for stage, upsampling in enumerate(config.upsamplings):
            block, inputs = f"stage_{stage}", signatures.diffusion_inputs(stage)
            modules[block] = made.Stage(config, stage, attend), inputs, spans[stage]
            calls[block] = range(config.depths[stage])
            module = made.PixelShuffle(config.channels[stage], stage, upsampling)
            larger = namedtuple("Upsampled", f"upsampled_{stage}")
            modules[f"upsample_{stage}"] = module, stage_features(stage), larger
        modules["noise_in"] = made.NoiseIn(config), noise, spans[last]
        modules["denoise"] = made.Denoise(config, attend), blocks("context"), spans[last]
        modules["pixels_out"] = made.PixelsOut(config, attend), blocks(), signatures.PatchOutputs
    final = config.depths[last] - 1
    calls |= {"denoise": range(final), "pixels_out": [final]}
    graphs = {
        name: Graph(Part("decoder", module, after), before, after)
        for name, (module, before, after) in modules.items()
    }
    named = [(name, first) for name in graphs for first in calls.get(name, [0])]
    runs = {call_name(*call): (call,) for call in named}
    return Program(graphs, runs, signatures.diffusion_fields(config, clip, dtype))


class Part(nn.Module):
    """A graph of a decoder: a module under its name in the rank files, such as
    "audio_decoder.up.0"."""

    def __init__(self, path: str, module: nn.Module, outputs: type):
        super().__init__()
        self.path, self.outputs = path, outputs
        first, *names = path.split(".")
        for name in reversed(names):
            module = nn.ModuleDict({name: module})
        self.add_module(first, module)

    @property
    def module(self) -> nn.Module:
        return self.get_submodule(self.path)

    def forward(self, inputs: tuple) -> tuple:
        returned = self.module(*inputs)
        return self.outputs(*returned if isinstance(returned, tuple) else (returned,))


def spectrogram_program_name(latents: int) -> str:
    """The name of the program that decodes spans of `latents` audio latents to mel spectrograms."""
    return f"mel-{latents}"


def spectrogram_program(config: AudioDecoderConfig, latents: int) -> Program:
    """The mel decoder for one span of `latents` latents per rank, a graph per level."""
    levels = [*reversed(range(len(config.multipliers)))]
    widths = [config.base_channels * config.multipliers[level] for level in levels]
    path = "audio_decoder"
    with torch.device("meta"):
        modules = {"mel_in": (path, audio_decoder.ConvIn(config, widths[0]))}
        for level, inputs, outputs in zip(levels, (widths[0], *widths), widths, strict=False):
            module = audio_decoder.Level(inputs, outputs, config.blocks, level > 0)
            modules[f"mel_level_{level}"] = f"{path}.up.{level}", module
        modules["mel_out"] = path, audio_decoder.ConvOut(config, widths[-1])
    between = map(stage_features, range(len(modules) - 1))
    chain = [signatures.SpectrogramInputs, *between, signatures.SpectrogramOutputs]
    return _chained(modules, chain, signatures.spectrogram_fields(config, latents))


def waveform_program_name(rows: int) -> str:
    """The name of the program that decodes spans of `rows` spectrogram rows to waveforms."""
    return f"vocoder-{rows}"


def waveform_program(config: VocoderConfig, rows: int) -> Program:
    """The vocoder for one span of `rows` mel spectrogram rows per rank, a graph per upsampling."""
    generators = {"vocoder": config.vocoder, "bwe_generator": config.bwe}
    modules, chain, stages = {}, [signatures.VocoderInputs], 0
    with torch.device("meta"):
        for name, generator in generators.items():
            inner = name == "vocoder"
            pre = vocoder.ConvPre(generator) if inner else vocoder.ConvPreOfWaveform(config)
            post = vocoder.ConvPost(generator) if inner else vocoder.AddWaveform(config)
            modules[f"{name}_in"] = name, pre
            for number in range(len(generator.rates)):
                modules[f"{name}_{number}"] = name, vocoder.Stage(generator, number)
            modules[f"{name}_out"] = name, post
            chain += map(stage_features, range(stages, stages + len(generator.rates) + 1))
            stages += len(generator.rates) + 1
            chain.append(signatures.LowWaveform if inner else signatures.WaveformOutputs)
    program = _chained(modules, chain, signatures.waveform_fields(config, rows))
    last = program.graphs["bwe_generator_out"]
    inputs = signatures.waveform_inputs(stages - 1)
    program.graphs["bwe_generator_out"] = last._replace(inputs=inputs)
    return program


def _chained(
    modules: dict[str, tuple[str, nn.Module]],
    chain: list[type],
    fields: dict[str, Field],
    calls: Calls = (),
) -> Program:
    """A program of modules, each of which takes the previous one's output. modules: graph name ->
    (name in the rank files, module); calls: of graphs that are called more than once."""
    graphs = {
        graph: Graph(Part(path, module, after), before, after)
        for (graph, (path, module)), before, after in zip(
            modules.items(), chain, chain[1:], strict=False
        )
    }
    return Program(graphs, {"main": calls or tuple((graph, 0) for graph in graphs)}, fields)
