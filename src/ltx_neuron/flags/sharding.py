"""The flags of the shard scripts."""

import argparse
from pathlib import Path

from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder
from ltx_neuron.flags.jobs import lora_fields
from ltx_neuron.flags.resolve import weight_sets
from ltx_neuron.profiles import resolve
from ltx_neuron.workspace import ShardRequest


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


def shard_request(args: argparse.Namespace) -> ShardRequest:
    """What the flags of a shard script ask for. Raises UserError for flags that exclude others."""
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
    profile = resolve(args.profile, tuple(args.profile_set))
    return ShardRequest(
        args.artifacts_dir,
        profile.degree(args.tp_degree),
        args.dtype,
        args.verify,
        args.from_shards,
        args.num_workers,
        weight_sets(lora_fields(args)) if "lora" in args else ((),),
    )
