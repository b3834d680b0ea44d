"""Actions: registered once, complete, reachable, and no two on one key."""

from __future__ import annotations

from collections import Counter

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeySequence

from app.actions import MENUS, SEPARATOR, SPECS, SUBMENUS, TOOLBAR
from app.window.window import MainWindow
from resources import ICONS

pytestmark = pytest.mark.shares_window


def menu_actions(window: MainWindow) -> list[QAction]:
    """The entries of all menus, submenus and separators left out."""
    openers = [menu.menuAction() for menu in window.menus]
    entries = [action for menu in window.menus for action in menu.actions()]
    return [a for a in entries if a not in openers and not a.isSeparator()]


def test_ids_are_unique_and_every_action_has_text_and_tip() -> None:
    ids = [spec.id for spec in SPECS]
    assert len(ids) == len(set(ids))
    for spec in SPECS:
        assert "." in spec.id
        assert spec.text.replace("&", "").strip()
        assert len(spec.tip) > 8
        assert not spec.tip.endswith(".")


def test_icons_exist() -> None:
    for spec in SPECS:
        assert not spec.icon or (ICONS / f"{spec.icon}.svg").is_file()


def test_no_two_shortcuts_collide(window: MainWindow) -> None:
    actions = {id(a): a for a in [*window.findChildren(QAction), *menu_actions(window)]}
    keys = Counter(
        key.toString(QKeySequence.SequenceFormat.PortableText)
        for action in actions.values()
        for key in action.shortcuts()
        # those of a field act in that field alone
        if not key.isEmpty() and action.shortcutContext() != Qt.ShortcutContext.WidgetShortcut
    )
    assert "F5" in keys
    assert [key for key, n in keys.items() if n > 1] == []


def test_every_action_is_in_a_menu_once(window: MainWindow) -> None:
    window.recent_menu.fill()
    names = Counter(a.objectName() for a in menu_actions(window))
    assert names == Counter(spec.id for spec in SPECS)


def test_lists_name_only_known_actions() -> None:
    known = {spec.id for spec in SPECS} | {
        SEPARATOR,
        "menu.recent",
        "menu.theme",
        "menu.layout",
        "menu.plots",
        "menu.panels",
    }
    assert set(TOOLBAR) <= known
    assert {entry for _, entries in MENUS for entry in entries} <= known


def test_mnemonics_of_a_menu_are_unique() -> None:
    texts = {spec.id: spec.text for spec in SPECS}
    texts |= {"menu.recent": "Open &Recent", "menu.theme": "&Theme"}
    texts["menu.layout"], texts["menu.panels"] = "&Layout", "Pa&nels"
    texts["menu.plots"] = "Pl&ots"
    menus = [[title for title, _ in MENUS]]
    menus += [[texts[e] for e in entries if e != SEPARATOR] for _, entries in MENUS]
    menus += [[spec.text for spec in SPECS if spec.id.startswith(start)] for start in SUBMENUS]
    for entries in menus:
        letters = [text[text.index("&") + 1].lower() for text in entries]
        assert len(letters) == len(set(letters)), entries


def test_tool_buttons_tell_what_they_do_and_their_key(window: MainWindow) -> None:
    assert "(F10)" in window.actions_by_id["run.step"].toolTip()
    for spec in SPECS:
        assert window.actions_by_id[spec.id].toolTip().startswith(spec.tip)


def test_what_is_disabled_says_what_it_needs(window: MainWindow) -> None:
    compare = window.actions_by_id["run.compare"]
    assert not compare.isEnabled()
    assert compare.toolTip().endswith(": needs a model that is loaded and idle (File, Open Model)")
    compare.setEnabled(True)
    assert "needs" not in compare.toolTip()
