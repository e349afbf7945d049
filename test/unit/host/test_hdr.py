"""Colours of HDR beside printed values, and EXR files beside another reader of them."""

import numpy as np
import pytest

from ltx_neuron.errors import UserError
from ltx_neuron.host.hdr import from_acescct, hlg_signal, read_exr, to_acescct, write_exr

pytest.importorskip("PyOpenColorIO")
OpenEXR = pytest.importorskip("OpenEXR")

FP32 = 2e-7  # a few roundings of codes up to 1
# Half floats have 11 significant bits; below 2^-14 their steps are equal.
HALF, LEAST = 2**-11, 2**-14
# ACEScct of light in AP1 (Academy S-2016-001), and what its conversions of Rec.709 are by the
# matrices of colour-science 0.4.4 (Bradford), in float64.
LIGHT = 0.0, 0.0078125, 0.18, 1.0, 16.0, 222.0
CODES = 0.0729055341958355, 0.1552511415525113, 0.4135884024924423
CODES += 0.5547945205479452, 0.7831050228310503, 0.9996812709103942
RED = 0.5145084623593209, 0.3360437118624257, 0.23515295334335573
SKY = (0.2, 0.6, 0.9), (0.4068006341802645, 0.45696458686011593, 0.5277995813544838)


def grey(*values: float) -> np.ndarray:
    return np.repeat(np.array(values, np.float32)[:, None], 3, axis=1)


def test_light_is_encoded_by_the_printed_curve_and_stays_in_its_range():
    assert np.abs(to_acescct(grey(*LIGHT), "acescg") - grey(*CODES)).max() < FP32
    assert to_acescct(grey(-1, 1000), "acescg")[:, 0] == pytest.approx([CODES[0], 1.0], abs=FP32)
    assert np.array_equal(to_acescct(grey(-0.5, 0.25, 2), "acescct"), grey(0, 0.25, 1))


def test_light_of_a_code_is_light_that_has_the_code():
    got = from_acescct(grey(0, *CODES, 1.0), "acescg")[:, 0]
    # A rounding of a code near 1 is 17.52 ln 2 times as much, relative to its light.
    assert got == pytest.approx([0, *LIGHT, 222.8609442038076], rel=12.2 * FP32, abs=FP32)


def test_colours_of_rec709_are_converted_to_ap1():
    """Display-coded sRGB is decoded first, linear sRGB is not."""
    display, linear = (to_acescct(np.array([(1, 0, 0), SKY[0]]), space) for space in ("srgb_gamma", "srgb"))
    assert np.abs(display - [RED, SKY[1]]).max() < 2e-6  # the matrices have 7 digits
    assert np.abs(linear[0] - RED).max() < 2e-6 and np.abs(linear[1] - SKY[1]).max() > 0.01
    assert np.array_equal(from_acescct(np.float32([[0.7, 0.4, 0.2]]), "srgb_linear")[0, 1:], [0, 0])  # out of gamut


def test_diffuse_white_is_three_quarters_of_hlg():
    """By ltx-core 1.4's formula in float64; neutral, then a colour."""
    light = np.concatenate([grey(0, 0.18, 1, 4, 100), np.float32([[2, 0.5, 0.05]])])
    got = hlg_signal(to_acescct(light, "srgb"))
    neutral = [0.0, 0.3782588830779046, 0.75, 0.947280748538359, 0.9999999950661305]
    assert got[:5] == pytest.approx(grey(*neutral), abs=2e-6)
    assert got[5] == pytest.approx([0.8139141545892317, 0.6460072658555785, 0.3108599919641505], abs=2e-6)


@pytest.mark.parametrize("space, name", [("acescg", "ACEScg"), ("acescct", "ACEScct"), ("srgb_linear", "sRGB")])
def test_an_exr_holds_the_picture_in_half_floats_for_us_and_for_ffmpeg(tmp_path, space, name):
    """ffmpeg has a reader of its own, which does not share code with the OpenEXR library."""
    import av

    codes = np.random.default_rng(0).random((20, 36, 3), np.float32)
    write_exr(path := tmp_path / "picture.exr", codes, space)
    got, wanted = read_exr(path, "--input"), from_acescct(codes, space)
    assert (np.abs(got - wanted) / np.maximum(np.abs(wanted), LEAST)).max() <= HALF
    assert OpenEXR.File(str(path)).header()["colorSpace"] == name
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    assert (frame.format.name, frame.width, frame.height) == ("gbrpf16le", 36, 20)
    planes = (np.frombuffer(p, np.float16).reshape(20, -1)[:, :36] for p in frame.planes)
    assert np.array_equal(np.stack([*planes], axis=-1)[..., [2, 0, 1]], got)


def test_other_exrs_are_read_as_three_colours_or_refused(tmp_path):
    def write(**channels) -> str:
        OpenEXR.File({}, channels).write(str(tmp_path / "other.exr"))
        return str(tmp_path / "other.exr")

    alpha = np.random.default_rng(0).random((4, 6, 4), np.float32)
    assert np.array_equal(read_exr(write(RGBA=alpha), "--input"), alpha[..., :3])
    assert np.array_equal(read_exr(write(Y=alpha[..., 0].copy()), "--input"), np.stack([alpha[..., 0]] * 3, -1))
    with pytest.raises(UserError, match="has the channels depth; wanted R, G and B, or Y"):
        read_exr(write(depth=alpha[..., 0].copy()), "--input")
    (tmp_path / "other.exr").write_bytes(b"not an EXR")
    with pytest.raises(UserError, match="--input .*other.exr cannot be read as EXR"):
        read_exr(tmp_path / "other.exr", "--input")
    with pytest.raises(UserError, match="none.exr: no such file"):
        read_exr(tmp_path / "none.exr", "--input")
