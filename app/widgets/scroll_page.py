"""A page that scrolls up and down where its place is too low for it."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QFrame, QLayout, QScrollArea, QWidget

_LEAST_LINES = 6


class ScrollPage(QScrollArea):
    """Takes any height from a few lines on; the width is that of the page at least.

    What is on the page shrinks to its least height before anything scrolls.
    """

    def __init__(self, layout: QLayout, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._page = _Page(layout)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setWidgetResizable(True)
        self.setWidget(self._page)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)

    def minimumSizeHint(self) -> QSize:
        least = _LEAST_LINES * self.fontMetrics().height()
        bar = self.verticalScrollBar().sizeHint().width()
        return QSize(self._page.minimumSizeHint().width() + bar, least)


class _Page(QWidget):
    """For a page with text that wraps, Qt would begin to scroll at the height it likes best."""

    def __init__(self, layout: QLayout) -> None:
        super().__init__()
        self._layout = layout
        self.setLayout(layout)

    def heightForWidth(self, width: int) -> int:
        return self._layout.minimumHeightForWidth(width)
