"""The weights and graphs that a machine lacks, from where `python -m ltx_neuron.artifacts push` has
sent them."""

from collections.abc import Iterable

from ltx_neuron.artifacts.store import Store, names_in
from ltx_neuron.artifacts.transfer import is_choice, opened, pull
from ltx_neuron.engine import RunOptions
from ltx_neuron.workspace import Workspace


def fetch(url: str, workspace: Workspace, options: RunOptions, sets: Iterable[tuple]) -> None:
    """Take from a store what a workspace could use and does not have. Of processes on one machine
    that do so at once, one pulls a folder and the others wait. UserError where the store does not
    answer, or is damaged. sets: the DiT's."""
    store, used = Store(url), sources(workspace, options, sets)
    names = [
        name for name in names_in(store.files()) if is_choice(name) or _fits(store, name, used)
    ]
    if names:
        pull(store, workspace.artifacts, names)


def sources(workspace: Workspace, options: RunOptions, sets: Iterable[tuple]) -> dict[str, tuple]:
    """What tells a workspace's sets from others: its degree and dtype, and by model what its
    weights are cut from."""
    weights = {"dit": [workspace.source("dit", loras) for loras in sets]}
    weights |= {"gemma3": [workspace.source("gemma3")]} if options.neuron_gemma else {}
    if options.neuron_vae:
        weights |= {"vae": [workspace.source("vae")], "sound": [workspace.source("sound")]}
    made_from = {
        (model, source.fingerprint, str(getattr(source, "lora_identity", [])))
        for model, several in weights.items()
        for source in several
    }
    return {"fields": (workspace.tp, workspace.dtype_name), "weights": made_from}


def _fits(store: Store, name: str, used: dict) -> bool:
    identity = opened(store, name).identity
    tp, dtype = used["fields"]
    dtype = "float32" if identity["model"] == "sound" else dtype
    if (identity["tp"], identity["dtype"]) != (tp, dtype):
        return False
    cut = identity["model"], identity.get("source"), str(identity.get("loras"))
    return identity["kind"] == "graphs" or cut in used["weights"]
