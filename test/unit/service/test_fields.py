"""A request's fields: what OpenAI's client and others send, what of it is refused and how; the
compiled sizes, and which of them a request means."""

import base64
import json
import re
from io import BytesIO

import pytest
from conftest import ROOT
from hypothesis import given, settings, strategies
from PIL import Image

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from jobs import make_job
from starlette.datastructures import UploadFile

from ltx_neuron.errors import UserError
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.spec import GuidanceFields, JobFields, LoraFields
from ltx_neuron.service import fields, picture, sandbox
from ltx_neuron.service.api_error import ApiError
from ltx_neuron.service.fields import KNOWN, HeldImage, VideoRequest, read_request
from ltx_neuron.service.jobs import job_of
from ltx_neuron.service.limits import TokenBucket
from ltx_neuron.service.sizes import RequestedSize
from ltx_neuron.service.tokens import LOCAL, Tokens, new_token

PROMPT = {"prompt": "waves crash on the shore"}
PNG_URL = "data:image/png;base64," + base64.b64encode(b"picture").decode()


def read(**said):
    return read_request(PROMPT | said)


URLS = {
    "input_reference": "image_url",
    "audio_reference": "audio_url",
    "video_reference": "video_url",
    "video_conditioning": "video_url",
    "conditioning_attention_mask": "video_url",
    "reference_video": "video_url",
}


def refused(**said) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**said)
    return caught.value


# --- fields ---------------------------------------------------------------------------------------


def test_the_size_auto_says_nothing_beside_sides():
    assert read(size="auto", width=768, height=512) == read(width=768, height=512)


def test_extra_params_within_extra_params_is_an_unknown_field():
    for nested in ({}, {"seed": 1}, None, "{}"):
        assert refused(extra_params={"extra_params": nested}).code == "unknown_field"


NAMES = [*sorted(fields.KNOWN), "extra_params", *fields.UNSUPPORTED, "nonsense", "", "a" * 100]
ENDS = [None, True, 0, -1, 1e308, 0.5, "", "7", "{}", "[[]]", PNG_URL, "x" * 40]
# JSON values: lists and objects within each other, under names that requests have.
NESTED = strategies.recursive(
    strategies.sampled_from(ENDS),
    lambda value: (
        strategies.lists(value, max_size=3) | strategies.dictionaries(strategies.sampled_from(NAMES), value, max_size=3)
    ),
)


BODIES = strategies.dictionaries(strategies.sampled_from(sorted(KNOWN)), NESTED, min_size=1)


@settings(deadline=None)
@given(BODIES | strategies.dictionaries(strategies.sampled_from(NAMES), NESTED, max_size=3))
def test_a_body_however_nested_is_read_or_refused_and_nothing_else(body):
    try:
        read(**body)
    except ApiError as refusal:
        assert refusal.status == 400


def test_the_size_is_read_however_it_is_said():
    assert read(size="768x512", seconds="5").requested_size == RequestedSize(height=512, width=768, seconds=5.0)
    as_numbers = read(width=768, height="512", num_frames="121", fps="24", two_stage="true")
    assert as_numbers.requested_size == RequestedSize(
        height=512, width=768, num_frames=121, frame_rate=24.0, two_stage=True
    )
    assert read(size="", seconds=None).requested_size == RequestedSize()


# Values that are JSON or a form's text, of fields that a job does not have or that have limits of their own; those of
# a job: sampling/test_refusals.py
REFUSED = {
    "size": ("768 x 512", "-1x2", "999999x1", ["768x512"]),
    "seconds": ("four", "-4", "nan", "inf", True, "1" * 400),
    "num_frames": (9.5, 10**12),
    "two_stage": ("maybe", 7),
    "recipe": ("fast",),
    "model": (["a"],),
    "images": ("{}", "[" * 100_000),
    "video_stg_blocks": ("[1",),
    "negative_prompt": ("x" * 10_001,),
}


@pytest.mark.parametrize(("param", "value"), [(param, value) for param in REFUSED for value in REFUSED[param]])
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_field(param, value):
    error = refused(**{param: value})
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("prompt", [None, "", "  ", 5, ["a"], "x" * 10_001, "x" * 1_000_000])
def test_a_prompt_must_be_there_and_short(prompt):
    with pytest.raises(ApiError) as caught:
        read_request({"prompt": prompt})
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    assert len(json.dumps(caught.value.content)) < 500


def test_an_unknown_field_is_refused_with_the_known_ones():
    error = refused(sead="5")
    assert (error.code, error.param) == ("unknown_field", "sead")
    assert "seed" in error.message


def test_what_is_not_supported_is_refused_by_name():
    assert refused(lora="x").code == "feature_not_supported"
    for name, key in URLS.items():
        assert refused(**{name: {"file_id": "f"}}).code == "feature_not_supported"
        for url in ("http://169.254.169.254/", "file:///etc/passwd", "/etc/passwd"):
            assert refused(**{name: {key: url}}).code == "feature_not_supported", name


def test_two_fields_that_say_the_same_are_refused():
    assert refused(seconds="5", num_frames=121).param == "seconds"
    assert refused(fps=24, frame_rate=24).param == "frame_rate"
    assert refused(num_steps=8, num_inference_steps=8).param == "num_inference_steps"
    assert refused(size="64x64", width=64).param == "size"
    assert refused(seed=1, extra_params={"seed": 2}).param == "seed"


def test_extra_params_are_fields_as_well():
    assert read(extra_params='{"seed": 5, "fps": 25}').seed == 5
    assert read(extra_params={"fps": 25}).requested_size.frame_rate == 25
    for other in ("[1]", [1], [], "[]", 0, "0", False, "a"):
        assert refused(extra_params=other).param == "extra_params"
    for none in (None, "", {}, "{}"):
        assert read(extra_params=none, seed=5).seed == 5


def test_every_field_of_a_job_can_be_said_but_files_by_their_paths_and_loras_by_theirs():
    uploads = {"image", "audio_path", "video_path"}  # images, audio_reference, video_reference
    # No size that is offered has the graphs or weights of these.
    no_graphs = {"images_as_guides", "skip_stage_2", "sampler", "sound_only"}
    no_graphs |= {"dfr", "temporal_upsample_rounds"}
    loras = set(LoraFields.model_fields)  # a lora_set names them
    left = set(JobFields.model_fields) - set(VideoRequest.model_fields)
    no_graphs |= {"auto_duration"}  # a request needs a known length
    assert left == uploads | no_graphs | loras


LIMITS = {
    "seconds": {"minimum": 0.01, "maximum": 3600},
    "height": {"minimum": 1, "maximum": 16_384},
    "num_frames": {"minimum": 1, "maximum": 100_000},
    "frame_rate": {"minimum": 1, "maximum": 1000},
    "seed": {"minimum": -(2**63), "exclusiveMaximum": 2**64},
    "num_inference_steps": {"minimum": 1, "maximum": 64},
    "video_skip_step": {"minimum": 0},
    "audio_stg_blocks": {"maxItems": 256},
    "prompt": {"maxLength": 10_000},
    "recipe": {"enum": ["distilled", "dev"]},
    "upscale": {"enum": ["spatial", "temporal", "both"]},
    "images": {"maxItems": 8},
    "fps": {"minimum": 1, "maximum": 1000},
}


def test_the_schema_of_a_body_has_every_field_with_its_limits():
    schema = VideoRequest.model_json_schema()
    fields = schema["properties"]
    assert set(fields) == KNOWN | {"extra_params"}
    assert schema["required"] == ["prompt"] and schema["additionalProperties"] is False
    for name, limits in LIMITS.items():
        described = fields[name] | fields[name].get("anyOf", [{}])[0]
        assert limits.items() <= described.items(), name
    assert not any("default:" in field.get("description", "") for field in fields.values())
    image = schema["$defs"]["HeldImage"]["properties"]
    assert set(image) == {"image_url", "frame", "strength", "crf"}
    kinds = [(kind["type"], kind.get("format")) for kind in fields["input_reference"]["anyOf"]]
    assert {("object", None), ("string", None), ("string", "binary")} <= set(kinds)
    assert (image["strength"]["maximum"], image["crf"]["anyOf"][0]["maximum"]) == (1, 51)


def test_the_documented_fields_are_those_of_the_schema():
    table = (ROOT / "docs/serving.md").read_text().partition("| field | meaning |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented <= fields.KNOWN | {"extra_params"}
    said = {name for name in VideoRequest.model_fields if not documented & {*fields._NAMES[name]}}
    assert said <= set(GuidanceFields.model_fields)  # "and the other guidance flags"


def test_a_request_makes_the_job_that_the_command_makes():
    said = read(seed="5", negative_prompt="rain", guidance_scale="2.5", video_stg_blocks="[1, 2]")
    job = said.job.replaced(recipe="dev")
    assert (job.prompt, job.seed, job.negative_prompt) == (PROMPT["prompt"], 5, "rain")
    assert job.guidance.video.cfg_scale == 2.5 and job.guidance.video.stg_blocks == (1, 2)


def test_a_line_makes_the_job_that_the_command_makes(tmp_path):
    line = {"prompt": "waves", "height": 64, "width": 96, "num_frames": 9, "recipe": "dev"}
    job = job_of(line | {"image": [["image-0.png", 0, 0.5, 33]]}, tmp_path)
    assert job.size == Size(64, 96, 9)
    assert job.images == (ImageCondition(str(tmp_path / "image-0.png"), 0, 0.5, 33),)


def test_a_name_in_a_line_leads_out_of_no_folder(tmp_path):
    job = job_of({"prompt": "waves", "image": [["../../etc/passwd", 0]]}, tmp_path)
    assert job.images[0].path == str(tmp_path / "passwd")


def test_images_come_as_files_as_data_urls_and_as_openai_writes_objects_in_a_form():
    first = {"input_reference": HeldImage(image_url=PNG_URL)}
    assert first["input_reference"].data == b"picture"
    assert read(input_reference=UploadFile(BytesIO(b"picture"))).held == first
    assert read(input_reference={"image_url": PNG_URL}).held == first
    assert read(**{"input_reference[image_url]": PNG_URL}).held == first
    several = [{"image_url": PNG_URL, "frame": 8, "strength": 0.5}]
    wanted = {"images[0]": HeldImage(**several[0])}
    assert read(images=several).held == read(images=json.dumps(several)).held == wanted


def test_a_body_takes_a_rate_as_a_fraction_and_the_last_frame_as_minus_one():
    request = read(fps="30000/1001", images=[{"image_url": PNG_URL, "frame": -1}])
    assert request.requested_size.frame_rate == 30000 / 1001
    assert [held.frame for held in request.held.values()] == [-1]
    assert refused(images=[{"image_url": PNG_URL, "frame": -2}]).param == "images[0]"


def test_sounds_and_videos_come_as_files_as_data_urls_and_as_objects_in_a_form():
    for name, key in [*URLS.items()][1:]:
        for said in (
            {name: UploadFile(BytesIO(b"picture"))},
            {name: PNG_URL},
            {name: {key: PNG_URL}},
            {f"{name}[{key}]": PNG_URL},
            {f"{name}[{key}]": UploadFile(BytesIO(b"picture"))},
        ):
            (sent,) = read(**said).media
            assert sent.param.startswith(name) and sent.held.file.read() == b"picture"
    several = [{"video_url": PNG_URL, "strength": 0.5}, {"video_url": PNG_URL}]
    for said in (several, json.dumps(several)):
        sent = read(video_conditioning=said).media
        assert [(each.param, each.held.strength) for each in sent] == [
            ("video_conditioning[0]", 0.5),
            ("video_conditioning[1]", 1.0),
        ]
    assert refused(video_conditioning=several * 3).param == "video_conditioning"
    error = refused(video_conditioning=[{"video_url": PNG_URL, "strength": 2}])
    assert error.param == "video_conditioning[0]"
    assert "audio_url" in refused(audio_reference={"video_url": PNG_URL}).message


def test_images_that_cannot_be_are_refused_by_their_place():
    assert refused(images=[{"image_url": PNG_URL}] * 9).param == "images"
    assert refused(images=[{"path": "/etc/passwd"}]).param == "images[0]"
    assert refused(images=[{"image_url": PNG_URL}, {"frame": 1}]).param == "images[1]"
    assert refused(input_reference={"image_url": "data:image/png;base64,%%"}).status == 400
    assert refused(images=[{"image_url": PNG_URL, "strength": 2}]).param == "images[0]"
    assert "images[1].image_url" in refused(images=[{"image_url": PNG_URL}, {"frame": 1}]).message


def test_images_and_references_are_counted_together_and_not_repeated_in_the_message():
    images = [{"image_url": PNG_URL}] * 8
    assert len(read(images=images).held) == 8
    assert len(read(images=images[1:], input_reference=PNG_URL).held) == 8
    assert "got 9 images" in refused(images=images, input_reference=PNG_URL).message
    for said in (images * 2, json.dumps(images * 2)):
        assert refused(images=said).message == "images: got 16 values, wanted at most 8"


@pytest.mark.parametrize("name", ["images", "video_stg_blocks", "audio_stg_blocks"])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_list_that_is_too_long_is_refused_before_its_values_are_looked_at(name, as_text):
    said = ["x"] * 100_000
    message = refused(**{name: json.dumps(said) if as_text else said}).message
    assert message.startswith(f"{name}: got 100000 values, wanted at most")


@pytest.mark.parametrize("name", ["seed", "images", "video_stg_blocks", "model"])
def test_lists_nested_deeper_than_python_recurses_are_refused(name):
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert refused(**{name: nested}).status == 400


def test_the_digest_is_of_all_that_was_said():
    digests = [
        read().digest,
        read(seed=5).digest,
        read(size="64x64").digest,
        read(input_reference={"image_url": PNG_URL}).digest,
        read(audio_reference=PNG_URL).digest,
        read(video_reference=PNG_URL).digest,
        read(video_conditioning=PNG_URL).digest,
        read(video_conditioning={"video_url": PNG_URL, "strength": 0.5}).digest,
        read(video_reference="data:video/mp4;base64,AAAA").digest,
        read_request({"prompt": "birds"}).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert read(seed=5).digest == read(seed=5).digest


def test_a_refusal_with_characters_that_utf8_lacks_can_be_sent():
    content = refused(**{"\ud800": "x"}).content
    assert json.dumps(content, ensure_ascii=False).encode()


def test_a_set_of_loras_is_a_name():
    assert read(lora_set="anime").lora_set == "anime"
    assert refused(lora_set=["anime"]).param == "lora_set"
    assert read(lora_set="anime").digest != read().digest


# --- pictures -------------------------------------------------------------------------------------


def image_file(path, size=(8, 6), mode="RGB", kind="PNG"):
    Image.effect_noise(size, 50).convert(mode).save(path, format=kind)
    return path


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "PNG"), ("P", "PNG"), ("RGB", "JPEG"), ("CMYK", "JPEG"), ("L", "WEBP")]
)
def test_a_decoded_picture_has_the_pixels_of_the_file(tmp_path, mode, kind):
    source, target = image_file(tmp_path / "a", mode=mode, kind=kind), tmp_path / "b.png"
    picture.decode(source, target)
    with Image.open(source) as before, Image.open(target) as after:
        assert after.format == "PNG"
        assert before.convert("RGB").tobytes() == after.convert("RGB").tobytes()


def test_what_is_no_picture_is_refused_and_nothing_is_written(tmp_path):
    source, target = tmp_path / "video.png", tmp_path / "b.png"
    whole = BytesIO()
    Image.new("RGB", (64, 64)).save(whole, format="PNG")
    for content in (b"", b"\0\0\0\x18ftypmp42", whole.getvalue()[:60], b"%PDF-1.4"):
        source.write_bytes(content)
        with pytest.raises(sandbox.BadFile, match="not a readable picture"):
            picture.decode(source, target)
        assert not target.exists()


def test_a_bomb_is_refused_by_its_header(tmp_path):
    source = image_file(tmp_path / "bomb.png", size=(300, 300))
    with pytest.raises(sandbox.BadFile, match="300x300 pixels, wanted at most 1000"):
        picture.decode(source, tmp_path / "b.png", max_pixels=1000)


# --- tokens and rates -----------------------------------------------------------------------------


def test_a_token_is_told_once_and_kept_as_a_hash(tmp_path):
    path = tmp_path / "tokens.json"
    ada, bob = new_token(path, "ada"), new_token(path, "bob")
    assert ada not in path.read_text() and path.stat().st_mode & 0o077 == 0
    tokens = Tokens.load(path)
    assert tokens.owner_of(f"Bearer {ada}") == "ada" and tokens.owner_of(f"bearer {bob}") == "bob"
    for wrong in (None, "", ada, f"Basic {ada}", f"Bearer {ada[:-1]}", "Bearer ", "Bearer \udcff"):
        assert tokens.owner_of(wrong) is None
    again = new_token(path, "ada")
    assert Tokens.load(path).owner_of(f"Bearer {ada}") is None
    assert Tokens.load(path).owner_of(f"Bearer {again}") == "ada"


def test_without_tokens_there_is_one_owner_and_a_broken_file_is_refused(tmp_path):
    assert Tokens.load(None).owner_of(None) == LOCAL
    for content in ("{}", '{"tokens": {}}', '{"tokens": {"ada": "secret"}}', '{"tokens": []}'):
        (tmp_path / "tokens.json").write_text(content)
        with pytest.raises(UserError, match="--new-token NAME"):
            Tokens.load(tmp_path / "tokens.json")
    with pytest.raises(UserError, match="wanted 1 to 64 characters"):
        new_token(tmp_path / "tokens.json", "../ada")


def test_an_owner_may_ask_so_often_and_no_more(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    rate = TokenBucket(per_minute=60)
    for _ in range(20):
        rate.take("ada")
    with pytest.raises(ApiError) as caught:
        rate.take("ada")
    assert caught.value.status == 429 and caught.value.headers["x-should-retry"] == "true"
    rate.take("bob")
    now[0] += 1
    rate.take("ada")


def test_a_job_of_the_default_fields_is_the_jobs_own_default(tmp_path):
    assert job_of(PROMPT, tmp_path) == make_job(PROMPT["prompt"])
