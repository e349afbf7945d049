"""What a shard script does: cut a model's weights for the ranks, verify them, or cut finished rank
files anew for another tp or dtype."""

from dataclasses import dataclass
from pathlib import Path

from ltx_neuron import artifacts
from ltx_neuron.errors import UserError
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.weights.rankfiles import RankSource, check_whole, verify
from ltx_neuron.weights.sharder import shard_specs, shard_weights
from ltx_neuron.weights.tensorfile import DTYPES
from ltx_neuron.workspace import Workspace


@dataclass(frozen=True)
class ShardRequest:
    """What is asked of a shard script.

    verify       check finished folders instead of writing
    from_shards  a finished folder to be cut anew, instead of a checkpoint
    workers      writing threads; one a file where None
    sets         the DiT's weight sets
    """

    artifacts_dir: Path
    tp: int
    dtype: str
    verify: bool = False
    from_shards: Path | None = None
    workers: int | None = None
    sets: tuple[WeightSet, ...] = ((),)


def shard(model: str, workspace: Workspace | None, request: ShardRequest) -> None:
    """Cut or verify the weights of `model`, "dit", "gemma3" or "vae", and print the folders.

    workspace  of the checkpoint; None without one
    """
    if request.from_shards:
        folder, tp, dtype = request.from_shards, request.tp, request.dtype
        path = reshard(folder, request.artifacts_dir, model, tp, dtype, request.workers)
        print(f"weights: {path}")
    elif not workspace:
        _verify_finished(model, request.artifacts_dir)
    elif request.verify:
        for path in workspace.verify(model, request.sets):
            print(f"whole, and bit for bit the source: {path}")
    else:
        for path in workspace.shard(model, request.sets, request.workers):
            print(f"weights: {path}")


def reshard(
    folder: Path, artifacts_dir: Path, model: str, tp: int, dtype: str, workers: int | None = None
) -> Path:
    """Make the rank files of another tp or dtype from a finished folder, without the checkpoint.

    Returns their folder. Raises UserError where the finished ones cannot give that tp or dtype.
    """
    source = RankSource(folder)
    if source.model.name == "sound" and model == "vae":  # both are cut by one script
        dtype = "float32"
    elif source.model.name != model:
        raise UserError(
            f"{folder} holds weights of {source.model.name}, wanted {model}: use its own shard"
            " script"
        )
    source.check(tp, DTYPES[dtype])
    identity = source.identity | {"tp": tp, "dtype": dtype}
    path = artifacts.folder(artifacts_dir, identity)
    specs = shard_specs(source, tp, {})
    if not shard_weights(source, path, identity, tp, DTYPES[dtype], specs, workers):
        print(f"already there, nothing to do: {path}")
    return path


def _verify_finished(model: str, artifacts_dir: Path) -> None:
    """Compare every finished weight set of a model with its manifest."""
    models = ("vae", "sound") if model == "vae" else (model,)  # of one script
    folders = [path for each in models for path in artifacts.finished_weights(artifacts_dir, each)]
    if not folders:
        raise UserError(
            f"no finished {model} weights in {artifacts_dir}; choose another place with"
            " --artifacts-dir DIR"
        )
    for path in folders:
        check_whole(path, verify(path))
        print(f"whole: {path} (with --checkpoint-path it is compared with the source as well)")
