"""Batches and the Python API: models load once, results are those of single runs bit for bit,
nothing is lost or left over."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import SIZE, TP, children, lines, opened, prepared, undisturbed, videos
from helpers import exit_code, forked, read_video, rel

from ltx_neuron.backends.ranks import RankError
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.batch import RESULTS
from ltx_neuron.engine.run import isolated
from ltx_neuron.errors import UserError
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.guidance import DEFAULTS

OTHER = 0.1  # another prompt, seed or image changes latents by more than this


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


# --- batches -------------------------------------------------------------------------------------
def test_a_batch_writes_every_video_in_order_and_says_so(batch, tiny):
    entries = json.loads((batch / "out" / RESULTS).read_text())["lines"]
    assert [entry["line"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry["prompt"] for entry in entries] == [line["prompt"] for line in lines(tiny)]
    assert {entry["status"] for entry in entries} == {"done"}
    assert [entry["output"] for entry in entries] == list(videos(batch)) == [f"{n:04d}.mp4" for n in range(1, 6)]
    for name in videos(batch):
        assert (batch / "out" / name).with_suffix(".json").is_file()
        found = read_video(batch / "out" / name)
        assert (found["width"], found["height"], found["frame_count"]) == (64, 64, 9)
    assert len(set(videos(batch).values())) == 5


def test_a_batch_loads_each_model_once(batch):
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
        made = api(
            line["prompt"],
            **SIZE,
            image=images.get(number),
            seed=line.get("seed", 10),
            output_type="mp4",
            output_path=path,
        )
        assert made.path == path and made.frames is None
        assert path.read_bytes() == videos(batch)[path.name], number


@pytest.mark.parametrize(
    ("error", "isolate", "alone"),
    [
        (ZeroDivisionError("no"), True, True),
        (ZeroDivisionError("no"), False, False),
        (UserError("no file"), True, False),
        (RankError("it was killed"), True, False),
    ],
)
def test_an_error_is_one_jobs_alone_unless_it_concerns_all(error, isolate, alone):
    run = SimpleNamespace(error=None)
    with nullcontext() if alone else pytest.raises(type(error)), isolated(run, isolate):
        raise error
    assert run.error is (error if alone else None)


# --- Python API ----------------------------------------------------------------------------------
def test_latents_follow_from_the_seed_or_the_generator(api):
    call = dict(prompt="birds sing", **SIZE, output_type="latent")
    first, again = api(**call, seed=5), api(**call, seed=5)
    assert first.video_latent.shape == (1, 128, 2, 2, 2) and first.audio_latent.shape == (1, 8, 9, 16)
    assert first.path is None
    drawn = api(**call, generator=torch.Generator().manual_seed(5), seed=99)
    for other in (again, drawn):
        assert torch.equal(first.video_latent, other.video_latent)
        assert torch.equal(first.audio_latent, other.audio_latent)
    assert rel(api(**call, seed=6).video_latent, first.video_latent) > OTHER
    generator = torch.Generator().manual_seed(5)
    # Drawn on from, not started anew.
    kept = [api(**call, generator=generator).video_latent for _ in range(2)]
    assert torch.equal(kept[0], first.video_latent) and not torch.equal(kept[1], first.video_latent)


def test_frames_and_waveform_come_as_arrays(api):
    made = api("birds sing", **SIZE, output_type="np")
    with pytest.warns(FutureWarning, match="batch first"):
        frames = made.frames
    assert frames.dtype == np.float32 and frames.shape == (1, 9, 64, 64, 3)
    assert 0 <= frames.min() < frames.max() <= 1
    # 4 * 9 - 3 mel frames.
    assert made.audio.dtype == torch.float32 and made.audio.shape == (1, 2, 33 * 480)
    assert (made.frame_rate, made.sample_rate) == (24.0, 48000)
    assert made.audio.isfinite().all() and frames.std() > 0


def test_the_callback_hears_of_every_step(api):
    heard = []
    api("birds sing", **SIZE, output_type="latent", callback_on_step_end=lambda *said: heard.append(said))
    sigmas = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
    assert [(pipe is api, step, timestep, info) for pipe, step, timestep, info in heard] == [
        (True, step, 1000 * sigma, {"stage": "stage_1", "sigma": sigma}) for step, sigma in enumerate(sigmas)
    ]
    count = len(heard)
    api("birds sing", **SIZE, output_type="latent")
    assert len(heard) == count  # not of the next call's


def test_models_stay_loaded_between_calls_and_the_prompt_encoded(api, monkeypatch):
    api("birds sing", **SIZE, output_type="latent")
    loaded, load = [], TorchDistRanks.load
    monkeypatch.setattr(
        TorchDistRanks, "load", lambda ranks, weights, *how: loaded.append(weights) or load(ranks, weights, *how)
    )
    before = children()
    api("birds sing", **SIZE, output_type="latent", seed=8)
    assert (loaded, children()) == ([], before)
    # The spy would have seen: this one has to be encoded.
    api("another prompt", **SIZE, output_type="latent")
    assert len(loaded) == 2 and children() == before


class OfAGpu(torch.Generator):
    """Stands for a GPU's: without one, none can be made."""

    device = torch.device("cuda")


MISTAKES = {
    "output_type": (dict(output_type="gif"), "output_type: unknown 'gif'; known: pil, np, pt, latent, mp4"),
    "no path": (dict(output_type="mp4"), "output_path"),
    "guidance": (dict(guidance=DEFAULTS), "the distilled recipe takes no video_cfg_guidance_scale"),
    "image": (dict(image="absent.png"), "absent.png: no such file"),
    "image of another type": (dict(image=5), "image: got 5, wanted an instance of ImageCondition"),
    "generator": (dict(generator=5), "generator: got 5, wanted Generator"),
    "generator's device": (dict(generator=OfAGpu()), "generator is on cuda; wanted one on the CPU"),
    "callback": (dict(callback_on_step_end=5), "callback_on_step_end: got 5, wanted a function"),
    "output_path": (dict(output_path=5), "output_path: got 5, wanted str or Path"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_plain_words_and_leave_the_models_loaded(api, mistake):
    wrong, said = MISTAKES[mistake]
    before = children()
    with pytest.raises(UserError) as error:
        api(**{"prompt": "birds sing"} | SIZE | wrong)
    assert said in str(error.value)
    assert children() == before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(dtype="float16"), "dtype: unknown 'float16'; known: bfloat16, float32"),
        (dict(recipe="slow"), "recipe: unknown 'slow'; known: distilled, dev"),
        (dict(compat="1.0"), "compat: unknown '1.0'; known: None, ltx-core-1.0.0"),
        (dict(tp_degree="2"), "tp_degree: got '2', wanted int"),
    ],
)
def test_a_pipeline_is_opened_with_known_values_only(tiny, wrong, said):
    with pytest.raises(UserError) as error:
        LTXPipeline.from_pretrained(checkpoint_path=tiny.checkpoint, gemma_root=tiny.gemma_root, **wrong)
    assert said in str(error.value)


def test_numbers_of_numpy_make_the_same_video(api, tmp_path):
    call = dict(prompt="birds sing", output_type="mp4")
    wanted = api(**call, **SIZE, seed=5, output_path=tmp_path / "plain.mp4").path
    numbers = {name: np.int64(value) for name, value in SIZE.items()}
    numbers |= {"seed": np.uint8(5), "frame_rate": np.float32(24)}
    got = api(**call, **numbers, output_path=tmp_path / "numpy.mp4").path
    assert got.read_bytes() == wanted.read_bytes()


def latents_of(api, seed: int, **more) -> list[torch.Tensor]:
    made = api("birds sing", **SIZE, output_type="latent", seed=seed, **more)
    return [made.video_latent, made.audio_latent]


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_two_threads_get_their_own_answers(api):
    seeds = (5, 6, 7)
    wanted = [latents_of(api, seed) for seed in seeds]
    heard = {seed: [] for seed in seeds}

    def call(seed: int) -> list[torch.Tensor]:
        def hear(pipe, step, *_):
            heard[seed].append(step)

        return latents_of(api, seed, callback_on_step_end=hear)

    with ThreadPoolExecutor(len(seeds)) as pool:
        got = list(pool.map(call, seeds))
    assert all(map(equal, got, wanted))
    assert heard == {seed: [*range(8)] for seed in seeds}


def test_a_pipeline_refuses_its_own_callback_and_the_call_goes_on(api):
    refused = []

    def call_again(pipe, *_):
        for again in (lambda: latents_of(pipe, 6), pipe.close):
            with pytest.raises(UserError) as error:
                again()
            refused.append(str(error.value))

    assert equal(latents_of(api, 5, callback_on_step_end=call_again), latents_of(api, 5))
    call, close = refused[:2]
    assert call.startswith("call inside a call of the same pipeline")
    assert close.startswith("close inside a call of the same pipeline")


def test_close_in_another_thread_waits_for_the_call_and_the_next_one_loads_again(api):
    closing, wanted, before = [], latents_of(api, 5), children()

    def close(pipe, step, *_):
        if step == 0:
            closing.append(threading.Thread(target=pipe.close))
            closing[0].start()
        assert closing[0].is_alive()

    assert equal(latents_of(api, 5, callback_on_step_end=close), wanted)
    closing[0].join()
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


def test_an_error_in_a_callback_ends_the_ranks_and_the_next_call_loads_again(api):
    wanted, before = latents_of(api, 5), children()

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        latents_of(api, 5, callback_on_step_end=stop)
    assert len(before - children()) == TP
    assert equal(latents_of(api, 5), wanted)
