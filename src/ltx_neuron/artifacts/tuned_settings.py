"""The settings that a tuning chose, stored in the artifacts: one file per device, package and code
versions, model sizes, TP degree and dtype.

Run settings apply to whole processes, including the text models: a file has one value of each.
Graph settings apply to the DiT's graphs only, and are chosen for each size.
"""

import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ltx_neuron import machine
from ltx_neuron.artifacts import code_digest, differences
from ltx_neuron.config.common import digest
from ltx_neuron.config.profiles import GRAPH_KEYS, RUN_KEYS, Profile, resolve
from ltx_neuron.config.transformer import Bucket
from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json, write_json
from ltx_neuron.invocation import command

Settings = dict[str, str]  # key -> value, in the notation of --profile-set

_PACKAGES = (
    "torch",
    "torch-neuronx",
    "torch-xla",
    "neuronx-cc",
    "neuronx-distributed",
    "nki",
    "nkilib",
)


def identity(profile: Profile, tp: int, dtype: str, config: str) -> dict:
    """Everything on which tuned settings depend. config: the digest of the model's sizes."""
    versions = {name: version for name in _PACKAGES if (version := machine.package_version(name))}
    return {
        "device": _device(profile),
        "versions": {"python": platform.python_version(), **versions},
        "code": code_digest("torchdist", "backends/nxd/compile"),
        "config": config,
        "tp": tp,
        "dtype": dtype,
    }


def _device(profile: Profile) -> dict:
    """The DiT's device: a build machine compiles with the settings of a Neuron device."""
    name: dict = {"profile": profile.name}
    if profile.context_parallel > 1:
        name["context_parallel"] = profile.context_parallel
    if profile.device == "neuron":
        return name | {"chips": profile.chips, "lnc": profile.lnc}
    if profile.device == "cuda":
        return name | {"gpus": machine.gpus()}
    return name | {"processor": machine.processor(), "threads": profile.host_threads}


def file_of(artifacts: Path, identity: dict) -> Path:
    """artifacts/tuned/<profile>-<tp>-<dtype>-<digest of the whole identity>.json"""
    name = f"{identity['device']['profile']}-tp{identity['tp']}-{identity['dtype']}"
    return Path(artifacts) / "tuned" / f"{name}-{digest(identity)[:8]}.json"


def size_key(buckets: Iterable[Bucket]) -> str:
    """The key of a size's tuned settings: the shapes of its stages, whatever their timesteps."""
    shapes = (
        f"v{bucket.video_tokens}-a{bucket.audio_tokens}"
        f"{'-guided' * bucket.guided}{'-nag' * bucket.nag}"
        for bucket in buckets
    )
    return "+".join(dict.fromkeys(shapes))


@dataclass
class TunedSettings:
    """A file of tuned settings."""

    path: Path
    identity: dict
    run: Settings = field(default_factory=dict)  # run settings
    # Size_key -> graph "settings", the "run" settings during their measurement, and the
    # measurement's results and conditions
    sizes: dict[str, dict] = field(default_factory=dict)
    # Size_key, or "run" -> the settings, as key=value, that changed a profile so far
    used: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def profile_of_run(self, profile: Profile) -> Profile:
        self.used["run"] = changes(profile, self.run)
        return applied(profile, self.run)

    def profile_of_size(
        self, profile: Profile, buckets: Iterable[Bucket], used: bool = True
    ) -> Profile:
        """The profile of a size's DiT graphs. used: whether the caller compiles or runs them."""
        key = size_key(buckets)
        size = self.sizes.get(key)
        if not size or size["run"] != self.run:
            return profile
        if used:
            self.used[key] = changes(profile, size["settings"])
        return applied(profile, size["settings"])

    def step_ms(self, buckets: Iterable[Bucket]) -> float | None:
        """Milliseconds of a warm step of a size, as its tuning measured them."""
        measured = self.sizes.get(size_key(buckets), {}).get("step_ms")
        return measured if isinstance(measured, float) else None

    def line(self) -> str:
        """A line that lists the used settings for the user; empty if there are none."""
        if self.used.keys() == {"run"} and not self.used["run"]:
            return ""
        settings = dict.fromkeys(setting for used in self.used.values() for setting in used)
        text = " ".join(settings) or "the profile's own values are the fastest"
        return f"tuned: {text} ({self.path}; --profile-set tuned=no ignores it)"

    def describe(self) -> dict:
        return {"file": str(self.path), "settings": self.used}

    def write(self) -> None:
        write_json(self.path, {"identity": self.identity, "run": self.run, "sizes": self.sizes})


def load(artifacts: Path, identity: dict) -> TunedSettings | None:
    """The tuned settings for an identity, or None; prints why a file is ignored."""
    path = file_of(artifacts, identity)
    if path.is_file():
        try:
            return _read(path, identity)
        except UserError as error:
            print(f"tuned settings are ignored: {error}")
            return None
    for other in path.parent.glob("*.json"):
        if what := _outdated(other, identity):
            print(
                f"{other} was tuned with other {' and '.join(what)} and is ignored; to tune again,"
                f" type {command('tune')}"
            )
            break
    return None


def _read(path: Path, identity: dict) -> TunedSettings:
    content = read_json(path)
    try:
        if content["identity"] != identity:
            raise ValueError("its identity does not match its name")
        sizes = {
            key: size | {name: _settings(size[name]) for name in ("settings", "run")}
            for key, size in content["sizes"].items()
        }
        return TunedSettings(path, identity, _settings(content["run"]), sizes)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is not a file of tuned settings ({error})") from None


def _settings(settings: dict) -> Settings:
    """The tunable settings of a table; a file from a store may have other keys."""
    if not all(isinstance(value, str) for value in settings.values()):
        raise ValueError("a setting is not text")
    return {key: value for key, value in settings.items() if key in (*RUN_KEYS, *GRAPH_KEYS)}


def _outdated(path: Path, identity: dict) -> list[str]:
    """If a file of this device and model differs only in versions or code: which of the two."""
    try:
        differing = {name for name, _, _ in differences(identity, read_json(path)["identity"])}
    except (UserError, KeyError, TypeError):
        return []
    words = {"versions": "versions", "code": "code of this toolkit"}
    return [words[name] for name in words if name in differing] if differing <= {*words} else []


def text_of(profile: Profile, key: str) -> str:
    """A profile's value in the notation of --profile-set; "" for an absent entry of a table."""
    field, _, entry = key.partition(".")
    value = getattr(profile, field)
    if entry:
        return dict(value).get(entry, "")
    return str(value).lower() if isinstance(value, bool) else str(value)


def typed(profile: Profile) -> set[str]:
    """The keys that the user set with --profile-set."""
    return {setting.partition("=")[0] for setting in profile.settings}


def changes(profile: Profile, settings: Settings) -> tuple[str, ...]:
    """The settings, as key=value, that change the profile and that the user did not type."""
    return tuple(
        f"{key}={value}"
        for key, value in settings.items()
        if key not in typed(profile) and value != text_of(profile, key)
    )


def applied(profile: Profile, settings: Settings) -> Profile:
    """A profile with these settings, which typed ones override; without, if they conflict."""
    try:
        return resolve(profile.name, (*changes(profile, settings), *profile.settings))
    except UserError as error:
        print(f"tuned settings are ignored: {error}")
        return profile
