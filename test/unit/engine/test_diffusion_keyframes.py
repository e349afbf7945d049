"""The diffusion decoder with keyframes equals its definition: for each token one softmax over the
tokens of the clip and of the keyframes' planes that it sees. tools/golden holds the definition."""

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

from ltx_neuron.config.diffusion import DIFFUSION_VAE
from ltx_neuron.config.diffusion import EMBEDDING as EMBEDDING_NAME
from ltx_neuron.engine.decode import Decoder
from ltx_neuron.engine.preflight import notes
from ltx_neuron.engine.resume import JobRun
from ltx_neuron.errors import FieldError
from ltx_neuron.host.diffusion import DiffusionDecoder, decode_bytes
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.service.fields import VideoRequest

FP32 = 2e-6  # relative, after all layers
SHAPE = 3, 3, 3
SIDES = tuple(32 * side for side in SHAPE[1:])
FRAMES = 0, 3, 9, 14  # of keyframes
EMBEDDING = randn(8, seed=11)
# Every fifth row and column of the frames, as tools/golden/keyframe_decoder.py records them of the definition.
GOLDEN, STEP = ROOT / "test/golden/diffusion_keyframes.safetensors", 5


def keyframes(frames=FRAMES) -> dict[int, Tensor]:
    drawn = generator(5)
    return {frame: torch.randn(1, 8, 1, *SHAPE[1:], generator=drawn) for frame in frames}


def decoder(embedding: Tensor | None = EMBEDDING):
    made = spans()
    if embedding is not None:
        made.type_emb = torch.nn.Parameter(embedding, requires_grad=False)
    return made


def pixels(made, planes: dict[int, Tensor], seed: int = SEED, shape=SHAPE) -> Tensor:
    """(3, F, H, W)"""
    chunks = DiffusionDecoder(made.config, shape, made).pixels(latent(shape), seed, planes)
    return torch.cat([*chunks], 2)[0]


def test_a_clip_attends_to_its_keyframes_as_the_definition_says(one_thread):  # noqa: F811
    frames = pixels(decoder(), keyframes())
    assert frames.shape == (3, 17, *SIDES)
    assert rel(frames[..., ::STEP, ::STEP], load_file(GOLDEN)["frames"]) < FP32


def test_frames_do_not_depend_on_spans_and_tiles(one_thread):  # noqa: F811
    made, planes = decoder(), keyframes()
    expected = pixels(made, planes)
    made.config = replace(config_of(), span=3, tile=5)
    assert rel(pixels(made, planes), expected) < FP32


def test_every_keyframe_its_place_and_the_embedding_change_the_clip():
    expected = pixels(decoder(), keyframes())
    assert rel(pixels(decoder(None), keyframes()), expected) > 1e-3
    assert rel(pixels(decoder(), {}), expected) > 1e-3
    for frames in ((0, 3, 9), (0, 3, 9, 15)):
        assert rel(pixels(decoder(), keyframes(frames)), expected) > 1e-3


def test_a_file_s_embedding_is_read_where_it_has_one(tmp_path):
    made = {}
    for name, tensors in {"with": {"vae.decoder.type_emb": EMBEDDING}, "without": {}}.items():
        path = write(tmp_path / f"{name}.safetensors", **tensors)
        models = HostModels(path, {"vae": VAE}, torch.float32)
        decoded = models.decode_video(latent(SHAPE), seed=SEED, keyframes=keyframes())
        made[name] = torch.cat([*decoded])
    assert made["with"].shape == made["without"].shape == (17, *SIDES, 3)
    assert not torch.equal(made["with"], made["without"])


def test_memory_grows_with_the_length_and_is_larger_than_without_keyframes():
    needs, clip = partial(decode_bytes, config_of(), dtype=torch.float32), (40, 8, 12)
    plain, short, long = (needs(clip), needs(clip, keyframes=True), needs((80, 8, 12), keyframes=True))
    assert plain < short < long < 2 * short


# --- jobs -----------------------------------------------------------------------------------------

TWO_STAGES = Size(256, 256, 17, two_stage=True)
READING = make_job("rain", TWO_STAGES, num_generated_keyframes=2, decode_with_keyframes=True)


def test_the_decoder_gets_the_last_stage_s_keyframes_by_frame():
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
    assert list(first) == [5, 11] and second == {}
    assert torch.equal(torch.cat([*first.values()], 2), planes)


def test_dfr_s_keyframes_inside_the_clip_are_decoded_in_their_order():
    job = make_job("rain", replace(TWO_STAGES, num_frames=41), dfr=True, temporal_upsample_rounds=1)
    tensors = {"s2_generated_keyframes": torch.arange(2.0).view(1, 1, 2, 1, 1)}
    for window in job.rendering.windows:
        made = torch.full((1, 1, len(window.generated), 1, 1), 10.0 + window.order)
        tensors[f"{window.key}_generated_keyframes"] = made
    decoded = {frame: float(plane) for frame, plane in job.decoded_keyframes(tensors).items()}
    assert decoded == {24: 10.0, 48: 0.0, 72: 11.0}  # of 81 frames; 96 fills the last segment
    assert list(decoded) == sorted(decoded)
    assert not replace(job, recipe="dev", compat="ltx-pipelines-1.2.0").reads_keyframes


ONE_STAGE = replace(TWO_STAGES, two_stage=False)
REFUSED = {
    "goes with --num-generated-keyframes": {"num_generated_keyframes": None},
    "cannot be combined with --upscale": {"upscale": "spatial", "size": ONE_STAGE},
    "ltx-pipelines-1.2.0 decodes without keyframes": {"compat": "ltx-pipelines-1.2.0"},
}


@pytest.mark.parametrize("printed", REFUSED)
def test_what_does_not_fit_is_refused(printed):
    READING.check()
    with pytest.raises(FieldError) as error:
        replace(READING, **REFUSED[printed]).check()
    assert printed in str(error.value)


def test_the_line_and_the_request_mean_the_same():
    fields = {"num_generated_keyframes": 2, "decode_with_keyframes": True}
    assert Job.model_validate({"prompt": "rain"} | fields).reads_keyframes
    request = VideoRequest(prompt="rain", **{name: str(value) for name, value in fields.items()})
    assert request.job.decode_with_keyframes
    assert not VideoRequest(prompt="rain").job.decode_with_keyframes
    assert "decode_with_keyframes" not in replace(READING, decode_with_keyframes=False).describe()
    assert READING.describe()["decode_with_keyframes"]


@pytest.mark.parametrize(
    ("kind", "names", "printed"),
    [
        (None, (), "convolutional decoder does not read keyframes"),
        (DIFFUSION_VAE, (), "zeros take the place of this embedding"),
        (DIFFUSION_VAE, (EMBEDDING_NAME,), None),
    ],
)
def test_a_file_that_cannot_use_the_keyframes_is_named(kind, names, printed):
    file = SimpleNamespace(path="vae.safetensors", shapes=names)
    files = SimpleNamespace(config={"vae": {"_class_name": kind}})
    files.files = SimpleNamespace(of=lambda section: file)
    found = notes(READING, files)
    assert len(found) == (printed is not None) and (printed or "") in "".join(found)
