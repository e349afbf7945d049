"""README and docs say what is so: links, commands, files and tests that they name exist."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from device import conftest as device
from typed import parser_of

from ltx_neuron.backends import neuron_errors
from ltx_neuron.commands import VERBS
from ltx_neuron.sampling.compat import FOLLOWED

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
BENCHMARKS = sorted(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md"))
PROGRAM, DEVICE_TESTS = "ltx-neuron", ["-m", "pytest", "test/device"]
README_LINES, PATH_FILES, PATH_LINES = 140, 10, 2000
MADE_BY_RUNNING = ("artifacts/", "outputs/")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def inline_code(page: str) -> list[str]:
    without_blocks = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_blocks)]


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
def device_flags() -> frozenset[str]:
    known = ["--lf"]
    group = SimpleNamespace(addoption=lambda *names, **_: known.extend(names))
    device.pytest_addoption(SimpleNamespace(getgroup=lambda *_: group))
    return frozenset(known)


@cache
def all_flags() -> frozenset[str]:
    return device_flags().union(*map(flags_of, VERBS))


def headings(page: str) -> list[str]:
    """A page's headings, as the anchors that links use."""
    without_blocks = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", without_blocks, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", [*PAGES, *BENCHMARKS])
def test_every_relative_link_leads_to_a_file_and_to_a_heading_in_it(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        name, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert "://" in target or path.is_file(), target
        assert "://" in target or not anchor or anchor in headings(str(path.relative_to(ROOT))), target


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
        elif words[1:4] == DEVICE_TESTS:
            assert flags <= device_flags(), shown
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
        elif re.fullmatch(r"[\w./-]+(\.py|\.sh|\.txt|/)", name) and not name.startswith(MADE_BY_RUNNING):
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
    assert len(messages) > 20 and len(numbers) > 10
    assert [text for text in messages if text not in said] == []
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
