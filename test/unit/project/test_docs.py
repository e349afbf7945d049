"""What README, docs, errors and helps say is so; their commands are taken (downloads: test_download_commands.py)."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import made_film, tone, write_sound
from typed import ended, parser_of, typed_in

from ltx_neuron.backends import environment, neuron_errors
from ltx_neuron.commands import VERBS, dispatch
from ltx_neuron.config import profiles
from ltx_neuron.config.gemma import gemma_config
from ltx_neuron.demo import ASSETS
from ltx_neuron.errors import UserError
from ltx_neuron.hub import RELEASE_FILES
from ltx_neuron.sampling.compat import FOLLOWED
from ltx_neuron.serve import __main__ as serve
from ltx_neuron.service.tokens import Tokens
from ltx_neuron.weights.model_files import kind_of
from ltx_neuron.weights.tensorfile import TensorFile

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
DEVICE_FLAGS = {"--lf", *re.findall(r'"(--[\w-]+)"', (ROOT / "test/device/conftest.py").read_text())}
BENCHMARKS = sorted(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md"))
PROGRAM = "ltx-neuron"


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def inline_code(page: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_blocks(page))]


def commands(page: str, in_sentences: bool = True) -> list[list[str]]:
    """The words of every command that a page shows, with the values of the page's variables."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)
    shell = "".join(text for language, text in blocks if not language).replace("\\\n", " ")
    values = dict(re.findall(r'(?:^|; )([A-Z_]+)=("[^"]*"|[^\s;]+)(?=;|$)', shell, re.MULTILINE))
    text = "\n".join([*shell.splitlines(), *(inline_code(page) if in_sentences else ())])
    for _ in values:  # of which some have others in their values
        for name, value in values.items():
            text = re.sub(rf"\${name}\b", lambda _, value=value: value.strip('"'), text)
    programs = re.compile(r"\s*(\w+=\S+ )*(make|pip|ltx-neuron|\S*python) ")
    shown = [part for line in text.splitlines() for part in line.split("&&") if programs.match(part)]
    split = [shlex.split(part, comments=True) for part in shown]
    return [words[next(i for i, word in enumerate(words) if not re.match(r"\w+=", word)) :] for words in split]


@cache
def flags_of(verb: str) -> frozenset[str]:
    """The flags of a verb of ltx-neuron, with all of its models."""
    models = ("transformer", "gemma3", "vae") if verb in ("shard", "compile") else ()
    parsers = [parser_of([verb, *([model] if model else [])]) for model in models or [""]]
    return frozenset(flag for parser in parsers for flag in parser._option_string_actions)


@cache
def all_flags() -> frozenset[str]:
    return DEVICE_FLAGS.union(*map(flags_of, VERBS))


@pytest.mark.parametrize("page", [*PAGES, *BENCHMARKS])
def test_every_relative_link_leads_to_a_file_and_to_a_heading_in_it(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        name, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert "://" in target or path.is_file(), target
        if "://" not in target and anchor:
            headings = re.findall(r"^#+ (.+)$", without_blocks(str(path.relative_to(ROOT))), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings], target


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_can_be_typed(page):
    """Those of a block with their values; those of a sentence may leave out what a verb needs."""
    assert len(commands("README.md")) > 5  # they are found
    targets = re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE)
    for words in commands(page):
        shown, flags = shlex.join(words), {word.partition("=")[0] for word in words if word.startswith("--")}
        files = [word for word in words[1:] if re.fullmatch(r"[a-z_0-9/-]+\.(py|txt)", word)]
        assert all((ROOT / name).is_file() for name in files), shown
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= {*targets}, shown
        elif words[0] == PROGRAM:
            assert words[1] in VERBS and flags <= flags_of(words[1]), shown
        elif words[1:4] == ["-m", "pytest", "test/device"]:
            assert flags <= DEVICE_FLAGS, shown
    for words in commands(page, in_sentences=False):
        assert "$" not in shlex.join(words) or words[0] != PROGRAM, words
        if words[0] == PROGRAM and "--help" not in words:
            parser_of(words[1:], parses=True)
    assert {code.split()[0] for code in inline_code(page) if code.startswith("--")} <= all_flags()


@pytest.mark.parametrize("page", PAGES)
def test_every_source_file_folder_and_test_that_is_named_exists(page):
    roots = ROOT, ROOT / "src", ROOT / "src/ltx_neuron"
    sources = "\n".join(path.read_text() for path in (ROOT / "test").rglob("test_*.py"))
    for name in inline_code(page):
        if re.fullmatch(r"test_\w+", name):
            assert f"def {name}(" in sources, name
        elif re.fullmatch(r"[\w./-]+(\.py|\.sh|\.txt|/)", name) and not name.startswith(("artifacts/", "outputs/")):
            assert any((root / name).exists() for root in roots), name


def nodes_of(path: Path) -> Iterator[tuple[ast.AST, str | None]]:
    """The syntax nodes of a file, and the texts of those that are texts, with ... for what a run puts in."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = [getattr(part, "value", "...") for part in getattr(node, "values", [node])]
        is_text = isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)
        yield node, "".join(part if isinstance(part, str) else "..." for part in parts) if is_text else None


def test_every_failure_that_the_trainium_page_explains_is_one_that_the_code_says():
    _, _, section = text_of("docs/trainium.md").partition("\n## 9. When something fails\n")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    messages = [code for row, _ in rows for code in re.findall("`([^`]+)`", row)]
    numbers = [code for _, why in rows for code in re.findall("`(N[RC][TC]_[A-Z_0-9]+)`", why)]
    files = (ROOT / "src").rglob("*.py")
    said = "\n".join({text.replace("…", "...") for path in files for _, text in nodes_of(path) if text})
    assert len(messages) > 20 and len(numbers) > 10 and [text for text in messages if text not in said] == []
    assert [code for code in numbers if not neuron_errors.known(code)] == []


def test_the_readme_and_the_readers_path_are_short_and_pages_name_the_followed_release():
    assert len(text_of("README.md").splitlines()) <= 140
    _, _, section = text_of("docs/architecture.md").partition("\n## A reader's path\n")
    files = re.findall(r"^\d+\. `([^`]+)`: ", section.partition("\n## ")[0], re.MULTILINE)
    lines = {name: len((ROOT / "src" / name).read_text().splitlines()) for name in files}
    assert 5 <= len(files) <= 10 and sum(lines.values()) <= 2000, lines
    for page in ("README.md", "docs/recipes.md", "CHANGELOG.md"):
        assert f"release {FOLLOWED}" in text_of(page)


def test_the_table_of_benchmarks_lists_every_script_and_every_result():
    table = text_of("benchmarks/README.md")
    scripts = [path.name for path in (ROOT / "benchmarks").glob("*.py")]
    assert [name for name in scripts if f"`{name}" not in table] == []
    assert [name for name in BENCHMARKS if name != "benchmarks/README.md" and f"]({name[11:]})" not in table] == []


def test_the_demos_files_are_what_they_are_called():
    kinds = {"checkpoint": "transformer", "spatial_upsampler": "spatial", "style_lora": "lora"}
    assert {name: kind_of(TensorFile(getattr(ASSETS, name), "")) for name in kinds} == kinds
    assert gemma_config(ASSETS.gemma_root).num_hidden_layers > 0


NODES = [(path.name, *found) for path in sorted((ROOT / "src/ltx_neuron").rglob("*.py")) for found in nodes_of(path)]
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
            (verb, *_), said = node.args[0].value.split(), {getattr(word, "value", "") for word in node.args}
            flags = {flag for flag in said if isinstance(flag, str) and flag.startswith("-")}
            assert verb in VERBS and flags <= flags_of(verb), (name, flags)
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


COMMON = "--checkpoint-path {ckpt} --gemma-root {gemma} --artifacts-dir {out}/artifacts --profile cpu --tp-degree 1"
SIZE = "--height 64 --width 64 --num-frames 9"
JOB = f"--recipe distilled {SIZE} --prompt rain --output-path {{out}}/a.mp4"
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
    ended(*words)
    return " ".join("".join(capsys.readouterr()).split())


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
    more = JOB if verb in ("generate", "prepare", "batch") else SIZE if verb == "plan" else ""
    left_out = {"shard": ["~--gemma-root"], "prepare": ["~--prompt", "~--output-path"]}.get(verb, [])
    typed = shlex.split(f"{COMMON} --dtype float32 {more}".format(**paths))
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


def test_a_service_for_other_machines_is_taken_with_the_token_that_is_printed(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["--checkpoint-path", str(tiny.checkpoint), "--host", "0.0.0.0"]
    with pytest.raises(UserError, match="no token is required") as refused:
        serve.check(serve.build_parser().parse_args(asked))
    typed_in(re.search("Make one: (.*)", str(refused.value))[1])
    token = re.search("then type (--tokens-file [\\w.]+)", str(refused.value))[1].split()
    serve.check(serve.build_parser().parse_args([*asked, *token]))
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(UserError, match="holds no tokens") as refused:
        Tokens.load(tmp_path / "empty.json")
    typed_in(str(refused.value).rpartition("make one: ")[2])
    assert Tokens.load(tmp_path / "empty.json").hashes


@pytest.mark.parametrize("visible", ["0-1", "0,1,2,2", "0,2,4,6", "1-4"])
def test_cores_that_are_refused_are_taken_after_the_printed_export(visible, monkeypatch):
    profile, name = profiles.resolve("trn2.3xlarge"), "NEURON_RT_VISIBLE_CORES"
    monkeypatch.setenv(name, visible)
    with pytest.raises(UserError, match=f"Type: (unset|export) {name}") as refused:
        environment.cores(profile, 4)
    monkeypatch.setenv(name, str(refused.value).partition(f"Type: export {name}=")[2])
    assert len(environment.cores(profile, 4)) == 4
