"""The benchmarks of the host's work run at tiny widths and print their results."""

import json
import re
import subprocess
import sys

from conftest import ROOT

HOST_BYTES = 1024  # what a step may send to the device; the times are not a test's to judge


def printed(script: str, *flags: str) -> str:
    command = [sys.executable, ROOT / "benchmarks" / script, "--tiny", *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_host_step_times_both_kinds_of_video_and_sends_a_step_number_only():
    last = json.loads(printed("host_step.py", "--repeats", "1").splitlines()[-1])
    assert [*last] == ["64x64x9 text to video", "64x64x9 image to video"]
    assert all(0 < case["bytes"] <= HOST_BYTES for case in last.values())


def test_text_encode_compares_equal_contexts_of_ours_and_the_reference():
    output = printed("text_encode.py", "--repeats", "1", "--threads", "1")
    distances = re.search(r"relative L2: hidden_states (\S+), video (\S+), audio (\S+)", output)
    assert max(map(float, distances.groups())) < 1e-5, output
    assert re.fullmatch(r"[\d.]+ times as fast as the reference", output.splitlines()[-1])


def test_upsample_compares_ours_with_ltx_core_in_both_dtypes():
    output = printed("upsample.py", "--repeats", "1", "--threads", "1")
    models = re.findall(r"(.*): ours is [\d.]+ times as fast as ltx-core float32 and", output)
    assert models == ["spatial upsampler", "image encoder"], output


def test_vae_encode_compares_ours_with_ltx_core_in_both_dtypes():
    small = ("--repeats", "1", "--threads", "1", *("--height", "64", "--width", "64"))
    output = printed("vae_encode.py", *small, "--num-frames", "9")
    ratios = re.findall(r"(.*) is [\d.]+ times as fast as (.*), [\d.]+ times in CPU", output)
    theirs = ("ltx-core float32", "ltx-core bfloat16")
    assert ratios == [(ours, other) for ours in ("ours float32", "ours") for other in theirs]
    distances = dict(re.findall(r"(\S.*\S) +(\S+) from ltx-core float32", output))
    assert float(distances["ours float32"]) < 1e-5, output


def test_the_table_lists_every_script_and_every_result():
    table = (ROOT / "benchmarks/README.md").read_text()
    scripts = [path.name for path in (ROOT / "benchmarks").glob("*.py")]
    results = [path.name for path in (ROOT / "benchmarks").glob("*.md") if path.stem != "README"]
    assert [name for name in scripts if f"`{name}`" not in table] == []
    assert [name for name in results if f"]({name})" not in table] == []
