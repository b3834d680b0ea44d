"""`draftscope help`: pages on features and terms."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from app.cli.option_lines import declare
from app.cli.output import print_lines, print_pages
from engine.errors import OptionError
from resources import help_page, help_topics

_WIDEST = 100
"""Most columns of a page: longer lines are hard to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__, titles="\n".join(_titles()))


def run(args: argparse.Namespace) -> int:
    """Print a page, or the list of titles. Raises OptionError for an unknown topic."""
    if args.topic is None:
        print_lines([*_titles(), "", "draftscope help TOPIC prints a page."])
        return 0
    topics = help_topics()
    topic = args.topic.lower().removesuffix(".md").replace("_", "-").replace(" ", "-")
    if topic not in topics:
        near = get_close_matches(topic, topics, n=2, cutoff=0.6)
        raise OptionError(
            f"There is no page {args.topic!r}.",
            f"Did you mean {' or '.join(near)}?" if near else f"Choose from {', '.join(topics)}.",
        )
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    print_pages(plain_text(help_page(topic), width))
    return 0


def _titles() -> list[str]:
    return [f"  {topic:<16} {title}" for topic, title in help_topics().items()]


_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_MARKS = re.compile(r"\*\*|`|(?<!\w)_(?=\S)|(?<=\S)_(?!\w)")
_LIST_ITEM = re.compile(r"(\s*)([-*]|\d+\.)\s+")
_RULE = re.compile(r"\|[\s:|-]+\|?$")
_CELL = re.compile(r"(?<!\\)\|")
_NARROWEST = 8
"""Characters to which a table's columns may be narrowed."""


def plain_text(markdown: str, width: int) -> str:
    """A help page as text, in lines of at most `width` columns (40 if less is given) except code.

    Headings are underlined, tables aligned; a link is its text followed by the address. Marks of
    emphasis and code are removed. Ends with a line end.
    """
    return "\n".join(_blocks(markdown.splitlines(), max(width, 40))).rstrip("\n") + "\n"


def _blocks(lines: Sequence[str], width: int) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if line.startswith("```"):
            while end < len(lines) and not lines[end].startswith("```"):
                end += 1
            yield from (f"    {code}".rstrip() for code in lines[at + 1 : end])
            end += 1
        elif line.startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while end < len(lines) and lines[end].startswith("    "):
                end += 1
            yield from lines[at:end]
        elif line.startswith("#"):
            level, _, title = line.partition(" ")
            yield f"{_inline(title)}\n{('=' if level == '#' else '-') * len(_inline(title))}"
        elif line.startswith("|"):
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            yield from _table(lines[at:end], width)
        elif line.strip():
            while end < len(lines) and _continues(lines[end]):
                end += 1
            yield _paragraph(lines[at:end], width)
        else:
            yield ""
        at = end


def _continues(line: str) -> bool:
    """Whether a line belongs to the paragraph or list item of the line before."""
    return bool(line.strip()) and not (line.startswith(("|", "#", "```")) or _LIST_ITEM.match(line))


def _paragraph(lines: Sequence[str], width: int) -> str:
    item = _LIST_ITEM.match(lines[0])
    indent = " " * len(item[0]) if item else ""
    first = item[0] if item else ""
    text = _inline(" ".join(line.strip() for line in (lines[0][len(first) :], *lines[1:])))
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _inline(text: str) -> str:
    """Text without marks; an address follows its text unless the text repeats it."""

    def link(found: re.Match[str]) -> str:
        label, address = found[1], found[2]
        if address.startswith("#") or found[0].startswith("!"):
            return label
        page = re.fullmatch(r"([\w-]+)\.md(#.*)?", address)
        if page:
            return label if page[1] in label else f"{label} (see {page[1]})"
        return label if label == address else f"{label} ({address})"

    parts = re.split(r"(`[^`]*`)", _LINK.sub(link, text))
    return "".join(
        part.strip("`") if part.startswith("`") else _MARKS.sub("", part) for part in parts
    ).replace("\\|", "|")


def _table(lines: Sequence[str], width: int) -> Iterator[str]:
    rows = [
        [_inline(cell.strip()) for cell in _CELL.split(line.strip().strip("|"))]
        for line in lines
        if not _RULE.match(line.strip())
    ]
    n = max(map(len, rows))
    rows = [row + [""] * (n - len(row)) for row in rows]
    widths = _widths([max(len(row[i]) for row in rows) for i in range(n)], width - 2 * (n - 1))
    head = True
    for row in rows:
        cells = [
            textwrap.wrap(cell, room, break_on_hyphens=False) or [""]
            for cell, room in zip(row, widths, strict=True)
        ]
        for i in range(max(map(len, cells))):
            parts = [(cell[i] if i < len(cell) else "") for cell in cells]
            padded = (part.ljust(room) for part, room in zip(parts, widths, strict=True))
            yield "  ".join(padded).rstrip()
        if head and any(row):
            yield "  ".join("-" * room for room in widths)
        head = False


def _widths(wanted: list[int], room: int) -> list[int]:
    """Column widths of a table: as wanted, the widest ones cut until all fit."""
    widths = [max(one, 1) for one in wanted]
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths
