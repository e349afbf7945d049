"""Given: the sound and the videos that a job's first stage is conditioned on."""

from typing import NamedTuple

from ltx_neuron.sampling.conditions import AttentionMask, ReferenceVideo, Retake, SoundCondition
from ltx_neuron.sampling.extension import Extension, extension_of
from ltx_neuron.sampling.latents import audio_latent_frames


class Given(NamedTuple):
    """What a job was given, and pixels, frames and frames per second of its first stage."""

    height: int
    width: int
    num_frames: int
    frame_rate: float
    sound: SoundCondition | None = None
    retake: Retake | None = None
    references: tuple[ReferenceVideo, ...] = ()
    attention_mask: AttentionMask | None = None

    @property
    def extension(self) -> Extension | None:
        """How the retaken video is made longer, where it is."""
        return extension_of(self.retake, self.num_frames, self.frame_rate)

    @property
    def seconds(self) -> float:
        return self.num_frames / self.frame_rate

    @property
    def audio_frames(self) -> int:
        """Latents of a sound as long as the video."""
        return audio_latent_frames(self.num_frames, self.frame_rate)

    def reference_size(self, reference: ReferenceVideo) -> tuple[int, int]:
        """Height and width in which a reference is encoded."""
        return self.height // reference.space_scale, self.width // reference.space_scale

    def reference_latent(self, reference: ReferenceVideo) -> tuple[int, int, int]:
        """(F, h, w) of its latent."""
        return reference.latent_shape(self.height, self.width, self.num_frames)
