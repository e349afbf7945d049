"""Encoding a prompt on this machine: our host fallback beside ltx-core's 1024 padded tokens,
released widths, random weights.

    python benchmarks/text_encode.py

Both take the same token ids and the same bf16 weights of Gemma3, the projections and both
connectors, and compute in float32 (--dtype). A release has 48 layers of Gemma3 and 8 blocks in each
connector; here are 6 and 1, an eighth of each, so that the reference's weights fit in memory: the
ratio is that of the whole. The reference (transformers' Gemma3 as ltx-core calls it, then
ltx-core's EmbeddingsProcessor) has its weights in memory; ours reads them at every prompt, from
files that the system has in its cache, and that is in its time. They run in turn in one process;
medians count. The last line is how many times faster ours is.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.host.arithmetic import fastest_libraries
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.machine import processor as processor_name
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.text.host_encoder import HostTextEncoder
from ltx_neuron.tiny import TinySizes
from ltx_neuron.tiny.config import merge, released_config, tiny_config
from ltx_neuron.tiny.gemma import gemma_config as tiny_gemma_config
from ltx_neuron.tiny.gemma import gemma_weights
from ltx_neuron.tiny.weights import DIFFUSION, random_weights
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.sharding import MODELS
from ltx_neuron.weights.tensorfile import DTYPES

LAYERS, BLOCKS = 6, 1  # an eighth of the release's 48 and 8
RELEASED = TinySizes(
    gemma_layers=LAYERS,
    gemma_heads=16,
    gemma_kv_heads=8,
    gemma_head_dim=256,
    gemma_hidden=3840,
    gemma_intermediate=15360,
    gemma_sliding_window_pattern=6,
)
TINY = TinySizes(gemma_layers=LAYERS, connector_layers=BLOCKS, gemma_sliding_window_pattern=6)
PARTS = {"Gemma3": "_states", "features": "_features", "connectors": "_connect"}
PUBLISHED = {
    "video_connector.": DIFFUSION + "video_embeddings_connector.",
    "audio_connector.": DIFFUSION + "audio_embeddings_connector.",
    "feature_extractor.": "text_embedding_projection.",
}


class Clock:
    """Seconds of named parts, the runs of each in a list."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def part(self, name: str):
        began = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name][1:])  # the first run is cold


class Reference:
    """What ltx-core runs: Gemma3 over 1024 tokens, padded on the left, all hidden states, features,
    connectors."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, dtype: torch.dtype, clock: Clock):
        from transformers import Gemma3ForConditionalGeneration

        self.clock = clock
        model = Gemma3ForConditionalGeneration.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True
        )
        self.gemma = model.eval().model
        self.processor = processor(checkpoint.config, folder)
        weights = {}
        for name in self.processor.state_dict():
            prefix = next(prefix for prefix in PUBLISHED if name.startswith(prefix))
            weights[name] = checkpoint.read(PUBLISHED[prefix] + name.removeprefix(prefix)).to(dtype)
        self.processor.load_state_dict(weights, strict=True, assign=True)

    @torch.no_grad()
    def encode(self, ids: list[int]) -> Contexts:
        padding = TEXT_TOKENS - len(ids)
        mask = torch.tensor([[0] * padding + [1] * len(ids)])
        processor, part = self.processor, self.clock.part
        with part("all"):
            with part("Gemma3"):
                padded = torch.tensor([[0] * padding + ids])
                states = self.gemma(
                    input_ids=padded, attention_mask=mask, output_hidden_states=True
                ).hidden_states
            with part("features and connectors"):
                extractor, seconds = processor.feature_extractor.forward, self.clock
                with mock.patch.object(
                    processor.feature_extractor, "forward", timed(seconds, "features", extractor)
                ):
                    contexts = processor.process_hidden_states(states, mask)
        return Contexts(
            contexts.video_encoding, contexts.audio_encoding, mask, torch.stack(states, -1)
        )


def timed(clock: Clock, name: str, function):
    """The function, its runs timed as a part."""

    @wraps(function)
    def run(*args):
        with clock.part(name):
            return function(*args)

    return run


class Ours(HostTextEncoder):
    """The host's encoder, its parts timed."""

    def __init__(self, clock: Clock, *args):
        super().__init__(*args)
        self.clock = clock
        for name, method in PARTS.items():
            setattr(self, method, timed(clock, name, getattr(self, method)))

    def encode(self, prompts: list[list[int]]) -> list[Contexts]:
        with self.clock.part("all"):
            return super().encode(prompts)

    def read(self) -> None:
        """Read the weights of all layers and blocks, as an encoding does, without running them."""
        lists = [
            self.encoder.layers,
            *(c.transformer_1d_blocks for c in self.connectors.children()),
        ]
        with self.clock.part("reading layers and blocks"):
            for layers in lists:
                for _ in layers:
                    pass


def processor(config: dict, gemma_root: Path):
    """ltx-core's EmbeddingsProcessor on the meta device, for the Gemma3 of that folder."""
    import_ltx_core()
    from ltx_core.text_encoders.gemma.encoders import encoder_configurator

    # The projections' width follows from a configuration of Gemma3-12B written out in ltx-core.
    sizes = json.loads((gemma_root / "config.json").read_text())["text_config"]
    patched = SimpleNamespace(text_config=SimpleNamespace(**sizes))
    with (
        mock.patch.object(encoder_configurator, "GEMMA3_CONFIG_FOR_LTX", patched),
        torch.device("meta"),
    ):
        return encoder_configurator.EmbeddingsProcessorConfigurator.from_config(config).eval()


def write_release(folder: Path, tiny: bool) -> Path:
    """Gemma3's folder, with the text part of a checkpoint in it; returns the checkpoint's path."""
    sizes = TINY if tiny else RELEASED
    blocks = {"connector_num_layers": BLOCKS, "audio_connector_num_layers": BLOCKS}
    config = merge(tiny_config(sizes) if tiny else released_config(), {"transformer": blocks})
    content = tiny_gemma_config(sizes)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(gemma_weights(content, sizes.seed), folder / "model.safetensors", {"format": "pt"})
    random = random_weights(
        processor(config, folder).state_dict(), torch.Generator().manual_seed(0)
    )
    weights = {}
    for name in list(random):
        prefix = next(prefix for prefix in PUBLISHED if name.startswith(prefix))
        weights[PUBLISHED[prefix] + name.removeprefix(prefix)] = random.pop(name).bfloat16()
    save_file(
        weights,
        folder / "checkpoint.safetensors",
        {"config": json.dumps(config), "model_version": "2.3.0"},
    )
    return folder / "checkpoint.safetensors"


def distance(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=60, help="of the prompt (default %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed runs of each (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="default: all cores, %(default)s"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the 4 GB of weights are written for the run (default: the system's)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny widths: shows that this script runs"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    dtype = DTYPES[args.dtype]
    clocks = {"reference": Clock(), "ours": Clock()}
    checkpoint = Checkpoint(write_release(folder, args.tiny))
    files = [checkpoint, *gemma_files(folder)]
    gemma, config = gemma_config(folder), transformer_config(checkpoint.config)
    libraries, source = fastest_libraries(), Source(MODELS["gemma3"], files)
    ours = Ours(clocks["ours"], source, gemma, config, dtype, libraries)
    reference = Reference(folder, checkpoint, dtype, clocks["reference"])
    ids = torch.randint(
        7, gemma.vocab_size, (args.tokens,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    print(
        f"{args.tokens} tokens, {args.dtype}, {LAYERS} layers of {gemma.hidden_size}, {BLOCKS}"
        f" block a connector, {args.threads} threads, torch {torch.__version__}, transformers"
        f" {version('transformers')}, ltx-core {version('ltx-core')}, load average"
        f" {os.getloadavg()[0]:.1f}, {processor_name()}; products by"
        f" {', '.join(f'{name}: {library}' for name, library in libraries._asdict().items())}",
        flush=True,
    )
    for _ in range(args.repeats + 1):
        wanted = reference.encode(ids)
        (got,) = ours.encode([ids])
        ours.read()
    for name, clock in clocks.items():
        print(
            f"{name:10}"
            + ", ".join(f" {seconds:.3f}" for seconds in clock.seconds["all"])
            + " s, the first one cold"
        )
    theirs, own = clocks["reference"], clocks["ours"]
    rest = theirs.median("features and connectors") - theirs.median("features")
    parts = {
        "Gemma3": theirs.median("Gemma3"),
        "features": theirs.median("features"),
        "connectors": rest,
    }
    for name, seconds in parts.items():
        print(
            f"{name:10}  reference {seconds:8.3f} s, ours {own.median(name):7.3f} s,"
            f" {seconds / own.median(name):5.1f} times"
        )
    print(
        f"ours reads layers and blocks in {own.median('reading layers and blocks'):.3f} s of these"
    )
    own_tokens = slice(TEXT_TOKENS - args.tokens, None)
    print(
        "relative L2: "
        + ", ".join(
            f"{name} {distance(getattr(got, name)[part], getattr(wanted, name)[part]):.1e}"
            for name, part in (("hidden_states", (0, own_tokens)), ("video", 0), ("audio", 0))
        )
    )
    print(f"reference {theirs.median('all'):.3f} s, ours {own.median('all'):.3f} s")
    print(f"{theirs.median('all') / own.median('all'):.2f} times as fast as the reference")


if __name__ == "__main__":
    main()
