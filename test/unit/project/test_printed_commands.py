"""Commands and flags that errors, hints and helps print can be typed, and are taken; those that download files:
test_download_commands.py."""

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from conftest import QUICK, ROOT
from helpers import made_film, one_thread, tone, write_sound  # noqa: F401
from typed import parser_of

from ltx_neuron.backends import environment
from ltx_neuron.commands import VERBS, dispatch
from ltx_neuron.config import profiles
from ltx_neuron.errors import UserError
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.serve import __main__ as serve
from ltx_neuron.service.tokens import Tokens
from unit.project.test_docs import PAGES, PROGRAM, all_flags, commands, flags_of, nodes_of

SOURCES = sorted((ROOT / "src/ltx_neuron").rglob("*.py"))
NODES = [(path.name, node, text) for path in SOURCES for node, text in nodes_of(path)]
# "Type --num-frames 9", "type for example {recipe} dev": a field in braces becomes its flag.
TYPE = re.compile(
    r"\b[Tt]ype (?:for example |at most |a (?:smaller|larger) |another )?(--[a-z][\w-]*|\{\w+\})(?: (?:with )?(\w+)=)?"
)


def test_every_flag_setting_and_verb_that_the_sources_say_to_type_exists():
    found = []
    for name, node, text in NODES:
        for flag, setting in TYPE.findall(text or ""):
            flag = flag if flag[0] == "-" else "--" + flag[1:-1].replace("_", "-")
            assert flag in all_flags(), (name, text)
            assert flag != "--profile-set" or not setting or hasattr(profiles.resolve("cpu"), setting), (name, text)
            found.append(flag)
        called = getattr(getattr(node, "func", None), "attr", "") or getattr(getattr(node, "func", None), "id", "")
        if called in ("command", "_command") and isinstance(node.args[0], ast.Constant):  # of ltx-neuron
            verb, flags = (
                node.args[0].value.split()[0],
                {word.value for word in node.args if isinstance(word, ast.Constant)},
            )
            assert verb in VERBS and {flag for flag in flags if flag[0] == "-"} <= flags_of(verb), (name, flags)
            found.append(verb)
    assert {"--num-frames", "--recipe", "--profile-set", "serve", "prepare"} <= {*found} and len(found) > 80


def test_the_extras_that_pip_is_told_to_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for _, _, text in NODES for line in re.findall(r"pip install ([^;)\n]+)", text or "")]
    lines += [shlex.join(words[2:]) for page in PAGES for words in commands(page) if words[0] == "pip"]
    named = {name for line in lines for some in re.findall(r"\[([a-z,]+)\]", line) for name in some.split(",")}
    assert {"serve", "fleet"} <= named <= extras.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_every_help_are_taken_by_its_parser(verb, capsys):
    for model in ("transformer", "gemma3", "vae") if verb in ("shard", "compile") else ("",):
        with pytest.raises(SystemExit):
            dispatch([*filter(None, [verb, model]), "--help"])
        shown = capsys.readouterr().out.replace("\\\n", " ")
        for line in re.findall(rf"^ *{PROGRAM} (\w.*)", shown, re.MULTILINE):
            parser_of(shlex.split(line), parses=True)


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
--tp-degree <- generate --tp-degree 3
--num-frames <- prepare --checkpoint-path {split} ~--gemma-root ~--num-frames --auto-duration 1 2
--gemma-root <- generate ~--gemma-root
--guidance <- generate --recipe dev --guidance 3
--guidance <- generate --recipe dev --guidance video_cfg => --guidance video_cfg=3
--checkpoint-path <- shard ~--checkpoint-path
--lora <- generate ~--num-frames --two-stage --reference-video {film}
--output-path <- generate ~--output-path
--output-dir <- batch ~--prompt ~--output-path --prompts-file {prompts}
--audio-start-time <- generate --audio-path {sound} --audio-start-time 0.4 => --audio-start-time 0
--num-frames <- generate --num-frames 25 --audio-path {sound}
--output-path <- generate --recipe dev --sound-only ~--height ~--width
--sound-only <- generate --output-path {out}/a.wav => --sound-only --recipe dev
--num-frames <- generate ~--num-frames --auto-duration 1 2 --duration-head-path {head} => ~--auto-duration \
    ~--duration-head-path --num-frames 9
--ic-lora <- generate --reference-audio {sound}
--prompt <- generate --prompt ' '
--lora <- generate --distilled-lora {lora} 1 => ~--distilled-lora --lora {lora}
--profile-set <- generate --profile-set guidance_parallel=2
--profile <- generate --profile gpu => --profile cpu
--profile-set <- plan --profile trn2.3xlarge --profile-set backend=nxd --profile-set guidance_parallel=2
--end-time <- generate ~--height ~--width ~--num-frames --video-path {film} --start-time 0 --end-time 9
--num-frames <- generate ~--height ~--width --num-frames 121 --video-path {film} --extend 1
--nag-scale <- generate --negative-prompt blurry
--recipe <- generate --video-cfg-guidance-scale 3
--stage-2-ic-lora <- generate --two-stage --height 128 --width 128 --ic-lora {lora} --video-conditioning {film} 1 \
    --tile --tile-height 64 --tile-width 64
--gemma-root <- generate --checkpoint-path {split}
--distilled-lora <- generate --recipe dev --two-stage --distilled-lora {lora} 1 \
    --distilled-lora-strength-stage-1 0.5 => --distilled-lora {lora}
"""


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


def printed_by(words: list[str], capsys) -> str:
    refused = ""
    try:
        dispatch(words)
    except SystemExit:
        pass
    except UserError as error:
        refused = str(error)
    return " ".join(("".join(capsys.readouterr()) + refused).split())


def replaced(words: list[str], remedy: list[str]) -> list[str]:
    """A command with the flags of a remedy in the place of its own, and without those with ~."""
    flags, kept, flag = {word.lstrip("~") for word in remedy if word.startswith(("--", "~--"))}, [], ""
    for word in words:
        flag = word if word.startswith("--") else flag
        kept += [word] if flag == "--profile-set" or flag not in flags else []
    return [*kept, *(word for word in remedy if word[0] != "~")]


@pytest.mark.parametrize("row", TYPED.splitlines())
def test_a_command_with_the_flag_that_its_error_names_is_not_refused_so_again(row, paths, capsys, monkeypatch):
    monkeypatch.chdir(paths["out"])
    flag, _, line = row.partition(" <- ")
    (verb, *words), remedy = (shlex.split(part.format(**paths)) for part in f"{line} => ".split(" => ")[:2])
    defaults = COMMON | (JOB if verb in ("generate", "prepare", "batch") else SIZE if verb == "plan" else {})
    left_out = {"shard": ["~--gemma-root"], "prepare": ["~--prompt", "~--output-path"]}.get(verb, [])
    typed = [word.format(**paths) for pair in defaults.items() for word in pair]
    typed = [verb, *["transformer"] * (verb == "shard"), *replaced(typed, [*left_out, *words])]
    message = printed_by(typed, capsys)
    sentence = re.search(
        rf"[Tt]ype (?:for example |at most |a smaller )?{flag}(?: with one of| with at most| with)?"
        r"((?: (?!-|or\b|as\b|\()(?:'[^']*'|[^\s,;]+))?)",
        message,
    )
    assert sentence, message
    values = {"PATH": paths["lora"], "FILE": paths["ckpt"], "DIR": paths["gemma"], "N": 9}
    if flag == "--gemma-root" and "in one file" in message:
        values["FILE"] = next((paths["split"] / "text_encoders").glob("*.safetensors"))
    named = [flag, *(str(values.get(word, word)) for word in shlex.split(sentence[1].rstrip(".")))]
    assert sentence[0] not in printed_by(replaced(typed, remedy or named), capsys)


def ran(line: str) -> None:
    words = shlex.split(line)
    dispatch(words[next(at for at, word in enumerate(words) if word in VERBS) :])


def test_a_newcomer_comes_to_a_video_by_typing_what_is_printed(tiny, tmp_path, capsys, monkeypatch):
    """prepare, which the refusal names, ends with a command that makes out.mp4 as it stands."""
    monkeypatch.chdir(tmp_path)
    asked = ["--checkpoint-path", tiny.checkpoint, "--gemma-root", tiny.gemma_root, "--artifacts-dir", tmp_path / "a"]
    asked += ["--profile", "cpu", "--tp-degree", 1, "--dtype", "float32", "--recipe", "distilled"]
    asked += ["--height", 64, "--width", 64, "--num-frames", 9, "--profile-set", QUICK[0]]
    with pytest.raises(UserError) as refused:
        dispatch([*map(str, ["generate", *asked, "--prompt", "rain", "--output-path", tmp_path / "rain.mp4"])])
    ran(str(refused.value).rpartition("\nMake them: ")[2])
    *_, generate = capsys.readouterr().out.strip().splitlines()
    ran(generate)
    assert (tmp_path / "out.mp4").stat().st_size > 1000


def test_a_service_for_other_machines_is_taken_with_the_token_that_is_printed(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["--checkpoint-path", str(tiny.checkpoint), "--host", "0.0.0.0"]
    with pytest.raises(UserError, match="no token is required") as refused:
        serve.check(serve.build_parser().parse_args(asked))
    ran(re.search("Make one: (.*)", str(refused.value))[1])
    token = re.search("then type (--tokens-file [\\w.]+)", str(refused.value))[1].split()
    serve.check(serve.build_parser().parse_args([*asked, *token]))
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(UserError, match="holds no tokens") as refused:
        Tokens.load(tmp_path / "empty.json")
    ran(str(refused.value).rpartition("make one: ")[2])
    assert Tokens.load(tmp_path / "empty.json").hashes


@pytest.mark.parametrize("visible", ["0-1", "0,1,2,2", "0,2,4,6", "1-4"])
def test_cores_that_are_refused_are_taken_after_the_printed_export(visible, monkeypatch):
    profile, name = profiles.resolve("trn2.3xlarge"), "NEURON_RT_VISIBLE_CORES"
    monkeypatch.setenv(name, visible)
    with pytest.raises(UserError, match=f"Type: (unset|export) {name}") as refused:
        environment.cores(profile, 4)
    monkeypatch.setenv(name, str(refused.value).partition(f"Type: export {name}=")[2])
    assert len(environment.cores(profile, 4)) == 4
