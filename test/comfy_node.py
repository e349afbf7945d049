"""The ComfyUI node, loaded as ComfyUI loads a file of custom_nodes, with what it imports of ComfyUI
in its place. Imported as `comfy_node`."""

import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

from conftest import ROOT


class Interrupted(Exception):
    """ComfyUI's InterruptProcessingException."""


class VideoFromFile:
    """ComfyUI's VIDEO of a file."""

    def __init__(self, file: str):
        self.file = file

    def get_stream_source(self) -> str:
        return self.file


class Comfy:
    """ComfyUI: `seen` of the progress bar, `previews` in it and `texts` on nodes; set `interrupted`
    to press its button."""

    def __init__(self, temp: Path):
        self.seen, self.previews, self.texts = [], [], []
        self.interrupted, self.temp = False, temp

    def throw_exception_if_processing_interrupted(self) -> None:
        if self.interrupted:
            raise Interrupted

    def progress_bar(self, total: int, node_id=None):
        def update_absolute(value: int, total: int, preview: tuple | None = None) -> None:
            self.seen.append((value, total))
            self.previews += [preview] if preview else []

        return SimpleNamespace(update_absolute=update_absolute)

    def send_progress_text(self, text: str, node_id: str) -> None:
        self.texts.append((node_id, text))

    @property
    def modules(self) -> dict[str, ModuleType]:
        found = {
            "comfy": {},
            "comfy.utils": {"ProgressBar": self.progress_bar},
            "comfy.model_management": {
                "throw_exception_if_processing_interrupted": (self.throw_exception_if_processing_interrupted)
            },
            "folder_paths": {"get_temp_directory": lambda: str(self.temp)},
            "server": {"PromptServer": SimpleNamespace(instance=self)},
            "comfy_api": {},
            "comfy_api.latest": {"InputImpl": SimpleNamespace(VideoFromFile=VideoFromFile)},
        }
        modules = {name: ModuleType(name) for name in found}
        for name, values in found.items():
            vars(modules[name]).update(values)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, modules[name])
        return modules


@contextmanager
def loaded(temp: Path):
    """(the node's module, ComfyUI)."""
    comfy = Comfy(temp)
    before = {name: sys.modules.get(name) for name in comfy.modules}
    sys.modules.update(comfy.modules)
    try:
        path = ROOT / "comfyui/ltx_neuron.py"
        spec = importlib.util.spec_from_file_location("comfyui_ltx_neuron", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module, comfy
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def executed(module, **inputs):
    """What ComfyUI does with a node of its first kind of interface: the class by its name, widgets'
    defaults for what is not connected, and a value for each of its types."""
    node = module.NODE_CLASS_MAPPINGS["LTXNeuronVideo"]
    kinds = node.INPUT_TYPES()
    given = {
        name: more[0]["default"]
        for several in (kinds["required"], kinds["optional"])
        for name, (_, *more) in several.items()
        if more and "default" in more[0]
    }
    given |= dict.fromkeys(kinds["hidden"], "7")
    assert inputs.keys() <= {name for several in kinds.values() for name in several}
    outputs = getattr(node(), node.FUNCTION)(**given | inputs)["result"]
    assert len(outputs) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    return dict(zip(node.RETURN_NAMES, outputs, strict=True))
