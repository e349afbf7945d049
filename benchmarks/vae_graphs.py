"""What decoding on the ranks costs at the released sizes: operations, bytes and FLOPs of every
graph of a tile, and of a whole clip. Nothing is computed: graphs are exported on the meta device.

python benchmarks/vae_graphs.py --height 512 --width 768 --num-frames 121
"""

from collections import Counter

import torch
from lib.harness import finish
from lib.harness import parser as harness_parser
from tiny.config import released_config

from ltx_neuron.backends.export import cost, trace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.sound import AUDIO_SCALE, audio_decoder_config, span_sizes, vocoder_config
from ltx_neuron.config.video import video_decoder_config
from ltx_neuron.host import sound
from ltx_neuron.host.tiles import cut, tile_shape, tiling_for_ranks
from ltx_neuron.models.programs import Program, spectrogram_program, tile_program, waveform_program
from ltx_neuron.sampling.shapes import audio_latent_frames, video_latent_shape


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--num-frames", type=int, default=121)
    parser.add_argument("--profile", default="trn2.3xlarge")
    parser.add_argument("--tp-degree", type=int, default=4)
    options = parser.parse_args()
    profile, tp = resolve(options.profile), options.tp_degree
    clip = video_latent_shape(options.height, options.width, options.num_frames)
    tiles = [tile_shape(tile) for tile in cut(clip, tiling_for_ranks(profile, clip, tp))]
    print(
        f"{options.height}x{options.width}, {options.num_frames} frames: latents {clip}, bfloat16"
    )
    flops, rounds = 0, 0
    for shape, count in Counter(tiles).items():
        config = video_decoder_config(released_config())
        of_tile = describe(tile_program(config, shape, torch.bfloat16), torch.bfloat16)
        flops, rounds = flops + of_tile * count, rounds + -(-count // tp) * of_tile
        print(f"{count} tiles of {shape}: {of_tile / 1e12:.2f} TFLOP each\n")
    print(f"clip: {flops / 1e12:.1f} TFLOP; a rank of {tp}: {rounds / 1e12:.1f} TFLOP")
    if profile.chip:
        ideal = rounds / (profile.flops(tp) / tp)
        print(
            f"at {profile.name}'s documented peak {ideal:.2f} s, at 30 % of it {ideal / 0.3:.2f} s"
        )

    describe_sound(audio_latent_frames(options.num_frames, 24), tp)
    finish(options, clip_flops=flops, rank_flops=rounds)


def describe_sound(latents: int, tp: int) -> None:
    """The same of sound as long as the clip at 24 frames per second."""
    mel, vocoder = audio_decoder_config(released_config()), vocoder_config(released_config())
    span, rows = span_sizes(latents)
    spectrogram = AUDIO_SCALE * latents - (AUDIO_SCALE - 1)
    for what, program, spans in (
        ("latents", spectrogram_program(mel, span), sound.cut(latents, span, mel.reach)),
        ("rows", waveform_program(vocoder, rows), sound.cut(spectrogram, rows, vocoder.reach)),
    ):
        print(f"\n{len(spans)} spans of {spans[0].stop} {what} of sound, float32")
        of_span = describe(program, torch.float32)
        rounds = -(-len(spans) // tp)
        print(
            f"{of_span / 1e12:.2f} TFLOP each; a rank of {tp}: {rounds * of_span / 1e12:.2f} TFLOP"
        )


def describe(program: Program, dtype: torch.dtype) -> int:
    """Print a line for every graph of a program; returns the FLOPs of all its calls."""
    calls, total = Counter(name for name, _ in program.runs["main"]), 0
    columns = {"calls": 6, "operations": 12, "GFLOP": 9, "weights MB": 12, "peak MB": 9}
    columns["elementwise MB"] = 16
    print("graph               " + "".join(f"{name:>{width}}" for name, width in columns.items()))
    for name, graph in program.graphs.items():
        exported = trace(program, name, dtype)
        counted = cost(exported)
        operations = sum(node.op == "call_function" for node in exported.graph.nodes)
        weights = dtype.itemsize * sum(parameter.numel() for parameter in graph.module.parameters())
        total += calls[name] * counted["flops"]
        print(
            f"{name:<20}{calls[name]:>6}{operations:>12}{counted['flops'] / 1e9:>9.0f}"
            f"{weights / 1e6:>12.1f}{counted['peak_bytes'] / 1e6:>9.0f}"
            f"{counted['elementwise_bytes'] / 1e6:>16.0f}"
        )
    return total


if __name__ == "__main__":
    main()
