"""The probes of test/device with NxD's real source, on the stand-ins that nxd_fixtures.py says how to run."""

import subprocess
import sys

import nxd_stubs
import pytest
from conftest import ROOT

from ltx_neuron.files import read_json, write_json

if lacking := nxd_stubs.missing():
    pytest.skip(f"THE PROBES WERE NOT RUN ON NXD: {lacking}", allow_module_level=True)
pytestmark = pytest.mark.timeout(300)


def probed(folder, **content) -> dict:
    """What a process of probes.py finds on the cores of a trn2.3xlarge."""
    request, output = folder / "request.json", folder / "found.json"
    content |= {"profile": "trn2.3xlarge", "settings": [], "dtype": "bfloat16", "tp": 4}
    write_json(request, content | {"folder": str(folder / "probe"), "output": str(output)})
    script = ROOT / "test/device/probes.py"
    run = f"import nxd_stubs; nxd_stubs.run_script({str(script)!r}, {str(request)!r})"
    subprocess.run([sys.executable, "-c", run], cwd=ROOT / "test/xla", check=True)
    return read_json(output)


def test_an_output_that_is_kept_survives_though_the_model_s_own_buffer_is_overwritten(tmp_path):
    """The stand-in overwrites a graph's outputs at its next run."""
    assert probed(tmp_path, probe="outputs") == {"right": True, "kept": True, "raw": False}


def test_sums_and_gathers_of_all_ranks_are_right(tmp_path):
    cases = [[operation, 1, 16, 8] for operation in ("sum", "gather", "gather and scatter")]
    actual = probed(tmp_path, probe="collectives", cases=cases)["cases"]
    assert [case["right"] for case in actual] == [True] * 3
    assert all(case["ms"] > 0 for case in actual)
