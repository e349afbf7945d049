"""ltx-neuron serve: the roles of its processes."""

import argparse
import ipaddress
import os
import sys
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

from ltx_neuron import errors, flags
from ltx_neuron.artifacts.build import fetch
from ltx_neuron.engine.run import Engine
from ltx_neuron.errors import UserError
from ltx_neuron.files import check_folder, exclusive
from ltx_neuron.invocation import command
from ltx_neuron.job import Job
from ltx_neuron.report.latency import Recorder
from ltx_neuron.serve.flags import EXAMPLE, build_parser
from ltx_neuron.service.settings import limits_of

try:
    from ltx_neuron.service import app, jobs, server, sizes, tokens
    from ltx_neuron.service.periodic import run_periodically
    from ltx_neuron.service.queue import Queue
    from ltx_neuron.service.worker import Worker
except ImportError as missing:  # --help works without them
    app, absent = None, missing

_SWEEP_SECONDS = 30.0  # between two deletions of old jobs


def check(args: argparse.Namespace) -> None:
    """Raise UserError for invalid flags and combinations."""
    if args.checkpoint_path is None:
        raise UserError(f"--checkpoint-path is missing\nexample: {EXAMPLE}")
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port {args.port}: wanted 0 to 65535; for example --port 8000")
    args.limits = limits_of(args)
    check_folder(args.data_dir, "--data-dir DIR")
    flags.check_fleet(args)
    new_token = "--tokens-file", "tokens.json", "--new-token", "NAME"
    if args.role != "worker" and not (is_local(args.host) or args.tokens_file):
        raise UserError(
            f"--host {args.host} is reachable from other machines, and no token is required. Make"
            f" one: {command('serve', *new_token)}\nthen type --tokens-file tokens.json"
            " as well"
        )


def is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_queue(args: argparse.Namespace) -> "Queue":
    folder = args.data_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return Queue(database(args), folder / "jobs")


def database(args: argparse.Namespace) -> Path:
    """The path of the queue's database; earlier versions took a URL."""
    if args.database is None:
        return args.data_dir.absolute() / "queue.sqlite"
    scheme, separator, path = args.database.rpartition(":///")
    if separator and scheme != "sqlite" or "://" in path:
        raise UserError(f"--database {args.database}: the queue uses SQLite; type a file's path")
    return Path(path).absolute()


def open_engine(args: argparse.Namespace) -> Engine:
    return Engine(flags.workspace(args, writes=False), Recorder(), flags.run_options(args))


def open_sizes(args: argparse.Namespace, engine: Engine) -> "sizes.SizeRegistry":
    """The compiled sizes. Raises UserError with the command to type if none can run."""
    default = sizes.CompiledSize(flags.spec(args).size, args.recipe)
    if default.size.two_stage:
        engine.preflight.upsampler("spatial")
    upsamplers = {kind for kind, path in engine.host.upsampler_paths.items() if path}
    lora_sets, neuron_vae = flags.lora_sets(args), args.neuron_vae
    workspace = engine.workspace
    registry = sizes.SizeRegistry(workspace, default, upsamplers, lora_sets, neuron_vae)
    jobs = capability_jobs(registry)
    if args.ray:  # the replicas check the rest
        for stage in jobs[0].stages:
            engine.workspace.dit_program_for(jobs[0], stage)
    else:
        engine.preflight.check(jobs)
        stages = chain.from_iterable(job.stages for job in reference_jobs(registry))
        weight_set = partial(engine.workspace.weight_set, "dit")
        engine.workspace.find_all(weight_set(stage.loras) for stage in stages)
    return registry


def capability_jobs(registry: "sizes.SizeRegistry") -> list[Job]:
    """Jobs that a worker must be able to run: one of each LoRA set but IC-LoRAs."""
    without = {name: {"ic_lora": ()} for name in registry.reference_sets}
    return _probes(registry, {name: without.get(name, {}) for name in registry.lora_sets})


def reference_jobs(registry: "sizes.SizeRegistry") -> list[Job]:
    """Jobs with the weight sets of IC-LoRAs; none of them runs."""
    return _probes(registry, dict.fromkeys(registry.reference_sets, {}))


def _probes(registry: "sizes.SizeRegistry", sets: dict[str, dict]) -> list[Job]:
    chosen = registry.served_default or registry.default
    probe = Job(prompt="a probe", recipe=chosen.recipe).resized(chosen.size)
    jobs = (probe.replaced(**registry.loras(name, chosen) | other) for name, other in sets.items())
    return [*map(registry.workspace.resolved, jobs)]


def be_worker(args: argparse.Namespace) -> None:
    """Run jobs, here or on a Ray cluster, until a signal ends the process."""
    name = server.worker_name(os.getpid())
    # Only one worker can use the devices: one that is ending may still hold them.
    with exclusive(args.data_dir.absolute() / "worker", "serving"), open_engine(args) as engine:
        if args.ray:
            from ltx_neuron.fleet.pool import Pool

            registry = open_sizes(args, engine)
            sets = [stage.loras for job in reference_jobs(registry) for stage in job.stages]
            Pool(open_queue(args), args, capability_jobs(registry), args.replicas, sets=sets).run()
        else:
            queue = open_queue(args)
            queue.release_worker(None, crashed=True)
            Worker(queue, engine, name, previews=not args.no_page).run()


def be_api(args: argparse.Namespace) -> None:
    """Answer requests until a signal ends the process, with or without a worker."""
    queue, engine = open_queue(args), open_engine(args)
    if args.artifacts_url:
        sets = [loras for job in flags.lora_sets(args).values() for loras in job.weight_sets]
        fetch(args.artifacts_url, engine.workspace, engine.options, sets)
    with exclusive(args.data_dir.absolute() / "api", "serving"):
        registry = open_sizes(args, engine)
        submitter = jobs.JobSubmitter(
            queue, registry, args.model_name or engine.workspace.checkpoint_path.stem, args.limits
        )
        assert app  # `main` refuses to run without it
        owners = tokens.Tokens.load(args.tokens_file)
        has_page, supervised = not args.no_page, args.role == "all"
        served = app.create_app(submitter, owners, flags.price(args), has_page, supervised)
        listen = partial(server.serve, served, args.host, args.port, has_page)
        sweep = partial(queue.sweep, args.keep_days, int(args.keep_gb * 1e9))
        with run_periodically(sweep, _SWEEP_SECONDS, "sweep"):
            module = "ltx_neuron.serve.supervised"
            worker = [sys.executable, "-m", module, *args.typed, "--role", "worker"]
            worker += ["--recipe", args.recipe]
            with server.supervise_worker(worker, queue) if supervised else nullcontext():
                listen()


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    args.typed = parser.words
    if app is None:
        raise UserError(
            f'the service\'s packages are missing ({absent})\nType: pip install "ltx-neuron[serve]"'
        )
    if args.new_token:
        path = errors.require(args.tokens_file, "--tokens-file", "--new-token", EXAMPLE)
        print(tokens.new_token(path, args.new_token))
        return
    check(args)
    if args.role != "worker":
        server.check_port(args.host, args.port)
    args.recipe = flags.recipe(args)
    be_worker(args) if args.role == "worker" else be_api(args)


if __name__ == "__main__":
    errors.run(main)
