"""README and docs say what is so: links, commands, files and tests that they name exist."""

import ast
import io
import re
import runpy
import shlex
import signal
import sys
from contextlib import redirect_stdout
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import printed
import pytest
from conftest import ROOT
from device import conftest as device

from ltx_neuron import commands as program
from ltx_neuron.backends import neuron_errors
from ltx_neuron.errors import UserError
from ltx_neuron.sampling.compat import FOLLOWED

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
BENCHMARKS = sorted(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md"))
PROGRAM, HELP = "ltx-neuron", ("--help-all", "--help")
README_LINES, PATH_FILES, PATH_LINES = 140, 10, 2000
DEVICE = ("-m", "pytest", "test/device")
MADE_BY_RUNNING = ("artifacts/", "outputs/")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def code_blocks(page: str) -> list[str]:
    """Fenced blocks of shell commands: those that name no language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)
    return [text for language, text in blocks if not language]


def inline_code(page: str) -> list[str]:
    without_blocks = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_blocks)]


def commands(page: str) -> list[list[str]]:
    """The words of every command that a page shows, with the values of the page's variables."""
    shell = "".join(code_blocks(page)).replace("\\\n", " ")
    assigned = re.findall(r'(?:^|; )([A-Z_]+)=("[^"]*"|[^\s;]+)(?=;|$)', shell, re.MULTILINE)
    values = {name: value.strip('"') for name, value in assigned}
    lines = [with_values(line, values) for line in [*shell.splitlines(), *inline_code(page)]]
    shown = [part for line in lines for part in line.split("&&")]
    programs = re.compile(r"\s*(\w+=\S+ )*(make|pip|ltx-neuron|\S*python) ")
    split = [shlex.split(line, comments=True) for line in shown if programs.match(line)]
    return [words[first_word(words) :] for words in split]


def with_values(line: str, values: dict[str, str]) -> str:
    while known := [name for name in re.findall(r"\$([A-Z_]+)", line) if name in values]:
        line = line.replace(f"${known[0]}", values[known[0]])
    return line


def first_word(words: list[str]) -> int:
    return next(i for i, word in enumerate(words) if not re.fullmatch(r"\w+=.*", word))


@cache
def flags_of(*script: str) -> frozenset[str]:
    """The flags that the help of a verb of ltx-neuron, a script or a module lists. Run in this
    process, which has imported torch."""
    if script == DEVICE:
        known = {"--lf"}
        group = SimpleNamespace(addoption=lambda *names, **_: known.update(names))
        device.pytest_addoption(SimpleNamespace(getgroup=lambda *_: group))
        return frozenset(known)
    if script[0] == PROGRAM:
        run = partial(program.dispatch, [*script[1:], *HELP])
    elif script[0] == "-m":
        run = partial(runpy.run_module, script[1], run_name="__main__", alter_sys=True)
    else:
        run = partial(runpy.run_path, str(ROOT / script[0]), run_name="__main__")
    handler, printed = signal.getsignal(signal.SIGTERM), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script[-1], *HELP]),
        redirect_stdout(printed),
        pytest.raises(SystemExit) as end,
    ):
        run()
    signal.signal(signal.SIGTERM, handler)  # errors.run has its own
    assert not end.value.code, script
    options = re.findall(r"^ +(-.*)$", printed.getvalue(), re.MULTILINE)
    flags = frozenset(flag for line in options for flag in re.findall(r"--[a-z0-9-]+", line))
    # prepare takes all flags of generate, and lists those that it needs.
    return flags | flags_of(PROGRAM, "generate") if script == (PROGRAM, "prepare") else flags


def script_in(words: list[str]) -> tuple[str, ...] | None:
    """What a command runs, if it is this project's: a verb of ltx-neuron with its model, a file, or
    -m and a module."""
    if words[0] == PROGRAM:
        return (PROGRAM, *words[1 : 3 if words[1] in ("shard", "compile") else 2])
    if words[1] != "-m":
        return (words[1],)
    if words[1:4] == [*DEVICE]:
        return DEVICE
    return ("-m", words[2]) if words[2].startswith("ltx_neuron") else None


def problems_of(words: list[str]) -> list[str]:
    shown = shlex.join(words)
    files = [word for word in words[1:] if re.fullmatch(r"[a-z_0-9/-]+\.(py|txt)", word)]
    problems = [f"{shown}: no file {name}" for name in files if not (ROOT / name).is_file()]
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
        wanted = [word for word in words[1:] if "=" not in word]
        return problems + [f"{shown}: no target {name}" for name in wanted if name not in targets]
    if words[0] == "pip" or problems or script_in(words) is None:
        return problems
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    try:
        known = flags_of(*script_in(words))
    except UserError as error:  # no such verb
        return [f"{shown}: {error}"]
    return [f"{shown}: no flag {flag}" for flag in given if flag not in known | {"--help"}]


def headings(page: str, marks: str = "#+") -> list[str]:
    """A page's headings with these marks, as the anchors that links use."""
    shell_comments = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    titles = re.findall(rf"^{marks} (.+)$", shell_comments.sub("", text_of(page)), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", [*PAGES, *BENCHMARKS])
def test_every_relative_link_leads_to_a_file_and_to_a_heading_in_it(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert path.is_file(), f"{page}: {target}"
        assert not anchor or anchor in headings(str(path.relative_to(ROOT))), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_names_a_script_that_exists_and_flags_that_it_knows(page):
    problems = [problem for words in commands(page) for problem in problems_of(words)]
    assert not problems, "\n".join(problems)


def test_a_command_that_does_not_exist_is_found():
    shown = [shlex.join(words) for page in PAGES for words in commands(page)]
    assert "make demo" in shown and sum(command.startswith("ltx-neuron generate") for command in shown) > 10
    assert not [command for command in shown if re.search(r"\$(CKPT|MODEL|GEMMA)", command)]
    for wrong in ("ltx-neuron shard vae --height 64", "ltx-neuron genrate", "python src/no_such.py", "make no-target"):
        assert problems_of(wrong.split()), wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_in_a_sentence_is_one_of_some_script(page):
    scripts = {
        script_in(words)
        for other in PAGES
        for words in commands(other)
        if words[0] == PROGRAM or words[0].endswith("python")
    }
    known = {flag for script in scripts - {None} for flag in flags_of(*script)}
    named = {code.split()[0] for code in inline_code(page) if code.startswith("--")}
    assert named <= known | {*HELP}


@pytest.mark.parametrize("page", PAGES)
def test_every_source_file_folder_and_test_that_is_named_exists(page):
    roots = ROOT, ROOT / "src", ROOT / "src/ltx_neuron"
    sources = "\n".join(path.read_text() for path in (ROOT / "test").rglob("test_*.py"))
    for name in inline_code(page):
        if re.fullmatch(r"test_\w+", name):
            assert f"def {name}(" in sources, f"{page}: {name}"
        elif re.fullmatch(r"[\w./-]+(\.py|\.sh|\.txt|/)", name) and not name.startswith(MADE_BY_RUNNING):
            assert any((root / name).exists() for root in roots), f"{page}: {name}"


@cache
def texts_of_the_code() -> str:
    """Every text of the sources, with ... for what a run puts into it."""
    texts = set()
    for path in (*(ROOT / "src").rglob("*.py"), ROOT / "test/device/measurements.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts |= {text.replace("…", "...") for text in map(printed.text_of, nodes) if text}
    return "\n".join(texts)


def test_every_failure_that_the_trainium_page_explains_is_one_that_the_code_says():
    _, _, section = text_of("docs/trainium.md").partition("\n## 9. When something fails\n")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    messages = [code for row, _ in rows for code in re.findall("`([^`]+)`", row)]
    numbers = [code for _, why in rows for code in re.findall("`(N[RC][TC]_[A-Z_0-9]+)`", why)]
    assert len(messages) > 20 and len(numbers) > 10
    assert [text for text in messages if text not in texts_of_the_code()] == []
    assert [code for code in numbers if not neuron_errors.known(code)] == []


def test_the_readme_and_the_readers_path_are_short_and_pages_name_the_followed_release():
    assert len(text_of("README.md").splitlines()) <= README_LINES
    _, _, section = text_of("docs/architecture.md").partition("\n## A reader's path\n")
    files = re.findall(r"^\d+\. `([^`]+)`: ", section.partition("\n## ")[0], re.MULTILINE)
    lines = {name: len((ROOT / "src" / name).read_text().splitlines()) for name in files}
    assert 5 <= len(files) <= PATH_FILES and sum(lines.values()) <= PATH_LINES, lines
    for page in ("README.md", "docs/recipes.md", "CHANGELOG.md"):
        assert f"release {FOLLOWED}" in text_of(page)


def test_the_table_of_benchmarks_lists_every_script_and_every_result():
    table = text_of("benchmarks/README.md")
    scripts = [path.name for path in (ROOT / "benchmarks").glob("*.py")]
    assert [name for name in scripts if f"`{name}" not in table] == []
    assert [name for name in BENCHMARKS if name != "benchmarks/README.md" and f"]({name[11:]})" not in table] == []
