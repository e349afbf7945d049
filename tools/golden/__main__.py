"""Record what Lightricks' packages make of the tests' jobs: python -m golden [NAME ...]

Run it from the root, with PYTHONPATH=src:tools:test, when the followed release or a job
changes. It writes test/golden/NAME.safetensors for each job of test/golden_jobs.py, or for the named ones.
Wants ltx-pipelines 1.0.0 beside ltx-core.
"""

import argparse
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from engines import drawn_contexts
from golden import upstream
from golden_jobs import JOBS
from helpers import rel
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.sampling.compat import FOLLOWED
from ltx_neuron.weights.checkpoint import Checkpoint
from records import comparable, write


def record(name: str, folder: Path) -> None:
    golden = JOBS[name]
    assets, job = golden.open(folder)
    release = job.compat.rpartition("-")[2] if job.compat else FOLLOWED
    config = transformer_config(Checkpoint(assets.checkpoint).config)

    def generate(dtype: torch.dtype) -> dict[str, Tensor]:
        if golden.encoded:
            tensors = upstream.encode(assets, job.prompt, dtype)
            decode = golden.decoded and dtype == torch.float32
            return tensors | upstream.generate(assets, job, None, dtype, decode)
        contexts = lambda prompt: [each.to(dtype) for each in drawn_contexts(config, prompt)]  # noqa: E731
        return upstream.generate(assets, job, contexts, dtype)

    tensors, metadata = comparable(generate(torch.float32)), {}
    tensors.pop("attention_mask", None)  # it is in the shape of the hidden states
    if not golden.passes:
        tensors = {key: tensor for key, tensor in tensors.items() if "step0" not in key}
    if golden.bfloat16:
        rounded = comparable(generate(torch.bfloat16))
        measured = tensors.keys() & rounded.keys()
        metadata["bfloat16"] = {key: rel(rounded[key], tensors[key]) for key in sorted(measured)}
    packages = {package: version(package) for package in ("ltx-core", "ltx-pipelines")}
    write(name, tensors, release=release, packages=packages, **metadata)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of jobs (default: all)")
    names = parser.parse_args().names or [*JOBS]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            record(name, Path(folder))
            print(name, flush=True)


if __name__ == "__main__":
    main()
