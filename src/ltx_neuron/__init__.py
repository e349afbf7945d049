"""LTX-2.3 audio-video generation on AWS Trainium2 and on CPUs.

    from ltx_neuron import LTXPipeline

Importing the package imports nothing else of it. Its names are loaded when first used. diffusers'
names LTX2Pipeline and LTX2ImageToVideoPipeline are LTXPipeline.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ltx_neuron.pipeline import LTXPipeline

__all__ = ["LTXPipeline"]
__version__ = "0.2.0"


def __getattr__(name: str):
    if name in ("LTXPipeline", "LTX2Pipeline", "LTX2ImageToVideoPipeline"):
        from ltx_neuron.pipeline import LTXPipeline  # torch and all

        return LTXPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
