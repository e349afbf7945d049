"""--upscale: latent upsamplers after a one-stage run, and their output shapes.

Shapes: (F, h, w), latent frames, rows and columns.
"""

Shape = tuple[int, int, int]
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
