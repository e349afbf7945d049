"""Bearer tokens. Files store only their hashes."""

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json, whole_file
from ltx_neuron.invocation import command

LOCAL = "local"  # the only owner of a service without tokens
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_PREFIX = "ltxn_"


@dataclass(frozen=True)
class Tokens:
    """The tokens of a file {"tokens": {name: SHA-256}}: too long to search a plain hash."""

    hashes: dict[str, str]

    @classmethod
    def load(cls, path: Path | None) -> "Tokens":
        """The tokens of a file; none without a path. Raises UserError for a damaged file."""
        if path is None:
            return cls({})
        hashes = read_json(path).get("tokens")
        valid = isinstance(hashes, dict) and all(
            _NAME.fullmatch(name) and isinstance(hash, str) and re.fullmatch("[0-9a-f]{64}", hash)
            for name, hash in hashes.items()
        )
        if not valid or not hashes:
            raise UserError(
                f"{path} holds no tokens; make one:"
                f" {command('serve', '--tokens-file', path, '--new-token', 'NAME')}"
            )
        return cls(hashes)

    def owner_of(self, authorization: str | None) -> str | None:
        """The owner of an Authorization header's token; LOCAL without tokens. In constant time."""
        if not self.hashes:
            return LOCAL
        scheme, _, token = (authorization or "").partition(" ")
        sent = _hash(token.strip()) if scheme.lower() == "bearer" else ""
        owner = None
        for name, hash in self.hashes.items():
            if hmac.compare_digest(hash, sent):
                owner = name
        return owner


def new_token(path: Path, name: str) -> str:
    """Add a token for a name to a file and return it. It replaces an earlier one of this name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"--new-token {name!r}: wanted 1 to 64 characters of A-Z a-z 0-9 _ . @ -")
    hashes = read_json(path).get("tokens", {}) if path.exists() else {}
    token = _PREFIX + secrets.token_urlsafe(32)
    content = {"tokens": {**hashes, name: _hash(token)}}
    with whole_file(path) as partial:
        partial.chmod(0o600)
        partial.write_text(json.dumps(content, indent=1) + "\n")
    return token


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
