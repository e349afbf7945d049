"""A clip of noise encoded, or the sound of random latents decoded, on the ranks and by the host, for test/device.

    python -m device.on_ranks REQUEST.json

REQUEST.json has part (encoder or sound), checkpoint, artifacts, size (the fields of job.Size), profile, settings,
dtype, tp and output, a JSON file: seconds to shard and to compile, of the ranks' first and second time and of the
host's, the relative error of the ranks' result, and the sizes of the encoder's tiles.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jobs import make_job

from ltx_neuron import errors
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Need, Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.sound import SPAN_LATENTS
from ltx_neuron.engine.residency import Residency
from ltx_neuron.files import read_json, write_json
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Job, Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import Retake
from ltx_neuron.tune.variant import rel_l2


def compare(part: str, workspace: Workspace, graphs: list[Need], host: HostModels, compute: Callable) -> dict:
    """compute(ranks) returns the result on the ranks; compute(None) that of the host."""
    seconds = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[what] = time.perf_counter() - began

    with timed("shard"):
        build.make(workspace, workspace.weight_sets(part))
    with timed("compile"):
        build.make(workspace, graphs)
    residency = Residency(workspace, Recorder())
    try:
        load = residency.video_encoder if part == "encoder" else residency.sound_decoder
        ranks = load({part: workspace.programs(graphs)})
        for what in ("first", "second"):
            with timed(what):
                result = compute(ranks)
    finally:
        residency.close()
    with timed("host"):
        expected = compute(None)
    return {"seconds": seconds, "relative": rel_l2(result.float(), expected.float())}


def encode(workspace: Workspace, job: Job) -> dict:
    host = HostModels(
        workspace.checkpoint_path,
        workspace.config,
        workspace.dtype,
        profile=workspace.profile,
        arithmetic=workspace.arithmetic,
        files=workspace.files,
    )
    (clip,) = job.encoded_clips
    noise = torch.randn((1, 3, *clip.pixels), generator=torch.Generator().manual_seed(0))
    pixels = noise.clip(-1, 1).to(workspace.dtype)
    tiles = {"tiles": workspace.encoder_tiles(job)}
    graphs = workspace.encoder_graphs(job)
    return tiles | compare(
        "encoder", workspace, graphs, host, lambda ranks: host.encode_video(pixels, rank_tiles=ranks)
    )


def decode_sound(workspace: Workspace) -> dict:
    host = HostModels(workspace.checkpoint_path, workspace.config, workspace.dtype, files=workspace.files)
    latent = torch.randn(1, 8, SPAN_LATENTS, 16, generator=torch.Generator().manual_seed(0))
    graphs = workspace.sound_graphs(SPAN_LATENTS, Size())
    return compare("sound", workspace, graphs, host, lambda ranks: host.decode_audio(latent, ranks))


def main() -> None:
    request = read_json(Path(sys.argv[1]))
    # In a rehearsal on a CPU the encoder does not stay beside the transformer by itself.
    resident = ("resident=true",) if request["part"] == "encoder" else ()
    profile = resolve(request["profile"], (*request["settings"], *resident))
    workspace = Workspace(request["checkpoint"], profile, request["artifacts"], request["tp"], request["dtype"])
    torch.set_num_threads(profile.host_threads)
    if request["part"] == "encoder":
        size = Size(**request["size"])
        found = encode(workspace, make_job("", size, retake=Retake("noise", 0, size.seconds)))
    else:
        found = decode_sound(workspace)
    write_json(Path(request["output"]), found)


if __name__ == "__main__":
    errors.run(main)
