"""What the API says of itself: a valid description with examples that are taken, and a page of it."""

import json
import re

import pytest
from conftest import ROOT

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")


from ltx_neuron.service.api_error import ERRORS, ApiError
from ltx_neuron.service.fields import VideoRequest, read_request
from unit.service.client import (
    SIZE,
    VIDEOS,
    Sent,
    accepted,
    answer_of,
    claimed,
    get,
    post_form,
    post_json,
    send,
    with_files,
)


@pytest.fixture
def described(service) -> dict:
    return answer_of(service, "/openapi.json")


def operations(described: dict):
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


NOT_TEXT = "integer", "number", "boolean", "array"
SCHEMA = VideoRequest.model_json_schema()
# The value at a limit, and the one beyond it, from the limit on.
AT = {"minimum": (0, -1), "exclusiveMinimum": (1, 0), "maximum": (0, 1), "exclusiveMaximum": (-1, 0)}


def at_limits(schema: dict) -> tuple[list, list]:
    """Values at a field's limits, and just beyond them or of another type than any that it takes."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    limits = [(kind[limit], signs) for kind in kinds for limit, signs in AT.items() if limit in kind]
    within = [value for kind in kinds for value in kind.get("enum", ())] + [limit + at for limit, (at, _) in limits]
    beyond = [limit + over for limit, (_, over) in limits]
    beyond += ["x" * (kind["maxLength"] + 1) for kind in kinds if "maxLength" in kind]
    beyond += [[{}] * (kind["maxItems"] + 1) for kind in kinds if "maxItems" in kind]
    no_text = any("enum" in kind or kind.get("type") in NOT_TEXT for kind in kinds)
    beyond += ["x"] * (no_text or any(not re.search(kind.get("pattern", ""), "x") for kind in kinds))
    return within, [*beyond, {"a": {}}, [[]]]


@pytest.mark.parametrize("name", [name for name in SCHEMA["properties"] if name != "extra_params"])
def test_a_field_takes_values_up_to_the_limits_of_its_schema_and_refuses_those_beyond_by_its_name(name):
    within, beyond = at_limits(SCHEMA["properties"][name])
    for value in within:
        request = read_request({"prompt": "waves", "extra_params": {name: value}})
        assert request.digest == read_request({"prompt": "waves", name: value}).digest
    for value in beyond:
        with pytest.raises(ApiError) as caught:
            read_request({"prompt": "waves"} | {name: value})
        error = caught.value
        assert (error.status, error.code in ERRORS[400]) == (400, True)
        assert error.param.partition("[")[0] == name and error.message.startswith(name)
        assert len(json.dumps(error.content)) < 500


def test_every_example_of_a_body_is_accepted_and_fits_its_schema(studio, files):
    jsonschema = pytest.importorskip("jsonschema")
    described = answer_of(studio, "/openapi.json")
    schema = described["components"]["schemas"]["VideoRequest"]
    validator = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
    kinds = described["paths"][VIDEOS]["post"]["requestBody"]["content"]
    videos = {}
    for kind, content in kinds.items():
        for name, example in content["examples"].items():
            if kind == "application/json":
                validator.validate(example["value"])
                got = post_json(studio, **example["value"])
            else:
                got = post_form(studio, **with_files(example["value"], files))
            assert got.status == 200, (kind, name, got.body)
            videos[name] = json.loads(got.body)
            send(studio, "DELETE", f"{VIDEOS}/{videos[name]['id']}")
    assert (videos["dev recipe"]["recipe"], videos["keyframes"]["size"]) == ("dev", SIZE)
    waits = described["paths"]["/v1/videos/sync"]["post"]
    assert waits["requestBody"]["content"] == kinds


def test_every_example_of_a_parameter_is_accepted(service, described):
    id, entry = accepted(service), claimed(service)
    for name in ("video.mp4", "thumbnail.jpg"):
        (service.queue.folder_of(id) / name).write_bytes(b"x")
    service.queue.complete(entry)
    asked = [operation for operation in operations(described) if operation[0] != "POST"]
    for method, path, operation in sorted(asked, key=lambda operation: operation[0] == "DELETE"):
        query = []
        for parameter in operation.get("parameters", ()):
            value = parameter["example"]
            value = id if str(value).startswith("video_") else value  # one that there is
            path = path.replace(f"{{{parameter['name']}}}", str(value))
            query += [f"{parameter['name']}={value}".encode()] * (parameter["in"] == "query")
        got = service.ask(Sent(method, path, b"&".join(query), service.headers()))
        assert got.status == (503 if path == "/ready" else 200), (path, got.body)


def test_the_description_is_valid_and_has_what_is_answered_and_every_error_with_its_codes(service, described):
    pytest.importorskip("openapi_spec_validator").validate(described)
    assert described["openapi"].startswith("3.1")
    paths, schemas = described["paths"], described["components"]["schemas"]
    assert {path for path in paths if path.startswith("/v1")} >= {VIDEOS, "/v1/videos/{id}/content", "/v1/models"}
    assert set(paths[VIDEOS]["post"]["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    references = {*re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))}
    assert references <= set(schemas) and {"VideoRequest", "HeldImage"} <= references
    id = accepted(service)
    for path, route in (
        (f"{VIDEOS}/{id}", f"{VIDEOS}/{{id}}"),
        *((path, path) for path in (VIDEOS, "/v1/models", "/v1/queue")),
        ("/v1/models/tiny", "/v1/models/{id}"),
    ):
        answer = paths[route]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        fields = schemas[answer["$ref"].rpartition("/")[2]]["properties"]
        assert set(answer_of(service, path)) == set(fields), path
    assert set(get(service, f"{VIDEOS}/x").error) == set(schemas["ErrorFields"]["properties"])
    for _, path, operation in operations(described):
        if path.startswith("/v1/"):  # /v1 itself needs no token
            answers = operation["responses"]
            assert {"401", "403", "500", "503"} <= set(answers), path
            for status in set(answers) - {"200"}:
                codes = re.findall(r"`(\w+)`", answers[status]["description"])
                assert tuple(codes) == ERRORS[int(status)]


def test_the_documented_codes_are_those_of_the_service():
    table = (ROOT / "docs/serving.md").read_text().partition("| status | code |")[2]
    documented = {*re.findall(r"`(\w+)`", table.partition("\n\n")[0])}
    assert documented == {code for codes in ERRORS.values() for code in codes}


def test_the_page_of_the_description_needs_no_token_has_every_operation_and_asks_no_other_site(service, described):
    for path in ("/openapi.json", "/docs", "/docs.css"):
        got = get(service, path, authorization=b"")
        assert got.status == 200 and str(ROOT).encode() not in got.body
    got = get(service, "/docs")
    policy = got.headers[b"content-security-policy"].decode()
    assert "default-src 'self'" in policy and "unsafe" not in policy
    page = got.body.decode()
    assert not re.search(r"<(?:script|style|iframe)|<[^>]* (?:on\w+|style)=", page)
    ids, addresses = re.findall(r' id="([^"]*)"', page), re.findall(r' (?:href|src)="([^"]*)"', page)
    links = {address[1:] for address in addresses if address.startswith("#")}
    assert links <= {*ids} and len({*ids}) == len(ids) and "VideoRequest" in ids
    assert {address for address in addresses if address[0] != "#"} == {"docs.css", "openapi.json"}
    assert {operation["operationId"] for _, _, operation in operations(described)} <= links
