"""Encoding a prompt on this machine: our host fallback beside ltx-core's 1024 padded tokens,
released widths, random weights.

    python benchmarks/text_encode.py

Both take the same token ids and the same bf16 weights of Gemma3, the projections and both
connectors, and compute in float32 (--dtype). A release has 48 layers of Gemma3 and 8 blocks in each
connector; here are 6 and 1, an eighth of each, so that the reference's weights fit in memory: the
ratio is that of the whole. The reference (transformers' Gemma3 as ltx-core calls it, then
ltx-core's EmbeddingsProcessor) has its weights in memory; ours reads them at every prompt, from
files that the system has in its cache, and that is in its time. They run in turn in one process;
medians count. The last line is JSON.
"""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from lib.harness import finish, print_conditions, print_ratios, take_turns
from lib.harness import parser as harness_parser
from lib.random_sources import GEMMA_SIZES
from safetensors.torch import save_file
from tiny import TinySizes
from tiny.config import merge, released_config, tiny_config
from tiny.gemma import gemma_config as tiny_gemma_config
from tiny.gemma import gemma_weights
from tiny.weights import DIFFUSION, random_weights

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.text.host_encoder import HostTextEncoder
from ltx_neuron.tune.variant import rel_l2
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import DTYPES

REFERENCE = "ltx-core"
LAYERS, BLOCKS = 6, 1  # an eighth of the release's 48 and 8
RELEASED = replace(GEMMA_SIZES, gemma_layers=LAYERS, gemma_vocab=TinySizes.gemma_vocab)
TINY = TinySizes(gemma_layers=LAYERS, connector_layers=BLOCKS, gemma_sliding_window_pattern=6)
PUBLISHED = {
    "video_connector.": DIFFUSION + "video_embeddings_connector.",
    "audio_connector.": DIFFUSION + "audio_embeddings_connector.",
    "feature_extractor.": "text_embedding_projection.",
}


class Reference:
    """What ltx-core runs: Gemma3 over 1024 tokens, padded on the left, all hidden states, features,
    connectors."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, dtype: torch.dtype):
        from transformers import Gemma3ForConditionalGeneration

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

    def encode(self, ids: list[int]) -> Contexts:
        padding = TEXT_TOKENS - len(ids)
        mask = torch.tensor([[0] * padding + [1] * len(ids)])
        padded = torch.tensor([[0] * padding + ids])
        states = self.gemma(
            input_ids=padded, attention_mask=mask, output_hidden_states=True
        ).hidden_states
        made = self.processor.process_hidden_states(states, mask)
        states = torch.stack(states, -1)
        return Contexts(made.video_encoding, made.audio_encoding, mask, states)


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


def main() -> None:
    parser = harness_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=60, help="of the prompt (default %(default)s)")
    add("--repeats", type=int, default=5, help="timed runs of each (default %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="default: all cores, %(default)s")
    add("--dtype", choices=DTYPES, default="float32")
    help = "where the 4 GB of weights are written for the run (default: the system's)"
    add("--folder", type=Path, help=help)
    add("--tiny", action="store_true", help="tiny widths: shows that this script runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    dtype, checkpoint = DTYPES[args.dtype], Checkpoint(write_release(folder, args.tiny))
    gemma, config = gemma_config(folder), transformer_config(checkpoint.config)
    source = Source(SHARDED_MODELS["gemma3"], [checkpoint, *gemma_files(folder)])
    ours = HostTextEncoder(source, gemma, config, dtype)
    reference = Reference(folder, checkpoint, dtype)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(7, gemma.vocab_size, (args.tokens,), generator=generator).tolist()
    print_conditions(
        f"{args.tokens} tokens, {args.dtype}, {LAYERS} layers of {gemma.hidden_size}, {BLOCKS}"
        f" block a connector; transformers {version('transformers')}"
    )
    ways = {REFERENCE: lambda: reference.encode(ids), "ours": lambda: ours.encode([ids])[0]}
    turns = take_turns(ways, args.repeats)
    wanted, got = turns[REFERENCE].result, turns["ours"].result
    own_tokens = slice(TEXT_TOKENS - args.tokens, None)
    parts = {"hidden_states": (0, own_tokens), "video": 0, "audio": 0}
    distances = {
        name: rel_l2(getattr(got, name)[part], getattr(wanted, name)[part])
        for name, part in parts.items()
    }
    shown = ", ".join(f"{name} {distance:.1e}" for name, distance in distances.items())
    print(f"relative L2: {shown}")
    print_ratios(turns, REFERENCE)
    summaries = {name: taken.summary() for name, taken in turns.items()}
    finish(args, ways=summaries, rel_l2=distances)


if __name__ == "__main__":
    main()
