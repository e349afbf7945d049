"""The jobs that tools/golden records and tests run, with the files and models that they need."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from conftest import once
from helpers import picture_frames, tone, write_film, write_sound
from jobs import make_job, read_clip, read_voice
from PIL import Image
from tiny import TinySizes, make_tiny

from ltx_neuron.demo import ASSETS
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import AttentionMask, ImageCondition, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.weights.lora import Lora

FP32 = 1e-5  # sums in another order, over ranks and over many steps; measured 3e-6
GUIDED = 3e-5  # guidance multiplies what sums in another order change

PUPPY = "a golden retriever puppy runs across a sunny green meadow"
WAVES = "waves crash on the shore ; Möwen singen – « hello » says a man"
RAIN, DUST = "rain on a tin roof", "dust"

# Four blocks: graphs of one and of two have several groups, and STG blocks are some of many.
FOUR = TinySizes(layers=4, seed=31)
# Nothing here is a power of two or of the release: 3 blocks of 8 heads, 10 and 6 channels each; 5 layers of Gemma3.
_GEMMA = dict(layers=5, heads=12, kv_heads=4, head_dim=6, hidden=36, intermediate=52, vocab=403)
_GEMMA |= dict(sliding_window_pattern=3)
_ODD = dict(layers=3, heads=8, head_dim=10, audio_head_dim=6, connector_layers=1, seed=77)
ODD = TinySizes(**_ODD, **{f"gemma_{name}": size for name, size in _GEMMA.items()})
# A block of the released width: 32 heads of 128 and of 64.
WIDE = TinySizes(layers=1, heads=32, head_dim=128, audio_head_dim=64, connector_layers=1, seed=3)
MODELS = {"tiny": TinySizes(), "four": FOUR, "odd": ODD, "wide": WIDE}


def assets_of(model: str, folder: Path):
    """The files of a model, made once a session below a folder; those of the demo lie in the package."""
    return ASSETS if model == "demo" else once(folder / model, lambda path: make_tiny(path, MODELS[model]))


def make_media(folder: Path) -> Path:
    """film: 17 frames of 64 x 64 with sound; cut: with half of it; mute: with none; short: 9 of 64 x 80 frames; held: a
    picture, and 17 frames of it; mask: 9 striped ones; speech: 20 with more sound than 17 have. And sound. Videos are
    lossless: other encodings depend on the number of cores."""
    folder.mkdir(parents=True)
    film, seconds = picture_frames(17, 64, 64, 3), 17 / 20
    picture = picture_frames(1, 64, 80, 70)
    # At a third of its size every other stripe is seen, at a sixth each of them.
    bright = (torch.arange(192) % 6 - 2).abs() < 2
    grey = 250 - 20 * torch.arange(9)[:, None] - torch.arange(192)
    mask = (grey.clamp(min=0)[..., None] * bright)[..., None].expand(-1, -1, -1, 3).byte().contiguous()
    for name, frames, rate, sound in (
        ("film", film, 20, tone(48000, seconds)),
        ("cut", film, 20, tone(48000, seconds / 2)),
        ("mute", film, 20, None),
        ("speech", picture_frames(20, 64, 64, 7), 20, tone(48000, 1.0, 150.0)),
        ("short", picture_frames(9, 64, 80, 40), 24, None),
        ("held", picture.expand(17, -1, -1, -1), 25, None),
        ("mask", mask, 24, None),
    ):
        write_film(folder / f"{name}.mkv", frames, rate, sound=sound, lossless=True)
    Image.fromarray(picture[0].numpy()).save(folder / "held.png")
    samples = (tone(44100, 1.5, 330.0) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    write_sound(folder / "sound.wav", samples, 44100, "pcm_s16le", "stereo", "s16")
    return folder


VIDEO = StreamGuidance(cfg_scale=2.5, stg_scale=0.8, stg_blocks=(1,), modality_scale=2.2, rescale_scale=0.6)
AUDIO = StreamGuidance(cfg_scale=5.0, stg_scale=1.3, stg_blocks=(0,), modality_scale=1.7, rescale_scale=0.35)
SKIPPING = replace(VIDEO, skip_step=1), replace(AUDIO, skip_step=2)
FEWER = StreamGuidance(stg_scale=1.5, stg_blocks=(2,)), StreamGuidance(cfg_scale=3.5)


def guidance(video: StreamGuidance = VIDEO, audio: StreamGuidance = AUDIO, steps: int = 3) -> dict:
    """The dev recipe."""
    streams = Guidance(video, audio)
    return dict(recipe="dev", guidance=streams, num_inference_steps=steps, negative_prompt=DUST)


def nag(scale: float = 11.0, **more) -> dict:
    return dict(nag_scale=scale, negative_prompt=DUST, **more)


def lora(assets, strength: float = 0.7) -> tuple[Lora, ...]:
    return (Lora(assets.lora, strength),)


def images(assets, *placed) -> tuple[ImageCondition, ...]:
    """Each is a frame index, a strength, and a CRF or none."""
    return tuple(ImageCondition(assets.image, *image) for image in placed)


TILES = dict(tile=True, tile_height=96, tile_width=96)  # of 4 x 4 cells, of which neighbours share two
PARTLY = (0, 0.8), (8, 0.6)  # a first frame held in part, and a keyframe
ONE_STAGE, TWO_STAGES = Size(96, 64, 9, 30.0), Size(64, 128, 9, 30.0, True)


def puppy(**more) -> Job:
    """Two stages of the distilled recipe."""
    return make_job(PUPPY, Size(128, 192, 17, 24.0, True), 10, **more)


def guided(size: Size = ONE_STAGE, **more) -> Job:
    """On four blocks."""
    return make_job(RAIN, size, 77, **guidance(replace(VIDEO, stg_blocks=(1, 3))) | more)


def image_job(assets, *placed, two_stage: bool = True, **more) -> Job:
    return make_job(RAIN, Size(64, 128, 17, 12.5, two_stage), 3, images=images(assets, *placed), **more)


def hq(assets) -> Job:
    """Other strengths of the distilled LoRA in both stages, a first frame and a keyframe held in part; a stream that
    skips, which substeps never do."""
    more = guidance(replace(VIDEO, stg_blocks=(1, 3), skip_step=1)) | dict(images=images(assets, (0, 0.7), (8, 0.5)))
    more |= dict(sampler="res_2s", stage_1_loras=lora(assets, 0.25), stage_2_loras=lora(assets, 0.5))
    return guided(Size(192, 128, 9, 30.0, True), **more)


def audio_to_video(media, seed=5, start=0.21, longest=0.5, two_stage=True, num_frames=9, **more) -> Job:
    """The sound is read longer than the video."""
    sound = SoundCondition(media / "sound.wav", start, longest)
    return make_job(RAIN, Size(64, 128, num_frames, 30.0, two_stage), seed, sound=sound, **more)


def guided_audio_to_video(assets, media, **more) -> Job:
    more = {"seed": 8, "stage_2_loras": lora(assets)} | more
    return audio_to_video(media, **guidance(audio=StreamGuidance()), images=images(assets, *PARTLY), **more)


def retake(media, regenerate="both", film="film", seed=21, num_frames=17, **more) -> Job:
    """Of 17 frames at 20 a second, in three latent frames: a time in the second one."""
    more = {"retake": Retake(media / f"{film}.mkv", 0.12, 0.2, regenerate)} | more
    return make_job(RAIN, Size(64, 64, num_frames, 20.0), seed, **more)


def longer(media, **more) -> Job:
    """In one window."""
    return retake(media, num_frames=25, retake=Retake(media / "film.mkv", extend=8 / 20, source_frames=17), **more)


def ic_lora(assets, media, height=128, num_frames=17, two_stage=True, scales=(1, 1), **more) -> Job:
    """Two references, one shorter than the clip, behind an image as a guide, all masked."""
    files = ("film.mkv", 1.0, 17), ("short.mkv", 0.6, 9)
    references = tuple(ReferenceVideo(media / name, *how, *scales) for name, *how in files)
    inputs = dict(images=images(assets, (8, 0.5)), references=references, stage_1_loras=lora(assets))
    inputs |= dict(attention_mask=AttentionMask(media / "mask.mkv", 0.8))
    return make_job(RAIN, Size(height, height, num_frames, 25.0, two_stage), 33, **inputs | more)


def still(assets, media) -> Job:
    """With one picture as reference."""
    held = ReferenceVideo(media / "held.png", 1.0, 17, still=True)
    return ic_lora(assets, media, two_stage=False, references=(held,), attention_mask=None)


def interpolated(assets) -> Job:
    more = dict(images=images(assets, (0, 0.9), (8, 0.5)), images_as_guides=True, stage_2_loras=lora(assets))
    return make_job(RAIN, TWO_STAGES, 12, **guidance(audio=replace(AUDIO, rescale_scale=0.0)), **more)


def dubbed(assets, media) -> Job:
    """17 of a clip's 20 frames, with all of its sound, behind an image."""
    clip = read_clip(media / "speech.mkv", lora(assets), reference_strength=0.8)
    inputs = dict(images=images(assets, (0, 1.0)), loras=lora(assets))
    return make_job(RAIN, Size(64, 128, 17, 20.0, True), 41, **clip, **inputs)


def voiced(assets, media, identity: float | None = 2.5, **more) -> Job:
    """In two stages behind an image, guided if the identity is; the voice is read for longer than the clip."""
    voice = read_voice(media / "sound.wav", reference_audio_max_duration=0.63, identity_guidance_scale=identity)
    inputs = dict(reference_sound=voice, images=images(assets, (0, 0.9)), stage_1_loras=lora(assets))
    if identity is not None:
        inputs |= guidance(audio=replace(AUDIO, rescale_scale=0.5)) | dict(stage_2_loras=lora(assets))
    return make_job(RAIN, TWO_STAGES, 52, **inputs | more)


def sound_alone() -> Job:
    """Of a length that no video has."""
    audio = replace(AUDIO, modality_scale=1.0, rescale_scale=0.7)
    return make_job(RAIN, Size(0, 0, 30, 30.0), 61, **guidance(StreamGuidance(), audio), sound_only=True)


@dataclass(frozen=True)
class Golden:
    """A job that is recorded."""

    job: Callable[..., Job]  # of the model's files and the folder of make_media
    bound: float = FP32
    model: str = "tiny"
    encoded: bool = False  # the prompt, by Gemma3; else its contexts are drawn
    decoded: bool = False  # frames and waveform are recorded
    passes: bool = False  # the predictions of a guided first step are recorded
    bfloat16: bool = False  # how far upstream's run in bfloat16 ends is recorded

    def open(self, folder: Path) -> tuple:
        """The model's files and the job; files are made once a session below a folder."""
        assets = assets_of(self.model, folder)
        return assets, self.job(assets, once(folder / "media", make_media))


FIRST_RELEASE, NOISY = "ltx-core-1.0.0", "ltx-pipelines-1.2.0"
READ, DEMO = dict(encoded=True, decoded=True), dict(model="demo", encoded=True, bfloat16=True)
NAG, OLD = nag(5.0, nag_alpha=0.5, nag_tau=1.5), guidance() | dict(compat=NOISY)
ALONE, BOTH = dict(two_stage=False, stage_2_loras=(), seed=9), dict(bound=GUIDED, bfloat16=True)
CIRCLE = "a red circle glides slowly to the right on a navy ground"
# By subject, and within it from plain to particular.
JOBS = {
    # text and images
    "text_to_video": Golden(lambda a, m: puppy(), bfloat16=True, **READ),
    "image": Golden(lambda a, m: puppy(images=images(a, (0, 0.7))), **READ),
    "image_of_1_0_0": Golden(lambda a, m: puppy(images=images(a, (0, 0.7)), compat=FIRST_RELEASE), **READ),
    "single_frame": Golden(lambda a, m: make_job(PUPPY, Size(128, 192, 1, 24.0)), **READ),
    "odd_sizes": Golden(lambda a, m: make_job(WAVES, Size(96, 160, 25, 25.0), 4242), model="odd", **READ),
    "keyframes": Golden(lambda a, m: image_job(a, (0, 1.0), (16, 0.6)), model="four"),
    "keyframes_of_1_0_0": Golden(lambda a, m: image_job(a, (0, 0.7), (16, 0.6), compat=FIRST_RELEASE), model="four"),
    "image_crf": Golden(lambda a, m: image_job(a, (0, 0.5, 0), (5, 0.25, 45)), model="four"),
    "lora_and_images": Golden(lambda a, m: image_job(a, (0, 0.8), (9, 0.3), loras=lora(a, 0.45)), model="four"),
    "demo": Golden(lambda a, m: make_job(CIRCLE, Size(128, 192, 49, 24.0, True), 1), **DEMO),
    "wide": Golden(lambda a, m: make_job(RAIN, Size(64, 96, 17, 24.0), 4), model="wide"),
    # normalized attention guidance
    "nag": Golden(lambda a, m: image_job(a, (0, 0.8), **nag()), model="four"),
    "nag_in_one_stage": Golden(lambda a, m: image_job(a, (0, 0.7), (16, 0.6), two_stage=False, **NAG), model="four"),
    "nag_audio_to_video": Golden(lambda a, m: audio_to_video(m, two_stage=False, **nag())),
    "nag_retake": Golden(lambda a, m: retake(m, **nag())),
    "nag_ic_lora": Golden(lambda a, m: ic_lora(a, m, skip_stage_2=True, **nag())),
    # the dev recipe
    "guided": Golden(lambda a, m: guided(), model="four", passes=True),
    "guided_by_fewer_terms": Golden(lambda a, m: guided(**guidance(*FEWER, 2)), model="four", passes=True),
    "skipped_steps": Golden(lambda a, m: guided(**guidance(*SKIPPING, 5)), model="four"),
    "skipped_steps_of_1_0_0": Golden(lambda a, m: guided(**guidance(*SKIPPING, 5), compat=FIRST_RELEASE), model="four"),
    "upscaled": Golden(lambda a, m: guided(upscale="both"), model="four"),
    "upscaled_in_time": Golden(lambda a, m: guided(upscale="temporal"), model="four"),
    "hq": Golden(lambda a, m: hq(a), model="four"),
    "dev_two_stages_of_1_2_0": Golden(lambda a, m: guided(TWO_STAGES, **OLD, stage_2_loras=lora(a, 0.8)), encoded=True),
    # audio to video
    "audio_to_video": Golden(lambda a, m: audio_to_video(m, two_stage=False, start=0.4, longest=None)),
    "audio_to_video_images": Golden(lambda a, m: audio_to_video(m, 6, images=images(a, *PARTLY))),
    "audio_to_video_guided": Golden(guided_audio_to_video, GUIDED),
    "audio_to_video_guided_in_one_stage": Golden(
        lambda a, m: guided_audio_to_video(a, m, **ALONE), GUIDED, bfloat16=True
    ),
    # retake
    "retake": Golden(lambda a, m: retake(m), bfloat16=True),
    "retake_video": Golden(lambda a, m: retake(m, "video", seed=4)),
    "retake_audio": Golden(lambda a, m: retake(m, "audio", seed=4)),
    "retake_video_of_1_2_0": Golden(lambda a, m: retake(m, "video", seed=4, compat=NOISY)),
    "retake_audio_of_1_2_0": Golden(lambda a, m: retake(m, "audio", seed=4, compat=NOISY)),
    "retake_short_sound": Golden(lambda a, m: retake(m, film="cut")),
    "retake_without_sound": Golden(lambda a, m: retake(m, "video", film="mute")),
    "retake_guided": Golden(lambda a, m: retake(m, **guidance()), GUIDED),
    "extend": Golden(lambda a, m: longer(m)),
    "extend_guided": Golden(lambda a, m: longer(m, **guidance()), GUIDED),
    # references
    "ic_lora": Golden(ic_lora),
    "ic_lora_scaled": Golden(lambda a, m: ic_lora(a, m, scales=(2, 2), images=(), skip_stage_2=True)),
    "ic_lora_guided": Golden(lambda a, m: ic_lora(a, m, two_stage=False, **guidance()), GUIDED, bfloat16=True),
    "ic_lora_still": Golden(still),
    "ic_lora_tiled": Golden(lambda a, m: ic_lora(a, m, 256, 9, skip_stage_2=True, **TILES), 1e-6),
    "keyframe_interpolation": Golden(lambda a, m: interpolated(a), GUIDED),
    # dubbing, voice, sound
    "dubbing": Golden(dubbed, bfloat16=True),
    "voice": Golden(voiced, GUIDED, bfloat16=True),
    "voice_distilled": Golden(lambda a, m: voiced(a, m, None)),
    "voice_without_identity": Golden(lambda a, m: voiced(a, m, 0.0), GUIDED),
    "voice_hq": Golden(lambda a, m: voiced(a, m, sampler="res_2s"), GUIDED),
    "sound_alone": Golden(lambda a, m: sound_alone(), GUIDED, bfloat16=True),
}
