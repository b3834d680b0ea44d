"""Command options, declared by each command's page in resources/commands, and argparse types.

A page has parts separated by lines `---`: the usage, next to which a line `first: --demo -n …` may
name the options that --help is limited to; the options; the epilog, optional. The options are in
groups of lines as in the help:

- any line that is none of the following is the heading of a group; a repeated heading continues
  its group, and `options` holds those of the command itself;
- `> text` is a line of the group's description;
- `-j, --jobs N  help` is an option; its help may continue in lines indented by six spaces. In
  place of N: nothing for a switch; `N*`, repeatable; `N?*`, the same, but None if not given; `N!`,
  required; `N x2`, two values; `N [N ...]`, `[N ...]` and `[N]` as in argparse; `{a,b}`, a choice;
  `N:int`, a type other than the one that _TYPES has for N. `--[no-]mmap` can be negated. `jobs=N`
  is a positional argument, `jobs=-j N` an option under another name. The default is the one in
  the help, as in `(default 3)`;
- `| --option`: of adjacent lines like this only one option may be given;
- `@decoding` adds the options of a group of RunOptions, `@a+b` of two, `@--seed` one option,
  `@module.Class` all options of a class, any other name those that the command gives. `?`: None
  if not given; `?seed,temp`: only for these; `*`: repeatable. A help text after it replaces
  theirs, which is {about} in it;
- `+model text` inserts the lines of [model] in shared.txt, with {} replaced by the text.

{name} is a value that the command gives, {module.NAME} a constant of a module: a text, a number,
names joined by commas, or names with their meanings; in place of N, the choices.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import OptionError
from engine.files import check_writable, decoded, unreadable, unwritable, user_text
from engine.option_fields import PlacedOption, grouped, json_object, options_in
from engine.plain_text import size_text
from resources import COMMANDS

_MOST_TEXT = 16 << 20
"""Longest prompt, bytes."""
_OPTION = re.compile(r"(?P<dest>\w+)=(?=\S)|-")
_DEFAULT = re.compile(r"\(default ([^\s;:)]+?)(?:[:)]|, )")
_ENGINE_OPTIONS = re.compile(
    r"@(?P<name>[\w.+-]+)(?P<unset>\?(?P<fields>[\w,]*))?(?P<many>\*)?(?:  (?P<about>.*))?"
)
_SHARED = re.compile(r"^ *\+([\w-]+) ?(.*)\n", re.MULTILINE)
_VALUE = re.compile(r"(?P<value>.*?)(?P<must>!)?(?P<unset>\?)?(?P<many>\*)?(?P<twice> x2)?")
_NAME = re.compile(r"\{([\w.]+)\}")


@cache
def page(command: str) -> tuple[str, str, str, list[str]]:
    """Usage, options and epilog of a command's page, named like its module, and the options that
    --help is limited to."""
    text = (COMMANDS / f"{command}.txt").read_text(encoding="utf-8")
    head, options, epilog = (*text.split("---\n", 2), "")[:3]
    first = re.search(r"^first: (.*)\n", head, re.MULTILINE)
    usage = (head.replace(first[0], "") if first else head).removeprefix("usage: ")
    epilog = _with_shared(epilog).removesuffix("\n")
    named = first[1].split() if first else []
    return usage.removesuffix("\n"), _with_shared(options), epilog, named


def _with_shared(text: str) -> str:
    """A text with references to shared.txt resolved."""
    return _SHARED.sub(
        lambda found: _with_shared(_shared()[found[1]]).replace("{}", found[2] or "{}"), text
    )


@cache
def _shared() -> dict[str, str]:
    text = (COMMANDS / "shared.txt").read_text(encoding="utf-8")
    parts = re.split(r"^\[([\w-]+)\]\n", text.replace("\n\n", "\n"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def declare(parser: argparse.ArgumentParser, module: str, **given: Any) -> None:
    """Declare usage, options and epilog from the page of a command's module.

    given: values that the page refers to: texts, choices, types of values, and options of the
    engine.
    """
    usage, options, epilog, _ = page(module.rpartition(".")[2])
    if usage:
        parser.usage = usage
    _Declaration(parser, given).add(options)
    if epilog:
        parser.epilog = _filled(epilog, given)


class _Declaration:
    def __init__(self, parser: argparse.ArgumentParser, given: Mapping[str, Any]) -> None:
        self._given, self._types = given, {**_TYPES, **given}
        self._parser, self._group = parser, parser
        self._groups: dict[str, Any] = {"options": parser}
        self._excluding: argparse._MutuallyExclusiveGroup | None = None

    def add(self, text: str) -> None:
        """Add the options of a page's lines, in order."""
        for line in _whole_lines(text):
            if line.startswith("| "):
                if self._excluding is None:
                    self._excluding = self._group.add_mutually_exclusive_group()
                self._add_option(self._excluding, line[2:])
                continue
            self._excluding = None
            if line.startswith("@"):
                self._add_engine_options(line)
            elif line.startswith(">"):
                said = _filled(line[2:], self._given)
                before = self._group.description
                self._group.description = said if before is None else f"{before}\n{said}"
            elif _OPTION.match(line):
                self._add_option(self._group, line)
            else:
                if line not in self._groups:
                    self._groups[line] = self._parser.add_argument_group(line)
                self._group = self._groups[line]

    def _add_option(self, group: argparse._ActionsContainer, line: str) -> None:
        found = _OPTION.match(line)
        assert found is not None
        names, _, about = line[len(found[0]) if found["dest"] else 0 :].partition("  ")
        about = _filled(about.strip(), self._given)
        *flags, last = names.split(", ")
        name, _, value = last.partition(" ")
        if not name.startswith("-"):
            name, value = found["dest"], last
        keywords = {"help": about, **self._of_value(value)}
        if value != last and found["dest"]:
            keywords["dest"] = found["dest"]
        long = name.replace("[no-]", "")
        if not value:
            negates = long != name
            keywords["action"] = argparse.BooleanOptionalAction if negates else "store_true"
        elif default := _DEFAULT.search(about):
            keywords.setdefault("default", default[1])
        group.add_argument(*flags, long, **keywords)

    def _of_value(self, value: str) -> dict[str, Any]:
        """Keywords of add_argument for a value as the page shows it."""
        if not value:
            return {}
        if name := _NAME.fullmatch(value):
            return {"choices": self._given.get(name[1]) or _named(name[1])}
        if value.startswith("{"):
            return {"choices": tuple(value[1:-1].split(","))}
        found: dict[str, Any] = {}
        if value.startswith("["):
            value = value[1:-1]
            found = {"nargs": "*" if value.endswith(" ...") else "?"}
            value = value.removesuffix(" ...")
        elif value.endswith(" ...]"):
            value, found = value.partition(" ")[0], {"nargs": "+"}
        elif parts := _VALUE.fullmatch(value):
            value = parts["value"]
            if parts["many"]:
                found = {"action": "append", "default": None if parts["unset"] else []}
            elif parts["twice"]:
                found = {"nargs": 2}
            elif parts["must"]:
                found = {"required": True}
        metavar, colon, kind = value.rpartition(":")
        if not colon or kind not in self._types:
            metavar = kind = value
        kinds = {"type": self._types[kind]} if kind in self._types else {}
        empty: dict[str, Any] = {"default": {}} if kind == "JSON" else {}
        return {"metavar": metavar, **empty, **found, **kinds}

    def _add_engine_options(self, line: str) -> None:
        found = _ENGINE_OPTIONS.fullmatch(line)
        assert found is not None, line
        for one in self._engine_options(found["name"]):
            unset = found["fields"] or one.field
            is_set = found["unset"] is None or one.field not in unset.split(",")
            about = _filled(found["about"] or "", {**self._given, "about": one.option.about})
            add_option(self._group, one, is_set=is_set, about=about, repeats=bool(found["many"]))

    def _engine_options(self, name: str) -> Iterable[PlacedOption]:
        if name in self._given:
            given: Iterable[PlacedOption] = self._given[name]
            return given
        if "." in name:
            return options_in(_named(name))
        from engine.options import RunOptions

        if name.startswith("-"):
            return [one for one in options_in(RunOptions) if name in one.option.flags]
        # a drafter's own options come before shared ones
        return sorted(
            grouped(RunOptions, *name.split("+")),
            key=lambda one: name == "ngram" and len(one.path) < 3,
        )


def _whole_lines(text: str) -> Iterator[str]:
    """Lines of a page, joined with their continuation lines."""
    whole = ""
    for line in text.splitlines():
        if line.startswith("      "):
            whole += f" {line.strip()}"
        else:
            if whole:
                yield whole
            whole = line.strip()
    yield whole


def _filled(text: str, given: Mapping[str, Any]) -> str:
    """A text with names in braces replaced: given ones, and constants of modules; others stay."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name in given:
            return _as_text(given[name])
        return _as_text(_named(name)) if "." in name else found[0]

    return _NAME.sub(value, text)


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_as_text(about)}" for name, about in value.items())
    return str(value) if isinstance(value, str | int) else ", ".join(map(str, value))


def _named(path: str) -> Any:
    """A constant of a module."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def add_option(
    group: argparse._ActionsContainer,
    one: PlacedOption,
    *,
    is_set: bool = True,
    about: str = "",
    repeats: bool = False,
) -> None:
    """Add an option of the engine. is_set: if False, it is None instead of its default when not
    given; the help is the same. about: replaces its help. repeats: collects a list."""
    option = one.option
    if one.kind is bool:
        group.add_argument(*option.flags, action="store_true", help=option.about)
        return
    repeats = repeats or option.repeats
    start: Any = [] if repeats else one.default
    shown = "%(default)s" if is_set else one.default
    has_default = one.default not in (None, "") and one.kind is not tuple
    own = option.about.replace("%", "%%") + (f" (default {shown})" if has_default else "")
    group.add_argument(
        *option.flags,
        action="append" if repeats else "store",
        type=reader(one),
        default=start if is_set else None,
        metavar=option.metavar,
        help=about or own,
    )


def reader(one: PlacedOption) -> Callable[[str], Any]:
    """The argparse type of the text of an engine's option."""
    parse = one.option.parse
    if parse is None:
        return whole_number if one.kind is int else finite_number if one.kind is float else str
    return as_type(parse)


def is_given(words: Sequence[object], flag: str) -> bool:
    """Whether a flag is among the words of a command line, alone or with its value."""
    is_short = len(flag) == 2
    return any(
        word == flag
        or word.startswith(f"{flag}=")
        or (is_short and word.startswith(flag) and word[2:3].isdigit())
        for word in map(str, words)
    )


def refuse_given(args: argparse.Namespace, needed: str, *lines: str, **given: Any) -> None:
    """Refuse options that have no effect without another one.

    lines: of a page, such as flags; given: values they refer to. Raises OptionError.
    """
    parser = argparse.ArgumentParser(add_help=False)
    _Declaration(parser, given).add(_with_shared("".join(f"{line}\n" for line in lines)))
    for flag in (flag for action in parser._actions for flag in action.option_strings):
        if is_given(args.words, flag):
            raise OptionError(f"{flag} has no effect without {needed}.", "Leave it out.")


def as_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser that raises OptionError, as an argparse type."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(f"{error}") from error

    return read


def whole_number(text: str) -> int:
    """An integer, as an argparse type."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error


def positive(text: str) -> int:
    """An integer from 1, as an argparse type."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return number


def thread_count(text: str) -> int:
    """A number of threads up to the number of cores, as an argparse type."""
    number, most = positive(text), os.cpu_count() or 1
    if number > most:
        raise argparse.ArgumentTypeError(f"{number} is more than the {most} cores of this machine")
    return number


def numbers(text: str) -> Sequence[int]:
    """Distinct integers from 1, separated by commas, as an argparse type."""
    return tuple(dict.fromkeys(positive(word.strip()) for word in text.split(",")))


def names_of(known: Collection[str], *, or_all: bool = False) -> Callable[[str], tuple[str, ...]]:
    """Distinct names separated by commas, as an argparse type. or_all: `all` means every one."""

    def read(text: str) -> tuple[str, ...]:
        if or_all and text == "all":
            return tuple(known)
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in known:
                all_of = ", ".join((*known, *(("all",) if or_all else ())))
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {all_of}")
        return names

    return read


def finite_number(text: str) -> float:
    """A finite number, as an argparse type."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return number


def token_ids(text: str) -> tuple[int, ...]:
    """Token ids separated by commas or spaces, as an argparse type."""
    words = text.replace(",", " ").split()
    if not words:
        raise argparse.ArgumentTypeError("no token id is given")
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise argparse.ArgumentTypeError(
                f"{word!r} is not a token id; give numbers such as 1,2,3, or a text with -p"
            )
    return tuple(map(int, words))


def output_file(text: str) -> Path:
    """An output file, as an argparse type."""
    if text.endswith(("/", "/.", "/..", os.sep)):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is a folder")
    return Path(text)


def check_output(path: Path, option: str) -> Path | None:
    """Refuse a file that cannot be written, before any work is done; returns the file that it would
    replace, if any.

    Raises OptionError for a folder, an invalid name, or a folder that does not exist or is not
    writable.
    """
    shown = f"{option} {str(path)[:80]}"
    try:
        return check_writable(path)
    except IsADirectoryError as error:
        raise OptionError(f"{shown} is a folder.", f"Name a file with {option}.") from error
    except (OSError, ValueError) as error:  # a name with a null character
        remedy = "Name a file in an existing folder, or change that folder's rights."
        raise unwritable(shown, error, remedy) from error


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """The same for all output files of a command, each of which is named once: it would replace an
    input, or what was written before it. Raises OptionError."""
    parts = [part for word in args.words for part in (word, word.partition("=")[2])]
    named = Counter(os.path.realpath(part) for part in parts if os.path.isfile(part))
    written = set()
    for action in parser._actions:
        if action.type is output_file and (path := getattr(args, action.dest)) is not None:
            option = action.option_strings[-1] if action.option_strings else "the file"
            target = check_output(path, option)
            if target is not None and (named[str(target)] > 1 or target in written):
                raise OptionError(
                    f"{option} {str(path)[:80]} is given twice in this command.",
                    f"Name another file with {option}.",
                )
            written.add(target)


def read_text(source: Path | None) -> str:
    """The text of a file, or of standard input for None. Raises OptionError."""
    if source is not None:
        return user_text(source, _MOST_TEXT)
    name = "Standard input"
    try:
        raw = sys.stdin.buffer.read(_MOST_TEXT + 1)
    except OSError as error:
        raise unreadable(Path(name), error) from error
    if len(raw) > _MOST_TEXT:
        raise OptionError(f"{name} gives more than {size_text(_MOST_TEXT)}.", "Give less text.")
    return decoded(raw, name)


def _prompt_file(name: str) -> str:
    return read_text(None if name == "-" else Path(name)).removesuffix("\n")


_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "S"), positive),
    **dict.fromkeys(("FILE", "DIR", "OUT", "TRACE", "MODEL", "GGUF", "BUILD"), Path),
    "N[,N]": numbers,
    "IDS": token_ids,
    "JSON": as_type(json_object),
    "int": whole_number,
    "threads": thread_count,
    "number": finite_number,
    "output": output_file,
    "prompt_file": _prompt_file,
    "text": str,
}
"""Types of values by name in the help; any other is a text."""
