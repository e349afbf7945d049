"""The commands that errors, hints and notes of the sources print, collected from the code, and the
mark of the tests that run them.

A printed command is a place, "FILE:FUNCTION: COMMAND", as in "host/media.py:check: ffmpeg". COMMAND
is the program, with its verb where it has verbs, or the flag that is to be typed.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from conftest import ROOT

SOURCES = ROOT / "src/ltx_neuron"
# Functions that return a command to type, and what they return begins with.
BUILDERS = {"command": "ltx-neuron", "_command": "ltx-neuron"}
VERBED = {"ltx-neuron", "hf", "pip", "aws", "sudo", "ray", "python"}  # whose next words count
_PROGRAMS = re.compile(
    r"(?:(?<=[\s;:(&`'\"])|^)(ffmpeg -|hf (?:download|auth)|pip (?:un)?install|python -[mc] \S+"
    r"|curl http|ltx-neuron [a-z]+ |chmod|rm -r|export \w+=|[Uu]nset (?:\w+|…)|sudo [\w-]+"
    r"|aws [a-z]+|(?<=\S )(?:neuron-ls|dmesg)|kill …|HF_HOME=|ray start)"
)
# "Type --num-frames 9", "type for example {recipe} dev", "or type at most --end-time 3": also a
# field in braces, which becomes its flag.
_FLAGS = re.compile(
    r"\b[Tt]ype (?:for example |at most |a (?:smaller|larger) |another )?(--[a-z][\w-]*|\{\w+\})"
    r"(?: (?:with )?(\w+=))?"
)


class Printed(NamedTuple):
    """A command that the sources print.

    key   its place: FILE:FUNCTION: COMMAND
    text  the sentence around it, with … for what a run puts in
    """

    key: str
    text: str

    @property
    def pattern(self) -> re.Pattern:
        """The sentence as a message has it, with single spaces."""
        text = " ".join(self.text.split())
        parts = (re.escape(part) for part in re.split(r"…|\{\w+\}", text))
        return re.compile(".*?".join(parts))


def runs(*keys: str) -> Callable:
    """Mark a test that runs these printed commands as they are printed, on the case that provokes
    them. The mark is read from the test's source (see `marked`)."""
    return lambda test: test


def text_of(node: ast.AST) -> str | None:
    """The text of a string or an f-string, with … for what a run puts in; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (getattr(part, "value", None) for part in node.values)
        return "".join(part if isinstance(part, str) else "…" for part in parts)
    return None


def name_of(call: ast.Call) -> str:
    """The last name of what is called: download for hub.download(...)."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


class _Reader(ast.NodeVisitor):
    """Finds the printed commands of a file."""

    def __init__(self, file: str):
        self.file, self.inside, self.found = file, ["-"], []

    def add(self, command: str, text: str) -> None:
        self.found.append(Printed(f"{self.file}:{self.inside[-1]}: {command}", text))

    def visit_FunctionDef(self, node) -> None:
        self.inside.append(getattr(node, "name", "-"))
        for child in ast.iter_child_nodes(node):
            documents = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if not documents:
                self.visit(child)
        self.inside.pop()

    visit_AsyncFunctionDef = visit_ClassDef = visit_Module = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        if getattr(node.targets[0], "attr", "") != "prog":  # a parser's name is no command
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "prog":
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = name_of(node)
        first = text_of(node.args[0]) if node.args else None
        if name in BUILDERS and first:
            self.add(f"{BUILDERS[name]} {first.partition('…')[0]}".strip(), "…")
        if name.startswith(("download", "gemma_download")) or name.endswith("_download"):
            self.add("hf download", "…")
        self.generic_visit(node)

    def _read(self, node: ast.AST) -> None:
        text = text_of(node)
        for match in _PROGRAMS.finditer(text):
            words = match[0].lower().split()
            words = words[:3] if words[:2] == ["python", "-m"] else words[: 1 + (words[0] in VERBED)]
            self.add(" ".join(words).removesuffix("="), text)
        for match in _FLAGS.finditer(text):
            flag = match[1] if match[1][0] == "-" else "--" + match[1][1:-1].replace("_", "-")
            self.add(" ".join(filter(None, [flag, match[2]])), text)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._read(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._read(node)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_List(self, node) -> None:
        """["ffmpeg", "-i", ...] of shlex.join."""
        if node.elts and text_of(node.elts[0]) in ("ffmpeg", "hf"):
            words = [text_of(each) for each in node.elts[:2]]
            self.add("ffmpeg" if words[0] == "ffmpeg" else " ".join(filter(None, words)), "…")
        self.generic_visit(node)

    visit_Tuple = visit_List


@cache
def printed() -> tuple[Printed, ...]:
    """All commands that the sources print."""
    found: list[Printed] = []
    for path in sorted(SOURCES.rglob("*.py")):
        reader = _Reader(path.relative_to(SOURCES).as_posix())
        reader.visit(ast.parse(path.read_text()))
        found += reader.found
    return tuple(found)


def marked() -> Iterator[tuple[str, str]]:
    """(key, test) of every mark `runs` in the tests."""
    for path in sorted((ROOT / "test").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and name_of(mark) == "runs":
                    for argument in mark.args:
                        yield text_of(argument) or "", f"{path.name}::{node.name}"
