"""Which release's numerics a run follows: upstream's later ones by default, ltx-core 1.0.0's on
request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compat:
    """What ltx-core 1.0.0 does differently from later releases, with the release that changed it.

    conditioning  images overwrite the noised latent and keyframes last eight frames (1.1.6, 1.1.2)
    cross_sigma   audio-video AdaLN follows the other stream's sigma, not a token's own timestep
                  (1.1.4)
    positions     video positions are rounded to the run's dtype (1.1.3)
    vocoder       audio decoder and vocoder run in the run's dtype (1.1.0)

    And what ltx-pipelines 1.2.0 does differently from what came before it:

    retake_noise  the stream that a retake keeps begins as noise, and walks to what is kept

    And what all of them do:

    as_stored     EXIF orientation and a video's display matrix are not applied
    """

    conditioning: bool = False
    cross_sigma: bool = False
    positions: bool = False
    vocoder: bool = False
    retake_noise: bool = False
    as_stored: bool = False


COMPAT = {
    None: Compat(),
    "ltx-core-1.0.0": Compat(
        conditioning=True, cross_sigma=True, positions=True, vocoder=True, as_stored=True
    ),
    "ltx-core-1.0.0-conditioning": Compat(conditioning=True, as_stored=True),
    "ltx-pipelines-1.2.0": Compat(retake_noise=True, as_stored=True),
}
