"""Code written for diffusers runs on a pipeline, or the error names what to type instead."""

import numpy as np
import pytest
import torch
from batches import SIZE, TP, opened, prepared
from helpers import read_video
from PIL import Image

from ltx_neuron.errors import UserError
from ltx_neuron.format import print_once
from ltx_neuron.sampling.conditions import ImageCondition

CALL = dict(prompt="birds sing", **SIZE)


@pytest.fixture(scope="module")
def setup(scripts, tiny):
    return prepared(scripts, tiny)


@pytest.fixture(scope="module")
def pipe(setup, tiny):
    threads = torch.get_num_threads()
    with opened(setup, tiny) as pipe:
        yield pipe
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def latents(pipe):
    """The latents of the seeds 5, 6 and 7."""
    return [pipe(**CALL, output_type="latent", seed=seed).video_latent for seed in (5, 6, 7)]


def test_a_pipeline_has_diffusers_names_and_takes_a_positional_checkpoint_and_torchs_dtypes(setup, tiny):
    imported = {}
    exec("from ltx_neuron import LTX2Pipeline, LTX2ImageToVideoPipeline, LTXPipeline", imported)
    pipeline = imported["LTXPipeline"]
    assert imported["LTX2Pipeline"] is imported["LTX2ImageToVideoPipeline"] is pipeline
    how = dict(gemma_root=tiny.gemma_root, artifacts_dir=setup.artifacts, profile="cpu", tp_degree=TP)
    for name in ("dtype", "torch_dtype"):
        opened_one = pipeline.from_pretrained(tiny.checkpoint, **how, **{name: torch.float32})
        assert opened_one.engine.workspace.dtype == torch.float32
        assert opened_one.engine.progress is True, "bars are shown in a notebook, too"
        with pytest.raises(UserError, match="dtype: unknown 'float16'; known: bfloat16, float32"):
            pipeline.from_pretrained(tiny.checkpoint, **how, **{name: torch.float16})


def test_frames_are_batch_first_in_the_form_of_output_type(pipe):
    default, array, tensor = (pipe(**CALL, seed=5, **how) for how in ({}, {"output_type": "np"}, {"output_type": "pt"}))
    assert default.output_type == "pil"
    with pytest.raises(AttributeError, match=r"no shape: .* np.stack\(result.frames\[0\]\)"):  # of the earlier array
        _ = default.frames.shape
    assert all(isinstance(frame, Image.Image) for frame in default.frames[0])
    clip = np.stack(default.frames[0])
    assert clip.shape == (9, 64, 64, 3) and clip.dtype == np.uint8 and clip.std() > 0
    with pytest.warns(FutureWarning, match="batch first"):
        values = array.frames
    assert values.dtype == np.float32 and values.shape == (1, 9, 64, 64, 3) and 0 <= values.min() < values.max() <= 1
    assert np.array_equal((values[0] * 255).round().astype(np.uint8), clip)
    assert torch.equal(tensor.frames, torch.from_numpy(values).permute(0, 1, 4, 2, 3))
    assert all(torch.equal(default.audio, other.audio) for other in (array, tensor))
    # 4 * 9 - 3 mel frames.
    assert default.audio.shape == (1, 2, 33 * 480) and default.audio.isfinite().all()
    assert (default.frame_rate, default.sample_rate) == (24.0, 48000)
    frames, audio = pipe(**CALL, output_type="pt", return_dict=False, seed=5)
    assert torch.equal(frames, tensor.frames) and torch.equal(audio, tensor.audio)
    latent, sound = pipe(**CALL, output_type="latent", return_dict=False, seed=5)
    assert latent.shape == (1, 128, 2, 2, 2) and sound.shape == (1, 8, 9, 16)


def test_prompts_in_a_list_and_videos_per_prompt_have_seeds_that_count_up(pipe, latents):
    several = pipe(**CALL, output_type="latent", seed=5, num_videos_per_prompt=3)
    assert torch.equal(several.frames, torch.cat(latents))
    texts = ["birds sing", "waves crash on the shore"]
    two = pipe(**CALL | {"prompt": texts}, output_type="latent", seed=5).frames
    other = pipe(**CALL | {"prompt": texts[1]}, output_type="latent", seed=6).frames
    assert torch.equal(two, torch.cat([latents[0], other])) and not torch.equal(other, latents[1])


def test_one_generator_seeds_all_videos_or_a_list_has_one_for_each(pipe, latents):
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 5)]
    call = CALL | dict(num_videos_per_prompt=2, output_type="latent")
    assert torch.equal(pipe(**call, generator=generators).frames, torch.cat([latents[2], latents[0]]))
    drawn = pipe(**call, generator=torch.Generator().manual_seed(5)).frames
    assert torch.equal(drawn[:1], latents[0]) and not torch.equal(drawn[1:], latents[0])
    with pytest.raises(UserError, match="got 1 for 2 videos"):
        pipe(**call, generator=generators[:1])


def test_a_pil_image_conditions_as_its_file_does(pipe, tiny, latents):
    picture = Image.open(tiny.image)
    file, image, condition = (
        pipe(**CALL, output_type="latent", seed=5, image=image).frames
        for image in (tiny.image, picture, [ImageCondition(picture)])
    )
    assert torch.equal(image, file) and torch.equal(condition, file) and not torch.equal(file, latents[0])


def test_save_writes_the_file_of_output_path_and_numbers_several(pipe, tmp_path):
    written = pipe(**CALL, output_type="mp4", output_path=tmp_path / "wanted.mp4", seed=5).path
    one, two = pipe(**CALL, seed=5), pipe(**CALL, seed=5, num_videos_per_prompt=2)
    assert one.save(tmp_path / "one.mp4") == [tmp_path / "one.mp4"]
    assert (tmp_path / "one.mp4").read_bytes() == written.read_bytes()
    assert read_video(tmp_path / "one.mp4")["frame_count"] == 9
    first, second = two.save(str(tmp_path / "two.mp4"))
    assert (first.name, second.name) == ("two-1.mp4", "two-2.mp4")
    assert first.read_bytes() == written.read_bytes() != second.read_bytes()
    with pytest.raises(UserError, match="FILE.mp4"):
        one.save(tmp_path / "out.mov")
    with pytest.raises(UserError, match="output_type='latent' holds no frames"):
        pipe(**CALL, output_type="latent").save(tmp_path / "out.mp4")
    with pytest.raises(UserError, match=r"one path for 2 videos.* type result.save\('a.mp4'\)"):
        pipe(**CALL, num_videos_per_prompt=2, output_type="mp4", output_path="a.mp4")


def test_a_callback_of_diffusers_runs_and_learns_that_latents_are_elsewhere(pipe):
    steps = []

    def progress(pipe, step, timestep, callback_kwargs):
        steps.append((step, timestep, callback_kwargs["sigma"]))
        return callback_kwargs

    pipe(**CALL, output_type="latent", callback_on_step_end=progress)
    assert len(steps) == 8 and steps[0] == (0, 1000.0, 1.0)
    with pytest.raises(UserError, match="'latents'.: known: stage, sigma. Latents stay"):
        pipe(**CALL, callback_on_step_end=lambda pipe, step, t, values: values["latents"])


def test_devices_offloading_and_tiling_have_no_effect_and_one_note_each(pipe, capsys):
    print_once.cache_clear()
    for _ in range(2):
        assert pipe.to("cuda").enable_model_cpu_offload() is pipe
        pipe.enable_sequential_cpu_offload()
        pipe.enable_vae_tiling()
        pipe.vae.enable_tiling()
        pipe.vae.to(torch.float32)
    words = "to enable_model_cpu_offload enable_sequential_cpu_offload enable_vae_tiling enable_tiling"
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == words.split()


UNKNOWN = {
    "call": {
        "guidance_scale": "video_cfg_guidance_scale=3.0, with recipe='dev'",
        "callback_on_step_end_tensor_inputs": "latents stay on the ranks",
        "fps": "frame_rate=24.0",
        "num_frame": "did you mean num_frames?",
    },
    "from_pretrained": {
        "pretrained_model_name_or_path": "here: checkpoint_path=",
        "device_map": "profile='trn2.3xlarge'",
        "revision": "checkpoint_path='OWNER/REPO@REVISION'",
        "gema_root": "did you mean gemma_root?",
    },
    "attribute": {
        "load_lora_weights": "loras=[('FILE', 1.0)], in from_pretrained or in a call; prepare --lora",
        "scheduler": "sampler= of a call",
        "vocoder": "result.sample_rate",
        "engin": "did you mean engine?",
    },
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_argument_or_attribute_is_refused_with_what_to_type(pipe, kind):
    uses = {
        "call": lambda name: pipe(**CALL, **{name: 3.0}),
        "from_pretrained": lambda name: pipe.from_pretrained("a", **{name: "x"}),
        "attribute": lambda name: getattr(pipe, name),
    }
    for name, advice in UNKNOWN[kind].items():
        with pytest.raises(AttributeError if kind == "attribute" else TypeError) as error:
            uses[kind](name)
        assert name in str(error.value) and advice in str(error.value)
