"""Column names: the meaning of columns, keys and series in other programs' tables and records,
numbers in human notation, and the lines of text with them."""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any

from engine.observe.files.records.request import RecordedRequest

_COUNT_OF = re.compile(
    r"^(?:\w{1,20}:)?(?:(?:#|n|num|number of|mtp|spec(?: decode)?|total|draft(?= num)) ?\b)+"
    r"(?=accept|draft(?:ed|s| tok| gen| acc| prop|$)|pred|proposed|rejected|generated)"
    r"|^total (?=draft)| (?:total|count)$"
)
"""What a name may have before the thing that is counted."""
_PATH = re.compile(r"^(?:(?!\w*(?:acc|draft|tok))\w{1,40}/){1,9}(?=\w{0,40}(?:acc|draft|spec))")
"""Prefixes of training metrics."""
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
NAMES = tomllib.loads(Path(__file__).parents[1].joinpath("names.toml").read_text("utf-8"))
_KINDS = ["", *(one["is"] for one in NAMES["column"])]
_COLUMN = re.compile("|".join(f"({'|'.join(one['names'])})" for one in NAMES["column"]))
"""Patterns of each kind as groups, of which the first one counts that matches the whole name."""
IN_NAME = re.compile(r"\([^()/→]{1,40}(?:(?:/|→|[-=]?->)[^()/→]{1,40})+\)")
"""Parts of a column name that say what each value belongs to."""
OF_ALL = re.compile(r" ?\((?:avg|average|mean)\)$| (?:mean ?)?[/±] ?std(?:dev)?$")
SPREAD = re.compile(r"(?:.{0,60} )?(?:min|max|std(?:dev)?|median|p\d\d?(?:\.\d)?):?", re.IGNORECASE)
"""Statistics over several requests, neither of one nor of all."""
_SHARE_OF = re.compile(r"(?<![\d.])([~≈]?)(\d{1,3}\.\d{1,6}|\d{2,3}(?= ?%)) ?(%?)(?![\d.])")
_COUNT = re.compile(r"(?<![\d.])\d{1,9}(?!\d|\.\d| ?%)")
_ALL_OF = re.compile(r"(?<![\d.])(\d{2,9})(?: ?/ ?| of | out of )\1(?![\d.])")
_FEWEST, _MOST_COUNTS = 20, 12
"""Drafted tokens below which other numbers form a rate by chance; most counts in a line."""
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[,'’ \xa0\u2009\u202f]\d{3})+(?![\d,])")
_DECIMAL_COMMA = re.compile(
    r"[~≈]?(?:0|\d{1,3}(?:\.\d{3})*+|\d+),(?:\d{1,2}|\d{4,})(?!\d).{0,9}|0,\d+"
)
_OTHER_WAY = str.maketrans(",.", ".,")
SUM_DIGITS = 0.01
"""Allowed difference of a printed rate from its counts, by its digits."""
_LONGEST, _LONGEST_NAME = 32, 80
ABOUT = re.compile("|".join(NAMES["about"]))
ABOUT_DRAFTS = re.compile(f"(?i){'|'.join(NAMES['said']['about'])}")
NUMBER = re.compile(
    r"[~≈]?(\d{1,12}(?:\.\d{1,20})?)(?: ?(?:±|\+/-) ?[\d.]{1,9})? ?(%?)(?![\d.kKM]|\s?[–—]|-\d)"
)
ACCEPTED = ("rate", "mean", "accepted", "per round")
FIGURES = {*ACCEPTED, "by", "at index"}
_TWO_COUNTS = re.compile(r"\d[\d,.]{0,20} ?/ ?\d.{0,80}")
_FIGURE, _ARROW = r"[~≈]?\d{1,6}(?:\.\d{1,6})? ?%?", r" ?(?:→|[-=]?->) ?"
SEVERAL = re.compile(
    rf"{_FIGURE}(?:(?: ?/ ?|, ?| )(?=[\d.]*[.%]){_FIGURE}|{_ARROW}{_FIGURE}){{1,31}}"
)
"""Several figures in one cell, which are not counts."""
SAID_SPEED = re.compile(
    r"(?<![\d.])(\d{1,6}(?:\.\d{1,6})?)(?: ?(?:±|\+/?-) ?[\d.]{1,9})?"
    r" ?t(?:ok(?:en)?s?)?(?:/|[- ]per[- ])s(?:ec(?:ond)?s?)?\b"
)
_SAYS_WHAT = re.compile(
    r"acc|draft|tok|rate|mean|avg|average|len|pos|\bper\b|pred|gen|spec|step|total|[/%]"
)
"""Part of a figure's name, not of an engine's or setting's."""


def names_of(cells: list[str]) -> list[str]:
    """Header cells as known names."""
    plain = (_CAMEL.sub(" ", _PATH.sub("", one)).lower().replace("_", " ") for one in cells)
    plain = (one.replace(". ", " ") for one in plain)
    return [_COUNT_OF.sub("", one) for one in plain]


@lru_cache(1 << 12)
def kind_of(name: str) -> str:
    """The kind of a column, by its name; "" if it is not read."""
    name = OF_ALL.sub("", name)
    first, _, more = name.partition(", ")
    others = IN_NAME.sub("", name).strip(), "" if SPREAD.fullmatch(more) else first
    known = (_COLUMN.fullmatch(one) for one in dict.fromkeys((name, *others)))
    return next((_KINDS[one.lastindex or 0] for one in known if one is not None), "")


@lru_cache(1 << 12)
def speed_of(name: str, shape: str) -> str:
    """ "speed" for a column without a kind that contains one, by the unit next to the number; else
    empty. shape: of the cell, with 0 for each number."""
    return "speed" if kind_of(f"{name} {shape}") == "speed" else ""


@lru_cache(1 << 12)
def parts_of(name: str) -> tuple[str, str]:
    """The owner of a figure, empty if its name has none, and the name of the figure."""
    words = name[:_LONGEST_NAME].replace("(", "").replace(")", "").split()
    for at in range(len(words) - 1, 0, -1):
        for side, rest in ((words[:at], words[at:]), (words[-at:], words[:-at])):
            if kind_of(" ".join(rest)) and not any(map(_SAYS_WHAT.search, side)):
                return " ".join(side), " ".join(rest)
    return "", name


def making_rates(line: str) -> set[tuple[int, int]]:
    """Accepted and drafted counts that form a rate next to them."""
    plain = without_signs(line)
    counts = {int(one) for one in _COUNT.findall(plain)}
    pairs = [*permutations(counts if len(counts) <= _MOST_COUNTS else (), 2)]
    pairs += [(int(one), int(one)) for one in _ALL_OF.findall(plain)]
    return {
        (accepted, drafted)
        for about, share, percent in _SHARE_OF.findall(line)
        for accepted, drafted in pairs
        if drafted >= _FEWEST
        and abs(accepted / drafted * (scale := 100 if percent else 1) - float(share))
        <= (1.0001 if about else 0.5001) * 10.0 ** -len(share.partition(".")[2])
        and accepted <= drafted
        and (scale > 1 or float(share) <= 1)
    }


def without_signs(text: str) -> str:
    """A text without thousands separators."""
    return _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), text)


@lru_cache(1 << 12)
def mean_of(text: str) -> tuple[float, float]:
    """A mean length, and half a unit of its last digit."""
    return float(text), 0.5001 * 10.0 ** -len(text.partition(".")[2])


def share_of(said: str) -> tuple[float, float]:
    """A share of 1, or in percent, and its allowed difference from that of its counts."""
    number, half = mean_of(said.rstrip(" %"))
    scale = 100 if "%" in said or number > 1 else 1
    return number / scale, SUM_DIGITS + half / scale


def is_number(cell: str) -> bool:
    """Whether a cell is just a number, as nearly all are."""
    return cell.replace(".", "", 1).isdecimal()


def plain_number(cell: str, has_comma: bool) -> str:
    """A cell with numbers without thousands separators and with decimal points."""
    is_plain = is_number(cell) and not (has_comma and "." in cell)
    if is_plain or not cell.lstrip("~≈")[:1].isdigit() or len(cell) > _LONGEST:
        return cell
    cell = cell.translate(_OTHER_WAY) if has_comma or _DECIMAL_COMMA.fullmatch(cell) else cell
    return without_signs(cell)


def has_decimal_comma(cells: list[str]) -> bool:
    """Whether numbers of a table have decimal commas, and none a decimal point."""
    has_comma = any(_DECIMAL_COMMA.fullmatch(one) for one in cells if "," in one)
    swapped = (one.translate(_OTHER_WAY) for one in cells if has_comma)
    return has_comma and not any(map(_DECIMAL_COMMA.fullmatch, swapped))


def is_head(names: list[str]) -> bool:
    """Whether header cells name acceptance."""
    parts = [one for one in names if ABOUT.search(one) or ABOUT.search(parts_of(one)[1])]
    kinds = [one for one in parts if {kind_of(one), kind_of(parts_of(one)[1])} & FIGURES]
    figures = NUMBER, SEVERAL, _TWO_COUNTS, SAID_SPEED, _THOUSANDS
    return bool(kinds) and not any(one.fullmatch(name) for one in figures for name in names)


def sides_of(names: list[str], above: list[str]) -> list[tuple[str, list[int], list[str]]]:
    """Engines or settings with figures side by side, by the additions to figure names, or by the
    row above: each with places and names of its columns and of the common ones."""
    parts = [parts_of(one) for one in names]
    if not any(side for side, _ in parts):
        above = [next(filter(None, above[at::-1]), "") for at in range(len(above))]
        parts = [
            (a if names.count(one) > 1 else "", one) for a, one in zip(above, names, strict=True)
        ]
    found = dict.fromkeys(side for side, one in parts if side and kind_of(one) in ACCEPTED)
    parts = [
        (next((one for one in found if name.startswith(f"{one} ")), side), rest)
        for name, (side, rest) in zip(names, parts, strict=True)
    ]
    if len(found) < 2:
        return [("", list(range(len(names))), names)]
    several = []
    for side in found:
        places = [i for i, (one, _) in enumerate(parts) if one == side or one not in found]
        mine = [parts[i][1] if parts[i][0] == side else names[i] for i in places]
        several.append((side, places, mine))
    return several


# -- headings of tables, and lines of a text ---------------------------------------------------

_HEADING = re.compile(r"(#{1,6}) +(.{1,200})|\*\*(.{1,200})\*\*:?|([^|]{1,200}):")
_REST = re.compile(r"^[\d.)]{1,9} | (?:by|per|for|at|in|on|with) .*| ?\(.*")
_OTHER = re.compile(f"(?i){'|'.join(NAMES['heading']['others'])}")
_MOST_ABOVE, _EMPTY = 40, {"", "-", "–", "—", "n/a", "N/A"}
_LENGTHS = re.compile(r"[~≈]?[1-9]\d?\.\d+")
_SHARES = re.compile(r"[~≈]?(?:0?\.\d+|1\.0+|\d{1,3}(?:\.\d+)? ?%)")


def under_heading(table: list[tuple[int, list[str]]], lines: list[str]) -> list[Any]:
    """A table of which only the heading says what its numbers are, with this as the name of each
    column in a row below the first; empty for other tables. A heading of a section is that of all
    tables in it, a line in bold or with a colon only of the next one; one about another quantity
    ends the search."""
    (number, head), *rows = table or [(0, [""])]
    cells = [one for _, row in rows for one in row[1:] if one not in _EMPTY]
    is_other = any(kind_of(one) or _OTHER.search(one) for one in names_of(head[1:]))
    above = [] if is_other or not cells else lines[max(number - _MOST_ABOVE, 0) : number - 1]
    level = 7
    for i, line in enumerate(one.strip() for one in reversed(above) if one.strip()):
        marks, *said = found.groups("") if (found := _HEADING.fullmatch(line)) else ("",)
        if not said or (i and not marks) or len(marks) >= level:
            continue
        level, text = len(marks) or level, "".join(said).strip("*_` :")
        (name,) = names_of([_REST.sub("", text)])
        if _OTHER.search(text):
            break
        if ABOUT.search(name) and (kind := kind_of(name)) in ("rate", "mean"):
            fits = _LENGTHS if kind == "mean" else NUMBER if "%" in text else _SHARES
            name += " (%)" if fits is NUMBER else ""
            named = [(number, head), (number, [head[0], *[name] * (len(head) - 1)]), *rows]
            return named if all(map(fits.fullmatch, cells)) else []
    return []


_LONGEST_SAID = 600
_WORDED = re.compile(f"(?i){'|'.join(NAMES['said']['counts'])}")
_PER_ROUND = re.compile(f"(?i){'|'.join(NAMES['said']['per_round'])}")
_NOT_HAD = re.compile(f"(?i){'|'.join(NAMES['said']['not_had'])}")
_IN_OTHERS = re.compile(NAMES["about"][1])
"""Words for acceptance in languages without spaces."""
_LISTED = re.compile(r"\s{0,20}[-*+•]\s")
"""A line that may follow one ending with a colon."""
_SAID_RATE = re.compile(
    r"(?i)(?:(?<![a-z])accept(?:ance|ed)?(?:[ _]rate|[ _]ratio)?(?: is| was| of| at)?"
    rf"|(?:{NAMES['about'][1]})[率률율](?:约?为|约|是|は)?)[ \t:：=~≈(（]{{0,4}}"
    r"(\d{1,3}(?:\.\d{1,6})? ?%|0\.\d{1,6}|1\.0{1,6})(?!\.?\d|[–-])"
    r"|(?<![\d.,+\-–−])(\d{1,3}(?:\.\d{1,6})? ?%) (?:(?:aggregate|average|avg|mean|overall|total"
    r"|draft|token|mtp)[ -]){0,2}accept(?:ance|ed)?\b(?! (?:loss|gain|drop|threshold|target))"
)
_SAID_LENGTH = re.compile(
    r"(?i)(?<![a-z_])(?:(?:mean|avg|average)_)?acc(?:ept(?:ance|ed)?)?[ _]len(?:gth)?"
    r"(?: is| was| of)?[ \t]*[:：=~≈*`]*[ \t]*"
    r"(\d{1,2}\.\d{1,6})(?!\.?\d| ?[%–]|-\d)"
)
_SHARE = re.compile(
    r"(?<![\d.+−–±-])(?<!\+/)(?:\d{1,3}(?:[.,]\d{1,6})? ?%|(?:0|1)\.\d{1,6}(?!\.?\d| ?[×A-Za-z%]))"
)


def said_lines(text: str) -> tuple[list[RecordedRequest], list[RecordedRequest]]:
    """Lines with two counts: those that form the acceptance rate next to them, or, without a rate,
    those identified by words; and lines with one rate or mean length and no such counts. Each with
    its only speed."""
    counted, rated = list[RecordedRequest](), list[RecordedRequest]()
    is_about = ABOUT_DRAFTS.search(text) is not None  # others accept people, or offers
    is_under = False
    for number, line in enumerate(text.splitlines() if is_about else (), 1):
        n_words = line.lower().count("accept") + len(_IN_OTHERS.findall(line))
        has_list = n_words > 0 and line.rstrip()[-1:] in (":", "：")
        is_under = has_list or (is_under and _LISTED.match(line) is not None)
        if len(line) > _LONGEST_SAID or not (n_words or is_under):
            continue
        found = RecordedRequest("", f"line {number}", stop="end")
        if len(speeds := SAID_SPEED.findall(line)) == 1:
            found.timings["predicted_per_second"] = float(speeds[0])
        # words before may mean something expected or lost, unless next to a speed
        shares = [after or one for after, one in _SAID_RATE.findall(line) if after or speeds]
        said = share_of(shares[0]) if len(shares) == 1 else (0.0, 1.0)
        pairs = {(n, of) for n, of in making_rates(line) if abs(n / of - said[0]) <= said[1]}
        plain = without_signs(line.replace("`", ""))
        if len(named := list(_WORDED.finditer(plain))) == 1:
            a, d, e, b, c, f = named[0].groups("")
            n, of = int(a + b + c), int(d + e + f)
            if (n, of) in pairs or (not (pairs or shares) and n <= of):
                pairs = {(n, of)}
            elif not pairs and len(shares) == 1 and of and _is_next_to(named[0], plain):
                share, within = share_of(shares[0])
                found.check_ratio("the rate", share, n, of, "accepted", "drafted", within=within)
                counted += [found] if found.contradictions else []
        if len(pairs) == 1:  # so their meaning is certain
            found.num_accepted_draft_tokens, found.num_draft_tokens = pairs.pop()
            counted.append(found)
        elif n_words != 1 or _NOT_HAD.search(line) is not None:
            continue
        elif len(shares) == len(_SHARE.findall(line)) == 1:
            share, _ = share_of(shares[0])
            found.given["draft_acceptance_rate"] = share
            rated += [found] if share <= 1 else []
            continue
        means = [float(one) for one in _SAID_LENGTH.findall(line)]
        means += [1 + float("".join(one)) for one in _PER_ROUND.findall(line)]
        if len(means) == 1:
            found.given["mean_acceptance_length"] = means[0]
            rated.append(found)
    return counted, rated


def _is_next_to(counts: re.Match[str], line: str) -> bool:
    """Whether no word separates counts from the rate in a line, so that they concern the same
    tokens."""
    rate = _SAID_RATE.search(line)
    first, last = sorted((counts.span(), rate.span() if rate is not None else (0, 0)))
    between = line[first[1] : last[0]]
    return rate is not None and re.fullmatch(r"\w*(?: tokens?)?\W*", between) is not None
