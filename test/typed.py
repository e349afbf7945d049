"""Jobs as they are typed: what tests of flags begin with."""

import argparse
import runpy
import shlex
import sys
from unittest import mock

import pytest
from conftest import ROOT

from ltx_neuron import errors, flags
from ltx_neuron.command_line import Parser
from ltx_neuron.commands import VERBS, dispatch
from ltx_neuron.job import Job


def parsed(*words, compiles: bool = False) -> argparse.Namespace:
    """The flags of a job, or of a script that compiles its graphs."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_job(parser, *[flags.GRAPHS] * compiles)
    args = parser.parse_args([*map(str, words)])
    args.recipe = args.recipe or "distilled"
    return args


def said(*words) -> Job:
    return flags.job(parsed("--prompt", "rain", *words))


def parser_of(words: list[str], parses: bool = False) -> Parser:
    """The parser that a command makes, as it is when its words are parsed, or once they are."""
    parse = Parser.parse_args

    def stop(parser, *arguments):
        if parses:
            parse(parser, *arguments)
        raise LookupError(parser)  # out of the command's main

    with mock.patch.object(Parser, "parse_args", stop), pytest.raises(LookupError) as stopped:
        dispatch(words)
    return stopped.value.args[0]


def ended(*words: object) -> int:
    """The exit code of ltx-neuron in this process."""
    try:
        errors.run(lambda: dispatch([*map(str, words)]))
    except SystemExit as end:
        return end.code or 0
    return 0


def typed_in(line: str) -> None:
    """Run a printed command in this process."""
    words = shlex.split(line)
    dispatch(words[next(at for at, word in enumerate(words) if word in VERBS) :])


def run(script: str, words: list[str]) -> int:
    with mock.patch.object(sys, "argv", [script, *words]), mock.patch.object(sys, "path", list(sys.path)):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as ending:
            return ending.code
    return 0
