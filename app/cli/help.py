"""`draftscope help`: pages on what the tool does and what its words mean."""

from __future__ import annotations

import argparse

from app.cli.output import print_lines, print_text
from resources import help_topics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    topics = help_topics()
    parser.add_argument(
        "topic",
        metavar="TOPIC",
        nargs="?",
        choices=[*topics],
        help=f"the page to print: {', '.join(topics)}; without it, what there is",
    )


def run(args: argparse.Namespace) -> int:
    """Print a page, or the titles of all."""
    topics = help_topics()
    if args.topic is None:
        texts = {name: path.read_text(encoding="utf-8") for name, path in topics.items()}
        print_lines(f"{name}: {text.partition(chr(10))[0][2:]}" for name, text in texts.items())
    else:
        print_text(topics[args.topic].read_text(encoding="utf-8"))
    return 0
