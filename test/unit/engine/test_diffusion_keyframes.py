"""The diffusion decoder with keyframes: for each token one softmax over the tokens of the clip and of the planes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from diffusion_vae import SEED, VAE, config_of, latent, spans, write
from helpers import generator, one_thread, randn, rel  # noqa: F401
from jobs import make_job, replace
from safetensors.torch import load_file
from torch import Tensor

from ltx_neuron.config import diffusion
from ltx_neuron.engine.decode import Decoder
from ltx_neuron.engine.outputs import JobRun
from ltx_neuron.engine.preflight import notes
from ltx_neuron.errors import FieldError
from ltx_neuron.host.diffusion import DiffusionDecoder, decode_bytes
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Size
from ltx_neuron.report.latency import Recorder

FP32 = 2e-6  # relative, after all layers
SHAPE = 3, 3, 3
EMBEDDING = randn(8, seed=11)
TWO_STAGES = Size(256, 256, 17, two_stage=True)
READING = make_job("rain", TWO_STAGES, num_generated_keyframes=2, decode_with_keyframes=True)
# Every fifth row and column of the frames, as tools/golden/keyframe_decoder.py records them of the definition.
GOLDEN, STEP = ROOT / "test/golden/diffusion_keyframes.safetensors", 5


def keyframes(frames=(0, 3, 9, 14)) -> dict[int, Tensor]:
    drawn = generator(5)
    return {frame: torch.randn(1, 8, 1, *SHAPE[1:], generator=drawn) for frame in frames}


def pixels(planes: dict[int, Tensor], embedding: Tensor | None = EMBEDDING, **config) -> Tensor:
    """(3, F, H, W)"""
    weights = spans()
    if embedding is not None:
        weights.type_emb = torch.nn.Parameter(embedding, requires_grad=False)
    weights.config = replace(config_of(), **config)
    return torch.cat([*DiffusionDecoder(weights.config, SHAPE, weights).pixels(latent(SHAPE), SEED, planes)], 2)[0]


def test_a_clip_attends_to_its_keyframes_as_the_definition_says():
    frames = pixels(keyframes())
    assert frames.shape == (3, 17, 96, 96)
    assert rel(frames[..., ::STEP, ::STEP], load_file(GOLDEN)["frames"]) < FP32
    assert rel(pixels(keyframes(), span=3, tile=5), frames) < FP32  # whatever the spans and tiles
    others = [pixels({}), pixels(keyframes((0, 3, 9))), pixels(keyframes((0, 3, 9, 15))), pixels(keyframes(), None)]
    assert min(rel(other, frames) for other in others) > 1e-3


def test_a_files_embedding_is_read_where_it_has_one(tmp_path):
    clips = []
    for number, tensors in enumerate(({"vae.decoder.type_emb": EMBEDDING}, {})):
        models = HostModels(write(tmp_path / f"{number}.safetensors", **tensors), {"vae": VAE}, torch.float32)
        clips.append(torch.cat([*models.decode_video(latent(SHAPE), seed=SEED, keyframes=keyframes())]))
    assert clips[0].shape == clips[1].shape == (17, 96, 96, 3) and not torch.equal(*clips)


def test_memory_grows_with_the_length_and_is_larger_than_without_keyframes():
    needs, clip = partial(decode_bytes, config_of(), dtype=torch.float32), (40, 8, 12)
    plain, short, long = (needs(clip), needs(clip, keyframes=True), needs((80, 8, 12), keyframes=True))
    assert plain < short < long < 2 * short


def test_the_decoder_gets_the_last_stages_keyframes_by_frame():
    decoded = []

    def decode_video(video, seed, keyframes):
        decoded.append(keyframes)
        yield torch.zeros(1, 32, 32, 3, dtype=torch.uint8)

    host = SimpleNamespace(sample_rate=48000)
    decoder = Decoder(host, Recorder(), False, decode_video, lambda _: torch.zeros(2, 9))
    planes = randn(1, 128, 2, 8, 8)
    for job in (READING, replace(READING, decode_with_keyframes=False)):
        run = JobRun(job)
        for key in ("s1", "s2"):
            run.tensors |= {f"{key}_{kind}": torch.zeros(1) for kind in ("video", "audio")}
        run.tensors |= {"s1_generated_keyframes": torch.zeros(1), "s2_generated_keyframes": planes}
        assert decoder.result(run)
    first, second = decoded
    assert list(first) == [5, 11] and second == {} and torch.equal(torch.cat([*first.values()], 2), planes)


def test_dfrs_keyframes_inside_the_clip_are_decoded_in_their_order():
    job = make_job("rain", replace(TWO_STAGES, num_frames=41), dfr=True, temporal_upsample_rounds=1)
    tensors = {"s2_generated_keyframes": torch.arange(2.0).view(1, 1, 2, 1, 1)}
    for window in job.rendering.windows:
        planes = torch.full((1, 1, len(window.generated), 1, 1), 10.0 + window.order)
        tensors[f"{window.key}_generated_keyframes"] = planes
    decoded = {frame: float(plane) for frame, plane in job.decoded_keyframes(tensors).items()}
    assert decoded == {24: 10.0, 48: 0.0, 72: 11.0}  # of 81 frames; 96 fills the last segment
    assert list(decoded) == sorted(decoded)
    assert not replace(job, recipe="dev", compat="ltx-pipelines-1.2.0").reads_keyframes


def test_what_does_not_fit_is_refused_and_a_file_that_cannot_use_the_keyframes_is_named():
    READING.check()
    for message, changes in (
        ("goes with --num-generated-keyframes", {"num_generated_keyframes": None}),
        ("cannot be combined with --upscale", {"upscale": "spatial", "size": replace(TWO_STAGES, two_stage=False)}),
        ("ltx-pipelines-1.2.0 decodes without keyframes", {"compat": "ltx-pipelines-1.2.0"}),
    ):
        with pytest.raises(FieldError, match=message):
            replace(READING, **changes).check()
    for kind, names, printed in (
        (None, (), ["convolutional decoder does not read keyframes"]),
        (diffusion.DIFFUSION_VAE, (), ["zeros take the place of this embedding"]),
        (diffusion.DIFFUSION_VAE, (diffusion.EMBEDDING,), []),
    ):
        file = SimpleNamespace(path="vae.safetensors", shapes=names)
        files = SimpleNamespace(of=lambda section, file=file: file)
        lines = notes(READING, SimpleNamespace(config={"vae": {"_class_name": kind}}, files=files))
        assert len(lines) == len(printed) and all(map(str.__contains__, lines, printed))
