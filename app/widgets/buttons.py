"""Small parts of views: a rounded button that floats over one ("To the end"); in the title of a
dock, a button that opens a menu, and words after the title.
"""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QObject, QPoint, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPalette, QPen
from PySide6.QtWidgets import QAbstractButton, QDockWidget, QMenu, QToolButton, QWidget

from app.looks.theme import Theme
from app.widgets.fitted_labels import ElidedLabel


class Chip(QAbstractButton):
    """A pill with a short text; the space bar and a click both press it."""

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


_GAP = 4
_DIRECT = Qt.FindChildOption.FindDirectChildrenOnly
_WITH_TEXT = Qt.ToolButtonStyle.ToolButtonTextBesideIcon
_WITHOUT = Qt.ToolButtonStyle.ToolButtonIconOnly


class TitleButton(QToolButton):
    """A button left of the buttons that Qt draws in a dock's title.

    Before the menu opens, what `target` gives gets the focus: the menu's actions are about that.
    """

    def __init__(
        self, dock: QDockWidget, text: str, menu: QMenu, target: Callable[[], QWidget | None]
    ) -> None:
        super().__init__(dock)
        self._dock, self._menu, self._target = dock, menu, target
        self.setText(text)
        self.setAccessibleName(f"{text} menu: {dock.windowTitle()}")
        self.setToolTip("X-axis, zoom, export as PNG, SVG or CSV, copy as image")
        self.setToolButtonStyle(_WITH_TEXT)
        self.setArrowType(Qt.ArrowType.DownArrow)
        self.setAutoRaise(True)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.clicked.connect(self._open)
        self._whole = self.sizeHint().width()
        dock.installEventFilter(self)
        self._place()
        self.show()  # Qt keeps what is made in a dock that is in sight already hidden

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.Resize, QEvent.Type.LayoutRequest, QEvent.Type.Show):
            self._place()
        return super().eventFilter(watched, event)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self.setToolButtonStyle(_WITH_TEXT)
            self._whole = self.sizeHint().width()
            self._place()

    def _place(self) -> None:
        title = self._dock.widget().geometry().top()
        drawn = [
            button
            for button in self._dock.findChildren(QAbstractButton, options=_DIRECT)
            if button is not self and not button.isHidden()
        ]
        right = min((button.x() for button in drawn), default=self._dock.width())
        name = self.fontMetrics().horizontalAdvance(self._dock.windowTitle())
        fits = name + self._whole + 3 * _GAP <= right
        # only a change: each setting asks the dock for a layout, which comes back here
        if fits != (self.toolButtonStyle() is _WITH_TEXT):
            self.setToolButtonStyle(_WITH_TEXT if fits else _WITHOUT)
        height = min(self.sizeHint().height(), title) if title > _GAP else self.sizeHint().height()
        self.resize(self.sizeHint().width(), height)
        self.move(right - self.width() - _GAP, max(0, (title - height) // 2))
        self.raise_()

    def _open(self) -> None:
        target = self._target()
        if target is not None:
            target.setFocus(Qt.FocusReason.OtherFocusReason)
        self._menu.popup(self.mapToGlobal(QPoint(0, self.height())))


_LEAST_CHARACTERS = 5
_PLACES = (
    QEvent.Type.Resize,
    QEvent.Type.LayoutRequest,
    QEvent.Type.Show,
    QEvent.Type.WindowTitleChange,
)


class TitleNote(ElidedLabel):
    """Greyed words between a dock's title and its buttons; left out where there is no room."""

    def __init__(self, dock: QDockWidget) -> None:
        super().__init__("", dock)
        self._dock = dock
        self.setForegroundRole(QPalette.ColorRole.PlaceholderText)
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)  # the title is dragged
        dock.installEventFilter(self)
        self.hide()

    def say(self, text: str) -> None:
        """Show other words, or none."""
        if text != self.text():
            self.setText(text)
            self._place()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in _PLACES:
            self._place()
        return super().eventFilter(watched, event)

    def _place(self) -> None:
        view, metrics = self._dock.widget(), self.fontMetrics()
        high = 0 if view is None else view.geometry().top()
        x = metrics.horizontalAdvance(self._dock.windowTitle()) + 4 * _GAP
        least = x + _LEAST_CHARACTERS * metrics.averageCharWidth()
        drawn = [one.x() for one in self._dock.findChildren(QAbstractButton, options=_DIRECT)]
        right = min((at for at in drawn if at > 0), default=self._dock.width()) - _GAP
        fits = bool(self.text()) and high > _GAP and right > least
        self.setGeometry(x, 0, right - x, high)
        self.setVisible(fits)
