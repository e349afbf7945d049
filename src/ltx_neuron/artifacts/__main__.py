"""Copy sharded weights and compiled graphs to a store, and from it to other machines.

push URL    upload the files that the store lacks
pull URL    download the files that are missing or damaged here
list URL    list the content of the store

URL is a folder, s3://bucket/path, hf://owner/name/path, or any other URL of fsspec. Digests verify
the files. After an interruption, the same command continues with the missing files.
Cached prompts, measured times and compiler caches are not copied.

ltx-neuron artifacts push s3://bucket/ltx
ltx-neuron artifacts pull s3://bucket/ltx --only graphs --only 'weights/dit*'
"""

import argparse
import json
from pathlib import Path

from ltx_neuron.artifacts.store import Store, names_in
from ltx_neuron.artifacts.transfer import is_tuned, manifest_file, opened, pull, push, selected
from ltx_neuron.command_line import Parser
from ltx_neuron.errors import UserError, run
from ltx_neuron.files import check_folder
from ltx_neuron.format import format_bytes
from ltx_neuron.invocation import command

_MODELS = {
    "dit": "transformer",
    "gemma3": "text encoder",
    "connectors": "connectors",
    "vae": "video decoder",
    "encoder": "video encoder",
    "sound": "mel decoder and vocoder",
}
_IN_NAME = ("kind", "model", "bucket", "tp", "dtype", "layout")  # fields not listed again


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=command("artifacts"), description=__doc__)
    add = parser.add_argument
    add("action", choices=["push", "pull", "list"], help="what to do")
    add("url", metavar="URL", help="the store")
    help = "folder of weights and graphs on this machine (default: artifacts)"
    add("--artifacts-dir", type=Path, default=Path("artifacts"), metavar="DIR", help=help)
    help = "copy only these: a kind, a model, or a name printed by list, with * for any text;"
    help += " repeatable (default: all)"
    add("--only", action="append", default=[], metavar="NAME", help=help)
    help = "push: also upload files that the store has, to repair a damaged store"
    add("--force", action="store_true", help=help)
    help = "pull: check every byte of the files here, not only the sizes of weights"
    add("--verify", action="store_true", help=help)
    options = parser.parse_args(argv)
    for flag, action in (("force", "push"), ("verify", "pull")):
        if getattr(options, flag) and options.action != action:
            parser.error(f"--{flag} needs {action}, got {options.action}")
    return options


def main(argv: list[str] | None = None) -> None:
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
    files = store.files()
    lines = []
    for name in selected(names_in(files), only, store.url):
        try:
            facts = _facts(store, name, files)
        except UserError as error:
            facts = str(error)
        lines.append(f"{name}\n    {facts}")
    return "\n".join(lines) or f"{store.url} has no artifacts"


def _facts(store: Store, name: str, files: dict[str, int]) -> str:
    identity = opened(store, name).identity
    written = store.written(manifest_file(name))
    if is_tuned(name):
        facts = ["tuned settings", written]
    else:
        model = _MODELS.get(identity["model"], identity["model"])
        bucket = f" {identity['bucket']}" if "bucket" in identity else ""
        sizes = [size for file, size in files.items() if file.startswith(f"{name}/")]
        facts = [
            f"{identity['kind']} of the {model}{bucket}, TP {identity['tp']}, {identity['dtype']}",
            f"{format_bytes(sum(sizes))} in {len(sizes)} files, {written}",
        ]
        identity = {field: value for field, value in identity.items() if field not in _IN_NAME}
    # As JSON, because a store's text is not trusted.
    facts += [f"{field} {json.dumps(value)}" for field, value in identity.items()]
    return "; ".join(facts)


if __name__ == "__main__":
    run(main)
