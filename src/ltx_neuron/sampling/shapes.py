"""Shapes of latents, as numbers: no torch, so that flags are parsed without it.

Source: ltx-core types.py. The scale factors are fixed upstream.
"""

TIME_SCALE = 8  # pixel frames per latent frame after the first
SPACE_SCALE = 32  # pixels per latent row and column
VIDEO_CHANNELS = 128
AUDIO_CHANNELS, MEL_BINS = 8, 16
AUDIO_LATENTS_PER_SECOND = 25  # 16000 Hz / hop 160 / downsampling 4
GUIDED_MAX_STEPS = 64  # rows of a guided graph's schedule tables
# Sizes of the audio encoder's mel spectrogram; the hop is in samples.
MEL_FRAMES_PER_LATENT, HOP = 4, 160
SAMPLE_RATE = 16000


def video_latent_shape(height: int, width: int, num_frames: int) -> tuple[int, int, int]:
    """(F, h, w): latent frames, rows and columns of a video in pixels."""
    return (num_frames - 1) // TIME_SCALE + 1, height // SPACE_SCALE, width // SPACE_SCALE


def audio_latent_frames(num_frames: int, frame_rate: float) -> int:
    """Audio latents for the video's length: 26 for 25 frames at 24 fps, 126 for 121."""
    return round(num_frames / frame_rate * AUDIO_LATENTS_PER_SECOND)


Shape = tuple[int, int, int]  # latent frames, rows and columns
# --upscale -> the latent upsamplers that run after a one-stage run, in their order.
UPSCALES: dict[str | None, tuple[str, ...]] = {
    "spatial": ("spatial",),
    "temporal": ("temporal",),
    "both": ("spatial", "temporal"),
}


def upscaled(latent: Shape, upscale: str | None) -> Shape:
    """The shape of the decoded video latent."""
    for kind in UPSCALES.get(upscale, ()):
        latent = upsampled(latent, kind)
    return latent


def upsampled(latent: Shape, kind: str) -> Shape:
    """The shape of the output of the "spatial" or "temporal" upsampler."""
    frames, height, width = latent
    if kind == "temporal":
        return 2 * frames - 1, height, width
    return frames, 2 * height, 2 * width
