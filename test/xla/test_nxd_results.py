"""Every kind of graph on NxD's ranks gives the results of one rank of the other backend, or of the host, in fp32."""

from functools import cache, partial
from types import SimpleNamespace

import nxd_fixtures as nxd
import pytest
import torch
from helpers import made_film, randn, rel, tone, write_sound
from jobs import make_job, read_voice, replace
from nxd_fixtures import CUT, FP32, LATENTS, LAYOUTS, PER_BLOCK, PROMPT, SIZE, TP, WHOLE, assert_close, open_workspace

from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import tiles
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.run import Engine
from ltx_neuron.host import tiles as host_tiles
from ltx_neuron.host.diffusion import DiffusionDecoder
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size
from ltx_neuron.models.vocoder import resampling_filters
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.conditions import AttentionMask, ImageCondition, ReferenceVideo, Retake
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.text.encoders import RankTextEncoder
from ltx_neuron.text.inputs import bucket_for, tokenize
from ltx_neuron.weights.lora import Lora

if nxd.MISSING:
    pytest.skip(nxd.SKIP, allow_module_level=True)
pytest_plugins = ["nxd_fixtures"]
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nxd_source")]

SETTINGS = [(CUT,), (WHOLE, "sequence_parallel=true")]

# --- a job in two stages ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(assets, tmp_path_factory) -> Workspace:
    """Of the other backend."""
    folder = tmp_path_factory.mktemp("one-rank")
    return Workspace(assets.checkpoint, resolve("cpu"), folder, 1, "float32", assets.gemma_root)


def test_every_context_and_latent_of_a_two_stage_job(generated, one_rank, assets):
    build.make(one_rank, one_rank.weight_sets("dit"))
    with nxd.two_stages(one_rank, assets) as expected:
        assert_close(generated.tensors, expected.tensors, ("video_context", "audio_context", *LATENTS))


# --- jobs of every kind of graph --------------------------------------------------------------------------------------

GUIDANCE = StreamGuidance(cfg_scale=2.5, stg_scale=0.8, stg_blocks=(0,), modality_scale=2.2, rescale_scale=0.6)
GUIDED = dict(recipe="dev", num_inference_steps=2, guidance=Guidance(GUIDANCE, GUIDANCE))
# Jobs of all kinds of buckets: with audio timesteps, NAG, audio alone, identity, an attention bias
KINDS = ["two stages, stage 1", "guided", "retake", "guided retake"]
KINDS += ["negative prompt", "sound alone", "voice", "masked reference"]


@pytest.fixture(scope="module")
def jobs(assets, tmp_path_factory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("inputs")
    clip, mask = (made_film(folder / f"{seed}.mp4", 9, 64, 64, seed=seed) for seed in (0, 1))
    samples = (tone(16000, 0.5) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    sound = write_sound(folder / "voice.wav", samples, 16000, "pcm_s16le", "stereo", "s16")
    plain, lora = make_job(PROMPT, Size(64, 64, 9), 3), (Lora(assets.lora, 0.8),)
    guided = replace(plain, **GUIDED, negative_prompt="grey")
    audio = GUIDED | {"guidance": Guidance(StreamGuidance(), replace(GUIDANCE, modality_scale=1.0))}
    reference = {"references": (ReferenceVideo(clip, 0.7, 9),), "stage_1_loras": lora, "skip_stage_2": True}
    reference["attention_mask"] = AttentionMask(mask, 0.6)
    return {
        "two stages, stage 1": make_job(PROMPT, SIZE, 3, skip_stage_2=True),
        "guided": replace(guided, size=Size(64, 32, 9)),
        "retake": replace(plain, retake=Retake(clip, 0.05, 0.2)),
        "guided retake": replace(guided, retake=Retake(clip, 0.05, 0.2)),
        "negative prompt": replace(plain, negative_prompt="grey", nag_scale=5.0),
        "sound alone": make_job(PROMPT, Size(0, 0, 30, 30.0), sound_only=True, **audio),
        "voice": replace(guided, stage_1_loras=lora, reference_sound=read_voice(sound)),
        "masked reference": make_job(PROMPT, replace(SIZE, height=128, width=128), 4, **reference),
    }


@pytest.fixture(scope="module")
def on_one_rank(one_rank, jobs):
    return cache(lambda name: nxd.latents_of(jobs[name], one_rank))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_stage_on_four_ranks(assets, workspace, jobs, on_one_rank, name, settings):
    four_ranks = open_workspace(assets, workspace.artifacts, *settings)
    assert_close(nxd.latents_of(jobs[name], four_ranks), on_one_rank(name))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["negative prompt", "guided retake", "masked reference"])
def test_a_stage_on_eight_ranks_in_groups(assets, workspace, jobs, on_one_rank, eight_ranks, layout, name):
    tp, settings = LAYOUTS[layout]
    groups = open_workspace(assets, workspace.artifacts, *settings, tp=tp)
    assert_close(nxd.latents_of(jobs[name], groups), on_one_rank(name), bound=1e-5)


def test_ranks_of_two_groups_have_equal_latents_and_one_copy_of_the_weights(assets, workspace, eight_ranks):
    groups = open_workspace(assets, workspace.artifacts, CUT, "context_parallel=2")
    job = make_job(PROMPT, Size(64, 64, 9), 3)
    build.make(groups, groups.dit_graphs(job.buckets))
    with Engine(groups, Recorder()) as engine:
        nxd.set_contexts(engine, job)
        list(engine.run([job], keep=True, decode=False))
        ranks, per_step = engine.residency.ranks, engine.recorder.counters.collectives_per_step
        digests = ranks.hashes("video_latent", "audio_latent")
        assert len(digests) == 8 and len({*digests}) == 1
        # A block gathers keys and values of the video's self-attention. Two collectives merge the sound's attention to
        # the video. The tail gathers the velocity.
        layers = groups.transformer.num_layers
        assert per_step["count"] == (PER_BLOCK + 3) * layers + 1
        ((program, manifest),) = ranks.programs.items()
        assert manifest.cost()["context_collectives"] == 3 * layers + 1
        hidden, parts = ranks.get(program, "video_hidden"), ranks._buffers.tensors["video_hidden"]
        assert hidden.shape[1] == 8
        assert all(torch.equal(part, hidden[:, 4 * (rank // 4) :][:, :4]) for rank, part in enumerate(parts))
        (weight_set,) = ranks._sets
        for rank, other in zip(weight_set.tensors[:4], weight_set.tensors[4:], strict=True):
            assert all(rank[name] is other[name] for name in weight_set.shapes)


# --- LTX-2.5 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ltx25(split, nxd_source, tmp_path_factory):
    """A function (recipe, settings, tp) -> stage 1's latents of a job with an image of strength 0.7; without settings,
    on one rank of the other backend. The distilled job also generates a keyframe."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one-rank", "ranks")]
    job = make_job(PROMPT, Size(64, 64, 9), 3, images=(ImageCondition(split.image, 0, 0.7),))
    jobs = {"distilled": replace(job, num_generated_keyframes=1)}
    jobs["dev"] = replace(job, **GUIDED, negative_prompt="grey")

    def latents(recipe: str, settings: tuple[str, ...] = (), tp: int = TP):
        files = SimpleNamespace(checkpoint=getattr(split, recipe), gemma_root=split.text_encoder)
        if settings:
            workspace = open_workspace(files, folders[1], *settings, tp=tp)
        else:
            workspace = Workspace(files.checkpoint, resolve("cpu"), folders[0], 1, "float32", files.gemma_root)
        resolved = workspace.resolved(jobs[recipe])
        assert resolved.ancestral == (recipe == "distilled")
        return nxd.latents_of(resolved, workspace)

    return latents


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("recipe", ["distilled", "dev"])
def test_a_stage_of_ltx_2_5(ltx25, recipe, settings):
    assert_close(ltx25(recipe, settings), ltx25(recipe))


def test_groups_of_ranks_mark_the_keyframes_of_their_tokens(ltx25, eight_ranks):
    """Eight ranks divide 12 tokens, so the last ranks have padding."""
    tp, settings = LAYOUTS["2 groups of 4 ranks that divide the stream too"]
    assert_close(ltx25("distilled", settings, tp), ltx25("distilled"))


# --- the text encoder and the VAEs: what four ranks give is what the host gives ---------------------------------------


def assert_contexts_are_the_hosts(ranks, workspace: Workspace, buckets: tuple[int, ...], *prompts: list[int]) -> None:
    how = workspace.weights("gemma3"), workspace.gemma, workspace.transformer, buckets, torch.float32
    encoder = RankTextEncoder(ranks, *how)
    for ids in prompts:
        (contexts,), (host,) = encoder.encode([ids]), workspace.host_text_encoder().encode([ids])
        assert max(rel(contexts.video, host.video), rel(contexts.audio, host.audio)) < FP32


def test_prompts_of_any_length_by_graphs_over_one_copy_of_the_weights(workspace):
    prompts, buckets = [PROMPT, ", ".join(["a long walk on a pebble beach, in the rain"] * 12)], (128, 1024)
    ids = [tokenize(workspace.tokenizer, prompt) for prompt in prompts]
    assert [bucket_for([each], workspace.profile.text_buckets) for each in ids] == [*buckets]
    with nxd.loaded(workspace, "gemma3", workspace.text_graphs(buckets)) as ranks:
        (weight_set,) = ranks._sets
        models = [model for n in buckets for model in weight_set.models[f"gemma3-{n}", "gemma3"]]
        assert len({model.weights[3]["module.norm.weight"].data_ptr() for model in models}) == 1
        assert_contexts_are_the_hosts(ranks, workspace, buckets, *ids)


def test_gemma_4_with_its_global_head_on_every_rank(split, tmp_path):
    files = SimpleNamespace(checkpoint=split.distilled, gemma_root=split.text_encoder)
    workspace = open_workspace(files, tmp_path, CUT)
    with nxd.loaded(workspace, "gemma3", workspace.text_graphs((128,))) as ranks:
        (weight_set,) = ranks._sets
        full, sliding = workspace.gemma.full_attention_layers[0], 0
        assert workspace.gemma.attention(True).key_value_heads == 1
        for layer, copied in ((full, True), (sliding, False)):
            keys = [part[f"layers.{layer}.self_attn.k_proj.weight"] for part in weight_set.tensors]
            assert torch.equal(keys[0], keys[1]) == copied
        assert_contexts_are_the_hosts(ranks, workspace, (128,), tokenize(workspace.tokenizer, PROMPT))


def test_frames_of_vae_tiles(assets, workspace):
    clip, settings = (3, 3, 4), ("vae_tile_latents=12", "vae_overlap=32", "vae_overlap_frames=8")
    tiled = open_workspace(assets, workspace.artifacts, CUT, *settings)
    host = HostModels(assets.checkpoint, tiled.checkpoint.config, torch.float32, profile=tiled.profile)
    latent, tiling = randn(1, 128, *clip, seed=3), host_tiles.tiling_for_ranks(tiled.profile, clip, TP)
    assert len(host_tiles.cut(clip, tiling)) > 1
    with nxd.loaded(tiled, "vae", tiled.decoder_graphs(clip)) as ranks:
        frames = torch.cat([*host._decoded_in_tiles(latent, tiles.RankTiles(ranks))], dim=2)
        (weight_set,) = ranks._sets
        assert len({tensors["conv_in.conv.weight"].data_ptr() for tensors in weight_set.tensors}) == TP
    on_host = host_tiles.TiledDecoder(partial(map, host.video_decoder))
    expected = torch.cat([*on_host.tiled_decode(latent, tiling)], dim=2)
    assert frames.shape == expected.shape and rel(frames, expected) < FP32


def test_frames_of_the_diffusion_decoder(split, tmp_path):
    """There are more spans than cores, and the last call leaves some cores idle."""
    files, clip, seed = (split.distilled, resolve("trn2.3xlarge"), tmp_path, TP, "float32"), (4, 3, 3), 5
    workspace = Workspace(*files, video_vae_path=split.diffusion_vae)
    host = HostModels(workspace.checkpoint_path, workspace.config, torch.float32, files=workspace.files)
    latent = randn(1, 128, *clip, seed=3)
    with nxd.loaded(workspace, "vae", workspace.decoder_graphs(clip)) as ranks:
        spans = tiles.RankSpans(ranks, workspace.video_decoder, torch.float32)
        decoders = (DiffusionDecoder(each.config, clip, each) for each in (spans, host.video_decoder))
        frames, expected = (torch.cat([*each.pixels(latent, seed)], 2) for each in decoders)
    assert rel(frames, expected) < FP32


def test_latents_of_encoder_tiles(assets, workspace, monkeypatch):
    """Upstream's tiles are larger than a test's clips. These are two in time and two in width."""
    for axis in ("TIME", "SPACE"):
        monkeypatch.setattr(host_tiles, f"{axis}_TILE", 2)
        monkeypatch.setattr(host_tiles, f"{axis}_OVERLAP", 1)
    encodes = open_workspace(assets, workspace.artifacts, CUT, "resident=true")
    graphs = encodes.encoder_graphs(make_job("", Size(32, 96, 17), retake=Retake("clip.mkv", 0, 1)))
    host = HostModels(assets.checkpoint, encodes.config, torch.float32)
    pixels = randn(1, 3, 17, 32, 96).clip(-1, 1)
    with nxd.loaded(encodes, "encoder", graphs) as ranks:
        assert len(ranks.programs) == 2
        latents = host.encode_video(pixels, rank_tiles=tiles.RankEncoder(ranks))
    assert rel(latents, host.encode_video(pixels)) < FP32


def test_sound(assets, workspace):
    host = HostModels(assets.checkpoint, workspace.checkpoint.config, torch.float32)
    graphs = [graph for latents in (3, 60) for graph in workspace.sound_graphs(latents, Size())]
    with nxd.loaded(workspace, "sound", graphs) as ranks:
        on_ranks = tiles.RankSound(ranks, resampling_filters(workspace.vocoder))
        for latents in (3, 60):
            latent = randn(1, 8, latents, 16, seed=latents)
            # Random layers answer a rounding with ten of it.
            assert rel(host.decode_audio(latent, on_ranks), host.decode_audio(latent)) < 2e-5
