"""Pages and views that scroll up and down where their place is too low for them."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QLayout, QScrollArea, QWidget

_LEAST_LINES, _LEAST_HIGH = 6, 90
"""Lines, and the pixels that do with a tall font: no screen is higher for its letters."""
_MOST_OF_SCREEN = 0.28
"""Part of the screen's height that a panel may ask for."""


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
        least = min(_LEAST_LINES * self.fontMetrics().height(), _LEAST_HIGH)
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


class LowPanel(QScrollArea):
    """Holds a view, and scrolls where the view asks for more height than a low screen has for it:
    with a tall font it may. Elsewhere it is as if the view stood there itself.
    """

    def __init__(self, view: QWidget) -> None:
        super().__init__()
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._view = view
        self.setWidget(view)

    def sizeHint(self) -> QSize:
        return self._view.sizeHint()

    def minimumSizeHint(self) -> QSize:
        least = self._view.minimumSizeHint()
        most = round(_MOST_OF_SCREEN * self.screen().availableGeometry().height())
        return QSize(least.width(), min(least.height(), most))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def viewportEvent(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.LayoutRequest:  # the view needs more room, or less
            self.updateGeometry()
            self._fit()
        return super().viewportEvent(event)

    def _fit(self) -> None:
        least = self._view.minimumSizeHint().height()
        room = self.viewport().size()
        self._view.resize(room.width(), max(room.height(), least))
