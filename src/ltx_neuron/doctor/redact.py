"""Removes prompts, secrets, and names of people and machines from the texts of a bug report."""

import ast
import getpass
import json
import platform
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

# Environment variables that a report may contain: those of the software stack.
_TOLD = re.compile(
    "(NEURON|LTX|TORCH|PYTORCH|TORCHINDUCTOR|XLA|PJRT|NKI|OMP|GOMP|KMP|MKL|OPENBLAS|GLOO|MALLOC)_"
)
_SECRET_NAME = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(^|_)(KEY|PAT)(_|$)|APIKEY", re.I)
_SHORTEST_SECRET, _SHORTEST_PROMPT = 6, 5  # characters; shorter ones occur in other words

# A prompt in commands, JSON, Python and process lists. The second of three groups is the prompt.
_QUOTED = r"""(?=['"])(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+"""  # a word of a command line
_COMMAND = re.compile(rf"(--(?:negative-)?prompt[ =])({_QUOTED})()", re.S)
_WHOLE_WORD = re.compile(r"""('--(?:negative-)?prompt=)((?:[^']|'"'"')*)(')""")
_UNQUOTED = re.compile(r"(--(?:negative-)?prompt[ =])(?!['\"<])([^\n]*?)(?=\s--[a-z]|\n|\Z)()")
_FIELD = re.compile(
    r"""(\b(?:negative_)?prompt["']?\s*[:=]\s*)("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')()""", re.S
)
# The wrapped table of times.
_TABLE = (
    re.compile(r"(,\s+prompt\s+)(.{1,5000}?)(,\s+seed\s+\d)", re.S),
    re.compile(r"(,\s+negative_prompt\s+)(.{1,5000}?)(,\s+recipe\s)", re.S),
)
_ALL = (_COMMAND, _WHOLE_WORD, _UNQUOTED, _FIELD, *_TABLE)
# Patterns of secrets. The text of the first group is kept.
_SECRETS = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.{0,9999}?-----END [A-Z ]*PRIVATE KEY-----", re.S),
        (r"()\b(?:hf_|gh[pousr]_|github_pat_|sk-|xox[abprs]-|glpat-)[A-Za-z0-9_-]{16,}", 0),
        (r"()\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", 0),
        (r"()\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", 0),
        (r"(\bBearer\s+)\S+", re.I),
        (r"(://)[^\s/:@]+:[^\s/@]+(?=@)", 0),
        (
            r"(\b\w*(?:token|secret|passw(?:or)?d|api_?key|access_key(?:_id)?|credentials?)"
            r"""["']?\s*[=:]\s*["']?)[^\s"',;}]{6,}""",
            re.I,
        ),
    )
)
# Names that identify nobody.
_COMMON = {"root", "ubuntu", "ec2-user", "ssm-user", "admin", "user", "nobody", "runner"}
_COMMON |= {"localhost", "neuron", "trn2", "trainium"}
_PLACES = (
    (re.compile(r"/(home|Users)/[^/\s:'\"]+"), r"/\1/<user>"),
    (re.compile(r"\bi-[0-9a-f]{8,17}\b"), "<instance>"),
    (re.compile(r"\barn:aws[\w-]*:[^\s'\"]+"), "<arn>"),
)


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report may contain, except those with a secret's name."""
    names = sorted(filter(_TOLD.match, environment))
    return {name: environment[name] for name in names if not _SECRET_NAME.search(name)}


class Redactor:
    """Called with a text, returns it without prompts, secrets and names. `counts` has the number of
    removed texts by kind.

    environment  its secrets are removed from all texts
    prompts      keep prompts
    """

    def __init__(self, environment: Mapping[str, str], prompts: bool = False):
        self.counts: Counter[str] = Counter()
        self.keeps_prompts, self._prompts = prompts, set()
        self._secrets = sorted(
            (v for n, v in environment.items() if _SECRET_NAME.search(n) and _is_secret(v)),
            key=len,
            reverse=True,
        )
        self._names = list(_PLACES)
        home = str(Path.home())
        if len(home) > 1:
            self._names.insert(0, (re.compile(re.escape(home) + r"(?![\w-])"), "~"))
        for name, shown in ((_user(), "<user>"), (platform.node(), "<host>")):
            if len(name) > 2 and name not in _COMMON:
                self._names.append((re.compile(rf"(?<!\w){re.escape(name)}(?!\w)"), shown))

    def learn(self, text: str) -> None:
        """Record the prompts of a text: others may quote them."""
        for pattern in (_COMMAND, _WHOLE_WORD):
            self._prompts |= {_unquoted(match[2]) for match in pattern.finditer(text)}
        for pattern in _TABLE:
            found = {match[2] for match in pattern.finditer(text)}
            self._prompts |= found - {"None"}
        for match in _FIELD.finditer(text):
            with suppress(ValueError, SyntaxError):
                self._prompts.add(ast.literal_eval(match[2]))
            with suppress(ValueError):
                self._prompts.add(json.loads(match[2], strict=False))

    def __call__(self, text: str) -> str:
        if not self.keeps_prompts:
            for pattern in _ALL:
                text = self._taken(text, "prompts", pattern, _without_prompt)
            for pattern in self._known():
                text = self._taken(text, "prompts", pattern, "<prompt>")
        for secret in self._secrets:
            text = self._taken(text, "secrets", re.compile(re.escape(secret)), "<secret>")
        for pattern in _SECRETS:
            text = self._taken(text, "secrets", pattern, r"\1<secret>")
        for pattern, shown in self._names:
            text = self._taken(text, "names", pattern, shown)
        return text

    def _known(self) -> list[re.Pattern]:
        """Patterns of the recorded prompts and their lines, the longest first: plain, quoted for a
        shell, in JSON and in Python, each also wrapped."""
        known = {part for prompt in self._prompts for part in (prompt, *prompt.splitlines())}
        known = {text for text in known if len(text) >= _SHORTEST_PROMPT}
        quoted = {as_word(text)[1:-1] for text in known for as_word in (repr, json.dumps)}
        spellings = known | quoted | {*map(shlex.quote, known)}
        return [_wrapped(spelling) for spelling in sorted(spellings, key=len, reverse=True)]

    def _taken(self, text: str, what: str, pattern: re.Pattern, shown: str | Callable) -> str:
        text, count = pattern.subn(shown, text)
        self.counts += Counter({what: count})
        return text


def _is_secret(value: str) -> bool:
    return len(value) >= _SHORTEST_SECRET and value.lower() not in ("disabled", "enabled")


def _wrapped(text: str) -> re.Pattern:
    """A pattern for a text that may be wrapped at spaces and after hyphens."""
    words = (re.escape(word).replace(r"\-", r"\-\s*") for word in text.split())
    return re.compile(r"\s+".join(words))


def _without_prompt(match: re.Match) -> str:
    """The replacement of a match: a placeholder with the prompt's quotes."""
    if match[2] == "None":
        return match[0]
    quote = match[2][:1] if match[2][:1] in ("'", '"') else ""
    return f"{match[1]}{quote}<prompt>{quote}{match[3]}"


def _unquoted(word: str) -> str:
    """A word of a command line as the program receives it."""
    parts = re.findall(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)|([^\s'"\\]+)""", word, re.S)
    return "".join(
        single + re.sub(r"\\(.)", r"\1", double, flags=re.S) + escaped + plain
        for single, double, escaped, plain in parts
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return ""
