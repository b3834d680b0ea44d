"""Themes hold the documented colours, are complete, and reach palette and icons; the tab in front
is marked at the side away from its page."""

from __future__ import annotations

import gc
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PySide6.QtCore import QSize, QTimer
from PySide6.QtGui import QColor, QIcon, QPalette
from PySide6.QtWidgets import (
    QApplication,
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFileDialog,
    QLineEdit,
    QPlainTextEdit,
    QSpinBox,
    QTabBar,
    QTreeView,
    QVBoxLayout,
    QWidget,
)
from pytestqt.qtbot import QtBot

import resources
from app.looks import THEME_NAMES, FocusFrame, Theme, apply_theme, frame_focus, icon, mark_front_tab
from app.widgets.fields import NamesChoice
from resources import ICONS

ICON_NAMES = sorted(path.stem for path in ICONS.glob("*.svg"))
DOCUMENTED = {
    "light": {
        "accepted.line": "#005a9c",
        "accepted.tint": "#c7e0ee",
        "rejected.line": "#b34700",
        "rejected.tint": "#f6dcc7",
        "replacement.line": "#b34700",
        "ignored.line": "#6b6b6b",
    },
    "dark": {
        "accepted.line": "#56b4e9",
        "accepted.tint": "#325265",
        "rejected.line": "#ff9e57",
        "rejected.tint": "#644b14",
        "replacement.line": "#ff9e57",
        "ignored.line": "#9a9a9a",
    },
}


def luminance(colour: QColor) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(v) for v in (colour.redF(), colour.greenF(), colour.blueF()))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: QColor, two: QColor) -> float:
    """The contrast ratio of WCAG 2."""
    bright, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", THEME_NAMES)
def test_documented_colours(name: str) -> None:
    theme = Theme(name)
    assert theme.name == name
    assert {role: theme.color(role).name() for role in DOCUMENTED[name]} == DOCUMENTED[name]


def test_both_themes_define_the_same_roles() -> None:
    light, dark = (set(Theme(name).roles) for name in THEME_NAMES)
    assert light == dark


@pytest.mark.parametrize("name", THEME_NAMES)
def test_text_can_be_read(name: str) -> None:
    theme = Theme(name)
    for text, ground in (
        ("ui.text", "ui.window"),
        ("ui.text", "ui.panel"),
        ("ui.text", "ui.tooltip"),
        ("ui.muted", "ui.panel"),
        ("ui.muted", "ui.window"),
        ("ui.selection_text", "ui.selection"),
        ("ui.text", "ui.accent_tint"),
        ("accepted.text", "accepted.tint"),
        ("rejected.text", "rejected.tint"),
        ("ignored.text", "ui.panel"),
        ("prompt.text", "ui.panel"),
        ("plot.text", "plot.background"),
        ("plot.limit", "plot.background"),
        ("ui.text", "status.error_tint"),
        ("ui.text", "status.warning_tint"),
        ("ui.text", "status.info_tint"),
    ):
        ratio = contrast(theme.color(text), theme.color(ground))
        assert ratio >= 4.5, f"{text} on {ground}: {ratio:.2f}"


@pytest.mark.parametrize("name", THEME_NAMES)
def test_free_and_spent_slots_look_different(name: str) -> None:
    theme = Theme(name)
    assert contrast(theme.color("slot.free"), theme.color("slot.spent")) >= 1.25


def test_an_unknown_role_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"no\.such"):
        Theme("light").color("no.such")


def test_a_value_that_is_no_colour_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd.toml").write_text('name = "odd"\n[base]\n[ui]\ntext = "blurple"\n')
    monkeypatch.setattr(resources, "THEMES", tmp_path)
    with pytest.raises(ValueError, match=r"ui\.text = 'blurple'"):
        Theme("odd")


def test_the_palette_follows_the_theme(qtbot: QtBot, qapp: QApplication) -> None:
    for name in (*THEME_NAMES, "dark"):
        theme = Theme(name)
        apply_theme(qapp, theme)
        assert qapp.style().objectName().lower() == "fusion"
        palette = qapp.palette()
        assert palette.color(QPalette.ColorRole.Window) == theme.color("ui.window")
        assert palette.color(QPalette.ColorRole.Text) == theme.color("ui.text")
        group, role = QPalette.ColorGroup.Disabled, QPalette.ColorRole.Text
        assert palette.color(group, role) == theme.color("ui.disabled")


def edge_of(field: QWidget) -> QColor:
    """The edge at the left of a field, as it is on a window."""
    window = QWidget()
    column = QVBoxLayout(window)
    column.addWidget(field)
    window.resize(200, 80)
    image = window.grab().toImage()
    place = field.geometry()
    ground = image.pixelColor(0, 0)
    inks = (image.pixelColor(place.left() + x, place.center().y() + 1) for x in range(4))
    return max(inks, key=lambda ink: contrast(ink, ground))


@pytest.mark.parametrize("name", THEME_NAMES)
@pytest.mark.parametrize(
    "kind",
    [
        QCheckBox,
        QLineEdit,
        QPlainTextEdit,
        QComboBox,
        partial(QComboBox, editable=True),
        QSpinBox,
        QDoubleSpinBox,
        partial(NamesChoice, {}),
    ],
)
def test_the_edge_of_a_field_can_be_seen(
    qtbot: QtBot, qapp: QApplication, name: str, kind: Callable[[], QWidget]
) -> None:
    theme = Theme(name)
    apply_theme(qapp, theme)
    window = theme.color("ui.window")
    edge = contrast(edge_of(kind()), window)
    assert edge >= 3
    (disabled := kind()).setEnabled(False)
    assert contrast(edge_of(disabled), window) < edge
    assert contrast(theme.color("ui.focus"), theme.color("ui.outline")) >= 1.25, "its frame"


@pytest.mark.parametrize("name", ICON_NAMES)
def test_icons_take_the_colour_of_the_theme(qtbot: QtBot, name: str) -> None:
    theme = Theme("dark")
    for mode, role in ((QIcon.Mode.Normal, "status.warning"), (QIcon.Mode.Disabled, "ui.disabled")):
        picture = icon(name, theme, "status.warning").pixmap(QSize(48, 48), mode).toImage()
        solid = [
            picture.pixelColor(x, y)
            for x in range(picture.width())
            for y in range(picture.height())
            if picture.pixelColor(x, y).alpha() == 255
        ]
        assert len(solid) > 20
        assert {colour.name() for colour in solid} == {theme.color(role).name()}


@pytest.mark.parametrize("name", ICON_NAMES)
def test_drawings_share_one_grid(name: str) -> None:
    root = ET.parse(ICONS / f"{name}.svg").getroot()
    assert root.get("viewBox") == "0 0 24 24"
    assert root.get("stroke") == "currentColor"


@pytest.mark.parametrize("shape", [QTabBar.Shape.RoundedNorth, QTabBar.Shape.RoundedSouth])
@pytest.mark.parametrize("name", THEME_NAMES)
def test_only_the_tab_in_front_has_the_line(
    qtbot: QtBot, qapp: object, name: str, shape: QTabBar.Shape
) -> None:
    theme = Theme(name)
    apply_theme(qapp, theme)  # type: ignore[arg-type]
    bar = QTabBar()
    qtbot.addWidget(bar)
    mark_front_tab(bar)
    bar.setShape(shape)
    for title in ("one", "two", "three"):
        bar.addTab(title)
    bar.resize(bar.sizeHint())
    for front in (1, 2):
        bar.setCurrentIndex(front)
        image = bar.grab().toImage()
        for at in range(bar.count()):
            tab = bar.tabRect(at)
            rows = [
                y
                for y in range(tab.top(), tab.bottom() + 1)
                if image.pixelColor(tab.center().x(), y) == theme.color("ui.accent")
            ]
            assert bool(rows) is (at == front)
            if rows:
                below = shape is QTabBar.Shape.RoundedSouth
                assert (min(rows) > tab.center().y()) is below


def test_the_frame_in_a_dialog_of_qt_outlives_a_collection_and_goes_with_it(
    qtbot: QtBot, qapp: QApplication
) -> None:
    theme, framed, waited = Theme("light"), [], []

    def move(_before: QWidget | None, now: QWidget | None) -> None:
        frame_focus(now, theme)

    def look() -> None:
        gc.collect()
        dialog = QApplication.activeModalWidget()
        waited.append(dialog)
        if (dialog is None or not dialog.findChildren(FocusFrame)) and len(waited) < 100:
            QTimer.singleShot(100, look)  # it opens slowly next to other work
            if dialog is not None:  # whatever an earlier test left pressed or open
                dialog.activateWindow()
                next(one for one in dialog.findChildren(QTreeView) if one.isVisible()).setFocus()
            return
        dialog.resize(dialog.width() + 9, dialog.height())
        dialog.grab()
        framed.extend(frame.width() for frame in dialog.findChildren(FocusFrame))
        dialog.reject()

    qapp.focusChanged.connect(move)
    QTimer.singleShot(200, look)
    QFileDialog.getOpenFileName(options=QFileDialog.Option.DontUseNativeDialog)
    qapp.focusChanged.disconnect(move)
    assert len(framed) == 1
    frame_focus(None, theme)
    assert not FocusFrame.kept
