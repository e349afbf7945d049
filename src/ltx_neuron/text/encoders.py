"""Token ids to contexts, with Gemma and the connectors on the ranks. host_encoder.py: the host.

ltx-core pads a prompt on its left to 1024 tokens, and positions count the padding. It has no other
effect, so only the last positions are encoded: on the ranks a bucket of them.

Shapes: T tokens of a pass, n of one prompt, D inner width of a stream (Dv video, Da audio), H
Gemma's hidden_size, L its layers.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import GemmaConfig
from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.errors import UserError
from ltx_neuron.models.programs import program_name
from ltx_neuron.text.inputs import (
    attention_mask,
    bucket_for,
    connector_inputs,
    embedded_ids,
    encoder_inputs,
    pack_prompts,
    pad_left,
    prompt_slices,
    scale_embeddings,
)
from ltx_neuron.weights.rankfiles import open_host_file
from ltx_neuron.weights.tensorfile import TensorFile, finite

_EMBEDDINGS = "video_context", "video_prompt_embeds"  # of a file; the second is the trainer's name


class Contexts(NamedTuple):
    """An encoded prompt. hidden_states is None if the encoder does not return them."""

    video: Tensor  # (1, 1024, Dv)
    audio: Tensor  # (1, 1024, Da)
    attention_mask: Tensor  # (1, 1024) int64, 1 for the prompt's tokens, which come last
    hidden_states: Tensor | None  # (1, 1024, H, L + 1), zero where padded


def read_contexts(path: str, config: TransformerConfig, dtype: torch.dtype) -> Contexts:
    """The contexts in a file of text embeddings, without a sound's. Raises UserError."""
    file = TensorFile(Path(path), advice := "pass another with --text-embeddings FILE")
    shape = 1, TEXT_TOKENS, config.video.inner
    name = next((name for name in _EMBEDDINGS if file.shapes.get(name) == shape), None)
    if name is None or not finite(video := file.read(name)):
        raise UserError(
            f"--text-embeddings {path} has {file.shapes}; wanted a finite {_EMBEDDINGS[0]} of shape"
            f" {shape}; {advice}"
        )
    audio = torch.zeros(1, TEXT_TOKENS, config.audio.inner, dtype=dtype)
    return Contexts(video.to(dtype), audio, attention_mask(TEXT_TOKENS), None)


class RankTextEncoder:
    """Encodes on the ranks: the sharded Gemma in buckets of tokens, then the sharded connectors."""

    def __init__(
        self,
        ranks,  # a running backend (backends.ranks) that has loaded the programs and these weights
        weights: Path,  # folder of the rank files; its host file has embeddings and registers
        gemma: GemmaConfig,
        config: TransformerConfig,
        buckets,  # token counts for which the text encoder is compiled
        dtype: torch.dtype,  # of the programs' inputs
        # Encode each prompt in a pass of its own: guidance groups do it at the same time
        apart: bool = False,
    ):
        self.ranks, self.gemma, self.config, self.dtype = ranks, gemma, config, dtype
        self.buckets, self.host_file, self.apart = buckets, open_host_file(weights), apart

    def encode(self, prompts: list[list[int]]) -> list[Contexts]:
        packs = pack_prompts(prompts, self.apart)
        features = self.ranks.share([partial(self._features, pack) for pack in packs])
        registers = {
            m: self.host_file.read(f"{m}_connector.learnable_registers") for m in ("video", "audio")
        }
        of_prompts = [prompt for pack in features for prompt in pack]
        return self.ranks.share([partial(self._connect, x, registers) for x in of_prompts])

    def _features(self, prompts: list[list[int]], ranks) -> list[dict[str, Tensor]]:
        """Features (1, n, D) of each of the prompts of a pass, and hidden_states (1, n, H, L + 1)
        if the ranks return them."""
        counts, bucket = [len(ids) for ids in prompts], bucket_for(prompts, self.buckets)
        rows = self.host_file.rows("embed_tokens.weight", embedded_ids(prompts, self.gemma))
        padding = torch.zeros(bucket - len(rows), rows.shape[1], dtype=self.dtype)
        inputs = encoder_inputs(
            torch.cat([padding, scale_embeddings(rows, self.dtype)])[None], counts, self.gemma
        )
        program = program_name("gemma3", bucket)
        ranks.put(program, **inputs)
        ranks.run(program)
        names = ["video_features", "audio_features"]
        if "hidden_states" in ranks.programs[program].outputs:
            names.append("hidden_states")
        outputs = {name: ranks.get(program, name) for name in names}
        return [
            {name: t[:, part] for name, t in outputs.items()}
            for part in prompt_slices(counts, bucket)
        ]

    def _connect(
        self, features: dict[str, Tensor], registers: dict[str, Tensor], ranks
    ) -> Contexts:
        ranks.put("connectors", **connector_inputs(features, registers, self.config))
        ranks.run("connectors")
        video, audio = (ranks.get("connectors", f"{m}_context") for m in ("video", "audio"))
        states = features.get("hidden_states")
        mask = attention_mask(features["video_features"].shape[1])
        return Contexts(video, audio, mask, None if states is None else pad_left(states))
