"""The one entry point. No subcommand opens the window; subcommands never import Qt.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from app.cli.common import SUBCOMMANDS, new_parser
from engine.errors import DraftscopeError, OptionError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; errors that a user can act on become one line on stderr."""
    _never_fail_on_characters()
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except SystemExit as leaving:  # argparse: help, version, wrong usage
        return int(leaving.code or 0)
    except DraftscopeError as error:
        print(f"draftscope: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, OptionError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("draftscope: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader has gone: nothing more to say, not even when the interpreter flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv and argv[0] in SUBCOMMANDS else ""
    module = import_module(f"app.cli.{name.replace('-', '_') if name else 'launch'}")
    parser = new_parser(name)
    module.add_arguments(parser)
    # intermixed: options may stand between the positionals, some of which may be left out
    args = parser.parse_intermixed_args(argv[1:] if name else argv)
    return int(module.run(args))


def _never_fail_on_characters() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
