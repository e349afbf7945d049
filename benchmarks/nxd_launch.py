"""What a launch costs the host on NxD: NxD's forward with every input, and the bound inputs of
backends/nxd/runtime.py. Nothing is computed; the runtime's object is a C++ class that returns at
once.

    LTX_NEURON_NXD_SOURCE=<checkout of aws-neuron/neuronx-distributed> PYTHONPATH=test/xla \\
        VENV/bin/python benchmarks/nxd_launch.py

VENV is that of test/xla/make_xla_venv.sh; a C++ compiler and ninja are needed. The graphs have the
released model's inputs, as meta tensors. Between two calls of a graph the streams and the AdaLN
rows change, as from one step to the next. The least CPU time of all calls counts.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nxd_stubs
import torch
from lib.harness import finish, print_conditions
from lib.harness import parser as harness_parser
from tiny.config import released_config

from ltx_neuron.backends.nxd.compile import XlaComm, argument_name
from ltx_neuron.backends.nxd.runtime import GraphInputs
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.job import Job, Size
from ltx_neuron.models.programs import dit_program

CASES = ((4, 4), (16, 16), (24, 32), (8, 32), (48, 64))  # blocks of a graph, ranks
CHANGED = ("video_hidden", "audio_hidden", "video_rows", "audio_rows")
TAG = "blocks"
RUNTIME = """
#include <torch/custom_class.h>
using Ranked = std::vector<std::vector<at::Tensor>>;
struct Runtime : torch::CustomClassHolder {
  Ranked outputs;
  explicit Runtime(Ranked outputs) : outputs(std::move(outputs)) {}
  Ranked forward_ranked(Ranked inputs) { return outputs; }
};
TORCH_LIBRARY(launch_benchmark, library) {
  library.class_<Runtime>("Runtime").def(torch::init<Ranked>())
      .def("forward_ranked", &Runtime::forward_ranked);
}
"""


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument("--calls", type=int, default=60)
    args = parser.parse_args()
    if lacking := nxd_stubs.missing():
        parser.error(lacking)
    from torch.utils.cpp_extension import load_inline

    with tempfile.TemporaryDirectory() as folder:
        flags = {"extra_cflags": ["-O2"], "is_python_module": False}
        load_inline("launch_benchmark", RUNTIME, **flags)
        library = nxd_stubs.install(Path(os.environ[nxd_stubs.SOURCE]), Path(folder))
        print_conditions(f"CPU milliseconds of a call, least of {args.calls}")
        found = {}
        for blocks, ranks in CASES:
            label = f"{blocks} blocks, {ranks} ranks"
            inputs, first, before, after = measure(blocks, ranks, args.calls)
            calls = 48 // blocks
            found[label] = {"inputs": inputs, "bind_ms": first, "nxd_ms": before, "ms": after}
            print(
                f"{label}: {inputs} inputs, NxDModel.forward {before:.2f}, bound {after:.3f};"
                f" a step of {calls} calls {before * calls:.1f}, {after * calls:.2f};"
                f" to bind {first:.1f}"
            )
        finish(args, **found)
        del library


def measure(blocks: int, ranks: int, calls: int) -> tuple[int, float, float, float]:
    """Number of inputs; milliseconds to bind them once, of NxDModel.forward and of a bound call."""
    config = transformer_config(released_config())
    bucket = Job.of_size(Size(512, 768, 121)).buckets[0]
    program = dit_program(config, bucket, 4, XlaComm(4), torch.bfloat16, blocks)
    graph = program.graphs["blocks"]
    fields = {name: program.fields[name] for name in graph.inputs}
    shapes = {argument_name(name): value.shape for name, value in graph.module.named_parameters()}

    def parts(shape) -> list[torch.Tensor]:
        """A tensor for each rank; every field of the blocks is in bf16."""
        return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(ranks)]

    weights = {name: parts(shape) for name, shape in shapes.items()}
    even = {name: parts(field.shape) for name, field in fields.items()}
    steps = [even, even | {name: parts(fields[name].shape) for name in CHANGED}]
    model = nxd_model({name: field.shape for name, field in fields.items()} | shapes, ranks)
    began = time.process_time()
    inputs = GraphInputs(model, TAG, fields, weights)
    first = 1e3 * (time.process_time() - began)

    def bound(values: dict) -> None:
        for name, tensors in values.items():
            inputs.take(name, tensors)
        inputs.launch(model)

    def whole(values: dict) -> None:
        model(**values, **weights, model_name=TAG, forward_mode="ranked")

    return len(fields | shapes), first, least(whole, steps, calls), least(bound, steps, calls)


def least(call: Callable, steps: list[dict], calls: int) -> float:
    """The least CPU milliseconds of calls that take the steps' values in turn."""
    taken = []
    for number in range(calls):
        began = time.process_time()
        call(steps[number % 2])
        taken.append(time.process_time() - began)
    return 1e3 * min(taken)


def nxd_model(shapes: dict[str, tuple[int, ...]], ranks: int):
    """A loaded NxDModel of one graph with these inputs."""
    from neuronx_distributed import NxDModel
    from neuronx_distributed.trace.model_builder_utils import ModelParamInfo
    from neuronx_distributed.trace.nxd_model.nxd_model import JITWrapper

    model = NxDModel(world_size=ranks)
    model.model_params = [ModelParamInfo(name, True) for name in shapes]
    route = ", ".join(f"{name}: {list(shape)}" for name, shape in shapes.items())
    model.input_shape_map = {f"({route})": [TAG]}
    flattener = nxd_stubs.Flattener(list(range(len(shapes))), None)
    model.flattener_map[TAG] = JITWrapper(flattener)
    outputs = [[torch.empty(1), torch.empty(1)] for _ in range(ranks)]
    model.spmd_models[TAG] = torch.classes.launch_benchmark.Runtime(outputs)
    model.loaded_on_neuron = True
    return model


if __name__ == "__main__":
    main()
