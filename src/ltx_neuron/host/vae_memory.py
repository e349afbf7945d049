"""How much memory a video decode holds at once, from the shapes of vae.py and winograd.py: nothing
is loaded or computed.

What is counted is what lives when: the maps of a stage, the convolution at work, and the frames
that tiles are blended into.
"""

from math import prod

import torch
from ltx_core.model.video_vae import TilingConfig, VideoDecoder, VideoDecoderConfigurator
from ltx_core.model.video_vae.resnet import UNetMidBlock3D
from torch import nn

from ltx_neuron.host.winograd import LARGEST_FILTERS, POINTS, TILE, pays, piece_of, tiles_of

_FLOAT = 4
_STORED = 2  # bytes of a weight: the checkpoint's bfloat16, which stays so


def decode_bytes(config: dict, latent: tuple[int, int, int], threads: int) -> int:
    """Most bytes at once, weights included, of decoding a latent (F, h, w) to uint8 frames in the
    reference's default tiles.

    `config` is the checkpoint's; `threads` convolve at the same time.
    """
    with torch.device("meta"):
        decoder = VideoDecoderConfigurator.from_config(config)
    weights = sum(tensor.numel() for tensor in decoder.state_dict().values()) * _STORED
    scale = decoder.video_downscale_factors
    frame = 3 * latent[1] * scale.height * latent[2] * scale.width  # numbers
    tiles = decoder._prepare_tiles(
        torch.empty(1, 1, *latent, device="meta"), TilingConfig.default()
    )
    # Tiles of the same time are blended into a chunk of frames and one of weights, beside those of
    # the tiles before; what no later tile touches is divided (the whole chunk is), made into bytes
    # and kept.
    most = finished = divided = before = start = 0
    for group in decoder._group_tiles_by_temporal_slice(tiles):
        span = group[0].out_coords[2]
        chunk = _FLOAT * frame * (span.stop - span.start)
        both = 2 * (before + chunk)
        working = max(
            _Tile(decoder, [part.stop - part.start for part in tile.in_coords[2:]], threads).most
            for tile in group
        )
        most = max(most, finished + divided + both + working)
        if before:
            leaving = frame * (span.start - start)
            most = max(most, finished + both + before + max(divided, 2 * _FLOAT * leaving))
            finished, divided = finished + leaving, before
        before, start = chunk, span.start
    most = max(most, finished + 4 * before + max(divided, 2 * before))
    return weights + max(most, 2 * (finished + before // _FLOAT))


class _Tile:
    """One call of FastVideoDecoder, step by step; `most` is the most bytes at once."""

    def __init__(self, decoder: VideoDecoder, latent: list[int], threads: int):
        self.threads, self.most, self.memory = threads, 0, {}
        shape = (*latent, decoder.conv_in.conv.in_channels)
        self.kept = 2 * _FLOAT * prod(shape) + _map(
            shape
        )  # the latent, and what the first convolution reads
        shape = self._convolve(
            shape, decoder.conv_in.conv, 3 * _map((*latent, decoder.conv_in.conv.out_channels))
        )
        for block in decoder.up_blocks:
            if isinstance(block, UNetMidBlock3D):
                for residual in block.res_blocks:
                    self._convolve(shape, residual.conv1.conv, 3 * _map(shape))
            else:
                shape = self._upsample(shape, block)
        found = _FLOAT * prod(
            self._convolve(shape, decoder.conv_out.conv, 3 * _map(shape), whole=True)
        )
        self._hold(3 * _map(shape) + 2 * found)  # and its pixels in their places
        self._hold(3 * found)  # and stacked, blended

    def _upsample(self, shape: tuple[int, ...], block: nn.Module) -> tuple[int, ...]:
        """The next stage's shape; both stages' features are there while it is computed."""
        (frames, height, width, inputs), (time, down, across) = shape, block.stride
        channels = block.conv.conv.out_channels // (time * down * across)
        larger = (frames * time - (time - 1), height * down, width * across, channels)
        at_once = min(time * down * across, max(1, LARGEST_FILTERS // (inputs * channels)))
        weight = _FLOAT * block.conv.conv.weight.numel() // (time * down * across) * at_once
        self._convolution(shape, at_once * channels, _map(shape) + 3 * _map(larger) + weight)
        return larger

    def _convolve(
        self, shape: tuple[int, ...], conv: nn.Module, maps: int, whole: bool = False
    ) -> tuple[int, ...]:
        """Count a convolution beside the maps; `whole`: its result is one more. Returns the
        result's shape."""
        result = (*shape[:3], conv.out_channels)
        self._convolution(shape, conv.out_channels, maps + whole * _FLOAT * prod(result))
        return result

    def _convolution(self, shape: tuple[int, ...], outputs: int, beside: int) -> None:
        inputs, weight = shape[3], _FLOAT * 27 * shape[3] * outputs
        if not pays(
            shape, outputs
        ):  # the map without border, the result, and oneDNN's own arrangement of all of it
            frames, height, width, _ = shape
            self._hold(
                beside
                + 2
                * (
                    weight
                    + _FLOAT * ((frames + 2) * height * width * inputs + prod(shape[:3]) * outputs)
                )
            )
            return
        (_, _, wide), (groups, rows) = tiles_of(shape), piece_of(shape, self.threads)
        tiles, across = groups * rows * wide, TILE * wide + 2
        self._keep("filters", POINTS * inputs * outputs)
        for name, numbers in {
            "values": max(POINTS * tiles * inputs, 4 * 36 * tiles * outputs),
            "products": POINTS * tiles * outputs,
            "one": max(6 * groups * (TILE * rows + 2) * across * inputs, 16 * 6 * tiles * outputs),
            "two": max(36 * groups * rows * across * inputs, TILE**3 * tiles * outputs),
        }.items():
            self._keep(name, self.threads * numbers)
        self._hold(beside + 2 * weight)  # as float32, and its taps together

    def _keep(self, name: str, numbers: int) -> None:
        """A worker's memory stays, as long as the longest that was asked for."""
        self.memory[name] = max(self.memory.get(name, 0), _FLOAT * numbers)

    def _hold(self, size: int) -> None:
        self.most = max(self.most, self.kept + sum(self.memory.values()) + size)


def _map(shape: tuple[int, ...]) -> int:
    """Bytes of a winograd.Map of that shape, border included."""
    return _FLOAT * prod(count * TILE + 2 for count in tiles_of(shape)) * shape[3]
