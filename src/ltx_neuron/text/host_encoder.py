"""Token ids to contexts, with Gemma and the connectors on the host's CPU. Shapes as in encoders.py.

Weights are not copied: layers use mapped pages. Copies would need new memory, which on a virtual
machine costs ten times more than filling it (benchmarks/text_encode.md). bf16 weights of an fp32
product are cast in pieces that fit the CPU's cache.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ltx_neuron.config.gemma import GemmaConfig
from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.errors import UserError
from ltx_neuron.models.attention import sdpa
from ltx_neuron.models.connectors import Connectors
from ltx_neuron.models.gemma3 import Gemma3Encoder
from ltx_neuron.models.parallel import SingleRank, rms_norm
from ltx_neuron.text import inputs
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.tensorfile import missing_and_unexpected

MANY_ROWS = 256  # of activations: from this number on they count as many
# Elements of a weight that are cast at once: 8 MB in float32, which fit a core's share of the
# cache. With many rows of activations casting costs little compared with the product, and larger
# pieces are faster.
PIECE_ELEMENTS, LARGE_PIECE_ELEMENTS = 2**21, 2**23
_MIN_WEIGHT_ROWS = 64  # of a piece: fewer do not keep a product busy


class HostTextEncoder:
    """Encodes on the host's CPU. Weights are mapped pages of their files, one layer at a time."""

    def __init__(
        self,
        # The tensors of model "gemma3": Gemma's, and the connectors' from the checkpoint
        source: Source,
        gemma: GemmaConfig,
        config: TransformerConfig,
        dtype: torch.dtype,  # of the activations; in float32 runs, matrices keep their stored dtype
    ):
        self.stored_linear = StoredLinear()
        self.source, self.gemma, self.config, self.dtype = source, gemma, config, dtype
        self.weights = MappedWeights(source, dtype)

    def check(self) -> None:
        """Raise UserError with every difference of the source's tensors from the configs."""
        tensors = {**self.encoder.state_dict(), **self.connectors.state_dict()}
        expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name in expected:
            if name.endswith("aggregate_embed.weight"):  # (L+1, D, H) here, (D, H * (L+1)) in files
                layers, width, hidden = expected[name]
                expected[name] = width, layers * hidden
        stored = {n: self.source.shape(n) for n in expected.keys() & self.source.locations.keys()}
        if problems := missing_and_unexpected(expected, stored):
            title = "the text encoder's weights are not those its config.json describes:"
            raise UserError(
                "\n  ".join([title, *problems])
                + f"\nDownload it again: {self.source.files[-1].download}"
            )

    @cached_property
    def encoder(self) -> Gemma3Encoder:
        """Gemma whose layers are filled with weights when they run. `_features` computes the
        projections of its hidden states."""
        with torch.device("meta"):
            comm: Any = SingleRank()  # without what sequence parallelism needs
            encoder = Gemma3Encoder(self.gemma, self.config, 1, comm, states=True)
        encoder.layers = StreamedLayers(encoder.layers, "layers.", self.weights)
        return encoder

    @cached_property
    def connectors(self) -> Connectors:
        with torch.device("meta"):
            comm: Any = SingleRank()
            connectors = Connectors(self.config, 1, comm, sdpa)
        for name in ("video_connector", "audio_connector"):
            connector, prefix = getattr(connectors, name), f"{name}.transformer_1d_blocks."
            connector.transformer_1d_blocks = StreamedLayers(
                connector.transformer_1d_blocks, prefix, self.weights
            )
        return connectors

    @torch.no_grad()
    def encode(self, prompts: list[list[int]]) -> list[Contexts]:
        with self.stored_linear:
            packs = inputs.pack_prompts(prompts)
            return [context for pack in packs for context in self._encode_pack(pack)]

    def _encode_pack(self, prompts: list[list[int]]) -> list[Contexts]:
        counts, states = [len(ids) for ids in prompts], self._states(prompts)
        slices, features = inputs.prompt_slices(counts, states.shape[1]), self._features(states)
        contexts = self._connect(
            [{name: f[:, part] for name, f in features.items()} for part in slices]
        )
        return [
            Contexts(
                video,
                audio,
                inputs.attention_mask(count),
                inputs.pad_left(states[:, part].transpose(2, 3)),
            )
            for video, audio, count, part in zip(
                *(c.split(1) for c in contexts.values()), counts, slices, strict=True
            )
        ]

    def _states(self, prompts: list[list[int]]) -> Tensor:
        """Hidden states (1, T, L + 1, H) of packed prompts."""
        self.weights.fill(self.encoder.norm, "norm.")
        rows = inputs.scale_embeddings(
            self.source.rows("embed_tokens.weight", inputs.embedded_ids(prompts, self.gemma)),
            self.dtype,
        )[None]
        fields = inputs.encoder_inputs(rows, [len(ids) for ids in prompts], self.gemma)
        return torch.stack(list(self.encoder.hidden_states(fields)), dim=2)

    def _features(self, states: Tensor) -> dict[str, Tensor]:
        """video_features (1, T, Dv) and audio_features (1, T, Da): linear in all normed hidden
        states (1, T, L + 1, H) side by side. In the stored projections layers vary fastest."""
        normed = rms_norm(states).transpose(2, 3).flatten(2)  # (1, T, H * (L + 1))
        features = {}
        for name, size in (("video", self.config.video), ("audio", self.config.audio)):
            scaled = normed * math.sqrt(size.inner / self.gemma.hidden_size)
            bias = self.source.tensor(f"{name}_aggregate_embed.bias").to(self.dtype)
            weight = self.weights.tensor(f"{name}_aggregate_embed.weight")
            features[f"{name}_features"] = nn.functional.linear(scaled, weight, bias)
        return features

    def _connect(self, features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Contexts (prompts, 1024, D) of a pack's prompts, from the features (1, n, D) of each."""
        registers = {
            m: self.source.tensor(f"{m}_connector.learnable_registers") for m in ("video", "audio")
        }
        fields = [inputs.connector_inputs(feature, registers, self.config) for feature in features]
        tokens = ("video_tokens", "audio_tokens")
        joined = {name: torch.cat([feature[name] for feature in fields]) for name in tokens}
        return self.connectors(fields[0] | joined)


class MappedWeights:
    """A source's tensors as mapped pages of its files, with which modules are filled. dtype: of the
    activations, to which weights are cast. In float32, matrices keep their stored dtype, with which
    StoredLinear multiplies."""

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
    prefix: of "<index>.<name>" in the source's names, such as "layers."."""

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
    dtype, in fp32: pieces of a weight that fit the CPU's cache are cast one after another. The
    memory is reused, because new pages cost more than writing to them. Other functions are torch's.
    oneDNN computes the products: torch's own library, MKL, has half its rate on CPUs of other
    vendors than Intel, and at most 1.3 times its rate on Intel's (benchmarks/text_encode.md)."""

    def __init__(self):
        super().__init__()
        self._cast_buffer = torch.empty(0)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is nn.functional.linear and args[0].dtype == torch.float32:
            return self._linear(*args, **kwargs)
        return function(*args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) float32, weight (N, K), bias (N) -> (..., N) float32."""
        rows, outputs = x.shape[:-1].numel(), len(weight)
        output = x.new_empty(rows, outputs)
        flat = x.reshape(rows, -1).contiguous()
        elements = PIECE_ELEMENTS if rows < MANY_ROWS else LARGE_PIECE_ELEMENTS
        weight_rows = max(_MIN_WEIGHT_ROWS, elements // weight.shape[1])
        pieces = zip(weight.split(weight_rows), output.split(weight_rows, dim=1), strict=True)
        for piece, part in pieces:
            part.copy_(_product(flat, self._as_float32(piece)))
        if bias is not None:
            output.add_(bias)
        return output.view(*x.shape[:-1], outputs)

    def _as_float32(self, piece: Tensor) -> Tensor:
        """A piece of a weight in float32, valid until the next call."""
        if piece.dtype == torch.float32:
            return piece
        if self._cast_buffer.numel() < piece.numel():
            self._cast_buffer = torch.empty(piece.numel())
        return self._cast_buffer[: piece.numel()].view(piece.shape).copy_(piece)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x (M, K) times the transpose of weight (N, K); all are float32."""
    if not torch.backends.mkldnn.is_available():
        return x @ weight.t()
    # The operator that torch.compile's CPU backend uses for a linear layer, because no public
    # function uses oneDNN for float32.
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
