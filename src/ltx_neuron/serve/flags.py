"""Serve videos by OpenAI's API (/v1/videos), from a queue on disk.

  ltx-neuron serve --neuron-gemma --checkpoint-path CKPT --gemma-root DIR

--data-dir stores the jobs. A restarted service continues its queue. By default only this machine
can reach it. To serve others, make a token for each of them with --tokens-file tokens.json
--new-token NAME, then start the service with --tokens-file tokens.json --host 0.0.0.0.
"""

import argparse
from pathlib import Path

from ltx_neuron import flags
from ltx_neuron.command_line import Parser, advanced
from ltx_neuron.flags import verbs
from ltx_neuron.sampling.spec import LoraFields, SizeFields
from ltx_neuron.service.settings import add_limits

EXAMPLE = """ltx-neuron serve --neuron-gemma --gemma-root gemma-3-12b \\
    --checkpoint-path ltx-2.3-22b-distilled.safetensors"""
_USED = {
    *({*SizeFields.model_fields} - {"image"}) | {*LoraFields.model_fields} | verbs.MODELS,
    *("ray", "replicas", "artifacts_url", "price_per_hour"),
}


def build_parser() -> Parser:
    parser = verbs.job_parser("serve", __doc__, EXAMPLE, _USED, required=False)
    parser.set_defaults(needs_gemma=True)
    help = (
        'LoRAs that requests select as lora_set: {"NAME": {"lora": ["PATH", STRENGTH]}, ...}, with'
    )
    help += " the keys of a prompts file; shard each set as the command's own LoRAs"
    add = flags.group(parser, "sound, videos and LoRAs").add_argument
    advanced(add("--lora-sets", type=Path, metavar="FILE.json", help=help))
    add_service(parser)
    add_limits(parser)
    return parser


def add_service(parser: argparse.ArgumentParser) -> None:
    title = "The service's address, its users, and the folder of its jobs."
    add = parser.add_argument_group("service", title).add_argument
    help = "address to listen on (default: 127.0.0.1, this machine only)"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=help)
    help = "port to listen on; 0: any free one (default: 8000)"
    add("--port", type=int, default=8000, metavar="N", help=help)
    help = "folder of the jobs, their inputs and videos (default: outputs/service)"
    add("--data-dir", type=Path, default=Path("outputs/service"), metavar="DIR", help=help)
    help = "SQLite file of the queue (default: queue.sqlite in --data-dir)"
    advanced(add("--database", metavar="FILE", help=help))
    help = "hashes of the users' tokens; without it no token is needed"
    add("--tokens-file", type=Path, metavar="FILE.json", help=help)
    help = "add a token for NAME to --tokens-file, print it once, and exit"
    add("--new-token", metavar="NAME", help=help)
    help = "name of the model in the API (default: the checkpoint's file name)"
    advanced(add("--model-name", metavar="NAME", help=help))
    help = "api: answer requests; worker: generate videos; all: both (default)"
    advanced(add("--role", choices=["all", "api", "worker"], default="all", help=help))
    help = "serve no web page, and make no previews for it"
    advanced(add("--no-page", action="store_true", help=help))
