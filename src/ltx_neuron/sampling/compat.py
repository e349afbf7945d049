"""The upstream release whose numerics a run follows: FOLLOWED by default, earlier ones on
request."""

from dataclasses import dataclass

FOLLOWED = "1.4.2"  # the release of ltx-core and ltx-pipelines whose results are the default


@dataclass(frozen=True)
class Compat:
    """Differences of ltx-core 1.0.0 from later releases, with the release of the change:

    conditioning  images overwrite the noised latent and keyframes last eight frames (1.1.6, 1.1.2)
    skipped_uncond  the negative pass computes a stream that its step skips
    cross_sigma   audio-video AdaLN follows the other stream's sigma, not a token's own timestep
                  (1.1.4)
    positions     video positions are rounded to the run's dtype (1.1.3)
    vocoder       audio decoder and vocoder run in the run's dtype (1.1.0)
    tiles         the host decodes videos in tiles of 512 pixels and 64 frames, not 768 and 80, if
                  --profile-set does not change them (1.1.3)

    short_negative  the default negative prompt without the words that 1.2.0 added
    refined_sound the sound of a two-stage dev video is stage 2's, not stage 1's (ltx-pipelines, in
                  ti2vid_two_stages.py until July 2026)

    Differences of ltx-pipelines before 1.4.0:

    plain_stage_2 stage 2 of LTX-2.5's distilled recipe uses the Euler sampler without noise, no
                  stage 2 has the generated keyframes, and that of the dev recipe denoises the sound
                  again before it is dropped

    Behaviour of ltx-pipelines that the default does not follow:

    retake_noise  the stream that a retake keeps begins as noise and is denoised to the kept part
                  (since 1.1.0)
    orientation   "stored": orientation and colour profile of images and the display matrix of
                  videos are ignored; "turned": of images, quarter turns and the profile are
                  applied (since 1.2.0); "shown": all are
    """

    conditioning: bool = False
    skipped_uncond: bool = False
    cross_sigma: bool = False
    positions: bool = False
    vocoder: bool = False
    tiles: bool = False
    short_negative: bool = False
    refined_sound: bool = False
    plain_stage_2: bool = False
    retake_noise: bool = False
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
