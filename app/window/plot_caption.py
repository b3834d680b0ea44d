"""What a picture of a plot says above it: what it shows, of which run, under which settings."""

from __future__ import annotations

from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QFont, QPainter
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.trace_models.run_facts import effective, run_origin, run_title
from engine.trace.run_ref import RunRef

_LEFT, _TOP = 14, 8


class PlotCaption:
    """A title and lines below it, each cut at the width of the page. page: named after what it
    shows, or inside a widget that is."""

    def __init__(self, page: QWidget, run: RunRef | None) -> None:
        parent = page.parentWidget()
        self.title = page.accessibleName() or ("" if parent is None else parent.accessibleName())
        self.lines = [] if run is None else _lines(run)
        self._page = page
        self._step = page.fontMetrics().lineSpacing()

    @property
    def height(self) -> int:
        """Room above the page, in its pixels."""
        return _TOP + (1 + len(self.lines)) * self._step

    def paint(self, painter: QPainter, theme: Theme) -> None:
        """Write it from (0, 0) on."""
        painter.save()
        font = QFont(self._page.font())
        width = self._page.width() - 2 * _LEFT
        for at, line in enumerate((self.title, *self.lines)):
            font.setBold(at == 0)
            painter.setFont(font)
            painter.setPen(theme.color("ui.muted" if at else "ui.text"))
            box = QRect(_LEFT, _TOP + at * self._step, width, self._step)
            text = painter.fontMetrics().elidedText(line, Qt.TextElideMode.ElideRight, width)
            painter.drawText(box, Qt.AlignmentFlag.AlignVCenter, text)
        painter.restore()


def _lines(run: RunRef) -> list[str]:
    named = filter(None, (run_origin(run.facts), str(run), run_title(run.facts)))
    return [" · ".join(named), *effective(run.facts).splitlines()]
