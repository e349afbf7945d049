"""A clip of noise encoded, or the sound of random latents decoded, on the ranks and by the host, for test/device.

    python -m device.on_ranks REQUEST.json

REQUEST.json has what Bench.scripted and bench.request write, and part: encoder or sound. The output has the relative
error of the ranks' result, and the seconds of their first and second time and of the host's.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from jobs import make_job

from device.one_step import workspace_of
from ltx_neuron import errors
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Need, Workspace
from ltx_neuron.config.sound import SPAN_LATENTS
from ltx_neuron.engine.residency import Residency
from ltx_neuron.files import read_json, write_json
from ltx_neuron.host.models import HostModels
from ltx_neuron.job import Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.conditions import Retake
from ltx_neuron.tune.variant import rel_l2


def compare(part: str, workspace: Workspace, graphs: list[Need], compute: Callable) -> dict:
    """compute(ranks) returns the result on the ranks; compute(None) that of the host."""
    build.make(workspace, workspace.weight_sets(part))
    build.make(workspace, graphs)
    residency, results, seconds = Residency(workspace, Recorder()), [], {}
    try:
        load = residency.video_encoder if part == "encoder" else residency.sound_decoder
        ranks = load({part: workspace.programs(graphs)})
        for what, on in (("first", ranks), ("second", ranks), ("host", None)):
            began = time.perf_counter()
            results.append(compute(on).float())
            seconds[what] = time.perf_counter() - began
    finally:
        residency.close()
    return {"seconds": seconds, "relative": rel_l2(results[1], results[2])}


def encode(workspace: Workspace, size: Size) -> dict:
    job = make_job("", size, retake=Retake("noise", 0, size.seconds))
    how = workspace.checkpoint_path, workspace.config, workspace.dtype
    host = HostModels(*how, profile=workspace.profile, host_dtype=workspace.host_dtype, files=workspace.files)
    (clip,) = job.encoded_clips
    noise = torch.randn((1, 3, *clip.pixels), generator=torch.Generator().manual_seed(0))
    pixels = noise.clip(-1, 1).to(workspace.dtype)
    graphs = workspace.encoder_graphs(job)
    return compare("encoder", workspace, graphs, lambda ranks: host.encode_video(pixels, rank_tiles=ranks))


def decode_sound(workspace: Workspace) -> dict:
    host = HostModels(workspace.checkpoint_path, workspace.config, workspace.dtype, files=workspace.files)
    latent = torch.randn(1, 8, SPAN_LATENTS, 16, generator=torch.Generator().manual_seed(0))
    graphs = workspace.sound_graphs(SPAN_LATENTS, Size())
    return compare("sound", workspace, graphs, lambda ranks: host.decode_audio(latent, ranks))


def main() -> None:
    request = read_json(Path(sys.argv[1]))
    if request["part"] == "encoder":
        # In a rehearsal on a CPU the encoder does not stay beside the transformer by itself.
        found = encode(workspace_of(request, "resident=true"), Size(**request["size"]))
    else:
        found = decode_sound(workspace_of(request))
    write_json(Path(request["output"]), found)


if __name__ == "__main__":
    errors.run(main)
