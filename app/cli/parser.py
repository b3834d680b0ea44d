"""The argument parser of all commands: short and full help, errors with a remedy.

Options and commands of llama.cpp, vLLM and SGLang are recognised by their names in llama.cpp's
common/arg.cpp and in the engine arguments of vLLM and SGLang.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn

from app.cli.option_lines import declare, page
from app.cli.output import print_line, tell
from engine.environment import version
from resources import COMMANDS

_LISTED = dict(
    line.split("  ", 1)
    for line in (COMMANDS / "index.txt").read_text(encoding="utf-8").splitlines()
)
SUBCOMMANDS = {name: about for name, about in _LISTED.items() if " " not in name}
KINDS = {
    command: {
        name.removeprefix(f"{command} "): about
        for name, about in _LISTED.items()
        if name.startswith(f"{command} ")
    }
    for command in ("bench",)
}
"""Subcommands with kinds, which have a module each."""


def module_of(subcommand: str) -> str:
    """The module of a subcommand, or of a kind of it, by default its first kind; the window's for
    the empty name."""
    kind = f" {next(iter(KINDS[subcommand]))}" if subcommand in KINDS else ""
    name = f"{subcommand}{kind}".replace("-", "_").replace(" ", "_") or "launch"
    return f"app.cli.{name}_" if iskeyword(name) else f"app.cli.{name}"


def first_options(subcommand: str) -> list[str]:
    """The most used options of a long command, which --help is limited to."""
    return page(module_of(subcommand).rpartition(".")[2])[-1]


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print_line(f"draftscope {version()}")
        parser.exit()


class _FullHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        if isinstance(parser, _Parser):
            parser.first = ()
        parser.print_help()
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Takes `--option=--` literally; argparse would drop the dashes and give a list.

    first: option strings that --help is limited to; empty for all.
    """

    first: Sequence[str] = ()
    _words: Sequence[str] = ()

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.type is not None and "" in arg_strings:  # as a path, the current folder
            raise argparse.ArgumentError(action, "its value is empty")
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse; also keeps the words for error messages."""
        self._words = list(args or ())
        short = [one for one in self._given() if one[:2] in self._option_string_actions]
        if any(one in elsewhere()[0] for one in short):  # -hf is not -h with a value
            self.error("")
        return super().parse_intermixed_args(args, namespace)

    def format_help(self) -> str:
        """The help: all options in their groups, or only the first ones."""
        if not self.first:
            return super().format_help()
        of = self._option_string_actions
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("most used options")
        formatter.add_arguments(action for action in self._actions if not action.option_strings)
        formatter.add_arguments(of[name] for name in self.first)
        formatter.end_section()
        n_all = len({id(of[name]) for name in of if of[name].help != argparse.SUPPRESS})
        formatter.add_text(f"All {n_all} options: {self.prog} --help-all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with one line, whatever the message quotes, and the right spelling if known."""
        self.print_usage(sys.stderr)
        tell(
            f"error: {' '.join(self._elsewhere()) or self._with_nearest(message)}", f"{self.prog}: "
        )
        self.exit(2)

    def _given(self) -> Iterator[str]:
        """Names of given options that this parser does not have."""
        for word in self._words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("-") and name not in self._option_string_actions:
                yield name

    def _elsewhere(self) -> Iterator[str]:
        """A sentence for each given option of another engine."""
        for name in dict.fromkeys(self._given()):
            found = elsewhere()[0].get(name)
            if found is None:
                continue
            if not found.startswith("-"):
                yield f"{name} has no counterpart here: {found}"
            elif found.split()[0] in self._option_string_actions:
                yield f"{name} is {found} here."
            else:
                yield f"{name} is {found} here, but {self.prog} does not have that option."

    def _with_nearest(self, message: str) -> str:
        """The message, with the most similar option or kind."""
        kinds = KINDS.get(self.prog.rpartition(" ")[2], {})
        for name in self._given():
            if (kind := name.lstrip("-").removeprefix("write-")) in kinds:
                return f"{message}. Did you mean {self.prog} {kind}?"
            if near := get_close_matches(name, self._option_string_actions, n=1, cutoff=0.7):
                return f"{message}. Did you mean {near[0]}?"
        return message


def parser_of(subcommand: str) -> argparse.ArgumentParser:
    """The parser of a subcommand, or of the window for the empty name, with all its options."""
    parser = _new_parser(subcommand)
    module = import_module(module_of(subcommand))
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    else:
        declare(parser, module.__name__)
    return parser


def _new_parser(subcommand: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"draftscope {subcommand}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if subcommand:
        name, _, kind = subcommand.partition(" ")
        summary = KINDS[name][kind] if kind else SUBCOMMANDS[name]
        parser.description = f"{summary[0].upper()}{summary[1:]}."
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.first = first_options(subcommand)
    about = "show all options and exit" if parser.first else argparse.SUPPRESS
    parser.add_argument("--help-all", action=_FullHelp, nargs=0, help=about)
    return parser


def split_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The subcommand that words begin with, with its kind (`bench suite`), and the words after it;
    the empty name for the window."""
    name = words[0] if words and words[0] in SUBCOMMANDS else ""
    if len(words) > 1 and words[1] in KINDS.get(name, {}):
        return f"{name} {words[1]}", words[2:]
    return name, words[1:] if name else words


def unknown_command(word: str) -> str:
    """A remedy for a word that is neither a file nor a subcommand."""
    if found := elsewhere()[1].get(word):
        return found
    if word in SUBCOMMANDS:
        return f"Write the subcommand first: draftscope {word} …"
    if near := get_close_matches(word, SUBCOMMANDS, n=1):
        return f"Did you mean draftscope {near[0]}?"
    return f"Name a GGUF file or one of {', '.join(SUBCOMMANDS)}."


@functools.cache
def elsewhere() -> tuple[dict[str, str], dict[str, str]]:
    """Options and commands of other engines by name: the equivalent here, or why there is none."""
    import tomllib

    from resources import ROOT

    tables = tomllib.loads((ROOT / "elsewhere.toml").read_text(encoding="utf-8"))
    options = {name: here for here, names in tables["options"].items() for name in names.split()}
    return options, tables["commands"]
