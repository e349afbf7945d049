"""Trace the encoder-only Gemma3 (one graph per bucket of tokens) and the text connectors.

python compile/compile_gemma3.py --gemma-root DIR --checkpoint-path CKPT
"""

from ltx_neuron import errors, flags

EXAMPLE = "python compile/compile_gemma3.py --gemma-root gemma-3-12b --checkpoint-path CKPT"


def main() -> None:
    parser = flags.parser(
        "Trace the encoder-only Gemma3 for every bucket of tokens, and the text connectors.",
        EXAMPLE,
        gemma=True,
    )
    flags.add_tuned(parser)
    workspace = flags.workspace(parser.parse_args())
    workspace.say_tuned()
    for path in workspace.compile_text():
        print(f"graphs: {path}")


if __name__ == "__main__":
    errors.run(main)
