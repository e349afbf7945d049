"""Runs a large model on the host's CPU without copying its weights: layers use mapped pages.

Copies would need new memory, which on a virtual machine costs ten times more than filling it
(benchmarks/text_encode.md). Weights in the page cache are therefore not copied, and bf16 weights of
an fp32 product are cast in pieces that fit the CPU's cache.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ltx_neuron.host.arithmetic import Libraries, StoredProducts
from ltx_neuron.weights.checkpoint import Source


class MappedWeights:
    """A source's tensors as mapped pages of its files, with which modules are filled.

    dtype  of the activations, to which weights are cast. In float32, matrices keep their stored
           dtype, with which StoredLinear multiplies.
    """

    def __init__(self, source: Source, dtype: torch.dtype):
        self.source, self.dtype = source, dtype
        # Mapped once, for all prompts.
        self._mapped: dict[str, Tensor] = {}

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Load a module's weights, strictly. prefix: of the module's names in the source."""
        module.load_state_dict(
            {name: self.tensor(prefix + name) for name in module.state_dict()},
            strict=True,
            assign=True,
        )

    def tensor(self, name: str) -> Tensor:
        """A mapped tensor of the source, cast if necessary."""
        if name not in self._mapped:
            self._mapped[name] = self.source.read_mapped(name)
        stored = self._mapped[name]
        return stored if stored.ndim > 1 and self.dtype == torch.float32 else stored.to(self.dtype)

    def prefetch(self, module: nn.Module, prefix: str) -> None:
        """Ask the system to read a module's weights in the background."""
        for name in module.state_dict():
            if prefix + name not in self._mapped:
                self.source.prefetch(prefix + name)


class StreamedLayers(nn.ModuleList):
    """A model's layers that have weights only while they run. Iterating fills a layer, asks the
    system to read the next one's weights, and moves the layer back to the meta device afterwards.

    prefix  of "<index>.<name>" in the source's names, such as "layers."
    """

    def __init__(self, layers: Iterable[nn.Module], prefix: str, weights: MappedWeights):
        super().__init__(layers)
        self._prefix, self._weights = prefix, weights

    def __iter__(self) -> Iterator[nn.Module]:
        layers = list(super().__iter__())
        for index, layer in enumerate(layers):
            self._weights.fill(layer, f"{self._prefix}{index}.")
            if index + 1 < len(layers):
                self._weights.prefetch(layers[index + 1], f"{self._prefix}{index + 1}.")
            yield layer
            layer.to("meta")


class StoredLinear(TorchFunctionMode):
    """A context in which nn.functional.linear multiplies fp32 activations with weights of any
    dtype, in fp32 with the given libraries (host/arithmetic.py). Other functions are torch's."""

    def __init__(self, libraries: Libraries):
        super().__init__()
        self._products = StoredProducts(libraries)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is nn.functional.linear and args[0].dtype == torch.float32:
            return self._linear(*args, **kwargs)
        return function(*args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) float32, weight (N, K), bias (N) -> (..., N) float32."""
        rows, outputs = x.shape[:-1].numel(), len(weight)
        output = x.new_empty(rows, outputs)
        self._products.multiply(x.reshape(rows, -1).contiguous(), weight, output)
        if bias is not None:
            output.add_(bias)
        return output.view(*x.shape[:-1], outputs)
