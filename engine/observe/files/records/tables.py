"""Tables about speculative decoding, as programs print them and people write them: a row of names,
then a row for each setting, category or attempt, or the same by columns; also of HTML and CSV.

llama.cpp's speed_bench.py and speed_bench_compare.py and ik_llama.cpp's llama-spec-bench have such;
most have rates alone. Rows of all others together are left out. A text without tables may have
lines that say a rate next to the counts which make it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise, permutations, product

from engine.foreign import (
    COUNT,
    LONGEST_DRAFT,
    LONGEST_PART_MS,
    OutOfRangeError,
    is_real,
    is_whole,
    real,
    whole,
)
from engine.observe.files.records.document import Node, of_same_request
from engine.observe.files.records.readers import LLAMA_SERVER, RecordShape
from engine.observe.files.records.request import RecordedRequest

_NAMED = re.compile(r"([A-Za-z][\w/#%]{0,30})\s?=\s{0,9}([^\s,;=]{1,40})")
_FEW = 2
_AVERAGE = r"(?:mean |avg |average )?"
_UNIT = r"(?: ?\(tok(?:en)?s?(?:/.{1,12})?\))?"
_IN_ROWS = ("|", "│", "┃", "\t", "accept_rate")
_BARS = re.compile(r"[|│┃]")
_GAPS = re.compile(r"\s{2,}|\t")
_COMMAS, _SEMICOLONS = re.compile(r",(?=[^\s,])"), re.compile(r";(?=\S|$)")
_NEXT_CELL = re.compile(r"</t[dh]>\s{0,200}<t[dh][^>]{0,200}>")
_ROW_END, _TAG = re.compile(r"</tr>\s{0,200}"), re.compile(r"<[^>]{1,200}>")
_RULE = set(" -|:+=").union(map(chr, range(0x2500, 0x2580)))
_MOST_CELLS = 64
_LONGEST, _LONGEST_NAME, _LONGEST_NUMBER = 2000, 80, 32
_COUNT_OF = re.compile(
    r"^(?:\w{1,20}:)?(?:(?:#|n|num|number of|mtp|spec(?: decode)?|total|draft(?= num)) ?\b)+"
    r"(?=accept|draft(?:ed|s| tok| gen| acc|$)|pred|proposed|rejected|generated)|^total (?=draft)"
    r"| (?:total|count)$"
)
"""What a name has before what it counts."""
_PATH = re.compile(r"^(?:\w{1,40}/){2,9}(?=\w{0,40}(?:acc|draft|spec))")
"""What metrics of a training run have before their names."""
_KEY = re.compile(rb'"([A-Za-z][\w.:/]{2,80})"\s*:\s*\d')
_OF_RATE = re.compile(r"(?i)acc.*(?:rate|ratio|len)")
_AT_INDEX = re.compile(r"(?:acc(?:ept(?:ance)?)? )?(?:@ ?)?pos(?:ition)?[ .@#]?(\d{1,3})(?: ?%)?")
_BY_INDEX = re.compile(r"(?i).{0,40}acc.{0,40}per_?pos(?:ition)?")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
_COUNTED = (
    ("rounds", "num_spec_steps"),
    ("drafted", "num_draft_tokens"),
    ("accepted", "num_accepted_draft_tokens"),
)
_COLUMNS = (
    ("rate", r"(?:.{0,24}[ /])?(?:accept(?:ance)?|acc|draft) ?(?:rate|ratio|%)(?: ?\(%\))?|rate"),
    ("rate", r"(?:.{0,24} )?acceptance(?: ?\(%\))?|.{0,9}接受率.{0,9}|akzeptanz(?:rate)?.{0,4}"),
    ("mean", rf"(?:.{{0,24}}/)?{_AVERAGE}(?:accept(?:ance|ed)?|acc|a)[ .]len(?:gth)?{_UNIT}"),
    ("mean", r"al|.{0,9}接受长度|mean len(?:gth)?"),
    ("mean", r"(?:avg |decoded )?tok(?:en)?s?/(?:cycle|round|step|iter|fwd).{0,8}"),
    ("accepted", r"(?:draft )?accepted(?: (?:draft |prediction )?tokens)?|draft n accepted"),
    ("accepted", r"#?acc(?:ept)?(?: tokens)?"),
    ("rejected", r"(?:draft )?rejected(?: (?:draft |prediction )?tokens)?"),
    ("accepted", r"(?:angenommen|akzeptiert)(?:e token)?|accept[eé]s"),
    ("drafted", r"(?:drafted|proposed)(?: tokens)?|draft(?: tokens| n| generated)?|#?gen tokens"),
    ("drafted", r"(?:entworfen|vorgeschlagen)(?:e token)?|propos[eé]s"),
    ("rounds", r"rounds|(?:verify )?steps|drafts|num drafts"),
    ("tokens", r"(?:(?:generated|output|predicted) )?tokens?|pred(?:icted)?(?: n)?"),
    ("seconds", r"time ?\(s\)"),
    ("stop", r"stop"),
    ("by", r"pos accept|.{0,24}per[- ]pos(?:ition)?.{0,24}"),
    ("speed", r"(?!.{0,40}(?:prompt|prefill|pp )).{0,40}(?:t(?:ok(?:en)?s?|k)?[/\\]s|tps).{0,40}"),
)
"""Names of columns, in lower case and with spaces."""
_NUMBER = re.compile(r"[~≈]?(\d{1,12}(?:\.\d{1,20})?) ?(%?)(?![\d.]|\s?[–—]|-\d)")
_SHARE = re.compile(r"(?<![\d.])(\d{1,3}\.\d{1,6}|\d{2,3}(?= ?%)) ?(%?)(?![\d.])")
_COUNT = re.compile(r"(?<![\d.])\d{1,9}(?!\d|\.\d| ?%)")
_FEWEST, _LONGEST_SAID, _MOST_COUNTS = 20, 300, 12
"""Drafted tokens, below which other numbers make a rate by chance; characters and counts of a
line."""
_SHARES = re.compile(r"(?<![\d.])(\d{1,3}\.\d{1,3})(?![\d.])")
_PAIR = re.compile(r"(\d{1,20}) ?/ ?(\d{1,20})(?: ?\([^)]{0,40}\))?$")
_DRAFTS = re.compile(r"drafts \d{1,20}/(\d{1,20}), tokens (\d{1,20})/(\d{1,20})")
"""Drafts, tokens accepted and drafted, as ik_llama.cpp shows them in one cell."""
_OF_ALL = re.compile(r" ?\((?:avg|average|mean)\)$| (?:mean ?)?[/±] ?std(?:dev)?$")
_ALL = re.compile(r"(?:.{0,60} )?(?:overall|total|average|avg|mean):?", re.IGNORECASE)
_SPREAD = re.compile(
    r"(?:.{0,60} )?(?:min|max|std(?:dev)?|median|p\d\d?(?:\.\d)?):?", re.IGNORECASE
)
"""Of several requests, but neither one of them nor all."""
_NUMBERED = re.compile(r"(?i)p[02-46-9]:?")
"""A prompt by its number, no percentile."""
_WORDED = re.compile(
    r"(?i)(\d{1,9}) accepted ?/ ?(\d{1,9}) (?:generated|draft|proposed)"
    r"|(\d{1,9}) (?:draft(?:ed)?|proposed) tokens?,? (?:and )?(\d{1,9}) (?:were )?accepted"
    r"|(\d{1,9}) (?:of|out of) (\d{1,9}) (?:draft(?:ed)? )?(?:tokens )?(?:were )?accepted"
)
"""Counts that are named."""
_SAID_RATE = re.compile(
    r"(?i)(?<![a-z])accept(?:ance|ed)?(?:[ _]rate|[ _]ratio)?(?: is| was| of| at)?[ \t:=~≈(]{0,4}"
    r"(\d{1,3}(?:\.\d{1,6})? ?%|0\.\d{1,6}|1\.0{1,6})(?![\d.–-])"
)
_OF_TWO = re.compile(r"\d ?/ ?\d")
"""Counts, which do not make the rate."""
_SAID_SPEED = re.compile(r"(?<![\d.])(\d{1,6}(?:\.\d{1,6})?) ?t(?:ok(?:en)?s?)?/s\b")
_ENGINES = (
    *(("a.len", "ik_llama.cpp"), ("pred t/s", "llama-server"), ("ik llama", "ik_llama.cpp")),
    *(("vllm", "vllm"), ("sglang", "sglang"), ("llama.cpp", "llama-server")),
    ("llama-server", "llama-server"),
)
"""By parts of the names of columns."""
_ABOUT = re.compile(r"acc|draft|接受|^al$|^a\.len$|angenommen|akzept")
_ACCEPTED = ("rate", "mean", "accepted")
_SAYS_WHAT = re.compile(
    r"acc|draft|tok|rate|mean|avg|average|len|pos|\bper\b|pred|gen|spec|step|total|[/%]"
)
"""What is part of a figure's name, and not that of an engine or a setting."""
_DECIMAL_COMMA = re.compile(
    r"[~≈]?(?:0|\d{1,3}(?:\.\d{3})*+|\d+),(?:\d{1,2}|\d{4,})(?!\d).{0,9}|0,\d+"
)
_OTHER_WAY = str.maketrans(",.", ".,")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[,'’ \xa0\u2009\u202f]\d{3})+(?![\d,])")


def counted_shape(data: bytes) -> RecordShape | None:
    """The records of a JSON text, or its beginning, whose objects have counts of accepted and of
    drafted or rejected tokens, or of drafts, or else a rate or a mean length, under names that say
    so; None if there are none."""
    keys = dict.fromkeys(one.decode() for one in _KEY.findall(data))
    kinds = dict(zip(keys, map(_kind, _names(list(keys))), strict=True))
    accepted = [key for key, kind in kinds.items() if kind == "accepted"]
    others = [
        *(key for key, kind in kinds.items() if kind in ("drafted", "rejected")),
        *(key for key in keys if key.endswith("drafts")),
    ]
    signs: tuple[tuple[str, ...], ...] = tuple(product(accepted, others))
    signs = signs or tuple(
        (key,) for key, kind in kinds.items() if kind in ("rate", "mean") and _OF_RATE.search(key)
    )
    own = LLAMA_SERVER.without
    shape = RecordShape("counts", "counts", signs, _read_counted, own, request_of=_counted_of)
    return shape if shape.may_be_in(data) else None


def _counted_of(node: Node) -> Hashable:
    if not any("spec_decode_num" in key for key in node.values):
        return of_same_request(node)
    return tuple(key for key in node.path if not key.isdigit())  # a server's, which only grow


def _read_counted(node: Node) -> RecordedRequest:
    """An object as a row of a table, of which it has names and cells."""
    plain = {
        key: str(value)
        for key, value in node.values.items()
        if isinstance(value, int | float | str) and len(str(value)) <= _LONGEST_NAME
    }
    node.taken.setdefault(id(node.values), set()).update(plain)
    found = _row(_names(list(plain)), list(plain.values()), 0, "")
    found = found or RecordedRequest("", node.place)
    for key in filter(_BY_INDEX.fullmatch, node.values):
        shares = node.values[key]
        if not isinstance(shares, list) or not 0 < len(shares) <= LONGEST_DRAFT:
            continue
        if all(is_whole(one, COUNT) for one in shares) and sum(shares) == (
            found.num_accepted_draft_tokens
        ):
            found.per_pos = node.fields().counts(key)
        elif "rate" in key and all(is_real(one, 1.0) for one in shares):
            found.rates, found.num_spec_tokens = node.fields().values[key], len(shares)
            node.taken[id(node.values)].add(key)
    return found


def has_table(text: str) -> bool:
    """Whether a text has such a table, or such a line."""
    return bool(read_tables(text))


def read_tables(text: str) -> list[RecordedRequest]:
    """The rows of such tables. Numbers that cannot be are left out."""
    found = list(_requests(text)) or list(_said(text)) or list(_said_rates(text))
    is_numbered = any(map(_NUMBERED.fullmatch, (one.place for one in found)))
    found = [one for one in found if is_numbered or _SPREAD.fullmatch(one.place) is None]
    return [one for one in found if _ALL.fullmatch(one.place) is None] or found


def _requests(text: str) -> Iterator[RecordedRequest]:
    for table in _tables(text):
        heads = [at for at, (_, cells) in enumerate(table) if _is_head(_names(cells))]
        if not heads and _is_head(_names([cells[0] for _, cells in table])):
            number = table[0][0]  # its names are in the first column
            columns = zip(*(cells for _, cells in table), strict=True)
            table, heads = [(number, list(cells)) for cells in columns], [0]
        for begin, end in pairwise([*heads, len(table)]):
            sides = _sides(*(_names(table[at][1]) for at in (begin, max(begin - 1, 0))))
            every = [one for _, row in table for one in row]
            has_comma = any(map(_DECIMAL_COMMA.fullmatch, every)) and not any(
                _DECIMAL_COMMA.fullmatch(one.translate(_OTHER_WAY)) for one in every
            )
            rows = table[begin + 1 : end]
            if any("spec_decode_num" in one for one in table[begin][1]) and _only_grow(rows):
                rows = rows[-1:]  # counters of a server, which the newest row has all of
            for number, cells in rows:
                plain = [_plain_number(one, has_comma) for one in cells]
                for side, places, names in sides:
                    mine = [plain[i] for i in places]
                    if (found := _row(names, mine, number, side)) is not None:
                        yield found


def _only_grow(rows: list[tuple[int, list[str]]]) -> bool:
    """Whether no count of a table ever falls."""
    columns = zip(*(cells for _, cells in rows), strict=True)
    counts = [list(map(int, one)) for one in columns if all(map(str.isdecimal, one))]
    return all(before <= after for one in counts for before, after in pairwise(one))


def _said(text: str) -> Iterator[RecordedRequest]:
    """The lines that say two counts: those that make the rate of acceptance next to them, or, in
    lines without one, those that words name."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _LONGEST_SAID or "accept" not in line.lower():
            continue
        pairs = _making_rates(line)
        if not pairs and not _SAID_RATE.search(line):
            named = [found.groups("") for found in _WORDED.finditer(_without_signs(line))]
            both = [(a + b + c, d + e + f) for a, d, e, b, c, f in named]
            pairs = {(int(n), int(of)) for n, of in both if len(both) == 1 and int(n) <= int(of)}
        if len(pairs) == 1:  # so it is sure what they are
            found = RecordedRequest("", f"line {number}", stop="end")
            found.num_accepted_draft_tokens, found.num_draft_tokens = pairs.pop()
            yield found


def _making_rates(line: str) -> set[tuple[int, int]]:
    """The counts of accepted and of drafted tokens that make a rate next to them."""
    counts = {int(one) for one in _COUNT.findall(_without_signs(line))}
    return {
        (accepted, drafted)
        for share, percent in _SHARE.findall(line)
        for accepted, drafted in permutations(counts if len(counts) <= _MOST_COUNTS else (), 2)
        if drafted >= _FEWEST
        and abs(accepted / drafted * (scale := 100 if percent else 1) - float(share))
        <= 0.5001 * 10.0 ** -len(share.partition(".")[2])
        and accepted <= drafted
        and (scale > 1 or float(share) <= 1)
    }


def _without_signs(text: str) -> str:
    """A text whose numbers have no signs between thousands."""
    return _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), text)


def _said_rates(text: str) -> Iterator[RecordedRequest]:
    """The lines that say one rate of acceptance, without the counts that make it."""
    for number, line in enumerate(text.splitlines(), 1):
        shares = _SAID_RATE.findall(line) if len(line) <= _LONGEST_SAID else []
        if len(shares) != 1 or line.lower().count("accept") > 1 or _OF_TWO.search(line):
            continue
        share = float(shares[0].rstrip(" %")) / (100 if "%" in shares[0] else 1)
        if share <= 1:
            found = RecordedRequest("", f"line {number}", stop="end")
            found.given["draft_acceptance_rate"] = share
            if len(speeds := _SAID_SPEED.findall(line)) == 1:
                found.timings["predicted_per_second"] = float(speeds[0])
            yield found


def _sides(names: list[str], above: list[str]) -> list[tuple[str, list[int], list[str]]]:
    """The engines or settings whose figures stand side by side, by what their names add to those
    of figures, or by what is above them: each with places and names of its columns and of those
    in common."""
    parts = [_parts(one) for one in names]
    if not any(side for side, _ in parts):
        above = [next(filter(None, above[at::-1]), "") for at in range(len(above))]
        parts = [
            (a if names.count(one) > 1 else "", one) for a, one in zip(above, names, strict=True)
        ]
    found = dict.fromkeys(side for side, one in parts if side and _kind(one) in _ACCEPTED)
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


@lru_cache(1 << 12)
def _parts(name: str) -> tuple[str, str]:
    """Whose a figure is, empty if its name does not say so, and the name of the figure."""
    words = name[:_LONGEST_NAME].replace("(", "").replace(")", "").split()
    for at in range(len(words) - 1, 0, -1):
        for side, rest in ((words[:at], words[at:]), (words[-at:], words[:-at])):
            if _kind(" ".join(rest)) and not any(map(_SAYS_WHAT.search, side)):
                return " ".join(side), " ".join(rest)
    return "", name


def _plain_number(cell: str, has_comma: bool) -> str:
    """A cell whose numbers have neither signs between thousands nor a comma for a point."""
    if not cell.lstrip("~≈")[:1].isdigit() or len(cell) > _LONGEST_NUMBER:
        return cell
    cell = cell.translate(_OTHER_WAY) if has_comma or _DECIMAL_COMMA.fullmatch(cell) else cell
    return _without_signs(cell)


def _tables(text: str) -> Iterator[list[tuple[int, list[str]]]]:
    """Lines that follow each other and have as many cells: their numbers, and their cells."""
    if "<td" in text:
        text = _TAG.sub(" ", _ROW_END.sub("\n", _NEXT_CELL.sub("|", text)))
        text = "\n".join(filter(str.strip, text.split("\n")))
    table: list[tuple[int, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) <= _LONGEST and set(line) <= _RULE and line.strip():
            continue
        if len(table) == 1 and not line.strip():
            continue
        # gaps alone are in any text
        cells = _cells(line) if len(line) <= _LONGEST else []
        is_row = table or any(map(line.__contains__, _IN_ROWS)) or _COMMAS.search(line)
        cells = cells if is_row or (len(cells) > _FEW and _is_head(_names(cells))) else []
        named = _NAMED.findall(line) if len(line) <= _LONGEST else []
        is_named = len({name for name, _ in named}) > _FEW or (
            len(named) == _FEW
            and _BARS.search(line) is None
            and all(value[0].isdigit() for name, value in named if "acc" in name.lower())
            and _is_head(_names([name for name, _ in named]))
        )
        if is_named:  # a row that names its cells
            names = ["", *(name for name, _ in named)]
            cells = [line[: line.find(named[0][0])].strip(), *(value for _, value in named)]
            speeds = _SAID_SPEED.findall(line)
            if len(speeds) == 1 and "speed" not in map(_kind, _names(names)):
                names, cells = [*names, "t/s"], [*cells, *speeds]
            if table and table[0][1] != names:
                yield table
                table = []
            table = table or [(number, names)]
        elif table and len(cells) != len(table[0][1]):
            yield table
            table = []
        if 2 <= len(cells) <= _MOST_CELLS:
            table.append((number, cells))
    yield table


def _cells(line: str) -> list[str]:
    line = line.strip(" \t\r>")
    if _BARS.search(line) is not None:
        parts = _BARS.split(line)
        parts = parts[not parts[0].strip() :]
        parts = parts[: len(parts) - (not parts[-1:] or not parts[-1].strip())]
    else:
        parts = max((one.split(line) for one in (_SEMICOLONS, _GAPS, _COMMAS)), key=len)
    return [one.strip(' \t*`"') for one in parts]


def _names(cells: list[str]) -> list[str]:
    plain = (_CAMEL.sub(" ", _PATH.sub("", one)).lower().replace("_", " ") for one in cells)
    return [_COUNT_OF.sub("", _OF_ALL.sub("", one)) for one in plain]


def _is_head(names: list[str]) -> bool:
    """Whether cells name what is accepted."""
    parts = [one for one in names if _ABOUT.search(one)]
    kinds = [one for one in parts if _kind(one) in _ACCEPTED or _kind(_parts(one)[1]) in _ACCEPTED]
    return bool(kinds) and not any(map(_NUMBER.fullmatch, names))


@lru_cache(1 << 12)
def _kind(name: str) -> str:
    """What a column has, by its name; "" for what is not read."""
    return next((kind for kind, known in _COLUMNS if re.fullmatch(known, name)), "")


def _row(columns: list[str], cells: list[str], number: int, side: str) -> RecordedRequest | None:
    """A row, None if it has none of the numbers. side: whose figures they are."""
    values: dict[str, str] = {}
    words: list[str] = []
    weak = ""  # may be how far a draft goes
    for name, cell in zip(columns, cells, strict=True):
        # what is a speed may be said by its unit
        if not (kind := _kind(name) or ("speed" if _kind(f"{name} {cell}") == "speed" else "")):
            shown = f"run {cell}" if name == "run" else cell
            is_more = not any(words) or re.search(r"[^\W\d]", shown)
            words += [shown] if is_more and not values else []
        elif kind == "speed" or kind not in values or (kind, weak) == ("drafted", "draft"):
            values[kind], weak = cell, name  # of several speeds the last is the newest
    around = " ".join([*columns, side])
    engine = next((engine for sign, engine in _ENGINES if sign in around), "")
    words = list(filter(None, words))
    place = ", ".join(filter(None, [" ".join(words), side]))[:200] or f"line {number}"
    found = RecordedRequest(engine, place, stop=values.get("stop", "") or "end")
    found.record = dict(zip(columns, cells, strict=True))
    numbers = {kind: one for kind, v in values.items() if (one := _NUMBER.match(v)) is not None}
    if (one := numbers.get("accepted")) is not None and (
        one[2] or ("." in one[1] and float(one[1]) <= 1)
    ):
        numbers.setdefault("rate", one)
    pair, drafts = _PAIR.match(values.get("accepted", "")), _DRAFTS.search(" ".join(cells))
    made = _making_rates(values.get("rate", "")) if "accepted" not in values else ()
    try:
        for kind, field in _COUNTED:
            if kind in numbers and numbers[kind][1].isdigit() and not numbers[kind][2]:
                setattr(found, field, whole(numbers[kind][1], COUNT))
        if pair is not None:
            found.num_accepted_draft_tokens, found.num_draft_tokens = (
                whole(one, COUNT) for one in pair.groups()
            )
        elif len(made) == 1:
            ((found.num_accepted_draft_tokens, found.num_draft_tokens),) = made
        elif "rejected" in numbers and "accepted" in numbers and "drafted" not in numbers:
            parts = [whole(numbers[name][1], COUNT) for name in ("accepted", "rejected")]
            found.num_draft_tokens, found.derived = sum(parts), ("num_draft_tokens", "draft_n")
        elif drafts is not None:
            found.num_spec_steps, found.num_accepted_draft_tokens, found.num_draft_tokens = (
                whole(one, COUNT) for one in drafts.groups()
            )
        if "tokens" in numbers and numbers["tokens"][1].isdigit():
            found.timings["predicted_n"] = whole(numbers["tokens"][1], COUNT)
        if "seconds" in numbers:
            found.timings["predicted_ms"] = 1e3 * real(numbers["seconds"][1], LONGEST_PART_MS)
        if "speed" in numbers:
            found.timings["predicted_per_second"] = real(numbers["speed"][1], LONGEST_PART_MS)
    except OutOfRangeError as error:
        found.check(False, (place,), str(error))
        return found
    n = found.num_accepted_draft_tokens
    if "draft" in columns and (n is None or n > (found.num_draft_tokens or 0)):
        found.num_draft_tokens = None  # a setting, of how far a draft goes
    found.check_counts({"num_draft_tokens": "drafted", "num_accepted_draft_tokens": "accepted"})
    _take_shares(found, values, numbers, columns)
    counts = found.num_accepted_draft_tokens, found.timings.get("predicted_n")
    if counts == (None, None) and found.num_draft_tokens is None:
        found.num_spec_steps = None  # a setting as well
    is_empty = counts == (None, None) and not found.given and "speed" not in numbers
    return None if is_empty else found


def _take_shares(
    found: RecordedRequest,
    values: dict[str, str],
    numbers: dict[str, re.Match[str]],
    columns: list[str],
) -> None:
    """Rates and lengths where no counts give them; by position only if all drafts are of one
    length, as the shares may be of the drafts that went so far."""
    has_counts = found.num_accepted_draft_tokens is not None
    if (rate := numbers.get("rate")) is not None and not (has_counts and found.num_draft_tokens):
        value = float(rate[1])
        name = next((one for one in columns if _kind(one) == "rate"), "")
        value /= 100 if rate[2] or "%" in name or value > 1 else 1
        if value <= 1:
            found.given["draft_acceptance_rate"] = value
    steps = found.num_spec_steps
    if (mean := numbers.get("mean")) is not None and not (has_counts and steps):
        found.given["mean_acceptance_length"] = float(mean[1])
    by = values.get("by", "") or _joined(columns, found.record)
    rates = [float(one) / (100 if "%" in by else 1) for one in _SHARES.findall(by)]
    is_even = steps is not None and found.num_draft_tokens == steps * len(rates)
    if rates and "..." not in by and is_even and max(rates) <= 1:
        found.set_rates(rates)
    elif rates and "by" not in values and max(rates) <= 1:
        found.rates, found.num_spec_tokens = rates, len(rates)


def _joined(columns: list[str], cells: Mapping[str, str]) -> str:
    """The shares of columns that are named by the index in the draft, as far as they follow each
    other."""
    found = {int(one[1]): name for name in columns if (one := _AT_INDEX.fullmatch(name))}
    first = min(found, default=0)
    rows = [cells[found[at]] for at in range(first, first + len(found)) if at in found]
    return ", ".join(rows) if first < _FEW and len(rows) == len(found) else ""
