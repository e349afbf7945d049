"""The size and quality of MP4 files beside those of upstream's settings, and whether their bytes
repeat.

    python benchmarks/mp4.py --folder DIR [--repeats 3] [--num-frames 49]

Encodes five clips: grain, a gradient, motion and a still picture of 320x576, made here, and the
PNG frames in DIR, of a generated clip (--save-frames of ltx-neuron generate). Sizes are those of
the picture's track. Every way runs through `write_video` with silence and with the same colour
conversion; only the stream's settings differ:

    upstream  ltx-pipelines 1.4.2: crf 19, veryfast, threads by frame, as many as x264 takes
    ours      what write_video has
    the others each change one setting of ours

SSIM (Gaussian window of 11, sigma 1.5, every fifth frame) and PSNR compare the decoded luma with
the encoder's input. Bytes repeat if all runs give one file: on one core and on all of them. In
turn, upstream and ours are timed.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import av
import numpy as np
import torch
from lib.harness import finish, print_conditions, print_ratios, take_turns
from lib.harness import parser as harness_parser
from PIL import Image
from torch import Tensor
from torch.nn.functional import conv2d

from ltx_neuron.files import frames_in
from ltx_neuron.host import video
from ltx_neuron.host.video import X264_OPTIONS, X264_THREADS, write_video, yuv420

HEIGHT, WIDTH = 320, 576  # a width at which x264's AVX-512 code does not repeat itself
RATE, SOUND_RATE = 24, 48000
UPSTREAM = {"crf": "19", "preset": "veryfast"}
WITHOUT_TREE = X264_OPTIONS | {"mbtree": "0"}
ANY_CPU = X264_OPTIONS | {"x264-params": "cpu-independent=1"}


class Settings(NamedTuple):
    options: dict[str, str]
    threads: int
    thread_type: str


OURS = Settings(X264_OPTIONS, X264_THREADS, "FRAME")
WAYS = {
    "upstream": Settings(UPSTREAM, 0, "FRAME"),
    "ours": OURS,
    "1 thread": OURS._replace(threads=1),
    "16 threads": OURS._replace(threads=16),
    "4 slices": OURS._replace(thread_type="SLICE"),
    "no tree": OURS._replace(options=WITHOUT_TREE),
    "no tree, 4 slices": OURS._replace(options=WITHOUT_TREE, thread_type="SLICE"),
    "cpu-independent": OURS._replace(options=ANY_CPU),
    "crf 18": OURS._replace(options=X264_OPTIONS | {"crf": "18"}),
}


def texture(height: int, width: int, seed: int) -> Tensor:
    """A picture whose spectrum falls as 1/f, as that of photographs does, (height, width, 3) in
    0..255."""
    noise = torch.fft.rfft2(
        torch.randn(3, height, width, generator=torch.Generator().manual_seed(seed))
    )
    y, x = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)
    picture = torch.fft.irfft2(noise / (x**2 + y**2).sqrt().clip(1 / width) ** 1.2, (height, width))
    picture = picture / picture.std(dim=(1, 2), keepdim=True)
    return (128 + 45 * picture).permute(1, 2, 0)


GROUND = texture(HEIGHT, WIDTH, seed=1)


def disc(height: int, width: int, y: float, x: float, radius: float) -> Tensor:
    """The share of each pixel that a disc covers, (height, width, 1)."""
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    distance = ((rows - y) ** 2 + (columns - x) ** 2).sqrt()
    return (radius - distance + 0.5).clip(0, 1)[..., None]


def shown(pictures: Iterator[Tensor]) -> Tensor:
    return torch.stack([picture.round().clip(0, 255).byte() for picture in pictures])


def scene(number: int) -> Tensor:
    """A textured disc that moves before a texture, which moves the other way."""
    mask = disc(HEIGHT, WIDTH, HEIGHT / 2, 150 + 5.3 * number, 90)
    return GROUND.roll(-2 * number, 1) * (1 - mask) + (255 - GROUND.roll(3 * number, 0)) * mask


def gradient(number: int) -> Tensor:
    y, x = torch.arange(HEIGHT)[:, None, None], torch.arange(WIDTH)[:, None]
    phase = (x / 400 + y / 550 + number / 60) * torch.tensor([0.5, 1.0, 1.5])
    return 127 + 100 * torch.sin(phase)


def grain(number: int) -> Tensor:
    noise = torch.randn(HEIGHT, WIDTH, 1, generator=torch.Generator().manual_seed(number))
    return gradient(number) + 8 * noise


def all_clips(frames: Path, count: int) -> dict[str, Tensor]:
    """Name -> uint8 (N, H, W, 3)."""
    made = {
        "grain": shown(grain(number) for number in range(count)),
        "gradient": shown(gradient(number) for number in range(count)),
        "motion": shown(scene(number) for number in range(count)),
        "still": shown(scene(0) for _ in range(count)),
    }
    pictures = [np.array(Image.open(path)) for path in frames_in(frames)]
    return made | {"demo": torch.from_numpy(np.stack(pictures))}


@contextmanager
def settings(way: Settings) -> Iterator[None]:
    """write_video with other settings of the picture's stream."""
    add = video._add_video_stream

    def other(*args):
        with mock.patch.multiple(video, X264_OPTIONS=way.options, X264_THREADS=way.threads):
            stream = add(*args)
        stream.codec_context.thread_type = way.thread_type
        return stream

    with mock.patch.object(video, "_add_video_stream", other):
        yield


def write(path: Path, frames: Tensor, way: Settings) -> bytes:
    sound = torch.zeros(2, len(frames) * SOUND_RATE // RATE)
    with settings(way):
        write_video(path, [frames], RATE, lambda: sound, SOUND_RATE)
    return path.read_bytes()


def picture_bytes(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(packet.size for packet in container.demux(video=0))


def luma(frame: Any) -> Tensor:
    """(1, 1, H, W), of a frame in yuv420p."""
    rows = np.frombuffer(frame.planes[0], np.uint8).reshape(frame.height, -1)
    return torch.from_numpy(rows[:, : frame.width].astype(np.float32))[None, None]


def ssim(a: Tensor, b: Tensor) -> float:
    """The structural similarity of two pictures (1, 1, H, W), 0..255 (Wang et al., 2004)."""
    window = torch.exp(-((torch.arange(11.0) - 5) ** 2) / (2 * 1.5**2))
    window = (window / window.sum())[None, None, None]
    means = conv2d(conv2d(torch.cat([a, b, a * a, b * b, a * b]), window), window.mT)
    mean_a, mean_b, aa, bb, ab = means
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    first = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    covariance, variances = ab - mean_a * mean_b, aa - mean_a**2 + bb - mean_b**2
    return (first * (2 * covariance + c2) / (variances + c2)).mean().item()


def quality(path: Path, frames: Tensor) -> tuple[float, float]:
    """SSIM and PSNR in dB of a file's luma."""
    similar, squares = [], []
    with av.open(str(path)) as container:
        decoded = container.decode(video=0)
        for number, (picture, frame) in enumerate(zip(frames.numpy(), decoded, strict=True)):
            a, b = luma(yuv420(picture)), luma(frame)
            if number % 5 == 0:  # frame types repeat after at most four
                similar.append(ssim(a, b))
            squares.append((a - b).square().mean().item())
    return float(np.mean(similar)), float(10 * np.log10(255**2 / np.mean(squares)))


def compare(frames: Tensor, path: Path) -> dict[str, dict[str, float]]:
    """Bytes, their ratio to upstream's, SSIM and PSNR of every way."""
    rows: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        write(path, frames, way)
        similar, psnr = quality(path, frames)
        size = picture_bytes(path)
        ratio = size / rows.get("upstream", {"bytes": size})["bytes"]
        rows[name] = {"bytes": size, "ratio": ratio, "ssim": similar, "psnr": psnr}
        print(f"{name:18} {size:9} bytes, {ratio:5.3f} of upstream's, {similar:.5f}, {psnr:.2f} dB")
    print(f"ours at upstream's SSIM: {at_equal_ssim(rows):.3f} of upstream's bytes")
    return rows


def at_equal_ssim(rows: dict[str, dict[str, float]]) -> float:
    """Bytes of ours at upstream's SSIM, over upstream's, on the line through CRF 19 and 18."""
    ours, finer, upstream = rows["ours"], rows["crf 18"], rows["upstream"]
    share = (upstream["ssim"] - ours["ssim"]) / (finer["ssim"] - ours["ssim"])
    return ours["ratio"] * (finer["ratio"] / ours["ratio"]) ** share


def different_files(frames: Tensor, path: Path, repeats: int) -> dict[str, int]:
    """How many different files upstream and ours give on one core and on all."""
    cores = os.sched_getaffinity(0)
    numbers = {"upstream": 0, "ours": 0}
    for name in numbers:
        files = []
        for chosen in ({min(cores)}, cores):
            os.sched_setaffinity(0, chosen)
            files += [write(path, frames, WAYS[name]) for _ in range(repeats)]
        numbers[name] = len(set(files))
        print(f"{name:18} {len(set(files))} different files of {len(files)}", flush=True)
    return numbers


def main() -> None:
    parser = harness_parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, required=True, help="PNG frames of a clip")
    parser.add_argument("--num-frames", type=int, default=49, help="of the clips that are made")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)  # torch is not what is measured
    print_conditions(f"PyAV {av.__version__}, SSIM and PSNR of the luma")
    clips: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        for name, frames in all_clips(args.folder, args.num_frames).items():
            print(f"{name}, {'x'.join(map(str, frames.shape[:3]))}")
            rows = compare(frames, path)
            clips[name] = rows | {"equal_ssim": at_equal_ssim(rows)}
            clips[name]["files"] = different_files(frames, path, args.repeats)
            ways = {way: partial(write, path, frames, WAYS[way]) for way in ("upstream", "ours")}
            turns = take_turns(ways, args.repeats)
            print_ratios(turns, "upstream")
    finish(args, **clips)


if __name__ == "__main__":
    main()
