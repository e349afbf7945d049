"""What several tests share: random models of ltx-core at any size, inputs of a step, our graphs run in this process,
processes and files of media."""

import ctypes
import json
import math
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from blake3 import blake3
from conftest import SCRIPT_SECONDS
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from tiny import SPATIAL_UPSAMPLER, TinySizes
from tiny.config import merge, tiny_config
from tiny.weights import random_weights, upsampler_weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.transformer import Bucket, TransformerConfig, transformer_config
from ltx_neuron.files import MANIFEST, write_json
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.host.video import write_video
from ltx_neuron.models.modulation import modulation_table
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import Program, dit_program
from ltx_neuron.models.rope import rope_tables
from ltx_neuron.models.signatures import Field
from ltx_neuron.sampling.latents import audio_positions
from ltx_neuron.sampling.schedules import sigma_pairs
from ltx_neuron.weights.rankfiles import file_names
from ltx_neuron.weights.sharding import DIFFUSION
from ltx_neuron.weights.tensorfile import TensorFile

import_ltx_core()  # before any test imports the parts of ltx-core that want torchaudio

STREAMS = ("video", "audio")
FP32_ROUNDING = 2**-24  # the most that one operation rounds by, relative to its result
BF16_ROUNDING = 2**-8
# The default size; one whose counts divide nothing evenly; one whose RoPE has two left-over entries.
SIZES = {
    "4 heads of 8": TinySizes(),
    "8 heads of 10, 3 blocks": TinySizes(layers=3, heads=8, head_dim=10, audio_head_dim=6),
    "4 heads of 10": TinySizes(layers=1, head_dim=10, audio_head_dim=2),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Import it to run a file's tests on one thread: tiny models gain nothing from two, and may lose."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stress_count(whole: int) -> int:
    """How often a test of test/stress does something: so often, or the share STRESS_SHARE of it."""
    return max(1, round(whole * float(os.environ.get("STRESS_SHARE", "1"))))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def shared_memories() -> set[str]:
    """Of this machine, without semaphores, which ranks of other tests have."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def rel(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|"""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def furthest(got: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference of an element."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return (got.double() - wanted.double()).abs().max().item()


def fp32_bound(*summands: int) -> float:
    """How far two fp32 evaluations of a chain of sums, with so many summands each, may be apart, relative to the
    result's norm. Partial sums of k summands of random sign grow as sqrt(k), and an addition rounds by up to u = 2**-24
    of its partial sum, at random: a sum of n is off by about u * sqrt(n / 2). Sums that follow one another add in
    quadrature, and two evaluations differ by sqrt(2) times that. Four times this figure holds over thousands of
    comparisons on any CPU. Source: Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019."""
    return 4 * FP32_ROUNDING * math.sqrt(sum(summands))


def block_summands(width: int, keys: int = TEXT_TOKENS, attentions: int = 3) -> tuple[int, ...]:
    """Those of a transformer block of a width: per attention a norm, q/k/v, the q/k norms, scores of at most the width,
    keys and the output; then a norm and the feed-forward. One attention has so many keys, others fewer than 64."""
    attention = (width,) * 5
    return attention * attentions + (keys,) + (64,) * (attentions - 1) + (width, width, 4 * width)


def made_config(sizes: TinySizes = SIZES["4 heads of 8"], **transformer) -> tuple[dict, TransformerConfig]:
    """A checkpoint's config metadata, with changes to its transformer section, as it is and as we parse it."""
    content = merge(tiny_config(sizes), {"transformer": transformer})
    return content, transformer_config(content)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with fp32 weights that keep activations lively."""
    weights = random_weights(model.state_dict(), generator(seed))
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
    return model.eval().requires_grad_(False)


def ltx_model(content: dict, seed: int = 0) -> nn.Module:
    """ltx-core's DiT of a config with random weights, which have the names that ours have."""
    from ltx_core.model.transformer import LTXModelConfigurator

    return randomised(LTXModelConfigurator.from_config(content), seed)


class Held(NamedTuple):
    """What a stage's state says of held video tokens."""

    denoise_mask: Tensor  # (Tv, 1)
    clean_latent: Tensor  # (1, Tv, C)
    masks: Tensor  # (U,), 1 first
    timestep_mask: Tensor  # (Tv, U), one-hot


def step_inputs(
    config, weights, sigmas, positions, audio_tokens, held: Held, max_steps=None, cross_sigma=False
) -> dict:
    """All fields of a DiT step but its number: random latents and contexts, tables for the rest."""
    pairs = sigma_pairs(sigmas, max_steps or len(sigmas) - 1)
    return {
        "step_numbers": torch.arange(len(pairs), dtype=torch.int32),
        "sigmas": pairs[:, None].expand(-1, 2, 2),
        "video_modulation": modulation_table(weights, config, "video", pairs[:, 0], held.masks, cross_sigma),
        "audio_modulation": modulation_table(weights, config, "audio", pairs[:, 0], torch.ones(1), cross_sigma),
        "video_latent": randn(1, positions.shape[2], config.in_channels, seed=1),
        "audio_latent": randn(1, audio_tokens, config.audio_in_channels, seed=2),
        "video_context": randn(1, TEXT_TOKENS, config.video.inner, seed=3),
        "audio_context": randn(1, TEXT_TOKENS, config.audio.inner, seed=4),
        "timestep_mask": held.timestep_mask,
        "denoise_mask": held.denoise_mask,
        "clean_latent": held.clean_latent,
        **rope_tables(config, positions, audio_positions(audio_tokens)),
    }


def step_number(number: int) -> dict[str, Tensor]:
    return {"step": torch.tensor([number], dtype=torch.int32)}


def call(program: Program, name: str, first_block: int, weights: dict, values: dict) -> dict[str, Tensor]:
    """The outputs of one call of a program on a single rank."""
    inputs = {field: values[field] for field in program.graphs[name].inputs}
    return program.call(name, first_block, weights.__getitem__, inputs)


def run_program(program: Program, weights: dict, values: dict) -> dict[str, Tensor]:
    """The values after one run of a program on a single rank, without tracing it."""
    for name, first_block in program.runs["main"]:
        values = values | call(program, name, first_block, weights, values)
    return values


def clip_times(latents: int) -> list[tuple[int, int]]:
    """Between which frames each latent of a clip lies."""
    return [(0, 1), *((8 * k - 7, 8 * k + 1) for k in range(1, latents))]


def token_positions(times: list[tuple[int, int]], fps: float, rows: int, columns: int) -> Tensor:
    """Middles (1, 3, T) of the tokens of latents, or of frames, that lie between these frames."""
    grid = [(16 + 32 * y, 16 + 32 * x) for y in range(rows) for x in range(columns)]
    # In fp32, as upstream: the highest frequencies of RoPE show the last bit of a second.
    seconds = (torch.tensor(times, dtype=torch.float32) / fps).sum(1) / 2
    return torch.tensor([[second, *at] for second in seconds for at in grid]).T[None]


def predicted_video(config, weights, mask, clean, positions, sigma, sound=None, **values: Tensor) -> Tensor:
    """The clean video, held tokens restored, by a plain step to sigma 0, beside sound (1, Ta, C) that is clean."""
    masks = torch.tensor([1.0, *sorted({*mask.flatten().tolist()} - {1.0})])
    audio = torch.zeros(1, 0, config.audio_in_channels) if sound is None else sound
    held = Held(mask, clean, masks, (mask == masks).float())
    inputs = step_inputs(config, weights, (sigma, 0.0), positions, audio.shape[1], held)
    if sound is not None:
        now, never = torch.tensor([sigma]), torch.zeros(1)
        inputs["video_modulation"] = modulation_table(weights, config, "video", now, masks, False, never)
        inputs["audio_modulation"] = modulation_table(weights, config, "audio", never, torch.ones(1), False, now)
    bucket = Bucket(positions.shape[2], audio.shape[1], len(masks), 1)
    program = dit_program(config, bucket, 1, SingleRank(), torch.float32, 0)
    return run_program(program, weights, inputs | step_number(0) | {"audio_latent": audio} | values)["video_latent"]


def random_lora(path: Path, checkpoint: Path, *layers: str, **metadata: str) -> Path:
    """An adapter of rank 4 of some layers of a checkpoint's DiT."""
    shapes, factors = TensorFile(checkpoint, "").shapes, {}
    for number, layer in enumerate(layers):
        rows, columns = shapes[f"{DIFFUSION}{layer}.weight"]
        parts = {"A": randn(4, columns, seed=number), "B": 0.1 * randn(rows, 4, seed=number + 2)}
        factors |= {f"diffusion_model.{layer}.lora_{part}.weight": x.bfloat16() for part, x in parts.items()}
    save_file(factors, path, metadata)
    return path


class Convolutions(TorchDispatchMode):
    """The numbers of dimensions, such as 2, over which convolutions go while it is active."""

    def __init__(self):
        super().__init__()
        self.dimensions: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.dimensions.add(args[1].ndim - 2)
        return function(*args, **kwargs or {})


class Together:
    """Comm of ranks that are threads of this process."""

    def __init__(self, size: int):
        self.size, self._given, self._ranks = size, {}, {}
        self._met, self._read = threading.Barrier(size), threading.Barrier(size)

    def join(self, rank: int) -> None:
        """Say which rank this thread is; needed where the ranks' order counts."""
        self._ranks[threading.get_ident()] = rank

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if tensors[0].is_meta:  # one rank derives the shapes of its fields
            return tensors
        given = self._exchange(tensors)
        return tuple(torch.stack(parts).sum(0) for parts in zip(*given, strict=True))

    def all_gather(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor.repeat(1, self.size, 1)
        return torch.cat([part for (part,) in self._exchange((tensor,))], dim=1)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor.chunk(self.size, dim=1)[0]
        mine = sorted(self._ranks.values()).index(self._ranks[threading.get_ident()])
        return self.sum(tensor)[0].chunk(self.size, dim=1)[mine]

    def _exchange(self, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """The tensors of every rank, in the order of the ranks."""
        mine = threading.get_ident()
        self._given[self._ranks.get(mine, mine)] = tensors
        self._met.wait(timeout=30)
        given = [self._given[rank] for rank in sorted(self._given)]
        if self._read.wait(timeout=30) == 0:
            self._given.clear()
        self._met.wait(timeout=30)
        return given


def random_value(field: Field, tp: int, seed: int) -> Tensor:
    """A whole tensor of a field, random where it is of floats."""
    shape = [size * tp if dim == field.split else size for dim, size in enumerate(field.shape)]
    return (randn(*shape, seed=seed) if field.dtype.is_floating_point else torch.zeros(shape)).to(field.dtype)


def save_weights(folder: Path, *ranks: dict[str, Tensor]) -> Path:
    """A finished weight set that holds the given tensors, none of them on the host."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = {}
    for name, tensors in zip(file_names(len(ranks)), (*ranks, {}), strict=True):
        content = save({key: tensor.contiguous() for key, tensor in tensors.items()})
        end = 8 + int.from_bytes(content[:8], "little")
        text = content[8:end] + b" " * (-end % 64)  # as the sharder writes it
        header = len(text).to_bytes(8, "little") + text
        (folder / name).write_bytes(whole := header + content[end:])
        digests = {"blake3": blake3(whole).hexdigest(), "header_blake3": blake3(header).hexdigest()}
        lines[name] = {"bytes": len(whole), **digests}
    write_json(folder / MANIFEST, {"identity": {"kind": "weights", "model": "toy", "tp": len(ranks)}, "files": lines})
    return folder


def forked(function: Callable[[], None], seconds: int = 30) -> int:
    """The pid of a forked process that calls a function, and ends after so many seconds in any case; its exit code is 0
    where the function returned, and 1 where it raised."""
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        # After a fork, threads that begin together race for torch's pool.
        torch.set_num_threads(torch.get_num_threads())
        function()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - also SystemExit: it must not leave this function
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def exit_code(child: int) -> int:
    """Of a forked process, once it has ended; negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ranks_of(pid: int) -> list[int]:
    """Processes that a run's fork server started."""
    ranks = []
    with suppress(psutil.Error):  # it ends meanwhile
        for child in psutil.Process(pid).children():
            ranks += [grandchild.pid for grandchild in child.children()]
    return ranks


def wait_for(happened: Callable[[], bool], seconds: float = SCRIPT_SECONDS, every: float = 0.02) -> None:
    """Wait until something has happened; the test fails where it does not."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(every)


def allowed(seconds: float) -> float:
    """A bound of seconds on this machine as it is: as many times more as there are processes for each of its cores."""
    return seconds * max(1.0, os.getloadavg()[0] / os.cpu_count())


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block ends in so many seconds, see `allowed`."""
    began = time.monotonic()
    yield
    took, most = time.monotonic() - began, allowed(seconds)
    assert took < most, f"{took:.1f} s, {most:.1f} allowed"


def ended(pids: list[int], seconds: float = 10) -> bool:
    """Whether processes end soon."""
    deadline = time.monotonic() + allowed(seconds)
    while (alive := any(map(psutil.pid_exists, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive


def rewrite(source, destination, change, metadata_change=None):
    """A copy of a safetensors file with `change` applied to its tensors and `metadata_change` to its config."""
    with safe_open(source, "pt") as file:
        metadata = dict(file.metadata())
    config = json.loads(metadata["config"]) | (metadata_change or {})
    tensors = load_file(source)
    change(tensors)
    save_file(tensors, destination, metadata | {"config": json.dumps(config)})
    return destination


def rational_upsampler(path: Path) -> Path:
    """A spatial upsampler of 1.5, as ltx-2.3-spatial-upscaler-x1.5-1.0."""
    from ltx_core.model.upsampler.blur_downsample import BlurDownsample

    config = SPATIAL_UPSAMPLER | {"spatial_scale": 1.5, "rational_resampler": True}
    weights = upsampler_weights(config, 7)
    weights["upsampler.blur_down.kernel"] = BlurDownsample(2, 2).kernel
    save_file(weights, path, {"config": json.dumps(config)})
    return path


def tone(rate: int, seconds: float, hertz: float = 440.0) -> Tensor:
    """Two tones, float32 (2, samples): left and right."""
    time = torch.arange(round(rate * seconds), dtype=torch.float64) / rate
    return (0.5 * torch.stack([time * hertz, time * hertz * 1.5]).mul(2 * math.pi).sin()).float()


def write_sound(path, samples, rate, codec, layout="stereo", format="fltp"):
    """Write samples, laid out as PyAV has them in that format. Returns the path."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout = layout
        frame = av.AudioFrame.from_ndarray(samples, format=format, layout=layout)
        frame.sample_rate = rate
        for part in (frame, None):
            for packet in stream.encode(part):
                container.mux(packet)
    return path


def picture_frames(count, height, width, seed):
    """Soft pictures that change, uint8 (count, height, width, 3)."""
    f, y, x = torch.meshgrid(*map(torch.arange, (count, height, width)), indexing="ij")
    planes = (2 * x + 5 * f + seed, 3 * y - 4 * f, x + y + 7 * f)
    return torch.stack([128 + 110 * torch.sin(plane / 23) for plane in planes], -1).byte()


def write_film(path, frames, rate=24, sound=None, lossless=False):
    """A video, with 48000 samples of sound a second, if any. Returns the path."""
    import av

    codec, pixels, options = ("libx264rgb", "rgb24", {"qp": "0"}) if lossless else ("libx264", "yuv420p", {"crf": "12"})
    with av.open(str(path), "w") as container:
        track = container.add_stream("pcm_s16le", rate=48000, layout="stereo") if sound is not None else None
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pixels
        for number, picture in enumerate(frames.numpy()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if track:
            samples = (sound * 2**15).short().T.reshape(1, -1).contiguous().numpy()
            samples = av.AudioFrame.from_ndarray(samples, format="s16", layout="stereo")
            samples.sample_rate = 48000
            container.mux([*track.encode(samples), *track.encode()])
    return path


def made_film(path: Path, count: int, height: int, width: int, seed: int = 0) -> Path:
    """A video of soft pictures that change, 24 a second, with sound as long as it."""
    frames = picture_frames(count, height, width, 9 * seed)
    write_video(path, [frames], 24.0, lambda: tone(48000, count / 24, 330 + 30 * seed), 48000)
    return path


def read_video(path: str | Path) -> dict:
    """Codecs, sizes, rates, number of decoded frames, and both durations in seconds of a video file."""
    import av

    with av.open(str(path)) as container:
        video, pictures = container.streams.video[0], container.streams.video[0].codec_context
        facts = {"video_codec": pictures.name, "pixel_format": pictures.pix_fmt, "frame_rate": video.average_rate}
        facts |= {"width": pictures.width, "height": pictures.height}
        facts["video_seconds"] = float(video.duration * video.time_base)
        if container.streams.audio:
            audio, sound = container.streams.audio[0], container.streams.audio[0].codec_context
            facts |= {"audio_codec": sound.name, "channels": sound.channels, "sample_rate": sound.sample_rate}
            facts["audio_seconds"] = float(audio.duration * audio.time_base)
        return facts | {"frame_count": sum(1 for _ in container.decode(video))}


def said_to_an_ordinary_user(function: Callable[[], object]) -> str:
    """The kind and text of what `function` raises in a fork without capabilities, which permissions bind also where the
    tests run as root. It must use no threads."""
    readable, writable = os.pipe()

    def call() -> None:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of capabilities
        ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())
        try:
            said = f"nothing was refused: {function()}"
        except BaseException as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        os.write(writable, said.encode())

    exit_code(forked(call))
    os.close(writable)
    with open(readable) as pipe:
        return pipe.read()


@contextmanager
def locked(path: Path) -> Iterator[Path]:
    """Take all permissions from a file or folder inside the block."""
    before = stat.S_IMODE(path.stat().st_mode)
    path.chmod(0)
    try:
        yield path
    finally:
        path.chmod(before)
