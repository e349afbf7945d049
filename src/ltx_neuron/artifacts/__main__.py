"""Send finished weights and compiled graphs to a store, and take them on other machines: what was
made once is made nowhere else.

push URL    send what the store lacks
pull URL    take what is missing or damaged here
list URL    what there is

URL is a folder, s3://bucket/path, hf://owner/name/path, or another one that fsspec knows. Files are
stored by their digests and checked by them; typed again after an interruption, push and pull go on.
Calibrations and cached prompts stay where they are, and so does what a compiler of the ranks keeps.

python -m ltx_neuron.artifacts push s3://bucket/ltx
python -m ltx_neuron.artifacts pull s3://bucket/ltx --only graphs --only 'weights/dit*'
"""

import argparse
from pathlib import Path

from ltx_neuron.artifacts.choices import decoded, is_choice
from ltx_neuron.artifacts.sets import ArtifactSet
from ltx_neuron.artifacts.store import Store
from ltx_neuron.artifacts.transfer import in_units, pull, push, selected
from ltx_neuron.errors import UserError, run
from ltx_neuron.files import check_folder

_MODELS = {
    "dit": "transformer",
    "gemma3": "text encoder",
    "connectors": "connectors",
    "vae": "video decoder",
    "sound": "mel decoder and vocoder",
}
_IN_NAME = ("kind", "model", "bucket", "tp", "dtype", "layout")  # of an identity: said elsewhere


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ltx_neuron.artifacts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("action", choices=["push", "pull", "list"])
    add("url", metavar="URL", help="where the artifacts are stored")
    help = "where weights and graphs lie here (default: artifacts)"
    add("--artifacts-dir", type=Path, default=Path("artifacts"), metavar="DIR", help=help)
    help = "a kind, a model, or a name that list shows, * for any; repeatable (default: all)"
    add("--only", action="append", default=[], metavar="NAME", help=help)
    help = "push: send also what is there, which mends a damaged store"
    add("--again", action="store_true", help=help)
    help = "pull: read every byte of what is here already, not only the sizes of weights"
    add("--verify", action="store_true", help=help)
    options = parser.parse_args(argv)
    for flag, action in (("again", "push"), ("verify", "pull")):
        if getattr(options, flag) and options.action != action:
            parser.error(f"--{flag} goes with {action}, got {options.action}")
    return options


def main(argv: list[str] | None = None) -> None:
    """Push, pull or list."""
    options = parse_arguments(argv)
    store = Store(options.url)
    if options.action == "push":
        push(store, options.artifacts_dir, options.only, options.again)
    elif options.action == "pull":
        check_folder(options.artifacts_dir, "--artifacts-dir DIR")
        pull(store, options.artifacts_dir, options.only, options.verify)
    else:
        print(table(store, options.only))


def table(store: Store, only: list[str]) -> str:
    """What a store has, for a person."""
    names = selected(store.names(), only, store.url)
    return "\n".join(_lines(store, name) for name in names) or f"{store.url} holds no artifacts"


def _lines(store: Store, name: str) -> str:
    try:
        if is_choice(name):
            said = facts_of_choice(**store.opened(name, decoded))
        else:
            said = facts(store.described(name))
    except UserError as error:
        said = [str(error)]
    return f"{name}\n    {'; '.join(said)}"


def facts_of_choice(choice: dict, pushed: str) -> list[str]:
    """What a tuning chose, and for what."""
    identity = choice["identity"]
    rest = [f"{field} {_said(value)}" for field, value in identity.items()]
    return [f"settings of a tuning of {len(choice.get('sizes', ()))} sizes", _said(pushed), *rest]


def facts(described: ArtifactSet) -> list[str]:
    """What a set is, and all that its identity says it was made from and for."""
    identity = described.identity
    model = _MODELS.get(identity["model"], identity["model"])
    bucket = f" {identity['bucket']}" if "bucket" in identity else ""
    first = f"{identity['kind']} of the {model}{bucket}, TP {identity['tp']}, {identity['dtype']}"
    size = f"{in_units(described.bytes)} in {len(described.files)} files"
    rest = {field: value for field, value in identity.items() if field not in _IN_NAME}
    rest = [f"{field} {_said(value)}" for field, value in rest.items()]
    return [_said(first), f"{size}, {_said(described.pushed)}", *rest]


def _said(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_said, value)) or "none"
    text = "none" if value is None or value == "" else str(value)
    return "".join(sign if sign.isprintable() else "?" for sign in text)  # others wrote it


if __name__ == "__main__":
    run(main)
