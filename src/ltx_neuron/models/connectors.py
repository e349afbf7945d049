"""The text connectors: text features to contexts.

Source: ltx-core text_encoders/gemma/embeddings_connector.py. The prompt's
tokens come first, learned registers fill the rest of the 1024 positions, and every position attends
to every other.

Shapes: S = 1024 positions, D width of a stream (video 4096, audio 2048); the batch is 1.
"""

from collections.abc import Mapping
from itertools import zip_longest

from torch import Tensor, nn

from ltx_neuron.config.common import AttentionSize
from ltx_neuron.config.transformer import STREAMS, TransformerConfig
from ltx_neuron.models.attention import Attention, AttentionCall, Kernel, attend
from ltx_neuron.models.parallel import Comm, FeedForward, rms_norm
from ltx_neuron.models.rope import Rope


class ConnectorBlock(nn.Module):
    """Self-attention and feed-forward of one stream. Its forward pass is in Connectors.
    Parameters have the checkpoint's names."""

    def __init__(self, size: AttentionSize, tp: int, kernel: Kernel, ff_bias: bool):
        super().__init__()
        self.attn1 = Attention(size, size.inner, size.inner, tp, kernel)
        self.ff = FeedForward(size.inner, tp, ff_bias)


class Connector(nn.Module):
    """The blocks of one stream. Connectors runs both streams together."""

    def __init__(self, size: AttentionSize, layers: int, tp: int, kernel: Kernel, ff_bias: bool):
        super().__init__()
        self.transformer_1d_blocks = nn.ModuleList(
            ConnectorBlock(size, tp, kernel, ff_bias) for _ in range(layers)
        )


class Connectors(nn.Module):
    """Tokens and registers (1, S, D) of both streams -> contexts of the same shapes."""

    def __init__(self, config: TransformerConfig, tp: int, comm: Comm, kernel: Kernel):
        super().__init__()
        self.comm = comm
        common = tp, kernel, config.connector_ff_bias
        self.video_connector = Connector(
            config.video_connector, config.connector_num_layers, *common
        )
        self.audio_connector = Connector(
            config.audio_connector, config.audio_connector_num_layers, *common
        )

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        states = {stream: inputs[f"{stream}_tokens"] for stream in STREAMS}
        ropes = {stream: Rope.of(inputs, stream) for stream in STREAMS}
        blocks = (
            self.video_connector.transformer_1d_blocks,
            self.audio_connector.transformer_1d_blocks,
        )
        # The streams may differ in depth: the deeper one continues alone.
        for layer in zip_longest(*blocks):
            active = {
                name: block for name, block in zip(states, layer, strict=True) if block is not None
            }
            # Both streams together, so that their sums form one group (Comm.sum).
            # These norms have no weights; q and k have norms of their own in Attention.
            normed = {name: rms_norm(states[name]) for name in active}
            calls = [
                AttentionCall(block.attn1, normed[name], normed[name], ropes[name])
                for name, block in active.items()
            ]
            for name, out in zip(active, attend(self.comm, *calls), strict=True):
                states[name] = states[name] + out
            partials = [block.ff.partial(rms_norm(states[name])) for name, block in active.items()]
            for (name, block), summed in zip(active.items(), self.comm.sum(*partials), strict=True):
                states[name] = states[name] + block.ff.finish(summed)
        # The last norm has no weight (embeddings_connector.py), so nothing of it is loaded.
        return {f"{stream}_context": rms_norm(state) for stream, state in states.items()}
