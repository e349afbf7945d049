"""Colours of an image as the model was trained on: sRGB. Imports no torch, which needs more memory
than the process that decodes an upload may use."""

from io import BytesIO

from PIL import Image, ImageCms

_ERRORS = (ImageCms.PyCMSError, OSError, ValueError)


def in_srgb(image: Image.Image) -> Image.Image:
    """An image as RGB without alpha. Applies its embedded colour profile, such as a phone's Display
    P3, unless that is damaged (ltx-pipelines 1.2.0, media_io/decode.py)."""
    profile = image.info.get("icc_profile")
    if opaque := {"RGBA": "RGB", "P": "RGB", "LA": "L"}.get(image.mode):
        image = image.convert(opaque)
    if profile:
        try:
            embedded = ImageCms.ImageCmsProfile(BytesIO(profile))
            srgb = ImageCms.createProfile("sRGB")
            image = ImageCms.profileToProfile(image, embedded, srgb, outputMode="RGB") or image
        except _ERRORS as error:
            print(f"the image's colour profile is ignored: {error}")
    image = image.convert("RGB")
    image.info.pop("icc_profile", None)
    return image
