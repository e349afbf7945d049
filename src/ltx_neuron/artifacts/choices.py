"""What tunings chose (tuned/*.json), sent along: a machine of the same kind that has no choice of
its own looks for the graphs that this one was compiled for.

A choice is small: in a store it lies among the sets, with its content in it.
"""

from pathlib import Path
from time import gmtime, strftime

from ltx_neuron.artifacts.sets import NAME, sealed, unsealed
from ltx_neuron.artifacts.store import Store
from ltx_neuron.config import digest
from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json, write_json

KIND = "tuned"


def local_choices(artifacts: Path) -> dict[str, Path]:
    """The files of choices, by name."""
    return {f"{KIND}/{path.stem}": path for path in sorted((artifacts / KIND).glob("*.json"))}


def is_choice(name: str) -> bool:
    return name.startswith(f"{KIND}/")


def encoded(choice: dict, pushed: str) -> bytes:
    return sealed({"choice": choice, "pushed": pushed})


def decoded(text: bytes, name: str) -> dict:
    """{"choice", "pushed"} as `encoded` wrote it; ValueError that says what is wrong with another
    one."""
    content = unsealed(text)
    try:
        _check(content["choice"], name)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no choice of a tuning ({error!r})") from None
    return content


def _check(choice: dict, name: str) -> None:
    """Raise ValueError unless a choice has that name. What it holds is checked where it is read
    (tune/tuned_settings.py)."""
    own = name.removeprefix(f"{KIND}/")
    if not NAME.fullmatch(own) or not own.endswith(f"-{digest(choice['identity'])[:8]}"):
        raise ValueError("its identity is that of another choice")


def push_choice(store: Store, name: str, path: Path, stored: bool) -> bool:
    """Send a choice, unless the same one is `stored`; whether it was sent."""
    choice = read_json(path)
    try:
        _check(choice, name)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what a tuning writes ({error})") from None
    if stored and _stored(store, name) == choice:
        return False
    store.write(name, encoded(choice, strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())))
    return True


def _stored(store: Store, name: str) -> dict | None:
    try:
        return store.opened(name, decoded)["choice"]
    except UserError:  # damaged: it is written again
        return None


def pull_choice(store: Store, name: str, artifacts: Path) -> Path:
    """Take a choice where there is none of its name: one's own is never replaced."""
    choice, path = store.opened(name, decoded)["choice"], artifacts / f"{name}.json"
    if not path.is_file():
        write_json(path, choice)
        print(f"pulled: {path}")
    elif read_json(path) == choice:
        print(f"already there: {path}")
    else:
        print(f"kept: {path}, which differs from the store's")
    return path
