"""Reads and checks a job's files: images, videos and sounds.

Frames are read by number. Time 0 is the first frame's, so sound and picture have one clock: where a
track has no sound there is silence, and sound before the picture is left out. A file without a
picture begins with its sound. For files whose tracks begin at 0 these are the rules of upstream's
pipelines (ltx_pipelines utils/media_io/decode.py).

A UserError names the file and its flag: Pillow or PyAV cannot read it, or the model cannot take it.
It then has the ffmpeg command that makes a file that the model can take.
"""

import math
import os
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from ltx_neuron.errors import UserError, os_reason, own_files, to_user_error
from ltx_neuron.files import check_regular, first_bytes
from ltx_neuron.host.colors import in_srgb
from ltx_neuron.sampling import shapes
from ltx_neuron.sampling.conditions import AttentionMask, SoundCondition
from ltx_neuron.sampling.inputs import JobInputs
from ltx_neuron.sampling.shapes import TIME_SCALE
from ltx_neuron.sampling.size import Size, exact_frame_rate

SOUND, RETAKE = "--audio-path", "--video-path"
REFERENCE, MASK = "--video-conditioning", "--conditioning-attention-mask"
VOICE, DUBBED = "--reference-audio", "--reference-video"


@own_files()
def check(inputs: JobInputs) -> None:
    """Raise UserError for files that cannot be encoded. Reads only the headers of videos."""
    for image in inputs.images:
        check_image(image.path, *inputs.size.sides, inputs.orientation)
    if inputs.sound:
        rate = read_sound_condition(inputs, inputs.sound).rate
        _check_rate(inputs.sound.path, SOUND, rate, aac_rate(rate))
    if inputs.retake:
        extension, size = inputs.extension, inputs.size
        frames = extension.source_frames if extension else size.num_frames
        _check_footage(inputs.retake.path, RETAKE, frames, size.sides, inputs.upright)
        retaken_sound(inputs)
    if inputs.reference_sound:
        voice = inputs.reference_sound
        read_reference_audio(voice.path, voice.max_duration, voice_flag(inputs))
    _check_references(inputs)


def notes(inputs: JobInputs) -> list[str]:
    """What a job changes of its files, in sentences: silence that is added, sound and pictures that
    are left out. Also a voice much shorter or longer than those of the training."""
    lines = [
        f"--image {image.path} moves: its first picture is taken"
        for image in inputs.images
        if not is_still(image.path)
    ]
    lines += [
        f"{flag} {path}: {sentence}"
        for flag, (path, start, duration) in _sounds_to_read(inputs).items()
        for sentence in _changes(path, flag, start, duration)
    ]
    if voice := inputs.voice:
        seconds = voice.latents / shapes.AUDIO_LATENTS_PER_SECOND
        if not 2 <= seconds <= 10:
            lines.append(
                f"{VOICE} {voice.path} gives {seconds:.1f} s of sound; its LoRA was trained on"
                " about 5 s, wanted 2 to 10"
            )
    if dubbed := inputs.dubbing:
        frames = footage(dubbed.path, DUBBED).num_frames
        if dubbed.num_frames < frames:
            lines.append(f"{dubbed.path}: {dubbed.num_frames} of {frames} frames are used (8k+1)")
    return lines


# --- images ---------------------------------------------------------------------------------------

# The shortest and longest side that libx264 supports: one 2x2 block of colour, and 16384.
MIN_SIDE, MAX_SIDE = 2, 16384
# Of a picture, 5 GB while it is read (19 bytes each, measured), and of one that is scaled.
_MAX_PIXELS, _MAX_SCALED = MAX_SIDE**2, 89_478_485
# Formats whose frames are a video's. Those of others are pages, layers, or a photograph's preview.
_MOVING = {"GIF", "WEBP", "PNG", "AVIF", "FLI", "MPEG"}
_HEIF = re.compile(rb"....ftyp(heic|heix|mif1)", re.DOTALL)
# Beginnings of other files that are not read -> their names.
_FORMATS = {
    rb"%PDF": "a PDF",
    rb"\xff\x0a|\0\0\0\x0cJXL ": "JPEG XL",
    rb"\s*<": "SVG or a web page",
    rb"....ftyp(?!av|mif1)|\x1aE\xdf\xa3": "a video",
}


def check_image(
    path: str | Path,
    height: int = 1,
    width: int = 1,
    orientation: str = "shown",
    flag: str = "--image",
) -> None:
    """Raise UserError if `load_image(path, height, width)` would."""
    check_filling(path, decode_image(path, orientation, flag).shape[:2], height, width, flag)


def decode_image(path: str | Path, orientation: str, flag: str = "--image") -> np.ndarray:
    """Read an image file as uint8 (H, W, 3). Raises UserError for unusable images."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with _open_image(path) as image:
                if orientation == "stored":
                    shown = _eight_bit(image).convert("RGB")
                else:
                    exif = image.getexif().get(ExifTags.Base.Orientation)
                    turn = orientation == "shown" or exif in (3, 6, 8)  # quarters, not mirrored
                    shown = in_srgb(_eight_bit(ImageOps.exif_transpose(image) if turn else image))
                picture = np.array(shown)
        except FileNotFoundError:
            raise UserError(
                f"there is no image {path}: pass an existing file with {flag} FILE"
            ) from None
        except PermissionError as error:
            raise to_user_error(error, flag) from None
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise UserError(
                f"{path} is too large: {error}\npass a smaller image with {flag} FILE"
            ) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read as an image: {_conversion(path) or os_reason(error)}\n"
                f"pass another with {flag} FILE"
            ) from None
    height, width = picture.shape[:2]
    if min(height, width) < MIN_SIDE or max(height, width) > MAX_SIDE:
        raise UserError(
            f"{path} has {width}x{height} pixels, wanted {MIN_SIDE} to {MAX_SIDE} on each side;"
            f" pass another with {flag} FILE"
        )
    return picture


def _open_image(path: str | Path) -> Image.Image:
    check_regular(path)
    Image.MAX_IMAGE_PIXELS = _MAX_PIXELS  # Pillow's is below the largest cameras'
    return Image.open(path)


def _eight_bit(image):
    """Scale a 16-bit grey image to 8 bits, because Pillow's conversion clips it to white. Raises
    ValueError for floats, whose value of white is unknown."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, wanted 8 bits: convert it")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))


def is_still(path: str | Path) -> bool:
    """Whether a file's content is one picture. Not if it moves, or cannot be read."""
    try:
        if _HEIF.match(first_bytes(Path(path), 12)):
            return True  # though Pillow may not read it; a video's reader would take one tile of it
        with _open_image(path) as image:
            return not (image.format in _MOVING and getattr(image, "is_animated", True))
    except Image.DecompressionBombError:
        return True
    except (OSError, SyntaxError, ValueError):
        return False


def _conversion(path: str | Path) -> str:
    """What an unreadable image is, and how to convert it; "" if unknown."""
    begin, path = first_bytes(Path(path), 16), str(path)
    if _HEIF.match(begin):
        new = _new_name(path, ".png")
        script = f"import pillow_heif as h; h.read_heif({path!r}).to_pillow().save({new!r})"
        return f"it is HEIC.\nType: pip install pillow-heif && python -c {shlex.quote(script)}"
    matching = (name for magic, name in _FORMATS.items() if re.match(magic, begin, re.DOTALL))
    name = next(matching, "")
    return name and f"it is {name}; wanted PNG, JPEG, WebP, AVIF, TIFF or GIF"


def _conversion_of_webp(path: str | Path) -> str:
    """How to convert a moving WebP, which PyAV cannot read; "" for other files."""
    with suppress(OSError, SyntaxError, ValueError), _open_image(path) as image:
        if image.format == "WEBP":
            path, new = str(path), _new_name(path, ".png")
            script = f"from PIL import Image; Image.open({path!r}).save({new!r}, save_all=True)"
            return f"it is an animated WebP.\nType: python -c {shlex.quote(script)}"
    return ""


def check_filling(
    path: str | Path, size: tuple[int, int], height: int, width: int, flag: str = "--image"
) -> None:
    """Raise UserError for a `size` (height, width) too large when it fills height x width."""
    if math.prod(_filling_size(size, height, width)) > _MAX_SCALED:
        raise UserError(
            f"{path} is too narrow to fill {width}x{height}: got {size[1]}x{size[0]} pixels, wanted"
            f" an aspect ratio closer to the video's; crop it and pass it again with {flag} FILE"
        )


def _filling_size(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Height and width of a picture scaled, with its aspect ratio, to cover height x width."""
    scale = max(height / size[0], width / size[1])
    return math.ceil(size[0] * scale), math.ceil(size[1] * scale)


def fill(image: np.ndarray, height: int, width: int) -> torch.Tensor:
    """A picture, uint8 (H, W, 3), scaled to fill height x width and cropped around its centre, as
    pixels (1, 3, 1, height, width) in [-1, 1], float32."""
    size = _filling_size(image.shape[:2], height, width)
    pixels = torch.tensor(image, dtype=torch.float32).permute(2, 0, 1)[None]
    pixels = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    pixels = pixels[:, :, None, top : top + height, left : left + width]
    return pixels / 127.5 - 1.0


# --- videos ---------------------------------------------------------------------------------------


def _check_references(inputs: JobInputs) -> None:
    if inputs.alpha_gen:
        first, frames = inputs.references[0], inputs.output_size.num_frames
        _check_number(first.path, REFERENCE, 1 if first.still else first.num_frames, frames)
    for reference in () if inputs.media.hdr else inputs.references:
        _, height, width = reference.pixels(inputs.size.first)
        if reference.still:
            check_image(reference.path, height, width, inputs.orientation, REFERENCE)
            continue
        sides = height, width
        _check_footage(reference.path, REFERENCE, reference.num_frames, sides, inputs.upright)
    if clip := inputs.dubbing:
        for size in (inputs.size.first, inputs.size):
            frames, height, width = clip.pixels(size)
            _check_footage(clip.path, DUBBED, frames, (height, width), inputs.upright)
    if mask := inputs.attention_mask:
        _check_footage(mask.path, MASK, 1, inputs.size.first.sides, inputs.upright)
        mask_frames(inputs, mask)


def _check_footage(
    path: str | Path, flag: str, num_frames: int, sides: tuple[int, int], upright: bool
) -> None:
    video = footage(path, flag, upright)
    _check_number(path, flag, video.num_frames, max(1, num_frames))
    check_filling(path, video.sides, *sides, flag)


def _check_number(path: str | Path, flag: str, got: int, expected: int) -> None:
    if got < expected:
        raise UserError(
            f"{flag} {path}: got {got} frames, wanted {expected}: the file is damaged or has"
            " changed; pass another one"
        )


def mask_frames(inputs: JobInputs, mask: AttentionMask) -> int:
    frames = min(footage(mask.path, MASK).num_frames, inputs.size.num_frames)
    for reference in inputs.references:
        latent_frames, _, _ = reference.latent_shape(inputs.size.first)
        if not mask_divides(frames, latent_frames):
            raise UserError(
                f"{MASK} {mask.path}: got {frames} frames for the {latent_frames} latent frames of"
                f" the reference {reference.path}, wanted 1 + a multiple of {latent_frames - 1};"
                f" pass a mask and a reference of {inputs.size.num_frames} frames each"
            )
    return frames


def mask_divides(frames: int, latent_frames: int) -> bool:
    """Whether a mask's frames divide evenly over the latent frames after the first."""
    if latent_frames == 1:
        return True
    return frames >= latent_frames and (frames - 1) % (latent_frames - 1) == 0


def footage(path: str | Path, flag: str, upright: bool = True) -> Size:
    """A video file's size. Frames are counted if the header has no number of frames. Raises
    UserError, with the command that mends it, for a file whose frames cannot be read by number.
    upright: apply the display matrix, as for a phone's portrait video."""
    video = inspected(path, flag, upright)
    if video.wrong:
        raise video.refusal(path, flag)
    return video.size


# Allowed difference of the shortest and longest time between frames, relative to the mean.
# Containers round times, Matroska to a millisecond.
_UNEVEN = 0.1
# Signs of a display matrix -> quarter turns, counterclockwise. Others mirror or turn else.
_TURNS = {"1 0 0 1": 0, "0 -1 1 0": 1, "-1 0 0 -1": 2, "0 1 -1 0": 3}


class Footage(NamedTuple):
    size: Size
    wrong: list[str]  # why the file is refused, if it is
    filters: list[str]  # of ffmpeg, that mend it
    before: list[str]  # ffmpeg's options of the file

    def refusal(self, path: str | Path, flag: str, name: str = "even.mp4", *cut: Any) -> UserError:
        """With the command. cut: ffmpeg's options that end the new file."""
        filters = ["-vf", ",".join(self.filters)] if self.filters else []
        options = *_PICTURE, *filters, "-crf", "16", *_sound_options(path, flag), *cut
        command = ffmpeg(path, name, *options, before=self.before)
        return UserError(f"{flag} {path} {'; it '.join(self.wrong)}.\nType: {command}")


def inspected(path: str | Path, flag: str, upright: bool) -> Footage:
    """A video file's size, and what is wrong with it: its frames last unequal times, are mirrored,
    or are fewer than its header says. Where one may get lost in mending, the size has one less."""
    with _open_container(path, flag) as container:
        stream = _video_stream(container, path, flag)
        if not stream.average_rate:
            raise ValueError("it has no frame rate")
        header_rate, base = float(stream.average_rate), float(stream.time_base)
        packets = [
            (packet.pts, packet.is_discard) for packet in container.demux(stream) if packet.size
        ]
        counted, begins = stream.frames, (container.start_time or 0) / 1e6
    with _open_container(path, flag) as container:
        frames = container.decode(_video_stream(container, path, flag))
        if (frame := next(frames, None)) is None:
            raise ValueError("no frame can be decoded")
        signs, zero = _display(frame) if upright else "1 0 0 1", frame.time or 0.0
        height, width = (frame.height, frame.width)[:: -1 if signs[0] == "0" else 1]
        number = counted or 1 + sum(1 for _ in frames)
    shown, wrong, filters = [pts for pts, discard in packets if not discard], [], []
    if counted:
        number -= len(packets) - len(shown)  # an edit list leaves them out
        if (got := len(packets)) < counted:
            wrong.append(f"is cut off: got {got} frames, wanted the {counted} of its header")
            number = len(shown) - 1
    times = [] if None in shown else sorted(shown)
    steps = [(after - before) * base for before, after in pairwise(times)]
    if len(steps) > 1 and (mean := sum(steps) / len(steps)) > 0:
        least, most, rate = min(steps), max(steps), 1 / mean
        if most - least > _UNEVEN * mean + 2 * base or abs(rate - header_rate) > _UNEVEN * rate:
            wrong.append(
                f"has a variable frame rate: frames last {least:.4g} to {most:.4g} s, {rate:.4g}"
                f" per second on average, {header_rate:.4g} by its header; wanted a constant rate"
            )
            header_rate, number = rate, number - 1
            filters.append(f"fps={exact_frame_rate(round(rate, 3))}")
    if signs not in _TURNS:
        wrong.append("is displayed mirrored or at an odd angle; wanted an upright video")
    before = [] if upright else ["-noautorotate"]
    if zero > begins:  # cut by our clock
        before += ["-ss", f"{math.floor((zero - begins) * 1000) / 1000:.3f}"]
    return Footage(Size(height, width, number, header_rate), wrong, filters, before)


def _display(frame) -> str:
    """The signs of the first four numbers of a decoded frame's display matrix."""
    from av.sidedata.sidedata import Type

    if (data := frame.side_data.get(Type.DISPLAYMATRIX)) is None:
        return "1 0 0 1"
    return " ".join(map(str, np.sign(np.frombuffer(bytes(data), np.int32)[[0, 1, 3, 4]])))


def _video_stream(container, path: str | Path, flag: str):
    stream = _picture(container)
    if stream is None:
        raise UserError(f"{path} has no video: pass a video file with {flag}")
    if max(stream.codec_context.height, stream.codec_context.width) > MAX_SIDE:
        raise ValueError(f"its frames have more than {MAX_SIDE} pixels on a side")
    stream.thread_type = "AUTO"
    return stream


# --- frames of videos -----------------------------------------------------------------------------


def read_frames(path: str | Path, flag: str, count: int, upright: bool) -> Iterator[np.ndarray]:
    """The first `count` frames of a file. Raises UserError if there are fewer."""
    got = 0
    for frame in islice(first_frames(path, flag, upright), count):
        got += 1
        yield frame
    _check_number(path, flag, got, count)


def first_frames(path: str | Path, flag: str, upright: bool = True) -> Iterator[np.ndarray]:
    """All frames, uint8 (H, W, 3), whatever their times. upright: as displayed, not stored."""
    with _open_container(path, flag) as container:
        for frame in container.decode(_video_stream(container, path, flag)):
            pixels = frame.to_rgb().to_ndarray()
            if (turns := _TURNS.get(_display(frame)) if upright else 0) is None:
                raise ValueError("it is displayed mirrored or at an odd angle")
            yield np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def pixels_of(frames: Iterable[np.ndarray], height: int, width: int) -> Tensor:
    """Frames, scaled to fill height x width and cropped around their centre, as pixels
    (1, 3, F, height, width) in [-1, 1]."""
    return torch.cat([fill(frame, height, width) for frame in frames], dim=2)


# --- sounds ---------------------------------------------------------------------------------------

CHANNELS = 2  # of the encoded sound
# Sample rates of AAC, which an input sound has in the MP4.
AAC_RATES = 7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000
_MOST_TAPS = 2**25  # of all filters together: rates without a common divisor would need gigabytes
_HEARD = 1 / shapes.AUDIO_LATENTS_PER_SECOND  # seconds: less is not worth a note
_TOO_SHORT = 512 / shapes.SAMPLE_RATE  # seconds: half a frame of the spectrogram, reflected
# Full scale of integer sample formats.
_FULL_SCALE = {"u8": 2**7, "s16": 2**15, "s32": 2**31}
# Frames' times are rounded, and jitter in recordings of screens. Less than this is no gap: a lost
# packet is longer (Opus 20 ms, AAC 21 ms). A longer gap than the other is a damaged time.
_JITTER, _MOST_SILENCE = 0.015, 3600


class Sound(NamedTuple):
    samples: Tensor  # float32 (channels, N), in [-1, 1] if the file's are
    rate: int  # samples per second


def read_sound_condition(inputs: JobInputs, source: SoundCondition) -> Sound:
    path, start, duration = _sounds_to_read(inputs)[SOUND]
    sound = read_sound(path, SOUND, start, duration)
    if sound is None:
        if read_sound(path, SOUND) is None:
            raise UserError(f"{path} has no sound: pass another file with {SOUND}")
        raise UserError(
            f"{SOUND} {path} ends before --audio-start-time {start:g}: type a smaller one"
        )
    if source.path in dict(inputs.video_conditioning):  # as of a retake: silence after its end
        missing = round(inputs.size.seconds * sound.rate) - sound.samples.shape[1]
        sound = sound._replace(samples=F.pad(sound.samples, (0, max(0, missing))))
    frames = sound_latent_frames(sound.samples.shape[1], sound.rate)
    if frames < inputs.output_size.audio_frames or _is_too_short(sound):
        raise _too_short(source, inputs.output_size, sound, frames)
    _check_format(sound, path, SOUND)
    return sound


def _too_short(source: SoundCondition, size: Size, sound: Sound, audio_frames: int) -> UserError:
    where, advice = "", "pass a longer sound"
    if source.start_time:
        where += f" from --audio-start-time {source.start_time:g} on"
        advice += ", or type a smaller --audio-start-time"
    if source.max_duration is not None:
        where += f" with --audio-max-duration {source.max_duration:g}"
        advice = f"leave --audio-max-duration out, or {advice}"
    for num_frames in range(size.num_frames - TIME_SCALE, 0, -TIME_SCALE):
        if 1 <= shapes.audio_latent_frames(num_frames, size.frame_rate) <= audio_frames:
            advice += f", or type --num-frames {num_frames}"
            break
    return UserError(
        f"{SOUND} {source.path} is shorter than the video: got"
        f" {sound.samples.shape[1] / sound.rate:.2f} s of sound{where}, wanted {size.seconds:.2f} s"
        f" ({size.num_frames} frames at {size.frame_rate:g} per second); {advice}"
    )


def sound_latent_frames(samples: int, rate: int) -> int:
    """Audio latents of a sound with `samples` at `rate`."""
    mel_frames = 1 + -(-samples * shapes.SAMPLE_RATE // rate) // shapes.HOP
    return -(-mel_frames // shapes.MEL_FRAMES_PER_LATENT)


def _is_too_short(sound: Sound) -> bool:
    return sound.samples.shape[1] <= _TOO_SHORT * sound.rate


def retaken_sound(inputs: JobInputs) -> Sound | None:
    path, start, duration = _sounds_to_read(inputs)[RETAKE]
    sound = read_sound(path, RETAKE, start, duration)
    if sound is None or _is_too_short(sound):
        return None
    _check_format(sound, path, RETAKE)
    return sound


def voice_flag(inputs: JobInputs) -> str:
    return DUBBED if inputs.dubbing else VOICE


def read_reference_audio(path: str | Path, max_duration: float | None, flag: str = VOICE) -> Sound:
    """A reference's sound in one or two channels, of `max_duration` seconds. UserError: silence."""
    sound = read_sound(path, flag, 0.0, max_duration)
    if sound is None or not sound.samples.any():
        if flag == DUBBED:
            raise UserError(
                f"{flag} {path} has no sound, which the voice is taken from; a silent clip gets one"
                f" by {RETAKE} {path} --start-time 0 --end-time 5 --regenerate audio"
            )
        raise UserError(f"{flag} {path} holds no sound; pass another file")
    if _is_too_short(sound):
        longer = "" if max_duration is None else f" or a larger {VOICE}-max-duration"
        raise UserError(f"{flag} {path} is too short to be encoded; pass a longer sound{longer}")
    _check_format(sound, path, flag)
    return sound


def _check_format(sound: Sound, path: str | Path, flag: str) -> None:
    if len(sound.samples) > CHANNELS:
        raise UserError(
            f"{flag} {path} has {len(sound.samples)} channels of sound, wanted 1 or 2.\n"
            f"Type: {converted_sound(path, flag)}"
        )
    if not sound.samples.isfinite().all():
        raise UserError(f"{flag} {path} has samples that are NaN or Inf: pass another file")
    _check_rate(path, flag, sound.rate, shapes.SAMPLE_RATE)


def _check_rate(path: str | Path, flag: str, rate: int, target: int) -> None:
    if not can_resample(rate, target):
        raise UserError(
            f"{flag} {path} has {rate} samples of sound per second, which cannot be resampled to"
            f" {target}.\nType: {converted_sound(path, flag)}"
        )


def can_resample(rate: int, new_rate: int) -> bool:
    """Whether `resample`'s filters have an acceptable size for these rates."""
    divisor = math.gcd(rate, new_rate)
    return rate * new_rate <= _MOST_TAPS * divisor**2


def aac_rate(rate: int) -> int:
    """The rate itself if AAC supports it, otherwise the next higher one, or AAC's highest."""
    return min((aac for aac in AAC_RATES if aac >= rate), default=AAC_RATES[-1])


def _sounds_to_read(inputs: JobInputs) -> dict[str, tuple[str | Path, float, float | None]]:
    read = {}
    if sound := inputs.sound:
        seconds = inputs.size.seconds if sound.max_duration is None else sound.max_duration
        read[SOUND] = sound.path, sound.start_time, seconds
    if retake := inputs.retake:
        longer = inputs.extension
        seconds = longer.source_seconds if longer else inputs.size.seconds
        read[RETAKE] = retake.path, 0.0, seconds
    if voice := inputs.reference_sound:
        read[voice_flag(inputs)] = voice.path, 0.0, voice.max_duration
    return read


def _changes(path: str | Path, flag: str, start: float, duration: float | None) -> list[str]:
    """What `read_sound` adds to a sound and leaves out, in sentences."""
    first, end, gaps, rate = None, 0, 0, 0  # in samples
    for at, frame in _placed(path, flag, start, duration):
        if first is None:
            first = at
        elif at > end:
            gaps += at - end
        end, rate = max(end, at + frame.samples), frame.sample_rate
    if first is None:
        return []
    lines, (begins, ends, missing) = [], (first / rate, end / rate, gaps / rate)
    if not start and begins < -_HEARD:
        lines.append(f"{-begins:.2f} s of its sound before its picture are left out")
    if begins > _HEARD:
        lines.append(f"its sound begins after {start + begins:.2f} s: silence before it")
    if missing:
        lines.append(f"its sound has pauses of {missing:.2f} s in all: silence in them")
    if flag == RETAKE and duration and duration - ends > _HEARD:
        lines.append(f"its sound ends {duration - ends:.2f} s before its picture: silence after it")
    return lines


def read_sound(
    path: str | Path, flag: str, start: float = 0.0, duration: float | None = None
) -> Sound | None:
    """The file's first sound track from `start` on, for `duration` seconds or to its end, with
    silence where the track has none. None if there is no sound in that time."""
    parts, end, rate = [], 0, 0
    for at, frame in _placed(path, flag, start, duration):
        if at + frame.samples < 0:
            continue
        samples, rate = _samples(frame), frame.sample_rate
        parts.append(np.zeros((len(samples), max(0, at - end)), np.float32))
        parts.append(samples[:, max(0, end - at) :])
        end = max(end, at + frame.samples)
    if not parts:
        return None
    samples = np.concatenate(parts, axis=1)
    if duration is not None:
        samples = samples[:, : round(duration * rate)]
    return Sound(torch.from_numpy(np.ascontiguousarray(samples)), rate)


def _placed(
    path: str | Path, flag: str, start: float, duration: float | None
) -> Iterator[tuple[int, Any]]:
    """The sound's frames in the time that is read and some before it, each with the sample after
    `start` at which it begins."""
    from av.error import FFmpegError

    zero = _zero(path, flag)
    with _open_container(path, flag) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            return
        base, end = stream.time_base, -(2**62)
        with suppress(FFmpegError):  # there is nothing that early: it is read from its beginning
            container.seek(int((start + min(0.0, zero)) / base), stream=stream)
        for frame in container.decode(stream):
            rate, at = frame.sample_rate, max(end, 0)
            if frame.pts is not None:
                begins = float(frame.pts * base) - zero
                if duration is not None and begins > start + duration:
                    return
                at = round((begins - start) * rate)
            if abs(at - end) <= _JITTER * rate:
                at = end if end >= 0 else min(at, 0)
            if at - max(end, 0) > _MOST_SILENCE * rate:
                raise ValueError(f"its sound pauses for more than {_MOST_SILENCE} s")
            end = at + frame.samples
            yield at, frame


def _zero(path: str | Path, flag: str) -> float:
    """Seconds of the file's time at which its picture, or without one its sound, begins."""
    with _open_container(path, flag) as container:
        stream = _picture(container) or next(iter(container.streams.audio), None)
        if stream is None:
            return 0.0
        first = next(container.decode(stream), None)
        return first.time or 0.0 if first else 0.0


def _samples(frame) -> np.ndarray:
    name = frame.format.name.removesuffix("p")
    samples = frame.to_ndarray().astype(np.float32)
    if name == "u8":  # its silence is 128
        samples -= _FULL_SCALE[name]
    if name in _FULL_SCALE:
        samples /= _FULL_SCALE[name]
    if not frame.format.is_planar:  # (1, N * channels)
        samples = samples.reshape(-1, len(frame.layout.channels)).T
    return samples


# --- PyAV and ffmpeg ------------------------------------------------------------------------------


@contextmanager
def _open_container(path: str | Path, flag: str) -> Iterator:
    """The file as PyAV's container. PyAV's errors in the block become UserError."""
    import av
    from av.error import FFmpegError

    advice = f"pass another file with {flag}"
    try:
        check_regular(path)
        with av.open(str(path)) as container:
            yield container
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: {advice}") from None
    except PermissionError as error:
        raise to_user_error(error, flag) from None
    except (FFmpegError, OSError, ValueError) as error:
        why = _conversion_of_webp(path) or os_reason(error)
        raise UserError(f"{flag} {path} cannot be read: {why}\n{advice}") from None


def _picture(container):
    """The container's first video stream that is no cover, or None. One of a single frame, such as
    that of an animated AVIF for readers of stills, only if there is no other."""
    from av.stream import Disposition

    cover, streams = Disposition.attached_pic, container.streams.video
    shown = (stream for stream in streams if not stream.disposition & cover)
    return max(shown, key=lambda stream: stream.frames != 1, default=None)


# The tracks that are read; ffmpeg would choose the largest. V: no cover.
_PICTURE, _TRACK = ("-map", "0:V:0"), ("-map", "0:a:0")
# An encoder joins what a gap divides.
_FILLED = "-af", "aresample=async=1:min_hard_comp=0.01"


def ffmpeg(path: str | Path, name: str, *options: Any, before: Iterable[Any] = ()) -> str:
    """The command that makes a new file in the current folder, for errors. name: the end of the new
    file's name, after that of the file. before: options of the file."""
    # A dash would begin an option, and a colon end a protocol.
    path, new = (
        f"./{file}" if file[0] == "-" or ":" in file else file
        for file in (str(path), _new_name(path, f"-{name}"))
    )
    return shlex.join(map(str, ("ffmpeg", *before, "-i", path, *options, new)))


def _new_name(path: str | Path, end: str) -> str:
    """The name of a new file in the current folder: the file's, with another end."""
    stem = Path(path).stem[:60]
    names = (f"{stem}{number}{end}" for number in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(name for name in names if not os.path.lexists(name))


def _sound_options(path: str | Path, flag: str) -> list[str]:
    """ffmpeg's options of a sound that the encoder supports, at most stereo; none without sound."""
    with _open_container(path, flag) as container:
        if not (streams := container.streams.audio):
            return []
        mixed = ["-ac", "2"] if streams[0].codec_context.layout.nb_channels > 2 else []
    return [*_TRACK, *_FILLED, *mixed, "-ar", "48000", "-b:a", "256k"]


def converted_sound(path: str | Path, flag: str) -> str:
    """The command that makes a sound that the encoder supports, beside the file's picture."""
    options, picture = _sound_options(path, flag), (*_PICTURE, "-c:v", "copy", "-c:a", "aac")
    with _open_container(path, flag) as container:
        if not _picture(container):
            return ffmpeg(path, "sound.wav", *options[:-2])
        kind = "mov" if "mov" in container.format.name else "mkv"
    return ffmpeg(path, f"sound.{kind}", *picture, *options)
