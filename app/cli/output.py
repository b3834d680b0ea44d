"""The output of all commands: everything that reaches a terminal or a pipe is written here.

Names, texts and messages come from files, servers and logs of anyone, and a terminal obeys some
characters. So all of it is filtered here, and colours are added afterwards:

- a line (`print_line`, `tell`, `note`): one line, see engine.plain_text;
- the text of a run, prompt included (`print_text`): unchanged unless standard output is a
  terminal; on a terminal filtered too, except for line feeds, tabs and joiners;
- JSON (`print_json`): with \\uXXXX for the same characters, so that parsing gives equal values;
- what libraries, warnings and tracebacks write to standard error: filtered, except line feeds.

Signals that end a command are handled here too: Ctrl-C, a request to end, a closed terminal.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

from engine.files import write_text
from engine.plain_text import TEXT, terminal_text

if TYPE_CHECKING:
    from typing_extensions import Buffer


_NOT_ASCII = re.compile(r"[^\n\x20-\x7e]")
_CLEAR_LINE = "\r\x1b[K"
_BELOW, _BACK = "\x1bD\x1b[A\x1b7\r\n", "\x1b8"
"""Escape sequences to the line below the cursor, creating it if needed, and back."""
_is_open = False
"""Whether the text of a run has left the cursor in the middle of a line."""


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Reopen closed standard streams, make standard output and error accept any character, filter
    standard error for all writers, and drop what it cannot write."""
    _open_closed()
    LastingStream.in_place_of("stderr")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with redirect_stderr(_Filtered(sys.stderr) if sys.stderr else None):
        yield


def _open_closed() -> None:
    """Reopen standard streams that a shell has closed (`>&-`) on the null device, so that no other
    file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # open() returns the lowest free number
            stream = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


class LastingStream(io.FileIO):
    """A standard stream that never fails: when writing becomes impossible, output is dropped, and
    `error` holds the first reason."""

    error: OSError | None = None

    @classmethod
    def in_place_of(cls, name: str) -> LastingStream | None:
        """Replace sys.NAME; None if that is not the process's own stream."""
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            return None
        output = cls(stream.fileno(), "wb", closefd=False)
        text = io.TextIOWrapper(
            # standard error is unbuffered
            cast(BinaryIO, output) if stream.write_through else io.BufferedWriter(output),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, text)
        return output

    def write(self, data: Buffer, /) -> int:
        """Bytes written, or dropped."""
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


class _Filtered:
    """A stream with foreign writers."""

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
    """Print a line on standard output, unbuffered."""
    print(terminal_text(line), flush=True)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(terminal_text(line))
    flush()


def print_text(text: str) -> None:
    """Print text of a run, unbuffered and without a line end."""
    print_texts([(text, "")])


def print_texts(texts: Iterable[tuple[str, str]]) -> None:
    """The same, each piece with the SGR parameters of its style on a terminal, empty for none."""
    has_terminal, has_colours = is_terminal(sys.stdout), is_coloured()
    pieces = []
    for text, style in texts:
        piece = terminal_text(text, TEXT) if has_terminal else text
        pieces.append(f"\x1b[{style}m{piece}\x1b[0m" if style and has_colours else piece)
    written = "".join(pieces)
    print(written, end="", flush=True)
    global _is_open
    if written and has_terminal:
        _is_open = not written.endswith("\n")


def end_text() -> None:
    """Finish the text of a run: its line, unless a message has done so, and an empty one."""
    print_text("\n\n" if _is_open or not is_terminal(sys.stdout) else "\n")


def print_pages(text: str) -> None:
    """Print a long text, through the user's pager if standard output is a terminal: $PAGER, else
    less or more; an empty $PAGER, or cat, means none."""
    chosen = os.environ.get("PAGER")
    found = [shutil.which(name) for name in ("less", "more")] if chosen is None else [chosen]
    command = shlex.split(next(filter(None, found), ""))
    if not is_terminal(sys.stdout) or not command or shutil.which(command[0]) is None:
        print_text(text)
        return
    flush()
    # -F: print short texts directly; -R: allow letters of any language; -X: keep the text on the
    # screen
    environment = {"LESS": "FRX", "LESSCHARSET": "utf-8", **os.environ}
    with on_signal(lambda _: None):  # the pager handles Ctrl-C
        subprocess.run(
            command, input=terminal_text(text, TEXT).encode(), env=environment, check=False
        )


def print_json(value: Any) -> None:
    """Print a value as strict JSON: non-finite numbers become null."""
    from engine.trace.typed_json import strict_json

    print(json_text(strict_json(value)), flush=True)


def print_report(args: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    """Print a value with --json, else lines."""
    if args.json:
        print_json(value)
    else:
        print_lines(lines)


def in_columns(rows: Sequence[Sequence[str]], at_right: Sequence[bool]) -> Iterator[str]:
    """Lines of a table; at_right: per column, whether cells are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, at_right, strict=True)
        yield "  ".join(c.rjust(n) if right else c.ljust(n) for c, n, right in cells).rstrip()


def json_text(value: Any) -> str:
    r"""Indented JSON: printable characters are kept, others become \uXXXX."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return _NOT_ASCII.sub(lambda found: _json_character(found[0]), text)


def write_json(path: Path, value: Any) -> None:
    """Write it to a file and print its path. Raises OptionError if that fails."""
    write_text(path, json_text(value) + "\n")
    tell(f"results written to {path}")


def _json_character(char: str) -> str:
    return char if terminal_text(char) == char else json.dumps(char)[1:-1]


def tell(line: str, name: str = "draftscope: ") -> None:
    """Print a line on standard error, which may be closed; ends the line of a run first."""
    if _is_open and is_terminal(sys.stderr):
        print_text("\n")
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"{name}{terminal_text(line)}", file=sys.stderr, flush=True)


def note(line: str) -> None:
    """Print a note on standard error."""
    tell(f"note: {line}")


def show_progress(text: str) -> None:
    """A line on a terminal's standard error that the next one replaces; an empty one clears it."""
    _to_terminal(f"{_CLEAR_LINE}{terminal_text(text)}")


def show_below(text: str) -> None:
    """The same in the line below the cursor, which does not move."""
    flush()
    line = terminal_text(text)[: shutil.get_terminal_size().columns - 1]
    _to_terminal(f"{_BELOW}\x1b[K{line}{_BACK}")


def _to_terminal(text: str) -> None:
    stream = sys.stderr.stream if isinstance(sys.stderr, _Filtered) else sys.stderr
    with suppress(OSError):  # the terminal may be closed
        print(text, end="", file=stream, flush=True)


def is_coloured() -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return is_terminal(sys.stdout) and not is_plain


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def flush() -> None:
    """Flush standard output."""
    if sys.stdout is not None:
        sys.stdout.flush()


def end() -> None:
    """Flush standard output, or drop the rest: a failure at interpreter exit would be reported."""
    try:
        flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


_AGAIN_S = 0.01


class Interrupted(KeyboardInterrupt):
    """Ends a command after a signal; `status` is the exit status that shells use for it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


def interrupt(number: int) -> None:
    """Raise Interrupted in the main thread; an `act` for `on_signal`."""
    raise Interrupted(number)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Defer signals while the body writes what was recorded."""
    came: list[int] = []
    with on_signal(came.append):
        yield
    if came:
        raise Interrupted(came[0])


@contextmanager
def on_signal(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` on the first of SIGNALS; a second one ends the process at once.

    Ignored signals stay ignored, as under nohup. No effect outside the main thread. A signal that
    arrives where nothing can be raised, as in a finaliser, is sent again.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in SIGNALS}
        before = {n: handler for n, handler in found.items() if handler != signal.SIG_IGN}

    def handle(number: int, frame: FrameType | None) -> None:
        for each in before:  # even during a long forward pass, while no Python code runs
            signal.signal(each, signal.SIG_DFL)
        act(number)

    def again(raised: sys.UnraisableHookArgs) -> None:
        if not isinstance(raised.exc_value, Interrupted):
            usual(raised)
            return
        number = raised.exc_value.status - 128
        signal.signal(number, handle)
        late = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
        late.daemon = True
        late.start()

    usual = sys.unraisablehook
    if before:
        sys.unraisablehook = again
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        if before:
            sys.unraisablehook = usual
        for number, handler in before.items():
            signal.signal(number, handler)
