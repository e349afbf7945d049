"""Download missing weights and graphs from a store that `ltx-neuron artifacts push` filled."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from ltx_neuron.artifacts import folder
from ltx_neuron.artifacts.store import Store, names_in
from ltx_neuron.artifacts.transfer import pull
from ltx_neuron.needs import RunOptions
from ltx_neuron.workspace import Workspace


def fetch(url: str, workspace: Workspace, options: RunOptions, sets: Iterable[tuple]) -> None:
    """Download the weights and graphs of a workspace that it lacks. If several processes on one
    machine do so at once, one pulls a folder and the others wait.

    sets  weight sets, at least one
    Raises UserError if the store does not answer or is damaged.
    """
    models = ["gemma3"] if options.neuron_gemma else []
    models += workspace.profile.vae_models if options.neuron_vae else ()
    needs = [workspace.weight_set(model, loras) for loras in sets for model in ("dit", *models)]
    wanted = [folder(Path(), need.identity).as_posix() for need in needs]
    tp, dtype = workspace.tp, workspace.dtype_name
    wanted += ["tuned/*", f"graphs/*-tp{tp}-{dtype}-*", f"graphs/sound-*-tp{tp}-float32-*"]
    store = Store(url)
    stored = names_in(store.files())
    names = [name for name in stored if any(fnmatchcase(name, pattern) for pattern in wanted)]
    if names:
        pull(store, workspace.artifacts, names)
