"""Changes of logs and records of other engines, each drawn as JSON."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.golden_files import DATA

Step = dict[str, Any]
Random = np.random.Generator
_FOLDERS = (DATA / "logs", DATA / "records", DATA / "captures")
_NUMBER = re.compile(rb"\d+(?:\.\d+)?")
_MARK = re.compile(rb"[,(:=|'\"] ?")
_WORD = re.compile(rb"\S+\s*")
_NUMBERS: dict[str, bytes] = {
    "zero": b"0",
    "-1": b"-1",
    "10": b"10",
    "2^31": b"2147483648",
    "2^63": b"9223372036854775808",
    "10^30": b"1" + b"0" * 30,
    "400 digits": b"7" * 400,
    "4301 digits": b"9" * 4301,
    "5000 digits": b"1" * 5000,
    "0.5": b"0.5",
    "1e308": b"1e308",
    "1e309": b"1e309",
    "1.2.3": b"1.2.3",
    ".": b".",
    "nan": b"NaN",
    "-inf": b"-Infinity",
    "arabic": "٣".encode(),
    "superscript": "²".encode(),
    "true": b"true",
    "null": b"null",
    "": b"",
}
_HUGE = ("2^63", "10^30", "400 digits")
_CLASSES: dict[str, bytes] = {
    "space": b" ",
    "tab": b"\t",
    "line": b"\n",
    "return": b"\r",
    "digit": b"7",
    "letter": b"x",
    "point": b".",
    "minus": b"-",
    "quote": b"'",
    "double quote": b'"',
    "backslash": b"\\",
    "bracket": b"(",
    "brace": b"{",
    "square": b"[",
    "bar": b" | ",
    "colour": b"\x1b[",
    "null": b"\0",
    "wide": "🙂".encode(),
}
_SIZES = (1 << 16, 1 << 18, 1 << 18, 1 << 20, 1 << 22)
_BAD = (b"\0", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x1b[31m", b"\xe2\x80\xa8", b"\x85", b"\r")
_LINES = ("double", "cut", "drop", "join", "shuffle", "swap")
_COPIES = (
    "[53409] ",
    "llama-1  | ",
    "Aug 15 19:02:{s:02} box llama-server[2211]: ",
    "2026-08-15T19:02:{s:02}.{i:06}Z ",
    "2026-08-15T19:02:{s:02}.{i:09}+02:00 stderr F ",
    "[pod/llama-7d9fb-x2x/llama] ",
    "> ",
    "colour",
    "docker",
    "utf-16",
)
"""What may be in front of each line, or around it."""
_CODES = ("utf-16", "utf-8-sig", "utf-32", "latin-1", "crlf", "cr")


@cache
def logs() -> dict[str, Path]:
    """Files of this tree by their names."""
    found = [path for folder in _FOLDERS for path in sorted(folder.iterdir())]
    return {path.name: path for path in found if path.suffix != ".gguf"}


def unpacked(name: str) -> bytes:
    data = logs()[name].read_bytes()
    return gzip.decompress(data) if name.endswith(".gz") else data


def draw(random: Random) -> Step:
    how = _pick(random, (*_HOWS, "number", "words", "words"))
    return {
        "how": how,
        "at": int(random.integers(1 << 20)),
        "what": _pick(random, _HOWS[how][1]),
        "n": _pick(random, _SIZES) if how in ("pump", "words") else int(random.integers(1, 6)),
    }


def draw_huge(random: Random) -> Step:
    """A number that is far too large wherever its line has its like."""
    return {
        "how": "same",
        "at": int(random.integers(1 << 20)),
        "what": _pick(random, _HUGE),
        "n": 1,
    }


def draw_copy(random: Random) -> Step:
    """The same lines as people copy them."""
    return {
        "how": "copy",
        "at": int(random.integers(1 << 20)),
        "what": _pick(random, _COPIES),
        "n": int(random.integers(2)),
    }


def changed(text: bytes, step: Step) -> bytes:
    """The text after a step."""
    return _HOWS[step["how"]][0](text, step["at"], step["what"], step["n"])


def _pick(random: Random, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


def _number(text: bytes, at: int, what: str, n: int) -> bytes:
    """One number becomes another, or some that follow it too."""
    places = list(_NUMBER.finditer(text))
    if not places:
        return text
    first = at % len(places)
    for place in reversed(places[first : first + (n if n > 3 else 1)]):
        text = text[: place.start()] + _NUMBERS[what] + text[place.end() :]
    return text


def _same(text: bytes, at: int, what: str, _n: int) -> bytes:
    """A number becomes another one wherever its line has its like in other lines."""
    lines = text.split(b"\n")
    line = lines[_one_of(lines, at)]
    # not those of the prefix: without time and slot no line is read at all
    numbers = list(_NUMBER.finditer(line, line.rfind(b"|") + 1))
    if not numbers:
        return text
    place = numbers[(at >> 8) % len(numbers)]
    before = line[: place.start()].rsplit(b"|")[-1][-24:]
    # from within a number none is looked for: there may be a million digits
    before = re.sub(rb"\d+", rb"(?<!\\d)\\d++", re.escape(before)) if before else rb"\b"
    return re.sub(before + rb"\d+", lambda m: _NUMBER.sub(_NUMBERS[what], m[0])[:8000], text)


def _line(text: bytes, at: int, what: str, n: int) -> bytes:
    lines = text.splitlines(keepends=True) or [b""]
    i = at % len(lines)
    part = lines[i : i + n]
    if what == "double":
        part = [line for line in part for _ in range(2)]
    elif what == "cut":
        part[0] = part[0][: (at >> 7) % (len(part[0]) + 1)]
    elif what == "drop":
        part = []
    elif what == "join":
        part = [b" ".join(line.rstrip(b"\r\n") for line in part)]
    elif what == "shuffle":
        order = np.random.default_rng(at).permutation(len(lines))
        return b"".join(lines[int(j)] for j in order)
    else:
        part.reverse()
    return b"".join([*lines[:i], *part, *lines[i + n :]])


def _pump(text: bytes, at: int, what: str, n: int) -> bytes:
    """One class of characters n bytes long, between two words of a line."""
    place = _between(text, at)
    return text[:place] + _CLASSES[what] * (n // len(_CLASSES[what])) + text[place:]


def _words(text: bytes, at: int, what: str, n: int) -> bytes:
    """A part of a line again and again: within it, to its end, or as lines of its own."""
    lines = text.splitlines(keepends=True) or [b""]
    i = _one_of(lines, at)
    line = lines[i].rstrip(b"\r\n")
    marks = [0, *(mark.end() for mark in _MARK.finditer(line)), len(line)]
    bar = line.rfind(b" | ") + 3
    first = bar if at % 3 and bar > 2 else marks[(at >> 7) % len(marks)]
    ends = [mark for mark in marks if mark > first] or [len(line)]
    again = line[first : ends[(at >> 11) % min(4, len(ends))]] or b"x"
    many = (again + b"\n" * (what == "lines")) * (n // len(again) + 1)
    rest = line[first:] if what == "inside" else b""
    lines[i] = line[:first] + many + rest + b"\n"
    return b"".join(lines)


def _insert(text: bytes, at: int, what: int, n: int) -> bytes:
    for i in range(n):
        place = at * (i + 1) % (len(text) + 1)
        text = text[:place] + _BAD[what] + text[place:]
    return text


def _deep(text: bytes, at: int, what: str, _n: int) -> bytes:
    """A value of JSON becomes a deep one, or one of many keys; where there is none, a line."""
    values = list(re.finditer(rb'(?<=[:,\[])\s*(?:\d+|"[^"\\]{0,50}"|\{|\[)', text))
    place = values[at % len(values)] if values else None
    made = {
        "lists": b"[" * 100_000 + b"]" * 100_000,
        "open lists": b"[" * 100_000,
        "objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "keys": b"{" + b",".join(b'"k%d":%d' % (i, i) for i in range(100_000)) + b"}",
        "values": b"[" + b"1," * 200_000 + b"1]",
    }[what]
    if place is None:
        return text + b"\n" + made + b"\n"
    keep = place[0].strip()
    more = b"," + keep if keep in (b"{", b"[") else b""
    return text[: place.start()] + made + more + text[place.end() :]


def _copy(text: bytes, _at: int, what: str, n: int) -> bytes:
    lines = text.decode("utf-8", "replace").split("\n")
    if what == "colour":
        lines = [f"\x1b[34m{line}\x1b[0m" for line in lines]
    elif what == "docker":
        lines = [json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in lines]
    elif what != "utf-16":
        lines = [what.format(i=i, s=i % 60) + line for i, line in enumerate(lines)]
    copied = ("\r\n" if n else "\n").join([*lines, ""])
    return copied.encode("utf-16" if what == "utf-16" else "utf-8")


def _code(text: bytes, _at: int, what: str, _n: int) -> bytes:
    if what == "crlf":
        return text.replace(b"\n", b"\r\n")
    if what == "cr":
        return text.replace(b"\n", b"\r")
    return text.decode("utf-8", "replace").encode(what, "replace")


def _between(text: bytes, at: int) -> int:
    lines = text.splitlines(keepends=True) or [b""]
    i = _one_of(lines, at)
    words = _WORD.findall(lines[i]) or [lines[i]]
    n = (at >> 7) % (len(words) + 1)
    return len(b"".join(lines[:i])) + len(b"".join(words[:n]).rstrip(b"\r\n"))


def _one_of(lines: Sequence[bytes], at: int) -> int:
    """The place of a line: what is said rarely is as likely as what is said often."""
    kinds: dict[bytes, list[int]] = {}
    for i, line in enumerate(lines):
        kinds.setdefault(re.sub(rb"[\d.]+|'.*", b"", line[:200]), []).append(i)
    places = list(kinds.values())[at % len(kinds)]
    return places[(at >> 7) % len(places)]


_HOWS: dict[str, tuple[Callable[[bytes, int, Any, int], bytes], Any]] = {
    "number": (_number, list(_NUMBERS)),
    "same": (_same, list(_NUMBERS)),
    "line": (_line, _LINES),
    "pump": (_pump, list(_CLASSES)),
    "words": (_words, ("inside", "end", "end", "lines")),
    "insert": (_insert, range(len(_BAD))),
    "deep": (_deep, ("lists", "open lists", "objects", "keys", "values")),
    "code": (_code, _CODES),
    "copy": (_copy, _COPIES),
}
