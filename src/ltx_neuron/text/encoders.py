"""From a prompt to the contexts the DiT attends to: tokenise, encode, connect; on the ranks or on
the host's CPU.

The tokenizer pads on the left to 1024 and positions count the padding. Padding changes nothing
else, so only the last positions are encoded: on the ranks a bucket of them, on the host exactly the
prompt's.
"""

import math
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config import GemmaConfig, TransformerConfig
from ltx_neuron.errors import UserError
from ltx_neuron.models.attention import sdpa
from ltx_neuron.models.connectors import Connectors
from ltx_neuron.models.gemma3 import Gemma3Encoder
from ltx_neuron.models.parallel import SingleRank, rms_norm
from ltx_neuron.models.signatures import ConnectorOutputs
from ltx_neuron.text.inputs import (
    attention_mask,
    bucket_for,
    connector_inputs,
    embed,
    encoder_inputs,
    padded,
    passes,
    program_name,
    prompt_slices,
)
from ltx_neuron.text.streamed import FloatProducts, StreamedLayers, Weights
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import load_host


class Contexts(NamedTuple):
    """What a prompt becomes. hidden_states is None where the encoder keeps them to itself."""

    video: Tensor  # (1, 1024, Dv)
    audio: Tensor  # (1, 1024, Da)
    attention_mask: Tensor  # (1, 1024) int64, 1 for the prompt's tokens, which come last
    hidden_states: Tensor | None  # (1, 1024, width, layers + 1), zero where padded


class RankTextEncoder:
    """Encodes on the ranks: the sharded Gemma3 in token buckets, then the sharded connectors."""

    def __init__(
        self,
        ranks,
        weights: Path,
        gemma: GemmaConfig,
        config: TransformerConfig,
        buckets,
        dtype: torch.dtype,
    ):
        self.ranks, self.gemma, self.config, self.dtype = ranks, gemma, config, dtype
        self.buckets, self.host = buckets, load_host(weights)

    def encode(self, prompts: list[list[int]]) -> list[Contexts]:
        """Contexts of the prompts of one job, encoded together."""
        return [context for group in passes(prompts) for context in self._pass(group)]

    def _pass(self, prompts: list[list[int]]) -> list[Contexts]:
        counts, bucket = [len(ids) for ids in prompts], bucket_for(prompts, self.buckets)
        rows = torch.cat(
            [self.host.read("embed_tokens.weight", i, i + 1) for ids in prompts for i in ids]
        )
        registers = {
            m: self.host.read(f"{m}_connector.learnable_registers") for m in ("video", "audio")
        }
        padding = torch.zeros(bucket - len(rows), rows.shape[1], dtype=self.dtype)
        inputs = encoder_inputs(
            torch.cat([padding, embed(rows, self.dtype)])[None], counts, self.gemma
        )
        program = program_name(bucket)
        self.ranks.put(program, **inputs._asdict())
        self.ranks.run(program)
        names = ["video_features", "audio_features"]
        names += ["hidden_states"] if self.ranks.returns(program, "hidden_states") else []
        outputs = {name: self.ranks.get(program, name) for name in names}
        return [
            self._connect({name: t[:, part] for name, t in outputs.items()}, registers)
            for part in prompt_slices(counts, bucket)
        ]

    def _connect(self, features: dict[str, Tensor], registers: dict[str, Tensor]) -> Contexts:
        self.ranks.put("connectors", **connector_inputs(features, registers, self.config)._asdict())
        self.ranks.run("connectors")
        contexts = (self.ranks.get("connectors", f"{m}_context") for m in ("video", "audio"))
        states = features.get("hidden_states")
        mask = attention_mask(features["video_features"].shape[1])
        return Contexts(*contexts, mask, None if states is None else padded(states))


class HostTextEncoder:
    """Encodes on the host's CPU, only the prompt's own tokens. Weights are pages of their files, a
    layer's used at a time."""

    def __init__(
        self, source: Source, gemma: GemmaConfig, config: TransformerConfig, dtype: torch.dtype
    ):
        self.source, self.gemma, self.config, self.dtype = source, gemma, config, dtype
        self.weights = Weights(source, dtype)

    def check(self) -> None:
        """Raise UserError, listing every tensor, where the source's are not those the configs
        describe. Loads nothing."""
        problems = []
        for name, tensor in {**self.encoder.state_dict(), **self.connectors.state_dict()}.items():
            wanted = tuple(tensor.shape)
            if name.endswith("aggregate_embed.weight"):  # stored with all layers side by side
                wanted = (wanted[1], wanted[0] * wanted[2])
            if name not in self.source.where:
                problems.append(f"missing: {name}")
            elif self.source.shape(name) != wanted:
                problems.append(f"{name}: {self.source.shape(name)}, wanted {wanted}")
        if problems:
            raise UserError(
                "\n  ".join(
                    [
                        "the text encoder's weights are not those its config.json describes:",
                        *problems,
                    ]
                )
                + f"\nDownload it again: {self.source.files[-1].download}"
            )

    @cached_property
    def encoder(self) -> Gemma3Encoder:
        """Its layers take their weights when they run; its projections are multiplied in
        `_features`."""
        with torch.device("meta"):
            encoder = Gemma3Encoder(self.gemma, self.config, 1, SingleRank(), return_states=True)
        encoder.layers = StreamedLayers(encoder.layers, "layers.", self.weights)
        return encoder

    @cached_property
    def connectors(self) -> Connectors:
        with torch.device("meta"):
            connectors = Connectors(self.config, 1, SingleRank(), sdpa)
        for name in ("video_connector", "audio_connector"):
            connector, prefix = getattr(connectors, name), f"{name}.transformer_1d_blocks."
            connector.transformer_1d_blocks = StreamedLayers(
                connector.transformer_1d_blocks, prefix, self.weights
            )
        return connectors

    @torch.no_grad()
    def encode(self, prompts: list[list[int]]) -> list[Contexts]:
        """Contexts of the prompts of one job, encoded together."""
        with FloatProducts():
            return [context for group in passes(prompts) for context in self._pass(group)]

    def _pass(self, prompts: list[list[int]]) -> list[Contexts]:
        counts, states = [len(ids) for ids in prompts], self._states(prompts)
        slices, features = prompt_slices(counts, states.shape[1]), self._features(states)
        contexts = self._connect(
            [{name: f[:, part] for name, f in features.items()} for part in slices]
        )
        return [
            Contexts(video, audio, attention_mask(count), padded(states[:, part].transpose(2, 3)))
            for video, audio, count, part in zip(
                *(c.split(1) for c in contexts), counts, slices, strict=True
            )
        ]

    def _states(self, prompts: list[list[int]]) -> Tensor:
        """Hidden states (1, B, layers + 1, width)."""
        self.weights.fill(self.encoder.norm, "norm.")
        rows = embed(
            self.source.rows("embed_tokens.weight", [i for ids in prompts for i in ids]), self.dtype
        )[None]
        inputs = encoder_inputs(rows, [len(ids) for ids in prompts], self.gemma)
        return torch.stack(list(self.encoder.hidden_states(inputs)), dim=2)

    def _features(self, states: Tensor) -> dict[str, Tensor]:
        """The features (1, B, D) of all hidden states, by the projections as they are stored:
        layers vary fastest."""
        normed, found = rms_norm(states).transpose(2, 3).flatten(2), {}
        for name, size in (("video", self.config.video), ("audio", self.config.audio)):
            scaled = normed * math.sqrt(size.inner / self.gemma.hidden_size)
            bias = self.source.tensor(f"{name}_aggregate_embed.bias").to(self.dtype)
            weight = self.weights.tensor(f"{name}_aggregate_embed.weight")
            found[f"{name}_features"] = torch.nn.functional.linear(scaled, weight, bias)
        return found

    def _connect(self, features: list[dict[str, Tensor]]) -> ConnectorOutputs:
        """Contexts of prompts as a batch."""
        registers = {
            m: self.source.tensor(f"{m}_connector.learnable_registers") for m in ("video", "audio")
        }
        inputs = [connector_inputs(each, registers, self.config) for each in features]
        video, audio = (torch.cat(tokens) for tokens in list(zip(*inputs, strict=True))[:2])
        return self.connectors(inputs[0]._replace(video_tokens=video, audio_tokens=audio))
