"""What a shard script does once its flags are parsed: cut, verify, or cut finished rank files
anew."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ltx_neuron import artifacts
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder
from ltx_neuron.flags import workspace
from ltx_neuron.profiles import resolve
from ltx_neuron.weights.rankfiles import RankSource, check_whole, verify
from ltx_neuron.weights.sharder import shard_specs, shard_weights
from ltx_neuron.weights.tensorfile import DTYPES
from ltx_neuron.workspace import Workspace


def shard(
    args: argparse.Namespace,
    model: str,
    make: Callable[[Workspace], list[Path]],
    check: Callable[[Workspace], list[Path]],
) -> None:
    """What a shard script does once its flags are parsed."""
    if args.num_workers is not None and args.num_workers < 1:
        raise UserError(f"--num-workers {args.num_workers}: wanted 1 or more")
    if args.from_shards:
        if args.checkpoint_path or args.verify:
            raise UserError(
                "--from-shards takes the place of --checkpoint-path and does not go with --verify;"
                " leave one out"
            )
        check_folder(args.artifacts_dir, "--artifacts-dir DIR")
        profile = resolve(args.profile, tuple(args.profile_set))
        tp = profile.degree(args.tp_degree)
        print(
            "weights:"
            f" {reshard(args.from_shards, args.artifacts_dir, model, tp, args.dtype, args.num_workers)}"
        )
    elif args.checkpoint_path:
        found = (check if args.verify else make)(workspace(args))
        for path in found:
            print(f"{'whole, and bit for bit the source' if args.verify else 'weights'}: {path}")
    elif args.verify:
        _verify_all(args.artifacts_dir, model)
    else:
        raise UserError(
            "which weights? Type --checkpoint-path FILE, or --from-shards DIR to cut finished ones"
            " anew"
        )


def _verify_all(artifacts_dir: Path, model: str) -> None:
    """Compare every finished weight set of a model with its manifest."""
    folders = artifacts.finished_weights(artifacts_dir, model)
    if not folders:
        raise UserError(
            f"no finished {model} weights in {artifacts_dir}; choose another place with"
            " --artifacts-dir DIR"
        )
    for path in folders:
        check_whole(path, verify(path))
        print(f"whole: {path} (with --checkpoint-path it is compared with the source as well)")


def reshard(
    folder: Path, artifacts_dir: Path, model: str, tp: int, dtype: str, workers: int | None = None
) -> Path:
    """Make the rank files of another tp or dtype from finished ones, without the checkpoint;
    returns their folder."""
    source = RankSource(folder)
    if source.model.name != model:
        raise UserError(
            f"{folder} holds weights of {source.model.name}, wanted {model}: use its own shard"
            " script"
        )
    source.check(tp, DTYPES[dtype])
    identity = source.identity | {"tp": tp, "dtype": dtype}
    path = artifacts.folder(artifacts_dir, identity)
    if not shard_weights(
        source, path, identity, tp, DTYPES[dtype], shard_specs(source, tp, {}), workers
    ):
        print(f"already there, nothing to do: {path}")
    return path
