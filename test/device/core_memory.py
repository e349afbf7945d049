"""Device memory in use, core by core: what the driver counts, else what neuron-monitor reports."""

import contextlib
import json
import subprocess
import tempfile
import threading
from pathlib import Path

from ltx_neuron.doctor import system

# What neuron-monitor is asked for; every 5 seconds without a period.
_MONITORED = {
    "period": "1s",
    "neuron_runtimes": [{"tag_filter": ".*", "metrics": [{"type": "memory_used"}]}],
    "system_metrics": [],
}


def core_memory(root: Path) -> dict[str, int]:
    """Bytes of device memory in use, by core: "neuron0/neuron_core1" as the driver counts them,
    "logical core 1" where only neuron-monitor tells, which is started for it."""
    return counted_memory(root) or _monitored_memory()


def counted_memory(root: Path) -> dict[str, int]:
    """The driver's own counters, by core; reading them starts no process.

    The counter `total` is what is used now. To driver 2.30 it lies in stats/memory_usage/ of the
    core's folder; 2.31 "moved several nodes to new paths", of which we know no list, so it is
    looked for by its name (neuron-sysfs-user-guide of the SDK's documentation, 2.32 and 2.33).
    """
    used = {}
    base = root / "sys/devices/virtual/neuron_device"
    for path in sorted(base.glob("neuron*/neuron_core*/**/device_mem/total")):
        with contextlib.suppress(OSError, ValueError):
            used["/".join(path.relative_to(base).parts[:2])] = int(path.read_text())
    return used


def _monitored_memory() -> dict[str, int]:
    """As neuron-monitor reports it: every logical core of the machine, with what all processes have
    on it together (neuron-monitor-user-guide.rst, SDK 2.32). Empty where it is absent or not
    understood."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        json.dump(_MONITORED, config)
        config.flush()
        line = first_line_of("neuron-monitor", "-c", config.name)
    try:
        report = json.loads(line or "")
        hardware = report["neuron_hardware_info"]
        count = hardware["neuron_device_count"] * hardware["neuroncore_per_device_count"]
        used = dict.fromkeys(range(count), 0)
        for process in report["neuron_runtime_data"] or ():
            if not process.get("error"):
                memory = process["report"]["memory_used"]["neuron_runtime_used_bytes"]
                cores = memory["usage_breakdown"]["neuroncore_memory_usage"]
                for core, parts in cores.items():
                    used[int(core)] = used.get(int(core), 0) + sum(parts.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {f"logical core {core}": size for core, size in sorted(used.items())}


def first_line_of(*command: str) -> str | None:
    """The first line that a command prints which runs on until it is ended; None where it is
    absent or prints none in time."""
    path = system.path_of(command[0])
    if path is None:
        return None
    try:
        process = subprocess.Popen([path, *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    with process:
        timer = threading.Timer(system.COMMAND_SECONDS, process.kill)
        timer.start()
        try:
            return process.stdout.readline().decode(errors="replace") or None
        finally:
            timer.cancel()
            process.kill()
