"""Which module may import which, what importing the package loads, and limits on files and
functions."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SRC = ROOT / "src"
PACKAGE = SRC / "ltx_neuron"
SOURCES = sorted(SRC.rglob("*.py"))
SCRIPTS = [
    *(ROOT / "shards").glob("*.py"),
    *(ROOT / "compile").glob("*.py"),
    SRC / "generate_ltx23.py",
]
PYTHON_FILES = sorted(
    path
    for folder in ("src", "shards", "compile", "benchmarks", "test")
    for path in (ROOT / folder).rglob("*.py")
)
NEURON = {
    "torch_neuronx",
    "neuronx_distributed",
    "libneuronxla",
    "neuronxcc",
    "torch_xla",
    "nki",
    "nkilib",
}
LINT = "ltx_neuron/lint"  # its own tool: it lowers graphs with torch_xla, on no Neuron machine
BASE = {
    "config",
    "errors",
    "files",
    "format",
    "machine",
    "profiles",
}  # modules at the top, below every room
# What each subpackage may import of ltx_neuron besides itself: subpackages, and modules at the top.
ALLOWED = {
    "config": {"errors", "files"},
    "models": {"config"},
    "sampling": {"config", "errors", "files"},
    "weights": {"config", "errors", "files"},
    "host": {"models", "sampling", "weights", *BASE},
    "text": {"models", "weights", "host", *BASE},
    "backends": {"models", "weights", *BASE},
    "artifacts": {"backends", "report", "weights", "config", "errors", "files", "format"},
    "report": {"errors", "files", "format"},
    "demo": set(),
    "tiny": {"host", "errors", "files"},
    "flags": {"host", "sampling", "weights", "engine", "generate", "job", "workspace", *BASE},
    "lint": {"backends", "models", "report", "tiny", *BASE},
    "tune": {
        "backends",
        "models",
        "report",
        "sampling",
        "text",
        "weights",
        "artifacts",
        "denoise",
        "flags",
        "job",
        "workspace",
        *BASE,
    },
    "service": {
        "backends",
        "host",
        "report",
        "sampling",
        "decode_queue",
        "engine",
        "finished",
        "flags",
        "generate",
        "job",
        "progress",
        "workspace",
        *BASE,
    },
    "serve": {"fleet", "report", "service", "engine", "flags", "job", *BASE},
    "fleet": {
        "artifacts",
        "backends",
        "report",
        "service",
        "batch",
        "engine",
        "flags",
        "generate",
        "job",
        "progress",
        "workspace",
        *BASE,
    },
    "plan": {
        "backends",
        "host",
        "models",
        "report",
        "sampling",
        "tune",
        "weights",
        "flags",
        "job",
        *BASE,
    },
    "doctor": {
        "backends",
        "host",
        "report",
        "sampling",
        "text",
        "weights",
        "flags",
        "job",
        "progress",
        "workspace",
        *BASE,
    },
}
# The modules at the top may import every subpackage but these tools.
TOOLS = {"demo", "doctor", "fleet", "lint", "tiny", "service", "serve"}
MOST_TOP_MODULES, MOST_FUNCTION_LINES, MOST_COLUMNS = 20, 70, 100


def module_name(path: Path) -> str:
    """ltx_neuron.weights.lora for src/ltx_neuron/weights/lora.py, the package for __init__.py."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SUBPACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def imported_modules(tree: ast.AST) -> set[str]:
    """The modules of ltx_neuron that the code imports anywhere, also inside functions.

    The packages around an imported module are not counted: Python runs their __init__.py, which
    would make every package that imports its own modules a circle.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import: this test reads absolute ones"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in full}
    return names & set(MODULES)


IMPORTS = {name: imported_modules(ast.parse(path.read_text())) for name, path in MODULES.items()}


def room(module: str) -> str:
    """The subpackage that a module is in, or its own name at the top of ltx_neuron."""
    return module.split(".")[1] if "." in module else module


def test_every_subpackage_imports_only_what_the_table_allows():
    assert set(ALLOWED) == SUBPACKAGES
    wrong = [
        f"{module} imports {other}"
        for module, imports in IMPORTS.items()
        for other in sorted(imports)
        if room(module) in ALLOWED and room(other) not in {room(module), *ALLOWED[room(module)]}
    ]
    assert wrong == []


def test_modules_at_the_top_import_no_tool():
    wrong = [
        f"{module} imports {other}"
        for module, imports in IMPORTS.items()
        for other in sorted(imports)
        if room(module) not in ALLOWED and room(other) in TOOLS
    ]
    assert wrong == []


def test_nothing_imports_the_scripts():
    scripts = {path.stem for path in SCRIPTS}
    for path in MODULES.values():
        assert imported_packages(ast.parse(path.read_text()), at_import=False).isdisjoint(scripts)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module, or of one that imports itself."""
    reachable = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reachable[start] = seen
    components = {
        frozenset(other for other in reachable[module] if module in reachable[other])
        for module in graph
        if module in reachable[module]
    }
    return sorted(sorted(component) for component in components)


def test_no_modules_import_each_other_in_a_circle_even_inside_functions():
    assert circles(IMPORTS) == []


def test_a_circle_is_seen_at_any_length():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"e"}, "f": set()}
    assert circles(graph) == [["a", "b", "c"], ["e"]]


def test_the_package_has_few_modules_at_its_top():
    modules = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(modules) <= MOST_TOP_MODULES, modules


def test_no_function_is_long():
    """Counted from the line of `def` to the last one, without decorators."""
    functions = (
        (path, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, node in functions
        if node.end_lineno - node.lineno >= MOST_FUNCTION_LINES
    ]
    assert not long, long


def lines_of_the_project() -> list[tuple[str, str]]:
    """Every line of every Python file, after its path and number."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in PYTHON_FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


def test_no_line_is_long():
    assert [place for place, line in lines_of_the_project() if len(line) > MOST_COLUMNS] == []


def test_no_statement_is_excepted_from_formatting():
    exception = "fmt: " + "skip"
    assert [place for place, line in lines_of_the_project() if exception in line] == []


def test_only_tests_change_the_search_path():
    outside = [path for path in PYTHON_FILES if not path.is_relative_to(ROOT / "test")]
    assert [path.name for path in outside if "sys.path" in path.read_text()] == []


def imported_packages(tree: ast.AST, at_import: bool) -> set[str]:
    """Top-level packages a module imports: anywhere, or only those that importing the module
    imports."""
    packages, nodes = set(), [tree]
    while nodes:
        node = nodes.pop()
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            packages.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            packages |= {
                arg.value.partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant)
            }
    return packages


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SRC)))
def test_neuron_is_imported_in_backends_alone_and_only_when_used(path):
    name, tree = str(path.relative_to(SRC)), ast.parse(path.read_text())
    assert imported_packages(tree, at_import=True).isdisjoint(NEURON)
    if not name.startswith(("ltx_neuron/backends/", LINT)):
        assert imported_packages(tree, at_import=False).isdisjoint(NEURON)


def test_the_walk_sees_every_form_of_an_import():
    tree = ast.parse(
        "import torch_xla.core as xm\n"
        "class A:\n    from nki import language\n"
        "if True:\n    import importlib; importlib.import_module('libneuronxla.x')\n"
        "def f():\n    import neuronx_distributed\n"
        "g = lambda: __import__('torch_neuronx')\n"
    )
    assert imported_packages(tree, at_import=True) & NEURON == {"torch_xla", "nki", "libneuronxla"}
    everywhere = imported_packages(tree, at_import=False)
    assert everywhere & NEURON == NEURON - {"neuronxcc", "nkilib"}


def loaded_by(code: str, *names: str) -> set[str]:
    """Which of these modules a fresh interpreter without site-packages' start-up has after running
    the code."""
    code += f"\nimport sys; print(*(name for name in {names!r} if name in sys.modules))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SRC)},
    )
    return set(process.stdout.split())


def test_importing_the_package_imports_nothing_else():
    assert loaded_by("import ltx_neuron", "torch", "numpy", "ltx_core", "transformers") == set()


def test_the_package_gives_the_pipeline_and_no_other_name():
    import ltx_neuron
    from ltx_neuron.pipeline import LTXPipeline

    assert ltx_neuron.LTXPipeline is LTXPipeline and "LTXPipeline" in dir(ltx_neuron)
    with pytest.raises(AttributeError, match="module 'ltx_neuron' has no attribute 'LTXPipelin'"):
        ltx_neuron.LTXPipelin  # noqa: B018


def test_scripts_understand_their_flags_without_ltx_core_and_without_neuron():
    code = "import ltx_neuron.flags, ltx_neuron.plan, ltx_neuron.host.models"
    assert loaded_by(code, "torch", "ltx_core", *NEURON) == {"torch"}


def test_a_replica_reads_the_environment_before_torch_does():
    assert loaded_by("import ltx_neuron.fleet.replica", "torch", "ray") == set()


def test_a_script_finds_the_installed_package(monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    code = "import ltx_neuron; print(ltx_neuron.__file__)"
    package = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    if package.stdout.strip() != str(PACKAGE / "__init__.py"):
        pytest.skip("this checkout is not installed: pip install -e .")
    script = ROOT / "shards/shard_backbone_weights.py"
    process = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert process.returncode == 0 and "--tp-degree" in process.stdout, process.stderr


# What one module does for all others, and what shows that another does it by itself.
ONE_PLACE = {
    "files are written whole": (r"os\.replace|\"\.partial", {"files", "weights.sharder"}),
    "folders are locked": (r"flock", {"files"}),
    "versions are looked up": (r"importlib\.metadata|import metadata", {"machine"}),
    "the system's errors are put in words": (r"error\.strerror", {"errors"}),
    "the tensor-parallel degree is chosen": (r"tp_degree (is None|or )", {"profiles"}),
}


@pytest.mark.parametrize("what", ONE_PLACE)
def test_what_all_modules_need_is_done_in_one_place(what):
    pattern, places = ONE_PLACE[what]
    found = {module for module, path in MODULES.items() if re.search(pattern, path.read_text())}
    assert found - {f"ltx_neuron.{place}" for place in places} == set()
