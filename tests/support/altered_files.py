"""Files of other engines, altered: what a seed gives is always the same.

Bases are the good files that the tests have. An alteration changes numbers, JSON values, lines or
bytes, or blows up one part; what comes out may still be good.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.captures import OURS, SHARED, load

RECORDS = OURS.parent / "records"
REPLIES = OURS.parent / "replies"
CASES = SHARED.parent / "cases"
NUMBERS = (
    *("0", "-1", "-0", "1", "-0.0", "0.5", "1.7", "1e308", "1e999", "-1e999", "NaN", "Infinity"),
    *("2147483647", "2147483648", "4294967296", str(2**53 + 1), str(2**63), str(2**64), str(10**9)),
    *(str(10**18), "1" + "0" * 400, "9" * 5000, "1.2.3", "1e-400", "0x10", "1_000", "٣", "", "."),
)
VALUES: tuple[Any, ...] = (
    *(0, -1, -0.0, 0.5, 1, 2**31, 2**53 + 1, 2**63, 10**9, 10**18, 10**400, 1e308, 1e-320),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        True,
        False,
        None,
        "",
        "x",
        "12",
        "\ud800",
        "\x00",
    ),
    *(
        [],
        {},
        [1],
        [[]],
        [None],
        {"a": 1},
        [1, "a", None],
        {"timings": {}},
        [{"id": 1}],
        "x" * 5000,
    ),
    *(["12"] * 3000, {str(i): i for i in range(300)}, [10**9] * 9, [2**31] * 3, [[1, 2]] * 3),
)
_NUMBER = re.compile(r"-?\d[\d.]*(?:[eE][-+]?\d+)?")
_AFTER_WORD = re.compile(r"((?<![A-Za-z_])[A-Za-z_]{1,40}\"?[ \t]{0,9}[:=]?[ \t]{0,9})(-?\d[\d.]*)")
_WORD = re.compile(r"[A-Za-z_]{4,}")
_TOLD = re.compile(rb"draft|token|checkpoint|eval time|n_rs_seq|predicted|cached|llama_decode")
_KEPT = re.compile(
    "slot  |draft candidate|called impl|adding spec|update slots|yielding|n_batch|n_rs_seq"
)
_BLOWN = 1 << 20


@cache
def bases() -> dict[str, bytes]:
    """Good files by name, short enough to be read in a moment."""
    kept = sorted([*RECORDS.iterdir(), *REPLIES.iterdir()])
    found = {path.name: path.read_bytes() for path in kept}
    if CASES.is_dir():
        for path in sorted(CASES.glob("*/*")):
            if path.suffix in (".log", ".json", ".jsonl", ".prom", ".sse", ".txt"):
                found[path.name] = path.read_bytes()
    names = ("mtp", "utf8", "draft", "chain", "jsonl", "light-log", "stops", "endpoints")
    there = [n for n in names if any((d / f"{n}.json.gz").is_file() for d in (SHARED, OURS))]
    for name in there:
        whole = json.loads(gzip.decompress(_path(name).read_bytes()))
        lines = whole.get("log") or []
        told = [line for line in lines if _KEPT.search(line)][:400]
        if told:
            found[f"{name}.log"] = "\n".join(told).encode("utf-8", "replace")
        whole["log"] = told
        whole["requests"] = copy.deepcopy(whole.get("requests", [])[:3])
        for request in whole["requests"]:
            reply = request.get("reply", request)
            if isinstance(reply.get("events"), list):
                reply["events"] = reply["events"][:20] + reply["events"][-3:]
        found[f"{name}.json"] = json.dumps(whole).encode()
        for i, request in enumerate(load(name).requests[:2]):
            pieces = [piece for _, piece in request.pieces]
            found[f"{name}-{i}.sse"] = b"".join(pieces[:20] + pieces[-3:])
    return found


def _path(name: str) -> Path:
    path = SHARED / f"{name}.json.gz"
    return path if path.is_file() else OURS / path.name


def altered(seed: int) -> tuple[str, bytes]:
    """A name, which says what was done, and the bytes."""
    chosen = random.Random(seed)
    name = chosen.choice(sorted(bases()))
    done, data = altered_text(bases()[name], chosen)
    return f"{name} {done}", data


def altered_text(data: bytes, chosen: random.Random) -> tuple[str, bytes]:
    """What was done to a text of any kind, and the bytes."""
    done = []
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        act = chosen.choice(_ACTS)
        done.append(act.__name__.strip("_"))
        data = act(data, chosen)
    return " ".join(done), data


def altered_binary(data: bytes, chosen: random.Random) -> bytes:
    """Some bytes changed, most of them near the beginning, or a part lost, moved or added."""
    if chosen.random() < 0.3:
        return _raw(data, chosen)
    changed = bytearray(data)
    for _ in range(chosen.choice((1, 1, 2, 8, 64))):
        at = int(len(data) * chosen.random() ** chosen.choice((1, 3, 6)))
        changed[at] = chosen.choice((0, 1, 0x7F, 0x80, 0xFF, chosen.randrange(256)))
    return bytes(changed)


def _numbers(data: bytes, chosen: random.Random) -> bytes:
    text = data.decode("utf-8", "surrogateescape")
    places = list(_NUMBER.finditer(text))
    for place in sorted(_some(places, chosen), key=lambda one: -one.start()):
        value = chosen.choice(NUMBERS)
        text = text[: place.start()] + value + text[place.end() :]
    return _bytes(text)


def _told_numbers(data: bytes, chosen: random.Random) -> bytes:
    """One number of a line of a log that tells of tokens or drafts, where there is one."""
    lines = data.split(b"\n")
    told = [i for i, line in enumerate(lines) if _TOLD.search(line)] or range(len(lines))
    for i in _some(list(told), chosen):
        lines[i] = _numbers(lines[i], chosen)
    return b"\n".join(lines)


def _same_numbers(data: bytes, chosen: random.Random) -> bytes:
    """All numbers after one word."""
    text = data.decode("utf-8", "surrogateescape")
    words = list(re.finditer(_AFTER_WORD, text))
    if not words:
        return data
    word, value = chosen.choice(words)[1], chosen.choice(NUMBERS)
    return _bytes(re.sub(re.escape(word) + r"-?\d[\d.]*", lambda _: word + value, text))


def _values(data: bytes, chosen: random.Random) -> bytes:
    """Values of a JSON text, or of its lines."""
    try:
        return _json(_changed(json.loads(data), chosen))
    except (ValueError, RecursionError):
        pass
    lines = data.split(b"\n")
    for i in range(len(lines)):
        at = lines[i].find(b"{")
        if at >= 0 and chosen.random() < 0.3:
            try:
                lines[i] = lines[i][:at] + _json(_changed(json.loads(lines[i][at:]), chosen))
            except (ValueError, RecursionError):
                continue
    return b"\n".join(lines)


def _changed(value: Any, chosen: random.Random) -> Any:
    value = copy.deepcopy(value)
    places = list(_places(value))
    for inner, key in _some(places, chosen):
        act = chosen.randrange(6)
        if isinstance(inner, dict) and key in inner:
            if act == 0:
                del inner[key]
            elif act == 1:
                other = chosen.choice(list(inner))
                inner[key], inner[other] = inner[other], inner[key]
            elif act == 2:
                inner[chosen.choice(("timings", "choices", "usage", "x", "reply"))] = inner[key]
            else:
                inner[key] = copy.deepcopy(chosen.choice(VALUES))
        elif isinstance(inner, list) and key < len(inner):
            if act == 0:
                del inner[key]
            elif act == 1:
                inner += [copy.deepcopy(inner[key])] * chosen.choice((1, 5, 200))
            else:
                inner[key] = copy.deepcopy(chosen.choice(VALUES))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def _lines(data: bytes, chosen: random.Random) -> bytes:
    lines = data.split(b"\n")
    at, other = chosen.randrange(len(lines)), chosen.randrange(len(lines))
    act = chosen.randrange(8)
    if act == 0:
        lines.insert(at, lines[other])
    elif act == 1:
        chosen.shuffle(lines)
    elif act == 2:
        lines[at] = lines[at][: chosen.randrange(len(lines[at]) + 1)]
    elif act == 3:
        lines[at : at + 2] = [b"".join(lines[at : at + 2])]
    elif act == 4:
        lines.reverse()
    elif act == 5:
        lines = [line for line in lines if chosen.random() < 0.7]
    elif act == 6:
        lines[at : at + 1] = [lines[at]] * chosen.choice((3, 300))
    else:
        return chosen.choice((b"\r", b"\r\n", b"", b" ", b"\n\n", b"\x0b", "\u2028".encode())).join(
            lines
        )
    return b"\n".join(lines)


def _raw(data: bytes, chosen: random.Random) -> bytes:
    act, at = chosen.randrange(9), chosen.randrange(len(data) + 1)
    if act == 0:
        return data[:at]
    if act == 1:
        return data[:at] + bytes(chosen.randrange(256) for _ in range(8)) + data[at:]
    if act == 2:
        return b"\xef\xbb\xbf" + data
    if act == 3:
        return data.decode("utf-8", "replace").encode(chosen.choice(("utf-16", "utf-16-le")))
    if act == 4:
        return data[:at] + b"\x00" * chosen.choice((1, 70_000)) + data[at:]
    if act == 5:
        return gzip.compress(data, 1) + chosen.choice((b"", b"rest", gzip.compress(data, 1)))
    if act == 6:
        return gzip.compress(data, 1)[: at + 12]
    if act == 7:
        return data + data
    return data[at:] + data[:at]


def _blown(data: bytes, chosen: random.Random) -> bytes:
    """One part many times, in one line."""
    text = data.decode("utf-8", "surrogateescape")
    words = _WORD.findall(text) or ["x"]
    keys = [line for line in text.split("\n") if len(line) < 400] or ["x"]
    part = chosen.choice(
        (
            *("0", "9", " ", "[", "{", '"', "'", ",", "\\", "\x1b[0m", ": ", "= ", ".", "\t", "\r"),
            *('{"a":', "[[", "1.", "(", "| ", "\n", "\x00", "é", "data: ", "#"),
            *(chosen.choice(words), chosen.choice(words) + " ", chosen.choice(words) + " = "),
            *(chosen.choice(keys), chosen.choice(keys)),
            chosen.choice(keys)[: chosen.randrange(80)],
        )
    )
    size = chosen.choice((1 << 12, 1 << 16, _BLOWN // 4, _BLOWN))
    at = chosen.randrange(len(text) + 1)
    if chosen.random() < 0.5:  # after a word that something begins with
        found = [match.end() for match in _WORD.finditer(text)]
        at = chosen.choice(found) if found else at
    return _bytes(text[:at] + part * (size // max(len(part), 1)) + text[at:])


def _nested(data: bytes, chosen: random.Random) -> bytes:
    depth = chosen.choice((60, 900, 100_000))
    begin, end = chosen.choice((("[", "]"), ('{"a":', "}")))
    at = data.find(b":", chosen.randrange(len(data) + 1)) + 1
    inner = (begin * depth + "1" + end * depth).encode()
    return data[:at] + inner + data[at + 1 :]


def _twice(data: bytes, chosen: random.Random) -> bytes:
    """A member of JSON twice, the same or with another value."""
    members = list(re.finditer(rb'"\w{1,60}"\s?:\s?(?:-?\d[\d.]*|"[^"\\]{0,60}"|true|null)', data))
    if not members:
        return data
    one = chosen.choice(members)
    again = re.sub(rb"[\d.]+\Z", b"7", one[0]) if chosen.random() < 0.5 else one[0]
    return data[: one.start()] + again + b", " + data[one.start() :]


def _many(data: bytes, chosen: random.Random) -> bytes:
    """Very many of one member of a JSON text."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    lists = [inner for inner, _ in _places(value) if isinstance(inner, list) and inner]
    if lists and len(data) < 100_000:
        one = chosen.choice(lists)
        one += [one[0]] * chosen.choice((70, 2000))
    elif isinstance(value, dict):
        value |= {f"k{i}": i for i in range(20_000)}
    return _json(value)


def _some(places: list[Any], chosen: random.Random) -> list[Any]:
    return chosen.sample(places, min(len(places), chosen.choice((1, 1, 2, 5, 30))))


def _json(value: Any) -> bytes:
    is_ascii = len(str(value)) % 2 == 0
    return json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


_ACTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(
        _numbers,
        _told_numbers,
        _told_numbers,
        _same_numbers,
        _same_numbers,
        _values,
        _values,
        _values,
        _lines,
        _raw,
    ),
    *(_blown, _nested, _many, _twice),
)
