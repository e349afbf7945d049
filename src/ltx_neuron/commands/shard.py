"""ltx-neuron shard MODEL: the weights of one model, in one file per rank; ltx-neuron verify checks
those of all models."""

import argparse
from typing import TYPE_CHECKING

from ltx_neuron import flags
from ltx_neuron.command_line import advanced
from ltx_neuron.commands import choose
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder

if TYPE_CHECKING:
    from ltx_neuron.weights.lora import WeightSet

# Model -> a line of help, and the description
_MODELS = {
    "transformer": (
        "the DiT, also with LoRAs merged in",
        "Shard the DiT's weights into one file per rank.",
    ),
    "gemma3": (
        "Gemma, the text projections and the connectors",
        "Shard the weights of Gemma, the text projections and the connectors into one file per"
        " rank.",
    ),
    "vae": (
        "the video VAE, for --neuron-vae",
        "For --neuron-vae, copy the weights of the video VAE, and with --profile-set"
        " sound_on_ranks=true those of mel decoder and vocoder, into one file per model.",
    ),
}
_DESCRIPTION = """Check every finished weight set against its manifest. With --checkpoint-path (and
--gemma-root, for Gemma) compare it bit for bit with those files as well. Write nothing."""
_EXAMPLE = """ltx-neuron verify --checkpoint-path ltx-2.3-22b-distilled.safetensors \\
    --gemma-root gemma-3-12b"""


def main(argv: list[str]) -> None:
    model, argv = choose("shard", {name: line for name, (line, _) in _MODELS.items()}, argv)
    name, gemma = "dit" if model == "transformer" else model, model == "gemma3"
    example = f"ltx-neuron shard {model} --checkpoint-path ltx-2.3-22b-distilled.safetensors"
    example += " \\\n    --gemma-root gemma-3-12b" * gemma
    parser = flags.parser(_MODELS[model][1], example, gemma, required=False, verb=f"shard {model}")
    if name != "vae":
        flags.add_job(parser, flags.WEIGHTS)
    add = flags.group(parser, "sharding").add_argument
    help = "write nothing: check sharded weights against their digests and, with --checkpoint-path,"
    help += " bit for bit against the checkpoint"
    add("--verify", action="store_true", help=help)
    help = "threads that write (default: one per file)"
    advanced(add("--num-workers", type=int, metavar="N", help=help))
    args = parser.parse_args(argv)
    from ltx_neuron.artifacts import build  # torch and all

    args.needs_gemma = gemma
    if args.num_workers is not None and args.num_workers < 1:
        raise UserError(f"--num-workers {args.num_workers}: wanted 1 or more")
    if not (args.checkpoint_path or args.verify):
        raise UserError("no weights to shard; type --checkpoint-path FILE")
    if not args.verify:
        check_folder(args.artifacts_dir, "--artifacts-dir DIR")
    if not args.checkpoint_path:
        build.check_finished(name, args.artifacts_dir)
        return
    workspace = flags.workspace(args, writes=False, tuned=False)
    needs = workspace.weight_sets(name, ((),) if name == "vae" else _sets(args))
    if args.verify:
        build.check_bytes(workspace, needs)
        return
    for path in build.make(workspace, needs, args.num_workers):
        print(f"weights: {path}")


def verify(argv: list[str]) -> None:
    parser = flags.parser(_DESCRIPTION, _EXAMPLE, gemma=True, required=False, verb="verify")
    flags.add_job(parser, flags.WEIGHTS)
    args = parser.parse_args(argv)
    from ltx_neuron.artifacts import build, finished_weights  # torch and all

    models = [m for m in ("dit", "gemma3", "vae") if finished_weights(args.artifacts_dir, m)]
    if not models:
        raise UserError(
            f"no finished weights in {args.artifacts_dir}; choose another place with"
            " --artifacts-dir DIR"
        )
    workspace = flags.workspace(args, writes=False) if args.checkpoint_path else None
    for model in models:
        if workspace and (model != "gemma3" or workspace.gemma_root):
            sets = _sets(args) if model == "dit" else ((),)
            build.check_bytes(workspace, workspace.weight_sets(model, sets))
        else:
            build.check_finished(model, args.artifacts_dir)


def _sets(args: argparse.Namespace) -> tuple["WeightSet", ...]:
    return flags.spec(args).weight_sets
