"""Checks and measures this toolkit on the machine at hand: docs/trainium.md, the first hour on the
chip.

    python -m pytest test/device --minutes 10
    python -m pytest test/device --minutes 60

The sections of ten minutes come first: doctor, a collective, and two blocks at full width, compared
with the CPU and timed graph by graph beside the plan's forecast. Then what the runtime does with a
graph's outputs; tiny models of LTX-2.3 and LTX-2.5 compiled, run and compared; a longer clip, the
other collectives, and tuning; and, where the checkpoint is given, the full model: sharded,
compiled, one step compared and timed, whole videos, models in turn and resident, and with frames
and sound that the ranks decode. Every section drives the real scripts in processes of their own.

What a whole checkpoint is wanted for comes last. With --minutes, a section that takes longer than
what is left, by an estimate, is left out, and one that runs when the time is over is stopped. A
section that fails is recorded with its error, and those that do not need it go on. The same command
with --lf runs what is not finished. With --profile cpu everything but the device itself runs on any
machine.

"Compared" is the three-way rule: rel_L2(device, fp32) <= 2 * rel_L2(CPU in bf16, fp32) + 0.005,
from equal noise and contexts. The fp32 reference of the full model wants its weights in host memory
and on the disk once more, as fp32 (74 GB).

The minutes are guesses from compile times that others published: not measured.
"""

import pytest

from device import comparisons as compared
from device import measurements as measured
from device.bench import demo, full, ltx25, tiny, wide
from device.report import SECTIONS, section  # noqa: F401

pytestmark = pytest.mark.timeout(0)  # a section's own is in device.report
FIRST_COLLECTIVE, *OTHER_COLLECTIVES = measured.COLLECTIVES


@section(minutes=0.5)
def test_doctor(bench, found):
    found.extend(compared.doctor(bench))


@section(minutes=1.5)
def test_a_collective(bench, found):
    found.extend(measured.collectives(bench, [FIRST_COLLECTIVE]))


@section(minutes=4)
def test_two_blocks_shard_and_compile(bench, found):
    found.extend(compared.wide_compiles(bench))


@section(minutes=2, needs=(test_two_blocks_shard_and_compile,))
def test_two_blocks_one_step_against_the_cpu(bench, found):
    found.extend(compared.one_step(bench, wide(bench)))


@section(minutes=1.5, needs=(test_two_blocks_shard_and_compile,))
def test_two_blocks_a_step_by_its_graphs(bench, found):
    found.extend(measured.wide_step_times(bench, wide(bench)))


@section(minutes=3)
def test_a_graphs_outputs_after_its_next_run(bench, found):
    found.extend(measured.outputs(bench))


@section(minutes=4)
def test_tiny_shard_and_compile(bench, found):
    found.extend(compared.tiny_compiles(bench))


@section(minutes=2, needs=(test_tiny_shard_and_compile,))
def test_tiny_one_step_against_the_cpu(bench, found):
    found.extend(compared.one_step(bench, tiny(bench)))


@section(minutes=4)
def test_ltx25_shard_and_compile(bench, found):
    found.extend(compared.ltx25_compiles(bench))


@section(minutes=2, needs=(test_ltx25_shard_and_compile,))
def test_ltx25_an_ancestral_step_against_the_cpu(bench, found):
    found.extend(compared.one_step(bench, ltx25(bench)))


@section(minutes=5, needs=(test_ltx25_shard_and_compile,))
def test_ltx25_a_video_in_two_stages_against_the_cpu(bench, found):
    found.extend(compared.tiny_video(bench, ltx25(bench)))


@section(minutes=6, needs=(test_ltx25_shard_and_compile,))
def test_ltx25_frames_of_the_diffusion_decoder_on_the_ranks(bench, found):
    found.extend(compared.decoded_on_ranks(bench, ltx25(bench)))


@section(minutes=6, needs=(test_two_blocks_shard_and_compile,))
def test_two_blocks_a_clip_by_its_graphs(bench, found):
    model = measured.timed_blocks(bench)
    found.append(compared.compiled(bench, model, gemma=False))
    found.extend(measured.wide_step_times(bench, model))


@section(minutes=3)
def test_collectives(bench, found):
    found.extend(measured.collectives(bench, OTHER_COLLECTIVES))


@section(minutes=8)
def test_groups_of_ranks_on_a_torus(bench, found):
    found.extend(measured.groups(bench))


@section(minutes=10, needs=(test_two_blocks_shard_and_compile,))
def test_two_blocks_tune(bench, found):
    found.extend(measured.tune(bench, measured.timed_blocks(bench)))


@section(minutes=5, needs=(test_tiny_shard_and_compile,))
def test_tiny_a_video_in_two_stages_against_the_cpu(bench, found):
    found.extend(compared.tiny_video(bench, tiny(bench)))


@section(minutes=6, needs=(test_tiny_shard_and_compile,))
def test_tiny_frames_decoded_on_the_ranks(bench, found):
    found.extend(compared.decoded_on_ranks(bench, tiny(bench)))


@section(minutes=3, needs=(test_tiny_shard_and_compile,))
def test_tiny_a_clip_encoded_on_the_ranks(bench, found):
    found.extend(compared.encoded_on_ranks(bench, tiny(bench)))


@section(minutes=5)
def test_demo_sound_decoded_on_the_ranks(bench, found):
    found.extend(compared.sound_on_ranks(bench, demo(bench)))


@section(minutes=10)
def test_full_shard(bench, found):
    found.append(compared.sharded(bench, full(bench)))


@section(minutes=30)
def test_full_compile(bench, found):
    found.append(compared.compiled(bench, full(bench)))


FULL = (test_full_shard, test_full_compile)


@section(minutes=5, needs=FULL)
def test_full_a_step_by_its_graphs(bench, found):
    found.extend(measured.step_times(bench, full(bench)))


@section(minutes=10, needs=FULL)
def test_full_a_video_models_in_turn(bench, found):
    found.extend(measured.in_turn(bench))


@section(minutes=10, needs=FULL)
def test_full_a_video_both_models_resident(bench, found):
    found.extend(measured.resident(bench))


@section(minutes=30, needs=FULL)
def test_full_one_step_against_the_cpu(bench, found):
    found.extend(compared.full_step(bench))


@section(minutes=60, needs=FULL)
def test_full_frames_decoded_on_the_ranks(bench, found):
    found.extend(compared.decoded_on_ranks(bench, full(bench)))


@section(minutes=60, needs=FULL)
def test_full_a_clip_encoded_on_the_ranks(bench, found):
    found.extend(compared.encoded_on_ranks(bench, full(bench)))


@section(minutes=30, needs=FULL)
def test_full_sound_decoded_on_the_ranks(bench, found):
    found.extend(compared.sound_on_ranks(bench, full(bench)))


@section(minutes=60, needs=FULL)
def test_full_tune(bench, found):
    found.extend(measured.tune(bench, full(bench)))
