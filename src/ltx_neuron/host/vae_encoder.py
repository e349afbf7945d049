"""The released video encoder, run faster on a CPU: ltx-core's modules and weights with another
forward (vae_stages.py)."""

import itertools
import math

import torch
from ltx_core.model.video_vae import VideoEncoder
from ltx_core.model.video_vae.enums import LogVarianceType
from ltx_core.model.video_vae.ops import patchify
from ltx_core.model.video_vae.resnet import UNetMidBlock3D
from ltx_core.model.video_vae.sampling import SpaceToDepthDownsample
from torch import Tensor

from ltx_neuron.host.background import Workers
from ltx_neuron.host.vae_stages import KNOWN, Stage, TakenOver, activate
from ltx_neuron.host.winograd import NUMBERS_IN_CACHE
from ltx_neuron.sampling.latents import SPACE_SCALE, TIME_SCALE


class FastVideoEncoder(TakenOver, VideoEncoder):
    """A loaded ltx-core video encoder with another forward, see TakenOver."""

    name = "encoder"
    released = KNOWN | {
        VideoEncoder: lambda m: m.latent_log_var == LogVarianceType.UNIFORM,
        SpaceToDepthDownsample: lambda m: math.prod(m.stride) % m.group_size == 0,
    }

    @torch.no_grad()
    def forward(self, sample: Tensor) -> Tensor:
        """Encode frames (B, 3, 8F-7, 32h, 32w) in [-1, 1] as normalised latents (B, 128, F, h, w),
        float32. As in ltx-core further frames are left out. Raises ValueError for other sides."""
        _, _, frames, height, width = sample.shape
        if height % SPACE_SCALE or width % SPACE_SCALE:
            raise ValueError(f"wanted multiples of {SPACE_SCALE} pixels, got {height}x{width}")
        frames -= (frames - 1) % TIME_SCALE
        self.give_back(len(sample) * math.ceil(frames / TIME_SCALE) * height * width // 1024)
        with Workers() as workers:
            means = [self._encode(video[:, :frames], workers) for video in sample]
        return self.per_channel_statistics.normalize(torch.stack(means))

    def _encode(self, video: Tensor, workers: Workers) -> Tensor:
        """Encode one video (3, 8F-7, 32h, 32w) as latents (128, F, h, w) before they are
        normalised."""
        stage = _EncoderStage.first(
            patchify(video[None], self.patch_size)[0], self.conv_in.conv, workers, self.arithmetic
        )
        for block in self.down_blocks:
            if isinstance(block, UNetMidBlock3D):
                stage.add_residuals(block)
            else:
                stage = stage.downsample(block)
                self.give_back_between_stages()
        conv, means = self.conv_out.conv, slice(self.latent_channels)  # before their variance
        latents = stage.convolved(stage.active, conv.weight[means], conv.bias[means])
        return latents.permute(3, 0, 1, 2)


class _EncoderStage(Stage):
    causal = True

    def downsample(self, block: SpaceToDepthDownsample) -> "_EncoderStage":
        """The next stage: a convolution, of which positions become channels, and beside it the
        features, whose positions become channels that are averaged in groups.

        With a stride of (p1, p2, p3), channel c at one of p1 x p2 x p3 positions is channel
        (c, i1, i2, i3) of the one that takes their place. A stride of 2 in time takes the first
        frame twice: of the features and of the convolution, which reads that frame alone for both.
        """
        del self.active, self.middle  # room for the next stage
        conv, steps, group = block.conv.conv, block.stride, block.group_size
        result = self.convolved(self.features, conv.weight, conv.bias)
        *sizes, _ = self.features.shape
        smaller = [-(-size // step) for size, step in zip(sizes, steps, strict=True)]
        parts = [*itertools.product(*map(range, steps))]
        channels = conv.out_channels * len(parts)
        stage = _EncoderStage(*smaller, channels, self.workers, self.arithmetic)
        rows_at_once = max(1, NUMBERS_IN_CACHE // (smaller[2] * channels))

        def write(corner: tuple[int, int]) -> None:
            frame, start = corner
            stop = min(smaller[1], start + rows_at_once)
            piece = self.workers.scratch("piece", stop - start, smaller[2], channels)
            taken = [_positions(frame, start, stop, part, steps) for part in parts]
            for number, positions in enumerate(taken):
                piece[..., number :: len(parts)] = result[positions]
            for number, positions in enumerate(taken):
                own = piece[..., number // group :: len(parts) // group]
                own.add_(self.features.inner[positions], alpha=1 / group)
            place = frame, slice(start, stop)
            stage.features.inner[place] = piece
            activate(piece, stage.active.inner[place])

        self.workers.run(
            write, itertools.product(range(smaller[0]), range(0, smaller[1], rows_at_once))
        )
        stage.repeat_end_frames()
        return stage


def _positions(
    frame: int, start: int, stop: int, part: tuple[int, int, int], steps: tuple[int, int, int]
) -> tuple[int, slice, slice]:
    """Where one of the positions lies that a frame's rows `start` to `stop` take the place of."""
    (time, down, across), (t, y, x) = steps, part
    # The first frame is taken twice where time is 2.
    before = max(0, (frame - 1) * time + 1 + t)
    return before, slice(start * down + y, stop * down, down), slice(x, None, across)
