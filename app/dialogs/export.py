"""Asking where a trace goes."""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtWidgets import QFileDialog, QWidget

from app.settings import Settings


def ask_export_folder(parent: QWidget, settings: Settings) -> Path | None:
    """A new folder inside one chosen by the user, None when there was no choice."""
    name = QFileDialog.getExistingDirectory(
        parent,
        "Export trace into",
        str(settings.folder("export")),
        options=QFileDialog.Option.DontUseNativeDialog | QFileDialog.Option.ShowDirsOnly,
    )
    if not name:
        return None
    parent_folder = Path(name)
    settings.set_folder("export", parent_folder)
    return new_folder(parent_folder, time.localtime())


def new_folder(parent: Path, now: time.struct_time) -> Path:
    """A name that is free inside `parent`, made of the date and time."""
    base = time.strftime("draftscope-trace-%Y%m%d-%H%M%S", now)
    folder, number = parent / base, 2
    while folder.exists():
        folder, number = parent / f"{base}-{number}", number + 1
    return folder
