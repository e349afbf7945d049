"""A job's sound and videos as tensors, under the names that --save-tensors has for them: encoded on
the host once a job, before its first stage.

Sources: ltx-pipelines 1.2.0, a2vid_two_stage.py, retake.py, iclora_utils.py and utils/helpers.py.
What a file lacks for its job is a UserError, which the checks raise before a model is loaded.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ltx_neuron.errors import UserError
from ltx_neuron.host.images import check_filling
from ltx_neuron.host.media import (
    Footage,
    Sound,
    first_frames,
    footage,
    frames_between,
    pixels_of,
    read_sound,
    timed_frames,
)
from ltx_neuron.host.models import HostModels
from ltx_neuron.sampling.attention_mask import mask_divides, token_weights
from ltx_neuron.sampling.conditioning import AttentionMask, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.latents import TIME_SCALE, audio_latent_frames, sound_latent_frames

SOUND, RETAKE = "--audio-path", "--video-path"
REFERENCE, MASK = "--video-conditioning", "--conditioning-attention-mask"
CHANNELS = 2  # of sound
_SHORTEST_SOUND = 1 / 16  # seconds: more than half a frame of the spectrogram, which is reflected


class FirstStage(NamedTuple):
    """Pixels, frames and frames per second of what a job's first stage makes."""

    height: int
    width: int
    num_frames: int
    frame_rate: float

    @property
    def seconds(self) -> float:
        return self.num_frames / self.frame_rate

    @property
    def audio_frames(self) -> int:
        return audio_latent_frames(self.num_frames, self.frame_rate)


def check(
    first_stage: FirstStage,
    sound: SoundCondition | None = None,
    retake: Retake | None = None,
    references: tuple[ReferenceVideo, ...] = (),
    attention_mask: AttentionMask | None = None,
) -> None:
    """Raise UserError where `encode` would for what a file is: of videos only headers are read."""
    if sound:
        check_sound(sound, first_stage)
    if retake:
        check_retake(retake, first_stage)
    check_references(references, attention_mask, first_stage)


def encode(
    host: HostModels,
    first_stage: FirstStage,
    sound: SoundCondition | None = None,
    retake: Retake | None = None,
    references: tuple[ReferenceVideo, ...] = (),
    attention_mask: AttentionMask | None = None,
) -> dict[str, Tensor]:
    """A job's given sound and videos by name; what it was not given is not there.

    mel               (1, 2, frames, 64) float32; of a retake only where its file has sound
    audio_latent      (1, 8, Ta, 16), as long as the video
    waveform          (2, N) float32, and waveform_rate, of them per second: the sound condition's
    video_latent      (1, 128, F, h, w), of a retake
    reference_latent  (1, 128, F, h, w), then reference_latent_1 and so on
    reference_attention  (1, M), a weight for each token of all references, where there is a mask
    """
    tensors = {}
    if sound:
        tensors |= _encode_sound(host, sound, first_stage)
    if retake:
        tensors |= _encode_retake(host, retake, first_stage)
    for number, reference in enumerate(references):
        name = f"reference_latent_{number}" if number else "reference_latent"
        tensors[name] = _encode_reference(host, reference, first_stage)
    if attention_mask:
        tensors["reference_attention"] = _reference_attention(
            attention_mask, references, first_stage, host.dtype
        )
    return tensors


# --- sound ----------------------------------------------------------------------------------------


def check_sound(sound: SoundCondition, first_stage: FirstStage) -> None:
    """Raise UserError unless the sound is there, in one or two channels, and long enough."""
    _given_sound(sound, first_stage)


def _encode_sound(
    host: HostModels, sound: SoundCondition, first_stage: FirstStage
) -> dict[str, Tensor]:
    given = _given_sound(sound, first_stage)
    given = _stereo(given, f"{SOUND} {sound.path}")
    mel, latent = host.encode_audio(given)
    return {
        "mel": mel,
        "audio_latent": latent[:, :, : first_stage.audio_frames].contiguous(),
        "waveform": given.samples,
        "waveform_rate": torch.tensor(given.rate),
    }


def _given_sound(sound: SoundCondition, first_stage: FirstStage) -> Sound:
    """The samples that are asked for, in one or two channels."""
    start, path, typed = sound.start_time, sound.path, f"{SOUND} {sound.path}"
    duration = first_stage.seconds if sound.max_duration is None else sound.max_duration
    given = read_sound(path, SOUND, start, duration)
    if given is None:
        if read_sound(path, SOUND, 0.0, _SHORTEST_SOUND) is None:
            raise UserError(f"{path} has no sound: pass another file with {SOUND}")
        raise UserError(
            f"{typed} has no sound from {start:g} s on: type a smaller --audio-start-time"
        )
    _check_channels(given, path, SOUND)
    samples, wanted = given.samples.shape[1], first_stage.audio_frames
    frames = sound_latent_frames(samples, given.rate)
    if frames < wanted or samples < _SHORTEST_SOUND * given.rate:
        seconds = samples / given.rate
        where = f" from --audio-start-time {start:g} on" if start else ""
        longer = "pass a longer sound"
        if sound.max_duration is not None:
            where += f" with --audio-max-duration {duration:g}"
            longer = "leave --audio-max-duration out, or pass a longer sound"
        raise UserError(
            f"{typed} is too short: got {seconds:.3f} s of sound{where}, wanted the"
            f" {first_stage.seconds:.3f} s of {first_stage.num_frames} frames at"
            f" {first_stage.frame_rate:g} per second; {longer}"
            f"{_shorter_video(frames, first_stage)}"
        )
    return given


def _shorter_video(audio_frames: int, first_stage: FirstStage) -> str:
    """What to type for the longest video that so many audio latents are enough for, if any."""
    for num_frames in range(first_stage.num_frames - TIME_SCALE, 0, -TIME_SCALE):
        if 1 <= audio_latent_frames(num_frames, first_stage.frame_rate) <= audio_frames:
            return f", or type --num-frames {num_frames}"
    return ""


def _check_channels(sound: Sound, path, flag: str) -> None:
    channels = len(sound.samples)
    if channels > CHANNELS:
        raise UserError(
            f"{flag} {path} has {channels} channels of sound, wanted 1 or 2; mix them down, for"
            f" example: ffmpeg -i IN -ac 2 OUT"
        )


def _stereo(sound: Sound, typed: str) -> Sound:
    """The sound in two channels; where it has one, both are that, and it is said."""
    if len(sound.samples) == CHANNELS:
        return sound
    print(f"{typed}: its one channel of sound is taken for both, left and right")
    return Sound(sound.samples.expand(CHANNELS, -1).contiguous(), sound.rate)


# --- retake ---------------------------------------------------------------------------------------


def check_retake(retake: Retake, first_stage: FirstStage) -> None:
    """Raise UserError unless every frame of the video is there by its time, and its sound, where it
    has any, has one or two channels."""
    timed = timed_frames(retake.path, RETAKE, 0.0, first_stage.seconds)
    if timed is not None:
        _check_number(retake.path, RETAKE, timed, first_stage.num_frames)
    _retaken_sound(retake, first_stage)


def _encode_retake(host: HostModels, retake: Retake, first_stage: FirstStage) -> dict[str, Tensor]:
    path, seconds, count = retake.path, first_stage.seconds, first_stage.num_frames
    frames = _exactly(count, frames_between(path, RETAKE, 0.0, seconds), path, RETAKE)
    pixels = pixels_of(frames, first_stage.height, first_stage.width).to(host.dtype)
    tensors = {"video_latent": host.encode_video(pixels)}
    del pixels
    if given := _retaken_sound(retake, first_stage):
        mel, latent = host.encode_audio(_stereo(given, f"{RETAKE} {path}"))
        # Behind the end of the sound is zero, which is no encoded silence: as upstream has it.
        missing = max(0, first_stage.audio_frames - latent.shape[2])
        latent = F.pad(latent, (0, 0, 0, missing))[:, :, : first_stage.audio_frames]
        tensors |= {"mel": mel, "audio_latent": latent.contiguous()}
    return tensors


def _retaken_sound(retake: Retake, first_stage: FirstStage) -> Sound | None:
    """The video's sound as long as the video; None where there is too little to be encoded."""
    given = read_sound(retake.path, RETAKE, 0.0, first_stage.seconds)
    if given is None or given.samples.shape[1] < _SHORTEST_SOUND * given.rate:
        return None
    _check_channels(given, retake.path, RETAKE)
    return given


# --- references -----------------------------------------------------------------------------------


def check_references(
    references: tuple[ReferenceVideo, ...],
    attention_mask: AttentionMask | None,
    first_stage: FirstStage,
) -> None:
    """Raise UserError unless the reference videos and the mask are videos, of a shape that fills
    the clip, and the mask has frames for each of the references' latent frames."""
    for reference in references:
        found = _checked_footage(
            reference.path, REFERENCE, *_reference_size(reference, first_stage)
        )
        _check_number(reference.path, REFERENCE, found.num_frames, reference.num_frames)
    if attention_mask:
        found = _checked_footage(attention_mask.path, MASK, first_stage.height, first_stage.width)
        frames = min(found.num_frames, first_stage.num_frames)
        for reference in references:
            _check_mask(attention_mask, frames, reference, first_stage)


def _reference_size(reference: ReferenceVideo, first_stage: FirstStage) -> tuple[int, int]:
    """Height and width in which a reference is encoded."""
    scale = reference.space_scale
    return first_stage.height // scale, first_stage.width // scale


def _encode_reference(
    host: HostModels, reference: ReferenceVideo, first_stage: FirstStage
) -> Tensor:
    """The latent of its first frames by their number, of which every time_scale-th is taken after
    the first; never in tiles."""
    there = min(reference.num_frames, first_stage.num_frames)
    frames = _exactly(there, first_frames(reference.path, REFERENCE), reference.path, REFERENCE)
    taken = chain(islice(frames, 1), islice(frames, 0, None, reference.time_scale))
    pixels = pixels_of(taken, *_reference_size(reference, first_stage))
    # The encoder takes 8k+1 frames; ltx-core's crops the others, too.
    pixels = pixels[:, :, : reference.taken_frames(there)].to(host.dtype)
    return host.encode_video(pixels, whole=True)


def _reference_attention(
    mask: AttentionMask,
    references: tuple[ReferenceVideo, ...],
    first_stage: FirstStage,
    dtype: torch.dtype,
) -> Tensor:
    """(1, M): the mask's weight of each reference's token, times its strength."""
    height, width, num_frames, _ = first_stage
    there = min(footage(mask.path, MASK).num_frames, num_frames)
    # At the size of the stage, not of the references.
    pixels = pixels_of(
        _exactly(there, first_frames(mask.path, MASK), mask.path, MASK), height, width
    )
    weights = [
        token_weights(pixels.to(dtype), reference.latent_shape(height, width, num_frames))
        for reference in references
    ]
    return torch.cat(weights, dim=1) * mask.strength


def _check_mask(
    mask: AttentionMask, frames: int, reference: ReferenceVideo, first_stage: FirstStage
) -> None:
    height, width, num_frames, _ = first_stage
    latent_frames = reference.latent_shape(height, width, num_frames)[0]
    if not mask_divides(frames, latent_frames):
        raise UserError(
            f"{MASK} {mask.path} has {frames} frames in the time of the clip, and the reference"
            f" {reference.path} has {latent_frames} latent frames: wanted 1 + a multiple of"
            f" {latent_frames - 1} frames; pass a mask of {num_frames} frames, or a reference of"
            " as many"
        )


# --- frames of files ------------------------------------------------------------------------------


def _checked_footage(path, flag: str, height: int, width: int) -> Footage:
    found = footage(path, flag)
    _check_number(path, flag, found.num_frames, 1)
    check_filling(path, (found.height, found.width), height, width, flag)
    return found


def _check_number(path, flag: str, got: int, wanted: int) -> None:
    if got < wanted:
        raise UserError(
            f"{flag} {path}: got {got} frames, wanted {wanted}: the file is cut off, or its times"
            " do not begin at 0. Write it anew, for example: ffmpeg -i IN -vf setpts=PTS-STARTPTS"
            " -af asetpts=PTS-STARTPTS OUT"
        )


def _exactly(count: int, frames: Iterable[np.ndarray], path, flag: str) -> Iterator[np.ndarray]:
    """The first so many frames: UserError where there are fewer."""
    got = 0
    for frame in islice(frames, count):
        got += 1
        yield frame
    _check_number(path, flag, got, count)
