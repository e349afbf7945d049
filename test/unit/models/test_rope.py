"""Our RoPE tables and rotations are those of ltx-core and of transformers."""

import json
from functools import partial

import pytest
import torch
from helpers import FP32_ROUNDING, furthest, made_config, randn
from hypothesis import given
from hypothesis import strategies as st
from tiny import TinySizes
from tiny.gemma import gemma_config as tiny_gemma_config

from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.models.rope import Rope, half_rope, rope_tables, rotate, split_rope
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.latent_state import video_state
from ltx_neuron.sampling.latents import audio_positions, video_positions

THETA = 10000.0
VIDEO_MAX, AUDIO_MAX, CONNECTOR_MAX = (20, 2048, 2048), (20,), (4096,)
LATENT, FPS = (7, 3, 4), 24.0
# ltx-core rotates with fused multiply-adds, we with products and sums: of numbers below 5, each of
# the two rounds two products and their sum, by at most FP32_ROUNDING of 5, 5 and 7
ROTATION = 2 * (5 + 5 + 7) * FP32_ROUNDING
SHOWS = 0.05  # a mean difference of cosines that no rounding makes: the angle is another one


def ltx_tables(grid, max_pos, inner_dim, heads, middles=True):
    from ltx_core.model.transformer.rope import LTXRopeType, generate_freq_grid_np, precompute_freqs_cis

    how = {"rope_type": LTXRopeType.SPLIT, "freq_grid_generator": generate_freq_grid_np, "theta": THETA}
    how |= {"use_middle_indices_grid": middles, "num_attention_heads": heads, "max_pos": list(max_pos)}
    return precompute_freqs_cis(grid, dim=inner_dim, out_dtype=torch.float32, **how)


def video_bounds(shape=LATENT, fps=FPS):
    from ltx_core.components.patchifiers import VideoLatentPatchifier, get_pixel_coords
    from ltx_core.types import SpatioTemporalScaleFactors, VideoLatentShape

    coords = VideoLatentPatchifier(1).get_patch_grid_bounds(VideoLatentShape(1, 128, *shape))
    bounds = get_pixel_coords(coords, SpatioTemporalScaleFactors.default(), causal_fix=True).float()
    bounds[:, 0] /= fps
    return bounds


def same_bits(ours, theirs):
    return torch.equal(ours.cos, theirs[0]) and torch.equal(ours.sin, theirs[1])


# Width and heads of a stream, and the entries left over by three axes.
@pytest.mark.parametrize(("inner", "heads", "padding"), [(32, 4, 1), (40, 4, 2), (80, 8, 1), (4096, 32, 2), (48, 4, 0)])
def test_video_tables_have_the_bits_of_ltx_core_with_every_count_of_padding_entries(inner, heads, padding):
    ours = split_rope(video_positions(LATENT, FPS), VIDEO_MAX, inner, heads, THETA)
    assert same_bits(ours, ltx_tables(video_bounds(), VIDEO_MAX, inner, heads))
    first = ours.cos[0, 0].T  # the first head's entries: those left over come first and turn nothing
    assert inner // 2 - 3 * (inner // 6) == padding
    assert (first[:padding] == 1).all() and (ours.sin[0, 0, :, :padding] == 0).all()
    assert (first[padding] != 1).any()


def test_the_tables_of_a_step_have_the_bits_of_ltx_core_and_audio_video_attention_those_of_time_alone():
    from ltx_core.components.patchifiers import AudioPatchifier
    from ltx_core.types import AudioLatentShape

    _, config = made_config()
    tables = rope_tables(config, video_positions(LATENT, FPS), audio_positions(51))
    audio = AudioPatchifier(1).get_patch_grid_bounds(AudioLatentShape(1, 8, 51, 16))
    assert (config.video.inner, config.audio.inner) == (32, 16)
    for name, bounds, max_pos, width in (
        ("video", video_bounds(), VIDEO_MAX, 32),
        ("audio", audio, AUDIO_MAX, 16),
        ("video_cross", video_bounds()[:, :1], AUDIO_MAX, 16),
        ("audio_cross", audio, AUDIO_MAX, 16),
    ):
        assert same_bits(Rope.of(tables, name), ltx_tables(bounds, max_pos, width, 4)), name


def test_connector_tables_take_whole_positions_with_the_bits_of_ltx_core():
    positions = torch.arange(1024, dtype=torch.float32)[None, None]
    ours = split_rope(positions, CONNECTOR_MAX, 2048, 32, THETA)
    assert same_bits(ours, ltx_tables(positions, CONNECTOR_MAX, 2048, 32, middles=False))


def test_rotation_is_ltx_cores_split_rotation_and_rounds_once_to_the_dtype():
    from ltx_core.model.transformer.rope import apply_split_rotary_emb

    rope = split_rope(video_positions(LATENT, FPS), VIDEO_MAX, 80, 8, THETA)
    x = randn(1, 8, rope.cos.shape[2], 10)
    theirs = apply_split_rotary_emb(x.clone(), *rope)
    assert furthest(rotate(x, rope), theirs) < ROTATION
    assert furthest(x, theirs) > SHOWS
    assert torch.equal(rotate(x.bfloat16(), rope), rotate(x.bfloat16().float(), rope).bfloat16())


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("head_dim", [8, 256])
def test_gemma_tables_are_those_of_transformers_for_either_kind_of_layer(layer_type, head_dim, tmp_path):
    from transformers import Gemma3Config, Gemma3TextModel

    content = tiny_gemma_config(TinySizes(gemma_head_dim=head_dim))
    (tmp_path / "config.json").write_text(json.dumps(content))
    gemma = gemma_config(tmp_path)
    local = layer_type == "sliding_attention"
    base = (gemma.rope_local_base_freq, 1.0) if local else (gemma.rope_theta, gemma.rope_factor)
    positions = torch.arange(1024)
    ours = half_rope(positions, head_dim, *base)
    model = Gemma3TextModel(Gemma3Config.from_dict(content).text_config)
    if hasattr(model, "rotary_emb_local"):  # transformers 4 has a module for each
        rotary = model.rotary_emb_local if local else model.rotary_emb
    else:
        rotary = partial(model.rotary_emb, layer_type=layer_type)
    cos, sin = rotary(torch.zeros(1), positions[None])  # both halves are alike
    assert torch.equal(ours.cos[0], cos[..., : head_dim // 2])
    assert torch.equal(ours.sin[0], sin[..., : head_dim // 2])
    half, turning = half_rope(positions, head_dim, *base, turning=0.5), head_dim // 4
    assert torch.equal(half.cos[..., :turning], ours.cos[..., :turning]) and (half.sin[..., turning:] == 0).all()


def test_positions_stay_fp32_where_ltx_core_1_0_0_rounds_them_to_bf16():
    """In bf16 44 % of the audio-video cosines are off by more than 0.1: up to 28 ms of sound."""
    from ltx_core.components.patchifiers import VideoLatentPatchifier
    from ltx_core.tools import VideoLatentTools
    from ltx_core.types import VideoLatentShape

    latent = torch.zeros(1, 128, 16, 1, 1, dtype=torch.bfloat16)
    image = (ImageCondition("", frame_index=9), torch.zeros(1, 128, 1, 1, 1, dtype=torch.bfloat16))
    positions = video_state(latent, FPS, [image]).positions
    assert positions.dtype == torch.float32
    ours = split_rope(positions[:, :1, :16], AUDIO_MAX, 2048, 32, THETA)
    assert same_bits(ours, ltx_tables(video_bounds((16, 1, 1))[:, :1], AUDIO_MAX, 2048, 32))
    tools = VideoLatentTools(VideoLatentPatchifier(1), VideoLatentShape(1, 128, 16, 1, 1), FPS)
    rounded = tools.create_initial_state("cpu", torch.bfloat16).positions[:, :1]
    theirs = ltx_tables(rounded, AUDIO_MAX, 2048, 32)
    assert (ours.cos - theirs[0]).abs().mean() > SHOWS
    # Where 1.0.0 is wanted all the same, its tables follow from positions rounded as it rounds them.
    on_request = split_rope(video_positions((16, 1, 1), FPS, torch.bfloat16)[:, :1], AUDIO_MAX, 2048, 32, THETA)
    assert same_bits(on_request, theirs)


TURNED = randn(1, 4, 1, 24), randn(1, 4, 1, 24, seed=1)  # a query and a key, 4 heads of 24
POSITION = st.tuples(st.floats(0, 20), st.floats(0, 2048), st.floats(0, 2048))


def tables_at(position: tuple[float, float, float]):
    return split_rope(torch.tensor(position, dtype=torch.float32).view(1, 3, 1), VIDEO_MAX, 96, 4, THETA)


@given(position=POSITION)
def test_a_rotation_keeps_the_length_of_each_head_and_its_reverse_undoes_it(position):
    tables, (query, _) = tables_at(position), TURNED
    turned = rotate(query, tables)
    assert torch.allclose(turned.norm(dim=-1), query.norm(dim=-1), rtol=4 * FP32_ROUNDING)
    back = rotate(turned, tables._replace(sin=-tables.sin))
    assert furthest(back, query) < ROTATION


@given(query=POSITION, key=POSITION, shift=st.floats(-1, 1))
def test_a_score_depends_on_the_distance_of_its_tokens_alone(query, key, shift):
    """Phases reach theta pi / 2 = 16,000, of which fp32 has the last 0.001: the shift keeps them."""
    moved = [tuple(p + shift * limit / 16 for p, limit in zip(at, VIDEO_MAX, strict=True)) for at in (query, key)]
    pairs = (query, key), moved
    scores = [(rotate(TURNED[0], tables_at(a)) * rotate(TURNED[1], tables_at(b))).sum(-1) for a, b in pairs]
    last_bits = 4 * THETA * torch.pi / 2 * 2 * FP32_ROUNDING  # of four phases
    products = (TURNED[0].abs() * TURNED[1].abs()).sum(-1)
    assert ((scores[0] - scores[1]).abs() <= 2 * last_bits * products).all()
