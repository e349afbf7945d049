"""How much the video's tokens attend to those of a reference: a mask's pixels as weights of tokens,
and these as what is added before the softmax.

Sources: ltx-pipelines 1.2.0 iclora_utils.py, ltx-core conditioning/mask_utils.py and
transformer_args.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def mask_divides(frames: int, latent_frames: int) -> bool:
    """Whether a mask of so many frames has equally many for each latent frame after the first."""
    if latent_frames == 1:
        return True
    return frames >= latent_frames and (frames - 1) % (latent_frames - 1) == 0


def token_weights(pixels: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
    """Weights (1, F*h*w) in [0, 1] of a reference's tokens, from a mask's pixels (1, 3, frames, H,
    W) in [-1, 1]; computed in their dtype.

    A token's weight is the mean grey of its area: for the first latent frame of the first frame,
    for each later one of as many frames as `mask_divides` has found.
    """
    frames, rows, columns = latent_shape
    grey = ((pixels.mean(dim=1) + 1) / 2).clamp(0, 1)  # (1, frames, H, W)
    areas = F.interpolate(grey.transpose(0, 1), size=(rows, columns), mode="area")[:, 0]
    first, later = areas[:1], areas[1:]
    if frames == 1:
        return first.reshape(1, -1)
    later = later.unflatten(0, (frames - 1, -1)).mean(dim=1)
    return torch.cat([first, later]).reshape(1, -1)


def attention_bias(
    target_tokens: int, groups: list[tuple[int, Tensor | None]], dtype: torch.dtype
) -> Tensor:
    """The bias (T, T) of the video's self-attention, the same for all heads: the logarithm of how
    much each token attends to each, the least number of the dtype where it does not.

    target_tokens  of the clip itself, which come first
    groups  what is appended behind it, in order: how many tokens, and their weights (count,), or
            None for images and for references without a mask

    Tokens of a weight w attend to the clip's, and are attended to by them, as much as w. From the
    first group with weights on, groups do not see the ones before them.
    """
    total = target_tokens + sum(count for count, _ in groups)
    bias = torch.full((total, total), torch.finfo(dtype).min, dtype=dtype)
    end, masked = target_tokens, False
    bias[:end, :end] = 0
    for count, weights in groups:
        start, end = end, end + count
        masked = masked or weights is not None
        if not masked:
            bias[:end, :end] = 0
            continue
        bias[start:end, start:end] = 0
        between = torch.zeros(count) if weights is None else _logarithms(weights.to(dtype))
        bias[:target_tokens, start:end] = between
        bias[start:end, :target_tokens] = between[:, None]
    return bias


def _logarithms(weights: Tensor) -> Tensor:
    limits = torch.finfo(weights.dtype)
    return weights.clamp(min=limits.tiny).log().masked_fill(weights <= 0, limits.min)
