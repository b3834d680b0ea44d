"""--report and --markdown: what a command measured, as a page to share or as a comment."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from app.cli.common import check_output, output_file
from app.cli.output import print_lines, tell
from engine.errors import OptionError
from engine.report.markdown import markdown
from engine.report.parts import Report
from engine.report.write import write_report


def add_report(group: argparse._ArgumentGroup) -> None:
    """Both options."""
    group.add_argument(
        "--report",
        type=output_file,
        metavar="FILE",
        help="write what was measured as one HTML page that needs nothing else",
    )
    add_markdown(group)


def add_markdown(group: argparse._ArgumentGroup) -> None:
    """--markdown alone."""
    group.add_argument("--markdown", action="store_true", help="print Markdown, for a comment")


def check_report(args: argparse.Namespace) -> None:
    """Refuse a file that cannot be written, before anything is computed. Raises OptionError."""
    if args.markdown and args.json:
        raise OptionError("--markdown and --json are both given.", "Leave one of them out.")
    if args.report is not None:
        check_output(args.report, "--report")


def deliver_report(args: argparse.Namespace, make: Callable[[list[str]], Report]) -> bool:
    """Write and print the report as far as it is asked for; whether it was printed.

    make: gives the report on what was done by the command that these words are.
    """
    if args.report is None and not args.markdown:
        return False
    report = make(["draftscope", *getattr(args, "words", ())])
    if args.report is not None:
        write_report(report, args.report)
        tell(f"report written to {args.report}")
    if args.markdown:
        print_lines(markdown(report).removesuffix("\n").split("\n"))
    return bool(args.markdown)
