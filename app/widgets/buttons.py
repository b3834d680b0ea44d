"""Small buttons: a rounded one that floats over a view ("To the end"), and one in the title of a
dock that opens a menu.
"""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QPoint, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QAbstractButton, QDockWidget, QMenu, QToolButton, QWidget

from app.looks.theme import Theme


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

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self.update()

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
_WITH_TEXT = Qt.ToolButtonStyle.ToolButtonTextBesideIcon
_WITHOUT = Qt.ToolButtonStyle.ToolButtonIconOnly


class TitleButton(QToolButton):
    """A button left of the buttons that Qt draws in a dock's title.

    Before the menu opens, `target` gets the focus: it is what the menu's actions are about.
    """

    def __init__(self, dock: QDockWidget, text: str, menu: QMenu, target: QWidget) -> None:
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
            for button in self._dock.findChildren(
                QAbstractButton, options=Qt.FindChildOption.FindDirectChildrenOnly
            )
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
        self._target.setFocus(Qt.FocusReason.OtherFocusReason)
        self._menu.popup(self.mapToGlobal(QPoint(0, self.height())))
