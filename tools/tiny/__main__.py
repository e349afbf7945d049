"""The command line of tiny."""

import argparse
from dataclasses import asdict, fields
from pathlib import Path

import tiny
from ltx_neuron.command_line import Parser
from ltx_neuron.errors import run
from tiny.split import make_split

_MAKERS = {"2.3": tiny.make_tiny, "2.5": make_split}


def parse_arguments() -> argparse.Namespace:
    """Parse the directory, the release, and one flag per field of TinySizes."""
    parser = Parser(prog="python -m tiny", description=tiny.__doc__)
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="folder to write to; an earlier tiny set is replaced",
    )
    help = "release of LTX-2 whose files to write (default: 2.3)"
    parser.add_argument("--version", choices=list(_MAKERS), default="2.3", help=help)
    for size in fields(tiny.TinySizes):
        flag = "--" + size.name.replace("_", "-")
        parser.add_argument(
            flag,
            type=int,
            default=size.default,
            metavar="N",
            help=f"{size.metadata['help']} (default: %(default)s)",
        )
    return parser.parse_args()


def main() -> None:
    """Write the assets and print their paths."""
    arguments = vars(parse_arguments())
    directory = arguments.pop("directory")
    make = _MAKERS[arguments.pop("version")]
    sizes = tiny.TinySizes(**arguments)
    assets = make(directory, sizes)
    for name, path in assets._asdict().items():
        files = path.rglob("*") if path.is_dir() else [path]
        print(f"{name:20s} {sum(file.stat().st_size for file in files) / 1e3:8.1f} kB  {path}")
    print("sizes: " + " ".join(f"{name}={number}" for name, number in asdict(sizes).items()))


if __name__ == "__main__":
    run(main)
