"""Names that tables and records of other programs have, of columns, keys and series, and what each
is."""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path

_COUNT_OF = re.compile(
    r"^(?:\w{1,20}:)?(?:(?:#|n|num|number of|mtp|spec(?: decode)?|total|draft(?= num)) ?\b)+"
    r"(?=accept|draft(?:ed|s| tok| gen| acc|$)|pred|proposed|rejected|generated)|^total (?=draft)"
    r"| (?:total|count)$"
)
"""What a name has before what it counts."""
_PATH = re.compile(r"^(?:(?!\w*(?:acc|draft|tok))\w{1,40}/){1,9}(?=\w{0,40}(?:acc|draft|spec))")
"""What metrics of a training run have before their names."""
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
NAMES = tomllib.loads(Path(__file__).parents[1].joinpath("names.toml").read_text("utf-8"))
_KINDS = ["", *(one["is"] for one in NAMES["column"])]
_COLUMN = re.compile("|".join(f"({'|'.join(one['names'])})" for one in NAMES["column"]))
"""The names of each kind in a group, of which the first counts that is the whole name."""
IN_NAME = re.compile(r"\([^()/→]{1,40}(?:(?:/|→|[-=]?->)[^()/→]{1,40})+\)")
"""In the name of a column what each of them is of."""
OF_ALL = re.compile(r" ?\((?:avg|average|mean)\)$| (?:mean ?)?[/±] ?std(?:dev)?$")
SPREAD = re.compile(r"(?:.{0,60} )?(?:min|max|std(?:dev)?|median|p\d\d?(?:\.\d)?):?", re.IGNORECASE)
"""Of several requests, but neither one of them nor all."""


def names_of(cells: list[str]) -> list[str]:
    """Cells of a head as names that are known."""
    plain = (_CAMEL.sub(" ", _PATH.sub("", one)).lower().replace("_", " ") for one in cells)
    plain = (one.replace(". ", " ") for one in plain)
    return [_COUNT_OF.sub("", OF_ALL.sub("", one)) for one in plain]


@lru_cache(1 << 12)
def kind_of(name: str) -> str:
    """What a column has, by its name; "" for what is not read."""
    first, _, more = name.partition(", ")
    others = IN_NAME.sub("", name).strip(), "" if SPREAD.fullmatch(more) else first
    known = (_COLUMN.fullmatch(one) for one in dict.fromkeys((name, *others)))
    return next((_KINDS[one.lastindex or 0] for one in known if one is not None), "")


@lru_cache(1 << 12)
def speed_of(name: str, shape: str) -> str:
    """ "speed" for a column without a kind that has one, as the unit next to the number says; else
    empty. shape: of the cell, with 0 for each number."""
    return "speed" if kind_of(f"{name} {shape}") == "speed" else ""
