"""Files of records as JSON values: whole files, one record per line, or the events of a stream.

A record is untrusted: its size, its depth and every number in it are checked before use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import chain, islice
from typing import Any

import msgspec

from engine.errors import TraceFileError, check_most
from engine.foreign import (
    COUNT,
    DEEPEST,
    LARGEST,
    LONGEST_DRAFT,
    MOST_VALUES,
    JsonError,
    Uncounted,
    are_whole,
    as_json,
    closed_object,
    is_real,
    is_whole,
    parse_json,
    plain_values,
    quick_json,
    value_end,
)
from engine.gguf.binary import shorten
from engine.observe.rounds.stream_rounds import Addition, additions, packed

MOST_BYTES = 64 << 20
MOST_STEPS = 1_000_000
_MOST_TEXT = 10_000
_DEEPEST = DEEPEST - 16
"""Largest depth: a trace may be nested 64 times, and what is kept of a record is inside it."""
_STAMP = re.compile(
    r"\[(?:\d{4}-\d\d-\d\d|\d\d/\d\d/\d{4})[ T-]\d\d:\d\d:\d\d[^\]\n]{0,20}\][^\n]{0,4000}?"
    r"(?:([{\[])[ \t\r]{0,9})?(?=\n|$)|(?:\{ )?\[\d{1,20} bytes data\]"
)
"""A log prefix before an object, at its end: of LM Studio, TensorRT-LLM or curl."""
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_FIELD = re.compile(r"(?:\S{1,60}\s+){0,3}?(data|event|id|retry|error|):(?:\s+|(?=[{\[])|$)")
_EVENT = re.compile(r"\s*(?:\S{1,60}\s+){0,3}?(?:data: ?[{\[]|event: ?\w)")
_KEY = re.compile(
    r'"((?:[^"\\\r\n]|\\.){1,100})"\s*:\s*|(?m:^)([A-Za-z_][\w\[\]]{0,60}) {0,20}[:=] ?(?=\{|\[\{)'
)
"""The name of a member, or of a value printed by a program."""
_BETWEEN = re.compile(r"[\s,}\]\x1e]*")
"""Characters between values; braces and brackets there belong to what was cut away."""
_DOTS = r"\s*+(?:\.{3}|…)\s*+"
_ELIDED = re.compile(
    rf'("(?:[^"\\]|\\.)*+"|\[(?:[^][{{}}".…]|\.(?!\.))*+\])|(\{{{_DOTS}\}}|\[[^][{{}}"]*+\])'
    rf'|,(?:{_DOTS}|\s*+)(?=\}})|(?<=\}}),{_DOTS}(?=\])|(?<=[{{,]){_DOTS},?(?=\s*+")'
)
"""A string or a whole list, a value or a list of numbers that a person has elided, members."""
_INSIDE = re.compile(r'(?<=[\s=:(])\{\s{0,9}"|(?<![\w"\\{])"\w{1,60}"\s?:\s?(?=[\d[])')
"""Start of an object, or of a named member of one, inside a line."""
_STATUS = re.compile(r"(?:<{1,2} )?HTTP/\d|.{0,400} HTTP/\d(?:\.\d)?$")
_HEADER = re.compile(r"(?:< )?[A-Za-z][A-Za-z0-9-]{0,60}:")
_TRANSPORT = re.compile(
    r"[<>*{}$](?: |$)|PS [A-Z]:"
    r"|(?:https?://\S+|[^\d{\"]){0,999}+$|\[\d{1,9} bytes|`{3}|[0-9a-fA-F]{1,8}$|% Total|: "
)
"""Commands, transport information, and lines without a number except in an address."""
_IS_ABOUT = re.compile(r'(?i)"\w{0,60}accept\w{0,60}"\s{0,9}:')
"""Words after the drafted tokens, so that these are not alone."""
_AT_ONCE = 256
"""Objects read together: with more, memory costs more time than reading."""
_MOST_HEAD = 1 << 16
"""Characters searched for a stream's first event."""
_REMEDY = "Save the record again as the engine wrote it."


class Node(msgspec.Struct, frozen=True, eq=False):
    """An object in a document.

    path: keys and indices that lead to it, from `start`, the document's place. around: the objects
    and lists on that path, outermost first. taken: keys that were read, by id() of the object, for
    all nodes of a file.
    """

    values: dict[str, Any]
    file: str
    start: str
    path: tuple[str, ...]
    around: tuple[Any, ...]
    taken: dict[int, set[str]]

    @property
    def place(self) -> str:
        """Its path, for messages."""
        return ".".join(self.path if not self.start else (self.start, *self.path))

    def owner(self, *keys: str) -> dict[str, Any]:
        """The nearest object with any of the keys, of this one and its ancestors; else this one."""
        for one in (self.values, *reversed(self.around)):
            if isinstance(one, dict) and not one.keys().isdisjoint(keys):
                return one
        return self.values

    def fields(self, values: dict[str, Any] | None = None) -> Fields:
        """The keys of this object, or of an ancestor."""
        values = self.values if values is None else values
        chain = (*self.around, self.values)
        path = self.path[: list(map(id, chain)).index(id(values))]
        place = ".".join(path if not self.start else (self.start, *path))
        return Fields(values, self.file, place, self.taken)


def read_documents(data: bytes, name: str) -> tuple[list[tuple[str, Any]], str]:
    """The JSON values of a text that a person has kept, with their places, and a sentence about
    lines that are none of them, empty if there are none.

    One value, one per line, several in sequence, members without braces, or events of streams; HTTP
    headers and curl output may surround them, and the last value may be cut. Raises TraceFileError,
    naming `name` and the place, if there is none.
    """
    check_most(name, len(data), MOST_BYTES, "bytes")
    text = data.decode("utf-8-sig", errors="replace")
    if is_stream(text):
        return _events(text, name)
    found, end = _objects(text)
    if found and end == len(text):
        return (found if len(found) > 1 else [("", found[0][1])]), ""
    if (texts := quick_json(text, list[str])) is not None:
        return [("", texts)], ""
    try:
        elements = quick_json(text, list[msgspec.Raw]) or [b""]
        is_list = bytes(elements[0])[:1] == b"{"  # read in parts, like a stream's
        listed = _each(bytes(one).decode() for one in elements) if is_list else None
        return [("", listed or _parse(text))], ""
    except JsonError as error:
        if error.what.startswith("it "):  # too large, or too deep
            raise _invalid(name, f"line {error.line}", error) from error
        plain = rest = text[end:]
        if "..." in rest or "…" in rest:
            plain = _ELIDED.sub(lambda one: one[1] or ("null" if one[2] else ""), rest)
        plain = as_json(rest) if plain == rest else plain
        if plain != rest:
            return read_documents((text[:end] + plain).encode("utf-8", "replace"), name)
        return _values(text, name, error, found, end)


def is_stream(text: str) -> bool:
    """Whether a text consists of server-sent events, from or after its start."""
    begin = text[:_MOST_HEAD].lstrip()
    return not begin.startswith(("{", "[", '"')) and any(
        _EVENT.match(line[0]) for line in _LINE.finditer(begin)
    )


def _events(text: str, name: str) -> tuple[list[tuple[str, Any]], str]:
    """The events' data, as one list. Each is on one line; an incomplete one ends the stream."""
    lines = (plain := text.replace("\r\n", "\n")).split("\n")
    n_others = len(lines) - lines.count("") - lines.count("data: [DONE]")
    lines = [line[6:] for line in lines if line[:7] == "data: {" and line[-1:] == "}"]
    is_plain = bool(lines) and n_others <= len(lines) and "\r" not in plain
    if is_plain and (whole := _each(lines)) is not None:
        return [("", whole)], ""  # only complete objects in data lines
    found: list[Any] = []
    left = LeftOut()
    held: list[str] = []
    fault: tuple[int, JsonError] | None = None
    for number, line in enumerate(chain(map(re.Match.group, _LINE.finditer(text)), ("",)), 1):
        end = number + 1
        value = line.strip()
        is_object = value.startswith("{") and value.endswith("}")
        if (field := _FIELD.match(value)) is not None:
            if field[1] not in ("data", "error"):
                continue
            value = value[field.end() :]
        elif value and not is_object:
            left.add(number, value)
            continue
        if held or not value.endswith("}"):  # an event of several lines, ended by a blank one
            if value.startswith("{") or held:
                held.append(value)
            if value or not held:
                continue
            value, held, end = "\n".join(held), [], number
        if not value.startswith("{"):
            continue
        if fault is not None:
            break
        try:
            found.append(_parse(value))
        except JsonError as error:
            fault = end, error
    else:
        fault = None if found else fault  # the last event may be cut
    if fault is not None:
        raise _invalid(name, f"the event before line {fault[0]}", fault[1])
    return [("", found)], left.sentence


def _each(texts: Iterable[str]) -> list[Any] | None:
    """The objects of texts, many parsed at once, with runs of additions to one answer grouped; None
    if a text is not an object."""
    values: list[Any] = []
    n, pairs = 0, additions(texts)  # a quarter of the values may be objects
    while part := list(islice(pairs, _AT_ONCE)):
        others = [text for text, one in part if one is None]
        inside = [text.count("{") + text.count("[") for text in others]
        n += 4 * sum(inside) + sum(text.count(",") for text in others)
        if n > MOST_VALUES:
            return None
        found = plain_values(others) if max(inside, default=0) < _DEEPEST else None
        try:
            read = map(packed, [*map(_parse, others)] if found is None else found)
        except JsonError:
            return None
        values += [one or next(read) for _, one in part]
    return values


def _values(
    text: str, name: str, whole: JsonError, found: list[tuple[str, Any]], at: int
) -> tuple[list[tuple[str, Any]], str]:
    """Consecutive values. whole: why the text is not one value. found: values before `at`."""
    left = LeftOut()
    members: dict[str, Any] = {}
    uncounted = Uncounted(text)
    number, room = 1 + text.count("\n", 0, at), 4 * len(text)
    while at < len(text):
        begin = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        number += text.count("\n", at, begin)
        at = begin
        if at == len(text):
            break
        if (stamp := _STAMP.match(text, at)) is not None:
            if stamp[1] is None:
                left.add(number, stamp[0].strip())
            at = stamp.end() if stamp[1] is None else stamp.start(1)
            continue
        key = _KEY.match(text, at)
        start = at if key is None else key.end()
        end, is_value = start, False
        if (key is not None or text[at] in "{[") and room > 0:
            end, is_value = value_end(uncounted, start)
            room -= 0 if is_value else end - start
        if not is_value:
            stop = text.find("\n", at)
            stop = len(text) if stop < 0 else stop
            inner = _INSIDE.search(text, at, stop) if key is None and room > 0 else None
            if inner is not None and inner[0][0] == '"' and text[at] not in "{[":
                at = inner.start()
                continue
            is_cut = text.find("\n", end) < 0 or "Unterminated" in whole.what
            opened = start if inner is None or text[start] == "{" else inner.start()
            may_be = is_cut and not found and room > 0
            room -= len(text) - opened if may_be else 0
            if may_be and _IS_ABOUT.search(plain := closed_object(text[opened:])):
                left.add(number, text.rstrip()[-80:])
                value = _parse(plain)
                found.append((f"line {number}", {key[1] or key[2]: value} if key else value))
                break
            line = text[at:stop].strip()
            if inner is not None and inner[0][0] == "{":  # after a prefix
                end, is_value = value_end(uncounted, inner.start())
                room -= end - inner.start()
                if is_value and (values := _each([text[inner.start() : end]])) is not None:
                    members = {}
                    found.append((f"line {number}", values[0]))
                    number, at = number + text.count("\n", at, end), end
                    continue
            if key is None and line[0] in "{[" and not (found or left.sentence or is_cut):
                raise _invalid(name, f"line {whole.line}", whole)
            is_even = all(line.count(one) == line.count(other) for one, other in ("{}", "[]"))
            if key is None and line[0] in "{[" and line[-1] in "]}," and is_even:
                # damaged, and neither cut nor a log level
                start, end = at, stop
            else:
                left.add(number, line)
                members = {} if line[-1] == "{" else members  # of another value
                at = stop
                continue
        try:
            value = _parse(text[start:end].strip())
        except JsonError as error:
            raise _invalid(name, f"line {number + error.line - 1}", error) from error
        if key is None:
            members = {}
            found.append((f"line {number}", value))
        else:
            if not members or (key[1] or key[2]) in members:
                members = {}
                found.append((f"line {number}", members))
            members[key[1] or key[2]] = value
        number += text.count("\n", at, end)
        at = end
    if not found:
        if not text.strip():
            raise TraceFileError(f"{name} is empty.", _REMEDY)
        raise _invalid(name, f"line {whole.line}", whole)
    return found, left.sentence


def _objects(text: str) -> tuple[list[tuple[str, Any]], int]:
    """The objects of a text that starts with one per line, or none, parsed at once because events
    are many; and the end of their lines."""
    at, numbers = 0, list[int]()

    def lines() -> Iterator[str]:
        nonlocal at
        number = 0
        while at < len(text):
            end, number = text.find("\n", at) + 1 or len(text), number + 1
            line = text[at:end].strip()
            if line and (line[0] != "{" or line[-1] != "}"):
                return
            at = end
            if line:
                numbers.append(number)
                yield line

    if not text[: text.find("\n")].rstrip().endswith("}") or (found := _each(lines())) is None:
        return [], 0
    places = zip(numbers, found, strict=True)  # that of an addition is of no use
    return [("" if type(one) is Addition else f"line {i}", one) for i, one in places], at


class LeftOut:
    """Unread lines, except those of HTTP and curl."""

    def __init__(self) -> None:
        self._n = 0
        self._first = ""
        self._is_in_head = self._is_command = False

    def add(self, number: int, line: str) -> None:
        """Add a line, which is not blank."""
        self._is_in_head = _STATUS.match(line) is not None or (
            self._is_in_head and _HEADER.match(line) is not None
        )
        is_command = self._is_command or _TRANSPORT.match(line) is not None
        self._is_command = is_command and line[-1] == "\\"  # and the next line as well
        if self._is_in_head or is_command:
            return
        if not self._n:
            self._first = f"line {number}: {shorten(line, 80)}"
        self._n += 1

    @property
    def sentence(self) -> str:
        """Their number, and the first; empty without any."""
        if not self._n:
            return ""
        lines = "1 line was" if self._n == 1 else f"{self._n:,} lines were"
        return f"{lines} left out, the first is {self._first}"


def _parse(text: str) -> Any:
    return parse_json(text, deepest=_DEEPEST, unique=True, whole_texts=True)


def _invalid(name: str, place: str, error: JsonError) -> TraceFileError:
    return TraceFileError(
        f"{name}: {place} is not valid JSON (column {error.column}: {error.what[:80]}).", _REMEDY
    )


def nodes(file: str, documents: list[tuple[str, Any]], keys: AbstractSet[str]) -> list[Node]:
    """The objects of a file with any of the keys, in order; an object before those inside it."""
    found: list[Node] = []
    taken: dict[int, set[str]] = {}

    def visit(value: Any, start: str, path: tuple[str, ...], around: tuple[Any, ...]) -> None:
        is_object = type(value) is dict
        if is_object and not keys.isdisjoint(value):
            found.append(Node(value, file, start, path, around, taken))
        elif not is_object and {dict, list}.isdisjoint(map(type, value)):
            return  # thousands of ids
        inner: tuple[Any, ...] = ()
        for key, one in value.items() if is_object else enumerate(value):
            kind = type(one)
            if (kind is dict or kind is list) and one:
                inner = inner or (*around, value)
                visit(one, start, (*path, str(key)), inner)

    for start, document in documents:
        if isinstance(document, (dict, list)):
            visit(document, start, (), ())
    visit = None  # type: ignore[assignment]  # it holds itself, and what was found
    return found


def unknown_keys(node: Node, shared: Container[int]) -> dict[str, Any]:
    """Unread keys of an object and its ancestors, by path without indices.

    shared: id() of objects and lists that also contain other records; they are left out.
    """
    chain = (*node.around, node.values)
    ids = {id(one) for one in chain}
    found: dict[str, Any] = {}
    for depth, one in enumerate(chain):
        if isinstance(one, dict) and id(one) not in shared:
            found |= _untaken(one, node.path[:depth], ids, node.taken)
    return found


def _untaken(
    values: dict[str, Any], path: tuple[str, ...], inside: set[int], taken: dict[int, set[str]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    read = taken.get(id(values), set())
    for key, value in values.items():
        if key not in read:
            if id(value) not in inside:
                here = (*path, key)
                found[".".join(part for part in here if not part.isdigit())] = value
        elif isinstance(value, dict) and id(value) in taken and id(value) not in inside:
            found |= _untaken(value, (*path, key), inside, taken)
    return found


class Fields:
    """The keys of an object, taken with their required types.

    None for missing keys, or null. Raises TraceFileError naming file, place and key for a known key
    of another type or out of range.
    """

    def __init__(
        self, values: dict[str, Any], file: str, place: str, taken: dict[int, set[str]]
    ) -> None:
        self.values, self._file, self.place, self._all = values, file, place, taken
        self._taken = taken.setdefault(id(values), set())

    def count(self, key: str) -> int | None:
        """An integer from 0."""
        return self._taken_if(key, is_whole, f"a whole number from 0 to {COUNT:,}")

    def number(self, key: str) -> float | None:
        """A number from 0 to 2^53."""
        return self._taken_if(key, lambda one: is_real(one, LARGEST), "a number from 0 to 2^53")

    def text(self, key: str) -> str | None:
        """A short text."""
        wanted = f"a text of at most {_MOST_TEXT:,} characters"
        return self._taken_if(
            key, lambda one: isinstance(one, str) and len(one) <= _MOST_TEXT, wanted
        )

    def counts(self, key: str, most: int = COUNT) -> list[int] | None:
        """A list of integers from 0 to `most`."""
        value = self._taken_if(key, lambda one: isinstance(one, list), "a list of whole numbers")
        if value is None:
            return None
        if len(value) > MOST_STEPS:
            raise self.wrong(key, value[:9], f"a list of at most {MOST_STEPS:,} numbers")
        if not are_whole(value, most):
            i, one = next((i, one) for i, one in enumerate(value) if not is_whole(one, most))
            raise self.wrong(f"{key}.{i}", one, f"a whole number from 0 to {most:,}")
        return value

    def histogram(self, key: str) -> list[int] | None:
        """Steps by number of accepted tokens, as a list, or as an object without absent numbers."""
        if isinstance(self.values.get(key), dict):
            sparse = self.object(key)
            assert sparse is not None
            n_of = {sparse.index(text): sparse.count(text) or 0 for text in sparse.values}
            return [n_of.get(size, 0) for size in range(max(n_of, default=-1) + 1)]
        found = self.counts(key)
        if found is not None and len(found) > LONGEST_DRAFT + 1:
            raise self.wrong(key, found, f"a list of at most {LONGEST_DRAFT + 1:,} numbers")
        return found

    def index(self, key: str) -> int:
        """A key that is the length of a draft."""
        size = int(key) if key.isascii() and key.isdigit() and len(key) <= 4 else COUNT
        if size > LONGEST_DRAFT or str(size) != key:
            raise self.wrong(key, key, f"a draft length from 0 to {LONGEST_DRAFT:,}")
        return size

    def object(self, key: str) -> Fields | None:
        """A nested object."""
        value = self._taken_if(key, lambda one: isinstance(one, dict), "an object")
        place = f"{self.place}.{key}" if self.place else key
        return None if value is None else Fields(value, self._file, place, self._all)

    def wrong(self, key: str, value: Any, wanted: str) -> TraceFileError:
        """An error for a key with an unsuitable value."""
        shown = repr(value)[:40]
        at = f"{self.place}.{key}" if self.place else key
        return TraceFileError(f"{self._file}: {at[-120:]} is {shown}, not {wanted}.", _REMEDY)

    def _taken_if(self, key: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        """The value of a key, None without one. Raises an error for an unsuitable value."""
        self._taken.add(key)
        value = self.values.get(key)
        if value is None or fits(value):
            return value
        raise self.wrong(key, value, wanted)
