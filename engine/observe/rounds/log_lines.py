"""Log lines as people copy them: several servers in one file, with prefixes (a router's port, a
container, journald, times), colours, CRLF, lines wrapped in JSON.

A prefix is everything before the server's own text. Times and levels in it change from line to
line; the rest identifies the server, so that lines of several servers are separated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np

from engine.errors import check_most
from engine.observe.rounds.log_text import decoded, encoded, n_open, unwrapped, without_colours

Time: TypeAlias = re.Match[str] | int | None
"""Time of a line on its server's clock: a match of STAMP, or microseconds."""
LogLine: TypeAlias = tuple[str, int, Time, str | None, bool]
"""The server of a line ("" without a prefix), its number from 1, its time, its text (None if it
should be JSON and is not), and whether an entry may begin in it."""


OfShape: TypeAlias = "tuple[str, str, np.ndarray, Sequence[Any]]"
"""Lines of one shape in a block: their meaning and kind, their numbers in the block from 0, and
values by column: arrays, lists of texts, or None."""
_IN_ORDER = re.compile(r"(prompt )?eval time {0,20}=")
LONGEST_TIME = 100
"""Characters at the start of a line that contain its time."""


class OtherLines(Protocol):
    """Reads the lines of other engines in a log."""

    last_read: tuple[Any, str, str] | None
    """For the newest line, if others of its shape mean the same: its meaning (`Saying`), its text,
    and its server."""

    @property
    def is_waiting(self) -> bool:
        """Whether the next line may continue the previous one."""

    def takes(self, number: int, stream: str, said: str, /) -> bool:
        """Read a line if it is one of theirs; returns whether it was. Arguments: its number, server
        and text."""

    def say_all(self, parts: Sequence[tuple[str, OfShape]], /) -> list[int]:
        """Read all such lines of a block, by server and shape; returns the lines not taken."""

    def source(self, prefix: str, /) -> str:
        """The server identified by a prefix."""


LONGEST_LINE = 1 << 14
"""Characters of a line that are examined; meaningful ones have a few hundred."""
SHORTEST_LINE = 12
"""Shortest line that can mean anything by itself, characters."""
_MOST_JSON = 16 << 20
_MOST_KEPT = 4 * LONGEST_LINE
"""Bytes of an incomplete line."""
_LONGEST_PREFIX = 256
_MOST_PREFIXES = 4096
_MOST_FORMS = 8
_MOST_WORDS = 6
"""Words of a prefix."""
_MANY = 3
"""Minimum average number of lines per name; fewer mean that it is a line counter."""
# Regular expressions without ambiguous repetition: gaps are bounded, and only the start of a line
# is searched.
STAMP = re.compile(r"(?<!\d)(\d{1,9})\.(\d\d)\.(\d{3})\.(\d{3}) ([IWEDC]) ", re.ASCII)
_BARE = re.compile(
    r"(?:(?<!\S)[\d.]{0,14}\d{3} )?(?:(?<!\S)[IWEDC] )?(?<![\w/])("
    r"slot {1,20}[\w():~.]{1,32}: id {1,40}\d"
    r"|(?:srv|que|spec|cmn) {1,20}[\w():~]{1,32}: "
    r"|(?:INFO|WARN|VERB|ERR|DEBUG|ERROR|WARNING) {1,3}\[ {0,40}\w{1,40}\] "
    r"|main: |llama_\w{1,40}: |common_\w{1,40}: |build: \d|system.info: "
    r"|statistics {1,40}\S{1,64}: #calls|draft acceptance|(?:prompt |generation )?eval time {0,8}="
    r"|total time {0,8}=|={3,20} Cache: )"
)
"""Start of a server's text without a time: prefixes of llama-server's entries."""
_OF_BARE = (
    *("slot ", "srv ", "spec ", "que ", "cmn ", "llama_", "common_", "main: ", "build: ", "[ "),
    *("eval time", "draft acceptance", "statistics ", "total time", "system", " Cache: "),
)
_TIMES = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d(?:[T _]{1,2}\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?)?"
    r"(?: ?(?:Z|[+-]\d\d:?\d\d|UTC)\b)?"
    r"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2}(?:,? \d{4})?(?=\D)"
    r"|\d\d/[A-Z][a-z]{2}/\d{4}:|\d\d-\d\d(?= \d\d:\d\d:)"
    r"|\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?: ?[AP]M)?(?: ?(?:Z|[+-]\d\d:?\d\d)(?!\d))?"
    r"|\[ {0,12}\d{1,12}\.\d{1,9}\]|(?<![\d.])\d{10}(?:\d{3}|\d{6}|\d{9}|\.\d{1,9})?(?![\d.])"
)
_LEVELS = re.compile(
    r"(?<![A-Za-z])(?:TRACE|DEBUG|DBG|INFO|INF|NOTICE|WARN|WARNING|WRN|ERROR|ERR|FATAL|stdout|stderr"
    r"|(?<![\w.-])[FPIWED](?![A-Za-z_.-]|\d(?!\d{3} )))(?![A-Za-z])",
    re.IGNORECASE,
)
_VARIABLE = re.compile(
    f"(?P<time>{_TIMES.pattern})|(?P<level>{_LEVELS.pattern})"
    "|(?P<digits>[0-9]{1,20})|(?P<gap> {1,40})",
    re.IGNORECASE,
)
_BAR = re.compile(
    r"[^|\r\n]{0,100}?\d{1,3}%\|[^|]{0,200}\|[^\[\]]{0,40}\[[^\]]{0,80}\]|^\S{1,100}\.exe : "
)
"""Progress bars and PowerShell decorations before a line."""
_OVERWRITTEN = re.compile(r"^[^'\n]*(?:%[^'\n]*\r(?=[^\r\n])|\r(?=\d{4}-\d\d-\d\d))", re.MULTILINE)
"""Progress that a terminal overwrites with what follows, or with a line with a time."""
_KEYS = re.compile(r'\b(?:time|ts|level|lvl|msg|message)="?')
"""Keys of Go programs before the text of a line."""
_ZEROS = str.maketrans("123456789", "000000000")
_ZERO_BYTES = bytes.maketrans(b"123456789", b"000000000")
_COUNT = re.compile(r"^((?:[^\s:]{1,200}?[:-])?)\d{1,9}(?=[:-])")
_CSV = re.compile(rb'(?:[^\n"]{0,200}\n)?(?:"?[^\n",]{0,100}"?,){1,8}"[^\n]*"\n')
"""CSV lines with the text in the last, quoted cell."""
_NO_NAME = re.compile(r"[^\w./@-]+")


def microseconds(time: Time) -> int | None:
    """Time of a line since its server started."""
    if time is None or isinstance(time, int):
        return time
    minutes, seconds, ms, us, _ = time.groups()
    return ((int(minutes) * 60 + int(seconds)) * 1000 + int(ms)) * 1000 + int(us)


def may_have_stamp(line: str) -> bool:
    """Whether a line has one of the letters that follow a time."""
    return " I " in line or " D " in line or " W " in line or " E " in line or " C " in line


def name_of(prefix: str, *, is_loose: bool = False) -> str:
    """The server identified by a prefix; "" if nothing in it is constant. is_loose: numbers in it
    vary."""
    bare = _BAR.sub(" ", prefix) if "%|" in prefix or ".exe : " in prefix else prefix
    bare = _KEYS.sub(" ", bare) if "=" in bare else bare
    kept = _LEVELS.sub(" ", _TIMES.sub(" ", bare))
    if is_loose:
        rest = _COUNT.sub(r"\1", kept)  # of `grep -n`
        kept = rest if rest != kept else re.sub(r"\d{1,20}", " ", kept)
    found = _NO_NAME.sub(" ", kept).strip()
    is_text = found.count(" ") >= _MOST_WORDS  # unterminated text of a server
    return found.rstrip("- ") if not is_text and re.search(r"[^\W_]", found) else ""


def time_of(prefix: str) -> str:
    """Date and time in a prefix, as written; "" without any."""
    tail = prefix[-_LONGEST_PREFIX:]
    if tail.isascii():  # on bytes it takes a tenth of the time
        shape = tail.encode().translate(_ZERO_BYTES).decode()
    else:
        shape = tail.translate(_ZEROS)
    return " ".join(tail[begin:end] for begin, end in _times_of(shape))[:40]


@lru_cache(1 << 12)
def _times_of(shape: str) -> list[tuple[int, int]]:
    """Places of times in prefixes of a shape, in which every digit is 0."""
    times = (one.span() for one in _TIMES.finditer(shape))
    whole = ((a + len(shape[a:b]) - len(shape[a:b].lstrip()), b) for a, b in times)
    return [(a, a + len(shape[a:b].rstrip())) for a, b in whole if shape[a:b].strip()]


def is_newest_first(times: Sequence[str]) -> bool:
    """Whether most of these equally formatted times fall from one to the next."""
    pairs = [(a, b) for a, b in pairwise(times) if a != b and len(a) == len(b)]
    return 2 * sum(a > b for a, b in pairs) > len(pairs)


def oldest_first(text: str) -> str:
    """A log with the newest line first, as log viewers show it, reversed; others unchanged."""
    lines = text.removesuffix("\n").split("\n")
    times = [time_of(line[:LONGEST_TIME]) for line in lines]
    whole = [found[1] for line in lines if (found := _IN_ORDER.search(line)) is not None]
    pairs = list(pairwise([one is None for one in whole]))  # a prompt's time precedes the answer's
    is_upside_down = pairs.count((True, False)) > pairs.count((False, True)) and not any(times)
    if not (is_upside_down or is_newest_first(list(filter(None, times)))):
        return text
    entries: list[str] = []
    for line, time in zip(lines, times, strict=True):
        if time or not any(times):
            entries.append(line)
        elif entries:
            entries[-1] += f"\n{line}"
    return "\n".join([*reversed(entries), ""])


class LogLines:
    """Splits a growing log into lines. Of long lines only the examined part is kept."""

    def __init__(self, others: OtherLines | None = None) -> None:
        """others: takes lines of other engines."""
        self.number = 0
        """Lines so far."""
        self._others = others
        self.is_cut = False
        """Whether the last line has no end."""
        self._rest: list[bytes] = []
        self._n_rest = 0
        self._end = b""
        """The line terminator, once known."""
        self._is_json: bool | None = None
        self._is_csv: bool | None = None
        self._names: dict[str, str] = {}
        self._forms: dict[str, re.Pattern[str]] = {}
        self._formed: set[str] = set()
        """Names whose kind of prefix is known."""
        self._has_learned = self._is_loose = self._is_plain = False
        self.last = ""
        """The server of the newest line."""
        self.is_own = False
        """Whether the newest line identifies its server."""
        self.prefix: str | None = ""
        """What precedes the newest line's own text; None if its wrapper identifies the server."""
        self.n_learned = 0
        """How often knowledge about prefixes has changed."""

    def lines(self, data: bytes) -> bytes:
        """Add a part of the log; returns the completed lines, without colours, each with a line
        feed. data: whole characters. Raises TraceFileError for a JSON line that is too long."""
        if not data:
            return b""
        self.is_cut = not data.endswith(b"\n")
        if self._is_json is None and (begin := decoded(data).lstrip()[:1]):
            self._is_json = begin == "{"
        if self._end != b"\r" and b"\n" in data:
            end = data.rfind(b"\n") + 1
            whole, rest = b"".join((*self._rest, data[:end])), data[end:]
        elif self._end == b"\r" or (not self._end and self._n_rest > LONGEST_LINE // 2):
            self._end = b"\r"  # of old systems; a text without any is one line as before
            data = re.sub(rb"\r\n|\r", b"\n", b"".join((*self._rest, data)))
            end = data.rfind(b"\n") + 1
            whole, rest = data[:end], data[end:]
        else:
            self._keep(data)
            return b""
        if not self._end:
            self._end = b"\r\n" if whole[: whole.find(b"\n")].endswith(b"\r") else b"\n"
        self._rest, self._n_rest = [], 0
        self._keep(rest)
        return self._clean(whole)

    def last_lines(self) -> bytes:
        """The incomplete last line."""
        if not self._rest:
            return b""
        last, self._rest = b"".join(self._rest) + b"\n", []
        return self._clean(last if self._end else last.replace(b"\r", b"\n"))

    def _keep(self, rest: bytes) -> None:
        most = _MOST_JSON if self._is_json else _MOST_KEPT
        if rest and self._n_rest <= most:
            part = rest[:most]
            self._rest.append(part[: len(part) - n_open(part)])
        self._n_rest += len(rest)
        if self._is_json:
            what, remedy = f"The log's line {self.number + 1}", "Name the log that a server wrote."
            check_most(what, self._n_rest, _MOST_JSON, "bytes", remedy)

    def _clean(self, data: bytes) -> bytes:
        is_spaced = b"\xa0" in data and b"\xc2\xa0" in data
        # searching from its end takes half the time
        if is_spaced or b"\x1b" in data or data.rfind(b"[0m") >= 0:
            data = encoded("\n".join(map(without_colours, decoded(data).split("\n"))))
        if self._end == b"\r\n":
            data = data.replace(b"\r\n", b"\n")
        if self._is_csv is None and data.count(b"\n") > 1:
            self._is_csv = _CSV.match(data) is not None
        if self._is_csv:
            data = data.replace(b'"\n', b"\n").replace(b'""', b'"')
        if b"\r" in data:
            data = encoded(_OVERWRITTEN.sub("", decoded(data)))
        if not self._has_learned:
            self._learn(list(map(decoded, data[:-1].split(b"\n", 1000)[:1000])))
        return data

    def placed(self, line: str) -> Iterator[LogLine]:
        """The next line with its server; several if it wraps them, none if another engine's reader
        takes it."""
        self.number += 1
        self.is_own, self.prefix = True, ""
        stamp = STAMP.match(line)
        if stamp is not None:
            self.last = ""
            if not self._is_plain:
                self._is_plain = True
                self.n_learned += 1
            yield "", self.number, stamp, line[stamp.end() : LONGEST_LINE], True
        elif len(line) < SHORTEST_LINE and not (self._is_json or self._forms):
            self.is_own = False
            if self._others is None or not self._others.takes(self.number, "", line):
                yield self.last, self.number, None, line, False
        elif line and not line.isspace():
            yield from self._unstamped(line)
        elif not self._is_json:  # it may be inside the text of a token
            self.is_own = False
            yield self.last, self.number, None, line, False

    def _unstamped(self, line: str) -> Iterator[LogLine]:
        """A line that does not start with a time."""
        start = line.find("{", 0, _LONGEST_PREFIX) if "}" in line[-2:] else -1
        if start >= 0:
            found = unwrapped(line[start:].strip())
            if found is not None and found[0]:
                text, name, time = found
                name = name or self.source(line[:start])
                for i, part in enumerate(text.rstrip("\n").split("\n")):
                    if self._others is None or not self._others.takes(self.number, name, part):
                        yield self._placed(part, name, time, is_first=i == 0 and time is not None)
                return
            if self._is_json and found is not None:
                return  # an object without meaning
        if self._is_json and (start >= 0 or self._head(line) is None):
            self.is_own = False
            yield self.last, self.number, None, None, True
            return
        if self._others is None or not self._others.takes(self.number, "", line):
            yield self._placed(line, "", None, is_first=False)

    def own_source(self, line: str) -> tuple[str | None, int]:
        """The server named at the start of a line, None for none, and the start of the text after a
        following time, 0 without a time."""
        if (found := STAMP.match(line)) is not None:
            return "", found.end()
        if (begin := self._form_of(line) if self._forms else None) is None:
            return None, 0
        found = None if self._is_plain else STAMP.match(line, begin.end())
        return self.source(begin[0]), 0 if found is None else found.end()

    @property
    def has_names(self) -> bool:
        """Whether lines may name their server at the start."""
        return self._is_plain or bool(self._forms)

    @property
    def may_join(self) -> bool:
        """Whether a line without a prefix continues the previous one."""
        return not (self._is_json or self._forms)

    @property
    def is_json(self) -> bool:
        """Whether lines are objects that contain lines."""
        return bool(self._is_json)

    @staticmethod
    def _head(line: str) -> re.Match[str] | None:
        """The start of a server's own text in a line."""
        found = STAMP.search(line, 0, _LONGEST_PREFIX) if may_have_stamp(line) else None
        if found is None and any(map(line.__contains__, _OF_BARE)):
            found = _BARE.search(line, 0, _LONGEST_PREFIX)
        return found

    def _placed(self, line: str, name: str, time: int | None, *, is_first: bool) -> LogLine:
        """A line with its server. name: from its wrapper."""
        begin = self._form_of(line)
        found = self._head(line) if begin is None else self._head_at(line, begin.end())
        if found is not None:
            prefix = begin[0] if begin is not None else line[: found.start()]
            # unterminated text of a server that writes no prefix
            is_own = self._is_plain and (found.re is not STAMP or not prefix[-1:].isspace())
            own = "" if begin is None and is_own else self.source(prefix)
            if own not in self._formed and not prefix.isspace():
                self._learn_form(prefix)
                self._formed.add(own)
            self.last = f"{name} {own}".strip() if name else own
            self.prefix = None if name else prefix
            is_stamp = found.re is STAMP
            at: Time = found if is_stamp and time is None else time
            start = found.end() if is_stamp else found.start(1)
            return self.last, self.number, at, line[start:LONGEST_LINE], True
        line = line[:LONGEST_LINE]
        if name or time is not None:
            self.last, self.prefix = name, None
            return name, self.number, time, line, is_first
        if begin is not None:
            self.last, self.prefix = self.source(begin[0]), begin[0]
            return self.last, self.number, None, line[begin.end() :], False
        self.is_own = False  # without its neighbours' prefix it is another program's
        return self.last, self.number, None, line, bool(self._forms)

    @staticmethod
    def _head_at(line: str, start: int) -> re.Match[str] | None:
        """The start of a server's text after a prefix, if it is there."""
        found = STAMP.match(line, start) or _BARE.match(line, start)
        if found is None and may_have_stamp(line):
            found = STAMP.search(line, start, start + _LONGEST_PREFIX)
        return found

    def source(self, prefix: str) -> str:
        """The server identified by a prefix; "" if nothing in it is constant."""
        if not prefix:
            return ""
        found = self._names.get(prefix)
        if found is None:
            if len(self._names) >= _MOST_PREFIXES:  # times in them
                self._names.clear()
            found = self._names[prefix] = name_of(prefix, is_loose=self._is_loose)
        return found

    def _form_of(self, line: str) -> re.Match[str] | None:
        """The prefix of a line, if its kind is known."""
        matches = (form.match(line) for form in self._forms.values())
        return next((one for one in matches if one is not None), None)

    def _learn(self, lines: list[str]) -> None:
        """Decide from the first lines whether numbers in prefixes identify servers: `grep -n`
        counts lines."""
        heads = [(line, self._head(line)) for line in lines if STAMP.match(line) is None]
        prefixes = [line[: head.start()] for line, head in heads if head is not None]
        if len(prefixes) > 1:
            self._has_learned = True
            names = {name for prefix in prefixes if (name := self.source(prefix))}
            self.n_learned += 1
            self._is_loose = len(names) > 1 and len(prefixes) < _MANY * len(names)
            self._names.clear()
        elif len(lines) > 1:
            self._has_learned = True

    def _learn_form(self, prefix: str) -> None:
        """Learn the kind of prefix; continuation lines have the same one with other times and
        numbers."""
        if not prefix or len(self._formed) >= _MOST_PREFIXES:
            return
        form, at = "", 0
        for part in _VARIABLE.finditer(prefix.rstrip()):
            form += re.escape(prefix[at : part.start()])
            kinds = {"digits": r"\d{1,20}", "gap": " {1,40}", "level": "[A-Za-z]{1,8}"}
            form, at = form + kinds.get(part.lastgroup or "", f"(?:{_TIMES.pattern})"), part.end()
        form += re.escape(prefix.rstrip()[at:]) + ("[ \t]?" if prefix[-1:] in " \t" else "")
        if form not in self._forms:
            if len(self._forms) >= _MOST_FORMS:
                del self._forms[next(iter(self._forms))]
            self._forms[form] = re.compile(form)
            self.n_learned += 1
