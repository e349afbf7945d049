"""What users of diffusers expect of a pipeline: its output, batch first, and answers to the words
of diffusers that this toolkit spells differently or does not need."""

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ltx_neuron.engine.decode import Result
from ltx_neuron.engine.outputs import check_output_path
from ltx_neuron.errors import UserError
from ltx_neuron.format import print_once

_GUIDANCE = "with recipe='dev' of from_pretrained; the distilled recipe has no guidance"
_LORAS = "loras=[('FILE', 1.0)], in from_pretrained or in a call"
# diffusers' arguments and attributes -> what to type here.
_WORDS = {
    "guidance_scale": f"video_cfg_guidance_scale=3.0, {_GUIDANCE}",
    "audio_guidance_scale stg_scale guidance_rescale": f"guidance=Guidance(...), {_GUIDANCE}",
    "conditions last_image": "image=[ImageCondition('FILE', frame_index), ...], -1: the last frame",
    "fps": "frame_rate=24.0",
    "timesteps sigmas scheduler": "num_inference_steps= and sampler= of a call",
    "latents audio_latents noise_scale": "generator= or seed=, which draw the noise",
    "prompt_embeds negative_prompt_embeds": "prompt=: the pipeline encodes and caches prompts",
    "callback_on_step_end_tensor_inputs": "nothing: latents stay on the ranks between steps",
    "decode_timestep decode_noise_scale max_sequence_length variant use_safetensors"
    " low_cpu_mem_usage": "nothing: leave it out",
    "attention_kwargs load_lora_weights": f"{_LORAS}; prepare --lora FILE 1.0 merges them before",
    "set_adapters fuse_lora unload_lora_weights": "loras= of a call, () for none",
    "vocoder": "result.sample_rate, the rate of the sound",
    "pretrained_model_name_or_path": "checkpoint_path=",
    "revision": "checkpoint_path='OWNER/REPO@REVISION'",
    "subfolder": "checkpoint_path='OWNER/REPO/FILE'",
    "cache_dir token local_files_only": "HF_HOME, HF_TOKEN or HF_HUB_OFFLINE=1 in the environment",
    "quantization_config": "checkpoint_path= of an fp8 checkpoint",
    "device device_map": "profile=, as in profile='trn2.3xlarge'",
}
_HERE = {word: text for words, text in _WORDS.items() for word in words.split()}
_PARTS = ("vae", "audio_vae", "transformer", "text_encoder", "connectors")


def unknown_word(word: str, known: Iterable[str]) -> str:
    """What to type instead of an unknown word of diffusers, or the nearest known one."""
    if word in _HERE:
        return f"{word} is diffusers' word; here: {_HERE[word]}"
    near = get_close_matches(word, known, 1)
    return f"unknown {word!r}" + (f"; did you mean {near[0]}?" if near else "")


class DiffusersWords:
    """Attributes of diffusers that a pipeline answers. Devices, offloading and tiling have no
    effect and print a note once; others raise AttributeError with what to type here."""

    engine: Any

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS:
            return self  # for pipe.vae.enable_tiling()
        if name not in _HERE and (name == "to" or name.startswith(("enable_", "disable_"))):
            return partial(_without_effect, self, name)
        raise AttributeError(unknown_word(name, dir(self)))

    def set_progress_bar_config(self, *, disable: bool = False, **_) -> None:
        self.engine.progress = not disable


def _without_effect(pipeline: DiffusersWords, name: str, *_, **__) -> DiffusersWords:
    text = f"note: {name} has no effect: profile and dtype place the models, and decoders tile"
    print_once(text, sys.stderr)
    return pipeline


class StepValues(dict):
    """callback_kwargs: the stage's name and the step's sigma. diffusers' tensors are missing."""

    def __missing__(self, name: str):
        raise UserError(
            f"callback_kwargs[{name!r}]: known: {', '.join(self)}. Latents stay on the ranks"
            " between steps; a callback can neither read nor replace them"
        )


class _Clips(list):
    """Clips of PIL images. Explains itself to code that expects the array of earlier versions."""

    def __getattr__(self, name: str):
        raise AttributeError(
            f"frames has no {name}: it is a list of clips of PIL images, as in diffusers. The uint8"
            " array of frames before 0.2.0 is np.stack(result.frames[0])"
        )


# output_type -> a clip, uint8 (N, H, W, 3), in its form.
_FORMS = {
    "pil": lambda clip: [Image.fromarray(frame.numpy()) for frame in clip],
    "np": lambda clip: (clip.float() / 255).numpy(),
    "pt": lambda clip: (clip.float() / 255).movedim(-1, 1),
}


@dataclass
class LTXPipelineOutput:
    """The result of a call: one video or sound for each prompt and each of num_videos_per_prompt,
    in this order. frames, audio and latents are batch first, as in diffusers; where lengths differ
    they are lists."""

    output_type: str
    results: list[Result]  # their tensors: frames and waveform, or "video" and "audio" latents
    path: Path | None = None  # "mp4", "wav"

    @cached_property
    def frames(self) -> Any:
        """ "pil": lists of PIL images; "np": float32 (B, N, H, W, 3) in [0, 1]; "pt": float32 (B,
        N, 3, H, W) in [0, 1]; "latent": the latents; None for files and sound alone."""
        clips = [result.frames for result in self.results if result.frames is not None]
        if self.output_type not in _FORMS or not clips:
            return self.video_latent
        clips = [*map(_FORMS[self.output_type], clips)]
        if self.output_type == "np":
            warnings.warn(
                "since 0.2.0 frames are float32 in [0, 1] and batch first, as in diffusers; the"
                " earlier array is np.stack(result.frames[0]) with output_type='pil'",
                FutureWarning,
                stacklevel=3,  # the line that reads result.frames
            )
        return _Clips(clips) if self.output_type == "pil" else _stacked(clips)

    @cached_property
    def audio(self) -> Any:
        """float32 (B, 2, samples) in [-1, 1]; "latent": the latents; None for files."""
        if self.output_type not in _FORMS:
            return self.audio_latent
        return _stacked([result.tensors["waveform"] for result in self.results])

    @property
    def video_latent(self) -> Any:
        """ "latent": (B, 128, F, h, w)."""
        return self._latents("video")

    @property
    def audio_latent(self) -> Any:
        """ "latent": (B, 8, Ta, 16)."""
        return self._latents("audio")

    def _latents(self, name: str) -> Any:
        latents = [result.tensors[name][0] for result in self.results if name in result.tensors]
        return _stacked(latents) if latents else None

    @property
    def frame_rate(self) -> float:
        return self.results[0].job.output_frame_rate

    @property
    def sample_rate(self) -> int:
        return self.results[0].sample_rate

    def save(self, path: str | Path) -> list[Path]:
        """Write an MP4 with sound, or the WAV of sound alone, and return its path. Several videos
        are numbered: out-1.mp4, out-2.mp4. Raises UserError for latents and written files."""
        if self.output_type not in _FORMS:
            raise UserError(
                f"save: a result of output_type={self.output_type!r} holds no frames; wanted one of"
                f" {', '.join(_FORMS)}"
            )
        check_output_path(path, self.results[0].job.sound_only)
        paths = [path := Path(path)]
        if (count := len(self.results)) > 1:
            paths = [path.with_stem(f"{path.stem}-{n}") for n in range(1, count + 1)]
        for result, target in zip(self.results, paths, strict=True):
            result.clip().write(target)
        return paths


def _stacked(arrays: list) -> Any:
    """Arrays or tensors as one, batch first; a list if their shapes differ."""
    if len(arrays) == 1:
        return arrays[0][None]  # no copy
    stack = torch.stack if isinstance(arrays[0], Tensor) else np.stack
    return stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
