"""Takes out of texts what a bug report must not carry: prompts, secrets, and the names of people
and machines."""

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

# Variables of the environment that a report may have: what the stack reads.
_TOLD = re.compile(
    "(NEURON|LTX|TORCH|PYTORCH|TORCHINDUCTOR|XLA|PJRT|NKI|OMP|GOMP|KMP|MKL|OPENBLAS|GLOO|MALLOC)_"
)
_SECRET_NAME = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(^|_)(KEY|PAT)(_|$)|APIKEY", re.I)
_SHORTEST_SECRET, _SHORTEST_PROMPT = 6, 5  # characters; shorter ones are in other words as well

# A prompt as commands, JSON, Python and lists of processes show it. Of three groups the second one
# is the prompt.
_QUOTED = r"""(?=['"])(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+"""  # a word of a command line
_COMMAND = re.compile(rf"(--(?:negative-)?prompt[ =])({_QUOTED})()", re.S)
_WHOLE_WORD = re.compile(r"""('--(?:negative-)?prompt=)((?:[^']|'"'"')*)(')""")
_UNQUOTED = re.compile(r"(--(?:negative-)?prompt[ =])(?!['\"<])([^\n]*?)(?=\s--[a-z]|\n|\Z)()")
_FIELD = re.compile(
    r"""(\b(?:negative_)?prompt["']?\s*[:=]\s*)("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')()""", re.S
)
# The table of times, which is wrapped.
_TABLE = (
    re.compile(r"(,\s+prompt\s+)(.{1,5000}?)(,\s+seed\s+\d)", re.S),
    re.compile(r"(,\s+negative_prompt\s+)(.{1,5000}?)(,\s+recipe\s)", re.S),
)
_ALL = (_COMMAND, _WHOLE_WORD, _UNQUOTED, _FIELD, *_TABLE)
# What looks like a secret, wherever it stands. Of two groups, the first one stays.
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
# Names that say nothing of a person.
_COMMON = {"root", "ubuntu", "ec2-user", "ssm-user", "admin", "user", "nobody", "runner"}
_COMMON |= {"localhost", "neuron", "trn2", "trainium"}
_PLACES = (
    (re.compile(r"/(home|Users)/[^/\s:'\"]+"), r"/\1/<user>"),
    (re.compile(r"\bi-[0-9a-f]{8,17}\b"), "<instance>"),
    (re.compile(r"\barn:aws[\w-]*:[^\s'\"]+"), "<arn>"),
)


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report may have; one whose name sounds like a secret is none of them."""
    names = sorted(filter(_TOLD.match, environment))
    return {name: environment[name] for name in names if not _SECRET_NAME.search(name)}


class Redactor:
    """Called with a text, returns it without what must not leave the machine. `counts` says how
    often what was taken out.

    environment  whose secrets are taken out wherever they stand
    prompts      leave prompts in
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
        """Remember the prompts that a text shows as such: others may quote them."""
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
        """The prompts and their lines as texts may have them, the longest first: plain, in a
        shell's words, in JSON and in Python, and wrapped."""
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
    """Finds a text also where it is broken into lines, at spaces and after hyphens."""
    words = (re.escape(word).replace(r"\-", r"\-\s*") for word in text.split())
    return re.compile(r"\s+".join(words))


def _without_prompt(match: re.Match) -> str:
    """What is left of a match: the placeholder quoted as the prompt was."""
    if match[2] == "None":
        return match[0]
    quote = match[2][:1] if match[2][:1] in ("'", '"') else ""
    return f"{match[1]}{quote}<prompt>{quote}{match[3]}"


def _unquoted(word: str) -> str:
    """A word of a command line as the program got it."""
    parts = re.findall(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)|([^\s'"\\]+)""", word, re.S)
    return "".join(
        single + re.sub(r"\\(.)", r"\1", double, flags=re.S) + escaped + plain
        for single, double, escaped, plain in parts
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        return ""
