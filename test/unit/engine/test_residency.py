"""What the residency of models says of a device's memory."""

from types import SimpleNamespace

import torch

from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.residency import ModulationTables, Residency
from ltx_neuron.report.latency import Recorder

STAYS = "stay in the device's memory"


def test_a_modulation_table_is_made_once_for_a_schedule(monkeypatch):
    made = []
    monkeypatch.setattr("ltx_neuron.engine.residency.modulation_table", lambda *given: made.append(given) or given)
    tables = ModulationTables("weights", "config")
    for sigma in (1.0, 1.0, 0.5):
        tables("video", torch.tensor([sigma]), True)
    assert [sigmas.item() for *_, sigmas, _ in made] == [1.0, 0.5]


def test_torchneurons_graphs_of_other_sizes_stay_and_are_named(tmp_path, monkeypatch, capsys):
    """Of ranks that load anything; NxD's keep no graphs."""
    ranks = SimpleNamespace(load=lambda *_: None, close=lambda: None)
    monkeypatch.setattr("ltx_neuron.engine.residency.registry.ranks", lambda *_: ranks)
    said = []
    for backend in ("nxd", "torchdist"):
        profile, weights = resolve("trn2.3xlarge", (f"backend={backend}",)), lambda loras: tmp_path
        workspace = SimpleNamespace(
            profile=profile, tp=4, dtype=torch.bfloat16, compiler_cache=None, dit_weights=weights
        )
        models = Residency(workspace, Recorder())
        for size in ("small", "large"):
            models.load_transformer({size: None}, ())
        said.append(capsys.readouterr().out)
    assert STAYS not in said[0] and f"another size: the graphs of small {STAYS}" in said[1]
    models.close()  # the processes end, and all that they had
    for _ in range(2):
        models.load_transformer({"small": None}, ())
    assert STAYS not in capsys.readouterr().out
