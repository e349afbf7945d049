"""ltx-neuron shard MODEL: the weights of one model, in one file per rank."""

from ltx_neuron import flags, invocation
from ltx_neuron.commands import choose

# Model -> a line of help, and the description
_MODELS = {
    "transformer": ("the DiT, also with LoRAs merged in", "Shard the DiT's weights"),
    "gemma3": (
        "Gemma, the text projections and the connectors",
        "Shard the weights of Gemma, the text projections and the connectors",
    ),
    "vae": (
        "the video VAE, for --neuron-vae",
        "For --neuron-vae, copy the weights of the video VAE, and with --profile-set"
        " sound_on_ranks=true those of mel decoder and vocoder,",
    ),
}


def main(argv: list[str]) -> None:
    model, argv = choose("shard", {name: line for name, (line, _) in _MODELS.items()}, argv)
    name = "dit" if model == "transformer" else model
    shared = " per model" if name == "vae" else " per rank"
    example = f"ltx-neuron shard {model} --checkpoint-path ltx-2.3-22b-distilled.safetensors"
    if name == "gemma3":
        example += " \\\n    --gemma-root gemma-3-12b"
    parser = flags.parser(
        f"{_MODELS[model][1]} into one file{shared}.",
        example,
        gemma=name == "gemma3",
        required=False,
    )
    parser.prog = invocation.command(f"shard {model}")
    if name != "vae":
        flags.add_loras(parser)
    flags.add_sharding(parser)
    flags.shard(name, parser.parse_args(argv))
