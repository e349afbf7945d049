"""The duration head predicts, from a prompt's contexts, the seconds of the shot that the prompt
describes. It is a model of a few MB in its own file, new in LTX-2.5."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.errors import UserError
from ltx_neuron.host.loading import ModelFile
from ltx_neuron.hub import download_released
from ltx_neuron.weights.checkpoint import Checkpoint
from ltx_neuron.weights.model_files import config_of, described, kind_of
from ltx_neuron.weights.tensorfile import WeightFile

FLAG, _PREFIX = "--duration-head-path", "duration_head."
DOWNLOAD = download_released("duration_head", "Lightricks/LTX-2.5")


class AttentionPooler(nn.Module):
    """Learned queries (Q, H) that attend to all tokens (1, T, H). Returns (1, Q, H)."""

    def __init__(self, hidden: int, queries: int, heads: int):
        super().__init__()
        self.query_tokens = nn.Parameter(torch.empty(queries, hidden))
        self.cross_attn = nn.MultiheadAttention(hidden, heads, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cross_attn(self.query_tokens[None], tokens, tokens, need_weights=False)[0]


class DurationHead(nn.Module):
    """Seconds (1,) from the contexts (1, 1024, Dv) and (1, 1024, Da) of a prompt, after ltx-core
    1.2.0 duration_head.py. The model predicts their logarithm. widths: Dv and Da. settings: the
    file's `duration_head` config."""

    def __init__(self, widths: tuple[int, int], settings: dict):
        super().__init__()
        hidden = settings.get("pooler_hidden_dim", 256)
        queries, heads = settings.get("num_queries", 1), settings.get("num_pooler_heads", 4)
        if hidden % heads:
            raise ValueError(f"num_pooler_heads {heads} does not divide pooler_hidden_dim {hidden}")
        mlp = settings.get("mlp_hidden", 256)
        self.video_input_proj, self.audio_input_proj = (nn.Linear(w, hidden) for w in widths)
        self.video_modality_emb = nn.Parameter(torch.empty(hidden))
        self.audio_modality_emb = nn.Parameter(torch.empty(hidden))
        self.attention_pooler = AttentionPooler(hidden, queries, heads)
        self.mlp_hidden = nn.Linear(hidden * queries, mlp)
        self.mlp_out = nn.Linear(mlp, 1)

    @torch.no_grad()
    def forward(self, video: Tensor, audio: Tensor) -> Tensor:
        tokens = [
            self.video_input_proj(video.float()) + self.video_modality_emb,
            self.audio_input_proj(audio.float()) + self.audio_modality_emb,
        ]
        pooled = self.attention_pooler(torch.cat(tokens, dim=1)).flatten(1)
        return self.mlp_out(gelu(self.mlp_hidden(pooled), approximate="tanh"))[:, 0].exp()


def duration_head_spec(
    path: str | Path, checkpoint: Checkpoint, transformer: TransformerConfig
) -> ModelFile:
    """The source of a checkpoint's duration head. Raises UserError for a file without one, and for
    a head of another release or of other widths."""
    file = WeightFile(path, f"{DOWNLOAD}\nand pass it with {FLAG} FILE")
    if kind_of(file) != "duration_head":
        raise UserError(
            f"{FLAG} {path}: wanted a duration head, got {described(file)}\nDownload it: {DOWNLOAD}"
        )
    if not checkpoint.release.has("duration_head"):
        raise UserError(
            f"{FLAG} {path} is {described(file)}; --checkpoint-path {checkpoint.path} is of"
            f" LTX-{checkpoint.release.version}, which has none\nLeave {FLAG} out, and type"
            " --num-frames N"
        )
    file.check_release(FLAG, checkpoint.release, DOWNLOAD)
    config = config_of(file)
    sizes, settings = config.get("transformer", {}), config.get("duration_head", {})
    widths = sizes.get("cross_attention_dim", 4096), sizes.get("audio_cross_attention_dim", 2048)
    if widths != (expected := (transformer.video.inner, transformer.audio.inner)):
        raise UserError(
            f"{FLAG} {path} reads contexts of widths {widths}, but those of --checkpoint-path"
            f" {checkpoint.path} have widths {expected}\nPass the head that was published with it"
        )
    return ModelFile(
        name="duration head",
        path=path,
        flag=FLAG,
        download=DOWNLOAD,
        build=partial(DurationHead, widths, settings),
        prefixes={"": _PREFIX},
        dtype=torch.float32,
    )
