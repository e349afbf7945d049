"""What the residency of models says of a device's memory."""

from types import SimpleNamespace

import pytest
import torch

from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.residency import ModulationTables, Residency
from ltx_neuron.report.recorder import Recorder

STAYS = "stay in the device's memory"


@pytest.fixture
def residency(tmp_path, monkeypatch):
    """Builds the residency of a profile, on ranks that load anything."""

    def build(*settings: str) -> Residency:
        workspace = SimpleNamespace(
            profile=resolve("trn2.3xlarge", settings),
            tp=4,
            dtype=torch.bfloat16,
            compiler_cache=None,
            dit_weights=lambda loras: tmp_path,
        )
        ranks = SimpleNamespace(load=lambda *_: None, close=lambda: None)
        monkeypatch.setattr("ltx_neuron.engine.residency.registry.ranks", lambda *_: ranks)
        return Residency(workspace, Recorder())

    return build


def test_a_modulation_table_is_made_once_for_a_schedule(monkeypatch):
    made = []
    monkeypatch.setattr("ltx_neuron.engine.residency.modulation_table", lambda *given: made.append(given) or given)
    tables = ModulationTables("weights", "config")
    for sigma in (1.0, 1.0, 0.5):
        tables("video", torch.tensor([sigma]), True)
    assert [sigmas.item() for *_, sigmas, _ in made] == [1.0, 0.5]


def test_torchneurons_graphs_of_other_sizes_stay_and_are_named(residency, capsys):
    for backend in ("nxd", "torchdist"):  # only the second keeps them
        assert STAYS not in capsys.readouterr().out
        models = residency(f"backend={backend}")
        for size in ("small", "large"):
            models.load_transformer({size: None}, ())
    assert f"another size: the graphs of small {STAYS}" in capsys.readouterr().out
    models.close()  # the processes end, and all that they had
    models.load_transformer({"small": None}, ())
    models.load_transformer({"small": None}, ())
    assert STAYS not in capsys.readouterr().out
