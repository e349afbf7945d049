"""The sections of test/device that measure: outputs of graphs, collectives, and steps."""

import statistics
from collections.abc import Iterator, Sequence

import pytest
from jobs import make_job, replace
from tiny.config import released_config

from device.bench import STEPS, Bench, Model, wide
from device.probes import CHAIN
from ltx_neuron import flags
from ltx_neuron.artifacts.workspace import of_release
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.plan import plan
from ltx_neuron.weights.model_files import ModelFiles
from ltx_neuron.weights.tensorfile import DTYPES

CHANNELS = transformer_config(released_config()).video.inner
# Collectives of a step: an operation of probes.py, whether a rank has a part of the tokens, and the channels. The
# norms have a number for each token.
COLLECTIVES = {
    "sum of a stream": ("sum", False, CHANNELS),
    "sum of its norms": ("sum", False, 1),
    "gather and scattered sum of a stream": ("gather and scatter", True, CHANNELS),
}


def outputs(bench: Bench) -> Iterator[str]:
    """Does a graph's output survive the graph's next run? Guided passes depend on it."""
    found = bench.probed("outputs")
    kept = "unchanged." if found["kept"] else "OVERWRITTEN."
    yield f"The output of a graph that a guided pass keeps, after the graph's next runs: {kept}"
    if not (found["right"] and found["kept"]):
        wrong = "guided generation combines overwritten predictions: its videos are wrong"
        pytest.fail(wrong if found["right"] else "the graph of one product gives wrong numbers", pytrace=False)


def collectives(bench: Bench, names: Sequence[str]) -> Iterator[str]:
    """These of COLLECTIVES: their own time, what a launch adds, and the bytes that a rank sends in a second."""
    if bench.tp == 1:
        pytest.skip("one rank has no collectives")
    tokens = make_job("", flags.spec(bench.args).size).buckets[-1].video_tokens
    shapes = []
    for name in names:
        kind, divided, channels = COLLECTIVES[name]
        shapes.append((kind, tokens // bench.tp if divided else tokens, channels))
    cases = [[kind, count, *shape] for kind, *shape in shapes for count in (1, CHAIN)]
    found = bench.probed("collectives", cases=cases)["cases"]
    yield from (f"{bench.tp} ranks, {tokens} tokens.", "")
    yield "| collective | tokens x channels of a rank | ms | GB/s | with its launch, ms | right |"
    yield "|---|---|---|---|---|---|"
    for name, (_, rows, channels), one, chain in zip(names, shapes, found[::2], found[1::2], strict=True):
        own_ms = (chain["ms"] - one["ms"]) / (CHAIN - 1)
        sent = 2 * (bench.tp - 1) / bench.tp * tokens * channels * DTYPES[bench.args.dtype].itemsize
        rate = f"{sent / own_ms / 1e6:.1f}" if own_ms > 0 else "-"
        yield f"| {name} | {rows} x {channels} | {own_ms:.3f} | {rate} | {one['ms']:.3f} | {one['right']} |"
    if wrong := [name for name, one in zip(names, found[::2], strict=True) if not one["right"]]:
        pytest.fail(f"wrong numbers: {', '.join(wrong)}", pytrace=False)


def wide_steps(bench: Bench) -> Iterator[str]:
    """Two blocks at full width, at the size that was typed: no checkpoint is needed."""
    model = wide(bench)._replace(size=replace(flags.spec(bench.args).size, two_stage=False))
    _, result = bench.step(model, bench.device(model), steps=STEPS)
    return times(bench, model, result)


def times(bench: Bench, model: Model, result: dict) -> Iterator[str]:
    """How long the steps of a model took, and the plan's forecast of its last stage's, without the text encoder."""
    yield f"{model.size}. Compiled in {result['compile_seconds']:.1f} s, loaded in {result['load_seconds']:.1f} s."
    for stage, (cold, *warm) in result["steps_ms"].items():
        ms = statistics.median(warm)
        yield f"{stage}: the first step {cold / 1e3:.2f} s, a warm one {ms:.1f} ms."
    files = ModelFiles(model.checkpoint)
    how = bench.profile, of_release(make_job("", model.size), files.release), bench.tp, bench.args.dtype
    expected = plan(files.checkpoint, *how, gemma=None, parts=files.config)
    if forecast := expected.stages[-1].forecast:
        span, share = f"{forecast.low:.1f} to {forecast.high:.1f} ms", ms / forecast.middle
        yield f"Forecast of this step: {span}, middle {forecast.middle:.1f}. Measured / forecast: {share:.2f}."
    else:
        yield f"Forecast: none, profile {expected.profile} has no documented limits."
