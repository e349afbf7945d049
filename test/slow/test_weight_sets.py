"""A batch of lines of all kinds, each on weights of its own: each line is its single run bit for bit."""

import engines
import pytest
import torch
from engines import ONE, TWO, assert_same, each_alone, latents, swaps
from helpers import made_film, one_thread, randn  # noqa: F401
from jobs import make_job, read_clip, read_voice
from safetensors.torch import save_file

from ltx_neuron.artifacts import build
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition, Retake, SoundCondition
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.weights.lora import Lora

SPOKEN = StreamGuidance(cfg_scale=7.0, stg_scale=1.0, stg_blocks=(0,))


@pytest.fixture(scope="module")
def mixed(tiny, tmp_path_factory) -> list[Job]:
    """A line of each kind, those of two IC-LoRAs apart from each other."""
    jobs = engines.jobs_of_three_sets(tiny, tmp_path_factory.mktemp("jobs"))
    first, second = jobs[0].loras, jobs[1].stage_1_loras
    masked = {name: getattr(jobs[1], name) for name in ("references", "attention_mask")}
    film = masked["references"][0].path
    long = made_film(tmp_path_factory.mktemp("mixed") / "film.mp4", 17, 64, 64)
    voice, dust = read_voice(long), {"negative_prompt": "dust"}
    guided = dust | {"recipe": "dev", "num_inference_steps": 2}
    guidance = Guidance(StreamGuidance(cfg_scale=3.0), SPOKEN)
    heard = {"guidance": Guidance(StreamGuidance(), SPOKEN), "sound_only": True}
    both = {"stage_1_loras": first, "stage_2_loras": second}
    return [
        make_job("an IC-LoRA", TWO, 11, stage_1_loras=first, **masked),
        make_job("text to video", ONE, 12),
        make_job("another IC-LoRA", TWO, 13, stage_1_loras=second, **masked),
        make_job("image to video", ONE, 14, images=(ImageCondition(tiny.image),)),
        make_job("two windows", Size(64, 64, 25), 18, retake=Retake(long, extend=0.6, source_frames=17)),
        make_job("a retake", ONE, 15, retake=Retake(film, 0.05, 0.2)),
        make_job("the first again", TWO, 16, stage_1_loras=first, **masked),
        make_job("audio to video", TWO, 17, sound=SoundCondition(film)),
        make_job("dubbing", TWO, 19, loras=first, **read_clip(film, first)),
        make_job("a reference voice", TWO, 20, stage_1_loras=first, reference_sound=voice),
        make_job("a guided voice", TWO, 21, **guided, **both, guidance=guidance, reference_sound=voice),
        make_job("normalized attention guidance", ONE, 22, **dust, nag_scale=11.0),
        make_job("a bed of noise", TWO, 24, sound=SoundCondition(film, bed=-30.0)),
        make_job("sound alone", Size(0, 0, 30, 30.0), 26, **guided, **heard),
    ]


@pytest.fixture(scope="module")
def engine_of(tiny, mixed, artifacts):
    with engines.opened(mixed, tiny, artifacts) as anew:
        yield anew


def test_a_batch_of_all_kinds_swaps_least_and_every_line_is_its_single_run(engine_of, mixed):
    single, order = each_alone(engine_of(), mixed), []
    engine = engine_of()
    engine.on_stage_end = lambda run: order.append(run.job.seed)
    assert_same(latents(engine, mixed), single)
    assert swaps(engine) == 2
    # What one LoRA makes, what the other does, and then all that is plain.
    plain = [11, 12, 13, 14, 18, 18, 15, 16, 17, 17, 20, 22, 24, 24, 26]
    assert order == [11, 16, 19, 19, 20, 21] + [13, 21] + plain


def test_ranks_encode_each_prompt_with_the_connectors_of_its_jobs_lora(tiny, tmp_path, artifacts):
    """As the host does, beside jobs without one."""
    key = "video_embeddings_connector.transformer_1d_blocks.0.attn1.to_v"
    tensors = {f"{key}.lora_A.weight": randn(4, 32), f"{key}.lora_B.weight": randn(32, 4)}
    save_file({name: t.bfloat16() for name, t in tensors.items()}, tmp_path / "lora.safetensors")
    loras = (Lora(tmp_path / "lora.safetensors"),)
    jobs = [make_job("rain on a roof", ONE, loras=loras), make_job("rain on a roof", ONE)]

    def contexts(**options) -> list[torch.Tensor]:
        workspace = engines.opened_workspace(tiny, artifacts, settings=["text_buckets=128,1024"])
        build.make(workspace, workspace.weight_sets("gemma3", map(workspace.text_loras, jobs)))
        build.make(workspace, workspace.text_graphs())
        with engines.opened_engine(workspace, tiny, cache_prompts=False, **options) as engine:
            return [run.contexts[0].video for run in engine.encode(jobs)]

    ranks, host = contexts(neuron_gemma=True), contexts()
    assert (host[0] - host[1]).abs().max() > 0.01
    for got, wanted in zip(ranks, host, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
