"""Input files of jobs."""

from collections.abc import Callable

import pytest
import torch
from helpers import picture_frames, tone, write_sound
from safetensors.torch import save_file

from ltx_neuron.host.video import write_video
from ltx_neuron.weights.lora import Lora


@pytest.fixture(scope="package")
def clip(tmp_path_factory) -> Callable[..., str]:
    """clip(frames, height, width, rate): the path of a video with sound."""
    folder = tmp_path_factory.mktemp("clips")

    def path_of(frames: int, height: int = 32, width: int = 64, rate: float = 24.0) -> str:
        path = folder / f"{frames}x{height}x{width}x{rate}.mp4"
        if not path.exists():
            pictures = picture_frames(frames, height, width, 0)
            write_video(path, [pictures], rate, lambda: tone(48000, frames / rate), 48000)
        return str(path)

    return path_of


@pytest.fixture(scope="package")
def voice(tmp_path_factory) -> str:
    """The path of a mono sound of 1 s."""
    stored = (tone(16000, 1.0)[:1] * 2**15).short().numpy()
    path = tmp_path_factory.mktemp("voice") / "voice.wav"
    return str(write_sound(path, stored, 16000, "pcm_s16le", "mono", "s16"))


@pytest.fixture(scope="package")
def ic_lora(tmp_path_factory) -> Callable[..., Lora]:
    """ic_lora(downscale_factor=...): a LoRA file whose metadata has these factors of references."""
    folder = tmp_path_factory.mktemp("loras")

    def lora_of(**metadata: str) -> Lora:
        path = folder / f"{'-'.join(map(''.join, metadata.items())) or 'plain'}.safetensors"
        save_file({"a": torch.zeros(1)}, path, {f"reference_{k}": v for k, v in metadata.items()})
        return Lora(path)

    return lora_of
