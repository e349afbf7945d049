"""What a generation needs and how fast it could be, before anyone pays for a compile. Reads
headers, loads no weights.

  python -m ltx_neuron.plan --checkpoint-path CKPT --profile trn2.3xlarge --height 512 --width 768 --num-frames 121

FLOPs, collectives and activations are counted in the real graphs: head, one block and tail are
exported at full width on the meta device, and blocks repeat. What is assumed rather than counted is
in ASSUMED, and named in the output.
"""

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ltx_neuron import errors
from ltx_neuron.backends.export import TorchDistComm, cost, fake_process_group, trace
from ltx_neuron.config import (
    GEMMA_3_12B,
    Bucket,
    GemmaConfig,
    TransformerConfig,
    gemma_config,
    transformer_config,
)
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size, Stage
from ltx_neuron.models.programs import Program, dit_program, gemma3_program
from ltx_neuron.profiles import Profile, resolve
from ltx_neuron.sampling.latents import video_latent_shape
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.sharding import HOST, MODELS, local_shape, rule
from ltx_neuron.weights.tensorfile import DTYPES

ASSUMED = {
    "runtime_bytes_per_core": (
        2 * 2**30
    ),  # compiled graphs, scratch, runtime; published peaks suggest 1 to 3 GB
    "sdpa": "attention scores are never held (a flash kernel)",
}


@dataclass(frozen=True)
class StagePlan:
    """One stage's step. Times are the least that the chip's documented limits allow; None where
    they are not known."""

    name: str
    height: int
    width: int
    steps: int
    video_tokens: int
    audio_tokens: int
    flops_per_step: int
    ideal_step_ms: float | None
    compute_ms: float | None
    memory_ms: float | None
    collectives_ms: float | None
    collectives_per_step: dict  # {"count", "bytes"} of one rank
    activation_bytes_per_core: int
    upload_bytes: int  # once per stage: noise, contexts, RoPE and modulation tables, one rank's
    bytes_to_device_per_step: int


@dataclass(frozen=True)
class Plan:
    """A generation on a profile. Byte counts are per rank (logical core) where they say so."""

    profile: str
    tp: int
    dtype: str
    block_weight_bytes_per_rank: int
    dit_weight_bytes_per_rank: int
    gemma3_weight_bytes_per_rank: int
    flops_per_step: int  # of the last stage, like the next three
    ideal_step_ms: float | None
    collectives_per_step: dict
    hbm_bytes_per_core: int  # the DiT, in turn with Gemma3
    hbm_bytes_per_core_resident: int  # both at once
    hbm_limit_bytes_per_core: int | None
    fits: bool | None
    fits_resident: bool | None
    nearest_that_fits: str | None
    host_bytes_to_load: (
        int  # at most: every rank's file of the larger model, read before it goes to the device
    )
    host_bytes_to_decode: int  # with this machine's threads
    host_limit_bytes: int | None
    disk_bytes: int
    assumed: dict
    stages: list[StagePlan]


def check_fits(
    checkpoint: Checkpoint,
    profile: Profile,
    size: Size,
    tp: int,
    dtype: str,
    gemma: GemmaConfig | None,
    recipe: str,
) -> None:
    """Raise UserError where a generation needs more memory than a core of the profile has; nothing
    is loaded to know."""
    if profile.memory_bytes_per_core is None:
        return
    made = plan(checkpoint, profile, size, tp, dtype, gemma, recipe)
    both = profile.resident and gemma is not None
    if made.fits and (made.fits_resident or not both):
        return
    needed = made.hbm_bytes_per_core_resident if both else made.hbm_bytes_per_core
    limit = f"{made.hbm_limit_bytes_per_core / 1e9:.1f} GB"
    what = (
        f"{size.height}x{size.width}, {size.num_frames} frames at tp {tp} needs {needed / 1e9:.1f}"
        " GB a core"
    )
    if made.fits:
        do = "Type --profile-set resident=false: one model at a time fits"
    elif made.nearest_that_fits:
        do = f"The nearest size that fits: {made.nearest_that_fits}"
    else:
        do = "No length of that size fits; type a larger --tp-degree, or --dtype bfloat16"
    raise UserError(
        f"{what}, {profile.name} has {limit} (LNC={profile.lnc}).\n{do}. "
        "All figures: python -m ltx_neuron.plan, with the same flags"
    )


def check_text_fits(
    profile: Profile, tp: int, dtype: str, gemma: GemmaConfig, config: TransformerConfig
) -> None:
    """The same for the text encoder alone."""
    with fake_process_group(tp):
        needed = _gemma_bytes(gemma, config, tp, DTYPES[dtype]) + ASSUMED["runtime_bytes_per_core"]
    if profile.memory_bytes_per_core is not None and needed > profile.memory_bytes_per_core:
        raise UserError(
            f"the text encoder at tp {tp} needs {needed / 1e9:.1f} GB a core, {profile.name} has"
            f" {profile.memory_bytes_per_core / 1e9:.1f} GB (LNC={profile.lnc}).\nType a larger"
            " --tp-degree, or generate without --neuron-gemma"
        )


def plan(
    checkpoint: Checkpoint,
    profile: Profile,
    size: Size,
    tp: int,
    dtype: str,
    gemma: GemmaConfig | None = GEMMA_3_12B,
    recipe: str = "distilled",
    steps: int = 30,
) -> Plan:
    """Plan a generation; without gemma, of a prompt that is encoded on the host. Raises UserError
    for sizes and degrees that do not fit the model."""
    from ltx_neuron.host.vae_memory import (
        decode_bytes,
    )  # ltx-core, which importing this package does not need

    size.check()
    config, kind = transformer_config(checkpoint.config), DTYPES[dtype]
    config.check_tensor_parallel(tp)
    if gemma:
        gemma.check_tensor_parallel(tp)
    weights = _dit_bytes(checkpoint, tp, kind)

    def planned(of: Size) -> list[StagePlan]:
        return [_stage(config, of, stage, profile, tp, kind) for stage in of.stages(recipe, steps)]

    def peak(of: Size) -> int:
        with fake_process_group(tp):
            return max(
                stage.activation_bytes_per_core + stage.upload_bytes for stage in planned(of)
            )

    with fake_process_group(tp):
        stages = planned(size)
        gemma_bytes = _gemma_bytes(gemma, config, tp, kind) if gemma else 0
    embeddings = gemma.vocab_size * gemma.hidden_size * kind.itemsize if gemma else 0
    last, limit = stages[-1], profile.memory_bytes_per_core
    activations = max(stage.activation_bytes_per_core + stage.upload_bytes for stage in stages)
    in_turn = max(weights["rank"] + activations, gemma_bytes) + ASSUMED["runtime_bytes_per_core"]
    resident = weights["rank"] + gemma_bytes + activations + ASSUMED["runtime_bytes_per_core"]
    fits = None if limit is None else in_turn <= limit
    latent = video_latent_shape(size.height, size.width, size.num_frames)
    nearest = _nearest(size, last, weights["rank"], limit, peak) if fits is False else None
    return Plan(
        profile=profile.name,
        tp=tp,
        dtype=dtype,
        block_weight_bytes_per_rank=weights["blocks"],
        dit_weight_bytes_per_rank=weights["rank"],
        gemma3_weight_bytes_per_rank=gemma_bytes,
        flops_per_step=last.flops_per_step,
        ideal_step_ms=last.ideal_step_ms,
        collectives_per_step=last.collectives_per_step,
        hbm_bytes_per_core=in_turn,
        hbm_bytes_per_core_resident=resident,
        hbm_limit_bytes_per_core=limit,
        fits=fits,
        fits_resident=None if limit is None else resident <= limit,
        nearest_that_fits=nearest,
        host_bytes_to_load=tp * max(weights["rank"], gemma_bytes),
        host_bytes_to_decode=decode_bytes(checkpoint.config, latent, profile.host_threads),
        host_limit_bytes=profile.host_memory_bytes,
        disk_bytes=tp * (weights["rank"] + gemma_bytes) + weights["host"] + embeddings,
        assumed=ASSUMED,
        stages=stages,
    )


def _dit_bytes(checkpoint: Checkpoint, tp: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of one rank's weights, of its blocks alone, and of what stays on the host; from the
    header and the table."""
    source, model, found = (
        Source(MODELS["dit"], [checkpoint]),
        MODELS["dit"],
        {"rank": 0, "blocks": 0, "host": 0},
    )
    for name in source.locations:
        split = rule(model, name)
        size = torch.Size(local_shape(source.shape(name), split, tp, name)).numel() * dtype.itemsize
        found["host" if split == HOST else "rank"] += size
        found["blocks"] += size if name.startswith("transformer_blocks.") else 0
    return found


def _gemma_bytes(gemma: GemmaConfig, config: TransformerConfig, tp: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's text encoder and projections."""
    program = gemma3_program(gemma, config, 128, tp, TorchDistComm(tp), dtype, states=False)
    return sum(p.numel() * dtype.itemsize for p in program.graphs["gemma3"].module.parameters())


def _stage(
    config: TransformerConfig,
    size: Size,
    stage: Stage,
    profile: Profile,
    tp: int,
    dtype: torch.dtype,
) -> StagePlan:
    bucket = size.bucket(stage, ())
    program = dit_program(config, bucket, tp, TorchDistComm(tp), dtype, 1, profile.attention)
    exported = {name: trace(program, name, dtype) for name in program.graphs if name != "guide"}
    calls = [name for name, _ in next(iter(program.runs.values()))]
    costs = {name: cost(graph) for name, graph in exported.items()}
    total = {key: sum(costs[name][key] for name in calls) for key in costs["blocks"]}
    weights = sum(
        p.numel() * dtype.itemsize
        for name in calls
        for p in program.graphs[name].module.parameters()
    )
    times = {"compute_ms": None, "memory_ms": None, "collectives_ms": None}
    if profile.chip:
        # A ring all-reduce moves 2 (tp - 1) / tp of its bytes in and out of each rank.
        moved = total["collective_bytes"] * tp * 2 * (tp - 1) / tp
        times = {
            "compute_ms": total["flops"] * tp / profile.flops(tp) * 1e3,
            "memory_ms": weights * tp / profile.memory_bytes_per_second(tp) * 1e3,
            "collectives_ms": moved / profile.link_bytes_per_second(tp) * 1e3,
        }
    return StagePlan(
        name=stage.name,
        height=stage.height,
        width=stage.width,
        steps=len(stage.sigmas) - 1,
        video_tokens=bucket.video_tokens,
        audio_tokens=bucket.audio_tokens,
        flops_per_step=total["flops"] * tp,
        ideal_step_ms=profile.chip and max(times["compute_ms"], times["memory_ms"]),
        **times,
        collectives_per_step={"count": total["collectives"], "bytes": total["collective_bytes"]},
        activation_bytes_per_core=max(peak_bytes(graph) for graph in exported.values()),
        upload_bytes=_upload_bytes(program, bucket),
        bytes_to_device_per_step=program.fields["step"].dtype.itemsize,
    )


def peak_bytes(exported: torch.export.ExportedProgram) -> int:
    """Most bytes of intermediate tensors that are alive at once when a graph runs in its order.
    Views count as copies."""
    nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    order = {node: i for i, node in enumerate(nodes)}
    output = next(node for node in exported.graph.nodes if node.op == "output")
    frees: dict[int, int] = {}
    alive = peak = 0
    for index, node in enumerate(nodes):
        value = node.meta.get("val")
        size = (
            value.numel() * value.dtype.itemsize
            if isinstance(value, torch.Tensor) and not _is_view(node)
            else 0
        )
        last = max(
            (
                order.get(user, len(nodes)) if user is not output else len(nodes)
                for user in node.users
            ),
            default=index,
        )
        alive += size
        peak = max(peak, alive)
        frees[last] = frees.get(last, 0) + size
        alive -= frees.pop(index, 0)
    return peak


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema) and any(
        argument.alias_info and not argument.alias_info.is_write for argument in schema.arguments
    )


def _upload_bytes(program: Program, bucket: Bucket) -> int:
    kept = {name for graph in program.graphs.values() for name in graph.inputs._fields}
    kept -= {
        name
        for graph in program.graphs.values()
        for name in graph.outputs._fields
        if not name.endswith("_latent")
    }
    return sum(
        torch.Size(program.fields[name].shape).numel() * program.fields[name].dtype.itemsize
        for name in kept
    )


def _nearest(size: Size, stage: StagePlan, weights: int, limit: int, peak) -> str | None:
    """The longest clip of this height and width whose step fits. `peak` gives a size's bytes beside
    the weights."""
    room = limit - weights - ASSUMED["runtime_bytes_per_core"]
    per_token = (stage.activation_bytes_per_core + stage.upload_bytes) / stage.video_tokens
    latent_frames = int(room / per_token) // (
        stage.video_tokens // ((size.num_frames - 1) // 8 + 1)
    )
    for count in range(
        latent_frames, 0, -1
    ):  # the guess leaves out what does not grow with the tokens
        shorter = dataclasses.replace(size, num_frames=8 * (count - 1) + 1)
        if peak(shorter) <= room:
            return f"{size.height}x{size.width}, {shorter.num_frames} frames"
    return None


def table(made: Plan) -> str:
    """The plan as a person reads it."""

    def gb(count: int | None) -> str:
        return "-" if count is None else f"{count / 1e9:.2f} GB"

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} ms"

    lines = [f"profile {made.profile}, tp {made.tp}, {made.dtype}", ""]
    for s in made.stages:
        reduced = s.collectives_per_step
        lines += [
            (
                f"{s.name}: {s.height}x{s.width}, {s.steps} steps, {s.video_tokens:,} video and"
                f" {s.audio_tokens} audio tokens"
            ),
            f"  FLOPs per step        {s.flops_per_step / 1e12:.1f} T",
            (
                f"  ideal step            {ms(s.ideal_step_ms)}  (compute {ms(s.compute_ms)},"
                f" weights {ms(s.memory_ms)}; collectives {ms(s.collectives_ms)} if not hidden)"
            ),
            f"  collectives per step  {reduced['count']}, {gb(reduced['bytes'])} a rank",
            f"  activations a core    {gb(s.activation_bytes_per_core)}",
            (
                f"  to the device         {gb(s.upload_bytes)} a rank once,"
                f" {s.bytes_to_device_per_step} bytes a step"
            ),
        ]
    lines += [
        "",
        (
            f"DiT weights a core      {gb(made.dit_weight_bytes_per_rank)} (blocks"
            f" {gb(made.block_weight_bytes_per_rank)})"
        ),
        f"Gemma3 weights a core   {gb(made.gemma3_weight_bytes_per_rank)}",
        (
            f"memory a core           {gb(made.hbm_bytes_per_core)} in turn,"
            f" {gb(made.hbm_bytes_per_core_resident)} both resident, of"
            f" {gb(made.hbm_limit_bytes_per_core)}"
        ),
        (
            f"host memory             {gb(made.host_bytes_to_load)} to load,"
            f" {gb(made.host_bytes_to_decode)} to decode, of {gb(made.host_limit_bytes)}"
        ),
        f"disk for rank files     {gb(made.disk_bytes)}",
        (
            f"assumed                 {gb(ASSUMED['runtime_bytes_per_core'])} a core for graphs and"
            f" runtime; {ASSUMED['sdpa']}"
        ),
    ]
    verdict = {
        True: "fits",
        False: "does not fit",
        None: "this profile has no documented memory to compare with",
    }
    nearest = f"; the nearest that does: {made.nearest_that_fits}" if made.nearest_that_fits else ""
    nearest = nearest or ("; no length of that size does" if made.fits is False else "")
    resident = (
        " (both models resident as well)"
        if made.fits_resident
        else " (one model at a time)"
        if made.fits
        else ""
    )
    return "\n".join([*lines, f"verdict                 {verdict[made.fits]}{resident}{nearest}"])


def main(argv: list[str] | None = None) -> None:
    from ltx_neuron import flags  # which imports the workspace, which checks its memory here

    parser = flags.parser(
        "Plan a generation before compiling: memory, FLOPs, collectives, the ideal step time, and"
        " whether it fits.",
        "python -m ltx_neuron.plan --checkpoint-path CKPT --profile trn2.3xlarge --height 512"
        " --width 768 --num-frames 121",
        gemma=False,
    )
    flags.add_size(parser)
    parser.add_argument(
        "--gemma-root",
        type=Path,
        metavar="DIR",
        help="its config.json is read (default: Gemma3-12B's sizes)",
    )
    parser.add_argument(
        "--num-inference-steps", type=int, default=30, metavar="N", help="dev recipe only"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args: argparse.Namespace = parser.parse_args(argv)
    profile = resolve(args.profile, tuple(args.profile_set))
    tp = profile.degree(args.tp_degree)
    gemma = gemma_config(args.gemma_root) if args.gemma_root else GEMMA_3_12B
    checkpoint = Checkpoint(args.checkpoint_path)
    recipe = args.recipe or "distilled"
    made = plan(
        checkpoint,
        profile,
        flags.size(args),
        tp,
        args.dtype,
        gemma,
        recipe,
        args.num_inference_steps,
    )
    print(json.dumps(dataclasses.asdict(made)) if args.json else table(made))
    if made.fits is False:
        sys.exit(1)


if __name__ == "__main__":
    errors.run(main)
