"""The page at /: a static form. Its script calls the API with a session cookie."""

from collections.abc import Callable
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from ltx_neuron.service.tokens import Tokens

_COOKIE, _COOKIE_SECONDS = "ltx_session", 30 * 86400
_WEB = Path(__file__).parent / "web"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, tokens: Tokens, authorize: Callable) -> None:
    """Add the page's files, and /session, which stores a token in a cookie."""
    files = {path.name for path in _WEB.iterdir()}

    def file(request: Request) -> Response:
        if refusal := request.state.refusal:
            raise refusal
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404)
        return FileResponse(_WEB / name, headers=_HEADERS)

    def session(request: Request) -> Response:
        """The session's owner. POST starts a session with the Authorization header's token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        answer = JSONResponse({"owner": request.state.owner if tokens.hashes else None})
        # Behind a TLS proxy, only the browser knows the scheme.
        safe = request.headers.get("origin", "").startswith("https:")
        rules = {"httponly": True, "samesite": "strict", "secure": safe}
        if request.method == "DELETE":
            answer.delete_cookie(_COOKIE, **rules)
        elif request.method == "POST" and token and tokens.hashes:
            answer.set_cookie(_COOKIE, token.strip(), _COOKIE_SECONDS, **rules)
        return answer

    for path in ("/", "/web/{name}"):
        app.add_route(path, file, methods=["GET"], include_in_schema=False)
    app.add_api_route(
        "/session",
        session,
        methods=["GET", "POST", "DELETE"],
        response_model=None,
        dependencies=[Depends(authorize)],
        include_in_schema=False,
    )


def cookie_authorization(request: Request) -> str | None:
    """The Authorization header for a request's session cookie. None unless the page sent the
    request: browsers also add the cookie to requests from pages on other ports."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    # RequestLimits compares Origin with Host. Browsers leave it out of the page's own GETs.
    same_site = request.method in ("GET", "HEAD") or "origin" in request.headers
    token = request.cookies.get(_COOKIE)
    return f"Bearer {token}" if token and same_site and site in ("same-origin", "none") else None
