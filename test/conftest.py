"""Fixtures every test may use."""

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Paths of one set of tiny assets, made once; tests must not change the files."""
    from ltx_neuron.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))
