"""What the API says of itself: a valid description with examples that are taken, and a page of it."""

import json
import re

import pytest
from conftest import ROOT
from service_app import SIZE, VIDEOS

from ltx_neuron.service.api_error import ERRORS
from unit.service.studio import with_files


@pytest.fixture
def described(service) -> dict:
    return service.get("/openapi.json").json


def operations(described: dict):
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_every_example_of_a_body_is_accepted_and_fits_its_schema(studio, files):
    jsonschema = pytest.importorskip("jsonschema")
    described, videos = studio.get("/openapi.json").json, {}
    schema = described["components"]["schemas"]["VideoRequest"]
    validator = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
    kinds = described["paths"][VIDEOS]["post"]["requestBody"]["content"]
    for kind, content in kinds.items():
        for name, example in content["examples"].items():
            if kind == "application/json":
                validator.validate(example["value"])
                got = studio.post(**example["value"])
            else:
                got = studio.post_form(**with_files(example["value"], files))
            assert got.status == 200, (kind, name, got.body)
            videos[name] = got.json
            studio.send("DELETE", f"{VIDEOS}/{got.json['id']}")
    assert (videos["dev recipe"]["recipe"], videos["keyframes"]["size"]) == ("dev", SIZE)
    assert described["paths"]["/v1/videos/sync"]["post"]["requestBody"]["content"] == kinds


def test_every_example_of_a_parameter_is_accepted(service, described):
    id, entry = service.accepted(), service.claimed()
    for name in ("video.mp4", "thumbnail.jpg"):
        (service.queue.folder_of(id) / name).write_bytes(b"x")
    service.queue.complete(entry)
    asked = [operation for operation in operations(described) if operation[0] != "POST"]
    for method, path, operation in sorted(asked, key=lambda operation: operation[0] == "DELETE"):
        query = []
        for parameter in operation.get("parameters", ()):
            value = str(parameter["example"])
            value = id if value.startswith("video_") else value  # one that there is
            path = path.replace(f"{{{parameter['name']}}}", value)
            query += [f"{parameter['name']}={value}".encode()] * (parameter["in"] == "query")
        got = service.send(method, path, b"&".join(query))
        assert got.status == (503 if path == "/ready" else 200), (path, got.body)


def test_the_description_is_valid_and_has_what_is_answered_and_every_error_with_its_codes(service, described):
    pytest.importorskip("openapi_spec_validator").validate(described)
    paths, schemas = described["paths"], described["components"]["schemas"]
    assert set(paths[VIDEOS]["post"]["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    references = {*re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))}
    assert references <= set(schemas) and {"VideoRequest", "HeldImage"} <= references
    examples = {f"{VIDEOS}/{{id}}": f"{VIDEOS}/{service.accepted()}", "/v1/models/{id}": "/v1/models/tiny"}
    for route in (*examples, VIDEOS, "/v1/models", "/v1/queue"):
        answer = paths[route]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        fields = schemas[answer["$ref"].rpartition("/")[2]]["properties"]
        assert set(service.get(examples.get(route, route)).json) == set(fields), route
    assert set(service.get(f"{VIDEOS}/x").error) == set(schemas["ErrorFields"]["properties"])
    for _, path, operation in operations(described):
        if path.startswith("/v1/"):  # /v1 itself needs no token
            answers = operation["responses"]
            assert {"401", "403", "500", "503"} <= set(answers), path
            for status in set(answers) - {"200"}:
                assert tuple(re.findall(r"`(\w+)`", answers[status]["description"])) == ERRORS[int(status)]


def test_the_documented_codes_are_those_of_the_service():
    table = (ROOT / "docs/serving.md").read_text().partition("| status | code |")[2]
    documented = {*re.findall(r"`(\w+)`", table.partition("\n\n")[0])}
    assert documented == {code for codes in ERRORS.values() for code in codes}


def test_the_page_of_the_description_needs_no_token_has_every_operation_and_asks_no_other_site(service, described):
    for path in ("/openapi.json", "/docs", "/docs.css"):
        got = service.get(path, authorization=b"")
        assert got.status == 200 and str(ROOT).encode() not in got.body
    got = service.get("/docs")
    policy, page = got.headers[b"content-security-policy"].decode(), got.body.decode()
    assert "default-src 'self'" in policy and "unsafe" not in policy
    assert not re.search(r"<(?:script|style|iframe)|<[^>]* (?:on\w+|style)=", page)
    ids, addresses = re.findall(r' id="([^"]*)"', page), re.findall(r' (?:href|src)="([^"]*)"', page)
    links = {address[1:] for address in addresses if address.startswith("#")}
    assert links <= {*ids} and len({*ids}) == len(ids) and "VideoRequest" in ids
    assert {address for address in addresses if address[0] != "#"} == {"docs.css", "openapi.json"}
    assert {operation["operationId"] for _, _, operation in operations(described)} <= links
