"""What changes a result without an error is a note: printed once, in the sidecar and in the API's answer."""

from types import SimpleNamespace

import pytest
from service_app import opened
from typed import said

from ltx_neuron.artifacts.workspace import RunOptions
from ltx_neuron.engine.outputs import sidecar
from ltx_neuron.engine.preflight import Preflight, notes
from ltx_neuron.report.latency import Recorder
from ltx_neuron.text.inputs import cut_off, load_tokenizer, tokenize

WORDS = " ".join(f"w{number}" for number in range(1000))  # no two are the same
FOREIGN = "".join(map(chr, range(0x4E00, 0x4E00 + 800)))  # three tokens each
CUT = "is cut to 1,024: the model does not read what begins with"


@pytest.fixture(scope="module")
def workspace(tiny):
    return SimpleNamespace(tokenizer=load_tokenizer(tiny.gemma_root))


def test_what_changes_a_result_without_an_error_is_a_note(workspace):
    for words, expected in (
        (["--prompt", WORDS], [f"--prompt has 4,890 tokens and {CUT} '"]),
        (["--prompt", FOREIGN], [f"--prompt has 2,401 tokens and {CUT} '{FOREIGN[341:401]}'"]),  # without spaces
        (["--recipe", "dev", "--prompt", WORDS, "--negative-prompt", WORDS], ["--prompt has", "--negative-prompt has"]),
        (["--nag-scale", 11, "--negative-prompt", WORDS], [f"--negative-prompt has 4,890 tokens and {CUT}"]),
        (["--seed", 0, "--prompt", WORDS[:1023]], []),
        (["--prompt", WORDS[:1000] + " " * 100], []),  # spaces at the end are no tokens
    ):
        lines = notes(said(*words), workspace)
        assert [text in note for text, note in zip(expected, lines, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("text", [WORDS, FOREIGN, f"  {WORDS}\n", "a" * 5000])
def test_what_a_note_calls_cut_is_what_the_encoder_does_not_get(workspace, text):
    tokenizer = workspace.tokenizer
    count, lost = cut_off(tokenizer, text)
    whole = tokenizer(text.strip()).input_ids
    assert count == len(whole) and tokenize(tokenizer, text) == whole[:1024]
    kept = text.strip().removesuffix(lost)
    assert len(tokenizer(kept).input_ids) <= 1024 < len(tokenizer(kept + lost[:2]).input_ids)


def test_a_note_of_many_jobs_is_one_line_that_is_printed_once_and_in_the_sidecar(workspace, capsys):
    jobs = [said("--prompt", f"rain {n}").replaced(seed=-1) for n in range(30)]
    jobs.append(said("--prompt", WORDS))
    checks = Preflight(workspace, SimpleNamespace(upsampler_paths={}), RunOptions())
    checks.title_of = lambda job: f"line {1 + jobs.index(job)}"
    for _ in range(2):
        checks.print_notes(jobs)
    seed, cut = capsys.readouterr().out.splitlines()
    assert seed == "line 1 and 29 more: --seed -1 is a seed like any other, not a random one"
    assert cut.startswith("line 31: --prompt has 4,890 tokens")
    report = Recorder().report(jobs[0].describe(), "cpu", 1, {}, {"code": ""})
    report["phases"] = [phase := {"name": "decode_video", "seconds": 1.0}, phase | {"overlapped_seconds": 0.5}]
    written = sidecar(jobs[0], report, [seed])
    assert (written["notes"], written["seconds"]) == ([seed], {"decode_video": 2.5})


def test_the_api_answers_with_the_notes_in_its_own_words(workspace, tmp_path):
    with opened(tmp_path) as service:
        service.sizes.workspace.tokenizer = workspace.tokenizer
        cut, seed = service.post(prompt=WORDS, seed=-1).json["notes"]
        assert service.post(seed=1).json["notes"] == []
    assert cut.startswith("prompt has 4,890 tokens and is cut to 1,024")
    assert seed == "seed -1 is a seed like any other, not a random one"
