"""What the text encoder and the connectors take: token ids, positions, masks and RoPE tables of a
prompt."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ltx_neuron.config import REGISTERS, TEXT_TOKENS, GemmaConfig, TransformerConfig, gemma_download
from ltx_neuron.errors import UserError
from ltx_neuron.models.rope import half_rope, split_rope
from ltx_neuron.models.signatures import ConnectorInputs, Gemma3Inputs

# ltx-core's connectors take the default, whatever the transformer's config says
_CONNECTOR_THETA = 10000.0


_MASKED = -1e9  # finite: a row of infinities would be NaN


def tokenizer(gemma_root: Path):
    """The Gemma tokenizer of a root, loaded without network."""
    if not (Path(gemma_root) / "tokenizer.json").is_file():
        raise UserError(
            f"no tokenizer.json in --gemma-root {gemma_root}\nDownload it:"
            f" {gemma_download(gemma_root)}"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(gemma_root), local_files_only=True)
    except (
        Exception
    ) as error:  # a broken tokenizer.json is a bare Exception of the tokenizers library
        raise UserError(
            f"the tokenizer (tokenizer.json, tokenizer_config.json) in --gemma-root {gemma_root}"
            f" cannot be loaded: {error}\nDownload it again: {gemma_download(gemma_root)}"
        ) from None


def tokenize(tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt, BOS first, cut at 1024. No chat template, no EOS."""
    return tokenizer(prompt.strip(), truncation=True, max_length=TEXT_TOKENS).input_ids


def encoder_inputs(embeddings: Tensor, counts: list[int], gemma: GemmaConfig) -> Gemma3Inputs:
    """Inputs for embeddings (1, B, width) that hold prompts of `counts` tokens one after another,
    at the end.

    Each prompt sees itself alone, at the positions it has when it is padded on its left to 1024: a
    prompt and its negative are encoded in one pass.
    """
    tokens = embeddings.shape[1]
    padding = tokens - sum(counts)
    segment = torch.cat([torch.full((n,), i) for i, n in enumerate([padding, *counts])])
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() & (segment[:, None] == segment[None])
    mask = torch.zeros(tokens, tokens).masked_fill(~seen, _MASKED).to(embeddings.dtype)[None, None]
    positions = torch.cat([torch.arange(TEXT_TOKENS - n, TEXT_TOKENS) for n in (padding, *counts)])
    local = half_rope(positions, gemma.head_dim, gemma.rope_local_base_freq, 1.0)
    full = half_rope(positions, gemma.head_dim, gemma.rope_theta, gemma.rope_factor)
    return Gemma3Inputs(embeddings, mask, *local, *full)


def prompt_slices(counts: list[int], tokens: int) -> list[slice]:
    """Where each prompt lies among the tokens."""
    ends = [tokens - sum(counts[i + 1 :]) for i in range(len(counts))]
    return [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]


def passes(prompts: list[list[int]]) -> list[list[list[int]]]:
    """The prompts in as few encoder passes as hold them."""
    return [prompts] if sum(map(len, prompts)) <= TEXT_TOKENS else [[ids] for ids in prompts]


def connector_inputs(
    features: dict[str, Tensor], registers: dict[str, Tensor], config: TransformerConfig
) -> ConnectorInputs:
    """Inputs from the {stream}_features (1, n, D) of a prompt's tokens, which come first; position
    p >= n holds register p mod 128."""
    tokens, ropes = {}, {}
    for name, size in (("video", config.video_connector), ("audio", config.audio_connector)):
        found = features[f"{name}_features"]
        count = found.shape[1]
        tiled = registers[name].repeat(TEXT_TOKENS // REGISTERS, 1)
        tokens[name] = torch.cat([found, tiled[count:].unsqueeze(0).to(found.dtype)], dim=1)
        positions = torch.arange(TEXT_TOKENS, dtype=torch.float32)[None, None]
        max_pos = config.connector_positional_embedding_max_pos
        ropes[name] = split_rope(positions, max_pos, size.inner, size.heads, _CONNECTOR_THETA)
    return ConnectorInputs(tokens["video"], tokens["audio"], *ropes["video"], *ropes["audio"])


def embed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale embedding rows as Gemma does, in their own dtype: in bf16 sqrt(3840) is 62."""
    rows = rows.to(dtype)
    return rows * torch.tensor(rows.shape[-1] ** 0.5, dtype=torch.float32).to(dtype)


def padded(states: Tensor) -> Tensor:
    """(1, B, ...) of the last positions -> (1, 1024, ...). NumPy's zeros take no memory and no time
    until they are written."""
    size = TEXT_TOKENS * math.prod(states.shape[2:]) * states.itemsize
    whole = (
        torch.from_numpy(np.zeros(size, dtype=np.uint8))
        .view(states.dtype)
        .view(1, TEXT_TOKENS, *states.shape[2:])
    )
    whole[:, TEXT_TOKENS - states.shape[1] :] = states
    return whole


def attention_mask(count: int) -> Tensor:
    return torch.cat([torch.zeros(TEXT_TOKENS - count), torch.ones(count)]).long()[None]


def bucket_for(prompts: list[list[int]], buckets: tuple[int, ...]) -> int:
    """The smallest bucket of tokens that holds the prompts of a pass."""
    return min(bucket for bucket in buckets if bucket >= sum(map(len, prompts)))


def program_name(bucket: int) -> str:
    return f"gemma3-{bucket}"
