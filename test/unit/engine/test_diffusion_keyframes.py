"""The diffusion decoder with keyframes equals its definition: for each token one softmax over the
tokens of the clip and of the keyframes' planes that it sees."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from diffusion_vae import SEED, VAE, config_of, latent, spans, weights, write
from helpers import generator, one_thread, randn, rel  # noqa: F401
from jobs import make_job, replace
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


class Definition:
    """The decoder by the rules of ltx-core 1.4, over all tokens at once: (N, C), of the frames and
    then of the planes, in the order of time, rows and columns."""

    def __init__(self, planes: dict[int, Tensor]):
        self.config, self.weights, self.planes = config_of(), weights(config_of()), planes

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], eps=1e-6)

    def places(self, stage: int, count: int, rows: int, columns: int, left: int) -> None:
        """Set each token's time, row and column, and `seen`, which tokens it attends to."""
        times = [0.0 if f == 0 else (f + (left - 1) / 2) / left for f in self.planes]
        moments = [*map(float, range(count)), *times]
        tokens = [(n, h, w) for n in range(len(moments)) for h in range(rows) for w in range(columns)]
        number, row, column = torch.tensor(tokens).unbind(1)
        reach = [size // 2 for size in self.config.kernels[stage]]
        sees = torch.zeros(len(moments), len(moments), dtype=torch.bool)
        for one, here in enumerate(moments):
            others = range(count, len(moments)) if one < count else range(count)
            ranked = sorted(others, key=lambda other: (abs(moments[other] - here), other))
            sees[one, ranked[:2]] = True
            for other in range(count):
                sees[one, other] |= one < count and abs(one - other) <= reach[0]
            sees[one, one] = True
        self.seen = sees[number][:, number]
        self.seen &= (row[:, None] - row).abs() <= reach[1]
        self.seen &= (column[:, None] - column).abs() <= reach[2]
        self.positions = torch.tensor(moments)[number], row.float(), column.float()

    def rotated(self, x: Tensor) -> Tensor:
        parts = x.split(self.config.rope_split, -1)
        turned = []
        for part, positions in zip(parts, self.positions, strict=True):
            channels = part.shape[-1]
            speed = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
            phases = positions.double()[:, None] * speed
            pairs = torch.view_as_complex(part.double().unflatten(-1, (-1, 2)).contiguous())
            pairs = pairs * torch.polar(torch.ones_like(phases), phases)[:, None]
            turned.append(torch.view_as_real(pairs).flatten(-2))
        return torch.cat(turned, -1).float()

    def block(self, name: str, x: Tensor, rows: Tensor | None = None) -> Tensor:
        gate_1 = gate_2 = 1.0
        scale = [torch.zeros(()), torch.zeros(()), 0, torch.zeros(()), torch.zeros(())]
        if rows is not None:
            scale = (rows + self.weights[f"{name}.scale_shift_table"]).unbind(0)
            gate_1, gate_2 = (self.weights[f"{name}.gate_{part}"] for part in ("msa", "mlp"))
        normed = self.norm(f"{name}.norm1", x) * (1 + scale[0]) + scale[1]
        query, key, value = (
            part.unflatten(-1, (-1, self.config.head_dim))
            for part in self.linear(f"{name}.attn.qkv", normed).chunk(3, -1)
        )
        query = self.rotated(self.norm(f"{name}.attn.q_norm", query))
        key = self.rotated(self.norm(f"{name}.attn.k_norm", key))
        found = torch.cat(
            [
                self.attended(some, key, value, seen)
                for some, seen in zip(query.split(1000), self.seen.split(1000), strict=True)
            ]
        )
        x = x + gate_1 * self.linear(f"{name}.attn.proj", found)
        normed = self.norm(f"{name}.norm2", x) * (1 + scale[3]) + scale[4]
        hidden = F.silu(self.linear(f"{name}.mlp.w_gate", normed))
        hidden = hidden * self.linear(f"{name}.mlp.w_up", normed)
        return x + gate_2 * self.linear(f"{name}.mlp.w_down", hidden)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("qnd,knd->nqk", query, key) / math.sqrt(self.config.head_dim)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("nqk,knd->qnd", weights, value).flatten(1)

    def upsampled(self, stage: int, x: Tensor) -> Tensor:
        """(T, H, W, C), without the first frame if the frames are doubled."""
        time, down, across = self.config.upsamplings[stage].stride
        x = self.linear(f"upsamples.{stage}.proj", x)
        frames, rows, columns, _ = x.shape
        x = x.view(frames, rows, columns, -1, time, down, across).permute(0, 4, 1, 5, 2, 6, 3)
        return x.reshape(frames * time, rows * down, columns * across, -1)[time - 1 :]

    def context(self, number: int, x: Tensor) -> Tensor:
        name = f"diff_blocks.{number}"
        return self.linear(f"{name}.context_proj", x) * self.weights[f"{name}.gate_ctx"]

    def modulation(self) -> Tensor:
        half = torch.exp(-math.log(10000) * torch.arange(128) / 128) * 1000.0
        x = self.linear("t_embedder.mlp.0", torch.cat([half.cos(), half.sin()])[None])
        x = self.linear("t_embedder.mlp.2", F.silu(x))
        return self.linear("shared_adaln.proj", F.silu(x)).view(7, -1)

    def __call__(self) -> Tensor:
        """The clip's pixels, (3, F, H, W)."""
        deviation, mean = (self.weights[f"per_channel_statistics.{name}-of-means"] for name in ("std", "mean"))
        raw = lambda x: x[0].permute(1, 2, 3, 0) * deviation + mean  # noqa: E731
        video = raw(latent(SHAPE))
        video = torch.cat([video, *[video[-1:]] * self.config.repeats])
        planes = raw(torch.cat([*self.planes.values()], 2)) + EMBEDDING
        video, planes = self.linear("conv_in", video), self.linear("conv_in", planes)
        left = 8
        for stage in range(len(self.config.upsamplings)):
            count, rows, columns, channels = video.shape
            self.places(stage, count, rows, columns, left)
            x = torch.cat([video, planes]).flatten(0, 2)
            for block in range(self.config.depths[stage]):
                x = self.block(f"det_stages.{stage}.{block}", x)
            x = x.view(-1, rows, columns, channels)
            video, planes = self.upsampled(stage, x[:count]), x[count:]
            planes = torch.cat([self.upsampled(stage, plane) for plane in planes.split(1)])
            left //= self.config.upsamplings[stage].stride[0]
        video, seeded = video[: 8 * SHAPE[0] - 7], torch.Generator().manual_seed(SEED)
        context, noise = torch.cat([video, planes]), []
        for count in (len(video), len(planes)):
            drawn = torch.randn(3, count, *SIDES, generator=seeded)
            tiles = drawn.unflatten(3, (-1, 4)).unflatten(2, (-1, 4))  # (3, F, rows, q, columns, r)
            noise.append(tiles.permute(1, 2, 4, 0, 5, 3).flatten(3))
        x = self.linear("conv_in_x_t", torch.cat(noise))
        count, rows, columns, channels = x.shape
        self.places(len(self.config.depths) - 1, len(video), rows, columns, 1)
        for block in range(self.config.depths[-1]):
            x = x + self.context(block, context)
            x = self.block(f"diff_blocks.{block}", x.flatten(0, 2), self.modulation())
            x = x.view(count, rows, columns, channels)
        x = self.linear("conv_out", self.norm("norm_out", x))[: len(video)]
        x = x.unflatten(3, (3, 4, 4))  # (F, rows, columns, 3, r, q)
        return x.permute(3, 0, 1, 5, 2, 4).flatten(4, 5).flatten(2, 3)


def test_a_clip_attends_to_its_keyframes_as_the_definition_says(one_thread):  # noqa: F811
    planes = keyframes()
    got = pixels(decoder(), planes)
    assert got.shape == (3, 17, *SIDES)
    assert rel(got, Definition(planes)()) < FP32


def test_frames_do_not_depend_on_spans_and_tiles(one_thread):  # noqa: F811
    made, planes = decoder(), keyframes()
    wanted = pixels(made, planes)
    made.config = replace(config_of(), span=3, tile=5)
    assert rel(pixels(made, planes), wanted) < FP32


def test_every_keyframe_its_place_and_the_embedding_change_the_clip():
    wanted = pixels(decoder(), keyframes())
    assert rel(pixels(decoder(None), keyframes()), wanted) > 1e-3
    assert rel(pixels(decoder(), {}), wanted) > 1e-3
    for frames in ((0, 3, 9), (0, 3, 9, 15)):
        assert rel(pixels(decoder(), keyframes(frames)), wanted) > 1e-3


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


@pytest.mark.parametrize("told", REFUSED)
def test_what_does_not_fit_is_refused(told):
    READING.check()
    with pytest.raises(FieldError) as error:
        replace(READING, **REFUSED[told]).check()
    assert told in str(error.value)


def test_the_line_and_the_request_mean_the_same():
    fields = {"num_generated_keyframes": 2, "decode_with_keyframes": True}
    assert Job.model_validate({"prompt": "rain"} | fields).reads_keyframes
    request = VideoRequest(prompt="rain", **{name: str(value) for name, value in fields.items()})
    assert request.job.decode_with_keyframes
    assert not VideoRequest(prompt="rain").job.decode_with_keyframes
    assert "decode_with_keyframes" not in replace(READING, decode_with_keyframes=False).describe()
    assert READING.describe()["decode_with_keyframes"]


@pytest.mark.parametrize(
    ("kind", "names", "told"),
    [
        (None, (), "convolutional decoder does not read keyframes"),
        (DIFFUSION_VAE, (), "zeros take the place of this embedding"),
        (DIFFUSION_VAE, (EMBEDDING_NAME,), None),
    ],
)
def test_a_file_that_cannot_use_the_keyframes_is_named(kind, names, told):
    file = SimpleNamespace(path="vae.safetensors", shapes=names)
    files = SimpleNamespace(config={"vae": {"_class_name": kind}})
    files.files = SimpleNamespace(of=lambda section: file)
    found = notes(READING, files)
    assert len(found) == (told is not None) and (told or "") in "".join(found)
