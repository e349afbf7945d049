"""The flags of the scripts, spelled and checked in one place, and what they are turned into.

A script parses its flags once, into a Job, Outputs, RunOptions and a Workspace; nothing below it
sees an argparse.Namespace. A line of a prompts file goes the same way: its keys are job flags.
"""

from ltx_neuron.flags.common import add_graph_cut, add_tuned, parser, workspace
from ltx_neuron.flags.conditions import add_conditions, images
from ltx_neuron.flags.guided import add_guidance, guidance, guidance_keys
from ltx_neuron.flags.jobs import add_job, add_sampler, add_size, job, recipe, shape, size
from ltx_neuron.flags.lines import job_flags, job_of_line, lora_sets
from ltx_neuron.flags.lora import (
    add_ic_loras,
    add_loras,
    lora_fields,
    lora_keys,
    loras,
    weight_sets,
)
from ltx_neuron.flags.running import (
    add_fleet,
    add_models,
    add_outputs,
    add_run,
    check_fleet,
    outputs,
    run_options,
)
from ltx_neuron.flags.sharding import add_sharding, shard_request

__all__ = [
    "add_conditions",
    "add_fleet",
    "add_graph_cut",
    "add_guidance",
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
    "guidance",
    "guidance_keys",
    "images",
    "job",
    "job_flags",
    "job_of_line",
    "lora_fields",
    "lora_keys",
    "lora_sets",
    "loras",
    "outputs",
    "parser",
    "recipe",
    "run_options",
    "shape",
    "shard_request",
    "size",
    "weight_sets",
    "workspace",
]
