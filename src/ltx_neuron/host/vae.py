"""The released video decoder, run faster on a CPU: ltx-core's modules and weights with another
forward (vae_stages.py)."""

import torch
from ltx_core.model.video_vae import VideoDecoder
from ltx_core.model.video_vae.ops import unpatchify
from ltx_core.model.video_vae.resnet import UNetMidBlock3D
from ltx_core.model.video_vae.sampling import DepthToSpaceUpsample
from torch import Tensor

from ltx_neuron.host.background import Workers
from ltx_neuron.host.tiles import EagerDecoder
from ltx_neuron.host.vae_stages import KNOWN, Stage, TakenOver, activate
from ltx_neuron.host.winograd import LARGEST_FILTERS


class FastVideoDecoder(TakenOver, EagerDecoder):
    """A loaded ltx-core video decoder with another forward, see TakenOver."""

    name = "decoder"
    released = KNOWN | {
        VideoDecoder: lambda m: not m.causal and not m.timestep_conditioning,
        DepthToSpaceUpsample: lambda m: not m.residual,
    }

    @torch.no_grad()
    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Decode normalised latents (B, 128, F, h, w) to frames (B, 3, 8F-7, 32h, 32w), float32 in
        about [-1, 1].

        `timestep` and `generator` are in ltx-core's signature; the released decoder uses neither.
        """
        self.give_back(sample[:, 0].numel())
        with Workers() as workers:
            latents = self.per_channel_statistics.un_normalize(sample.float())
            return torch.stack([self._decode(latent, workers) for latent in latents])

    def _decode(self, latent: Tensor, workers: Workers) -> Tensor:
        """Decode one latent (128, F, h, w), un-normalised, to frames (3, 8F-7, 32h, 32w)."""
        stage = _DecoderStage.first(latent, self.conv_in.conv, workers, self.arithmetic)
        for block in self.up_blocks:
            if isinstance(block, UNetMidBlock3D):
                stage.add_residuals(block)
            else:
                stage = stage.upsample(block)
                self.give_back_between_stages()
        conv = self.conv_out.conv
        pixels = stage.convolved(stage.active, conv.weight, conv.bias).permute(3, 0, 1, 2)
        return unpatchify(pixels[None], self.patch_size)[0]


class _DecoderStage(Stage):
    def upsample(self, block: DepthToSpaceUpsample) -> "_DecoderStage":
        """The next stage: a convolution, whose output channels become positions.

        With a stride of (p1, p2, p3), output channel (c, i1, i2, i3) of the convolution is channel
        c at one of the p1 x p2 x p3 positions that take the place of one. A stride of 2 in time
        gives 2F frames, of which the first is dropped.
        """
        del self.active, self.middle  # room for the next stage, which is up to 8 times as large
        frames, height, width, inputs = self.features.shape
        time, down, across = block.stride
        parts = time * down * across
        # Channels are ordered (c, part); as (part, c) some parts can be convolved alone.
        weight = block.conv.conv.weight.unflatten(0, (-1, parts)).transpose(0, 1)
        bias = block.conv.conv.bias.unflatten(0, (-1, parts)).transpose(0, 1)
        channels = weight.shape[1]
        larger = frames * time - (time - 1), height * down, width * across
        stage = _DecoderStage(*larger, channels, self.workers, self.arithmetic)
        parts_at_once = max(1, LARGEST_FILTERS // (inputs * channels))
        for first in range(0, parts, parts_at_once):

            def write(f: slice, r: slice, piece: Tensor, first: int = first) -> None:
                for part, content in enumerate(piece.split(channels, dim=-1), first):
                    t, y, x = part // (down * across), part // across % down, part % across
                    start, stop = (frame * time + t - (time - 1) for frame in (f.start, f.stop))
                    if start < 0:  # the first frame, which is dropped
                        start, content = start + time, content[1:]
                    positions = (
                        slice(start, stop, time),
                        slice(r.start * down + y, r.stop * down, down),
                        slice(x, None, across),
                    )
                    stage.features.inner[positions] = content
                    activate(content, stage.active.inner[positions])

            some = slice(first, first + parts_at_once)
            self.convolve(self.features, weight[some].flatten(0, 1), bias[some].flatten(), write)
        stage.repeat_end_frames()
        return stage
