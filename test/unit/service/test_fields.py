"""A request's fields: what OpenAI's client and others send, what of it is refused and how."""

import base64
import json
import re
from io import BytesIO

import pytest
from conftest import ROOT

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from jobs import make_job
from starlette.datastructures import UploadFile

from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.spec import GuidanceFields, JobFields, LoraFields
from ltx_neuron.service import fields as request_fields
from ltx_neuron.service.api_error import ERRORS, ApiError
from ltx_neuron.service.fields import KNOWN, HeldImage, VideoRequest, read_request
from ltx_neuron.service.jobs import job_of
from ltx_neuron.service.sizes import RequestedSize

PROMPT = {"prompt": "waves crash on the shore"}
PNG_URL = "data:image/png;base64," + base64.b64encode(b"picture").decode()
IMAGE, VIDEO = {"image_url": PNG_URL}, {"video_url": PNG_URL}
URLS = {"input_reference": "image_url", "audio_reference": "audio_url"}
URLS |= dict.fromkeys(("video_reference", "reference_video"), "video_url")
URLS |= dict.fromkeys(("video_conditioning", "conditioning_attention_mask"), "video_url")


def read(**fields) -> VideoRequest:
    return read_request(PROMPT | fields)


def spellings():
    upload = UploadFile(BytesIO(b"picture"))
    yield {"width": 768, "height": 512}, {"size": "auto", "width": 768, "height": "512"}
    numbers = {"num_frames": 121, "frame_rate": 24.0, "two_stage": True}
    yield numbers, {"num_frames": "121", "fps": "24", "two_stage": "true", "size": "", "seconds": None}
    yield {"frame_rate": 30000 / 1001}, {"fps": "30000/1001"}
    yield {"video_cfg_guidance_scale": 2.5}, {"guidance_scale": "2.5"}
    yield {"seed": 5, "frame_rate": 25}, {"extra_params": '{"seed": 5, "fps": 25}'}
    for nothing in (None, "", {}, "{}"):
        yield {"seed": 5}, {"extra_params": nothing, "seed": 5}
    several = [IMAGE | {"frame": 8, "strength": 0.5}, IMAGE | {"frame": -1}]
    yield {"images": several}, {"images": json.dumps(several)}
    weighted = [VIDEO | {"strength": 0.5}, VIDEO]
    yield {"video_conditioning": weighted}, {"video_conditioning": json.dumps(weighted)}
    for name, key in URLS.items():
        for field, value in ((name, upload), (name, PNG_URL), (f"{name}[{key}]", PNG_URL), (f"{name}[{key}]", upload)):
            yield {name: {key: PNG_URL}}, {field: value}


@pytest.mark.parametrize(("fields", "otherwise"), [*spellings()])
def test_a_field_is_the_same_as_a_file_a_data_url_a_forms_text_or_an_extra_parameter(fields, otherwise):
    assert read(**fields).digest == read(**otherwise).digest != read().digest


def test_a_request_has_the_size_the_job_and_the_files_that_it_names():
    assert read(size="768x512", seconds="5").requested_size == RequestedSize(height=512, width=768, seconds=5.0)
    job = read(seed="5", negative_prompt="rain", guidance_scale="2.5", video_stg_blocks="[1, 2]").job
    video = job.replaced(recipe="dev").guidance.video
    assert (job.prompt, job.seed, job.negative_prompt) == (PROMPT["prompt"], 5, "rain")
    assert (video.cfg_scale, video.stg_blocks) == (2.5, (1, 2))
    held = read(input_reference=PNG_URL, images=[IMAGE | {"frame": -1, "strength": 0.5, "crf": 20}] * 7).held
    last = HeldImage(image_url=PNG_URL, frame=-1, strength=0.5, crf=20)
    assert held["input_reference"] == HeldImage(image_url=PNG_URL) and held["images[6]"] == last
    assert last.data == b"picture"
    media = read(video_conditioning=[VIDEO | {"strength": 0.5}, VIDEO], audio_reference=PNG_URL).media
    assert [file.param for file in media] == ["audio_reference", "video_conditioning[0]", "video_conditioning[1]"]
    assert {file.held.file.read() for file in media} == {b"picture"}
    assert [file.held.strength for file in media[1:]] == [0.5, 1.0]


def test_requests_that_differ_in_any_field_or_file_have_other_digests():
    fields = [{}, {"seed": 5}, {"size": "64x64"}, {"prompt": "birds"}, {"lora_set": "anime"}]
    fields += [{name: url} for name in URLS for url in (PNG_URL, "data:video/mp4;base64,AAAA")]
    fields += [{"video_conditioning": VIDEO | {"strength": 0.5}}, {"images": [IMAGE]}, {"images": [IMAGE] * 2}]
    fields += [{"images": [IMAGE | more]} for more in ({"frame": 8}, {"strength": 0.5}, {"crf": 20})]
    assert len({read(**body).digest for body in fields}) == len(fields)


def test_the_params_of_a_queued_job_make_the_job_of_the_command_and_lead_out_of_no_folder(tmp_path):
    assert job_of(PROMPT, tmp_path) == make_job(PROMPT["prompt"])
    params = {"prompt": "waves", "height": 64, "width": 96, "num_frames": 9, "recipe": "dev"}
    job = job_of(params | {"image": [["image-0.png", 0, 0.5, 33], ["../../etc/passwd", 8]]}, tmp_path)
    assert job.size == Size(64, 96, 9)
    image = ImageCondition(str(tmp_path / "image-0.png"), 0, 0.5, 33)
    assert job.images == (image, ImageCondition(str(tmp_path / "passwd"), 8))


NESTED_LISTS: list = []
for _ in range(100_000):  # deeper than Python recurses
    NESTED_LISTS = [NESTED_LISTS]

FIRST = {name: name for name in URLS} | {"video_conditioning": "video_conditioning[0]"}
INVALID, UNKNOWN, NOT_SUPPORTED = "invalid_value", "unknown_field", "feature_not_supported"
REFUSALS = [
    *(({"prompt": prompt}, "missing_field", "prompt", "send a text") for prompt in ("  ", 5)),
    ({"prompt": "x" * 1_000_000}, "prompt_too_long", "prompt", "got 1000000 characters"),
    *(({"seconds": value}, INVALID, "seconds", "seconds: got") for value in ("nan", "inf", True, "1" * 400, 0)),
    ({"size": ["768x512"]}, INVALID, "size", "WIDTHxHEIGHT"),
    ({"seed": 2**64}, INVALID, "seed", f"seed: got {2**64}"),
    ({"next_prompts": ["x" * 10_001]}, INVALID, "next_prompts", "next_prompts.0: got"),
    *(({name: "[" * 100_000}, INVALID, name, "JSON") for name in ("images", "video_conditioning", "video_stg_blocks")),
    *(({name: NESTED_LISTS}, INVALID, name, "") for name in ("seed", "video_stg_blocks", "model")),
    ({"images": NESTED_LISTS}, INVALID, "images[0]", ""),
    ({"sead": "5"}, UNKNOWN, "sead", "seed"),
    ({"\ud800": "x"}, UNKNOWN, "\ud800", ""),
    ({"extra_params": {"extra_params": {}}}, UNKNOWN, "extra_params", ""),
    *(({"extra_params": other}, INVALID, "extra_params", "JSON object") for other in ("[1]", 0, "a")),
    ({"lora": "x"}, NOT_SUPPORTED, "lora", ""),
    ({"input_reference": {"file_id": "f"}}, NOT_SUPPORTED, "input_reference", "file_id"),
    *(({name: {key: "http://10.0.0.1/"}}, NOT_SUPPORTED, FIRST[name], "data URLs") for name, key in URLS.items()),
    *(({"input_reference": value}, INVALID, "input_reference", "wanted") for value in ({"image_url": 5}, [[]])),
    ({"input_reference": "/etc/passwd"}, NOT_SUPPORTED, "input_reference", "only data URLs"),
    ({"seconds": "5", "num_frames": 121}, INVALID, "seconds", "set the same value"),
    ({"seed": 1, "extra_params": {"seed": 2}}, INVALID, "seed", "leave one out"),
    ({"images[]": [], "images": []}, INVALID, "images", "sent twice"),
    ({"video_reference": PNG_URL, "video_reference[a]": 1}, INVALID, "video_reference", "as a value and as an object"),
    ({"images": [{"path": "/etc/passwd"}]}, INVALID, "images[0]", "images[0].image_url"),
    ({"input_reference": {"image_url": "data:image/png;base64,%%"}}, INVALID, "input_reference", "base64"),
    ({"input_reference": {"image_url": "data:image/png,AAAA"}}, INVALID, "input_reference", "base64"),
    ({"audio_reference": VIDEO}, INVALID, "audio_reference", "audio_url"),
    ({"images": [IMAGE] * 8, "input_reference": PNG_URL}, INVALID, "images", "got 9 images in all"),
    # A list is refused before its values are looked at, and not repeated in the message.
    ({"images": json.dumps([IMAGE] * 16)}, INVALID, "images", "images: got 16 values, wanted at most 8"),
]


@pytest.mark.parametrize(("fields", "code", "param", "words"), REFUSALS)
def test_a_refusal_names_the_field_as_it_was_sent_and_has_a_code_and_a_short_message(fields, code, param, words):
    with pytest.raises(ApiError) as caught:
        read(**fields)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, param) and words in error.message
    assert len(error.message) < (500 if code != UNKNOWN else 4000)
    assert json.dumps(error.content, ensure_ascii=False).encode()  # also characters that UTF-8 lacks


def test_the_schema_of_a_body_has_every_field_of_a_job_but_paths_of_files_and_of_loras():
    fields = (schema := VideoRequest.model_json_schema())["properties"]
    assert set(fields) == KNOWN | {"extra_params"}
    others = {"image", "audio_path", "video_path"}  # images, audio_reference, video_reference
    others |= {"prompts", *LoraFields.model_fields}  # prompt and next_prompts, a lora_set
    # No size that is offered has the graphs or weights of these; a request needs a known length.
    others |= {"images_as_guides", "skip_stage_2", "sampler", "sound_only", "dfr", "temporal_upsample_rounds"}
    others |= {"auto_duration", "upscale_video", "text_embeddings", "input_colorspace", "exr_colorspace"}
    others |= {"high_quality", "no_keyframes", "alpha_gen"}
    assert set(JobFields.model_fields) - set(VideoRequest.model_fields) == others
    assert schema["required"] == ["prompt"] and schema["additionalProperties"] is False
    assert {"minimum": 1, "maximum": 1000}.items() <= fields["fps"]["anyOf"][0].items()
    assert not any("default:" in field.get("description", "") for field in fields.values())
    kinds = [(kind["type"], kind.get("format")) for kind in fields["input_reference"]["anyOf"]]
    assert {("object", None), ("string", None), ("string", "binary")} <= set(kinds)


def test_the_documented_fields_and_codes_are_those_of_the_service():
    text = (ROOT / "docs/serving.md").read_text()
    codes = re.findall(r"`(\w+)`", text.partition("| status | code |")[2].partition("\n\n")[0])
    assert {*codes} == {code for codes in ERRORS.values() for code in codes}
    rows = text.partition("| field | meaning |")[2].partition("\n\n")[0].splitlines()[2:]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented <= KNOWN | {"extra_params"}
    missing = {name for name in VideoRequest.model_fields if not documented & {*request_fields._NAMES[name]}}
    assert missing <= set(GuidanceFields.model_fields)  # "and the other guidance flags"
