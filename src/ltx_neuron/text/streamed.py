"""Running a large model on the host's CPU without a copy of its weights: layers get them when they
run, as the files' own pages, and the host's kernels take the place of what torch is slow at.

Copies would need fresh memory, which on a virtual machine costs ten times what filling it does
(benchmarks/text_encode.md). So nothing that the page cache holds is copied, and bf16
weights of an fp32 product are cast piece by piece, in the CPU's cache.
"""

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ltx_neuron.host.products import AMX, BLAS, MANY_ROWS, ONEDNN_ALONE, Libraries, multiplier
from ltx_neuron.models.rope import Rope, rotate
from ltx_neuron.weights.checkpoint import Source

# Elements of a weight that are cast at once: 8 MB in fp32, which a core's share of the cache holds.
# MKL is a tenth faster with twice as many.
_PIECE_ELEMENTS = 2**21
# With many rows of activations casting costs little beside the product, and larger pieces are
# faster.
_LARGE_PIECE_ELEMENTS = 2**23
_MIN_WEIGHT_ROWS = 64  # of a piece: fewer do not keep a product busy


class MappedWeights:
    """A source's tensors as the files' own pages, to fill modules with.

    dtype  of the activations, to which weights are cast. With float32 matrices keep the dtype they
           are stored in: HostKernels multiplies with them.
    """

    def __init__(self, source: Source, dtype: torch.dtype):
        self.source, self.dtype = source, dtype
        # Mapped once: the next prompt finds every page where it was.
        self._mapped: dict[str, Tensor] = {}

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Load a module's weights, strictly. `prefix` comes before the module's own names in the
        source."""
        module.load_state_dict(
            {name: self.tensor(prefix + name) for name in module.state_dict()},
            strict=True,
            assign=True,
        )

    def tensor(self, name: str) -> Tensor:
        """A tensor of the source, mapped; cast where it must be."""
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
    """A model's layers that have weights only while they run: iterating fills a layer, asks the
    system to read the next one's weights, and empties the layer (meta device) afterwards.

    prefix  comes before "<index>.<name>" in the source's names, like "layers."
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


class HostKernels(TorchFunctionMode):
    """A context in which this machine's own kernels do what torch is slow at: nn.functional.linear
    multiplies fp32 activations with weights of any dtype, in fp32 and by the libraries given
    (host.products); tanh-GELU and rotation of bf16 are those of host.elementwise, to the bit. All
    else is torch's.
    """

    def __init__(self, libraries: Libraries = ONEDNN_ALONE):
        super().__init__()
        self._libraries = libraries
        self._cast_buffer = torch.empty(0)
        self._multiply = cache(multiplier)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is nn.functional.linear and args[0].dtype == torch.float32:
            return self._linear(*args, **kwargs)
        if function is nn.functional.gelu and _is_fast_gelu(*args, **kwargs):
            return _elementwise().gelu(args[0])
        if function is rotate and _is_fast_rotation(*args):
            x, rope = args
            return _elementwise().rotate(x, *rope)
        return function(*args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) float32, weight (N, K), bias (N) -> (..., N) float32."""
        rows, outputs = x.shape[:-1].numel(), len(weight)
        library = self._libraries.of(rows)
        activations, output = x.reshape(rows, -1).contiguous(), x.new_empty(rows, outputs)
        if library != AMX:
            self._in_pieces(activations, weight, output, library)
        elif weight.dtype == torch.bfloat16 and weight.is_contiguous():
            self._multiply(AMX)(activations, weight, output)
        else:  # as good as any: AMX is Intel's
            self._in_pieces(activations, weight, output, BLAS)
        if bias is not None:
            output.add_(bias)
        return output.view(*x.shape[:-1], outputs)

    def _in_pieces(self, x: Tensor, weight: Tensor, output: Tensor, library: str) -> None:
        """Multiply with pieces of the weight that are cast to float32 if they must be."""
        elements = _LARGE_PIECE_ELEMENTS
        if len(x) < MANY_ROWS:
            elements = _PIECE_ELEMENTS * (2 if library == BLAS else 1)
        weight_rows = max(_MIN_WEIGHT_ROWS, elements // weight.shape[1])
        parts = zip(weight.split(weight_rows), output.split(weight_rows, dim=1), strict=True)
        for piece, part in parts:
            self._multiply(library)(x, self._as_float32(piece), part)

    def _as_float32(self, piece: Tensor) -> Tensor:
        """A piece of a weight in float32, valid until the next call."""
        if piece.dtype == torch.float32:
            return piece
        if self._cast_buffer.numel() < piece.numel():
            self._cast_buffer = torch.empty(piece.numel())
        return self._cast_buffer[: piece.numel()].view(piece.shape).copy_(piece)


def _is_fast_gelu(x: Tensor, approximate: str = "none") -> bool:
    return approximate == "tanh" and x.dtype == torch.bfloat16 and x.is_contiguous()


def _is_fast_rotation(x: Tensor, rope: Rope) -> bool:
    """Whether x (B, H, T, D) and the tables (1, 1 or H, T, D / 2) lie as host.elementwise reads."""
    tables = x.shape[2], x.shape[3] // 2
    return (
        x.dtype == torch.bfloat16
        and x.transpose(1, 2).is_contiguous()
        and all(t.shape in ((1, 1, *tables), (1, x.shape[1], *tables)) for t in rope)
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in rope)
    )


def _elementwise():
    from ltx_neuron.host import elementwise  # imports numba and compiles

    return elementwise
