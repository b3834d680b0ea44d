"""The actions of `app.actions` as Qt has them, and which menu each of them is in."""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QActionGroup, QKeySequence

from app.actions import SPECS, ActionSpec
from app.actions.spec import RUN_MENU, SEPARATOR
from app.looks.theme import Theme, icon

MENUS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "&File",
        (
            "file.open",
            "file.open_draft",
            "file.open_demo",
            "menu.recent",
            SEPARATOR,
            "file.connect",
            "file.disconnect",
            SEPARATOR,
            "file.open_trace",
            "file.open_results",
            "file.close_trace",
            "file.export",
            "file.export_run",
            "file.perfetto",
            "file.report",
            "file.share",
            SEPARATOR,
            "file.copy_text",
            "file.copy_step",
            "file.copy_issue",
            SEPARATOR,
            "file.quit",
        ),
    ),
    ("&Run", RUN_MENU),
    (
        "&Go",
        (
            "go.previous_round",
            "go.next_round",
            "go.previous_rejection",
            "go.next_rejection",
            "go.inspect",
            SEPARATOR,
            "go.find",
            "go.find_next",
            "go.find_previous",
        ),
    ),
    (
        "&View",
        (
            "view.palette",
            SEPARATOR,
            "view.ghosts",
            "view.follow",
            "view.tabs",
            SEPARATOR,
            "view.zoom_in",
            "view.zoom_out",
            "view.zoom_reset",
            SEPARATOR,
            "menu.panels",
            "menu.plots",
            "menu.layout",
            "view.reset_layout",
            SEPARATOR,
            "menu.theme",
        ),
    ),
    (
        "&Help",
        ("help.pages", "help.shortcuts", "help.copy_environment", "help.copy_report", "help.about"),
    ),
)
"""Menu titles and their entries; "menu.…" is a submenu that the window fills."""

SUBMENUS = {
    "plot.": "Plots",
    "view.panel_": "Panels",
    "view.theme_": "Theme",
    "view.layout_": "Layout",
}
"""What the ids of the actions in a submenu begin with, and its title."""

TOOLBAR = (
    "file.open",
    SEPARATOR,
    "run.start",
    "run.pause",
    "run.step",
    "run.stop",
    "run.compare",
    SEPARATOR,
)


def submenu_of(action_id: str) -> str:
    """The title of the submenu that an action is in; empty for one in a menu itself."""
    titles = (title for prefix, title in SUBMENUS.items() if action_id.startswith(prefix))
    return next(titles, "")


class Actions:
    """The QActions of SPECS by id."""

    def __init__(self, parent: QObject) -> None:
        self._actions: dict[str, QAction] = {}
        self._groups: dict[str, QActionGroup] = {}
        self._at_server = False
        for spec in SPECS:
            self._actions[spec.id] = self._make(spec, parent)

    def __getitem__(self, action_id: str) -> QAction:
        return self._actions[action_id]

    def __iter__(self) -> Iterator[QAction]:
        return iter(self._actions.values())

    def explain(self, *, at_server: bool) -> None:
        """Say which actions a server in use disables, and why, in place of their tips."""
        if at_server == self._at_server:
            return
        self._at_server = at_server
        for spec in SPECS:
            if spec.not_at_servers:
                action = self._actions[spec.id]
                action.setToolTip(self.reason(spec) or _tip(spec, action))

    def reason(self, spec: ActionSpec) -> str:
        """Why the server in use disables an action, else empty."""
        return spec.not_at_servers if self._at_server else ""

    def retheme(self, theme: Theme) -> None:
        """Draw the icons in the theme's colour."""
        for spec in SPECS:
            if spec.icon:
                self._actions[spec.id].setIcon(icon(spec.icon, theme))

    def _make(self, spec: ActionSpec, parent: QObject) -> QAction:
        action = QAction(parent)
        action.setText(spec.text)
        action.setObjectName(spec.id)
        action.setShortcut(QKeySequence(spec.keys))
        action.setCheckable(spec.checkable)
        action.setToolTip(_tip(spec, action))
        if spec.group:
            if spec.group not in self._groups:
                self._groups[spec.group] = QActionGroup(parent)
            self._groups[spec.group].addAction(action)
        return action


def _tip(spec: ActionSpec, action: QAction) -> str:
    keys = action.shortcut().toString(QKeySequence.SequenceFormat.NativeText)
    return f"{spec.tip} ({keys})" if keys else spec.tip
