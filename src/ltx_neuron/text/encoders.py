"""From token ids to the contexts that the DiT attends to: Gemma3, then the connectors, on the ranks
or on the host's CPU.

ltx-core pads a prompt on its left to 1024 tokens, and positions count the padding. Padding changes
nothing else, so only the last positions are encoded: a bucket of them on the ranks, exactly the
prompts' tokens on the host.

Shapes: T tokens of a pass, n of one prompt, D inner width of a stream (Dv video, Da audio), H
Gemma's hidden_size, L its layers.
"""

import math
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config import GemmaConfig, TransformerConfig
from ltx_neuron.errors import UserError
from ltx_neuron.host.products import ONEDNN_ALONE, Libraries
from ltx_neuron.models.attention import sdpa
from ltx_neuron.models.connectors import Connectors
from ltx_neuron.models.gemma3 import Gemma3Encoder
from ltx_neuron.models.parallel import SingleRank, rms_norm
from ltx_neuron.models.signatures import ConnectorOutputs
from ltx_neuron.text.inputs import (
    attention_mask,
    bucket_for,
    connector_inputs,
    encoder_inputs,
    gemma3_program_name,
    pack_prompts,
    pad_left,
    prompt_slices,
    scale_embeddings,
)
from ltx_neuron.text.streamed import HostKernels, MappedWeights, StreamedLayers
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import open_host_file


class Contexts(NamedTuple):
    """What an encoder makes of a prompt. hidden_states is None where they are not returned."""

    video: Tensor  # (1, 1024, Dv)
    audio: Tensor  # (1, 1024, Da)
    attention_mask: Tensor  # (1, 1024) int64, 1 for the prompt's tokens, which come last
    hidden_states: Tensor | None  # (1, 1024, H, L + 1), zero where padded


class RankTextEncoder:
    """Encodes on the ranks: the sharded Gemma3 in buckets of tokens, then the sharded connectors.

    ranks    a running backend (backends.ranks) that holds the programs and these weights
    weights  folder of the rank files: embeddings and registers are read from its host file
    buckets  token counts that the text encoder is compiled for
    dtype    of the programs' inputs
    """

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
        self.buckets, self.host = buckets, open_host_file(weights)

    def encode(self, prompts: list[list[int]]) -> list[Contexts]:
        """Contexts of the prompts of one job, encoded together."""
        return [context for pack in pack_prompts(prompts) for context in self._encode_pack(pack)]

    def _encode_pack(self, prompts: list[list[int]]) -> list[Contexts]:
        counts, bucket = [len(ids) for ids in prompts], bucket_for(prompts, self.buckets)
        rows = torch.cat(
            [self.host.read("embed_tokens.weight", i, i + 1) for ids in prompts for i in ids]
        )
        registers = {
            m: self.host.read(f"{m}_connector.learnable_registers") for m in ("video", "audio")
        }
        padding = torch.zeros(bucket - len(rows), rows.shape[1], dtype=self.dtype)
        inputs = encoder_inputs(
            torch.cat([padding, scale_embeddings(rows, self.dtype)])[None], counts, self.gemma
        )
        program = gemma3_program_name(bucket)
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
        """Contexts of one prompt from its features (1, n, D), and hidden_states (1, n, H, L + 1)
        where the ranks return them."""
        self.ranks.put("connectors", **connector_inputs(features, registers, self.config)._asdict())
        self.ranks.run("connectors")
        contexts = (self.ranks.get("connectors", f"{m}_context") for m in ("video", "audio"))
        states = features.get("hidden_states")
        mask = attention_mask(features["video_features"].shape[1])
        return Contexts(*contexts, mask, None if states is None else pad_left(states))


class HostTextEncoder:
    """Encodes on the host's CPU. Weights are the pages of their files, one layer's at a time.

    source     the tensors of model "gemma3": Gemma's, and the connectors' from the checkpoint
    dtype      of the activations; in float32 matrices are multiplied in the dtype they are stored
               in
    libraries  that multiply in float32
    """

    def __init__(
        self,
        source: Source,
        gemma: GemmaConfig,
        config: TransformerConfig,
        dtype: torch.dtype,
        libraries: Libraries = ONEDNN_ALONE,
    ):
        self.libraries, self.kernels = libraries, HostKernels(libraries)
        self.source, self.gemma, self.config, self.dtype = source, gemma, config, dtype
        self.weights = MappedWeights(source, dtype)

    def check(self) -> None:
        """Raise UserError, listing every difference, where the source's tensors are not those that
        the configs describe. Reads no weights."""
        problems = []
        for name, tensor in {**self.encoder.state_dict(), **self.connectors.state_dict()}.items():
            wanted = tuple(tensor.shape)
            if name.endswith("aggregate_embed.weight"):  # (L+1, D, H) here, (D, H * (L+1)) in files
                wanted = (wanted[1], wanted[0] * wanted[2])
            if name not in self.source.locations:
                problems.append(f"missing: {name}")
            elif self.source.shape(name) != wanted:
                problems.append(f"{name}: {self.source.shape(name)}, wanted {wanted}")
        if problems:
            title = "the text encoder's weights are not those its config.json describes:"
            raise UserError(
                "\n  ".join([title, *problems])
                + f"\nDownload it again: {self.source.files[-1].download}"
            )

    @cached_property
    def encoder(self) -> Gemma3Encoder:
        """Gemma3 whose layers get their weights when they run. The projections of its hidden
        states are computed by `_features` instead."""
        with torch.device("meta"):
            encoder = Gemma3Encoder(self.gemma, self.config, 1, SingleRank(), return_states=True)
        encoder.layers = StreamedLayers(encoder.layers, "layers.", self.weights)
        return encoder

    @cached_property
    def connectors(self) -> Connectors:
        """Both connectors, whose blocks get their weights when they run."""
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
        with self.kernels:
            packs = pack_prompts(prompts)
            return [context for pack in packs for context in self._encode_pack(pack)]

    def _encode_pack(self, prompts: list[list[int]]) -> list[Contexts]:
        counts, states = [len(ids) for ids in prompts], self._states(prompts)
        slices, features = prompt_slices(counts, states.shape[1]), self._features(states)
        contexts = self._connect(
            [{name: f[:, part] for name, f in features.items()} for part in slices]
        )
        return [
            Contexts(video, audio, attention_mask(count), pad_left(states[:, part].transpose(2, 3)))
            for video, audio, count, part in zip(
                *(c.split(1) for c in contexts), counts, slices, strict=True
            )
        ]

    def _states(self, prompts: list[list[int]]) -> Tensor:
        """Hidden states (1, T, L + 1, H) of packed prompts."""
        self.weights.fill(self.encoder.norm, "norm.")
        rows = scale_embeddings(
            self.source.rows("embed_tokens.weight", [i for ids in prompts for i in ids]), self.dtype
        )[None]
        inputs = encoder_inputs(rows, [len(ids) for ids in prompts], self.gemma)
        return torch.stack(list(self.encoder.hidden_states(inputs)), dim=2)

    def _features(self, states: Tensor) -> dict[str, Tensor]:
        """video_features (1, T, Dv) and audio_features (1, T, Da): linear in all normed hidden
        states (1, T, L + 1, H) side by side. In the stored projections layers vary fastest."""
        normed = rms_norm(states).transpose(2, 3).flatten(2)  # (1, T, H * (L + 1))
        features = {}
        for name, size in (("video", self.config.video), ("audio", self.config.audio)):
            scaled = normed * math.sqrt(size.inner / self.gemma.hidden_size)
            bias = self.source.tensor(f"{name}_aggregate_embed.bias").to(self.dtype)
            weight = self.weights.tensor(f"{name}_aggregate_embed.weight")
            features[f"{name}_features"] = torch.nn.functional.linear(scaled, weight, bias)
        return features

    def _connect(self, features: list[dict[str, Tensor]]) -> ConnectorOutputs:
        """Contexts (prompts, 1024, D) of all prompts of a pack, from the features (1, n, D) of
        each."""
        registers = {
            m: self.source.tensor(f"{m}_connector.learnable_registers") for m in ("video", "audio")
        }
        inputs = [connector_inputs(each, registers, self.config) for each in features]
        video, audio = (torch.cat(tokens) for tokens in list(zip(*inputs, strict=True))[:2])
        return self.connectors(inputs[0]._replace(video_tokens=video, audio_tokens=audio))
