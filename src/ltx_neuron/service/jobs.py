"""Converts a request to a queued job, and a queued job to a Job for the engine."""

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx_neuron.config.common import digest
from ltx_neuron.engine import preflight
from ltx_neuron.errors import UserError
from ltx_neuron.files import first_bytes, whole_file
from ltx_neuron.host import input_files
from ltx_neuron.host.input_files import MAX_SIDE, MIN_SIDE, check_image
from ltx_neuron.job import Job
from ltx_neuron.sampling.conditions import ImageCondition, WeightedFile
from ltx_neuron.sampling.size import Size
from ltx_neuron.service import media, picture
from ltx_neuron.service.api_error import ApiError, busy, field_of, invalid, too_large
from ltx_neuron.service.fields import KNOWN, VideoRequest, WeightedVideo, with_field_names
from ltx_neuron.service.queue import Entry, KeyUsed, NewJob, Queue, QueueFull, Room
from ltx_neuron.service.sandbox import BadFile
from ltx_neuron.service.settings import Limits
from ltx_neuron.service.sizes import CompiledSize, SizeObject, SizeRegistry

VIDEO, THUMBNAIL = "video.mp4", "thumbnail.jpg"
# By the API's name: a finished job's file, and its type.
FILES = {"video": (VIDEO, "video/mp4"), "thumbnail": (THUMBNAIL, "image/jpeg")}
PREVIEW = "preview"  # key in a running job's detail: a JPEG in base64


@dataclass
class JobSubmitter:
    """Turns requests into jobs of the queue."""

    queue: Queue
    sizes: SizeRegistry
    model: str  # the checkpoint's name in the API
    limits: Limits = Limits()

    @property
    def room(self) -> Room:
        limits = self.limits
        of_owner = limits.max_queue_per_token or limits.max_queue
        return Room(limits.max_queue, of_owner, int(limits.max_queue_gb * 1e9))

    def accept(self, request: VideoRequest, owner: str, key: str | None = None) -> Entry:
        """Store a request's job on disk. A repeated key returns the earlier job. Raises
        ApiError."""
        try:
            if earlier := self.queue.of_key(owner, key, request.digest):
                return earlier
            if request.model not in (None, self.model):
                message = f"unknown model {request.model[:64]!r}; this service has only"
                raise ApiError(404, "model_not_found", f"{message} {self.model!r}", "model")
            return self._submit(request, owner, key)
        except QueueFull as error:
            raise busy(str(error), "queue_full") from None
        except KeyUsed:
            message = "this Idempotency-Key was used for another request; send another key"
            raise ApiError(409, "idempotency_conflict", message) from None

    def _submit(self, request: VideoRequest, owner: str, key: str | None) -> Entry:
        id = self.queue.new_id()
        folder, is_new = self.queue.folder_of(id), False
        folder.mkdir()
        try:
            job = self._job(request, folder)
            job.check()
            if job.retake:
                self.sizes.check_retake(job)
            if job.has_media():
                input_files.check(job)
            self._check_possible(job)
            notes = preflight.notes(job, self.sizes.workspace)
            notes = [public(note, folder) for note in notes]
            line = job.with_paths(lambda path: path.name).to_line()
            shown = {"model": self.model, "prompt": request.prompt, "seed": job.seed}
            shown |= {"notes": notes}
            shown |= CompiledSize(job.output_size, job.recipe).as_dict()
            shown |= {"settings": request.settings, "inputs": request.inputs}
            programs = self.sizes.workspace.dit_programs_for
            buckets = (bucket for stage in job.stages for bucket, _ in programs(job, stage))
            runs_on = batch_key(job, dict.fromkeys(bucket.name for bucket in buckets))
            size = folder_bytes(folder)
            new = NewJob(id, owner, request.digest, runs_on, line, shown, key, size)
            entry, is_new = self.queue.submit(new, self.room)
            return entry
        except UserError as error:
            message = public(error.render(field_of), folder)
            named = [*map(field_of, error.fields), *re.findall(r"\w+", message)]
            raise invalid(next(filter(KNOWN.__contains__, named), None), message) from None
        finally:
            if not is_new:
                shutil.rmtree(folder, ignore_errors=True)

    def _job(self, request: VideoRequest, folder: Path) -> Job:
        images = tuple(
            ImageCondition(str(folder / f"image-{n}.png"), held.frame, held.strength, held.crf)
            for n, held in enumerate(request.held.values())
        )
        sizes, requested = self.sizes, request.requested_size
        job = request.job.replaced(image=images, **self._media(request, folder))
        if request.video_reference:  # its file has the size
            chosen = CompiledSize(Size(), requested.recipe or sizes.default.recipe)
            if requested.seconds is not None:
                raise invalid("seconds", "seconds does not go with video_reference; leave it out")
            if abs(job.extend or 0) > (most := self.limits.max_media_seconds):
                raise invalid("extend", f"extend {job.extend:g}: wanted at most {most:g} s")
            job = job.replaced(**requested.model_dump(exclude_none=True))
        elif request.reference_video:  # its file has the length
            chosen, job = self._dubbing(request, job)
        else:
            if request.video_conditioning:
                fields = self._check_lora_set(request, "video_conditioning", "an IC-LoRA")
                job = job.replaced(**fields)
            if request.reference_audio:
                self._check_lora_set(request, "reference_audio", "an IC-LoRA")
            _ = job.media, job.windows  # raise UserError
            job = job.replaced(tail_frames=requested.tail_frames)
            chosen = sizes.choose(requested, job)
            job = job.resized(chosen.size)
            if job.windows and job.size.seconds > (most := self.limits.max_media_seconds):
                raise invalid("seconds", f"{job.size.seconds:g} s: wanted at most {most:g} s")
        loras = sizes.loras(request.lora_set, chosen)
        for image, (param, held) in zip(images, request.held.items(), strict=True):
            upload = Path(image.path).with_suffix(".upload")
            upload.write_bytes(held.data)
            self._decoded(param, upload)
        return sizes.workspace.resolved(job.replaced(**loras, recipe=chosen.recipe))

    def _media(self, request: VideoRequest, folder: Path) -> dict[str, Any]:
        """Write a request's sounds and videos into a job's folder; return the job's fields."""
        fields: dict[str, Any] = {}
        for number, (param, field, kind, held) in enumerate(request.media):
            path = folder / f"{kind}-{number}"
            held.file.seek(0)
            with open(path, "wb") as file:
                shutil.copyfileobj(held.file, file)
            still = field == "video_conditioning" and picture.is_picture(first_bytes(path, 12))
            most = self.limits.bytes_of("image" if still else kind)
            if path.stat().st_size > most:
                raise too_large(param, most)
            if still:
                path = self._decoded(param, path)
            else:
                try:
                    media.check(path, kind, self.limits)
                except BadFile as error:
                    raise invalid(param, f"{param}: {error}", f"invalid_{kind}") from None
            if isinstance(held, WeightedVideo):
                file = WeightedFile(str(path), held.strength)
                fields[field] = (*fields.get(field, ()), file)
            else:
                fields[field] = str(path)
        return fields

    def _check_lora_set(self, request: VideoRequest, field: str, lora: str) -> dict[str, Any]:
        """A job's LoRAs for a request. Raises ApiError if its set lacks the LoRA, in words, that
        `field` needs."""
        sizes = self.sizes
        fields = sizes.loras(request.lora_set, sizes.default)
        sets = sizes.dubbing_sets if field == "reference_video" else sizes.reference_sets
        if (request.lora_set or "default") not in sets:
            known = ", ".join(map(repr, sets)) or "none"
            message = f"{field} needs a lora_set with {lora}; available: {known}"
            raise invalid(field, message, "feature_not_supported")
        return fields

    def _dubbing(self, request: VideoRequest, job: Job) -> tuple[CompiledSize, Job]:
        """The size of a request for a video to dub, and its job of this size. Raises ApiError if
        its LoRA set cannot dub."""
        fields = self._check_lora_set(request, "reference_video", "a dubbing LoRA")
        requested = request.requested_size
        if requested.seconds is not None:
            raise invalid("seconds", "seconds does not go with reference_video; leave it out")
        length = {"num_frames": requested.num_frames, "frame_rate": requested.frame_rate}
        job = job.replaced(**fields, **length, two_stage=True)
        length = {"num_frames": job.size.num_frames, "frame_rate": job.size.frame_rate}
        dubbed = length | {"two_stage": True, "recipe": "distilled", "tail_frames": None}
        chosen = self.sizes.choose(requested.model_copy(update=dubbed), job)
        more = requested.model_dump(include={"two_stage", "tail_frames"}, exclude_none=True)
        chosen = chosen._replace(recipe=requested.recipe or chosen.recipe)
        return chosen, job.resized(chosen.size).replaced(**more)

    def _decoded(self, param: str, upload: Path) -> Path:
        """Replace an uploaded picture by a PNG, whose path is returned."""
        target = upload.with_suffix(".png")
        try:
            with whole_file(target) as partial:
                picture.decode(upload, partial, self.limits.max_image_pixels)
            check_image(target)
        except BadFile as error:
            raise invalid(param, f"{param}: {error}", "invalid_image") from None
        except UserError:  # only the size of our own PNG can be wrong
            sides = f"wanted {MIN_SIDE} to {MAX_SIDE} pixels on each side"
            message = f"{param}: a video cannot have its size; {sides}"
            raise invalid(param, message, "invalid_image") from None
        finally:
            upload.unlink()
        return target

    def _check_possible(self, job: Job) -> None:
        """Raise ApiError for a job that lacks an upsampler or that the recipe excludes."""
        if missing := job.upsamplers.keys() - self.sizes.upsamplers:
            message = f"this service has no {missing.pop()} upsampler"
            raise invalid("upscale", message, "feature_not_supported")
        if job.recipe == "dev":
            job.resolved_guidance.check(self.sizes.workspace.transformer.num_layers)


def batch_key(job: Job, names: Iterable[str]) -> str:
    """A key of the jobs that share loaded graphs, by their names, and weights."""
    loras = [digest(job.identity["loras"])[:8]] if job.all_loras else []
    return "+".join([job.recipe, *names, *loras])


def public(text: str, folder: Path) -> str:
    """A text for clients: with request fields for flags, and without a job's folder."""
    return with_field_names(text).replace(f"{folder.absolute()}/", "").replace(f"{folder}/", "")


def job_of(line: dict[str, Any], folder: Path) -> Job:
    """The Job of a queued job's parameters. Its input files are in `folder`."""
    return Job().updated(line).moved(lambda path: str(folder / path.name))


def folder_bytes(folder: Path) -> int:
    total = 0
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


class VideoObject(SizeObject):
    """A video as OpenAI's client reads it, with fields of our own.

    notes   on inputs that are cut, padded or of another kind
    detail  current step, and times of the steps
    ahead   number of waiting jobs before it
    settings  the request's other fields, and
    inputs    the names of those with a file, to send a request like it
    """

    id: str
    object: str
    status: str
    progress: int
    created_at: int
    started_at: int | None
    completed_at: int | None
    expires_at: int | None
    error: dict[str, str] | None
    remixed_from_video_id: str | None
    model: str
    prompt: str
    seed: int
    notes: list[str]
    detail: dict[str, Any] | None
    ahead: int | None
    settings: dict[str, Any]
    inputs: list[str]


def video_object(entry: Entry, keep_days: float, ahead: int | None = None) -> VideoObject:
    ended, detail = entry.completed_at, entry.detail
    if detail and PREVIEW in detail:
        detail = detail | {PREVIEW: True}  # clients download the picture separately
    fields: Any = {
        **{"settings": {}, "inputs": []},  # of jobs of earlier versions
        **entry.public_fields,
        "id": entry.id,
        "object": "video",
        "status": entry.status,
        "progress": entry.progress,
        "created_at": int(entry.created_at),
        "started_at": entry.started_at and int(entry.started_at),
        "completed_at": ended and int(ended),
        "expires_at": ended and int(ended + keep_days * 86400),
        "error": entry.error,
        "remixed_from_video_id": None,
        "detail": detail,
        "ahead": ahead,
    }
    return fields
