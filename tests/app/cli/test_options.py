"""Options that describe themselves: texts, ranges, parts, and that every option is in its place."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import ClassVar

import pytest

from app.cli.option_lines import add_option
from app.cli.parser import parser_of
from app.cli.run_arguments import options_from
from engine.draft.registry import DRAFTERS
from engine.errors import OptionError
from engine.option_fields import (
    NumberRange,
    PlacedOption,
    build,
    check,
    grouped,
    option,
    options_in,
    part,
)
from engine.options import CacheOptions, RunOptions, SpecOptions


@dataclass(frozen=True)
class Inner:
    size: int = option(3, "--{who}-size  size, {what}", NumberRange(1, 9, "Shrink it."))
    way: str = option("a", "--{who}-way  one of {choices}", choices=("a", "b"))


@dataclass(frozen=True)
class Toy:
    GROUP: ClassVar[str] = "toys"
    n: int | None = option(None, "-n, --number  how many", NumberRange(0, math.inf, "Add some."))
    share: float = option(
        0.5, "--share  100 % is all", NumberRange(0.0, 1.0, "Halve it.", is_open=True)
    )
    names: tuple[str, ...] = option((), "--name  {either}", choices=["x", "y"], repeats=True)
    loud: bool = option(False, "--loud  more noise", group="noise")
    inner: Inner = part(Inner, who="dog", what="of it")
    other: int = field(default=7)

    def __post_init__(self) -> None:
        check(self)


def parsed(*words: str) -> Toy:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for one in options_in(Toy):
        add_option(parser, one)
    return options_from(parser.parse_args(words), Toy)


def test_parts_are_flattened_and_their_texts_filled_in() -> None:
    found = {one.path: one for one in options_in(Toy)}
    assert list(found) == [
        ("n",),
        ("share",),
        ("names",),
        ("loud",),
        ("inner", "size"),
        ("inner", "way"),
    ]
    size, way = found["inner", "size"], found["inner", "way"]
    assert (size.option.flags, size.option.about, size.kind, size.default) == (
        ("--dog-size",),
        "size, of it",
        int,
        3,
    )
    assert way.option.about == "one of a, b"
    assert found["names",].option.about == "x or y"
    assert [one.field for one in grouped(Toy, "toys")] == ["n", "share", "names"]
    assert [one.field for one in grouped(Toy, "noise", "toys")] == ["n", "share", "names", "loud"]


def test_the_command_line_gives_what_was_asked_for() -> None:
    assert parsed() == Toy()
    words = "--number 4 --share 1 --name y --name x --loud --dog-size 9 --dog-way b"
    assert parsed(*words.split()) == Toy(4, 1.0, ("y", "x"), True, Inner(9, "b"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n -1", "-n is negative. Add some."),
        ("--share 0", "--share is outside (0, 1]. Halve it."),
        ("--dog-size 10", "--dog-size is outside 1..9. Shrink it."),
        ("--dog-way c", "--dog-way c is unknown. Choose from a, b."),
        ("--name x --name z", "--name z is unknown. Choose from x, y."),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_its_flag(words: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        parsed(*words.split())
    assert str(refused.value) == message


def test_what_is_wrong_with_a_number() -> None:
    assert NumberRange(-1, math.inf, "").broken() == "is below -1"
    assert NumberRange(0.0, math.inf, "", is_open=True).broken() == "is not positive"
    assert NumberRange(0.0, 2.5, "").broken() == "is outside [0, 2.5]"
    assert not NumberRange(0.0, 1.0, "").holds(math.nan)
    assert NumberRange(0.0, 1.0, "").holds(0.0) and not NumberRange(
        0.0, 1.0, "", is_open=True
    ).holds(0.0)


def test_values_by_path_make_the_dataclass() -> None:
    assert build(Toy, {("n",): 2, ("inner", "size"): 4}) == Toy(n=2, inner=Inner(4))


# -- the engine's own options --------------------------------------------------------------


def every_field(kind: type, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths by the dataclass alone, without what the fields say of themselves."""
    found = set()
    for one in fields(kind):
        inner = one.default_factory
        if is_dataclass(inner) and isinstance(inner, type):
            found |= every_field(inner, (*path, one.name))
        else:
            found.add((*path, one.name))
    return found


@pytest.mark.parametrize("kind", [RunOptions, CacheOptions])
def test_every_field_is_an_option_with_flags_of_its_own(kind: type) -> None:
    found = options_in(kind)
    assert {one.path for one in found} == every_field(kind)
    flags = [flag for one in found for flag in one.option.flags]
    assert len(set(flags)) == len(flags)
    assert len({one.option.dest for one in found}) == len(found)


def test_run_has_every_option_once() -> None:
    parser = parser_of("run")
    known = parser._option_string_actions
    for one in options_in(RunOptions):
        assert all(known[flag].dest == one.option.dest for flag in one.option.flags)
    defaults = vars(parser.parse_args([]))
    for one in options_in(RunOptions):
        if one.path != ("spec", "types"):
            value = defaults[one.option.dest]
            assert (tuple(value) if isinstance(value, list) else value) == one.default


@pytest.mark.parametrize("one", options_in(RunOptions), ids=lambda one: ".".join(one.path))
def test_a_form_can_show_every_default(one: PlacedOption) -> None:
    row, shown = one.option.row, one.default
    if one.kind not in (int, float) or row is None:
        return
    start = shown if row.start is None else row.start
    assert row.low < row.high
    assert start is None or row.low <= start <= row.high
    if one.option.within and not row.special:
        assert one.option.within.holds(row.low) and one.option.within.holds(row.high)


def test_every_drafter_finds_its_options() -> None:
    spec = SpecOptions()
    paths = every_field(SpecOptions)
    for drafter in DRAFTERS.values():
        assert drafter.paths() <= paths
        assert isinstance(drafter.options_of(spec), drafter.options)
        assert drafter.longest(drafter.options_of(spec)) > 0
        assert drafter.about
