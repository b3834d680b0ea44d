"""A line of the accent colour along the tab in front: Fusion tells it by a shade alone, which
cannot be seen on a dark window."""

from __future__ import annotations

from PySide6.QtGui import QPainter, QPalette
from PySide6.QtWidgets import QProxyStyle, QStyle, QStyleOption, QTabBar, QWidget

_THICK = 3
_BELOW = QTabBar.Shape.RoundedSouth, QTabBar.Shape.TriangularSouth


def mark_front_tab(bar: QTabBar) -> None:
    """Draw the line in a bar from now on; with none in front of it nothing changes."""
    style = _FrontTab("Fusion")
    style.setParent(bar)
    bar.setStyle(style)


class _FrontTab(QProxyStyle):
    """A style of tab bars alone: one in Python for all widgets would slow every painting down."""

    def drawControl(
        self,
        element: QStyle.ControlElement,
        option: QStyleOption,
        painter: QPainter,
        widget: QWidget | None = None,
    ) -> None:
        super().drawControl(element, option, painter, widget)
        if element is not QStyle.ControlElement.CE_TabBarTabShape:
            return
        if option.state & QStyle.StateFlag.State_Selected and isinstance(widget, QTabBar):
            line = option.rect.adjusted(2, 0, -2, 0)
            if widget.shape() in _BELOW:
                line.setTop(line.bottom() - _THICK + 1)
            else:
                line.setHeight(_THICK)
            painter.fillRect(line, option.palette.color(QPalette.ColorRole.Accent))
