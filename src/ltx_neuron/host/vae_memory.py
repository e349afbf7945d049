"""Peak host memory of decoding and of encoding a video, estimated from shapes; nothing is loaded or
computed.

The plan compares it with the host's memory before a job starts. The estimate covers every stage of
vae.py, because the largest one depends on the size and on ltx-core's tiles. It is within 20 % of
the measured peak at the sizes of its test. It is 0 for a structure that ltx-core's modules run.
"""

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch
from ltx_core.model.video_vae import TilingConfig

from ltx_neuron.config import video
from ltx_neuron.config.diffusion import diffusion_decoder_config, is_diffusion_vae
from ltx_neuron.errors import UserError
from ltx_neuron.host import convolution, diffusion, tiles
from ltx_neuron.models.programs import Program, encoder_program, tile_program

_FLOAT32 = 4  # bytes of a number
_CHUNKS = 2  # of frames: one is encoded while the next one waits (background.ahead)
_STORED = 2  # bytes of a weight, stored in bfloat16
Shape = tuple[int, ...]


def decode_bytes(
    config: Mapping[str, Any],  # the checkpoint's parsed `config` metadata
    latent: tuple[int, int, int],
    threads: int,  # cores that compute at the same time, each with scratch memory
    dtype: torch.dtype = torch.float32,  # of the decoder
    # Of the latent; by default every profile's; unused for the diffusion decoder
    tiling: TilingConfig | None = None,
    keyframes: bool = False,  # whether the diffusion decoder reads them
) -> int:
    """Peak bytes, with weights, of decoding a latent (F, h, w) to uint8 frames that are written at
    once. Only the latent's bytes depend on the clip's length."""
    if is_diffusion_vae(config):
        decoder = diffusion_decoder_config(config)
        return diffusion.decode_bytes(decoder, latent, dtype, keyframes)
    try:
        decoder = video.video_decoder_config(config)
    except UserError:
        return 0
    cuts = tiles.cut(latent, tiling or tiles.tiling())
    peaks = _Peaks(threads, dtype)
    working = max(peaks.of_decoder(decoder, shape) for shape in set(map(tiles.tile_shape, cuts)))
    # Tiles of one time span are blended into two float32 arrays, frames and their weights. The
    # frames that the next span changes are kept; the others are divided by their weights and wait.
    blend = tiles.TiledDecoder()
    spans = blend._group_tiles_by_temporal_slice(cuts)
    times = [span[0].out_coords[2] for span in spans]
    scale = blend.video_downscale_factors
    frame = 3 * latent[1] * scale.height * latent[2] * scale.width  # numbers of one frame
    blended = max(time.stop - time.start for time in times)
    shared = max((time.stop - later.start for time, later in pairwise(times)), default=0)
    waiting = _CHUNKS * (blended - shared) * frame * (len(spans) > 1)
    frames = 2 * _FLOAT32 * frame * (blended + shared)
    divided = 2 * _FLOAT32 * frame * (blended - shared)
    weights = _weights(tile_program(decoder, (1, 1, 1), torch.float32))
    return weights + waiting + frames + max(working, divided)


def encode_bytes(
    config: Mapping[str, Any],
    pixels: tuple[int, int, int],
    threads: int,
    host_dtype: torch.dtype = torch.float32,  # of the encoder
    dtype: torch.dtype = torch.float32,  # of the run and of the waiting pixels
    whole: bool = False,  # encoded in one piece, not in tiles: HostModels.encode_video
) -> int:
    """Peak bytes, weights and pixels included, of encoding a clip of 8k+1 frames of height x width
    pixels. Pixels are collected in float32, frame by frame, and joined before the encoding."""
    try:
        encoder = video.video_encoder_config(config)
    except UserError:
        return 0
    clip = 3 * prod(pixels)
    copies = {torch.float32, dtype, host_dtype}
    clip_bytes = clip * sum(copy.itemsize for copy in copies)
    sizes = [pixels] if whole else tiles.tile_counts(pixels)
    peaks = _Peaks(threads, host_dtype)
    working = max(peaks.of_encoder(encoder, size) for size in sizes)
    weights = _weights(encoder_program(encoder, (1, 32, 32), torch.float32))
    return weights + max(2 * _FLOAT32 * clip, clip_bytes + working)


def _weights(program: Program) -> int:
    return _STORED * sum(map(prod, program.weights().values()))


class _Peaks:
    """Peak bytes of host/vae.py for a tile, from the shapes (F, H, W, C) of its stages."""

    def __init__(self, threads: int, dtype: torch.dtype):
        self.threads, self.itemsize = threads, dtype.itemsize

    def of_decoder(self, config: video.VideoDecoderConfig, latent: Shape) -> int:
        """latent: of a tile, (F, h, w)."""
        shape, peak = self._first(latent, config.latent_channels, 8 * config.base_channels)
        for block in config.up_blocks:
            if isinstance(block, video.Resampling):
                (frames, height, width, inputs), (time, down, across) = shape, block.stride
                parts, channels = time * down * across, inputs // block.multiplier
                larger = (frames * time - (time - 1), height * down, width * across, channels)
                held = self._maps(shape, *[larger] * 3)
                peak = max(peak, self._convolution(shape, channels * parts, held))
                shape = larger
            else:
                peak = max(peak, self._residual(shape))
        outputs = config.out_channels * config.patch_size**2
        pixels, maps = _FLOAT32 * prod(shape[:3]) * outputs, self._maps(*[shape] * 3)
        peak = max(peak, self._convolution(shape, outputs, maps + pixels))
        # The pixels are copied into their layout, and blended after the maps are freed.
        return max(peak, maps + 2 * pixels, 3 * pixels)

    def of_encoder(self, config: video.VideoEncoderConfig, pixels: Shape) -> int:
        """pixels: a clip's frames, rows and columns."""
        frames, *sides = pixels
        patches = (frames, *(side // config.patch_size for side in sides))
        channels = config.in_channels * config.patch_size**2
        shape, peak = self._first(patches, channels, config.latent_channels)
        for block in config.down_blocks:
            if isinstance(block, video.Resampling):
                channels = shape[3] * block.multiplier
                outputs = channels // prod(block.stride)
                held = self._maps(shape) + _FLOAT32 * prod(shape[:3]) * outputs
                peak = max(peak, self._convolution(shape, outputs, held))
                steps = zip(shape, block.stride, strict=False)
                shape = (*(-(-size // step) for size, step in steps), channels)
                peak = max(peak, held + self._maps(*[shape] * 3))
            else:
                peak = max(peak, self._residual(shape))
        peak = max(peak, self._residual(shape))
        return peak + 3 * self.itemsize * prod(pixels)  # laid out in patches

    def _first(self, size: Shape, inputs: int, outputs: int) -> tuple[Shape, int]:
        """The first stage's shape, and the bytes of its convolution."""
        source, shape = (*size, inputs), (*size, outputs)
        return shape, self._convolution(source, outputs, self._maps(source, *[shape] * 3))

    def _residual(self, shape: Shape) -> int:
        return self._convolution(shape, shape[3], self._maps(*[shape] * 3))

    def _maps(self, *shapes: Shape) -> int:
        """Bytes of feature maps with their repeated frames: convolution.FeatureMap."""
        return self.itemsize * sum((frames + 2) * prod(sizes) for frames, *sizes in shapes)

    def _convolution(self, shape: Shape, outputs: int, held: int) -> int:
        """Bytes of a convolution of a map, with scratch memory. held: bytes of other tensors."""
        frames, height, width, inputs = shape
        result, frame = prod(shape[:3]) * outputs, height * width * outputs
        taps = 3 * min(result, max(convolution.NUMBERS_AT_ONCE, frame))
        pieces = 3 * _FLOAT32 * self.threads * min(result, convolution.NUMBERS_IN_CACHE)
        return held + self.itemsize * (taps + 36 * inputs * outputs) + pieces
