"""The sections of test/device that measure: outputs of graphs, collectives, steps and memory."""

import statistics
from collections.abc import Generator, Iterator, Sequence

import pytest
from jobs import make_job, replace
from tiny.config import released_config

from device.bench import WIDE, Bench, Model, Target, request, wide
from device.probes import CHAIN
from device.report import cell
from ltx_neuron import flags
from ltx_neuron.artifacts.workspace import of_release
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.files import read_json
from ltx_neuron.format import format_bytes
from ltx_neuron.plan import Plan, plan
from ltx_neuron.weights.model_files import ModelFiles
from ltx_neuron.weights.tensorfile import DTYPES

RELEASED = transformer_config(released_config())
# Collectives of a step: an operation of probes.py, whether a rank has a part of the tokens, and the channels. The
# norms have a number for each token.
COLLECTIVES = {
    "sum of a stream": ("sum", False, RELEASED.video.inner),
    "sum of its norms": ("sum", False, 1),
    "gather and scattered sum of a stream": ("gather and scatter", True, RELEASED.video.inner),
}


def outputs(bench: Bench) -> Iterator[str]:
    """Does a graph's output survive the graph's next run? Guided passes depend on it."""
    found = _probe(bench, "outputs", {})
    kept = "unchanged." if found["kept"] else "OVERWRITTEN."
    yield f"The output of a graph that a guided pass keeps, after the graph's next runs: {kept}"
    raw = {None: "another backend's", True: "unchanged", False: "overwritten, as expected"}[found["raw"]]
    yield f"The output that NxD's model returns, after its next run: {raw}."
    if not found["right"]:
        pytest.fail("the graph of one product gives wrong numbers")
    if not found["kept"]:
        pytest.fail("guided generation combines overwritten predictions: its videos are wrong")


def _probe(bench: Bench, name: str, content: dict) -> dict:
    # Probes attend to nothing: a kernel that is missing is found by the sections that need it.
    target = Target(bench.profile.name, (*bench.profile.settings, "attention=matmul"), bench.args.dtype)
    content |= {"probe": name, "folder": str(bench.folder / name)}
    return read_json(bench.scripted("probes", name, target, content))


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
    found = _probe(bench, "collectives", {"cases": cases})["cases"]
    yield from (f"{bench.tp} ranks, {tokens} tokens.", "")
    yield "| collective | tokens x channels of a rank | ms | GB/s | with its launch, ms | right |"
    yield "|---|---|---|---|---|---|"
    for name, (_, rows, channels), one, chain in zip(names, shapes, found[::2], found[1::2], strict=True):
        own_ms = (chain["ms"] - one["ms"]) / (CHAIN - 1)
        sent = 2 * (bench.tp - 1) / bench.tp * tokens * channels * DTYPES[bench.args.dtype].itemsize
        rate = f"{sent / own_ms / 1e6:.1f}" if own_ms > 0 else "-"
        yield f"| {name} | {rows} x {channels} | {own_ms:.3f} | {rate} | {one['ms']:.3f} | {one['right']} |"
    if wrong := [name for name, one in zip(names, found[::2], strict=True) if not one["right"]]:
        pytest.fail(f"wrong numbers: {', '.join(wrong)}")


def timed_blocks(bench: Bench) -> Model:
    """Two blocks at full width, at the size that was typed: no checkpoint is needed."""
    size = replace(flags.spec(bench.args).size, two_stage=False)
    return wide(bench)._replace(size=size)


def wide_step_times(bench: Bench, model: Model) -> Iterator[str]:
    """Their step, and what it says of all blocks."""
    found = yield from step_times(bench, model)
    blocks = sum(call["ms"] for call in found["calls"] if call["graph"] == "blocks")
    rest = sum(call["ms"] for call in found["calls"]) - blocks
    whole = rest + blocks * RELEASED.num_layers / WIDE.layers
    yield f"By these graphs a step of {RELEASED.num_layers} blocks takes {whole:.1f} ms."


def step_times(bench: Bench, model: Model) -> Generator[str, None, dict]:
    """A compiled step by its graphs, the cores' memory on the way, and both as the plan forecasts them; returns what
    step_times.py found."""
    name = f"{model.name}-step-times"
    content = request(model, model.size) | {"folder": str(bench.folder / name)}
    found = read_json(bench.scripted("step_times", name, bench.device(model), content))
    calls, (cold, *warm) = found["calls"], found["steps_ms"]
    alone, whole = sum(call["ms"] for call in calls), statistics.median(warm)
    yield f"{model.size}. Loaded in {found['load_seconds']:.1f} s; the first step took {cold / 1e3:.2f} s."
    yield f"A warm step: {whole:.1f} ms; its {len(calls)} launches one by one, each waited for: {alone:.1f} ms."
    yield from ("", "| graph | launches | ms each | % of peak | collectives | MB |", "|---|---|---|---|---|---|")
    peak = bench.profile.flops(bench.tp)
    for graph in dict.fromkeys(call["graph"] for call in calls):
        own = [call for call in calls if call["graph"] == graph]
        ms, cost = statistics.median(call["ms"] for call in own), own[0]
        percent = f"{100 * cost['flops'] * bench.tp / (ms / 1e3) / peak:.1f}" if peak else "-"
        sent = f"{cost['collectives']} | {cost['collective_bytes'] / 1e6:.1f}"
        yield f"| {graph} | {len(own)} | {ms:.3f} | {percent} | {sent} |"
    expected = planned(bench, model)
    yield from ("", *forecast_lines(expected, whole), "")
    yield from (*_memory(bench, found["memory"], expected.hbm_bytes_per_core), "")
    return found


def planned(bench: Bench, model: Model) -> Plan:
    """What `ltx-neuron plan` says of a model's step, without the text encoder."""
    files = ModelFiles(model.checkpoint)
    job = of_release(make_job("", model.size), files.release)
    how = bench.profile, job, bench.tp, bench.args.dtype
    return plan(files.checkpoint, *how, gemma=None, parts=files.config)


def forecast_lines(expected: Plan, measured_ms: float) -> Iterator[str]:
    """A measured step of the last stage beside the plan's forecast of it, whole and in parts."""
    forecast = expected.stages[-1].forecast
    if forecast is None:
        yield f"Forecast: none, profile {expected.profile} has no documented limits."
        return
    span, share = f"{forecast.low:.1f} to {forecast.high:.1f} ms", measured_ms / forecast.middle
    yield f"Forecast of this step: {span}, middle {forecast.middle:.1f}. Measured / forecast: {share:.2f}."
    yield from ("", "| part of the forecast | ms | from |", "|---|---|---|")
    for part in forecast.parts:
        yield f"| {part.name} | {part.low:.2f} to {part.high:.2f} | {cell(part.source)} |"


def _memory(bench: Bench, memory: dict[str, dict[str, int]], expected: int) -> Iterator[str]:
    """A table of the cores' memory by moment, what unloading freed, and the plan's bytes a core."""
    if not memory["loaded"]:
        untold = "the driver's counters are not at the known paths"
        yield f"Memory: {untold if bench.profile.device == 'neuron' else 'no Neuron device'}."
        return
    yield from (f"| core | {' | '.join(memory)} |", "|---" * (1 + len(memory)) + "|")
    for core in memory["loaded"]:
        used = " | ".join(format_bytes(cores.get(core, 0)) for cores in memory.values())
        yield f"| {core} | {used} |"
    before, most, after = (sum(memory[moment].values()) for moment in ("before", "after the steps", "unloaded"))
    freed, taken = format_bytes(most - after), format_bytes(most - before)
    yield ""
    yield f"Unloading freed {freed} of the {taken} that the model took. The plan has {format_bytes(expected)} a core."
