"""ltx-neuron demo: a small trained model, and the commands for a clip."""

from pathlib import Path

from ltx_neuron import invocation
from ltx_neuron.command_line import Parser
from ltx_neuron.demo import ASSETS, assets_in
from ltx_neuron.errors import UserError

_SIZE = ["--height", "128", "--width", "192", "--num-frames", "49", "--two-stage"]
_PROMPT = "a red circle glides slowly to the right on a navy ground"


def main(argv: list[str]) -> None:
    description = "Print the paths of the demo's files and the two commands for a clip."
    parser = Parser(prog=invocation.command("demo"), description=description)
    help = "folder of the demo's files (default: the one in the package)"
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=help)
    folder = parser.parse_args(argv).folder
    assets = assets_in(folder) if folder else ASSETS
    if absent := [path for path in assets if not path.exists()]:
        raise UserError(
            f"the demo's files (25 MB) are missing: no {absent[0]}\nA wheel has none of them. Get"
            " the folder src/ltx_neuron/demo of the repository or of the source distribution, and"
            f" type: {invocation.command('demo', 'DIR')}"
        )
    for name, path in assets._asdict().items():
        print(f"{name:18} {path}")
    flags = ["--checkpoint-path", assets.checkpoint, "--gemma-root", assets.gemma_root]
    flags += ["--spatial-upsampler-path", assets.spatial_upsampler, *_SIZE, "--neuron-gemma"]
    print(f"\n{invocation.command('prepare', *flags)}")
    output = ["--prompt", _PROMPT, "--output-path", "demo.mp4"]
    print(invocation.command("generate", *flags, *output))
