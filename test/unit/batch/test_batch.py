"""Prompts files: every line is checked before anything runs; what failed or changed runs again, and no more."""

import csv
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import locked, said_to_an_ordinary_user
from safetensors.torch import save_file
from typed import parsed, said

from ltx_neuron import batch
from ltx_neuron.batch import RESULTS, prompts_file, read_lines
from ltx_neuron.engine.decode import JobFailure
from ltx_neuron.engine.outputs import write_run_tensors
from ltx_neuron.errors import UserError
from ltx_neuron.files import read_json
from ltx_neuron.flags import job_of_line
from ltx_neuron.job import Job


def read_file(folder, content: str | bytes, flags: str = "", identity: str = "a") -> list[batch.Line]:
    """The lines of a file of any content. flags: of the command that has the file."""
    path = folder / "jobs.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_lines(path, job_of_line(parsed(*flags.split())), {"checkpoint": identity})


def read(folder, *lines, **how) -> list[batch.Line]:
    """A line that is not text is written as JSON."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return read_file(folder, text, **how)


COMMAND = "--recipe dev --height 64 --width 192 --num-frames 9 --seed 3"
A, B = __file__, pytest.__file__
# A line -> the flags that make the same job
LINES = [
    ({"two_stage": None, "upscale": None}, ""),
    ({"width": 128, "seed": -7, "frame_rate": 12.5}, "--width 128 --seed -7 --frame-rate 12.5"),
    ({"two_stage": True, "negative_prompt": "b"}, "--two-stage --negative-prompt b"),
    ({"num-frames": 17}, "--num-frames 17"),
    ({"num_frames": "17"}, "--num-frames 17"),
    ({"fps": 30}, "--frame-rate 30"),
    ({"image": A}, f"--image {A}"),
    ({"image": [A, 0, 0.5]}, f"--image {A} 0 0.5"),
    ({}, ""),  # no image of another line
    ({"image": [[A], [B, 8, 0.25, 10]]}, f"--image {A} --image {B} 8 0.25 10"),
    ({"video_cfg_guidance_scale": 2.0, "audio-stg-blocks": [1, 2]}, "--guidance video_cfg=2 audio_stg_blocks=1,2"),
]


def test_a_line_makes_the_job_of_its_flags_which_take_the_place_of_the_commands_own(tmp_path):
    lines = read(tmp_path, *({"prompt": "rain"} | line for line, _ in LINES), flags=COMMAND)
    for line, (_, typed) in zip(lines, LINES, strict=True):
        assert line.job == said(*COMMAND.split(), *typed.split())
    assert [line.file for line in lines[:2]] == ["0001.mp4", "0002.mp4"]


def test_prompts_keep_their_letters_and_empty_lines_count_but_are_skipped(tmp_path):
    prompts = ["--seed 5", "« Möwe » – 海", "a=b 'c' \"d\"", "line\nbreak"]
    lines = read(tmp_path, "", *({"prompt": prompt} for prompt in prompts), "   \t", "\r", {"prompt": "b"}, "")
    assert [(line.number, line.job.prompt) for line in lines] == [*enumerate(prompts, 2), (8, "b")]


def test_files_that_are_absent_no_files_or_locked_are_refused_by_their_flags(tmp_path):
    absent, pipe, folder = tmp_path / "absent", tmp_path / "pipe", tmp_path / "folder"
    with pytest.raises(UserError, match=f"line 2: --lora {absent}: no such file"):
        read(tmp_path, "", {"prompt": "b", "lora": str(absent)})
    os.mkfifo(pipe)
    job_of = job_of_line(parsed())
    for path, problem in (absent, "no such file"), (pipe, "that is a named pipe, wanted.*one JSON object"):
        with pytest.raises(UserError, match=f"{path.name}: {problem}"):
            read_lines(path, job_of, {})
    folder.mkdir()
    with locked(folder):
        problem = said_to_an_ordinary_user(lambda: read_lines(folder / "jobs.jsonl", job_of, {}))
        assert problem.startswith("NoPermission: --prompts-file")
        problem = said_to_an_ordinary_user(lambda: read(tmp_path, {"prompt": "a", "image": str(folder / "a.png")}))
        assert "you may not read or write it, or not enter its folder\n" in problem


def sheet(delimiter: str = ",", end: str = "\r\n", rows: tuple = ()) -> str:
    """A table as spreadsheets write it, with a prompt over two lines in the first of two rows."""
    file = io.StringIO(newline="")
    header = ("Prompt", "Num Frames", "seed", "two-stage", "")
    first = (f'waves{delimiter} "loud"\n– no wind', 9, 2, "TRUE", "")
    rows = rows or (header, first, ("",) * 5, ("rain", "", "", "", ""))
    csv.writer(file, delimiter=delimiter, lineterminator=end).writerows(rows)
    return file.getvalue()


TWO = [{"prompt": "a", "seed": 2}, {"prompt": "b"}]
FORMS = {
    "a CSV with a mark of its byte order": ("\ufeff" + sheet(), [2, 5]),
    "with tabs in UTF-16": (sheet("\t").encode("utf-16"), [2, 5]),
    "in UTF-16 without a mark": (sheet("\t").encode("utf-16-le"), [2, 5]),
    "of a Mac": (sheet(end="\r"), [2, 5]),
    "of Unix, its last line open": (sheet(end="\n").rstrip(), [2, 5]),
    "that names its delimiter": ("sep=;\r\n" + sheet(";"), [3, 6]),
    "an array": (json.dumps(TWO), [1, 2]),
    "an array over lines": ("\ufeff\n" + json.dumps(TWO, indent=2), [1, 2]),
    "objects in UTF-16": ('{"prompt": "a", "seed": 2}\n\n{"prompt": "b"}\n'.encode("utf-16"), [1, 3]),
}


@pytest.mark.parametrize(("content", "numbers"), FORMS.values(), ids=FORMS)
def test_a_spreadsheets_csv_and_a_json_array_are_read(tmp_path, content, numbers):
    lines = read_file(tmp_path, content)
    first, second = (line.job for line in lines)
    assert [line.number for line in lines] == numbers and (first.seed, second.seed) == (2, 10)
    if numbers[0] > 1:
        assert first.prompt in [f'waves{d} "loud"\n– no wind' for d in ",;\t"]
        assert (first.size.num_frames, first.size.two_stage) == (9, True)
        assert (second.prompt, second.size.num_frames) == ("rain", 121)


def test_cells_have_the_types_of_json_and_make_the_same_jobs(tmp_path):
    image = [__file__, 8, 0.5]
    cells = {"prompt": "2024", "negative-prompt": "true", "recipe": "dev", "frame rate": "12,5", "num_frames": "9.0"}
    cells |= {"two_stage": "False", "video_stg_blocks": "[1, 2]", "--image": json.dumps(image)}
    (row,) = read_file(tmp_path, sheet(";", rows=(tuple(cells), tuple(cells.values()))))
    values = {"prompt": "2024", "negative_prompt": "true", "recipe": "dev", "frame_rate": 12.5, "num_frames": 9}
    (line,) = read(tmp_path, values | {"two_stage": False, "video_stg_blocks": [1, 2], "image": image})
    assert (row.job, row.digest) == (line.job, line.digest)


FINE = '{"prompt": "fine"}\n'
PLAIN = "is neither a JSON object nor a CSV header with a column prompt"
UNREADABLE = {
    "nothing": ("\n  ", "has no lines"),
    "nested too deep": (FINE + "\n" + "[" * 100_000, "line 3: not JSON"),
    "a typo": (FINE + '\n{"sead": 1}', "jsonl: nothing was run.\nline 3: unknown key 'sead'; did you mean 'seed'?"),
    "a key of the command": ('{"prompt": "a", "checkpoint_path": "x"}', "line 1: unknown key 'checkpoint_path'"),
    "no prompt": ('{"seed": 1}', "line 1: --prompt is empty"),
    "a switch in a list": ('{"prompt": "a", "recipe": "dev", "audio-stg-blocks": [true]}', "--audio-stg-blocks: got"),
    "text as a switch": ('{"prompt": "a", "two_stage": "yes"}', "--two-stage: got 'yes', wanted a valid boolean"),
    "a key twice inside": ('{"prompt": "a", "seed": {"b": 1, "b": 2}}', "line 1: the key 'b' is given twice"),
    "a key in two spellings": ('{"prompt": "a", "fps": 24, "frame_rate": 25}', "'fps' and 'frame_rate' are the same"),
    "prompts as text": ("waves crash, loudly\na dog runs\n" * 2000, "line 1: 'waves", PLAIN),
    "Python's dicts": ("{'prompt': 'a', 'b': None}\n" * 3000, "line 1: not JSON: single quot"),
    "Python's True": ('{"prompt": "a", "two_stage": True}\n', "line 1: not JSON: True, False and"),
    "comments": ('# mine\n{"prompt": "a"}\n', "line 1: not JSON: a comment"),
    "curly quotation marks": ("{“prompt”: “a”}", "line 1: not JSON: curly"),
    "a path of Windows": (r'{"prompt": "a", "image": "C:\Users\a.png"}', "line 1: not JSON: a single"),
    "an object over lines": (json.dumps({"prompt": "a"}, indent=2), "line 1: not JSON: the object"),
    "commas after objects": ('{"prompt": "a"},\n' * 3000, "line 10: not JSON: a comma after the", "and 2,990 more"),
    "an array with a mistake": ('[\n{"prompt": "a"},\n{"prompt": "b",}\n]', "line 3: not JSON: a comma after the last"),
    "an array of texts": ('["a", "b"]', "object 1: got str, wanted a JSON object"),
    "a column twice": ("prompt,seed,Seed\na,1,2\n", "line 1: the key 'seed' is given twice"),
    "commas in a text": ("prompt,seed\na,1\n" + "a, b,1\n" * 3000, "line 3: 3 cells, and the header"),
    "an open quotation mark": ('prompt,seed\na,1\n"b,2\n', 'line 3: an open "'),
    "another encoding": ("prompt\na\nMöwe\n".encode("cp1252"), "line 3: --prompt is not UTF-8"),
    "a spreadsheet": (b"PK\3\4\x14\0rest", "save a spreadsheet as CSV UTF-8"),
    "a video": (b"\0\0\0\x20ftypisom\0\0\2\0", "is not text"),
}


@pytest.mark.parametrize(("content", "words"), [(row[0], row[1:]) for row in UNREADABLE.values()], ids=UNREADABLE)
def test_what_is_wrong_with_a_file_is_said_with_its_first_bad_lines_and_the_reason(tmp_path, content, words):
    with pytest.raises(UserError) as error:
        read_file(tmp_path, content)
    problem = str(error.value)
    assert [text for text in words if text not in problem] == []
    assert problem.count(prompts_file.WANTED) <= 1 and len(problem.splitlines()) <= 16
    if "not JSON" in problem or PLAIN in problem or "is not text" in problem:
        assert problem.endswith(prompts_file.WANTED)


def write(result, path):
    if result.job.prompt == "unwritable":
        raise OSError("disk full")
    path.write_text(result.job.prompt)


def run(lines, folder, fails: str = "", killed_before: str = "", last: str = "") -> tuple[list[dict], list[str]]:
    """The entries of all lines, and the prompts of those that ran, without models."""
    ran = []

    def run_jobs(jobs, isolate, resume, write):
        assert isolate and not any(map(resume, jobs))
        for job in sorted(jobs, key=lambda job: job.prompt == last):
            if job.prompt == killed_before:
                raise KeyboardInterrupt
            ran.append(job.prompt)
            outcome = SimpleNamespace(job=job)
            try:
                if job.prompt == fails:
                    raise ValueError("it broke")
                write(outcome)
            except Exception as error:  # an error of it is the job's
                outcome = JobFailure(job, error)
            yield outcome

    engine = SimpleNamespace(run=run_jobs, workspace=SimpleNamespace(dtype=torch.float32))
    return batch.run(lines, engine, folder / "out", write, Job.describe), ran


def prompts(folder, names: str):
    return read(folder, *({"prompt": name} for name in names.split()))


def test_every_line_is_recorded_in_the_files_order_and_those_that_failed_alone_run_again(tmp_path, capsys):
    lines = prompts(tmp_path, "unwritable b c d")
    entries, ran = run(lines, tmp_path, fails="b", last="c")
    assert ran == ["unwritable", "b", "d", "c"] and read_json(tmp_path / "out" / RESULTS) == {"lines": entries}
    assert [(entry["line"], entry["prompt"]) for entry in entries] == [(1, "unwritable"), (2, "b"), (3, "c"), (4, "d")]
    assert [entry["status"] for entry in entries] == ["failed", "failed", "done", "done"]
    assert [entry.get("error") for entry in entries[:3]] == ["OSError: disk full", "ValueError: it broke", None]
    assert [entry.get("output") for entry in entries] == [None, None, "0003.mp4", "0004.mp4"]
    assert [(tmp_path / "out" / entry["output"]).read_text() for entry in entries[2:]] == ["c", "d"]
    assert "line 2 failed: it broke" in capsys.readouterr().out
    entries, ran = run(lines, tmp_path)
    assert ran == ["unwritable", "b"] and [entry["status"] for entry in entries] == ["failed", "done", "done", "done"]


def test_what_was_done_before_a_kill_is_not_run_again_but_where_its_video_is_gone(tmp_path, capsys):
    lines = prompts(tmp_path, "a b c")
    with pytest.raises(KeyboardInterrupt):
        run(lines, tmp_path, killed_before="b")
    (entry,) = read_json(tmp_path / "out" / RESULTS)["lines"]
    assert (entry["line"], entry["status"]) == (1, "done")
    entries, ran = run(lines, tmp_path)
    assert ran == ["b", "c"] and [entry["status"] for entry in entries] == ["done"] * 3
    assert "resumed: 1 of 3 lines were done before" in capsys.readouterr().out
    assert run(lines, tmp_path)[1] == []
    (tmp_path / "out" / "0002.mp4").unlink()
    assert run(lines, tmp_path)[1] == ["b"]


def test_a_changed_line_runs_again_alone(tmp_path):
    a, b, c = ({"prompt": name} for name in "abc")
    run(read(tmp_path, a, b, c), tmp_path)
    assert run(read(tmp_path, a, b | {"seed": 11}, c), tmp_path)[1] == ["b"]
    entries, ran = run(read(tmp_path, a, {"prompt": "b2"}, c), tmp_path)
    assert ran == ["b2"] and [entry["prompt"] for entry in entries] == ["a", "b2", "c"]
    for how in ({"flags": "--seed 77"}, {"identity": "another checkpoint"}):
        assert run(read(tmp_path, a, b, **how), tmp_path)[1] == ["a", "b"]


def test_a_state_that_is_not_the_lines_own_is_not_taken_up(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    state, lines = tmp_path / "out/0001.resume.safetensors", prompts(tmp_path, "a")
    for write_state in (Path.touch, lambda path: write_run_tensors(path, {}, {"prompt": "b"})):
        write_state(state)
        assert run(lines, tmp_path)[1] == ["a"] and not state.exists()
        assert "line 1 starts over" in capsys.readouterr().out
        (tmp_path / "out" / RESULTS).unlink()


def test_a_results_file_that_is_none_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    for content in ("{", "[]", '{"lines": [{}]}'):
        (tmp_path / "out" / RESULTS).write_text(content)
        with pytest.raises(UserError, match="is not a results file; delete it"):
            run(prompts(tmp_path, "a"), tmp_path)
        assert (tmp_path / "out" / RESULTS).read_text() == content


def test_a_file_of_a_line_is_known_by_its_content_wherever_it_lies(tmp_path):
    lora, image, moved = (tmp_path / name for name in ("a.safetensors", "a.png", "moved.safetensors"))
    save_file({"x": torch.zeros(2)}, lora)
    image.write_bytes(b"one")

    def again(**changes) -> bool:
        line = {"prompt": "a", "lora": str(lora), "image": str(image)} | changes
        return run(read(tmp_path, line), tmp_path)[1] == ["a"]

    assert again()
    lora.rename(moved)
    assert not again(lora=[str(moved), 1])
    assert again(lora=[str(moved), 0.5])
    save_file({"x": torch.ones(2)}, lora)
    assert again()
    image.write_bytes(b"other")
    assert again() and not again()
