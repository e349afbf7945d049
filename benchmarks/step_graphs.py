"""What a DiT step's graphs hold: whole or cut into groups of blocks, with and without sequence
parallelism. Counted in the graphs of the released size; nothing is computed and no weight exists.

    python benchmarks/step_graphs.py --height 512 --width 768 --num-frames 121
    VENV/bin/python benchmarks/step_graphs.py --hlo

With --hlo the graphs are those that NxD's ModelBuilder gets (torch_xla lowers them, in the venv of
test/xla/make_xla_venv.sh), else those that torch.export writes.
"""

import time

import torch
from lib.harness import finish
from lib.harness import parser as harness_parser
from lint import lower
from tiny.config import released_config

from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group, trace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import Bucket, TransformerConfig, transformer_config
from ltx_neuron.job import Job, Size
from ltx_neuron.models.programs import dit_program

DTYPE = torch.bfloat16
COST = (
    "collectives",
    "collective_bytes",
    "reduce_scatter_bytes",
    "all_gather_bytes",
    "elementwise_bytes",
)


def main() -> None:
    parser = harness_parser(__doc__)
    add = parser.add_argument
    add("--profile", default="trn2.3xlarge")
    add("--height", type=int, default=512)
    add("--width", type=int, default=768)
    add("--num-frames", type=int, default=121)
    add("--blocks-per-graph", type=int, nargs="+", default=[4, 0], metavar="N", help="0: whole")
    add("--hlo", action="store_true", help="count instructions of HLO instead")
    args = parser.parse_args()
    profile, config = resolve(args.profile), transformer_config(released_config())
    size = Size(args.height, args.width, args.num_frames)
    bucket = Job.of_size(size).buckets[0]
    print(
        f"{args.height}x{args.width}, {args.num_frames} frames: {bucket.video_tokens} video and"
        f" {bucket.audio_tokens} audio tokens, {config.num_layers} blocks, bf16, tp {profile.tp},"
        f" attention {profile.attention}, torch {torch.__version__}"
    )
    found = {}
    for blocks in args.blocks_per_graph:
        for divided in (False, True):
            label = f"{f'{blocks} blocks a graph' if blocks else 'whole step'}"
            label += ", sequence parallel" * divided
            counts = found[label] = count(config, bucket, profile, blocks, divided, args.hlo)
            print(f"{label}: " + ", ".join(f"{name} {value:,}" for name, value in counts.items()))
    finish(args, **found)


def count(
    config: TransformerConfig, bucket: Bucket, profile, blocks: int, divided: bool, hlo: bool
) -> dict[str, float]:
    """Operations of the largest graph and, but for HLO, what a step costs a rank."""
    began, tp = time.perf_counter(), profile.tp
    comm = lower.comm(tp) if hlo else TorchDistComm(tp)
    with fake_process_group(tp):
        program = dit_program(config, bucket, tp, comm, DTYPE, blocks, profile.attention, divided)
        if hlo:
            readings = [lower.read(program, name, tp, DTYPE, name) for name in program.graphs]
            operations = [len(reading.check()[0]) for reading in readings]
            costs = {}
        else:
            exported = {name: trace(program, name, DTYPE) for name in program.graphs}
            operations = [
                sum(node.op == "call_function" for node in graph.graph.nodes)
                for graph in exported.values()
            ]
            each = {name: cost(graph) for name, graph in exported.items()}
            costs = {key: sum(each[name][key] for name, _ in program.runs["main"]) for key in COST}
    return {
        "operations of the largest graph": max(operations),
        **costs,
        "seconds": round(time.perf_counter() - began, 1),
    }


if __name__ == "__main__":
    main()
