"""Parts of a report. All text may be untrusted; writers escape it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_NUMBER = re.compile(r"[-+]?[0-9][0-9.,]*(e[-+]?[0-9]+)?(/[0-9]+| [KMGT]?i?B)?", re.ASCII)
CODE = "code"
_NONE = ("", "-", "n/a", "nan", "inf")


@dataclass(frozen=True, slots=True)
class ReportTable:
    """heads and rows: texts, rows [n][len(heads)]. title: above it, may be empty."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold only numbers and marks for missing ones: [len(heads)]."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.heads)
        return tuple(
            any(map(_NUMBER.fullmatch, cells))
            and all(_NUMBER.fullmatch(cell) or cell in _NONE for cell in cells)
            for cells in columns
        )


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence or a paragraph. tone: "", the severity of a finding, or CODE: lines kept
    literally, such as a command."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Generated text in pieces, each with its kind (engine.trace.records.TOKEN_KINDS)."""

    title: str
    pieces: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot drawn by engine.report.page. kind: one of its PLOTS.

    names: of the values along x, or of the bars. series: by name, None = missing. unit: of the
    values. log: a logarithmic axis.
    """

    kind: str
    title: str
    names: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    unit: str = ""
    log: bool = False


Part = ReportTable | Mapping[str, str] | Remark | Tokens | Plot
"""A mapping has names and values, shown in two columns."""


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a heading."""

    heading: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Report:
    """A title, the result in a sentence, and sections; empty sections are omitted."""

    title: str
    summary: str
    sections: Sequence[Section] = field(default_factory=tuple)
