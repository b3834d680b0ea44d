"""Import of other engines' files as runs of a trace, recognised by their contents."""

from __future__ import annotations

import base64
import html
import os
import quopri
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from engine.analysis.findings.check import record_findings
from engine.errors import TraceFileError
from engine.files import (
    SHOWN,
    file_bytes,
    file_head,
    is_archive,
    known_kind,
    members,
    opened_file,
    shown_files,
    unpacked,
)
from engine.foreign import quick_json
from engine.long_work import ReportProgress, collections_wait, watched
from engine.observe.files import records
from engine.observe.files.capture import is_capture, read_capture, replay
from engine.observe.files.line_words import READ, SIGNS
from engine.observe.files.log_run import fill_log
from engine.observe.files.records import METRICS, PRINTED
from engine.observe.files.records.column_names import without_signs
from engine.observe.files.records.document import MOST_BYTES, read_documents
from engine.observe.files.records.printed import read_printed
from engine.observe.rounds.log_lines import LONGEST_TIME, is_newest_first, oldest_first, time_of
from engine.observe.rounds.log_text import texts_of, unwrapped, utf8_of, without_colours
from engine.observe.rounds.log_words import has_entries
from engine.trace.export import SESSION_FILE
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.gguf.tokenizer import Tokenizer

CAPTURE, LOG, ARCHIVE = "capture", "log", "archive"
NAMES = (CAPTURE, LOG, *records.NAMES)
"""Names for formats, to choose from where the contents are ambiguous."""
_NOT_IN_NAMES, _LONGEST_NAME = re.compile(r"[^\w.+() -]|^\.{1,2}$"), 240
"""Characters not allowed in file names on some systems, and the longest name, bytes."""
_HEAD = 1 << 18
_MOST_BYTES = 512 << 20
"""Largest file read as a whole; captures and records have their own limits."""
_MOST_LOG_BYTES = 1 << 36
_PIECE = 1 << 22
_MOST_WRAPPED = 200
_LONGEST_WRAPPED = 1 << 18
_LONGEST = 4 * _LONGEST_WRAPPED
"""Bytes of a text with this many characters."""
_NARROWEST = 40
"""Smallest column at which lines may be wrapped."""
_GAP = 6
"""Blanks before a right-aligned number."""
_WHOLE, _ENTRY = (re.compile("|".join(READ[name])) for name in ("whole", "begins"))
_BEGINS = [
    re.compile(rf"(?:^|(?<=[^|\s])(?<!prompt)\s{{1,20}})(?={one})") for one in READ["parted"]
]
"""Start of entries that may be joined in one line."""
_LIKE = re.compile(r"(?i)(?:\b|_)accept.{0,40}?\d|\d.{0,40}?(?:\b|_)accept")
_LIST = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*[\[{\"]|\{\s*\n)")
"""Start of a JSON list, or of a multi-line object."""
_IS_TIME = re.compile(r"(?i).{0,20}time.{0,20}|.?ts|_?date").fullmatch
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/]{4}){8,}+(?:[A-Za-z0-9+/]{2}(?:==|[A-Za-z0-9+/]=))?")
_QUOTED = re.compile(rb'"([\[{](?:\\.|""|[^"\\\n])*+)"')
_SHORTEST = 40
"""Shortest reply, characters."""
_PRINTABLE = re.compile(rb"(?im)^Content-Transfer-Encoding:\s{0,9}quoted-printable")
_BROKEN = re.compile(rb"[^=]=\r?\n")
_NOT_PRINTABLE = re.compile(rb"=(?![\dA-F]{2}|[\dA-F]?\Z|[ \t]{0,9}\r?(?:\n|\Z))")
_ENTITY = re.compile(r"&(?:[lg]t|amp|quot|nbsp|apos|#x?[\da-fA-F]{1,6});")
_BREAK = re.compile(r"(?i)<(?:br ?/?|/p|/li|/?(?:div|pre|h[1-6])(?: [^<>\n]{0,500})?)>\n?")
_TAG = re.compile(r"(?i)</?(?:p|div|pre|code|span|li|ul|a|b|i|em|strong)(?: [^<>\n]{0,500})?>")
_COMMA_TIME = re.compile(r"eval time {0,20}= {1,20}\d{1,20},\d\d ms")
_THOUSANDS = re.compile(
    r"eval time {0,20}= {1,20}\d{1,3}(?:,\d{3})+\.\d|ms / {1,9}\d{1,3},\d{3} tok"
)
_OF_MODELS = re.compile(
    r"(?m)^(?:draft|target):\s{1,20}(?:llama_(?:print_tim|perf_)\w{1,30}:.*\n?)+"
)
"""Times of each of the two models of llama-speculative: neither is of a request."""
_IS_GLUED = re.compile(r"eval time {0,9}= {0,9}[\d.]{1,20}ms|\daccepted")
_GLUED = re.compile(
    r"(?<=\d)(?=(?:ms|tokens|accepted|generated)\b)|(?<=accepted)(?=/)|(?<=accepted/)(?=\d)"
    r"|(?<=rate|time)(?==)|(?<=rate=|time=)(?=\d)"
)
"""Blanks lost by text recognition in an image of a log."""
_ROW = re.compile(r"(?m)^[ \t>]{0,20}\|.{0,2000}\|[ \t]{0,20}$")
_COMMA = re.compile(r"(?<![\d,.])(\d{1,20}),(?=(?:\d\d|\d{5})(?![\d,]))")
"""Numbers with a decimal comma."""
_TYPED = {
    **dict.fromkeys(map(ord, "“”„‟″"), '"'),
    **dict.fromkeys(map(ord, "‘’‚"), "'"),
    **dict.fromkeys(map(ord, "\u200b\u200c\u2060\ufeff\u00ad")),
}
"""Typographic quotes of chat and mail programs, and zero-width characters."""
_COLOURS = re.compile(rb"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_QUOTE, _NOT_QUOTED = re.compile(rb"(?m)^[ \t]{0,8}> ?"), re.compile(rb"(?m)^[ \t]{0,8}[^>\s]")
_Path: TypeAlias = tuple[str, ...]
_QUOTES = re.compile(r"(?m)^(?:[ \t]{0,8}>){1,9} ?")


def recognise(data: bytes) -> str | None:
    """The format's name, from a file's bytes or their beginning; None if unknown."""
    if is_capture(data):
        return CAPTURE
    head = unpacked(data, "", _HEAD, whole=False)[:_HEAD]
    return ARCHIVE if is_archive(head) else _kind(as_written(_bare(head)))


def as_written(data: bytes) -> bytes:
    """Undo changes by mail (quoted-printable), web pages (tags and entities), chats (typographic
    quotes) or locale (decimal commas), if more of the text can be read afterwards; else return it
    unchanged, because an answer may contain such text."""
    has_signs = b"=3D" in data and data.lstrip()[:1] not in b"[{"
    is_mail = _PRINTABLE.search(data) is not None or _NOT_PRINTABLE.search(data) is None
    if is_mail and (has_signs or _BROKEN.search(data) is not None):
        data = quopri.decodestring(data)
    text = data.decode("utf-8", "surrogateescape")
    found = text.translate(_TYPED) if not text.isascii() else text
    found = _COMMA.sub(r"\1.", found) if _COMMA_TIME.search(found) is not None else found
    found = _GLUED.sub(" ", found) if _IS_GLUED.search(found) is not None else found
    found = without_signs(found) if _THOUSANDS.search(found) is not None else found
    if _ENTITY.search(text) is not None or _BREAK.search(text) is not None:
        found = html.unescape(_TAG.sub("", _BREAK.sub("\n", found))).replace("\xa0", " ")
    if found == text:
        return data
    before, after = map(_n_whole, (text, found))
    is_better = after > before if before else _kind(data[:_HEAD]) is None or after > 0
    return found.encode("utf-8", "surrogateescape") if is_better else data


def _n_whole(text: str) -> int:
    """How much of a text can be read: complete lines, and lines with any content."""
    found = [len(_WHOLE.findall(line)) for line in text.split("\n")]
    return sum(found) + len(found) - found.count(0)


def _kind(head: bytes) -> str | None:
    record = records.recognise(head)
    text = "".join(texts_of([head])).lstrip()
    if record == METRICS or (record == PRINTED and rejoined(text) == text):
        return record
    if text.startswith(("{", "[{", "data:")):  # a record may quote a log
        return LOG if is_log(_of_wrapped(text)) else record
    if is_log(text):
        return LOG
    return record or (PRINTED if read_printed(rejoined(text)) else None)


def is_log(text: str) -> bool:
    """Whether a text has lines of an engine's log."""
    text = without_colours(text)
    return _has_lines(text) or ((whole := rejoined(text)) != text and _has_lines(whole))


def _has_lines(text: str) -> bool:
    return has_entries(text) or _has_sums(text)


def _has_sums(text: str) -> bool:
    return any(map(text.__contains__, READ["words"])) and SIGNS.search(text) is not None


def rejoined(text: str) -> str:
    """A text with lines rejoined that a terminal or a mail program has wrapped, followed by blank
    lines for their rest, or with lines split that a page has joined; others unchanged."""
    if len(text) > _LONGEST_WRAPPED:
        return text
    parted = "\n".join(map(_parted, text.split("\n")))
    if parted != text:
        return parted
    lines = _QUOTES.sub("", text).split("\n")
    lengths = Counter(n for one in lines if (n := len(one.rstrip("\r"))) >= _NARROWEST)
    if not lengths:
        return text
    widths = {max(lengths), lengths.most_common(1)[0][0]}
    found = [_joined(lines, width, by) for width in widths for by in ("", " ")]
    return max([text, *found], key=lambda one: len(_WHOLE.findall(one)))


def _parted(line: str) -> str:
    """A line that several entries were joined to, each with figures, split into these."""
    begins = next((one for one in _BEGINS if one.match(line) is not None), None)
    places = [one.end() for one in begins.finditer(line)] if begins is not None else []
    parts = [line[a:b] for a, b in pairwise([*places, len(line)])] if len(places) > 1 else []
    is_several = sum(1 for one in parts if _WHOLE.search(one) or _LIKE.search(one)) > 1
    return "\n".join(parts) if is_several else line


def _joined(lines: list[str], width: int, by: str) -> str:
    """Lines that were wrapped at a width, between words or ("") anywhere."""
    found: list[str] = []
    rest, n = "", 0
    for line, after in pairwise([*(one.rstrip("\r") for one in lines), ""]):
        room = width - len(line)
        is_full = room <= len(after.partition(" ")[0]) + _GAP if by else room == 0
        if after and room >= 0 and is_full and _ENTRY.match(after) is None:
            rest, n = rest + line + by, n + 1
        else:
            found += [rest + line, *[""] * n]
            rest, n = "", 0
    return "\n".join(found)


def _of_wrapped(text: str) -> str:
    """The log lines in JSON lines."""
    lines = (line.strip() for line in text.split("\n", _MOST_WRAPPED)[:_MOST_WRAPPED])
    found = (unwrapped(line) for line in lines if line[:1] == "{" and line[-1:] == "}")
    return "\n".join(one[0] for one in found if one is not None)


def _of_list(data: bytes) -> str | bytes:
    """The log lines in a JSON value, as log collectors return them: all texts at the same path as
    the first one with an engine's line. Unchanged if there are none."""
    if _LIST.match(data) is None and not data.lstrip().startswith(b"{"):
        return data
    found = _texts_in(data)
    whose = next((path for path, text in found if is_log(text)), None)
    mine = [text for path, text in found if path == whose]
    lines = [one.removesuffix("\n") for one in mine if not one.isdigit()]
    times = {whose: [one for one in mine if one.isdigit()] if len(lines) < len(mine) else []}
    for path, text in found if len(mine) < len(found) else ():
        if path != whose and path and _IS_TIME(path[-1]):
            times.setdefault(path, []).append(text)
    if any(len(one) == len(lines) and is_newest_first(one) for one in times.values()):
        lines.reverse()
    return "\n".join([*lines, ""]) if whose is not None else data


def _of_texts(data: bytes, share: float = 0.0) -> bytes:
    """The replies in texts of a JSON value, or in quotes within another text, as browsers, tables
    and logs keep them, in sequence; empty if there are none, or if objects make up less than this
    share."""
    found = _texts_in(data)
    texts = [text.encode("utf-8", "replace") for _, text in found if len(text) > _SHORTEST]
    texts = texts or [_unquoted(one[1]) for one in _QUOTED.finditer(data)]
    texts = [base64.b64decode(one) if _BASE64.fullmatch(one) else one for one in texts]
    n_objects = sum(len(one) for one in texts if one.startswith((b"{", b"data:")))
    parts, forms = [], set[tuple[str, ...]]()
    for text in texts if n_objects >= share * len(data) else ():
        value = quick_json(text)
        form = tuple(value) if isinstance(value, dict) else ()
        if (form and form in forms) or records.recognise(text):
            forms.add(form)
            # each on a line, so that streams may be among them
            parts.append(text if value is None else msgspec.json.encode(value))
    return b"\n\n".join([*parts, b""]) if parts else b""


def _unquoted(text: bytes) -> bytes:
    """Contents of quotes, doubled (CSV) or escaped (programs)."""
    if b'""' in text:
        return text.replace(b'""', b'"')
    return re.sub(rb'\\(["\\])', rb"\1", text)


def _texts_in(data: bytes) -> list[tuple[_Path, str]]:
    """The texts in JSON values, empty for other bytes."""
    found: list[tuple[_Path, str]] = []
    with suppress(TraceFileError):
        _add_texts(found, [value for _, value in read_documents(data, "")[0]], ())
    return found


def _add_texts(found: list[tuple[_Path, str]], value: Any, path: _Path) -> None:
    """Add every text in an object or a list in order, with its path of keys."""
    is_object, listed = isinstance(value, dict), (*path, "[]")
    if not is_object and set(map(type, value)) == {str}:
        found += zip(repeat(listed), value, strict=False)
        return
    for key, one in value.items() if is_object else zip(repeat("[]"), value):
        if isinstance(one, str):
            found.append(((*path, key), one))
        elif isinstance(one, dict | list):
            _add_texts(found, one, (*path, key))
        elif isinstance(one, int | float) and _IS_TIME(key):
            found.append(((*path, key), str(one)))


def before_and_after(paths: Sequence[Path]) -> Iterator[tuple[Path, Path | None]]:
    """Files, each with the next one if both are counters of a server: scrapes before and after
    something."""
    at = 0
    while at < len(paths):
        both = paths[at : at + 2]
        is_pair = len(both) == 2 and all(recognise_file(p) == METRICS for p in both)
        yield both[0], both[1] if is_pair else None
        at += 2 if is_pair else 1


def recognise_file(path: Path) -> str | None:
    """The format of a file, from its beginning; None also if it cannot be read."""
    return recognise(file_head(path, _HEAD))


@collections_wait()
def import_file(
    store: TraceStore,
    path: Path,
    *,
    name: str | None = None,
    log: Path | None = None,
    later: Path | None = None,
    vocabulary: Tokenizer | None = None,
    progress: ReportProgress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> list[int]:
    """Write a file as runs of a trace, with findings; returns their ids.

    name: one of NAMES, by default from the contents. log: the server's log, for a capture without
    one. later: for counters, a later scrape. vocabulary: of a capture's model, for missing ids.
    Raises TraceFileError for a file that cannot be read or is unknown, and Cancelled when
    `cancelled` turns true.
    """
    kind = name or recognise_file(path)
    file = _shown(path)
    head = _bare(file_head(path, _HEAD))
    if kind == ARCHIVE or (SHOWN.match(head) is not None and path.stat().st_size <= _MOST_BYTES):
        return _import_members(store, path, name, cancelled)
    is_plain = name is not None or kind == CAPTURE or as_written(head) == head
    if kind == LOG and log is None and _LIST.match(head) is None and is_plain:
        if len(file_head(path, _LONGEST)) == _LONGEST:
            return fill_log(store, watched(_pieces(path, progress), cancelled), file)
        text = _OF_MODELS.sub("", rejoined("".join(texts_of(_pieces(path)))))
        try:
            runs = fill_log(store, text := oldest_first(text), file)
        except TraceFileError:  # it may only be quoted in a person's text
            if not read_printed(text):
                raise
            return records.fill(store, text.encode("utf-8", "surrogatepass"), file, PRINTED)
        lines = (one for one in text.split("\n") if _LIKE.search(one) and "=" not in one)
        # a person's remarks, unless a known program writes such lines
        lines = (one for one in lines if not (_has_lines(one) or time_of(one[:LONGEST_TIME])))
        others = "\n".join([*_ROW.findall(text), *(one for one in lines if not _ROW.match(one))])
        if rows := read_printed(others):
            _note(store, runs, f"Counts beyond the log were not read: {len(rows):,} lines or rows.")
        return runs
    data = _content(path) if is_plain else as_written(_content(path))
    may_have = kind is None and (b'"{' in data or b'"data:' in data)
    is_json = may_have and quick_json(data, msgspec.Raw) is not None
    if is_json and (inner := _of_texts(data, 0.5)):  # as a browser's recording
        data, kind = inner, records.recognise(inner[:_HEAD])
    other = known_kind(data[:_HEAD], "import") if kind is None else None
    if other is None or b"accept" in data or b"draft" in data:
        # identifying contents may be at the end
        kind = kind or records.recognise(data[:MOST_BYTES])
        if kind is None and is_log("".join(texts_of([data]))):
            kind = LOG
    if kind is None and (inner := _of_texts(data)):
        data, kind = inner, records.recognise(inner)
    fill = partial(records.fill, cancelled=cancelled)
    if kind == CAPTURE:
        text = _content(log).decode("utf-8-sig", "replace") if log is not None else ""
        capture, data = read_capture(data, file), b""
        if not capture.requests:
            return fill_log(store, capture.log, file)
        runs = [replay(capture, store, log=text, file=file, vocabulary=vocabulary)]
        record_findings(store, runs)
        return runs
    if log is not None:
        raise TraceFileError(
            f"{file} is not a capture, so {log.name} cannot be merged into it.",
            "Name the log with a capture, or alone.",
        )
    if kind == LOG:
        log_text, data = _of_list(data), b""
        return fill_log(store, log_text, file)
    if kind is None:
        if not data.strip():
            raise TraceFileError(f"{file} is empty.", "Name a file that has contents.")
        text = "".join(texts_of([data[:_HEAD]]))
        if other is not None:
            said = f"{file} is {other[0]}, which has no counts of drafted tokens."
            raise TraceFileError(said, other[1])
        like = [one.strip() for one in text.splitlines() if _LIKE.search(one) is not None]
        first = f" Lines with acceptance: {len(like):,}, such as {like[0][:80]!r}." if like else ""
        raise TraceFileError(
            f"The format of {file} is not recognised: it is not a log with rounds or totals, a "
            f"reply, a stream, counters or a record of requests.{first}",
            "Choose a file listed in `draftscope help observe`, or name its format with --as NAME.",
        )
    if later is not None:
        file = f"{file}, {_shown(later)}"
        return fill(store, data, file, kind, _content(later))
    if kind != PRINTED:
        contents, data = [data], b""
        return fill(store, contents, file, kind if name else None)
    text = rejoined("".join(texts_of([data])))
    of_log: list[int] = []
    is_program = "n_drafted" in text and "draft acceptance" not in text
    # a server's lines around the sums, instead of a program's own statistics
    if name is None and not is_program and _has_sums(text):
        with suppress(TraceFileError):
            of_log = fill_log(store, text, file)
    return of_log + fill(store, text.encode("utf-8", "surrogatepass"), file, kind)


def _import_members(
    store: TraceStore, path: Path, name: str | None, cancelled: Callable[[], bool] | None
) -> list[int]:
    """Import the readable files of an archive, each like `import_file`; errors of others become
    findings. Raises the first error if none can be read."""
    found, refused = list[int](), list[TraceFileError]()
    packed = _content(path)
    is_packed, how = is_archive(packed), (packed, path.name)
    files = (
        members(*how, _MOST_BYTES, TraceFileError)
        if is_packed
        else shown_files(*how, TraceFileError)
    )
    with TemporaryDirectory() as folder:
        for at, (one, content) in enumerate(watched(files, cancelled)):
            Path(folder, str(at)).mkdir()
            named = _NOT_IN_NAMES.sub("_", one).encode()[-_LONGEST_NAME:].decode(errors="ignore")
            inner = Path(folder, str(at), named or "_")
            inner.write_bytes(content)
            try:
                begin = file_head(inner, _HEAD)
                is_inside = is_archive(unpacked(begin, "", _HEAD, whole=False))
                if is_inside or (not is_packed and SHOWN.match(_bare(begin)) is not None):
                    said = f"{one}, inside of {path.name}, is itself an archive of several files."
                    raise TraceFileError(said, "Unpack it yourself.")
                found += import_file(store, inner, name=name, cancelled=cancelled)
            except TraceFileError as error:
                refused.append(error)
    if not found:
        raise next(iter(refused), TraceFileError(f"{path.name} has no files.", "Pack it again."))
    if refused:
        _note(store, found, f"Unread files in it: {len(refused):,}. {refused[0].message}")
    return found


def _note(store: TraceStore, runs: Sequence[int], message: str) -> None:
    """Add a finding on unread data to the last of these runs."""
    found = {"rule": "log-unread", "message": message, "evidence": ""}
    store.runs[runs[-1]].add_to("observed_findings", found)
    record_findings(store, runs[-1:])


def _content(path: Path) -> bytes:
    """A file's bytes, unpacked. Raises TraceFileError if it cannot be read or is too large."""
    if (path / SESSION_FILE).is_file():
        remedy = "Open it: `draftscope FOLDER`; `acceptance`, `triage` and `export` read it, too."
        raise TraceFileError(f"{_shown(path)} is a trace already and needs no import.", remedy)
    data = file_bytes(path, _MOST_BYTES, TraceFileError)
    data = unpacked(data, path.name, _MOST_BYTES, TraceFileError)
    return data if is_archive(data) else _bare(data)


def _bare(data: bytes) -> bytes:
    """A text without its wrapping: UTF-16 of PowerShell, byte order mark, terminal colours, quote
    marks before all lines."""
    is_wide = data[:2] in (b"\xff\xfe", b"\xfe\xff") or data[1:2] == data[3:4] == b"\0"
    data = b"".join(utf8_of([data])) if is_wide or data[:3] == b"\xef\xbb\xbf" else data
    data = _COLOURS.sub(b"", data) if b"\x1b" in data else data
    return data if _NOT_QUOTED.search(data) is not None else _QUOTE.sub(b"", data)


def _pieces(path: Path, progress: ReportProgress | None = None) -> Iterator[bytes]:
    """A file in pieces, unpacked. Raises like `_content`; logs may be far larger."""
    with opened_file(path, TraceFileError) as file:
        begin = file.read(_PIECE) or b""
        if begin[:2] != b"\x1f\x8b":
            n, total = 0, path.stat().st_size
            while begin and (n := n + len(begin)) <= _MOST_LOG_BYTES:
                yield begin
                if progress is not None:
                    progress(n, total, "reading the log")
                begin = file.read(_PIECE) or b""
            return
    data = _content(path)
    for at in range(0, len(data), _PIECE):
        yield data[at : at + _PIECE]


def _shown(path: Path) -> str:
    """A file's name with invalid bytes replaced."""
    return os.fsencode(path.name).decode("utf-8", "replace")
