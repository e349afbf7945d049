"""A tiny clip of two windows, and ltx-core's own loop over the windows."""

import dataclasses
from typing import NamedTuple

import torch
from golden.patches import numerics
from golden.upstream import Pipeline
from jobs import make_job

from ltx_neuron.job import Job, Size

WINDOW, CARRY, BLEND, RATE = 25, 17, 5, 24.0


def clip(frames: int = 33, prompt: str = "waves", **fields) -> Job:
    windows = {"chunk_pixel_frames": WINDOW, "chunk_carry_frames": CARRY, "chunk_blend_frames": BLEND}
    return make_job(prompt, Size(64, 64, frames, RATE, two_stage=True), 7, **windows | fields)


class Held(NamedTuple):
    """Sound at the beginning of a window that is there already."""

    latent: torch.Tensor

    def apply_to(self, latent_state, latent_tools):
        tokens = latent_tools.patchifier.patchify(self.latent)
        clean, mask = latent_state.clean_latent.clone(), latent_state.denoise_mask.clone()
        clean[:, : tokens.shape[1]], mask[:, : tokens.shape[1]] = tokens, 0
        return dataclasses.replace(latent_state, clean_latent=clean, denoise_mask=mask)


class InWindows(Pipeline):
    """Window after window through both stages, by the functions of ltx-pipelines and one generator."""

    def run(self):
        tensors, self.ends = {}, {}
        for number, prompt in enumerate(self.job.texts_of_windows):
            self.job, self.num_frames = self.job.replaced(prompt=prompt), WINDOW
            tensors |= {f"w{number}_{name}": x for name, x in super().run().items()}
        return tensors

    def _stage(self, height, width, sigmas, video=None, audio=None):
        ended = super()._stage(height, width, sigmas, video, audio)
        sound = round(CARRY / RATE * 25)
        self.ends[height] = ended[0][:, :, -(CARRY // 8 + 1) :], ended[1][:, :, -sound:]
        return ended

    def _streams(self, height, width, *begin):
        from ltx_core.conditioning import VideoConditionByLatentIndex

        streams = super()._streams(height, width, *begin)
        if height not in self.ends:
            return streams
        video, audio = self.ends[height]
        items = VideoConditionByLatentIndex(latent=video, strength=1.0, latent_idx=0), Held(audio)
        return tuple(s._replace(items=(*s.items, item)) for s, item in zip(streams, items, strict=True))


@torch.no_grad()
def by_ltx_core(tiny, job: Job, draw) -> dict[str, torch.Tensor]:
    with numerics("later"):
        return InWindows(tiny, job, draw).run()
