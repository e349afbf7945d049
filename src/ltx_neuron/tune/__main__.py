"""ltx-neuron tune: finds the fastest settings of a profile for a video size, and saves them."""

import argparse
import dataclasses
import os
import shutil
import sys
import time

from ltx_neuron import errors, flags
from ltx_neuron.artifacts import tuned_settings
from ltx_neuron.artifacts.tuned_settings import Settings, TunedSettings
from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.config.common import digest
from ltx_neuron.config.diffusion import DiffusionDecoderConfig
from ltx_neuron.config.profiles import TUNED_KEYS
from ltx_neuron.errors import UserError
from ltx_neuron.files import exclusive
from ltx_neuron.job import Job
from ltx_neuron.sampling.spec import LoraFields
from ltx_neuron.tune import search, trials, variant
from ltx_neuron.tune.flags import build_parser


def check(args: argparse.Namespace) -> None:
    """Raise UserError for an invalid flag value."""
    if unknown := [key for key in args.keys if key not in TUNED_KEYS]:
        raise UserError(f"--keys {unknown[0]}: unknown; known: {', '.join(TUNED_KEYS)}")
    if not 0 < args.limit < float("inf"):
        raise UserError(f"--limit {args.limit:g}: wanted seconds above 0, as in --limit 3600")
    numbers = {"--steps": args.steps, "--rounds": args.rounds, "--layouts": args.layouts or 1}
    for flag, number in numbers.items():
        if number < 1:
            raise UserError(f"{flag} {number}: wanted 1 or more")


class Tuning:
    """The tuning of one size of a workspace, and the file of its tuned settings."""

    def __init__(self, workspace: Workspace, args: argparse.Namespace, job: Job):
        self.workspace, self.args, self.job = workspace, args, job
        profile, artifacts = workspace.profile, workspace.artifacts
        self.cores = args.layouts
        if self.cores == 0:
            self.cores = profile.cores or os.cpu_count() or 1
        identity = tuned_settings.identity(
            profile, workspace.tp, workspace.dtype_name, workspace.transformer.digest
        )
        path = tuned_settings.file_of(artifacts, identity)
        self.tuned = tuned_settings.load(artifacts, identity) or TunedSettings(path, identity)
        self.key = tuned_settings.size_key(job.buckets)
        # Path prefix of this size's files.
        self.base = path.with_suffix("") / (self.key + "-layouts" * (args.layouts is not None))
        head = identity | {
            "checkpoint": workspace.checkpoint.fingerprint,
            "request": digest({"job": job.to_line(), "layers": args.layers, "steps": args.steps}),
            "typed": list(profile.settings),
            "keys": self.cores or [key for key in TUNED_KEYS if key in args.keys],
        }
        # Unless --force is typed, run settings of an earlier tuned size stay fixed.
        others = self.tuned.sizes.keys() - {self.key}
        fixed = self.tuned.run if others and not args.force and self.cores is None else {}
        self.journal = trials.Journal(self.base.with_suffix(".journal"), head, fixed, args.force)

    @property
    def held(self) -> set[str]:
        """Keys that the search skips: the user typed them, or another size's tuning fixed them."""
        return {*tuned_settings.typed(self.workspace.profile), *self.journal.fixed}

    def run(self) -> None:
        """Measure, print the table, and write the chosen settings."""
        workspace, args, journal = self.workspace, self.args, self.journal
        profile = tuned_settings.applied(workspace.profile, journal.fixed)
        baseline = search.baseline_settings(profile)
        keys = tuple(key for key in TUNED_KEYS if key in args.keys and key not in self.held)

        def others(key: str, best: Settings) -> list[Settings]:
            changed = search.with_settings(profile, best)
            sizes = workspace.transformer.num_layers, args.layers, self.job.buckets
            return [{key: value} for value in search.candidates(key, changed, workspace.tp, *sizes)]

        best, ms = self.fastest(baseline, keys, others)
        self.keep(best, ms, search.median_ms(journal.rows, baseline))
        print(f"chosen: {trials.name_of(best, baseline)} ({self.tuned.path})")

    def fastest(
        self, baseline: Settings, keys: tuple[str, ...], others: search.Others
    ) -> tuple[Settings, float]:
        """Measure the settings and print the table. Returns the best settings and the milliseconds
        of their step. Ends the process if no settings work."""
        workspace, args, journal = self.workspace, self.args, self.journal
        work = self.base.with_suffix(".work")
        measure = trials.Trials(args.typed, args.dtype, baseline, args.limit, work, journal).measure
        best = search.search(baseline, keys, others, args.rounds, measure)
        shutil.rmtree(work, ignore_errors=True)
        depth = f", the first {args.layers} blocks" if args.layers else ""
        print(f"\n{workspace.profile.name}, TP {workspace.tp}, {self.key}{depth}")
        print(trials.table(journal.rows, baseline, best))
        row, ms = journal.find(best, 0), search.median_ms(journal.rows, best)
        if row and row.problem:
            print(f"no settings were chosen: {row.problem}", file=sys.stderr)
            sys.exit(1)
        assert ms is not None  # of a variant without a problem
        return best, ms

    def compare_layouts(self, cores: int) -> None:
        """Measure the layouts, and print the fastest. Saves nothing: the user decides."""
        workspace = self.workspace
        baseline, layouts = search.layout_candidates(
            workspace.profile, workspace.tp, self.job, cores
        )
        best, ms = self.fastest(baseline, ("layout",), lambda key, best: layouts)
        if best == baseline:
            print("the fastest: one group")
            return
        changes = (f"{key}={value}" for key, value in best.items() if value != baseline[key])
        typed = " ".join(f"--profile-set {change}" for change in changes)
        cores = search.with_settings(workspace.profile, best).cores_needed(workspace.tp)
        single = search.median_ms(self.journal.rows, baseline)
        faster = f", {single / ms:.2f} times as fast as one group" if single else ""
        print(f"the fastest: {cores} cores{faster}. To use it, type {typed}")

    def keep(self, best: Settings, ms: float, baseline_ms: float | None) -> None:
        """Write the chosen settings; run settings only if they were tried, typed or fixed."""
        tried = {*self.args.keys, *self.held}
        run = {key: best[key] for key in tuned_settings.RUN_KEYS if key in tried and key in best}
        self.tuned.run = run
        self.tuned.sizes[self.key] = {
            "settings": {key: best[key] for key in tuned_settings.GRAPH_KEYS if key in best},
            "run": run,
            "step_ms": ms,
            "own_step_ms": baseline_ms,
            "layers": self.args.layers,
            "size": dataclasses.asdict(self.job.size),
            "recipe": self.job.recipe,
            "measured": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }
        self.tuned.write()
        if lost := [key for key, size in self.tuned.sizes.items() if size["run"] != run]:
            print(f"tune these sizes again, for the new run settings: {', '.join(lost)}")


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    args.typed = parser.words
    check(args)
    others = {name: field.default for name, field in LoraFields.model_fields.items()}
    others["lora"] = flags.spec(args).lora  # of all stages: the only ones that are tuned
    shape = flags.shape(args, flags.recipe(args), **others)
    shape.check_shape()
    workspace = flags.workspace(args, tuned=False)
    workspace.check_runtime()
    search.check_layers(args.layers, workspace.profile, workspace.transformer.num_layers)
    job = workspace.resolved(shape)
    workspace.print_tuned()
    if job.recipe == "dev":  # with the model version's own guidance
        job.resolved_guidance.check(workspace.transformer.num_layers)
    if args.vae:
        if isinstance(workspace.video_decoder, DiffusionDecoderConfig):
            raise UserError("--vae: the diffusion decoder has no convolutions; leave it out")
        variant.compare_convolutions(workspace, job, args.steps)
        return
    workspace.dit_weights(job.loras)
    if folder := args.variant or args.reference:
        variant.run(workspace, job, folder, args.steps, args.layers, exact=bool(args.reference))
        return
    with exclusive(workspace.artifacts / "tuned", "tuning in"):
        tuning = Tuning(workspace, args, job)
        tuning.run() if tuning.cores is None else tuning.compare_layouts(tuning.cores)


if __name__ == "__main__":
    errors.run(main)
