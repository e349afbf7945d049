"""Which fields need or exclude each other: each row of the one list, through the Python API, a line
of a prompts file and the flags."""

import pytest
from typed import parsed

from ltx_neuron import flags
from ltx_neuron.errors import FieldError
from ltx_neuron.job import Job
from ltx_neuron.sampling import rules
from ltx_neuron.sampling.spec import GuidanceFields, JobFields, to_flags

FILE = __file__
# A value of each field of a rule that is not its default.
VALUES = {
    **{name: 2 for name in GuidanceFields.model_fields if name.endswith(("scale", "step"))},
    **dict.fromkeys(("video_stg_blocks", "audio_stg_blocks"), (1,)),
    **dict.fromkeys(("audio_path", "video_path", "reference_video", "reference_audio"), FILE),
    **dict.fromkeys(("video_conditioning", "conditioning_attention_mask"), ((FILE, 1.0),)),
    **dict.fromkeys(("lora", "ic_lora", "distilled_lora", "detailing_lora"), ((FILE,),)),
    **dict.fromkeys(("two_stage", "sound_only", "skip_stage_2", "stage_2_ic_lora", "tile"), True),
    **dict.fromkeys(("images_as_guides", "dfr", "decode_with_keyframes"), True),
    **dict.fromkeys(("height", "width", "tile_height", "tile_width"), 64),
    **dict.fromkeys(("audio_start_time", "start_time", "end_time"), 0.0),
    **dict.fromkeys(("audio_max_duration", "extend", "reference_audio_max_duration"), 1.0),
    **dict.fromkeys(("num_generated_keyframes", "temporal_upsample_rounds"), 1),
    **dict.fromkeys(("distilled_lora_strength_stage_1", "distilled_lora_strength_stage_2"), 0.3),
    **{"image": [[FILE]], "audio_bed": -50.0, "regenerate": "video", "nag_scale": 11.0},
    **{"nag_alpha": 0.5, "nag_tau": 5.0, "num_frames": 9, "frame_rate": 25.0, "upscale": "both"},
    **{"auto_duration": (1, 2), "negative_prompt": "grey", "motion_speed": 0.5, "tail_frames": 8},
    **{"identity_guidance_scale": 2.0, "reference_strength": 0.5},
}


def values_of(*terms: str) -> dict:
    """The fields of a job in which these terms hold."""
    values = {}
    for term in terms:
        name, _, value = term.partition("=")
        name = "video_skip_step" if name == "guidance" else name
        if not name.startswith("!"):
            values[name] = value or VALUES[name]
    return values


def ways(values: dict):
    """The job of these values by each way in."""
    yield (job := Job.validated(values))
    line = {name: value for name, value in job.to_json().items() if name in values}
    yield Job().updated(line)
    yield flags.spec(parsed(*to_flags(line, line), "--recipe", job.recipe))


CASES = [(rule, field) for rule in rules.RULES for field in rule.fields.split()]


@pytest.mark.parametrize(("rule", "field"), CASES, ids=lambda case: str(case)[:60])
def test_a_rule_refuses_a_field_without_what_it_needs_and_with_what_it_excludes(rule, field):
    needs, excludes, when = (x.split() for x in (rule.needs, rule.excludes, rule.when))
    wrong = [[x for x in needs if x != missing] for missing in needs]
    wrong += [[excluded] for excluded in excludes]
    other = {"recipe=dev": "recipe=distilled", "recipe=distilled": "recipe=dev"}
    for terms, named in zip(wrong, [*needs, *excludes], strict=True):
        against = [other[named]] if named in needs and named in other else []
        for job in ways(values_of(field, *when, *terms, *against)):
            with pytest.raises(FieldError) as error:
                rule.check(job.holds)
            names = {field.partition("=")[0], named.partition("=")[0]}
            assert names & {*error.value.fields} and "THESE" not in str(error.value)
            with pytest.raises(FieldError):
                rules.check(job.holds)
    right = [*needs, *(other[x] for x in excludes if x in other)]
    for job in ways(values_of(field, *when, *right)):
        rule.check(job.holds)
    for job in ways(values_of(*needs, *excludes[:1])):  # the field has its default
        if len(rule.fields.split()) == 1 and not job.holds(field):
            rule.check(job.holds)


def test_the_rules_are_on_fields_of_a_job():
    names = {term.lstrip("!").partition("=")[0] for rule in rules.RULES for term in rule.terms}
    assert names - {"guidance"} <= JobFields.model_fields.keys()
    assert all(bool(rule.needs) != bool(rule.excludes) for rule in rules.RULES)
