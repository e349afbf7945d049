"""The page at /docs: /openapi.json as HTML without scripts, made when the service starts."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

_TEMPLATE = Path(__file__).with_name("reference.html")
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
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters |= {"code": _code, "example": _example, "type": _type}
    return environment.from_string(_TEMPLATE.read_text()).render(described)


def _example(fields: dict[str, Any], kind: str, path: str) -> str:
    """An example's body; for a form, the curl command that sends it."""
    if kind == "application/json":
        return json.dumps(fields, indent=2)
    words = [f"curl http://127.0.0.1:8000{path}"]
    for name, value in fields.items():
        words.append(f'-F {name}="{"@" if "." in value else ""}{value}"')
    return " \\\n    ".join(words)


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, with links to other schemas."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if kinds := schema.get("anyOf"):
        types = dict.fromkeys(_type(kind) for kind in kinds if kind.get("type") != "null")
        return Markup(" or ").join(types)
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if schema.get("type") == "array":
        return Markup("list of ") + _type(schema.get("items", {}))
    words = "file" if schema.get("format") == "binary" else schema.get("type", "any")
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    if least is not None or most is not None:
        words += f", {'' if least is None else least} to {'' if most is None else most}"
    return words


def _code(text: str) -> Markup:
    parts = escape(text).split("`")
    return Markup().join(
        Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts)
    )
