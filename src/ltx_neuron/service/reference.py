"""The page at /docs: /openapi.json as HTML without scripts, made when the service starts."""

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

_STYLE = Path(__file__).parent / "web" / "reference.css"
_POLICY = (
    "default-src 'self'; script-src 'none'; object-src 'none'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}


def routes(described: dict[str, Any]) -> list[Route]:
    """The page and its style. described: the service's OpenAPI description."""
    html, style = page(described), _STYLE.read_text()
    return [
        Route("/docs", lambda _: HTMLResponse(html, headers=_HEADERS)),
        Route("/docs.css", lambda _: Response(style, media_type="text/css", headers=_HEADERS)),
    ]


def page(described: dict[str, Any]) -> str:
    """An OpenAPI description as HTML."""
    schemas, info = described["components"]["schemas"], described["info"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(
        f'<li><a href="#{operation["operationId"]}">{method} {escape(path)}</a></li>'
        for method, path, operation in operations
    )
    sections = "".join(_operation(*each) for each in operations)
    models = "".join(
        f'<section id="{name}"><h2>{name}</h2>{_prose(schema.get("description", ""))}'
        f"{_fields(schema)}</section>"
        for name, schema in sorted(schemas.items())
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{info["title"]} API</title><link rel="stylesheet" href="docs.css">'
        f"<main><h1>{info['title']} API</h1>{_prose(info['description'])}"
        '<p>As OpenAPI: <a href="openapi.json">openapi.json</a></p>'
        f"<nav><ul>{links}</ul></nav>{sections}{models}</main></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [
        f'<section id="{operation["operationId"]}"><h2><code>{method} {escape(path)}</code></h2>',
        _prose(operation["summary"]),
    ]
    if parameters := operation.get("parameters"):
        rows = (
            (f"<code>{p['name']}</code>", p["in"], _type(p["schema"]), escape(str(p["example"])))
            for p in parameters
        )
        parts.append(_table(("parameter", "in", "type", "example"), rows))
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<h3>Body: {kind}</h3><p>{_type(content['schema'])}</p>")
        parts += (
            f"<details><summary>{escape(name)}</summary>{_example(kind, path, example['value'])}"
            "</details>"
            for name, example in content["examples"].items()
        )
    rows = (
        (status, _code(answer["description"]), ", ".join(map(_answer, answer["content"].items())))
        for status, answer in operation["responses"].items()
        if "content" in answer
    )
    parts.append(_table(("status", "", "answer"), rows))
    return "".join(parts) + "</section>"


def _example(kind: str, path: str, fields: dict[str, Any]) -> str:
    """An example's body; for a form, the curl command that sends it."""
    if kind == "application/json":
        return f"<pre>{escape(json.dumps(fields, indent=2))}</pre>"
    words = [f"curl http://127.0.0.1:8000{path}"]
    for name, value in fields.items():
        words.append(f'-F {name}="{"@" if "." in value else ""}{value}"')
    command = " \\\n    ".join(words)
    return f"<pre>{escape(command)}</pre>"


def _fields(schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = (
        (
            f"<code>{name}</code>{' *' if name in needed else ''}",
            _type(field),
            escape(field.get("description", "")),
        )
        for name, field in schema.get("properties", {}).items()
    )
    return _table(("field", "type", ""), rows)


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, with links to other schemas."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if several := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(_type(e) for e in several if e.get("type") != "null"))
    if "enum" in schema:
        return " or ".join(escape(json.dumps(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    words = "file" if schema.get("format") == "binary" else schema.get("type", "any")
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    if least is not None or most is not None:
        words += f", {'' if least is None else least} to {'' if most is None else most}"
    return words


def _answer(content: tuple[str, dict[str, Any]]) -> str:
    kind, described = content
    return _type(described["schema"]) if described.get("schema") else escape(kind)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{head}</th>" for head in heads)
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def _prose(text: str) -> str:
    return f"<p>{_code(text)}</p>" if text else ""


def _code(text: str) -> str:
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
