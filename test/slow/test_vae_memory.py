"""The counted peaks of a decode and of an encoding against the kernel's figure for a process that
does it."""

from pathlib import Path

import pytest
import torch
import warm_python
from conftest import ROOT, SCRIPT_SECONDS, succeeded
from tiny.config import merge, released_config

from ltx_neuron.host.arithmetic import FLOAT32, Arithmetic, arithmetic
from ltx_neuron.host.vae_memory import decode_bytes, encode_bytes

# the allocator's and oneDNN's own, beside tensors; measured 1 to 10 % at these sizes and the
# released ones
TOLERANCE = 0.2
CONFIG = merge(released_config(), {"vae": {"decoder_base_channels": 32}})
THREADS = 2
BFLOAT16 = arithmetic("auto", torch.bfloat16)  # as a run in it would compute here
ONE_TILE, TILES = (3, 8, 12), (17, 2, 18)  # in time and width, blended from chunks that count
CASES = {"tiles": (TILES, FLOAT32), "bfloat16": (ONE_TILE, BFLOAT16)}
# Memory that glibc keeps after it is freed, by a moving threshold, is not the model's. The constant
# M_MMAP_THRESHOLD is -3.
FIXED_THRESHOLD = "import ctypes\nctypes.CDLL(None).mallopt(-3, 262144)\n"
STATUS = """
def status(field):
    line = Path("/proc/self/status").read_text().split(field + ":")[1]
    return int(line.split()[0]) * 1024
"""
DECODE = f"""
import sys
from collections import deque
from pathlib import Path
import torch
from ltx_core.model.video_vae import VideoDecoderConfigurator
from tiny.config import merge, released_config
from ltx_neuron.host.arithmetic import Arithmetic
from ltx_neuron.host.models import HostModels
from ltx_neuron.config.video import video_decoder_config
from ltx_neuron.host.vae import host_decoder

torch.set_num_threads({THREADS})
config = merge(released_config(), {{"vae": {{"decoder_base_channels": 32}}}})
decoder = VideoDecoderConfigurator.from_config(config).bfloat16().eval().requires_grad_(False)
for weight in decoder.state_dict().values():
    weight.fill_(0.01)  # the statistics' memory may hold NaN
arithmetic = Arithmetic(getattr(torch, sys.argv[1]))
decoder = host_decoder(video_decoder_config(config), decoder.state_dict(), arithmetic)
host = HostModels("", config, torch.float32)
host.video_decoder = decoder

def decode(*latent):
    latent = torch.randn(1, 128, *latent)
    deque(host.decode_video(latent), maxlen=2)  # one is encoded and one waits
{STATUS}
decode(1, 1, 1)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
decode(*map(int, sys.argv[2:]))
print(status("VmHWM") - before + sum(tensor.nbytes for tensor in decoder.weights.values()))
"""


# An encoder of the released steps with a quarter of its channels.
NARROW = merge(released_config(), {"vae": {"latent_channels": 32}})
ENCODED = {
    "one frame": ((1, 768, 1024), FLOAT32),
    "tiles": ((89, 128, 256), FLOAT32),
    "bfloat16": ((25, 256, 384), BFLOAT16),
}
ENCODE = f"""
import sys
from pathlib import Path
import numpy
import torch
from ltx_neuron.host.models import HostModels
from ltx_neuron.host.media import pixels_of
from ltx_core.model.video_vae import VideoEncoderConfigurator
from tiny.config import merge, released_config
from ltx_neuron.host.arithmetic import Arithmetic
from ltx_neuron.config.video import video_encoder_config
from ltx_neuron.host.vae import host_encoder
{STATUS}
torch.set_num_threads({THREADS})
config = merge(released_config(), {{"vae": {{"latent_channels": 32}}}})
encoder = VideoEncoderConfigurator.from_config(config).bfloat16().eval().requires_grad_(False)
for weight in encoder.state_dict().values():
    weight.fill_(0.01)  # the statistics' memory may hold NaN
dtype = getattr(torch, sys.argv[1])
arithmetic = Arithmetic(dtype)
host = HostModels("", config, dtype, arithmetic=arithmetic)
encoder = host_encoder(video_encoder_config(config), encoder.state_dict(), arithmetic)
host.video_encoder = encoder

def encode(frames, height, width):
    frame = numpy.zeros((height, width, 3), numpy.uint8)
    pixels = pixels_of((frame for _ in range(frames)), height, width)
    host.encode_video(pixels.to(dtype))

encode(1, 32, 32)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
encode(*map(int, sys.argv[2:]))
print(status("VmHWM") - before + sum(tensor.nbytes for tensor in encoder.weights.values()))
"""


def measured(folder: Path, script: str, arithmetic: Arithmetic, shape: tuple[int, ...]) -> int:
    """Bytes at most of a process that runs the script."""
    path, dtype = folder / "measured.py", arithmetic.describe()["host_dtype"]
    path.write_text(FIXED_THRESHOLD + script)
    done = warm_python.run([*map(str, (path, dtype, *shape))], ROOT, SCRIPT_SECONDS)
    return int(succeeded(done).stdout)


@pytest.mark.parametrize(("pixels", "arithmetic"), ENCODED.values(), ids=ENCODED)
def test_the_peak_of_an_encoding_is_the_counted_one(tmp_path, pixels, arithmetic):
    counted = encode_bytes(NARROW, pixels, THREADS, arithmetic, arithmetic.dtype)
    assert measured(tmp_path, ENCODE, arithmetic, pixels) == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize(("latent", "arithmetic"), CASES.values(), ids=CASES)
def test_the_peak_of_a_decode_is_the_counted_one(tmp_path, latent, arithmetic):
    counted = decode_bytes(CONFIG, latent, THREADS, arithmetic)
    assert measured(tmp_path, DECODE, arithmetic, latent) == pytest.approx(counted, rel=TOLERANCE)
