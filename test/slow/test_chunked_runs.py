"""The memory of a chunked clip of many windows."""

import golden_runs
from chunked_clips import CARRY, WINDOW, clip
from helpers import one_thread, read_video  # noqa: F401

from ltx_neuron.report.latency import Recorder

runs = golden_runs.runs  # a fixture
GROWTH = 1.05  # what allocators keep, and the index of the MP4


def test_forty_windows_need_no_more_memory_than_four(runs, tmp_path):
    def peak(windows: int) -> int:
        """The peak of this process and its ranks, in bytes."""
        job = clip(WINDOW + (WINDOW - CARRY) * (windows - 1))
        assert len(job.windows) == windows
        engine = runs.engine()
        engine.recorder = engine.residency.recorder = Recorder()
        runs.made(job, write=lambda clip: clip.write(tmp_path / "long.mp4"))
        assert read_video(tmp_path / "long.mp4")["video_seconds"] == job.size.seconds
        phases = engine.recorder.report({}, "cpu", 1, {}, {})["phases"]
        return max(phase["peak_rss_bytes"] for phase in phases)

    peak(4)  # loads models
    four, forty = peak(4), peak(40)
    print(f"\n4 windows: {four / 1e6:.0f} MB, 40 windows: {forty / 1e6:.0f} MB, {forty / four:.3f}")
    assert forty < GROWTH * four
