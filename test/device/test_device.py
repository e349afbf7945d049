"""Checks and measures this toolkit on the machine at hand: docs/trainium.md, the first hour on the chip.

    python -m pytest test/device --minutes 10

The most important sections come first, and what a whole checkpoint is wanted for last. Each drives the real scripts in
processes of their own. With --minutes, one that takes longer than what is left, by an estimate, is skipped, and one
that runs when the time is over is stopped. With --profile cpu everything but the device itself runs on any machine.

"Compared" is the three-way rule: rel_L2(device, fp32) <= 2 * rel_L2(CPU in bf16, fp32) + 0.005, from equal noise and
contexts. The minutes are guesses from compile times that others published: not measured.
"""

from collections.abc import Callable, Iterable

import pytest

from device import comparisons as compared
from device import measurements as measured
from device.bench import Bench, Model, Section, demo, full, ltx25, tiny, wide

pytestmark = pytest.mark.timeout(0)  # a section's own is in device.bench
FIRST_COLLECTIVE, *OTHER_COLLECTIVES = measured.COLLECTIVES


def of(section: Callable[[Bench, Model], Iterable[str]], model: Callable[[Bench], Model]):
    return lambda bench: section(bench, model(bench))


BLOCKS, TINY, LTX25, DEMO, FULL = (
    f"{name}_shard_and_compile" for name in ("two_blocks", "tiny", "ltx25", "demo", "full")
)
SECTIONS = [
    Section("doctor", 0.5, compared.doctor),
    Section("a_collective", 1.5, lambda bench: measured.collectives(bench, [FIRST_COLLECTIVE])),
    Section(BLOCKS, 4, compared.wide_compiles),
    Section("two_blocks_one_step_against_the_cpu", 3, of(compared.one_step, wide), (BLOCKS,)),
    Section("a_graphs_outputs_after_its_next_run", 3, measured.outputs),
    Section(TINY, 4, compared.tiny_compiles),
    Section("tiny_one_step_against_the_cpu", 2, of(compared.one_step, tiny), (TINY,)),
    Section(LTX25, 4, compared.ltx25_compiles),
    Section("ltx25_one_step_against_the_cpu", 2, of(compared.one_step, ltx25), (LTX25,)),
    Section("ltx25_a_video_in_two_stages_against_the_cpu", 5, of(compared.tiny_video, ltx25), (LTX25,)),
    Section("ltx25_frames_of_the_diffusion_decoder_on_the_ranks", 6, of(compared.decoded_on_ranks, ltx25), (LTX25,)),
    Section("two_blocks_steps_of_a_clip", 6, measured.wide_steps, (BLOCKS,)),
    Section("collectives", 3, lambda bench: measured.collectives(bench, OTHER_COLLECTIVES)),
    Section("tiny_a_video_in_two_stages_against_the_cpu", 5, of(compared.tiny_video, tiny), (TINY,)),
    Section(DEMO, 4, of(compared.compiles, demo)),
    Section("demo_a_clip_encoded_and_decoded_on_the_ranks", 10, of(compared.clip_on_ranks, demo), (DEMO,)),
    Section(FULL, 40, of(compared.compiles, full)),
    Section("full_one_step_against_the_cpu", 30, of(compared.one_step, full), (FULL,)),
    Section("full_a_clip_encoded_and_decoded_on_the_ranks", 120, of(compared.clip_on_ranks, full), (FULL,)),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_section(bench, section):
    bench.begin(section)
    for line in section.run(bench):
        bench.say(line)
