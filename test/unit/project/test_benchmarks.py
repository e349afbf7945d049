"""The list of benchmarks is whole."""

from conftest import ROOT


def test_the_table_lists_every_script_and_every_result():
    table = (ROOT / "benchmarks/README.md").read_text()
    scripts = [path.name for path in (ROOT / "benchmarks").glob("*.py")]
    results = [path.name for path in (ROOT / "benchmarks").glob("*.md") if path.stem != "README"]
    assert [name for name in scripts if f"`{name}" not in table] == []
    assert [name for name in results if f"]({name})" not in table] == []
