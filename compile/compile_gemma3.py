"""Trace the encoder-only Gemma3 (one graph per bucket of tokens) and the text connectors.

python compile/compile_gemma3.py --gemma-root DIR --checkpoint-path CKPT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from ltx_neuron import cli, errors  # noqa: E402


def main() -> None:
    parser = cli.parser(
        "Trace the encoder-only Gemma3 for every bucket of tokens, and the text connectors.",
        "python compile/compile_gemma3.py --gemma-root gemma-3-12b --checkpoint-path CKPT",
        gemma=True,
    )
    for path in cli.workspace(parser.parse_args()).compile_text():
        print(f"graphs: {path}")


if __name__ == "__main__":
    errors.run(main)
