"""What a bug report may contain: traces of runs, messages without prompts, and numbers."""

import getpass
import json
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress

# Environment variables that a report may contain: those of the software stack.
_STACK = re.compile(
    "(NEURON|LTX|TORCH|PYTORCH|TORCHINDUCTOR|XLA|PJRT|NKI|OMP|GOMP|KMP|MKL|OPENBLAS|GLOO|MALLOC)_"
)
_SECRET_NAME = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(^|_)(KEY|PAT)(_|$)|APIKEY", re.I)
_SHORTEST_SECRET = 6  # characters; shorter ones occur in other words
# Lines that may have a secret, a prompt or a machine's address.
_PRIVATE = r"""
    PRIVATE\ KEY | ^[A-Za-z0-9+/=]{40,}$ | \b(AKIA|ASIA)[A-Z0-9]{16} | \beyJ[\w-]{8} | arn:aws
    | \b(hf_|gh[pousr]_|github_pat_|sk-|xox[abprs]-|glpat-)[\w-]{16} | \bi-[0-9a-f]{8} | ://[^\s/]+@
    | bearer\s | (token|secret|passw(or)?d|api_?key|access_key(_id)?|credentials?)["']?\s*[=:]
    | prompt["']?\s*[=:] | --(negative-)?prompt"""
_PATH = re.compile(r"(?<![\w./])~?(?:/[^\s/:'\"=,;()\[\]]+)+/?")
_SYSTEM = ("/dev/", "/etc/", "/lib/", "/opt/", "/proc/", "/sys/", "/usr/")
_PROGRAM_FILE = re.compile(
    r".*?/((?:(?<=/site-packages/)|(?<=/src/)).+\.py|[^/]+\.(?:py|so|log|txt|json|hlo|neff|mlir))"
)
# Names and values that tell nothing.
_COMMON = {"root", "ubuntu", "ec2-user", "ssm-user", "admin", "user", "nobody", "runner"}
_COMMON |= {"localhost", "neuron", "trn2", "trainium", "disabled", "enabled", ""}
# Lines of a run's log: a frame, what ranks and the runtime say, the machine's load.
_TRACED = re.compile(
    r"""\s*File\ "[^"]+",\ line\ \d+ | (error:\ )?([\w.]+:\ )?\[?rank\ \d | .*\b(NCC|NRT|NERR)_\w
    | load:|/proc/pressure/|Mem\w+:|SwapFree: | exit\ code\ \d
    | \d{4}-\d\d-\d\d\ """,
    re.X,
)
_RAISED = re.compile(r"(error: )?[\w.]*(Error|Exception|Interrupt|Exit)(?=:|$)")
_REPORTED = {"profile", "versions", "identity", "phases", "seconds", "recipe", "upscale", "sampler"}
_REPORTED |= {"denoise_steps_ms", "warm_step_ms", "launches_per_step", "collectives_per_step"}
_REPORTED |= {"weight_swaps", "bytes_to_device_per_step", "memory"}


def stack_environment(environment: Mapping[str, str]) -> list[str]:
    """The lines of the variables that a report may contain, except those with a secret's name."""
    names = sorted(filter(_STACK.match, environment))
    return [f"{name}={environment[name]}" for name in names if not _SECRET_NAME.search(name)]


def public(text: str) -> str:
    """Messages with cut paths, without lines that may have a secret, a prompt or a name."""
    values = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    secrets = [part for value in values for part in value.split() if len(part) >= _SHORTEST_SECRET]
    known = [re.escape(secret) for secret in secrets if secret.lower() not in _COMMON]
    known += [rf"(?<!\w){re.escape(name)}(?!\w)" for name in _names() if name not in _COMMON]
    private = re.compile("|".join([*known, rf"(?xi:{_PRIVATE})"]))
    text = _PATH.sub(lambda match: _cut(match[0]), text)
    return "\n".join(line for line in text.split("\n") if not private.search(line))


def trace(text: str) -> str:
    """Of a run's log: the frames of tracebacks without their code, the types of exceptions, what
    ranks, compiler and runtime say, and the machine's load. Other lines may quote a prompt."""
    lines = []
    for line in text.split("\n"):
        raised = _RAISED.match(line)
        if _TRACED.match(line):
            lines.append(line)
        elif raised:
            lines.append(raised[0])
    return public("\n".join(lines))


def numbers(text: str) -> str:
    """Of a report or a video's JSON: versions, digests, times and the numbers of the job."""
    content = json.loads(text)
    if not (isinstance(content, dict) and {"profile", "versions"} <= content.keys()):
        raise ValueError("not a report")
    reported = {"job": _numbers_of(job)} if isinstance(job := content.get("job"), dict) else {}
    return public(json.dumps(_numbers_of(content) | reported, indent=1))


def _numbers_of(content: dict) -> dict:
    simple = int | float | None  # also true and false
    return {k: v for k, v in content.items() if k in _REPORTED or isinstance(v, simple)}


def _cut(path: str) -> str:
    if path.startswith(_SYSTEM):
        return path
    file = _PROGRAM_FILE.fullmatch(path)
    return f"…/{file[1]}" if file else "…"


def _names() -> list[str]:
    with suppress(KeyError, OSError):  # a container's user id without a name
        return [getpass.getuser(), platform.node()]
    return [platform.node()]
