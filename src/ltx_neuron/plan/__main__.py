"""Estimate a generation before compilation: memory, FLOPs, collectives, the ideal time of a step
and the time of a whole clip. Exit code 1 if it does not fit into memory.

ltx-neuron plan --checkpoint-path CKPT --profile trn2.3xlarge --height 512 --width 768
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from ltx_neuron import errors, flags
from ltx_neuron.artifacts import tuned_settings
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.config.profiles import PROFILES
from ltx_neuron.engine.preflight import Preflight
from ltx_neuron.host.arithmetic import arithmetic
from ltx_neuron.plan import Plan, plan, text_weights
from ltx_neuron.plan.clip import ClipPlan, ClipPlanner
from ltx_neuron.plan.layouts import Layout, layouts
from ltx_neuron.plan.table import clip_table, layout_table, table
from ltx_neuron.weights.tensorfile import DTYPES

EXAMPLE = """ltx-neuron plan --checkpoint-path CKPT --profile trn2.3xlarge \\
    --height 512 --width 768 --num-frames 121"""


def main(argv: list[str] | None = None) -> None:
    description = (__doc__ or "").partition("\n\n")[0]
    parser = flags.parser(description, EXAMPLE, gemma=False, verb="plan")
    flags.add_job(parser, "size", "loras", "conditions")
    flags.add_fields(parser, "video", ["sampler", "nag_scale", "upscale", "num_inference_steps"])
    title = "The planned job besides the denoising steps, and the output's form."
    add = parser.add_argument_group("plan", title).add_argument
    help = "Gemma folder with config.json (default: the released sizes)"
    add("--gemma-root", type=Path, metavar="DIR", help=help)
    flags.add_models(parser)
    flags.add_duration_head(parser)
    flags.add_price(parser)
    add("--json", action="store_true", help="print one JSON object instead of the tables")
    args = parser.parse_args(argv)
    # Warnings about ignored files go to stderr, not into the JSON.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        result, clip, rows = planned(args)
    if args.json:
        parts = {"clip": dataclasses.asdict(clip), "layouts": [*map(dataclasses.asdict, rows)]}
        print(json.dumps(dataclasses.asdict(result) | parts))
    else:
        tables = [table(result), clip_table(clip)]
        if rows:
            tables.append(layout_table(rows, PROFILES[result.profile].machine))
        print(*tables, sep="\n\n")
    if result.fits is False:
        sys.exit(1)


def planned(args: argparse.Namespace) -> tuple[Plan, ClipPlan, list[Layout]]:
    """The plan of the parsed flags, that of a whole clip's time, and the machine's layouts."""
    workspace = flags.workspace(args, writes=False, tuned=False)
    profile, tp = workspace.profile, workspace.tp
    files, checkpoint, config = workspace.files, workspace.checkpoint, workspace.transformer
    job = workspace.resolved(flags.shape(args, args.recipe or "distilled"))
    with_gemma = files.find("gemma")
    Preflight.of(workspace, flags.run_options(args)).check_files([job], planned=True)
    gemma = files.gemma if with_gemma else files.release.gemma
    result = plan(checkpoint, profile, job, tp, args.dtype, gemma, files.config)
    with fake_process_group(tp):
        weights = text_weights(gemma, config, tp)
    computes = arithmetic(profile.host_dtype, DTYPES[args.dtype], args.artifacts_dir)
    identity = tuned_settings.identity(profile, tp, args.dtype, config.digest)
    tuned = tuned_settings.load(args.artifacts_dir, identity)
    clip = ClipPlanner(
        result,
        files.config,
        weights,
        profile,
        job,
        computes,
        args.neuron_gemma,
        args.neuron_vae,
        tuned and tuned.step_ms(job.buckets),
        flags.price(args),
    )
    planned_clip = clip.planned()
    return result, planned_clip, layouts(result, planned_clip, config, job, profile)


if __name__ == "__main__":
    errors.run(main)
