"""Tuning: what is tried, when a setting is kept, the journal, and the file that other commands take."""

import json
import re
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
from ltx_neuron.artifacts.workspace import RunOptions, Workspace
from ltx_neuron.backends import registry
from ltx_neuron.config import profiles
from ltx_neuron.config.profiles import COLLECTIVES_BUFFER, resolve
from ltx_neuron.engine.outputs import make_report, run_identity
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json
from ltx_neuron.job import Size
from ltx_neuron.report.latency import Recorder
from ltx_neuron.sampling.guidance import Guidance, StreamGuidance
from ltx_neuron.tune import __main__ as command
from ltx_neuron.tune import search as searching
from ltx_neuron.tune.search import Measurement, check_layers, search, wins
from ltx_neuron.tune.trials import Journal, Trials, last_words, table, violation
from ltx_neuron.tune.variant import first_blocks, rel_l2

OWN = {"backend": "torchdist", "threads": "0", "attention": "sdpa", "blocks_per_graph": "4"}
VALUES = {"threads": ["2"], "attention": ["matmul"], "blocks_per_graph": ["1", "0"]}
SIZE = Size(64, 64, 9)
REQUEST, IGNORING = {"request": "1", "typed": ["lnc=2"]}, "--profile-set tuned=no"


def row(ms: float, problem: str = "", settings: dict = OWN, turn: int = 0) -> Measurement:
    steps = {} if problem and not ms else {"stage_1": [10 * ms, ms, ms]}
    return Measurement(settings, turn, problem, 1.0, 1.0, steps, {"stage_1": 8}, {"s1_video": 1e-7})


def best_of(step_ms) -> tuple[dict, list]:
    """What a search of three rounds keeps and measures. step_ms(settings, turn): milliseconds, or why none."""
    measured = []

    def measure(settings: dict, turn: int) -> Measurement:
        measured.append((settings, turn))
        ms = step_ms(settings, turn)
        return row(0, ms, settings, turn) if isinstance(ms, str) else row(ms, "", settings, turn)

    return search(OWN, (*VALUES,), lambda key, _: [{key: value} for value in VALUES[key]], 3, measure), measured


def test_a_keys_fastest_value_is_kept_and_the_next_key_is_tried_from_it():
    shares = {"threads 2": 0.8, "attention matmul": 1.3, "blocks_per_graph 0": 0.6}
    best, measured = best_of(lambda s, turn: 100 * prod(shares.get(" ".join(pair), 1) for pair in s.items()))
    assert best == OWN | {"threads": "2", "blocks_per_graph": "0"}
    assert all(s["threads"] == "2" for s, _ in measured if s["attention"] == "matmul")
    assert [turn for s, turn in measured if s == best] == [0, 1, 2, 3]


def test_a_setting_that_fails_or_disagrees_is_not_kept_however_fast_it_is():
    def kept(ms, key="threads", value="2"):
        return best_of(lambda s, turn: ms(turn) if s[key] == value else 100)[0]

    assert kept(lambda turn: "differs: s1_video is 0.3") == OWN
    assert kept(lambda turn: "killed" if turn == 2 else 50) == OWN
    # The profile's own fails.
    assert kept(lambda turn: "no kernel", "attention", "sdpa") == OWN | {"attention": "matmul"}


def test_a_difference_below_the_noise_keeps_the_profiles_own():
    for own, other, kept in (
        ([100, 101, 99], [80, 81, 80], True),
        ([100, 100, 100], [99, 99, 99], False),  # faster by less than 2 %
        ([100, 100, 100], [50, 50, 101], False),  # slower in one turn
        ([100, 130, 100], [85, 86, 85], False),  # by less than the own one's turns differ
        ([100, 130, 100], [60, 61, 60], True),
    ):
        assert wins([(row(a), row(b)) for a, b in zip(own, other, strict=True)]) is kept


def test_stages_count_by_how_many_steps_a_generation_takes_of_them():
    both = Measurement(OWN, 0, "", 0, 0, {"stage_1": [9, 10, 10], "stage_2": [9, 65, 65]})
    assert replace(both, counts={"stage_1": 8, "stage_2": 3}).step_ms == (80 + 195) / 11


def test_a_variants_distance_is_judged_by_the_dtype_and_by_the_own_ones():
    for dtype, far, own, allowed in (
        ("float32", 9e-6, None, None),
        ("float32", 2e-5, 1e-9, 1e-5),
        ("bfloat16", 0.024, 0.01, None),  # within twice the own one's, and 0.005
        ("bfloat16", 0.026, 0.01, 0.025),
        ("bfloat16", 0.9, 0.8, 0.1),  # where the own one is wrong too
        ("bfloat16", 0.02, None, None),  # where the own one failed
        ("bfloat16", float("nan"), 0.01, 0.025),
    ):
        exact = torch.ones(4)
        problem = violation({"video": rel_l2(exact * (1 + far), exact)}, {"video": own} if own else {}, dtype)
        assert bool(problem) == (allowed is not None)
        if problem:
            assert problem.startswith("differs: video is ")
            assert float(problem.rpartition(" ")[2]) == pytest.approx(allowed)


def test_a_keys_other_values_are_tried_where_the_machine_has_them(monkeypatch):
    nxd, buffer = {"neuronx-distributed": "0.19"}, f"environment.{COLLECTIVES_BUFFER}"
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for keys, settings, packages, values in (
        ("backend", "trn2.3xlarge backend=nxd", nxd, []),
        ("backend", "trn2.3xlarge backend=nxd", nxd | {"torch-neuronx": "2.13.3"}, ["torchdist"]),
        ("compile_backend", "cpu", {}, ["aot_eager", "inductor"]),
        ("threads", "cpu", {}, ["1", "4", "8"]),  # 2 are its share of 8 cores
        ("compile_backend threads", "trn2.3xlarge", {}, []),
        ("attention", "trn2.3xlarge", {}, ["matmul"]),
        ("attention", "trn2.3xlarge attention=matmul", {}, []),
        ("attention", "trn2.3xlarge attention=matmul", {"nkilib": "1"}, ["nki"]),
        ("blocks_per_graph", "cpu", {}, ["1", "8", "12", "0"]),
        (buffer, "trn2.3xlarge", {}, ["41943040"]),
        (f"{buffer} compiler_flags.dit", "cpu", {}, []),
    ):
        monkeypatch.setattr(profiles, "package_version", packages.get)
        monkeypatch.setattr(searching, "find_spec", packages.get)
        name, *words = settings.split()
        for key in keys.split():
            assert searching.candidates(key, resolve(name, tuple(words)), 4, 48) == values


def test_only_cuts_of_the_depth_and_of_a_stages_tokens_are_tried_and_others_refused():
    """At a cut depth every call must end with it, and the whole step cannot end early."""
    cpu = resolve("cpu")
    for depth, layers, blocks in ((2, None, "1 0"), (12, None, "1 12 0"), (48, 4, "1"), (48, 8, "1 8")):
        assert searching.candidates("blocks_per_graph", cpu, 2, depth, layers) == blocks.split()
    check_layers(8, cpu, 48)
    for layers in (0, 6, 52):
        with pytest.raises(UserError, match=f"--layers {layers}: wanted a multiple of 4, .*most"):
            check_layers(layers, cpu, 48)
    with pytest.raises(UserError, match="whole step in one graph.*blocks_per_graph=1 as well"):
        check_layers(4, resolve("cpu", ("blocks_per_graph=0",)), 48)
    buckets = make_job("", Size(96, 96, 9)).buckets  # 18 tokens
    for settings, tp, values in (((), 2, ["true"]), ((), 4, []), (("sequence_parallel=true",), 2, ["false"])):
        assert searching.candidates("sequence_parallel", resolve("cpu", settings), tp, 48, buckets=buckets) == values


def test_the_dits_compiler_flags_are_tried_and_each_compiles_to_graphs_of_its_own():
    neuron = resolve("trn2.3xlarge", ("backend=nxd",))
    others = searching.candidates("compiler_flags.dit", neuron, 4, 48)
    assert len(others) == 2 and all("--vectorize-strided-dma" in flags for flags in others)
    assert "--cc-pipeline-tiling-factor=2" in others[1]
    changed = [resolve(neuron.name, ("backend=nxd", f"compiler_flags.dit={flags}")) for flags in others]
    assert len({registry.identity(profile, "dit")["compiler_flags"] for profile in (neuron, *changed)}) == 3
    assert len({registry.identity(profile, "gemma3")["compiler_flags"] for profile in changed}) == 1


def test_the_layouts_that_are_tried_are_those_that_the_machines_cores_allow():
    dev = make_job("", SIZE, recipe="dev")  # four passes
    guided = replace(dev, guidance=Guidance(StreamGuidance(cfg_scale=3.0), StreamGuidance(cfg_scale=3.0)))
    contexts = [f"context_parallel={n} blocks_per_graph={4 * n}" for n in (2, 4)]
    for machine, tp, cores, job, first, count in (
        ("cpu", 2, 3, make_job("", SIZE), [], 0),
        ("cpu", 1, 2, make_job("", SIZE), ["context_parallel=2"], 1),
        ("cpu context_parallel=3", 1, 2, make_job("", SIZE), ["context_parallel=2"], 1),  # whatever was typed
        ("cpu", 1, 4, dev, [f"guidance_parallel={n} backend=torchdist" for n in (2, 4)], 4),
        ("cpu", 1, 4, guided, ["guidance_parallel=2 backend=torchdist"], 4),  # two passes: with each layout of 2
        ("cpu", 1, 4, make_job("", Size(0, 0, 9), sound_only=True), [], 0),
        ("trn2.48xlarge", 4, 64, make_job("", SIZE), contexts, 4),
        ("trn2.48xlarge", 4, 16, make_job("", SIZE), contexts, 2),
        ("trn2.48xlarge", 8, 64, make_job("", SIZE), [], 0),  # not context parallelism of pairs of chips
    ):
        name, *settings = machine.split()
        baseline, changes = searching.layout_candidates(resolve(name, tuple(settings)), tp, job, cores)
        assert baseline.items() >= dict(guidance_parallel="1", context_parallel="1").items()
        layouts = [" ".join(f"{key}={value}" for key, value in change.items()) for change in changes]
        assert layouts[: len(first)] == first and len(layouts) == count
        for change in changes:  # can be typed
            resolve(name, (*settings, *(f"{key}={value}" for key, value in (baseline | change).items())))


def test_the_first_blocks_of_a_graph_take_the_same_weights(tmp_path):
    graph, calls = {"parameters": {"transformer_blocks.0.w": [2]}}, [["blocks", number] for number in range(3)]
    content = {"identity": {}, "graphs": {"blocks": graph | {"file": "blocks.pt2"}}, "fields": {}}
    write_json(tmp_path / "graphs/manifest.json", content | {"runs": {"main": calls}})
    (tmp_path / "graphs/blocks.pt2").write_bytes(b"a graph")
    cut = first_blocks(tmp_path / "graphs", 1, tmp_path / "work")
    runs = json.loads((cut / "manifest.json").read_text())["runs"]
    assert runs["main"] == [["blocks", 0]]
    assert sorted(call for run in runs.values() for call in run) == calls
    assert (cut / "blocks.pt2").read_bytes() == b"a graph"


def test_a_journals_rows_are_taken_again_by_the_same_request_unless_it_is_damaged(tmp_path, capsys):
    path = tmp_path / "a.journal"
    journal = Journal(path, REQUEST, {"threads": "2"})
    rows = [journal.add(row(1.5)), journal.add(row(0, "took longer", OWN | {"threads": "2"}))]
    content, again = path.read_bytes(), Journal(path, REQUEST, {})
    assert again.rows == rows and again.fixed == {"threads": "2"}
    assert again.find(OWN, 0) == rows[0] and again.find(OWN, 1) is None
    assert Journal(path, REQUEST | {"request": "2"}, {}).rows == []
    path.write_bytes(content)
    assert Journal(path, REQUEST, {}, force=True).rows == []
    path.write_text('{"request": 1}')
    assert Journal(path, REQUEST, {}).rows == [] and "starts over" in capsys.readouterr().out


def test_a_variant_that_takes_too_long_is_killed_and_is_a_row_with_its_errors_sentence(tmp_path):
    save_file({"s1_video": torch.ones(1)}, tmp_path / "reference.safetensors")
    trials = Trials([], "float32", OWN, 0.3, tmp_path, Journal(tmp_path / "a.journal", REQUEST, {}))
    with within(60):
        measured = trials.measure(OWN, 0)
    assert measured.problem == "took longer than --limit 0.3 s"
    assert trials.measure(OWN, 0) is measured  # not again
    assert Journal(tmp_path / "a.journal", REQUEST, {}).rows == [measured]
    log = "compiling\nerror: rank 1 of 2 failed: no memory\nType less\n"
    assert last_words(log, 1) == "rank 1 of 2 failed: no memory"
    assert last_words("Traceback\n  File\nKeyError: 'x'\n", 1) == "KeyError: 'x'"
    assert last_words("", -9) == "its process was killed (SIGKILL)"


def test_the_table_has_a_line_for_each_variant_with_what_became_of_it():
    faster, broken = OWN | {"attention": "matmul"}, OWN | {"threads": "2"}
    rows = [row(100), row(50, "", faster), row(0, "took longer", broken), row(52, "", faster, 1)]
    lines = table(rows, OWN, faster).splitlines()
    own, best = (" ".join(line.split()) for line in lines[1:3])
    assert own == "100.00 1 1.00 1.0 1.0e-07 the profile's own: own"
    assert best == "51.00 2 0.50 1.0 1.0e-07 attention=matmul: chosen"
    assert lines[3].endswith("threads=2: took longer") and len(lines) == 4


@pytest.fixture
def opened(tiny, tmp_path):
    """opened(*settings) is the workspace of a command line; take: one that takes the tuned settings."""

    def open_workspace(*settings: str, take: bool = False, tp: int = 2) -> Workspace:
        words = f"--checkpoint-path {tiny.checkpoint} --gemma-root {tiny.gemma_root} --artifacts-dir {tmp_path}"
        words += f" --profile cpu --tp-degree {tp} --dtype float32"
        words += "".join(f" --profile-set {setting}" for setting in settings)
        return flags.workspace(flags.parser("", "", gemma=True).parse_args(words.split()), tuned=take)

    return open_workspace


def choose(workspace: Workspace, run: dict, graphs: dict, size: Size = SIZE) -> TunedSettings:
    """Leave a file as a tuning of a size leaves it."""
    config = workspace.transformer.digest
    identity = tuned_settings.identity(workspace.profile, workspace.tp, workspace.dtype_name, config)
    path = tuned_settings.file_of(workspace.artifacts, identity)
    settings = tuned_settings.load(workspace.artifacts, identity) or TunedSettings(path, identity)
    settings.run = run
    settings.sizes[tuned_settings.size_key(make_job("", size).buckets)] = {"settings": graphs, "run": run}
    settings.write()
    return settings


def dit_identity(workspace: Workspace, size: Size = SIZE) -> dict:
    return workspace.dit_graphs(make_job("", size).buckets)[0].identity


def test_graph_settings_are_those_of_the_dit_and_of_its_size_and_typed_ones_win_key_by_key(opened):
    plain = opened()
    choose(plain, {"threads": "2"}, {"attention": "matmul", "blocks_per_graph": "1"})
    ours = dit_identity(workspace := opened(take=True))
    assert (ours["attention"], ours["blocks_per_graph"]) == ("matmul", 1)
    assert dit_identity(workspace, Size(96, 64, 9)) == dit_identity(plain, Size(96, 64, 9))
    of_text = ([graphs.identity for graphs in of.text_graphs([64])] for of in (workspace, plain))
    assert next(of_text) == next(of_text)
    assert workspace.profile.attention == "sdpa"
    assert workspace.profile.threads == workspace.identity["rank_threads"] == 2
    ours = dit_identity(workspace := opened("attention=sdpa", "threads=1", take=True))
    assert (ours["attention"], ours["blocks_per_graph"], workspace.profile.threads) == ("sdpa", 1, 1)
    assert dit_identity(opened("blocks_per_graph=2", take=True))["blocks_per_graph"] == 2


def test_a_size_is_found_by_its_shapes_whatever_its_timesteps_and_a_layout_has_its_own_file():
    def key(size, **fields):
        return tuned_settings.size_key(make_job("", size, **fields).buckets)

    two = Size(128, 128, 9, two_stage=True)
    assert key(Size(96, 64, 9)) == key(Size(64, 96, 9))
    both = [replace(bucket, timesteps=count) for bucket in make_job("", two).buckets for count in (1, 2)]
    assert tuned_settings.size_key(both) == key(two) == "v8-a9+v32-a9"
    assert len({key(two), key(two, recipe="dev"), key(two, nag_scale=11.0)}) == 3
    one, groups = (tuned_settings.identity(resolve("cpu", s), 2, "float32", "") for s in ((), ("context_parallel=2",)))
    assert groups["device"] == one["device"] | {"context_parallel": 2}
    assert tuned_settings.file_of(Path(), one) != tuned_settings.file_of(Path(), groups)


def test_a_size_tuned_under_other_settings_of_the_run_is_not_taken(opened):
    choose(opened(), {"threads": "2"}, {"attention": "matmul"}, Size(96, 64, 9))
    choose(opened(), {"threads": "1"}, {"attention": "matmul"})
    workspace = opened(take=True)
    assert dit_identity(workspace)["attention"] == "matmul"
    assert dit_identity(workspace, Size(96, 64, 9))["attention"] == "sdpa"


def test_a_file_of_a_store_changes_only_what_a_tuning_chooses_and_a_damaged_one_nothing(opened, capsys):
    foreign = {"environment.LD_PRELOAD": "x.so", "vae_tile": "64", "nonsense": "x"}
    settings = choose(opened(), foreign | {"threads": "2"}, foreign)
    assert opened(take=True).profile.settings == ("threads=2",)
    for content, message in (
        ("{", "cannot be read as JSON"),
        ('{"identity": {}, "run": {}, "sizes": {}}', "does not match its name"),
        ({}, "is not a file of tuned settings ('sizes')"),
        ({"sizes": {"a": {"run": {}}}}, "is not a file of tuned settings"),
        ({"sizes": {}, "run": None}, "is not a file of tuned settings"),
        ({"sizes": {}, "run": {"threads": 2}}, "a setting is not text"),
    ):
        own = {"identity": settings.identity, "run": {}}
        settings.path.write_text(content if isinstance(content, str) else json.dumps(own | content))
        workspace = opened(take=True)
        assert workspace.tuned_settings is None and workspace.profile.threads == 0
        assert message in capsys.readouterr().out


def test_what_does_not_fit_the_run_is_left_out_with_a_sentence(opened, capsys, monkeypatch):
    settings = choose(opened(), {"compile_backend": "aot_eager"}, {"attention": "nki_const_max"})
    assert settings.profile_of_run(resolve("cpu", ("device=cuda",))).compile_backend == "export"
    assert "tuned settings are ignored: --profile-set" in capsys.readouterr().out
    assert settings.profile_of_size(resolve("trn2.3xlarge"), make_job("", SIZE).buckets).attention == "nki"
    assert re.match("tuned settings are ignored:.*nki_const_max", capsys.readouterr().out)
    # Of another model nothing is said; other versions are.
    assert opened(take=True, tp=4).tuned_settings is None and capsys.readouterr().out == ""
    monkeypatch.setattr(tuned_settings.machine, "package_version", {"torch": "9.9"}.get)
    assert opened(take=True).tuned_settings is None
    assert "was tuned with other versions and is ignored" in capsys.readouterr().out


def test_commands_take_the_file_and_print_it_in_one_line_and_in_the_report(opened, capsys):
    path = choose(opened(), {"threads": "2"}, {"attention": "matmul"}).path
    workspace, job = opened(take=True), make_job("waves", SIZE)
    workspace.print_tuned(job.buckets)
    workspace.print_tuned()
    assert capsys.readouterr().out == f"tuned: threads=2 attention=matmul ({path}; {IGNORING} ignores it)\n"
    before, after = (run_identity(job, of, RunOptions()) for of in (opened(), workspace))
    differing = {name for name, _, _ in artifacts.differences(before, after)}
    assert differing == {"attention", "profile_set", "rank_threads"}  # --resume begins anew
    report = make_report(Recorder(), workspace, job.describe())
    settings = {"run": ("threads=2",), "v8-a9": ("attention=matmul",)}
    assert report["identity"]["tuned"] == {"file": str(path), "settings": settings}


def test_a_typed_no_ignores_the_file_and_is_in_the_commands_that_depend_on_it(opened, capsys):
    path = choose(opened(), {"threads": "2"}, {"attention": "matmul"}).path
    workspace, job = opened("tuned=no", take=True), make_job("", SIZE)
    workspace.print_tuned(job.buckets)
    assert workspace.tuned_settings is None and capsys.readouterr().out == ""
    assert dit_identity(workspace)["attention"] == "sdpa" and workspace.identity == opened().identity
    with pytest.raises(UserError, match=f"compile transformer .*{IGNORING}$"):
        workspace.dit_program_for(job, job.stages[0])
    with pytest.raises(UserError) as error:
        workspace.dit_weights()
    assert IGNORING not in str(error.value)  # weights do not depend on it
    # Graphs compiled before the tuning, beside as near ones of another size, are named with what to type.
    workspace, before = opened(take=True), dit_identity(opened())
    for identity in (before, dit_identity(workspace) | {"bucket": "v1-a1-t1-s8"}):
        write_json(artifacts.folder(workspace.artifacts, identity) / "manifest.json", {"identity": identity})
    with pytest.raises(UserError) as error:
        workspace.dit_program_for(job, job.stages[0])
    difference, make, tuned_line = str(error.value).splitlines()
    assert "attention: got sdpa, wanted matmul" in difference
    assert invocation.command("compile transformer") in make and "attention" not in make
    assert tuned_line == f"tuned: threads=2 attention=matmul ({path}; {IGNORING} ignores it)"


def tune(checkpoint: Path, folder: Path, *words: object) -> None:
    typed = f"--checkpoint-path {checkpoint} --artifacts-dir {folder} --profile cpu --recipe distilled"
    command.main([*typed.split(), "--height", "64", "--width", "64", "--num-frames", "9", *map(str, words)])


def test_what_is_typed_wrongly_is_refused_before_anything_runs(tiny, tmp_path):
    for words, message in {
        "--keys attention speed": "--keys speed: unknown; known: backend,",
        "--limit 0": "--limit 0: wanted seconds above 0",
        "--steps -1": "--steps -1: wanted 1 or more",
        "--layouts -1": "--layouts -1: wanted 1 or more",
        "--layers 1": "--layers 1: wanted a multiple of 2",
        "--height 65": "--height 65 is not a multiple of 32",
        "--recipe dev --guidance video_stg_blocks=7": "video STG block 7: this model has",
        "--recipe dev --nag-scale 11": "--nag-scale cannot",
        "": "no dit weights in .*\nMake them: .* shard transformer ",
    }.items():
        with pytest.raises(UserError, match=message):
            tune(tiny.checkpoint, tmp_path, "--tp-degree", 2, *words.split())


def test_a_download_of_ltx_2_5_is_tuned_with_its_sampler_and_has_no_convolutions_to_time(split, tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(Workspace, "dit_weights", lambda self, loras=(): tmp_path)
    monkeypatch.setattr(command.Tuning, "run", lambda self: jobs.append(self.job))
    tune(split.folder, tmp_path)
    assert [stage.sampler for stage in jobs.pop().stages] == ["ancestral"]
    with pytest.raises(UserError, match="--vae: the diffusion decoder has no convolutions"):
        tune(split.folder, tmp_path, "--video-vae-path", split.diffusion_vae, "--vae")


def test_the_graphs_of_a_tuned_size_are_identified_by_its_compiler_flags(tiny, tmp_path, monkeypatch):
    default, tuned = (resolve("trn2.3xlarge", ("backend=nxd", *more)) for more in ((), ("compiler_flags.dit=-O3",)))
    workspace = Workspace(tiny.checkpoint, default, tmp_path, 4, "bfloat16")
    monkeypatch.setattr(workspace, "dit_profile", lambda *_: tuned)
    (graphs,) = workspace.dit_graphs(make_job("", SIZE).buckets)
    assert graphs.identity["compiler_flags"] == "-O3 --lnc=2"
