"""A generation's plan at the release's sizes: memory, the forecast of a step, a clip's phases, a machine's layouts."""

import json
import math
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from jobs import make_job, replace
from tiny.config import released_config

from ltx_neuron import plan as planning
from ltx_neuron.artifacts import build, tuned_settings
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.config.profiles import COLLECTIVES_BUFFER, Chip, resolve
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.format import columns, format_bytes, format_flops, format_seconds
from ltx_neuron.host import vae_memory
from ltx_neuron.host.loading import checkpoint_spec
from ltx_neuron.job import Job, Size
from ltx_neuron.plan import cost
from ltx_neuron.plan.__main__ import main
from ltx_neuron.plan.clip import ClipPlanner
from ltx_neuron.plan.forecast import PUBLISHED, forecast
from ltx_neuron.plan.layouts import layouts
from ltx_neuron.plan.table import clip_table, headline, layout_table, table
from ltx_neuron.report.latency import PHASES, Recorder
from ltx_neuron.report.price import Price
from ltx_neuron.sampling import conditions as inputs
from ltx_neuron.sampling.shapes import video_latent_shape
from ltx_neuron.weights.checkpoint import Checkpoint
from ltx_neuron.weights.lora import Lora

FILE = Path(__file__)  # for inputs of which nothing is read
LONG, LARGE, SHORT, SMALL = (512, 768, 121), (1024, 1536, 121), (384, 512, 25), Size(256, 256, 9)
CPU, TRN2, MACHINE = resolve("cpu"), resolve("trn2.3xlarge"), resolve("trn2.48xlarge")
CONFIG = released_config()
TRANSFORMER = transformer_config(CONFIG)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A sparse file with the header of the released DiT and VAEs: 41 GB long, a few KB on the disk."""
    from ltx_core.model.transformer import LTXModelConfigurator

    with torch.device("meta"):
        model = LTXModelConfigurator.from_config(CONFIG)
        tensors = {f"model.diffusion_model.{name}": t for name, t in model.state_dict().items()}
        for name in ("video_encoder", "video_decoder", "audio_decoder", "vocoder"):
            spec = checkpoint_spec(name, "", CONFIG, None)
            tensors |= {spec._name_in_file(key): tensor for key, tensor in spec.build().state_dict().items()}
    header, end = ({"__metadata__": {"config": json.dumps(CONFIG), "model_version": "2.3.0"}}, 0)
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("released") / "ltx-2.3.safetensors"
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return Checkpoint(path)


def job_of(size: tuple[int, int, int] = LONG, two_stage: bool = False, **fields) -> Job:
    return make_job("", Size(*size, two_stage=two_stage), **fields)


@pytest.fixture(scope="module")
def planned(released):
    """planned(size or job, profile) is the release's plan at TP 4."""

    @cache
    def plan_of(job=LONG, profile=TRN2, tp=4):
        job = job if isinstance(job, Job) else job_of(job)
        return planning.plan(released, profile, job, tp, "bfloat16")

    return plan_of


@pytest.fixture(scope="module")
def planner(planned):
    """Plans the time of a clip of 512x768x121 on a trn2.3xlarge, by what is changed of how it is run."""
    weights = cost.text_weights(planning.GEMMA_3_12B, TRANSFORMER, 4)

    def planner(job=None, profile=TRN2, **changes):
        job = job or job_of()
        run = dict(neuron_gemma=False, neuron_vae=False) | changes
        return ClipPlanner(planned(job, profile), CONFIG, weights, profile, job, **run)

    return planner


@pytest.fixture(scope="module")
def clip(planner):
    return lambda *args, **changes: planner(*args, **changes).planned()


def planned_layouts(planner, profile, **fields):
    return layouts(planner(job_of(SHORT, **fields), profile), TRANSFORMER)


def parts(plan) -> dict:
    return {part.name: part for part in plan.stages[0].forecast.parts}


# Published: shards of 9.3 GB a rank at TP=4; at 667 TF/s with 1024 text tokens, steps of 298 and 37.8 ms. Biases,
# norms and the projections outside of the blocks, which those figures leave out, are below 1 %.
@pytest.mark.parametrize(("size", "ideal_ms"), [(LONG, 298.0), (SHORT, 37.8)])
def test_the_release_at_tp_4_has_the_published_shards_and_ideal_steps(planned, size, ideal_ms):
    plan = planned(size)
    assert plan.block_weight_bytes_per_rank == pytest.approx(9.26e9, rel=0.03)
    assert plan.ideal_step_ms == pytest.approx(ideal_ms, rel=0.03)
    assert plan.flops_per_step == pytest.approx(plan.ideal_step_ms / 1e3 * 667e12)
    assert plan.fits and plan.fits_resident
    # benchmarks/rehearsal.md: 38.02 GB of the transformer, 29.88 GB of text encoder, projections and connectors.
    assert plan.disk_bytes == pytest.approx(67.90e9, rel=1e-3)


def test_a_steps_forecast_is_the_sum_of_parts_that_name_their_sources(planned):
    expected = planned().stages[0].forecast
    assert [round(ms, -1) for ms in (expected.low, expected.middle, expected.high)] == [830, 970, 1110]
    assert sum(part.low for part in expected.parts) == pytest.approx(expected.low)
    assert sum(part.high for part in expected.parts) == pytest.approx(expected.high)
    names = ["linear", "attention", "large sums", "elementwise", "waiting", "fixed", "launches"]
    ranges = [(341, 396), (120, 151), (80, 144), (103, 144), (64, 108), (120, 168), (1.4, 1.4)]
    assert [part.name for part in expected.parts] == names
    for part, both in zip(expected.parts, ranges, strict=True):
        assert (part.low, part.high) == pytest.approx(both, rel=0.02)
        assert re.search(r"assumed|published|CPU|\(", part.source)
    assert "forecast step         830 to 1,100 ms, middle 970: a forecast, not measured" in table(planned())


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda step: f"{step['source']} {step['size']} {step['ms']}")
def test_a_published_step_is_in_our_range_and_in_the_docs_unless_its_stack_works_otherwise(published):
    (low, high), tp, cp, size = (published[name] for name in ("ms", "tp", "cp", "size"))
    # Divided as its stack divided it.
    which = replace(MACHINE, backend="torchdist", context_parallel=cp, blocks_per_graph=min(48, 4 * cp))
    _, step = cost.step_cost(TRANSFORMER, job_of(size).buckets[0], which, tp, torch.bfloat16)
    ours = forecast(which, tp, 48, step, cost.step_launches(TRANSFORMER, which.blocks_per_graph))
    assert math.prod(video_latent_shape(*size)) == published["tokens"]
    assert (ours.low <= low and high <= ours.high) != bool(published["differs"])
    ms = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    both = " to ".join(f"{float(f'{limit:.2g}'):,.0f}" for limit in (ours.low, ours.high))
    cells = "x".join(map(str, size)), f"{published['tokens']:,}", f"TP {tp}{f', context {cp}' * (cp > 1)}", ms, both
    row = f"| {' | '.join(cells)} | "
    rows = [line for line in (ROOT / "docs/results.md").read_text().splitlines() if line.startswith(row)]
    source, date = published["source"].partition(",")[0], published["date"]
    row = next(line for line in rows if source in line and date in line)
    assert ("outside" in row) == bool(published["differs"])


def test_a_plan_past_every_published_step_says_so(planned, planner):
    message = "beyond every published measurement, by tokens or chips"
    assert message not in table(planned())
    assert message in table(planned(LARGE)) and message in table(planned(LONG, resolve("trn2.48xlarge-cp8")))
    rows = planned_layouts(planner, MACHINE)
    assert [row.name for row in rows if row.measured] == ["one chip", "context 2", "context 4"]
    text = layout_table(rows, "trn2.48xlarge")
    assert f"* {message}" in text and "context 8 * " in text
    assert "shortest clip: context 4; type" in text  # of the measured ones


def test_a_launch_costs_nxds_python_by_tensors_and_ranks_and_torchneuron_nothing(planned):
    """As measured with NxD's source on a CPU: 0.54 ms a step of 12 launches with 359 tensors."""

    def launches(name, *settings):
        return parts(planned(LONG, resolve(name, settings)))["launches"]

    nxd, torchneuron = (launches("trn2.3xlarge", f"backend={name}") for name in ("nxd", "torchdist"))
    python = nxd.high - torchneuron.high
    assert nxd.low - torchneuron.low < 0.54 < python
    assert torchneuron.low == torchneuron.high == pytest.approx(14 * 0.1)
    assert "NxD's Python" in nxd.source and "NxD" not in torchneuron.source
    on_four_chips = launches("trn2.48xlarge-cp4", "backend=nxd")
    assert on_four_chips.high - 5 * 7.8 == pytest.approx(4 * python, rel=0.05)
    whole = launches("trn2.48xlarge", "backend=nxd", "blocks_per_graph=0")
    saved = 13 * (0.1 + 15 * 4 * 0.053e-3)  # 15 tensors besides the weights
    assert launches("trn2.48xlarge", "backend=nxd").high - whole.high == pytest.approx(saved)


def test_the_forecast_follows_divided_tokens_more_chips_and_scores_that_are_held(planned):
    plain, divided = planned(LONG, MACHINE), planned(LONG, resolve("trn2.48xlarge", ("sequence_parallel=true",)))
    step = divided.stages[0].forecast
    assert 750 < step.low < 780 and 1000 < step.high < 1060
    assert "sequence parallel     yes; without it " in table(divided)
    assert parts(planned(LONG, MACHINE, tp=8))["large sums"].high > parts(plain)["large sums"].high
    held = planned(LONG, resolve("trn2.48xlarge", ("attention=matmul",)))
    longer = parts(held)["attention"].high - parts(plain)["attention"].high
    assert longer == pytest.approx(held.stages[0].score_ms)
    shared = planned(LONG, resolve("trn2.48xlarge", ("attention=matmul", "context_parallel=4")))
    assert 4 * shared.stages[0].score_bytes_per_core == held.stages[0].score_bytes_per_core


def test_the_runtimes_buffer_holds_the_usual_sizes_sums_and_a_larger_one_names_its_setting(planned):
    usual, setting = planned(), f"environment.{COLLECTIVES_BUFFER}={192 * 2**20}"
    assert usual.stages[0].largest_collective_bytes == 48 * 2**20  # 6144 tokens of 4096 in bf16
    assert usual.collectives_buffer_bytes > 48 * 2**20 and COLLECTIVES_BUFFER not in table(usual)
    assert f"--profile-set {setting}" in table(planned(LARGE))
    assert COLLECTIVES_BUFFER not in table(planned(LARGE, resolve("trn2.3xlarge", (setting,))))
    launches = 2 + 48 + 1  # head, blocks, tail; guide: rings that are too short are built again at every launch
    assert int(dict(TRN2.environment)["NEURON_RT_IO_RING_CACHE_SIZE"]) >= launches


def test_what_does_not_fit_names_a_size_that_does(planned):
    small = replace(TRN2, chip=replace(TRN2.chip, memory_bytes=4 * int(12.0e9)))
    plan = planned(LARGE, small)
    nearest = tuple(map(int, re.findall(r"\d+", plan.nearest_that_fits)))
    assert plan.fits is False and planned(nearest, small).fits
    assert nearest[:2] == LARGE[:2] and nearest[2] < 121
    assert "does not fit; the nearest size that fits" in headline(plan, 9.6)
    assert headline(plan, 9.6).endswith("; a warm clip takes about 10 s")
    none = planned(make_job("", SMALL), tp=1)
    assert none.nearest_that_fits is None and "does not fit at any length of this size" in headline(none, None)


def test_models_that_do_not_fit_a_core_are_refused_before_anything_loads(released):
    for settings, tp, refusal in (
        (["resident=true"], 4, None),
        (["resident=true", "lnc=1"], 4, "trn2.3xlarge has 12.88 GB (LNC=1).\nType --profile-set resident=false"),
        ([], 1, " GB a core, trn2.3xlarge has 25.77 GB (LNC=2).\nNo length fits at"),
    ):
        chip = resolve("trn2.3xlarge", settings)
        with pytest.raises(UserError, match=re.escape(refusal)) if refusal else nullcontext():
            planning.check_fits(released, chip, make_job("", SMALL), tp, "bfloat16", planning.GEMMA_3_12B)
    planning.check_fits(released, CPU, make_job("", SMALL), 1, "float32", planning.GEMMA_3_12B)


def test_every_way_to_a_device_asks_first_whether_it_fits(tiny, tmp_path):
    """Generating stops at the memory before it misses what was never compiled; compiling stops at it as well."""
    little = Chip(4, 1e12, 4 * (2**31 + 2**14), 1e12, 1e12, 1e12, "a core has what the runtime takes and 16 KiB")
    workspace = Workspace(tiny.checkpoint, replace(CPU, chip=little), tmp_path, 4, "float32", tiny.gemma_root)
    job = make_job("rain", SMALL)
    with pytest.raises(UserError, match=r"256x256, 9 frames at tp 4 needs 2\.\d\d GB a core, cpu has 2\.15 GB"):
        Engine(workspace, Recorder(), RunOptions(neuron_gemma=True)).preflight.check([job])
    with pytest.raises(UserError, match="the text encoder at tp 4 needs 2.15 GB a core"):
        build.make(workspace, workspace.text_graphs())
    assert list(tmp_path.iterdir()) == []


def test_the_hosts_memory_is_planned_beside_what_the_machine_has(planned):
    in_float32, in_bfloat16 = (replace(TRN2, host_dtype=dtype) for dtype in ("float32", "bfloat16"))
    plan, narrow = planned(SHORT, in_float32), planned(SHORT, in_bfloat16)
    assert plan.host_bytes_to_load == 4 * plan.dit_weight_bytes_per_rank
    assert plan.host_bytes_to_load < TRN2.host_memory_bytes == plan.host_limit_bytes
    assert plan.host_bytes_mapped == 0 and "files' pages" not in table(plan)
    # The count itself: test_vae_memory.
    assert 1.4e9 < plan.host_bytes_to_decode < 2.4e9
    assert narrow.host_bytes_to_decode < 0.9 * plan.host_bytes_to_decode
    assert f"{format_bytes(narrow.host_bytes_to_decode)} to decode in bfloat16" in table(narrow)
    upscaled = planned(job_of(SHORT, upscale="spatial"), in_float32)
    assert upscaled.host_bytes_to_decode > 1.5 * plan.host_bytes_to_decode


def test_on_a_cpu_ranks_map_their_weights_and_neither_memory_nor_time_has_a_verdict(planned, clip):
    plan = planned(LONG, CPU)
    assert plan.fits is None and plan.ideal_step_ms is None and plan.flops_per_step > 0
    assert plan.host_bytes_to_load == 0 and plan.host_bytes_mapped == 4 * plan.dit_weight_bytes_per_rank
    assert "37.17 GB; pages beyond memory are read from the disk again" in table(plan)
    phases = clip(profile=CPU)
    seconds = {row.name: row.seconds for row in phases.rows}
    assert seconds["denoise_stage_1"] is None is phases.seconds and seconds["decode_video"] > 0
    assert phases.batch_seconds is None and "nothing: ranks and host share" in clip_table(phases)
    assert phases.cold == [] and "cold" not in clip_table(phases)


RETAKE, REFERENCE = inputs.Retake(FILE, 0, 1), inputs.ReferenceVideo(FILE, 1.0, 121)
LONGER, EARLIER = (inputs.Retake(FILE, extend=seconds, source_frames=241) for seconds in (3.0, -3.0))
IMAGES = inputs.ImageCondition(FILE), inputs.ImageCondition(FILE, 8)


def test_the_hosts_memory_is_that_of_the_largest_clip_or_image_that_is_encoded():
    for job, pixels, whole in (
        (job_of(two_stage=True, images=IMAGES), (1, 512, 768), False),  # at the size of each stage
        (job_of(retake=RETAKE), (121, 512, 768), False),
        (job_of((512, 768, 41), retake=LONGER), (17, 512, 768), False),  # what its windows see
        (job_of((512, 768, 41), retake=EARLIER), (25, 512, 768), False),  # a frame more, at the end of the clip
        (job_of(two_stage=True, references=(REFERENCE,)), (121, 256, 384), True),  # whole, at the size of stage 1
        (job_of((2176, 3840, 97), references=(REFERENCE,), tile=True), (97, 2176, 3840), False),  # so that it fits
        (job_of(two_stage=True, dubbing=REFERENCE), (121, 512, 768), False),  # in tiles, at the size of each stage
    ):
        host = planning._on_the_host(CONFIG, replace(TRN2, host_dtype="float32"), job, torch.bfloat16)
        wanted = vae_memory.encode_bytes(CONFIG, pixels, TRN2.host_threads, torch.float32, torch.bfloat16, whole)
        assert host["host_bytes_to_encode"] == wanted


LORAS, SMALLER = (Lora(FILE, 1.0),), ((256, 384, 25), True)
WITH_REFERENCE = {"references": (inputs.ReferenceVideo(FILE, 1.0, 25),), "stage_1_loras": LORAS}
VOICE, CLIPS_SOUND = (inputs.ReferenceAudio(FILE, latents) for latents in (126, 26))
# In tiles of 1024x1536 with a reference of half the size, in both stages.
TILED = {"references": (inputs.ReferenceVideo(FILE, 1.0, 121, 2),), "stage_1_loras": LORAS, "tile": True}
PLAIN = "512x768, 8 steps, 6,144 video and 126 audio"
# a kind -> job, its stages, weight sets, and a clip's phases between the text and the decoding
KINDS = {
    "res_2s": (
        job_of((128, 128, 9), True, recipe="dev", sampler="res_2s"),
        "64x64, 15 steps of 31 evaluations in all, 3 passes each, 8 video and 9 audio; "
        "128x128, 3 steps of 7 evaluations in all, 32 video and 9 audio",
        *(2, "31 x 3 passes; load_transformer; spatial; 7"),
    ),
    "sound alone": (
        job_of((0, 0, 121), recipe="dev", sound_only=True),
        *("30 steps, 3 passes each, 126 audio", 1, "30 x 3 passes"),
    ),
    "a given sound": (job_of(sound=inputs.SoundCondition(FILE)), PLAIN, 1, "sound; 8"),
    "a retake": (job_of(retake=RETAKE), PLAIN, 1, "video; sound; 8"),
    "images": (job_of(images=IMAGES), PLAIN.replace("6,144", "6,528"), 1, "images; 8"),
    "NAG": (job_of(nag_scale=11.0), PLAIN, 1, "8"),
    "a voice": (
        job_of(SHORT, recipe="dev", reference_sound=VOICE),
        *("384x512, 30 steps, 5 passes each, 768 video and 26 audio + 126 reference", 1, "sound; 30 x 5 passes"),
    ),
    "a mask": (
        job_of(*SMALLER, **WITH_REFERENCE, attention_mask=inputs.AttentionMask(FILE, 1.0)),
        "128x192, 8 steps, 96 video + 96 reference and 26 audio; 256x384, 3 steps, 384 video and 26 audio",
        *(2, "video; 8; load_transformer; spatial; 3"),
    ),
    "dubbing": (
        job_of(*SMALLER, dubbing=WITH_REFERENCE["references"][0], reference_sound=CLIPS_SOUND, loras=LORAS),
        "128x192, 8 steps, 96 video + 96 reference and 26 audio + 26 reference; "
        "256x384, 3 steps, 384 video + 384 reference and 26 audio + 26 reference",
        *(1, "video; video; sound; 8; spatial; 3"),
    ),
    "tiles": (
        job_of((2176, 3840, 121), True, stage_2_ic_lora=True, **TILED),
        "1088x1920, 8 steps in 4 tiles each, 24,576 video + 6,144 reference and 126 audio; "
        "2176x3840, 3 steps in 12 tiles each, 24,576 video + 6,144 reference and 126 audio",
        *(1, "video; video; 8 x 4 tiles; spatial; 3 x 12 tiles"),
    ),
}


def phase(row) -> str:
    """The input's or upsampler's kind, a stage's evaluations, or the name."""
    of_steps, x, _ = row.rate.rpartition(" x ")
    detail = of_steps if x and row.where == "device" else row.rate.partition(",")[0]
    return detail if row.name.startswith(("denoise", "encode_inputs", "upsample")) else row.name


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_planned_with_its_stages_tokens_weight_sets_and_phases(planned, clip, kind):
    job, stages, weight_sets, phases = KINDS[kind]
    plan, rows = planned(job), clip(job).rows
    assert "; ".join(re.findall(r"^stage_\d: (.*) tokens", table(plan), re.MULTILINE)) == stages
    assert plan.flops_per_step == plan.stages[-1].flops_per_step
    assert plan.disk_bytes == pytest.approx(67.90e9 + (weight_sets - 1) * 38.02e9, rel=1e-3)
    last = ["decode_video"] * (kind != "sound alone") + ["decode_audio"] * (kind != "a given sound")
    last += ["encode_mp4"] * (kind != "sound alone")
    assert "; ".join(map(phase, rows)) == "; ".join(["encode_text", phases, *last])
    assert all(row.seconds > 0 for row in rows)
    kept = kind not in ("res_2s", "tiles")
    assert (" a rank once, nothing in a step" in table(plan)) == kept == (not plan.stages[-1].host_bytes_per_step)
    assert (", two text attentions (NAG)\n" in table(plan)) == (kind == "NAG")
    assert (" to encode, " in table(plan)) == (kind not in ("res_2s", "sound alone", "a given sound", "NAG", "a voice"))
    assert ("attention scores  " in table(plan)) == (kind == "a mask")


def test_scores_that_a_kernel_holds_and_one_attention_and_sum_more_for_nag_are_planned(planned):
    first, second = planned(KINDS["a mask"][0]).stages
    # In fp32 of half a head at once, of stage 1's tokens; written and read once in each block.
    assert (first.score_bytes_per_core, second.score_bytes_per_core) == (4 * 192**2 / 2, 0)
    seconds = 2 * 4 * 32 * 192**2 * 48 / TRN2.memory_bytes_per_second(4)
    assert first.score_ms == pytest.approx(seconds * 1e3)
    (held,) = planned((256, 256, 9), resolve("trn2.3xlarge", ("attention=matmul",))).stages
    assert held.score_bytes_per_core == 4 * 8 * held.video_tokens**2 <= held.activation_bytes_per_core
    (plain,), (nag,) = planned().stages, planned(KINDS["NAG"][0]).stages
    assert plain.score_bytes_per_core == plain.score_ms == 0  # a flash kernel's
    assert nag.passes == 1 and nag.collectives_per_step["count"] == 12 * 48
    # Keys and values of 1024 tokens, and their products with all queries
    more = 48 * 4 * 1024 * (4096 * (4096 + nag.video_tokens) + 2048 * (2048 + nag.audio_tokens))
    assert nag.flops_per_step - plain.flops_per_step == more
    assert nag.upload_bytes - plain.upload_bytes == 1024 * (4096 + 2048) * 2 + 3 * 4


def test_tiles_are_timed_in_turn_or_by_as_many_groups_as_there_are_and_stay_on_the_ranks(planned, clip):
    job, groups = KINDS["tiles"][0], resolve("trn2.48xlarge", ("guidance_parallel=5", "backend=torchdist"))
    first, second = planned(job).stages
    # Of one rank fp32 RoPE of 8 heads of 128 numbers, and of 8 of 64 for the sound; clean latents in bfloat16, two
    # timesteps, and an fp32 mask.
    video = 8 * (128 + 64) * 4 + 128 * 2 + 2 * 2 + 4
    of_tile = second.video_tokens * video + second.audio_tokens * 8 * (64 + 64) * 4
    assert second.upload_bytes - first.upload_bytes == (12 - 4) * of_tile
    assert "of each of 12 tiles: a forecast" in table(planned(job))
    for profile, rounds in ((TRN2, 12), (groups, 3)):
        row = next(row for row in clip(job, profile).rows if row.name == "denoise_stage_2")
        assert row.rate.endswith(f"{format_bytes(4 * second.upload_bytes)} uploaded once")  # to one group each
        assert row.rate.startswith(f"3 x {rounds} tiles x {second.forecast.middle:.0f} ms")
        assert row.seconds == pytest.approx(3 * rounds * second.forecast.middle / 1e3, rel=0.05)


def test_4k_in_tiles_is_planned_on_one_chip_and_shared_by_more_with_its_price_and_what_crosses_the_host(planner):
    video, tile = inputs.ReferenceVideo(FILE, 1.0, 97, 2), dict(tile=True, tile_height=576, tile_width=1024)
    job = job_of((2176, 3840, 97), references=(video,), stage_1_loras=LORAS, **tile)
    machine = replace(MACHINE, backend="torchdist", vae_tile_latents=0)
    planned = planner(job, machine, price=Price(14.56, 16), neuron_vae=True, neuron_gemma=True)
    (stage,) = planned.plan.stages
    tokens = sum(bucket.video_tokens + bucket.audio_tokens for bucket in job.stage_buckets(job.stages[0]))
    assert (stage.tiles, stage.host_bytes_per_step) == (36, 2 * 128 * 2 * tokens)  # there and back, in bfloat16
    rows = {row.name: row for row in layouts(planned, TRANSFORMER)}
    one, most = rows["one chip"], rows["guidance 12"]
    assert [rows[name].chips for name in ("one chip", "guidance 4", "guidance 8 x context 2")] == [1, 4, 16]
    assert most.chips == 12 and most.step_ms[0] == pytest.approx(3 / 36 * one.step_ms[0])
    assert most.dollars == tuple(14.56 / 3600 / most.at_once * seconds for seconds in most.clip_seconds)
    # All ranks share the tiles of the decoder, too.
    assert most.clip_seconds[0] - most.chip_seconds[0] / 12 < one.clip_seconds[0] - one.chip_seconds[0] - 1
    text = layout_table([*rows.values()], "trn2.48xlarge")
    assert "$ a clip" in text and "shortest clip: guidance 12; type" in text  # though none was measured
    assert max(map(len, text.splitlines())) <= 100


def test_with_neuron_vae_clips_but_neither_images_nor_references_are_encoded_by_ranks(clip):
    rows = {kind: clip(KINDS[kind][0], neuron_vae=True).rows[1] for kind in ("images", "a mask")}
    assert {row.where for row in rows.values()} == {"host"} and rows["images"].rate.startswith("images, 2, 3.4 TFLOP")
    row = clip(KINDS["a retake"][0], neuron_vae=True).rows[1]
    # Of 16 latents 10, then the rest with 3 of those, and one earlier than that. Two tiles on four ranks take
    # as long as four; of one ltx-core's encoder has 69.04 TFLOPs, as torch counts.
    assert row.where == "device" and "2 x 73x512x768" in row.rate
    assert row.seconds == pytest.approx(4 * 69.04e12 / (0.4 * 667e12), rel=1e-3)


def test_a_download_of_ltx_2_5_is_planned_with_its_files_in_json_of_the_documented_names(split, capsys):
    size = "--profile trn2.3xlarge --height 64 --width 64 --num-frames 9 --json --price-per-hour 2"
    words = ["--num-generated-keyframes", "3", "--video-vae-path", str(split.diffusion_vae)]
    main(["--checkpoint-path", str(split.folder), *size.split(), *words])
    plan = json.loads(capsys.readouterr().out)
    assert plan["stages"][0]["video_tokens"] == (2 + 3) * 4
    (row,) = (row for row in plan["clip"]["rows"] if row["name"] == "decode_video")
    assert {*row} == {"name", "where", "seconds", "rate"} and "diffusion" in row["rate"]
    names = "block_weight_bytes_per_rank flops_per_step ideal_step_ms collectives_per_step hbm_bytes_per_core"
    assert plan["fits"] is True and all(plan[name] for name in names.split())
    assert plan["layouts"] == [] and plan["context_parallel"] == 1 and plan["clip"]["seconds"] > 0
    assert plan["clip"]["price"]["dollars_per_hour"] == 2 and plan["clip"]["price"]["dollars_per_clip"] > 0


def test_a_warm_clip_on_trn2_takes_ten_seconds_where_the_ranks_decode(clip):
    """By the forecast's middle, decoding at 40 % of the documented peak; what the host does beside it is assumed."""
    clip_plan = clip(profile=replace(TRN2, resident=True), neuron_gemma=True, neuron_vae=True)
    rows = {(row.name, row.where): row for row in clip_plan.rows}
    steps, decoding = rows["denoise_stage_1", "device"], rows["decode_video", "device"]
    assert steps.seconds == pytest.approx(8 * 0.97, abs=0.1) and "the forecast's" in steps.rate
    # 35.8 TFLOPs a tile, of which each rank has one
    assert decoding.seconds == pytest.approx(4 * 35.81e12 / (0.4 * 667e12), rel=1e-3)
    assert "not measured" in decoding.rate
    host, device = (sum(row.seconds for row in clip_plan.rows if row.where == where) for where in ("host", "device"))
    # 12 vCPUs, 0.25 s of sound a second each
    assert rows["decode_audio", "host"].seconds == pytest.approx(121 / 24 / (12 * 0.25), rel=1e-3)
    assert clip_plan.seconds == pytest.approx(device - decoding.seconds + max(decoding.seconds, host))
    assert clip_plan.seconds <= 10 and clip_plan.batch_seconds == pytest.approx(clip_plan.seconds)
    assert "sound and MP4 on the host beside decoding" in clip_table(clip_plan)
    assert "the next clip waits for the MP4" in clip_table(clip_plan)
    # The time of sound on the ranks is not known.
    clip_plan = clip(profile=replace(TRN2, resident=True, sound_on_ranks=True), neuron_gemma=True, neuron_vae=True)
    (sound,) = (row for row in clip_plan.rows if row.name == "decode_audio")
    assert (sound.where, sound.seconds) == ("device", None) and clip_plan.seconds is None
    assert "fill a 32nd of the tensor engine" in sound.rate
    assert f"to the first MP4        {'-':>16}  with the warm clip" in clip_table(clip_plan)


def test_a_cold_start_reads_the_rank_files_and_loads_what_a_warm_clip_has_on_the_ranks(clip):
    """Difflet's LTX-2: 37.8 GB in 11 to 15 s from the page cache, and 310 s more from the disk."""
    resident, in_turn = (clip(profile=replace(TRN2, resident=both), neuron_gemma=True) for both in (True, False))
    loads = ["load_gemma3", "encode_text", "load_transformer"]
    names = [row.name for row in in_turn.rows]
    assert names == [*loads, "denoise_stage_1", "decode_video", "decode_audio", "encode_mp4"]
    assert sorted(names, key=PHASES.index) == names  # as in a latency report
    cold = [" ".join(row.name for row in clip_plan.cold) for clip_plan in (resident, in_turn, clip())]
    assert cold[0] == "read_weights load_gemma3 load_transformer first_step"
    assert cold[1:] == ["read_weights first_step", "read_weights load_transformer first_step"]
    seconds = {row.name: row.seconds for row in resident.cold}
    assert seconds["read_weights"] == pytest.approx(67.9e9 / (125 * 2**20), rel=1e-3)
    assert seconds["load_transformer"] == pytest.approx(37.17e9 / 2.7e9, rel=1e-3)
    total = resident.seconds + sum(seconds.values())
    assert f"to the first MP4        {'':8}{total:8.2f}" in clip_table(resident)


def test_the_price_of_a_clip_is_that_of_a_busy_machine(clip):
    price = Price(14.56, 16)
    once, twice = clip(price=price, profile=MACHINE), clip(job_of(upscale="temporal"), MACHINE, price=price)
    dollars = once.batch_seconds * 14.56 / 3600 / 16
    assert once.price["dollars_per_clip"] == pytest.approx(dollars)
    assert twice.price["dollars_per_video_second"] == pytest.approx(twice.price["dollars_per_clip"] * 48 / 241)
    text = clip_table(once)
    assert f"${dollars:.2g} a clip, " in text and "$14.56 an hour,\n" in text
    assert clip().price is None and "price" not in clip_table(clip())


def test_without_the_ranks_a_clip_has_the_seconds_in_which_the_host_decodes(clip):
    clip_plan = clip()
    (row,) = (row for row in clip_plan.rows if row.name == "decode_video")
    assert row.where == "host" and "142.4 TFLOP, 2 tiles" in row.rate
    # 12 hyperthreads with 2.048 TFLOP/s each by their documentation
    assert row.seconds == pytest.approx(142.4e12 / (0.2 * 12 * 2.048e12), rel=1e-3)
    assert "20% of a documented peak, not measured" in row.rate
    alone = sum(row.seconds for row in clip_plan.rows)
    assert clip_plan.seconds == pytest.approx(alone)  # on the same cores nothing is gained
    host = sum(row.seconds for row in clip_plan.rows if row.name in ("decode_video", "decode_audio", "encode_mp4"))
    # The ranks denoise the next clip meanwhile.
    assert clip_plan.batch_seconds == pytest.approx(max(alone - host, host))


def test_a_step_that_was_tuned_counts_as_it_was_measured(clip, tmp_path):
    buckets = job_of().buckets
    sizes = {tuned_settings.size_key(buckets): {"step_ms": 500.0}}
    ms = tuned_settings.TunedSettings(tmp_path, {}, {}, sizes).step_ms(buckets)
    (steps,) = (row for row in clip(tuned_step_ms=ms).rows if row.name == "denoise_stage_1")
    assert steps.seconds == pytest.approx(4.0, abs=0.1) and "measured by" in steps.rate


def test_a_machines_layouts_are_those_that_its_chips_and_the_recipes_passes_allow(planned, planner):
    machine = replace(MACHINE, backend="torchdist")  # of all: guidance groups need it
    one_pass = planned_layouts(planner, machine)
    context, both = [f"context {cp}" for cp in (2, 4, 8, 16)], "guidance 4 x context 4"
    assert [row.name for row in one_pass] == ["one chip", *context]
    assert [(row.chips, row.at_once) for row in one_pass[:3]] == [(1, 16), (2, 8), (4, 4)]
    guided = planned_layouts(planner, machine, recipe="dev")
    assert "of each of 4 passes: a forecast" in table(planned(job_of(SHORT, recipe="dev"), machine))
    assert [row.name for row in guided] == ["one chip", "guidance 2", "guidance 4", *context, both]
    assert guided[-1].chips == 16 and guided[2].efficiency[0] > 0.97
    assert guided[2].step_ms[0] == pytest.approx(guided[0].step_ms[0] / 4, rel=0.02)
    newer = planned_layouts(planner, resolve("trn3", ("chips=16",)))
    assert [row.chips for row in newer] == [1, 2, 4, 8, 16]
    for name, rows in (("trn2.48xlarge", guided), ("trn3", newer)):  # what a row names is a profile
        assert all(resolve(name, row.settings).cores_needed(4) == 4 * row.chips for row in rows)
    of_trn2, of_trn3 = planned(SHORT), planned(SHORT, resolve("trn3", ("backend=torchdist",)))
    assert of_trn3.hbm_limit_bytes_per_core == 36 * 2**30 and of_trn3.fits
    assert of_trn3.ideal_step_ms == pytest.approx(of_trn2.ideal_step_ms * 667 / 671)
    assert "\nnot tried: " in table(of_trn3) and "not tried" not in table(of_trn2)
    # One chip a clip takes the fewest chip-seconds, and its step the longest.
    assert min(guided, key=lambda row: row.chip_seconds[0]).name == "one chip"
    text = layout_table(guided, "trn2.48xlarge")
    assert "forecasts, not measured, from the faster to the slower rates" in text
    assert "most clips: one chip a clip, 16 at once" in text and max(map(len, text.splitlines())) <= 100
    assert f"shortest clip: {both}; type --profile trn2.48xlarge" in text


def test_a_plan_follows_its_profiles_layout(planned):
    one, four = planned(LONG, MACHINE), planned(LONG, resolve("trn2.48xlarge-cp4"))
    (alone,), (stage,) = one.stages, four.stages
    assert (one.ranks, four.ranks) == (4, 16) and alone.between_groups["count"] == 0
    # In each of 48 blocks one collective of the video's self-attention, and two of the sound's attention to the video;
    # then the velocity's.
    assert stage.between_groups["count"] == 3 * 48 + 1
    assert 0.25 < stage.compute_ms / alone.compute_ms < 0.3
    assert stage.forecast.middle < 0.55 * alone.forecast.middle
    assert stage.activation_bytes_per_core < 0.35 * alone.activation_bytes_per_core
    assert four.disk_bytes == one.disk_bytes and four.host_bytes_to_load == 4 * one.host_bytes_to_load
    text = table(four)
    assert "trn2.48xlarge-cp4, tp 4 x context parallel 4, 16 ranks, bfloat16" in text
    assert "145 of them, 926.6 MB received a rank" in text and " 5 at 2.0 to 7.8 ms " in text


def test_a_table_aligns_text_at_its_start_and_has_numbers_in_units_that_a_person_reads():
    rows = [("name", "seconds", "note"), ("a", "10.00", "long"), ("longer", "1.00", "")]
    assert columns(rows, left=(0, -1)) == ["name    seconds  note", "a         10.00  long", "longer     1.00"]
    assert [*map(format_bytes, (None, 0, 1500, 25e6, 37.17e9))] == ["-", "0 B", "1.5 kB", "25.0 MB", "37.17 GB"]
    assert [*map(format_flops, (199e12, None))] == ["199.0 TFLOP", "-"]
    assert [*map(format_seconds, (9.6, 720, 20160))] == ["10 s", "12 min", "5.6 h"]
