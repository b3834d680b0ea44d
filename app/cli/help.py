"""`draftscope help`: pages on what the tool does and what its words mean."""

from __future__ import annotations

import argparse
import shutil
from difflib import get_close_matches

from app.cli.markdown_text import plain_text
from app.cli.output import print_lines, print_pages
from engine.errors import OptionError
from resources import help_page, help_topics

_WIDEST = 100
"""Columns of a page, also where the terminal has more: longer lines are hard to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.epilog = "topics:\n" + "\n".join(_titles())
    parser.add_argument(
        "topic", metavar="TOPIC", nargs="?", help="the page to print; without it, what there is"
    )


def run(args: argparse.Namespace) -> int:
    """Print a page, or the titles of all. Raises OptionError for an unknown topic."""
    if args.topic is None:
        print_lines([*_titles(), "", "draftscope help TOPIC prints a page."])
        return 0
    topics = help_topics()
    topic = args.topic.lower().removesuffix(".md").replace("_", "-").replace(" ", "-")
    if topic not in topics:
        near = get_close_matches(topic, topics, n=2, cutoff=0.6)
        raise OptionError(
            f"There is no page {args.topic!r}.",
            f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(topics)}.",
        )
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    print_pages(plain_text(help_page(topic), width))
    return 0


def _titles() -> list[str]:
    return [f"  {topic:<16} {title}" for topic, title in help_topics().items()]
