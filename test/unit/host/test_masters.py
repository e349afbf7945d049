"""Masters read back: the HLG one's tags and levels, and the alpha of ProRes 4444."""

import subprocess

import av
import numpy as np
import pytest
import torch

from ltx_neuron.host.masters import write_hlg, write_prores

WHITE = 0.5547945205479452  # ACEScct of diffuse white
LUMA = 721  # of 10 bits: 4 (219 x 0.75 + 16), HLG's diffuse white
ALPHA = 1  # codes of 8 bits are rounded to 10 and back, once in each library


def test_the_hlg_master_is_tagged_and_shows_white_at_its_level(tmp_path):
    pytest.importorskip("PyOpenColorIO")
    codes = torch.full((9, 64, 96, 3), WHITE)
    codes[:, :, 48:] = torch.tensor([0.5, 0.2, 0.2])  # red
    for name, chunks in (("one", [codes]), ("two", codes.split(4)), ("small", [codes[:, :32, :32]])):
        write_hlg(tmp_path / f"{name}.mp4", chunks, 29.97)
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "two.mp4").read_bytes()
    with av.open(str(tmp_path / "one.mp4")) as container:
        stream = container.streams.video[0]
        context, frames = stream.codec_context, [*container.decode(stream)]
        tags = context.color_primaries, context.color_trc, context.colorspace, context.color_range
        assert tags == (9, 18, 9, 1)  # BT.2020, ARIB STD-B67, BT.2020 NCL, limited
        assert (context.name, context.pix_fmt, stream.codec_tag) == ("hevc", "yuv420p10le", "hvc1")
        assert str(stream.average_rate) == "30000/1001" and len(frames) == 9
    luma, _, red = (np.frombuffer(plane, np.uint16).reshape(plane.height, -1) for plane in frames[4].planes)
    assert abs(int(np.median(luma[:, :48])) - LUMA) <= 1
    assert abs(int(np.median(red[:, :24])) - 512) <= 1 and np.median(red[:, 25:48]) > 600


def test_prores_keeps_alpha_for_pyav_and_for_ffmpeg(tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    blocks, path = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 4)), tmp_path / "one.mov"
    blocks[:, 0, :2, 3] = 0, 255
    pictures = np.kron(blocks, np.ones((1, 16, 16, 1))).astype(np.uint8)
    for each in (path, tmp_path / "two.mov"):
        write_prores(each, torch.from_numpy(pictures).split(3), 24.0)
    assert path.read_bytes() == (tmp_path / "two.mov").read_bytes()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_tag, stream.codec_context.profile) == ("prores", "ap4h", "4444")
        ours = np.stack([f.reformat(format="rgba").to_ndarray() for f in container.decode(stream)])
    command = [ffmpeg, "-loglevel", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgba", "-"]
    theirs = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8)
    for got in (ours, theirs.reshape(pictures.shape)):
        assert np.abs(got.astype(int) - pictures).max() <= ALPHA
