"""Guidance of the dev recipe: scales per stream, the passes that they need, and the attentions that
each pass skips.

Source: ltx-core components/guiders.py, ltx-pipelines utils/{constants,helpers}.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isclose
from typing import TYPE_CHECKING

from ltx_neuron.errors import FieldError

if TYPE_CHECKING:
    from torch import Tensor, dtype


@dataclass(frozen=True)
class StreamGuidance:
    """Scales of one stream, video or audio. 1 switches cfg and modality off, 0 the others."""

    cfg_scale: float = 1.0  # away from the negative prompt
    stg_scale: float = 0.0  # away from the prediction without self-attention in stg_blocks
    stg_blocks: tuple[int, ...] = ()
    # away from the prediction without audio-video cross-attention
    modality_scale: float = 1.0
    # 0 to 1: how far the conditional prediction's standard deviation is restored
    rescale_scale: float = 0.0
    # steps that repeat a prediction after each computed one
    skip_step: int = 0

    def weights(self) -> list[float]:
        """The graph's factors: (cfg - 1, stg, modality - 1, rescale)."""
        return [self.cfg_scale - 1, self.stg_scale, self.modality_scale - 1, self.rescale_scale]

    def computes(self, step: int) -> bool:
        """Whether a step computes a prediction; otherwise it repeats the last one."""
        return step % (self.skip_step + 1) == 0


@dataclass(frozen=True)
class Guidance:
    video: StreamGuidance
    audio: StreamGuidance

    @property
    def streams(self) -> tuple[StreamGuidance, StreamGuidance]:
        return self.video, self.audio

    def check(self, layers: int) -> None:
        """Raise FieldError for STG blocks beyond the model's layers."""
        for name, stream in (("video", self.video), ("audio", self.audio)):
            missing = [block for block in stream.stg_blocks if not 0 <= block < layers]
            if missing and not isclose(stream.stg_scale, 0.0):
                raise FieldError(
                    f"{name} STG block {', '.join(map(str, missing))}: this model has blocks"
                    f" 0..{layers - 1}; type for example {{{name}_stg_blocks}} {layers // 2}"
                )

    def passes(self) -> tuple[str, ...]:
        """The passes with a nonzero weight in either stream."""
        needed = {
            "uncond": any(not isclose(s.cfg_scale, 1.0) for s in self.streams),
            "perturbed": any(not isclose(s.stg_scale, 0.0) for s in self.streams),
            "isolated": any(not isclose(s.modality_scale, 1.0) for s in self.streams),
        }
        return ("cond", *(name for name, is_needed in needed.items() if is_needed))

    def weights(self) -> "Tensor":
        """(2, 4) fp32: the weights of video and of audio."""
        import torch

        return torch.tensor([stream.weights() for stream in self.streams])

    def keep(self, name: str, layers: int, dtype: "dtype") -> "Tensor":
        """The attentions of a pass in each block, (layers, 4): video and audio self-attention, a2v,
        v2a; 0: skipped (the graphs' input `keep`)."""
        import torch

        factors = torch.ones(layers, 4)
        if name == "perturbed":
            for column, stream in enumerate(self.streams):
                if not isclose(stream.stg_scale, 0.0):
                    factors[list(stream.stg_blocks), column] = 0
        if name == "isolated":
            factors[:, 2:] = 0  # both directions, every block
        return factors.to(dtype)

    def enabled_steps(self, steps: Iterable[int], max_steps: int) -> "Tensor":
        """(max_steps, 2) fp32: whether each evaluation computes video and audio. steps: each
        evaluation's step number; surplus rows are not used."""
        import torch

        enabled = torch.ones(max_steps, 2)
        for row, step in enumerate(steps):
            enabled[row] = torch.tensor([float(stream.computes(step)) for stream in self.streams])
        return enabled


# LTX-2.3's.
_STREAM = StreamGuidance(
    cfg_scale=3.0, stg_scale=1.0, stg_blocks=(28,), modality_scale=3.0, rescale_scale=0.7
)
DEFAULTS, DEFAULT_STEPS = Guidance(_STREAM, replace(_STREAM, cfg_scale=7.0)), 30
# HQ's (res_2s sampler): sharper, without STG.
_HQ_STREAM = StreamGuidance(cfg_scale=3.0, modality_scale=3.0, rescale_scale=0.45)
HQ_DEFAULTS = Guidance(_HQ_STREAM, replace(_HQ_STREAM, cfg_scale=7.0, rescale_scale=1.0))
HQ_STEPS = 15
# Of a reference voice, with which ID-LoRA (github.com/ID-LoRA, inference_one_stage.py) was made.
_VOICE_STREAM = replace(_STREAM, stg_blocks=(29,), rescale_scale=0.0)
VOICE_DEFAULTS = Guidance(_VOICE_STREAM, replace(_VOICE_STREAM, cfg_scale=7.0))
# ID-LoRA's HQ (inference_two_stage_hq.py) is without this rescale too; that it instead scales the
# negative prediction (CFGStarRescalingGuider) is not implemented.
_HQ_VOICE_STREAM = replace(_HQ_STREAM, rescale_scale=0.0)
HQ_VOICE_DEFAULTS = Guidance(_HQ_VOICE_STREAM, replace(_HQ_VOICE_STREAM, cfg_scale=7.0))
# Without a second pass; the rescale then has no effect (ltx-pipelines 1.4, alpha_gen.py).
MATTE = Guidance(StreamGuidance(rescale_scale=0.7), StreamGuidance())
MATTE_NEGATIVE_PROMPT = "worst quality, inconsistent motion, blurry, jittery, distorted"
IDENTITY_SCALE = 3.0  # how far the sound is guided away from the prediction without the voice


# Normalized attention guidance of the distilled recipe (models.attention.normalized_guidance), as
# ComfyUI-KJNodes, LTX2_NAG, has them. Its scale is 11.
NAG_ALPHA, NAG_TAU = 0.25, 2.5


def default_steps(sampler: str) -> int:
    return HQ_STEPS if sampler == "res_2s" else DEFAULT_STEPS


SHORT_NEGATIVE_PROMPT = (  # ltx-pipelines before 1.2.0
    "blurry, out of focus, overexposed, underexposed, low contrast, washed out colors, excessive"
    " noise, grainy texture, poor lighting, flickering, motion blur, distorted proportions,"
    " unnatural skin tones, deformed facial features, asymmetrical face, missing facial features,"
    " extra limbs, disfigured hands, wrong hand count, artifacts around text, inconsistent"
    " perspective, camera shake, incorrect depth of field, background too sharp, background"
    " clutter, distracting reflections, harsh shadows, inconsistent lighting direction, color"
    " banding, cartoonish rendering, 3D CGI look, unrealistic materials, uncanny valley effect,"
    " incorrect ethnicity, wrong gender, exaggerated expressions, wrong gaze direction, mismatched"
    " lip sync, silent or muted audio, distorted voice, robotic voice, echo, background noise,"
    " off-sync audio, incorrect dialogue, added dialogue, repetitive speech, jittery movement,"
    " awkward pauses, incorrect timing, unnatural transitions, inconsistent framing, tilted camera,"
    " flat lighting, inconsistent tone, cinematic oversaturation, stylized filters, or AI"
    " artifacts."
)
NEGATIVE_PROMPT = (
    "has_subtitles, has_blurbox, transition from black, transition to black, speech_ending_short, "
    + SHORT_NEGATIVE_PROMPT
)


def default_guidance(
    sampler: str = "euler", sound: bool = False, sound_only: bool = False, voice: bool = False
) -> Guidance:
    """The dev recipe's default.

    sound       the sound is an input and not guided
    sound_only  there is no video, by which the sound is then not guided either
    voice       with a reference voice
    """
    plain, voiced = DEFAULTS, VOICE_DEFAULTS
    if sampler == "res_2s":
        plain, voiced = HQ_DEFAULTS, HQ_VOICE_DEFAULTS
    guidance = voiced if voice else plain
    if sound_only:
        return Guidance(StreamGuidance(), replace(guidance.audio, modality_scale=1.0))
    return replace(guidance, audio=StreamGuidance()) if sound else guidance
