"""The look: colour roles from TOML, the Fusion palette made from them, tinted icons, the line of
the front tab, and the focus frame of areas."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import ClassVar

from PySide6.QtCore import QByteArray, QEvent, QObject, QPoint, QRect, QRectF, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontDatabase,
    QIcon,
    QPainter,
    QPaintEvent,
    QPalette,
    QPixmap,
    QRegion,
    QResizeEvent,
)
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import (
    QAbstractScrollArea,
    QApplication,
    QProxyStyle,
    QStyle,
    QStyleOption,
    QTabBar,
    QToolTip,
    QWidget,
)
from shiboken6 import isValid

from resources import ICONS, theme_roles

THEME_NAMES = ("light", "dark")
_ICON_SIZES = (16, 20, 24, 32, 48, 64)


class Theme(QObject):
    """Named colours of resources/themes/<name>.toml. A role is "group.name" as there, such as
    "accepted.line". ValueError if a value is neither a colour nor a base."""

    changed = Signal()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.roles = name, _roles(name)

    def become(self, name: str) -> None:
        if name != self.name:
            self.name, self.roles = name, _roles(name)
            self.changed.emit()

    def apply(self, recolour: Callable[[], None]) -> None:
        """Call a method now and after each change, as long as its object lives. Code that reads its
        colours when painting does not need it: a palette change repaints every widget."""
        self.changed.connect(recolour)
        recolour()

    def color(self, role: str) -> QColor:
        """The colour of a role; KeyError for a role that the theme does not define."""
        return QColor(self.roles[role])


@cache
def _roles(name: str) -> Mapping[str, str]:
    roles = theme_roles(name)
    for role, colour in roles.items():
        if not QColor.isValidColorName(colour) or not colour.startswith("#"):
            raise ValueError(f"theme {name}: {role} = {colour!r} is not a colour")
    return MappingProxyType(roles)


def mixed(one: QColor, two: QColor, share: float) -> QColor:
    """The colour at this share of the way from one to two, 0 to 1."""
    return QColor.fromRgbF(
        one.redF() + (two.redF() - one.redF()) * share,
        one.greenF() + (two.greenF() - one.greenF()) * share,
        one.blueF() + (two.blueF() - one.blueF()) * share,
    )


def apply_theme(app: QApplication, theme: Theme) -> None:
    """Fusion with an explicit palette: the same on every platform, whatever the desktop's theme."""
    if app.style().objectName().lower() != "fusion":
        app.setStyle("Fusion")
    palette = _palette(theme)
    app.setPalette(palette)
    edged = _edged_palette(palette, theme)
    for kind in _EDGED:
        # PySide's stubs ask for bytes, which it then refuses
        app.setPalette(edged, kind)  # type: ignore[arg-type]
    QToolTip.setPalette(palette)


OVERLAY_ROLES = ("plot.overlay", "ui.text", "lane.third")
"""Colours of overlaid runs, the latest first."""


def icon(name: str, theme: Theme, role: str = "ui.icon") -> QIcon:
    """The drawing resources/icons/<name>.svg in a role's colour, dimmed when disabled."""
    return _icon(name, theme.roles[role], theme.roles["ui.disabled"])


@cache
def _icon(name: str, usual: str, disabled: str) -> QIcon:
    """An icon in two colours; the windows of a process share it."""
    drawing = (ICONS / f"{name}.svg").read_text(encoding="utf-8")
    made = QIcon()
    for mode, tint in ((QIcon.Mode.Normal, usual), (QIcon.Mode.Disabled, disabled)):
        svg = QByteArray(drawing.replace("currentColor", tint).encode())
        renderer = QSvgRenderer(svg)
        for size in _ICON_SIZES:
            pixmap = QPixmap(size, size)
            pixmap.fill(Qt.GlobalColor.transparent)
            painter = QPainter(pixmap)
            renderer.render(painter, QRectF(0, 0, size, size))
            painter.end()
            made.addPixmap(pixmap, mode)
    return made


atexit.register(_icon.cache_clear)  # before Qt ends, which owns the pixmaps


def fixed_font(zoom: int = 0) -> QFont:
    """The system's monospace font at the application font's size, a tenth larger (or smaller) per
    zoom step."""
    font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
    size = QApplication.font().pointSizeF()
    if size > 0:
        font.setPointSizeF(size * (1 + zoom / 10))
    return font


def figures_font() -> QFont:
    """The application font with tabular figures, for columns of numbers."""
    font = QFont(QApplication.font())
    font.setFeature(QFont.Tag("tnum"), 1)
    return font


def _palette(theme: Theme) -> QPalette:
    role = QPalette.ColorRole
    palette = QPalette()
    for target, source in (
        (role.Window, "ui.window"),
        (role.WindowText, "ui.text"),
        (role.Base, "ui.panel"),
        (role.AlternateBase, "ui.raised"),
        (role.Text, "ui.text"),
        (role.PlaceholderText, "ui.muted"),
        (role.Button, "ui.raised"),
        (role.ButtonText, "ui.text"),
        (role.BrightText, "status.error"),
        (role.ToolTipBase, "ui.tooltip"),
        (role.ToolTipText, "ui.text"),
        (role.Highlight, "ui.selection"),
        (role.HighlightedText, "ui.selection_text"),
        (role.Accent, "ui.accent"),
        (role.Link, "ui.link"),
        (role.LinkVisited, "ui.link"),
        (role.Light, "ui.hover"),
        (role.Midlight, "ui.raised"),
        (role.Mid, "ui.border"),
        (role.Dark, "ui.border"),
        (role.Shadow, "ui.pressed"),
    ):
        palette.setColor(target, theme.color(source))
    for target in (role.WindowText, role.Text, role.ButtonText, role.HighlightedText):
        palette.setColor(QPalette.ColorGroup.Disabled, target, theme.color("ui.disabled"))
    palette.setColor(QPalette.ColorGroup.Disabled, role.Highlight, theme.color("ui.border"))
    return palette


_EDGED = (
    "QCheckBox",
    "QLineEdit",
    "QPlainTextEdit",
    "QComboBox",
    "QAbstractSpinBox",
    "NamesChoice",
)
"""Classes of input fields: without an edge they cannot be found."""
_DARKER = 140
"""Per cent by which Fusion darkens an edge relative to the Window colour."""


def _edged_palette(palette: QPalette, theme: Theme) -> QPalette:
    """A palette whose edges are visible: Fusion's are not on a dark window, and hardly on a light
    one; nothing else in these classes uses that role. Disabled ones are weaker."""
    edged, group, edge = QPalette(palette), QPalette.ColorGroup, theme.color("ui.outline")
    faint = mixed(edge, theme.color("ui.window"), 0.5)
    for groups, colour in ((group.All, edge), (group.Disabled, faint)):
        edged.setColor(groups, QPalette.ColorRole.Window, colour.lighter(_DARKER))
    return edged


_THICK = 3
_BELOW = QTabBar.Shape.RoundedSouth, QTabBar.Shape.TriangularSouth


def mark_front_tab(bar: QTabBar) -> None:
    """Draw the line in a bar from now on; without a front tab nothing changes. Whole titles scroll
    if there are too many: Qt would elide one to a letter."""
    bar.setElideMode(Qt.TextElideMode.ElideNone)
    bar.setUsesScrollButtons(True)
    style = _FrontTab("Fusion")
    style.setParent(bar)
    bar.setStyle(style)


class _FrontTab(QProxyStyle):
    """A style of tab bars alone: a Python style for all widgets would slow down all painting."""

    def pixelMetric(
        self,
        metric: QStyle.PixelMetric,
        option: QStyleOption | None = None,
        widget: QWidget | None = None,
    ) -> int:
        if metric is QStyle.PixelMetric.PM_TabBarTabShiftVertical:
            return 0  # the other titles would be cut at their lower edge
        return super().pixelMetric(metric, option, widget)

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


_FRAME = 2


class FocusFrame(QWidget):
    """The edge of an area or field with the focus: Qt draws none for areas, and faint ones for
    others."""

    kept: ClassVar[set[FocusFrame]] = set()
    """Of an area that only Qt refers to: otherwise its frame would be garbage-collected while it is
    painted."""

    def __init__(self, area: QWidget, theme: Theme) -> None:
        super().__init__(area)
        self._theme = theme
        self.kept.add(self)
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        area.installEventFilter(self)
        self._fit(area.rect())
        self.show()

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QResizeEvent):
            self._fit(QRect(QPoint(), event.size()))
        return False

    def _fit(self, box: QRect) -> None:
        self.setGeometry(box)
        self.setMask(QRegion(box) - QRegion(box.adjusted(_FRAME, _FRAME, -_FRAME, -_FRAME)))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(event.rect(), self._theme.color("ui.focus"))
        painter.end()


def frame_focus(now: QWidget | None, theme: Theme) -> None:
    """Move the frame to the focus widget; a click on a button or field needs none. There is one
    frame, however many windows call this."""
    while FocusFrame.kept:
        frame = FocusFrame.kept.pop()
        if isValid(frame):  # it is destroyed with its area
            frame.hide()
            frame.deleteLater()
    if now is None or now.window().windowType() == Qt.WindowType.Popup:
        return
    by_key = QApplication.mouseButtons() == Qt.MouseButton.NoButton
    is_stop = bool(now.focusPolicy() & Qt.FocusPolicy.TabFocus)
    if isinstance(now, QAbstractScrollArea) or (by_key and is_stop):
        FocusFrame(now, theme)
