"""Every command that an error, a hint or a page prints is run by a test that has its mark, or is in a list here.

The commands are collected from the code (test/printed.py): a new one fails here. A mark names one place:

    @runs("host/media.py:video_size: ffmpeg")
    def test_a_video_of_other_sides_is_taken_after_the_command_that_the_error_prints(...)
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from conftest import QUICK, ROOT
from helpers import made_film, one_thread, tone, write_sound  # noqa: F401
from printed import marked, printed, runs
from typed import parser_of

from ltx_neuron.backends import environment
from ltx_neuron.commands import VERBS, dispatch
from ltx_neuron.config import profiles
from ltx_neuron.errors import UserError
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.serve import __main__ as serve
from ltx_neuron.service.tokens import Tokens
from ltx_neuron.tune.search import check_layers
from unit.project import test_docs
from unit.project.test_docs import PAGES, PROGRAM, commands

# Places whose commands no test here can run, and why; FILE: * are all of a file's
NOT_RUN = """\
backends/nxd/compile.py:set_environment: unset <- of a Neuron compiler's environment
backends/nki.py:-: --profile-set attention= <- of Neuron's own compiler
backends/torchdist/compiled.py:group_names: --profile-set context_parallel= <- after torch-neuronx's own choice
backends/neuron_errors.py: * <- repairs a Neuron driver, its packages, cores or chips
doctor/neuron.py: * <- repairs a Neuron driver, its packages, cores or chips
doctor/groups.py: * <- after an exchange of real chips that differs
config/profiles.py:require_runtime: --profile | --tp-degree <- of a machine with chips or GPUs
config/profiles.py:detect: --profile | ltx-neuron doctor <- of a machine with chips that fit no profile
config/profiles.py:check_degree: --tp-degree <- of ranks that a tiny model has no heads for: test_profiles.py
config/profiles.py:check_cores: --tp-degree <- of ranks that a tiny model has no heads for: test_profiles.py
sampling/size.py:check: --frame-rate <- of a file of more than 1000 frames a second
plan/__init__.py: * <- of a model that does not fit a chip: test_plan.py has the table
plan/clip.py:_step_ms: ltx-neuron tune <- measures a chip
plan/table.py:layout_table: --profile <- of the layouts of chips
artifacts/tuned_settings.py:load: ltx-neuron tune <- measures a chip
doctor/checks.py:check_memory: ltx-neuron plan <- of a chip's memory
doctor/checks.py:can_run: ltx-neuron plan <- of a chip's memory
doctor/checks.py:host: --artifacts-dir <- names a larger disk
doctor/checks.py:examine: ltx-neuron doctor <- takes a command out of a message
fleet/batch.py:generate_batch: --num-frames <- of a cluster of Ray's; test/slow/test_fleet.py starts one
fleet/cluster.py: * <- of a cluster of Ray's; test/slow/test_fleet.py starts one
artifacts/store.py:-: hf auth | aws configure <- asks for a person's token or keys
config/common.py:gemma_download: hf auth <- asks for a person's token
hub.py:_as_user_errors: hf auth | hf_home | unset | hf download <- of a gated, a full or no network
hub.py:_download: hf_home <- names a larger disk
service/database.py:__init__: --data-dir <- names another folder
service/reference.py:_example: curl <- sends the examples that test_openapi.py sends
engine/resume.py:_check_identity: ltx-neuron generate <- names what writes such a file
report/table.py:_how_to_make: ltx-neuron generate <- names what writes such a file
errors.py:-: chmod | dmesg <- shows the system's messages, or which permission is missing, the owner's choice
backends/ranks.py:broken_latents: hf download <- reads a tensor and prints no command
"""
# Programs whose commands a test of this file collects itself, in all places.
BY_PROGRAM = ("pip install", "pip uninstall")


def not_run() -> Iterator[str]:
    for line in NOT_RUN.splitlines():
        place, _, commands = line.partition(" <- ")[0].rpartition(": ")
        if commands == "*":
            yield from (key for key in PLACES if key.startswith(f"{place}:"))
        yield from (f"{place}: {command}" for command in commands.split(" | ") if command != "*")


PLACES = {command.key for command in printed()}


def test_every_printed_command_is_run_by_a_test_and_no_mark_names_one_that_is_gone():
    listed = {*REMEDIES, *not_run()}
    missing = sorted(key for key in PLACES - {key for key, _ in marked()} - listed if not key.endswith(BY_PROGRAM))
    assert not missing, "no test runs these; mark one with @runs(KEY):\n" + "\n".join(missing)
    # A mark names one place: with a wildcard, a new command would be run by nobody.
    assert [mark for mark in marked() if mark[0] not in PLACES] == [] and listed <= PLACES
    commands = {key.partition(": ")[2] for key in PLACES}
    assert {"ffmpeg", "hf download", "ltx-neuron shard", "pip install", "rm", "--recipe"} <= commands
    assert len(PLACES) > 150  # the collection works


QUICK_SIZE = "--height", 64, "--width", 64, "--num-frames", 9, "--profile-set", QUICK[0]
COMMON = {
    "--checkpoint-path": "{ckpt}",
    "--gemma-root": "{gemma}",
    "--artifacts-dir": "{out}/artifacts",
    "--profile": "cpu",
    "--tp-degree": "1",
    "--dtype": "float32",
}
SIZE = {"--height": "64", "--width": "64", "--num-frames": "9"}
JOB = {"--recipe": "distilled", **SIZE, "--prompt": "rain", "--output-path": "{out}/a.mp4"}
# The flag that an error or a hint says to type <- the command that provokes it. ~ leaves a flag of
# JOB out. => has what to type where the message leaves it to the reader ("a smaller one").
TYPED = """\
config/common.py:check_heads: --tp-degree <- generate --tp-degree 3
commands/prepare.py:jobs_of: --num-frames <- prepare --checkpoint-path {split} ~--gemma-root ~--num-frames \
    --auto-duration 1 2
flags/__init__.py:workspace: --gemma-root <- generate ~--gemma-root
flags/__init__.py:_guidance_settings: --guidance video_cfg= <- generate --recipe dev --guidance 3
flags/__init__.py:_guidance_settings: --guidance <- generate --recipe dev --guidance video_cfg => --guidance \
    video_cfg=3
commands/shard.py:main: --checkpoint-path <- shard ~--checkpoint-path
host/facts.py:read_media: --lora <- generate ~--num-frames --two-stage --reference-video {film}
engine/outputs.py:check: --output-path <- generate ~--output-path
engine/outputs.py:check_batch: --output-dir <- batch ~--prompt ~--output-path --prompts-file {prompts}
host/encode_inputs.py:_too_short: --audio-start-time <- generate --audio-path {sound} --audio-start-time 0.4 => \
    --audio-start-time 0
host/encode_inputs.py:_too_short: --num-frames <- generate --num-frames 25 --audio-path {sound}
host/video.py:check_output_path: --output-path <- generate --recipe dev --sound-only ~--height ~--width
host/video.py:check_output_path: --sound-only <- generate --output-path {out}/a.wav => --sound-only --recipe dev
host/duration.py:duration_head_spec: --num-frames <- generate ~--num-frames --auto-duration 1 2 --duration-head-path \
    {head} => ~--auto-duration ~--duration-head-path --num-frames 9
sampling/rules.py:-: --ic-lora <- generate --reference-audio {sound}
job.py:check: --prompt <- generate --prompt ' '
engine/preflight.py:check_distilled_loras: --lora <- generate --distilled-lora {lora} 1 => ~--distilled-lora --lora \
    {lora}
engine/preflight.py:check_guidance_groups: --profile-set guidance_parallel= <- generate --profile-set \
    guidance_parallel=2
config/profiles.py:resolve: --profile <- generate --profile gpu => --profile cpu
config/profiles.py:_check: --profile-set backend= <- plan --profile trn2.3xlarge --profile-set backend=nxd \
    --profile-set guidance_parallel=2
sampling/conditions.py:check: --end-time <- generate ~--height ~--width ~--num-frames --video-path {film} \
    --start-time 0 --end-time 9
sampling/extension.py:check: --num-frames <- generate ~--height ~--width --num-frames 121 --video-path {film} \
    --extend 1
sampling/rules.py:-: --nag-scale <- generate --negative-prompt blurry
sampling/rules.py:-: --recipe <- generate --video-cfg-guidance-scale 3
sampling/inputs.py:check_inputs: --stage-2-ic-lora <- generate --two-stage --height 128 --width 128 --ic-lora {lora} \
    --video-conditioning {film} 1 --tile --tile-height 64 --tile-width 64
weights/model_files.py:text_encoder: --gemma-root <- generate --checkpoint-path {split}
sampling/inputs.py:check_strengths: --distilled-lora <- generate --recipe dev --two-stage --distilled-lora {lora} 1 \
    --distilled-lora-strength-stage-1 0.5 => --distilled-lora {lora}
"""
REMEDIES = dict(line.split(" <- ") for line in TYPED.splitlines())


@pytest.fixture(scope="module")
def paths(tiny, split, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("printed")
    made_film(folder / "film.mp4", 25, 64, 64)
    stored = (tone(48000, 0.5) * 2**15).short().T.reshape(1, -1).contiguous().numpy()
    write_sound(folder / "sound.wav", stored, 48000, "pcm_s16le", "stereo", "s16")
    (folder / "prompts.jsonl").write_text('{"prompt": "rain"}\n')
    (folder / "out").mkdir()
    own = {path.stem: path for path in folder.iterdir()}
    head = split.folder / RELEASE_FILES["Lightricks/LTX-2.5"]["duration_head"]
    model = {"ckpt": tiny.checkpoint, "gemma": tiny.gemma_root, "lora": tiny.lora}
    return own | model | {"split": split.folder, "head": head}


def command_of(line: str, paths: dict[str, Path]) -> tuple[list[str], list[str]]:
    typed, _, remedy = line.partition(" => ")
    verb, *words = shlex.split(typed)
    left_out = {word[1:] for word in words if word[0] == "~"}
    words = [word for word in words if word[0] != "~"]
    defaults = COMMON | (JOB if verb in ("generate", "prepare", "batch") else SIZE if verb in ("tune", "plan") else {})
    left_out |= {"shard": {"--gemma-root"}, "prepare": {"--prompt", "--output-path"}}.get(verb, set())
    defaults = {flag: value for flag, value in defaults.items() if flag not in left_out | {*words}}
    verbs = ["shard", "transformer"] if verb == "shard" else [verb]
    typed = [*verbs, *words, *(word for pair in defaults.items() for word in pair)]
    return [word.format(**paths) for word in typed], [word.format(**paths) for word in shlex.split(remedy)]


def printed_by(words: list[str], capsys) -> str:
    refused = ""
    try:
        dispatch(words)
    except SystemExit:
        pass
    except UserError as error:
        refused = str(error)
    return "".join(capsys.readouterr()) + refused


def applied(words: list[str], remedy: list[str]) -> list[str]:
    """A command with the flag of a remedy in the place of its own, and without those with ~."""
    replaced = {word.lstrip("~") for word in remedy if word.startswith(("--", "~--"))}
    kept, flag = [], ""
    for word in words:
        flag = word if word.startswith("--") else flag
        kept += [word] if flag == "--profile-set" or flag not in replaced else []
    return [*kept, *(word for word in remedy if word[0] != "~")]


def remedy_in(message: str, flag: str, paths: dict[str, Path]) -> list[str]:
    """The flag that a message says to type, with its value."""
    sentence = re.search(
        rf"[Tt]ype (?:for example |at most )?{flag}(?:[ ]with one of|[ ]with at most|[ ]with)?"
        r"((?: (?!-|or\b|as\b|\()(?:'[^']*'|[^\s,;]+))?)",
        message,
    )
    assert sentence, message
    examples = {"PATH": paths["lora"], "FILE": paths["ckpt"], "DIR": paths["gemma"], "N": 9}
    if flag == "--gemma-root" and "in one file" in message:
        examples["FILE"] = next((paths["split"] / "text_encoders").glob("*.safetensors"))
    return [flag, *(str(examples.get(word, word)) for word in shlex.split(sentence[1].rstrip(".")))]


@pytest.mark.parametrize("key", REMEDIES)
def test_a_command_with_the_flag_that_its_error_names_is_not_refused_so_again(key, paths, capsys, monkeypatch):
    monkeypatch.chdir(paths["out"])
    words, remedy = command_of(REMEDIES[key], paths)
    message = printed_by(words, capsys)
    provoked = [command for command in printed() if command.key == key and command.pattern.search(plain(message))]
    assert provoked, message
    flag = key.partition(": ")[2].split()[0]
    again = printed_by(applied(words, remedy or remedy_in(message, flag, paths)), capsys)
    assert not [command for command in provoked if command.pattern.search(plain(again))], again


def plain(message: str) -> str:
    return re.sub(r"\s+", " ", message)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_block_of_a_page_is_taken_by_its_parser(page):
    """With its values; test_docs.py looks for the names of flags alone, also in sentences."""
    with mock.patch.object(test_docs, "inline_code", lambda page: []):
        shown = commands(page)
    for words in shown:
        if words[0] == PROGRAM and "--help" not in words:
            parser_of(words[1:], parses=True)


@runs(
    "commands/compile.py:main: ltx-neuron compile",
    "flags/verbs.py:batch: ltx-neuron batch",
    "flags/verbs.py:generate: ltx-neuron generate",
    "flags/verbs.py:prepare: ltx-neuron prepare",
    "commands/shard.py:main: ltx-neuron shard",
    "commands/shard.py:-: ltx-neuron verify",
    "flags/verbs.py:doctor: ltx-neuron doctor",
    "flags/verbs.py:plan: ltx-neuron plan",
    "serve/flags.py:-: ltx-neuron serve",
    "tune/flags.py:-: ltx-neuron tune",
)
@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_every_help_are_taken_by_its_parser(verb, capsys):
    for model in ("transformer", "gemma3", "vae") if verb in ("shard", "compile") else ("",):
        with pytest.raises(SystemExit):
            dispatch([*filter(None, [verb, model]), "--help"])
        shown = capsys.readouterr().out.replace("\\\n", " ")
        for line in re.findall(rf"^ *{PROGRAM} (\w.*)", shown, re.MULTILINE):
            parser_of(shlex.split(line), parses=True)


def ran(line: str, *more: object) -> None:
    words = shlex.split(line)
    verb = next(at for at, word in enumerate(words) if word in VERBS)
    dispatch([*words[verb:], *map(str, more)])


@runs("commands/generate.py:_workspace: ltx-neuron prepare", "commands/prepare.py:main: ltx-neuron generate")
def test_a_newcomer_comes_to_a_video_by_typing_what_is_printed(tiny, tmp_path, capsys, monkeypatch):
    """prepare, which the refusal names, ends with a command that makes out.mp4 as it stands."""
    monkeypatch.chdir(tmp_path)
    files = ["--checkpoint-path", tiny.checkpoint, "--gemma-root", tiny.gemma_root]
    machine = ["--artifacts-dir", tmp_path / "a", "--profile", "cpu", "--tp-degree", 1]
    asked = [*files, *machine, "--dtype", "float32", "--recipe", "distilled", *QUICK_SIZE]
    video = "--prompt", "rain", "--output-path", tmp_path / "rain.mp4"
    with pytest.raises(UserError) as refused:
        dispatch([*map(str, ["generate", *asked, *video])])
    ran(str(refused.value).rpartition("\nMake them: ")[2])
    *_, generate = capsys.readouterr().out.strip().splitlines()
    ran(generate)
    assert (tmp_path / "out.mp4").stat().st_size > 1000


@runs("tune/search.py:check_layers: --profile-set blocks_per_graph=")
def test_a_step_can_end_early_with_the_setting_that_is_printed():
    with pytest.raises(UserError) as refused:
        check_layers(1, profiles.resolve("cpu", ("blocks_per_graph=0",)), 2)
    setting = re.search(r"type --profile-set (\S+)", str(refused.value))[1]
    check_layers(1, profiles.resolve("cpu", (setting,)), 2)


@runs(
    "serve/__main__.py:check: --tokens-file",
    "serve/__main__.py:check: ltx-neuron serve",
    "service/tokens.py:load: ltx-neuron serve",
)
def test_a_service_for_other_machines_is_taken_with_the_token_that_is_printed(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["--checkpoint-path", str(tiny.checkpoint), "--host", "0.0.0.0"]

    def check(*more: str) -> None:
        serve.check(serve.build_parser().parse_args([*asked, *more]))

    with pytest.raises(UserError, match="no token is required") as refused:
        check()
    ran(re.search("Make one: (.*)", str(refused.value))[1])
    check(*re.search("then type (--tokens-file [\\w.]+)", str(refused.value))[1].split())
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(UserError, match="holds no tokens") as refused:
        Tokens.load(tmp_path / "empty.json")
    ran(str(refused.value).rpartition("make one: ")[2])
    assert Tokens.load(tmp_path / "empty.json").hashes


def test_the_extras_that_pip_is_told_to_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for command in printed() for line in re.findall(r"pip install ([^;)\n]+)", command.text)]
    lines += [shlex.join(words[2:]) for page in PAGES for words in commands(page) if words[0] == "pip"]
    named = {name for line in lines for some in re.findall(r"\[([a-z,]+)\]", line) for name in some.split(",")}
    assert {"serve", "fleet"} <= named <= extras.keys()


@runs("backends/environment.py:cores: unset", "backends/environment.py:cores: export")
@pytest.mark.parametrize("visible", ["0-1", "0,1,2,2", "0,2,4,6", "1-4"])
def test_cores_that_are_refused_are_taken_after_the_printed_export(visible, monkeypatch):
    profile = profiles.resolve("trn2.3xlarge")
    name = "NEURON_RT_VISIBLE_CORES"
    monkeypatch.setenv(name, visible)
    with pytest.raises(UserError) as refused:
        environment.cores(profile, 4)
    line = str(refused.value).rpartition("\nType: ")[2]
    shell = subprocess.run(["bash", "-c", f"{line}; echo ${name}"], capture_output=True, text=True)
    monkeypatch.setenv(name, shell.stdout.strip())
    assert len(environment.cores(profile, 4)) == 4
