"""The one entry point. No subcommand opens the window; subcommands never import Qt.

Exit status: 0 done, 1 failed, 2 wrong usage; ended by a signal 128 and its number, that is 130
for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from app.cli.common import SUBCOMMANDS, module_of, new_parser
from app.cli.interruption import Interrupted, interrupt, on_signal
from engine.errors import DraftscopeError, OptionError

if TYPE_CHECKING:
    from typing_extensions import Buffer

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_FILES = ("trace", "out", "json", "report", "capture")
_REMEDY = "Check the path, its rights and the room on the disk."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; errors that a user can act on become one line on stderr."""
    _open_what_is_closed()
    _never_fail_on_characters()
    _Output.in_place_of("stderr")
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as leaving:  # argparse: help, version, wrong usage
        return int(leaving.code or 0)
    except DraftscopeError as error:
        _tell(f"error: {error}")
        return EXIT_USAGE if isinstance(error, OptionError) else EXIT_FAILED
    except KeyboardInterrupt as ending:
        _tell("interrupted")
        return ending.status if isinstance(ending, Interrupted) else EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has gone: nothing more to say
        return EXIT_FAILED
    except MemoryError:
        _tell("error: There is not enough memory for this. Close other programs, or ask for less.")
        return EXIT_FAILED
    except OSError as error:
        named = f" ({str(error.filename)[:80]})" if error.filename else ""
        _tell(f"error: The system refuses: {error.strerror or error}{named}. {_REMEDY}")
        return EXIT_FAILED
    finally:
        _flush()


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv and argv[0] in SUBCOMMANDS else ""
    module = import_module(module_of(name))
    parser = new_parser(name)
    module.add_arguments(parser)
    # intermixed: options may stand between the positionals, some of which may be left out; it
    # cannot be interrupted half-way, where it fails to put its parser back
    came: list[int] = []
    with on_signal(came.append):
        args = parser.parse_intermixed_args(argv[1:] if name else argv)
    if came:
        interrupt(came[0])
    args.words = argv
    if not name:  # the window has its own way to end
        return int(module.run(args))
    output = _Output.in_place_of("stdout") if _writes_files(args) else None
    with on_signal(interrupt):
        status = int(module.run(args))
        sys.stdout.flush()
    if output is not None and output.error is not None:
        raise output.error
    return status


def _writes_files(args: argparse.Namespace) -> bool:
    """Whether a command has more to do than to print."""
    wanted = (getattr(args, name, None) for name in _FILES)
    return any(isinstance(one, Path) for one in wanted)


class _Output(io.FileIO):
    """A standard stream of a command that has more to do than to print: where nothing can be
    printed any more, what is printed is lost, and `error` is the first reason."""

    error: OSError | None = None

    @classmethod
    def in_place_of(cls, name: str) -> _Output | None:
        """Put one in the place of sys.NAME; None where that is not the process's own stream."""
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            return None
        output = cls(stream.fileno(), "wb", closefd=False)
        text = io.TextIOWrapper(
            # standard error goes out at once
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


def _tell(text: str) -> None:
    """One line, whatever is in the names of files: no terminal is told to do anything."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    with suppress(OSError):  # the terminal may be gone
        print(f"draftscope: {line}", file=sys.stderr)


def _flush() -> None:
    """Let the interpreter find nothing to flush at its end, where failing is loud."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_what_is_closed() -> None:
    """Standard streams that a shell has closed (`>&-`): nothing is read or written there, and no
    other file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # what is opened gets the lowest number that is free
            stream = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def _never_fail_on_characters() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
