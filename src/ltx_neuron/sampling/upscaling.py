"""--upscale: latent upsamplers after a one-stage run, and what they make of a latent's shape.

Shapes: (F, h, w), latent frames, rows and columns.
"""

from ltx_neuron.errors import UserError

Shape = tuple[int, int, int]
# --upscale -> the latent upsamplers that run after a one-stage run, in their order.
UPSCALES = {"spatial": ("spatial",), "temporal": ("temporal",), "both": ("spatial", "temporal")}


def check_upscale(upscale: str | None, two_stage: bool) -> None:
    """Raise UserError for an --upscale that is not known, or not for such runs."""
    if upscale not in (None, *UPSCALES):
        raise UserError(f"upscale {upscale!r} is not known; known: {', '.join(UPSCALES)}")
    if upscale and two_stage:
        raise UserError(
            "--upscale is for one-stage runs; --two-stage upsamples between its stages already"
        )


def upscaled(latent: Shape, upscale: str | None) -> Shape:
    """Of the video latent that is decoded."""
    for kind in UPSCALES.get(upscale, ()):
        latent = upsampled(latent, kind)
    return latent


def upsampled(latent: Shape, kind: str) -> Shape:
    """Of what the "spatial" or "temporal" upsampler makes of a latent."""
    frames, height, width = latent
    if kind == "temporal":
        return 2 * frames - 1, height, width
    return frames, 2 * height, 2 * width
