"""What was measured of this machine is stored once, in the artifacts, and decides from then on."""

import os

import pytest
import torch
from jobs import make_job

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.profiles import PROFILES
from ltx_neuron.engine.resume import restore_state, write_run_tensors
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json
from ltx_neuron.host import arithmetic as arithmetic_module
from ltx_neuron.host.arithmetic import (
    FLOAT32,
    Arithmetic,
    arithmetic,
    bfloat16_is_faster,
    choices_file,
    fastest_libraries,
    store_choices,
    this_machine,
)
from ltx_neuron.job import Size


def choice(folder, key: str, measure):
    return arithmetic_module._choice(folder, key, measure, [1, 2, 8])


def read(folder) -> dict:
    return arithmetic_module._stored_choices(choices_file(folder))


def write(folder, **choices) -> None:
    write_json(choices_file(folder), {"machine": this_machine(), "choices": choices})


@pytest.fixture
def another_process(monkeypatch):
    """Called: what a process holds in memory is forgotten."""

    def forget():
        monkeypatch.setattr(arithmetic_module, "_choices", {})
        for name in ("print_once", "_measured_bfloat16", "_measured_libraries"):
            getattr(arithmetic_module, name).cache_clear()

    return forget


@pytest.fixture(autouse=True)
def alone(another_process):
    """No test sees what another one measured."""
    another_process()
    yield
    another_process()


def fail():
    raise AssertionError("measured again")


def test_a_measurement_is_stored_once_a_run_is_accepted_and_not_repeated(tmp_path, another_process):
    assert read(tmp_path) == {}
    assert choice(tmp_path, "speed", lambda: 2) == 2
    assert choice(tmp_path, "speed", fail) == 2  # this process remembers
    assert list(tmp_path.iterdir()) == []
    another_process()
    assert choice(tmp_path, "speed", lambda: 8) == 8
    store_choices(tmp_path)
    another_process()
    assert choice(tmp_path, "speed", fail) == 8
    assert choice(tmp_path, "other", lambda: 1) == 1
    store_choices(tmp_path)
    assert read(tmp_path) == {"speed": 8, "other": 1}
    (path,) = (tmp_path / "calibration").iterdir()
    assert path == choices_file(tmp_path) and '"processor"' in path.read_text()


def test_of_two_that_measure_at_a_time_later_runs_take_the_first_ones_choice(tmp_path, another_process):
    assert choice(tmp_path, "speed", lambda: 8) == 8
    assert choice(tmp_path, "other", lambda: 1) == 1
    first = dict(arithmetic_module._choices)
    another_process()
    assert choice(tmp_path, "speed", lambda: 2) == 2
    store_choices(tmp_path)
    arithmetic_module._choices.update(first)
    store_choices(tmp_path)
    another_process()
    assert choice(tmp_path, "speed", fail) == 2 and choice(tmp_path, "other", fail) == 1


def test_a_limit_on_instructions_and_another_cpu_are_other_machines(tmp_path, monkeypatch):
    write(tmp_path, speed=8)
    with monkeypatch.context() as limited:
        limited.setenv("MKL_CBWR", "COMPATIBLE")
        assert read(tmp_path) == {}
    with monkeypatch.context() as moved:
        moved.setattr(arithmetic_module.machine, "processor", lambda: "another CPU")
        assert read(tmp_path) == {}
    assert read(tmp_path) == {"speed": 8}


@pytest.mark.parametrize("content", ["", "[1, 2", "[]", '{"choices": {"speed": 2}}', "a list", "a named pipe"], ids=str)
def test_a_damaged_file_is_reported_and_measured_anew(tmp_path, capsys, content):
    path = choices_file(tmp_path)
    path.parent.mkdir()
    if content == "a named pipe":
        os.mkfifo(path)
    elif content == "a list":
        write_json(path, {"machine": this_machine(), "choices": [1]})
    else:
        path.write_text(content)
    assert choice(tmp_path, "speed", lambda: 8) == 8
    printed = capsys.readouterr().out
    assert str(path) in printed and printed.endswith("; measuring this machine again\n")
    assert choice(tmp_path, "speed", fail) == 8


@pytest.mark.parametrize("folder", ["", "typo"])
def test_where_nothing_can_be_written_it_is_measured_once_a_process(tmp_path, capsys, folder):
    # A file where the folder would be: this process may be root, whom no permission stops.
    (tmp_path / "calibration").write_text("")
    assert choice(tmp_path / folder, "speed", lambda: 8) == 8
    store_choices(tmp_path / folder)
    store_choices(tmp_path / folder)
    assert choice(tmp_path / folder, "speed", fail) == 8
    assert read(tmp_path / folder) == {} and not (tmp_path / "typo").exists()
    assert capsys.readouterr().out.count("measurements are not saved") == (folder == "")


@pytest.mark.parametrize(("stored", "faster"), [(False, False), (True, True), (8, None), ("true", None)])
def test_the_stored_choice_of_dtype_is_taken_and_no_other_value(tmp_path, stored, faster):
    write(tmp_path, bfloat16_is_faster=stored)
    faster = bfloat16_is_faster() if faster is None else faster
    expected = Arithmetic(torch.bfloat16) if faster else FLOAT32
    assert arithmetic("auto", torch.bfloat16, tmp_path) == expected
    new = tmp_path / "new"
    new.mkdir()
    for dtype, choices in ((torch.float32, {}), (torch.bfloat16, {"bfloat16_is_faster": bfloat16_is_faster()})):
        arithmetic("auto", dtype, new)  # stored by the first run that needs it
        store_choices(new)
        assert read(new) == choices


OTHERS = {"few": "onednn", "many": "blas"}


def test_the_libraries_of_products_are_measured_once_a_machine_and_stored(tmp_path, another_process):
    measured = fastest_libraries(tmp_path)
    store_choices(tmp_path)
    assert read(tmp_path) == {"float32_products": measured._asdict()}
    assert {*measured} <= {"blas", "onednn"}
    write(tmp_path, float32_products=OTHERS)
    assert fastest_libraries(tmp_path) == measured  # of this process, to its end
    another_process()
    assert fastest_libraries(tmp_path)._asdict() == OTHERS


@pytest.mark.parametrize(
    ("rounds", "fastest"),
    [
        ([*[(2, 1)] * 4, (9, 8)], "b"),  # wins every round: no other measurement
        ([*[(2, 3)] * 4, (4, 1), *[(3, 2)] * 5], "b"),  # the machine was busy in a first round: once more
        ([(5, 4), (3, 6), (9, 7), (9, 7), (9, 7)] * 3, "a"),  # it stays busy: the least times
    ],
    ids=["all rounds agree", "rounds disagree once", "rounds disagree"],
)
def test_the_fastest_library_wins_every_round_or_has_the_least_time(monkeypatch, rounds, fastest):
    left = [{"a": a, "b": b} for a, b in (*rounds, (1, 2))]
    monkeypatch.setattr(arithmetic_module, "_alternate", lambda _, count: [left.pop(0) for _ in range(count)])
    assert arithmetic_module._fastest({"a": None, "b": None}) == fastest and len(left) == 1


def test_a_runs_identity_and_its_prompt_cache_name_the_libraries(tiny, tmp_path):
    write(tmp_path, float32_products=OTHERS)
    workspace = Workspace(tiny.checkpoint, PROFILES["cpu"], tmp_path, 1, "float32", gemma_root=tiny.gemma_root)
    assert workspace.identity["host_products"] == OTHERS
    assert workspace.host_text_encoder().libraries._asdict() == OTHERS
    assert workspace.prompt_cache(neuron_gemma=False).identity["host_products"] == OTHERS


def test_a_run_begun_with_another_choice_is_resumed_with_a_message(tmp_path, capsys):
    path, job = tmp_path / "out.resume.safetensors", make_job("rain", Size(64, 64, 9))
    identity = {"seed": 10, "host_dtype": "bfloat16"}
    tensors = {
        "attention_mask": torch.ones(1, 1024, dtype=torch.int64),
        "video_context": torch.zeros(1, 1024, 4),
        "audio_context": torch.zeros(1, 1024, 2),
        "s1_video": torch.zeros(1, 128, 2, 2, 2),
        "s1_audio": torch.zeros(1, 8, 9, 16),
    }
    write_run_tensors(path, tensors, identity)
    here = identity | {"host_dtype": "float32"}
    run = restore_state(path, job, here, torch.float32)
    assert run.stages_left == []
    assert "host_dtype bfloat16, this machine's is float32" in capsys.readouterr().out
    with pytest.raises(UserError, match="is from another run: seed: got 10, wanted 11"):
        restore_state(path, job, here | {"seed": 11}, torch.float32)
    # A worker's next attempt may be on another machine: it begins anew rather than mix the two.
    with pytest.raises(UserError, match="host_dtype: got bfloat16, wanted float32"):
        restore_state(path, job, here, torch.float32, exact=True)
