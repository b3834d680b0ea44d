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
_COLUMNS = [(one["is"], name) for one in NAMES["column"] for name in one["names"]]
IN_NAME = re.compile(r"\([^()/→]{1,40}(?:(?:/|→|[-=]?->)[^()/→]{1,40})+\)")
"""In the name of a column what each of them is of."""
OF_ALL = re.compile(r" ?\((?:avg|average|mean)\)$| (?:mean ?)?[/±] ?std(?:dev)?$")
SPREAD = re.compile(r"(?:.{0,60} )?(?:min|max|std(?:dev)?|median|p\d\d?(?:\.\d)?):?", re.IGNORECASE)
"""Of several requests, but neither one of them nor all."""
ABOUT = re.compile(r"acc|draft|接受|^al$|^τ|^a\.len$|angenommen|akzept")
NUMBER = re.compile(
    r"[~≈]?(\d{1,12}(?:\.\d{1,20})?)(?: ?(?:±|\+/-) ?[\d.]{1,9})? ?(%?)(?![\d.kKM]|\s?[–—]|-\d)"
)
ACCEPTED = ("rate", "mean", "accepted", "per round")
FIGURES = {*ACCEPTED, "by"}
_TWO_COUNTS = re.compile(r"\d[\d,.]{0,20} ?/ ?\d")
_FIGURE, _ARROW = r"[~≈]?\d{1,6}(?:\.\d{1,6})? ?%?", r" ?(?:→|[-=]?->) ?"
SEVERAL = re.compile(
    rf"{_FIGURE}(?:(?: ?/ ?|, ?| )(?=[\d.]*[.%]){_FIGURE}|{_ARROW}{_FIGURE}){{1,31}}"
)
"""Several figures in one cell, which are no counts."""
SAID_SPEED = re.compile(
    r"(?<![\d.])(\d{1,6}(?:\.\d{1,6})?)(?: ?(?:±|\+/?-) ?[\d.]{1,9})?"
    r" ?t(?:ok(?:en)?s?)?(?:/|[- ]per[- ])s(?:ec(?:ond)?s?)?\b"
)
_SAYS_WHAT = re.compile(
    r"acc|draft|tok|rate|mean|avg|average|len|pos|\bper\b|pred|gen|spec|step|total|[/%]"
)
"""What is part of a figure's name, and not that of an engine or a setting."""
_LONGEST_NAME = 80


def names_of(cells: list[str]) -> list[str]:
    """Cells of a head as names that are known."""
    plain = (_CAMEL.sub(" ", _PATH.sub("", one)).lower().replace("_", " ") for one in cells)
    plain = (one.replace(". ", " ") for one in plain)
    return [_COUNT_OF.sub("", OF_ALL.sub("", one)) for one in plain]


@lru_cache(1 << 12)
def kind_of(name: str) -> str:
    """What a column has, by its name; "" for what is not read."""
    first, _, more = name.partition(", ")
    for one in (name, IN_NAME.sub("", name).strip(), "" if SPREAD.fullmatch(more) else first):
        if found := next((kind for kind, known in _COLUMNS if re.fullmatch(known, one)), ""):
            return found
    return ""


@lru_cache(1 << 12)
def speed_of(name: str, shape: str) -> str:
    """ "speed" for a column without a kind that has one, as the unit next to the number says; else
    empty. shape: of the cell, with 0 for each number."""
    return "speed" if kind_of(f"{name} {shape}") == "speed" else ""


@lru_cache(1 << 12)
def parts_of(name: str) -> tuple[str, str]:
    """Whose a figure is, empty if its name does not say so, and the name of the figure."""
    words = name[:_LONGEST_NAME].replace("(", "").replace(")", "").split()
    for at in range(len(words) - 1, 0, -1):
        for side, rest in ((words[:at], words[at:]), (words[-at:], words[:-at])):
            if kind_of(" ".join(rest)) and not any(map(_SAYS_WHAT.search, side)):
                return " ".join(side), " ".join(rest)
    return "", name


def is_head(names: list[str]) -> bool:
    """Whether cells name what is accepted."""
    parts = [one for one in names if ABOUT.search(one) or ABOUT.search(parts_of(one)[1])]
    kinds = [one for one in parts if {kind_of(one), kind_of(parts_of(one)[1])} & FIGURES]
    figures = NUMBER.fullmatch, SEVERAL.fullmatch, _TWO_COUNTS.match, SAID_SPEED.fullmatch
    return bool(kinds) and not any(one(name) for one in figures for name in names)
