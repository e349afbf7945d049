"""The upstream release whose numerics a run follows: FOLLOWED by default, earlier ones on
request."""

from dataclasses import dataclass

FOLLOWED = "1.4.2"  # the release of ltx-core and ltx-pipelines whose results are the default


@dataclass(frozen=True)
class Compat:
    """What a run follows of earlier releases; releases in brackets are those of the change."""

    # Differences of ltx-core 1.0.0 from later releases.
    # Images overwrite the noised latent and keyframes last eight frames (1.1.6, 1.1.2)
    conditioning: bool = False
    skipped_uncond: bool = False  # the negative pass computes a stream that its step skips
    # Audio-video AdaLN follows the other stream's sigma, not a token's own timestep (1.1.4)
    cross_sigma: bool = False
    positions: bool = False  # video positions are rounded to the run's dtype (1.1.3)
    vocoder: bool = False  # audio decoder and vocoder run in the run's dtype (1.1.0)
    # The host decodes videos in tiles of 512 pixels and 64 frames, not 768 and 80, if --profile-set
    # does not change them (1.1.3)
    tiles: bool = False
    short_negative: bool = False  # the default negative prompt without the words of 1.2.0
    # The sound of a two-stage dev video is stage 2's, not stage 1's (ltx-pipelines, in
    # ti2vid_two_stages.py until July 2026)
    refined_sound: bool = False
    # Of ltx-pipelines before 1.4.0: stage 2 of LTX-2.5's distilled recipe uses the Euler sampler
    # without noise, no stage 2 has the generated keyframes, and that of the dev recipe denoises the
    # sound again before it is dropped
    plain_stage_2: bool = False
    # Behaviour of ltx-pipelines that the default does not follow: the stream that a retake keeps
    # begins as noise and is denoised to the kept part (since 1.1.0)
    retake_noise: bool = False
    # "stored": orientation and colour profile of images and the display matrix of videos are
    # ignored; "turned": of images, quarter turns and the profile are applied (since 1.2.0);
    # "shown": all are
    orientation: str = "shown"


COMPAT = {
    None: Compat(),
    "ltx-core-1.0.0": Compat(
        conditioning=True,
        skipped_uncond=True,
        cross_sigma=True,
        positions=True,
        vocoder=True,
        tiles=True,
        short_negative=True,
        refined_sound=True,
        plain_stage_2=True,
        orientation="stored",
    ),
    "ltx-core-1.0.0-conditioning": Compat(
        conditioning=True, skipped_uncond=True, plain_stage_2=True, orientation="stored"
    ),
    "ltx-pipelines-1.2.0": Compat(plain_stage_2=True, retake_noise=True, orientation="turned"),
}
