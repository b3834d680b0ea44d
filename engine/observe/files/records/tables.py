"""Tables about speculative decoding, printed by programs or written by people: a header row, then a
row for each setting, category or attempt, or transposed; also HTML and CSV.

llama.cpp's speed_bench.py and speed_bench_compare.py and ik_llama.cpp's llama-spec-bench print such
tables; most have only rates. Total rows are left out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest

from engine.foreign import COUNT, LONGEST_PART_MS, OutOfRangeError, real, whole
from engine.observe.files.records.column_names import (
    ABOUT,
    ABOUT_DRAFTS,
    ACCEPTED,
    FIGURES,
    IN_NAME,
    NAMES,
    NUMBER,
    OF_ALL,
    SAID_SPEED,
    SEVERAL,
    SPREAD,
    SUM_DIGITS,
    has_decimal_comma,
    is_head,
    is_number,
    kind_of,
    making_rates,
    names_of,
    parts_of,
    plain_number,
    share_of,
    sides_of,
    speed_of,
    under_heading,
)
from engine.observe.files.records.request import RecordedRequest
from engine.observe.rounds.log_text import rows_with_bars
from engine.observe.rounds.server_log import MOST_REQUESTS

_NAMED = re.compile(r"([A-Za-z][\w/#%]{0,30})(?:\s?=\s{0,9}|: (?=\d))([^\s,;=`]{1,40})")
_FEW = 2
_IN_ROWS = ("|", "│", "┃", "\t", "accept_rate")
_BARS = re.compile(r"[|│┃┆]")
_GAPS = re.compile(r"\s\s*(?:(?<=\t)|(?<=\s\s))")  # two of them, or a tab
_COMMAS, _SEMICOLONS = re.compile(r",(?=[^\s,])"), re.compile(r";(?=\S|$)")
_QUOTED = re.compile(r'(?:^|[,;])"[^"\0]{0,200}"(?:[,;]|$)')
"""A quoted CSV cell that may contain a separator."""
_KEY_COLUMN = re.compile(
    r"key|metric(?: name)?|name|series|variable|measure(?:ment)?| ?field|legend"
)
_VALUE_COLUMN = re.compile(r" ?value.{0,20}|last.{0,20}")
_LINK = re.compile(r"\[([^][]{1,200})\]\([^()\s]{1,400}\)")
"""A Markdown link; its address is not part of a name."""
_RULE = set(" -|:+=").union(map(chr, range(0x2500, 0x2580)))
_NOT_PLAIN = ("  ", "\t", "\x1f", ";", ", ", ",,")
"""An ASCII line with one of these is not simply split at commas."""
_MOST_CELLS = 64
_LONGEST = 2000
_AT_INDEX = re.compile(
    r"(?:(?:draft )?acc(?:ept(?:ance)?)?(?: rate)? ?)?(?:@ ?|at )?pos(?:ition)?[ .@#]?(\d{1,3})"
    r"(?: acc(?:ept(?:ance)?)?)?(?: rate)?(?: ?%| ?\(%\))?"
)
_IS_POSITION = re.compile(r"(?i)(?:(?:draft|token) )?(?:pos(?:ition)?|index)").fullmatch
_RANGE = re.compile(r"[~≈]?\d{1,6}(?:\.\d{1,6})? ?%? ?(?:[–—-]|to) ?\d")
_BEGINS = re.compile(r"(?i)(?:[~≈<>≤≥]|about|approx\w{0,8}\.?|around|ca\.?|大?约)? ?\d")
_DIGITS = re.compile(r"[0-9]+")
_NUMBERS = re.compile(r"\d+\.?\d*(?:\n\d+\.?\d*)*+")
"""A column of numbers only, as most are."""
_SHARES = re.compile(r"(?<![\d.])(\d{1,3}\.\d{1,6})(?![\d.])")
_ARE_SHARES = re.compile(r"[\s\d.,;/|%()\[\]]+").fullmatch
"""Shares without words, which would name each, and not a range."""
_PAIR = re.compile(r"(\d{1,20}) ?(?:/|of|out of) ?(\d{1,20})(?: ?\([^)]{0,40}\))?$")
_DRAFTS = re.compile(r"drafts \d{1,20}/(\d{1,20}), tokens (\d{1,20})/(\d{1,20})")
"""Drafts, accepted and drafted tokens in one cell, as in ik_llama.cpp."""
_BETWEEN = re.compile(r" ?(?:/|→|[-=]?->) ?")
ALL = re.compile(rf"(?:.{{0,60}} )?(?:{'|'.join(NAMES['all']['names'])}):?", re.IGNORECASE)
_NUMBERED = re.compile(r"(?i)p[02-46-9]:?")
"""A numbered prompt, not a percentile."""
_MAY_BE_ABOUT = re.compile(ABOUT.pattern.translate({ord("^"): None, ord("$"): None}))
"""Part of each of these names."""
_ACC = {"acc", "Acc", "ACC"}
_COUNTS = "rounds", "accepted", "drafted", "rejected", "tokens"
_SPEEDS = ("seconds", "predicted_ms", 1e3), ("speed", "predicted_per_second", 1.0)
_PLAIN_RATE = re.compile(
    r"(?:(?:draft|token) )?(?:accept(?:ance)?|acc)(?: (?:rate|ratio))?(?: ?\(?%\)?)?|rate"
).fullmatch
"""Of the drafted tokens, and not of a part of them or an average."""
_COMPARES = re.compile(
    r"(?i)(?:.{0,80}, )?(?:% ?|rel\w{0,6} )?(?:difference|diff|delta|Δ|change)(?: ?\(?%\)?)?"
)
"""A comparison with the figures next to it."""


def read_tables(text: str, unread: list[str] | None = None) -> list[RecordedRequest]:
    """The rows of such tables. Impossible numbers are left out. unread: receives acceptance data of
    rows without a single figure."""
    found, n = list[RecordedRequest](), 0
    for row in _requests(text, [] if unread is None else unread):
        found.append(row)
        n += not any(one.fullmatch(row.place) for one in (SPREAD, _COMPARES, ALL))
        if n > MOST_REQUESTS:
            break  # they are refused
    is_numbered = any(map(_NUMBERED.fullmatch, (one.place for one in found)))
    others = [_COMPARES] if is_numbered else [_COMPARES, SPREAD]
    found = [one for one in found if not any(other.fullmatch(one.place) for other in others)]
    return [one for one in found if not ALL.fullmatch(one.place.partition(", ")[0])] or found


def _requests(text: str, unread: list[str]) -> Iterator[RecordedRequest]:
    # otherwise "acc" is the accuracy of answers
    is_about = "accuracy" not in text.lower() and ABOUT_DRAFTS.search(text) is not None
    lines = rows_with_bars(text).splitlines()
    for table in _tables(lines):
        if table and _IS_POSITION(table[0][1][0]) is not None:
            continue  # its rows are not requests
        if not (is_about or all(_ACC.isdisjoint(cells) for _, cells in table)):
            table = [(at, ["" if one in _ACC else one for one in cells]) for at, cells in table]
        if table and _MAY_BE_ABOUT.search(" ".join(table[0][1]).lower()):
            table = _widened(table)
        heads = [
            at
            for at, (_, cells) in enumerate(table)
            if not any(map(NUMBER.fullmatch, cells))
            and _MAY_BE_ABOUT.search(" ".join(cells).lower())
            and is_head(names_of(cells))
        ]
        if not heads and (wide := _pivoted(table)):
            table, heads = wide, [0]
        if not heads and (wide := under_heading(table, lines)):
            table, heads = wide, [1]
        if not heads and is_head(names_of([cells[0] for _, cells in table])):
            number = table[0][0]  # its names are in the first column
            columns = zip(*(cells for _, cells in table), strict=True)
            table, heads = [(number, list(cells)) for cells in columns], [0]
        has_comma = has_decimal_comma([one for _, row in table for one in row])
        for begin, end in pairwise([*heads, len(table)]):
            rows, above = table[begin + 1 : end], names_of(table[max(begin - 1, 0)][1])
            if any("spec_decode_num" in one for one in table[begin][1]) and _only_grow(rows):
                rows = rows[-1:]  # a server's counters: the newest row has totals
            joined = map("\n".join, zip(*(cells for _, cells in rows), strict=True))
            loose = {
                i: OF_ALL.search(table[begin][1][i].lower()) is not None
                for i, one in enumerate(joined)
                if has_comma or _NUMBERS.fullmatch(one) is None
            }
            sides = [
                (side, places, names, *_saying(names, [i in loose for i in places]))
                for side, places, names in sides_of(names_of(table[begin][1]), above)
            ]
            for number, cells in rows:
                plain = cells.copy()
                for i, is_spread in loose.items():
                    one = _BETWEEN.split(cells[i])[0] if is_spread else cells[i]
                    plain[i] = plain_number(one, has_comma)
                for side, places, names, saying, several in sides:
                    mine = [plain[i] for i in places]
                    for part, ones in _parted(names, mine, several):
                        whose = " ".join(filter(None, (side, part)))
                        found = row_of(names, ones, f"line {number}", whose, saying)
                        unread += _unread(found, [(names[i], ones[i]) for i in saying], number)
                        if found is not None:
                            yield found


def _saying(names: list[str], are_loose: list[bool]) -> tuple[list[int], list[int]]:
    """Columns that may be meaningful: those with a kind, with more than numbers, or before all with
    a kind; and of these those with more than numbers."""
    kinds = [kind_of(one) or speed_of(one, "0") for one in names]
    first = next((i for i, kind in enumerate(kinds) if kind), len(names))
    several = [i for i, is_loose in enumerate(are_loose) if is_loose]
    return [i for i, kind in enumerate(kinds) if kind or are_loose[i] or i < first], several


def _unread(
    found: RecordedRequest | None, cells: list[tuple[str, str]], number: int
) -> Iterator[str]:
    """Places of acceptance figures in a row that were not read: ranges, or several in a cell."""
    has_any = found is not None and (
        bool(found.given or found.rates) or found.num_accepted_draft_tokens is not None
    )
    sign = _RANGE if has_any else _BEGINS
    for name, cell in cells:
        if kind_of(name) in FIGURES and sign.match(cell) is not None:
            yield f"line {number}: {cell}"


def _pivoted(table: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """A table with one row per figure, its name in one column and the value in another, pivoted to
    a column for each; empty for other tables."""
    names = names_of(table[0][1]) if table else []
    key, value = (
        next((i for i, one in enumerate(names) if known.fullmatch(one)), None)
        for known in (_KEY_COLUMN, _VALUE_COLUMN)
    )
    if key is None or value is None or len(names) > _MOST_CELLS:
        return []
    rows: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {}
    for number, cells in table[1:]:
        others = [i for i in range(len(names)) if i not in (key, value)]
        of = tuple(cells[i] for i in others if "time" not in names[i])
        rows.setdefault(of, (number, {}))[1][cells[key]] = cells[value]
    columns = list(dict.fromkeys(name for _, one in rows.values() for name in one))
    if not is_head(names_of(columns)) or len(columns) > _MOST_CELLS:
        return []
    return [(table[0][0], ["", *columns])] + [
        (number, [" ".join(of), *(one.get(name, "") for name in columns)])
        for of, (number, one) in rows.items()
    ]


def _figures(cell: str) -> list[str]:
    """The figures of a cell, or their names: one with another in brackets, or separated."""
    first, _, more = cell.partition(" (")
    if more[-1:] == ")" and _BETWEEN.search(more) is None:
        return [first, more[:-1]]
    return cell.split(" / ") if " / " in cell else _BETWEEN.split(cell)


def _widened(table: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """A table with a column for each of the figures in composite cells named like "rate / a.len",
    including following columns that only name another setting."""
    wide, said = list[list[str]](), list[str]()
    for name, *cells in zip(*(one for _, one in table), strict=True):
        first, *names = _figures(name)
        whose, first = parts_of(names_of([first])[0])
        names = [first, *names]
        if said and len(names) == 1 and {len(_figures(one)) for one in cells} == {len(said)}:
            whose, names = name, said
        elif len({*map(kind_of, names_of(names))} - {"by", ""}) < max(_FEW, len(names)):
            said = []
            wide.append([name, *cells])
            continue
        said = names
        rows = zip_longest(names, *map(_figures, cells), fillvalue="")
        wide += [[f"{whose} {one}".strip(), *row] for one, *row in rows][: len(names)]
    numbers = (number for number, _ in table)
    return list(zip(numbers, map(list, zip(*wide, strict=True)), strict=True))


def _parted(
    names: list[str], cells: list[str], several: list[int]
) -> Iterator[tuple[str, list[str]]]:
    """The figures of cells with one value per setting, as the column's name says in the same
    form, or from before and after: the owner, and all cells. several: columns that may have such
    cells."""
    parts = {i: _BETWEEN.split(cells[i]) for i in several if _is_several(cells[i])}
    about = [i for i in parts if kind_of(names[i]) in ACCEPTED]
    said = next(
        (
            [one.strip(" ()") for one in _BETWEEN.split(found[0])]
            for i in (*about, *parts)
            if (found := IN_NAME.search(names[i])) is not None
        ),
        ["before", "after"] if any(set("→>") & set(cells[i]) for i in parts) else [],
    )
    if not (said and about) or any(len(parts[i]) != len(said) for i in about):
        yield "", cells
        return
    for at, whose in enumerate(said):
        ones = [parts[i][at] if at < len(parts.get(i, ())) else one for i, one in enumerate(cells)]
        yield whose, ones


def _is_several(cell: str) -> bool:
    """Whether a cell has several figures, or labelled ones."""
    parts = cell.split(" / ")
    is_of_others = len(parts) > 1 and all(map(_SHARES.search, parts))
    return not is_number(cell) and (is_of_others or SEVERAL.fullmatch(cell) is not None)


def _only_grow(rows: list[tuple[int, list[str]]]) -> bool:
    """Whether no count of a table ever falls."""
    columns = zip(*(cells for _, cells in rows), strict=True)
    counts = [list(map(int, one)) for one in columns if all(map(str.isdecimal, one))]
    return all(before <= after for one in counts for before, after in pairwise(one))


def _tables(lines: list[str]) -> Iterator[list[tuple[int, list[str]]]]:
    """Consecutive lines with as many cells each: their numbers and cells."""
    table: list[tuple[int, list[str]]] = []
    for number, line in enumerate(lines, 1):
        if len(line) <= _LONGEST and _RULE.issuperset(line) and line.strip():
            continue
        if len(table) == 1 and not line.strip():
            continue
        # any text has gaps
        cells = _cells(line) if len(line) <= _LONGEST else []
        is_row = table or any(map(line.__contains__, _IN_ROWS)) or _COMMAS.search(line)
        cells = cells if is_row or (len(cells) > _FEW and is_head(names_of(cells))) else []
        is_change = "adaptive " in line and " -> " in line  # rounds without a change are missing
        may_name = ("=" in line or ": " in line) and len(line) <= _LONGEST and not is_change
        named = _NAMED.findall(line) if may_name else []
        is_named = len({name for name, _ in named}) > _FEW or (
            len(named) == _FEW
            and _BARS.search(line) is None
            and all(value[0].isdigit() for name, value in named if "acc" in name.lower())
            and is_head(names_of([name for name, _ in named]))
        )
        if is_named:  # a row that labels its cells
            names = ["", *(name for name, _ in named)]
            cells = [line[: line.find(named[0][0])].strip(), *(value for _, value in named)]
            speeds = SAID_SPEED.findall(line)
            if len(speeds) == 1 and "speed" not in map(kind_of, names_of(names)):
                names, cells = [*names, "t/s"], [*cells, *speeds]
            if table and table[0][1] != names:
                yield table
                table = []
            table = table or [(number, names)]
        elif len(table) == 1 and len(cells) == len(table[0][1]) + 1 and _GAPS.search(line):
            table = [(table[0][0], ["", *table[0][1]])]  # rows have a name, or a number
        elif table and "\t" in line and 1 < len(cells) < len(table[0][1]):
            cells += [""] * (len(table[0][1]) - len(cells))  # trailing cells are empty
        elif table and len(cells) != len(table[0][1]):
            yield table
            table = []
        if 2 <= len(cells) <= _MOST_CELLS:
            table.append((number, cells))
        is_full = len(table) == MOST_REQUESTS + 2 and is_head(names_of(table[0][1]))
        if is_full and "spec_decode_num" not in " ".join(table[0][1]):  # each row by itself
            yield table
            table = table[:1]
    yield table


def _cells(line: str) -> list[str]:
    line = line.replace("~ ", "~").replace("≈ ", "≈").replace("+/-", "±")
    line = line.replace("**", "").replace("`", "").strip(" \t\r>")
    if any(map(line.__contains__, _IN_ROWS[:3])):
        parts = _BARS.split(line.replace("||", "|") if line.startswith("||") else line)
        parts = parts[not parts[0].strip() :]
        parts = parts[: len(parts) - (not parts[-1:] or not parts[-1].strip())]
    elif _QUOTED.search(line) is not None:
        by = max(",;", key=line.count)
        parts = next(csv.reader([line], delimiter=by, skipinitialspace=True), [])
    elif line.isascii() and not any(map(f"{line},,"[:-1].__contains__, _NOT_PLAIN)):
        parts = line.split(",")
    else:
        parts = max((one.split(line) for one in (_SEMICOLONS, _GAPS, _COMMAS)), key=len)
    return [_LINK.sub(r"\1", one).strip(' \t*`"') for one in parts]


def row_of(
    columns: list[str], cells: list[str], where: str, side: str, saying: Sequence[int] | None = None
) -> RecordedRequest | None:
    """A row, None if it has none of the numbers. where: its place, if no cell names it. side: the
    owner of the figures. saying: columns that may be meaningful, None for all."""
    values: dict[str, str] = {}
    words: list[str] = []
    weak = ""  # may be the draft length
    saying = range(len(columns)) if saying is None else saying
    for name, cell in ((columns[i], cells[i]) for i in saying):
        kind = kind_of(name) or speed_of(name, "0" if is_number(cell) else _DIGITS.sub("0", cell))
        if not kind and not values:
            shown = f"run {cell}" if name == "run" else cell
            letter = r"[^\W\dx]|x\w" if words else r"\w"  # not a speedup
            words += [shown] if re.search(letter, shown) else []
        elif not kind:
            continue
        elif kind == "speed" or kind not in values or (kind, weak) == ("drafted", "draft"):
            values[kind], weak = cell, name  # the last of several speeds is the newest
    engine = _engine_of(" ".join([*columns, side]))
    place = ", ".join(filter(None, [" ".join(words), side]))[:200] or where
    found = RecordedRequest(engine, place, stop=values.get("stop", "") or "end")
    found.record = dict(zip(columns, cells, strict=True))
    numbers = {
        kind: one
        for kind, v in values.items()
        if (one := NUMBER.match(v)) is not None and not _is_several(v)
    }
    if (one := numbers.get("by")) is not None and one.end() == len(values["by"]):
        numbers.setdefault("rate", one)
    if (one := numbers.get("accepted")) is not None and (
        one[2] or ("." in one[1] and float(one[1]) <= 1)
    ):
        numbers.setdefault("rate", one)
    pair = _PAIR.match(values.get("accepted", ""))
    drafts = _DRAFTS.search(" ".join(cells[i] for i in saying))
    made = making_rates(values.get("rate", "")) if "accepted" not in values else ()
    try:
        counts = {
            kind: whole(one[1], COUNT)
            for kind, one in numbers.items()
            if kind in _COUNTS and one[1].isdigit() and not one[2]
        }
        if pair is not None:
            counts["accepted"], counts["drafted"] = (whole(one, COUNT) for one in pair.groups())
        elif len(made) == 1:
            ((counts["accepted"], counts["drafted"]),) = made
        elif drafts is not None:
            counts |= zip(_COUNTS, (whole(one, COUNT) for one in drafts.groups()), strict=False)
        elif {"accepted", "rejected"} <= counts.keys() and "drafted" not in counts:
            counts["drafted"] = counts["accepted"] + counts["rejected"]
            found.derived = ("num_draft_tokens", "draft_n")
        found.num_spec_steps, accepted, drafted = map(counts.get, _COUNTS[:3])
        found.num_accepted_draft_tokens, found.num_draft_tokens = accepted, drafted
        if "tokens" in counts:
            found.timings["predicted_n"] = counts["tokens"]
        for kind, name, scale in _SPEEDS:
            if kind in numbers:
                found.timings[name] = scale * real(numbers[kind][1], LONGEST_PART_MS)
    except OutOfRangeError as error:
        found.check(False, (place,), str(error))
        return found
    part = numbers.get("accepted")  # more than a share
    has_part = part is not None and not part[2] and "." in part[1] and float(part[1]) > 1
    if has_part or ("draft" in columns and (accepted is None or accepted > (drafted or 0))):
        found.num_draft_tokens = None  # a setting of the draft length
    found.check_counts({"num_draft_tokens": "drafted", "num_accepted_draft_tokens": "accepted"})
    _take_shares(found, values, numbers, columns)
    has_no_counts = accepted is None and "tokens" not in counts
    if has_no_counts and found.num_draft_tokens is None:
        found.num_spec_steps = None  # also a setting
    has_shares = bool(found.given or found.rates)
    is_alone = numbers.keys() == {"accepted"} and pair is None  # of how many?
    is_empty = (has_no_counts or is_alone) and not has_shares and "speed" not in numbers
    return None if is_empty else found


@lru_cache(1 << 8)
def _engine_of(said: str) -> str:
    return next((engine for sign, engine in NAMES["engines"]["columns"] if sign in said), "")


@lru_cache(1 << 8)
def _by_index(columns: tuple[str, ...]) -> list[str]:
    """Columns named by draft index, as far as they are consecutive."""
    found = {int(one[1]): name for name in columns if (one := _AT_INDEX.fullmatch(name))}
    first = min(found, default=0)
    names = [found[at] for at in range(first, first + len(found)) if at in found]
    return names if first < _FEW and len(names) == len(found) else []


def _take_shares(
    found: RecordedRequest,
    values: dict[str, str],
    numbers: dict[str, re.Match[str]],
    columns: list[str],
) -> None:
    """Rates and lengths without counts; by position only if all drafts have one length, because
    shares may be of the drafts that reached a position."""
    accepted, drafted = found.num_accepted_draft_tokens, found.num_draft_tokens
    steps, given = found.num_spec_steps, found.given
    if (rate := numbers.get("rate")) is not None:
        name = next((one for one in columns if kind_of(one) == "rate"), "")
        value, within = share_of(rate[1] + "%" * ("%" in rate[2] + name))
        tokens = found.timings.get("predicted_n")
        if accepted is None or not drafted:
            given |= {"draft_acceptance_rate": value} if value <= 1 else {}
        elif _PLAIN_RATE(name) and not (ALL.fullmatch(found.place) or "±" in values["rate"]):
            is_of_output = tokens and accepted and abs(value - accepted / tokens) <= within
            counts = accepted, None if is_of_output else drafted, "accepted", "drafted"
            found.check_ratio(name, value, *counts, within=within)
    if (more := numbers.get("per round")) is not None and "mean" not in numbers:
        given["mean_acceptance_length"] = 1 + float(more[1])
    if (mean := numbers.get("mean")) is not None and (accepted is None or not steps):
        given["mean_acceptance_length"] = float(mean[1])
    length = given.get("mean_acceptance_length")
    if length == 0:
        given.clear()  # of no steps
    rates, digits = _shares(found.record, values, columns)
    n, rest = divmod(drafted or 0, len(rates) or 1)
    whole_mean = 1 + (accepted or 0) / n if n and not rest else 0.0
    if rates and steps is None and length and abs(whole_mean - length) < 0.006:
        # each draft has all of these tokens
        found.num_spec_steps, found.derived = n, ("num_spec_steps",)
    near = SUM_DIGITS + len(rates) * 0.5 * 10.0**-digits
    if rates and found.num_spec_steps and drafted == found.num_spec_steps * len(rates):
        found.set_rates(rates, digits)
    elif rates and ("by" not in values or abs(1 + sum(rates) - (length or 0)) < near):
        # one cell may hold more
        found.rates, found.num_spec_tokens = rates, len(rates)


def _shares(
    cells: dict[str, str], values: dict[str, str], columns: list[str]
) -> tuple[list[float], int]:
    """Shares by draft index, in separate columns or in one cell, and their number of digits; none
    if one is impossible."""
    by, places = values.get("by", ""), _by_index((*columns,))
    said = by or ("" if places else values.get("rate", ""))
    parts = _SHARES.findall(said) if said else [cells[one] for one in places]
    known = [one[1] for one in map(NUMBER.fullmatch, parts) if one is not None]
    is_one = not by and not places and (len(parts) <= _FEW or _ARE_SHARES(said) is None)
    if is_one or len(known) < len(parts) or "..." in said:
        return [], 0
    written, is_over = " ".join((said, *parts, *places)), max(map(float, known), default=0) > 1
    if is_over and not any(map(written.__contains__, ("%", "rate", "."))):
        return [], 0  # possibly counts
    is_percent = "%" in written or is_over
    most = 100.0 if is_percent else 1.0
    rates = [float(one) / most for one in known]
    digits = min((len(one.partition(".")[2]) for one in known), default=0)
    return ([], 0) if max(rates, default=0.0) > 1 else (rates, digits + (2 if most > 1 else 0))
