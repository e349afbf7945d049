"""The parser of every command. --help prints the most used flags, and --help-all prints all."""

import argparse
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence, Set
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from typing import Any, NoReturn

_WIDTH, _HELP_COLUMN = 100, 34
# What other programs, or 0.1.0, call a flag -> what to type here, where the command has that flag.
_MEANINGS = {
    "size resolution dimensions aspect-ratio": "--height 704 --width 1280",
    "guidance-scale cfg cfg-scale scale": "--guidance video_cfg=3 (dev recipe)",
    "tp tensor-parallel tensor-parallel-size ranks": "--tp-degree 4",
    "output out o output-file save": "--output-path FILE",
    "steps n-steps inference-steps": "--num-inference-steps N",
    "model model-id checkpoint ckpt m": "--checkpoint-path FILE",
    "frames length duration video-length": "--num-frames 121",
    "gemma text-encoder text-encoder-path": "--gemma-root DIR",
    "negative neg-prompt n-prompt": "--negative-prompt TEXT",
    "input input-image image-path img init-image first-frame": "--image FILE",
    "audio sound": "--audio-path FILE",
    "input-video": "--video-path FILE",
    "device gpu cuda": "--profile cuda",
    "upsampler upscaler": "--spatial-upsampler-path FILE",
    "text p": "--prompt TEXT",
    "again": "--force",
    "artifacts-from": "--artifacts-url URL",
    "turns": "--rounds 3",
    "blocks-per-graph": "--profile-set blocks_per_graph=2",
    "host-dtype": "--profile-set host_dtype=float32",
    "ignore-tuned no-tuned": "--profile-set tuned=no",
}
_MEANT = {name: meant for names, meant in _MEANINGS.items() for name in names.split()}
_SIMILAR = 0.8  # similarity, from 0 to 1, of a typo and the word that was meant


def advanced(action: argparse.Action) -> argparse.Action:
    """Hide a flag from --help; --help-all shows it."""
    vars(action)["advanced"] = True
    return action


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations: a typo is an error, which names the nearest flag."""

    typical = ""  # the most used optional flags, for the end of the usage line
    words: list[str]  # the parsed words
    ignored: Set[str] = frozenset()  # names in a Namespace that keep their defaults
    noted: Set[str] = frozenset()  # those of them whose absence changes the result

    def __init__(self, **options):
        super().__init__(**options, add_help=False, allow_abbrev=False)
        # "-50dB" is a value, whose error names it, and no flag.
        self._negative_number_matcher = re.compile(r"-\.?\d")
        options = {"action": _Help, "nargs": 0, "dest": "help", "default": argparse.SUPPRESS}
        add = self.add_argument
        advanced(add("-h", "--help", help="print the most used flags and exit", **options))
        advanced(add("--help-all", help="print all flags and exit", **options))

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:  # type: ignore[override]
        self.words = sys.argv[1:] if args is None else args
        required = [action for action in self._actions if action.required]
        for action in required:  # a typo may be why one is missing: both are reported
            action.required, vars(action)["usual"] = False, True
        parsed, unknown = self.parse_known_args(self.words, namespace)
        for action in required:
            action.required = True
        absent = [action for action in required if getattr(parsed, action.dest) is None]
        problems = [self._unknown(unknown)] if unknown else []
        if absent:
            names = ", ".join((*action.option_strings, action.dest)[0] for action in absent)
            problems.append(f"required and missing: {names}")
        if problems:
            self.error("\n".join(problems))
        self._drop_ignored(parsed)
        return parsed

    def _drop_ignored(self, parsed: argparse.Namespace) -> None:
        """Set ignored flags to their defaults, with a note on stderr about those of `noted`."""
        typed = []
        for action in self._actions:
            if action.dest in self.ignored:
                if action.dest in self.noted and getattr(parsed, action.dest) != action.default:
                    typed.append(action.option_strings[0])
                setattr(parsed, action.dest, action.default)
        if typed:
            _note(f"note: {self.prog} is for a job without {', '.join(typed)}")

    def _unknown(self, words: Sequence[str]) -> str:
        """The message for words that no flag takes."""
        text = f"unknown: {' '.join(words)}"
        if words[0].startswith("-"):
            name = words[0].partition("=")[0]
            meant = self._meant(name.strip("-").replace("_", "-").lower())
            return text + (f"; did you mean {meant}?" if meant else "")
        before = self.words[: self.words.index(words[0])]
        flag = next((word for word in reversed(before) if word.startswith("--")), "")
        action = self._option_string_actions.get(flag.partition("=")[0])
        rest = takewhile(lambda word: not word.startswith("--"), self.words[len(before) :])
        if action is None or action.nargs is not None or not _is_text(action):
            flag, value = "--prompt", " ".join(rest)
            action = self._option_string_actions.get(flag)
            if action is None or flag in self.words:
                return text
            return f"{text}; a prompt needs its flag: {flag} {_quoted(value)}"
        value = flag.partition("=")[2] if "=" in flag else before[-1]
        value = _quoted(" ".join([value, *rest]))
        return f"{text}; a text with spaces needs quotes: {flag.partition('=')[0]} {value}"

    def _meant(self, name: str) -> str:
        """What to type in place of an unknown flag; "" if nothing is near."""
        known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        text = _MEANT.get(name, "")
        if text and text.partition(" ")[0][2:] in known:
            return text
        longer = [option for option in known if option.startswith(f"{name}-")]
        near = longer if len(longer) == 1 else get_close_matches(name, known, 1, _SIMILAR)
        return f"--{near[0]}" if near else ""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"(--[\w-]+)(/--[\w-]+)+", r"\1", message)  # keep a flag's first name
        if match := re.fullmatch(r"argument (--[\w-]+): expected .*argument.*", message):
            flag, action = match[1], self._option_string_actions[match[1]]
            value = '"a red circle on a blue ground"' if flag == "--prompt" else ""
            value = value or _Formatter(self.prog)._format_args(action, action.dest.upper())
            message = f"{flag} has no value; type {flag} {value}"
        if match := re.fullmatch(r"argument (--[\w-]+): invalid (\w+) value: (.*)", message):
            kind = {"int": "a whole number", "float": "a number"}.get(match[2], match[2])
            message = f"{match[1]}: got {match[3]}, wanted {kind}"
        self.exit(2, f"error: {message}\nAll flags: {self.prog} --help-all\n")

    # --- help -------------------------------------------------------------------------------------

    def format_usage(self) -> str:
        formatter = _Formatter(self.prog)
        shown = [
            formatter._format_args(action, action.dest)
            if not action.option_strings
            else formatter._format_action_invocation(action)
            for action in self._actions
            if action.required or getattr(action, "usual", False)  # most runs need it
        ]
        words = ["usage:", self.prog, *shown, self.typical, "[flags]"]
        usage = " ".join(word for word in words if word)
        return _wrapped(usage, formatter._width, others=" " * 4) + "\n"

    def format_help(self, everything: bool = False) -> str:
        """The text of --help or, with everything, of --help-all."""
        flags = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        shown = [a for a in flags if everything or not getattr(a, "advanced", False)]
        others = [group for group in self._action_groups if group is not self._optionals]
        sections = []
        for group in (*others, self._optionals):
            if actions := [action for action in group._group_actions if action in shown]:
                formatter = _Formatter(self.prog, every_name=everything)
                formatter.start_section(group.title)
                if everything:
                    formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
                sections.append(formatter.format_help().strip("\n"))
        parts = [
            self.format_usage().strip(),
            _wrapped((self.description or "").strip()),
            ("\n\n" if everything else "\n").join(sections),
            self.epilog,
        ]
        if len(flags) - len(shown) > 2:  # more than -h and --help-all themselves
            parts.append(f"{len(shown)} of {len(flags)} flags. All of them: --help-all")
        return "\n\n".join(part for part in parts if part) + "\n"


@cache
def _note(text: str) -> None:
    """Print a note once: a command's words are parsed before its module is imported and after."""
    print(text, file=sys.stderr)


def _is_text(action: argparse.Action) -> bool:
    """Whether a flag's value may have spaces."""
    return str(action.metavar).startswith(("TEXT", "FILE", "DIR", "PATH"))


def _quoted(text: str) -> str:
    """A text as one word of a shell."""
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'


class _Help(argparse.Action):
    """Prints the help and exits."""

    def __call__(self, parser: Any, namespace, values, option_string=None):
        print(parser.format_help(everything=option_string == "--help-all"), end="")
        parser.exit()


def _wrapped(text: str, width: int = _WIDTH, first: str = "", others: str = "") -> str:
    """Wrap each line of a text separately. first, others: prefixes of its first and other lines."""
    wrapper = textwrap.TextWrapper(
        width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )
    return "\n".join(map(wrapper.fill, text.splitlines()))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help of at most 100 columns, which prints a flag's value once for all of its names."""

    def __init__(self, prog: str, every_name: bool = False):
        width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 50)).columns)
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=width)
        self.every_name = every_name
        self._action_max_length = width  # one column of help texts in all sections

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = action.option_strings if self.every_name else action.option_strings[:1]
        default = self._get_default_metavar_for_optional(action)
        value = "" if action.nargs == 0 else self._format_args(action, default)
        return f"{', '.join(names)} {value}".strip()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return _wrapped(text, width, indent, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(text, width).splitlines()

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if isinstance(action.metavar, str) and " " in action.metavar:  # it lists all values
            return action.metavar
        return super()._format_args(action, default_metavar)
