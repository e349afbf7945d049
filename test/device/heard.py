"""The sound of random latents decoded on the ranks and by the host, for test/device.

    python -m device.heard REQUEST.json

REQUEST.json has checkpoint, artifacts, profile, settings, dtype, tp and output, a JSON file:
seconds to shard and to compile the decoders, of the ranks' first and second decoding and of the
host's, and the relative error of the ranks' waveform.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ltx_neuron import errors
from ltx_neuron.artifacts import build
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.sound import SPAN_LATENTS
from ltx_neuron.engine.residency import Residency
from ltx_neuron.files import read_json, write_json
from ltx_neuron.host.models import HostModels
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.size import Size
from ltx_neuron.tune.variant import rel_l2


def decode(request: dict) -> None:
    """Decode on the ranks twice, then on the host, and write what it took."""
    profile = resolve(request["profile"], tuple(request["settings"]))
    workspace = Workspace(request["checkpoint"], profile, request["artifacts"], request["tp"], request["dtype"])
    torch.set_num_threads(profile.host_threads)
    took: dict[str, float] = {}

    def timed(what: str, call: Callable[..., Any], *given: object) -> Any:
        began = time.perf_counter()
        result = call(*given)
        took[what] = time.perf_counter() - began
        return result

    timed("shard", build.make, workspace, [workspace.weight_set("sound")])
    graphs = workspace.sound_graphs(SPAN_LATENTS, Size())
    timed("compile", build.make, workspace, graphs)
    sources = workspace.checkpoint_path, workspace.config, workspace.dtype
    host = HostModels(*sources, files=workspace.files)
    latent = torch.randn(1, 8, SPAN_LATENTS, 16, generator=torch.Generator().manual_seed(0))
    residency = Residency(workspace, Recorder())
    try:
        spans = residency.sound_decoder({"sound": workspace.programs(graphs)})
        for what in ("first", "second"):
            waveform = timed(what, host.decode_audio, latent, spans)
    finally:
        residency.close()
    wanted = timed("host", host.decode_audio, latent)
    found = {"seconds": took, "relative": rel_l2(waveform, wanted)}
    write_json(Path(request["output"]), found)


if __name__ == "__main__":
    errors.run(lambda: decode(read_json(Path(sys.argv[1]))))
