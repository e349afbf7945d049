"""The dev recipe, LoRAs, images, upscaling and --compat against ltx-core (test/recipes_oracle.py),
latent for latent.

One recipe runs through the five scripts, flags and all; the others through the engine that the
scripts call, in this process, so that the ranks are started once for many jobs.
"""

from dataclasses import replace
from functools import cache

import oracle
import pytest
import recipes_oracle
import torch
from helpers import rel
from recipes_oracle import OFF, STREAMS

from ltx_neuron import progress
from ltx_neuron.engine import Engine, RunOptions
from ltx_neuron.errors import UserError
from ltx_neuron.job import Job, Size
from ltx_neuron.profiles import resolve
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.tiny import TinySizes, make_tiny
from ltx_neuron.weights.lora import Lora
from ltx_neuron.workspace import Workspace

pytestmark = pytest.mark.slow

FP32 = 1e-5  # sums in another order, over ranks and over many steps; measured 3e-6
# what every other job, release or weight set changes at least; the least is a hundred times FP32
SHOWS = 1e-3

SEA = "fifty grey waves, and thunder !"
NIGHT = "pale, night"
VIDEO = (
    ("cfg_scale", 2.5),
    ("stg_scale", 0.8),
    ("stg_blocks", (1, 3)),
    ("modality_scale", 2.2),
    ("rescale_scale", 0.6),
)
AUDIO = (
    ("cfg_scale", 5.0),
    ("stg_scale", 1.3),
    ("stg_blocks", (0,)),
    ("modality_scale", 1.7),
    ("rescale_scale", 0.35),
)
GUIDED = recipes_oracle.Job(
    SEA,
    height=96,
    width=64,
    num_frames=9,
    frame_rate=30.0,
    seed=77,
    negative_prompt=NIGHT,
    steps=3,
    video=VIDEO,
    audio=AUDIO,
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Four blocks: graphs of one and of two have several groups, and STG blocks are some of
    many."""
    return make_tiny(tmp_path_factory.mktemp("four"), TinySizes(layers=4, seed=31))


@pytest.fixture(scope="module")
def opened(assets, tmp_path_factory):
    """opened(tp, ...): a engine with its weights sharded, the same one for the same arguments."""
    artifacts, made, threads = tmp_path_factory.mktemp("artifacts"), {}, torch.get_num_threads()

    def engine(
        tp: int,
        blocks: int | None = None,
        loras: tuple = (),
        compat: str | None = None,
        settings: tuple[str, ...] = (),
    ):
        key = (tp, blocks, loras, compat, settings)
        if key not in made:
            workspace = Workspace(
                assets.checkpoint,
                resolve("cpu", settings),
                artifacts,
                tp,
                "float32",
                assets.gemma_root,
                blocks,
            )
            workspace.shard("dit", [merged(loras)])
            options = RunOptions(
                compat=compat,
                spatial_upsampler_path=assets.spatial_upsampler,
                temporal_upsampler_path=assets.temporal_upsampler,
            )
            made[key] = Engine(workspace, Recorder(), options)
            made[key].progress = False
        return made[key]

    yield engine
    for one in made.values():
        one.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def wanted(assets):
    return cache(lambda job: recipes_oracle.generate(assets, job))


def told(job: recipes_oracle.Job, **more) -> Job:
    """The oracle's job in our words."""
    guided = {}
    if job.video is not None:
        streams = (StreamGuidance(**parameters) for parameters in job.guidance)
        guided = dict(recipe="dev", guidance=Guidance(*streams), num_inference_steps=job.steps)
        guided |= dict(negative_prompt=job.negative_prompt)
    size = Size(job.height, job.width, job.num_frames, job.frame_rate, job.two_stage)
    images = tuple(ImageCondition(str(path), *how) for path, *how in job.images)
    given = dict(images=images, loras=merged(job.loras))
    return Job(job.prompt, size, job.seed, **given, **guided, **more)


def merged(loras: tuple) -> tuple[Lora, ...]:
    return tuple(Lora(path, strength) for path, strength in loras)


def generate(engine: Engine, job: Job, decode: bool = False) -> dict[str, torch.Tensor]:
    """Latents and the predictions of a guided first step, read from the ranks. Compiles what is not
    there yet."""
    workspace, first = engine.workspace, {}
    for stage in job.stages:
        workspace.compile_dit([job.bucket(stage)])

    def read(stage, step):
        if step or not stage.guided:
            return
        name = workspace.dit_program_for(job, stage)[0].name
        for kind in (*job.resolved_guidance.passes(), "guided"):
            first.update(
                {
                    f"step0.{kind}.{s}": engine.residency.ranks.get(name, f"{kind}_{s}")
                    for s in STREAMS
                }
            )

    engine.on_step_end = read
    (result,) = engine.run([job], keep=True, decode=decode)
    return result.tensors | first


def distances(got: dict, want: dict) -> dict[str, float]:
    return {name: rel(got[name], want[name]) for name in want}


def assert_equals_the_oracle(got: dict, want: dict) -> None:
    found = distances(got, want)
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert {name: distance for name, distance in found.items() if not distance <= FP32} == {}


def assert_differs(got: dict, other: dict, *names: str) -> None:
    found = {name: rel(got[name], other[name]) for name in names}
    print({name: f"{distance:.1e}" for name, distance in found.items()})
    assert {name: distance for name, distance in found.items() if not distance > SHOWS} == {}


# --- guidance ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tp", "blocks", "settings"), [(1, 1, ()), (4, 2, ()), (4, 2, ("sequence_parallel=true",))]
)
def test_a_guided_stage_equals_ltx_core_pass_by_pass(opened, wanted, tp, blocks, settings):
    engine = opened(tp, blocks, settings=settings)
    got, want = generate(engine, told(GUIDED)), wanted(GUIDED)
    assert {name.split(".")[1] for name in want if "step0" in name} == {
        "cond",
        "uncond",
        "perturbed",
        "isolated",
        "guided",
    }
    assert_equals_the_oracle(got, want)
    if tp == 4:
        engine.close()


ONE_TERM = {
    "cfg": (("cfg_scale", 3.5),),
    "stg": (("stg_scale", 1.5), ("stg_blocks", (2,))),
    "modality": (("modality_scale", 2.5),),
    "rescale of nothing": (("rescale_scale", 0.7),),
}


@pytest.mark.parametrize("term", ONE_TERM)
def test_one_term_in_one_stream_equals_ltx_core(opened, wanted, term):
    job = replace(GUIDED, video=ONE_TERM[term], audio=(), steps=2)
    got = generate(opened(1, 1), told(job))
    assert_equals_the_oracle(got, wanted(job))
    if term != "rescale of nothing":
        assert_differs(got, wanted(replace(job, video=())), "s1_video")


SKIPPING = replace(
    GUIDED, steps=5, video=(*VIDEO, ("skip_step", 1)), audio=(*AUDIO, ("skip_step", 2))
)


@pytest.mark.parametrize("release", ["later", "1.0.0"])
def test_skipped_steps_equal_ltx_core_of_each_release(opened, wanted, release):
    job = replace(SKIPPING, release=release)
    got = generate(opened(1, 1, compat=None if release == "later" else "ltx-core-1.0.0"), told(job))
    assert_equals_the_oracle(got, wanted(job))
    assert_differs(
        got, wanted(replace(job, release={"later": "1.0.0", "1.0.0": "later"}[release])), "s1_video"
    )


def test_a_guided_stage_with_keyframes_equals_ltx_core(opened, wanted, assets):
    job = replace(GUIDED, steps=2, images=((assets.image, 0, 0.9), (assets.image, 8, 0.5)))
    assert_equals_the_oracle(generate(opened(1, 1), told(job)), wanted(job))


def test_ten_runs_of_other_guidance_blocks_and_seeds_compile_nothing(opened):
    engine = opened(1, 1)
    generate(engine, told(replace(GUIDED, steps=2)))

    def files():
        graphs = engine.workspace.artifacts / "graphs"
        return {path: path.stat().st_mtime_ns for path in graphs.rglob("*")}

    before, results = files(), []
    for n in range(10):
        video = dict(
            cfg_scale=1.0 + n % 3,
            stg_scale=n % 2 * 0.7,
            stg_blocks=(n % 4, 3 - n % 2),
            modality_scale=1 + n / 4,
        )
        audio = dict(
            cfg_scale=1.0 + n,
            stg_blocks=(n % 3,),
            stg_scale=0.3 * n,
            rescale_scale=n / 10,
            skip_step=n // 8,
        )
        guidance = Guidance(StreamGuidance(**video), StreamGuidance(**audio))
        job = replace(told(replace(GUIDED, steps=2 + n % 2)), guidance=guidance, seed=1000 + n)
        (result,) = engine.run([job], keep=True, decode=False)
        results.append(result.tensors["s1_video"])
    assert files() == before != {}
    assert len({tuple(latent.flatten()[:8].tolist()) for latent in results}) == 10


def test_the_model_versions_guidance_is_used_where_none_is_said(opened):
    job = replace(told(GUIDED), guidance=None)
    with pytest.raises(UserError, match="28: this model has blocks 0..3"):  # its STG block, of 48
        generate(opened(1, 1), job)


# --- upscaling -----------------------------------------------------------------------------------
@pytest.mark.parametrize("upscale", ["temporal", "both"])
def test_upscaled_latents_equal_ltx_cores(opened, wanted, assets, upscale):
    from ltx_core.model.upsampler import upsample_video

    job = told(GUIDED, upscale=upscale)
    got, latent = generate(opened(1, 1), job), wanted(GUIDED)["s1_video"]
    if upscale == "both":
        models = oracle.ledger(assets, torch.float32)
        with torch.no_grad():
            latent = upsample_video(latent, models.video_encoder(), models.spatial_upsampler())
        assert_equals_the_oracle(got, {"upsampled": latent})
    want = recipes_oracle.upsampled_in_time(assets, latent)
    assert want.shape[2] == 2 * latent.shape[2] - 1
    assert_equals_the_oracle(got, {"temporal_video": want})


def test_twice_the_frames_are_shown_twice_as_fast(opened):
    job = told(replace(GUIDED, steps=2), upscale="temporal")
    engine = opened(1, 1)
    engine.on_step_end = None
    (result,) = engine.run([job], keep=True)
    assert (len(result.frames), job.output_frame_rate) == (17, 60.0)


# --- LoRAs, images, releases: two stages of the distilled recipe ---------------------------------
def image_job(assets, *images, **more) -> recipes_oracle.Job:
    held = tuple((assets.image, *image) for image in images)
    size = dict(height=64, width=128, num_frames=17, frame_rate=12.5, seed=3)
    return recipes_oracle.Job(SEA, **size, two_stage=True, images=held, **more)


def test_a_lora_images_and_a_keyframe_equal_ltx_core(opened, wanted, assets):
    job = image_job(assets, (0, 0.8), (9, 0.3), loras=((assets.lora, 0.45),))
    got = generate(opened(2, loras=job.loras), told(job))
    assert_equals_the_oracle(got, wanted(job))
    assert_differs(got, wanted(replace(job, loras=())), "s1_video", "s2_video")


KEYFRAMES = (0, 1.0), (16, 0.6)
HELD_IN_PART = (0, 0.7), (16, 0.6)


@pytest.mark.parametrize(
    "images", [KEYFRAMES, HELD_IN_PART], ids=["first frame held whole", "both in part"]
)
def test_a_first_frame_and_a_later_one_equal_ltx_core(opened, wanted, assets, images):
    job = image_job(assets, *images)
    got = generate(opened(2), told(job))
    assert_equals_the_oracle(got, wanted(job))
    assert_differs(got, wanted(replace(job, release="1.0.0")), "s2_video", "s2_audio")


def test_compat_equals_ltx_core_1_0_0_as_released(opened, wanted, assets):
    job = image_job(assets, *HELD_IN_PART, release="1.0.0")
    got = generate(opened(2, compat="ltx-core-1.0.0"), told(job))
    assert_equals_the_oracle(got, wanted(job))


def test_images_of_other_crf_equal_ltx_core(opened, wanted, assets):
    job = image_job(assets, (0, 0.5, 0), (5, 0.25, 45))  # no H.264 round trip, and a rough one
    got = generate(opened(2), told(job))
    assert_equals_the_oracle(got, wanted(job))
    default = replace(job, images=tuple(image[:3] for image in job.images))
    assert_differs(got, wanted(default), "s2_video")


# --- HQ ------------------------------------------------------------------------------------------
def hq_job(assets) -> recipes_oracle.Job:
    """The distilled LoRA at .25, and in stage 2 at .5, of which another .25 is the same to the bit;
    a first frame and a keyframe held in part; a stream that skips, which substeps never do."""
    return replace(
        GUIDED,
        height=192,
        width=128,
        two_stage=True,
        sampler="res_2s",
        video=(*VIDEO, ("skip_step", 1)),
        images=((assets.image, 0, 0.7), (assets.image, 8, 0.5)),
        loras=((assets.lora, 0.25),),
        refining_loras=((assets.lora, 0.25),),
    )


def told_hq(assets, engine: Engine) -> Job:
    """That job in our words, its two weight sets sharded."""
    first, second = (merged(((assets.lora, strength),)) for strength in (0.25, 0.5))
    engine.workspace.shard("dit", [first, second])
    job = told(replace(hq_job(assets), loras=()), sampler="res_2s")
    return replace(job, stage_1_loras=first, stage_2_loras=second)


def test_hq_equals_ltx_pipelines_and_sounds_as_stage_1(opened, wanted, assets):
    job = hq_job(assets)
    engine = opened(1, 1)
    got = generate(engine, told_hq(assets, engine), decode=True)
    want = {name: tensor for name, tensor in wanted(job).items() if "step0" not in name}
    assert_equals_the_oracle(got, want | {"final_audio": want["s1_audio"]})
    assert_differs(got, wanted(replace(job, sampler="euler")), "s1_video", "s1_audio", "s2_video")
    assert torch.equal(got["waveform"], engine.host.decode_audio(got["s1_audio"]))


def test_hq_goes_on_after_stage_1_and_after_a_warm_up_to_the_same_bits(opened, assets, tmp_path):
    engine = opened(1, 1)
    job = told_hq(assets, engine)
    states = iter(tmp_path / name for name in ("first", "second"))
    engine.on_stage_end = lambda run: progress.save_state(next(states), run, {})
    whole = generate(engine, job)
    engine.on_stage_end, engine.options = None, replace(engine.options, warmup=True)

    def resume(job):
        return progress.restore_state(tmp_path / "first", job, {}, torch.float32)

    assert [stage.name for stage in resume(job).stages_left] == ["stage_2"]
    (result,) = engine.run([job], keep=True, decode=False, resume=resume)
    engine.options = replace(engine.options, warmup=False)
    for name in ("s1_audio", "s2_video", "s2_audio", "final_audio"):
        assert torch.equal(result.tensors[name], whole[name]), name


# --- the dev recipe in two stages, by the scripts ------------------------------------------------
def test_the_dev_recipe_in_two_stages_equals_ltx_core_through_the_scripts(scripts, tiny):
    video = dict(VIDEO) | {"stg_blocks": (1,)}
    refining = ((tiny.lora, 0.8),)
    job = replace(
        GUIDED,
        width=128,
        height=64,
        two_stage=True,
        video=tuple(video.items()),
        refining_loras=refining,
    )
    setup, size = (
        scripts(tiny, 4),
        dict(height=64, width=128, num_frames=9, frame_rate=30.0, two_stage=True, recipe="dev"),
    )
    setup.prepare(**size)
    loras = dict(distilled_lora=((tiny.lora, 0.8),))
    setup.run("shards/shard_backbone_weights.py", gemma=False, **loras)
    flags = dict(
        prompt=SEA, negative_prompt=NIGHT, seed=77, num_inference_steps=3, neuron_gemma=True
    )
    for (stream, other), parameters in zip(
        (("video", "a2v"), ("audio", "v2a")), job.guidance, strict=True
    ):
        flags |= {
            f"{stream}_cfg_guidance_scale": parameters["cfg_scale"],
            f"{stream}_stg_guidance_scale": parameters["stg_scale"],
            f"{stream}_stg_blocks": (parameters["stg_blocks"],),
            f"{stream}_rescale_scale": parameters["rescale_scale"],
            f"{other}_guidance_scale": parameters["modality_scale"],
        }
    got = setup.generate(**size, **flags, **loras).tensors
    want = {
        name: tensor
        for name, tensor in recipes_oracle.generate(tiny, job).items()
        if "step0" not in name
    }
    assert_equals_the_oracle(got, want)
    for name, other in (
        ("without", dict(refining_loras=())),
        ("in both stages", dict(loras=refining, refining_loras=())),
    ):
        stepped_in = recipes_oracle.generate(tiny, replace(job, **other))
        print(name)
        assert_differs(
            got,
            stepped_in,
            "s2_video",
            "s2_audio",
            *(("s1_video",) if name == "in both stages" else ()),
        )


def test_the_oracle_without_guidance_is_that_of_the_distilled_recipe(assets):
    """Ties the two oracles: guidance of nothing is one plain pass."""
    job = replace(GUIDED, video=(), audio=(), steps=2)
    assert recipes_oracle.passes(*job.guidance) == ["cond"]
    found = recipes_oracle.generate(assets, job)
    assert torch.equal(found["step0.cond.video"], found["step0.guided.video"])
    assert OFF["cfg_scale"] == 1.0
