"""Options of the engine as argparse arguments, and back; see engine.option_fields."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from app.cli.common import finite_number
from engine.errors import OptionError
from engine.option_fields import PlacedOption, build, options_in

_T = TypeVar("_T")


def add_options(
    group: argparse._ArgumentGroup, options: Iterable[PlacedOption], *, is_set: bool = True
) -> None:
    """Add them. is_set: without it, the value of an option that is not given is None, not its
    default; the help is the same."""
    for one in options:
        option = one.option
        if one.kind is bool:
            group.add_argument(*option.flags, action="store_true", help=option.about)
            continue
        start: Any = [] if option.repeats else one.default
        shown = "%(default)s" if is_set else one.default
        has_default = one.default is not None and one.kind is not tuple
        group.add_argument(
            *option.flags,
            action="append" if option.repeats else "store",
            type=reader(one),
            default=start if is_set else None,
            metavar=option.metavar,
            help=option.about.replace("%", "%%") + (f" (default {shown})" if has_default else ""),
        )


def reader(one: PlacedOption) -> Callable[[str], Any]:
    """The argparse type of an option's text."""
    parse = one.option.parse
    if parse is None:
        return int if one.kind is int else finite_number if one.kind is float else str

    def read(text: str) -> Any:
        try:
            return parse(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def options_from(args: argparse.Namespace, kind: type[_T]) -> _T:
    """A dataclass of options from what was given; options that the parser lacks, or that were not
    given, keep their defaults. Raises OptionError for a value out of range."""
    values: dict[tuple[str, ...], Any] = {}
    for one in options_in(kind):
        value = getattr(args, one.option.dest, None)
        if value is not None:
            values[one.path] = tuple(value) if isinstance(value, list) else value
    return build(kind, values)
