"""Line shapes, by which most of a long log is read in columns: a shape is a line with every number
replaced by one digit. Lines of one shape differ only in their numbers, so they are read like the
first of them: the same numbers are its values, or it is meaningless."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import compress, repeat
from typing import Any, TypeAlias

import numpy as np

from engine.observe.rounds.log_words import CHUNK, Saying, Value
from kernels.lines import CUT, scanned

Place: TypeAlias = tuple[int, int]
"""Place of a byte: the last number that ends before it, -1 for none, and the bytes from there; the
next number and minus the bytes up to it; or -2 and the bytes before the end of the line."""
_Column: TypeAlias = tuple[tuple[int, ...], Place, Place, float | None]
"""The numbers of a value, start and end if it is a text, and its maximum."""
MOST_SHAPES = 1 << 16
LONGEST_SHAPE = 2048
FEW = 16
"""Fewer lines of a shape in a block are read individually."""
_MOST_DIGITS = 15
"""Digits of a number that float64 represents exactly."""
_AT_END = -2
_ANYWHERE: Place = (-1, 0)
_MANY_GROUPS = 16
_MOST_MINUTES = 7
"""Digits of minutes in a time: 19 years."""
_NUMBER = re.compile(rb"[0-9]+")
_STAMP = rb"[0-9]{1,9}\.[0-9]{2}\.[0-9]{3}\.[0-9]{3} [IWEDC] "
_ENDS_LATER = re.compile(
    _STAMP
    + rb"[^'\n]{0,200}(?:next token:|draft candidate)[^'\n]{1,96} '[^'\n\0\\\x1b]{0,64}\n+'\n"
    rb"(?=" + _STAMP + rb")"
)
"""An entry whose token text ends with line ends, before another entry."""
_OTHER_DIGITS = str.maketrans("0123456789", "1234567890")
_SAYS = re.compile(
    rb"slot |id_slot|draft|accept|spec|statistics|eval time|better prompt|called impl|done yield"
    rb"|n_(?:gen|decoded|rs_seq|batch|past|tokens) |build|llama_server|main: |model|next token"
    rb"|candidate|update slots|mean |per pos|Aggregate|metrics: |Decode batch|throughput:|pred="
    rb"|adaptive |sampling|rejection_|threshold_|MTP[\[ ]|freq_|file size| K \(|- n_max="
    rb"|CtxLimit:|D(?:raft|Flash g)|Metrics \(|\[Seq |vlm_mtp"
    rb"|\\u|\x1b"
)
"""Parts of a shape that may mean something to any reader."""
_BARE = re.compile(rb"srv |que |cmn |llama_|common_|\[ |system|total time|[0-9]\.0\.0\.0 |\}.?$")
"""Parts of a line in which a server's text may start without a time, or a second one, or a wrapped
one."""


class Reading:
    """How lines of a shape are read. whose, name, kind: see `Saying` and `Read`. columns: of slot
    and task if any, and of the values. time: the first number of a time. stream: the server, unless
    the prefix names another by its numbers; is_own: whether the line identifies its server."""

    __slots__ = (
        "columns", "handler", "is_mark", "is_own", "kind", "may_go_on", "name", "numbers", "prefix",
        "same", "stream", "time", "times", "whose",
    )  # fmt: skip

    def __init__(
        self, line: str, whose: str, saying: Saying | None, stream: str, *, is_own: bool
    ) -> None:
        self.whose, self.stream, self.is_own = whose, stream, is_own
        self.name, self.kind = saying[:2] if saying is not None else ("", "")
        self.handler: Callable[..., bool | None] | None = None
        self.is_mark = self.may_go_on = False
        """Whether it marks a phase, and whether text may follow."""
        self.numbers = [found.span() for found in _NUMBER.finditer(line.encode())]
        self.columns: list[_Column | None] = []
        self.time: int | None = None
        self.times = 0
        """Number of numbers in a time, 4 or 1."""
        self.prefix = (0, (-1, 0))
        """Number of numbers in the prefix, and its end."""
        self.same: list[tuple[int, int]] = []
        """Numbers that identify the server and must be equal."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Readings with equal keys are equal."""
        of_time, of_stream = (self.time, self.times), (self.stream, self.is_own, self.prefix)
        what = self.whose, self.name, self.kind
        return what, of_time, of_stream, tuple(self.columns), tuple(self.same)

    def place(self, line: str, at: int) -> Place | None:
        """Place of a character in every line of the shape; None inside a number."""
        byte = at if line.isascii() else len(line[:at].encode())
        last = -1
        for i, (begin, end) in enumerate(self.numbers):
            if begin < byte < end:
                return None
            if end <= byte:
                last = i
        return last, byte - (self.numbers[last][1] if last >= 0 else 0)

    def add(self, line: str, at: int, values: Sequence[Value]) -> bool:
        """Add columns for values, whose places are counted from a character on; returns whether
        that is possible."""
        for begin, end, most in values:
            if begin < 0:
                self.columns.append(None)
                continue
            first, last = self.place(line, at + begin), self.place(line, at + end)
            if first is None or last is None:
                return False
            inside = tuple(range(first[0] + 1, last[0] + 1))
            if most is None:
                inside = ()
                byte = len(line[: at + end].encode())  # equal for any text
                if last[0] == len(self.numbers) - 1:
                    last = _AT_END, len(line.encode()) - byte
                elif (before := byte - self.numbers[last[0] + 1][0]) < 0:
                    last = last[0] + 1, before
            else:
                text = line[at + begin : at + end]
                is_plain = re.fullmatch(
                    r"[0-9]+" if isinstance(most, int) else r"[0-9]+(?:\.[0-9]+)?", text
                )
                if is_plain is None:
                    return False
                first = last = _ANYWHERE  # lines may have other gaps before it
            self.columns.append((inside, first, last, most))
        return True

    def set_time(self, line: str, time: re.Match[str] | int | None) -> bool:
        """Set the place of the time, if any; returns whether it is known."""
        if isinstance(time, int):
            digits = str(time).encode()
            found = [i for i, (a, b) in enumerate(self.numbers) if line.encode()[a:b] == digits]
            self.time, self.times = found[0] if found else None, 1
            return len(found) == 1
        if time is not None:
            start = line.find(time.string)
            place = self.place(line, start + time.start(1)) if start >= 0 else None
            self.time, self.times = (None if place is None else place[0] + 1), 4
            return place is not None
        return True

    def set_prefix(self, line: str, prefix: str | None, name: Callable[[str], str]) -> bool:
        """Set the part of a line that identifies its server, None for parts of a wrapper; returns
        whether it is known."""
        if prefix is None:
            text = line.encode()
            names = set(_NUMBER.findall(self.stream.encode()))
            self.same = [(i, int(text[a:b])) for i, (a, b) in enumerate(self.numbers)
                         if text[a:b] in names and b - a <= _MOST_DIGITS]  # fmt: skip
            return len(self.same) >= len(names)
        end = self.place(line, len(prefix))
        if end is not None and name(prefix) == self.stream:
            self.prefix = end[0] + 1, end
        return end is not None


def shape_of(line: str) -> bytes:
    """The shape of a line."""
    return _NUMBER.sub(b"0", line.encode("utf-8", "surrogatepass"))


def read_as(shape: bytes) -> bytes:
    """The shape that a shape's lines are read as: token texts are arbitrary, and if something
    follows, texts without numbers or quotes."""
    if not (b"next token:" in shape or b"draft candidate" in shape):
        return shape
    head, quote, rest = shape.partition(b" '")
    text, _, tail = rest.rpartition(b"'")
    other = (b"0", b"'", b"\\u", b"\x1b", b"\\") if tail else (b"\\u", b"\x1b")
    is_any = text and tail[:1] in (b"", b'"', b"\\") and not any(one in text for one in other)
    return head + quote + b"x'" + tail if is_any else shape


def closed_shape(shape: bytes) -> bytes | None:
    """The shape of a candidate's line whose text has no closing quote; None for others."""
    head, _, text = shape.partition(b" '")
    is_one = b"draft candidate" in head and text == text.rstrip()
    is_any = is_one and not any(one in text for one in (b"'", b"\\u", b"\x1b"))
    return head + b" 'x'" if is_any else None


def lengths_of_runs(is_one: np.ndarray, shortest: int) -> dict[int, int]:
    """Length of each run of True, by start."""
    begins = np.flatnonzero(np.diff(is_one, prepend=not is_one[:1].all()))
    lengths = np.diff(begins, append=len(is_one))
    is_long = (lengths >= shortest) & is_one[begins]
    return dict(zip(begins[is_long].tolist(), lengths[is_long].tolist(), strict=True))


def without_repeats(
    whose: np.ndarray, is_silent: np.ndarray, todo: np.ndarray
) -> tuple[np.ndarray, list[bool]]:
    """Lines without those that only say that a slot works on a task, as the server's next line
    does; and which of the rest are of the same slot and task as their server's previous one with a
    slot. Lines that must be read individually separate the lines of all servers. whose: int64 [4,
    n], see `LogReader`. is_silent: slot lines without content."""
    is_known = whose[0, todo] >= 0
    part = np.cumsum(~is_known)
    order = np.argsort(whose[0, todo], kind="stable")
    server, slot, task, us = whose[:, todo[order]]
    is_next = (us[1:] >= us[:-1]) & ((us[1:] < 0) == (us[:-1] < 0))
    is_next &= (server[1:] == server[:-1]) & is_known[order[1:]]
    is_next &= part[order[1:]] == part[order[:-1]]
    is_later = is_next & (slot[1:] >= 0)
    chain = np.concatenate([np.zeros(1, np.int64), np.cumsum(~is_next)])
    last = np.maximum.accumulate(np.where(slot == -1, 0, np.arange(len(slot))))[:-1]
    is_same = is_later & (slot[1:] == slot[last]) & (task[1:] == task[last])
    is_same &= chain[1:] == chain[last]
    goes_on, is_left = np.zeros(len(todo), bool), np.ones(len(todo), bool)
    goes_on[order[1:]] = is_same
    is_left[order[1:-1]] = ~(is_same[:-1] & is_later[1:] & is_silent[todo[order[1:-1]]])
    return todo[is_left], goes_on[is_left].tolist()


def says_nothing(shape: bytes, start: int) -> bool:
    """Whether lines of a shape are meaningless to every reader. start: of the text after the time,
    0 without a time."""
    head, chunk, _ = shape.partition(CHUNK.encode())
    if _SAYS.search(head) is not None:
        return False
    if chunk:
        return True
    return b"0.0.0.0 " not in shape[start:] if start else _BARE.search(shape) is None


class Burst:
    """A block of lines, and the numbers in them."""

    def __init__(self, data: bytes, *, cuts: bool = False, joins: bool = False) -> None:
        """data: whole lines with line ends. cuts: whether data sent to clients may be truncated.
        joins: whether a line may continue after a line end that is a token's text."""
        self._data = data
        inner = _inner_ends(data) if joins else []
        self._scanned = found = scanned(_without(data, inner), cuts=cuts)
        self.n_lines = len(found.ends)
        self.shape_of, self.hashes = found.shape_of, found.hashes.tolist()
        self._ends, self._lengths, self._first = found.stops, found.lengths, found.first
        self._line_ends = found.ends
        self._lines = np.concatenate([np.zeros(1, np.int64), found.ends[:-1] + 1])
        self.before = np.arange(self.n_lines + 1)
        """Number of original lines before each of these, and in total."""
        if inner:
            self.before += np.searchsorted(inner, np.append(self._lines, len(data)))

    def line(self, number: int) -> str:
        """A line, without its end."""
        begin, end = int(self._lines[number]), int(self._line_ends[number])
        return self._data[begin:end].decode("utf-8", "surrogatepass")

    def is_cut(self, shape: int) -> bool:
        """Whether lines of a shape continue differently."""
        return bool(self.hashes[shape] & CUT)

    def example(self, shape: int) -> str:
        """The first line of a shape."""
        return self.line(int(self._scanned.first_of[shape]))

    def _whole(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values of numbers, int64, and their number of digits; wrong above 15 digits."""
        return self._scanned.values[numbers], self._lengths[numbers]

    def _places(self, rows: np.ndarray, place: Place) -> np.ndarray:
        number, after = place
        if number == _AT_END:
            return self._line_ends[rows] - after
        if number < 0:
            return self._lines[rows] + after
        numbers = self._first[rows] + number
        return self._ends[numbers] + after - (self._lengths[numbers] if after < 0 else 0)

    def times(self, reading: Reading, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Microseconds of lines, -1 without a time, and which lines have a valid one."""
        if reading.time is None:
            return np.full(len(rows), -1), np.ones(len(rows), bool)
        first = self._first[rows] + reading.time
        us, n = self._whole(first)
        if reading.times == 1:
            return us, n <= _MOST_DIGITS
        is_good = n <= _MOST_MINUTES
        for i, (unit, digits) in enumerate(((60, 2), (1000, 3), (1000, 3)), 1):
            part, n = self._whole(first + i)
            us, is_good = us * unit + part, is_good & (n == digits)
        return us, is_good

    def columns(self, reading: Reading, rows: np.ndarray) -> tuple[list[Any], np.ndarray]:
        """Values of lines by column, and which lines are in range. Columns are the time in
        microseconds, and arrays of integers or decimals, texts, or None."""
        us, is_good = self.times(reading, rows)
        first = self._first[rows]
        found: list[Any] = [None if reading.time is None else us]
        for column in reading.columns:
            if column is None:
                found.append(None)
                continue
            inside, begin, end, most = column
            if most is None:
                of = self._data if self._ascii is None else self._ascii
                found.append(LogTexts(of, self._places(rows, begin), self._places(rows, end)))
                continue
            value, n = self._whole(first + inside[0])
            is_good &= n <= _MOST_DIGITS
            if len(inside) == 2:
                part, digits = self._whole(first + inside[1])
                is_good &= n + digits <= _MOST_DIGITS
                power = 10.0 ** np.minimum(digits, _MOST_DIGITS)
                value = (value * power + part) / power
            elif isinstance(most, float):
                value = value.astype(float)
            is_good &= value <= most
            found.append(value)
        for number, same in reading.same:
            value, n = self._whole(first + number)
            is_good &= (value == same) & (n <= _MOST_DIGITS)
        return found, is_good

    @cached_property
    def _ascii(self) -> str | None:
        """All lines as text, if they are ASCII."""
        return self._data.decode("ascii") if self._data.isascii() else None

    def streams(
        self, reading: Reading, rows: np.ndarray, name: Callable[[str], str]
    ) -> tuple[list[str], np.ndarray]:
        """Servers, and the index of each line's server. name: identifies a server by prefix."""
        n_numbers, end = reading.prefix
        of = np.zeros(len(rows), np.int64)
        if not n_numbers:
            return [reading.stream], of
        numbers = self._first[rows][:, None] + np.arange(n_numbers)
        lengths = self._lengths[numbers]

        def prefix(i: int) -> str:
            (last,) = self._places(rows[i : i + 1], end)
            return self._data[self._lines[rows[i]] : last].decode("utf-8", "replace")

        kinds, kind_of = _groups(lengths.T)
        keys = np.zeros((n_numbers + 1, len(rows)), np.int64)
        keys[-1] = kind_of
        for kind, example in enumerate(kinds):
            mine = np.flatnonzero(kind_of == kind)
            for number in _telling(prefix(example), name):
                keys[number, mine] = self._whole(numbers[mine, number])[0]
        first, of = _groups(keys)
        return [name(prefix(i)) for i in first], of

    def stream(self, reading: Reading, line: int, name: Callable[[str], str]) -> str:
        """The server of one line."""
        n_numbers, end = reading.prefix
        if not n_numbers:
            return reading.stream
        (last,) = self._places(np.array([line]), end)
        return name(self._data[self._lines[line] : last].decode("utf-8", "replace"))

    @staticmethod
    def rows(
        rows: np.ndarray,
        columns: list[Any],
        is_good: np.ndarray,
        streams: tuple[list[str], np.ndarray],
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Number and values of each line in range: server, time in microseconds and columns."""
        parts = [repeat(None) if one is None else one.tolist() for one in columns]
        names, which = streams
        of = repeat(*names) if len(names) == 1 else map(names.__getitem__, which.tolist())
        found = zip(rows.tolist(), zip(of, *parts, strict=False), strict=False)
        return found if is_good.all() else compress(found, is_good.tolist())


def _inner_ends(data: bytes) -> list[int]:
    """Places of line ends that are a token's text."""
    found: list[int] = []
    if b"next token" not in data and b"draft candidate" not in data:
        return found  # a tenth of the time of searching for them
    at = data.find(b"\n'\n")
    while at >= 0:
        end = at
        while end and data[end - 1] == 10:
            end -= 1
        if _ENDS_LATER.match(data, data.rfind(b"\n", 0, end) + 1) is not None:
            found += range(end, at + 1)
        at = data.find(b"\n'\n", at + 2)
    return found


def _without(data: bytes, places: list[int]) -> bytes:
    """A text with characters replaced at some places."""
    if not places:
        return data
    found = bytearray(data)
    for place in places:
        found[place] = 32
    return bytes(found)


class LogTexts:
    """Parts of a text, sliced on access: from each start to its end."""

    def __init__(self, of: str | bytes, begins: np.ndarray, ends: np.ndarray) -> None:
        self._of, self._begins, self._ends = of, begins, ends

    def blank(self, n: int) -> LogTexts:
        """n empty parts."""
        return LogTexts(self._of, np.zeros(n, np.int64), np.zeros(n, np.int64))

    def put(self, rows: np.ndarray, others: LogTexts) -> None:
        """Replace some parts by others of the same text."""
        self._begins[rows], self._ends[rows] = others._begins, others._ends

    def __getitem__(self, at: Any) -> Any:
        """One part, or a selection for a slice or an array."""
        if isinstance(at, (slice, np.ndarray)):
            return LogTexts(self._of, self._begins[at], self._ends[at])
        return self[at : at + 1].tolist()[0]

    def tolist(self) -> list[str]:
        """All parts as strings."""
        parts, of = map(slice, self._begins.tolist(), self._ends.tolist()), self._of
        found: Any = map(of.__getitem__, parts)
        if isinstance(of, str):
            return list(found)
        if not len(self._begins):
            return []
        # no text contains both at a line end
        return b"\0\n".join(found).decode("utf-8", "replace").split("\0\n")


def _groups(keys: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Equal columns of keys, int64 [m, n]: the first of each group, and the group of each
    column."""
    keys = keys[(keys != keys[:, :1]).any(1)]
    of = np.zeros(keys.shape[1], np.int64)
    first, left = [0], np.flatnonzero((keys != keys[:, :1]).any(0))
    while len(left):
        one = int(left[0])
        if len(first) >= _MANY_GROUPS:
            _, begins, rest = np.unique(
                keys[:, left], axis=1, return_index=True, return_inverse=True
            )
            of[left] = len(first) + rest.ravel()
            return first + left[begins].tolist(), of
        is_other = (keys[:, left] != keys[:, one : one + 1]).any(0)
        of[left[~is_other]] = len(first)
        first.append(one)
        left = left[is_other]
    return first, of


def _telling(prefix: str, name: Callable[[str], str]) -> list[int]:
    """The numbers in a prefix that identify its server."""
    found, here = [], name(prefix)
    for i, number in enumerate(re.finditer(r"[0-9]+", prefix)):
        other = number[0].translate(_OTHER_DIGITS)
        if name(prefix[: number.start()] + other + prefix[number.end() :]) != here:
            found.append(i)
    return found
