"""Send finished weights and compiled graphs to a store, and take them on other machines: what was
made once is made nowhere else.

push URL    send what the store lacks
pull URL    take what is missing or damaged here
list URL    what there is

URL is a folder, s3://bucket/path, hf://owner/name/path, or another one that fsspec knows. A store
has the folders of --artifacts-dir. Files are checked by their digests; typed again after an
interruption, push and pull go on with the files that are missing. Calibrations and cached prompts
stay where they are, and so does what a compiler of the ranks keeps.

ltx-neuron artifacts push s3://bucket/ltx
ltx-neuron artifacts pull s3://bucket/ltx --only graphs --only 'weights/dit*'
"""

import argparse
import json
from pathlib import Path

from ltx_neuron.artifacts.store import Store, names_in
from ltx_neuron.artifacts.transfer import is_tuned, manifest_file, opened, pull, push, selected
from ltx_neuron.errors import UserError, run
from ltx_neuron.files import check_folder
from ltx_neuron.format import format_bytes
from ltx_neuron.invocation import command

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
        prog=command("artifacts"),
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
    add("--force", "--again", action="store_true", help=help)
    help = "pull: read every byte of what is here already, not only the sizes of weights"
    add("--verify", action="store_true", help=help)
    options = parser.parse_args(argv)
    for flag, action in (("force", "push"), ("verify", "pull")):
        if getattr(options, flag) and options.action != action:
            parser.error(f"--{flag} goes with {action}, got {options.action}")
    return options


def main(argv: list[str] | None = None) -> None:
    """Push, pull or list."""
    options = parse_arguments(argv)
    store = Store(options.url)
    if options.action == "push":
        push(store, options.artifacts_dir, options.only, options.force)
    elif options.action == "pull":
        check_folder(options.artifacts_dir, "--artifacts-dir DIR")
        pull(store, options.artifacts_dir, options.only, options.verify)
    else:
        print(table(store, options.only))


def table(store: Store, only: list[str]) -> str:
    """What a store has, for a person."""
    files = store.files()
    lines = []
    for name in selected(names_in(files), only, store.url):
        try:
            facts = _facts(store, name, files)
        except UserError as error:
            facts = str(error)
        lines.append(f"{name}\n    {facts}")
    return "\n".join(lines) or f"{store.url} holds no artifacts"


def _facts(store: Store, name: str, files: dict[str, int]) -> str:
    """What there is under a name, and all that it was made from and for."""
    identity = opened(store, name).identity
    written = store.written(manifest_file(name))
    if is_tuned(name):
        facts = ["settings of a tuning", written]
    else:
        model = _MODELS.get(identity["model"], identity["model"])
        bucket = f" {identity['bucket']}" if "bucket" in identity else ""
        sizes = [size for file, size in files.items() if file.startswith(f"{name}/")]
        facts = [
            f"{identity['kind']} of the {model}{bucket}, TP {identity['tp']}, {identity['dtype']}",
            f"{format_bytes(sum(sizes))} in {len(sizes)} files, {written}",
        ]
        identity = {field: value for field, value in identity.items() if field not in _IN_NAME}
    # As JSON: others wrote it.
    facts += [f"{field} {json.dumps(value)}" for field, value in identity.items()]
    return "; ".join(facts)


if __name__ == "__main__":
    run(main)
