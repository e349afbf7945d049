"""ltx-neuron plan: prints the estimate of a generation."""

import argparse
import contextlib
import dataclasses
import json
import sys

from ltx_neuron import errors, flags
from ltx_neuron.artifacts import tuned_settings
from ltx_neuron.config.profiles import PROFILES
from ltx_neuron.engine.preflight import Preflight
from ltx_neuron.flags import verbs
from ltx_neuron.plan import Plan, plan
from ltx_neuron.plan.clip import ClipPlan, ClipPlanner
from ltx_neuron.plan.cost import text_weights
from ltx_neuron.plan.layouts import ChipLayout, layouts
from ltx_neuron.plan.table import clip_table, headline, layout_table, table


def main(argv: list[str] | None = None) -> None:
    args = verbs.plan().parse_args(argv)
    # Warnings about ignored files go to stderr, not into the JSON.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        result, clip, rows = planned(args)
    if args.json:
        parts = {"clip": dataclasses.asdict(clip), "layouts": [*map(dataclasses.asdict, rows)]}
        print(json.dumps(dataclasses.asdict(result) | parts))
    else:
        tables = [headline(result, clip.seconds), table(result), clip_table(clip)]
        if rows:
            tables.append(layout_table(rows, PROFILES[result.profile].machine))
        print(*tables, sep="\n\n")
    if result.fits is False:
        sys.exit(1)


def planned(args: argparse.Namespace) -> tuple[Plan, ClipPlan, list[ChipLayout]]:
    """The plan of the parsed flags, that of a whole clip's time, and the machine's layouts."""
    workspace = flags.workspace(args, writes=False, tuned=False)
    profile, tp = workspace.profile, workspace.tp
    files, checkpoint, config = workspace.files, workspace.checkpoint, workspace.transformer
    job = workspace.resolved(flags.shape(args, flags.recipe(args)))
    with_gemma = files.find("gemma")
    Preflight.of(workspace, flags.run_options(args)).check_files([job], planned=True)
    gemma = files.gemma if with_gemma else files.release.gemma
    result = plan(checkpoint, profile, job, tp, args.dtype, gemma, files.config)
    weights = text_weights(gemma, config, tp)
    identity = tuned_settings.identity(profile, tp, args.dtype, config.digest)
    tuned = tuned_settings.load(args.artifacts_dir, identity)
    planner = ClipPlanner(
        result,
        files.config,
        weights,
        profile,
        job,
        args.neuron_gemma,
        args.neuron_vae,
        tuned and tuned.step_ms(job.buckets),
        flags.price(args),
    )
    return result, planner.planned(), layouts(planner, config)


if __name__ == "__main__":
    errors.run(main)
