"""What a video looks like between two steps: the matrix from latents to colours, the prediction,
and how often latents are read back."""

from io import BytesIO
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.nn import functional

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from jobs import make_job

from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.sampling.latents import patchify_video
from ltx_neuron.service import preview
from ltx_neuron.service.preview import Previews

STAGE = make_job("", Size(64, 96, 9)).stages[0]  # latents (1, 128, 2, 2, 3)
MIXED = torch.linalg.qr(torch.randn(128, 3, generator=torch.Generator().manual_seed(1)))[0]


def encode(pixels: torch.Tensor) -> torch.Tensor:
    """An encoder whose latents are a pixel's mean colour, mixed into 128 channels."""
    colours = functional.avg_pool2d(pixels[:, :, 0], 32)[0]
    return torch.einsum("ck,khw->chw", MIXED * 3, colours)[None, :, None]


def test_the_matrix_of_an_encoder_gives_the_colours_back():
    colours = torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(2)) * 0.6 + 0.2
    pixels = colours.permute(2, 0, 1).repeat_interleave(32, 1).repeat_interleave(32, 2)
    latent = preview.middle(encode(pixels[None, :, None] * 2 - 1))
    got = preview.with_one(latent) @ preview.fitted(encode)
    torch.testing.assert_close(got, colours, atol=0.02, rtol=0)


@pytest.mark.parametrize("step", range(STAGE.steps))
def test_what_a_step_predicts_is_found_from_the_latents_around_it(step):
    clean, noise = torch.randn(2, 4, 6, 128, generator=torch.Generator().manual_seed(3))
    sigma, sigma_next = STAGE.sigmas[step : step + 2]
    before, after = (clean + s * (noise - clean) for s in (sigma, sigma_next))
    got = preview.predicted(before, after, sigma, sigma_next)
    torch.testing.assert_close(got, clean, atol=2e-3, rtol=0)


def test_a_preview_is_a_small_picture_of_the_videos_shape():
    latent = torch.randn(16, 24, 128, generator=torch.Generator().manual_seed(4))
    image = Image.open(BytesIO(preview.picture(latent, torch.randn(129, 3))))
    assert (image.format, image.size) == ("JPEG", (256, 171))


def test_latents_that_are_no_numbers_are_a_picture_all_the_same():
    assert preview.picture(torch.full((2, 2, 128), float("nan")), torch.ones(129, 3))


class Engine:
    """What Previews asks of an engine, with counted answers."""

    def __init__(self, folder):
        self.fits, self.reads = 0, 0
        self.workspace = SimpleNamespace(artifacts=folder, checkpoint=SimpleNamespace(fingerprint="f"))
        self.host = SimpleNamespace(encode_image=self.encode_image)
        latent = torch.randn(1, 128, 2, 2, 3)
        self.stage_run = SimpleNamespace(
            video=patchify_video(latent),
            latent_shape=(2, 2, 3),
            video_latent=self.video_latent,
            predicted_video=lambda: None,
        )

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        self.fits += 1
        return encode(pixels)

    def video_latent(self) -> torch.Tensor:
        self.reads += 1
        return torch.randn(1, 128, 2, 2, 3)


def shown(previews: Previews, seconds_a_step: float, clock: list[float]) -> list[bool]:
    """Whether each step of a stage gave a picture."""
    given = []
    for number in range(STAGE.steps):
        clock[0] += seconds_a_step
        given.append(previews.after_step(STAGE, number) is not None)
    return given


def test_slow_steps_are_read_back_once_each(tmp_path):
    clock, engine = [0.0], Engine(tmp_path)
    assert shown(Previews(engine, lambda: clock[0]), 1.0, clock) == [True] * STAGE.steps
    assert engine.reads == STAGE.steps


def test_of_fast_steps_two_are_read_back_for_a_picture(tmp_path):
    clock, engine = [0.0], Engine(tmp_path)
    given = shown(Previews(engine, lambda: clock[0]), 0.1, clock)
    # The first step's latents begin on the host; then none for 0.25 s, and one to compare with.
    assert given == [True, False, False, False, True, False, False, False]
    assert engine.reads == 4  # steps 1, 4, 5 and 8


def test_of_a_sampler_that_keeps_its_prediction_that_is_shown_and_nothing_is_read_back(tmp_path):
    """Latents of res_2s hold new noise: an Euler step to 0 from two of them would show that."""
    clock, engine = [0.0], Engine(tmp_path)
    previews = Previews(engine, lambda: clock[0])
    clean = torch.randn(1, 128, 2, 2, 3)
    engine.stage_run.predicted_video = lambda: clean
    clock[0] = 1.0
    wanted = preview.picture(preview.middle(clean), previews.matrix)
    assert previews.after_step(STAGE, 5) == wanted and engine.reads == 0
    assert previews.after_step(STAGE, 6) is None  # too soon


def test_a_step_of_another_stage_is_not_compared_with(tmp_path):
    clock, engine = [0.0], Engine(tmp_path)
    previews = Previews(engine, lambda: clock[0])
    other = make_job("", Size(64, 64, 9)).stages[0]
    clock[0] = 1.0
    assert previews.after_step(STAGE, 0)
    clock[0] = 2.0
    assert previews.after_step(other, 1) is None


def test_a_job_is_not_compared_with_the_latents_of_the_one_before(tmp_path):
    """Which may be another owner's. Its own first step came too soon after that one's picture."""
    clock, engine = [0.0], Engine(tmp_path)
    previews = Previews(engine, lambda: clock[0])
    clock[0] = 1.0
    assert previews.after_step(STAGE, 0)
    clock[0] += preview.SECONDS / 2
    assert previews.after_step(STAGE, 0) is None  # of the next job
    clock[0] += preview.SECONDS
    assert previews.after_step(STAGE, 1) is None
    clock[0] += preview.SECONDS
    assert previews.after_step(STAGE, 2)


def test_a_checkpoint_without_an_encoder_has_no_previews_which_is_said(tmp_path, capsys):
    def missing(pixels):
        raise UserError("no tensors of the video encoder")

    engine = Engine(tmp_path)
    engine.host.encode_image = missing
    assert preview.previews_of(engine) is None
    assert "no previews: no tensors" in capsys.readouterr().out


def test_the_matrix_is_fitted_once_for_a_checkpoint_and_again_where_its_file_is_damaged(tmp_path):
    first, second, third = Engine(tmp_path), Engine(tmp_path), Engine(tmp_path)
    matrix = Previews(first).matrix
    assert torch.equal(Previews(second).matrix, matrix) and first.fits and not second.fits
    (file,) = (tmp_path / "preview").iterdir()
    file.write_text('{"matrix": [[1, 2, 3]]}')
    assert torch.equal(Previews(third).matrix, matrix) and third.fits
