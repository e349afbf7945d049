"""HDR and mattes on tiny models of LTX-2.5, beside a loop over all tokens that is written down from the rules of
ltx-pipelines 1.4 (hdr_ic_lora.py, alpha_gen.py), in float32."""

import json

import pytest

pytest.importorskip("PyOpenColorIO", reason="the extra is not installed: pip install -e .[hdr]")

import av
import numpy as np
import OpenEXR
import torch
from conftest import QUICK, words
from helpers import clip_times, picture_frames, predicted_video, randn, random_lora, rel, token_positions, write_film
from PIL import Image
from safetensors.torch import load_file, save_file

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.commands import dispatch
from ltx_neuron.config.profiles import resolve
from ltx_neuron.host.models import HostModels
from ltx_neuron.sampling.schedules import DISTILLED_SIGMAS, ltx2_schedule
from ltx_neuron.weights.sharding import DIFFUSION
from ltx_neuron.weights.tensorfile import TensorFile

FP32 = 1e-5  # sums in another order, over 8 steps
# Of half floats; and fp32's rounding of codes near black, relative to LEAST (measured 6e-5).
HALF, LEAST, NEAR_BLACK = 2**-11, 2**-14, 1e-4
LAYERS = ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.attn2.to_out.0")
TO_AP1 = [
    [0.6130974024, 0.3395231462, 0.0473794514],
    [0.0701937225, 0.9163538791, 0.0134523985],
    [0.0206155929, 0.1095697729, 0.8698146342],
]


def encoded(light: np.ndarray) -> np.ndarray:
    """ACEScct of light in AP1."""
    log = (np.log2(np.maximum(light, 1e-12)) + 9.72) / 17.52
    return np.where(light > 0.0078125, log, 10.5402377416545 * light + 0.0729055341958355).clip(0, 1)


def decoded(codes: np.ndarray) -> np.ndarray:
    linear = (codes - 0.0729055341958355) / 10.5402377416545
    return np.where(codes > 0.155251141552511, 2.0 ** (17.52 * codes - 9.72), linear).clip(0)


def linear(display: np.ndarray) -> np.ndarray:
    """Light in AP1 of sRGB in [0, 1]."""
    light = np.where(display <= 0.04045, display / 12.92, ((display + 0.055) / 1.055) ** 2.4)
    return light @ np.array(TO_AP1).T


class Loop:
    """The tokens of a clip and of its reference, then appended ones, and their steps. fps: of the positions."""

    def __init__(self, workspace: Workspace, home, reference: torch.Tensor, fps: float):
        stored, merged = load_file(workspace.checkpoint_path), load_file(home / "hdr.safetensors")
        self.weights = {name.removeprefix(DIFFUSION): x.float() for name, x in stored.items()}
        for layer in LAYERS:
            down, up = (merged[f"diffusion_model.{layer}.lora_{part}.weight"] for part in "AB")
            # In bfloat16, as upstream merges.
            self.weights[f"{layer}.weight"] = (stored[f"{DIFFUSION}{layer}.weight"] + up @ down).float()
        self.config, self.fps, self.sides = workspace.transformer, fps, reference.shape[-2:]
        self.parts, self.times = [], []  # tokens, masks and marks of each part
        for latent, mask in ((torch.zeros_like(reference), 1.0), (reference, 0.0)):
            self.append(latent, clip_times(reference.shape[2]), mask)
        self.parts[0][2][: self.sides.numel()] = 1.0  # the first frame is marked

    def append(self, latent, times, mask: float, marked: float = 0.0) -> None:
        """Tokens with these times in frames, held but for `mask`."""
        tokens, self.times = latent[0].flatten(1).T, self.times + times
        self.parts.append((tokens, *(torch.full((len(tokens), 1), value) for value in (mask, marked))))

    def run(self, sigmas, context) -> torch.Tensor:
        """The tokens (1, T, 128) at the end."""
        clean, mask, marked = (torch.cat(x) for x in zip(*self.parts, strict=True))
        clean, places = clean[None], token_positions(self.times, self.fps, *self.sides)
        x = mask * randn(*clean.shape, seed=10) + (1 - mask) * clean
        given = {"keyframes_mask": marked, "video_context": context}
        for sigma, after in zip(sigmas, sigmas[1:], strict=False):
            x0 = predicted_video(self.config, self.weights, mask, clean, places, sigma, video_latent=x, **given)
            x = x0 + (x - x0) * (after / sigma)
        return x


@pytest.fixture(scope="module")
def home(split, tmp_path_factory):
    """A folder with an adapter, text embeddings, and a film of 25 frames of 92 x 60 at 50 a second."""
    folder = tmp_path_factory.mktemp("hdr")
    random_lora(folder / "hdr.safetensors", split.distilled, *LAYERS)
    width = TensorFile(split.distilled, "").shapes[f"{DIFFUSION}{LAYERS[0]}.weight"][0]
    save_file({"video_context": randn(1, 1024, width, seed=5)}, folder / "texts.safetensors")
    write_film(folder / "in.mkv", picture_frames(25, 60, 92, 3), 50, lossless=True)
    return folder


def run(home, split, artifacts, recipe: str, **flags: object) -> tuple[dict, Workspace, HostModels]:
    """The tensors of a job with the adapter, and what its model is read by."""
    flags |= {"checkpoint_path": split.folder, "artifacts_dir": artifacts, "profile": "cpu", "profile_set": QUICK}
    flags |= {"recipe": recipe, "tp_degree": 1, "dtype": "float32", "ic_lora": home / "hdr.safetensors"}
    dispatch(["prepare", *words(**flags)])
    dispatch(["generate", *words(**flags, save_tensors=home / "tensors.safetensors")])
    workspace = Workspace(getattr(split, recipe), resolve("cpu", ()), artifacts, 1, "float32")
    host = HostModels(workspace.checkpoint_path, workspace.config, torch.float32, files=workspace.files)
    return load_file(home / "tensors.safetensors"), workspace, host


def planes(latent: torch.Tensor, rows: int = 2, columns: int = 3) -> torch.Tensor:
    return latent.unflatten(1, (-1, rows, columns)).permute(0, 4, 1, 2, 3)


@torch.no_grad()
def test_hdr_equals_the_loop_and_ships_its_light_as_exr_and_hlg(home, split, artifacts, capsys):
    files = {"text_embeddings": home / "texts.safetensors", "output_path": home / "out.mp4"}
    files["video_conditioning"] = ((home / "in.mkv", 1.0),)
    got, workspace, host = run(home, split, artifacts, "distilled", **files)
    with av.open(str(home / "in.mkv")) as film:
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)])
    codes = encoded(linear(shown / 255.0))
    codes = np.pad(codes, ((0, 0), (0, 4), (0, 4), (0, 0)), mode="reflect")
    pixels = torch.from_numpy(2 * codes - 1).float().permute(3, 0, 1, 2)[None]
    reference, guide = (host.encode_video(part, whole=True) for part in (pixels, pixels[:, :, 24:]))
    assert rel(got["reference_latent"], reference) < FP32 and rel(got["given_keyframes"], guide) < FP32

    loop = Loop(workspace, home, reference, fps=30.0)  # not the film's 50
    loop.append(guide, [(24, 25)], float(torch.tensor(1 - 0.95)))
    loop.append(torch.zeros_like(guide), [(24, 25)], 1.0, marked=1.0)
    end = loop.run(DISTILLED_SIGMAS, load_file(home / "texts.safetensors")["video_context"])
    assert rel(got["s1_video"], planes(end[:, :24])) < FP32
    assert rel(got["s1_generated_keyframes"], planes(end[:, -6:])) < FP32
    assert "s1_audio" not in got

    frames = got["frames"]  # without the reflected rows and columns; the same decoder as of 8 bits
    eight = torch.cat([*host.decode_video(got["s1_video"])])[:, :60, :92]
    assert frames.dtype == torch.float32 and torch.equal((frames * 255).byte(), eight)
    files, light = sorted((home / "out_acescg_exr").iterdir()), decoded(frames.numpy().astype(np.float64))
    assert [file.name for file in files] == [f"frame_{n:05d}.exr" for n in range(25)]
    for file, wanted in zip(files, light, strict=True):
        pixels = OpenEXR.File(str(file)).channels()["RGB"].pixels.astype(np.float64)
        assert (np.abs(pixels - wanted) / np.maximum(wanted, LEAST)).max() < HALF + NEAR_BLACK
    with av.open(str(home / "out.mp4")) as master:
        (stream,) = master.streams
        assert (stream.width, stream.height, stream.average_rate, stream.frames) == (92, 60, 50, 25)
        assert (stream.codec_context.name, stream.codec_context.color_trc) == ("hevc", 18)
    described = json.loads((home / "out.json").read_text())
    assert described["text_embeddings"] and "IC-LoRA" not in capsys.readouterr().err


@torch.no_grad()
def test_a_folder_of_exr_files_is_generated_at_twice_its_frames_in_high_quality(home, split, artifacts):
    """The plate is half again as bright as white."""
    folder = home / "plate"
    folder.mkdir()
    plate = np.random.default_rng(0).random((9, 64, 64, 3)) * 1.5
    for number, picture in enumerate(plate):
        OpenEXR.File({}, {"RGB": picture.astype(np.float32)}).write(str(folder / f"plate.{number:04d}.exr"))
    files = {"text_embeddings": home / "texts.safetensors", "output_path": home / "hq.mp4"}
    spaces = {"input_colorspace": "acescg", "frame_rate": 24, "exr_colorspace": "acescct", "high_quality": True}
    spaces["video_conditioning"] = ((folder, 1.0),)
    got, workspace, host = run(home, split, artifacts, "distilled", **files, **spaces)
    pixels = torch.from_numpy(2 * encoded(plate) - 1).float().permute(3, 0, 1, 2)[None]
    reference = host.encode_video(pixels.repeat_interleave(2, dim=2)[:, :, :17], whole=True)
    end = Loop(workspace, home, reference, fps=24.0).run(
        DISTILLED_SIGMAS, load_file(home / "texts.safetensors")["video_context"]
    )
    assert rel(got["s1_video"], planes(end[:, :12], 2, 2)) < FP32
    eight = torch.cat([*host.decode_video(got["s1_video"])])[::2]
    assert torch.equal((got["frames"] * 255).byte(), eight) and len(eight) == 9
    (first, *_) = files = sorted((home / "hq_acescct_exr").iterdir())
    pixels = OpenEXR.File(str(first)).channels()["RGB"].pixels
    assert len(files) == 9 and np.array_equal(pixels, got["frames"][0].numpy().astype(np.float16))


@torch.no_grad()
def test_a_matte_equals_the_loop_and_is_the_alpha_of_its_video(home, split, artifacts, capsys):
    """At cfg 1 the guided prediction is the model's own, whatever the rescale."""
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3}
    files = {"video_conditioning": ((home / "in.mkv", 1.0),), "output_path": home / "matte.mov"}
    got, workspace, host = run(home, split, artifacts, "dev", alpha_gen=True, **size, **files, save_frames=home / "png")
    assert "the prompt is empty: the references alone guide the video" in capsys.readouterr().out
    end = Loop(workspace, home, got["reference_latent"], fps=24.0).run(ltx2_schedule(3), got["video_context"])
    assert rel(got["s1_video"], planes(end[:, :12])) < FP32
    matte = torch.cat([*host.decode_video(got["s1_video"])]).float().mean(-1).round().byte().numpy()
    pictures = np.stack([np.asarray(Image.open(home / "png" / f"frame_{n:05d}.png")) for n in range(9)])
    assert pictures.shape == (9, 64, 96, 4) and np.array_equal(pictures[..., 3], matte)
    with av.open(str(home / "matte.mov")) as container:
        (stream,) = container.streams
        shown = np.stack([f.reformat(format="rgba").to_ndarray() for f in container.decode(stream)])
    assert stream.codec_tag == "ap4h" and np.abs(shown[..., 3].astype(int) - matte).max() <= 3
    assert np.abs(shown[..., :3].astype(int) - pictures[..., :3]).mean() < 2
