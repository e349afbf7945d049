"""What a shard script does: cut a model's weights for the ranks, verify them, or cut finished rank
files anew for another tp or dtype."""

from dataclasses import dataclass
from pathlib import Path

from ltx_neuron import artifacts
from ltx_neuron.errors import UserError
from ltx_neuron.weights.rankfiles import RankSource, check_whole, verify
from ltx_neuron.weights.sharder import cuts_of
from ltx_neuron.weights.sharder import shard as write_rank_files
from ltx_neuron.weights.tensorfile import DTYPES
from ltx_neuron.workspace import Workspace


@dataclass(frozen=True)
class ShardRequest:
    """What is asked of a shard script.

    verify       check finished folders instead of writing
    from_shards  a finished folder to be cut anew, instead of a checkpoint
    workers      writing threads; one a file where None
    """

    artifacts_dir: Path
    tp: int
    dtype: str
    verify: bool = False
    from_shards: Path | None = None
    workers: int | None = None


def shard(model: str, workspace: Workspace | None, request: ShardRequest) -> None:
    """Cut or verify the weights of `model`, "dit" or "gemma3", and print the folders.

    workspace  of the checkpoint; None without one
    """
    if request.from_shards:
        print(f"weights: {reshard(model, request)}")
    elif not workspace:
        _verify_finished(model, request.artifacts_dir)
    elif request.verify:
        for path in workspace.verify_dit() if model == "dit" else workspace.verify_gemma3():
            print(f"whole, and bit for bit the source: {path}")
    else:
        workers = request.workers
        dit = model == "dit"
        for path in workspace.shard_dit(workers) if dit else [workspace.shard_gemma3(workers)]:
            print(f"weights: {path}")


def reshard(model: str, request: ShardRequest) -> Path:
    """Make the rank files of another tp or dtype from finished ones, without the checkpoint.

    Returns their folder. Raises UserError where the finished ones cannot give that tp or dtype.
    """
    source, dtype = RankSource(request.from_shards), DTYPES[request.dtype]
    if source.model.name != model:
        raise UserError(
            f"{request.from_shards} holds weights of {source.model.name}, wanted {model}: use its"
            " own shard script"
        )
    source.check(request.tp, dtype)
    identity = source.identity | {"tp": request.tp, "dtype": request.dtype}
    path = artifacts.folder(request.artifacts_dir, identity)
    cuts = cuts_of(source, request.tp, {})
    if not write_rank_files(source, path, identity, request.tp, dtype, cuts, request.workers):
        print(f"already there, nothing to do: {path}")
    return path


def _verify_finished(model: str, artifacts_dir: Path) -> None:
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
