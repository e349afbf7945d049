"""What the scripts share: a parser with the flags of all, and the Workspace that these say."""

import argparse
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder
from ltx_neuron.profiles import PROFILES, resolve
from ltx_neuron.workspace import Workspace


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are short: the mistake and, for an unknown flag, the nearest one."""

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unknown: {' '.join(unknown)}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nAll flags: python {sys.argv[0]} --help\n")


def parser(
    description: str, example: str, gemma: bool, required: bool = True
) -> argparse.ArgumentParser:
    """A parser with the flags common to all the scripts.

    Abbreviations are off, so that a typo is an error.

    gemma     whether the script reads Gemma's folder too
    required  whether the checkpoint (and Gemma's folder) must be named
    """
    parser = _Parser(
        description=description,
        epilog=f"example:\n  {example}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = ("--checkpoint-path", "--distilled-checkpoint-path", "--model-path")
    help = "the single-file LTX-2.3 checkpoint"
    add(*names, type=Path, required=required, metavar="FILE", help=help)
    if gemma:
        help = "Gemma3-12B: weights and tokenizer"
        add("--gemma-root", type=Path, required=required, metavar="DIR", help=help)
    help = "where weights and graphs lie (default: artifacts)"
    add("--artifacts-dir", type=Path, default=Path("artifacts"), metavar="DIR", help=help)
    help = f"hardware: {', '.join(PROFILES)} (default: this machine's own)"
    add("--profile", metavar="NAME", help=help)
    help = "change one value of the profile, as in attention=matmul; repeatable"
    add("--profile-set", action="append", default=[], metavar="KEY=VALUE", help=help)
    help = "tensor-parallel ranks (default: the profile's)"
    add("--tp-degree", type=int, metavar="N", help=help)
    help = "weights and activations"
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help=help)
    return parser


def add_graph_cut(parser: argparse.ArgumentParser) -> None:
    """How a denoising step is cut into graphs: of the scripts that compile or run them."""
    help = "transformer blocks in one graph; 0: the whole step (default: the profile's)"
    parser.add_argument("--blocks-per-graph", type=int, metavar="N", help=help)


def add_tuned(parser: argparse.ArgumentParser) -> None:
    """Whether tuned settings are taken: of the scripts that compile or run graphs."""
    help = "ignore what python -m ltx_neuron.tune chose; --profile-set wins over it in any case"
    parser.add_argument("--ignore-tuned", action="store_true", help=help)
    parser.add_argument(  # its earlier name
        "--no-tuned", dest="ignore_tuned", action="store_true", help=argparse.SUPPRESS
    )


def workspace(args: argparse.Namespace, writes: bool = True) -> Workspace:
    """The checkpoint, profile and artifacts of the common flags.

    writes  whether the script writes into the artifacts folder, which is then checked for it
    """
    host_dtype = getattr(args, "host_dtype", None)
    settings = [*args.profile_set, *([f"host_dtype={host_dtype}"] if host_dtype else [])]
    profile = resolve(args.profile, tuple(settings))
    if writes:
        check_folder(args.artifacts_dir, "--artifacts-dir DIR")
    blocks = getattr(args, "blocks_per_graph", None)
    if blocks is not None and blocks < 0:
        raise UserError(
            f"--blocks-per-graph {blocks} is negative; type 0 for the whole step in one graph"
        )
    opened = Workspace(
        args.checkpoint_path,
        profile,
        args.artifacts_dir,
        profile.degree(args.tp_degree),
        args.dtype,
        getattr(args, "gemma_root", None),
        blocks,
    )
    opened.ignores_tuned = getattr(args, "ignore_tuned", True)
    if not opened.ignores_tuned:
        opened.take_tuned()
    return opened
