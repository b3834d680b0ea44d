"""The window's appearance: theme, layout, rejected tokens, tabs, saved in the settings; and a
warning about scripts that no font of the system can show."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
from PySide6.QtCore import QByteArray, QObject, Qt, QTimer
from PySide6.QtGui import QFontDatabase, QGuiApplication
from PySide6.QtWidgets import QApplication, QWidget

from app.engine_thread.feed import timer
from app.looks import Theme, apply_theme, frame_focus
from app.saved.settings import TEXT_ZOOMS, THEME_CHOICES, Settings
from app.window.dock_area import LAYOUTS
from app.window.panels import Panels
from engine.trace.run_ref import RunRef
from engine.trace.token_text import pieces_at

_KEEP_MS = 15_000


class Appearance(QObject):
    """Connects the actions that change it, and follows the desktop's theme if that is chosen."""

    def __init__(self, panels: Panels) -> None:
        super().__init__(panels.window)
        self._settings, self._actions = settings, actions = panels.settings, panels.actions
        self._docks, self._panels = docks, panels = panels.docks, panels
        self._theme = panels.theme
        actions.on({f"view.theme_{name}": partial(self.set_theme, name) for name in THEME_CHOICES})
        actions.on({f"view.layout_{name}": partial(self.set_layout, name) for name in LAYOUTS})
        self._connect_text()
        self._kept = ("", QByteArray())
        self._keeping = timer(self, self.keep, _KEEP_MS)
        self._keeping.start()
        panels.run_panel.set_open_groups(settings.open_groups)
        docks.turn_to(settings.pages)
        QGuiApplication.setAttribute(Qt.ApplicationAttribute.AA_DontUseNativeDialogs)
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._follow_desktop)
        _application().focusChanged.connect(self._frame_focus)

    def set_layout(self, name: str) -> None:
        """Apply a named layout as it was left; the current one is saved first."""
        if name != self._docks.layout_name:
            self._settings.set_layout(self._docks.layout_name, self._docks.save())
            self._docks.apply(name, self._settings.layout(name))
            QTimer.singleShot(0, self, self.keep)  # it takes as long as the layout
        self._actions[f"view.layout_{name}"].setChecked(True)

    def keep(self) -> None:
        """Save all places: after a kill the layout in use comes back."""
        window = self._docks.window
        if not window.isVisible():
            return  # its docks are not where they will be
        found = self._docks.layout_name, self._docks.save()
        if found != self._kept:
            self._kept = found
            self._settings.set_layout(*found)
        self._settings.geometry = window.saveGeometry()
        self._settings.pages = self._docks.pages
        self._settings.open_groups = self._panels.run_panel.open_groups()
        self._settings.sync()

    def rest(self) -> None:
        """Stop saving."""
        self._keeping.stop()

    def set_theme(self, choice: str) -> None:
        """system, light or dark."""
        self._settings.theme = choice
        self._actions[f"view.theme_{choice}"].setChecked(True)
        self._take_theme(choice)

    def _connect_text(self) -> None:
        tokens, settings = self._panels.tokens, self._settings
        ghosts, follow = self._actions["view.ghosts"], self._actions["view.follow"]
        ghosts.toggled.connect(self._show_ghosts)
        follow.toggled.connect(tokens.set_follow)
        tokens.follow_changed.connect(follow.setChecked)
        ghosts.setChecked(settings.ghosts)
        tokens.toggle_ghosts(ghosts.isChecked())
        follow.setChecked(True)
        tokens.set_zoom(settings.text_zoom)
        tokens.zoom_asked.connect(self._zoom_text)
        steps = {"in": 1, "out": -1, "reset": 0}
        self._actions.on({f"view.zoom_{n}": partial(self._zoom_text, steps[n]) for n in steps})
        tabs = self._actions["view.tabs"]
        tabs.toggled.connect(self._show_tabs)
        tabs.setChecked(settings.tabs)

    def _zoom_text(self, step: int) -> None:
        zoom = self._settings.text_zoom + step if step else 0
        if zoom in TEXT_ZOOMS:
            self._settings.text_zoom = zoom
            self._panels.tokens.set_zoom(zoom)

    def _show_ghosts(self, shown: bool) -> None:
        self._settings.ghosts = shown
        self._panels.tokens.toggle_ghosts(shown)

    def _show_tabs(self, as_tabs: bool) -> None:
        self._settings.tabs = as_tabs
        self._panels.tokens.set_tabs(as_tabs)

    def _take_theme(self, choice: str) -> None:
        self._theme.become(_theme_name(choice))
        apply_theme(_application(), self._theme)
        self._actions.draw_icons(self._theme)
        self._docks.draw_buttons(self._theme)

    def _follow_desktop(self) -> None:
        if self._settings.theme == "system":
            self._take_theme("system")

    def _frame_focus(self, _before: QWidget | None, now: QWidget | None) -> None:
        frame_focus(now, self._theme)


def _application() -> QApplication:
    app = QApplication.instance()
    assert isinstance(app, QApplication)
    return app


def first_theme(settings: Settings) -> Theme:
    return Theme(_theme_name(settings.theme))


def _theme_name(choice: str) -> str:
    if choice != "system":
        return choice
    dark = QGuiApplication.styleHints().colorScheme() is Qt.ColorScheme.Dark
    return "dark" if dark else "light"


_Script = QFontDatabase.WritingSystem
SCRIPTS = {
    "Chinese": (re.compile("[\u4e00-\u9fff]"), (_Script.SimplifiedChinese, _Script.Japanese)),
    "Japanese": (re.compile("[\u3041-\u30ff]"), (_Script.Japanese,)),
    "Korean": (re.compile("[\u1100-\u11ff\uac00-\ud7a3]"), (_Script.Korean,)),
}
"""By name: its characters, and the writing systems of which one must have a font."""


class GlyphWatch(QObject):
    """Checks the text of every run that is shown or ends. Qt itself substitutes a font for missing
    characters, if there is one."""

    def __init__(self, panels: Panels) -> None:
        super().__init__(panels.window)
        self._banners = panels.banners
        self._told: set[str] = set()
        panels.feed.run_shown.connect(self._look)
        panels.bridge.run_ended.connect(self._look)

    def _look(self, run: RunRef | None) -> None:
        if run is None or len(self._told) == len(SCRIPTS):
            return
        table = run.store.tokens
        mine = np.flatnonzero(table.column("run_id") == run.run_id)
        _, firsts = np.unique(table.column("token_id")[mine], return_index=True)
        has_id = table.column("token_id")[mine] >= 0
        rows = mine[np.union1d(firsts, np.flatnonzero(~has_id))]
        text = b"".join(pieces_at(run.store, rows)).decode("utf-8", "ignore")
        if text.isascii():
            return
        missing = [name for name in SCRIPTS if name not in self._told and _lacks(name, text)]
        if missing:
            self._told.update(missing)
            self._banners.add(
                "warning",
                f"No font of this system has {' or '.join(missing)} characters: they show as "
                "boxes.",
                "Install one, such as Noto Sans CJK, and start again.",
            )


def _lacks(script: str, text: str) -> bool:
    characters, systems = SCRIPTS[script]
    if not characters.search(text):
        return False
    return not any(QFontDatabase.families(system) for system in systems)
