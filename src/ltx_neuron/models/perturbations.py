"""What a guided pass leaves out."""

from torch import Tensor


class Perturbations:
    """What a guided pass leaves out of one block (ltx-core guidance/perturbations.py).

    Tensors of 0 and 1 rather than Python flags: the passes share one graph, and another STG block
    or skipped step compiles nothing.

    keep     (4,): video and audio self-attention, audio to video, video to audio; 0 is left out
    enabled  (2,) fp32: video, audio; 0 leaves the stream as it entered the block
    """

    def __init__(self, keep: Tensor, enabled: Tensor):
        self.video_self, self.audio_self, self.a2v, self.v2a = keep.unbind(0)
        self.enabled = enabled.to(keep.dtype)

    def where_enabled(
        self, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """The streams (1, T, D) after a part of the block where they are enabled, else before."""
        return tuple(
            new * on + old * (1 - on)
            for old, new, on in zip(before, after, self.enabled.unbind(0), strict=True)
        )
