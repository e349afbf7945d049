"""A clip of noise encoded on the ranks and by the host, for test/device.

    python -m device.encoded REQUEST.json

REQUEST.json has checkpoint, artifacts, size (the fields of job.Size), profile, settings, dtype, tp
and output, a JSON file: seconds to shard and to compile the encoder, of the ranks' first and second
encoding and of the host's, the sizes of the tiles, and the relative error of the ranks' latents.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jobs import make_job

from ltx_neuron import errors
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.residency import Residency
from ltx_neuron.files import read_json, write_json
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import Retake
from ltx_neuron.tune.variant import rel_l2


def encode(request: dict) -> None:
    """Encode a clip on the ranks twice, then on the host, and write what it took."""
    # Of a rehearsal on a CPU, whose VAEs do not stay beside the transformer by themselves
    profile = resolve(request["profile"], (*request["settings"], "resident=true"))
    workspace = Workspace(request["checkpoint"], profile, request["artifacts"], request["tp"], request["dtype"])
    torch.set_num_threads(profile.host_threads)
    size, took = Size(**request["size"]), {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        took[what] = time.perf_counter() - began

    job = make_job("", size, retake=Retake("noise", 0, size.seconds))
    with timed("shard"):
        build.make(workspace, workspace.weight_sets("encoder"))
    with timed("compile"):
        build.make(workspace, workspace.encoder_graphs(job))
    host = HostModels(
        workspace.checkpoint_path,
        workspace.config,
        workspace.dtype,
        profile=profile,
        arithmetic=workspace.arithmetic,
        files=workspace.files,
    )
    generator = torch.Generator().manual_seed(0)
    (clip,) = job.encoded_clips
    pixels = torch.randn((1, 3, *clip.pixels), generator=generator).clip(-1, 1).to(workspace.dtype)
    residency = Residency(workspace, Recorder())
    try:
        tiles = residency.video_encoder({"encoder": workspace.programs(workspace.encoder_graphs(job))})
        for what in ("first", "second"):
            with timed(what):
                latent = host.encode_video(pixels, rank_tiles=tiles)
    finally:
        residency.close()
    with timed("host"):
        wanted = host.encode_video(pixels)
    difference = {"relative": rel_l2(latent.float(), wanted.float())}
    tiles = {"tiles": workspace.encoder_tiles(job)}
    write_json(Path(request["output"]), {"seconds": took} | tiles | difference)


if __name__ == "__main__":
    errors.run(lambda: encode(read_json(Path(sys.argv[1]))))
