"""The supported releases of LTX-2, with their settings that no config contains."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ltx_neuron.config.gemma import GEMMA_3_12B, GEMMA_4_12B, GemmaConfig
from ltx_neuron.errors import FieldError
from ltx_neuron.hub import RELEASE_FILES, download_released


@dataclass(frozen=True)
class Release:
    """Settings that are fixed by a checkpoint's release and absent from its config metadata."""

    version: str  # the beginning of `model_version` in the checkpoint's metadata
    # Quality of the H.264 round trip of conditioning images (ltx-pipelines 1.2.0)
    image_crf: int = 33
    # Whether the distilled recipe uses the ancestral Euler sampler for text and images
    # (ltx-pipelines 1.2.0 utils/samplers.py in stage 1; since 1.4.0 in stage 2 as well)
    ancestral: bool = False
    gemma: GemmaConfig = GEMMA_3_12B  # the sizes of its text encoder
    # Whether text encoder, video VAE and audio VAE each have a file of their own
    split: bool = False

    def check_compat(self, compat: str | None) -> None:
        """Raise FieldError for the numerics of ltx-core 1.0.0 with a later model."""
        if self.split and compat and compat.startswith("ltx-core-1.0.0"):
            raise FieldError(
                f"{{compat}} {compat}: that release does not run LTX-{self.version}; leave it out"
            )

    def download(self, kind: str) -> str:
        """The command that downloads the release's file of a kind of RELEASE_FILES, or with it."""
        return download_released(kind if self.has(kind) else "distilled", self._repository)

    def has(self, kind: str) -> bool:
        """Whether the release has a file of a kind of hub.RELEASE_FILES."""
        return kind in RELEASE_FILES[self._repository]

    @property
    def _repository(self) -> str:
        return f"Lightricks/LTX-{self.version}"


RELEASES = (
    Release("2.3"),
    Release("2.5", image_crf=18, ancestral=True, gemma=GEMMA_4_12B, split=True),
)


_LABEL = re.compile(r"(?:ltxv?[-_ ]?|v)*(\d+)[._](\d+)", re.IGNORECASE)


def parse_release(model_version: str) -> Release | None:
    """The supported release that a file's `model_version` names: 2.3.0, v2.3, LTX-2.3-dev."""
    version = ".".join(map(str, _numbers(model_version)))
    return next((release for release in RELEASES if release.version == version), None)


def _numbers(label: str) -> tuple[int, ...]:
    named = _LABEL.match(label.strip())
    return tuple(map(int, named.groups())) if named else ()


def identified(model_version: str, transformer: Mapping[str, Any]) -> tuple[Release | None, str]:
    """The release of a checkpoint, None if it is not supported, and its version for messages. The
    label decides if it names a supported release, or one after 2.3, whose config may be the same.
    Otherwise the config decides: a repackaged file may have another label, or none."""
    if (release := parse_release(model_version)) or _numbers(model_version) > (2, 3):
        return release, model_version
    if not transformer.get("cross_attention_adaln"):
        older = "2.0" if "audio_num_attention_heads" in transformer else "0.9 (LTX-Video)"
        return None, f"{older}, by its config"
    release = parse_release("2.5" if transformer.get("use_keyframes_abs_pos_embedding") else "2.3")
    return release, release.version if release else ""
