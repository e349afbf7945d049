"""Colours of HDR beside printed values, and EXR files beside another reader of them."""

import sys

import pytest

pytest.importorskip("PyOpenColorIO", reason="the extra is not installed: pip install -e .[hdr]")

import numpy as np
import OpenEXR
import torch
from helpers import made_config, made_film
from safetensors.torch import save_file

from ltx_neuron.engine.outputs import OutputPaths
from ltx_neuron.errors import UserError
from ltx_neuron.files import content_digest
from ltx_neuron.host.encode_inputs import encode
from ltx_neuron.host.hdr import exr_folder, from_acescct, hlg_signal, read_exr, to_acescct, write_exr
from ltx_neuron.host.video import write_frames
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.inputs import Media
from ltx_neuron.text.encoders import read_contexts

FP32 = 2e-7  # a few roundings of codes up to 1
# ACEScct of light in AP1 (Academy S-2016-001), and what its conversions of Rec.709 are by the
# matrices of colour-science 0.4.4 (Bradford), in float64.
LIGHT = 0.0, 0.0078125, 0.18, 1.0, 16.0, 222.0
CODES = 0.0729055341958355, 0.1552511415525113, 0.4135884024924423
CODES += 0.5547945205479452, 0.7831050228310503, 0.9996812709103942
RED = 0.5145084623593209, 0.3360437118624257, 0.23515295334335573
SKY = (0.2, 0.6, 0.9), (0.4068006341802645, 0.45696458686011593, 0.5277995813544838)


def refusal(act, *args) -> str:
    with pytest.raises(UserError) as error:
        act(*args)
    return str(error.value)


def grey(*values: float) -> np.ndarray:
    return np.repeat(np.array(values, np.float32)[:, None], 3, axis=1)


def test_light_is_encoded_by_the_printed_curve_in_its_range_and_light_of_a_code_has_that_code():
    assert np.abs(to_acescct(grey(*LIGHT), "acescg") - grey(*CODES)).max() < FP32
    assert to_acescct(grey(-1, 1000), "acescg")[:, 0] == pytest.approx([CODES[0], 1.0], abs=FP32)
    assert np.array_equal(to_acescct(grey(-0.5, 0.25, 2), "acescct"), grey(0, 0.25, 1))
    got = from_acescct(grey(0, *CODES, 1.0), "acescg")[:, 0]
    # A rounding of a code near 1 is 17.52 ln 2 times as much, relative to its light.
    assert got == pytest.approx([0, *LIGHT, 222.8609442038076], rel=12.2 * FP32, abs=FP32)


def test_colours_of_rec709_are_converted_to_ap1_and_to_hlg_with_white_at_three_quarters():
    """Display-coded sRGB is decoded first, linear sRGB is not. HLG: by ltx-core 1.4's formula in float64."""
    display, linear = (to_acescct(np.array([(1, 0, 0), SKY[0]]), space) for space in ("srgb_gamma", "srgb"))
    assert np.abs(display - [RED, SKY[1]]).max() < 2e-6  # the matrices have 7 digits
    assert np.abs(linear[0] - RED).max() < 2e-6 and np.abs(linear[1] - SKY[1]).max() > 0.01
    assert np.array_equal(from_acescct(np.float32([[0.7, 0.4, 0.2]]), "srgb_linear")[0, 1:], [0, 0])  # out of gamut
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
    # Half floats have 11 significant bits; below 2^-14 their steps are equal.
    assert (np.abs(got - wanted) / np.maximum(np.abs(wanted), 2**-14)).max() <= 2**-11
    assert OpenEXR.File(str(path)).header()["colorSpace"] == name
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    assert (frame.format.name, frame.width, frame.height) == ("gbrpf16le", 36, 20)
    planes = (np.frombuffer(p, np.float16).reshape(20, -1)[:, :36] for p in frame.planes)
    assert np.array_equal(np.stack([*planes], axis=-1)[..., [2, 0, 1]], got)


def test_other_exrs_are_read_as_three_colours_or_refused(tmp_path):
    path = tmp_path / "other.exr"

    def read(**channels) -> np.ndarray:
        OpenEXR.File({}, channels).write(str(path))
        return read_exr(path, "--input")

    alpha = np.random.default_rng(0).random((4, 6, 4), np.float32)
    assert np.array_equal(read(RGBA=alpha), alpha[..., :3])
    assert np.array_equal(read(Y=alpha[..., 0].copy()), np.stack([alpha[..., 0]] * 3, -1))
    assert "has the channels depth; wanted R, G and B, or Y" in refusal(lambda: read(depth=alpha[..., 0].copy()))
    path.write_bytes(b"not an EXR")
    for name, message in (("other", r"other.exr cannot be read as EXR"), ("none", "as EXR: no such file")):
        assert message in refusal(read_exr, tmp_path / f"{name}.exr", "--input")


def job(path, **fields) -> Job:
    return Job.validated({"text_embeddings": "texts", "video_conditioning": [[str(path), 1.0]]} | fields)


def plate(folder, *sides: tuple[int, int]):
    folder.mkdir()
    for number, (height, width) in enumerate(sides):
        write_exr(folder / f"{number}.exr", np.zeros((height, width, 3), np.float32), "acescct")
    return folder


def test_keyframes_are_at_the_ends_of_segments_inside_the_input():
    """By ltx-pipelines 1.4 itself (its _dfr_seam_pixel_positions)."""
    seams_of = {9: (), 25: (24,), 33: (32,), 57: (32,), 97: (32, 64, 96), 105: (24, 48, 72, 96), 1: ()}
    settings = {}, {"high_quality": True}, {"no_keyframes": True}
    for frames, seams in seams_of.items():
        known = Media(references=((frames, False),), hdr=Size(60, 92, frames, 50.0))
        plain, twice, without = (job("in.mp4", **more).with_media(known) for more in settings)
        assert plain.generated_keyframes(False) == plain.given_keyframes == seams and not without.given_keyframes
        assert twice.given_keyframes == tuple(2 * at for at in seams)
        assert (plain.size.sides, plain.size.num_frames, twice.size.num_frames) == ((64, 96), frames, 2 * frames - 1)
        assert plain.output_size.sides == (60, 92) and plain.position_rate == 30
        bucket = plain.stage_buckets(plain.stages[0])[0]
        assert (bucket.timesteps, bucket.streams, plain.texts) == (3 if seams else 2, ("video",), ())


def test_other_inputs_are_refused_with_what_they_need(tmp_path, monkeypatch):
    film, long = made_film(tmp_path / "in.mp4", 9, 32, 32), made_film(tmp_path / "ten.mp4", 10, 32, 32)
    folder, odd = plate(tmp_path / "plate", *[(32, 32)] * 9), plate(tmp_path / "odd", (32, 33))
    acescg = {"input_colorspace": "acescg", "frame_rate": 24.0}
    takes = "takes a --frame-rate, and --input-colorspace srgb or acescg or acescct"
    none = "takes no --frame-rate, and --input-colorspace srgb_gamma or srgb"
    for path, fields, message in (
        (folder, {}, takes),
        (folder, {"input_colorspace": "acescg"}, takes),
        (film, acescg, none),
        (film, {"frame_rate": 24.0}, none),
        (long, {}, "10 frames of 32x32; wanted 8k+1 frames, such as 9 or 17"),
        (odd, acescg, "and even sides"),
        (plate(tmp_path / "empty"), acescg, "has no file NAME.exr"),
        (film, {"video_conditioning": [[str(film), 1.0]] * 2}, "needs one --video-conditioning"),
    ):
        assert message in refusal(getattr, job(path, **fields), "size")
    assert job(folder, **acescg).size == Size(32, 32, 9, 24.0)
    digest = content_digest(folder)
    plate(tmp_path / "mixed", (32, 34))
    (folder / "8.exr").write_bytes((tmp_path / "mixed" / "0.exr").read_bytes())
    assert content_digest(folder) != digest  # a changed frame is another input
    assert "8.exr: got (32, 34) pixels, wanted (32, 32)" in refusal(encode, None, job(folder, **acescg))
    monkeypatch.setitem(sys.modules, "PyOpenColorIO", None)
    assert "needs the package PyOpenColorIO" in refusal(getattr, job(film), "size")


def test_text_embeddings_are_the_contexts_of_the_model_or_refused(tmp_path):
    _, config = made_config()
    texts, width = torch.randn(1, 1024, config.video.inner), config.video.inner
    for name in ("video_context", "video_prompt_embeds"):
        save_file({name: texts}, path := tmp_path / "texts.safetensors")
        assert torch.equal(read_contexts(str(path), config, torch.float32).video, texts)
    for wrong in ({"video_context": texts[:, :8]}, {"context": texts}, {"video_context": texts * torch.inf}):
        save_file({name: x.contiguous() for name, x in wrong.items()}, path)
        said = refusal(read_contexts, str(path), config, torch.float32)
        assert f"wanted a finite video_context of shape (1, 1024, {width})" in said


def test_exr_files_of_others_are_not_overwritten_and_stale_ones_of_ours_are_removed(tmp_path):
    video, frames = tmp_path / "out.mp4", torch.rand(3, 4, 6, 3)
    folder, known = exr_folder(video, "acescg"), Media(references=((9, False),), hdr=Size(4, 6, 9, 24.0))
    made = job("in.mp4").with_media(known)
    list(write_frames(folder, [frames], "acescg"))
    OutputPaths(video).check({}, made)
    list(write_frames(folder, [frames[:2]], "acescg"))
    assert [path.name for path in sorted(folder.iterdir())] == ["frame_00000.exr", "frame_00001.exr"]
    (folder / "frame_00001.exr").write_bytes(b"somebody's")
    assert "frame_00001.exr exists and this toolkit did not write it" in refusal(OutputPaths(video).check, {}, made)
    assert "HDR writes EXR files" in refusal(OutputPaths(video, frames=tmp_path / "png").check, {}, made)
