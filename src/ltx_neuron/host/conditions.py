"""A job's sound and videos as tensors, under the names that --save-tensors has for them: encoded on
the host once a job, before its first stage.

Sources: ltx-pipelines 1.2.0, a2vid_two_stage.py, retake.py, iclora_utils.py and utils/helpers.py.
What a file lacks for its job is a UserError, which the checks raise before a model is loaded.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ltx_neuron.errors import UserError
from ltx_neuron.host.images import check_filling
from ltx_neuron.host.media import (
    Sound,
    first_frames,
    footage,
    frames_between,
    pixels_of,
    read_sound,
    timed_frames,
)
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.spectrogram import can_resample
from ltx_neuron.host.video import aac_rate
from ltx_neuron.sampling.attention_mask import mask_divides, token_weights
from ltx_neuron.sampling.conditions import ReferenceVideo
from ltx_neuron.sampling.inputs import Inputs
from ltx_neuron.sampling.latents import (
    SAMPLE_RATE,
    TIME_SCALE,
    audio_latent_frames,
    sound_latent_frames,
)
from ltx_neuron.sampling.size import Size
from ltx_neuron.weights.finite import finite

SOUND, RETAKE = "--audio-path", "--video-path"
REFERENCE, MASK = "--video-conditioning", "--conditioning-attention-mask"
CHANNELS = 2  # of the sound that is encoded
_TOO_SHORT = 512 / SAMPLE_RATE  # seconds: half a frame of the spectrogram, which is reflected


def check(given: Inputs) -> None:
    """Raise UserError where `encode` would for what a file is: of videos only headers are read."""
    if given.sound:
        check_sound(given)
    if given.extension:
        check_extension(given)
    elif given.retake:
        check_retake(given)
    check_references(given)


def encode(host: HostModels, given: Inputs) -> dict[str, Tensor]:
    """A job's given sound and videos by name; what it was not given is not there.

    mel               (1, 2, frames, 64) float32; of a retake only where its file has sound
    audio_latent      (1, 8, Ta, 16), as long as the video; where there is a mel
    waveform          (2, N) float32, and waveform_rate, of them per second: the sound condition's
    video_latent      (1, 128, F, h, w), of a retake; of a video that is made longer, the clip that
                      its windows are cut out of, zeros where it is new; so its audio_latent
    reference_latent  (1, 128, F, h, w), then reference_latent_1 and so on
    reference_attention  (1, M), a weight for each token of all references, where there is a mask
    """
    tensors = {}
    if given.sound:
        tensors |= _encode_sound(host, given)
    if given.extension:
        tensors |= _encode_extension(host, given)
    elif given.retake:
        tensors |= _encode_retake(host, given)
    for number, reference in enumerate(given.references):
        name = f"reference_latent_{number}" if number else "reference_latent"
        tensors[name] = _encode_reference(host, given, reference)
    if given.attention_mask:
        tensors["reference_attention"] = _reference_attention(given, host.dtype)
    return tensors


# --- sound ----------------------------------------------------------------------------------------


def check_sound(given: Inputs) -> None:
    """Raise UserError unless the sound is there, in one or two channels, and long enough."""
    rate = _read_given(given).rate
    _check_rate(given.sound.path, SOUND, rate, aac_rate(rate))


def _encode_sound(host: HostModels, given: Inputs) -> dict[str, Tensor]:
    sound = _stereo(_read_given(given), f"{SOUND} {given.sound.path}")
    mel, latent = host.encode_audio(sound)
    return {
        "mel": mel,
        "audio_latent": latent[:, :, : given.size.audio_frames].contiguous(),
        "waveform": sound.samples,
        "waveform_rate": torch.tensor(sound.rate),
    }


def _read_given(given: Inputs) -> Sound:
    """The samples that a sound condition asks for, in one or two channels."""
    path, start, duration = given.sound.path, given.sound.start_time, given.sound.max_duration
    duration = given.size.seconds if duration is None else duration
    sound = read_sound(path, SOUND, start, duration)
    if sound is None:
        if read_sound(path, SOUND) is None:
            raise UserError(f"{path} has no sound: pass another file with {SOUND}")
        raise UserError(
            f"{SOUND} {path} ends before --audio-start-time {start:g}: type a smaller one"
        )
    frames = sound_latent_frames(sound.samples.shape[1], sound.rate)
    if frames < given.size.audio_frames or _is_too_short(sound):
        raise _too_short(given, sound, frames)
    _check_format(sound, path, SOUND)
    return sound


def _too_short(given: Inputs, sound: Sound, audio_frames: int) -> UserError:
    """audio_frames  latents that the sound is encoded as"""
    asked, size, where, advice = given.sound, given.size, "", "pass a longer sound"
    if asked.start_time:
        where += f" from --audio-start-time {asked.start_time:g} on"
        advice += ", or type a smaller --audio-start-time"
    if asked.max_duration is not None:
        where += f" with --audio-max-duration {asked.max_duration:g}"
        advice = f"leave --audio-max-duration out, or {advice}"
    for num_frames in range(size.num_frames - TIME_SCALE, 0, -TIME_SCALE):
        if 1 <= audio_latent_frames(num_frames, size.frame_rate) <= audio_frames:
            advice += f", or type --num-frames {num_frames}"
            break
    return UserError(
        f"{SOUND} {asked.path} is shorter than the video: got"
        f" {sound.samples.shape[1] / sound.rate:.2f} s of sound{where}, wanted {size.seconds:.2f} s"
        f" ({size.num_frames} frames at {size.frame_rate:g} per second); {advice}"
    )


def _is_too_short(sound: Sound) -> bool:
    """Whether it is too short for a spectrogram."""
    return sound.samples.shape[1] <= _TOO_SHORT * sound.rate


def _check_format(sound: Sound, path: str | Path, flag: str) -> None:
    """Raise UserError for a sound that the encoder does not take."""
    if len(sound.samples) > CHANNELS:
        raise UserError(
            f"{flag} {path} has {len(sound.samples)} channels of sound, wanted 1 or 2; mix them"
            " down, for example: ffmpeg -i IN -ac 2 OUT"
        )
    if not finite(sound.samples):
        raise UserError(f"{flag} {path} has samples that are no numbers: pass another file")
    _check_rate(path, flag, sound.rate, SAMPLE_RATE)


def _check_rate(path: str | Path, flag: str, rate: int, wanted: int) -> None:
    if not can_resample(rate, wanted):
        raise UserError(
            f"{flag} {path} has {rate} samples of sound per second, which have too little in common"
            f" with the {wanted} that are wanted; convert it, for example: ffmpeg -i IN -ar 48000"
            " OUT"
        )


def _stereo(sound: Sound, typed: str) -> Sound:
    """The sound in two channels; where it has one, both are that, and it is said."""
    if len(sound.samples) == CHANNELS:
        return sound
    print(f"{typed}: its one channel of sound is taken for both, left and right")
    return Sound(sound.samples.expand(CHANNELS, -1).contiguous(), sound.rate)


# --- retake ---------------------------------------------------------------------------------------


def check_retake(given: Inputs) -> None:
    """Raise UserError unless every frame of the video is there by its time, and its sound, where it
    has any, is one that can be encoded."""
    path = given.retake.path
    timed = timed_frames(path, RETAKE, 0.0, given.size.seconds)
    if timed is not None:
        _check_number(path, RETAKE, timed, given.size.num_frames)
    _retaken_sound(path, given.size.seconds)


def _encode_retake(host: HostModels, given: Inputs) -> dict[str, Tensor]:
    path, frames = given.retake.path, given.size.audio_frames
    timed = frames_between(path, RETAKE, 0.0, given.size.seconds, given.upright)
    pixels = pixels_of(_exactly(given.size.num_frames, timed, path, RETAKE), *given.size.sides)
    tensors = {"video_latent": host.encode_video(pixels.to(host.dtype))}
    if sound := _retaken_sound(path, given.size.seconds):
        mel, latent = host.encode_audio(_stereo(sound, f"{RETAKE} {path}"))
        # What the sound is too short for is zeros, which are no encoded silence: upstream's rule.
        padded = F.pad(latent, (0, 0, 0, max(0, frames - latent.shape[2])))
        tensors |= {"mel": mel, "audio_latent": padded[:, :, :frames].contiguous()}
    return tensors


def _retaken_sound(path: str | Path, seconds: float) -> Sound | None:
    """The video's sound as long as the video; None where there is too little of it."""
    sound = read_sound(path, RETAKE, 0.0, seconds)
    if sound is None or _is_too_short(sound):
        return None
    _check_format(sound, path, RETAKE)
    return sound


# --- a video that is made longer ------------------------------------------------------------------


def check_extension(given: Inputs) -> None:
    """Raise UserError unless every frame of the video is there, and its sound, where it has any, is
    one that can be encoded."""
    path, extension = given.retake.path, given.extension
    timed = timed_frames(path, RETAKE, 0.0, math.inf)
    if timed is not None:
        _check_number(path, RETAKE, timed, extension.source_frames)
    _retaken_sound(path, extension.source_seconds)


def _encode_extension(host: HostModels, given: Inputs) -> dict[str, Tensor]:
    extension, dtype = given.extension, host.dtype
    pixels = pixels_of(_known_frames(given), *given.size.sides)
    known = host.encode_video(pixels.to(dtype))[:, :, int(extension.before) :]
    video = known.new_zeros(*known.shape[:2], extension.video_latents, *known.shape[3:])
    video[:, :, extension.known_video] = known
    mel, latent = host.encode_audio(_extended_sound(given))
    missing = max(0, extension.audio_latents - latent.shape[2])
    latent = F.pad(latent, (0, 0, 0, missing))[:, :, : extension.audio_latents]
    audio = torch.zeros_like(latent)
    audio[:, :, extension.known_audio] = latent[:, :, extension.known_audio]
    return {"mel": mel, "video_latent": video, "audio_latent": audio}


def _known_frames(given: Inputs) -> Iterator[np.ndarray]:
    """The file's frames that the windows see."""
    extension, frames = given.extension, _source_frames(given)
    if not extension.before:
        return islice(frames, extension.source_frames - extension.known_frames, None)
    # A latent of its own for one frame: the file's are behind the first latent of the clip. Nothing
    # moves before them, as the encoder takes it of every clip.
    first = next(frames)
    return chain([first, first], islice(frames, extension.known_frames - 1))


def _extended_sound(given: Inputs) -> Sound:
    """The file's sound as long as its video, behind as much silence as is made before it. A file
    without sound is silent."""
    extension, path = given.extension, given.retake.path
    sound = _retaken_sound(path, extension.source_seconds)
    if sound is None:
        print(f"{RETAKE} {path} has no sound: what is added goes on from silence")
        sound = Sound(torch.zeros(CHANNELS, 0), SAMPLE_RATE)
    samples, rate = _stereo(sound, f"{RETAKE} {path}")
    before, whole = (
        round(seconds * rate)
        for seconds in (extension.silence, extension.silence + extension.source_seconds)
    )
    return Sound(F.pad(samples, (before, whole - before - samples.shape[1])), rate)


def _source_frames(given: Inputs) -> Iterator[np.ndarray]:
    path = given.retake.path
    frames = first_frames(path, RETAKE, given.upright)
    return _exactly(given.extension.source_frames, frames, path, RETAKE)


def with_source(given: Inputs, decoded: Iterator[Tensor]) -> Iterator[Tensor]:
    """The frames of a video that is made longer, in chunks, uint8 (N, H, W, 3): the file's own, bit
    for bit, and the new ones of those that are decoded."""
    kept, new = _in_chunks(_source_frames(given)), _taken(decoded, given.extension.decoded)
    with closing(decoded):
        yield from chain(new, kept) if given.extension.before else chain(kept, new)


def _in_chunks(frames: Iterator[np.ndarray]) -> Iterator[Tensor]:
    while some := list(islice(frames, TIME_SCALE)):
        yield torch.from_numpy(np.stack(some))


def _taken(chunks: Iterator[Tensor], wanted: slice) -> Iterator[Tensor]:
    """Those frames of the chunks; later ones are not asked for."""
    at = 0
    for chunk in chunks:
        part = chunk[max(0, wanted.start - at) : max(0, wanted.stop - at)]
        at += len(chunk)
        if len(part):
            yield part
        if at >= wanted.stop:
            return


# --- references -----------------------------------------------------------------------------------


def check_references(given: Inputs) -> None:
    """Raise UserError unless the reference videos and their mask are videos that can be scaled to
    fill the clip, and the mask has frames for each latent frame of the references."""
    for reference in given.references:
        sides = reference.sides(*given.size.first.sides)
        there = _checked_footage(reference.path, REFERENCE, *sides, given.upright)
        _check_number(reference.path, REFERENCE, there.num_frames, reference.num_frames)
    if given.attention_mask:
        _checked_footage(given.attention_mask.path, MASK, *given.size.first.sides, given.upright)
        _mask_frames(given)


def _encode_reference(host: HostModels, given: Inputs, reference: ReferenceVideo) -> Tensor:
    """The latent of the first frames by their number, of which every time_scale-th is taken after
    frame 0; never in tiles."""
    path, there = reference.path, min(reference.num_frames, given.size.num_frames)
    frames = _exactly(there, first_frames(path, REFERENCE, given.upright), path, REFERENCE)
    taken = chain(islice(frames, 1), islice(frames, 0, None, reference.time_scale))
    pixels = pixels_of(taken, *reference.sides(*given.size.first.sides))
    # The encoder takes 8k+1 frames: upstream's leaves the last ones out, too.
    pixels = pixels[:, :, : reference.taken_frames(given.size.num_frames)]
    return host.encode_video(pixels.to(host.dtype), whole=True)


def _reference_attention(given: Inputs, dtype: torch.dtype) -> Tensor:
    """(1, M): the mask's weight of each reference's token, times its strength."""
    mask = given.attention_mask
    frames = first_frames(mask.path, MASK, given.upright)
    frames = _exactly(_mask_frames(given), frames, mask.path, MASK)
    # At the size of the stage, not of the references.
    pixels = pixels_of(frames, *given.size.first.sides).to(dtype)
    weights = [token_weights(pixels, _latent_shape(given, each)) for each in given.references]
    return torch.cat(weights, dim=1) * mask.strength


def _latent_shape(given: Inputs, reference: ReferenceVideo) -> tuple[int, int, int]:
    """(F, h, w) of a reference's latent."""
    return reference.latent_shape(*given.size.first.sides, given.size.num_frames)


def _mask_frames(given: Inputs) -> int:
    """How many frames of the mask are taken. UserError where they do not divide among the latent
    frames of a reference."""
    mask = given.attention_mask
    frames = min(footage(mask.path, MASK).num_frames, given.size.num_frames)
    for reference in given.references:
        latent_frames, _, _ = _latent_shape(given, reference)
        if not mask_divides(frames, latent_frames):
            raise UserError(
                f"{MASK} {mask.path}: its first {frames} frames do not divide among the"
                f" {latent_frames} latent frames of the reference {reference.path}: wanted 1 + a"
                f" multiple of {latent_frames - 1}; pass a mask and a reference of"
                f" {given.size.num_frames} frames each"
            )
    return frames


# --- frames of files ------------------------------------------------------------------------------


def _checked_footage(path: str | Path, flag: str, height: int, width: int, upright: bool) -> Size:
    found = footage(path, flag, upright)
    _check_number(path, flag, found.num_frames, 1)
    check_filling(path, found.sides, height, width, flag)
    return found


def _check_number(path: str | Path, flag: str, got: int, wanted: int) -> None:
    if got < wanted:
        raise UserError(
            f"{flag} {path}: got {got} frames, wanted {wanted}: the file is cut off, or its times"
            " do not begin at 0. Write it anew, for example: ffmpeg -i IN -vf setpts=PTS-STARTPTS"
            " -af asetpts=PTS-STARTPTS OUT"
        )


def _exactly(
    count: int, frames: Iterable[np.ndarray], path: str | Path, flag: str
) -> Iterator[np.ndarray]:
    """The first so many frames: UserError where there are fewer."""
    got = 0
    for frame in islice(frames, count):
        got += 1
        yield frame
    _check_number(path, flag, got, count)
