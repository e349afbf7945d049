"""Checks and measures this toolkit on the machine at hand: docs/trainium.md, the first hour on the chip.

    python -m pytest test/device --minutes 10

The sections of ten minutes come first, and what a whole checkpoint is wanted for last. Every section drives the real
scripts in processes of their own. With --minutes, one that takes longer than what is left, by an estimate, is left out,
and one that runs when the time is over is stopped. A section that fails is recorded, and those that do not need it go
on. With --profile cpu everything but the device itself runs on any machine.

"Compared" is the three-way rule: rel_L2(device, fp32) <= 2 * rel_L2(CPU in bf16, fp32) + 0.005, from equal noise and
contexts. The fp32 reference of the full model wants its weights in host memory and on the disk once more (74 GB).

The minutes are guesses from compile times that others published: not measured.
"""

from collections.abc import Callable, Iterable

import pytest

from device import comparisons as compared
from device import measurements as measured
from device.bench import Bench, Model, demo, full, ltx25, tiny, wide
from device.report import Section

pytestmark = pytest.mark.timeout(0)  # a section's own is in device.report
FIRST_COLLECTIVE, *OTHER_COLLECTIVES = measured.COLLECTIVES


def of(section: Callable[[Bench, Model], Iterable[str]], model: Callable[[Bench], Model]):
    return lambda bench: section(bench, model(bench))


def clip_by_its_graphs(bench: Bench) -> Iterable[str]:
    model = measured.timed_blocks(bench)
    yield from compared.compiles(bench, model, gemma=False)
    yield from measured.wide_step_times(bench, model)


BLOCKS, TINY, LTX25 = "two_blocks_shard_and_compile", "tiny_shard_and_compile", "ltx25_shard_and_compile"
FULL = ("full_shard_and_compile",)
SECTIONS = [
    Section("doctor", 0.5, compared.doctor),
    Section("a_collective", 1.5, lambda bench: measured.collectives(bench, [FIRST_COLLECTIVE])),
    Section(BLOCKS, 4, compared.wide_compiles),
    Section("two_blocks_one_step_against_the_cpu", 2, of(compared.one_step, wide), (BLOCKS,)),
    Section("two_blocks_a_step_by_its_graphs", 1.5, of(measured.wide_step_times, wide), (BLOCKS,)),
    Section("a_graphs_outputs_after_its_next_run", 3, measured.outputs),
    Section(TINY, 4, compared.tiny_compiles),
    Section("tiny_one_step_against_the_cpu", 2, of(compared.one_step, tiny), (TINY,)),
    Section(LTX25, 4, compared.ltx25_compiles),
    Section("ltx25_an_ancestral_step_against_the_cpu", 2, of(compared.one_step, ltx25), (LTX25,)),
    Section("ltx25_a_video_in_two_stages_against_the_cpu", 5, of(compared.tiny_video, ltx25), (LTX25,)),
    Section("ltx25_frames_of_the_diffusion_decoder_on_the_ranks", 6, of(compared.decoded_on_ranks, ltx25), (LTX25,)),
    Section("two_blocks_a_clip_by_its_graphs", 6, clip_by_its_graphs, (BLOCKS,)),
    Section("collectives", 3, lambda bench: measured.collectives(bench, OTHER_COLLECTIVES)),
    Section("tiny_a_video_in_two_stages_against_the_cpu", 5, of(compared.tiny_video, tiny), (TINY,)),
    Section("tiny_frames_decoded_on_the_ranks", 6, of(compared.decoded_on_ranks, tiny), (TINY,)),
    Section("tiny_a_clip_encoded_on_the_ranks", 3, of(compared.encoded_on_ranks, tiny), (TINY,)),
    Section("demo_sound_decoded_on_the_ranks", 5, of(compared.sound_on_ranks, demo)),
    Section(*FULL, 40, of(compared.compiles, full)),
    Section("full_a_step_by_its_graphs", 5, of(measured.step_times, full), FULL),
    Section("full_one_step_against_the_cpu", 30, of(compared.one_step, full), FULL),
    Section("full_frames_decoded_on_the_ranks", 60, of(compared.decoded_on_ranks, full), FULL),
    Section("full_a_clip_encoded_on_the_ranks", 60, of(compared.encoded_on_ranks, full), FULL),
    Section("full_sound_decoded_on_the_ranks", 30, of(compared.sound_on_ranks, full), FULL),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_section(bench, lines, section):
    lines.extend(section.run(bench))
