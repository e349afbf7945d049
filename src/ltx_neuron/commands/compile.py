"""ltx-neuron compile MODEL: the graphs of one model."""

import argparse
from pathlib import Path

from ltx_neuron import flags
from ltx_neuron.commands import choose
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.shapes import video_latent_shape

# Model -> a line of help, and the description
_MODELS = {
    "transformer": (
        "the DiT, for the size of a generation",
        "Compile the DiT step for the size of a generation; --two-stage compiles the sizes of both"
        " stages. Without --image the graphs serve text to video and an image at frame 0; with"
        " --image, exactly those images. A sound needs no graphs of its own.",
    ),
    "gemma3": (
        "Gemma and the connectors, for every bucket of tokens",
        "Compile the encoder-only Gemma for every bucket of tokens, and the text connectors.",
    ),
    "vae": (
        "the video decoder and encoder, for --neuron-vae",
        "Compile the VAEs for --neuron-vae: the video decoder for each tile shape of a clip of this"
        " size, and for a video as input the video encoder for each tile shape. With --profile-set"
        " sound_on_ranks=true also the mel decoder and the vocoder for the spans of its sound.",
    ),
}


def main(argv: list[str]) -> None:
    model, argv = choose("compile", {name: line for name, (line, _) in _MODELS.items()}, argv)
    gemma = model == "gemma3"
    size = "--gemma-root gemma-3-12b" if gemma else "--height 384 --width 512 --num-frames 25"
    checkpoint = "--checkpoint-path ltx-2.3-22b-distilled.safetensors"
    example = f"ltx-neuron compile {model} {checkpoint} \\\n    {size}"
    parser = flags.parser(_MODELS[model][1], example, gemma=gemma, verb=f"compile {model}")
    if not gemma:
        flags.add_job(parser, flags.GRAPHS)
    compiled = {"transformer": _transformer, "gemma3": _gemma3, "vae": _vae}[model]
    for path in compiled(parser.parse_args(argv)):
        print(f"graphs: {path}")


def _transformer(args: argparse.Namespace) -> list[Path]:
    from ltx_neuron.artifacts import build  # torch and all
    from ltx_neuron.engine.preflight import check_plans_fit

    job = flags.shape(args, flags.recipe(args))
    job.check_shape()
    workspace = flags.workspace(args)
    paths = []
    for compat in COMPAT:  # stage 2 of an earlier release may have graphs of its own
        job = workspace.resolved(job.replaced(compat=compat))
        buckets = job.buckets_to_compile
        check_plans_fit(workspace, [job], neuron_gemma=False)
        workspace.print_tuned(buckets)
        paths += build.make(workspace, workspace.dit_graphs(buckets, job))
        build.record_size(workspace, job, buckets)
    return list(dict.fromkeys(paths))


def _gemma3(args: argparse.Namespace) -> list[Path]:
    from ltx_neuron.artifacts import build

    workspace = flags.workspace(args)
    workspace.print_tuned()
    return build.make(workspace, workspace.text_graphs())


def _vae(args: argparse.Namespace) -> list[Path]:
    from ltx_neuron.artifacts import build
    from ltx_neuron.artifacts.workspace import times

    size = flags.spec(args).with_upscaling().size
    size.check()
    workspace, needs = flags.workspace(args), []
    if args.video_path or args.reference_video or args.upscale_video or args.tile:
        job = flags.shape(args, flags.recipe(args))
        job.check_shape()
        job = workspace.resolved(job)
        if tiles := workspace.encoder_tiles(job):
            shapes = ", ".join(map(times, tiles))
            print(f"tiles of the input video: {shapes} (frames x rows x columns)")
        needs += workspace.encoder_graphs(job)
    if not args.sound_only:
        clip = video_latent_shape(size.height, size.width, size.num_frames)
        shapes = ", ".join(map(times, workspace.tile_shapes(clip)))
        print(f"tiles: {shapes} latents (frames x rows x columns)")
        needs += workspace.decoder_graphs(clip)
    if workspace.profile.sound_on_ranks:
        needs += workspace.sound_graphs(size.audio_frames, size)
    else:
        print("sound: decoded by the host, without graphs")
    return build.make(workspace, needs)
