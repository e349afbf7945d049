"""Prompts files: every line is checked before anything runs; what failed or changed runs again, and no more."""

import argparse
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

from ltx_neuron import batch, flags
from ltx_neuron.batch import RESULTS, prompts_file, read_lines
from ltx_neuron.engine.resume import write_run_tensors
from ltx_neuron.engine.run import JobFailure
from ltx_neuron.errors import UserError
from ltx_neuron.flags import job_of_line
from ltx_neuron.job import Job
from ltx_neuron.sampling.conditions import ImageCondition


def command(*words: str) -> argparse.Namespace:
    """The flags of the command that has the prompts file."""
    parser = argparse.ArgumentParser(add_help=False)
    flags.add_job(parser)
    args = parser.parse_args(words)
    args.recipe = args.recipe or "distilled"
    return args


def read_file(folder, content: str | bytes, flags: str = "", identity: str = "a") -> list[batch.Line]:
    """The lines of a file of any content."""
    path = folder / "jobs.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_lines(path, job_of_line(command(*flags.split())), {"checkpoint": identity})


def read(folder, *lines, **how) -> list[batch.Line]:
    """A line that is not text is written as JSON."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return read_file(folder, text, **how)


def refused(folder, *lines) -> str:
    with pytest.raises(UserError) as error:
        read(folder, *lines)
    return str(error.value)


def test_a_line_says_what_differs_from_the_commands_own_flags(tmp_path):
    flags = "--height 64 --width 96 --num-frames 9 --seed 3"
    changes = {"prompt": "b", "width": 128, "seed": -7, "frame_rate": 12.5, "two_stage": True}
    first, second = read(tmp_path, {"prompt": "a", "two_stage": None, "upscale": None}, changes, flags=flags)
    assert (first.job.prompt, first.job.seed, first.job.size.width, first.job.size.frame_rate) == ("a", 3, 96, 24.0)
    assert (second.job.seed, second.job.size.height, second.job.size.width) == (-7, 64, 128)
    assert (second.job.size.frame_rate, first.job.size.two_stage, second.job.size.two_stage) == (12.5, False, True)
    assert (first.file, second.file) == ("0001.mp4", "0002.mp4")


def test_keys_are_flags_with_dashes_or_underscores_and_aliases(tmp_path):
    keys = {"num-frames": 17}, {"num_frames": 17}, {"num_frames": "17"}, {"fps": 30}, {"frame-rate": 30}
    lines = read(tmp_path, *({"prompt": "a", **key} for key in keys))
    assert [line.job.size.num_frames for line in lines] == [17, 17, 17, 121, 121]
    assert [line.job.size.frame_rate for line in lines][3:] == [30.0, 30.0]
    assert lines[0].digest == lines[1].digest == lines[2].digest != lines[3].digest == lines[4].digest


def test_prompts_keep_their_letters_and_empty_lines_count_but_are_skipped(tmp_path):
    prompts = ["--seed 5", "-x", "« Möwe » – 海", "a=b 'c' \"d\"", "line\nbreak"]
    lines = read(tmp_path, "", *({"prompt": prompt} for prompt in prompts), "   \t", "\r", {"prompt": "b"}, "")
    assert [line.job.prompt for line in lines] == [*prompts, "b"]
    assert [line.number for line in lines] == [2, 3, 4, 5, 6, 9]


def test_images_of_a_line_are_a_path_a_list_or_a_list_of_lists_and_no_other_lines(tmp_path):
    a, b = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    for path in (a, b):
        Path(path).write_bytes(b"not looked into")
    images = a, [a, 0, 0.5], None, [[a], [b, 8, 0.25, 10]]
    lines = read(tmp_path, *({"prompt": "a"} | ({"image": image} if image else {}) for image in images))
    assert [line.job.images for line in lines] == [
        (ImageCondition(a),),
        (ImageCondition(a, 0, 0.5),),
        (),
        (ImageCondition(a), ImageCondition(b, 8, 0.25, 10)),
    ]


def test_guidance_of_a_line_is_the_dev_recipes(tmp_path):
    line = {"prompt": "a", "video_cfg_guidance_scale": 2.0, "audio-stg-blocks": [1, 2], "negative_prompt": "b"}
    (parsed,) = read(tmp_path, line, flags="--recipe dev")
    guidance = parsed.job.guidance
    assert (guidance.video.cfg_scale, guidance.audio.stg_blocks) == (2.0, (1, 2))
    assert parsed.job.texts == ("a", "b")
    with pytest.raises(UserError, match="audio-stg-blocks"):
        read(tmp_path, line | {"audio-stg-blocks": [True]}, flags="--recipe dev")


BAD = {
    "not JSON": ("{'prompt': 'a'}", "not JSON"),
    "nested too deep": ("[" * 100_000, "not JSON"),
    "a list": ("[1]", "got list, wanted a JSON object"),
    "unknown key": ({"prompt": "a", "sead": 1}, "unknown key 'sead'; did you mean 'seed'?"),
    "a key of the command": ({"prompt": "a", "checkpoint_path": "x"}, "unknown key 'checkpoint_path'"),
    "no prompt": ({"seed": 1}, "--prompt is empty"),
    "illegal size": ({"prompt": "a", "height": 65}, "--height 65 is not a multiple of 32"),
    "text as a switch": ({"prompt": "a", "two_stage": "yes"}, "--two-stage: got 'yes', wanted a valid boolean"),
    "a key twice": ('{"prompt": "a", "seed": 1, "seed": 2}', "the key 'seed' is given twice"),
    "a key twice inside": ('{"prompt": "a", "seed": {"b": 1, "b": 2}}', "the key 'b' is given twice"),
    "a flag in two spellings": (
        {"prompt": "a", "fps": 24, "frame_rate": 25},
        "'fps' and 'frame_rate' are the same flag",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_by_its_number(tmp_path, name):
    line, words = BAD[name]
    problem = refused(tmp_path, {"prompt": "fine"}, "", line, {"prompt": "fine"})
    assert problem.startswith(f"{tmp_path / 'jobs.jsonl'}: nothing was run.\nline 3: ")
    assert words in problem


def test_the_first_bad_lines_are_said_at_once_and_the_others_counted(tmp_path):
    problem = refused(tmp_path, *(line for line, _ in BAD.values()), {"prompt": "fine"})
    numbers = [line.partition(":")[0] for line in problem.splitlines() if line.startswith("line ")]
    assert numbers == [f"line {n}" for n in range(1, 11)]
    assert f"\nand {len(BAD) - 10} more\n" in problem and problem.endswith(prompts_file.WANTED)


def test_files_that_are_absent_empty_no_files_or_locked_are_refused_by_their_flags(tmp_path):
    absent, pipe, folder = tmp_path / "absent", tmp_path / "pipe", tmp_path / "folder"
    assert "has no lines" in refused(tmp_path, "", "  ")
    assert f"line 2: --lora {absent}: no such file" in refused(tmp_path, "", {"prompt": "b", "lora": str(absent)})
    with pytest.raises(UserError, match="absent: no such file"):
        read_lines(absent, job_of_line(command()), {})
    os.mkfifo(pipe)
    image = {"prompt": "a", "image": str(pipe)}
    assert f"line 1: --image {pipe}: that is a named pipe, wanted a regular file; pass" in refused(tmp_path, image)
    with pytest.raises(UserError, match="pipe: that is a named pipe, wanted.*one JSON object"):
        read_lines(pipe, job_of_line(command()), {})
    folder.mkdir()
    with locked(folder):
        for reads in (
            lambda: read(tmp_path, {"prompt": "a", "image": str(folder / "a.png")}),
            lambda: read_lines(folder / "jobs.jsonl", job_of_line(command()), {}),
        ):
            problem = said_to_an_ordinary_user(reads)
            assert "you may not read or write it, or not enter its folder\n" in problem
            assert problem.startswith(("UserError", "NoPermission: --prompts-file"))


def sheet(*rows: tuple, delimiter: str = ",", end: str = "\r\n") -> str:
    """A table as spreadsheets write it, with a prompt over two lines in the first of two rows."""
    file = io.StringIO(newline="")
    header = ("Prompt", "Num Frames", "seed", "two-stage", "")
    first = (f'waves{delimiter} "loud"\n– no wind', 9, 2, "TRUE", "")
    csv.writer(file, delimiter=delimiter, lineterminator=end).writerows(
        rows or (header, first, ("",) * 5, ("rain", "", "", "", ""))
    )
    return file.getvalue()


def objects(*lines: dict, **how) -> str:
    return json.dumps(lines or [{"prompt": "a", "seed": 2}, {"prompt": "b"}], **how)


# A file -> the numbers of its lines.
FORMS = {
    "a CSV": (sheet(), [2, 5]),
    "with a mark of its byte order": ("\ufeff" + sheet(), [2, 5]),
    "with semicolons": (sheet(delimiter=";"), [2, 5]),
    "with tabs in UTF-16": (sheet(delimiter="\t").encode("utf-16"), [2, 5]),
    "in UTF-16 without a mark": (sheet(delimiter="\t").encode("utf-16-le"), [2, 5]),
    "of a Mac": (sheet(end="\r"), [2, 5]),
    "of Unix, its last line open": (sheet(end="\n").rstrip(), [2, 5]),
    "that names its delimiter": ("sep=;\r\n" + sheet(delimiter=";"), [3, 6]),
    "an array": (objects(), [1, 2]),
    "an array over lines": ("\ufeff\n" + objects(indent=2), [1, 2]),
    "lines in UTF-16": ('{"prompt": "a"}\n\n{"prompt": "b"}\n'.encode("utf-16"), [1, 3]),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_spreadsheets_csv_and_a_json_array_are_read(tmp_path, name):
    content, numbers = FORMS[name]
    lines = read_file(tmp_path, content)
    assert [line.number for line in lines] == numbers
    if "lines" not in name:
        assert [line.job.seed for line in lines] == [2, 10]
    if numbers[0] > 1:
        first, second = (line.job for line in lines)
        assert first.prompt in [f'waves{d} "loud"\n– no wind' for d in ",;\t|"]
        assert (first.size.num_frames, first.size.two_stage) == (9, True)
        assert (second.prompt, second.size.num_frames) == ("rain", 121)


def test_cells_have_the_types_of_json_and_make_the_same_jobs(tmp_path):
    """Texts stay texts, whatever they look like."""
    (tmp_path / "a.png").write_bytes(b"")
    image = [str(tmp_path / "a.png"), 8, 0.5]
    cells = {
        "prompt": "2024",
        "negative-prompt": "true",
        "recipe": "dev",
        "frame rate": "12,5",
        "num_frames": "9.0",
        "two_stage": "False",
        "video_stg_blocks": "[1, 2]",
        "--image": json.dumps(image),
    }
    (row,) = read_file(tmp_path, sheet(tuple(cells), tuple(cells.values()), delimiter=";"))
    values = {"prompt": "2024", "negative_prompt": "true", "recipe": "dev", "frame_rate": 12.5, "num_frames": 9}
    (line,) = read(tmp_path, values | {"two_stage": False, "video_stg_blocks": [1, 2], "image": image})
    assert (row.job, row.digest) == (line.job, line.digest)


PLAIN = "neither a JSON object nor a CSV header with a column prompt"
# A file -> what is said of it, with the line's number.
UNREADABLE = {
    "prompts as text": ("waves crash, loudly\na dog runs\n" * 2000, "line 1: 'waves", PLAIN),
    "a CSV without prompt": ("text,seed\na,1\n" * 3000, "line 1: 'text,seed' is", PLAIN),
    "YAML": ("- prompt: a\n  seed: 1\n" * 50, "line 1: '- prompt: a' is", PLAIN),
    "Python's dicts": ("{'prompt': 'a', 'b': None}\n" * 3000, "line 1: not JSON: single quot"),
    "Python's True": ('{"prompt": "a", "two_stage": True}\n', "line 1: not JSON: True, False and"),
    "comments": ('# mine\n{"prompt": "a"}\n', "line 1: not JSON: a comment"),
    "comments between": ('{"prompt": "a"}\n// mine\n', "line 2: not JSON: a comment"),
    "curly quotation marks": ("{“prompt”: “a”}", "line 1: not JSON: curly"),
    "a path of Windows": (r'{"prompt": "a", "image": "C:\Users\a.png"}', "line 1: not JSON: a single"),
    "an object over lines": (json.dumps({"prompt": "a"}, indent=2), "line 1: not JSON: the object"),
    "commas after objects": ('{"prompt": "a"},\n' * 3000, "line 1: not JSON: a comma after the ob"),
    "a comma too many": ('{"prompt": "a",}\n', "line 1: not JSON: a comma after the last value"),
    "an array with a mistake": ('[\n{"prompt": "a"},\n{"prompt": "b",}\n]', "line 3: not JSON: a comma"),
    "an array of texts": ('["a", "b"]', "object 1: got str, wanted a JSON object"),
    "an unknown key in an array": (objects({"prompt": "a", "sead": 1}, indent=2), "object 1: unknown"),
    "a column of no flag": ("prompt,mood\n" + "a,sad\n" * 3000, "line 1: unknown key 'mood'"),
    "a column twice": ("prompt,seed,Seed\na,1,2\n", "line 1: the key 'seed' is given twice"),
    "a column in two spellings": ("prompt,fps,frame_rate\na,1,2\n", "line 1: 'fps' and 'frame_rate'"),
    "commas in a text": ("prompt,seed\na,1\n" + "a, b,1\n" * 3000, "line 3: 3 cells, and the header"),
    "an open quotation mark": ('prompt,seed\na,1\n"b,2\n', 'line 3: an open "'),
    "another encoding": ("prompt\na\nMöwe\n".encode("cp1252"), "line 3: --prompt is not UTF-8"),
    "a spreadsheet": (b"PK\3\4\x14\0rest", "save a spreadsheet as CSV UTF-8"),
    "a video": (b"\0\0\0\x20ftypisom\0\0\2\0", "is not text"),
    "a header alone": ("prompt,seed\n", "has no lines"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_a_prompts_file_is_is_said_once_with_the_line_and_the_reason(tmp_path, name):
    content, *words = UNREADABLE[name]
    with pytest.raises(UserError) as error:
        read_file(tmp_path, content)
    problem = str(error.value)
    assert [text for text in words if text not in problem] == []
    assert problem.count(prompts_file.WANTED) <= 1 and len(problem.splitlines()) <= 16
    if "not JSON" in problem or PLAIN in problem or "is not text" in problem:
        assert problem.endswith(prompts_file.WANTED)


class FakePipeline:
    """Runs jobs without models: notes them, fails at some, and is killed before others."""

    workspace = SimpleNamespace(dtype=torch.float32)

    def __init__(self, fails=(), killed_before=None, last=()):
        self.ran, self.fails, self.killed_before, self.last = [], fails, killed_before, last

    def run(self, jobs, isolate, resume, write):
        assert isolate and not any(map(resume, jobs))
        for job in sorted(jobs, key=lambda job: job.prompt in self.last):  # some jobs finish after later ones
            if job.prompt == self.killed_before:
                raise KeyboardInterrupt
            self.ran.append(job.prompt)
            outcome = SimpleNamespace(job=job)
            try:
                if job.prompt in self.fails:
                    raise ValueError("it broke")
                write(outcome)
            except Exception as error:  # an error of it is the job's
                outcome = JobFailure(job, error)
            yield outcome


def write(result, path):
    if result.job.prompt == "unwritable":
        raise OSError("disk full")
    path.write_text(result.job.prompt)


def run(lines, folder, **how) -> tuple[list[dict], list[str]]:
    """The entries of all lines, and the prompts of those that ran."""
    engine = FakePipeline(**how)
    return batch.run(lines, engine, folder / "out", write, Job.describe), engine.ran


def prompts(folder, names: str, **how):
    return read(folder, *({"prompt": name} for name in names.split()), **how)


def recorded(folder) -> list[dict]:
    return json.loads((folder / "out" / RESULTS).read_text())["lines"]


def test_every_line_is_run_and_recorded_in_the_files_order_whatever_order_jobs_finish_in(tmp_path):
    entries, ran = run(prompts(tmp_path, "a b c"), tmp_path, last=("a",))
    assert ran == ["b", "c", "a"] and recorded(tmp_path) == entries
    assert [(entry["line"], entry["prompt"], entry["status"], entry["output"]) for entry in entries] == [
        (1, "a", "done", "0001.mp4"),
        (2, "b", "done", "0002.mp4"),
        (3, "c", "done", "0003.mp4"),
    ]
    assert [(tmp_path / "out" / entry["output"]).read_text() for entry in entries] == ["a", "b", "c"]


def test_a_line_that_fails_is_recorded_and_the_others_go_on_and_it_alone_runs_again(tmp_path, capsys):
    lines = prompts(tmp_path, "unwritable b c")
    entries, ran = run(lines, tmp_path, fails=("b",))
    assert ran == ["unwritable", "b", "c"] and [entry["status"] for entry in entries] == ["failed", "failed", "done"]
    assert [entry.get("error") for entry in entries] == ["OSError: disk full", "ValueError: it broke", None]
    assert "output" not in entries[1] and "line 2 failed: it broke" in capsys.readouterr().out
    entries, ran = run(lines, tmp_path)
    assert ran == ["unwritable", "b"] and [entry["status"] for entry in entries] == ["failed", "done", "done"]


def test_what_was_done_before_a_kill_is_not_run_again_but_where_its_video_is_gone(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(prompts(tmp_path, "a b c"), tmp_path, killed_before="b")
    assert [(entry["line"], entry["status"]) for entry in recorded(tmp_path)] == [(1, "done")]
    lines = prompts(tmp_path, "a b c")
    entries, ran = run(lines, tmp_path)
    assert ran == ["b", "c"] and [entry["status"] for entry in entries] == ["done"] * 3
    assert "resumed: 1 of 3 lines were done before" in capsys.readouterr().out
    assert run(lines, tmp_path)[1] == []
    (tmp_path / "out" / "0002.mp4").unlink()
    assert run(lines, tmp_path)[1] == ["b"]


@pytest.mark.parametrize(
    ("lines", "how", "again"),
    [
        ([{"prompt": "a"}, {"prompt": "b2"}, {"prompt": "c"}], {}, ["b2"]),
        ([{"prompt": "a"}, {"prompt": "b", "seed": 11}, {"prompt": "c"}], {}, ["b"]),
        ([{"prompt": "a"}, {"prompt": "b"}], {"flags": "--seed 77"}, ["a", "b"]),
        ([{"prompt": "a"}, {"prompt": "b"}], {"identity": "another checkpoint"}, ["a", "b"]),
    ],
)
def test_a_changed_line_runs_again_alone(tmp_path, lines, how, again):
    run(prompts(tmp_path, "a b c"), tmp_path)
    entries, ran = run(read(tmp_path, *lines, **how), tmp_path)
    assert ran == again and [entry["prompt"] for entry in entries] == [line["prompt"] for line in lines]


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
    for content in ("{", "[]", '{"lines": 3}', '{"lines": [{}]}'):
        (tmp_path / "out" / RESULTS).write_text(content)
        with pytest.raises(UserError, match="is not a results file; delete it"):
            run(prompts(tmp_path, "a"), tmp_path)
        assert (tmp_path / "out" / RESULTS).read_text() == content


def test_a_file_of_a_line_is_known_by_its_content_wherever_it_lies(tmp_path):
    lora, image = tmp_path / "a.safetensors", tmp_path / "a.png"
    save_file({"x": torch.zeros(2)}, lora)
    image.write_bytes(b"one")
    line = {"prompt": "a", "lora": str(lora), "image": str(image)}
    run(read(tmp_path, line), tmp_path)
    moved = line | {"lora": [str(lora.rename(tmp_path / "moved.safetensors")), 1]}
    assert run(read(tmp_path, moved), tmp_path)[1] == []
    weaker = moved | {"lora": [str(tmp_path / "moved.safetensors"), 0.5]}
    assert run(read(tmp_path, weaker), tmp_path)[1] == ["a"]
    save_file({"x": torch.ones(2)}, lora)
    assert run(read(tmp_path, line), tmp_path)[1] == ["a"]
    image.write_bytes(b"other")
    assert run(read(tmp_path, line), tmp_path)[1] == ["a"]
