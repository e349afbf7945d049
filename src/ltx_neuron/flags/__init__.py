"""The flags of the scripts, spelled and checked in one place, and what they are turned into.

A script parses its flags once, into a Job, Outputs, RunOptions and a Workspace; nothing below it
sees an argparse.Namespace. A job's flags are the fields of sampling.spec.JobSpec, as are the keys
of a prompts file's line and the fields of a request.
"""

from ltx_neuron.flags.common import add_graph_cut, add_tuned, parser, workspace
from ltx_neuron.flags.jobs import (
    add_conditions,
    add_ic_loras,
    add_job,
    add_loras,
    add_sampler,
    add_size,
    images,
    job,
    job_of_line,
    lora_fields,
    lora_sets,
    recipe,
    shape,
    size,
    spec,
)
from ltx_neuron.flags.resolve import job_of, weight_sets
from ltx_neuron.flags.running import (
    add_fleet,
    add_models,
    add_outputs,
    add_run,
    check_fleet,
    outputs,
    run_options,
)
from ltx_neuron.flags.sharding import add_sharding, shard

__all__ = [
    "add_conditions",
    "add_fleet",
    "add_graph_cut",
    "add_ic_loras",
    "add_job",
    "add_loras",
    "add_models",
    "add_outputs",
    "add_run",
    "add_sampler",
    "add_sharding",
    "add_size",
    "add_tuned",
    "check_fleet",
    "images",
    "job",
    "job_of",
    "job_of_line",
    "lora_fields",
    "lora_sets",
    "outputs",
    "parser",
    "recipe",
    "run_options",
    "shape",
    "shard",
    "size",
    "spec",
    "weight_sets",
    "workspace",
]
