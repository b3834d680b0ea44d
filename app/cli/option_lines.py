"""Options declared by the lines that a command's help shows of them, and the types of values."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any

from engine.errors import OptionError
from engine.files import check_writable, unwritable

_OPTION = re.compile(r"(?P<dest>\w+)=(?=\S)|-")
_DEFAULT = re.compile(r"\(default ([^\s;:)]+?)(?:[:)]|, )")


class OptionLines:
    """A parser or a group whose options are declared by lines of text.

    A line is `-j, --jobs N  help`, where the help may go on in lines indented by four spaces or
    more. In the place of N: nothing for a switch; `N*`, repeatable; `N [N ...]` and `[N]` as in
    argparse; `{a,b}` for a choice; `N:int`, another type than the usual one of that name, see
    _TYPES. `--[no-]mmap` can be negated. `jobs=N` is a positional argument, `jobs=-j N` an option
    under another name. The default is the one that the help names as `(default 3)`. Any other
    line is the heading of a new group.
    """

    def __init__(self, group: argparse._ActionsContainer) -> None:
        self._group = group

    def add(self, text: str, **more: Mapping[str, Any]) -> argparse._ArgumentGroup:
        """Add what the lines say; returns the group of the last one. more: by option, further
        keywords of add_argument."""
        group: Any = self._group
        for line in _whole_lines(cleandoc(text)):
            if (found := _OPTION.match(line)) is None:
                group = self._group.add_argument_group(line)
                continue
            names, _, about = line[len(found[0]) if found["dest"] else 0 :].partition("  ")
            *flags, last = names.split(", ")
            name, _, value = last.partition(" ")
            if not name.startswith("-"):
                name, value = found["dest"], last
            keywords = {"help": about.strip(), **_of_value(value)}
            if value != last and found["dest"]:
                keywords["dest"] = found["dest"]
            long = name.replace("[no-]", "")
            keywords |= more.pop(long.lstrip("-").replace("-", "_"), {})
            if not value and not keywords.keys() & {"choices", "action"}:
                negates = long != name
                keywords["action"] = argparse.BooleanOptionalAction if negates else "store_true"
            elif default := _DEFAULT.search(about):
                keywords.setdefault("default", default[1])
            group.add_argument(*flags, long, **keywords)
        assert not more, more
        return group


def _whole_lines(text: str) -> Iterator[str]:
    """Headings and options, each with the lines that go on with it."""
    whole = ""
    for line in text.splitlines():
        if line.startswith("    "):
            whole += f" {line.strip()}"
        else:
            if whole:
                yield whole
            whole = line.strip()
    yield whole


def _of_value(value: str) -> dict[str, Any]:
    """Keywords of add_argument for a value as the help shows it."""
    if not value:
        return {}
    if value.startswith("{"):
        return {"choices": tuple(value[1:-1].split(","))}
    found: dict[str, Any] = {}
    if value.startswith("["):
        value, found = value[1:-1], {"nargs": "?"}
    elif value.endswith(" ...]"):
        value, found = value.partition(" ")[0], {"nargs": "+"}
    elif value.endswith("*"):
        value, found = value[:-1], {"action": "append", "default": []}
    metavar, colon, kind = value.rpartition(":")
    if not colon or kind not in _TYPES:
        metavar = kind = value
    return {"metavar": metavar, **found} | ({"type": _TYPES[kind]} if kind in _TYPES else {})


def is_given(words: Sequence[object], flag: str) -> bool:
    """Whether one of the words of a command line is a flag, alone or with its value."""
    is_short = len(flag) == 2
    return any(
        word == flag
        or word.startswith(f"{flag}=")
        or (is_short and word.startswith(flag) and word[2:3].isdigit())
        for word in map(str, words)
    )


def refuse_given(
    args: argparse.Namespace, needed: str, *options: str | Callable[[Any], object]
) -> None:
    """Refuse options that are given without what they have an effect with.

    options: flags, or functions that add the options to a parser. Raises OptionError.
    """
    parser = argparse.ArgumentParser(add_help=False)
    for add in filter(callable, options):
        add(parser)
    added = (flag for action in parser._actions for flag in action.option_strings)
    for flag in (*(one for one in options if isinstance(one, str)), *added):
        if is_given(args.words, flag):
            raise OptionError(f"{flag} goes only with {needed}.", "Leave it out.")


def as_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """What raises OptionError, as an argparse type."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(f"{error}") from error

    return read


def whole_number(text: str) -> int:
    """A whole number, as an argparse type."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error


def positive(text: str) -> int:
    """A whole number from 1, as an argparse type."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number


def thread_count(text: str) -> int:
    """As many threads as the machine has cores at most, as an argparse type."""
    number, most = positive(text), os.cpu_count() or 1
    if number > most:
        raise argparse.ArgumentTypeError(f"{number} is more than the {most} cores of this machine")
    return number


def numbers(text: str) -> Sequence[int]:
    """Numbers from 1, separated by commas, each once, as an argparse type."""
    return tuple(dict.fromkeys(positive(word.strip()) for word in text.split(",")))


def names_of(known: Collection[str], *, or_all: bool = False) -> Callable[[str], tuple[str, ...]]:
    """Names separated by commas, each once, as an argparse type. or_all: `all` is every one."""

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
        raise argparse.ArgumentTypeError("there is no token id")
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise argparse.ArgumentTypeError(
                f"{word!r} is not a token id; give numbers such as 1,2,3, or a text with -p"
            )
    return tuple(map(int, words))


def output_file(text: str) -> Path:
    """A file to write, as an argparse type."""
    if text.endswith(("/", "/.", "/..", os.sep)):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is a folder")
    return Path(text)


def check_output(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before anything is computed for it.

    Raises OptionError for a folder, a name that the file system does not take, a folder that does
    not exist or takes no file.
    """
    shown = f"{option} {str(path)[:80]}"
    try:
        check_writable(path)
    except IsADirectoryError as error:
        raise OptionError(f"{shown} is a folder.", f"Name a file with {option}.") from error
    except (OSError, ValueError) as error:  # a name with a null character
        remedy = "Name a file in an existing folder, or change that folder's rights."
        raise unwritable(shown, error, remedy) from error


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """The same for all that a command is to write. Raises OptionError."""
    for action in parser._actions:
        if action.type is output_file and (path := getattr(args, action.dest)) is not None:
            check_output(path, action.option_strings[-1] if action.option_strings else "the file")


_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "S"), positive),
    **dict.fromkeys(("FILE", "DIR", "OUT", "TRACE", "MODEL", "GGUF", "BUILD"), Path),
    "N[,N]": numbers,
    "IDS": token_ids,
    "int": whole_number,
    "threads": thread_count,
    "number": finite_number,
    "output": output_file,
    "text": str,
}
"""The types of values by their names in the help; any other is a text."""
