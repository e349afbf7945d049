"""The sections of test/device that measure: what the runtime does with a graph's outputs and with
memory, how long graphs, collectives and videos take, and which settings are the fastest."""

import statistics
from collections.abc import Generator, Iterator, Sequence

import pytest
from jobs import make_job, replace
from tiny.config import released_config

from device.bench import WIDE, Bench, Model, Target, full, request, wide
from device.probes import CHAIN, torus_groups
from device.report import Stopped, cell
from ltx_neuron import flags
from ltx_neuron.artifacts.workspace import of_release
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.files import read_json
from ltx_neuron.format import format_bytes
from ltx_neuron.plan import Plan, plan
from ltx_neuron.report import table
from ltx_neuron.weights.model_files import ModelFiles
from ltx_neuron.weights.tensorfile import DTYPES

RELEASED = transformer_config(released_config())
VARIANT_SECONDS = 900  # of a tuning, its compile included
PROBE_SECONDS = 240  # one process of probes.py, its compile included
# Collectives of a step: an operation of probes.py, whether a rank has a part of the tokens, and the
# channels. The norms have a number for each token.
COLLECTIVES = {
    "sum of a stream": ("sum", False, RELEASED.video.inner),
    "sum of its norms": ("sum", False, 1),
    "gather and scattered sum of a stream": ("gather and scatter", True, RELEASED.video.inner),
}


def outputs(bench: Bench) -> Iterator[str]:
    """Does a graph's output survive the graph's next run? Guided passes depend on it."""
    found = _probe(bench, "outputs", {"probe": "outputs"})
    raw = found["raw"]
    yield (
        "The output of a graph that a guided pass keeps, after the graph's next runs: "
        + ("unchanged." if found["kept"] else "OVERWRITTEN.")
    )
    if raw is None:
        yield "NxD's own output buffers: not run, the backend is another."
    else:
        yield (
            "The output that NxD's model returns, after its next run: "
            + ("unchanged." if raw else "overwritten, as this toolkit takes it to be.")
        )
    if not found["right"]:
        pytest.fail("the graph of one product gives wrong numbers")
    if not found["kept"]:
        pytest.fail("guided generation combines overwritten predictions: its videos are wrong")


def _probe(bench: Bench, name: str, content: dict) -> dict:
    """What a process of probes.py finds."""
    # Probes attend to nothing: a kernel that is missing is found by the sections that need it.
    settings = (*bench.profile.settings, "attention=matmul")
    target = Target(bench.profile.name, settings, bench.args.dtype)
    content |= {"folder": str(bench.folder / name)}
    return read_json(bench.scripted("probes", name, target, content, seconds=PROBE_SECONDS))


def collectives(bench: Bench, names: Sequence[str]) -> Iterator[str]:
    """These of COLLECTIVES alone: their own time, what a launch adds, and the bytes that a rank
    sends in a second, as the plan counts them."""
    if bench.tp == 1:
        pytest.skip("one rank has no collectives")
    tokens = make_job("", flags.spec(bench.args).size).buckets[-1].video_tokens
    own = tokens // bench.tp  # a rank's part where the tokens are divided
    shapes = {
        name: (kind, own if divided else tokens, channels)
        for name, (kind, divided, channels) in COLLECTIVES.items()
        if name in names
    }
    cases = [[kind, count, *shape] for kind, *shape in shapes.values() for count in (1, CHAIN)]
    content = {"probe": "collectives", "cases": cases, "groups": None}
    found = _probe(bench, "collectives", content)["cases"]
    yield f"{bench.tp} ranks, {tokens} tokens."
    yield ""
    yield "| collective | tokens x channels of a rank | ms | GB/s | with its launch, ms | right |"
    yield "|---|---|---|---|---|---|"
    wrong = []
    for number, (name, (_, rows, channels)) in enumerate(shapes.items()):
        one, chain = found[2 * number : 2 * number + 2]
        own_ms = (chain["ms"] - one["ms"]) / (CHAIN - 1)
        sent = 2 * (bench.tp - 1) / bench.tp * tokens * channels * DTYPES[bench.args.dtype].itemsize
        rate = f"{sent / own_ms / 1e6:.1f}" if own_ms > 0 else "-"
        yield (f"| {name} | {rows} x {channels} | {own_ms:.3f} | {rate} | {one['ms']:.3f} | {one['right']} |")
        wrong += [] if one["right"] else [name]
    if wrong:
        pytest.fail(f"wrong numbers: {', '.join(wrong)}")


def groups(bench: Bench) -> Iterator[str]:
    """Which groups of ranks have collectives on a machine of 16 chips: a process for each group,
    since one that cannot be routed may end the runtime."""
    profile = bench.profile
    if profile.device != "neuron" or profile.chips != 16:
        pytest.skip(f"16 chips are wanted, {profile.name} has {profile.chips}")
    if profile.backend != "nxd":
        pytest.skip("written for NxD alone: type --profile-set backend=nxd")
    cores = profile.cores // profile.chips
    tokens, channels = 1024, RELEASED.video.inner
    yield "| group | ranks | sum ms | gather ms | right |"
    yield "|---|---|---|---|---|"
    for number, (name, ranks) in enumerate(torus_groups(cores).items()):
        cases = [["sum", 1, tokens, channels], ["gather", 1, tokens // 32, channels]]
        content = {"probe": "collectives", "cases": cases, "groups": ranks, "tp": profile.cores}
        row = f"| {name} | {len(ranks[0])} |"
        try:
            found = _probe(bench, f"group-{number}", content)["cases"]
        except pytest.fail.Exception as failure:
            lines = str(failure).splitlines()
            yield f"{row} - | - | {cell(' '.join(dict.fromkeys((lines[0], lines[-1]))))} |"
            continue
        right = [word for word, case in zip(("sum", "gather"), found, strict=True) if case["right"]]
        right = "both" if len(right) == 2 else " ".join(right) or "NEITHER"
        yield f"{row} {found[0]['ms']:.3f} | {found[1]['ms']:.3f} | {right} |"
    yield ""
    yield "The chips are taken to be numbered row by row; neuron-ls has these neighbours:"
    yield from ("", "```", (bench.system.output("neuron-ls") or "neuron-ls is absent").rstrip())
    yield "```"


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
    """A compiled step by its graphs, the cores' memory on the way, and both as the plan forecasts
    them; returns what step_times.py found."""
    target, name = bench.device(model), f"{model.name}-step-times"
    content = request(model, model.size) | {"folder": str(bench.folder / name)}
    found = read_json(bench.scripted("step_times", name, target, content))
    cold, *warm = found["steps_ms"]
    calls, whole = found["calls"], statistics.median(warm)
    alone = sum(call["ms"] for call in calls)
    yield (f"{model.size}. Loaded in {found['load_seconds']:.1f} s; the first step took {cold / 1e3:.2f} s.")
    yield (f"A warm step: {whole:.1f} ms; its {len(calls)} launches one by one, each waited for: {alone:.1f} ms.")
    yield from ("", "| graph | launches | ms each | % of peak | collectives | MB |")
    yield "|---|---|---|---|---|---|"
    peak = bench.profile.flops(bench.tp)
    for graph in dict.fromkeys(call["graph"] for call in calls):
        own = [call for call in calls if call["graph"] == graph]
        ms, cost = statistics.median(call["ms"] for call in own), own[0]
        percent = f"{100 * cost['flops'] * bench.tp / (ms / 1e3) / peak:.1f}" if peak else "-"
        yield (
            f"| {graph} | {len(own)} | {ms:.3f} | {percent} | {cost['collectives']}"
            f" | {cost['collective_bytes'] / 1e6:.1f} |"
        )
    yield ""
    expected = planned(bench, model)
    yield from forecast_lines(expected, whole)
    yield ""
    yield from _memory(bench, found["memory"], expected.hbm_bytes_per_core)
    yield ""
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
    yield (
        f"Forecast of this step: {forecast.low:.1f} to {forecast.high:.1f} ms, middle"
        f" {forecast.middle:.1f}. Measured / forecast: {measured_ms / forecast.middle:.2f}."
    )
    yield from ("", "| part of the forecast | ms | from |", "|---|---|---|")
    for part in forecast.parts:
        yield f"| {part.name} | {part.low:.2f} to {part.high:.2f} | {cell(part.source)} |"


def _memory(bench: Bench, memory: dict[str, dict[str, int]], expected: int) -> Iterator[str]:
    """A table of the cores' memory by moment, what unloading freed, and the plan's bytes a core."""
    cores = memory["loaded"]
    if not cores:
        yield no_memory(bench)
        return
    yield from (f"| core | {' | '.join(memory)} |", "|---" * (1 + len(memory)) + "|")
    for core in cores:
        used = " | ".join(format_bytes(each.get(core, 0)) for each in memory.values())
        yield f"| {core} | {used} |"
    before, most, after = (sum(memory[moment].values()) for moment in ("before", "after the steps", "unloaded"))
    yield ""
    freed, taken = format_bytes(most - after), format_bytes(most - before)
    yield (f"Unloading freed {freed} of the {taken} that the model took. The plan has {format_bytes(expected)} a core.")


def no_memory(bench: Bench) -> str:
    """Why the cores' memory is not told."""
    untold = "neither the driver's counters nor neuron-monitor tell it"
    return f"Memory: {untold if bench.profile.device == 'neuron' else 'no Neuron device'}."


def in_turn(bench: Bench) -> list[str]:
    return _measured(bench, bench.device(full(bench)), "in-turn")


def resident(bench: Bench) -> list[str]:
    target = bench.device(full(bench))
    bench.need_device()
    settings = (*target.settings, "resident=true")
    return _measured(bench, target._replace(settings=settings), "resident")


def _measured(bench: Bench, target: Target, name: str) -> list[str]:
    """Two videos, the second one with warm caches: their times and the cores' memory."""
    model, lines = full(bench), []
    for number in (1, 2):
        run, _, perf = bench.generate(model, target, f"{name}-{number}")
        phases: dict[str, float] = {}
        for phase in perf["phases"]:
            phases[phase["name"]] = phases.get(phase["name"], 0.0) + phase["seconds"]
        steps, warm = perf["denoise_steps_ms"], perf["warm_step_ms"]
        first = next(times[0] for times in steps.values() if times)
        lines += [
            (
                f"Run {number}: {run.seconds:.1f} s with the start of the process,"
                f" {perf['end_to_end_seconds']:.1f} s end to end."
            ),
            (
                f"Cold start: Gemma3 {phases['load_gemma3']:.1f} s, DiT"
                f" {phases['load_transformer']:.1f} s, first step {first / 1e3:.2f} s."
            ),
            "",
            "| stage | steps | cold ms | warm median ms | p90 ms | device ms |",
            "|---|---|---|---|---|---|",
            *(
                f"| {stage} | {len(times)} | {times[0]:.1f} | "
                + " | ".join(f"{warm[stage][k]:.1f}" for k in ("median", "p90", "device"))
                + " |"
                for stage, times in steps.items()
                if len(times) > 1
            ),
            "",
        ]
        percent = perf["percent_of_peak"]
        lines.append(
            "Percent of the chip's bf16 peak, last stage: "
            + (f"{percent:.1f} %." if percent is not None else "not counted, this profile has no peak.")
        )
        used = ", ".join(f"{core} {format_bytes(most)}" for core, most in run.memory.items())
        lines.append(
            f"Device memory at most, by core: {used}."
            if used
            else "Memory per core: the driver has no counters; the step by its graphs has it."
        )
        lines.append("")
    return [*lines, "```", table.table(perf), "```"]


def tune(bench: Bench, model: Model) -> Iterator[str]:
    """Compiler flags, kernels and cuts in turn. What was measured until the budget ends is kept:
    the tuning goes on from there."""
    scripts = bench.scripts(model, bench.device(model))
    command = ["-m", "ltx_neuron.tune", *scripts.common, *scripts.size]
    if bench.budget.finite:  # or one that hangs takes the time of all others
        command += ["--limit", VARIANT_SECONDS]
    log = f"{model.name}-tune"
    try:
        output = bench.run(log, *command).output
    except (Stopped, KeyboardInterrupt):
        yield from ("```", bench.log(log).read_text(errors="replace").rstrip(), "```")
        raise
    _, _, found = output.rstrip().rpartition("\n\n")  # its table and what was chosen
    yield from ("```", found, "```")
