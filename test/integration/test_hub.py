"""A script in its own process takes its files from the hub that HF_ENDPOINT names."""

import os
import subprocess
import sys

from conftest import ROOT, SCRIPT_SECONDS, succeeded
from hub_server import Hub

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import resolve
from ltx_neuron.hub import DEFAULT_REPO, RELEASE_FILES


def test_weights_sharded_by_a_hub_name_are_those_of_the_local_file(tiny, tmp_path):
    hub = Hub({DEFAULT_REPO: {RELEASE_FILES[DEFAULT_REPO]["distilled"]: tiny.checkpoint}})
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    flags = ["--profile", "cpu", "--tp-degree", "2", "--artifacts-dir", str(tmp_path / "artifacts")]
    script = [ROOT / "shards/shard_backbone_weights.py", "--checkpoint-path", DEFAULT_REPO, *flags]
    run = subprocess.run(
        [sys.executable, *map(str, script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
    )
    assert f"downloading {DEFAULT_REPO}/" in succeeded(run).stdout
    local = Workspace(tiny.checkpoint, resolve("cpu"), tmp_path / "artifacts", 2, "bfloat16")
    assert f"weights: {local.weights('dit')}" in run.stdout
