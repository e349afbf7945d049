"""LTX-2.5's DFR against a loop of its own: the tokens, the noise and the steps of a round's windows, written down from
the release's rules for one clip. A whole job, which is resumed in a window; and the service's videos."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
import serving
import split_runs
import torch
from helpers import clip_times, generator, predicted_video, randn, random_lora, read_video, rel, token_positions
from jobs import make_job
from ltx25_step import CONFIG, contexts, opened_run, texts, weights
from safetensors.torch import load_file

from ltx_neuron.commands import dispatch
from ltx_neuron.denoise import StageRun, starting_states
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.service.fields import read_request
from ltx_neuron.service.jobs import VIDEO

runs = split_runs.runs  # a fixture
# 73 frames at 24 fps are three segments of 24. A round's clip has 145 frames, 19 latents, keyframes at 48, 96, 144, and
# new ones at 24, 72, 120. The windows are two segments and one.
SEED, IMAGE = 7, ImageCondition("", 40, 0.6, 18)  # the frame 80 of the round's clip
SIGMAS = 0.975, 0.909375, 0.725, 0.421875, 0.0
GIVEN = {"s1_audio": randn(1, 8, 76, 16, seed=1), "s2_video": randn(1, 128, 10, 2, 2, seed=2)}
GIVEN |= {"s2_generated_keyframes": randn(1, 128, 3, 2, 2, seed=3)}  # of frames 48, 96, 144
GIVEN |= {"temporal_video": randn(1, 128, 19, 2, 2, seed=4)}
PICTURE = randn(1, 128, 1, 2, 2, seed=5)
# By release: the recipe, the frame rate that the model sees, the first latent of the clip's end that window 2 owns; and
# for each window its first frame, its latents, how many it holds, the frames of given and of new keyframes, its image,
# and latents of sound.
RELEASES = {
    "1.4": (*("distilled", 60.0, 4), [(0, 13, 0, (48, 96), (24, 72), 80, 40), (72, 10, 4, (72,), (48,), 8, 30)]),
    "1.2.0": (*("dev", 48.0, 7), [(0, 13, 0, (48, 96), (24, 72), 40, 0), (48, 13, 0, (0, 48, 96), (24, 72), None, 0)]),
}


def rendered(recipe: str) -> torch.Tensor:
    """The round's latents (1, 128, 19, 2, 2) by the project's own stages."""
    size, inputs = Size(64, 64, 73, 24.0, two_stage=True), dict(recipe=recipe, dfr=True, temporal_upsample_rounds=1)
    job, tensors, noise = make_job("", size, SEED, images=(IMAGE,), **inputs), dict(GIVEN), generator(SEED)
    for stage in job.stages[2:]:
        of, run = job.of(stage), opened_run(job.bucket(stage))
        images = [(image, PICTURE) for image in of.images]
        run.prepare(of, stage, texts(), starting_states(job, stage, tensors, images, torch.float32), noise)
        run.start()
        for number in range(stage.steps):
            run.step(number)
        tensors[f"{stage.key}_video"], _ = run.result()
        tensors[f"{stage.key}_generated_keyframes"] = run.generated_keyframes()
    return job.rendering.final(tensors)


def tokens(latent: torch.Tensor) -> torch.Tensor:
    return latent[0].permute(1, 2, 3, 0).reshape(1, -1, 128)


def latent(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.reshape(-1, 2, 2, 128).permute(3, 0, 1, 2)[None]


def sound_of(start: int, count: int, sounds: int) -> torch.Tensor | None:
    """A window's tokens: of its frames, at 48 fps, as a share of the clip's 73 / 24 seconds."""
    if not sounds:
        return None
    frames, span, audio = 8 * count - 7, 76 / (73 / 24), GIVEN["s1_audio"]
    at = (start + frames * torch.arange(sounds) / sounds) / 48 * span
    left = at.floor().long()
    part = (at - left)[:, None]
    latents = audio[:, :, left] * (1 - part) + audio[:, :, (left + 1).clamp(max=75)] * part
    return latents.transpose(1, 2).flatten(2)


def looped(release: str) -> torch.Tensor:
    _, fps, owned, windows = RELEASES[release]
    clip, stills = GIVEN["temporal_video"], GIVEN["s2_generated_keyframes"].split(1, dim=2)
    planes = dict(zip((48, 96, 144), stills, strict=True))
    initial, done = generator(SEED), []
    given_contexts = dict(zip(("video_context", "audio_context"), contexts(), strict=True))
    for number, (start, count, held, given, new, image, sounds) in enumerate(windows):
        video, times = clip[:, :, start // 8 : start // 8 + count].clone(), clip_times(count)
        x, clean, mask = tokens(video), tokens(video).clone(), torch.ones(4 * count, 1)
        marked = (torch.arange(4 * count) < 4).float()[:, None]
        if held:  # latents 10, 11, 12 of the clip, after the keyframe of frame 72
            clean[:, : 4 * held] = tokens(torch.cat([planes[72], done[0][:, :, 10:13]], dim=2))
            mask[: 4 * held] = 0
        keyframes = [] if image is None else [(image, PICTURE, 0.4)]
        keyframes += [(frame, planes[start + frame], 0.05) for frame in given] + [(frame, None, 1.0) for frame in new]
        for frame, still, weight in keyframes:  # given ones are held, new ones are generated
            times.append((frame, frame + 1))
            nothing, generated = torch.zeros(1, 4, 128), still is None
            own = tokens(video[:, :, frame // 8 : frame // 8 + 1]) if generated else nothing
            x = torch.cat([x, own], dim=1)
            clean = torch.cat([clean, nothing if generated else tokens(still)], dim=1)
            mask = torch.cat([mask, torch.full((4, 1), weight)])
            marked = torch.cat([marked, torch.full((4, 1), float(generated))])
        sound, where = sound_of(start, count, sounds), token_positions(times, fps, 2, 2)
        noise = torch.randn(x.shape, generator=initial)
        if sounds:
            torch.randn(1, sounds, 128, generator=initial)
        x = mask * (0.025 * x + 0.975 * noise) + (1 - mask) * clean
        added = generator(SEED + 1000 + number)
        for sigma, end in zip(SIGMAS, SIGMAS[1:], strict=False):
            inputs = dict(video_latent=x, keyframes_mask=marked, **given_contexts)
            x0 = predicted_video(CONFIG, weights(), mask, clean, where, sigma, sound, **inputs)
            if end == 0:
                x = x0
                continue
            down = end * (1 + (end / sigma - 1) / 2)
            signal = (1 - end) / (1 - down)
            spread = (end**2 - (down * signal) ** 2) ** 0.5
            noise = torch.randn(x.shape, generator=added)
            if sounds:
                torch.randn(1, sounds, 128, generator=added)
            x = signal * (down / sigma * x + (1 - down / sigma) * x0) + spread * noise
            x = mask * x + (1 - mask) * clean
        done.append(latent(x[0, : 4 * count]))
        for frame, still in zip(new, x[0, -4 * len(new) :].split(4), strict=True):
            planes.setdefault(start + frame, latent(still))
    return torch.cat([done[0], done[1][:, :, owned:]], dim=2)


@torch.no_grad()
@pytest.mark.parametrize("release", RELEASES)
def test_a_round_equals_a_loop_over_its_windows(release):
    got = rendered(RELEASES[release][0])
    assert rel(got, looped(release)) < 2e-6
    assert rel(got, GIVEN["temporal_video"]) > 0.1


def test_a_job_that_is_killed_in_a_window_is_resumed_to_the_same_bytes(split, tmp_path, monkeypatch, capsys):
    runs, layer = (
        split_runs.Runs(folder=split.folder, artifacts=tmp_path / "artifacts"),
        "transformer_blocks.0.attn1.to_q",
    )
    lora = random_lora(tmp_path / "detail", split.distilled, layer, reference_downscale_factor="2")
    flags = ["--dfr", "--two-stage", "--height", 64, "--width", 128, "--num-frames", 17]
    flags += ["--temporal-upscalings", 1, "--detailing-lora", lora]
    dispatch(runs.words("prepare", *flags))

    def generate(name: str, *more: object) -> bytes:
        out = tmp_path / f"{name}.mp4"
        words = ["--prompt", "a red fox", "--output-path", out, "--save-tensors", tmp_path / name]
        dispatch(runs.words("generate", *flags, *words, *more))
        return out.read_bytes()

    whole = generate("whole")
    tensors = load_file(tmp_path / "whole")
    assert tensors["final_video"].shape == (1, 128, 5, 2, 4)
    assert torch.equal(tensors["s2_reference_latent"], tensors["s1_video"])
    assert torch.equal(tensors["final_audio"], tensors["s1_audio"])
    facts = read_video(tmp_path / "whole.mp4")
    assert (facts["frame_count"], facts["frame_rate"]) == (33, 48)
    described = json.loads((tmp_path / "whole.json").read_text())
    assert described["sigmas"]["stage_3"] == pytest.approx(SIGMAS)
    step = StageRun.step

    def kill(stage_run, number):
        if stage_run.stage.temporal and number == 1:
            os.kill(stage_run.ranks._processes[0].pid, signal.SIGKILL)
        return step(stage_run, number)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "step", kill)
        with pytest.raises(Exception, match="the process was killed"):
            generate("killed")
    assert generate("killed", "--resume") == whole
    assert "is left" in capsys.readouterr().out


def test_the_service_makes_the_bytes_of_the_batch(runs, split, tmp_path):
    assets = SimpleNamespace(checkpoint=split.distilled, gemma_root=None, spatial_upsampler=None)
    fields = {"prompt": "a red fox", "size": "128x64", "two_stage": True, "num_generated_keyframes": 1}
    with serving.worker(runs, assets, tmp_path, neuron_gemma=False) as (working, intake):
        entry = intake.accept(read_request(fields), "ada")
        serving.run_until(working, entry)
        assert (working.queue.folder_of(entry.id) / VIDEO).read_bytes() == runs.wanted[0]
        assert intake.sizes.inputs["num_generated_keyframes"]
