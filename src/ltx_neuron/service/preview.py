"""Previews of a video between two steps: small pictures from its latents, without the decoder.

A latent pixel covers 32x32 pixels. A matrix maps its 128 channels to their approximate mean colour.
The matrix is fitted to the checkpoint's encoder by least squares over synthetic pictures: colour
clouds whose neighbouring pixels resemble each other as in photographs. The artifacts cache it.

Latents between steps are mostly noise. The preview shows the step's prediction without noise, which
is on the line from the latents before the step to those after it.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ltx_neuron.config.common import digest
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import RunError, UserError
from ltx_neuron.files import read_json, write_json
from ltx_neuron.job import Stage
from ltx_neuron.sampling.latents import unpatchify_video
from ltx_neuron.sampling.shapes import SPACE_SCALE

SECONDS = 0.25  # minimum time between two pictures
LONGEST = 256  # maximum side of a picture
_SIDE, _PICTURES, _SEED = 256, 12, 0  # the synthetic pictures: 64 latent pixels each
_RIDGE = 1.0  # ridge regularization


class Previews:
    """Previews of the video that an engine denoises, at most one every SECONDS. A step longer than
    SECONDS reads the latents back from the ranks once: 1.6 MB for 121 frames of 768x512 in
    bfloat16. Shorter steps do so twice every SECONDS."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic):
        self.engine, self.clock, self.matrix = engine, clock, matrix_of(engine)
        self._shown = -SECONDS
        self._before: tuple[Stage, int, Tensor] | None = None

    def after_step(self, stage: Stage, number: int) -> bytes | None:
        """A JPEG of the middle frame; None within SECONDS of the last one."""
        if number == 0:  # of another stage or job, perhaps another owner's
            self._before = None
        if self.clock() - self._shown < SECONDS:
            return None
        run, before = self.engine.stage_run, self._before
        assert run
        if number == 0:  # the initial latents are on the host
            before = stage, -1, middle(unpatchify_video(run.video, run.latent_shape))
        if (clean := run.predicted_video()) is not None:
            self._shown = self.clock()
            return picture(middle(clean), self.matrix)
        latent = middle(run.video_latent())
        self._before = stage, number, latent
        if not before or before[:2] != (stage, number - 1):
            return None
        self._shown = self.clock()
        return picture(
            predicted(before[2], latent, *stage.sigmas[number : number + 2]), self.matrix
        )


def middle(video: Tensor) -> Tensor:
    """The latents of the middle frame of a video (1, 128, F, h, w): (h, w, 128)."""
    return video[0, :, video.shape[2] // 2].permute(1, 2, 0).float()


def predicted(before: Tensor, after: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """The latents without noise that an Euler step from one sigma to the next predicts."""
    return before + (after - before) * (sigma / (sigma - sigma_next))


def picture(latent: Tensor, matrix: Tensor) -> bytes:
    """Latents (h, w, 128) as a JPEG."""
    colours = (with_one(latent) @ matrix).nan_to_num(0.0).clamp(0, 1)
    image = Image.fromarray((colours * 255).byte().numpy())
    scale = LONGEST / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    file = BytesIO()
    image.resize((width, height), Image.Resampling.BICUBIC).save(file, format="JPEG", quality=80)
    return file.getvalue()


def previews_of(engine: Engine) -> Previews | None:
    """An engine's Previews; None, with a printed note, if the checkpoint has no encoder."""
    try:
        return Previews(engine)
    except (UserError, RunError) as error:
        print(f"no previews: {error}", flush=True)
        return None


def matrix_of(engine: Engine) -> Tensor:
    """The checkpoint's matrix (129, 3): cached, or fitted now."""
    workspace, host = engine.workspace, engine.host
    identity = digest([workspace.checkpoint.fingerprint, _SIDE, _PICTURES, _SEED, _RIDGE])
    path = workspace.artifacts / "preview" / f"{identity[:16]}.json"
    with suppress(UserError, ValueError, TypeError):  # absent, or damaged
        matrix = torch.tensor(read_json(path)["matrix"])
        if matrix.shape == (129, 3):
            return matrix
    loaded = "video_encoder" in vars(host)
    matrix = fitted(host.encode_image)
    if not loaded:  # free it: few jobs have an image
        vars(host).pop("video_encoder", None)
    with suppress(OSError):  # read-only folder: the next worker fits the matrix again
        write_json(path, {"matrix": matrix.tolist()})
    return matrix


def fitted(encode: Callable[[Tensor], Tensor]) -> Tensor:
    """The least-squares matrix (129, 3) from latents to the mean colours of their pixels. encode:
    pixels (1, 3, 1, H, W) in [-1, 1] to latents (1, 128, 1, H/32, W/32)."""
    generator = torch.Generator().manual_seed(_SEED)
    latents, colours = [], []
    for _ in range(_PICTURES):
        pixels = clouds(_SIDE, generator)
        latents.append(middle(encode(pixels[None, :, None] * 2 - 1)).flatten(0, 1))
        colours.append(functional.avg_pool2d(pixels, SPACE_SCALE).flatten(1).T)
    known = with_one(torch.cat(latents)).double()
    ridge = _RIDGE * torch.eye(known.shape[1], dtype=torch.double)
    ridge[-1, -1] = 0  # no penalty on the constant
    targets = torch.cat(colours).double()
    return torch.linalg.solve(known.T @ known + ridge, known.T @ targets).float()


def clouds(side: int, generator: torch.Generator) -> Tensor:
    """A picture (3, side, side) in [0, 1]: noise at every scale, stronger at larger scales."""
    total, cells = torch.zeros(3, side, side), 2
    while cells <= side:
        noise = torch.randn(1, 3, cells, cells, generator=generator)
        size, mode = (side, side), "bilinear"
        total += functional.interpolate(noise, size, mode=mode, align_corners=False)[0] / cells
        cells *= 2
    return total.mul(2).sigmoid()


def with_one(latent: Tensor) -> Tensor:
    """Append a channel of ones, for the constant row of the matrix."""
    return torch.cat([latent, torch.ones_like(latent[..., :1])], -1)
