"""Decodes video latents with the diffusion decoder, from the first frame to the last.

Each block of the decoder reads a frame of the block before it when a window needs the frame, and
frees frames that no later window needs. The frames equal those of a clip that is decoded at once.
Memory does not depend on the clip's length. The host and the ranks run the same parts
(models/diffusion_decoder.py) on the same spans.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from ltx_neuron.config.diffusion import (
    TIME_FACTOR,
    AxisCut,
    DiffusionDecoderConfig,
    clamped,
    cut,
    volumes,
)
from ltx_neuron.host.background import check_cancelled
from ltx_neuron.models.diffusion_decoder import MLP_RATIO, TIMESTEP_FEATURES, Neighbourhood
from ltx_neuron.models.programs import diffusion_program

SPACE_FACTOR = 32  # pixels per row and column of latents
_FRAMES = 8  # of a chunk of pixels
_ROPE_BASE = 10000.0
_NEAREST = 2  # planes that a frame attends to, and frames that a plane attends to

Call = tuple[str, int]  # graph and first block
Inputs = dict[str, Tensor]  # by the names of the graph's fields


class HostSpans(nn.Module):
    """The diffusion decoder's weights under the file's names. Its parts run on the host."""

    at_once = 1

    def __init__(self, config: DiffusionDecoderConfig, embeds_keyframes: bool = False):
        """embeds_keyframes: the file has an embedding of keyframes, type_emb."""
        super().__init__()
        self.config = config
        # The modules do not depend on the clip's size.
        self.program = diffusion_program(config, config.smallest, torch.float32, "sdpa")
        more = {"type_emb": (config.latent_channels,)} if embeds_keyframes else {}
        for name, shape in (self.program.weights() | more).items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.empty(shape)))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @torch.no_grad()
    def run(self, clip: tuple[int, int, int], call: Call, spans: Sequence[Inputs]) -> list[Tensor]:
        """The output of a call for each span. The clip may have any size."""
        outputs = [self.program.call(*call, self.get_parameter, inputs) for inputs in spans]
        return [next(iter(tensors.values())) for tensors in outputs]


class _Frames:
    """The frames of an iterator by number. Frees the frames before the last requested ones."""

    def __init__(self, frames: Iterator[Tensor]):
        self._frames, self._kept, self._first = frames, [], 0

    def take(self, start: int, count: int) -> Tensor:
        """`count` frames from `start` on, as one tensor. `start` must not decrease."""
        del self._kept[: start - self._first]
        self._first = start
        self._kept += itertools.islice(self._frames, count - len(self._kept))
        return torch.stack(self._kept[:count])


class DiffusionDecoder:
    """Decodes clips of one size. clip: latents (F, h, w). decoder: runs the calls, at most
    `at_once` spans together: HostSpans or backends.tiles.RankSpans."""

    def __init__(self, config: DiffusionDecoderConfig, clip: tuple[int, int, int], decoder):
        self.config, self.clip, self.decoder = config, clip, decoder
        self.volumes = volumes(config, clip)

    def pixels(
        self, latent: Tensor, seed: int, keyframes: Mapping[int, Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Latents (1, C, F, h, w) to pixels (1, 3, N, 32h, 32w) of about -1 to 1, in chunks of
        frames. seed: of the noise. keyframes: latents (1, C, 1, h, w) by frame, which the clip
        attends to: on the host alone, in memory that grows with the clip's length."""
        config, dtype = self.config, self.decoder.dtype
        frames, height, width = self.clip
        _, rows, columns = self.volumes[0]
        # Enlarge a small clip by repeating its last frame and its borders.
        above, left = (rows - height) // 2, (columns - width) // 2
        pad = left, columns - width - left, above, rows - height - above

        def enlarged(latent: Tensor) -> Tensor:
            padded = nn.functional.pad(latent[0].transpose(0, 1).float(), pad, mode="replicate")
            return padded.permute(0, 2, 3, 1)

        latents = enlarged(latent)
        total = self.volumes[0].frames
        latents = torch.cat([latents, latents[-1:].expand(total - frames, -1, -1, -1)])
        last = self.volumes[-1]
        shape = config.out_channels, last.frames, rows * SPACE_FACTOR, columns * SPACE_FACTOR
        if keyframes:
            planes = enlarged(torch.cat([*keyframes.values()], 2))
            pixels = iter(self._joint_patches(latents, planes, torch.tensor([*keyframes]), seed))
        else:
            drawn = noise_frames(shape, seed)
            noise = (patches(frame, config.patch_size).to(dtype) for frame in drawn)
            pixels = self._patches(iter(latents.to(dtype)), noise)
        decoded = itertools.islice(pixels, TIME_FACTOR * (frames - 1) + 1)
        top, side = above * SPACE_FACTOR, left * SPACE_FACTOR
        while chunk := [*itertools.islice(decoded, _FRAMES)]:
            video = torch.stack([unpatched(patch, config.patch_size) for patch in chunk], 1)[None]
            del chunk
            video = video[:, :, :, top : top + height * SPACE_FACTOR]
            yield video[..., side : side + width * SPACE_FACTOR].float()

    def _patches(self, latents: Iterator[Tensor], noise: Iterator[Tensor]) -> Iterator[Tensor]:
        """Each frame's pixels in patches, (H, W, C)."""
        config, last = self.config, len(self.volumes) - 1
        features = self._stream(("latents_in", 0), self._spans(0), {"latent_frames": latents})
        for stage, upsampling in enumerate(config.upsamplings):
            times, near = self._attention_spans(stage)
            for block in range(config.depths[stage]):
                inputs = {f"region_{stage}": features}
                features = self._stream((f"stage_{stage}", block), times, inputs, near)
            inputs = {f"features_{stage}": features}
            features = self._stream((f"upsample_{stage}", 0), self._spans(stage), inputs)
            # Upsampling in time doubles the first frame too: skip its copy.
            features = itertools.islice(features, upsampling.stride[0] - 1, None)
        blocks = config.depths[last]
        features = itertools.islice(features, self.volumes[last].frames)
        contexts = itertools.tee(features, blocks)
        whole = self._spans(last)
        features = self._stream(("noise_in", 0), whole, {"noise": noise, "context": contexts[0]})
        times, near = self._attention_spans(last)
        timestep = timestep_features(config.timestep_scale).to(self.decoder.dtype)
        near = [{**region, "timestep": timestep} for region in near]
        for block, context in enumerate(contexts[1:]):
            inputs = {f"region_{last}": features, "context": context}
            features = self._stream(("denoise", block), times, inputs, near)
        inputs = {f"region_{last}": features}
        yield from self._stream(("pixels_out", blocks - 1), times, inputs, near)

    def _spans(self, stage: int) -> AxisCut:
        """The spans of a stage's frames for calls without attention."""
        return cut(self.volumes[stage].frames, self.config.span, 1)

    def _attention_spans(self, stage: int) -> tuple[AxisCut, list[Inputs]]:
        """The spans of a stage's frames, and the data of each span's neighbourhood."""
        (frames, *sides), kernel = self.volumes[stage], self.config.kernels[stage]
        times = cut(frames, self.config.span, kernel[0])
        near = neighbourhoods(self.config, stage, times, *sides)
        fields = [region._asdict().items() for region in near]
        return times, [{f"{name}_{stage}": tensor for name, tensor in region} for region in fields]

    def _stream(
        self,
        call: Call,
        times: AxisCut,
        frames: dict[str, Iterator[Tensor]],
        of_spans: Sequence[Inputs] = (),
    ) -> Iterator[Tensor]:
        """The frames that a call computes, one by one. frames: its inputs, by field; of_spans:
        further inputs of each span."""
        readers = {name: _Frames(values) for name, values in frames.items()}
        parts = range(len(times.starts))

        def inputs(part: int) -> Inputs:
            inputs_of_part = {**of_spans[part]} if of_spans else {}
            for name, reader in readers.items():
                if name.startswith("region"):
                    inputs_of_part[name] = reader.take(times.windows[part], times.window)
                else:
                    inputs_of_part[name] = reader.take(times.starts[part], times.size)
            return inputs_of_part

        for first in range(0, len(parts), self.decoder.at_once):
            check_cancelled()
            group = parts[first : first + self.decoder.at_once]
            outputs = self.decoder.run(self.clip, call, [inputs(part) for part in group])
            for part, span in zip(group, outputs, strict=True):
                new = times.new[part] * len(span) // times.size
                yield from span[len(span) - new :]

    # --- with keyframes ---------------------------------------------------------------------------

    def _joint_patches(self, video: Tensor, planes: Tensor, frames: Tensor, seed: int) -> Tensor:
        """Each frame's pixels in patches, (F + P, H, W, C), of a clip that attends to keyframes,
        and then those of the keyframes, which no video shows.

        The planes of the keyframes follow the clip's frames through all parts. A frame has the keys
        of its window and of the two planes that are nearest in time; a plane has its own keys and
        those of the two nearest frames. Windows are cut off at borders, not shifted inward.
        Source: ltx-core 1.4 model/video_vae/keyframes.py, transformer/fallback_na/joint_eager.py.

        video, planes  latents (F, h, w, C) and (P, h, w, C)
        frames         of the planes
        """
        config, last, decoder = self.config, len(self.volumes) - 1, self.decoder
        if (embedding := getattr(decoder, "type_emb", None)) is not None:
            deviation = decoder.get_parameter("per_channel_statistics.std-of-means")
            planes = planes + embedding.float() / deviation.float()  # of raw latents

        def run(graph: str, **inputs: Tensor) -> Tensor:
            return decoder.run(self.clip, (graph, 0), [inputs])[0]

        x = run("latents_in", latent_frames=torch.cat([video, planes]).to(decoder.dtype))
        count, left = len(video), TIME_FACTOR  # frames, and those of pixels in one of them
        for stage, upsampling in enumerate(config.upsamplings):
            times = torch.where(frames > 0, (frames + (left - 1) / 2) / left, 0)
            near = self._joint_neighbourhoods(stage, count, times)
            for block in range(config.depths[stage]):
                x = self._joint((f"stage_{stage}", block), stage, near, x)
            time = upsampling.stride[0]
            x = run(f"upsample_{stage}", **{f"features_{stage}": x})
            x = torch.cat([x[time - 1 : count * time], x[count * time + time - 1 :: time]])
            count, left = count * time - (time - 1), left // time
        _, height, width = self.volumes[last]
        sides = height * config.patch_size, width * config.patch_size
        context = torch.cat([x[: self.volumes[last].frames], x[count:]])
        count, generator = self.volumes[last].frames, torch.Generator().manual_seed(seed)
        noise = [
            patches(frame, config.patch_size).to(decoder.dtype)
            for length in (count, len(frames))
            for frame in torch.randn(3, length, *sides, generator=generator).unbind(1)
        ]
        x = run("noise_in", noise=torch.stack(noise), context=context)
        near = self._joint_neighbourhoods(last, count, frames.float())
        timestep = timestep_features(config.timestep_scale).to(decoder.dtype)
        for block in range(config.depths[last] - 1):
            x = self._joint(("denoise", block), last, near, x, context, timestep=timestep)
        call = "pixels_out", config.depths[last] - 1
        return self._joint(call, last, near, x, timestep=timestep)

    def _joint(
        self,
        call: Call,
        stage: int,
        near: Sequence[tuple[Tensor, Tensor, Inputs]],
        x: Tensor,
        context: Tensor | None = None,
        **more: Tensor,
    ) -> Tensor:
        """A block of the frames and planes x. near: of _joint_neighbourhoods."""
        outputs = []
        for queries, keys, inputs in near:
            check_cancelled()
            values = {} if context is None else {"context": context[queries]}
            values |= inputs | more | {f"region_{stage}": x[keys]}
            outputs += self.decoder.run(self.clip, call, [values])
        return torch.cat(outputs)

    def _joint_neighbourhoods(
        self, stage: int, count: int, times: Tensor
    ) -> list[tuple[Tensor, Tensor, Inputs]]:
        """Queries, keys and the data of attention of each span of `count` frames and of planes at
        `times`, which are counted in frames of the stage."""
        config, kernel = self.config, self.config.kernels[stage]
        moments = torch.cat([torch.arange(count, dtype=torch.float32), times])
        distance = (moments[:, None] - moments).abs()
        visible = torch.eye(len(moments), dtype=torch.bool)
        visible[:count, :count] = distance[:count, :count] <= kernel[0] // 2
        for one, other in ((slice(count), slice(count, None)), (slice(count, None), slice(count))):
            nearest = distance[one, other].argsort(dim=1, stable=True)[:, :_NEAREST]
            visible[one, other] = visible[one, other].scatter(1, nearest, True)
        pairs = zip(self.volumes[stage][1:], kernel[1:], strict=True)
        sides = [bias(cut(length, config.tile, n), shifted=False) for length, n in pairs]
        split, groups = config.rope_split, []
        ropes = [rope_table(n, d) for n, d in zip(self.volumes[stage][1:], split[1:], strict=True)]
        for queries in torch.arange(len(moments)).split(config.span):
            keys = visible[queries].any(0).nonzero()[:, 0]
            place = (queries[:, None] == keys).float()
            times = torch.where(visible[queries][:, keys], 0.0, _MASKED)
            tables = [rope_table(moments[keys] - moments[keys].min(), split[0]), *ropes]
            data = Neighbourhood(place, times, *sides, *tables)._asdict()
            inputs = {f"{name}_{stage}": tensor for name, tensor in data.items()}
            groups.append((queries, keys, inputs))
        return groups


def noise_frames(shape: tuple[int, int, int, int], seed: int) -> Iterator[Tensor]:
    """The frames (C, H, W) of noise (C, F, H, W), float32. Their bits are those of one torch.randn
    with a generator of this seed."""
    channels, frames, height, width = shape
    generators = [torch.Generator().manual_seed(seed)]
    for _ in range(channels - 1):
        following = torch.Generator()
        following.set_state(generators[-1].get_state())
        for _ in range(frames):  # to the next channel; torch draws 16 numbers at a time
            torch.randn(height, width, generator=following)
        generators.append(following)
    for _ in range(frames):
        drawn = [torch.randn(height, width, generator=generator) for generator in generators]
        yield torch.stack(drawn)


def patches(frame: Tensor, size: int) -> Tensor:
    """Pixels (C, H, W) as patches of features (H / size, W / size, C size size)."""
    x = frame.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # (C, rows, q, columns, r)
    return x.permute(1, 3, 0, 4, 2).flatten(2)


def unpatched(features: Tensor, size: int) -> Tensor:
    """The inverse of `patches`."""
    x = features.unflatten(2, (-1, size, size))  # (rows, columns, C, r, q)
    return x.permute(2, 0, 4, 1, 3).flatten(3, 4).flatten(1, 2)


# --- the data of attention ------------------------------------------------------------------------

# Added to a masked score, once for each axis that masks it. The score's weight is then exactly 0 in
# fp32, and a score with three of them is finite in bf16.
_MASKED = -1e4


def neighbourhoods(
    config: DiffusionDecoderConfig, stage: int, times: AxisCut, rows: int, columns: int
) -> list[Neighbourhood]:
    """The Neighbourhood of every span of a stage. times: the cut of its frames."""
    lengths, kernel = (times.window, rows, columns), config.kernels[stage]
    ropes = [rope_table(n, size) for n, size in zip(lengths, config.rope_split, strict=True)]
    pairs = zip((rows, columns), kernel[1:], strict=True)
    sides = [bias(cut(length, config.tile, neighbours)) for length, neighbours in pairs]
    frames = torch.eye(times.window)
    return [
        Neighbourhood(frames[start - first :][: times.size], mine, *sides, *ropes)
        for start, first, mine in zip(times.starts, times.windows, bias(times), strict=True)
    ]


def bias(parts: AxisCut, shifted: bool = True) -> Tensor:
    """(parts, size, window): 0 where a query attends to a key, otherwise _MASKED. shifted: windows
    are shifted inward at borders, not cut off."""
    bias = torch.full((len(parts.starts), parts.size, parts.window), _MASKED)
    for part, (start, first) in enumerate(zip(parts.starts, parts.windows, strict=True)):
        for query in range(parts.size):
            key = start + query - parts.kernel // 2
            if shifted:
                key = clamped(key, parts.length - parts.kernel)
            bias[part, query, max(key - first, 0) : key - first + parts.kernel] = 0
    return bias


def rope_table(positions: int | Tensor, channels: int) -> Tensor:
    """Cosines and sines (2, positions, channels / 2) fp32 of so many positions, or of these. They
    count from the beginning of a region, because attention depends on their differences only."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float64) / channels
    frequencies = (_ROPE_BASE**-exponents).float()
    if isinstance(positions, int):
        positions = torch.arange(positions, dtype=torch.float32)
    phases = positions[:, None] * frequencies
    return torch.stack([phases.cos(), phases.sin()])


def timestep_features(scale: float) -> Tensor:
    """Cosines and sines (1, 256) fp32 of timestep 1, which is pure noise."""
    half = TIMESTEP_FEATURES // 2
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32) / half
    phases = scale * exponents.exp()[None]
    return torch.cat([phases.cos(), phases.sin()], -1)


# --- estimates, for the plan ----------------------------------------------------------------------

_STORED, _FLOAT32 = 2, 4  # bytes of a stored weight (bfloat16) and of a float32
# Numbers of tensors as large as a region, and of biases of a strip of tiles, that exist at the same
# time. They are measured, and include freed memory that the system does not get back.
_OF_REGION, _OF_BIAS = 14, 4


def decode_flops(config: DiffusionDecoderConfig, clip: tuple[int, int, int]) -> int:
    """FLOPs of matrix products and attention for a clip of latents (F, h, w). They include masked
    scores, and the keys and values that spans compute again."""
    sizes, last = volumes(config, clip), len(config.channels) - 1
    total = 0
    for stage, (channels, kernel) in enumerate(zip(config.channels, config.kernels, strict=True)):
        lengths, parts = sizes[stage], (config.span, config.tile, config.tile)
        times, *sides = map(cut, lengths, parts, kernel)
        spans, tokens = len(times.starts), times.size * lengths.rows * lengths.columns
        # Queries and outputs, three layers of the MLP; keys and values of the whole region.
        layers = tokens * (2 + 3 * MLP_RATIO) + 2 * tokens * times.window // times.size
        scores = times.size * times.window
        for side in sides:
            scores *= len(side.starts) * side.size * side.window
        block = 2 * channels**2 * layers + 4 * channels * scores
        if stage < last:
            upsampling = config.upsamplings[stage]
            more = channels**2 * prod(upsampling.stride) // upsampling.multiplier
        else:  # contexts, noise and pixels
            more = config.depths[last] * channels**2 + 2 * config.patch_channels * channels
        total += spans * (config.depths[stage] * block + 2 * tokens * more)
    return total + 2 * prod(sizes[0]) * config.latent_channels * config.channels[0]


def decode_bytes(
    config: DiffusionDecoderConfig,
    clip: tuple[int, int, int],
    dtype: torch.dtype,
    keyframes: bool = False,
) -> int:
    """Peak bytes, with weights, of decoding latents (F, h, w) to uint8 frames that are written
    immediately. Only the latent's bytes depend on the clip's length, unless there are keyframes."""
    stored = working = whole = 0
    for stage, (volume, depth) in enumerate(zip(volumes(config, clip), config.depths, strict=True)):
        frame, kernel = volume.rows * volume.columns * config.channels[stage], config.kernels[stage]
        window = cut(volume.frames, config.span, kernel[0]).window
        # Each block keeps its region's frames, and a span that the next block has not read.
        stored += depth * (window + config.span) * frame
        rows, columns = map(cut, volume[1:], (config.tile, config.tile), kernel[1:])
        keys, queries = rows.window * columns.window, config.span * rows.size * columns.size
        strip = 2 * keys * config.channels[stage] + _OF_BIAS * queries * keys
        strip *= len(columns.starts) * window
        working = max(working, _OF_REGION * window * frame + strip)
        # The features of the whole clip, those that a block has computed, and both in one tensor.
        whole = max(whole, 3 * volume.frames * frame)
        if stage == len(config.channels) - 1:  # the context, until the last block has read it
            whole += volume.frames * frame
            stored += min(volume.frames, depth * (kernel[0] // 2 + config.span)) * frame
    stored = whole if keyframes else stored
    weights = sum(
        prod(shape)
        for shape in diffusion_program(config, config.smallest, dtype).weights().values()
    )
    pixels = 2 * _FRAMES * 3 * prod(clip[1:]) * SPACE_FACTOR**2
    return _STORED * weights + dtype.itemsize * (weights + stored) + _FLOAT32 * (working + pixels)
