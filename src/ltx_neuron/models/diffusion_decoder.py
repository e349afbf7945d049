"""The diffusion decoder of the video VAE, in the parts that a host or a rank runs one after the
other: from normalised latents and noise to pixels in one step.

Source: ltx-core 1.2.0 model/video_vae (diffusion_video_decoder.py, transformer/), with the meaning
of NATTEN's neighbourhood attention. Parameters have the file's names.

Stages before the last one upsample the latents. The last stage denoises pixels: the upsampled
features (the context) are projected and added before each of its blocks. A token attends to a
window of the kernel's size. At the video's borders the window is shifted inward, so every token
has the same number of keys.

A block computes some frames, the span, from the frames that their windows contain, the region. The
region has the same size for every span, and the span's place in it is data. A graph therefore
serves all spans, and blocks of a stage.

Shapes: T frames of a span, R frames of its region, H rows, W columns, C channels; features are
(T, H, W, C). Norms, rotations and softmax are fp32 in graphs of every dtype.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_neuron.config.diffusion import DiffusionDecoderConfig, cut
from ltx_neuron.config.video import Resampling
from ltx_neuron.models.video_decoder import Statistics

EPS = 1e-6  # of all RMS norms
MLP_RATIO = 4
TIMESTEP_FEATURES, TIMESTEP_CHANNELS = 256, 384
MODULATION_ROWS = 7  # scale and shift of attention and MLP, and three gates that are not used


class Neighbourhood(NamedTuple):
    """The data of a span's attention."""

    place: Tensor  # (T, R), one-hot: where the span's frames are in their region
    times: Tensor  # (T, R), 0 where a query has a key, otherwise lower than any score
    rows: Tensor  # (tiles, queries, keys), the same for the tiles of rows
    columns: Tensor  # and of columns
    # (2, positions, F): cosines and sines of the region's frames, of rows and of columns
    time_rope: Tensor
    row_rope: Tensor
    column_rope: Tensor


# The fields of a Neighbourhood that differ between spans.
OF_SPAN = ("place", "times")


def rotate(x: Tensor, *tables: Tensor) -> Tensor:
    """Rotate neighbouring channels of (H, T, rows, columns, D) by frame, row and column. tables:
    (2, positions, F) each. fp32."""
    x, rotated, first = x.float(), [], 0
    for axis, table in enumerate(tables):
        part = narrowed(x, x.ndim - 1, first, channels := 2 * table.shape[-1])
        first += channels
        shape = [table.shape[1] if axis == dim else 1 for dim in range(3)]
        cos, sin = (part.view(*shape, -1) for part in table.float().unbind(0))
        even, odd = part.unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        rotated.append(pairs.flatten(-2))
    return torch.cat(rotated, -1)


def narrowed(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Some positions of a dimension. A slice of all of them would be an operation of its own."""
    before = (slice(None),) * dim
    return x if size == x.shape[dim] else x[*before, start : start + size]


class RMSNorm(nn.Module):
    """RMS norm over the last dimension, with weights; returns fp32."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight.float()


def neighbourhood_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: tuple[int, int, int],
    near: Neighbourhood,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Attention of queries (N, T, H, W, D) to keys and values (N, R, H, W, D) of N heads in their
    windows: (T, H, W, N D). Tiles of queries attend to the window of all their keys, with a bias
    that masks the keys of others. attend: one of attention.KERNELS."""
    _, span, height, width, size = query.shape
    tile = near.rows.shape[1], near.columns.shape[1]
    rows, columns = cut(height, tile[0], kernel[1]), cut(width, tile[1], kernel[2])
    strips = []
    for number in range(len(rows.starts)):
        down = near.rows[number][None, :, None, None, :, None]
        bias = near.times[:, None, None, :, None, None] + down
        bias = bias + near.columns[:, None, None, :, None, None, :]
        bias = bias.flatten(4, 6).flatten(1, 3).unsqueeze(1).to(query.dtype)
        tiles = _tiles(query, rows.starts[number], rows.size, columns.starts, columns.size)
        keys, values = (
            _tiles(x, rows.windows[number], rows.window, columns.windows, columns.window)
            for x in (key, value)
        )
        attended = attend(tiles, keys, values, size**-0.5, bias)
        attended = attended.unflatten(2, (span, rows.size, columns.size))
        # (T, rows of a tile, tiles, columns of a tile, C)
        attended = attended.permute(2, 3, 0, 4, 1, 5).flatten(-2)
        *whole, last = attended.unbind(2)
        strip = torch.cat([*whole, _newest(last, 2, columns.new[-1])], 2)
        strips.append(_newest(strip, 1, rows.new[number]))
    return torch.cat(strips, 1)


def _tiles(x: Tensor, row: int, height: int, columns: list[int], width: int) -> Tensor:
    """Tiles of the rows from `row` on, which begin at these columns, of (N, T, H, W, D):
    (tiles, N, T height width, D)."""
    strip = narrowed(x, 2, row, height)
    return torch.stack([narrowed(strip, 3, column, width) for column in columns]).flatten(2, 4)


def _newest(x: Tensor, dim: int, count: int) -> Tensor:
    """The last `count` positions of a dimension."""
    return narrowed(x, dim, x.shape[dim] - count, count)


class NeighbourhoodAttention(nn.Module):
    def __init__(
        self, channels: int, head_dim: int, kernel: tuple[int, int, int], attend: Callable
    ):
        super().__init__()
        self.head_dim, self.kernel, self.attend = head_dim, kernel, attend
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.q_norm, self.k_norm = RMSNorm(head_dim), RMSNorm(head_dim)

    def forward(self, span: Tensor, region: Tensor, near: Neighbourhood) -> Tensor:
        """Normed features of the span and of its region, (T, H, W, C) and (R, H, W, C)."""
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        dtype = weights[0].dtype
        query, key, value = (
            self._heads(F.linear(x, weight, bias))
            for x, weight, bias in zip((span, region, region), weights, biases, strict=True)
        )
        times = (near.place[:, :, None].float() * near.time_rope.float()[:, None]).sum(2)
        sides = near.row_rope, near.column_rope
        query = rotate(self.q_norm(query), times, *sides).to(dtype)
        key = rotate(self.k_norm(key), near.time_rope, *sides).to(dtype)
        windows = self.kernel, near, self.attend
        return self.proj(neighbourhood_attention(query, key, value, *windows))

    def _heads(self, x: Tensor) -> Tensor:
        """(T, H, W, C) -> (N, T, H, W, D)"""
        return x.unflatten(-1, (-1, self.head_dim)).permute(3, 0, 1, 2, 4)


class SwiGLU(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        hidden = MLP_RATIO * channels
        self.w_gate = nn.Linear(channels, hidden, bias=False)
        self.w_up = nn.Linear(channels, hidden, bias=False)
        self.w_down = nn.Linear(hidden, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(silu(self.w_gate(x)) * self.w_up(x))


class Block(nn.Module):
    """Neighbourhood attention and an MLP, both residual. modulated: of the last stage, with the
    timestep's scales and shifts. gated: its residuals have a gate per channel."""

    def __init__(
        self, config: DiffusionDecoderConfig, stage: int, attend: Callable, modulated: bool = False
    ):
        super().__init__()
        channels = config.channels[stage]
        self.norm1, self.norm2 = RMSNorm(channels), RMSNorm(channels)
        self.attn = NeighbourhoodAttention(channels, config.head_dim, config.kernels[stage], attend)
        self.mlp = SwiGLU(channels)
        if modulated:
            self.scale_shift_table = nn.Parameter(torch.empty(MODULATION_ROWS, channels))
        self.gated = modulated and config.gated
        if self.gated:
            self.gate_msa = nn.Parameter(torch.empty(channels))
            self.gate_mlp = nn.Parameter(torch.empty(channels))

    def forward(
        self, region: Tensor, near: Neighbourhood, modulation: Tensor | None = None
    ) -> Tensor:
        """The span's features (T, H, W, C), from its region's. modulation: (7, C), the same for all
        blocks."""
        one, two = (lambda x: x), (lambda x: x)
        if modulation is not None:
            rows = (modulation + self.scale_shift_table.float()).unbind(0)
            one = lambda x: x * (1 + rows[0]) + rows[1]  # noqa: E731
            two = lambda x: x * (1 + rows[3]) + rows[4]  # noqa: E731
        dtype = region.dtype
        # The span's frames of the region, exactly in bf16; Trainium2 computes products of float32
        # in two passes of halves.
        span = torch.bmm(near.place.to(dtype)[None], region.flatten(1)[None])[0]
        span = span.unflatten(-1, region.shape[1:])
        normed = one(self.norm1(region)).to(dtype)
        change = self.attn(one(self.norm1(span)).to(dtype), normed, near)
        x = span + (change * self.gate_msa if self.gated else change)
        # A frame at a time, which bounds the memory of the wider features.
        changes = [self.mlp(two(self.norm2(frame)).to(dtype)) for frame in x.split(1)]
        change = torch.cat(changes)
        return x + (change * self.gate_mlp if self.gated else change)


class Stage(nn.Module):
    """A block of a stage before the last one, under the name of its first one."""

    def __init__(self, config: DiffusionDecoderConfig, stage: int, attend: Callable):
        super().__init__()
        block = Block(config, stage, attend)
        self.det_stages = nn.ModuleDict({str(stage): nn.ModuleList([block])})
        self.stage = str(stage)

    def forward(self, region: Tensor, *near: Tensor) -> Tensor:
        (block,) = self.det_stages[self.stage]  # pyright: ignore[reportGeneralTypeIssues]
        return block(region, Neighbourhood(*near))


class PixelShuffle(nn.Module):
    """A linear layer whose output channels become positions. If it doubles the frames, the video's
    first one is to be dropped."""

    def __init__(self, channels: int, stage: int, upsampling: Resampling):
        super().__init__()
        self.stride, self.stage = upsampling.stride, str(stage)
        outputs = math.prod(self.stride) * channels // upsampling.multiplier
        proj = nn.ModuleDict({"proj": nn.Linear(channels, outputs)})
        self.upsamples = nn.ModuleDict({self.stage: proj})

    def forward(self, features: Tensor) -> Tensor:
        frames, height, width, _ = features.shape
        time, down, across = self.stride
        x = self.upsamples[self.stage].proj(features)  # pyright: ignore[reportCallIssue]
        x = x.unflatten(-1, (-1, time, down, across))
        x = x.permute(0, 4, 1, 5, 2, 6, 3)  # (T, time, H, down, W, across, C)
        return x.reshape(frames * time, height * down, width * across, -1)


class LatentsIn(nn.Module):
    """Latents (T, h, w, C), un-normalised and projected: the first stage's features."""

    def __init__(self, config: DiffusionDecoderConfig):
        super().__init__()
        self.per_channel_statistics = Statistics(config.latent_channels)
        self.conv_in = nn.Linear(config.latent_channels, config.channels[0])

    def forward(self, latent: Tensor) -> Tensor:
        std, mean = (x.float() for x in self.per_channel_statistics.viewed(-1))
        return self.conv_in((latent.float() * std + mean).to(latent.dtype))


class Context(nn.Module):
    """The upsampled features' projection, which is added before a block of the last stage."""

    def __init__(self, config: DiffusionDecoderConfig):
        super().__init__()
        self.context_proj = nn.Linear(config.channels[-1], config.channels[-1])
        self.gate = config.gated
        if self.gate:
            self.gate_ctx = nn.Parameter(torch.empty(config.channels[-1]))

    def forward(self, context: Tensor) -> Tensor:
        context = self.context_proj(context)
        return context * self.gate_ctx if self.gate else context


class NoiseIn(nn.Module):
    """Noise in patches of pixels (T, H, W, patch), projected, with the context of the first
    block."""

    def __init__(self, config: DiffusionDecoderConfig):
        super().__init__()
        self.conv_in_x_t = nn.Linear(config.patch_channels, config.channels[-1])
        self.diff_blocks = nn.ModuleList([Context(config)])

    def forward(self, noise: Tensor, context: Tensor) -> Tensor:
        return self.conv_in_x_t(noise) + self.diff_blocks[0](context)


class Denoise(nn.Module):
    """A block of the last stage, and the context of the next one."""

    def __init__(self, config: DiffusionDecoderConfig, attend: Callable, last: bool = False):
        super().__init__()
        channels, stage = config.channels[-1], len(config.channels) - 1
        hidden = nn.Linear(TIMESTEP_FEATURES, TIMESTEP_CHANNELS)
        embedding = nn.ModuleDict(
            {"0": hidden, "2": nn.Linear(TIMESTEP_CHANNELS, TIMESTEP_CHANNELS)}
        )
        self.t_embedder = nn.ModuleDict({"mlp": embedding})
        rows = nn.Linear(TIMESTEP_CHANNELS, MODULATION_ROWS * channels)
        self.shared_adaln = nn.ModuleDict({"proj": rows})
        blocks = [Block(config, stage, attend, modulated=True)]
        self.diff_blocks = nn.ModuleList(blocks if last else [*blocks, Context(config)])

    def forward(self, region: Tensor, timestep: Tensor, context: Tensor, *near: Tensor) -> Tensor:
        return self.denoised(region, timestep, *near) + self.diff_blocks[1](context)

    def denoised(self, region: Tensor, timestep: Tensor, *near: Tensor) -> Tensor:
        """timestep: (1, 256), the timestep's features."""
        first, second = (self.t_embedder["mlp"][name] for name in "02")  # pyright: ignore
        hidden = second(silu(first(timestep)))
        rows = self.shared_adaln["proj"](silu(hidden)).float().unflatten(-1, (MODULATION_ROWS, -1))
        return self.diff_blocks[0](region, Neighbourhood(*near), rows[0])


class PixelsOut(Denoise):
    """The last block, and its features as patches of pixels (T, H, W, patch)."""

    def __init__(self, config: DiffusionDecoderConfig, attend: Callable):
        super().__init__(config, attend, last=True)
        self.norm_out = RMSNorm(config.channels[-1])
        self.conv_out = nn.Linear(config.channels[-1], config.patch_channels)

    def forward(self, region: Tensor, timestep: Tensor, *near: Tensor) -> tuple[Tensor, Tensor]:
        features = self.denoised(region, timestep, *near)
        patches = self.conv_out(self.norm_out(features).to(features.dtype))
        # The mean is NaN or Inf if a pixel is: one number for the host to check.
        return patches, patches.float().mean((0, 1, 2, 3)).unsqueeze(0)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)
