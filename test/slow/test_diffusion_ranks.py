"""The diffusion decoder on real ranks gives the host's frames."""

import diffusion_vae
import torch
from helpers import one_thread, rel, save_weights  # noqa: F401

from ltx_neuron.backends.export import compile_program, fake_process_group
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.tiles import RankSpans
from ltx_neuron.backends.torchdist.host import TorchDistRanks
from ltx_neuron.config.diffusion import shortest
from ltx_neuron.config.profiles import PROFILES
from ltx_neuron.models.programs import diffusion_program, program_name

TP, SHAPE, LONGER = 2, (4, 3, 3), (5, 3, 3)
EQUAL = 2e-6  # relative: sums in another order


def test_frames_equal_the_hosts_and_what_spans_have_in_common_is_uploaded_once_a_clip(tmp_path):
    """Also if the last group of spans leaves a rank idle, and for a longer clip on the same graphs."""
    config = diffusion_vae.config_of()
    clip = shortest(config, SHAPE)
    with fake_process_group(TP):
        program = diffusion_program(config, clip, torch.float32)
        compile_program(program, tmp_path / "graphs", {}, torch.float32)
    programs = {program_name("vae", *clip): Manifest(tmp_path / "graphs")}
    weights = save_weights(tmp_path / "weights", *[diffusion_vae.weights(config)] * TP)
    with TorchDistRanks(PROFILES["cpu"], TP) as ranks:
        ranks.load(weights, programs, torch.float32)
        decoder, put, puts = RankSpans(ranks, config, torch.float32), ranks.put, []
        ranks.put = lambda name, like, **tensors: puts.extend(tensors.items()) or put(name, like, **tensors)
        for shape in (SHAPE, LONGER):
            puts.clear()
            sent, wanted = ranks.bytes_sent, diffusion_vae.pixels(diffusion_vae.spans(), shape)
            assert rel(diffusion_vae.pixels(decoder, shape), wanted) < EQUAL
            # RoPE, the biases of rows and columns, the timestep.
            constants = [name for name, _ in puts if program.fields[name].split is None]
            assert len(constants) == len({*constants}) == 5 * len(config.channels) + 1
            assert ranks.bytes_sent - sent == sum(tensor.nbytes for _, tensor in puts)
