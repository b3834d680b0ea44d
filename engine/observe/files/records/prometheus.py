"""Prometheus counters of vLLM, of llama-server and LMDeploy, which use equal names, of
TensorRT-LLM, SGLang, rapid-mlx and TGI.

Consecutive scrapes give the work between them; a single one gives the work since the server's
start.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from engine.errors import TraceFileError, check_most
from engine.foreign import LARGEST, LONGEST_DRAFT, is_real
from engine.observe.files.records.column_names import NAMES
from engine.observe.files.records.document import MOST_BYTES, LeftOut, nodes, read_documents
from engine.observe.files.records.request import RecordedRequest
from engine.observe.rounds.counters import LONGEST_LINE, longest_line
from engine.observe.rounds.log_lines import is_newest_first

_KNOWN = NAMES["series"]
_COUNTERS, _GAUGES = _KNOWN["names"], _KNOWN["gauges"]
_PER_POS = "num_accepted_tokens_per_pos"
_OUR_NAMES = {field: name for name, field in _COUNTERS.items()} | {"per_pos": _PER_POS}
_EMITTED, _STEPS, _AT_MOST, _REQUESTS = "emitted", "steps", "at_most", "requests"
"""The last three are TGI's: for each step of a request, including its prompt's, a histogram has the
accepted tokens; drafted ones are not counted."""
_SERIES = re.compile(
    rf"(vllm|llamacpp|lmdeploy):spec_decode_({'|'.join((*_COUNTERS, _PER_POS))})(?:_total)?"
)
_SIGN = re.compile(f"(?m)^(?:\\| ?)?(?:{'|'.join(_KNOWN['signs'])})[ {{]".encode())
_PARTS = b":spec_", b"mlx_spec_", b"trtllm_spec_", b"llamacpp:", b"tgi_request", b"maxserve"
"""Each sign contains one of these."""
_QUERIED = re.compile(rb'"metric"\s*:\s*\{([^{}]{1,4000})\}\s*,\s*"values?"\s*:\s*\[([^{}]*+)\}')
"""A series in a reply to a query, or of VictoriaMetrics: its labels, and the values."""
_AFTER_NEWEST = b'"], \t\r\n'
_NEWEST = re.compile(rb"(?<![\d.e+])[\d.e+]{1,40}\Z")
_PRINTED = re.compile(
    rb"\b[A-Z]\w{3,20}\(name='([\w:]{1,200})', labels=\{([^{}]{0,4000})\},"
    rb" values?=\[?([\d.e+, ]{1,8192})"
)
"""A counter, or a list by position, as Python prints the results of vLLM's `get_metrics`."""
_PAIR = re.compile(rb"'(\w{1,80})': '([^'\"\n]{0,400})'")
_POINTS = re.compile(rb'"name"\s*:\s*"(?=[^"]{1,200}(?:spec_decode|speculative))[^"]{1,200}"')
"""Name of a series in OpenTelemetry exports."""
_BELOW = re.compile(
    rb"(?m)^(\w{1,40}:spec_[^\n]{1,4000}[}\w])[ \t\r]{0,9}\n\s{0,9}([\d.e+]{1,40}\r?$)"
)
"""A series whose value is on the next line."""
_CELL = re.compile(
    rb'[,;\t"\n|](?:(?:vllm|llamacpp|sglang|lmdeploy):(?:spec|draft)_|rapid_mlx_spec_|trtllm_spec_)'
)
"""A series in a table, as exported by Grafana and others."""
_SHOWN = re.compile(r"(?m)[ }](\d[\d.]{0,9} (?:[kKMGB]|Mil|Bil))$")
"""A number with its unit, as displayed or exported by Grafana."""
_SERIES_NAME = re.compile(
    r"\s*(?:(?:vllm|llamacpp|sglang|lmdeploy):|rapid_mlx_|trtllm_)[^,;|]{1,4000}"
)
_VALUE = re.compile(r"(?i).{0,40}value.{0,20}|last.{0,20}")
_TIME = re.compile(r"(?i).{0,20}time.{0,20}|date")
"""Columns of a table with one row per value."""
_NAME = re.compile(rb'"__name__"\s*:\s*"([^"]{1,200})",?')
_LABEL = re.compile(rb'"(\w{1,80})"\s*:\s*')
_BEFORE = re.compile(
    rb"(?m)^(?!#|(?:vllm|llamacpp|sglang|lmdeploy):)[^\n]{1,200}?(?=(?:vllm|llamacpp|sglang|lmdeploy)"
    rb":\w{1,200}(?:\{[^\n{}]{0,4000}\})? {0,9}[\d.e+]{1,40}\r?$)"
)
"""Prefixes of log collectors, quotes and `grep -n` before a sample."""
_EXACT = {"llamacpp": 10**6}
"""Largest counter printed with all digits by servers that round."""
_IS_OTHER = re.compile(
    rb"(?![\w:]{0,200}?(?:spec|draft|token))[A-Za-z_][\w:]{0,200}(?:\{[^{}]{0,4000}\})?"
).fullmatch
"""Other series, to which most samples belong."""
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
"""Lines that differ only in digits have one form, which is checked once."""
_LINE = re.compile(r"[^\n]*\S[^\n]*")
_IS_VALUE = re.compile(rb"[\d.e+]{1,40}\r?").fullmatch
_IS_BARE = re.compile(rb"\s{0,9}[\d.e+]{1,40}\r?").fullmatch
"""A line with only a value."""
_NUMBER = re.compile(r"(?m) (?<=[\w}] )(\d{1,20}(?:\.\d{1,20})?(?:e\+\d\d)?)$")
_IS_NUMBER = re.compile(r"\d{1,20}(?:\.\d{1,20})?(?:e\+?\d{1,2})?").fullmatch
_LONGEST_FORM = 1 << 16
_PART = re.compile(rb"(?s).{1,4194304}[^\n]*\n?")
_REMEDY = "Save the reply of /metrics again, once before and once after the requests."

_SAMPLE = re.compile(
    r"[`>*|\s]{0,9}([A-Za-z_]\w{0,80}[:_]\w{1,200}(?:\{.{0,4000}\})?)\s{0,9}(?:\||=>)?\s{0,9}"
    r"(?<=[\s|}])([^\s|]{1,40}(?: \d{1,20})?)(?: @\[[\d.]{1,30}\])?[\s|]{0,9}"
)
"""A sample, also as a table row or in promtool's format."""
_BEGIN = re.compile(r"[`>*|\s]{0,9}(?:(?:vllm|llamacpp|sglang|lmdeploy):|rapid_mlx_|trtllm_|tgi_)")

_Counters = dict[str, dict[int, float]]


def is_metrics(data: bytes) -> bool:
    """Whether bytes, or their beginning, are counters of speculative decoding."""
    may_be = any(map(data.__contains__, _PARTS))  # a much faster check for large files
    return may_be and (_has_points(data) or _SIGN.search(_of_query(data)) is not None)


def _has_points(data: bytes) -> bool:
    return b'"dataPoints"' in data and _POINTS.search(data) is not None


def _of_query(data: bytes) -> bytes:
    """The last values in Prometheus's reply to a query, or in another export; other samples without
    their prefixes. Unrelated series become blank lines."""
    data = _without_others(data)
    data = _BELOW.sub(rb"\1 \2", data) if _has_line(data, _IS_BARE) else data
    found = [
        b"%s{%s} %s\n" % (name[1], _LABEL.sub(rb"\1=", labels.replace(name[0], b"")), value[0])
        for labels, inside in _QUERIED.findall(data)
        for values in [inside.partition(b'"timestamps"')[0].rstrip(_AFTER_NEWEST)]
        if (name := _NAME.search(labels)) is not None and (value := _NEWEST.search(values[-41:]))
    ]
    found = found or _printed(data)
    if not found and _has_points(data):
        found = _points(data)
    if not found and _SIGN.search(data) is None and _CELL.search(data) is not None:
        found = _newest(data)
    if found:
        return b"".join(found)
    data = data.replace(b"&quot;", b'"')
    return _BEFORE.sub(b"", data) if _has_line(data, _BEFORE.match) else data


def _has_line(data: bytes, fits: Callable[[bytes], Any]) -> bool:
    return any(map(fits, set(data.translate(_ZEROS).split(b"\n"))))


def _without_others(data: bytes) -> bytes:
    """A text in which samples of other series are blank lines."""
    is_other, parts = cache(_IS_OTHER), list[bytes]()
    for part in _PART.finditer(data):  # a list of all lines would take many times the memory
        forms = part[0].translate(_ZEROS).split(b"\n")
        known = [(form, form.rpartition(b" ")) for form in set(forms)]
        others = {one for one, (series, _, value) in known if is_other(series) and _IS_VALUE(value)}
        lines = zip(part[0].split(b"\n"), forms, strict=True)
        parts.append(b"\n".join(b"" if form in others else line for line, form in lines))
    return b"".join(parts)


def _printed(data: bytes) -> list[bytes]:
    """Samples of objects printed by Python."""
    found = []
    for name, labels, said in _PRINTED.findall(data) if b"(name='" in data else ():
        pairs = [b'%s="%s"' % one for one in _PAIR.findall(labels)]
        values = said.strip(b", ").split(b", ")
        for at, value in enumerate(values):
            mine = [*pairs, b'position="%d"' % at] if name.endswith(b"_per_pos") else pairs
            found.append(b"%s{%s} %s\n" % (name, b",".join(mine), value))
    return found


def _points(data: bytes) -> list[bytes]:
    """Points of series in OpenTelemetry's JSON export: for each the newest, or the sum of
    increments. Raises TraceFileError."""
    found: dict[str, float] = {}
    for node in nodes("", read_documents(data, "the export")[0], {"dataPoints"}):
        name = str(node.owner("name").get("name"))
        name = name if ":" in name else re.sub(r"\W", "_", name)
        is_added = str(node.values.get("aggregationTemporality")).endswith(("1", "DELTA"))
        points = node.values["dataPoints"]
        for point in points if isinstance(points, list) else ():
            point = point if isinstance(point, dict) else {}
            value, labels = str(point.get("asInt", point.get("asDouble"))), point.get("attributes")
            if not re.fullmatch(r"\d{1,20}(?:\.\d{1,20})?", value):
                continue
            labels = labels if isinstance(labels, list) else []
            key = f"{name}{{{','.join(_label(one) for one in labels)}}}"
            found[key] = float(value) + (found.get(key, 0.0) if is_added else 0.0)
    return [f"{key} {value:.17g}\n".encode() for key, value in found.items()]


def _label(attribute: Any) -> str:
    """An attribute of a point, as a label."""
    pair = attribute if isinstance(attribute, dict) else {}
    value = pair.get("value")
    said = next(iter(value.values()), "") if isinstance(value, dict) else ""
    return f"{pair.get('key')}={json.dumps(str(said))}"


def _newest(data: bytes) -> list[bytes]:
    """The last value of each series in a table with a column per series, or a row per value and
    columns for name, labels and time."""
    lines = data.decode("utf-8", "replace").splitlines()
    by = max(",;\t", key=lines[0].count)
    try:
        names, *rows = csv.reader(lines, delimiter=by)
    except csv.Error:
        return []
    rows = [row for row in rows if len(row) == len(names)]
    columns = list(zip(*rows, strict=True))
    times = [one for name, one in zip(names, columns, strict=False) if _TIME.fullmatch(name)]
    if times and is_newest_first(times[0]):
        rows.reverse()
    found: dict[str, str] = {}
    whose = next((i for i, one in enumerate(columns) if all(map(_SERIES_NAME.match, one))), None)
    if whose is None:
        series = {at: name.strip() for at, name in enumerate(names) if _SERIES_NAME.match(name)}
        found = {series[at]: row[at] for row in rows for at in series if row[at]}
    else:
        numbers = [i for i, one in enumerate(columns) if all(map(_IS_NUMBER, one))]
        named = [i for i in numbers if _VALUE.fullmatch(names[i])]
        value = next(reversed(named or numbers), whose)
        others = [i for i, one in enumerate(names) if not _TIME.fullmatch(one)]
        for row in rows:
            labels = [
                f'{names[i]}="{row[i]}"' for i in others if i not in (whose, value) and row[i]
            ]
            said = row[whose].strip()
            key = said if "{" in said or not labels else f"{said}{{{','.join(labels)}}}"
            found[key] = row[value]
    return [f"{key} {value}\n".encode() for key, value in found.items()]


def only_samples(data: bytes) -> tuple[bytes, str]:
    """Counters as a person has copied them, without commands, table rules and tags around them, and
    a sentence with the number of such lines; unchanged if there are none."""
    left = LeftOut()
    data = _of_query(data)
    forms = set(data.translate(_ZEROS).decode("utf-8-sig", "replace").splitlines())
    if all(_sample(form) == form for form in forms):
        return data, ""
    lines = data.decode("utf-8-sig", "replace").splitlines()
    kept = [*map(_sample, lines)]
    for number, (line, one) in enumerate(zip(lines, kept, strict=True), start=1):
        if one is None and any(map(str.isalnum, line)):
            left.add(number, line.strip())
    return "".join(f"{one}\n" for one in kept if one is not None).encode(), left.sentence


def _sample(line: str) -> str | None:
    """The part of a line that is read, None for one that is skipped. Errors in a long line, or in
    one that starts as a sample, are reported later."""
    if not (bare := line.strip()) or bare.startswith("#"):
        return bare
    if len(line) <= LONGEST_LINE and (found := _SAMPLE.fullmatch(line)) is not None:
        return f"{found[1]} {found[2]}"
    is_cut = "{" in line and "}" not in line
    return line if (_BEGIN.match(line) and not is_cut) or len(line) > LONGEST_LINE else None


def read_metrics(data: bytes, name: str, later: bytes = b"") -> list[RecordedRequest]:
    """One sum for each time between two scrapes and each set of labels: engines of a server,
    models. later: a scrape taken after those in `data`. Raises TraceFileError."""
    check_most(name, len(data) + len(later), MOST_BYTES, "bytes", _REMEDY)
    scrapes = [
        _read_scrape(text, name)
        for part in (data, later)
        for text in (_scrapes(part.decode("utf-8", errors="replace")) if part else ())
    ]
    return [
        _difference(engine, labels, before.get((engine, labels)), last, name)
        for before, after in pairwise(scrapes if scrapes[1:] else [{}, *scrapes])
        for (engine, labels), last in after.items()
    ]


def _scrapes(text: str) -> list[str]:
    """The scrapes of a file: each starts with the same comment or series as the first."""
    text, found = f"{text}\n", _LINE.search(text)
    first = found[0] if found is not None else ""
    begin = first if first.startswith("#") else first.rpartition(" ")[0]
    starts = [one.start() for one in re.finditer(rf"(?m)^{re.escape(begin)}", text)]
    return [text[a:b] for a, b in pairwise([*(starts if begin else [0]), len(text)])]


def _read_scrape(text: str, name: str) -> dict[tuple[str, str], _Counters]:
    """Speculative decoding counters by engine and labels; index -1 is a counter's own."""
    check_most(f"A line of {name}", longest_line(text), LONGEST_LINE, "characters", _REMEDY)
    found: dict[tuple[str, str], _Counters] = {}
    emitted: dict[tuple[str, str], float] = {}
    try:
        samples = _samples(text)
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        if (shown := _SHOWN.search(text)) is not None:
            raise TraceFileError(
                f"{name}: a value was rounded for display, {shown[1]!r}.",
                "In Grafana, export the data again with Formatted data switched off.",
            ) from error
        raise TraceFileError(
            f"{name} is not a valid Prometheus text ({str(error)[:80]}).", _REMEDY
        ) from error
    for sample in samples:
        is_count = is_real(sample.value, LARGEST) and sample.value == int(sample.value)
        gauge = sample.name.removeprefix("sglang:")
        if gauge in _GAUGES and gauge != sample.name and is_real(sample.value, LARGEST):
            whose = _labels_text(sample.labels)
            found.setdefault(("sglang", whose), defaultdict(dict))[gauge][-1] = sample.value
            continue
        if (match := _SERIES.fullmatch(sample.name)) is not None:
            engine, series = match[1], match[2]
        elif (known := _KNOWN["counters"].get(sample.name.removesuffix("_total"))) is not None:
            engine, series = known
        else:
            engine = _KNOWN["emitted"].get(sample.name.removesuffix("_total"))
            if engine and is_count:
                emitted[engine, _labels_text(sample.labels)] = float(sample.value)
            continue
        labels = dict(sample.labels)
        first = int(engine == "rapid_mlx")
        at = labels.pop({"rapid_mlx": "depth", "tgi": "le"}.get(engine, "position"), None)
        if at == "+Inf":
            continue
        index = -1 if at is None else _position(at, sample.name, name, first)
        values = found.setdefault((engine, _labels_text(labels)), defaultdict(dict))[series]
        if index in values:
            raise TraceFileError(f"{name} has {sample.name} twice in one scrape.", _REMEDY)
        if not is_count:
            what = f"{sample.name} is {str(sample.value)[:40]}, not a whole number from 0"
            raise TraceFileError(f"{name}: {what}.", _REMEDY)
        values[index] = float(sample.value)
    for key in found.keys() & emitted.keys():
        found[key][_EMITTED][-1] = emitted[key]
    return found


def _samples(text: str) -> list[Any]:
    """The samples of a scrape. With placeholders for values it often equals the previous scrape."""
    parts = _NUMBER.split(text)
    values = parts[1::2]
    parts[1::2] = map(" {}".format, range(len(values)))
    with suppress(ValueError, KeyError, IndexError, RecursionError):
        form = "".join(parts)
        known = _parsed(form) if len(form) <= _LONGEST_FORM else []
        if values and sorted(one.value for one in known) == list(range(len(values))):
            numbers = [int(one) if one.isdigit() else float(one) for one in values]
            return [one._replace(value=numbers[one.value]) for one in known]
    return _parsed.__wrapped__(text)


@lru_cache(4)
def _parsed(text: str) -> list[Any]:
    from prometheus_client.parser import text_string_to_metric_families

    return [s for f in text_string_to_metric_families(text) for s in f.samples]


def _labels_text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(labels.items()))


def _position(text: str, series: str, file: str, first: int) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= 4
    if not (is_number and first <= int(text) < LONGEST_DRAFT):
        raise TraceFileError(
            f"{file}: position {text[:40]!r} of {series} is not a draft position.", _REMEDY
        )
    return int(text) - first


def _difference(
    engine: str, labels: str, before: _Counters | None, last: _Counters, file: str
) -> RecordedRequest:
    before = before or defaultdict(dict)
    gauges = {name: last[name][-1] for name in _GAUGES if name in last}
    series = [(name, i) for name, values in last.items() if name not in gauges for i in values]
    fell = [name for name, index in series if before[name].get(index, 0.0) > last[name][index]]
    found = RecordedRequest(_KNOWN["engines"][engine], labels)
    if fell:  # another process of the server: the first scrape has other counters
        before = defaultdict(dict)
        found.record["restarted"] = f"{fell[0]} fell between the scrapes"
    most = max((last[name][i] for name, i in series if name != _EMITTED), default=0.0)
    exact = most < _EXACT.get(engine, LARGEST + 1)
    if not exact:
        found.record["rounded"] = f"counters from {_EXACT[engine]:,} on have six digits"

    def count(name: str, index: int = -1) -> int | None:
        value = last[name].get(index)
        return None if value is None else int(value - before[name].get(index, 0.0))

    for name, field in _COUNTERS.items():
        setattr(found, field, count(name))
        found.record[name] = count(name)
    if (emitted := count(_EMITTED)) is not None:
        found.timings["predicted_n"] = emitted
    if gauges:
        found.given = {_GAUGES[name]: value for name, value in gauges.items()}
        found.record = dict(gauges)
        return found
    if engine == "tgi":
        _take_steps(found, count, sorted(last[_AT_MOST]), file)
        return found
    n_positions = max(last[_PER_POS], default=-1) + 1
    per_pos = [count(_PER_POS, i) or 0 for i in range(n_positions)]
    found.per_pos, found.record[_PER_POS] = per_pos or None, list(per_pos)
    if exact:
        found.check_counts(_OUR_NAMES)
    return found


def _take_steps(
    found: RecordedRequest, count: Callable[..., int | None], lengths: list[int], file: str
) -> None:
    """Steps from TGI's histogram. The first step of a request is its prompt's; their number is
    known if all requests have ended."""
    accepted, steps = found.num_accepted_draft_tokens, count(_STEPS)
    if not accepted and lengths[-1:] in ([], [0]):
        raise TraceFileError(
            f"{file} has counters of TGI, but none of speculation.",
            "Start TGI with --speculate N, and save /metrics after the requests.",
        )
    if accepted is None or steps is None:
        return
    at_most = [count(_AT_MOST, i) or 0 for i in lengths]
    if lengths == list(range(len(lengths))) and at_most[-1:] == [steps]:
        per_pos = [steps - n for n in at_most[:-1]]
        found.per_pos = per_pos if sum(per_pos) == accepted else None
    n_requests = count(_REQUESTS)
    if n_requests is not None and found.timings.get("predicted_n") == steps + accepted:
        found.num_spec_steps = steps - n_requests
        found.derived = ("num_spec_steps",)
