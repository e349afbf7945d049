"""Find the fastest settings of a profile for a video size on this machine, and save them.

  ltx-neuron tune --checkpoint-path CKPT --height 512 --width 768 --num-frames 121

Each variant runs in a separate process. The process compiles, loads the sharded weights, and times
steps on random latents. Its output must match the same step in float32 on the host. The search
tunes one key after another. Later, commands that compile or generate use the saved settings;
--profile-set tuned=no ignores them.

With --layouts the command compares ways to run a clip on several groups of cores instead: guidance
groups and context parallelism. It prints the fastest layout and saves nothing. With --vae it times
a tile of the video decoder with each value of vae_convolution.

Shard the weights first. To continue an interrupted tuning, type the same command again.
"""

import argparse
from pathlib import Path

from ltx_neuron.command_line import Parser
from ltx_neuron.config.profiles import TUNED_KEYS
from ltx_neuron.flags import verbs
from ltx_neuron.sampling.spec import GuidanceFields, LoraFields, SizeFields

EXAMPLE = """ltx-neuron tune --checkpoint-path ltx-2.3-22b-distilled.safetensors \\
    --height 512 --width 768 --num-frames 121"""
_USED = {
    *SizeFields.model_fields | LoraFields.model_fields | GuidanceFields.model_fields,
    *("guidance", "nag_scale", "sound_only", "compat", "spatial_upsampler_path"),
}


def build_parser() -> Parser:
    parser = verbs.job_parser("tune", __doc__, EXAMPLE, _USED, gemma=False)
    add = parser.add_argument_group("tuning", "Settings to try, and limits.").add_argument
    help = f"keys of the profile to try (default: all): {', '.join(TUNED_KEYS)}"
    add("--keys", nargs="+", default=list(TUNED_KEYS), metavar="KEY ...", help=help)
    help = "time limit of one variant, with its compilation (default: 3600)"
    add("--limit", type=float, default=3600.0, metavar="SECONDS", help=help)
    add("--steps", type=int, default=5, metavar="N", help="timed steps of a stage (default: 5)")
    help = "rounds in which a faster variant and the best one alternate (default: 3)"
    add("--rounds", type=int, default=3, metavar="N", help=help)
    help = "run only the first N transformer blocks (default: all)"
    add("--layers", type=int, metavar="N", help=help)
    help = "compare layouts of this many cores (default: the machine's) instead of tuning keys"
    add("--layouts", nargs="?", type=int, const=0, metavar="CORES", help=help)
    help = "time the video decoder with each value of vae_convolution instead"
    add("--vae", action="store_true", help=help)
    add("--force", action="store_true", help="measure again, and discard the earlier choice")
    for name in ("variant", "reference"):  # the output folder of one of the tuning's processes
        add(f"--{name}", type=Path, help=argparse.SUPPRESS)
    return parser
