"""The window's actions, registered once: their texts, their menus, and their QActions."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QActionGroup, QKeySequence

from app.looks import Theme, icon
from resources import ROOT

SEPARATOR = ""
"""A separator line in a menu."""


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What the user sees of an action. `keys` is a portable key text or a standard key.

    `group`: of its checkable actions exactly one is on. `needs`: what is missing while it is
    disabled, in words that follow "needs". `not_at_servers`: why it is disabled while a server is
    in use.
    """

    id: str
    text: str
    tip: str
    keys: str | QKeySequence.StandardKey = ""
    icon: str = ""
    checkable: bool = False
    group: str = ""
    needs: str = ""
    not_at_servers: str = ""


_GROUPS = {"view.theme_": "theme", "view.layout_": "layout", "plot.x_": "plot_x"}

_TABLES = tomllib.loads((ROOT / "actions.toml").read_text(encoding="utf-8"))


def _specs() -> Iterator[ActionSpec]:
    for action_id, said in _TABLES["actions"].items():
        keys = said.pop("keys", "")
        said["keys"] = QKeySequence.StandardKey[keys[1:]] if keys.startswith("@") else keys
        groups = (group for start, group in _GROUPS.items() if action_id.startswith(start))
        yield ActionSpec(action_id, group=next(groups, ""), **said)


def _entries(text: str) -> tuple[str, ...]:
    return tuple(SEPARATOR if word == "|" else word for word in text.split())


SPECS = tuple(_specs())
PANELS = tuple(spec for spec in SPECS if spec.id.startswith("view.panel_"))
MENUS = tuple((title, _entries(text)) for title, text in _TABLES["menus"].items())
"""Menu titles and their entries; "menu.…" is a submenu that the window fills."""
TOOLBAR = _entries(_TABLES["toolbar"])

SUBMENUS = {
    "plot.": "Plots",
    "view.panel_": "Panels",
    "view.theme_": "Theme",
    "view.layout_": "Layout",
}
"""Id prefix of the actions in a submenu, and its title."""


def submenu_of(action_id: str) -> str:
    """The title of an action's submenu; empty for one in a menu itself."""
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

    def on(self, handlers: Mapping[str, Callable[[], object]]) -> None:
        """Connect each of these actions to its handler."""
        for action_id, does in handlers.items():
            self[action_id].triggered.connect(lambda _=False, act=does: act())

    def explain(self, *, at_server: bool) -> None:
        """Explain in tooltips which actions a server in use disables, and why. Others say what they
        need while they are disabled."""
        if at_server == self._at_server:
            return
        self._at_server = at_server
        for spec in SPECS:
            if spec.not_at_servers:
                self._tell(spec)

    def reason(self, spec: ActionSpec) -> str:
        """Why the server in use disables an action, empty if it does not."""
        return spec.not_at_servers if self._at_server else ""

    def draw_icons(self, theme: Theme) -> None:
        for spec in SPECS:
            if spec.icon:
                self._actions[spec.id].setIcon(icon(spec.icon, theme))

    def _tell(self, spec: ActionSpec) -> None:
        action = self._actions[spec.id]
        action.setToolTip(self.reason(spec) or _tip(spec, action))

    def _make(self, spec: ActionSpec, parent: QObject) -> QAction:
        action = QAction(parent)
        action.setText(spec.text)
        action.setObjectName(spec.id)
        action.setShortcut(QKeySequence(spec.keys))
        action.setCheckable(spec.checkable)
        action.setToolTip(_tip(spec, action))
        if spec.needs:
            action.enabledChanged.connect(lambda _: self._tell(spec))
        if spec.group:
            if spec.group not in self._groups:
                self._groups[spec.group] = QActionGroup(parent)
            self._groups[spec.group].addAction(action)
        return action


def _tip(spec: ActionSpec, action: QAction) -> str:
    keys = action.shortcut().toString(QKeySequence.SequenceFormat.NativeText)
    tip = f"{spec.tip} ({keys})" if keys else spec.tip
    return tip if action.isEnabled() or not spec.needs else f"{tip}: needs {spec.needs}"
