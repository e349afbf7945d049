"""test/device/core_memory.py: device memory in use, by the driver's counters or by
neuron-monitor."""

import json
import os

import pytest
from device.core_memory import core_memory, first_line_of
from helpers import within

GIB = 2**30


def test_memory_in_use_is_read_core_by_core(tmp_path):
    for core, used in ((0, 5), (1, 7)):
        device = tmp_path / "sys/devices/virtual/neuron_device/neuron0"
        folder = device / f"neuron_core{core}/stats/memory_usage/device_mem"
        folder.mkdir(parents=True)
        (folder / "total").write_text(f"{used * GIB}\n")
    assert core_memory(tmp_path) == {"neuron0/neuron_core0": 5 * GIB, "neuron0/neuron_core1": 7 * GIB}
    assert core_memory(tmp_path / "elsewhere") == {}


def test_memory_in_use_is_found_where_a_driver_has_moved_its_counter_to(tmp_path):
    """Driver 2.31 "moved several nodes to new paths" (sysfs user guide, v2.33.0), we do not know
    where to: any folder of a core stands for it."""
    core = tmp_path / "sys/devices/virtual/neuron_device/neuron3/neuron_core2"
    for counter, used in (("device_mem", 5 * GIB), ("device_mem/tensors", 1), ("host_mem", 2)):
        (core / "memory" / counter).mkdir(parents=True, exist_ok=True)
        (core / "memory" / counter / "total").write_text(f"{used}\n")
    assert core_memory(tmp_path) == {"neuron3/neuron_core2": 5 * GIB}


def monitored(pid: int, cores: dict[str, int], error: str = "") -> dict:
    """A process's part of neuron-monitor's report."""
    usage = {core: {"constants": used - 2, "tensors": 2} for core, used in cores.items()}
    breakdown = {"host": {"tensors": 7}, "neuroncore_memory_usage": usage}
    memory = {"neuron_runtime_used_bytes": {"host": 7, "usage_breakdown": breakdown}}
    report = {} if error else {"memory_used": memory}
    return {"pid": pid, "neuron_runtime_tag": str(pid), "error": error, "report": report}


@pytest.fixture
def monitor(tmp_path, monkeypatch):
    """Put a neuron-monitor on PATH that prints a report for its configuration file and runs on, as
    neuron-monitor-user-guide.rst (aws-neuron-sdk 81ce03a, SDK 2.32) describes it."""

    def install(*processes: dict) -> None:
        hardware = {"neuron_device_count": 1, "neuroncore_per_device_count": 4}
        report = {"neuron_runtime_data": [*processes], "neuron_hardware_info": hardware}
        script = tmp_path / "bin/neuron-monitor"
        script.parent.mkdir()
        line = json.dumps(report)
        script.write_text(f"#!/bin/sh\ngrep -q memory_used \"$2\" && echo '{line}'\nexec sleep 60\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")

    return install


def test_where_the_driver_counts_no_memory_neuron_monitor_tells(tmp_path, monitor):
    """All processes on a core together; a core that nobody uses has 0 bytes."""
    gone = monitored(30, {}, error="the process has ended")
    monitor(monitored(10, {"0": 100, "2": 40}), monitored(20, {"2": 2}), gone)
    assert core_memory(tmp_path) == {
        "logical core 0": 100,
        "logical core 1": 0,
        "logical core 2": 42,
        "logical core 3": 0,
    }


def test_a_monitor_that_says_nothing_is_ended(tmp_path, monkeypatch):
    with within(30):
        assert first_line_of("yes", "no") == "no\n"  # it would print for ever
        monkeypatch.setattr("ltx_neuron.doctor.system.COMMAND_SECONDS", 0.2)
        assert first_line_of("sleep", "60") is None
    assert first_line_of("no-such-command-at-all") is None
