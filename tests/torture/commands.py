"""Commands of the program in this process, with all that they say."""

from __future__ import annotations

import io
import os
import sys
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from app.__main__ import main

_END = b"\0the end of what is said\0"


@dataclass(frozen=True)
class Said:
    """How a command ended, and its output and errors as they were written."""

    status: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        """Errors, however they are encoded; with all else where both go to one terminal."""
        return (self.err or self.out).decode("utf-8", "replace")

    def check(self, *statuses: int) -> None:
        """Raises AssertionError for another status, silence after a failure, and a traceback."""
        assert self.status in (statuses or (0, 1, 2)), f"status {self.status}: {self.text[-800:]}"
        assert "Traceback" not in self.text, self.text[-1500:]
        assert self.status == 0 or self.out.strip() or self.text.strip(), "failed without a word"
        assert self.status != 2 or "error: " in self.text, self.text[-800:]


def said_by(words: Sequence[str], *, stdin: bytes = b"", on_terminal: bool = False) -> Said:
    """Run a command. on_terminal: its output and errors are one terminal, in `out`.

    What it raises is raised, and so is what a thread of it raises.
    """
    raised: list[BaseException] = []
    hook = threading.excepthook
    threading.excepthook = lambda args: raised.append(args.exc_value or args.exc_type())
    streams = _terminal() if on_terminal else _pipes()
    standard = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with streams as (sys.stdout, sys.stderr, read):
            status = main(words)
            sys.stdout.flush()
            sys.stderr.flush()
            out, err = read()
    finally:
        sys.stdin, sys.stdout, sys.stderr = standard
        threading.excepthook = hook
    if raised:
        raise raised[0]
    return Said(status, out, err)


_Streams = tuple[io.TextIOWrapper, io.TextIOWrapper, Callable[[], tuple[bytes, bytes]]]
"""Output, errors, and what gives all that was written to both."""


@contextmanager
def _pipes() -> Iterator[_Streams]:
    out, err = io.BytesIO(), io.BytesIO()
    yield _text(out), _text(err), lambda: (out.getvalue(), err.getvalue())


def _text(stream: io.BytesIO | io.FileIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, "utf-8", "backslashreplace", newline="\n")  # type: ignore[type-var]


@contextmanager
def _terminal() -> Iterator[_Streams]:
    """A terminal that changes nothing of what is written to it."""
    ours, its = os.openpty()
    tty.setraw(its)
    got = io.BytesIO()
    reader = threading.Thread(target=_drain, args=(ours, got), daemon=True)
    reader.start()
    text = _text(io.FileIO(its, "w"))

    def read() -> tuple[bytes, bytes]:
        # no end of file comes where a process of a sweep has the terminal still open
        text.buffer.write(_END)
        text.close()
        reader.join()
        return got.getvalue().removesuffix(_END), b""

    yield text, text, read
    with suppress(OSError, ValueError):
        text.close()
    os.close(ours)


def _drain(terminal: int, got: io.BytesIO) -> None:
    with suppress(OSError):  # its end
        while not got.getvalue().endswith(_END) and (more := os.read(terminal, 1 << 16)):
            got.write(more)
