"""What the API says of itself: a valid description, its examples, and a page of it."""

import json
import re
from contextlib import contextmanager
from html.parser import HTMLParser
from io import BytesIO

import pytest
import torch
from conftest import ROOT
from helpers import picture_frames, tone, write_film, write_sound
from hypothesis import given, settings, strategies
from PIL import Image
from safetensors.torch import save_file

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from jobs import make_job, read_clip
from service_app import FORM, SIZE, SMALL, Got, Sent, Service, Workspace, form, get, opened
from starlette.datastructures import UploadFile

from ltx_neuron.config.release import RELEASES
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import AttentionMask, ImageCondition, ReferenceAudio, ReferenceVideo, Retake
from ltx_neuron.service.api_error import ERRORS, ApiError
from ltx_neuron.service.fields import VideoRequest, read_request
from ltx_neuron.service.jobs import job_of
from ltx_neuron.service.openapi import EXAMPLES
from ltx_neuron.weights.lora import Lora

FILM = Size(64, 96, 57)  # of the videos that are sent: longer than the parts that examples name
WINDOW = Size(64, 96, 105)
PAIR = Size(128, 192, 57, two_stage=True)
TILES = {"tile_height": 64, "tile_width": 96}  # six of PAIR's second stage


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A file for each kind that examples name, by the end of its name."""
    folder = tmp_path_factory.mktemp("files")
    samples = (tone(8000, 6.0) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    write_sound(folder / "a.wav", samples, 8000, "pcm_s16le", "stereo", "s16")
    film = picture_frames(FILM.num_frames, *FILM.sides, 1)
    write_film(folder / "a.mp4", film)
    write_film(folder / "a.mkv", film, sound=tone(48000, FILM.seconds))
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    return {path.suffix: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def service(tmp_path_factory, files):
    """With graphs for each kind of job."""
    with compiled_for(tmp_path_factory.mktemp("service"), files) as made:
        yield made


@contextmanager
def compiled_for(folder, files, release=RELEASES[0]):
    lora = folder / "pose.safetensors"
    save_file({"x": torch.zeros(2)}, lora)
    held = {"images": (ImageCondition("x"), ImageCondition("x", 120, 0.8))}
    (folder / "a.mkv").write_bytes(files[".mkv"])
    dubbing = read_clip(folder / "a.mkv", (Lora(lora),))
    references = {"references": (ReferenceVideo("x", 1.0, FILM.num_frames),)}
    tiled = references | TILES | {"tile": True, "stage_2_ic_lora": True}
    with opened(folder) as made:
        made.sizes.workspace.release = release
        pose, dub = make_job(stage_1_loras=(Lora(lora),)), make_job(loras=(Lora(lora),))
        made.sizes.lora_sets = {"default": make_job(), "pose": pose, "dub": dub}
        made.sizes.upsamplers = {"spatial"}
        for sizes, inputs in (
            ((SMALL,), {}),
            ((SMALL,), {"images": (ImageCondition("x"),)}),
            ((SMALL,), {"recipe": "dev"}),
            ((SMALL,), held),
            ((FILM, WINDOW), {"retake": Retake("x")}),
            ((PAIR,), references),
            ((PAIR,), references | {"attention_mask": AttentionMask("x")}),
            ((PAIR,), references | {"stage_2_ic_lora": True}),
            ((PAIR,), tiled),
            ((PAIR,), {"reference_sound": ReferenceAudio("x", 51)}),
            ((PAIR,), dubbing),
        ):
            made.sizes.workspace.recorded |= Workspace(*sizes, release=release, **inputs).recorded
        yield made


@pytest.fixture(scope="module")
def described(service) -> dict:
    return json.loads(get(service, "/openapi.json").body)


def operations(described: dict):
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def post(service: Service, path: str, kind: str, fields: dict, files: dict) -> Got:
    if kind == "application/json":
        body, headers = json.dumps(fields).encode(), service.headers()
    else:
        sent = {name: files.get("." + value.rpartition(".")[2], value) for name, value in fields.items()}
        body, headers = form(sent), service.headers(FORM)
    return service.ask(Sent("POST", path, b"", headers, body))


def test_the_description_is_valid_openapi(described):
    validate = pytest.importorskip("openapi_spec_validator").validate
    validate(described)
    assert described["openapi"].startswith("3.1")


# --- properties of the body's schema --------------------------------------------------------------


def alternatives(schema: dict) -> list[dict]:
    return [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]


def outside(schema: dict) -> list:
    """Values just outside a field's limits, and of another type than any that it takes."""
    kinds = alternatives(schema)
    values = [kind[limit] + sign for kind in kinds for limit, sign in BEYOND.items() if limit in kind]
    values += ["x" * (kind["maxLength"] + 1) for kind in kinds if "maxLength" in kind]
    values += [[{}] * (kind["maxItems"] + 1) for kind in kinds if "maxItems" in kind]
    no_text = any("enum" in kind or kind.get("type") in NOT_TEXT for kind in kinds)
    values += ["x"] * (no_text or any(not re.search(kind.get("pattern", ""), "x") for kind in kinds))
    return values + [{"a": {}}, [[]]]


BEYOND = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1, "exclusiveMaximum": 0}
NOT_TEXT = "integer", "number", "boolean", "array"
SCHEMA = VideoRequest.model_json_schema()
OUTSIDE = [
    pytest.param(name, value, id=f"{name} {str(value)[:20]}")
    for name, schema in SCHEMA["properties"].items()
    if name != "extra_params"
    for value in outside(schema)
]


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_a_value_outside_the_schema_is_refused_by_its_fields_name(name, value):
    with pytest.raises(ApiError) as caught:
        read_request({"prompt": "waves"} | {name: value})
    error = caught.value
    assert (error.status, error.code in ERRORS[400]) == (400, True)
    assert error.param.partition("[")[0] == name and error.message.startswith(error.param.partition("[")[0])
    assert len(json.dumps(error.content)) < 500


def of_schema(schema: dict):
    """A strategy of the values that a schema describes."""
    if "$ref" in schema:
        return of_schema(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return strategies.one_of(*map(of_schema, schema["anyOf"]))
    if "enum" in schema:
        return strategies.sampled_from(schema["enum"])
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    ends = {"exclude_min": "exclusiveMinimum" in schema, "exclude_max": "exclusiveMaximum" in schema}
    match schema.get("type"):
        case "integer":
            high, step = schema.get("exclusiveMaximum", (high or 2**40) + 1) - 1, schema.get("multipleOf", 1)
            return strategies.integers(None if low is None else -(-low // step), high // step).map(lambda n: n * step)
        case "number":
            high = schema.get("exclusiveMaximum", 1e6 if high is None else high)
            return strategies.floats(-1e6 if low is None else low, high, allow_nan=False, **ends)
        case "string" if "data:" in schema.get("description", ""):
            return strategies.just("data:image/png;base64,AAAA")
        case "string" if schema.get("format") == "binary":
            return strategies.builds(lambda: UploadFile(BytesIO(b"file")))
        case "string" if "pattern" in schema:
            return strategies.from_regex(schema["pattern"], fullmatch=True).filter(lambda text: len(text) <= 12)
        case "string":
            return strategies.text(max_size=min(12, schema.get("maxLength", 12)))
        case "array":
            return strategies.lists(of_schema(schema["items"]), max_size=min(3, schema.get("maxItems", 3)))
        case "object" if "properties" in schema:
            fields = {name: of_schema(field) for name, field in schema["properties"].items()}
            required = {name: fields.pop(name) for name in schema.get("required", ())}
            return strategies.fixed_dictionaries(required, optional=fields)
        case "boolean":
            return strategies.booleans()
    return strategies.none()


@pytest.mark.parametrize("name", [name for name in SCHEMA["properties"] if name not in ("prompt", "extra_params")])
def test_a_value_within_the_schema_is_read(name):
    @settings(max_examples=15, deadline=None)
    @given(of_schema(SCHEMA["properties"][name]))
    def check(value):
        request = read_request({"prompt": "waves", "extra_params": {name: value}})
        assert request.digest == read_request({"prompt": "waves", name: value}).digest

    check()


def test_every_example_of_a_body_is_accepted_and_fits_its_schema(service, described, files):
    jsonschema = pytest.importorskip("jsonschema")
    schema = described["components"]["schemas"]["VideoRequest"]
    validator = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
    kinds = described["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    seen = {}
    for kind, content in kinds.items():
        for name, example in content["examples"].items():
            fields = example["value"]
            if kind == "application/json":
                validator.validate(fields)
            got = post(service, "/v1/videos", kind, fields, files)
            assert got.status == 200, (kind, name, got.body)
            seen[name] = json.loads(got.body)
            service.ask(Sent("DELETE", f"/v1/videos/{seen[name]['id']}", b"", service.headers()))
    assert (seen["dev recipe"]["recipe"], seen["keyframes"]["size"]) == ("dev", SIZE)
    assert seen["extend"]["num_frames"] == FILM.num_frames + 48
    # /v1/videos/sync waits for the same.
    waits = described["paths"]["/v1/videos/sync"]["post"]
    assert waits["requestBody"]["content"] == kinds


# Kinds of jobs besides the examples.
POSE = {"prompt": "a robot dances", "lora_set": "pose"}
MORE = {
    "tiles of a size": POSE
    | {"video_conditioning": "a.mp4", "stage_2_ic_lora": "true", "tile": "1"}
    | {name: str(side) for name, side in TILES.items()},
    "a mask": POSE | {"video_conditioning": "a.mp4", "conditioning_attention_mask": "a.mp4"},
    "slow motion": POSE | {"video_conditioning": "a.mp4", "motion_speed": "0.5"},
    "a voice": POSE | {"reference_audio": "a.wav", "reference_audio_max_duration": "2"},
}


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_each_kind_of_job_is_taken_of_each_release(tmp_path, files, release):
    jobs = {}
    with compiled_for(tmp_path, files, release) as service:
        for name, fields in (EXAMPLES["multipart/form-data"] | MORE).items():
            got = post(service, "/v1/videos", "multipart/form-data", fields, files)
            assert got.status == 200, (name, got.body)
            id = json.loads(got.body)["id"]
            jobs[name] = job_of(service.queue.get("ada", id).params, service.queue.folder_of(id))
            _ = jobs[name].media  # read while its files are there
            service.ask(Sent("DELETE", f"/v1/videos/{id}", b"", service.headers()))
    made = jobs["tiles of a size"]
    assert made.tile and made.stage_2_ic_lora and made.size == PAIR
    assert (made.tile_height, made.tile_width) == (TILES["tile_height"], TILES["tile_width"])
    assert len(made.stage_tiles(made.stages[1])) == 6
    assert jobs["slow motion"].motion_speed == 0.5 and jobs["a mask"].attention_mask
    assert not jobs["IC-LoRA"].tile and jobs["IC-LoRA in tiles"].stage_2_ic_lora


def test_tiles_are_refused_where_their_graphs_are_not_and_without_a_reference(service, files):
    fields = MORE["tiles of a size"] | {"tile_height": "96"}
    got = post(service, "/v1/videos", "multipart/form-data", fields, files)
    assert got.error["code"] == "profile_mismatch" and "tile is not compiled" in got.error["message"]
    assert {each["size"] for each in got.error["compiled"]} == {"192x128", "128x192"}
    without = {"prompt": "rain", "size": SIZE, "tile": "true"}
    got = post(service, "/v1/videos", "multipart/form-data", without, files)
    assert got.error["param"] == "tile" and "video_conditioning" in got.error["message"]


def test_every_example_of_a_parameter_is_accepted(service, described):
    got = post(service, "/v1/videos", "application/json", {"prompt": "waves", "size": SIZE}, {})
    id = json.loads(got.body)["id"]
    (entry,) = service.queue.claim("w", service.queue.next_batch_key(), 1)
    for name in ("video.mp4", "thumbnail.jpg"):
        (service.queue.folder_of(id) / name).write_bytes(b"x")
    service.queue.complete(entry)
    asked = [each for each in operations(described) if each[0] != "POST"]
    for method, path, operation in sorted(asked, key=lambda each: each[0] == "DELETE"):
        query = []
        for parameter in operation.get("parameters", ()):
            value = parameter["example"]
            value = id if str(value).startswith("video_") else value  # one that there is
            if parameter["in"] == "path":
                path = path.replace(f"{{{parameter['name']}}}", value)
            else:
                query.append(f"{parameter['name']}={value}".encode())
        got = service.ask(Sent(method, path, b"&".join(query), service.headers()))
        assert got.status == (503 if path == "/ready" else 200), (path, got.body)


def test_the_errors_of_each_operation_are_described_with_their_codes(described):
    for _, path, operation in operations(described):
        if path.startswith("/v1/"):  # /v1 itself needs no token
            answers = operation["responses"]
            assert {"401", "403", "500", "503"} <= set(answers), path
            for status in set(answers) - {"200"}:
                codes = re.findall(r"`(\w+)`", answers[status]["description"])
                assert tuple(codes) == ERRORS[int(status)]
    posts = described["paths"]["/v1/videos"]["post"]["responses"]
    assert {"400", "409", "413", "429", "507"} <= set(posts)


def test_the_documented_codes_are_those_of_the_service():
    table = (ROOT / "docs/serving.md").read_text().partition("| status | code |")[2]
    documented = {*re.findall(r"`(\w+)`", table.partition("\n\n")[0])}
    known = {code for codes in ERRORS.values() for code in codes}
    assert documented == known


def test_a_description_needs_no_token_and_names_no_path_of_this_machine(service):
    for path in ("/openapi.json", "/docs", "/docs.css"):
        got = get(service, path, authorization=b"")
        assert got.status == 200 and str(ROOT).encode() not in got.body


class _Page(HTMLParser):
    """The page's tags and the addresses in it."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.addresses, self.ids, self.handlers = set(), [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("href", "src"):
                self.addresses.append(value)
            elif name == "id":
                self.ids.append(value)
            self.handlers += [name] if name.startswith("on") or name == "style" else []


def test_the_page_of_the_description_has_every_operation_and_asks_no_other_site(service, described):
    got = get(service, "/docs")
    policy = got.headers[b"content-security-policy"].decode()
    assert "default-src 'self'" in policy and "unsafe" not in policy
    page = _Page(got.body.decode())
    assert not page.tags & {"script", "style", "iframe"} and not page.handlers
    links = {address[1:] for address in page.addresses if address.startswith("#")}
    assert links <= {*page.ids} and len({*page.ids}) == len(page.ids)
    assert {each for each in page.addresses if each[0] != "#"} == {"docs.css", "openapi.json"}
    assert {operation["operationId"] for _, _, operation in operations(described)} <= links
    assert "VideoRequest" in page.ids
