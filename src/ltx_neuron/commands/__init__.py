"""The command line: ltx-neuron VERB.

Only the typed verb's module is imported, so that help needs no torch.
"""

import sys
from difflib import get_close_matches
from functools import partial
from pkgutil import resolve_name

from ltx_neuron import __version__, errors, invocation

# Verb -> its command-line function, and a line of help. _PARSERS: the parsers of those whose
# functions' modules import torch
VERBS = {
    "prepare": ("commands.prepare:main", "shard and compile everything that a generation needs"),
    "generate": ("commands.generate:main", "generate a video with sound from a prompt"),
    "batch": ("commands.generate:batch_main", "generate the videos of a prompts file"),
    "serve": ("serve.__main__:main", "serve OpenAI's video API, /v1/videos"),
    "shard": ("commands.shard:main", "shard the weights of one model"),
    "compile": ("commands.compile:main", "compile the graphs of one model"),
    "verify": ("commands.shard:verify", "check the sharded weights of all models"),
    "plan": ("plan.__main__:main", "estimate the memory and time of a generation"),
    "doctor": ("doctor.__main__:main", "find this machine's problems and print their fixes"),
    "tune": ("tune.__main__:main", "find the fastest settings for a video size"),
    "report": ("report.__main__:main", "print, compare and draw latency reports"),
    "artifacts": ("artifacts.__main__:main", "copy weights and graphs to and from other machines"),
    "demo": ("commands.demo:main", "print the demo's files and the commands for a clip"),
}
_PARSERS = {
    **{v: f"flags.verbs:{v}" for v in ("prepare", "generate", "batch", "plan", "doctor")},
    **{verb: f"{verb}.flags:build_parser" for verb in ("serve", "tune")},
}


def main(verb: str = "") -> None:
    """Run the typed command. verb: that of a clone's script."""
    errors.run(partial(dispatch, [*verb.split(), *sys.argv[1:]]))


def dispatch(argv: list[str]) -> None:
    """Run the verb in the first word. Raises UserError for an unknown one."""
    if argv[:1] in (["--version"], ["version"]):
        print(f"ltx-neuron {__version__}")
        return
    verb, words = choose("", {verb: line for verb, (_, line) in VERBS.items()}, argv)
    if verb in _PARSERS:  # a mistyped flag does not wait for these imports
        parser = resolve_name(f"ltx_neuron.{_PARSERS[verb]}")()
        parser.parse_args(words)
        words = parser.words
    from ltx_neuron.report.progress import line

    with line("starting"):  # torch's import takes seconds
        run = resolve_name(f"ltx_neuron.{VERBS[verb][0]}")
    run(words)


def choose(verb: str, choices: dict[str, str], argv: list[str]) -> tuple[str, list[str]]:
    """The first word, one of the choices, and the words after it. --help prints the choices and
    exits. verb: the verb that has the choices; "" for the verbs themselves. choices: help by
    choice. Raises UserError, with the nearest choice, for another word."""
    typed, kind = invocation.command(verb), "model" if verb else "verb"
    if not argv or argv[0] in ("-h", "--help", "--help-all", "help"):
        print(f"usage: {typed} {kind.upper()} [flags]\n")
        for name, line in choices.items():
            print(f"  {name:12} {line}")
        print(f"\n{typed} {kind.upper()} --help prints its flags.")
        sys.exit(0 if argv else 2)
    if argv[0].startswith("-") and (later := next((w for w in argv if w in choices), "")):
        words = [word for word in argv if word != later]
        text = f"the {kind} comes first; type {invocation.command(verb, later, *words)}"
        raise errors.UserError(text)
    if argv[0] not in choices:
        near = get_close_matches(argv[0], choices, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise errors.UserError(f"unknown {kind}: {argv[0]}{hint}\nAll of them: {typed} --help")
    return argv[0], argv[1:]
