"""The counted peaks of a decode and of an encoding against the kernel's figure for a process that does it."""

import pytest
import torch
import warm_python
from conftest import ROOT, SCRIPT_SECONDS, succeeded
from tiny.config import merge, released_config

from ltx_neuron.host import dtypes
from ltx_neuron.host.vae_memory import decode_bytes, encode_bytes

# The allocator's and oneDNN's own, beside tensors; measured 1 to 10 % at these sizes and the released ones.
TOLERANCE = 0.2
# The released steps with a quarter of the channels.
NARROW = {"vae": {"decoder_base_channels": 32, "latent_channels": 32}}
THREADS = 2
BFLOAT16 = dtypes.of_video("auto", torch.bfloat16)  # as a run in it would compute here
# What is measured, its frames (or latents), rows and columns, and how it is computed.
CASES = {
    "decoded in tiles": ("decode", (17, 2, 18), torch.float32),  # in time and width, blended from chunks that count
    "decoded in bfloat16": ("decode", (3, 8, 12), BFLOAT16),
    "one frame encoded": ("encode", (1, 768, 1024), torch.float32),
    "encoded in tiles": ("encode", (89, 128, 256), torch.float32),
    "encoded in bfloat16": ("encode", (25, 256, 384), BFLOAT16),
}
# Memory that glibc keeps after it is freed, by a moving threshold, is not the model's. M_MMAP_THRESHOLD is -3.
SCRIPT = f"""
import ctypes
ctypes.CDLL(None).mallopt(-3, 262144)
import sys
from collections import deque
from pathlib import Path
import numpy
import torch
from ltx_core.model.video_vae import VideoDecoderConfigurator, VideoEncoderConfigurator
from tiny.config import merge, released_config
from ltx_neuron.config.video import video_decoder_config, video_encoder_config
from ltx_neuron.host.input_files import pixels_of
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.vae import host_decoder, host_encoder

def status(field):
    line = Path("/proc/self/status").read_text().split(field + ":")[1]
    return int(line.split()[0]) * 1024

def decode(*latent):
    deque(host.decode_video(torch.randn(1, WIDTH, *latent)), maxlen=2)  # one is encoded and one waits

def encode(frames, height, width):
    frame = numpy.zeros((height, width, 3), numpy.uint8)
    pixels = pixels_of((frame for _ in range(frames)), height, width)  # kept, as a caller keeps them
    host.encode_video(pixels.to(dtype))

torch.set_num_threads({THREADS})
config = merge(released_config(), {NARROW})
WIDTH = config["vae"]["latent_channels"]
what, dtype = sys.argv[1], getattr(torch, sys.argv[2])
kinds = {{
    "decode": (decode, (1, 1, 1), VideoDecoderConfigurator, host_decoder, video_decoder_config),
    "encode": (encode, (1, 32, 32), VideoEncoderConfigurator, host_encoder, video_encoder_config),
}}
run, smallest, configurator, host_model, own_config = kinds[what]
theirs = configurator.from_config(config).bfloat16().eval().requires_grad_(False)
for weight in theirs.state_dict().values():
    weight.fill_(0.01)  # the statistics' memory may hold NaN
model = host_model(own_config(config), theirs.state_dict(), dtype)
del theirs
host = HostModels("", config, torch.float32 if what == "decode" else dtype, host_dtype=dtype)
setattr(host, f"video_{{what}}r", model)
run(*smallest)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
run(*map(int, sys.argv[3:]))
print(status("VmHWM") - before + sum(tensor.nbytes for tensor in model.weights.values()))
"""


@pytest.mark.parametrize(("what", "shape", "dtype"), CASES.values(), ids=CASES)
def test_the_peak_of_a_process_is_the_counted_one(tmp_path, what, shape, dtype):
    config, path = merge(released_config(), NARROW), tmp_path / "measured.py"
    path.write_text(SCRIPT)
    words = [path, what, str(dtype).removeprefix("torch."), *shape]
    measured = int(succeeded(warm_python.run([*map(str, words)], ROOT, SCRIPT_SECONDS)).stdout)
    count, more = (decode_bytes, ()) if what == "decode" else (encode_bytes, (dtype,))
    assert measured == pytest.approx(count(config, shape, THREADS, dtype, *more), rel=TOLERANCE)
