"""The command palette: every action, by keys alone."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QTableWidgetItem
from pytestqt.qtbot import QtBot

from app.actions import SPECS, submenu_of
from app.window.dialogs.help import ShortcutsDialog
from app.window.dialogs.palette import Command, CommandPalette
from app.window.dock_area import PAGES
from app.window.window import MainWindow

pytestmark = pytest.mark.shares_window

CTRL_SHIFT = Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier


_PAGES = {f"Panels: {title}" for pages in PAGES.values() for title in pages.values()}
_N_LINES = len(SPECS) - 1 + len(_PAGES)


@pytest.fixture
def palette(window: MainWindow, qtbot: QtBot) -> CommandPalette:
    window.activateWindow()
    prompt = window.run_panel.prompt
    prompt.setFocus()
    qtbot.waitUntil(prompt.hasFocus)
    qtbot.keyClick(prompt, Qt.Key.Key_P, CTRL_SHIFT)
    assert window.palette_box.isVisible()
    return window.palette_box


def text(palette: CommandPalette, column: int) -> str:
    item = palette.list.currentItem()
    return item.text(column)


def test_lists_every_action_but_itself(palette: CommandPalette, window: MainWindow) -> None:
    ids = {a.objectName(): a.text().replace("&", "") for a in window.actions_by_id}
    assert (
        set(palette.lines)
        == {
            f"{submenu_of(name)}: {text}" if submenu_of(name) else text
            for name, text in ids.items()
            if name != "view.palette"
        }
        | _PAGES
    )
    assert len(palette.lines) == _N_LINES
    assert palette.field.hasFocus()
    widest = max(palette.fontMetrics().horizontalAdvance(line) for line in palette.lines)
    assert palette.list.columnWidth(0) >= widest, "no name is cut"


def test_letters_filter_and_return_does_it(
    palette: CommandPalette, window: MainWindow, qtbot: QtBot
) -> None:
    ghosts = window.actions_by_id["view.ghosts"].isChecked()
    qtbot.keyClicks(palette.field, "ghtok")
    assert palette.lines[0] == "Ghost Tokens"
    assert text(palette, 2) == "G"
    assert not palette.none.isVisible()
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert not palette.isVisible()
    assert window.actions_by_id["view.ghosts"].isChecked() is not ghosts
    assert window.run_panel.prompt.hasFocus(), "the focus goes back to where it was"


def test_once_it_is_gone_its_keys_are_gone_too(window: MainWindow) -> None:
    palette = window.palette_box
    palette.field.setFocus()  # as after an action that took the focus from where it was
    palette.open()
    palette.close_palette()
    assert window.focusWidget() is not palette.field


def test_the_name_of_a_submenu_finds_what_is_in_it(palette: CommandPalette, qtbot: QtBot) -> None:
    qtbot.keyClicks(palette.field, "them")
    assert set(palette.lines[:3]) == {"Theme: System", "Theme: Light", "Theme: Dark"}


def test_what_can_be_done_is_shown_as_it_changes(
    palette: CommandPalette, window: MainWindow, qtbot: QtBot
) -> None:
    qtbot.keyClicks(palette.field, "one round")
    window.actions_by_id["run.step"].setEnabled(True)
    assert text(palette, 0) == "One Round"
    assert text(palette, 1).startswith("Draft, verify and roll back once")
    palette.close_palette()
    window.actions_by_id["run.step"].setEnabled(False)
    assert text(palette, 1).startswith("Draft"), "a palette that is closed is left alone"


def test_arrows_choose_and_escape_leaves(
    palette: CommandPalette, window: MainWindow, qtbot: QtBot
) -> None:
    qtbot.keyClicks(palette.field, "layout")
    first = text(palette, 0)
    qtbot.keyClick(palette.field, Qt.Key.Key_Down)
    assert text(palette, 0) != first or len(palette.lines) == 1
    qtbot.keyClick(palette.field, Qt.Key.Key_Escape)
    assert not palette.isVisible()


def test_disabled_ones_say_what_they_need_and_do_nothing(
    palette: CommandPalette, window: MainWindow, qtbot: QtBot
) -> None:
    qtbot.keyClicks(palette.field, "one round")
    assert palette.lines[0] == "One Round"
    assert text(palette, 1) == "needs a model that is loaded and idle (File, Open Model)"
    muted = palette.list.palette().placeholderText().color()
    assert palette.list.currentItem().foreground(0).color() == muted
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert palette.isVisible()


def test_what_opens_comes_before_what_only_speaks_of_it(
    palette: CommandPalette, qtbot: QtBot
) -> None:
    for typed, first in (
        ("open runs", "Panels: Runs"),
        ("open plots", "Layout: Plots"),
        ("open model", "Open Model…"),
        ("share runs", "Share"),
        ("measure plain", "Measure Plain"),
    ):
        palette.field.clear()
        qtbot.keyClicks(palette.field, typed)
        assert palette.lines[0] == first


def test_nothing_that_fits_is_no_trap(palette: CommandPalette, qtbot: QtBot) -> None:
    qtbot.keyClicks(palette.field, "zzzz")
    assert palette.lines == []
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert palette.isVisible()
    palette.field.clear()
    assert len(palette.lines) == _N_LINES


def test_disabled_actions_have_a_reason(window: MainWindow) -> None:
    needs = {spec.id: spec.needs for spec in SPECS}
    for action in window.actions_by_id:
        if not action.isEnabled():
            assert needs[action.objectName()], action.objectName()


def test_the_table_of_shortcuts_lists_everything(window: MainWindow, qtbot: QtBot) -> None:
    window.actions_by_id["help.shortcuts"].trigger()
    (dialog,) = window.findChildren(ShortcutsDialog)
    table = dialog.table
    cells: list[QTableWidgetItem | None] = [table.item(r, 0) for r in range(table.rowCount())]
    assert [c.text() for c in cells if c] == [s.text.replace("&", "") for s in SPECS]
    dialog.resize(500, 400)
    every = range(table.rowCount())  # of these no line is cut
    qtbot.waitUntil(lambda: all(table.rowHeight(r) >= table.sizeHintForRow(r) for r in every))
    dialog.reject()


def test_a_page_is_found_by_its_command(palette: CommandPalette, qtbot: QtBot) -> None:
    palette.field.clear()
    qtbot.keyClicks(palette.field, "conform")
    assert text(palette, 0) == "Panels: Kernels"


def test_it_says_that_nothing_was_found(palette: CommandPalette, qtbot: QtBot) -> None:
    qtbot.keyClicks(palette.field, "qqqq")
    assert palette.lines == []
    assert palette.none.isVisible()


def test_behind_a_long_name_there_is_room_for_what_it_does(
    window: MainWindow, qtbot: QtBot
) -> None:
    action = QAction("A scenario with a name that goes on and on " * 4)
    palette = CommandPalette(lambda: [Command(action, "What it does")], window)
    palette.open()
    names, tips = (palette.list.columnWidth(column) for column in (0, 1))
    assert names < 0.5 * palette.width() and tips > 0.3 * palette.width()


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("inspector", "Panels: Step Inspector"),
        ("what if", "Panels: What if"),
        ("kernels", "Panels: Kernels"),
        ("ghost", "Ghost Tokens"),
        ("csv trace", "Export Trace…"),  # what it does
        ("exp tr", "Export Trace…"),
        ("gttk", "Ghost Tokens"),
        ("measure plain", "Measure Plain"),
    ],
)
def test_words_come_before_letters_anywhere(
    palette: CommandPalette, qtbot: QtBot, typed: str, first: str
) -> None:
    qtbot.keyClicks(palette.field, typed)
    assert palette.lines[0] == first
