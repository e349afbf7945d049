"""Record what the definition of the diffusion decoder with keyframes makes of the tests' latents: for each
token one softmax over the tokens of the clip and of the keyframes' planes that it sees.

Run it from the root, with PYTHONPATH=src:test:tools, when the definition changes:
python tools/golden/keyframe_decoder.py. It writes test/golden/diffusion_keyframes.safetensors.
"""

import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from diffusion_vae import SEED, config_of, latent, weights
from ltx_neuron.sampling.compat import FOLLOWED
from unit.engine.test_diffusion_keyframes import EMBEDDING, GOLDEN, SHAPE, STEP, keyframes

SIDES = tuple(32 * side for side in SHAPE[1:])


class Definition:
    """The decoder by the rules of ltx-core 1.4, over all tokens at once: (N, C), of the frames and
    then of the planes, in the order of time, rows and columns."""

    def __init__(self, planes: dict[int, Tensor]):
        self.config, self.weights, self.planes = config_of(), weights(config_of()), planes

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], eps=1e-6)

    def places(self, stage: int, count: int, rows: int, columns: int, left: int) -> None:
        """Set each token's time, row and column, and `seen`, which tokens it attends to."""
        times = [0.0 if f == 0 else (f + (left - 1) / 2) / left for f in self.planes]
        moments = [*map(float, range(count)), *times]
        tokens = [(n, h, w) for n in range(len(moments)) for h in range(rows) for w in range(columns)]
        number, row, column = torch.tensor(tokens).unbind(1)
        reach = [size // 2 for size in self.config.kernels[stage]]
        sees = torch.zeros(len(moments), len(moments), dtype=torch.bool)
        for one, here in enumerate(moments):
            others = range(count, len(moments)) if one < count else range(count)
            ranked = sorted(others, key=lambda other: (abs(moments[other] - here), other))
            sees[one, ranked[:2]] = True
            for other in range(count):
                sees[one, other] |= one < count and abs(one - other) <= reach[0]
            sees[one, one] = True
        self.seen = sees[number][:, number]
        self.seen &= (row[:, None] - row).abs() <= reach[1]
        self.seen &= (column[:, None] - column).abs() <= reach[2]
        self.positions = torch.tensor(moments)[number], row.float(), column.float()

    def rotated(self, x: Tensor) -> Tensor:
        parts = x.split(self.config.rope_split, -1)
        turned = []
        for part, positions in zip(parts, self.positions, strict=True):
            channels = part.shape[-1]
            speed = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
            phases = positions.double()[:, None] * speed
            pairs = torch.view_as_complex(part.double().unflatten(-1, (-1, 2)).contiguous())
            pairs = pairs * torch.polar(torch.ones_like(phases), phases)[:, None]
            turned.append(torch.view_as_real(pairs).flatten(-2))
        return torch.cat(turned, -1).float()

    def block(self, name: str, x: Tensor, rows: Tensor | None = None) -> Tensor:
        gate_1 = gate_2 = 1.0
        scale = [torch.zeros(()), torch.zeros(()), 0, torch.zeros(()), torch.zeros(())]
        if rows is not None:
            scale = (rows + self.weights[f"{name}.scale_shift_table"]).unbind(0)
            gate_1, gate_2 = (self.weights[f"{name}.gate_{part}"] for part in ("msa", "mlp"))
        normed = self.norm(f"{name}.norm1", x) * (1 + scale[0]) + scale[1]
        query, key, value = (
            part.unflatten(-1, (-1, self.config.head_dim))
            for part in self.linear(f"{name}.attn.qkv", normed).chunk(3, -1)
        )
        query = self.rotated(self.norm(f"{name}.attn.q_norm", query))
        key = self.rotated(self.norm(f"{name}.attn.k_norm", key))
        found = torch.cat(
            [
                self.attended(some, key, value, seen)
                for some, seen in zip(query.split(1000), self.seen.split(1000), strict=True)
            ]
        )
        x = x + gate_1 * self.linear(f"{name}.attn.proj", found)
        normed = self.norm(f"{name}.norm2", x) * (1 + scale[3]) + scale[4]
        hidden = F.silu(self.linear(f"{name}.mlp.w_gate", normed))
        hidden = hidden * self.linear(f"{name}.mlp.w_up", normed)
        return x + gate_2 * self.linear(f"{name}.mlp.w_down", hidden)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("qnd,knd->nqk", query, key) / math.sqrt(self.config.head_dim)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("nqk,knd->qnd", weights, value).flatten(1)

    def upsampled(self, stage: int, x: Tensor) -> Tensor:
        """(T, H, W, C), without the first frame if the frames are doubled."""
        time, down, across = self.config.upsamplings[stage].stride
        x = self.linear(f"upsamples.{stage}.proj", x)
        frames, rows, columns, _ = x.shape
        x = x.view(frames, rows, columns, -1, time, down, across).permute(0, 4, 1, 5, 2, 6, 3)
        return x.reshape(frames * time, rows * down, columns * across, -1)[time - 1 :]

    def context(self, number: int, x: Tensor) -> Tensor:
        name = f"diff_blocks.{number}"
        return self.linear(f"{name}.context_proj", x) * self.weights[f"{name}.gate_ctx"]

    def modulation(self) -> Tensor:
        half = torch.exp(-math.log(10000) * torch.arange(128) / 128) * 1000.0
        x = self.linear("t_embedder.mlp.0", torch.cat([half.cos(), half.sin()])[None])
        x = self.linear("t_embedder.mlp.2", F.silu(x))
        return self.linear("shared_adaln.proj", F.silu(x)).view(7, -1)

    def __call__(self) -> Tensor:
        """The clip's pixels, (3, F, H, W)."""
        deviation, mean = (self.weights[f"per_channel_statistics.{name}-of-means"] for name in ("std", "mean"))
        raw = lambda x: x[0].permute(1, 2, 3, 0) * deviation + mean  # noqa: E731
        video = raw(latent(SHAPE))
        video = torch.cat([video, *[video[-1:]] * self.config.repeats])
        planes = raw(torch.cat([*self.planes.values()], 2)) + EMBEDDING
        video, planes = self.linear("conv_in", video), self.linear("conv_in", planes)
        left = 8
        for stage in range(len(self.config.upsamplings)):
            count, rows, columns, channels = video.shape
            self.places(stage, count, rows, columns, left)
            x = torch.cat([video, planes]).flatten(0, 2)
            for block in range(self.config.depths[stage]):
                x = self.block(f"det_stages.{stage}.{block}", x)
            x = x.view(-1, rows, columns, channels)
            video, planes = self.upsampled(stage, x[:count]), x[count:]
            planes = torch.cat([self.upsampled(stage, plane) for plane in planes.split(1)])
            left //= self.config.upsamplings[stage].stride[0]
        video, seeded = video[: 8 * SHAPE[0] - 7], torch.Generator().manual_seed(SEED)
        context, noise = torch.cat([video, planes]), []
        for count in (len(video), len(planes)):
            drawn = torch.randn(3, count, *SIDES, generator=seeded)
            tiles = drawn.unflatten(3, (-1, 4)).unflatten(2, (-1, 4))  # (3, F, rows, q, columns, r)
            noise.append(tiles.permute(1, 2, 4, 0, 5, 3).flatten(3))
        x = self.linear("conv_in_x_t", torch.cat(noise))
        count, rows, columns, channels = x.shape
        self.places(len(self.config.depths) - 1, len(video), rows, columns, 1)
        for block in range(self.config.depths[-1]):
            x = x + self.context(block, context)
            x = self.block(f"diff_blocks.{block}", x.flatten(0, 2), self.modulation())
            x = x.view(count, rows, columns, channels)
        x = self.linear("conv_out", self.norm("norm_out", x))[: len(video)]
        x = x.unflatten(3, (3, 4, 4))  # (F, rows, columns, 3, r, q)
        return x.permute(3, 0, 1, 5, 2, 4).flatten(4, 5).flatten(2, 3)


if __name__ == "__main__":
    frames = Definition(keyframes())()[..., ::STEP, ::STEP].contiguous()
    save_file({"frames": frames}, GOLDEN, {"release": FOLLOWED})
