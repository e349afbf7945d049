"""A job's sound, videos and images as latents. The host encodes sound and videos once per job,
before the first stage, under their names in --save-tensors.

Sources: ltx-pipelines 1.2.0, a2vid_two_stage.py, retake.py, iclora_utils.py and utils/helpers.py.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from io import BytesIO
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ltx_neuron.errors import UserError, own_files
from ltx_neuron.host import hdr, input_files
from ltx_neuron.host.input_files import CHANNELS, DUBBED, MASK, REFERENCE, RETAKE, SOUND, Sound
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.spectrogram import resample
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

SOUNDS = {"audio_latent", "audio_reference"}  # of encode_sounds
BED_SEED = 0xBED  # of every bed: one sound at one level is always heard the same
_HDR_WHOLE = 512 * 768  # pixels of a frame; HDR's larger ones are encoded in tiles


@own_files()
def encode_images(
    host: HostModels, inputs: JobInputs, height: int, width: int
) -> list[tuple[ImageCondition, Tensor]]:
    """The images with their latents (1, 128, 1, h, w) at a stage's size."""
    encoded = []
    for image in inputs.placed:
        assert image.crf is not None  # the release's, if no other is given
        pixels = load_image(image.path, height, width, image.crf, host.dtype, inputs.orientation)
        encoded.append((image, host.encode_image(pixels)))
    return encoded


def load_image(
    path: str | Path,
    height: int,
    width: int,
    crf: int = 33,
    dtype: torch.dtype = torch.float32,
    orientation: str = "shown",  # see sampling.compat.Compat
) -> torch.Tensor:
    """The image as pixels (1, 3, 1, height, width) in [-1, 1], as
    ltx_pipelines.utils.media_io.load_image_conditioning. One H.264 round trip at `crf` gives it the
    texture of the video frames the model was trained on (0 skips it); then it is scaled to fill
    height x width and cropped around its centre. Alpha is dropped. Raises UserError when `path` is
    not a readable image, or one too small or too large to use."""
    image = input_files.decode_image(path, orientation)
    if crf != 0:
        image = _h264_round_trip(image, crf)
    input_files.check_filling(path, image.shape[:2], height, width)
    return input_files.fill(image, height, width).to(dtype)


def _h264_round_trip(image: np.ndarray, crf: int) -> np.ndarray:
    """Encode a picture, uint8 (H, W, 3), in H.264 and decode it; odd sides lose a pixel."""
    import av

    height, width = image.shape[0] // 2 * 2, image.shape[1] // 2 * 2
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=1, options={"crf": str(crf), "preset": "veryfast"}
        )
        stream.height, stream.width = height, width
        frame = av.VideoFrame.from_ndarray(
            np.ascontiguousarray(image[:height, :width]), format="rgb24"
        )
        container.mux(stream.encode(frame.reformat(format="yuv420p")))
        container.mux(stream.encode())
    file.seek(0)
    with av.open(file, "r") as written:
        return next(written.decode(video=0)).to_ndarray(format="rgb24")


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
        tensors |= _encode_reference_audio(host, inputs, inputs.reference_sound)
    return tensors


# --- sound ----------------------------------------------------------------------------------------


def _encode_sound(host: HostModels, inputs: JobInputs, source: SoundCondition) -> dict[str, Tensor]:
    sound = _stereo(input_files.read_sound_condition(inputs, source), f"{SOUND} {source.path}")
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


def _stereo(sound: Sound, typed: str) -> Sound:
    """The sound in two channels. A mono sound is duplicated, with a printed line."""
    if len(sound.samples) == CHANNELS:
        return sound
    print(f"{typed}: mono sound, used for both channels")
    return Sound(sound.samples.expand(CHANNELS, -1).contiguous(), sound.rate)


def _encode_reference_audio(
    host: HostModels, inputs: JobInputs, reference: ReferenceAudio
) -> dict[str, Tensor]:
    flag = input_files.voice_flag(inputs)
    sound = input_files.read_reference_audio(reference.path, reference.max_duration, flag)
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
    frames = input_files.read_frames(path, RETAKE, inputs.size.num_frames, inputs.upright)
    pixels = input_files.pixels_of(frames, *inputs.size.sides)
    tensors = {"video_latent": host.encode_video(pixels.to(host.dtype), rank_tiles=rank_tiles)}
    if sound := input_files.retaken_sound(inputs):
        mel, latent = host.encode_audio(_stereo(sound, f"{RETAKE} {path}"))
        tensors |= {"mel": mel, "audio_latent": _fitted(latent, inputs.size.audio_frames)}
    return tensors


def _fitted(latent: Tensor, frames: int) -> Tensor:
    """A latent padded to `frames` frames with zeros: no encoded silence, but as upstream."""
    return F.pad(latent, (0, 0, 0, frames - latent.shape[2])).contiguous()


# --- extended videos ------------------------------------------------------------------------------


def _encode_extension(
    host: HostModels, inputs: JobInputs, extension: Extension, rank_tiles: Any
) -> dict[str, Tensor]:
    pixels = input_files.pixels_of(_known_frames(inputs, extension), *inputs.size.sides)
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
    if (sound := input_files.retaken_sound(inputs)) is None:
        print(f"{RETAKE} {inputs.video_path} has no sound: the new part continues from silence")
        sound = Sound(torch.zeros(CHANNELS, 0), shapes.SAMPLE_RATE)
    samples, rate = _stereo(sound, f"{RETAKE} {inputs.video_path}")
    before = round(extension.silence * rate)
    whole = round((extension.silence + extension.source_seconds) * rate)
    return Sound(F.pad(samples, (before, whole - before - samples.shape[1])), rate)


def _source_frames(inputs: JobInputs, extension: Extension) -> Iterator[np.ndarray]:
    path, count = inputs.video_path, extension.source_frames
    assert path
    with own_files():
        yield from input_files.read_frames(path, RETAKE, count, inputs.upright)


# --- references -----------------------------------------------------------------------------------


def _encode_reference(
    host: HostModels, inputs: JobInputs, reference: ReferenceVideo, size: Size, rank_tiles: Any
) -> Tensor:
    """The latent of every time_scale-th frame after frame 0; of an IC-LoRA in tiles only if its
    stage is tiled."""
    flag = DUBBED if inputs.dubbing else REFERENCE
    path, there = reference.path, reference.frames(inputs.size)
    if reference.still:  # not one repeated latent: the encoder is causal
        frames = repeat(input_files.decode_image(path, inputs.orientation, flag), there)
    else:
        before = reference.start
        frames = input_files.read_frames(path, flag, before + there, inputs.upright)
        frames = islice(frames, before, None)
    taken = chain(islice(frames, 1), islice(frames, 0, None, reference.time_scale))
    count, *sides = reference.pixels(size)
    # The encoder needs 8k+1 frames; upstream omits the last ones, too.
    pixels = input_files.pixels_of(taken, *sides)[:, :, :count]
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
        frames = input_files.read_frames(path, REFERENCE, source.num_frames, inputs.upright)
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
    count = input_files.mask_frames(inputs, mask)
    frames = input_files.read_frames(mask.path, MASK, count, inputs.upright)
    # At stage 1's size in every stage, not at the references'.
    pixels = input_files.pixels_of(frames, *inputs.size.first.sides).to(dtype)
    shapes = (reference.latent_shape(size) for reference in inputs.references)
    return torch.cat([token_weights(pixels, shape) for shape in shapes], dim=1) * mask.strength


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


# --- frames beside decoded ones -------------------------------------------------------------------


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
    frames = input_files.read_frames(path, REFERENCE, inputs.output_size.num_frames, inputs.upright)
    for chunk in mattes:
        pixels = input_files.pixels_of(islice(frames, len(chunk)), *inputs.size.sides)
        colors = ((pixels[0] + 1) * 127.5).round().byte().permute(1, 2, 3, 0)
        alpha = chunk.float().mean(dim=-1, keepdim=True).round().byte()
        yield torch.cat([colors, alpha], dim=-1).contiguous()
