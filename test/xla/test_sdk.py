"""What the SDK says before a chip is rented: its simulator runs the kernels that are called, and neuronx-cc compiles
the DiT's graphs. No device is needed:

    python -m pytest test/xla/test_sdk.py

Not run by us: neither Neuron's nki nor neuronx-cc can be installed here.
"""

import importlib
import shutil
from functools import partial

import pytest
import torch
from helpers import randn
from jobs import make_job, replace
from tiny.config import released_config

from ltx_neuron.backends import nki, registry
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config.profiles import PROFILES, require_runtime, resolve
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.models.attention import attention_cte
from ltx_neuron.models.programs import dit_program
from ltx_neuron.tune.trials import FACTOR, FLOOR
from ltx_neuron.tune.variant import rel_l2

pytestmark = pytest.mark.timeout(7200)

COMMAND = "with Neuron's SDK: python -m pytest test/xla/test_sdk.py"
TRN2 = PROFILES["trn2.3xlarge"]


@pytest.fixture
def simulated(monkeypatch):
    """The kernel in NumPy, by Neuron's own nki, 0.3 (SDK 2.29) or newer; the public index has another package nki."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    try:
        module = importlib.import_module("nki")
        if not getattr(module, "__file__", None):
            raise ImportError("nki is nxd_stubs' module")
        return module.simulate(nki.load()[TRN2.lnc])
    except (ImportError, AttributeError, UserError) as error:
        pytest.skip(f"NKI KERNELS NOT SIMULATED ({error}); {COMMAND}")


@pytest.mark.parametrize("keys", [130, 256])  # a tile has 128
@pytest.mark.parametrize("size", [64, 128])
def test_the_simulated_kernel_attends_as_the_reference_does(simulated, size, keys):
    query, key, value = (randn(2, keys, size, seed=seed) for seed in range(3))
    scale = size**-0.5
    exact = attention_cte(query, key, value, scale)
    rounded = [tensor.bfloat16() for tensor in (query, key, value)]
    got = torch.as_tensor(simulated(**nki.arguments(*rounded, scale))).reshape(exact.shape)
    allowed = FACTOR * rel_l2(attention_cte(*rounded, scale), exact) + FLOOR
    assert rel_l2(got, exact) <= allowed


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("backend", ["nxd", "torchdist"])
def test_neuronx_cc_compiles_the_graphs_of_two_blocks(backend, guided, tmp_path):
    """Of the released width, at 512x768 with 121 frames: distilled, and guided."""
    profile = resolve(TRN2.name, (f"backend={backend}",))
    try:
        require_runtime(profile, profile.tp)
        if shutil.which("neuronx-cc") is None:
            raise UserError("no neuronx-cc in PATH")
    except UserError as error:
        pytest.skip(f"GRAPHS NOT COMPILED ({str(error).splitlines()[0]}); {COMMAND}")
    config = replace(transformer_config(released_config()), num_layers=2)
    (bucket,) = make_job("", recipe="dev" if guided else "distilled").buckets
    comm = registry.comm(profile, profile.tp)
    make = partial(dit_program, config, bucket, profile.tp, comm, torch.bfloat16, 2, profile.attention)
    identity = {"model": "dit", "bucket": bucket.name, **registry.identity(profile, "dit")}
    registry.compile_program(make, tmp_path / "graphs", identity, torch.bfloat16, profile, profile.tp)
    # TorchNeuron's graphs are compiled where they run, or here.
    registry.precompile([tmp_path / "graphs"], profile, profile.tp, tmp_path / "cache")
    graphs = {"head", "blocks", "tail"} | ({"guide"} if guided else set())
    assert Manifest(tmp_path / "graphs").graphs.keys() == graphs
