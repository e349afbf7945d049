"""Inputs of the text encoder and of the connectors: token ids, masks, positions and RoPE tables.

Several prompts may share one pass of the encoder (a pack): their tokens follow one another at the
end of the sequence, and each prompt attends only to itself. In shapes below, T counts the tokens of
a pass (on the ranks with padding before them), n those of one prompt.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ltx_neuron.config.common import TEXT_TOKENS, gemma_download
from ltx_neuron.config.gemma import GemmaConfig
from ltx_neuron.config.transformer import REGISTERS, TransformerConfig
from ltx_neuron.errors import UserError, as_user_errors
from ltx_neuron.files import check_readable
from ltx_neuron.models.rope import half_rope, split_rope
from ltx_neuron.weights.model_files import TextEncoderFile

# ltx-core's connectors use the default, not the transformer's config
_CONNECTOR_THETA = 10000.0
_MASKED = -1e9  # added to masked scores; finite, because a row of infinities would give NaN


def load_tokenizer(gemma_root: Path):
    """The tokenizer of a Gemma folder. Raises UserError if it is missing or broken."""
    with as_user_errors("--gemma-root"):
        exists = (Path(gemma_root) / "tokenizer.json").is_file()
    if not exists:
        raise UserError(
            f"no tokenizer.json in --gemma-root {gemma_root}\nDownload it:"
            f" {gemma_download(gemma_root)}"
        )
    for path in Path(gemma_root).glob("*.json"):
        check_readable(path, "--gemma-root")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(gemma_root), local_files_only=True)
    # The tokenizers library raises a bare Exception for a broken tokenizer.json.
    except Exception as error:
        raise UserError(
            f"the tokenizer (tokenizer.json, tokenizer_config.json) in --gemma-root {gemma_root}"
            f" cannot be loaded: {error}\nDownload it again: {gemma_download(gemma_root)}"
        ) from None


def embedded_tokenizer(file: TextEncoderFile):
    """The tokenizer in a text encoder's file. Raises UserError if it is broken. As in ltx-core, the
    class in tokenizer_config.json is not used: tokenizer.json has all rules."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        settings = json.loads(file.asset("tokenizer_config.json"))
        special = {k: settings.get(k) for k in ("bos_token", "eos_token", "pad_token", "unk_token")}
        pairs = Tokenizer.from_buffer(file.asset("tokenizer.json"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, **special)
        if tokenizer.bos_token_id is None:
            raise ValueError("it has no bos_token")
    # The tokenizers library raises a bare Exception for a broken tokenizer.json.
    except Exception as error:
        raise UserError(
            f"the tokenizer in {file.path} cannot be loaded: {error}\nDownload it again:"
            f" {file.download}"
        ) from None
    return tokenizer


def tokenize(tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt: BOS first, cut at TEXT_TOKENS = 1024, no chat template, no EOS."""
    ids = tokenizer(prompt.strip(), truncation=True, max_length=TEXT_TOKENS).input_ids
    bos = tokenizer.bos_token_id
    # Gemma 4's tokenizer adds no BOS.
    return ids if ids[:1] == [bos] else [bos, *ids][:TEXT_TOKENS]


def cut_off(tokenizer, prompt: str) -> tuple[int, str]:
    """The number of a prompt's tokens, and the text that `tokenize` cuts off, or ""."""
    text = prompt.strip()
    whole = tokenizer(text, return_offsets_mapping=True, verbose=False)
    added = whole.input_ids[:1] != [tokenizer.bos_token_id]
    begins = [first for first, _ in whole.offset_mapping][TEXT_TOKENS - added :]
    return len(whole.input_ids) + added, text[begins[0] :] if begins else ""


def embedded_ids(prompts: list[list[int]], gemma: GemmaConfig) -> list[int]:
    """The rows of the embedding table for packed prompts."""
    replaced = dict(gemma.replaced_tokens)
    return [replaced.get(token, token) for ids in prompts for token in ids]


def encoder_inputs(embeddings: Tensor, counts: list[int], gemma: GemmaConfig) -> dict[str, Tensor]:
    """The fields that the text encoder takes, for one pass over packed prompts.

    embeddings  (1, T, hidden_size), scaled: padding, then the prompts' tokens one after another
    counts      tokens of each prompt

    A prompt attends causally and only to itself, at its positions in ltx-core's padding (left, to
    1024). Its hidden states are therefore those of a separate pass. The attention mask is additive,
    (1, 1, T, T).
    """
    tokens = embeddings.shape[1]
    padding = tokens - sum(counts)
    segments = torch.cat([torch.full((n,), i) for i, n in enumerate([padding, *counts])])
    same_prompt = segments[:, None] == segments[None]
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril() & same_prompt
    mask = torch.zeros(tokens, tokens).masked_fill(~allowed, _MASKED)
    mask = mask.to(embeddings.dtype)[None, None]
    positions = torch.cat([torch.arange(TEXT_TOKENS - n, TEXT_TOKENS) for n in (padding, *counts)])
    local = half_rope(positions, gemma.head_dim, gemma.rope_local_base_freq, 1.0)
    full = half_rope(
        positions,
        gemma.attention(full=True).head_dim,
        gemma.rope_theta,
        gemma.rope_factor,
        gemma.partial_rotary_factor,
    )
    inputs = {"embeddings": embeddings, "attention_mask": mask}
    return inputs | local.fields("local") | full.fields("global")


def prompt_slices(counts: list[int], tokens: int) -> list[slice]:
    """The positions of each packed prompt, given its token count, among `tokens` positions."""
    ends = [tokens - sum(counts[i + 1 :]) for i in range(len(counts))]
    return [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]


def pack_prompts(prompts: list[list[int]], apart: bool = False) -> list[list[list[int]]]:
    """Group prompts into passes of at most 1024 tokens: all in one, or one each (`apart`)."""
    together = not apart and sum(map(len, prompts)) <= TEXT_TOKENS
    return [prompts] if together else [[ids] for ids in prompts]


def connector_inputs(
    features: dict[str, Tensor], registers: dict[str, Tensor], config: TransformerConfig
) -> dict[str, Tensor]:
    """The fields that the connectors take, for one prompt.

    features   video_features (1, n, Dv) and audio_features (1, n, Da) of the prompt's tokens
    registers  of "video" and "audio": learned tokens (128, D)

    The tokens (1, 1024, D) are the prompt's, then registers: position p >= n holds register
    p mod 128. Positions, and so the RoPE tables, are those of all 1024. Source: ltx-core
    text_encoders/gemma/embeddings_connector.py.
    """
    inputs = {}
    for name, size in (("video", config.video_connector), ("audio", config.audio_connector)):
        prompt = features[f"{name}_features"]
        tiled = registers[name].repeat(TEXT_TOKENS // REGISTERS, 1)
        rest = tiled[prompt.shape[1] :].unsqueeze(0).to(prompt.dtype)
        inputs[f"{name}_tokens"] = torch.cat([prompt, rest], dim=1)
        positions = torch.arange(TEXT_TOKENS, dtype=torch.float32)[None, None]
        max_pos = config.connector_positional_embedding_max_pos
        rope = split_rope(positions, max_pos, size.inner, size.heads, _CONNECTOR_THETA)
        inputs |= rope.fields(name)
    return inputs


def scale_embeddings(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Embedding rows (n, hidden_size) in `dtype`, times sqrt(hidden_size) rounded to it, as Gemma
    scales them: in bf16 sqrt(3840) is 62."""
    rows = rows.to(dtype)
    return rows * torch.tensor(rows.shape[-1] ** 0.5, dtype=torch.float32).to(dtype)


def pad_left(states: Tensor) -> Tensor:
    """(1, n, ...) of a prompt's tokens -> (1, 1024, ...) with zeros before them."""
    size = TEXT_TOKENS * math.prod(states.shape[2:]) * states.itemsize
    # NumPy's zeros use no memory until they are written.
    memory = torch.from_numpy(np.zeros(size, dtype=np.uint8))
    whole = memory.view(states.dtype).view(1, TEXT_TOKENS, *states.shape[2:])
    whole[:, TEXT_TOKENS - states.shape[1] :] = states
    return whole


def attention_mask(count: int) -> Tensor:
    """(1, 1024) int64 of a prompt of `count` tokens: 1 for its tokens, which come last."""
    return torch.cat([torch.zeros(TEXT_TOKENS - count), torch.ones(count)]).long()[None]


def bucket_for(prompts: list[list[int]], buckets: tuple[int, ...]) -> int:
    return min(bucket for bucket in buckets if bucket >= sum(map(len, prompts)))
