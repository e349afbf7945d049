"""python -m ltx_neuron.tune: what is tried, when a setting is kept, the journal, and the file that
the scripts take."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from helpers import one_thread, within  # noqa: F401
from jobs import make_job, replace
from safetensors.torch import save_file

from ltx_neuron import artifacts, flags, invocation
from ltx_neuron.artifacts import tuned_settings
from ltx_neuron.artifacts.tuned_settings import TunedSettings
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import registry
from ltx_neuron.config import profiles
from ltx_neuron.config.profiles import COLLECTIVES_BUFFER, resolve
from ltx_neuron.engine.outputs import make_report, run_identity
from ltx_neuron.engine.preflight import RunOptions
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json
from ltx_neuron.job import Job, Size
from ltx_neuron.report.recorder import Recorder
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.tune import __main__ as command
from ltx_neuron.tune.search import (
    Measurement,
    baseline_settings,
    candidates,
    check_layers,
    layout_candidates,
    search,
    wins,
)
from ltx_neuron.tune.trials import Journal, Trials, last_words, table, violation
from ltx_neuron.tune.variant import first_blocks, rel_l2

OWN = {"backend": "torchdist", "threads": "0", "attention": "sdpa", "blocks_per_graph": "4"}
VALUES = {"threads": ["2"], "attention": ["matmul"], "blocks_per_graph": ["1", "0"]}
SIZE = Size(64, 64, 9)


def row(ms: float, problem: str = "", settings: dict = OWN, turn: int = 0) -> Measurement:
    steps = {} if problem and not ms else {"stage_1": [10 * ms, ms, ms]}
    return Measurement(settings, turn, problem, 1.0, 1.0, steps, {"stage_1": 8}, {"s1_video": 1e-7})


def tuned(step_ms, values: dict = VALUES, turns: int = 3) -> tuple[dict, list]:
    """The settings that a search keeps, and what it measured. step_ms(settings, turn) gives the
    milliseconds of a step, or why there are none."""
    measured = []

    def measure(settings: dict, turn: int) -> Measurement:
        measured.append((settings, turn))
        ms = step_ms(settings, turn)
        return row(0, ms, settings, turn) if isinstance(ms, str) else row(ms, "", settings, turn)

    def others(key: str, best: dict) -> list[dict]:
        return [{key: value} for value in values[key]]

    return search(OWN, tuple(values), others, turns, measure), measured


# --- when a setting is kept -----------------------------------------------------------------------


def test_a_key_s_fastest_value_is_kept_and_the_next_key_is_tried_from_it():
    shares = {"threads 2": 0.8, "attention matmul": 1.3, "blocks_per_graph 0": 0.6}

    def step_ms(settings, turn):
        return 100 * prod(shares.get(" ".join(pair), 1) for pair in settings.items())

    best, measured = tuned(step_ms)
    assert best == OWN | {"threads": "2", "blocks_per_graph": "0"}
    assert all(s["threads"] == "2" for s, _ in measured if s["attention"] == "matmul")
    assert [turn for s, turn in measured if s == best] == [0, 1, 2, 3]


# milliseconds of a step, or why there are none, by the settings and the turn -> what is kept of the profile's own
CHOICES = {
    "it disagrees": (lambda s, turn: "differs: s1_video is 0.3" if s["threads"] == "2" else 100, OWN),
    "it fails in a later turn": (lambda s, turn: ("killed" if turn == 2 else 50) if s["threads"] == "2" else 100, OWN),
    "the profile's own fails": (
        lambda s, turn: "no kernel" if s["attention"] == "sdpa" else 100,
        OWN | {"attention": "matmul"},
    ),
}


@pytest.mark.parametrize(("step_ms", "kept"), CHOICES.values(), ids=CHOICES)
def test_a_setting_that_fails_or_disagrees_is_not_kept_however_fast_it_is(step_ms, kept):
    assert tuned(step_ms)[0].items() >= {**kept, "threads": "0"}.items()


# milliseconds of the profile's own and of the challenger, turn by turn -> whether it is kept
DUELS = {
    "clearly faster": ([100, 101, 99], [80, 81, 80], True),
    "faster by less than 2 %": ([100, 100, 100], [99, 99, 99], False),
    "slower in one turn": ([100, 100, 100], [50, 50, 101], False),
    "faster by less than the own one's turns differ": ([100, 130, 100], [85, 86, 85], False),
    "faster by more than that": ([100, 130, 100], [60, 61, 60], True),
}


@pytest.mark.parametrize("own, other, kept", DUELS.values(), ids=DUELS)
def test_a_difference_below_the_noise_keeps_the_profile_s_own(own, other, kept):
    assert wins([(row(a), row(b)) for a, b in zip(own, other, strict=True)]) is kept


def test_a_lucky_first_time_decides_nothing():
    def step_ms(settings, turn):
        return 50 if settings["attention"] == "matmul" and turn == 0 else 100

    best, measured = tuned(step_ms, {"attention": ["matmul"]})
    turns = [(settings["attention"], turn) for settings, turn in measured]
    # One lost turn decides: the other two are not taken.
    assert best == OWN and turns[2:] == [("sdpa", 1), ("matmul", 1)]


def test_stages_count_by_how_many_steps_a_generation_takes_of_them():
    both = Measurement(OWN, 0, "", 0, 0, {"stage_1": [9, 10, 10], "stage_2": [9, 65, 65]})
    assert replace(both, counts={"stage_1": 8, "stage_2": 3}).step_ms == (80 + 195) / 11


# --- whether a variant's latents are right --------------------------------------------------------

RULE = {
    "float32 within 1e-5": ("float32", 9e-6, None, None),
    "float32 beyond": ("float32", 2e-5, 1e-9, 1e-5),
    "bfloat16 within twice the own one's": ("bfloat16", 0.024, 0.01, None),
    "bfloat16 beyond": ("bfloat16", 0.026, 0.01, 0.025),
    "bfloat16 where the own one is wrong too": ("bfloat16", 0.9, 0.8, 0.1),
    "bfloat16 where the own one failed": ("bfloat16", 0.02, None, None),
    "NaN": ("bfloat16", float("nan"), 0.01, 0.025),
}


@pytest.mark.parametrize("dtype, far, own, allowed", RULE.values(), ids=RULE)
def test_a_variant_s_distance_is_judged_by_the_dtype_and_by_the_own_one_s(dtype, far, own, allowed):
    exact = torch.ones(4)
    errors = {"video": rel_l2(exact * (1 + far), exact)}
    problem = violation(errors, {"video": own} if own else {}, dtype)
    assert bool(problem) == (allowed is not None)
    if problem:
        assert problem.startswith("differs: video is ")
        assert float(problem.rpartition(" ")[2]) == pytest.approx(allowed)


# --- what is tried --------------------------------------------------------------------------------


def test_on_a_cpu_every_key_that_has_other_values_is_tried(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    cpu = resolve("cpu")
    assert candidates("backend", cpu, 4, 48) == []
    assert candidates("compile_backend", cpu, 4, 48) == ["aot_eager", "inductor"]
    assert candidates("threads", cpu, 4, 48) == ["1", "4", "8"]  # 2 are its share
    assert candidates("attention", cpu, 4, 48) == ["matmul"]
    assert candidates("blocks_per_graph", cpu, 4, 48) == ["1", "8", "12", "0"]


@pytest.mark.parametrize(
    ("depth", "layers", "cuts"),
    [
        (2, None, ["1", "0"]),  # 4 comes to 2
        (12, None, ["1", "12", "0"]),
        # At a cut depth every call must end with it, and the whole step cannot end early.
        (48, 4, ["1"]),
        (48, 8, ["1", "8"]),
    ],
)
def test_only_cuts_that_divide_the_depth_are_tried_and_each_once(depth, layers, cuts):
    assert candidates("blocks_per_graph", resolve("cpu"), 2, depth, **({"layers": layers} if layers else {})) == cuts


def test_another_backend_is_tried_where_it_is_installed(monkeypatch):
    neuron = resolve("trn2.3xlarge", ("backend=nxd",))
    versions = {"neuronx-distributed": "0.19"}
    monkeypatch.setattr(profiles, "package_version", versions.get)
    assert candidates("backend", neuron, 4, 48) == []
    versions["torch-neuronx"] = "2.13.3"
    assert candidates("backend", neuron, 4, 48) == ["torchdist"]
    assert candidates("attention", neuron, 4, 48) == ["matmul"]
    assert candidates("threads", neuron, 4, 48) == candidates("compile_backend", neuron, 4, 48) == []


def test_the_flash_kernel_is_tried_where_its_package_is_installed(monkeypatch):
    plain = resolve("trn2.3xlarge", ("attention=matmul",))
    assert candidates("attention", plain, 4, 48) == []
    monkeypatch.setattr("ltx_neuron.tune.search.find_spec", lambda package: package)
    assert candidates("attention", plain, 4, 48) == ["nki"]


def test_the_dit_s_compiler_flags_are_tried_and_each_compiles_to_graphs_of_its_own():
    neuron = resolve("trn2.3xlarge", ("backend=nxd",))
    others = candidates("compiler_flags.dit", neuron, 4, 48)
    assert len(others) == 2 and all("--vectorize-strided-dma" in flags for flags in others)
    assert "--cc-pipeline-tiling-factor=2" in others[1]
    of = {f: resolve(neuron.name, ("backend=nxd", f"compiler_flags.dit={f}")) for f in others}
    made = [registry.identity(profile, "dit") for profile in (neuron, *of.values())]
    assert len({identity["compiler_flags"] for identity in made}) == 3
    assert len({registry.identity(p, "gemma3")["compiler_flags"] for p in of.values()}) == 1
    assert candidates(f"environment.{COLLECTIVES_BUFFER}", neuron, 4, 48) == ["41943040"]
    cpu = resolve("cpu")
    assert candidates("compiler_flags.dit", cpu, 4, 48) == []
    assert candidates(f"environment.{COLLECTIVES_BUFFER}", cpu, 4, 48) == []


def test_sequence_parallelism_is_tried_where_a_stage_s_tokens_divide():
    cpu, buckets = resolve("cpu"), make_job("", Size(96, 96, 9)).buckets  # 18 tokens
    assert candidates("sequence_parallel", cpu, 2, 48, buckets=buckets) == ["true"]
    assert candidates("sequence_parallel", cpu, 4, 48, buckets=buckets) == []
    on = resolve("cpu", ("sequence_parallel=true",))
    assert candidates("sequence_parallel", on, 2, 48, buckets=buckets) == ["false"]


def layouts(profile: str, tp: int, cores: int, job: Job, *settings: str) -> list[str]:
    baseline, changes = layout_candidates(resolve(profile, settings), tp, job, cores)
    assert baseline.items() >= dict(guidance_parallel="1", context_parallel="1").items()
    typed = (tuple(f"{k}={v}" for k, v in (baseline | change).items()) for change in changes)
    assert all(resolve(profile, (*settings, *each)) for each in typed)
    return [" ".join(f"{k}={v}" for k, v in change.items()) for change in changes]


def test_the_layouts_of_a_cpu_are_those_that_its_cores_allow():
    assert layouts("cpu", 2, 2, make_job("", SIZE)) == layouts("cpu", 2, 3, make_job("", SIZE)) == []
    two = ["context_parallel=2"]
    assert layouts("cpu", 1, 2, make_job("", SIZE)) == two
    # A typed layout does not matter.
    assert layouts("cpu", 1, 2, make_job("", SIZE), "context_parallel=3") == two
    dev = make_job("", SIZE, recipe="dev")  # four passes
    guided = layouts("cpu", 1, 4, dev)
    assert guided[0] == "guidance_parallel=2 backend=torchdist"
    assert guided[1] == "guidance_parallel=4 backend=torchdist" and not any("=3 " in x for x in guided)
    assert "context_parallel=4" in guided
    of_cfg = StreamGuidance(cfg_scale=3.0)  # two passes
    job = make_job("", SIZE, recipe="dev", guidance=Guidance(of_cfg, of_cfg))
    assert not any("guidance_parallel=4" in x for x in layouts("cpu", 1, 4, job))
    assert layouts("cpu", 1, 4, make_job("", Size(0, 0, 9), sound_only=True)) == []


def test_the_layouts_of_chips_are_those_that_they_connect():
    tried = layouts("trn2.48xlarge", 4, 64, make_job("", SIZE))
    assert tried[:2] == [f"context_parallel={n} blocks_per_graph={4 * n}" for n in (2, 4)]
    assert tried[-1].startswith("context_parallel=16 ")
    # Not context parallelism of pairs of chips.
    assert layouts("trn2.48xlarge", 8, 64, make_job("", SIZE)) == []
    assert layouts("trn2.48xlarge", 4, 16, make_job("", SIZE)) == tried[:2]
    assert layouts("trn2.3xlarge", 4, 4, make_job("", SIZE)) == []


def test_settings_tuned_with_several_groups_are_not_those_of_one():
    one, two = (
        tuned_settings.identity(resolve("cpu", settings), 2, "float32", "config")
        for settings in ((), ("context_parallel=2",))
    )
    assert two["device"] == one["device"] | {"context_parallel": 2}
    assert tuned_settings.file_of(Path(), one) != tuned_settings.file_of(Path(), two)


def test_a_depth_that_no_call_ends_at_is_refused():
    cpu = resolve("cpu")
    check_layers(8, cpu, 48)
    for layers in (0, 6, 52):
        with pytest.raises(UserError, match=f"--layers {layers}: wanted a multiple of 4, .*most"):
            check_layers(layers, cpu, 48)
    with pytest.raises(UserError, match="whole step in one graph.*blocks_per_graph=1 as well"):
        check_layers(4, resolve("cpu", ("blocks_per_graph=0",)), 48)


def test_the_first_blocks_of_a_graph_take_the_same_weights(tmp_path):
    graph = {"file": "blocks.pt2", "parameters": {"transformer_blocks.0.w": [2]}}
    calls = [["blocks", 0], ["blocks", 1], ["blocks", 2]]
    folder = tmp_path / "graphs"
    content = {"identity": {}, "graphs": {"blocks": graph}, "runs": {"main": calls}, "fields": {}}
    write_json(folder / "manifest.json", content)
    (folder / "blocks.pt2").write_bytes(b"a graph")
    cut = first_blocks(folder, 1, tmp_path / "work")
    runs = json.loads((cut / "manifest.json").read_text())["runs"]
    assert runs["main"] == [["blocks", 0]]
    assert sorted(call for run in runs.values() for call in run) == calls
    assert (cut / "blocks.pt2").read_bytes() == b"a graph"


# --- the journal ----------------------------------------------------------------------------------

ASKED = {"request": "1", "typed": ["lnc=2"]}


def test_a_tuning_that_was_ended_finds_its_rows_again(tmp_path):
    path = tmp_path / "a.journal"
    journal = Journal(path, ASKED, {"threads": "2"})
    first = journal.add(row(1.5))
    failed = journal.add(row(0, "took longer", OWN | {"threads": "2"}))
    again = Journal(path, ASKED, {})
    assert again.rows == [first, failed] and again.fixed == {"threads": "2"}
    assert again.find(OWN, 0) == first and again.find(OWN, 1) is None


def test_rows_of_another_request_or_a_damaged_journal_are_not_taken(tmp_path, capsys):
    path = tmp_path / "a.journal"
    Journal(path, ASKED, {}).add(row(1.5))
    assert Journal(path, ASKED | {"request": "2"}, {}).rows == []
    assert Journal(path, ASKED, {}, force=True).rows == []
    path.write_text('{"request": 1}')
    assert Journal(path, ASKED, {}).rows == [] and "starts over" in capsys.readouterr().out


def test_a_variant_that_takes_too_long_is_killed_and_is_a_row(tmp_path):
    save_file({"s1_video": torch.ones(1)}, tmp_path / "reference.safetensors")
    journal = Journal(tmp_path / "a.journal", ASKED, {})
    trials = Trials([], "float32", OWN, 0.3, tmp_path, journal)
    with within(60):
        measured = trials.measure(OWN, 0)
    assert measured.problem == "took longer than --limit 0.3 s"
    assert trials.measure(OWN, 0) is measured  # not again
    assert Journal(tmp_path / "a.journal", ASKED, {}).rows == [measured]


def test_the_reason_of_a_failed_variant_is_its_error_s_sentence():
    log = "compiling\nerror: rank 1 of 2 failed: no memory\nType less\n"
    assert last_words(log, 1) == "rank 1 of 2 failed: no memory"
    assert last_words("Traceback\n  File\nKeyError: 'x'\n", 1) == "KeyError: 'x'"
    assert last_words("", -9) == "its process was killed (SIGKILL)"


def test_the_table_has_a_line_for_each_variant_with_what_became_of_it():
    faster = OWN | {"attention": "matmul"}
    broken = OWN | {"threads": "2"}
    rows = [row(100), row(50, "", faster), row(0, "took longer", broken), row(52, "", faster, 1)]
    lines = table(rows, OWN, faster).splitlines()
    own, best = (" ".join(line.split()) for line in lines[1:3])
    assert own == "100.00 1 1.00 1.0 1.0e-07 the profile's own: own"
    assert best == "51.00 2 0.50 1.0 1.0e-07 attention=matmul: chosen"
    assert lines[3].endswith("threads=2: took longer") and len(lines) == 4


# --- the file that scripts take -------------------------------------------------------------------

SHAPES = make_job("", SIZE).buckets


def opened(tiny, folder: Path, *typed: str, take: bool = False) -> Workspace:
    """take: with the tuned settings in the folder."""
    workspace = Workspace(tiny.checkpoint, resolve("cpu", typed), folder, 2, "float32", tiny.gemma_root)
    if take:
        workspace.take_tuned()
    return workspace


def choose(workspace: Workspace, run: dict, graphs: dict, size: Size = SIZE) -> TunedSettings:
    """Leave a file as a tuning of a size leaves it."""
    config = workspace.transformer.digest
    identity = tuned_settings.identity(workspace.profile, workspace.tp, workspace.dtype_name, config)
    path = tuned_settings.file_of(workspace.artifacts, identity)
    kept = tuned_settings.load(workspace.artifacts, identity) or TunedSettings(path, identity)
    kept.run = run
    key = tuned_settings.size_key(make_job("", size).buckets)
    kept.sizes[key] = {"settings": graphs, "run": run}
    kept.write()
    return kept


def dit_identity(workspace: Workspace, size: Size = SIZE) -> dict:
    buckets = make_job("", size).buckets
    return workspace.dit_graphs(buckets)[0].identity


def test_graph_settings_are_those_of_the_dit_and_of_its_size_alone(tiny, tmp_path):
    plain = opened(tiny, tmp_path)
    choose(plain, {"threads": "2"}, {"attention": "matmul", "blocks_per_graph": "1"})
    workspace = opened(tiny, tmp_path, take=True)
    ours = dit_identity(workspace)
    assert (ours["attention"], ours["blocks_per_graph"]) == ("matmul", 1)
    assert dit_identity(workspace, Size(96, 64, 9)) == dit_identity(plain, Size(96, 64, 9))
    of_text = ([n.identity for n in w.text_graphs([64])] for w in (workspace, plain))
    assert next(of_text) == next(of_text)
    assert workspace.profile.attention == "sdpa" and workspace.profile.threads == 2
    assert workspace.identity["rank_threads"] == 2


def test_a_size_is_found_by_its_shapes_whatever_its_timesteps(tiny, tmp_path):
    portrait, two = Size(96, 64, 9), Size(128, 128, 9, two_stage=True)
    key = tuned_settings.size_key(make_job("", portrait).buckets)
    assert key == tuned_settings.size_key(make_job("", Size(64, 96, 9)).buckets)
    stages = make_job("", two).buckets
    both = [replace(bucket, timesteps=count) for bucket in stages for count in (1, 2)]
    assert tuned_settings.size_key(both) == tuned_settings.size_key(stages) == "v8-a9+v32-a9"
    for other in (dict(recipe="dev"), dict(nag_scale=11.0)):
        key = tuned_settings.size_key(make_job("", two, **other).buckets)
        assert key != tuned_settings.size_key(stages)


def test_what_is_typed_wins_key_by_key(tiny, tmp_path):
    choose(opened(tiny, tmp_path), {"threads": "2"}, {"attention": "matmul", "blocks_per_graph": "1"})
    workspace = opened(tiny, tmp_path, "attention=sdpa", "threads=1", take=True)
    ours = dit_identity(workspace)
    assert (ours["attention"], ours["blocks_per_graph"]) == ("sdpa", 1) and workspace.profile.threads == 1
    assert dit_identity(opened(tiny, tmp_path, "blocks_per_graph=2", take=True))["blocks_per_graph"] == 2


def test_a_size_tuned_under_other_settings_of_the_run_is_not_taken(tiny, tmp_path):
    choose(opened(tiny, tmp_path), {"threads": "2"}, {"attention": "matmul"}, Size(96, 64, 9))
    choose(opened(tiny, tmp_path), {"threads": "1"}, {"attention": "matmul"})
    workspace = opened(tiny, tmp_path, take=True)
    assert dit_identity(workspace)["attention"] == "matmul"
    assert dit_identity(workspace, Size(96, 64, 9))["attention"] == "sdpa"


# What lies where the file should be -> what is said; the run goes on without it.
STALE = {
    "not JSON": ("{", "cannot be read as JSON"),
    "another identity": ('{"identity": {}, "run": {}, "sizes": {}}', "does not match its name"),
    "no sizes": ({}, "is not a file of tuned settings ('sizes')"),
    "sizes in a list": ({"sizes": []}, "is not a file of tuned settings"),
    "a size without settings": ({"sizes": {"a": {"run": {}}}}, "is not a file of tuned settings"),
    "no settings of the run": ({"sizes": {}, "run": None}, "is not a file of tuned settings"),
    "a number": ({"sizes": {}, "run": {"threads": 2}}, "a setting is not text"),
}


@pytest.mark.parametrize("content, message", STALE.values(), ids=STALE)
def test_a_file_that_cannot_be_taken_stops_nothing(tiny, tmp_path, capsys, content, message):
    kept = choose(opened(tiny, tmp_path), {"threads": "2"}, {})
    if not isinstance(content, str):
        content = json.dumps({"identity": kept.identity, "run": {}} | content)
    kept.path.write_text(content)
    workspace = opened(tiny, tmp_path, take=True)
    assert workspace.tuned_settings is None and workspace.profile.threads == 0
    assert message in capsys.readouterr().out


def test_a_file_changes_nothing_that_a_tuning_does_not_choose(tiny, tmp_path):
    """It may come from a store."""
    foreign = {"environment.LD_PRELOAD": "x.so", "vae_tile": "64", "nonsense": "x"}
    choose(opened(tiny, tmp_path), foreign | {"threads": "2"}, foreign)
    workspace = opened(tiny, tmp_path, take=True)
    assert workspace.tuned_settings.run == {"threads": "2"}
    assert workspace.profile.settings == ("threads=2",)


def test_a_tuning_with_other_versions_is_named_and_one_of_another_model_is_not(tiny, tmp_path, capsys, monkeypatch):
    choose(opened(tiny, tmp_path), {"threads": "2"}, {})
    other_tp = Workspace(tiny.checkpoint, resolve("cpu"), tmp_path, 4, "float32")
    other_tp.take_tuned()
    assert other_tp.tuned_settings is None and capsys.readouterr().out == ""
    monkeypatch.setattr(tuned_settings.machine, "package_version", {"torch": "9.9"}.get)
    workspace = opened(tiny, tmp_path, take=True)
    message = capsys.readouterr().out
    assert workspace.tuned_settings is None and "was tuned with other versions and is ignored" in message


def test_settings_that_do_not_go_with_what_was_typed_are_left_out(tiny, tmp_path, capsys):
    kept = choose(opened(tiny, tmp_path), {"compile_backend": "aot_eager"}, {})
    profile = kept.profile_of_run(resolve("cpu", ("device=cuda",)))
    assert profile.compile_backend == "export"
    assert "tuned settings are ignored: --profile-set" in capsys.readouterr().out


def test_a_tuned_value_that_does_not_exist_any_more_is_left_out_with_a_sentence(tiny, tmp_path, capsys):
    kept = choose(opened(tiny, tmp_path), {}, {"attention": "nki_const_max"})
    assert kept.profile_of_size(resolve("trn2.3xlarge"), SHAPES).attention == "nki"
    printed = capsys.readouterr().out
    assert printed.startswith("tuned settings are ignored:") and "nki_const_max" in printed


IGNORING = "--profile-set tuned=no"


def arguments(tiny, folder: Path, *more: str):
    parser = flags.parser("", "", gemma=False)
    flags.add_job(parser, flags.GRAPHS)
    common = ["--checkpoint-path", str(tiny.checkpoint), "--artifacts-dir", str(folder)]
    common += ["--profile", "cpu", "--tp-degree", "2", "--dtype", "float32"]
    return parser.parse_args([*common, *more])


def test_scripts_take_the_file_and_say_so_in_one_line(tiny, tmp_path, capsys):
    kept = choose(opened(tiny, tmp_path), {"threads": "2"}, {"attention": "matmul"})
    workspace = flags.workspace(arguments(tiny, tmp_path))
    workspace.print_tuned(SHAPES)
    workspace.print_tuned()
    line = f"tuned: threads=2 attention=matmul ({kept.path}; {IGNORING} ignores it)\n"
    assert capsys.readouterr().out == line
    ignored = flags.workspace(arguments(tiny, tmp_path, *IGNORING.split()))
    ignored.print_tuned(SHAPES)
    assert ignored.tuned_settings is None and capsys.readouterr().out == ""
    assert dit_identity(ignored)["attention"] == "sdpa"


def test_the_report_names_the_tuned_settings_and_their_file(tiny, tmp_path):
    kept = choose(opened(tiny, tmp_path), {"threads": "2"}, {"attention": "matmul"})
    workspace = flags.workspace(arguments(tiny, tmp_path))
    job = make_job("waves", SIZE)
    before = run_identity(job, opened(tiny, tmp_path), RunOptions())
    after = run_identity(job, workspace, RunOptions())
    differing = {name for name, _, _ in artifacts.differences(before, after)}
    assert differing == {"attention", "profile_set", "rank_threads"}  # --resume begins anew
    report = make_report(Recorder(), workspace, job.describe())
    settings = {"run": ("threads=2",), "v8-a9": ("attention=matmul",)}
    assert report["identity"]["tuned"] == {"file": str(kept.path), "settings": settings}


def test_graphs_compiled_before_the_tuning_are_named_with_what_to_type(tiny, tmp_path):
    before = opened(tiny, tmp_path)
    folder = artifacts.folder(tmp_path, dit_identity(before))
    write_json(folder / "manifest.json", {"identity": dit_identity(before)})
    kept = choose(before, {}, {"attention": "matmul"})
    workspace = flags.workspace(arguments(tiny, tmp_path))
    other = dit_identity(workspace) | {"bucket": "v1-a1-t1-s8"}  # as near, and of another size
    write_json(artifacts.folder(tmp_path, other) / "manifest.json", {"identity": other})
    with pytest.raises(UserError) as error:
        workspace.dit_program_for(make_job("", SIZE), make_job("", SIZE).stages[0])
    _, make, tuned_line = str(error.value).splitlines()
    assert "attention: got sdpa, wanted matmul" in str(error.value)
    assert invocation.command("compile transformer") in make and "attention" not in make
    assert tuned_line == f"tuned: attention=matmul ({kept.path}; {IGNORING} ignores it)"


def test_a_command_says_that_tuned_settings_are_ignored_where_that_was_typed(tiny, tmp_path):
    choose(opened(tiny, tmp_path), {"threads": "2"}, {"attention": "matmul"})
    workspace = flags.workspace(arguments(tiny, tmp_path, *IGNORING.split()))
    with pytest.raises(UserError, match=f"compile transformer .*{IGNORING}$"):
        workspace.dit_program_for(make_job("", SIZE), make_job("", SIZE).stages[0])
    with pytest.raises(UserError) as error:
        workspace.dit_weights()
    assert IGNORING not in str(error.value)  # weights do not depend on it
    assert workspace.identity == opened(tiny, tmp_path).identity  # nor does what a run gives


# --- what is typed --------------------------------------------------------------------------------

WRONG = {
    "an unknown key": (["--keys", "attention", "speed"], "--keys speed: unknown; known: backend,"),
    "a limit of 0": (["--limit", "0"], "--limit 0: wanted seconds above 0"),
    "an endless limit": (["--limit", "inf"], "--limit inf: wanted seconds above 0"),
    "no rounds": (["--rounds", "0"], "--rounds 0: wanted 1 or more"),
    "no steps": (["--steps", "-1"], "--steps -1: wanted 1 or more"),
    "no cores": (["--layouts", "-1"], "--layouts -1: wanted 1 or more"),
    "half a block": (["--layers", "1"], "--layers 1: wanted a multiple of 2"),
    "a size that cannot be": (["--height", "65"], "--height 65 is not a multiple of 32"),
    "guidance of another recipe": (["--guidance", "video_cfg=3"], "recipe takes no --guidance video_cfg"),
    "a block that the model lacks": (
        ["--recipe", "dev", "--guidance", "video_stg_blocks=7"],
        "video STG block 7: this model has",
    ),
    "another recipe's graphs": (["--recipe", "dev", "--nag-scale", "11"], "--nag-scale cannot"),
    "no rank files": ([], "no dit weights in .*\nMake them: .* shard transformer "),
}


@pytest.mark.parametrize("typed, message", WRONG.values(), ids=WRONG)
def test_what_is_typed_wrongly_is_said_before_anything_runs(tiny, tmp_path, typed, message):
    common = ["--checkpoint-path", str(tiny.checkpoint), "--artifacts-dir", str(tmp_path)]
    common += ["--profile", "cpu", "--tp-degree", "2", "--recipe", "distilled"]
    common += ["--height", "64", "--width", "64", "--num-frames", "9"]
    with pytest.raises(UserError, match=message):
        command.main([*common, *typed])


def test_a_diffusion_decoder_has_no_convolutions_to_time(split, tmp_path):
    words = ["--checkpoint-path", str(split.folder), "--video-vae-path", str(split.diffusion_vae)]
    words += ["--artifacts-dir", str(tmp_path), "--profile", "cpu", "--recipe", "distilled"]
    with pytest.raises(UserError, match="--vae: the diffusion decoder has no convolutions"):
        command.main([*words, "--height", "64", "--width", "64", "--num-frames", "9", "--vae"])


def test_the_step_of_ltx_2_5_is_tuned_with_its_sampler(split, tmp_path, monkeypatch):
    tuned = []
    monkeypatch.setattr(Workspace, "dit_weights", lambda self, loras=(): tmp_path)
    monkeypatch.setattr(command.Tuning, "run", lambda self: tuned.append(self.job))
    words = ["--checkpoint-path", str(split.folder), "--artifacts-dir", str(tmp_path)]
    words += ["--profile", "cpu", "--height", "64", "--width", "64", "--num-frames", "9"]
    command.main([*words, "--recipe", "distilled"])
    assert [stage.sampler for stage in tuned.pop().stages] == ["ancestral"]


def test_all_that_can_be_tuned_is_a_value_of_the_profile():
    own = baseline_settings(resolve("trn2.3xlarge"))
    assert resolve("trn2.3xlarge", tuple(f"{k}={v}" for k, v in own.items()))
    assert own["attention"] == "nki" and own["threads"] == "0"
