"""The output of all commands: whatever reaches a terminal or a pipe is written here.

Names, texts and messages come from files, servers and logs of anyone, and a terminal obeys some
characters. So all of it is filtered here, and colours are added afterwards:

- a line (`print_line`, `tell`, `note`): one line, see engine.terminal_text;
- the text of a run, prompt included (`print_text`): as it is where standard output is no
  terminal; on a terminal filtered too, its lines, tabs and joiners kept;
- JSON (`print_json`): with \\uXXXX for the same characters, so that parsing gives equal values;
- what libraries, warnings and tracebacks write to standard error: filtered, its lines kept.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any, TextIO

from engine.terminal_text import TEXT, terminal_text

_NOT_ASCII = re.compile(r"[^\n\x20-\x7e]")
_CLEAR_LINE = "\r\x1b[K"


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Both streams take any character, and standard error is filtered whoever writes to it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with redirect_stderr(_Filtered(sys.stderr) if sys.stderr else None):
        yield


class _Filtered:
    """A stream whose writers are not ours."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(terminal_text(text, TEXT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def print_line(line: str = "") -> None:
    """A line on standard output, at once."""
    print(terminal_text(line), flush=True)


def print_lines(lines: Iterable[str]) -> None:
    """Lines on standard output."""
    for line in lines:
        print(terminal_text(line))
    flush()


def print_text(text: str, colour: int | None = None) -> None:
    """Text of a run, at once and without a line end. colour: of the terminal, as SGR numbers it."""
    if is_terminal(sys.stdout):
        text = terminal_text(text, TEXT)
    print(f"\x1b[{colour}m{text}\x1b[0m" if colour and is_coloured() else text, end="", flush=True)


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    print(json_text(value), flush=True)


def json_text(value: Any) -> str:
    """Indented JSON: what is printable stands as it is, all else as \\uXXXX."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return _NOT_ASCII.sub(lambda found: _json_character(found[0]), text)


def _json_character(char: str) -> str:
    return char if terminal_text(char) == char else json.dumps(char)[1:-1]


def tell(line: str, name: str = "draftscope: ") -> None:
    """A line on standard error, which may be gone."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"{name}{terminal_text(line)}", file=sys.stderr, flush=True)


def note(line: str) -> None:
    """Something on the side, on standard error."""
    tell(f"note: {line}")


def show_progress(text: str) -> None:
    """A line of a terminal's standard error that the next one replaces; an empty one clears it."""
    stream = sys.stderr.stream if isinstance(sys.stderr, _Filtered) else sys.stderr
    print(f"{_CLEAR_LINE}{terminal_text(text)}", end="", file=stream, flush=True)


def is_coloured() -> bool:
    """Whether standard output is a terminal that may be sent colours."""
    return is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is there and a terminal."""
    return stream is not None and stream.isatty()


def flush() -> None:
    """Pass on what is held back of standard output."""
    if sys.stdout is not None:
        sys.stdout.flush()


def end() -> None:
    """Let the interpreter find nothing to flush at its end, where failing is loud."""
    try:
        flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
