"""A job's sound, videos and images as tensors. The host encodes sound and videos once per job,
before the first stage, under their names in --save-tensors.

Sources: ltx-pipelines 1.2.0, a2vid_two_stage.py, retake.py, iclora_utils.py and utils/helpers.py.
The checks raise UserError for unsuitable files before a model is loaded.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ltx_neuron.errors import UserError, own_files
from ltx_neuron.host import hdr, media
from ltx_neuron.host.images import check_filling, check_image, decode_image, is_still, load_image
from ltx_neuron.host.media import Sound, read_sound
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.spectrogram import can_resample, resample
from ltx_neuron.host.video import aac_rate
from ltx_neuron.sampling import shapes
from ltx_neuron.sampling.conditions import (
    AttentionMask,
    ImageCondition,
    ReferenceAudio,
    ReferenceVideo,
    SoundCondition,
)
from ltx_neuron.sampling.extension import Extension
from ltx_neuron.sampling.inputs import JobInputs
from ltx_neuron.sampling.latent_state import reference_names
from ltx_neuron.sampling.size import Size
from ltx_neuron.weights.tensorfile import finite

SOUND, RETAKE = "--audio-path", "--video-path"
SOUNDS = {"audio_latent", "audio_reference"}  # of encode_sounds
REFERENCE, MASK = "--video-conditioning", "--conditioning-attention-mask"
VOICE, DUBBED = "--reference-audio", "--reference-video"
CHANNELS = 2  # of the encoded sound
BED_SEED = 0xBED  # of every bed: one sound at one level is always heard the same
_HEARD = 1 / shapes.AUDIO_LATENTS_PER_SECOND  # seconds: less is not worth a note
_HDR_WHOLE = 512 * 768  # pixels of a frame; HDR's larger ones are encoded in tiles
_TOO_SHORT = 512 / shapes.SAMPLE_RATE  # seconds: half a frame of the spectrogram, reflected


@own_files()
def check(inputs: JobInputs) -> None:
    """Raise UserError for files that cannot be encoded. Reads only the headers of videos."""
    for image in inputs.images:
        check_image(image.path, *inputs.size.sides, inputs.orientation)
    if inputs.sound:
        rate = _read_sound_condition(inputs, inputs.sound).rate
        _check_rate(inputs.sound.path, SOUND, rate, aac_rate(rate))
    if inputs.retake:
        extension, size = inputs.extension, inputs.size
        frames = extension.source_frames if extension else size.num_frames
        _check_footage(inputs.retake.path, RETAKE, frames, size.sides, inputs.upright)
        _retaken_sound(inputs)
    if inputs.reference_sound:
        voice = inputs.reference_sound
        read_reference_audio(voice.path, voice.max_duration, voice_flag(inputs))
    _check_references(inputs)


@own_files()
def encode_images(
    host: HostModels, inputs: JobInputs, height: int, width: int
) -> list[tuple[ImageCondition, Tensor]]:
    """The images with their latents (1, 128, 1, h, w) at a stage's size."""
    encoded = []
    for image in inputs.placed:
        assert image.crf is not None  # with_release_defaults
        pixels = load_image(image.path, height, width, image.crf, host.dtype, inputs.orientation)
        encoded.append((image, host.encode_image(pixels)))
    return encoded


@own_files()
def encode(
    host: HostModels, inputs: JobInputs, upsampled: bool = False, rank_tiles: Any = None
) -> dict[str, Tensor]:
    """Tensors of a job's input sound and videos by name, for a stage. Missing inputs have no
    entries, and windows no sounds: they share the whole clip's. upsampled: for stage 2, which has
    only references. rank_tiles: encodes tiles on the ranks, see HostModels.encode_video.

    mel               (1, 2, frames, 64) float32; for a retake only if its file has sound
    audio_latent      (1, 8, Ta, 16), as long as the video; if there is a mel
    waveform          (2, N) float32, and waveform_rate, samples per second, of an input sound
    video_latent      (1, 128, F, h, w), of a retake; of an extended video, the clip from which
                      windows are cut, zero where it is new, like its audio_latent
    audio_reference   (1, 8, Tref, 16), of a voice or of a dubbed clip's sound, with its mel
    reference_latent  (1, 128, F, h, w), then reference_latent_1 and so on; in stage 2
                      s2_reference_latent
    given_keyframes   (1, 128, K, h, w), of HDR
    reference_attention  (1, M), a weight per token of all references, if there is a mask
    """
    if inputs.media.hdr:
        return _encode_hdr(host, inputs, inputs.media.hdr)
    references = inputs.appended_references(upsampled)
    names, size = reference_names(len(references), upsampled), inputs.stage_size(upsampled)
    tensors: dict[str, Tensor] = {
        name: _encode_reference(host, inputs, reference, size, rank_tiles)
        for name, reference in zip(names, references, strict=True)
    }
    if (mask := inputs.attention_mask) and references:
        tensors["reference_attention"] = _reference_attention(inputs, mask, size, host.dtype)
    if upsampled:
        return tensors
    if inputs.extension:
        tensors |= _encode_extension(host, inputs, inputs.extension, rank_tiles)
    elif inputs.retake:
        tensors |= _encode_retake(host, inputs, rank_tiles)
    return tensors if inputs.chunk else tensors | encode_sounds(host, inputs)


def encode_sounds(host: HostModels, inputs: JobInputs) -> dict[str, Tensor]:
    """Tensors of a job's sound files by name, for all of its stages and windows."""
    tensors: dict[str, Tensor] = {}
    if inputs.sound:
        tensors |= _encode_sound(host, inputs, inputs.sound)
    if inputs.reference_sound:
        tensors |= _encode_reference_audio(host, inputs.reference_sound, voice_flag(inputs))
    return tensors


# --- sound ----------------------------------------------------------------------------------------


def _encode_sound(host: HostModels, inputs: JobInputs, source: SoundCondition) -> dict[str, Tensor]:
    sound = _stereo(_read_sound_condition(inputs, source), f"{SOUND} {source.path}")
    mel, latent = host.encode_audio(_heard(sound, inputs, source.bed))
    return {
        "mel": mel,
        "audio_latent": _fitted(latent, inputs.size.audio_frames),
        "waveform": sound.samples,
        "waveform_rate": torch.tensor(sound.rate),
    }


def _heard(sound: Sound, inputs: JobInputs, bed: float | None) -> Sound:
    """What the model hears: the input sound, then silence to the end of a tail, over the bed."""
    samples, rate = sound
    if inputs.tail_frames:
        missing = round(inputs.size.seconds * rate) - samples.shape[1]
        samples = F.pad(samples, (0, max(0, missing)))
    if bed is None:
        return Sound(samples, rate)
    # At the encoder's rate, so that the level does not depend on the file's.
    samples = resample(samples, rate, shapes.SAMPLE_RATE)
    generator = torch.Generator().manual_seed(BED_SEED)  # not the job's, whose draws stay
    noise = torch.randn(samples.shape, generator=generator)
    return Sound(samples + 10 ** (bed / 20) * noise, shapes.SAMPLE_RATE)


def _read_sound_condition(inputs: JobInputs, source: SoundCondition) -> Sound:
    path, start, duration = _read_sounds(inputs)[SOUND]
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
    frames = shapes.sound_latent_frames(sound.samples.shape[1], sound.rate)
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
    for num_frames in range(size.num_frames - shapes.TIME_SCALE, 0, -shapes.TIME_SCALE):
        if 1 <= shapes.audio_latent_frames(num_frames, size.frame_rate) <= audio_frames:
            advice += f", or type --num-frames {num_frames}"
            break
    return UserError(
        f"{SOUND} {source.path} is shorter than the video: got"
        f" {sound.samples.shape[1] / sound.rate:.2f} s of sound{where}, wanted {size.seconds:.2f} s"
        f" ({size.num_frames} frames at {size.frame_rate:g} per second); {advice}"
    )


def _is_too_short(sound: Sound) -> bool:
    return sound.samples.shape[1] <= _TOO_SHORT * sound.rate


def _check_format(sound: Sound, path: str | Path, flag: str) -> None:
    if len(sound.samples) > CHANNELS:
        raise UserError(
            f"{flag} {path} has {len(sound.samples)} channels of sound, wanted 1 or 2.\n"
            f"Type: {media.converted_sound(path, flag)}"
        )
    if not finite(sound.samples):
        raise UserError(f"{flag} {path} has samples that are NaN or Inf: pass another file")
    _check_rate(path, flag, sound.rate, shapes.SAMPLE_RATE)


def _check_rate(path: str | Path, flag: str, rate: int, target: int) -> None:
    if not can_resample(rate, target):
        raise UserError(
            f"{flag} {path} has {rate} samples of sound per second, which cannot be resampled to"
            f" {target}.\nType: {media.converted_sound(path, flag)}"
        )


def _stereo(sound: Sound, typed: str) -> Sound:
    """The sound in two channels. A mono sound is duplicated, with a printed line."""
    if len(sound.samples) == CHANNELS:
        return sound
    print(f"{typed}: mono sound, used for both channels")
    return Sound(sound.samples.expand(CHANNELS, -1).contiguous(), sound.rate)


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
        for flag, (path, start, duration) in _read_sounds(inputs).items()
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
        frames = media.footage(dubbed.path, DUBBED).num_frames
        if dubbed.num_frames < frames:
            lines.append(f"{dubbed.path}: {dubbed.num_frames} of {frames} frames are used (8k+1)")
    return lines


def _read_sounds(inputs: JobInputs) -> dict[str, tuple[str | Path, float, float | None]]:
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
    if (times := media.hearing(path, flag, start, duration)) is None:
        return []
    lines, (begins, ends, missing) = [], times
    if not start and begins < -_HEARD:
        lines.append(f"{-begins:.2f} s of its sound before its picture are left out")
    if begins > _HEARD:
        lines.append(f"its sound begins after {start + begins:.2f} s: silence before it")
    if missing:
        lines.append(f"its sound has pauses of {missing:.2f} s in all: silence in them")
    if flag == RETAKE and duration and duration - ends > _HEARD:
        lines.append(f"its sound ends {duration - ends:.2f} s before its picture: silence after it")
    return lines


def voice_flag(inputs: JobInputs) -> str:
    return DUBBED if inputs.dubbing else VOICE


def _encode_reference_audio(
    host: HostModels, reference: ReferenceAudio, flag: str
) -> dict[str, Tensor]:
    sound = read_reference_audio(reference.path, reference.max_duration, flag)
    sound = _stereo(sound, f"{flag} {reference.path}")
    mel, latent = host.encode_audio(sound)
    if latent.shape[2] != reference.latents:
        raise UserError(
            f"{flag} {reference.path}: got {latent.shape[2]} audio latents, wanted"
            f" {reference.latents}: the file has changed. Start again"
        )
    return {"mel": mel, "audio_reference": latent}


# --- retake ---------------------------------------------------------------------------------------


def _encode_retake(host: HostModels, inputs: JobInputs, rank_tiles: Any) -> dict[str, Tensor]:
    assert inputs.retake
    path = inputs.retake.path
    frames = _frames(path, RETAKE, inputs.size.num_frames, inputs.upright)
    pixels = media.pixels_of(frames, *inputs.size.sides)
    tensors = {"video_latent": host.encode_video(pixels.to(host.dtype), rank_tiles=rank_tiles)}
    if sound := _retaken_sound(inputs):
        mel, latent = host.encode_audio(_stereo(sound, f"{RETAKE} {path}"))
        tensors |= {"mel": mel, "audio_latent": _fitted(latent, inputs.size.audio_frames)}
    return tensors


def _fitted(latent: Tensor, frames: int) -> Tensor:
    """A latent padded to `frames` frames with zeros: no encoded silence, but as upstream."""
    return F.pad(latent, (0, 0, 0, frames - latent.shape[2])).contiguous()


def _retaken_sound(inputs: JobInputs) -> Sound | None:
    path, start, duration = _read_sounds(inputs)[RETAKE]
    sound = read_sound(path, RETAKE, start, duration)
    if sound is None or _is_too_short(sound):
        return None
    _check_format(sound, path, RETAKE)
    return sound


# --- extended videos ------------------------------------------------------------------------------


def _encode_extension(
    host: HostModels, inputs: JobInputs, extension: Extension, rank_tiles: Any
) -> dict[str, Tensor]:
    pixels = media.pixels_of(_known_frames(inputs, extension), *inputs.size.sides)
    known = host.encode_video(pixels.to(host.dtype), rank_tiles=rank_tiles)
    known = known[:, :, int(extension.before) :]
    video = known.new_zeros(*known.shape[:2], extension.video_latents, *known.shape[3:])
    video[:, :, extension.known_video] = known
    mel, latent = host.encode_audio(_extended_sound(inputs, extension))
    latent = _fitted(latent, extension.audio_latents)
    audio = torch.zeros_like(latent)
    audio[:, :, extension.known_audio] = latent[:, :, extension.known_audio]
    return {"mel": mel, "video_latent": video, "audio_latent": audio}


def _known_frames(inputs: JobInputs, extension: Extension) -> Iterator[np.ndarray]:
    frames = _source_frames(inputs, extension)
    if not extension.before:
        return islice(frames, extension.source_frames - extension.known_frames, None)
    # The clip's first latent is one frame, and the file's latents follow it. The encoder assumes
    # for every clip that nothing moves before it.
    first = next(frames)
    return chain([first, first], islice(frames, extension.known_frames - 1))


def _extended_sound(inputs: JobInputs, extension: Extension) -> Sound:
    """The file's sound, as long as its video, after silence for what is generated before it."""
    if (sound := _retaken_sound(inputs)) is None:
        print(f"{RETAKE} {inputs.video_path} has no sound: the new part continues from silence")
        sound = Sound(torch.zeros(CHANNELS, 0), shapes.SAMPLE_RATE)
    samples, rate = _stereo(sound, f"{RETAKE} {inputs.video_path}")
    before = round(extension.silence * rate)
    whole = round((extension.silence + extension.source_seconds) * rate)
    return Sound(F.pad(samples, (before, whole - before - samples.shape[1])), rate)


def _source_frames(inputs: JobInputs, extension: Extension) -> Iterator[np.ndarray]:
    assert inputs.video_path
    with own_files():
        yield from _frames(inputs.video_path, RETAKE, extension.source_frames, inputs.upright)


def with_source(
    inputs: JobInputs, decoded: Generator[Tensor, None, None]
) -> Generator[Tensor, None, None]:
    """The frames of an extended video, in chunks, uint8 (N, H, W, 3): the file's, bit for bit, and
    the new ones from `decoded`, which is read no further than needed."""
    extension = inputs.extension
    assert extension
    taken, original = extension.decoded, map(torch.from_numpy, _source_frames(inputs, extension))
    new = islice(chain.from_iterable(decoded), taken.start, taken.stop)
    frames = chain(new, original) if extension.before else chain(original, new)
    with closing(decoded):
        while chunk := list(islice(frames, shapes.TIME_SCALE)):
            yield torch.stack(chunk)


def with_alpha(inputs: JobInputs, mattes: Iterable[Tensor]) -> Iterator[Tensor]:
    """The frames of a matte's video at its size, uint8 (N, H, W, 4), with the grey of each frame of
    the matte as alpha. mattes: chunks of frames, uint8 (N, H, W, 3)."""
    (path, _), *_ = inputs.video_conditioning
    frames = _frames(path, REFERENCE, inputs.output_size.num_frames, inputs.upright)
    for chunk in mattes:
        pixels = media.pixels_of(islice(frames, len(chunk)), *inputs.size.sides)
        colors = ((pixels[0] + 1) * 127.5).round().byte().permute(1, 2, 3, 0)
        alpha = chunk.float().mean(dim=-1, keepdim=True).round().byte()
        yield torch.cat([colors, alpha], dim=-1).contiguous()


# --- references -----------------------------------------------------------------------------------


def _check_references(inputs: JobInputs) -> None:
    if inputs.alpha_gen:
        first, frames = inputs.references[0], inputs.output_size.num_frames
        _check_number(first.path, REFERENCE, 1 if first.still else first.num_frames, frames)
    for reference in () if inputs.media.hdr else inputs.references:
        _, height, width = reference.pixels(inputs.size.first)
        sides = height, width
        if reference.still:
            check_image(reference.path, *sides, inputs.orientation, REFERENCE)
            continue
        _check_footage(reference.path, REFERENCE, reference.num_frames, sides, inputs.upright)
    if clip := inputs.dubbing:
        for size in (inputs.size.first, inputs.size):
            frames, *sides = clip.pixels(size)
            _check_footage(clip.path, DUBBED, frames, (sides[0], sides[1]), inputs.upright)
    if mask := inputs.attention_mask:
        _check_footage(mask.path, MASK, 1, inputs.size.first.sides, inputs.upright)
        _mask_frames(inputs, mask)


def _encode_reference(
    host: HostModels, inputs: JobInputs, reference: ReferenceVideo, size: Size, rank_tiles: Any
) -> Tensor:
    """The latent of every time_scale-th frame after frame 0; of an IC-LoRA in tiles only if its
    stage is tiled."""
    flag = DUBBED if inputs.dubbing else REFERENCE
    path, there = reference.path, reference.frames(inputs.size)
    if reference.still:  # not one repeated latent: the encoder is causal
        frames = repeat(decode_image(path, inputs.orientation, flag), there)
    else:
        before = reference.start
        frames = islice(_frames(path, flag, before + there, inputs.upright), before, None)
    taken = chain(islice(frames, 1), islice(frames, 0, None, reference.time_scale))
    count, *sides = reference.pixels(size)
    # The encoder needs 8k+1 frames; upstream omits the last ones, too.
    pixels = media.pixels_of(taken, *sides)[:, :, :count]
    return host.encode_video(pixels.to(host.dtype), inputs.encodes_whole(size), rank_tiles)


def _encode_hdr(host: HostModels, inputs: JobInputs, source: Size) -> dict[str, Tensor]:
    """In float32: the whole clip, and each frame at a keyframe as a clip of its own."""
    height, width = inputs.size.sides
    beyond = (0, height - source.height), (0, width - source.width), (0, 0)
    codes = (hdr.to_acescct(x, inputs.input_colorspace) for x in _light(inputs, source))
    pixels = torch.from_numpy(np.stack([np.pad(x, beyond, "reflect") for x in codes]) * 2 - 1)
    pixels = pixels.permute(3, 0, 1, 2)[None].contiguous()
    if inputs.high_quality:
        pixels = pixels.repeat_interleave(2, dim=2)[:, :, :-1]
    parts = [pixels, *(pixels[:, :, at : at + 1] for at in inputs.hdr_seams)]
    whole = height * width <= _HDR_WHOLE
    clip, *given = (host.exact.encode_video(part, whole).to(host.dtype) for part in parts)
    return {"reference_latent": clip, "given_keyframes": torch.cat(given or [clip[:, :, :0]], 2)}


def _light(inputs: JobInputs, source: Size) -> Iterator[np.ndarray]:
    """The frames of HDR's input, float32 (H, W, 3), those of a video in [0, 1]."""
    path = inputs.video_conditioning[0].path
    if not Path(path).is_dir():
        frames = _frames(path, REFERENCE, source.num_frames, inputs.upright)
        yield from (frame.astype(np.float32) / 255 for frame in frames)
        return
    for file in hdr.exr_frames(path):
        frame = hdr.read_exr(file, REFERENCE)
        if (sides := frame.shape[:2]) != source.sides:
            raise UserError(f"{REFERENCE} {file}: got {sides} pixels, wanted {source.sides}")
        yield frame


def _reference_attention(
    inputs: JobInputs, mask: AttentionMask, size: Size, dtype: torch.dtype
) -> Tensor:
    """(1, M): the mask's weight of each reference's token in a stage, times its strength."""
    frames = _frames(mask.path, MASK, _mask_frames(inputs, mask), inputs.upright)
    # At stage 1's size in every stage, not at the references'.
    pixels = media.pixels_of(frames, *inputs.size.first.sides).to(dtype)
    shapes = (reference.latent_shape(size) for reference in inputs.references)
    return torch.cat([token_weights(pixels, shape) for shape in shapes], dim=1) * mask.strength


def _mask_frames(inputs: JobInputs, mask: AttentionMask) -> int:
    frames = min(media.footage(mask.path, MASK).num_frames, inputs.size.num_frames)
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


def token_weights(pixels: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
    """Weights (1, F*h*w) in [0, 1] of a reference's tokens, from a mask's pixels
    (1, 3, frames, H, W) in [-1, 1]; computed in their dtype. A token's weight is the mean grey of
    its area: of the first frame for the first latent frame, and of an equal number of frames for
    each later one (see `mask_divides`)."""
    frames, rows, columns = latent_shape
    grey = ((pixels.mean(dim=1) + 1) / 2).clamp(0, 1)  # (1, frames, H, W)
    areas = F.interpolate(grey.transpose(0, 1), size=(rows, columns), mode="area")[:, 0]
    first, later = areas[:1], areas[1:]
    if frames == 1:
        return first.reshape(1, -1)
    later = later.unflatten(0, (frames - 1, -1)).mean(dim=1)
    return torch.cat([first, later]).reshape(1, -1)


# --- frames of files ------------------------------------------------------------------------------


def _check_footage(
    path: str | Path, flag: str, num_frames: int, sides: tuple[int, int], upright: bool
) -> None:
    video = media.footage(path, flag, upright)
    _check_number(path, flag, video.num_frames, max(1, num_frames))
    check_filling(path, video.sides, *sides, flag)


def _check_number(path: str | Path, flag: str, got: int, expected: int) -> None:
    if got < expected:
        raise UserError(
            f"{flag} {path}: got {got} frames, wanted {expected}: the file is damaged or has"
            " changed; pass another one"
        )


def _frames(path: str | Path, flag: str, count: int, upright: bool) -> Iterator[np.ndarray]:
    """The first `count` frames of a file. Raises UserError if there are fewer."""
    got = 0
    for frame in islice(media.first_frames(path, flag, upright), count):
        got += 1
        yield frame
    _check_number(path, flag, got, count)
