"""FLOPs of the host's models, counted by torch on the meta device from ltx-core's own modules: a
convolution counts as a direct one, however it is computed."""

from collections.abc import Callable

import torch
from ltx_core.model.upsampler import LatentUpsamplerConfigurator
from ltx_core.model.video_vae import VideoDecoderConfigurator, VideoEncoderConfigurator
from torch.utils.flop_counter import FlopCounterMode

from ltx_neuron.config.sound import AUDIO_SCALE, audio_decoder_config, span_sizes, vocoder_config
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.host.sound import cut
from ltx_neuron.host.spectrogram import mel_sizes
from ltx_neuron.models.programs import Program, spectrogram_program, waveform_program

Shape = tuple[int, int, int]  # frames, rows, columns: of latents, or of pixels


def video_decoder_flops(config: dict, tile: Shape) -> int:
    """Of decoding a tile of latents. config: the checkpoint's."""
    return _counted(VideoDecoderConfigurator.from_config, config, 128, *tile)


def video_encoder_flops(config: dict, pixels: Shape) -> int:
    """Of encoding 8k+1 frames of so many rows and columns."""
    return _counted(VideoEncoderConfigurator.from_config, config, 3, *pixels)


def audio_encoder_flops(config: dict, frames: int) -> int:
    """Of encoding so many frames of a stereo sound's spectrogram."""
    import_ltx_core()  # of which this part wants torchaudio
    from ltx_core.model.audio_vae import AudioEncoderConfigurator

    bins = mel_sizes(config).bins
    return _counted(AudioEncoderConfigurator.from_config, config, 2, frames, bins)


def upsampler_flops(latent: Shape, kind: str) -> int:
    """Of the released "spatial" or "temporal" upsampler; its file need not be there."""
    config = {f"{name}_upsample": name == kind for name in ("spatial", "temporal")}
    return _counted(LatentUpsamplerConfigurator.from_config, config, 128, *latent)


def sound_flops(config: dict, latents: int, tp: int) -> int:
    """Of decoding so many latents of sound on tp ranks: ranks without a span wait for others."""
    mel, vocoder = audio_decoder_config(config), vocoder_config(config)
    span, rows = span_sizes(latents)
    parts = (
        (spectrogram_program(mel, span), cut(latents, span, mel.reach)),
        (waveform_program(vocoder, rows), cut(AUDIO_SCALE * latents - 3, rows, vocoder.reach)),
    )
    return sum(_of_program(program) * -(-len(spans) // tp) * tp for program, spans in parts)


def _of_program(program: Program) -> int:
    """Of one call of every graph."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for graph in program.graphs.values():
            fields = (program.fields[name] for name in graph.inputs._fields)
            graph.module(graph.inputs(*(torch.empty(f.shape, device="meta") for f in fields)))
    return counter.get_total_flops()


def _counted(from_config: Callable[[dict], torch.nn.Module], config: dict, *shape: int) -> int:
    with torch.device("meta"):
        module = from_config(config)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(torch.empty(1, *shape))
    return counter.get_total_flops()
