"""The cost of a step, counted in the real graphs: head, one block and tail are exported at full
width on the meta device, and the block's counts are multiplied."""

import dataclasses
import math
from functools import cache
from typing import Any

import torch

from ltx_neuron.backends import export, mesh, registry
from ltx_neuron.config.gemma import GemmaConfig
from ltx_neuron.config.profiles import PROFILES, Profile
from ltx_neuron.config.transformer import Bucket, TransformerConfig
from ltx_neuron.models import programs
from ltx_neuron.models.attention import rows_at_once


@cache
def text_weights(gemma: GemmaConfig, config: TransformerConfig, tp: int) -> dict[str, int]:
    """Numbers in one rank's "gemma3" and "connectors"."""
    comm, dtype = export.TorchDistComm(tp), torch.bfloat16
    with export.fake_process_group(tp):
        parts = {
            "gemma3": programs.gemma3_program(gemma, config, 128, tp, comm, dtype, states=False),
            "connectors": programs.connector_program(config, tp, comm, dtype),
        }
    return {
        name: sum(map(math.prod, program.weights().values())) for name, program in parts.items()
    }


def score_bytes(
    config: TransformerConfig, bucket: Bucket, profile: Profile, tp: int
) -> tuple[int, int]:
    """Bytes of the video's attention scores in fp32, for all heads of a rank: materialized at once,
    and computed in total; 0 if a flash kernel computes them."""
    heads, tokens = config.video.heads // tp, bucket.video_tokens
    queries = programs.own_tokens(tokens, profile.context_parallel)
    masked = bucket.biased and min(queries, rows_at_once(heads, tokens))
    rows = {"matmul": queries, "nki": masked}
    row, rows_held = 4 * heads * tokens, rows.get(profile.attention, 0)
    return row * rows_held, row * queries if rows_held else 0


def step_launches(config: TransformerConfig, blocks_per_graph: int) -> int:
    """Graphs that a step launches: the whole step, or head, groups of blocks and tail."""
    if not blocks_per_graph:
        return 1
    return 2 + config.num_layers // programs.group_size(config.num_layers, blocks_per_graph)


def step_cost(
    config: TransformerConfig,
    bucket: Bucket,
    profile: Profile,
    tp: int,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
) -> tuple[programs.Program, dict[str, Any]]:
    """A bucket's program, and the cost of a step for one rank: sums over its calls, and maxima
    for peak_bytes and the largest collective. moved_bytes: sent by the rank in its
    tensor-parallel group. weight_bytes, weight_tensors: its weights. inputs: the most other
    tensors of a graph. score_bytes: to write and read attention's scores."""
    # The fields of a profile that the counts depend on. NxD's graphs are not exported.
    divided = {"attention": profile.attention, "context_parallel": profile.context_parallel}
    counted = dataclasses.replace(PROFILES["cpu"], **divided)
    with export.fake_process_group(profile.world_size(tp), groups=mesh.groups(counted, tp)):
        return _step_cost(config, bucket, counted, tp, dtype, sequence_parallel)


@cache
def _step_cost(
    config: TransformerConfig,
    bucket: Bucket,
    profile: Profile,
    tp: int,
    dtype: torch.dtype,
    sequence_parallel: bool,
) -> tuple[programs.Program, dict[str, Any]]:
    how = dtype, 1, profile.attention, sequence_parallel, registry.context(profile, tp)
    program = programs.dit_program(config, bucket, tp, registry.comm(profile, tp), *how)
    exported = {
        name: export.trace(program, name, dtype) for name in program.graphs if name != "guide"
    }
    costs = {
        name: export.cost(graph) | {"moved_bytes": _moved_bytes(graph, tp)}
        for name, graph in exported.items()
    }
    called = [name for name, _ in next(iter(program.runs.values()))]
    sums = {key: sum(costs[name][key] for name in called) for key in costs[called[0]]}
    modules = [program.graphs[name].module for name in called]
    weights = [weight.numel() for module in modules for weight in module.parameters()]
    largest = {
        "weight_bytes": sum(weights) * dtype.itemsize,
        "weight_tensors": len(weights),
        "score_bytes": 2 * score_bytes(config, bucket, profile, tp)[1] * config.num_layers,
        "inputs": max(len(graph.inputs) for graph in program.graphs.values()),
        "peak_bytes": max(costs[name]["peak_bytes"] for name in called),
        "largest_collective_bytes": max(map(export.largest_collective, exported.values())),
    }
    return program, sums | largest


def _moved_bytes(exported: torch.export.ExportedProgram, tp: int) -> float:
    """Bytes that a rank sends in collectives of its tensor-parallel group. A ring moves (tp - 1) /
    tp of a reduce-scatter's input, of an all-gather's output, of an all-reduce's both."""
    moved = 0.0
    for node in exported.graph.nodes:
        if node.args and node.args[-1] == mesh.WORLD:
            argument, result = node.args[0].meta["val"].nbytes, node.meta["val"].nbytes
            moved += (tp - 1) / tp * (2 * argument if argument == result else max(argument, result))
    return moved
