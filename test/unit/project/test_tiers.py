"""A test session collects quickly, and every tier has a command."""

import tiers
from conftest import ROOT


def test_collecting_tests_imports_nothing_that_takes_seconds_and_is_not_needed(pytestconfig):
    assert pytestconfig.stash[tiers.IMPORTED] == set()


def test_every_tier_has_a_command():
    folders = {path.name for path in (ROOT / "test").iterdir() if any(path.glob("test_*.py"))}
    assert folders <= tiers.COMMANDS.keys()
