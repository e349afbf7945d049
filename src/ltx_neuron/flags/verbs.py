"""The parsers of the verbs for a job. Each accepts every flag of a job, so that the flags of one
verb can be typed after another; a verb ignores those that change nothing of its result."""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ltx_neuron import flags
from ltx_neuron.command_line import Parser, advanced
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.spec import ConditionFields, JobFields, LoraFields, SizeFields

_CHECKPOINT = "--checkpoint-path ltx-2.3-22b-distilled.safetensors"
_FILES = f"--neuron-gemma --gemma-root gemma-3-12b \\\n    {_CHECKPOINT}"
# Flags that weights and graphs depend on, by their names in a Namespace
DECIDING = {
    *(*flags.MODEL_FILES, "artifacts_dir", "profile", "profile_set", "tp_degree", "dtype"),
    *("neuron_gemma", "neuron_vae", "upscale", "nag_scale", "prompts_file"),
    *SizeFields.model_fields | LoraFields.model_fields | ConditionFields.model_fields,
}
# Flags of models that change what a job needs
MODELS = {*flags.MODEL_FILES, "neuron_gemma", "neuron_vae", "compat", "no_prompt_cache", "warmup"}
# Fields of a job that change neither its graphs nor its time
_CONTENT = {"prompt", "prompts", "negative_prompt", "seed", "nag_alpha", "nag_tau", "auto_duration"}
SHAPE = {*JobFields.model_fields, "guidance"} - _CONTENT
# Flags whose absence changes a job's graphs: a verb that ignores them prints so.
_NOTED = {*ConditionFields.model_fields, "image", "prompts_file", "upscale"}


def job_parser(
    verb: str,
    description: str | None,
    example: str,
    used: Collection[str] | None = None,
    required: bool = True,
    gemma: bool = True,
) -> Parser:
    """A parser with all flags of a job.

    used      the names, in a Namespace, of those that the verb uses (default: all); the others keep
              their defaults, and no help lists them
    required  whether the checkpoint is required, and with `gemma` Gemma too
    """
    parser = flags.parser(description, example, gemma=True, required=required, verb=verb)
    common = {action.dest for action in parser._actions} - {"gemma_root"}
    parser.set_defaults(needs_gemma=required and gemma)
    flags.add_job(parser)
    add_run(parser)
    for action in parser._actions:
        if action.dest == "gemma_root":
            vars(action)["usual"] = required and gemma
        if used is not None and action.dest not in common | {*used}:
            parser.ignored |= {action.dest}
            action.help = argparse.SUPPRESS
    parser.noted = parser.ignored & _NOTED
    return parser


def add_run(parser: Parser) -> None:
    """Flags of a run besides a job's."""
    switch: dict[str, Any] = {"action": "store_true"}
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    add = flags.group(parser, "models").add_argument
    help = "encode prompts on the device (default: on the host's CPU)"
    add("--neuron-gemma", **switch, help=help)
    help = "run the video VAE on the device (default: on the host's CPU)"
    add("--neuron-vae", **switch, help=help)
    add("--spatial-upsampler-path", **file, help="for --two-stage and --upscale spatial|both")
    help = "for --upscale temporal|both and --temporal-upsample-rounds"
    advanced(add("--temporal-upsampler-path", **file, help=help))
    help = "encode prompts again, without the contexts cached in --artifacts-dir"
    advanced(add("--no-prompt-cache", **switch, help=help))
    help = "reproduce the numerics of a release of the reference"
    advanced(add("--compat", choices=[name for name in COMPAT if name], help=help))
    help = "run one step before each stage and discard it, so that timings exclude the cold step"
    advanced(add("--warmup", **switch, help=help))
    help = "LTX-2.5: the duration head; it predicts --num-frames where that is left out"
    advanced(add("--duration-head-path", **file, help=help))
    add = flags.group(parser, "fleet").add_argument
    help = "run on every chip of a Ray cluster: auto (the cluster of this machine), HOST:PORT, or"
    help += " local (the chips of this machine)"
    advanced(add("--ray", metavar="ADDRESS", help=help))
    help = "maximum number of engines that run at once (default: one per chip)"
    advanced(add("--replicas", type=int, metavar="N", help=help))
    help = "download missing weights and graphs from this store of `artifacts push`"
    advanced(add("--artifacts-url", metavar="URL", help=help))
    add = flags.group(parser, "video").add_argument
    add("--prompts-file", **file, help="many videos: one JSON object per line, with flags as keys")
    help = "LTX-2.5: print the length that the duration head predicts, and make no video"
    advanced(add("--predict-duration", **switch, help=help))
    add = flags.group(parser, "output").add_argument
    add("--output-path", **file, help="the video, as .mp4, or the sound, as .wav")
    help = "folder for the videos of --prompts-file and results.json"
    add("--output-dir", type=Path, metavar="DIR", help=help)
    help = "continue an interrupted run from the state beside --output-path, or decode the latents"
    help += " of a --save-tensors FILE"
    advanced(add("--resume", nargs="?", const=True, metavar="FILE", help=help))
    help = "write every frame as a PNG file too"
    advanced(add("--save-frames", type=Path, metavar="DIR", help=help))
    help = "write contexts, latents, frames and waveform too"
    advanced(add("--save-tensors", type=Path, metavar="FILE.safetensors", help=help))
    help = "write the latency report: the time of each phase and step"
    advanced(add("--perf-dump-path", type=Path, metavar="FILE.json", help=help))
    help = "US dollars for an hour of this machine, to report the price of a clip"
    add = flags.group(parser, "model and machine").add_argument
    advanced(add("--price-per-hour", type=float, metavar="DOLLARS", help=help))


def generate() -> Parser:
    example = f"""ltx-neuron generate {_FILES} --output-path out.mp4 \\
    --prompt "a golden retriever puppy runs across a sunny green meadow\""""
    parser = job_parser("generate", "Generate a video with sound from a prompt.", example)
    parser.typical = "--prompt TEXT --output-path FILE"
    return parser


def batch() -> Parser:
    description = "Generate the videos of a prompts file. Models are loaded once."
    example = f"ltx-neuron batch prompts.jsonl {_FILES} --output-dir outputs"
    parser = job_parser("batch", description, example)
    parser.typical = "PROMPTS_FILE --output-dir DIR"
    help = "many videos: one JSON object per line, with flags as keys"
    parser.add_argument("prompts_path", nargs="?", type=Path, metavar="PROMPTS_FILE", help=help)
    for other in ("--prompts-file", "--output-path"):
        advanced(parser._option_string_actions[other])
    return parser


def prepare() -> Parser:
    description = """Shard the weights and compile the graphs that a generation needs. Accepts all
flags of generate, and ignores those without effect on weights and graphs."""
    example = f"ltx-neuron prepare {_FILES} --height 512 --width 768"
    parser = job_parser("prepare", description, example)
    for action in parser._actions:
        if action.dest not in DECIDING | {"help"}:
            action.help = argparse.SUPPRESS
    help = "threads that write (default: one per file)"
    parser.add_argument("--num-workers", type=int, metavar="N", help=help)
    help = "print the missing parts with their sizes and times, and make nothing"
    parser.add_argument("--dry-run", action="store_true", help=help)
    return parser


def plan() -> Parser:
    description = (
        "Estimate a generation before compilation: memory, FLOPs, collectives, the ideal time of a"
        " step and the time of a whole clip. Exit code 1 if it does not fit into memory."
    )
    example = """ltx-neuron plan --checkpoint-path CKPT --profile trn2.3xlarge \\
    --height 512 --width 768 --num-frames 121"""
    used = SHAPE | MODELS | {"price_per_hour"}
    parser = job_parser("plan", description, example, used, gemma=False)
    vars(parser._option_string_actions["--price-per-hour"])["advanced"] = False
    help = "print one JSON object instead of the tables"
    parser.add_argument("--json", action="store_true", help=help)
    return parser


def doctor() -> Parser:
    description = """Check this machine for problems that block a generation, and print a remedy for
each. The doctor changes nothing.

  ltx-neuron doctor
  ltx-neuron doctor --checkpoint-path CKPT --gemma-root DIR --height 512 --width 768

Without files it checks the machine. With files it also checks them, the weights and graphs made
from them, and whether the video's size fits into memory. Exit code 0: nothing blocks (commands for
missing weights and graphs are listed); 1: something blocks; 2: a wrong flag.

  ltx-neuron doctor --bundle report.tar.gz --bundle-add outputs

writes a bug report: these findings, logs and reports of earlier runs.
"""
    example = f"ltx-neuron doctor {_CHECKPOINT} \\\n    --gemma-root gemma-3-12b"
    parser = job_parser("doctor", description, example, SHAPE | MODELS, required=False)
    add_bundle(parser)
    help = "print one JSON object instead of the table"
    parser.add_argument("--json", action="store_true", help=help)
    return parser


WORK_DIR = Path("outputs/on-device")  # default work folder of test/device


def add_bundle(parser: argparse.ArgumentParser) -> None:
    title = "One file with facts of this machine and of failed runs, without prompts and secrets."
    add = parser.add_argument_group("bug report", title).add_argument
    help = "write a bug report: findings, versions, traces of logs, times, compiler messages"
    add("--bundle", type=Path, metavar="FILE.tar.gz", help=help)
    help = "add a text file, or logs and JSON files of a failed run's folder; repeatable"
    add("--bundle-add", type=Path, action="append", default=[], metavar="PATH", help=help)
    help = f"work folder of the device tests (default: {WORK_DIR})"
    advanced(add("--work-dir", type=Path, default=WORK_DIR, metavar="DIR", help=help))
