"""The diffusion decoder: attention by its definition, and ltx-core 1.2.0's frames however spans divide the clip."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from diffusion_vae import GOLDEN, GOLDEN_STEPS, SEED, VAE, config_of, latent, pixels, spans, write
from helpers import one_thread, randn, rel  # noqa: F401
from jobs import make_job, replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ltx_neuron.config.diffusion import cut, diffusion_decoder_config
from ltx_neuron.engine.decode import Decoder
from ltx_neuron.engine.outputs import JobRun
from ltx_neuron.errors import UserError
from ltx_neuron.host import diffusion
from ltx_neuron.host.diffusion import neighbourhoods, rope_table
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Size
from ltx_neuron.models import diffusion_decoder
from ltx_neuron.models.attention import KERNELS
from ltx_neuron.models.diffusion_decoder import neighbourhood_attention, rotate
from ltx_neuron.models.programs import diffusion_program
from ltx_neuron.report.latency import Recorder

FP32 = 2e-6  # relative, after all layers
SHAPE = (3, 4, 5)


def window(position: int, length: int, kernel: int) -> range:
    """The neighbours of a position, shifted inward at borders so that their number is constant."""
    first = min(max(position - kernel // 2, 0), length - kernel)
    return range(first, first + kernel)


def attended(query: Tensor, key: Tensor, value: Tensor, kernel) -> Tensor:
    """Every query's attention to its neighbours, one by one: (N, T, H, W, D) to (T, H, W, N D)."""
    sizes = query.shape[1:4]
    found = torch.empty_like(query)
    for place in itertools.product(*map(range, sizes)):
        sides = (window(p, n, k) for p, n, k in zip(place, sizes, kernel, strict=True))
        t, h, w = map(list, sides)
        keys, values = (x[:, t][:, :, h][:, :, :, w].flatten(1, 3) for x in (key, value))
        scores = torch.einsum("nd,nkd->nk", query[:, *place], keys) * query.shape[-1] ** -0.5
        found[:, *place] = torch.einsum("nk,nkd->nd", scores.softmax(-1), values)
    return found.permute(1, 2, 3, 0, 4).flatten(3)


def by_spans(query: Tensor, key: Tensor, value: Tensor, kernel, kernel_of: str) -> Tensor:
    sizes, head_dim = query.shape[1:4], query.shape[-1]
    config = replace(config_of(), head_dim=head_dim, kernels=(kernel,))
    times = cut(sizes[0], config.span, kernel[0])
    found = []
    for part, near in enumerate(neighbourhoods(config, 0, times, *sizes[1:])):
        mine = slice(times.starts[part], times.starts[part] + times.size)
        keys = slice(times.windows[part], times.windows[part] + times.window)
        given = query[:, mine], key[:, keys], value[:, keys], kernel, near, KERNELS[kernel_of]
        found.append(neighbourhood_attention(*given))
    return torch.cat([x[-new:] for x, new in zip(found, times.new, strict=True)])


@pytest.mark.parametrize("kernel_of", ["sdpa", "matmul"])
@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [((9, 10, 13), (3, 7, 5)), ((5, 5, 5), (5, 5, 5)), ((13, 8, 4), (11, 3, 3)), ((4, 11, 7), (1, 11, 1))],
)
def test_every_token_attends_to_its_neighbours_and_to_no_others(sizes, kernel, kernel_of):
    given = [randn(2, *sizes, 8, seed=seed) for seed in range(3)]
    got, wanted = by_spans(*given, kernel, kernel_of), attended(*given, kernel)
    assert rel(got, wanted) < FP32


def test_a_span_s_rotation_is_exact_where_products_of_float32_are_not(monkeypatch):
    class HalfProducts(TorchDispatchMode):
        """Rounds the operands of products to bfloat16, less exact than a device's passes of halves."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
                args = tuple(x.bfloat16().to(x.dtype) for x in args)
            return function(*args, **kwargs or {})

    turned, decoder = [], spans()
    monkeypatch.setattr(diffusion_decoder, "rotate", lambda x, *axes: turned.append(axes[0]) or rotate(x, *axes))
    with HalfProducts():
        pixels(decoder, (3, 3, 3))
    for own, region in zip(turned[::2], turned[1::2], strict=True):
        frames = region.unbind(1)
        assert all(any(torch.equal(one, each) for each in frames) for one in own.unbind(1))


@pytest.mark.parametrize("shape", GOLDEN)
def test_frames_equal_ltx_cores(shape):
    """Also for a clip that is smaller than the kernels, whose borders are repeated."""
    step = GOLDEN_STEPS[shape]
    got = pixels(spans(), tuple(map(int, shape.split("x"))))[::step, ::step, ::step]
    assert rel(got, GOLDEN[shape]) < FP32


def test_frames_do_not_depend_on_how_the_clip_is_divided():
    decoder, wanted = spans(), pixels(spans(), SHAPE)
    for span, tile in ((3, 3), (7, 8)):
        decoder.config = replace(config_of(), span=span, tile=tile)
        assert rel(pixels(decoder, SHAPE), wanted) < FP32
    together = spans()
    together.at_once = 3
    assert rel(pixels(together, SHAPE), wanted) < FP32


def test_noise_has_the_bits_of_one_draw():
    shape = 3, 9, 32, 64
    wanted = torch.randn(1, *shape, generator=torch.Generator().manual_seed(SEED))[0]
    assert torch.equal(torch.stack([*diffusion.noise_frames(shape, SEED)], 1), wanted)


def test_bfloat16_is_near_float32_and_equal_seeds_give_equal_frames():
    exact, half, again = (pixels(spans(dtype), (3, 3, 4)) for dtype in (torch.float32, torch.bfloat16, torch.float32))
    assert half.dtype == torch.float32 and 1e-4 < rel(half, exact) < 3e-2
    assert torch.equal(exact, again) and rel(pixels(spans(), (3, 3, 4), SEED + 1), exact) > 0.05


def test_memory_and_work_per_frame_do_not_depend_on_the_length(monkeypatch):
    """The first frames are decoded before later latents are read, and few frames are kept."""
    decoder, calls, kept, shape = spans(), [], [], (100, 3, 3)
    run, take = decoder.run, diffusion._Frames.take

    def noted(frames, start, count):
        taken = take(frames, start, count)
        kept.append(len(frames._kept))
        return taken

    monkeypatch.setattr(decoder, "run", lambda *given: calls.append(1) or run(*given))
    monkeypatch.setattr(diffusion._Frames, "take", noted)
    chunks = diffusion.DiffusionDecoder(decoder.config, shape, decoder).pixels(latent(shape), SEED)
    counts = [len(calls) for _ in itertools.islice(chunks, 2)]
    assert counts[0] < 100 and counts[1] - counts[0] < 50
    assert max(kept) <= decoder.config.span * 8 + max(kernel[0] for kernel in decoder.config.kernels)


def test_a_file_is_decoded_as_its_config_says_and_an_unknown_tensor_is_refused(tmp_path):
    path = write(tmp_path / "vae.safetensors", **{"vae.decoder.type_emb": torch.zeros(8)})
    models = HostModels(path, {"vae": VAE}, torch.float32)
    models.check(["video_decoder"])
    got = torch.cat([*models.decode_video(latent((2, 2, 4)), seed=SEED)])
    assert got.dtype == torch.uint8 and got.shape == (9, 64, 128, 3)
    wanted = (GOLDEN["2x2x4"] + 1).div(2).clamp(0, 1).mul(255)
    assert (got[::4, ::4, ::4] - wanted).abs().max() < 1.01
    for dtype in (torch.bfloat16, torch.float32):
        assert HostModels(path, {"vae": VAE}, torch.bfloat16, host_dtype=dtype).video_decoder.dtype == dtype
    write(path, **{"vae.decoder.conv_mid": torch.zeros(8)})
    with pytest.raises(UserError, match="unexpected: vae.decoder.conv_mid"):
        HostModels(path, {"vae": VAE}, torch.float32).check(["video_decoder"])


def test_a_job_is_decoded_with_the_noise_of_its_seed():
    """Also in a batch: each job has its own seed."""
    seeds = []

    def decode_video(video, seed, keyframes):
        seeds.append(seed)
        yield torch.zeros(1, 32, 32, 3, dtype=torch.uint8)

    host = SimpleNamespace(sample_rate=48000)
    decoder = Decoder(host, Recorder(), False, decode_video, lambda _: torch.zeros(2, 9))
    for seed in (5, 6):
        run = JobRun(make_job("rain", Size(32, 32, 1), seed=seed))
        run.tensors |= {"s1_video": torch.zeros(1), "s1_audio": torch.zeros(1)}
        assert decoder.result(run)
    assert seeds == [5, 6]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"default_num_inference_steps": 2}, "vae.decoder.default_num_inference_steps is 2"),
        ({"stage_depths": [1, 1]}, "stages"),
        ({"stage5_kernel": [4, 5, 5]}, "odd sizes"),
        ({"stage_channels": [32, 32, 16, 16, 24]}, "heads of 16"),
        ({"stage_channels": [32, 32, 16, 16, 32]}, "a stage of 32 channels"),
        ({"patch_size": 2}, "upsamplings by (8, 16, 16)"),
        ({"head_dim": None}, "vae.decoder.head_dim is None"),
        ({"upsamples": 3}, "does not describe a diffusion decoder"),
    ],
)
def test_another_structure_is_refused_with_the_difference(changes, named):
    with pytest.raises(UserError, match=re.escape(named)):
        diffusion_decoder_config({"vae": VAE | {"decoder": VAE["decoder"] | changes}})


def test_the_names_of_a_files_tensors_show_whether_it_has_gates():
    assert config_of().gated and not config_of(["diff_blocks.0.norm1.weight"]).gated
    assert config_of().digest != config_of(()).digest


def test_flops_are_counted_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode

    decoder = spans()
    decoder.program = diffusion_program(decoder.config, SHAPE, torch.float32)
    with FlopCounterMode(display=False) as counter:
        pixels(decoder, SHAPE)
    counted = diffusion.decode_flops(decoder.config, SHAPE)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_memory_is_the_same_for_every_length_and_grows_with_the_picture():
    config, needs = config_of(), diffusion.decode_bytes
    short, long = (needs(config, (f, 8, 12), torch.float32) for f in (20, 200))
    assert short == long < needs(config, (20, 16, 12), torch.float32)
    assert needs(config, (20, 8, 12), torch.bfloat16) < short


def test_rotated_scores_depend_on_distances_alone():
    sizes, head_dim = (9, 6, 5), 16
    tables = [rope_table(n + 3, d) for n, d in zip(sizes, config_of().rope_split, strict=True)]
    query, key = randn(1, *sizes, head_dim), randn(1, *sizes, head_dim, seed=1)
    scores = []
    for shift in (0, 3):
        moved = [table[:, shift : shift + n] for table, n in zip(tables, sizes, strict=True)]
        turned = (rotate(x, *moved).flatten(0, 3) for x in (query, key))
        scores.append(torch.mm(*(x if n == 0 else x.T for n, x in enumerate(turned))))
    assert rel(*scores) < FP32
