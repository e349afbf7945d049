"""Batches and the Python API: models load once, results are those of single runs bit for bit,
nothing is lost or left over."""

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from batches import SIZE, TP, children, lines, opened, prepared, undisturbed, videos
from helpers import exit_code, forked, read_video, rel
from jobs import make_job, replace

from ltx_neuron.backends import manifest
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.batch import RESULTS
from ltx_neuron.config.profiles import TRAINIUM2
from ltx_neuron.denoise import StageRun
from ltx_neuron.engine.preflight import compiled_memory
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.plan import CoreMemory, compiled_activations
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.guidance import DEFAULTS

OTHER = 0.1  # another prompt, seed or image changes latents by more than this
BIRDS = {"prompt": "birds sing", **SIZE}
# Milliseconds on an idle machine (benchmarks/second_call.md). Exporting head, block and tail, as
# every call once did, takes more even at this size.
SECONDS_TO_FIRST_STEP = 0.5


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    return prepared(scripts, tiny)


@pytest.fixture(scope="module")
def batch(setup, tiny, shared):
    return undisturbed(setup, tiny, shared)


@pytest.fixture(scope="module")
def api(setup, tiny):
    """One open pipeline for the tests that only call it; nothing is left of it afterwards."""
    threads, before = torch.get_num_threads(), children()
    with opened(setup, tiny) as pipe:
        yield pipe
    torch.set_num_threads(threads)
    assert children() <= before


@pytest.fixture(scope="module")
def checked(setup, tiny):
    """One whose calls are checked against the memory of a trn2.3xlarge, on this CPU."""
    on_a_cpu = ("backend=torchdist", "device=cpu", "compile_backend=export", "attention=sdpa")
    with opened(setup, tiny, profile="trn2.3xlarge", profile_set=on_a_cpu) as pipe:
        yield pipe


# --- batches -------------------------------------------------------------------------------------


def test_a_batch_writes_every_video_in_order_and_loads_each_model_once(batch, tiny):
    entries, mp4s = json.loads((batch / "out" / RESULTS).read_text())["lines"], videos(batch)
    assert [entry["line"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry["prompt"] for entry in entries] == [line["prompt"] for line in lines(tiny)]
    assert {entry["status"] for entry in entries} == {"done"}
    assert [entry["output"] for entry in entries] == list(mp4s) == [f"{n:04d}.mp4" for n in range(1, 6)]
    for name in mp4s:
        assert (batch / "out" / name).with_suffix(".json").is_file()
        facts = read_video(batch / "out" / name)
        assert (facts["width"], facts["height"], facts["frame_count"]) == (64, 64, 9)
    perf = json.loads((batch / "perf.json").read_text())
    names = [phase["name"] for phase in perf["phases"]]
    loads = ("load_gemma3", "encode_text", "unload_gemma3", "load_transformer", "unload_transformer")
    assert {name: names.count(name) for name in loads} == dict.fromkeys(loads, 1)
    assert names.count("denoise_stage_1") >= 5 and names.count("encode_mp4") == 5
    assert len(perf["denoise_steps_ms"]["stage_1"]) == 5 * 8


def test_a_batch_makes_the_bits_of_single_calls(batch, api, tiny, tmp_path):
    images = {3: [ImageCondition(tiny.image, 0, 0.8)], 5: tiny.image}
    for number, line in enumerate(lines(tiny), 1):
        path = tmp_path / f"{number:04d}.mp4"
        inputs = dict(image=images.get(number), seed=line.get("seed", 10), output_type="mp4", output_path=path)
        result = api(line["prompt"], **SIZE, **inputs)
        assert result.path == path and result.frames is None
        assert path.read_bytes() == videos(batch)[path.name], number


# --- calls of the Python API ---------------------------------------------------------------------


def latents_of(api, seed: int, **more) -> list[torch.Tensor]:
    result = api(**BIRDS, output_type="latent", seed=seed, **more)
    assert result.path is None
    return [result.video_latent, result.audio_latent]


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_latents_follow_from_the_seed_or_the_generator(api):
    first = latents_of(api, 5)
    assert [tuple(latent.shape) for latent in first] == [(1, 128, 2, 2, 2), (1, 8, 9, 16)]
    assert equal(latents_of(api, 5), first)
    assert equal(latents_of(api, 99, generator=torch.Generator().manual_seed(5)), first)
    assert rel(latents_of(api, 6)[0], first[0]) > OTHER
    generator = torch.Generator().manual_seed(5)
    assert equal(latents_of(api, 1, generator=generator), first)
    assert not equal(latents_of(api, 1, generator=generator), first)  # drawn on from, not started anew


def test_the_callback_hears_of_every_step_of_its_call_alone(api):
    heard = []
    latents_of(api, 5, callback_on_step_end=lambda *step: heard.append(step))
    latents_of(api, 5)
    sigmas = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
    assert [(pipe is api, step, timestep, info) for pipe, step, timestep, info in heard] == [
        (True, step, 1000 * sigma, {"stage": "stage_1", "sigma": sigma}) for step, sigma in enumerate(sigmas)
    ]


@pytest.fixture
def counted(monkeypatch):
    """How often each of these was called."""
    counts = {"export": 0, "hash a file": 0, "load on the ranks": 0}

    def count(owner, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    # Compiling, in this process, has hashed the files already; a user's call comes later.
    monkeypatch.setattr(manifest, "_digests", {})
    count(torch.export, "export", "export")
    count(manifest.hashlib, "file_digest", "hash a file")
    count(TorchDistRanks, "load", "load on the ranks")
    return counts


def test_a_second_call_exports_hashes_and_loads_nothing(checked, counted, monkeypatch):
    began, step = [], StageRun.step

    def noting(self, number):
        began.append(time.perf_counter())
        return step(self, number)

    monkeypatch.setattr(StageRun, "step", noting)
    first = checked("rain", **SIZE, output_type="latent")
    assert counted["load on the ranks"] == 2 and counted["hash a file"] > 0  # the counters count
    assert counted["export"] == 0
    counted.update(dict.fromkeys(counted, 0))
    began.clear()
    called, before = time.perf_counter(), children()
    second = checked("rain", **SIZE, output_type="latent")
    assert counted == dict.fromkeys(counted, 0) and children() == before
    assert began[0] - called < SECONDS_TO_FIRST_STEP
    assert torch.equal(first.video_latent, second.video_latent)


def test_a_device_too_small_is_refused_from_the_manifests_alone(checked, counted, monkeypatch):
    """What is compared is what was counted when compiling; the plan, which exports graphs, is
    asked only then, for a size that fits."""
    workspace, job = checked.engine.workspace, make_job("rain", Size(**SIZE))
    manifests = [step.manifest for step in checked.engine.preflight.check([job]).values()]
    stages = [[each] for each in manifests]
    memory = compiled_memory(workspace, stages, [], job, checked.engine.options)
    needed = CoreMemory(
        4 * sum(map(math.prod, manifests[0].weights().values())),
        (workspace.weights("gemma3") / "rank0.safetensors").stat().st_size,
        compiled_activations(stages),
    ).in_turn
    for limit, exports in ((needed, False), (needed - 1, True)):
        chip = replace(TRAINIUM2, memory_bytes=4 * limit)
        monkeypatch.setattr(workspace, "profile", replace(workspace.profile, chip=chip))
        with pytest.raises(UserError, match="needs .* GB a core") if exports else nullcontext():
            checked.engine.preflight._check_fits(memory, job)
        assert bool(counted["export"]) == exports


class OfAGpu(torch.Generator):
    """Stands for a GPU's: without one, none can be made."""

    device = torch.device("cuda")


MISTAKES = {
    "output_type: unknown 'gif'; known: pil, np, pt, latent, mp4": dict(output_type="gif"),
    "output_path": dict(output_type="mp4"),
    "the distilled recipe takes no video_cfg_guidance_scale": dict(guidance=DEFAULTS),
    "absent.png: no such file": dict(image="absent.png"),
    "image: got 5, wanted an instance of ImageCondition": dict(image=5),
    "generator: got 5, wanted Generator": dict(generator=5),
    "generator is on cuda; wanted one on the CPU": dict(generator=OfAGpu()),
    "callback_on_step_end: got 5, wanted a function": dict(callback_on_step_end=5),
    "output_path: got 5, wanted str or Path": dict(output_path=5),
}
MISTAKES_OF_OPENING = {
    "dtype: unknown 'float16'; known: bfloat16, float32": dict(dtype="float16"),
    "recipe: unknown 'slow'; known: distilled, dev": dict(recipe="slow"),
    "compat: unknown '1.0'; known: None, ltx-core-1.0.0": dict(compat="1.0"),
    "tp_degree: got '2', wanted int": dict(tp_degree="2"),
}


def test_mistakes_are_plain_words_and_leave_the_models_loaded(api, tiny):
    before = children()
    for message, wrong in MISTAKES.items():
        with pytest.raises(UserError) as error:
            api(**BIRDS | wrong)
        assert message in str(error.value)
    for message, wrong in MISTAKES_OF_OPENING.items():
        with pytest.raises(UserError) as error:
            LTXPipeline.from_pretrained(checkpoint_path=tiny.checkpoint, gemma_root=tiny.gemma_root, **wrong)
        assert message in str(error.value)
    assert children() == before


def test_threads_get_their_own_answers(api):
    seeds = (5, 6, 7)
    wanted, heard = [latents_of(api, seed) for seed in seeds], {seed: [] for seed in seeds}

    def call(seed: int) -> list[torch.Tensor]:
        return latents_of(api, seed, callback_on_step_end=lambda pipe, step, *_: heard[seed].append(step))

    with ThreadPoolExecutor(len(seeds)) as pool:
        got = list(pool.map(call, seeds))
    assert all(map(equal, got, wanted)) and heard == {seed: [*range(8)] for seed in seeds}


def test_a_pipeline_refuses_its_own_callback_and_the_call_goes_on(api):
    refused = []

    def call_again(pipe, *_):
        for again in (lambda: latents_of(pipe, 6), pipe.close):
            with pytest.raises(UserError) as error:
                again()
            refused.append(str(error.value))

    assert equal(latents_of(api, 5, callback_on_step_end=call_again), latents_of(api, 5))
    for message, what in zip(refused, ("call", "close"), strict=False):
        assert message.startswith(f"{what} inside a call of the same pipeline")


def test_a_call_loads_again_after_a_close_in_another_thread_or_an_error_in_a_callback(api):
    """close() waits for the call."""
    closing, wanted, before = [], latents_of(api, 5), children()

    def close(pipe, step, *_):
        if step == 0:
            closing.append(threading.Thread(target=pipe.close))
            closing[0].start()
        assert closing[0].is_alive()

    def stop(*_):
        raise KeyboardInterrupt

    assert equal(latents_of(api, 5, callback_on_step_end=close), wanted)
    closing[0].join()
    assert len(before - children()) == TP
    assert equal(latents_of(api, 5), wanted)
    before = children()
    with pytest.raises(KeyboardInterrupt):
        latents_of(api, 5, callback_on_step_end=stop)
    assert len(before - children()) == TP
    assert equal(latents_of(api, 5), wanted)


def test_a_forked_process_is_told_to_be_spawned_and_leaves_the_ranks_alone(api, capfd):
    """It would wait for ever for ranks that answer its parent."""
    wanted, before = latents_of(api, 5), children()

    def use() -> None:
        with pytest.raises(UserError, match="was forked from process .* Start processes with"):
            latents_of(api, 5)
        api.close()

    assert exit_code(forked(use)) == 0, capfd.readouterr().err
    assert children() == before and equal(latents_of(api, 5), wanted)
