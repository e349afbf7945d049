"""What is imported where: nothing by importing the package, and what only a Neuron machine has only
where it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
MODULES = sorted(SRC.rglob("*.py"))
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


def imports(tree: ast.AST, at_import: bool) -> set[str]:
    """Top-level packages a module imports: anywhere, or only those that importing the module
    imports."""
    found, nodes = set(), [tree]
    while nodes:
        node = nodes.pop()
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            found |= {
                arg.value.partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant)
            }
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SRC)))
def test_neuron_is_imported_in_backends_alone_and_only_when_used(path):
    name, tree = str(path.relative_to(SRC)), ast.parse(path.read_text())
    assert imports(tree, at_import=True).isdisjoint(NEURON)
    if not name.startswith(("ltx_neuron/backends/", LINT)):
        assert imports(tree, at_import=False).isdisjoint(NEURON)


def test_the_walk_sees_every_form_of_an_import():
    tree = ast.parse(
        "import torch_xla.core as xm\n"
        "class A:\n    from nki import language\n"
        "if True:\n    import importlib; importlib.import_module('libneuronxla.x')\n"
        "def f():\n    import neuronx_distributed\n"
        "g = lambda: __import__('torch_neuronx')\n"
    )
    assert imports(tree, at_import=True) & NEURON == {"torch_xla", "nki", "libneuronxla"}
    assert imports(tree, at_import=False) & NEURON == NEURON - {"neuronxcc", "nkilib"}


def loaded_by(code: str, *names: str) -> set[str]:
    """Which of these modules a fresh interpreter without site-packages' start-up has after running
    the code."""
    code += f"\nimport sys; print(*(name for name in {names!r} if name in sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SRC)},
    )
    return set(ran.stdout.split())


def test_importing_the_package_imports_nothing_else():
    assert loaded_by("import ltx_neuron", "torch", "numpy", "ltx_core", "transformers") == set()


def test_scripts_understand_their_flags_without_ltx_core_and_without_neuron():
    assert loaded_by("import ltx_neuron.flags, ltx_neuron.plan", "torch", "ltx_core", *NEURON) == {
        "torch"
    }
