"""Decoding of log text: UTF-16, JSON around each line, terminal colours; and table rows from HTML,
BBCode and LaTeX."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
import numpy as np
from msgspec.structs import astuple

from engine.foreign import LARGEST, is_whole, quick_json

_ESCAPES = re.compile(
    r"(?:\x1b|#033|\^\[|\\(?:x1[bB]|033|u001[bB]|e))\[[0-9;?]{0,20}[A-Za-z]|\[[0-9;]{1,12}m"
)
_MOST_OTHERS = 8
"""Bytes of a log per non-ASCII one, above which searching for these pays."""
_NEXT_CELL = re.compile(r"(?:</t[dh]>|<tr[^>]{0,200}>)\s{0,200}<t[dh][^>]{0,200}>")
_COLUMNS = re.compile(r"<t[dh][^>]{0,200}\bcolspan=\W?(\d)\b[^>]{0,200}>[^<]{0,2000}</t[dh]>")
_ROWS = re.compile(
    r"(<tr[^>]{0,200}>\s{0,200}<t[dh][^>]{0,200}\browspan=\W?2\b.{0,9999}?<tr[^>]{0,200}>)",
    re.DOTALL,
)
"""A cell spanning several columns, and a first cell spanning two rows."""
_BBCODE = re.compile(r"\[(/?)(table|tr|t[dh])[^\]\n]{0,40}\]")
_LATEX_RULE = re.compile(r"(?m)^\\[a-z]{1,20}(?:[{\[(][^&\n]{0,200})?\n")
_LATEX = re.compile(r"(?m)^([^&\n]{0,200}&.{0,2000}?)\\\\.{0,80}$")
_BROKEN_ROW = re.compile(r"\|[ \t]{0,9}\n(?=[^|\n]{1,200}\|[ \t]{0,9}$)", re.MULTILINE)
"""Where the next cell of a row is on the next line."""
_ROW_END, _TAG = re.compile(r"</t[dh]>\s{0,200}</tr>\s{0,200}"), re.compile(r"<[^>]{1,200}>")
_UNBROKEN = re.compile(r"^[^'\n]+", re.MULTILINE)
"""What precedes the text of a token."""


class _Wrapped(msgspec.Struct):
    """A JSON line that contains a log line: `--log-jsonl`, docker's files, journalctl, old builds
    of llama-server, Loki, Google's and OpenTelemetry's collectors, Splunk."""

    msg: object = None
    log: object = None
    MESSAGE: object = None
    message: object = None
    line: object = None
    text_payload: object = msgspec.field(default=None, name="textPayload")
    body: object = None
    raw: object = msgspec.field(default=None, name="_raw")
    time: object = None
    id_slot: object = None
    id_task: object = None
    process: object = msgspec.field(default=None, name="_PID")
    container_name: object = None


_N_TEXTS = 8
"""Number of leading fields that may hold the line."""


def unwrapped(line: str) -> tuple[str, str, int | None] | None:
    """Text, server and time in microseconds of a JSON line; no text if it contains none. None if it
    is not an object."""
    if (found := quick_json(line, _Wrapped)) is None:
        return None
    text = next((one for one in astuple(found)[:_N_TEXTS] if isinstance(one, str)), "")
    if not text and isinstance(found.MESSAGE, list):  # journalctl's form of a text with colours
        try:
            text = without_colours(bytes(found.MESSAGE).decode("utf-8", "replace"))
        except (TypeError, ValueError):
            return "", "", None
    if text and is_whole(found.id_slot) and is_whole(found.id_task):
        text = f"slot of_json: id {found.id_slot} | task {found.id_task} | {text}"
    names = (found.container_name, found.process)
    name = next((one[:100] for one in names if isinstance(one, str)), "")
    return text, name, found.time if is_whole(found.time, LARGEST) else None


def without_colours(text: str) -> str:
    """A text without terminal escapes, also those copied as text, and without a browser's
    non-breaking spaces, except those of tokens."""
    if "\xa0" in text:
        text = _UNBROKEN.sub(lambda found: found[0].replace("\xa0", " "), text)
    # everything coloured is reset somewhere
    return _ESCAPES.sub("", text) if "\x1b" in text or "[0m" in text else text


def encoded(text: str) -> bytes:
    """A text in the form that `decoded` takes."""
    return text.encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> str:
    """UTF-8 as text, including lone surrogates."""
    return data.decode("utf-8", "surrogatepass")


def utf8_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A file's bytes as UTF-8, in whole characters: UTF-16 (from PowerShell) is converted, invalid
    bytes are replaced."""
    decoder, rest = None, b""
    for piece in chain(pieces, [b""]):
        if decoder is None:
            is_wide = piece[:2] in (b"\xff\xfe", b"\xfe\xff")
            is_bare = piece[1:2] == b"\0" and piece[3:4] == b"\0"
            name = "utf-16" if is_wide else "utf-16-le" if is_bare else "utf-8-sig"
            decoder = codecs.getincrementaldecoder(name)("replace")
            piece = piece.removeprefix(codecs.BOM_UTF8)
        if name != "utf-8-sig":
            yield decoder.decode(piece, final=not piece).encode()
            continue
        end = (piece.rfind(b"\n") + 1 or len(piece) - n_open(piece)) if piece else 0
        data, rest = rest + piece[:end], piece[end:]
        if not data.isascii():
            try:
                _of_characters(data).decode()
            except UnicodeDecodeError:
                data = data.decode("utf-8", "replace").encode()
        yield data


def _of_characters(data: bytes) -> bytes:
    """The non-ASCII bytes, with a separator between non-adjacent ones: UTF-8 if the whole is.
    Returns all bytes if they are many."""
    is_other = np.frombuffer(data, np.int8) < 0
    if _MOST_OTHERS * np.count_nonzero(is_other) > len(data):
        return data
    at = np.flatnonzero(is_other)
    places = np.arange(len(at))
    places[1:] += np.cumsum(np.diff(at) > 1)
    found = np.zeros(places[-1] + 1, np.uint8)
    found[places] = np.frombuffer(data, np.uint8)[at]
    return found.tobytes()


def n_open(data: bytes) -> int:
    """Bytes of an incomplete character at the end."""
    for n, byte in enumerate(reversed(data[-3:]), 1):
        if byte >= 0xC0:
            return n if n < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        if byte < 0x80:
            break
    return 0


def texts_of(pieces: Iterable[bytes]) -> Iterator[str]:
    """The same as text."""
    return map(decoded, utf8_of(pieces))


def rows_with_bars(text: str) -> str:
    """A text with bars between the cells of an HTML, BBCode or LaTeX table."""
    text = _BBCODE.sub(r"<\1\2>", text) if "[td]" in text else text
    if "\\\\" in text:
        text = _LATEX_RULE.sub("", text)
        text = _LATEX.sub(lambda row: row[1].replace("\\%", "%").replace("&", "|"), text)
    text = _BROKEN_ROW.sub("| ", text) if "|\n" in text else text
    if "<td" in text:
        text = _COLUMNS.sub(lambda cell: cell[0] + (int(cell[1]) - 1) * "<td></td>", text)
        text = _ROWS.sub(r"\1<td></td>", text)
        text = _TAG.sub(" ", _ROW_END.sub("|\n", _NEXT_CELL.sub("| ", text)))
        text = "\n".join(filter(str.strip, text.split("\n")))
    return text
