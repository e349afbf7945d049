"""Tiny random assets in the layout of LTX-2.5: a file per part, in the folders of its download."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ltx_neuron.config.diffusion import diffusion_decoder_config
from ltx_neuron.hub import RELEASE_FILES
from tiny.config import TinySizes, check, tiny_config
from tiny.gemma import GEMMA_4_VERSION, write_gemma4_file
from tiny.weights import (
    DIFFUSION,
    LORA_RANK,
    checkpoint_weights,
    lora_weights,
    random_weights,
    save,
    upsampler_weights,
)

VERSION = "2.5.0"
_PAIR = {"ltx_version": VERSION, "gemma_version": GEMMA_4_VERSION}
SOURCE = {"gemma_source_checkpoint": json.dumps(_PAIR)}  # of a transformer's metadata
LICENSE = "Random weights made for tests. No released weight is contained."
# The transformer's config where it differs from LTX-2.3's.
TRANSFORMER = {
    "ff_bias": False,
    "text_encoder_norm_type": "PER_TOKEN_RMS",
    "use_keyframes_abs_pos_embedding": True,
}
# Tensors of LTX-2.3 that LTX-2.5 lacks: biases of the video feed-forward (ff_bias).
ABSENT = re.compile(r".+\.transformer_blocks\.\d+\.ff\.net\..+\.bias")
# The decoder of the released diffusion VAE.
DECODER = {
    "_class_name": "NADiffusionDecoder",
    "in_channels": 128,
    "out_channels": 3,
    "patch_size": 4,
    "head_dim": 64,
    "stage_channels": [2048, 1024, 512, 512, 256],
    "stage_depths": [4, 6, 4, 2, 8],
    "stage_kernels": [[3, 7, 7]] * 2 + [[3, 5, 5]] * 2 + [[11, 11, 11]],
    "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 2]],
    "spatial_padding_mode": "zeros",
    "resampler_kind": "linear",
    "stage5_kernel": [11, 11, 11],
    "timestep_scale_multiplier": 1000.0,
    "default_num_inference_steps": 1,
}
TINY_DECODER = DECODER | {
    "head_dim": 16,
    "stage_channels": [128, 64, 32, 32, 16],
    "stage_depths": [1, 1, 1, 1, 2],
    "stage_kernels": [[3, 3, 3]] * 4 + [[3, 5, 5]],
    "stage5_kernel": [3, 5, 5],
}


class SplitAssets(NamedTuple):
    """The files of one set of assets. video_vae has the convolutional decoder, diffusion_vae the
    diffusion decoder."""

    distilled: Path
    dev: Path
    text_encoder: Path
    video_vae: Path
    diffusion_vae: Path
    audio_vae: Path
    spatial_upsampler: Path
    temporal_upsampler: Path
    duration_head: Path
    lora: Path
    image: Path

    @property
    def folder(self) -> Path:
        """The folder of the download."""
        return self.image.parent


def split_assets_in(directory: Path) -> SplitAssets:
    """The paths of make_split's files in a directory, with the released names."""
    names = RELEASE_FILES["Lightricks/LTX-2.5"]
    kinds = "distilled", "dev", "gemma", "video_vae", "", "audio_vae", "spatial", "temporal"
    files = [names.get(kind, "") for kind in (*kinds, "duration_head", "lora")]
    files[4] = names["video_vae"].replace("-conv", "")
    return SplitAssets(*(Path(directory) / name for name in (*files, "image.png")))


def make_split(directory: Path, sizes: TinySizes = TinySizes()) -> SplitAssets:  # noqa: B008
    """Write one set of tiny assets of LTX-2.5, replacing the files of an earlier one. Raises
    UserError for invalid sizes."""
    from tiny import SPATIAL_UPSAMPLER, TEMPORAL_UPSAMPLER, picture

    check(sizes)
    assets, config = split_assets_in(directory), tiny_config(sizes)
    for path in assets:
        path.parent.mkdir(parents=True, exist_ok=True)
    config["transformer"] |= TRANSFORMER
    distilled, dev = (_parts(config, replace(sizes, seed=sizes.seed + n)) for n in (0, 10))
    for path, parts in ((assets.distilled, distilled), (assets.dev, dev)):
        _save(path, parts[DIFFUSION], sections(config, "transformer", "scheduler"), SOURCE)
    write_gemma4_file(assets.text_encoder, sizes)
    vae = {name.removeprefix("vae."): weight for name, weight in distilled["vae."].items()}
    _save(assets.video_vae, vae, sections(config, "vae"))
    nested = {"vae": _diffusion_config(config["vae"])}
    shared = {name: weight for name, weight in vae.items() if not name.startswith("decoder.")}
    _save(assets.diffusion_vae, shared | _diffusion_weights(nested, sizes.seed + 11), nested)
    sound = distilled["audio_vae."] | distilled["vocoder."]
    _save(assets.audio_vae, sound, sections(config, "audio_vae", "vocoder"))
    temporal = TEMPORAL_UPSAMPLER | {"spatial_scale": 1.0}
    for path, upsampler, seed, license in (
        (assets.spatial_upsampler, SPATIAL_UPSAMPLER, sizes.seed + 2, {"license": LICENSE}),
        (assets.temporal_upsampler, temporal, sizes.seed + 4, {}),
    ):
        weights = upsampler_weights(upsampler, seed)
        save(path, weights, {"config": json.dumps(upsampler)} | license)
    _save_duration_head(assets.duration_head, sizes)
    ranks = {f"lora_{name}": str(LORA_RANK) for name in ("rank", "alpha")}
    save(assets.lora, lora_weights(dev[DIFFUSION], sizes.seed + 3), labels() | ranks)
    picture().save(assets.image)
    return assets


def _parts(config: dict, sizes: TinySizes) -> dict[str, dict[str, Tensor]]:
    """The weights of each part, by the prefix of their names in a checkpoint."""
    weights = checkpoint_weights(config, sizes)
    inner, generator = sizes.video_inner, torch.Generator().manual_seed(sizes.seed + 12)
    embedding = 0.5 * torch.randn(1, inner, generator=generator)
    weights[f"{DIFFUSION}keyframes_abs_pos_embedding"] = embedding.bfloat16()
    return {
        prefix: {
            name: weight
            for name, weight in weights.items()
            if name.startswith(prefix) and not ABSENT.fullmatch(name)
        }
        for prefix in (DIFFUSION, "vae.", "audio_vae.", "vocoder.")
    }


def _diffusion_config(vae: dict) -> dict:
    """The config of the diffusion VAE with the encoder of a convolutional one."""
    encoder = {
        "_class_name": "Encoder",
        "dims": 3,
        "in_channels": 3,
        "out_channels": vae["latent_channels"],
        "blocks": vae["encoder_blocks"],
        "patch_size": vae["patch_size"],
        "latent_log_var": "constant",
        "latent_log_var_value": -7.824046010856292,
        "norm_layer": "pixel_norm",
        "base_channels": vae["encoder_base_channels"],
        "spatial_padding_mode": "zeros",
    }
    return {
        "_class_name": "CausalDiffusionVAE",
        "dims": 3,
        "encoder": encoder,
        "decoder": TINY_DECODER,
        "model_output_type": "x0",
        "spatial_padding_mode": "zeros",
    }


def _diffusion_weights(config: dict, seed: int) -> dict[str, Tensor]:
    """The weights of the diffusion decoder, and the embedding of keyframes."""
    from ltx_neuron.host.diffusion import HostSpans

    with torch.device("meta"):
        shapes = HostSpans(diffusion_decoder_config(config)).state_dict()
        shapes |= {"type_emb": torch.empty(TINY_DECODER["in_channels"])}
    own = {n: like for n, like in shapes.items() if not n.startswith("per_channel_statistics.")}
    weights = random_weights(own, torch.Generator().manual_seed(seed))
    return {f"decoder.{name}": weight.bfloat16() for name, weight in weights.items()}


def _save_duration_head(path: Path, sizes: TinySizes) -> None:
    from ltx_neuron.host.duration import DurationHead

    widths = sizes.video_inner, sizes.audio_inner
    with torch.device("meta"):
        shapes = DurationHead(widths, {}).state_dict()
    weights = random_weights(shapes, torch.Generator().manual_seed(sizes.seed + 13))
    tensors = {f"duration_head.{name}": weight.bfloat16() for name, weight in weights.items()}
    names = "cross_attention_dim", "audio_cross_attention_dim"
    transformer = dict(zip(names, widths, strict=True))
    _save(path, tensors, {"transformer": transformer, "duration_head": {}})


def _save(
    path: Path, tensors: dict[str, Tensor], config: dict, metadata: dict[str, str] | None = None
) -> None:
    save(path, tensors, labels() | {"config": json.dumps(config)} | (metadata or {}))


def sections(config: dict, *names: str) -> dict:
    return {name: config[name] for name in names}


def labels() -> dict[str, str]:
    return {"model_version": VERSION, "license": LICENSE}
