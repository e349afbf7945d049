"""The supported releases of LTX-2, with their settings that no config contains."""

from dataclasses import dataclass

from ltx_neuron.config.gemma import GEMMA_3_12B, GEMMA_4_12B, GemmaConfig
from ltx_neuron.errors import FieldError
from ltx_neuron.hub import RELEASED, download_released


@dataclass(frozen=True)
class Release:
    """Settings that are fixed by a checkpoint's release and absent from its config metadata.

    version    the beginning of `model_version` in the checkpoint's metadata
    image_crf  quality of the H.264 round trip of conditioning images (ltx-pipelines 1.2.0
               utils/constants.py)
    gemma      the sizes of its text encoder
    split      whether text encoder, video VAE and audio VAE each have a file of their own
    ancestral  whether the distilled recipe uses the ancestral Euler sampler for text and images
               (ltx-pipelines 1.2.0 utils/samplers.py in stage 1; since 1.4.0 in stage 2 as well)
    """

    version: str
    image_crf: int = 33
    ancestral: bool = False
    gemma: GemmaConfig = GEMMA_3_12B
    split: bool = False

    def check_compat(self, compat: str | None) -> None:
        """Raise FieldError for the numerics of ltx-core 1.0.0 with a later model."""
        if self.split and compat and compat.startswith("ltx-core-1.0.0"):
            raise FieldError(
                f"{{compat}} {compat}: that release does not run LTX-{self.version}; leave it out"
            )

    def download(self, kind: str) -> str:
        """The command that downloads the release's file of a kind of hub.RELEASED."""
        return download_released(kind, self._repository)

    def has(self, kind: str) -> bool:
        """Whether the release has a file of a kind of hub.RELEASED."""
        return kind in RELEASED[self._repository]

    @property
    def _repository(self) -> str:
        return f"Lightricks/LTX-{self.version}"


RELEASES = (
    Release("2.3"),
    Release("2.5", image_crf=18, ancestral=True, gemma=GEMMA_4_12B, split=True),
)


def release_of(model_version: str) -> Release | None:
    """The release of a checkpoint's `model_version`; None if it is not supported."""
    return next((each for each in RELEASES if model_version.startswith(each.version)), None)
