"""Peak host memory of decoding and of encoding a video, counted from shapes; nothing is loaded or
computed.

The plan compares it with the host's memory before a job starts. It follows vae_stages.py, vae.py,
vae_encoder.py and winograd.py step by step instead of using a formula: which stage holds most
depends on the size, on where ltx-core's tiles end and on the number of threads. The sum lies within
1 to 10 % of the measured peak, at the sizes of its test and at the released ones.
"""

from math import prod

import torch
from ltx_core.model.video_vae import (
    TilingConfig,
    VideoDecoder,
    VideoDecoderConfigurator,
    VideoEncoder,
    VideoEncoderConfigurator,
)
from ltx_core.model.video_vae.resnet import UNetMidBlock3D
from torch import nn

from ltx_neuron.host import encoding
from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic
from ltx_neuron.host.winograd import (
    LARGEST_FILTERS,
    NUMBERS_AT_ONCE,
    NUMBERS_IN_CACHE,
    POINTS,
    TILE,
    piece_size,
    tile_counts,
    winograd_is_faster,
)

_FLOAT32 = 4  # bytes of a number
_CHUNKS = 2  # of frames: one is encoded and one waits for that, see background.ahead
_STORED = 2  # bytes of a weight: the checkpoint's bfloat16, which is kept


def decode_bytes(
    config: dict,
    latent: tuple[int, int, int],
    threads: int,
    arithmetic: Arithmetic = FLOAT32,
    tiling: TilingConfig | None = None,
) -> int:
    """Peak bytes, weights included, of decoding a latent (F, h, w) to uint8 frames that are written
    as they come: those of a clip of any length, but for the latent.

    config      the checkpoint's parsed `config` metadata
    threads     cores that convolve at the same time, each with its scratch memory
    arithmetic  what the decoder computes in
    tiling      how the latent is cut; by default as ltx-core does

    Follows HostModels.decode_video. Tiles of one time span are
    blended into two float32 arrays: frames and blending weights. Then the frames that the next span
    does not change are divided by their weights, checked, converted to bytes and handed on.
    """
    with torch.device("meta"):
        decoder = VideoDecoderConfigurator.from_config(config)
    weights = sum(tensor.numel() for tensor in decoder.state_dict().values()) * _STORED
    scale = decoder.video_downscale_factors
    frame = 3 * latent[1] * scale.height * latent[2] * scale.width  # numbers of one frame
    tiles = decoder._prepare_tiles(
        torch.empty(1, 1, *latent, device="meta"), tiling or TilingConfig.default()
    )
    spans = decoder._group_tiles_by_temporal_slice(tiles)
    slices = [span[0].out_coords[2] for span in spans]
    # Bytes of: frames that wait to be written; those of the span before that the next one changes,
    # and their weights.
    peak = waiting = shared = 0
    for span, time, later in zip(spans, slices, [*slices[1:], None], strict=True):
        blended = 2 * _FLOAT32 * frame * (time.stop - time.start)
        working = max(
            _DecoderPeak(
                decoder,
                [part.stop - part.start for part in tile.in_coords[2:]],
                threads,
                arithmetic,
            ).peak
            for tile in span
        )
        peak = max(peak, waiting + shared + blended + working)
        leaving = frame * ((later.start if later else time.stop) - time.start)
        shared = 2 * _FLOAT32 * frame * max(0, time.stop - later.start) if later else 0
        # Divided, by weights that are copied for that.
        peak = max(peak, waiting + blended + shared + 2 * _FLOAT32 * leaving)
        waiting = max(waiting, _CHUNKS * leaving)
    return weights + peak


def encode_bytes(
    config: dict,
    pixels: tuple[int, int, int],
    threads: int,
    arithmetic: Arithmetic = FLOAT32,
    dtype: torch.dtype = torch.float32,
    whole: bool = False,
) -> int:
    """Peak bytes, weights and pixels included, of encoding a clip of 8k+1 frames of height x width
    pixels.

    arithmetic  what the encoder computes in
    dtype       of the run, in which pixels wait
    whole       encoded in one piece, not in tiles: HostModels.encode_video

    Pixels are collected in float32 a frame at a time and joined, before anything is encoded.
    """
    with torch.device("meta"):
        encoder = VideoEncoderConfigurator.from_config(config)
    weights = sum(tensor.numel() for tensor in encoder.state_dict().values()) * _STORED
    clip, itemsize = 3 * prod(pixels), arithmetic.dtype.itemsize
    joined = 2 * _FLOAT32 * clip
    given = (_FLOAT32 + dtype.itemsize * (dtype != torch.float32)) * clip
    given += itemsize * clip * (arithmetic.dtype != dtype)
    tiles = [pixels] if whole else encoding.tile_counts(pixels)
    working = max(_EncoderPeak(encoder, tile, threads, arithmetic).peak for tile in tiles)
    return weights + max(joined, given + working)


class _Peak:
    """Peak bytes of one call of a model with the forward of vae_stages.py, as attribute `peak`."""

    def __init__(self, threads: int, arithmetic: Arithmetic):
        self.threads, self.arithmetic, self.peak = threads, arithmetic, 0
        self.kept = 0  # what lives to the end
        self.scratch: dict[str, int] = {}  # name -> bytes of all workers, see Workers.scratch

    def _first(self, shape: tuple[int, ...], conv: nn.Conv3d) -> tuple[int, ...]:
        """Count the first stage, of what the model is given (F, H, W, C). Returns its shape."""
        first = (*shape[:3], conv.out_channels)
        self._convolution(shape, conv.out_channels, self._map(shape) + self._maps(first))
        return first

    def _residuals(self, shape: tuple[int, ...], block: UNetMidBlock3D) -> None:
        for _ in block.res_blocks:  # both convolutions have the stage's channels
            self._convolution(shape, shape[3], self._maps(shape))

    def _map(self, shape: tuple[int, ...]) -> int:
        """Bytes of a winograd.FeatureMap (F, H, W, C)."""
        frames, *others = shape
        if self.arithmetic.dtype == torch.float32:  # with its border
            return _FLOAT32 * prod(count * TILE + 2 for count in tile_counts(shape)) * shape[3]
        return self.arithmetic.dtype.itemsize * (frames + 2) * prod(others)

    def _maps(self, shape: tuple[int, ...]) -> int:
        """The three maps of a stage."""
        return 3 * self._map(shape)

    def _convolution(self, shape: tuple[int, ...], outputs: int, others: int) -> None:
        """Count a convolution of a map (F, H, W, Cin) while `others` bytes are held as well."""
        inputs = shape[3]
        weight = _FLOAT32 * 27 * inputs * outputs
        if shape[0] == 1 and self.arithmetic.dtype == torch.float32:
            # A third of the weights, the map without its border and the result, by oneDNN.
            numbers = prod(shape) + prod(shape[:3]) * outputs
            self._hold(others + 2 * (weight // 3 + _FLOAT32 * numbers))
            return
        if not winograd_is_faster(shape, outputs, self.arithmetic.speed):
            if self.arithmetic.dtype != torch.float32:
                self._bfloat16_convolution(shape, outputs, others)
                return
            # The map without its border and the result; oneDNN arranges all of it once more.
            frames, height, width, _ = shape
            borderless = _FLOAT32 * (frames + 2) * height * width * inputs
            result = _FLOAT32 * prod(shape[:3]) * outputs
            self._hold(others + 2 * (weight + borderless + result))
            return
        tiles_w, (piece_f, piece_h) = tile_counts(shape)[2], piece_size(shape, self.threads)
        tiles, across = piece_f * piece_h * tiles_w, TILE * tiles_w + 2
        # Each buffer serves the input transform (..., inputs) and the output transform
        # (..., outputs), and stays as long as the longest that was asked for.
        rows = TILE * piece_h + 2
        points = max(POINTS * tiles * inputs, 4 * 36 * tiles * outputs)
        one = max(6 * piece_f * rows * across * inputs, 16 * 6 * tiles * outputs)
        two = max(36 * piece_f * piece_h * across * inputs, TILE**3 * tiles * outputs)
        self._keep_scratch("filters", POINTS * inputs * outputs)
        self._keep_scratch("points", self.threads * points)
        self._keep_scratch("products", self.threads * POINTS * tiles * outputs)
        self._keep_scratch("one", self.threads * one)
        self._keep_scratch("two", self.threads * two)
        if self.arithmetic.dtype != torch.float32:
            frames_read = TILE * piece_f + 2
            self._keep_scratch("window", self.threads * frames_read * rows * across * inputs)
        self._hold(others + 2 * weight)  # as float32, and reordered for its transform

    def _bfloat16_convolution(self, shape: tuple[int, ...], outputs: int, others: int) -> None:
        """Count a direct convolution in bfloat16: the results of its three taps, of some frames at
        a time, and weights, of which oneDNN arranges a tap's once more."""
        frames, height, width, inputs = shape
        itemsize, frame = self.arithmetic.dtype.itemsize, height * width * outputs
        results = 3 * itemsize * frame * min(frames, max(1, NUMBERS_AT_ONCE // frame))
        rows = min(height, max(1, NUMBERS_IN_CACHE // (width * outputs)))
        self._keep_scratch("piece", self.threads * rows * width * outputs)
        # PixelNorm and SiLU of a piece, beside it
        activated = 2 * _FLOAT32 * self.threads * rows * width * outputs
        self._hold(others + results + activated + itemsize * 36 * inputs * outputs)

    def _keep_scratch(self, name: str, numbers: int) -> None:
        self.scratch[name] = max(self.scratch.get(name, 0), _FLOAT32 * numbers)

    def _hold(self, size: int) -> None:
        """Count a moment at which `size` bytes are held besides what is kept."""
        self.peak = max(self.peak, self.kept + sum(self.scratch.values()) + size)


class _DecoderPeak(_Peak):
    """Of FastVideoDecoder with a latent (F, h, w)."""

    def __init__(
        self, decoder: VideoDecoder, latent: list[int], threads: int, arithmetic: Arithmetic
    ):
        super().__init__(threads, arithmetic)
        shape = (*latent, decoder.conv_in.conv.in_channels)
        self.kept = 2 * _FLOAT32 * prod(shape)  # the latent, un-normalised
        shape = self._first(shape, decoder.conv_in.conv)
        for block in decoder.up_blocks:
            if isinstance(block, UNetMidBlock3D):
                self._residuals(shape, block)
            else:
                shape = self._upsample(shape, block)
        outputs = decoder.conv_out.conv.out_channels
        pixels = _FLOAT32 * prod(shape[:3]) * outputs
        self._convolution(shape, outputs, self._maps(shape) + pixels)
        self._hold(self._maps(shape) + 2 * pixels)  # unpatchify copies them
        self._hold(3 * pixels)  # stacked and blended, without the maps

    def _upsample(self, shape: tuple[int, ...], block: nn.Module) -> tuple[int, ...]:
        """Count an upsampling, which holds this stage's features and the next stage's maps. Returns
        the next stage's shape."""
        (frames, height, width, inputs), (time, down, across) = shape, block.stride
        parts = time * down * across
        channels = block.conv.conv.out_channels // parts
        larger = (frames * time - (time - 1), height * down, width * across, channels)
        parts_at_once = min(parts, max(1, LARGEST_FILTERS // (inputs * channels)))
        itemsize = self.arithmetic.dtype.itemsize
        weight = itemsize * block.conv.conv.weight.numel() // parts * parts_at_once
        others = self._map(shape) + self._maps(larger) + weight
        self._convolution(shape, parts_at_once * channels, others)
        return larger


class _EncoderPeak(_Peak):
    """Of FastVideoEncoder with frames, rows and columns of pixels."""

    def __init__(
        self,
        encoder: VideoEncoder,
        pixels: tuple[int, int, int],
        threads: int,
        arithmetic: Arithmetic,
    ):
        super().__init__(threads, arithmetic)
        frames, *sides = pixels
        patches = [side // encoder.patch_size for side in sides]
        shape = (frames, *patches, encoder.conv_in.conv.in_channels)
        self.kept = arithmetic.dtype.itemsize * prod(shape)  # patchify copies the pixels
        shape = self._first(shape, encoder.conv_in.conv)
        for block in encoder.down_blocks:
            if isinstance(block, UNetMidBlock3D):
                self._residuals(shape, block)
            else:
                shape = self._downsample(shape, block)
        outputs = encoder.latent_channels
        latents = _FLOAT32 * prod(shape[:3]) * outputs
        self._convolution(shape, outputs, self._maps(shape) + latents)

    def _downsample(self, shape: tuple[int, ...], block: nn.Module) -> tuple[int, ...]:
        """Count a downsampling, which holds this stage's features, a convolution of them in float32
        and the next stage's maps. Returns the next stage's shape."""
        outputs = block.conv.conv.out_channels
        result = _FLOAT32 * prod(shape[:3]) * outputs
        self._convolution(shape, outputs, self._map(shape) + result)
        smaller = [-(-size // step) for size, step in zip(shape, block.stride, strict=False)]
        smaller = (*smaller, outputs * prod(block.stride))
        rows = min(smaller[1], max(1, NUMBERS_IN_CACHE // prod(smaller[2:])))
        self._keep_scratch("piece", self.threads * rows * prod(smaller[2:]))
        self._hold(self._map(shape) + result + self._maps(smaller))
        return smaller
