"""Batches and the Python API, also as code for diffusers calls it: models load once, results are those of single runs
bit for bit, nothing is lost or left over, and an error says what to type."""

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import exit_code, forked, generator, read_video
from jobs import make_job, replace
from PIL import Image
from runs import ONE_STAGE, TP, batch_lines, children, opened, undisturbed_batch, videos

import ltx_neuron
from ltx_neuron.backends import manifest
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.batch import RESULTS
from ltx_neuron.config.profiles import TRAINIUM2
from ltx_neuron.engine.preflight import compiled_memory
from ltx_neuron.errors import UserError
from ltx_neuron.format import print_once
from ltx_neuron.job import Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.plan import CoreMemory, compiled_activations
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.guidance import DEFAULTS

CALL = {"prompt": "birds sing", **ONE_STAGE}
LATENT = CALL | {"output_type": "latent"}
# Milliseconds on an idle machine (benchmarks/second_call.md). Exporting head, block and tail, as every call once did,
# takes more even at this size.
SECONDS_TO_FIRST_STEP = 0.5


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    setup = scripts(tiny, TP)
    setup.prepare(**ONE_STAGE)
    return setup


@pytest.fixture(scope="module")
def api(setup, tiny):
    """One open pipeline for the tests that only call it; nothing is left of it afterwards."""
    threads, before = torch.get_num_threads(), children()
    with opened(setup, tiny) as pipe:
        yield pipe
    torch.set_num_threads(threads)
    assert children() <= before


@pytest.fixture(scope="module")
def latents(api):
    """Of the seeds 5, 6 and 7."""
    return {seed: api(**LATENT, seed=seed).frames for seed in (5, 6, 7)}


def test_a_batch_writes_the_bits_of_single_calls_in_order_and_loads_each_model_once(setup, shared, api, tiny, tmp_path):
    batch, images = undisturbed_batch(setup, tiny, shared), {3: [ImageCondition(tiny.image, 0, 0.8)], 5: tiny.image}
    entries = json.loads((batch / "out" / RESULTS).read_text())["lines"]
    rows = zip(entries, batch_lines(tiny), videos(batch).items(), strict=True)
    for number, (entry, line, (name, wanted)) in enumerate(rows, 1):
        assert (entry["line"], entry["prompt"], entry["status"]) == (number, line["prompt"], "done")
        assert entry["output"] == name == f"{number:04d}.mp4"
        assert (batch / "out" / name).with_suffix(".json").is_file()
        facts = read_video(batch / "out" / name)
        assert (facts["width"], facts["height"], facts["frame_count"]) == (64, 64, 9)
        inputs = dict(image=images.get(number), seed=line.get("seed", 10), output_type="mp4")
        result = api(line["prompt"], **ONE_STAGE, **inputs, output_path=tmp_path / name)
        assert result.path == tmp_path / name and result.frames is None
        assert result.path.read_bytes() == wanted, number
    perf = json.loads((batch / "perf.json").read_text())
    names = [phase["name"] for phase in perf["phases"]]
    loads = ("load_gemma3", "encode_text", "unload_gemma3", "load_transformer", "unload_transformer")
    assert {name: names.count(name) for name in loads} == dict.fromkeys(loads, 1)
    assert names.count("denoise_stage_1") >= 5 and names.count("encode_mp4") == 5
    assert len(perf["denoise_steps_ms"]["stage_1"]) == 5 * 8


def test_a_pipeline_has_diffusers_names_and_takes_torchs_dtypes(api):
    assert ltx_neuron.LTX2Pipeline is ltx_neuron.LTX2ImageToVideoPipeline is ltx_neuron.LTXPipeline is LTXPipeline
    assert api.engine.workspace.dtype == torch.float32


def test_frames_are_batch_first_in_the_form_of_output_type(api):
    default, array, tensor = (api(**CALL, seed=5, **how) for how in ({}, {"output_type": "np"}, {"output_type": "pt"}))
    assert default.output_type == "pil" and all(isinstance(frame, Image.Image) for frame in default.frames[0])
    with pytest.raises(AttributeError, match=r"no shape: .* np.stack\(result.frames\[0\]\)"):  # of the earlier array
        _ = default.frames.shape
    clip = np.stack(default.frames[0])
    assert clip.shape == (9, 64, 64, 3) and clip.dtype == np.uint8 and clip.std() > 0
    with pytest.warns(FutureWarning, match="batch first"):
        values = array.frames
    assert values.dtype == np.float32 and values.shape == (1, 9, 64, 64, 3) and 0 <= values.min() < values.max() <= 1
    assert np.array_equal((values[0] * 255).round().astype(np.uint8), clip)
    assert torch.equal(tensor.frames, torch.from_numpy(values).permute(0, 1, 4, 2, 3))
    assert all(torch.equal(default.audio, other.audio) for other in (array, tensor))
    assert default.audio.shape == (1, 2, 33 * 480) and default.audio.isfinite().all()  # 4 * 9 - 3 mel frames
    assert (default.frame_rate, default.sample_rate) == (24.0, 48000)
    frames, audio = api(**CALL, output_type="pt", return_dict=False, seed=5)
    assert torch.equal(frames, tensor.frames) and torch.equal(audio, tensor.audio)
    latent, sound = api(**LATENT, return_dict=False, seed=5)
    assert latent.shape == (1, 128, 2, 2, 2) and sound.shape == (1, 8, 9, 16)


def test_prompts_in_a_list_and_videos_per_prompt_have_seeds_that_count_up(api, latents):
    assert torch.equal(api(**LATENT, seed=5, num_videos_per_prompt=3).frames, torch.cat([*latents.values()]))
    texts = ["birds sing", "waves crash on the shore"]
    two, other = (api(**LATENT | {"prompt": p}, seed=seed).frames for p, seed in ((texts, 5), (texts[1], 6)))
    assert torch.equal(two, torch.cat([latents[5], other])) and not torch.equal(other, latents[6])


def test_one_generator_draws_on_for_all_videos_or_a_list_has_one_for_each(api, latents):
    call, generators = LATENT | {"num_videos_per_prompt": 2}, [generator(7), generator(5)]
    assert torch.equal(api(**call, generator=generators).frames, torch.cat([latents[7], latents[5]]))
    drawn = api(**call, generator=generator(5)).frames
    assert torch.equal(drawn[:1], latents[5]) and not torch.equal(drawn[1:], latents[5])
    with pytest.raises(UserError, match="got 1 for 2 videos"):
        api(**call, generator=generators[:1])


def test_a_pil_image_conditions_as_its_file_does(api, tiny, latents):
    picture = Image.open(tiny.image)
    file, *same = (api(**LATENT, seed=5, image=x).frames for x in (tiny.image, picture, [ImageCondition(picture)]))
    assert all(torch.equal(image, file) for image in same) and not torch.equal(file, latents[5])


def test_save_writes_the_file_of_output_path_and_numbers_several(api, tmp_path):
    written = api(**CALL, output_type="mp4", output_path=tmp_path / "wanted.mp4", seed=5).path.read_bytes()
    one, two = api(**CALL, seed=5), api(**CALL, seed=5, num_videos_per_prompt=2)
    assert one.save(tmp_path / "one.mp4") == [tmp_path / "one.mp4"]
    first, second = two.save(str(tmp_path / "two.mp4"))
    assert (first.name, second.name) == ("two-1.mp4", "two-2.mp4")
    assert (tmp_path / "one.mp4").read_bytes() == first.read_bytes() == written != second.read_bytes()
    with pytest.raises(UserError, match="FILE.mp4"):
        one.save(tmp_path / "out.mov")
    with pytest.raises(UserError, match="output_type='latent' holds no frames"):
        api(**LATENT).save(tmp_path / "out.mp4")


def test_devices_offloading_and_tiling_have_no_effect_and_one_note_each(api, capsys):
    print_once.cache_clear()
    for _ in range(2):
        assert api.to("cuda").enable_model_cpu_offload() is api
        api.enable_vae_tiling()
        api.vae.enable_tiling()
        api.vae.to(torch.float32)
    words = ["to", "enable_model_cpu_offload", "enable_vae_tiling", "enable_tiling"]
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == words


@pytest.fixture(scope="module")
def checked(setup, tiny):
    """A pipeline whose calls are checked against the memory of a trn2.3xlarge, on this CPU."""
    on_a_cpu = ("backend=torchdist", "device=cpu", "compile_backend=export", "attention=sdpa")
    with opened(setup, tiny, profile="trn2.3xlarge", profile_set=on_a_cpu) as pipe:
        yield pipe


@pytest.fixture
def calls():
    """Of what takes long."""
    hashlib, load = manifest.hashlib, TorchDistRanks.load
    with (
        # Compiling, in this process, has hashed the files already; a user's call comes later.
        mock.patch.object(manifest, "_digests", {}),
        mock.patch.object(torch.export, "export", wraps=torch.export.export) as export,
        mock.patch.object(hashlib, "file_digest", wraps=hashlib.file_digest) as digest,
        mock.patch.object(TorchDistRanks, "load", autospec=True, side_effect=load) as load,
    ):
        yield SimpleNamespace(export=export, digest=digest, load=load)


def test_a_second_call_exports_hashes_and_loads_nothing(checked, calls):
    steps = []
    first = checked(**LATENT)
    assert calls.load.call_count == 2 and calls.digest.called and not calls.export.called
    for each in vars(calls).values():
        each.reset_mock()
    called, before = time.perf_counter(), children()
    second = checked(**LATENT, callback_on_step_end=lambda *_: steps.append(time.perf_counter()))
    assert not any(each.called for each in vars(calls).values()) and children() == before
    assert steps[0] - called < SECONDS_TO_FIRST_STEP
    assert torch.equal(first.video_latent, second.video_latent)


def test_a_device_too_small_is_refused_from_the_manifests_alone(checked, calls, monkeypatch):
    """What is compared was counted when compiling; the plan, which exports graphs, is asked only then, for a size that
    fits."""
    workspace, job = checked.engine.workspace, make_job("rain", Size(**ONE_STAGE))
    stages = [[step.manifest] for step in checked.engine.preflight.check([job]).values()]
    memory = compiled_memory(workspace, stages, [], job, checked.engine.options)
    weights = 4 * sum(map(math.prod, stages[0][0].weights().values()))
    encoder = (workspace.weights("gemma3") / "rank0.safetensors").stat().st_size
    needed = CoreMemory(weights, encoder, compiled_activations(stages)).in_turn
    for limit, exports in ((needed, False), (needed - 1, True)):
        chip = replace(TRAINIUM2, memory_bytes=4 * limit)
        monkeypatch.setattr(workspace, "profile", replace(workspace.profile, chip=chip))
        with pytest.raises(UserError, match="needs .* GB a core") if exports else nullcontext():
            checked.engine.preflight._check_fits(memory, job)
        assert calls.export.called == exports


class OfAGpu(torch.Generator):
    """Stands for a GPU's: without one, none can be made."""

    device = torch.device("cuda")


TWO_VIDEOS = dict(num_videos_per_prompt=2, output_type="mp4", output_path="a.mp4")
MISTAKES = {
    "output_type: unknown 'gif'; known: pil, np, pt, latent, mp4": dict(output_type="gif"),
    "output_path": dict(output_type="mp4"),
    r"one path for 2 videos.* type result.save\('a.mp4'\)": TWO_VIDEOS,
    "the distilled recipe takes no video_cfg_guidance_scale": dict(guidance=DEFAULTS),
    "absent.png: no such file": dict(image="absent.png"),
    "image: got 5, wanted an instance of ImageCondition": dict(image=5),
    "generator: got 5, wanted Generator": dict(generator=5),
    "generator is on cuda; wanted one on the CPU": dict(generator=OfAGpu()),
    "callback_on_step_end: got 5, wanted a function": dict(callback_on_step_end=5),
    "output_path: got 5, wanted str or Path": dict(output_path=5),
}
MISTAKES_OF_OPENING = {
    "dtype: unknown 'float16'; known: bfloat16, float32": dict(torch_dtype=torch.float16),
    "recipe: unknown 'slow'; known: distilled, dev": dict(recipe="slow"),
    "compat: unknown '1.0'; known: None, ltx-core-1.0.0": dict(compat="1.0"),
    "tp_degree: got '2', wanted int": dict(tp_degree="2"),
}
# A word of diffusers, and a misspelled one.
UNKNOWN = {
    "guidance_scale .* video_cfg_guidance_scale=3.0, with recipe='dev'": dict(guidance_scale=3.0),
    r"num_frame'; did you mean num_frames\?": dict(num_frame=9),
}
UNKNOWN_ATTRIBUTES = {
    r"loras=\[\('FILE', 1.0\)\], in from_pretrained or in a call; prepare --lora": "load_lora_weights",
    r"engin'; did you mean engine\?": "engin",
}


def test_mistakes_are_plain_words_and_leave_the_models_loaded(api, tiny):
    before, opens = children(), partial(LTXPipeline.from_pretrained, tiny.checkpoint, gemma_root=tiny.gemma_root)
    for error, rows, use in (
        (UserError, MISTAKES, lambda wrong: api(**CALL | wrong)),
        (TypeError, UNKNOWN, lambda wrong: api(**CALL | wrong)),
        (UserError, MISTAKES_OF_OPENING, lambda wrong: opens(**wrong)),
        (TypeError, {"device_map .* profile='trn2.3xlarge'": dict(device_map="auto")}, lambda wrong: opens(**wrong)),
        (AttributeError, UNKNOWN_ATTRIBUTES, lambda name: getattr(api, name)),
    ):
        for message, wrong in rows.items():
            with pytest.raises(error, match=message):
                use(wrong)
    assert children() == before


def test_threads_get_their_own_answers_and_a_callback_hears_of_every_step_of_its_call_alone(api, latents):
    heard, sigmas = {seed: [] for seed in latents}, [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]

    def call(seed: int) -> torch.Tensor:
        return api(**LATENT, seed=seed, callback_on_step_end=lambda *step: heard[seed].append(step)).frames

    with ThreadPoolExecutor(len(latents)) as pool:
        assert all(map(torch.equal, pool.map(call, latents), latents.values()))
    steps = [(api, step, 1000 * s, {"stage": "stage_1", "sigma": s}) for step, s in enumerate(sigmas)]
    assert heard == dict.fromkeys(latents, steps)
    with pytest.raises(UserError, match="'latents'.: known: stage, sigma. Latents stay"):
        api(**CALL, callback_on_step_end=lambda pipe, step, t, values: values["latents"])


def test_a_pipeline_refuses_its_own_callback_and_the_call_goes_on(api, latents):
    def call_again(pipe, *_):
        for again, what in ((lambda: pipe(**LATENT), "call"), (pipe.close, "close")):
            with pytest.raises(UserError, match=f"^{what} inside a call of the same pipeline"):
                again()

    assert torch.equal(api(**LATENT, seed=5, callback_on_step_end=call_again).frames, latents[5])


def test_a_call_loads_again_after_a_close_in_another_thread_or_an_error_in_a_callback(api, latents):
    """close() waits for the call."""
    closing, before = [], children()

    def close(pipe, step, *_):
        if step == 0:
            closing.append(threading.Thread(target=pipe.close))
            closing[0].start()
        assert closing[0].is_alive()

    def stop(*_):
        raise KeyboardInterrupt

    assert torch.equal(api(**LATENT, seed=5, callback_on_step_end=close).frames, latents[5])
    closing[0].join()
    assert len(before - children()) == TP
    assert torch.equal(api(**LATENT, seed=5).frames, latents[5])
    before = children()
    with pytest.raises(KeyboardInterrupt):
        api(**LATENT, callback_on_step_end=stop)
    assert len(before - children()) == TP
    assert torch.equal(api(**LATENT, seed=5).frames, latents[5])


def test_a_forked_process_is_told_to_be_spawned_and_leaves_the_ranks_alone(api, latents, capfd):
    """It would wait for ever for ranks that answer its parent."""
    before = children()

    def use() -> None:
        with pytest.raises(UserError, match="was forked from process .* Start processes with"):
            api(**LATENT)
        api.close()

    assert exit_code(forked(use)) == 0, capfd.readouterr().err
    assert children() == before and torch.equal(api(**LATENT, seed=5).frames, latents[5])
