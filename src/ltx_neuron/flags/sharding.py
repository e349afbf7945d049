"""The flags of the shard scripts, and what these do."""

import argparse
from pathlib import Path

from ltx_neuron.errors import UserError, require
from ltx_neuron.files import check_folder
from ltx_neuron.flags.common import workspace
from ltx_neuron.flags.jobs import lora_fields
from ltx_neuron.flags.resolve import weight_sets
from ltx_neuron.profiles import resolve
from ltx_neuron.workspace import reshard, verify_finished


def add_sharding(parser: argparse.ArgumentParser) -> None:
    """What the shard scripts share: checking instead of writing, and another source of weights."""
    add = parser.add_argument
    help = (
        "check finished folders against their manifests, and with --checkpoint-path bit for bit"
        " against the source; write nothing"
    )
    add("--verify", action="store_true", help=help)
    help = "instead of --checkpoint-path: a finished folder, to be cut for another tp or dtype"
    add("--from-shards", type=Path, metavar="DIR", help=help)
    help = "writing threads (default: one a file)"
    add("--num-workers", type=int, metavar="N", help=help)


def shard(model: str, args: argparse.Namespace) -> None:
    """Do what the flags of a shard script say: cut or verify the weights of `model`, "dit",
    "gemma3" or "vae", and print the folders. Raises UserError for flags that exclude others."""
    _check(args)
    tp = resolve(args.profile, tuple(args.profile_set)).degree(args.tp_degree)
    sets = weight_sets(lora_fields(args)) if "lora" in args else ((),)
    if args.checkpoint_path:
        if model == "gemma3":
            example = "Type for example --gemma-root gemma-3-12b"
            require(args.gemma_root, "--gemma-root", "--checkpoint-path", example)
        opened = workspace(args, writes=False)
        if args.verify:
            for path in opened.verify(model, sets):
                print(f"whole, and bit for bit the source: {path}")
        else:
            for path in opened.shard(model, sets, args.num_workers):
                print(f"weights: {path}")
    elif args.verify:
        verify_finished(model, args.artifacts_dir)
    else:
        artifacts, workers = args.artifacts_dir, args.num_workers
        path = reshard(args.from_shards, artifacts, model, tp, args.dtype, workers)
        print(f"weights: {path}")


def _check(args: argparse.Namespace) -> None:
    if args.num_workers is not None and args.num_workers < 1:
        raise UserError(f"--num-workers {args.num_workers}: wanted 1 or more")
    if args.from_shards and (args.checkpoint_path or args.verify):
        raise UserError(
            "--from-shards takes the place of --checkpoint-path and does not go with --verify;"
            " leave one out"
        )
    if not (args.from_shards or args.checkpoint_path or args.verify):
        raise UserError(
            "which weights? Type --checkpoint-path FILE, or --from-shards DIR to cut finished ones"
            " anew"
        )
    if not args.verify:
        check_folder(args.artifacts_dir, "--artifacts-dir DIR")
