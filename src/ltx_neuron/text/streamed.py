"""Weights that are the files' own pages, a layer at a time, and products with them as they are
stored: for the host's CPU.

Both save memory that the kernel would hand out anew: on a virtual machine that costs ten times what
filling it does (benchmarks/text_encode.md). So nothing is copied that the system's cache
has, and where a layer computes in fp32 its bf16 weights are cast piece by piece, in the cache of
the CPU.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ltx_neuron.host.products import product
from ltx_neuron.weights.checkpoint import Source

_PIECE = (
    2**21
)  # numbers of a weight that are cast at once: 8 MB, which a core's share of the cache holds
_LARGE_PIECE, _MANY = (
    2**23,
    256,
)  # the same for so many rows of activations, beside which casting is little
_LEAST_ROWS = 64  # of a piece: fewer do not fill a product


class Weights:
    """Fills modules from a source, strictly.

    A matrix stays as it is stored where activations are fp32 (see FloatProducts); all else becomes
    `dtype`.
    """

    def __init__(self, source: Source, dtype: torch.dtype):
        self.source, self.dtype = source, dtype
        self._mapped: dict[
            str, Tensor
        ] = {}  # mapped once: the next prompt finds all of it where it was

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Give a module its weights; `prefix` is what the source's names have before the module's
        own."""
        module.load_state_dict(
            {name: self.tensor(prefix + name) for name in module.state_dict()},
            strict=True,
            assign=True,
        )

    def tensor(self, name: str) -> Tensor:
        if name not in self._mapped:
            self._mapped[name] = self.source.mapped(name)
        stored = self._mapped[name]
        return stored if stored.ndim > 1 and self.dtype == torch.float32 else stored.to(self.dtype)

    def prefetch(self, module: nn.Module, prefix: str) -> None:
        """Have the system read a module's weights while something else is done."""
        for name in module.state_dict():
            if prefix + name not in self._mapped:
                self.source.prefetch(prefix + name)


class StreamedLayers(nn.ModuleList):
    """A model's layers, each with weights from when it is its turn until it is the next one's.
    `prefix` as in Weights."""

    def __init__(self, layers: Iterable[nn.Module], prefix: str, weights: Weights):
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


class FloatProducts(TorchFunctionMode):
    """Within it, linear layers multiply fp32 activations with weights of any dtype, in fp32.

    oneDNN multiplies: torch gives fp32 products to MKL, which on CPUs that are not Intel's has half
    of its rate.
    """

    def __init__(self):
        super().__init__()
        self._memory = torch.empty(0)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear and args[0].dtype == torch.float32:
            return self._linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        numbers = _PIECE if x.shape[:-1].numel() < _MANY else _LARGE_PIECE
        count = max(_LEAST_ROWS, numbers // weight.shape[1])
        outputs = [product(x, self._wide(piece)) for piece in weight.split(count)]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return output if bias is None else output.add_(bias)

    def _wide(self, piece: Tensor) -> Tensor:
        if piece.dtype == torch.float32:
            return piece
        if self._memory.numel() < piece.numel():
            self._memory = torch.empty(piece.numel())
        return self._memory[: piece.numel()].view(piece.shape).copy_(piece)
