"""The released vocoder, run faster on a CPU: ltx-core's modules and weights with another forward.

Every layer is computed in spans of time, which the cores share. A span is read with the margin
that the layer's filters reach over, so that the parts are those of the whole. Spans are cut by a
layer's length and channels alone: the number of cores does not change the bits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from ltx_core.model.audio_vae import vocoder as ltx
from torch import Tensor, nn

from ltx_neuron.host.fourier import Filters
from ltx_neuron.host.winograd import Workers

FILTER = 12  # taps of the low-pass filters around an activation
REACH = 6  # samples on each side on which an activation's result depends
UP_REACH = 3  # samples on each side from which upsampling makes a sample's two
BLOCK = 16  # samples that a row of a matrix product resamples
# A span has about this many numbers, which a core's cache holds with what is made of them, but no
# fewer samples than the other number: all of a layer's filters are read for each span.
SPAN_NUMBERS, SPAN_SAMPLES = 2**18, 640
# The modules of the released vocoder, with the settings that the forward below computes.
_RELEASED_MODULES = {
    ltx.VocoderWithBWE: lambda m: True,
    ltx.Vocoder: lambda m: m.is_amp and not (m.apply_final_activation and m.use_tanh_at_final),
    nn.Conv1d: lambda m: (
        (m.stride, m.groups, m.padding_mode) == ((1,), 1, "zeros")
        and m.kernel_size[0] in (3, 7, 11)
        and 2 * m.padding[0] == (m.kernel_size[0] - 1) * m.dilation[0]
    ),
    nn.ConvTranspose1d: lambda m: (
        (m.dilation, m.groups, m.output_padding) == ((1,), 1, (0,))
        and 2 * m.padding[0] == m.kernel_size[0] - m.stride[0]
    ),
    nn.ModuleList: lambda m: True,
    ltx.AMPBlock1: lambda m: True,
    ltx.Activation1d: lambda m: (
        type(m.act) is ltx.SnakeBeta
        and (m.upsample.ratio, m.upsample.kernel_size) == (2, FILTER)
        and (m.downsample.ratio, m.downsample.kernel_size) == (2, FILTER)
    ),
    ltx.SnakeBeta: lambda m: m.alpha_logscale,
    ltx.UpSample1d: lambda m: True,
    ltx.DownSample1d: lambda m: True,
    ltx.LowPassFilter1d: lambda m: m.padding and m.padding_mode == "replicate",
    ltx.MelSTFT: lambda m: True,
    ltx._STFTFn: lambda m: True,
}


def unknown_modules(vocoder: nn.Module) -> list[str]:
    """Name and type of every module that `FastVocoder` cannot run: those that the released vocoder
    does not have, or that are not in float32. Empty for the released vocoder."""
    return [
        f"{name or 'vocoder'}: {type(module).__name__}({module.extra_repr()})"
        for name, module in vocoder.named_modules()
        if type(module) not in _RELEASED_MODULES
        or not _RELEASED_MODULES[type(module)](module)
        or any(weight.dtype != torch.float32 for weight in module.parameters(recurse=False))
    ]


class FastVocoder(ltx.VocoderWithBWE):
    """A loaded ltx-core vocoder with another forward, which differs in rounding only."""

    def __init__(self, vocoder: ltx.VocoderWithBWE):
        """Take over the vocoder's modules. Raises ValueError unless `unknown_modules` is empty."""
        if unknown := unknown_modules(vocoder):
            raise ValueError("not the released vocoder:\n  " + "\n  ".join(unknown))
        nn.Module.__init__(self)
        self.__dict__.update(vocoder.__dict__)  # shared and not copied

    @torch.no_grad()
    def forward(self, mel_spec: Tensor) -> Tensor:
        """Mel spectrograms (B, 2, T, bins) to waveforms (B, 2, samples) in [-1, 1]."""
        with Workers() as workers:
            return torch.stack([self._waveform(mel, workers) for mel in mel_spec])

    def _waveform(self, mel: Tensor, workers: Workers) -> Tensor:
        low = generate(self.vocoder, mel, workers)
        length = low.shape[1] * self.output_sampling_rate // self.input_sampling_rate
        low = F.pad(low, (0, -low.shape[1] % self.hop_length))[None]
        mel = _on_one_core(lambda: self._compute_mel(low), workers)[0]
        residual = generate(self.bwe_generator, mel.transpose(1, 2), workers)
        skip = _on_one_core(lambda: self.resampler(low), workers)[0]
        return residual.add_(skip).clamp_(-1, 1)[:, :length]


def generate(generator: ltx.Vocoder, mel: Tensor, workers: Workers) -> Tensor:
    """The waveform (2, samples) that one of the vocoder's two generators makes of mel spectrograms
    (2, T, bins)."""
    x = _convolve(mel.transpose(1, 2).flatten(0, 1), generator.conv_pre, workers)
    blocks = len(generator.resblocks) // len(generator.ups)
    for stage, up in enumerate(generator.ups):
        x = _upsample(x, up, workers)
        total = torch.zeros_like(x)
        for block in generator.resblocks[stage * blocks : (stage + 1) * blocks]:
            total += _amp_block(x, block, workers)
        x = total.div_(blocks)
    x = _post(x, generator, workers)
    return x.clamp_(-1, 1) if generator.apply_final_activation else x


def spans(x: Tensor) -> list[tuple[int, int]]:
    """Where the spans of a layer's input (C, length) start and stop: an even number of nearly equal
    ones, or one."""
    channels, length = x.shape
    count = -(-length // max(SPAN_SAMPLES, SPAN_NUMBERS // channels))
    count += count % 2 if count > 1 else 0
    return [(length * i // count, length * (i + 1) // count) for i in range(count)]


def _on_one_core(function: Callable[[], Tensor], workers: Workers) -> Tensor:
    """What the function returns, with the bits that one thread gives: for what is small."""
    result = []
    workers.run(lambda run: result.append(run()), [function])
    return result[0]


def _convolve(x: Tensor, conv: nn.Conv1d, workers: Workers) -> Tensor:
    """The convolution of x (C, length) by torch; the workers share the output channels."""
    out = torch.empty(conv.out_channels, x.shape[1])

    def channels(first: int) -> None:
        some = slice(first, first + 128)
        bias = None if conv.bias is None else conv.bias[some]
        out[some] = F.conv1d(x[None], conv.weight[some], bias, padding=conv.padding)[0]

    workers.run(channels, range(0, conv.out_channels, 128))
    return out


def up_margin(taps: int, stride: int) -> int:
    """Input samples on each side of a span that reach into a transposed convolution's result."""
    return -(-taps // stride)


def _upsample(x: Tensor, up: nn.ConvTranspose1d, workers: Workers) -> Tensor:
    """The transposed convolution (Cout, length * stride) of x (Cin, length)."""
    (stride,), (taps,), (padding,) = up.stride, up.kernel_size, up.padding
    out = torch.empty(up.out_channels, x.shape[1] * stride)
    margin = up_margin(taps, stride)

    def span(ends: tuple[int, int]) -> None:
        start, stop = ends
        first = max(0, start - margin)
        part = F.conv_transpose1d(x[None, :, first : stop + margin], up.weight, up.bias, stride)[0]
        skipped = (start - first) * stride + padding
        wanted = slice(start * stride, stop * stride)
        out[:, wanted] = part[:, skipped : skipped + wanted.stop - wanted.start]

    workers.run(span, spans(x))
    return out


def _amp_block(x: Tensor, block: ltx.AMPBlock1, workers: Workers) -> Tensor:
    """x and what the block's three pairs of convolutions add to it."""
    x, middle = x.clone(), torch.empty_like(x)

    def write(start: int, stop: int, result: Tensor) -> None:
        middle[:, start:stop] = result

    def add(start: int, stop: int, result: Tensor) -> None:
        x[:, start:stop] += result

    pairs = zip(block.acts1, block.convs1, block.acts2, block.convs2, strict=True)
    for act1, conv1, act2, conv2 in pairs:
        _activate_and_convolve(x, act1, conv1, write, workers)
        _activate_and_convolve(middle, act2, conv2, add, workers)
    return x


def _activate_and_convolve(
    x: Tensor,
    activation: ltx.Activation1d,
    conv: nn.Conv1d,
    write: Callable[[int, int, Tensor], None],
    workers: Workers,
) -> None:
    """Hand conv(activation(x)) to `write`, span by span: start, stop, and what lies between."""
    snake, margin = _Snake(activation), conv.padding[0]
    weight = conv.weight * snake.inverse
    filters = Filters(weight, conv.bias, conv.dilation[0], x.shape[1], workers)

    def span(ends: tuple[int, int]) -> None:
        start, stop = ends
        signal = snake.activate(x, start - margin, filters.room(stop - start), workers)
        write(start, stop, filters.convolve(signal, stop - start, workers))

    workers.run(span, spans(x))


def _post(x: Tensor, generator: ltx.Vocoder, workers: Workers) -> Tensor:
    """The last activation and convolution: (2, length) of x (C, length)."""
    conv, snake = generator.conv_post, _Snake(generator.act_post)
    (margin,), out = conv.padding, torch.empty(conv.out_channels, x.shape[1])
    weight = conv.weight * snake.inverse

    def span(ends: tuple[int, int]) -> None:
        start, stop = ends
        samples = stop - start + 2 * margin
        signal = snake.activate(x, start - margin, samples, workers)[:, :samples]
        out[:, start:stop] = F.conv1d(signal[None], weight, conv.bias)[0]

    workers.run(span, spans(x))
    return out


class _Snake:
    """An activation, times a: y = x + sin(ax)^2 / b at twice the rate, between low-pass filters.

    The filters are matrices that make BLOCK samples at a time. With ax in place of x, the sum is
    ax + (root sin(ax))^2, root = sqrt(a / b). The next weights are multiplied by `inverse`, 1 / a.
    """

    def __init__(self, activation: ltx.Activation1d):
        snake = activation.act
        scale, beta = snake.alpha.exp()[:, None], snake.beta.exp()[:, None] + snake.eps
        self.scale, self.inverse, self.root = scale, 1 / scale, (scale / beta).sqrt()
        self.up = torch.zeros(BLOCK, 2, BLOCK + 2 * UP_REACH)
        self.down = torch.zeros(BLOCK, 2 * BLOCK + FILTER - 2)
        up = 2 * activation.upsample.filter.flatten().flip(0)
        # A sample's two have every second tap, of samples -3 to 2 and -2 to 3 around it.
        diagonals = self.up.stride(0) + 1, 1
        self.up.as_strided((BLOCK, FILTER // 2), diagonals).copy_(up[0::2])
        second = self.up.stride(1) + 1
        self.up.as_strided((BLOCK, FILTER // 2), diagonals, second).copy_(up[1::2])
        diagonals = self.down.stride(0) + 2, 1
        down = activation.downsample.lowpass.filter.flatten()
        self.down.as_strided((BLOCK, FILTER), diagonals).copy_(down)

    def activate(self, x: Tensor, start: int, samples: int, workers: Workers) -> Tensor:
        """The activation of x (C, length) from `start`, at least that many samples of it, in
        scratch memory of the calling worker. What is outside of x is zeros."""
        channels, length = x.shape
        blocks = -(-samples // BLOCK)
        high = self._high(x, start, blocks + 1, workers)
        # A sample is made of 5 before its two and 5 after; the first ones here are 6 before it.
        strides = (high.stride(0), 2 * BLOCK, 1)
        views = high.as_strided((channels, blocks, self.down.shape[1]), strides, 1)
        rows = workers.scratch("blocks", *views.shape).copy_(views).view(-1, views.shape[2])
        low = workers.scratch("signal", len(rows), BLOCK)
        torch.mm(rows, self.down.T, out=low)
        low = low.view(channels, -1)
        if start < 0:
            low[:, :-start] = 0
        if start + low.shape[1] > length:
            low[:, length - start :] = 0
        return low

    def _high(self, x: Tensor, start: int, blocks: int, workers: Workers) -> Tensor:
        """a times the snake at twice the rate, (C, 2 * BLOCK * blocks), from UP_REACH samples
        before `start`."""
        channels, length = x.shape
        size = blocks * BLOCK + 2 * UP_REACH
        source = _samples(x, start - REACH, size, workers)
        views = source.as_strided(
            (channels, blocks, BLOCK + 2 * UP_REACH),
            (source.stride(0), BLOCK, 1),
            source.storage_offset(),
        )
        rows = workers.scratch("blocks", *views.shape)
        torch.mul(views, self.scale[:, :, None], out=rows)
        high = workers.scratch("values", channels * blocks, 2 * BLOCK)
        torch.mm(rows.view(len(high), -1), self.up.flatten(0, 1).T, out=high)
        sine = torch.sin(high, out=workers.scratch("products", *high.shape)).view(channels, -1)
        sine.mul_(self.root)
        high = high.view(channels, -1).addcmul_(sine, sine)
        # The second filter, too, reads the ends again and again where x ends.
        origin = start - UP_REACH
        _repeat_ends(high, max(0, -2 * origin), min(high.shape[1], 2 * (length - origin)))
        return high


def _samples(x: Tensor, start: int, size: int, workers: Workers) -> Tensor:
    """Columns of x (C, length) from `start`, with the nearest one of x for each outside of it."""
    channels, length = x.shape
    first, last = max(0, start), min(length, start + size)
    if last - first == size:
        return x[:, first:last]
    source = workers.scratch("source", channels, size)
    source[:, first - start : last - start] = x[:, first:last]
    _repeat_ends(source, first - start, last - start)
    return source


def _repeat_ends(x: Tensor, first: int, last: int) -> None:
    """Overwrite all columns outside of first to last by the nearest column inside."""
    if first:
        x[:, :first] = x[:, first, None]
    if last < x.shape[1]:
        x[:, last:] = x[:, last - 1, None]
