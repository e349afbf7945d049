"""Which fields of a job need or exclude each other. Refusals of flags, lines and requests, and the
tests of them, come from this list.

A term is a field, which holds if it has a value other than its default; "field=value"; "guidance",
any field of guidance; or one of these after "!", which holds if it does not.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from ltx_neuron.errors import FieldError

# Of a stream, in the order of StreamGuidance's fields.
VIDEO_GUIDANCE = (
    *("video_cfg_guidance_scale", "video_stg_guidance_scale", "video_stg_blocks"),
    *("a2v_guidance_scale", "video_rescale_scale", "video_skip_step"),
)
AUDIO_GUIDANCE = (
    *("audio_cfg_guidance_scale", "audio_stg_guidance_scale", "audio_stg_blocks"),
    *("v2a_guidance_scale", "audio_rescale_scale", "audio_skip_step"),
)
GUIDANCE = VIDEO_GUIDANCE, AUDIO_GUIDANCE
# Fields that sound alone does not have.
PICTURE_FIELDS = ("height", "width", *VIDEO_GUIDANCE, "v2a_guidance_scale")
PICTURE = " ".join(PICTURE_FIELDS)
_DEV = "\nFor the full (dev) checkpoint type {recipe} dev"
_OF_FILE = (
    "THESE cannot be combined with {video_path}: the video gets the file's size and frame rate, in"
    " one stage; leave out THESE"
)
_PART = "type the seconds to regenerate, for example {start_time} 0.5 {end_time} 1"
_STANDARD = (
    "THESE goes with NEEDS, got no OTHERS; type OTHERS as well, or leave out THESE",
    "THESE cannot be combined with OTHERS; leave one of them out",
)
_STRENGTHS = "distilled_lora_strength_stage_1 distilled_lora_strength_stage_2"


class Rule(NamedTuple):
    """Fields that cannot be without, or with, others. All are names, separated by spaces."""

    fields: str  # which of them hold is checked together
    needs: str = ""  # all of these must hold
    excludes: str = ""  # none of these may hold
    when: str = ""  # the rule is for jobs in which all of these hold
    # A message in place of the standard one. THESE: the fields that hold, LIST: with commas,
    # OTHERS: what is missing or excluded
    why: str = ""
    graphs: bool = True  # whether a graph depends on it

    @property
    def terms(self) -> set[str]:
        return {*f"{self.fields} {self.needs} {self.excludes} {self.when}".split()}

    def check(self, holds: Callable[[str], bool]) -> None:
        """Raise FieldError for a job that breaks the rule. holds: whether a term holds."""
        these = [field for field in self.fields.split() if holds(field)]
        if not these or not all(map(holds, self.when.split())):
            return
        others = [term for term in self.needs.split() if not holds(term)]
        others = others or [term for term in self.excludes.split() if holds(term)]
        if others:
            text = (self.why or _STANDARD[bool(self.excludes)]).replace(
                "LIST", _listed(these, ", ")
            )
            words = {"NEEDS": self.needs.split(), "THESE": these, "OTHERS": others}
            for word, terms in words.items():
                text = text.replace(word, _listed(terms))
            raise FieldError(text)


def _listed(terms: Iterable[str], separator: str = " ") -> str:
    """Terms for the text of a FieldError: {recipe} dev."""
    split = (term.partition("=") for term in terms)
    return separator.join(f"{{{field}}} {value}".rstrip() for field, _, value in split)


def check(
    holds: Callable[[str], bool], graphs: bool = False, among: Collection[str] | None = None
) -> None:
    """Raise FieldError for the first rule that is broken. graphs: check only rules on which graphs
    depend. among: check only rules on these fields alone."""
    for rule in RULES:
        if (rule.graphs or not graphs) and (among is None or rule.terms <= {*among}):
            rule.check(holds)


def _owned(owner: str, fields: str) -> Rule:
    return Rule(fields, needs=owner, why="THESE needs OTHERS FILE")


RULES = (
    # Size and length.
    _owned("audio_path", "audio_start_time audio_max_duration audio_bed"),
    Rule("sound_only", excludes=PICTURE, why="{sound_only} makes no picture: leave out OTHERS"),
    Rule("num_frames", excludes="auto_duration", when="!video_path"),
    Rule(
        "height width num_frames frame_rate two_stage",
        excludes="video_path",
        when="!extend",
        why=_OF_FILE,
    ),
    Rule("height width frame_rate two_stage", excludes="video_path", why=_OF_FILE),
    Rule(
        "upscale_video",
        excludes="num_frames frame_rate auto_duration tail_frames two_stage upscale video_path"
        " audio_path video_conditioning reference_video reference_audio sound_only dfr",
        why="THESE has its own length, frame rate and sound, in one stage; leave out OTHERS",
    ),
    # LoRAs and guidance.
    Rule(_STRENGTHS, needs="distilled_lora", why="THESE needs {distilled_lora} PATH"),
    Rule(_STRENGTHS, excludes="recipe=distilled"),
    Rule(
        " ".join(VIDEO_GUIDANCE + AUDIO_GUIDANCE),
        excludes="recipe=distilled",
        why="the distilled recipe takes no LIST: a distilled checkpoint runs without guidance;"
        f" with guidance it gives noise.{_DEV}",
    ),
    Rule(
        " ".join(AUDIO_GUIDANCE),
        excludes="audio_path",
        why="LIST cannot be combined with {audio_path}: guidance does not apply to a given sound;"
        " leave it out",
    ),
    # Videos and voices.
    _owned("video_path", "start_time end_time regenerate extend"),
    Rule(
        "start_time end_time regenerate",
        excludes="extend",
        why="THESE cannot be combined with {extend}, which keeps the whole video; leave out THESE",
    ),
    Rule("video_path", needs="start_time", when="!extend", why=f"THESE needs OTHERS: {_PART}"),
    Rule("video_path", needs="end_time", when="!extend", why=f"THESE needs OTHERS: {_PART}"),
    _owned("reference_audio", "reference_audio_max_duration identity_guidance_scale"),
    Rule(
        "reference_audio",
        excludes="reference_video",
        why="THESE does not go with OTHERS, whose own voice is kept; leave one of them out",
    ),
    _owned("reference_video", "reference_strength"),
    # What excludes others.
    Rule(
        "upscale",
        excludes="two_stage",
        why="{upscale} is for one-stage runs; {two_stage} upsamples between its stages already",
    ),
    Rule(
        "reference_audio",
        excludes="audio_path",
        why="THESE does not go with OTHERS: that sound is what is heard, nothing is spoken; leave"
        " one of them out",
    ),
    Rule(
        "video_path",
        excludes="audio_path image two_stage upscale tail_frames"
        # These need one of the fields above.
        " ic_lora video_conditioning conditioning_attention_mask skip_stage_2 images_as_guides"
        " sampler=res_2s",
    ),
    # These files have a length. Sound alone has one context, and the duration head reads two.
    Rule("auto_duration", excludes="audio_path video_path reference_video sound_only"),
    Rule("nag_scale", excludes="recipe=dev"),  # whose guidance reads the negative prompt
    Rule("sampler=res_2s", excludes="audio_path video_conditioning"),
    Rule(  # Upstream has no pipeline of this sampler with an input.
        "sampler=gradient_estimation",
        excludes="audio_path video_path video_conditioning reference_audio sound_only",
    ),
    Rule("stage_2_ic_lora", excludes="skip_stage_2"),
    Rule("reference_audio", excludes="video_path sound_only"),
    Rule(
        "reference_video",
        excludes="audio_path video_path ic_lora video_conditioning conditioning_attention_mask"
        " skip_stage_2 tail_frames",
    ),
    Rule("motion_speed", excludes="video_path reference_video sound_only"),
    Rule("text_embeddings", excludes="prompt", graphs=False),
    Rule(  # Its file determines the size.
        "text_embeddings",
        excludes="height width num_frames two_stage image lora audio_path video_path"
        " reference_video reference_audio upscale tail_frames num_generated_keyframes"
        " dfr tile conditioning_attention_mask nag_scale motion_speed auto_duration",
    ),
    Rule(
        "alpha_gen",
        excludes="two_stage audio_path video_path reference_video reference_audio sound_only"
        " upscale num_generated_keyframes dfr sampler=gradient_estimation tail_frames",
    ),
    Rule(
        "sound_only",
        excludes="audio_path video_path reference_video image two_stage upscale ic_lora"
        " video_conditioning tail_frames",
    ),
    Rule(
        "dfr",
        excludes="video_path audio_path reference_video reference_audio ic_lora video_conditioning"
        " num_generated_keyframes upscale skip_stage_2 images_as_guides tail_frames motion_speed"
        " sound_only sampler=res_2s sampler=gradient_estimation guidance",
    ),
    Rule("dfr", excludes="negative_prompt", when="!nag_scale"),
    Rule(
        "chunked",
        excludes="video_path dfr upscale tail_frames sound_only images_as_guides reference_audio"
        " conditioning_attention_mask sampler=res_2s sampler=gradient_estimation text_embeddings"
        " alpha_gen",
    ),
    Rule("num_generated_keyframes", excludes="video_path sound_only"),
    Rule("decode_with_keyframes", excludes="upscale dfr"),  # DFR's are always read
    # What needs others.
    Rule("decode_with_keyframes", needs="num_generated_keyframes"),
    Rule("prompts", needs="chunked"),
    Rule("prompts", excludes="prompt"),
    Rule("nag_alpha", needs="nag_scale"),
    Rule("nag_tau", needs="nag_scale"),
    Rule("tile_height", needs="tile", when="!upscale_video"),
    Rule("tile_width", needs="tile", when="!upscale_video"),
    Rule("temporal_upsample_rounds", needs="dfr"),
    Rule("detailing_lora", needs="dfr"),
    Rule("upscale_video", needs="ic_lora recipe=distilled"),
    Rule(
        "ic_lora",
        needs="video_conditioning",
        when="recipe=distilled !reference_audio !upscale_video",
    ),
    Rule("video_conditioning", needs="ic_lora"),
    Rule("conditioning_attention_mask", needs="video_conditioning"),
    Rule("images_as_guides", needs="two_stage recipe=dev"),
    Rule("sampler=res_2s", needs="two_stage recipe=dev"),
    Rule("sampler=gradient_estimation", needs="recipe=dev"),
    Rule("skip_stage_2", needs="two_stage"),
    Rule("stage_2_ic_lora", needs="video_conditioning two_stage recipe=distilled"),
    Rule("tile", needs="video_conditioning recipe=distilled"),
    Rule("dfr", needs="two_stage"),
    Rule("text_embeddings", needs="video_conditioning recipe=distilled"),
    Rule("high_quality no_keyframes input_colorspace exr_colorspace", needs="text_embeddings"),
    Rule("alpha_gen", needs="video_conditioning recipe=dev"),
    Rule("dfr", needs="detailing_lora", when="recipe=distilled"),
    Rule("reference_video", needs="two_stage recipe=distilled"),
    Rule("sound_only", needs="recipe=dev"),
    Rule(
        "negative_prompt",
        needs="nag_scale",
        when="recipe=distilled",
        why="{negative_prompt} with the distilled recipe needs {nag_scale}; type {nag_scale} 11 as"
        f" well.{_DEV}",
    ),
    Rule(
        "identity_guidance_scale",
        excludes="recipe=distilled",
        why="THESE is of the dev recipe, as the other scales are; leave it out, or type {recipe}"
        " dev",
    ),
    Rule(
        "reference_audio",
        needs="ic_lora",
        why="{reference_audio} goes with {ic_lora}, got no {ic_lora}; type {ic_lora} PATH as well,"
        " or leave out {reference_audio}",
        graphs=False,
    ),
)
