"""Writing a report into a file."""

from __future__ import annotations

from pathlib import Path

from engine.files import written_whole
from engine.report.page import html_page
from engine.report.parts import Report


def write_report(report: Report, path: Path) -> None:
    """As one HTML page, in place of an earlier file. Raises OptionError where the system does not
    let us write."""
    text = html_page(report)
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8")
