"""A Hugging Face Hub on loopback, as far as huggingface_hub reads one: its files are local ones."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ltx_neuron.hub import RELEASE_FILES

LTX, GEMMA = "Lightricks/LTX-2.3", "google/gemma-3-12b-it-qat-q4_0-unquantized"
TOKEN = "hf_reader"  # of a reader who accepted every licence


class Hub(ThreadingHTTPServer):
    """repos: the files of each repository, by their names there. A test may change them, the gated repositories and
    the revisions. requests: (method, path) of each."""

    daemon_threads = True

    def __init__(self, repos: dict[str, dict[str, Path]]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.gated = repos, set()
        self.revisions = {"main": "a" * 40, "v1": "b" * 40}
        self.requests: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def downloads(self) -> list[str]:
        return [path.split("/")[-1] for method, path in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def released(tiny, monkeypatch, folder: Path) -> Iterator[Hub]:
    """A hub with the released repositories of tiny files, which huggingface_hub in this process reads from an empty
    folder with an empty cache."""
    from huggingface_hub import constants, file_download

    kinds = {"distilled": tiny.checkpoint, "dev": tiny.checkpoint, "lora": tiny.lora}
    kinds |= {"spatial": tiny.spatial_upsampler, "temporal": tiny.temporal_upsampler}
    files = {RELEASE_FILES[LTX][kind]: path for kind, path in kinds.items()}
    hub = Hub({LTX: files, GEMMA: {path.name: path for path in tiny.gemma_root.iterdir()}})
    (folder / "home").mkdir()
    monkeypatch.chdir(folder / "home")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    template = "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(file_download, *template, raising=False)  # versions below 1 read it there
    settings = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder / "cache"), "HF_TOKEN_PATH": str(folder / "token")}
    for name, value in (template, *settings.items(), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(constants, name, value)
    yield hub
    hub.shutdown()
    hub.server_close()


@cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: Hub = self.server
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        if listing := path.startswith("/api/models/"):
            kind = "/tree/" if "/tree/" in path else "/revision/"
            repo, _, revision = path.removeprefix("/api/models/").partition(kind)
        else:
            repo, _, rest = path[1:].partition("/resolve/")
            revision, _, name = rest.partition("/")
        commit = {**hub.revisions, **{c: c for c in hub.revisions.values()}}.get(revision or "main")
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
        files = hub.repos.get(repo)
        if files is None:
            self.refuse(404 if allowed else 401, "RepoNotFound")
        elif commit is None:
            self.refuse(404, "RevisionNotFound")
        elif listing:
            entries = [self.entry(name, path, kind == "/tree/") for name, path in files.items()]
            info = entries if kind == "/tree/" else {"id": repo, "sha": commit, "siblings": entries}
            self.answer(json.dumps(info).encode(), commit)
        elif repo in hub.gated and not allowed:
            self.refuse(403 if self.headers["Authorization"] else 401, "GatedRepo")
        elif name not in files:
            self.refuse(404, "EntryNotFound")
        else:
            self.answer(files[name].read_bytes(), commit, headers={"ETag": f'"{digest(files[name])}"'})

    def entry(self, name: str, path: Path, tree: bool) -> dict:
        """A file in a listing, of a tree or of a revision."""
        size, sha = path.stat().st_size, digest(path)
        lfs = {"size": size, "sha256": sha, "oid": sha, "pointerSize": 134}
        named = {"path": name, "oid": sha, "type": "file"} if tree else {"rfilename": name, "blobId": sha}
        return named | {"size": size} | ({"lfs": lfs} if name.endswith(".safetensors") else {})

    def refuse(self, status: int, code: str) -> None:
        self.answer(b"", "", status, {"X-Error-Code": code})

    def answer(self, body: bytes, commit: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": commit, **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
