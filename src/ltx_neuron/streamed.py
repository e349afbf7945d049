"""Weights that are in memory only while their layer runs, and products with them as they are stored: for the host's CPU.

Both save memory that the kernel would hand out anew: on a virtual machine that costs ten times what filling it does
(benchmarks/2026-11-21-text-encode.md). So a layer is read into the memory of the one before it, and where it computes in
fp32 its bf16 weights are cast piece by piece, in the cache.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ltx_neuron.checkpoint import Source

_PIECE = 2**21  # numbers of a weight that are cast at once: 8 MB, which a core's share of the cache holds
_LEAST_ROWS = 64  # of a piece: fewer do not fill a product


class Weights:
    """Fills modules from a source, strictly, and takes their memory back for the next ones.

    A matrix stays as it is stored where activations are fp32 (see FloatProducts); all else becomes `dtype`.
    """

    def __init__(self, source: Source, dtype: torch.dtype):
        self.source, self.dtype = source, dtype
        self._free: dict[tuple, list[Tensor]] = defaultdict(list)
        self._lent: dict[nn.Module, list[Tensor]] = {}

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Read a module's weights; `prefix` is what the source's names have before the module's own."""
        read = {name: self._read(prefix + name) for name in module.state_dict()}
        self._lent[module] = list(read.values())
        weights = {name: tensor if self._stays(tensor) else tensor.to(self.dtype) for name, tensor in read.items()}
        module.load_state_dict(weights, strict=True, assign=True)

    def release(self, module: nn.Module) -> None:
        """Take back the memory that was read into: the module has no weights afterwards."""
        module.to("meta")
        for tensor in self._lent.pop(module):
            self._free[tensor.shape, tensor.dtype].append(tensor)

    def _stays(self, weight: Tensor) -> bool:
        return weight.ndim > 1 and self.dtype == torch.float32

    def _read(self, name: str) -> Tensor:
        free = self._free[torch.Size(self.source.shape(name)), self.source.dtype(name)]
        return self.source.stored(name, into=free.pop() if free else None)

    def rows(self, name: str, count: int) -> Iterator[tuple[slice, Tensor]]:
        """A matrix by pieces of `count` rows; each piece lies in the memory of the one before it."""
        total, width = self.source.shape(name)
        memory = torch.empty(min(count, total), width, dtype=self.source.dtype(name))
        for start in range(0, total, count):
            rows = slice(start, min(start + count, total))
            piece = self.source.stored(name, rows.start, rows.stop, into=memory[: rows.stop - rows.start])
            yield rows, piece if self._stays(piece) else piece.to(self.dtype)


class StreamedLayers(nn.ModuleList):
    """A model's layers, each with weights from when it is its turn until it is the next one's. `prefix` as in Weights."""

    def __init__(self, layers: Iterable[nn.Module], prefix: str, weights: Weights):
        super().__init__(layers)
        self._prefix, self._weights = prefix, weights

    def __iter__(self) -> Iterator[nn.Module]:
        for index, layer in enumerate(super().__iter__()):
            self._weights.fill(layer, f"{self._prefix}{index}.")
            yield layer
            self._weights.release(layer)


class FloatProducts(TorchFunctionMode):
    """Within it, linear layers multiply fp32 activations with weights of any dtype, in fp32.

    oneDNN multiplies: torch gives fp32 products to MKL, which on CPUs that are not Intel's has half of its rate.
    """

    def __init__(self):
        super().__init__()
        self._memory = torch.empty(0)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear and args[0].dtype == torch.float32:
            return self._linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        count = max(_LEAST_ROWS, _PIECE // weight.shape[1])
        outputs = [_product(x, self._wide(piece)) for piece in weight.split(count)]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return output if bias is None else output.add_(bias)

    def _wide(self, piece: Tensor) -> Tensor:
        if piece.dtype == torch.float32:
            return piece
        if self._memory.numel() < piece.numel():
            self._memory = torch.empty(piece.numel())
        return self._memory[: piece.numel()].view(piece.shape).copy_(piece)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if not torch.backends.mkldnn.is_available():
        return nn.functional.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # as torch.compile calls it
