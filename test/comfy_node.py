"""The ComfyUI node, loaded as ComfyUI loads a file of custom_nodes, with what it imports of ComfyUI in its place."""

import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import ROOT


class Interrupted(Exception):
    """ComfyUI's InterruptProcessingException."""


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
        def video_from_file(file: str) -> SimpleNamespace:
            return SimpleNamespace(get_stream_source=lambda: file)

        interrupting = {"throw_exception_if_processing_interrupted": self.throw_exception_if_processing_interrupted}
        contents = {
            "comfy": {},
            "comfy.utils": {"ProgressBar": self.progress_bar},
            "comfy.model_management": interrupting,
            "folder_paths": {"get_temp_directory": lambda: str(self.temp)},
            "server": {"PromptServer": SimpleNamespace(instance=self)},
            "comfy_api": {},
            "comfy_api.latest": {"InputImpl": SimpleNamespace(VideoFromFile=video_from_file)},
        }
        modules = {name: ModuleType(name) for name in contents}
        for name, values in contents.items():
            vars(modules[name]).update(values)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, modules[name])
        return modules


@contextmanager
def loaded(temp: Path):
    """(the node's module, ComfyUI)."""
    comfy = Comfy(temp)
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in comfy.modules.items():
            patch.setitem(sys.modules, name, stand_in)
        spec = importlib.util.spec_from_file_location("comfyui_ltx_neuron", ROOT / "comfyui/ltx_neuron.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module, comfy


def executed(module, **inputs):
    """What ComfyUI does with a node of its first kind of interface: the class by its name, widgets'
    defaults for what is not connected, and a value for each of its types."""
    node = module.NODE_CLASS_MAPPINGS["LTXNeuronVideo"]
    kinds = node.INPUT_TYPES()
    widgets = kinds["required"] | kinds["optional"]
    values = {name: more[0]["default"] for name, (_, *more) in widgets.items() if more and "default" in more[0]}
    values |= dict.fromkeys(kinds["hidden"], "7")
    assert inputs.keys() <= {name for names in kinds.values() for name in names}
    outputs = getattr(node(), node.FUNCTION)(**values | inputs)["result"]
    return dict(zip(node.RETURN_NAMES, outputs, strict=True))
