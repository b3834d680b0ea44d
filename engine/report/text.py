"""Escaping of untrusted text for HTML and Markdown, with invisible characters and those that change
the text direction made visible; and reports as Markdown for a comment, without plots."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Mapping

from engine.report.parts import CODE, Part, Remark, Report, ReportTable, Tokens
from engine.trace.records import GHOST_KINDS

_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~])")
_AUTOMATIC = re.compile(r"([@#])(?=\w)|(?<=\w):(?=//)")
_LIST = re.compile(r"^(\d*)([-+.)])(?= )")
_LONGEST_CELL = 200


def visible(text: str, *, keep_lines: bool = False) -> str:
    """A text in which invisible characters and those that change the direction are codes such as
    U+202E."""
    return "".join(
        char if char.isprintable() or (keep_lines and char == "\n") else _code(char)
        for char in text
    )


def _code(char: str) -> str:
    if unicodedata.category(char) in _UNSEEN:
        return f"⟨U+{ord(char):04X}⟩"
    return " "  # an unusual space


def escape(text: str) -> str:
    """Text for an element or attribute of HTML or SVG, on one line."""
    return html.escape(visible(" ".join(text.split())))


def escape_lines(text: str) -> str:
    """Text for HTML that keeps line feeds and runs of spaces."""
    return html.escape(visible(text.replace("\t", "    "), keep_lines=True))


def markdown_cell(text: str) -> str:
    """Text for a cell or list in Markdown: on one line, without markup, mentions or links."""
    line = visible(" ".join(text.split()))
    if len(line) > _LONGEST_CELL:
        line = f"{line[: _LONGEST_CELL - 1]}…"
    plain = _LIST.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\1", line.replace("&", "&amp;")))
    # mentions and references need their sign directly before the word
    return _AUTOMATIC.sub("\\g<0>&ZeroWidthSpace;", plain)


def markdown_block(text: str) -> str:
    """A fenced block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{visible(text, keep_lines=True)}\n{fence}"


def markdown(report: Report) -> str:
    """A whole report."""
    return "\n".join(_lines(report)).rstrip("\n") + "\n"


def table_lines(table: ReportTable) -> Iterator[str]:
    """A table, with its title above."""
    if table.title:
        yield f"**{markdown_cell(table.title)}**"
        yield ""
    yield _row(table.heads)
    yield "|" + "".join("---:|" if numeric else "---|" for numeric in table.numeric)
    yield from map(_row, table.rows)


def _row(cells: object) -> str:
    assert isinstance(cells, (list, tuple))
    return f"| {' | '.join(map(markdown_cell, cells))} |"


def _lines(report: Report) -> Iterator[str]:
    yield f"### {markdown_cell(report.title)}"
    yield ""
    yield markdown_cell(report.summary)
    for section in report.sections:
        parts = [lines for part in section.parts if (lines := list(_part(part)))]
        if parts:
            yield ""
            yield f"#### {markdown_cell(section.heading)}"
        for lines in parts:
            yield ""
            yield from lines


def _part(part: Part) -> Iterator[str]:
    if isinstance(part, ReportTable):
        yield from table_lines(part)
    elif isinstance(part, Mapping):
        for name, value in part.items():
            yield f"- {markdown_cell(name)}: {markdown_cell(value)}"
    elif isinstance(part, Remark) and part.tone == CODE:
        yield markdown_block(part.text)
    elif isinstance(part, Remark):
        tone = f"**{markdown_cell(part.tone)}**: " if part.tone else ""
        yield f"{'- ' if part.tone else ''}{tone}{markdown_cell(part.text)}"
    elif isinstance(part, Tokens):
        yield f"**{markdown_cell(part.title)}**"
        yield ""
        yield markdown_block("".join(text for text, kind in part.pieces if kind not in GHOST_KINDS))
