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


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path)


@pytest.fixture
def previews(engine, clock):
    return Previews(engine, lambda: clock[0])


@pytest.mark.parametrize(
    ("seconds", "pictures", "reads"),
    [
        (1.0, [True] * STAGE.steps, STAGE.steps),
        # The first step's latents begin on the host; then none for 0.25 s, and one to compare with.
        (0.1, [True, False, False, False, True, False, False, False], 4),  # steps 1, 4, 5 and 8
    ],
)
def test_slow_steps_are_read_back_once_each_and_two_fast_ones_for_a_picture(
    previews, engine, clock, seconds, pictures, reads
):
    for number, picture in enumerate(pictures):
        clock[0] += seconds
        assert (previews.after_step(STAGE, number) is not None) == picture
    assert engine.reads == reads


def test_a_samplers_own_prediction_is_shown_and_nothing_is_read_back(previews, engine, clock):
    """Latents of res_2s hold new noise: an Euler step to 0 from two of them would show that."""
    clean = torch.randn(1, 128, 2, 2, 3)
    engine.stage_run.predicted_video = lambda: clean
    clock[0] = 1.0
    picture = preview.picture(preview.middle(clean), previews.matrix)
    assert previews.after_step(STAGE, 5) == picture and engine.reads == 0
    assert previews.after_step(STAGE, 6) is None  # too soon


def test_a_stage_or_a_job_is_not_compared_with_the_latents_of_the_one_before(previews, clock):
    """Which may be another owner's."""
    other, picture = make_job("", Size(64, 64, 9)).stages[0], previews.after_step
    clock[0] = 1.0
    assert picture(STAGE, 0)
    clock[0] = 2.0
    assert picture(other, 1) is None
    clock[0] = 3.0
    assert picture(STAGE, 0)
    clock[0] += preview.SECONDS / 2
    assert picture(STAGE, 0) is None  # of the next job, too soon after that picture
    clock[0] += preview.SECONDS
    assert picture(STAGE, 1) is None
    clock[0] += preview.SECONDS
    assert picture(STAGE, 2)


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
