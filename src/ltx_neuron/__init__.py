"""LTX-2.3 audio-video generation on AWS Trainium2 and on CPUs.

    from ltx_neuron import LTXPipeline

Importing the package imports nothing else of it. The names of __all__ are loaded when first used.
"""

import os

# torch loads device backends when it is imported. The host's process uses none of them, and
# TorchNeuron's would be a second one beside the ranks'; those load it (backends/environment.py).
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

__all__ = ["LTXPipeline"]


def __getattr__(name: str):
    if name == "LTXPipeline":
        from ltx_neuron.pipeline import LTXPipeline  # torch and all

        return LTXPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
