"""Previews between two steps: the matrix to colours, the prediction, and how often latents are read back."""

from io import BytesIO
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import generator, randn
from PIL import Image
from torch.nn import functional

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from jobs import make_job

from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.sampling.latents import patchify_video
from ltx_neuron.service import preview
from ltx_neuron.service.preview import SECONDS, Previews
from ltx_neuron.service.worker import with_thumbnail

STAGE, OTHER = (make_job("", Size(64, width, 9)).stages[0] for width in (96, 64))
LATENT = 1, 128, 2, 2, 3
MIXED = torch.linalg.qr(randn(128, 3, seed=1))[0]


def encode(pixels: torch.Tensor) -> torch.Tensor:
    """An encoder whose latents are a pixel's mean colour, mixed into 128 channels."""
    colours = functional.avg_pool2d(pixels[:, :, 0], 32)[0]
    return torch.einsum("ck,khw->chw", MIXED * 3, colours)[None, :, None]


def test_the_matrix_of_an_encoder_gives_the_colours_back():
    colours = torch.rand(4, 6, 3, generator=generator(2)) * 0.6 + 0.2
    pixels = colours.permute(2, 0, 1).repeat_interleave(32, 1).repeat_interleave(32, 2)
    fitted = preview.with_one(preview.middle(encode(pixels[None, :, None] * 2 - 1))) @ preview.fitted(encode)
    torch.testing.assert_close(fitted, colours, atol=0.02, rtol=0)


def test_what_a_step_predicts_is_found_from_the_latents_around_it():
    clean, noise = randn(2, 4, 6, 128, seed=3)
    for sigma, sigma_next in zip(STAGE.sigmas, STAGE.sigmas[1:], strict=False):
        before, after = (clean + s * (noise - clean) for s in (sigma, sigma_next))
        predicted = preview.predicted(before, after, sigma, sigma_next)
        torch.testing.assert_close(predicted, clean, atol=2e-3, rtol=0)


def test_a_preview_is_a_small_picture_of_the_videos_shape_also_of_latents_that_are_no_numbers():
    for latent in (randn(16, 24, 128), torch.full((16, 24, 128), float("nan"))):
        image = Image.open(BytesIO(preview.picture(latent, randn(129, 3))))
        assert (image.format, image.size) == ("JPEG", (256, 171))


@pytest.fixture
def engine(tmp_path):
    """What Previews asks of an engine, with counted answers."""
    read = Mock(side_effect=lambda: torch.randn(LATENT))
    run = SimpleNamespace(video=patchify_video(torch.randn(LATENT)), latent_shape=LATENT[2:], video_latent=read)
    run.predicted_video = lambda: None
    workspace = SimpleNamespace(artifacts=tmp_path, checkpoint=SimpleNamespace(fingerprint="f"))
    host = SimpleNamespace(encode_image=Mock(side_effect=encode))
    return SimpleNamespace(workspace=workspace, host=host, stage_run=run)


def shown(engine, *steps) -> list[bool]:
    """Whether there is a picture after each of (seconds since the one before, stage, step)."""
    now = [0.0]
    previews, pictures = Previews(engine, lambda: now[0]), []
    for seconds, stage, number in steps:
        now[0] += seconds
        pictures.append(previews.after_step(stage, number) is not None)
    return pictures


def test_slow_steps_are_read_back_once_each_and_two_fast_ones_for_a_picture(engine):
    assert all(shown(engine, *((1.0, STAGE, number) for number in range(STAGE.steps))))
    read = engine.stage_run.video_latent
    assert read.call_count == STAGE.steps
    read.reset_mock()
    pictures = shown(engine, *((0.1, STAGE, number) for number in range(8)))
    # The first step's latents begin on the host; then none for 0.25 s, and one to compare with: 1, 4, 5 and 8.
    assert [number for number, picture in enumerate(pictures) if picture] == [0, 4] and read.call_count == 4


def test_a_samplers_own_prediction_is_shown_and_nothing_is_read_back(engine):
    """Latents of res_2s hold new noise: an Euler step to 0 from two of them would show that."""
    previews, clean = Previews(engine, lambda: 1.0), torch.randn(LATENT)
    engine.stage_run.predicted_video = lambda: clean
    assert previews.after_step(STAGE, 5) == preview.picture(preview.middle(clean), previews.matrix)
    assert not engine.stage_run.video_latent.called and previews.after_step(STAGE, 6) is None  # too soon


def test_a_stage_or_a_job_is_not_compared_with_the_latents_of_the_one_before(engine):
    """Which may be another owner's."""
    steps = (1, STAGE, 0), (1, OTHER, 1), (1, STAGE, 0), (SECONDS / 2, STAGE, 0), (SECONDS, STAGE, 1)
    # The fourth is of the next job, too soon after that picture.
    assert shown(engine, *steps, (SECONDS, STAGE, 2)) == [True, False, True, False, False, True]


def test_the_matrix_is_fitted_once_for_a_checkpoint_that_has_an_encoder(engine, tmp_path, capsys):
    fit, matrix = engine.host.encode_image, Previews(engine).matrix
    pictures = fit.call_count
    assert torch.equal(Previews(engine).matrix, matrix) and fit.call_count == pictures > 0
    (file,) = (tmp_path / "preview").iterdir()
    file.write_text('{"matrix": [[1, 2, 3]]}')  # damaged
    assert torch.equal(Previews(engine).matrix, matrix) and fit.call_count == 2 * pictures
    file.unlink()
    fit.side_effect = UserError("no tensors of the video encoder")
    assert preview.previews_of(engine) is None and "no previews: no tensors" in capsys.readouterr().out


def test_a_clips_thumbnail_is_its_middle_frame_in_whichever_chunk_it_comes(tmp_path):
    frames = torch.tensor([0, 50, 200, 100, 150], dtype=torch.uint8)[:, None, None, None].expand(5, 64, 96, 3)
    chunks = frames[:2], frames[2:]
    passed = [*with_thumbnail(iter(chunks), SimpleNamespace(output_frames=5), tmp_path / "tile.jpg")]
    assert all(map(torch.equal, passed, chunks))
    with Image.open(tmp_path / "tile.jpg") as picture:
        assert picture.getpixel((5, 5)) == (200, 200, 200)
