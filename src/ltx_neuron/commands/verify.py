"""ltx-neuron verify: checks the sharded weights of all models."""

from ltx_neuron import flags, invocation
from ltx_neuron.artifacts import finished_weights
from ltx_neuron.errors import UserError
from ltx_neuron.workspace import verify_finished

_DESCRIPTION = """Check every finished weight set against its manifest. With --checkpoint-path (and
--gemma-root, for Gemma) compare it bit for bit with those files as well. Write nothing."""
_EXAMPLE = """ltx-neuron verify --checkpoint-path ltx-2.3-22b-distilled.safetensors \\
    --gemma-root gemma-3-12b"""


def main(argv: list[str]) -> None:
    parser = flags.parser(_DESCRIPTION, _EXAMPLE, gemma=True, required=False)
    parser.prog = invocation.command("verify")
    flags.add_loras(parser)
    args = parser.parse_args(argv)
    models = [m for m in ("dit", "gemma3", "vae") if finished_weights(args.artifacts_dir, m)]
    if not models:
        raise UserError(
            f"no finished weights in {args.artifacts_dir}; choose another place with"
            " --artifacts-dir DIR"
        )
    workspace = flags.workspace(args, writes=False) if args.checkpoint_path else None
    sets = flags.spec(args).weight_sets
    for model in models:
        if workspace and (model != "gemma3" or workspace.gemma_root):
            for path in workspace.verify(model, sets if model == "dit" else ((),)):
                print(f"whole, and bit-identical to the source: {path}")
        else:
            verify_finished(model, args.artifacts_dir)
