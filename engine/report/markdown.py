"""A report, or one table of it, as Markdown for a comment; plots are left out."""

from __future__ import annotations

from collections.abc import Iterator

from engine.report.parts import CodeSample, Facts, Part, Remark, Report, ReportTable, Tokens
from engine.report.text import markdown_block, markdown_cell
from engine.trace.records import GHOST_KINDS


def markdown(report: Report) -> str:
    """The whole report."""
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
    elif isinstance(part, Facts):
        for name, value in part.values.items():
            yield f"- {markdown_cell(name)}: {markdown_cell(value)}"
    elif isinstance(part, Remark):
        tone = f"**{markdown_cell(part.tone)}**: " if part.tone else ""
        yield f"{'- ' if part.tone else ''}{tone}{markdown_cell(part.text)}"
    elif isinstance(part, CodeSample):
        yield markdown_block(part.text)
    elif isinstance(part, Tokens):
        yield f"**{markdown_cell(part.title)}**"
        yield ""
        yield markdown_block("".join(text for text, kind in part.pieces if kind not in GHOST_KINDS))
