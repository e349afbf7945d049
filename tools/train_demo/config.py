"""The demo checkpoint's config: the released one, with the sizes of the demo.

python tools/train_demo/config.py   prints the parameters of every part
"""

from tiny.config import TinySizes, merge, released_config

LAYERS, HEADS, HEAD_DIM, AUDIO_HEAD_DIM = 6, 4, 40, 20
INNER, AUDIO_INNER = HEADS * HEAD_DIM, HEADS * AUDIO_HEAD_DIM
LIMIT = 25e6  # bytes of all shipped files

# The clip that the world is learnt at; stage 1 is half as high and wide.
HEIGHT, WIDTH, NUM_FRAMES, FRAME_RATE = 128, 192, 49, 24.0
SECONDS = NUM_FRAMES / FRAME_RATE
MEL_RATE, SAMPLE_RATE = 16000, 48000  # Hz: of the mel spectrogram, and of the sound that one hears

# Gemma3 (tiny.gemma takes such sizes); the number of layers counts the decoder's.
GEMMA = TinySizes(
    layers=LAYERS,
    heads=HEADS,
    head_dim=HEAD_DIM,
    audio_head_dim=AUDIO_HEAD_DIM,
    connector_layers=1,
    gemma_layers=4,
    gemma_heads=4,
    gemma_kv_heads=4,
    gemma_head_dim=16,
    gemma_hidden=64,
    gemma_intermediate=128,
    gemma_vocab=512,
)

TRANSFORMER = {
    "num_layers": LAYERS,
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "cross_attention_dim": INNER,
    "audio_num_attention_heads": HEADS,
    "audio_attention_head_dim": AUDIO_HEAD_DIM,
    "audio_cross_attention_dim": AUDIO_INNER,
    "caption_channels": GEMMA.gemma_hidden,
    "connector_num_layers": GEMMA.connector_layers,
    "connector_num_attention_heads": HEADS,
    "connector_attention_head_dim": HEAD_DIM,
    "audio_connector_num_attention_heads": HEADS,
    "audio_connector_attention_head_dim": AUDIO_HEAD_DIM,
}

# The encoder's blocks work on 128 channels; the decoder's first on 8 * decoder_base_channels, which
# every multiplier divides. The decoder's list is built from its end. Most of the time goes into the
# encoder's first convolution, so the next block makes an eighth of the positions.
VIDEO_VAE = {
    "encoder_blocks": [
        ["compress_all_res", {"multiplier": 1}],
        ["compress_all_res", {"multiplier": 1}],
        ["res_x", {"num_layers": 1}],
        ["compress_all_res", {"multiplier": 1}],
    ],
    "encoder_base_channels": 128,
    "decoder_blocks": [
        ["res_x", {"num_layers": 1}],
        ["compress_space", {"multiplier": 1}],
        ["res_x", {"num_layers": 1}],
        ["compress_time", {"multiplier": 1}],
        ["res_x", {"num_layers": 2}],
        ["compress_all", {"multiplier": 1}],
        ["res_x", {"num_layers": 2}],
        ["compress_all", {"multiplier": 2}],
        ["res_x", {"num_layers": 2}],
    ],
    "decoder_base_channels": 6,
}

# ch must be 128, for it is also how many statistics of latents there are (8 channels of 16 bins).
AUDIO_VAE = {"model": {"params": {"ddconfig": {"ch_mult": [1, 1, 1], "num_res_blocks": 0}}}}
_SMALL_VOCODER = {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}
VOCODER = {
    "vocoder": _SMALL_VOCODER | {"upsample_initial_channel": 128},
    # The tables of its Fourier transform would take 1 MB at the released window of 512.
    "bwe": _SMALL_VOCODER | {"upsample_initial_channel": 32, "n_fft": 256, "win_size": 256},
}

# Groups of its norms are two channels: of one alone the norm would take away a whole clip's level.
UPSAMPLER = {
    "_class_name": "LatentUpsampler",
    "in_channels": 128,
    "mid_channels": 64,
    "num_blocks_per_stage": 1,
    "dims": 3,
    "spatial_upsample": True,
    "temporal_upsample": False,
    "spatial_scale": 2.0,
    "rational_resampler": False,
}


def demo_config() -> dict:
    """The config for the checkpoint's metadata, which every part's model is built from."""
    sizes = {
        "transformer": TRANSFORMER,
        "vae": VIDEO_VAE,
        "audio_vae": AUDIO_VAE,
        "vocoder": VOCODER,
    }
    return merge(released_config(), sizes)


PARTS = (
    "model.diffusion_model.video_embeddings_connector.",
    "model.diffusion_model.audio_embeddings_connector.",
    "model.diffusion_model.",
    "text_embedding_projection.",
    "vae.encoder.",
    "vae.decoder.",
    "vae.",
    "audio_vae.encoder.",
    "audio_vae.decoder.",
    "audio_vae.",
    "vocoder.vocoder.",
    "vocoder.bwe_generator.",
    "vocoder.",
)


def sizes_of_parts() -> dict[str, int]:
    """Bytes by the published prefix of each part."""
    from tiny.gemma import gemma_config, gemma_weights
    from tiny.weights import checkpoint_weights, upsampler_weights

    sizes = dict.fromkeys(PARTS, 0)
    for name, weight in checkpoint_weights(demo_config(), GEMMA).items():
        sizes[next(part for part in PARTS if name.startswith(part))] += weight.nbytes
    for part, weights in (
        ("upsampler", upsampler_weights(UPSAMPLER, 0)),
        ("gemma", gemma_weights(gemma_config(GEMMA), 0)),
    ):
        sizes[part] = sum(weight.nbytes for weight in weights.values())
    return sizes


def main() -> None:
    sizes = sizes_of_parts()
    for part, count in (sizes | {"all": sum(sizes.values())}).items():
        print(f"{part:50} {count / 1e6:6.2f} MB")


if __name__ == "__main__":
    main()
