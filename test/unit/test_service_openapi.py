"""What the API says of itself: a valid description, its examples, and a page of it."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from conftest import ROOT
from helpers import picture_frames, tone, write_film, write_sound
from PIL import Image
from safetensors.torch import save_file

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from service_app import FORM, SIZE, SMALL, Got, Sent, Service, Workspace, form, get, opened

from ltx_neuron.flags.resolve import dubbing_of
from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import ImageCondition, ReferenceVideo, Retake
from ltx_neuron.sampling.spec import JobSpec
from ltx_neuron.service.api_error import ERRORS
from ltx_neuron.weights.lora import Lora

FILM = Size(64, 96, 57)  # of the videos that are sent: longer than the parts that examples name
WINDOW = Size(64, 96, 105)
PAIR = Size(128, 192, 57, two_stage=True)


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
    folder = tmp_path_factory.mktemp("service")
    lora = folder / "pose.safetensors"
    save_file({"x": torch.zeros(2)}, lora)
    none = dict.fromkeys(("loras", "stage_1_loras", "stage_2_loras"), ())
    held = {"images": (ImageCondition("x"), ImageCondition("x", 120, 0.8))}
    (folder / "a.mkv").write_bytes(files[".mkv"])
    dubbing = dubbing_of(JobSpec(reference_video=str(folder / "a.mkv")), PAIR, (Lora(lora),))
    with opened(folder) as made:
        pose, dub = {"stage_1_loras": (Lora(lora),)}, {"loras": (Lora(lora),)}
        made.sizes.lora_sets = {"default": none, "pose": none | pose, "dub": none | dub}
        made.sizes.upsamplers = {"spatial"}
        for more in (
            Workspace(SMALL, recipe="dev"),
            Workspace(SMALL, **held),
            Workspace(FILM, WINDOW, retake=Retake("x")),
            Workspace(PAIR, references=(ReferenceVideo("x", 1.0, FILM.num_frames),)),
            Workspace(PAIR, **dubbing),
        ):
            made.sizes.workspace.recorded |= more.recorded
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
        sent = {
            name: files.get("." + value.rpartition(".")[2], value) for name, value in fields.items()
        }
        body, headers = form(sent), service.headers(FORM)
    return service.ask(Sent("POST", path, b"", headers, body))


def test_the_description_is_valid_openapi(described):
    validate = pytest.importorskip("openapi_spec_validator").validate
    validate(described)
    assert described["openapi"].startswith("3.1")


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
        if path.startswith("/v1"):
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
