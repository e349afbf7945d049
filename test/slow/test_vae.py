"""The video decoder on a CPU without bfloat16 units."""

import os
import subprocess
import sys

from conftest import ROOT

DECODE_WITHOUT_UNITS = """
import torch
from unit.host.test_vae import BFLOAT16, FLOAT32, arithmetic
from unit.host.test_vae import bfloat16_decoders, host_like, randn, rel

assert arithmetic("auto", torch.bfloat16) == FLOAT32
exact, decoder = bfloat16_decoders()
latent = randn(1, 128, 1, 2, 3)
with torch.no_grad():
    wanted = exact(latent)
    theirs = rel(decoder(latent.bfloat16()), wanted)
assert 0 < rel(host_like(decoder, BFLOAT16)(latent), wanted) <= theirs
"""


def test_without_bfloat16_units_float32_is_chosen_and_bfloat16_is_still_right():
    """A process of its own: which instructions torch and oneDNN use is settled when they load."""
    env = os.environ | {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "default",
        "PYTHONPATH": ":".join(str(ROOT / part) for part in ("src", "tools", "test", "test/unit")),
    }
    subprocess.run([sys.executable, "-c", DECODE_WITHOUT_UNITS], check=True, env=env)
