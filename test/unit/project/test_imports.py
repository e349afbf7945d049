"""What importing the package and the tests loads, and limits on files; import contracts are in pyproject.toml."""

import ast
import subprocess
import sys

import pytest
import tiers
from conftest import ROOT
from PIL import Image

SRC = ROOT / "src"
NEURON = ("torch_neuronx", "neuronx_distributed", "libneuronxla", "neuronxcc", "torch_xla", "nki", "nkilib")
# Code -> which of these modules a fresh interpreter without site-packages' start-up must not have, and those it has
LOADED = [
    ("import ltx_neuron", ("torch", "numpy", "ltx_core", "transformers"), ""),
    # The process that decodes an uploaded picture: a CUDA build of torch does not load within its memory limit
    ("from ltx_neuron.service import picture; picture._convert({!r}, {!r}, 4)", ("torch", "PIL"), "PIL"),
    ("import ltx_neuron.flags, ltx_neuron.plan, ltx_neuron.host.models", ("torch", "ltx_core", *NEURON), "torch"),
    ("import ltx_neuron.fleet.replica", ("torch", "ray"), ""),  # it reads the environment before torch does
]


def test_the_package_has_few_modules_at_its_top_and_no_function_is_long():
    modules = sorted(path.name for path in SRC.glob("ltx_neuron/[!_]*.py"))
    assert len(modules) <= 9, modules
    long = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[ast.get_docstring(node) is not None and len(node.body) > 1].lineno
                if node.end_lineno - first >= 64:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long, long


@pytest.mark.parametrize(("code", "names", "loaded"), LOADED, ids=[code for code, *_ in LOADED])
def test_a_process_imports_no_more_than_it_needs(tmp_path, code, names, loaded):
    Image.new("CMYK", (2, 2)).save(tmp_path / "a.jpg")
    code = code.format(str(tmp_path / "a.jpg"), str(tmp_path / "b.png"))
    code += f"\nimport sys; print(*(name for name in {names!r} if name in sys.modules))"
    how = dict(check=True, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(SRC)})
    assert subprocess.run([sys.executable, "-c", code], **how).stdout.split() == loaded.split()


def test_the_package_gives_the_pipeline_and_no_other_name():
    import ltx_neuron
    from ltx_neuron.pipeline import LTXPipeline

    assert ltx_neuron.LTXPipeline is LTXPipeline and "LTXPipeline" in dir(ltx_neuron)
    with pytest.raises(AttributeError, match="module 'ltx_neuron' has no attribute 'LTXPipelin'"):
        ltx_neuron.LTXPipelin  # noqa: B018


def test_collecting_tests_imports_nothing_that_takes_seconds_and_every_tier_has_a_command(pytestconfig):
    assert pytestconfig.stash[tiers.IMPORTED] == set()
    assert {path.parent.name for path in (ROOT / "test").glob("*/test_*.py")} <= tiers.COMMANDS.keys()
