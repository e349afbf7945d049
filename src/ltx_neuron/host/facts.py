"""The facts of a job's files that its size and its graphs depend on."""

from pathlib import Path
from typing import Any

from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.files import check_readable
from ltx_neuron.format import print_once
from ltx_neuron.host import input_files
from ltx_neuron.host.hdr import exr_frames, package, read_exr
from ltx_neuron.host.input_files import DUBBED, REFERENCE, RETAKE, VOICE, footage, is_still
from ltx_neuron.sampling.conditions import WeightedFile
from ltx_neuron.sampling.extension import check_source
from ltx_neuron.sampling.inputs import JobInputs, Media
from ltx_neuron.sampling.shapes import SPACE_SCALE, TIME_SCALE
from ltx_neuron.sampling.size import Size, exact_frame_rate
from ltx_neuron.weights.lora import WeightSet, detailing_scale, dubbing_scale, reference_scale


def read_media(
    inputs: JobInputs, loras: WeightSet, ic_loras: WeightSet, detailing_loras: WeightSet
) -> Media:
    """The facts of the input files and of their LoRAs' metadata. Raises UserError for a file whose
    size, length or sound cannot be used."""
    video = None
    if inputs.video_path is not None:
        extends = inputs.extend is not None
        video = video_size(inputs.video_path, RETAKE, extends, inputs.upright)
    clip, scales = None, (1, 1)
    if inputs.reference_video is not None:
        if len(loras) != 1:
            count = f"{len(loras)}; leave all but one out" if loras else "none; type {lora} PATH"
            raise FieldError(
                "{reference_video} needs one {lora}, the dubbing LoRA (it is in both stages), got"
                f" {count}"
            )
        clip, scales = _clip(inputs), (dubbing_scale(loras[0]), 1)
    elif inputs.video_conditioning:
        scales = reference_scale(ic_loras)
    if inputs.text_embeddings is not None:
        hdr = _hdr_input(inputs)
        frames = 2 * hdr.num_frames - 1 if inputs.high_quality else hdr.num_frames
        return Media(references=((frames, False),), hdr=hdr)
    stills = {path: is_still(path) for path, _ in inputs.video_conditioning}
    references = tuple(
        (1 if stills[path] else footage(path, REFERENCE).num_frames, stills[path])
        for path, _ in inputs.video_conditioning
    )
    detailing = detailing_scale(detailing_loras)
    return Media(video, clip, references, scales, detailing, _latents(inputs))


def _hdr_input(inputs: JobInputs) -> Size:
    """The size of the input of HDR, a video or a folder of EXR files."""
    for name in ("OpenEXR", "PyOpenColorIO"):
        package(name)
    (path, _), *others = inputs.video_conditioning
    folder, rate = Path(path).is_dir(), inputs.frame_rate
    spaces = ("srgb", "acescg", "acescct") if folder else ("srgb_gamma", "srgb")
    if inputs.input_colorspace not in spaces or folder != (rate is not None) or others:
        raise FieldError(
            f"{{text_embeddings}} needs one {{video_conditioning}}; {{path}} takes"
            f" {'a' if folder else 'no'} {{frame_rate}}, and {{input_colorspace}} "
            + " or ".join(spaces),
            path=path,
        )
    if folder:
        if not (files := exr_frames(path)):
            raise UserError(f"{REFERENCE} {path} has no file NAME.exr")
        height, width, _ = read_exr(files[0], REFERENCE).shape
        size = Size(height, width, len(files), rate or 0.0)
    else:
        size = footage(path, REFERENCE, inputs.upright)
    frames = (size.num_frames - 1) // TIME_SCALE * TIME_SCALE + 1
    if frames != size.num_frames or any(side % 2 for side in size.sides):
        raise UserError(
            f"{REFERENCE} {path} has {size.num_frames} frames of {size.height}x{size.width}; wanted"
            f" 8k+1 frames, such as {max(1, frames)} or {frames + TIME_SCALE}, and even sides"
        )
    return size


def _latents(inputs: JobInputs) -> int:
    """The audio latents of a voice, or of the sound of a clip to dub."""
    path, flag = inputs.reference_video, DUBBED
    if path is None:
        path, flag = inputs.reference_audio, VOICE
    if path is None:
        return 0
    kind = "video with sound" if flag == DUBBED else "sound"
    check_readable(path, flag, f"; pass a {kind} as {flag} FILE")
    sound = input_files.read_reference_audio(path, inputs.reference_audio_max_duration, flag)
    return input_files.sound_latent_frames(sound.samples.shape[1], sound.rate)


def _clip(inputs: JobInputs) -> tuple[int, float]:
    """The frames, 8k+1, and the frame rate of a video to dub."""
    path = inputs.reference_video
    assert path
    check_readable(path, DUBBED, f"; pass a video with sound as {DUBBED} FILE")
    video = footage(path, DUBBED)
    frames, rate = video.num_frames, video.frame_rate
    used = max(1, (frames - 1) // TIME_SCALE * TIME_SCALE + 1)
    typed = [name for name in ("num_frames", "frame_rate") if getattr(inputs, name) is not None]
    if typed:
        named = " ".join(f"{{{name}}} {getattr(inputs, name):g}" for name in typed)
        raise FieldError(
            f"{named} does not go with {{reference_video}}: {{path}} says how many ({{counts}});"
            " leave it out",
            path=path,
            counts=f"{used} of its {frames} frames, {rate:g} fps",
        )
    if used == 1:
        raise UserError(
            f"{DUBBED} {path} has {frames} frames, wanted {TIME_SCALE + 1} or more; pass a longer"
            " one"
        )
    return used, rate


def video_size(path: str | Path, flag: str, extends: bool = False, upright: bool = True) -> Size:
    """The size of a retake's file, or of one that is extended. Raises UserError, with the command
    that cuts the file, for a size that the model cannot have."""
    check_readable(path, flag, f"; pass a video as {flag} FILE")
    video = input_files.inspected(path, flag, upright)
    size, frames = video.size, video.size.num_frames
    if not extends:
        frames = max(1, (frames - 1) // TIME_SCALE * TIME_SCALE + 1)
    else:
        check_source(frames)
    height, width = (max(SPACE_SCALE, side // SPACE_SCALE * SPACE_SCALE) for side in size.sides)
    if (size.num_frames, size.sides) != (frames, (height, width)):
        counted = "8k+1 frames and " if not extends else ""
        video.wrong.append(
            f"has {size.num_frames} frames of {size.height}x{size.width}; wanted {counted}sides"
            f" that are multiples of {SPACE_SCALE}"
        )
        fill = f"scale={width}:{height}:force_original_aspect_ratio=increase,crop={width}:{height}"
        video.filters.append(fill)
    if video.wrong:
        rate = exact_frame_rate(size.frame_rate)
        cut = "-frames:v", frames, "-t", f"{float(frames / rate):.3f}"
        name = f"{height}x{width}x{frames}.mp4"
        raise video.refusal(path, flag, name, *(() if extends else cut))
    return size


UPSCALED = "--upscale-video"
_LONGEST = 20  # seconds: the released models' last position


def upscaling(inputs: JobInputs, ic_loras: WeightSet) -> dict[str, Any]:
    """The fields of the job that upscales upscale_video: it is the reference of the IC-LoRA, in
    tiles, and the result has its length (8k+1 frames), frame rate and sound. Sides are rounded up
    to what the model can have. Prints what changes; raises UserError for an unusable file."""
    path = inputs.upscale_video
    assert path
    check_readable(path, UPSCALED, f"; pass a video as {UPSCALED} FILE")
    clip, (scale, _) = footage(path, UPSCALED, inputs.upright), reference_scale(ic_loras)
    windows = inputs.holds("chunked") or clip.seconds > _LONGEST
    frames = (clip.num_frames - 1) // TIME_SCALE * TIME_SCALE + 1
    sides = [-(-side // SPACE_SCALE) * SPACE_SCALE * scale for side in clip.sides]
    height, width = inputs.height or sides[0], inputs.width or sides[1]
    print_once(
        f"{UPSCALED} {path}: {frames} of {clip.num_frames} frames (8k+1) of"
        f" {clip.height}x{clip.width} become {height}x{width}{', in windows' * windows}"
    )
    sound = input_files.read_sound(path, UPSCALED, 0.0, frames / clip.frame_rate)
    if sound is None:
        print_once(f"{UPSCALED} {path} has no sound: the model generates one")
    return {
        "upscale_video": None,
        "video_conditioning": (WeightedFile(path, 1.0),),
        "audio_path": path if sound else None,
        "tile": True,
        "chunked": windows,
        "height": height,
        "width": width,
        "num_frames": frames,
        "frame_rate": clip.frame_rate,
    }
