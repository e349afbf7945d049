"""A denoising step of the full DiT on one GPU, beside ltx-core's own transformer in the same
process.

    python benchmarks/gpu_step.py

Random weights in bfloat16, made on the device once: both run on the very same tensors. Ours goes
the way of the profile: its graphs are exported, read back and compiled, and a rank's own code runs
them (TP=1). ltx-core runs eagerly, and with every transformer block through torch.compile. They
take turns; medians of warm steps count, timed from queue to result, latents to next latents. Each
is set against the device's own rate in a large matrix product.

Before anything is timed, one step of two blocks must agree: in float32, and in bfloat16 by the
three-way rule.

Without a GPU the same runs small on a CPU, which proves the way and measures nothing worth keeping:

    python benchmarks/gpu_step.py --profile cpu --tiny --blocks 2 --sizes 64x64x9
    --steps 2
"""

import argparse
import dataclasses
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from lib.sections import Failed, rel, three_way
from lib.sizes import parse_size
from torch import Tensor

from ltx_neuron import errors
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.rank import Rank
from ltx_neuron.backends.ranks import Ranks
from ltx_neuron.backends.torchdist import rank_settings
from ltx_neuron.backends.wire import SharedTensor
from ltx_neuron.config import TEXT_TOKENS, transformer_config
from ltx_neuron.denoise import CompiledStep, StageRun
from ltx_neuron.errors import UserError
from ltx_neuron.host.models import import_ltx_core
from ltx_neuron.job import Job, Size
from ltx_neuron.models.modulation import host_weights
from ltx_neuron.models.programs import dit_program
from ltx_neuron.profiles import Profile, require_runtime, resolve
from ltx_neuron.sampling import latents
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.tiny import TinySizes
from ltx_neuron.tiny.config import merge, released_config, tiny_config
from ltx_neuron.tiny.weights import random_weight

SIZES = ("384x512x25", "512x768x121", "1024x1536x121")
AIM_MS, AIM_SIZE = 350.0, "512x768x121"  # a step on one H200
CHECKED_BLOCKS, CHECKED_SIZE = 2, Size(384, 512, 25)
# sums in another order: 1e-7 to 3e-7 on a CPU at tiny width; contexts in a wrong order change 2e-2
FP32 = 1e-4
FORMS = ("ours", "ltx-core compiled", "ltx-core eager")
NONE = "not measured"


class Model:
    """The DiT's weights on the device, once: as ltx-core's module, and under the names of our
    graphs, which are the same."""

    def __init__(self, content: dict, device: torch.device, dtype: torch.dtype):
        import_ltx_core()
        from ltx_core.model.transformer import LTXModelConfigurator, X0Model

        self.config = transformer_config(content)
        self.device, self.dtype = device, dtype
        with torch.device("meta"):
            model = LTXModelConfigurator.from_config(content)
        generator = torch.Generator(device).manual_seed(0)
        with device:
            weights = {
                name: random_weight(name, like, generator).bfloat16().to(dtype)
                for name, like in model.state_dict().items()
            }
        model.load_state_dict(weights, assign=True)
        self.transformer = X0Model(model.eval().requires_grad_(False))
        self.tensors = model.state_dict()

    def compile_blocks(self, backend: str) -> None:
        """Compile every block of ltx-core's transformer: they are alike, so that is one graph,
        where the whole would be 48."""
        # else what is compiled too often runs eagerly, unsaid
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for block in self.transformer.velocity_model.transformer_blocks:
            block.compile(backend=backend, dynamic=False)


class Case:
    """A step of one size: what both take, on the device."""

    def __init__(self, model: Model, size: Size):
        self.model, self.size = model, size
        self.job = Job("contexts are given", size)
        self.stage = self.job.stages[0]
        self.bucket = self.job.bucket(self.stage)
        # The last step, to sigma 0, leaves the prediction itself.
        self.number = len(self.stage.sigmas) - 2
        config = model.config
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            # bfloat16 holds them, so they are the same numbers in every dtype
            return torch.randn(shape, generator=generator).bfloat16().to(model.dtype)

        self.shape = latents.video_latent_shape(size.height, size.width, size.num_frames)
        self.video = random(1, self.bucket.video_tokens, config.in_channels)
        self.audio = random(1, self.bucket.audio_tokens, config.audio_in_channels)
        widths = config.video.inner, config.audio.inner
        self.contexts = Contexts(
            *(random(1, TEXT_TOKENS, width) for width in widths), torch.ones(1, TEXT_TOKENS), None
        )

    def theirs(self, stance: str) -> Callable[[], dict[str, Tensor]]:
        """ltx-core's step: both denoised predictions, then Euler, as ltx-pipelines calls them.

        `stance` is torch.compile's: "default", or "force_eager", which runs compiled blocks as they
        were.
        """
        from ltx_core.components.diffusion_steps import EulerDiffusionStep
        from ltx_core.types import LatentState
        from ltx_pipelines.utils.helpers import simple_denoising_func

        device = self.model.device

        def state(latent: Tensor, middles: Tensor) -> LatentState:
            # the model takes the middle of each pair of bounds
            bounds = torch.stack([middles, middles], dim=-1).to(device)
            return LatentState(
                latent.to(device),
                torch.ones(*latent.shape[:2], 1, device=device),
                bounds,
                torch.zeros_like(latent, device=device),
            )

        states = {
            "video_state": state(
                self.video, latents.video_positions(self.shape, self.size.frame_rate)
            ),
            "audio_state": state(self.audio, latents.audio_positions(self.bucket.audio_tokens)),
        }
        contexts = self.contexts.video.to(device), self.contexts.audio.to(device)
        denoise = simple_denoising_func(*contexts, self.model.transformer)
        euler = EulerDiffusionStep()
        sigmas = torch.tensor(self.stage.sigmas, device=device)

        def step() -> dict[str, Tensor]:
            with torch.compiler.set_stance(stance):
                predictions = denoise(**states, sigmas=sigmas, step_index=self.number)
            return {
                name: euler.step(states[f"{name}_state"].latent, x0, sigmas, self.number)
                for name, x0 in zip(("video", "audio"), predictions, strict=True)
            }

        return step

    def ours(self, local: "LocalRank") -> Callable[[], dict[str, Tensor]]:
        """Our step: the command that a generation sends to a rank, on the rank's own latents."""
        config, dtype = self.model.config, self.model.dtype
        adaln = {name: self.model.tensors[name].cpu() for name in host_weights(config)}
        compiled = CompiledStep(self.bucket, local.programs[self.bucket.name])
        run = StageRun(local, compiled, config, dtype, adaln, COMPAT[None])
        empty = (
            torch.zeros(1, latents.VIDEO_CHANNELS, *self.shape),
            torch.zeros(1, latents.AUDIO_CHANNELS, self.bucket.audio_tokens, latents.MEL_BINS),
        )
        run.prepare(
            self.job, self.stage, [self.contexts], *empty, torch.Generator().manual_seed(0), []
        )
        run.video, run.audio = self.video, self.audio
        run.start()
        start = {
            f"{name}_latent": local.rank.tensors[f"{name}_latent"] for name in ("video", "audio")
        }

        def step() -> dict[str, Tensor]:
            local.rank.tensors.update(start)
            local.rank.run(self.bucket.name, "main", {"step": self.number})
            return {name: local.rank.tensors[f"{name}_latent"] for name in ("video", "audio")}

        return step


class LocalRank:
    """A rank of the profile in this process: backends/rank.py on weights that are on the device
    already."""

    def __init__(self, profile: Profile, model: Model, folders: dict[str, Path]):
        self.rank = Rank(
            rank_settings(profile, 1, 0, None),
            model.device,
            barrier=lambda: None,
            launched=lambda: None,
        )
        self.programs = {name: Manifest(folder) for name, folder in folders.items()}
        wanted = {
            name: shape
            for manifest in self.programs.values()
            for name, shape in manifest.weights().items()
        }
        self.rank.weights[frozenset(wanted)] = (
            Path("random"),
            {name: model.tensors[name] for name in wanted},
        )
        self.rank.load(Path("random"), wanted, folders, model.dtype)

    put_numbers = Ranks.put_numbers

    def put(self, program: str, like: str | None = None, **tensors: Tensor) -> None:
        """What Ranks.put does, for the one rank."""
        for name, tensor in tensors.items():
            field = self.rank.programs[program].fields[like or name]
            with SharedTensor(tuple(tensor.shape), field.dtype) as shared:
                shared.tensor.copy_(tensor)
                upload = {"name": name, "like": like or name, "memory": shared.name}
                self.rank.put(program, [upload | {"shape": list(tensor.shape)}])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compiled(model: Model, cases: list[Case], profile: Profile, folder: Path) -> dict[str, Path]:
    """The graphs of every case's step, as compile_transformer.py makes them."""
    folders = {}
    for case in cases:
        path = folder / f"{case.bucket.name}-{model.config.num_layers}-{_name(model.dtype)}"

        def make(bucket=case.bucket):
            return dit_program(
                model.config,
                bucket,
                1,
                registry.comm(profile, 1),
                model.dtype,
                profile.blocks_per_graph,
                profile.attention,
            )

        registry.compile_program(make, path, {}, model.dtype, profile, 1)
        folders[case.bucket.name] = path
    return folders


class Group:
    """A process group of this process alone, which a rank wants; out of the way while graphs are
    traced."""

    def __init__(self, profile: Profile, folder: Path):
        store = dist.FileStore(str(folder / f"store-{time.monotonic_ns()}"), 1)
        dist.init_process_group(profile.process_group, store=store, rank=0, world_size=1)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        dist.destroy_process_group()


def checked(
    content: dict, profile: Profile, device: torch.device, size: Size, folder: Path
) -> list[str]:
    """Two blocks: our step against ltx-core's in float32, and in bfloat16 by the three-way rule.
    Failed where they differ."""
    content = merge(content, {"transformer": {"num_layers": CHECKED_BLOCKS}})
    results: dict = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Model(content, device, dtype)
        case = Case(model, size)
        folders = compiled(model, [case], profile, folder)
        with Group(profile, folder):
            results[dtype] = {
                "ours": on_host(case.ours(LocalRank(profile, model, folders))()),
                "theirs": on_host(case.theirs("force_eager")()),
            }
    exact = results[torch.float32]
    off = {name: rel(exact["ours"][name], exact["theirs"][name]) for name in exact["ours"]}
    lines = [
        f"{CHECKED_BLOCKS} blocks, one step, float32: ours is "
        + ", ".join(f"{value:.1e} ({name})" for name, value in off.items())
        + " from ltx-core's"
    ]
    if not max(off.values()) < FP32:
        raise Failed(f"our step is not ltx-core's: allowed is {FP32:g}", lines)
    rows = three_way(
        results[torch.bfloat16]["ours"],
        results[torch.bfloat16]["theirs"],
        exact["theirs"],
        ("video", "audio"),
    )
    return [
        *lines,
        "",
        *(row.replace("| device | CPU bf16 |", "| ours, bfloat16 | ltx-core's |") for row in rows),
        "",
    ]


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def milliseconds(call: Callable, device: torch.device) -> float:
    """From queue to result: CUDA's own events on a GPU, the clock elsewhere."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of several large matrix products."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = [milliseconds(lambda: torch.mm(a, b, out=out), device) for _ in range(20)]
    return 2 * size**3 / (min(times[5:]) / 1e3)


class Row:
    """What was measured of one form at one size."""

    def __init__(self, step: Callable, device: torch.device):
        self.step, self.device, self.times, self.peak = step, device, [], 0
        began = time.perf_counter()
        self.result = on_host(step())
        self.cold_seconds = time.perf_counter() - began

    def turn(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.times.append(milliseconds(self.step, self.device))
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def measured(case: Case, local: LocalRank, steps: int) -> dict[str, Row]:
    """Every form at a size: the first step of each, then so many in turn."""
    forms = (case.ours(local), case.theirs("default"), case.theirs("force_eager"))
    rows = {name: Row(step, case.model.device) for name, step in zip(FORMS, forms, strict=True)}
    for _ in range(steps):
        for row in rows.values():
            row.turn()
    return rows


def table(size: Size, flops: int, rate: float, rows: dict[str, Row]) -> list[str]:
    label = f"{size.height}x{size.width}x{size.num_frames}"
    return [
        f"| {label} | {name} | {row.median:,.1f} | {min(row.times):,.1f} to {max(row.times):,.1f} |"
        f" {100 * flops / (row.median / 1e3) / rate:.1f} % | {row.cold_seconds:,.1f} |"
        f" {f'{row.peak / 1e9:.1f} GB' if row.peak else NONE} |"
        f" {distance(row, rows['ltx-core eager']):.2%} |"
        for name, row in rows.items()
    ]


def distance(row: Row, other: Row) -> float:
    return max(rel(row.result[name], other.result[name]) for name in row.result)


@torch.no_grad()
def run(args: argparse.Namespace, profile: Profile) -> None:
    device = torch.device("cuda", 0) if profile.device == "cuda" else torch.device(profile.device)
    content = tiny_config(TinySizes()) if args.tiny else released_config()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    rate = matmul_rate(device, torch.bfloat16)
    print(
        f"{name}, torch {torch.__version__}, ltx-core {version('ltx-core')}, {args.blocks}"
        f" blocks{' (tiny)' if args.tiny else ''}, bfloat16; a large matrix product runs at"
        f" {rate / 1e12:.3g} TF/s"
    )
    sizes = [parse_size(text) for text in args.sizes]
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(
                *checked(
                    content, profile, device, sizes[0] if args.tiny else CHECKED_SIZE, Path(folder)
                ),
                sep="\n",
            )
        except Failed as failed:
            print(*failed.lines, sep="\n")
            raise errors.RunError(str(failed)) from None
        model = Model(
            merge(content, {"transformer": {"num_layers": args.blocks}}), device, torch.bfloat16
        )
        cases = [Case(model, size) for size in sizes]
        folders = compiled(model, cases, profile, Path(folder))
        print(
            "| size | | median ms | range | of the matrix product | first step, s | memory at most"
            " | from ltx-core eager |",
            "|---|---|---|---|---|---|---|---|",
            sep="\n",
        )
        ratios = {}
        with Group(profile, Path(folder)):
            local = LocalRank(profile, model, folders)
            model.compile_blocks(
                "eager" if profile.compile_backend == "export" else profile.compile_backend
            )
            for case, text in zip(cases, args.sizes, strict=True):
                rows = measured(case, local, args.steps)
                flops = Manifest(folders[case.bucket.name]).cost()["flops"]
                print(*table(case.size, flops, rate, rows), sep="\n", flush=True)
                ratios[text] = rows["ltx-core compiled"].median / rows["ours"].median
                if (
                    text == AIM_SIZE
                    and not args.tiny
                    and device.type == "cuda"
                    and args.blocks == 48
                ):
                    print(
                        f"<!-- {text}: {rows['ours'].median:.1f} ms, the aim on one H200 is"
                        f" {AIM_MS:g} ms -->"
                    )
    by_size = ", ".join(f"{ratio:.2f} at {text}" for text, ratio in ratios.items())
    print(
        f"times as fast as ltx-core compiled: {by_size}"
        + ("" if device.type == "cuda" else f" (no GPU: {NONE})")
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profile",
        default="cuda",
        help="cuda, or cpu for a small run of the same (default: %(default)s)",
    )
    parser.add_argument("--profile-set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--sizes", nargs="+", default=SIZES, metavar="HxWxF", help=f"default: {' '.join(SIZES)}"
    )
    parser.add_argument(
        "--blocks", type=int, default=48, help="default: %(default)s, the release's"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="timed steps of each (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny width instead of the release's")
    args = parser.parse_args(argv)
    profile = dataclasses.replace(resolve(args.profile, tuple(args.profile_set)), tp=1)
    try:
        require_runtime(profile, 1)
    except UserError as error:
        raise UserError(
            f"{NONE}: {error}\nA small run of all of it here: python benchmarks/gpu_step.py"
            " --profile cpu --tiny --blocks 2 --sizes 64x64x9 --steps 2"
        ) from None
    run(args, profile)


if __name__ == "__main__":
    errors.run(main)
