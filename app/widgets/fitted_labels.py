"""Space-saving widgets: labels with an ellipsis or with expandable lines, scrolling pages, and a
rounded button floating over a view ("To the end")."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QEvent, QPointF, QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QPen, QResizeEvent, QTextLayout, QTextOption
from PySide6.QtWidgets import QAbstractButton, QLabel, QLayout, QScrollArea, QSizePolicy, QWidget

from app.looks import Theme
from app.trace_models.shown_text import plain_tip
from app.widgets.build import scrolling, vbox
from engine.report.text import visible


class ElidedLabel(QLabel):
    """A label that requires no width and shows its text literally; on several lines only while it
    wraps."""

    def __init__(self, text: str = "", parent: QWidget | None = None, **properties: Any) -> None:
        super().__init__(parent, **properties)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setText(text)

    def setText(self, text: str) -> None:
        super().setText(visible(text, keep_lines=True))
        self.setToolTip(plain_tip(text))

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        if self.wordWrap():
            super().paintEvent(event)
            return
        painter = QPainter(self)
        painter.setPen(self.palette().color(self.foregroundRole()))
        room = self.contentsRect()
        text = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, room.width())
        painter.drawText(room, Qt.AlignmentFlag.AlignVCenter, text)
        painter.end()


MOST_LINES = 3
_FIRST_CHARACTERS = 40
_LEAST_CHARACTERS = 12


class ClampedLabel(QLabel):
    """A label that wraps at its width and adjusts its height. While it is cut, its tooltip has the
    whole text."""

    cut_changed = Signal(bool)

    def __init__(self, text: str, **properties: Any) -> None:
        super().__init__(**properties)
        self._most_lines, self._open, self.is_cut = MOST_LINES, False, False
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.say(text)

    def say(self, text: str) -> None:
        """Show another text."""
        self.whole = visible(text, keep_lines=True)
        self._fit()
        self.updateGeometry()

    def clamp(self, most_lines: int) -> None:
        """Cut the text after this many lines."""
        if most_lines != self._most_lines:
            self._most_lines = most_lines
            self._fit()
            self.updateGeometry()

    def n_lines(self, width: int) -> int:
        """Number of lines of the whole text."""
        return len(self._lines(width))

    def set_open(self, wanted: bool) -> None:
        self._open = wanted
        self._fit()
        self.updateGeometry()

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        n = self.n_lines(width)
        return (n if self._open else min(n, self._most_lines)) * self.fontMetrics().lineSpacing()

    def sizeHint(self) -> QSize:
        width = _FIRST_CHARACTERS * self.fontMetrics().averageCharWidth()
        return QSize(width, self.heightForWidth(width))

    def minimumSizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(_LEAST_CHARACTERS * metrics.averageCharWidth(), metrics.lineSpacing())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        lines = self._lines(self.width())
        last, cut = self._most_lines - 1, len(lines) > self._most_lines
        if cut and not self._open:
            rest = " ".join(lines[last:])
            end = self.fontMetrics().elidedText(rest, Qt.TextElideMode.ElideRight, self.width())
            lines = [*lines[:last], end]
        self.setText("\n".join(lines))
        self.setToolTip(plain_tip(self.whole) if cut and not self._open else "")
        if cut is not self.is_cut:
            self.is_cut = cut
            self.cut_changed.emit(cut)

    def _lines(self, width: int) -> list[str]:
        """The text wrapped at a width; longer words are broken."""
        lines: list[str] = []
        for paragraph in self.whole.splitlines() or [""]:
            layout = QTextLayout(paragraph, self.font())
            option = QTextOption()
            option.setWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
            layout.setTextOption(option)
            layout.beginLayout()
            while (line := layout.createLine()).isValid():
                line.setLineWidth(max(1, width))
                line.setPosition(QPointF(0, 0))
                start = line.textStart()
                lines.append(paragraph[start : start + line.textLength()].rstrip())
            layout.endLayout()
        return lines or [""]


_LEAST_LINES, _LEAST_HIGH = 6, 90
"""Minimum height in lines, and in pixels for tall fonts, because screens do not grow with fonts."""
_MOST_OF_SCREEN = 0.28
"""Share of the screen's height that a panel may require."""


class ScrollPage(QScrollArea):
    """A scroll area of any height from a few lines on, at least as wide as its page.

    The page shrinks to its minimum height before anything scrolls.
    """

    def __init__(self, layout: QLayout) -> None:
        super().__init__()
        self._page = _Page(layout)
        scrolling(self, self._page)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)

    def minimumSizeHint(self) -> QSize:
        least = min(_LEAST_LINES * self.fontMetrics().height(), _LEAST_HIGH)
        bar = self.verticalScrollBar().sizeHint().width()
        return QSize(self._page.minimumSizeHint().width() + bar, least)

    def viewportEvent(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.LayoutRequest:  # the page may need another width
            self.updateGeometry()
        return super().viewportEvent(event)


class _Page(QWidget):
    """For a page with wrapping text, Qt would start scrolling at its preferred height."""

    def __init__(self, layout: QLayout) -> None:
        super().__init__()
        self._layout = layout
        self.setLayout(layout)

    def heightForWidth(self, width: int) -> int:
        return self._layout.minimumHeightForWidth(width)


class LowPanel(ScrollPage):
    """Holds a view, and scrolls if the view requires more height than a low screen offers, as with
    tall fonts. Otherwise it has no effect."""

    def __init__(self, view: QWidget) -> None:
        super().__init__(vbox(view, margins=(0, 0, 0, 0)))
        self.view = view

    def sizeHint(self) -> QSize:
        return self.view.sizeHint()

    def minimumSizeHint(self) -> QSize:
        least = self.view.minimumSizeHint()
        most = round(_MOST_OF_SCREEN * self.screen().availableGeometry().height())
        return QSize(least.width(), min(least.height(), most))


class Chip(QAbstractButton):
    """A pill with a short text, pressed by a click or the space bar."""

    def __init__(self, text: str, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self.setText(text)
        self.setAccessibleName(text)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.adjustSize()

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(metrics.horizontalAdvance(self.text()) + 24, metrics.height() + 8)

    def paintEvent(self, _event: QPaintEvent) -> None:
        theme = self._theme
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        fill = "ui.hover" if self.underMouse() or self.isDown() else "ui.accent_tint"
        edge = "ui.focus" if self.hasFocus() else "ui.accent"
        painter.setBrush(theme.color(fill))
        painter.setPen(QPen(theme.color(edge), 1.0))
        box = self.rect().toRectF().adjusted(0.5, 0.5, -0.5, -0.5)
        painter.drawRoundedRect(box, box.height() / 2, box.height() / 2)
        painter.setPen(theme.color("ui.text"))
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignCenter, self.text())
        painter.end()
