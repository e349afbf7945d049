"""The sizes that are compiled, and which of them a request means.

A graph knows a size by its tokens alone. So the sizes are those, of the usual shapes and frame
rates, whose tokens some graph has: portrait and landscape share one.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ltx_neuron.config import Bucket
from ltx_neuron.errors import UserError
from ltx_neuron.finished import MAX_TIMESTEPS
from ltx_neuron.job import LORA_FIELDS, RECIPES, Job, Size, Stage
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.latents import SPACE_SCALE, TIME_SCALE, audio_latent_frames
from ltx_neuron.service.refusal import Refusal, invalid
from ltx_neuron.workspace import Workspace

FRAME_RATES = (24.0, 25.0, 30.0, 48.0, 50.0, 60.0)
NO_LORAS = {"default": dict.fromkeys(LORA_FIELDS, ())}
_MAX_LATENT_FRAMES = 129  # 1025 frames
_MAX_ASPECT = 2.5
_NAME = re.compile(r"v(\d+)-a(\d+)-t(\d+)-s(\d+)(-guided)?")
_SHOWN = 12  # sizes in a message


@dataclass(frozen=True)
class Wanted:
    """What a request says of the size; None is what it does not say."""

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    seconds: float | None = None
    frame_rate: float | None = None
    two_stage: bool | None = None
    recipe: str | None = None


class Offer(NamedTuple):
    """A size that is compiled, with the recipe that its graphs are for."""

    size: Size
    recipe: str

    def job(self, images: tuple[ImageCondition, ...] = ()) -> Job:
        """What its graphs are for."""
        return Job("", self.size, images=images, recipe=self.recipe)

    @property
    def refines(self) -> bool:
        """Whether stage 2 needs the distilled LoRA."""
        return self.size.two_stage and self.recipe == "dev"

    @property
    def shown(self) -> dict:
        size = self.size
        return {
            "size": f"{size.width}x{size.height}",
            "seconds": seconds_of(size),
            "num_frames": size.num_frames,
            "fps": size.frame_rate,
            "two_stage": size.two_stage,
            "recipe": self.recipe,
        }

    def __str__(self) -> str:
        size, stages = self.size, "two stages" if self.size.two_stage else "one stage"
        return (
            f"{size.width}x{size.height}, {size.num_frames} frames at {size.frame_rate:g} fps"
            f" ({seconds_of(size)} s), {stages}, {self.recipe}"
        )


def seconds_of(size: Size) -> str:
    """From the first frame to the last: whole for 8k+1 frames at 24 fps, as 121 are 5 s."""
    return f"{(size.num_frames - 1) / size.frame_rate:.4g}"


class Catalogue:
    """What a workspace has compiled.

    default     the size and recipe of a request that does not say
    upsamplers  kinds of latent upsamplers that there are: two stages need the spatial one
    lora_sets   the LoRAs that a request may choose by a name, as a Job's fields; "default" are
                those of one that does not say
    """

    def __init__(
        self,
        workspace: Workspace,
        default: Offer,
        upsamplers: Collection[str],
        lora_sets: Mapping[str, dict[str, tuple]] = NO_LORAS,
    ):
        self.workspace, self.default, self.upsamplers = workspace, default, upsamplers
        self.lora_sets = lora_sets
        self._folder = Path(workspace.artifacts) / "graphs"
        # The folder's time, the compiled buckets and what they offer; all of one look.
        self._known: tuple[float, set[str], list[Offer]] = (-1.0, set(), [])
        self._checked: dict[tuple, bool] = {}

    # --- what there is ----------------------------------------------------------------------------

    @property
    def offers(self) -> list[Offer]:
        """Every size that is compiled, the smallest first."""
        self._look()
        return self._known[2]

    def _look(self) -> None:
        """Read the graphs' folder again where one was added or removed."""
        changed = self._folder.stat().st_mtime if self._folder.is_dir() else 0.0
        if changed != self._known[0]:
            names = self.workspace.compiled_buckets()
            self._checked.clear()
            offers = [offer for offer in _offers(names) if self._runs(offer)]
            offers.sort(key=lambda offer: (offer.recipe, _pixels(offer.size), str(offer)))
            self._known = (changed, names, offers)

    def _runs(self, offer: Offer) -> bool:
        """Whether the command's own files are those of a size: two stages need an upsampler, those
        of dev a distilled LoRA as well."""
        distilled = all(fields["stage_2_loras"] for fields in self.lora_sets.values())
        needed = "spatial" in self.upsamplers or not offer.size.two_stage
        return needed and (distilled or not offer.refines)

    def loras(self, name: str | None, offer: Offer) -> dict[str, tuple]:
        """A Job's LoRAs by the name of their set: those of stage 2 only where dev has one. Raises
        Refusal for an unknown name."""
        if (name or "default") not in self.lora_sets:
            known = ", ".join(map(repr, self.lora_sets))
            raise invalid("lora_set", f"lora_set {name[:64]!r} is not there; known: {known}")
        fields = self.lora_sets[name or "default"]
        return fields if offer.refines else fields | {"stage_2_loras": ()}

    def fits(self, offer: Offer, images: tuple[ImageCondition, ...] = ()) -> bool:
        """Whether every stage of a size, which is legal, has its graph."""
        key = offer, tuple((image.frame_index, image.strength) for image in images)
        self._look()
        if key not in self._checked:
            self._checked[key] = self._has_graphs(offer, images)
        return self._checked[key]

    def _has_graphs(self, offer: Offer, images: tuple[ImageCondition, ...]) -> bool:
        job, names = offer.job(images), self._known[1]
        for stage in job.stages:
            if not _is_compiled(job, stage, names):
                return False
            try:
                self.workspace.dit_program_for(job, stage)
            except UserError:  # one that is damaged, or cut otherwise
                return False
        return self._runs(offer)

    # --- what a request means ---------------------------------------------------------------------

    def choose(
        self, wanted: Wanted, images: tuple[ImageCondition, ...] = ()
    ) -> tuple[Offer, list[str]]:
        """The compiled size that a request means, and what was rounded for it.

        What a request does not say is free, and near the default. Raises Refusal where nothing that
        is compiled is within a rounding of what it says.
        """
        exact = self._exact(wanted)
        if exact and self.fits(exact, images):
            return exact, []
        near = [offer for offer in self.offers if _is_near(wanted, offer)]
        fitting = [offer for offer in near if self.fits(offer, images)]
        if not fitting:
            raise self._mismatch(wanted, near if images else [])
        chosen = min(fitting, key=lambda offer: _distance(wanted, offer, self.default))
        return chosen, _rounded(wanted, chosen)

    def _exact(self, wanted: Wanted) -> Offer | None:
        """What a request says word for word, the default's where it says nothing; None where no
        video can be that."""
        default = self.default.size
        rate = default.frame_rate if wanted.frame_rate is None else wanted.frame_rate
        size = Size(
            default.height if wanted.height is None else wanted.height,
            default.width if wanted.width is None else wanted.width,
            _frames(wanted, rate, default.num_frames),
            rate,
            default.two_stage if wanted.two_stage is None else wanted.two_stage,
        )
        try:
            size.check()
        except UserError:
            return None
        return Offer(size, wanted.recipe or self.default.recipe)

    def _mismatch(self, wanted: Wanted, without_images: list[Offer]) -> Refusal:
        said = {name: value for name, value in vars(wanted).items() if value is not None}
        what = ", ".join(f"{name} {value}" for name, value in said.items()) or "the default size"
        if without_images:
            message = f"{what} is compiled for text alone, not for images held as these are"
        else:
            message = f"{what} is not compiled, nor within a rounding of what is"
        listed = "; ".join(map(str, self.offers[:_SHOWN])) or "nothing"
        more = len(self.offers) - _SHOWN
        listed += f"; and {more} more" if more > 0 else ""
        first = next((name for name in said if name in ("height", "width", "seconds")), "size")
        return Refusal(
            400,
            "profile_mismatch",
            f"{message}. Compiled: {listed}. GET /v1/models lists all",
            {"height": "size", "width": "size"}.get(first, first),
            compiled=[offer.shown for offer in self.offers[: 4 * _SHOWN]],
        )


def _frames(wanted: Wanted, rate: float, default: int) -> int:
    """Frames that a request asks for: of a clip of whole seconds one more than their product."""
    if wanted.num_frames is not None:
        return wanted.num_frames
    return default if wanted.seconds is None else round(wanted.seconds * rate) + 1


def _is_near(wanted: Wanted, offer: Offer) -> bool:
    """Whether an offer is what a request says, but for a rounding to the model's own units."""
    size = offer.size
    unit = SPACE_SCALE * (2 if size.two_stage else 1)
    frames = _frames(wanted, size.frame_rate, size.num_frames)
    return (
        (wanted.height is None or abs(wanted.height - size.height) < unit)
        and (wanted.width is None or abs(wanted.width - size.width) < unit)
        and abs(frames - size.num_frames) < TIME_SCALE
        # 23.976 is 24, and 29.97 is 30
        and (wanted.frame_rate is None or abs(wanted.frame_rate / size.frame_rate - 1) < 2e-3)
        and wanted.two_stage in (None, size.two_stage)
        and wanted.recipe in (None, offer.recipe)
    )


def _distance(wanted: Wanted, offer: Offer, default: Offer) -> tuple:
    """How far an offer is from what is said, then from the default."""
    size, usual = offer.size, default.size

    def away(value: float | None, from_default: float, got: float) -> float:
        return abs(got / (from_default if value is None else value) - 1)

    frames = _frames(wanted, size.frame_rate, usual.num_frames)
    return (
        away(wanted.height, usual.height, size.height)
        + away(wanted.width, usual.width, size.width)
        + abs(size.num_frames / frames - 1),
        offer.recipe != default.recipe,
        size.two_stage != usual.two_stage,
        away(wanted.frame_rate, usual.frame_rate, size.frame_rate),
    )


def _rounded(wanted: Wanted, offer: Offer) -> list[str]:
    """What of a request was rounded, in words."""
    size = offer.size
    frames = _frames(wanted, size.frame_rate, size.num_frames)
    pairs = {
        "height": (wanted.height, size.height),
        "width": (wanted.width, size.width),
        "num_frames": (frames, size.num_frames),
        "fps": (wanted.frame_rate, size.frame_rate),
    }
    return [
        f"{name} {asked:g} became {got:g}, which is compiled"
        for name, (asked, got) in pairs.items()
        if asked is not None and asked != got
    ]


def _pixels(size: Size) -> int:
    return size.height * size.width * size.num_frames


def _offers(names: set[str]) -> set[Offer]:
    """Every size whose tokens some graph has."""
    found = set()
    for name in names:
        bucket = bucket_of(name)
        for size in _sizes_of_tokens(bucket.video_tokens, bucket.audio_tokens) if bucket else ():
            for recipe in RECIPES:
                for two_stage in (False, True):
                    whole = Size(size.height, size.width, size.num_frames, size.frame_rate)
                    offer = Offer(_staged(whole, two_stage), recipe)
                    if _is_legal(offer.size) and _all_compiled(offer, names):
                        found.add(offer)
    return found


def _staged(size: Size, two_stage: bool) -> Size:
    return Size(size.height, size.width, size.num_frames, size.frame_rate, two_stage)


def _is_legal(size: Size) -> bool:
    try:
        size.check()
    except UserError:
        return False
    return True


def _all_compiled(offer: Offer, names: set[str]) -> bool:
    job = offer.job()
    return all(_is_compiled(job, stage, names) for stage in job.stages)


def _is_compiled(job: Job, stage: Stage, names: set[str]) -> bool:
    """Whether there is a graph of a stage with as many timesteps as it needs, or some more."""
    needed = job.bucket(stage).timesteps
    rows = range(needed, needed + MAX_TIMESTEPS)
    return any(job.bucket(stage, count).name in names for count in rows)


def bucket_of(name: str) -> Bucket | None:
    """A bucket by its name."""
    match = _NAME.fullmatch(name)
    return match and Bucket(*map(int, match.groups()[:4]), guided=bool(match[5]))


@cache
def _sizes_of_tokens(video_tokens: int, audio_tokens: int) -> tuple[Size, ...]:
    """The one-stage sizes of usual shapes and rates that have so many tokens."""
    sizes = []
    for frames in range(1, _MAX_LATENT_FRAMES + 1):
        count = (frames - 1) * TIME_SCALE + 1
        rates = [rate for rate in FRAME_RATES if audio_latent_frames(count, rate) == audio_tokens]
        if not rates or video_tokens % frames:
            continue
        area = video_tokens // frames
        for rows in (n for n in range(1, area + 1) if area % n == 0):
            columns = area // rows
            if max(rows, columns) <= _MAX_ASPECT * min(rows, columns):
                sizes += [
                    Size(rows * SPACE_SCALE, columns * SPACE_SCALE, count, rate) for rate in rates
                ]
    return tuple(sizes)
