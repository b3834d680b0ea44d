"""Reader of a llama-server's log: at `-lv 5` with LLAMA_TRACE=1 all rounds with their tokens, with
LLAMA_TRACE=1 alone those with a draft (the light form), otherwise the sums at the end of every
request."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from copy import copy
from typing import Any, TypeAlias

import numpy as np

from engine.errors import check_most
from engine.foreign import OutOfRangeError
from engine.observe.rounds.log_lines import LogLines, OfShape, OtherLines, Time
from engine.observe.rounds.log_rounds import LightRows, LookedAt, Slot
from engine.observe.rounds.log_shapes import (
    FEW,
    LONGEST_SHAPE,
    MOST_SHAPES,
    Burst,
    Reading,
    closed_shape,
    read_as,
    says_nothing,
    shape_of,
    without_repeats,
)
from engine.observe.rounds.log_text import decoded, encoded, unwrapped
from engine.observe.rounds.log_words import CHUNK, Saying
from engine.observe.rounds.server_log import LogServers, Read, ServerLog

MOST_ROUNDS = 1 << 22
_FEW_LINES = 64
"""Blocks of fewer lines are read without shapes."""
_USUAL_LINE = 128
_FIRST_BYTES, _MOST_BYTES = 1 << 13, 1 << 23
"""Size of the first block, when no shapes are known, and of the largest."""
_MOST_HASHES = 1 << 18
_MOST_BETWEEN = 64
"""Most lines of other servers examined between two of one server."""
_NUMBERS = re.compile("[0-9]+")
_BETWEEN = ("impl", "candidate", "statistics")
"""Lines of a server between those of a slot, after which it continues."""
_OfReading: TypeAlias = tuple[np.ndarray, list[Any], np.ndarray, tuple[list[str], np.ndarray]]
"""Lines read alike: their numbers in the block, their columns, which lines are in range, and their
servers (`Burst.columns`, `Burst.streams`)."""
_QUIET = Reading("", "nothing", None, "", is_own=False)
"""For lines without any word that a reader looks for."""


class LogReader(LogServers):
    """Reads a growing log."""

    def __init__(
        self,
        others: OtherLines | None = None,
        fold: Callable[[ServerLog], int] | None = None,
        *,
        has_batches: bool = False,
    ) -> None:
        """others: reads lines of other engines. fold: merges requests of a server if there are more
        than a trace can hold; returns how many. has_batches: whether rounds of the light form may
        be kept as batches."""
        super().__init__(fold)
        self._lines, self._others = LogLines(others), others
        self._has_batches = has_batches
        self._by_stream: dict[str, ServerLog] = {}
        self._waiting: set[str] = set()
        """Servers whose newest line may be continued."""
        self._n_block = _FIRST_BYTES
        self._by_hash: dict[int, Reading] = {}
        """By the hash of a shape."""
        self._readings: dict[bytes, Reading] = {}
        """By shape."""
        self._kinds: dict[tuple[Any, ...], Reading] = {}
        """The same by key."""
        self._open: dict[Reading, Reading] = {}
        """The same for texts that end with two quotes."""

    def feed(self, text: str | bytes) -> None:
        """Add a part of the log, cut anywhere, or as UTF-8 in whole characters. Raises
        TraceFileError for more than a trace can hold."""
        self._take(self._lines.lines(encoded(text) if isinstance(text, str) else text))

    def end(self) -> None:
        """End of the log: the last entry is complete, unless the server ended in it."""
        known = {
            one: (one.n_unread, one.first_unread, one.has_wrong_numbers) for one in self.servers
        }
        self._take(self._lines.last_lines())
        for server in self._by_stream.values():
            server.end()
            if self._lines.is_cut and server in known:  # its last line may be incomplete
                server.n_unread, server.first_unread, server.has_wrong_numbers = known[server]

    def let_go(self) -> None:
        """Free everything now instead of waiting for the garbage collector."""
        for held in (self.servers, self.requests, self._by_stream):
            held.clear()

    def _take(self, data: bytes) -> None:
        """Read whole lines."""
        at = 0
        while at < len(data):
            end = data.find(b"\n", at if self._is_waiting else at + self._n_block) + 1 or len(data)
            lines, at = data[at:end], end
            may_be_few = len(lines) < _FEW_LINES * _USUAL_LINE
            if self._is_waiting or (may_be_few and lines.count(b"\n") < _FEW_LINES):
                for line in decoded(lines).split("\n")[:-1]:
                    self._place(line)
            else:
                known = self._lines
                self._take_block(Burst(lines, cuts=not known.is_json, joins=known.may_join))
            self._n_block = min(2 * self._n_block, _MOST_BYTES)
        n_rounds = sum(server.n_rounds for server in self.servers)
        check_most("The log", n_rounds, MOST_ROUNDS, "rounds")

    def _take_block(self, block: Burst) -> None:
        """Read many lines: known shapes by column, others one by one. Meaningless lines are
        skipped."""
        numbers = (self._lines.number + block.before).tolist()
        unknown: dict[int, bytes | None] = {}
        known = list(map(self._by_hash.get, block.hashes))
        for i, reading in enumerate(known):
            if reading is None:
                known[i], unknown[i] = self._known(block, i)
        of_line = block.shape_of
        columns, light, looked, others, whose = self._columns(block, known)
        says_more = np.array([one is None or one.whose != "nothing" for one in known])[of_line]
        for _, (_, _, rows, _) in others:
            says_more[rows] = False
        is_silent = np.array([one is not None and one.handler is None for one in known])
        left, goes_on = without_repeats(whose, is_silent[of_line], np.flatnonzero(says_more))
        values = self._values(block, columns, left)
        may_go_on = np.array([one is not None and one.may_go_on for one in known])
        for i in np.flatnonzero(may_go_on[of_line]).tolist() if may_go_on.any() else ():
            source = looked.server(i)
            after = known[of_line[i + 1]] if i + 1 < block.n_lines else None
            key = (after.stream, after.is_own, after.time is None, after.prefix[0]) if after else ()
            if source is None or key == (source, True, False, 0):
                continue  # an entry of the same server begins, as nearly always
            if not self._is_whole(block, i, source):
                looked.drop(i)
        runs, drafts = light.runs(left), looked.drafts(left)
        shapes, todo = of_line[left].tolist(), left.tolist()
        n_learned, at, placed = self._lines.n_learned, 0, -1
        slots: dict[str, tuple[ServerLog, Slot] | None] = {}
        """By server the slot of its newest line, if any."""
        while at < len(todo):
            i = todo[at]
            if runs and (n := runs.get(at, 0)) and self._say_light(light, left[at : at + n]):
                at += n
                slots.clear()
                continue
            if drafts and (draft := drafts.get(at)) and self._say_draft(*draft[1:]):
                at += draft[0]
                continue
            reading, row = known[shapes[at]], values[i] or light.row(i) or looked.row(i)
            if reading is not None and row is not None:
                server = self._by_stream.get(row[0]) if reading.is_mark else None
                if server is not None and server.has_times and not server.is_waiting:
                    server.clock.mark(row[1], reading.kind)
                    at += 1
                    continue
                if goes_on[at] and (known_slot := slots.get(row[0])) is not None:
                    server, mine = known_slot  # and no line of it has an earlier time
                    server.last_us = us = row[1]
                    said = numbers[i] + 1, us, reading.kind
                    try:
                        is_said = reading.handler is None or (
                            reading.handler(server, mine, said, *row[4:]) is not False
                        )
                    except OutOfRangeError:
                        is_said = False
                else:
                    is_said, found = self._say(reading, numbers[i] + 1, row)
                    if reading.whose == "slot":
                        slots[row[0]] = found
                if is_said:
                    at += 1
                    continue
            slots.clear()
            self._say_others(block, others, numbers, placed, i)
            self._lines.last = self._stream_before(block, known, i, placed)
            self._lines.number = numbers[i]
            bad, shape = self._place_all(block.line(i), unknown.get(shapes[at])), shapes[at]
            while self._is_waiting and i + 1 < block.n_lines:
                i += 1
                self._place_all(block.line(i))
            if self._lines.n_learned != n_learned:  # what was learned concerns other prefixes
                self._forget()
                n_learned = self._lines.n_learned
            placed = i
            at = bisect_right(todo, i, at)
            while bad is not None and at < len(todo) and shapes[at] == shape:
                bad.n_unread += 1  # not JSON either
                placed = todo[at]
                at += 1
        self._say_others(block, others, numbers, placed, block.n_lines)
        self._lines.last = self._stream_before(block, known, block.n_lines, placed)
        self._lines.number = numbers[-1]

    def _known(self, block: Burst, shape: int) -> tuple[Reading | None, bytes | None]:
        """The reading of a shape that is new to this block, if known, and the shape it is read as,
        if any."""
        line, is_cut = block.example(shape), block.is_cut(shape)
        if is_cut:
            line = line[: line.index(CHUNK) + len(CHUNK)]
        of_line = shape_of(line)
        key = None if is_cut else read_as(of_line)
        found = None if key is None else self._readings.get(key)
        if found is None and (
            self._is_quiet_object(line) if self._lines.is_json else self._is_quiet(of_line, line)
        ):
            found = _QUIET
        is_open = False
        if found is None and key is not None and (closed := closed_shape(key)) is not None:
            found, is_open = self._readings.get(closed), True
        if found is not None and (is_open or (found.name == "candidate" and of_line[-2:] == b"''")):
            if found not in self._open:
                self._open[found] = copy(found)
                self._open[found].may_go_on = True
            found = self._open[found]
        if found is not None:
            if len(self._by_hash) >= _MOST_HASHES:
                self._by_hash.clear()
            self._by_hash[block.hashes[shape]] = found
        return found, key

    def _forget(self) -> None:
        for known in (self._readings, self._kinds, self._by_hash, self._open):
            known.clear()

    def _is_whole(self, block: Burst, line: int, source: str) -> bool:
        """Whether the next line of this line's server begins an entry."""
        lines = range(line + 1, min(line + _MOST_BETWEEN, block.n_lines))
        found = (self._lines.own_source(block.line(after)) for after in lines)
        mine = next((one for one in found if one[0] is None or one[0] == source), (None, 0))
        return mine[0] is not None and mine[1] > 0

    def _is_quiet(self, shape: bytes, line: str) -> bool:
        """Whether lines of an unknown shape can be skipped. line: one of them."""
        if len(shape) > LONGEST_SHAPE:
            return False
        source, start = self._lines.own_source(line)
        server = self._by_stream.get(source or "")
        if start and (server is None or not server.has_times):
            return False  # the first line with a time shows that there are times
        return says_nothing(shape, len(_NUMBERS.sub("0", line[:start]).encode()))

    def _is_quiet_object(self, line: str) -> bool:
        """The same for a JSON line."""
        if not line or line.isspace():
            return True
        text, name, time = unwrapped(line) or ("", "", None)
        server, said = self._by_stream.get(name), text.rstrip("\n")
        if not said or "\n" in said or (time is not None and not (server and server.has_times)):
            return False
        return len(said) < LONGEST_SHAPE and says_nothing(shape_of(said), 0)

    def _say_others(
        self,
        block: Burst,
        parts: list[tuple[str, OfShape]],
        numbers: list[int],
        after: int,
        before: int,
    ) -> None:
        """Read the lines of other engines between two lines. numbers: number of lines before each
        line."""
        mine = []
        for source, (name, kind, rows, columns) in parts:
            begin, end = np.searchsorted(rows, (after + 1, before)).tolist()
            if begin < end:
                of = [one if one is None else one[begin:end] for one in columns]
                mine.append((source, (name, kind, rows[begin:end], of)))
        for line in self._others.say_all(mine) if mine and self._others is not None else ():
            self._lines.number = numbers[line]
            self._place_all(block.line(line))

    def _columns(
        self, block: Burst, known: list[Reading | None]
    ) -> tuple[list[_OfReading], LightRows, LookedAt, list[tuple[str, OfShape]], np.ndarray]:
        """Lines by reading; light-form rounds and candidates separately; lines of other engines by
        server and shape; and server, slot, task and time of lines, int64 [4, n], -1 if absent, slot
        -2 for lines about the server. known: reading of each shape."""
        of_line = block.shape_of
        kinds: dict[Reading | None, int] = {}
        kind = np.array([kinds.setdefault(one, len(kinds)) for one in known], np.uint16)[of_line]
        order = np.argsort(kind, kind="stable")
        ends = np.cumsum(np.bincount(kind, minlength=len(kinds)))
        mine: list[_OfReading] = []
        light, looked = LightRows(len(of_line)), LookedAt(len(of_line))
        whose = np.full((4, len(of_line)), -1)
        numbers: dict[str, int] = {}
        others: list[tuple[str, OfShape]] = []
        for reading, rows in zip(kinds, np.split(order, ends[:-1]), strict=True):
            if reading is None or reading.whose == "nothing" or len(rows) < FEW:
                continue
            is_other = reading.whose == "other"
            names = self._others if is_other and self._others is not None else self._lines
            columns, is_good = block.columns(reading, rows)
            streams = block.streams(reading, rows, names.source)
            if is_other:
                for i, name in enumerate(streams[0]):
                    of_one = np.flatnonzero(is_good & (streams[1] == i))
                    parts = [one if one is None else one[of_one] for one in columns[1:]]
                    if len(of_one):
                        others.append((name, (reading.name, reading.kind, rows[of_one], parts)))
                continue
            if self._has_batches and (reading.name, reading.kind) == ("accepted", ""):
                light.add(rows, columns, is_good, streams)
            elif reading.name == "candidate":
                looked.add(rows, columns, is_good, streams)
            else:
                mine.append((rows, columns, is_good, streams))
            names_of, of = streams
            known_as = [numbers.setdefault(one, len(numbers)) for one in names_of]
            whose[0, rows] = np.array(known_as)[of]
            whose[0, rows[~is_good]] = -1
            whose[3, rows] = -1 if columns[0] is None else columns[0]
            if reading.whose == "slot":
                whose[1:3, rows] = columns[1:3]
            elif not (reading.is_mark or reading.name in _BETWEEN):
                whose[1, rows] = -2
        return mine, light, looked, others, whose

    @staticmethod
    def _values(
        block: Burst, parts: list[_OfReading], left: np.ndarray
    ) -> list[tuple[Any, ...] | None]:
        """Values of the remaining lines, None for lines that must be read individually."""
        values: list[tuple[Any, ...] | None] = [None] * block.n_lines
        is_left = np.zeros(block.n_lines, bool)
        is_left[left] = True
        for rows, columns, is_good, (names, of) in parts:
            kept = is_left[rows]
            if not kept.all():
                rows, is_good, of = rows[kept], is_good[kept], of[kept]
                columns = [one if one is None else one[kept] for one in columns]
            for i, row in block.rows(rows, columns, is_good, (names, of)):
                values[i] = row
        return values

    def _say(
        self, reading: Reading, line: int, row: tuple[Any, ...]
    ) -> tuple[bool, tuple[ServerLog, Slot] | None]:
        """Apply a line of a known shape; False if it must be read individually. row: its server,
        time and values. Also returns the server and slot that continue if the next line is of the
        same slot and task, at no earlier time."""
        whose = reading.whose
        server, us = self._by_stream.get(row[0]), row[1]
        if server is None or server.is_waiting:
            return False, None
        if us is not None:
            server.has_times = True
        handler, said = reading.handler, (line, us, reading.kind)
        try:
            if whose == "slot":
                last = server.last_us
                falls = us is not None and last is not None and us < last
                if falls and server.requests and server.begins_again(us):
                    return False, None
                slot = server.slots.get(row[2])
                if slot is None or slot.request.task != row[3]:
                    slot = server.slot(row[2], row[3])
                server.works_on(slot, us)
                if slot.request.is_broken:
                    return True, None
                is_said = handler is None or handler(server, slot, said, *row[4:]) is not False
                return is_said, (server, slot)
            n_head = int(whose == "free")
            more = *row[2 : 2 + n_head], said, *row[2 + n_head :]
            return handler is not None and handler(server, *more) is not False, None
        except OutOfRangeError:
            return False, None

    @property
    def _is_waiting(self) -> bool:
        """Whether the next line may continue the previous one."""
        return bool(self._waiting) or (self._others is not None and self._others.is_waiting)

    def _say_light(self, light: LightRows, lines: np.ndarray) -> bool:
        """Apply rounds of the light form, in any order of servers; returns whether all are
        valid."""
        found = []
        for stream, rows in light.by_server(lines):
            server = self._by_stream.get(stream)
            if server is None or server.is_waiting or (of := server.light_rows(rows)) is None:
                return False
            found.append((server, rows, of))
        for server, rows, of in found:
            server.has_times |= bool(rows[0, -1] >= 0)
            server.take_light(rows, of)
        return True

    def _say_draft(self, name: str, has_times: bool, values: tuple[Any, ...]) -> bool:
        """Apply tokens that drafters considered, in sequence; returns whether they are valid."""
        server = self._by_stream.get(name)
        if server is None or server.is_waiting:
            return False
        server.has_times |= has_times
        server.take_candidates(*values)
        return True

    def _stream_before(self, block: Burst, known: list[Reading | None], i: int, placed: int) -> str:
        """The server of the previous line. placed: the newest line with a known server."""
        shapes, has_names = block.shape_of, self._lines.has_names
        for at in range(i - 1, placed, -1):
            one = known[shapes[at]]
            if one is _QUIET:
                source = self._lines.own_source(block.line(at))[0] if has_names else None
                if source is not None:
                    return source
            if one is not None and one.is_own:
                return block.stream(one, at, self._lines.source)
        return self._lines.last

    def _place_all(self, text: str, shape: bytes | None = None) -> ServerLog | None:
        """Like _place, for a line that may contain further entries."""
        if "\n" not in text:
            return self._place(text, shape)
        for line in text.split("\n"):
            self._place(line)
        return None

    def _place(self, line: str, shape: bytes | None = None) -> ServerLog | None:
        """Read a line individually; its reading is kept for others of its shape. Returns its log if
        it should be JSON and is not."""
        n, by_stream = 0, self._by_stream
        for stream, number, time, message, is_head in self._lines.placed(line):
            n += 1
            if (server := by_stream.get(stream)) is None:
                server = by_stream[stream] = self.begins(stream)
            after = by_stream[stream] = server.add(number, time, message, is_head)
            note = self._waiting.add if after.is_waiting else self._waiting.discard
            note(stream)
        if n == 1 and message is None:
            return server
        reading = None
        if shape is None or len(shape) > LONGEST_SHAPE or shape in self._readings:
            return None
        if n == 0 and self._others is not None and self._others.last_read is not None:
            reading = self._other_reading(line, *self._others.last_read)
        elif n == 1 and server is after and message is not None and after.last_read is not None:
            if (inner := after.inner) is not None:
                time, message = inner, inner.string[inner.end() :]
            reading = self._reading(line, stream, time, message, after.last_read)
        if reading is not None:
            if len(self._readings) >= MOST_SHAPES:
                self._forget()
            self._readings[shape] = self._kinds.setdefault(reading.key, reading)
        return None

    def _other_reading(self, line: str, saying: Saying, said: str, source: str) -> Reading | None:
        """The reading of another engine's shape."""
        start = line.find(said)
        if start < 0 or "\\u" in line or self._others is None:
            return None
        reading = Reading(line, "other", saying, source, is_own=False)
        begin, end, _ = saying[2][0]
        prefix = None if start else said[begin:end]
        is_known = reading.add(line, start, saying[2]) and reading.set_prefix(
            line, prefix, self._others.source
        )
        return reading if is_known else None

    def _reading(
        self, line: str, stream: str, time: Time, message: str, read: Read
    ) -> Reading | None:
        """The reading of a shape, from one line; None if others may differ."""
        whose, head, at, saying = read
        start = len(line) - len(message) if line.endswith(message) else line.find(message)
        if start < 0 or "\\u" in line:
            return None
        if whose == "free" and saying is None:
            whose, head = "nothing", ()
        if whose == "nothing":
            time = None
        reading = Reading(line, whose, saying, stream, is_own=self._lines.is_own)
        if saying is not None:
            reading.handler = getattr(ServerLog, f"on_{saying[0]}")
            reading.is_mark = (whose, saying[0]) == ("server", "mark")
        if not reading.is_own and whose != "nothing":
            return None
        is_known = (
            reading.add(line, start, head)
            and (saying is None or reading.add(line, start + at, saying[2]))
            and reading.set_time(line, time)
            and reading.set_prefix(line, self._lines.prefix, self._lines.source)
        )
        return reading if is_known else None
