"""Tells once which scripts of a text no font of the system can show: they would be boxes."""

from __future__ import annotations

import re

import numpy as np
from PySide6.QtCore import QObject
from PySide6.QtGui import QFontDatabase

from app.engine_thread.bridge import Bridge
from app.engine_thread.feed import Feed
from app.trace_models.token_text import pieces_at
from app.window.banner import BannerArea
from engine.trace.run_ref import RunRef

_Script = QFontDatabase.WritingSystem
SCRIPTS = {
    "Chinese": (re.compile("[\u4e00-\u9fff]"), (_Script.SimplifiedChinese, _Script.Japanese)),
    "Japanese": (re.compile("[\u3041-\u30ff]"), (_Script.Japanese,)),
    "Korean": (re.compile("[\u1100-\u11ff\uac00-\ud7a3]"), (_Script.Korean,)),
}
"""By name: its characters, and the writing systems of which one must have a font."""


class GlyphWatch(QObject):
    """Looks at the text of every run that comes on show or ends. Qt takes another font by itself
    where the one in use lacks a character, if there is any."""

    def __init__(self, bridge: Bridge, feed: Feed, banners: BannerArea, parent: QObject) -> None:
        super().__init__(parent)
        self._banners = banners
        self._told: set[str] = set()
        feed.run_shown.connect(self._look)
        bridge.run_ended.connect(self._look)

    def _look(self, run: RunRef | None) -> None:
        if run is None or len(self._told) == len(SCRIPTS):
            return
        table = run.store.tokens
        mine = np.flatnonzero(table.column("run_id") == run.run_id)
        _, firsts = np.unique(table.column("token_id")[mine], return_index=True)
        told = table.column("token_id")[mine] >= 0
        rows = mine[np.union1d(firsts, np.flatnonzero(~told))]
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
